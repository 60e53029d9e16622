"""Gradient release that clips by the norm of the step before."""

import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lowbit_optim
from lowbit_optim import release_gradients
from test_release import backward, model

NORM = "previous_gradient_norm"


def clipped_by_hand(limit, steps):
    """The run in which each step scales by the norm of the step before."""
    net = model()
    optimizer = lowbit_optim.AdamW32bit(net.parameters(), lr=0.01)
    norm = 0.0
    for t in range(steps):
        backward(net, t)
        grads = [p.grad for p in net.parameters()]
        now = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        for g in grads:
            g.mul_(min(1.0, limit / norm) if norm else 1.0)
        norm = now
        optimizer.step()
        optimizer.zero_grad()
    return net, norm


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 26])
def test_clipping_by_the_previous_norm(bucket_bytes):
    want, norm = clipped_by_hand(0.05, 5)
    net = model()
    optimizer = lowbit_optim.AdamW32bit(net.parameters(), lr=0.01)
    release_gradients(optimizer, net, bucket_bytes=bucket_bytes, clip_previous_norm=0.05)
    run_without_schedule(optimizer, net, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    # It goes on with the norm that was saved.
    other = model()
    other.load_state_dict(net.state_dict())
    again = lowbit_optim.AdamW32bit(other.parameters(), lr=0.01)
    again.load_state_dict(saved)
    release_gradients(again, other, bucket_bytes=bucket_bytes, clip_previous_norm=0.05)
    run_without_schedule(again, other, range(3, 5))
    for p, q in zip(other.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert abs(float(again.param_groups[0][NORM]) / norm - 1) < 1e-4


def run_without_schedule(optimizer, net, steps):
    for t in steps:
        backward(net, t)
        optimizer.step()


def test_clipping_goes_on_from_a_state_without_a_norm():
    want, norm = clipped_by_hand(0.05, 3)
    net = model()
    optimizer = lowbit_optim.AdamW32bit(net.parameters(), lr=0.01)
    saved = optimizer.state_dict()
    release_gradients(optimizer, net, clip_previous_norm=0.05)
    optimizer.load_state_dict(saved)
    run_without_schedule(optimizer, net, range(3))
    for p, q in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert float(optimizer.param_groups[0][NORM]) == pytest.approx(norm)


def test_the_norm_goes_where_the_parameters_are():
    """A checkpoint may have it on a CPU, for which a device's every step would wait."""
    net = model().to("meta")
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, net, clip_previous_norm=1.0)
    optimizer.param_groups[0][NORM] = torch.tensor(0.25)
    assert handle._norm().is_meta
    assert optimizer.param_groups[0][NORM].is_meta


def test_groups_in_another_order_share_the_norm():
    net = model()
    optimizer = lowbit_optim.AdamW8bit([{"params": [p]} for p in net.parameters()])
    handle = release_gradients(optimizer, bucket_bytes=0, clip_previous_norm=1.0)
    backward(net, 0)
    optimizer.step()
    norm = float(optimizer.param_groups[0][NORM])
    optimizer.param_groups.reverse()
    assert float(handle._norm()) == norm > 0
    backward(net, 1)
    optimizer.step()
    assert [NORM in group for group in optimizer.param_groups].count(True) == 1
    handle.remove()
    assert not any(NORM in group for group in optimizer.param_groups)


def test_the_norm_of_bf16_gradients_is_added_up_in_more_bits():
    net = model(torch.bfloat16)
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, clip_previous_norm=1.0)
    backward(net, 0)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
    optimizer.step()
    assert float(optimizer.param_groups[0][NORM]) == pytest.approx(norm, rel=1e-5)


def test_a_norm_that_is_not_finite_clips_nothing():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, clip_previous_norm=1.0)
    net[0].weight.register_hook(lambda g: g * math.inf)
    backward(net, 0)
    optimizer.step()
    assert float(optimizer.param_groups[0][NORM]) == 0


def test_a_step_that_was_refused_counts_once_in_the_norm():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, clip_previous_norm=1.0)
    backward(net, 0)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
    group = optimizer.param_groups[0]
    group["eps"] = -1.0
    with pytest.raises(ValueError, match="eps"):
        optimizer.step()
    group["eps"] = 1e-8
    optimizer.step()
    assert float(group[NORM]) == pytest.approx(norm)


def test_memory_that_runs_out_for_the_norm_steps_nothing_twice(monkeypatch):
    def full(*args, **options):
        raise MemoryError

    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, clip_previous_norm=1.0)
    backward(net, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", full)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert {int(optimizer.state[p]["step"]) for p in net.parameters()} == {1}


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0, "1", torch.tensor([1.0, 2.0])])
def test_a_norm_that_no_step_leaves_behind_is_refused(norm):
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, clip_previous_norm=1.0)
    saved = optimizer.state_dict()
    saved["param_groups"][0][NORM] = norm
    with pytest.raises(ValueError, match=f"parameter group 0 of state_dict: {NORM} must be"):
        lowbit_optim.AdamW8bit(model().parameters()).load_state_dict(saved)


def test_what_cannot_be_released_keeps_no_hook():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    optimizer.param_groups[0][NORM] = "x"
    with pytest.raises(TypeError):
        release_gradients(optimizer, clip_previous_norm=1.0)
    del optimizer.param_groups[0][NORM]
    release_gradients(optimizer, clip_previous_norm=1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_has_no_hook_is_clipped_with_the_others(frozen):
    """A group that is added later, or a layer that is frozen at first."""
    want = model()
    net = copy.deepcopy(want)
    optimizers = []
    for each in (want, net):
        head = list(each[-1].parameters())
        body = [p for layer in each[:-1] for p in layer.parameters()]
        groups = [{"params": body}, {"params": head}]
        unhooked = each is net
        for p in head:
            p.requires_grad_(not (unhooked and frozen))
        first = groups if frozen or not unhooked else groups[:1]
        optimizer = lowbit_optim.AdamW32bit(first, lr=0.01)
        release_gradients(optimizer, each, clip_previous_norm=0.05)
        if len(first) == 1:
            optimizer.add_param_group(groups[1])
        for p in head:
            p.requires_grad_()
        run_without_schedule(optimizer, each, range(3))
        optimizers.append(optimizer)
    norms = [float(optimizer.param_groups[0][NORM]) for optimizer in optimizers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for p, q in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_hooks_of_several_threads_run_one_at_a_time(monkeypatch):
    """The backward pass has a thread for each device."""
    together = [model(), model()]
    apart = copy.deepcopy(together)
    for nets in (together, apart):
        params = [p for net in nets for p in net.parameters()]
        optimizer = lowbit_optim.AdamW32bit(params)
        release_gradients(optimizer, bucket_bytes=0, clip_previous_norm=0.05)
        step_some = optimizer._step_subset

        def slowly(params, step_some=step_some):
            time.sleep(0.002)
            step_some(params)

        monkeypatch.setattr(optimizer, "_step_subset", slowly)
        for t in range(2):
            with ThreadPoolExecutor(2 if nets is together else 1) as pool:
                list(pool.map(lambda net, t=t: backward(net, t), nets))
            optimizer.step()
    for net, other in zip(together, apart, strict=True):
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_sparse_gradient_is_refused_by_the_optimizers_name(clip):
    net = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, net, bucket_bytes=0, clip_previous_norm=clip)
    with pytest.raises(RuntimeError, match="AdamW8bit does not support sparse gradients"):
        net(torch.tensor([1, 2])).sum().backward()
