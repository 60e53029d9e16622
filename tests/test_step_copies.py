"""Tensors that are not contiguous, as of `channels_last`: copied in every step, by one plan."""

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import reading
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.overlaps import memory_of, turns_of
from protocol import ANY_GRADIENT, give_gradients, identical, parameters, snapshot, train

SHAPES = ((4, 70, 3, 3), (5, 3, 2, 2), (300,))


def strided(p, kind):
    """A tensor with p's values that has to be copied to be stepped."""
    if kind == "channels last":
        return p.contiguous(memory_format=torch.channels_last)
    return p.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("what", ["both", "parameter", "gradient"])
@pytest.mark.parametrize("kind", ["channels last", "transposed"])
def test_what_is_not_contiguous_is_copied_in_every_step_of_one_plan(kind, what, engine, device):
    """With missing gradients, too; to the same bits as by plans that are made anew."""
    results = []
    for thorough in (False, True):
        params = [torch.nn.Parameter(x.detach().to(device)) for x in parameters(shapes=SHAPES)]
        if what != "gradient":
            for p in params[:2]:
                p.data = strided(p.data, kind)
        optimizer, reused = lowbit_optim.LAMB8bit(params, lr=0.01, min_8bit_size=1), []
        for t in range(6):
            give_gradients(params, t)
            for p in params[:2]:
                p.grad = None if p is params[t % 3] and t > 3 else strided(p.grad, kind)
                if what == "parameter" and p.grad is not None:
                    p.grad = p.grad.contiguous()
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
            (plan,) = optimizer.plans.values()
            reused.append(plan.reused)
        results.append(snapshot(optimizer))
        results[-1]["strides"] = [p.stride() for p in params]
        assert reused[:4] == [False, *([not thorough] * 3)]
    assert identical(*results)


def test_copies_are_let_go_after_every_step():
    params = [
        torch.nn.Parameter(strided(x.detach(), "channels last"))
        for x in parameters(shapes=SHAPES[:2])
    ]
    optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, min_8bit_size=1)
    for t in range(3):
        give_gradients(params, t)
        optimizer.step()
        (plan,) = optimizer.plans.values()
        assert plan.reused == (t > 0)
        assert not plan.staged
        assert not any(hasattr(slot, "p") for batch in plan.batches for slot in batch.slots)


def test_a_parameter_that_comes_to_share_memory_is_refused(monkeypatch):
    """At the same address, and not contiguous either; also where strides are not looked at."""
    monkeypatch.setattr(reading, "_guards", lambda tensors: lambda *others: False)
    (p,) = params = parameters(shapes=[(5, 5)])
    p.data = strided(p.data, "transposed")
    optimizer = train(lowbit_optim.AdamW8bit(params, lr=0.01), 2)
    p.data = p.data[:, :1].expand(5, 5)
    give_gradients(params, 2)
    with pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()


