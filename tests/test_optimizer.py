"""The protocol of torch.optim.Optimizer: groups, closures, hooks, schedulers, gradients, state."""

import copy
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import cases
import lowbit_optim
from protocol import (
    BITS,
    BY_ENGINE,
    CLASSES,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    snapshot,
    train,
)


def values(optimizer):
    return [p.detach().clone() for p in all_parameters(optimizer)]


def changed(before, optimizer):
    """For each parameter, whether it differs from what it was."""
    after = values(optimizer)
    return [not identical(a, b) for a, b in zip(before, after, strict=True)]


@CLASSES
@BITS
def test_is_a_torch_optimizer(case, bits):
    optimizer = build(case, bits, parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, lowbit_optim.LowBitOptimizer)
    assert f"{case.name}{bits}bit" in repr(optimizer)
    assert f"lr: {case.lr}" in repr(optimizer)


@CLASSES
@BITS
def test_state_is_created_at_a_parameters_first_step(case, bits):
    a, b = params = parameters()
    optimizer = build(case, bits, params)
    assert not optimizer.state
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert set(optimizer.state) == {a}
    assert set(case.moments) | {"step"} <= set(optimizer.state[a])
    give_gradients([b], 0)
    optimizer.step()
    assert int(optimizer.state[a]["step"]) == 2
    assert int(optimizer.state[b]["step"]) == 1


@CLASSES
@BITS
def test_a_parameter_without_gradient_stays(case, bits):
    a, b = params = parameters()
    b.requires_grad_(False)
    optimizer = build(case, bits, params)
    before = values(optimizer)
    assert optimizer.step() is None
    assert changed(before, optimizer) == [False, False]
    a.grad = torch.ones_like(a)
    optimizer.step()
    optimizer.step()  # a first step of ADOPT moves nothing
    assert changed(before, optimizer) == [True, False]
    assert b not in optimizer.state


@CLASSES
def test_closure_runs_once_with_gradients_enabled(case):
    (p,) = parameters(shapes=[(20,)])
    optimizer = build(case, 32, [p])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert int(optimizer.state[p]["step"]) == 1
    assert optimizer.step(lambda: 3.5) == 3.5


@CLASSES
def test_an_exception_in_the_closure_changes_nothing(case):
    optimizer = train(build(case, 8, parameters()), 1)
    before = snapshot(optimizer)

    def closure():
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(closure)
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    for options in ({}, {"foreach": True}, {"fused": True}):
        params = parameters()
        optimizer = lowbit_optim.AdamW8bit(params, **options)
        give_gradients(params, 0)
        optimizer.zero_grad(set_to_none=set_to_none)
        for p in params:
            assert p.grad is None if set_to_none else not p.grad.any()


@CLASSES
def test_a_zero_gradient_is_a_step_and_none_is_not(case):
    a, b = params = parameters()
    optimizer = build(case, 8, params)
    a.grad = torch.zeros_like(a)
    optimizer.step()
    assert int(optimizer.state[a]["step"]) == 1
    assert b not in optimizer.state


@CLASSES
@BITS
def test_groups_are_read_afresh(case, bits):
    """Whoever changes a group between steps gets what a new optimizer of that setting does."""
    settings = {"lr": case.lr / 3, "weight_decay": 0.3, "maximize": True}
    known = build(case, bits, parameters()).param_groups[0]
    settings["betas"] = tuple(0.8 * beta for beta in known.get("betas", ()))
    settings.update({"momentum": 0.5} if known.get("momentum") else {})
    settings = {key: value for key, value in settings.items() if key in known}
    optimizer = train(build(case, bits, parameters()), 2)
    other = build(case, bits, parameters(), **settings)
    other.load_state_dict(
        {**optimizer.state_dict(), "param_groups": other.state_dict()["param_groups"]}
    )
    for p, q in zip(all_parameters(other), values(optimizer), strict=True):
        p.data.copy_(q)
    optimizer.param_groups[0].update(settings)
    train(optimizer, 2, first=2)
    train(other, 2, first=2)
    assert identical(snapshot(optimizer), snapshot(other))


