"""State as numbers, for rows that are cut out of parameters or added to them."""

import copy
import re

import pytest
import torch

import lowbit_optim
from lowbit_optim import dequantize_state
from protocol import CLASSES, all_parameters, build, identical, parameters, snapshot, train

FORMATS = pytest.mark.parametrize("state_format", ["dynamic8", "ratio8", "ratio4"])


@CLASSES
def test_state_is_that_of_the_32_bit_twin(case):
    """Which a checkpoint in codes gives it, with all that state has beside moments."""
    optimizer = train(build(case, 8, parameters(), percentile_clipping=50), 3)
    twin = build(case, 32, parameters(), percentile_clipping=50)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = snapshot(optimizer)
    dequantize_state(optimizer)
    after = snapshot(optimizer)
    assert identical(after["state"], snapshot(twin)["state"])
    assert identical((after["params"], after["groups"]), (before["params"], before["groups"]))


@CLASSES
def test_the_next_step_codes_it(case):
    optimizer, twin = (train(build(case, 8, parameters()), 3) for _ in range(2))
    dequantize_state(optimizer)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = {p: dict(state) for p, state in optimizer.state.items()}
    dequantize_state(optimizer)
    for p, state in optimizer.state.items():
        assert all(value is kept[p][key] for key, value in state.items())
    assert identical(snapshot(train(optimizer, 2, 3)), snapshot(train(twin, 2, 3)))


@pytest.mark.parametrize("bits", [None, 24, 32])
def test_what_is_kept_of_weights_stays(bits):
    (p,) = parameters(torch.bfloat16, [(40, 256)])
    optimizer = train(lowbit_optim.AdamW8bit([p], master_weight_bits=bits), 2)
    before = dict(lowbit_optim.master_weights(optimizer))
    residual = optimizer.state[p].get("master_residual")
    dequantize_state(optimizer)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert identical(optimizer.state[p].get("master_residual"), residual)
    assert identical(dict(lowbit_optim.master_weights(optimizer)), before)


def test_numbers_of_inference_mode_are_changed_outside():
    (p,) = parameters(shapes=[(40, 256)])
    optimizer = train(lowbit_optim.AdamW8bit([p]), 1)
    with torch.inference_mode():
        dequantize_state(optimizer)
    optimizer.state[p]["exp_avg"][0] = 0.0
    assert not any(x.is_inference() for x in optimizer.state[p].values())


def cut(optimizer, keep, zeros):
    """Keep rows of a parameter and its state and add some: in torch's words, as users' code has it.

    Afterwards the optimizer has a parameter of other rows.
    """
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    state = optimizer.state.pop(p)
    for key, value in state.items():
        if key != "step":
            new = torch.zeros((zeros, *value.shape[1:]), dtype=value.dtype)
            state[key] = torch.cat([value[keep], new])
    fresh = torch.zeros((zeros, *p.shape[1:]))
    group["params"] = [torch.nn.Parameter(torch.cat([p.detach()[keep], fresh]))]
    optimizer.state[group["params"][0]] = state


@FORMATS
@pytest.mark.parametrize("shape", [(3000, 3), (500, 15, 3), (60, 300)])
def test_rows_come_and_go_as_with_torch(shape, state_format):
    bits = 4 if state_format == "ratio4" else 8
    kept = {"optim_bits": bits, "state_format": state_format, "min_8bit_size": 1}
    ours = lowbit_optim.Adam(parameters(shapes=[shape]), lr=1e-3, **kept)
    theirs = torch.optim.Adam(parameters(shapes=[shape]), lr=1e-3)
    keep = torch.arange(shape[0]) % 3 != 0
    for optimizer in (ours, theirs):
        train(optimizer, 3)
    dequantize_state(ours)
    for optimizer in (ours, theirs):
        cut(optimizer, keep, 100)
    (p,), (q,) = all_parameters(ours), all_parameters(theirs)
    begun = p.detach().clone()
    assert p.shape == q.shape
    (state,) = ours.state.values()
    assert all(state[key][-100:].count_nonzero() == 0 for key in ("exp_avg", "exp_avg_sq"))
    # torch's goes on from what the codes stand for.
    (other,) = theirs.state.values()
    other.update({key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")})
    with torch.no_grad():
        q.copy_(p)
    for optimizer in (ours, theirs):
        train(optimizer, 1, 3)
    assert any(x.dtype == torch.uint8 for x in ours.state[p].values())
    step, wanted = p.detach() - begun, q.detach() - begun
    error = (step - wanted).square().sum() / wanted.square().sum()
    assert error < (0.005 if bits == 4 else 0.001)


def test_without_it_cut_codes_are_refused():
    optimizer = train(lowbit_optim.Adam8bit(parameters(shapes=[(3000, 3)])), 1)
    (state,) = optimizer.state.values()
    keep = torch.ones(3000, dtype=torch.bool)
    state["exp_avg_absmax"] = state["exp_avg_sq_absmax"] = torch.zeros(3000)  # by rows
    cut(optimizer, keep, 0)
    with pytest.raises(ValueError, match=re.escape("exp_avg_absmax has shape (3000,)")):
        train(optimizer, 1)


def test_what_is_no_optimizer_of_this_package():
    other = torch.optim.Adam(parameters())
    with pytest.raises(TypeError, match=r"dequantize_state takes an optimizer of lowbit_optim"):
        dequantize_state(other)


def test_before_the_first_step_there_is_nothing_to_do():
    optimizer = lowbit_optim.Adam8bit(parameters())
    dequantize_state(optimizer)
    assert not optimizer.state
