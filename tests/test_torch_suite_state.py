"""torch's generic optimizer tests over our classes: state dicts, hooks, copies. See torch_database.

Each test here is named after the one of torch's `TestOptimRenewed` that it follows.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import lowbit_optim
import torch_database
from protocol import BITS, CLASSES, build, identical, snapshot
from torch_database import RECORDS, inputs, record

NAMED = pytest.mark.parametrize("named", [False, True], ids=["", "named"])
NAMED_THEN = pytest.mark.parametrize("then", [False, True], ids=["", "then named"])
# Groups of state dicts of older releases have none of these.
NEWER_FLAGS = ("foreach", "fused", "differentiable", "maximize", "capturable")


@pytest.fixture(autouse=True)
def _engine():
    """The torch engine, which compiles nothing: no test here is about how a step is computed."""
    with torch_database.small_steps():
        yield


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((2, 3), (2,))]


def with_names(params, named):
    return [(f"name{i}", p) for i, p in enumerate(params)] if named else params


def train(optimizer, params, steps):
    """Steps down a linear model's squared error."""
    weight, bias = params
    for _ in range(steps):
        optimizer.zero_grad()
        (weight.mv(torch.tensor([0.5, -1.0, 2.0])) + bias).pow(2).sum().backward()
        optimizer.step()
    return optimizer


def copies(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def without_names(state_dict):
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


@RECORDS
@NAMED
@NAMED_THEN
@pytest.mark.few(("name", "bits"), "then", "named")
def test_state_dict_deterministic(name, bits, named, then):
    info = record(name, bits)
    for arguments in inputs(info)[:: 1 if named == then else 4]:
        params = parameters()
        optimizer = info.optim_cls(with_names(params, named), **copy.deepcopy(arguments))
        train(optimizer, params, 3)
        others = copies(params)
        other = info.optim_cls(with_names(others, then), **copy.deepcopy(arguments))
        saved = optimizer.state_dict()
        given = copy.deepcopy(saved)
        other.load_state_dict(given)
        assert identical(given, saved), "loading changes what it loads"
        train(optimizer, params, 2)
        train(other, others, 2)
        assert identical([p.detach() for p in params], [p.detach() for p in others])
        mine, theirs = (without_names(x.state_dict()) for x in (optimizer, other))
        assert identical(mine, theirs), arguments
        other.param_groups.extend(other.param_groups)
        repeated = without_names(other.state_dict())["param_groups"]
        assert identical(repeated[-1], mine["param_groups"][-1])


@RECORDS
def test_can_load_older_state_dict(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(params, **arguments), params, 2)
        older = copy.deepcopy(optimizer.state_dict())
        for group in older["param_groups"]:
            for flag in NEWER_FLAGS:
                del group[flag]
        optimizer.load_state_dict(older)
        assert optimizer.param_groups[0].keys() >= set(NEWER_FLAGS)
        train(optimizer, params, 1)


@RECORDS
@NAMED
@NAMED_THEN
def test_can_load_from_to_named_state_dict(name, bits, named, then):
    info = record(name, bits)
    arguments = inputs(info)[0]
    params = parameters()
    optimizer = train(info.optim_cls(with_names(params, named), **arguments), params, 2)
    others = copies(params)
    other = info.optim_cls(with_names(others, then), **arguments)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, others, 1)
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names == (["name0", "name1"] if named or then else None)


@RECORDS
@NAMED
def test_save_load_equality_with_weights_only(name, bits, named):
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(with_names(params, named), **arguments), params, 2)
        saved = optimizer.state_dict()
        for weights_only in (True, False):
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            assert identical(torch.load(file, weights_only=weights_only), saved), arguments