TIED = {
    "a matrix and its transpose": lambda base: [base, base.t()],
    "a transpose and its matrix": lambda base: [base.t(), base],
    "a transpose twice": lambda base: [base.t(), base.t()],
    "columns that overlap": lambda base: [base[:, :20], base[:, 10:]],
    "columns beside each other": lambda base: [base[:, :20], base[:, 20:]],
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tied", TIED)
def test_copies_of_one_memory_are_stepped_one_after_the_other(tied, groups, engine, device):
    """As by torch, whose steps each see what the one before has written."""
    ends = []
    for cls in (torch.optim.SGD, lowbit_optim.SGD32bit):
        base = torch.linspace(-1, 1, 24 * 36, device=device).reshape(24, 36)
        params = TIED[tied](base)
        listed = [{"params": [p], "maximize": k == 1 and groups == 2} for k, p in enumerate(params)]
        optimizer = cls(listed if groups == 2 else params, lr=0.1, momentum=0.9)
        for t in range(4):
            for k, p in enumerate(params):
                p.grad = torch.full_like(p, k + 1.0 + t) if (t, k) != (2, 1) else None
            optimizer.step()
        ends.append(base)
    torch.testing.assert_close(*ends)


def test_a_tied_autoencoder_trains_as_by_torch(engine):
    ends = []
    for cls in (torch.optim.AdamW, lowbit_optim.AdamW32bit):
        torch.manual_seed(0)
        encoder, decoder = torch.nn.Linear(32, 8), torch.nn.Linear(8, 32)
        decoder.weight.data = encoder.weight.data.t()
        x = torch.randn(64, 32)
        optimizer = cls([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            (decoder(encoder(x).tanh()) - x).square().mean().backward()
            optimizer.step()
        assert torch.equal(decoder.weight, encoder.weight.t())
        ends.append(encoder.weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@ANY_GRADIENT
def test_a_copy_of_another_dtype_is_made_in_every_step(engine, device):
    """Of a gradient that an engine reads in fp32, and that is not contiguous."""
    results = []
    for thorough in (False, True):
        params = [torch.nn.Parameter(x.detach().to(device)) for x in parameters(shapes=SHAPES)]
        params[0].grad_dtype = None  # any
        optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, min_8bit_size=1)
        for t in range(4):
            give_gradients(params, t)
            params[0].grad = strided(params[0].grad.double(), "transposed")
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
        results.append(snapshot(optimizer))
    assert identical(*results)


def test_tables_of_one_memory_stay_with_their_parameters(engine, device):
    """Where a plan is made anew of parameters that are alike, as new tensors in their state do."""
    ends = []
    for cls in (torch.optim.SGD, lowbit_optim.SGD32bit):
        base = torch.linspace(-1, 1, 70, device=device)
        params = [base[:], base[:]]
        optimizer = cls(params, lr=0.1, momentum=0.9)
        for t in range(3):
            for k, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + k + t)
                state = optimizer.state[p]
                state.update({key: x.clone() for key, x in state.items() if x is not None})
            optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
        ends.append([base, *buffers])
    torch.testing.assert_close(*ends)


def test_norms_of_one_memory_are_those_before_the_step(engine, device):
    """As on the torch engine, whichever of two parameters is stepped first."""
    ends = []
    for name in (engine, "torch"):
        base = torch.linspace(-1, 1, 70, device=device)
        params = [base[:], base[:]]
        optimizer = lowbit_optim.LARS32bit(params, lr=0.5, trust_coefficient=1.0)
        for p in params:
            p.grad = torch.ones_like(p)
        with lowbit_optim.use_engine(name):
            optimizer.step()
        ends.append(base)
    torch.testing.assert_close(*ends)


def test_each_memory_comes_after_all_before_it_that_it_overlaps():
    """Neighbours do not overlap, nor does what has no elements."""
    memories = [(0, 8), (8, 16), (4, 12), (0, 0), (0, 16), (14, 20), (0, 0)]
    assert turns_of(memories) == [0, 0, 1, 0, 2, 3, 0]
    whole = torch.zeros(10, 4)
    start, end = memory_of(whole)
    assert memory_of(whole[:, 1]) == (start + 4, end - 8)
    assert memory_of(whole[:0]) == memory_of(whole[:, :0]) == (0, 0)
    assert memory_of(whole.to("meta")) == (0, 0)  # nor does what has no address


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("name", ["AdamW", "Cain", "LearnedGradient", "ScheduleFreeAdamW"])
def test_the_bits_beside_bf16_parameters_that_are_negative_views(name, bits):
    results = []
    for look in (torch.clone, lambda x: torch._neg_view(-x)):
        params = [
            torch.nn.Parameter(look(x.detach()))
            for x in parameters(torch.bfloat16, shapes=((40, 70), (300,)))
        ]
        optimizer = getattr(lowbit_optim, name)(params, lr=0.01, master_weight_bits=bits)
        train(optimizer, 2)
        if name == "ScheduleFreeAdamW":
            optimizer.eval()
            optimizer.train()
        kept = [w.clone() for _, w in lowbit_optim.master_weights(optimizer)]
        lowbit_optim.load_master_weights(optimizer, [1.001 * w for w in kept])
        train(optimizer, 1, first=2)
        results.append((kept, snapshot(optimizer)))
    assert identical(*results)


def test_what_has_no_gradient_is_neither_copied_nor_written(engine, device):
    """What autograd has kept of it stays good."""
    params = [
        torch.nn.Parameter(strided(x.detach().to(device), "channels last"))
        for x in parameters(shapes=SHAPES[:1] * 2)
    ]
    optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, min_8bit_size=1)
    for t in range(3):
        give_gradients(params, t)
        for p in params:
            p.grad = strided(p.grad, "channels last")
        if t == 2:
            params[1].grad = None
        versions = [p._version for p in params]
        optimizer.step()
    (plan,) = optimizer.plans.values()
    assert plan.reused == ENGINES[engine].takes_mixed_batches
    assert params[0]._version > versions[0]
    assert params[1]._version == versions[1]
