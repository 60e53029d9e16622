"""Weights of more bits that are read from an optimizer, and set."""

import math

import pytest
import torch

import lowbit_optim
from lowbit_optim import load_master_weights, master_weights
from protocol import identical


def test_master_weights_out_and_in():
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).bfloat16()
    given = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    for bits, error in ((24, 2.0**-16), (32, 0.0), (None, 2.0**-8)):
        optimizer = lowbit_optim.AdamW8bit(model.named_parameters(), master_weight_bits=bits)
        load_master_weights(optimizer, given)
        got = dict(master_weights(optimizer))
        assert got.keys() == given.keys()
        for name, w in got.items():
            assert w.dtype == torch.float32
            assert ((w - given[name]).abs() <= error * given[name].abs()).all(), (bits, name)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # the state that was made is one to go on with
    numbered = lowbit_optim.AdamW8bit(model.parameters(), master_weight_bits=24)
    load_master_weights(numbered, list(given.values()))
    pairs = list(master_weights(numbered))
    assert [name for name, _ in pairs] == [0, 1, 2, 3]
    before = [p.detach().clone() for p in model.parameters()]
    for bad, match in (
        (list(given.values())[:3], "one tensor for each of 4 parameters; got 3"),
        ({0: given["0.weight"]}, r"they lack \[1, 2, 3\]"),
        (pairs[:2], r"they lack \[2, 3\]"),
        (pairs[:1] * 4, r"several parameters are called \[0\]"),
        ([torch.zeros(2)] * 4, r"the weight 0 has shape \(2,\), its parameter \(30, 40\)"),
    ):
        with pytest.raises(ValueError, match=match):
            load_master_weights(numbered, bad)
    for bad, kind in (([1.0] * 4, "float"), ([p.int() for p in before], "torch.int32")):
        with pytest.raises(TypeError, match=f"weight 0 must be a floating tensor; got {kind}"):
            load_master_weights(numbered, bad)
    for last in (torch.ones(5, device="meta"), torch.ones(5).to_sparse()):
        with pytest.raises(ValueError, match=r"the weight 3.* (meta device|dense tensor)"):
            load_master_weights(numbered, [*[torch.ones_like(p) for p in before[:3]], last])
    for same in (iter(pairs), reversed(pairs)):
        load_master_weights(numbered, same)
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("bits", [None, 24, 32])
@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "LearnedGradient"])
def test_state_begins_with_the_weights_that_are_loaded(name, bits):
    """What state has of its parameter is not that of the weights before, nor of the first ones."""
    generator = torch.Generator().manual_seed(0)
    first, weights, g = torch.randn(3, 40, 30, generator=generator)
    runs = []
    for begin in (torch.zeros(40, 30), weights):
        p = torch.nn.Parameter(begin.bfloat16())
        optimizer = getattr(lowbit_optim, name)([p], lr=1e-3, master_weight_bits=bits)
        load_master_weights(optimizer, [first])
        load_master_weights(optimizer, [weights])
        p.grad = g.bfloat16()
        optimizer.step()
        runs.append([p.detach(), optimizer.state[p]])
    assert identical(*runs)
    ((_, moved),) = master_weights(optimizer)
    assert (moved - weights).abs().max() < 0.02
    if bits == 32 and name == "ScheduleFreeAdamW":  # z has all of their bits, as y has
        step = 1e-3 * g.bfloat16().float().sign()
        for x in (moved, optimizer.state[p]["z"]):
            torch.testing.assert_close(x, weights - step, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_no_finite_weight_is_loaded_as_infinite(bits):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = lowbit_optim.AdamW8bit([p], master_weight_bits=bits)
    load_master_weights(optimizer, [torch.tensor([3.4e38, -3.4e38, math.inf, math.nan])])
    largest = torch.finfo(torch.bfloat16).max
    assert p.tolist()[:3] == [largest, -largest, math.inf]
    assert p[3].isnan()
    load_master_weights(optimizer, [torch.full((4,), 6e4, dtype=torch.float16)])
    assert identical(p.detach(), torch.full((4,), 6e4).bfloat16())


@pytest.mark.parametrize("function", [master_weights, lambda other: load_master_weights(other, [])])
def test_another_librarys_optimizer_has_no_master_weights(function):
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(
        TypeError, match="master_weights takes an optimizer of lowbit_optim, got torch"
    ):
        list(function(other))


@pytest.mark.parametrize("bits", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_may_be_given_as_one_anothers_weights(dtype, bits):
    """Those of fp32 are in the parameters' own memory, which is written one after the other."""
    params = [torch.nn.Parameter(torch.randn(4, 4).to(dtype)) for _ in range(3)]
    first, second, third = (p.detach().clone() for p in params)
    optimizer = lowbit_optim.AdamW8bit(params, master_weight_bits=bits)
    load_master_weights(optimizer, [params[1], params[0].t(), params[2]])
    assert all(map(torch.equal, params, (second, first.t(), third)))
    weights = dict(master_weights(optimizer))
    load_master_weights(optimizer, {0: weights[1], 1: weights[0], 2: weights[2].t()})
    assert all(map(torch.equal, params, (first.t(), second, third.t())))


def test_weights_in_order_are_in_that_of_the_groups():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8, bias=False))
    first, second = (p.detach().clone() for p in model.parameters())
    optimizer = lowbit_optim.AdamW8bit(lowbit_optim.parameter_groups(model, named=True))
    load_master_weights(optimizer, [second + 1, first + 1])
    assert all(map(torch.equal, model.parameters(), (first + 1, second + 1)))
    load_master_weights(optimizer, {"0.weight": first, "1.weight": second})
    assert all(map(torch.equal, model.parameters(), (first, second)))