@RECORDS
def test_load_nontensor_step(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(params, **arguments), params, 3)
        before = snapshot(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["step"] = state["step"].item()
        optimizer.load_state_dict(saved)
        assert identical(snapshot(optimizer), before)
        train(optimizer, params, 1)


def test_adamw_serialization():
    """What Adam saves AdamW goes on from, with its own way of decay."""
    params = parameters()
    theirs = train(torch.optim.Adam(params, weight_decay=0.1), params, 3)
    ended = []
    for cls in (torch.optim.AdamW, lowbit_optim.AdamW32bit):
        own = copies(params)
        optimizer = cls(own)
        optimizer.load_state_dict(theirs.state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
        train(optimizer, own, 3)
        ended.append(own)
    for p, q in zip(*ended, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@RECORDS
def test_state_dict_with_cuda_params(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(params, **copy.deepcopy(arguments)), params, 2)
        others = [torch.nn.Parameter(p.detach().cuda()) for p in params]
        other = info.optim_cls(others, **copy.deepcopy(arguments))
        saved = optimizer.state_dict()
        given = copy.deepcopy(saved)
        other.load_state_dict(given)
        assert identical(given, saved)
        for _ in range(3):
            for p, q in zip(params, others, strict=True):
                p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            optimizer.step()
            other.step()
        for p, q in zip(params, others, strict=True):
            # LearnedGradient multiplies matrices, whose sums a GPU forms in another order.
            rtol = 1e-3 if name == "LearnedGradient" else 1e-5
            torch.testing.assert_close(q.cpu(), p, rtol=rtol, atol=1e-6)


@RECORDS
def test_deepcopy_copies_all_public_attrs(name, bits):
    """And a pickle does; both go on as the original does."""
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(params, **arguments), params, 2)
        for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            public = [{key for key in vars(x) if key[0] != "_"} for x in (optimizer, again)]
            assert public[0] == public[1]
            assert identical(snapshot(again), snapshot(optimizer))
        train(again, again.param_groups[0]["params"], 1)
        train(optimizer, params, 1)
        assert identical(snapshot(again), snapshot(optimizer)), arguments


@RECORDS
def test_non_empty_state(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        params = parameters()
        optimizer = train(info.optim_cls(params, **arguments), params, 1)
        assert optimizer.state.keys() == set(params)
        assert all(optimizer.state.values())


@RECORDS
def test_optimizer_can_be_printed(name, bits):
    info = record(name, bits)
    for arguments in inputs(info, flags=True):
        text = repr(info.optim_cls(parameters(), **arguments))
        assert text.startswith(info.optim_cls.__name__)
        assert all(f"{key}: " in text for key in arguments)


# Hooks.


def mark_state(optimizer):
    optimizer.state["test"] = 1


def take_mark(optimizer, state_dict):
    state_dict["ran_state_dict_pre_hook"] = state_dict["state"].pop("test", None) == 1
    return state_dict


def set_lr_in_place(optimizer, state_dict):
    state_dict["param_groups"][0]["lr"] = 0.002


def set_lr_in_a_copy(optimizer, state_dict):
    changed = copy.deepcopy(state_dict)
    changed["param_groups"][0]["lr"] = 0.003
    return changed


def note_load(optimizer):
    optimizer.state["lr_at_post_hook"] = optimizer.param_groups[0]["lr"]


def each_input(name, bits):
    info = record(name, bits)
    for arguments in inputs(info, flags=True):
        yield info.optim_cls([torch.rand(2, 3, requires_grad=True)], **arguments)


@RECORDS
def test_state_dict_pre_and_post_hook(name, bits):
    for optimizer in each_input(name, bits):
        handle = optimizer.register_state_dict_post_hook(take_mark)
        assert optimizer.state_dict()["ran_state_dict_pre_hook"] is False
        handle.remove()
        optimizer.register_state_dict_pre_hook(mark_state)
        assert optimizer.state_dict()["state"]["test"] == 1
        optimizer.register_state_dict_post_hook(take_mark)
        saved = optimizer.state_dict()
        assert "test" not in saved["state"]
        assert saved["ran_state_dict_pre_hook"] is True


@RECORDS
def test_load_state_dict_pre_hook_and_prepend(name, bits):
    for optimizer in each_input(name, bits):
        saved = optimizer.state_dict()
        optimizer.register_load_state_dict_pre_hook(set_lr_in_place)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.002
        optimizer.register_load_state_dict_pre_hook(set_lr_in_a_copy, prepend=True)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.002, "the prepended hook runs first"


@RECORDS
def test_load_state_dict_pre_post_hook(name, bits):
    for optimizer in each_input(name, bits):
        optimizer.register_load_state_dict_post_hook(note_load)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state.pop("lr_at_post_hook") == lr
        optimizer.register_load_state_dict_pre_hook(set_lr_in_a_copy)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["lr_at_post_hook"] == 0.003


@RECORDS
def test_step_all_hooks(name, bits):
    """Before and after a step, those of all optimizers outside those of this one."""
    seen = []

    def noting(what):
        return lambda optimizer, args, kwargs: seen.append(what)

    for optimizer in each_input(name, bits):
        other = torch.optim.SGD([torch.rand(2, requires_grad=True)])
        handles = [
            register_optimizer_step_pre_hook(noting("all before")),
            register_optimizer_step_post_hook(noting("all after")),
            optimizer.register_step_pre_hook(noting("before")),
            optimizer.register_step_post_hook(noting("after")),
        ]
        seen.clear()
        optimizer.step()
        other.step()
        optimizer.step(lambda: 1)
        mine = ["all before", "before", "after", "all after"]
        assert seen == [*mine, "all before", "all after", *mine]
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert len(seen) == 10


@RECORDS
def test_step_pre_hook_may_change_the_arguments(name, bits):
    for optimizer in each_input(name, bits):
        optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7), {}))
        assert optimizer.step() == 7


@pytest.mark.parametrize("engine", ["torch", "numba"])
@CLASSES
@BITS
def test_the_dict_of_a_state_stays_the_same_one(case, bits, engine):
    """As torch's: who looked at it before the first step, or changed a count, finds the next."""
    with lowbit_optim.use_engine(engine):
        params = [torch.nn.Parameter(torch.ones(300))]
        optimizer = build(case, bits, params)
        held = optimizer.state[params[0]]
        for step in (1, 2):
            params[0].grad = torch.ones(300)
            optimizer.step()
            assert held is optimizer.state[params[0]]
            assert int(held["step"]) == step
        held["step"] = torch.tensor(0.0)
        optimizer.step()
        assert held is optimizer.state[params[0]]
        assert int(held["step"]) == 1