@CLASSES
def test_a_group_has_its_own_settings(case):
    a, b = parameters()
    optimizer = build(case, 32, [{"params": [a], "lr": 0.0}, {"params": [b], "optim_bits": 8}])
    before = values(optimizer)
    train(optimizer, 2)
    assert changed(before, optimizer) == [False, True]
    for key in case.moments:
        assert optimizer.state[a][key].dtype == torch.float32
        assert optimizer.state[b][key].dtype == torch.uint8


@CLASSES
@BITS
def test_a_group_added_late_is_as_one_there_from_the_start(case, bits):
    a, b = parameters()
    late = build(case, bits, [a])
    late.add_param_group({"params": b, "lr": case.lr / 2})
    a2, b2 = parameters()
    early = build(case, bits, [{"params": [a2]}, {"params": [b2], "lr": case.lr / 2}])
    train(late, 3)
    train(early, 3)
    assert identical(snapshot(late), snapshot(early))
    (c,) = parameters(shapes=[(9,)])
    late.add_param_group({"params": [c]})
    give_gradients([c], 0)
    late.step()
    assert int(late.state[c]["step"]) == 1


@CLASSES
def test_empty_groups(case):
    (p,) = parameters(shapes=[(20,)])
    optimizer = build(case, 8, [{"params": []}, {"params": [p]}])
    train(optimizer, 1)
    assert int(optimizer.state[p]["step"]) == 1
    nothing = build(case, 8, [{"params": []}])
    nothing.step()
    nothing.load_state_dict(nothing.state_dict())


@CLASSES
@BITS
def test_tensors_of_any_size(case, bits):
    optimizer = build(case, bits, parameters(shapes=[(0,), (), (1,), (3, 0), (257,)]))
    before = values(optimizer)
    train(optimizer, 2)
    moved = changed(before, optimizer)
    assert moved[0] is moved[3] is False
    assert moved[4]
    assert all(p.isfinite().all() for p in all_parameters(optimizer))


@CLASSES
def test_named_parameters(case):
    model = torch.nn.Linear(4, 3)
    optimizer = build(case, 8, model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    unnamed = build(case, 8, model.parameters())
    unnamed.load_state_dict(saved)
    assert unnamed.param_groups[0]["param_names"] == ["weight", "bias"]


@CLASSES
def test_tied_parameters_are_stepped_once(case):
    embedding, head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    tied = build(case, 8, torch.nn.ModuleList([embedding, head]).parameters())
    assert len(all_parameters(tied)) == 1
    (p,) = parameters(shapes=[(20, 8)])
    p.data.copy_(embedding.weight.data)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = build(case, 8, [p, p])
    train(tied, 3)
    for t in range(3):
        give_gradients([p], t)
        twice.step()
    assert int(twice.state[p]["step"]) == 3
    assert torch.equal(p, embedding.weight)
    twice.load_state_dict(twice.state_dict())


@CLASSES
@BITS
def test_lr_may_be_a_tensor(case, bits):
    rate = torch.tensor(case.lr, dtype=torch.float64)
    a, b = build(case, bits, parameters(), lr=rate), build(case, bits, parameters())
    train(a, 2)
    train(b, 2)
    assert identical(values(a), values(b))
    still = build(case, bits, parameters(), lr=rate)
    rate.mul_(0)  # as a scheduler does
    before = values(still)
    train(still, 1)
    assert changed(before, still) == [False, False]


SCHEDULERS = [
    lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
]


def scheduled(optimizer, make):
    """Learning rates and parameters of a few steps under a scheduler."""
    scheduler, rates = make(optimizer), []
    for t in range(6):
        train(optimizer, 1, first=t)
        is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if is_plateau else []))
        group = optimizer.param_groups[0]
        rates.append((float(group["lr"]), group.get("betas"), group.get("momentum")))
    return rates, values(optimizer)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR in torch 2.7
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_do_as_with_torch(make, as_tensor):
    """Momentum and betas that OneCycleLR and CyclicLR move take effect too."""
    for ours, theirs, options in (
        (lowbit_optim.SGD32bit, torch.optim.SGD, {"momentum": 0.9}),
        (lowbit_optim.AdamW32bit, torch.optim.AdamW, {}),
    ):
        lr = torch.tensor(0.05) if as_tensor else 0.05
        got = scheduled(ours(parameters(), lr=lr, **options), make)
        lr = torch.tensor(0.05) if as_tensor else 0.05
        want = scheduled(theirs(parameters(), lr=lr, **options), make)
        for a, b in zip(got[0], want[0], strict=True):
            assert a == b
        for a, b in zip(got[1], want[1], strict=True):
            assert cases.distance(a, b) < 1e-5


