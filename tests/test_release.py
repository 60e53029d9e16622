"""Gradient release: the same run with each gradient gone as soon as it is there."""

import functools
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import lowbit_optim
from lowbit_optim import _release, release_gradients
from lowbit_optim_kernels import dispatch
from protocol import CLASSES, identical


def model(dtype=torch.float32, tied=False):
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 70), nn.LayerNorm(70), nn.Linear(70, 2)
    ).to(dtype)
    if tied:
        made.append(nn.Linear(2, 70, bias=False).to(dtype))
        made[-1].weight = nn.Parameter(made[-2].weight.detach().t().clone())
        made.append(nn.Linear(70, 2, bias=False).to(dtype))
        made[-1].weight = made[-3].weight
    return made


def batch(t, dtype=torch.float32):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(t)).to(dtype)


def backward(net, t):
    loss = net(batch(t, next(net.parameters()).dtype)).float().square().mean()
    loss.backward()
    return loss


def run(optimizer, net, steps=4):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for t in range(steps):
        backward(net, t)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return optimizer.state_dict()


FUSED = [mark for mark in CLASSES.args[1] if mark.fused]


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
@pytest.mark.parametrize("bucket_bytes", [0, 2000, 1 << 26])
@pytest.mark.few("bucket_bytes", "case")
def test_released_is_as_unreleased(case, bucket_bytes):
    """Bit for bit: parameters, state, schedules."""
    nets = model(torch.bfloat16), model(torch.bfloat16)
    states = []
    for net in nets:
        options = {"master_weight_bits": 24, "min_8bit_size": 1, "percentile_clipping": 50}
        optimizer = case.build(net.parameters(), 8, **options)
        if net is nets[1]:
            release_gradients(optimizer, net, bucket_bytes=bucket_bytes)
        states.append(run(optimizer, net))
    assert identical(*states)
    assert identical(nets[0].state_dict(), nets[1].state_dict())


def test_gradients_go_during_the_backward_pass():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, bucket_bytes=0)
    there = []
    net[0].bias.register_hook(lambda g: there.append([p.grad is None for p in net.parameters()]))
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 0)
    assert all(there[0]), "those behind it have been stepped, it has no gradient yet"
    assert all(p.grad is None for p in net.parameters())
    after = [p.detach().clone() for p in net.parameters()]
    assert not any(map(torch.equal, before, after))
    optimizer.step()
    assert all(map(torch.equal, after, net.parameters())), "step() has nothing left to do"
    handle.remove()
    backward(net, 1)
    assert all(p.grad is not None for p in net.parameters())
    assert all(map(torch.equal, after, net.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, after, net.parameters()))
    again = release_gradients(optimizer)  # may be had again
    handle.remove()  # which is not that of the other
    with pytest.raises(ValueError, match="released already; call remove"):
        release_gradients(optimizer)
    again.remove()


def test_a_graph_kept_for_a_second_backward_notices_the_step():
    """As it would after an unreleased one: the weights are not those of the forward pass."""
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, bucket_bytes=0)
    loss = net(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bucket_that_is_not_full_is_stepped_by_step():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, bucket_bytes=1 << 15)
    for t in range(2):  # what waited in the first has no part in the second
        optimizer.step()
        before = [p.detach().clone() for p in net.parameters()]
        backward(net, t)
        assert all(map(torch.equal, before, net.parameters()))
    handle.remove()
    assert all(p.grad is not None for p in net.parameters()), "what waited is not lost"
    optimizer.step()
    assert not any(map(torch.equal, before, net.parameters()))


def test_tied_weights_are_one_parameter():
    nets = model(tied=True), model(tied=True)
    optimizers = [lowbit_optim.AdamW8bit(net.parameters(), min_8bit_size=1) for net in nets]
    release_gradients(optimizers[1], nets[1], bucket_bytes=0)
    assert identical(*[run(o, net) for o, net in zip(optimizers, nets, strict=True)])


