"""Tensors that are not contiguous, as of `channels_last`: copied in every step, by one plan."""

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import reading
from protocol import give_gradients, identical, parameters, snapshot, train

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
        assert all(slot.p.numel() == slot.g.numel() == 0 for b in plan.batches for slot in b.slots)


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