@CLASSES
def test_every_class_runs_under_one_cycle(case):
    known = build(case, 8, parameters()).defaults
    cycles = "betas" in known or "momentum" in known
    optimizer = build(case, 8, parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, case.lr, total_steps=5, cycle_momentum=cycles)
    for t in range(4):
        train(optimizer, 1, first=t)
        scheduler.step()
    assert all(p.isfinite().all() for p in all_parameters(optimizer))


def test_momentum_and_amsgrad_may_be_switched_on_later():
    optimizer = train(lowbit_optim.SGD8bit(parameters(), lr=0.1, min_8bit_size=1), 2)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, 2, first=2)
    other = lowbit_optim.AdamW8bit(parameters(), lr=0.1, min_8bit_size=1)
    train(other, 2)
    other.param_groups[0]["amsgrad"] = True
    train(other, 2, first=2)
    for o, key in ((optimizer, "momentum_buffer"), (other, "max_exp_avg_sq")):
        for p in all_parameters(o):
            assert o.state[p][key].dtype == torch.uint8
            assert o.state[p][f"{key}_absmax"].any()
            assert int(o.state[p]["step"]) == 4


@CLASSES
def test_step_hooks_run_once(case):
    optimizer = build(case, 8, parameters())
    seen = []
    everywhere = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    train(optimizer, 1)
    everywhere.remove()
    assert seen == ["global", "before", "after"]


@CLASSES
@BITS
@BY_ENGINE
@pytest.mark.few_if_compiled("bits", "case")
def test_gradients_are_never_modified_and_versions_are_counted(engine, case, bits):
    params = parameters()
    optimizer = build(case, bits, params, percentile_clipping=3)
    give_gradients(params, 0)
    kept = [(p.grad, p.grad.clone(), p.grad._version, p._version) for p in params]
    optimizer.step()
    for p, (g, copied, g_version, p_version) in zip(params, kept, strict=True):
        assert p.grad is g
        assert torch.equal(g, copied)
        assert g._version == g_version
        assert p._version > p_version


@pytest.mark.parametrize(("steps", "bits"), [(0, None), (2, None), (2, 16), (2, 32)])
def test_backward_through_a_weight_that_was_stepped_is_refused(steps, bits):
    """What autograd promises: values saved for backward are not overwritten in silence."""
    (p,) = parameters(torch.bfloat16 if bits else torch.float32, shapes=[(300,)])
    optimizer = train(lowbit_optim.AdamW8bit([p], master_weight_bits=bits), steps)
    loss = (p * p).sum()
    give_gradients([p], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@CLASSES
def test_gradients_of_a_graph(case):
    """create_graph=True leaves gradients that require gradients themselves."""
    (p,) = parameters(shapes=[(300,)])
    optimizer = build(case, 8, [p])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the reference cycle
        (p**3).sum().backward(create_graph=True)
    optimizer.step()
    assert p.is_leaf
    assert p.grad_fn is None
    optimizer.zero_grad()


@CLASSES
@BITS
def test_a_deep_copy_goes_its_own_way(case, bits):
    model = torch.nn.Linear(20, 15)
    optimizer = train(build(case, bits, model.parameters()), 2)
    twin = copy.deepcopy(optimizer)
    before = snapshot(optimizer)
    assert identical(snapshot(twin), before)
    train(twin, 2, first=2)
    assert identical(snapshot(optimizer), before)
    train(optimizer, 2, first=2)
    assert identical(snapshot(optimizer), snapshot(twin))