def test_a_closure_is_run():
    nets = model(), model()
    optimizers = [lowbit_optim.LAMB8bit(net.parameters(), lr=0.01) for net in nets]
    release_gradients(optimizers[1])
    losses = [
        [o.step(lambda net=net, t=t: backward(net, t)).item() for t in range(3)]
        for o, net in zip(optimizers, nets, strict=True)
    ]
    # Without release gradients pile up, as the closure does not clear them.
    assert losses[0][0] == losses[1][0]
    assert identical(*[[p.detach() for p in net[:1].parameters()] for net in nets]) is False


def test_what_has_no_hook_is_stepped_by_step():
    net, late = model(), nn.Parameter(torch.ones(3))
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release = release_gradients(optimizer)
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    optimizer.step()
    assert (late != 1).all()
    # It has one from then on.
    before = late.detach().clone()
    (2 * late).sum().backward()
    assert late.grad is not None
    release._flush([late], None)
    assert late.grad is None
    assert not torch.equal(late, before)
    release.remove()
    late.sum().backward()
    assert late.grad is not None


def test_gradients_that_are_zeroed_are_not_stepped():
    """A batch that is left out: its last gradients were still waiting."""
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, net, clip_previous_norm=1.0)
    backward(net, 0)
    optimizer.zero_grad()
    optimizer.step()
    assert identical([p.detach() for p in net.parameters()], before)
    backward(net, 1)
    optimizer.step()
    assert not identical([p.detach() for p in net.parameters()], before)


def test_a_bucket_is_of_one_stream(monkeypatch):
    """What another one has left to do it would not wait for."""
    net = model()
    streams = {p: p.ndim for p in net.parameters()}
    monkeypatch.setattr(_release, "_stream", streams.__getitem__)
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, bucket_bytes=700)
    seen, step_some = [], optimizer._step_subset

    def noted(params):
        seen.append({streams[p] for p in params})
        step_some(params)

    monkeypatch.setattr(optimizer, "_step_subset", noted)
    backward(net, 0)
    assert sorted(seen, key=sum) == [{1}, {2}, {2}]
    optimizer.step()
    assert all(p.grad is None for p in net.parameters())
    assert len(seen) == 4, "step() takes the bias that is left, whatever its stream"


def test_trainers_hooks():
    """The names that trainers call from hooks of their own."""
    nets = [model() for _ in range(3)]
    optimizers = [lowbit_optim.LANS8bit(net.parameters(), lr=0.01) for net in nets]
    for t in range(3):
        for k, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            backward(net, t)
            (group,) = optimizer.param_groups
            if k == 0:
                optimizer.step()
            for i, p in enumerate(group["params"]):
                if k == 1:
                    optimizer.step_parameter(p, group, i)
                if k == 2:
                    optimizer.step_param(p, group)
                p.grad = None
    assert identical(*[o.state_dict()["state"] for o in optimizers[:2]])
    for net in nets[1:]:
        assert identical(net.state_dict(), nets[0].state_dict())
    optimizer.step_parameter(p)  # has no gradient: stays
    with pytest.raises(ValueError, match="not in this LANS8bit"):
        optimizer.step_parameter(nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="group must be that of the parameter, parameter group 0"):
        optimizer.step_parameter(p, {"params": [p]})
    for i in (0, -1, "0"):
        with pytest.raises(ValueError, match="i must be the parameter's place"):
            optimizer.step_parameter(p, group, i)


def test_a_single_step_that_is_interrupted_keeps_no_gradient(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    p = nn.Parameter(torch.ones(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = lowbit_optim.AdamW8bit([p], min_8bit_size=1)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step_parameter(p)
    monkeypatch.setattr(dispatch, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step_parameter(p)
    gradient = weakref.ref(p.grad)
    p.grad = None
    gc.collect()
    assert gradient() is None


def test_groups_that_change_between_single_steps():
    params = [nn.Parameter(torch.ones(80, 80)) for _ in range(3)]
    groups = [{"params": [params[0]]}, {"params": params[1:]}]
    optimizer = lowbit_optim.AdamW8bit(groups, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step_parameter(params[2])
    del optimizer.param_groups[0]
    with pytest.raises(ValueError, match="not in this AdamW8bit"):
        optimizer.step_parameter(params[0])
    del optimizer.param_groups[0]["params"][0]
    optimizer.step_parameter(params[2], optimizer.param_groups[0], 0)
    with pytest.raises(ValueError, match="not in this AdamW8bit"):
        optimizer.step_parameter(params[1])
    assert [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in params] == [
        0,
        0,
        2,
    ]


def test_numbers_that_shift_between_single_steps():
    """Random bits are those of `step()`, whose numbers a parameter before shifts."""
    weights = []
    for alone in (False, True):
        first, added, p = (nn.Parameter(torch.ones(s)) for s in ((8,), (8,), (64, 64)))
        groups = [{"params": [first]}, {"params": [p]}]
        optimizer = lowbit_optim.AdamW8bit(groups, lr=0.1, min_8bit_size=0)
        for t in range(4):
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(t))
            if t == 2:
                groups[0]["params"].insert(0, added)
                optimizer.param_groups[0]["params"] = groups[0]["params"]
            if alone:
                optimizer.step_parameter(p)
            else:
                optimizer.step()
        weights.append(p.detach())
    assert identical(*weights)


# What cannot be had.


def test_a_second_backward_pass_is_refused():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer, bucket_bytes=0)
    backward(net, 0)
    with pytest.raises(RuntimeError, match=r"second gradient .* call step\(\) after every"):
        backward(net, 1)


def test_a_layer_twice_under_reentrant_checkpointing_is_refused():
    layer = nn.Linear(16, 16)
    optimizer = lowbit_optim.AdamW8bit(layer.parameters())
    release_gradients(optimizer, layer)
    x = torch.randn(4, 16, requires_grad=True)
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, layer)
    checkpoint(checkpoint(x, use_reentrant=False), use_reentrant=False).sum().backward()
    layer.zero_grad()
    other = nn.Linear(16, 16)
    another = lowbit_optim.AdamW8bit(other.parameters())
    release_gradients(another, other)
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, other)
    twice = checkpoint(checkpoint(x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"second gradient .* use_reentrant=False"):
        twice.sum().backward()


def test_a_gradient_scaler_is_refused():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    release_gradients(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(batch(0)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler .*bf16"):
        scaler.step(optimizer)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step_parameter(net[0].weight)
    del optimizer.grad_scale
    optimizer.found_inf = 0  # of one that has been asked to unscale what is gone
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step()


def test_bad_arguments():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    for options, match in (
        ({"accumulate": 2}, "accumulate must be 1, got 2: .* use smaller batches"),
        ({"accumulate": 0}, "accumulate must be an integer >= 1"),
        ({"bucket_bytes": -1}, "bucket_bytes must be an integer >= 0"),
        ({"clip_previous_norm": 0.0}, "clip_previous_norm must be finite, > 0"),
    ):
        with pytest.raises(ValueError, match=match):
            release_gradients(optimizer, **options)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got list"):
        release_gradients(optimizer, [net])
    with pytest.raises(TypeError, match="an optimizer of lowbit_optim, got torch"):
        release_gradients(torch.optim.AdamW(net.parameters()))
    for name in ("Cain8bit", "LearnedGradient"):
        with pytest.raises(ValueError, match=f"{name} cannot step parameters in the backward"):
            release_gradients(getattr(lowbit_optim, name)(net.parameters()))
    handle = release_gradients(optimizer)
    with pytest.raises(ValueError, match="released already; call remove"):
        release_gradients(optimizer)
    with pytest.raises(ValueError, match="by another optimizer already; call remove"):
        release_gradients(lowbit_optim.SGD(net.parameters()))
    handle.remove()
    release_gradients(lowbit_optim.SGD(net.parameters()))


def test_ddp_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(model())
        optimizer = lowbit_optim.AdamW8bit(net.parameters())
        with pytest.raises(ValueError, match=r"DistributedDataParallel, .* fully_shard"):
            release_gradients(optimizer, net)
    finally:
        torch.distributed.destroy_process_group()
