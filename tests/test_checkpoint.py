"""State dicts: what they hold, exact resumption, and loading from elsewhere."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch

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
    saved_and_loaded,
    snapshot,
    tensors_of,
    train,
    with_values_of,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def plain(tree):
    """Whether a tree is made of tensors, numbers, strings, None, lists, tuples and dicts alone."""
    if isinstance(tree, dict):
        return type(tree) is dict and all(plain(k) and plain(v) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree) in (list, tuple) and all(map(plain, tree))
    return type(tree) in (torch.Tensor, int, float, bool, str, type(None))


@CLASSES
@BITS
@BY_ENGINE
@pytest.mark.few_if_compiled("bits", "case")
def test_state_dict_is_plain_data(engine, case, bits):
    optimizer = train(build(case, bits, parameters(), percentile_clipping=50), 2)
    saved = optimizer.state_dict()
    assert plain(saved)
    assert saved["lowbit_optim"] == {"format_version": 2, "optimizer": case.name}
    for index, p in enumerate(all_parameters(optimizer)):
        state = saved["state"][index]
        assert state["step"].dtype == torch.float32
        assert state["step"].shape == ()
        for key in case.moments:
            assert state[key].shape == p.shape
            assert state[key].dtype == (torch.uint8 if bits == 8 else torch.float32)
            assert (f"{key}_absmax" in state) == (bits == 8)
    assert identical(saved_and_loaded(saved), saved)


@CLASSES
@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@BY_ENGINE
@pytest.mark.few_if_compiled("dtype", "bits", "case")
def test_training_resumes_bit_for_bit(engine, case, bits, dtype):
    """Odd shapes, so that rows end in short blocks."""
    shapes, options = [(3, 300), (257,), ()], {"percentile_clipping": 50}
    straight = train(build(case, bits, parameters(dtype, shapes), **options), 3)
    resumed = build(case, bits, parameters(dtype, shapes, seed=9), **options)
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    with_values_of(straight, resumed)
    assert identical(snapshot(straight), snapshot(resumed))
    train(straight, 3, first=3)
    train(resumed, 3, first=3)
    assert identical(snapshot(straight), snapshot(resumed))


@CLASSES
@BITS
def test_a_loaded_state_has_the_order_of_one_that_steps_made(case, bits):
    """Who compares two state dicts, or sends one to other ranks, walks through it in its order."""
    options = {"percentile_clipping": 50, "master_weight_bits": 24}
    with lowbit_optim.use_engine("torch"):
        optimizer = train(build(case, bits, parameters(torch.bfloat16), **options), 2)
    saved = optimizer.state_dict()["state"].values()
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = optimizer.state_dict()["state"].values()
    assert [list(state) for state in loaded] == [list(state) for state in saved]


@CLASSES
@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loading_casts_nothing_and_aliases_nothing(case, bits, dtype):
    """torch.optim.Optimizer.load_state_dict would cast fp32 state to the parameter's dtype."""
    with lowbit_optim.use_engine("torch"):
        source = train(build(case, bits, parameters(dtype), percentile_clipping=50), 2)
        lr = torch.tensor(case.lr)
        source.param_groups[0]["lr"] = lr
        saved = source.state_dict()
        kept = copy.deepcopy(saved)
        loaded = build(case, bits, parameters(dtype))
        loaded.load_state_dict(saved)
        assert identical(loaded.state_dict(), kept)
        pointers = {x.data_ptr() for x in tensors_of(saved) if x.numel()}
        assert not pointers & {x.data_ptr() for x in tensors_of(loaded.state_dict()) if x.numel()}
        train(loaded, 2)
    assert identical(saved, kept)
    loaded.param_groups[0]["lr"].mul_(2)
    loaded.param_groups[0]["weight_decay"] = 0.7
    assert identical(saved, kept)


@CLASSES
def test_map_location_may_be_a_function(case):
    optimizer = train(build(case, 8, parameters()), 2)
    seen = []

    def place(storage, location):
        seen.append(location)
        return storage

    loaded = build(case, 8, parameters())
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict(), map_location=place))
    assert set(seen) == {"cpu"}
    assert identical(loaded.state_dict(), optimizer.state_dict())


@CLASSES
@BITS
@BY_ENGINE
@pytest.mark.few_if_compiled("bits", "case")
def test_the_optimizer_pickles(engine, case, bits):
    optimizer = train(build(case, bits, parameters(), percentile_clipping=50), 2)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is type(optimizer)
    assert identical(snapshot(twin), snapshot(optimizer))
    train(optimizer, 2, first=2)
    train(twin, 2, first=2)
    assert identical(snapshot(twin), snapshot(optimizer))


@CLASSES
def test_state_dict_before_the_first_step(case):
    optimizer = build(case, 8, parameters())
    fresh = build(case, 8, parameters())
    fresh.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert not fresh.state
    train(optimizer, 2)
    train(fresh, 2)
    assert identical(snapshot(fresh), snapshot(optimizer))


@CLASSES
def test_hooks_of_saving_and_loading(case):
    optimizer = train(build(case, 8, parameters()), 1)
    calls = []

    def post_save(_, state_dict):
        calls.append("saved")
        return {**state_dict, "note": "kept"}

    def pre_load(_, state_dict):
        calls.append("before load")
        note = state_dict.pop("note")
        return {
            **state_dict,
            "param_groups": [{**g, "name": note} for g in state_dict["param_groups"]],
        }

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before save"))
    optimizer.register_state_dict_post_hook(post_save)
    optimizer.register_load_state_dict_pre_hook(pre_load)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert calls == ["before save", "saved", "before load", "loaded"]
    assert saved["note"] == "kept"
    assert optimizer.param_groups[0]["name"] == "kept"
    train(optimizer, 1, first=1)


@CLASSES
def test_a_post_hook_of_saving_sees_all_that_is_saved(case):
    optimizer = build(case, 8, parameters())
    optimizer.register_state_dict_post_hook(lambda _, saved: {"wrapped": saved})
    saved = optimizer.state_dict()
    assert set(saved) == {"wrapped"}
    assert "lowbit_optim" in saved["wrapped"]


def test_what_an_optimizer_around_it_keeps_is_carried_along():
    """As TRAC of pytorch_optimizer does, whose own `step` has any dtype and shape."""
    optimizer = train(lowbit_optim.AdamW8bit(parameters()), 1)
    its = {"step": torch.arange(2), "s": torch.ones(3), 0: torch.ones(300)}
    optimizer.state["trac"] = its
    other = lowbit_optim.AdamW8bit(parameters())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert identical(other.state.pop("trac"), its)
    assert len(other.state) == len(all_parameters(other))


def test_what_a_user_keeps_with_a_parameter_and_in_a_group_is_copied():
    optimizer = train(lowbit_optim.AdamW8bit(parameters()), 1)
    kept, named = {"sizes": [torch.ones(3)]}, NamedTuple("Named", [("a", int)])(3)
    first, *_ = all_parameters(optimizer)
    optimizer.state[first]["mine"], optimizer.param_groups[0]["mine"] = kept, named
    other = lowbit_optim.AdamW8bit(parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["mine"] == named
    loaded = other.state[all_parameters(other)[0]]["mine"]
    assert identical(loaded, kept)
    loaded["sizes"][0].zero_()
    loaded["sizes"].clear()
    assert identical(kept, {"sizes": [torch.ones(3)]})


def test_hooks_may_drop_the_state_of_a_parameter_in_no_group():
    optimizer = train(lowbit_optim.AdamW8bit(parameters()), 1)
    stray = torch.nn.Parameter(torch.zeros(3))
    optimizer.state[stray] = {"kept": torch.ones(3)}
    optimizer.register_state_dict_pre_hook(lambda one: one.state.pop(stray, None))
    assert len(optimizer.state_dict()["state"]) == len(parameters())


def test_the_state_of_a_parameter_in_no_group_is_not_saved():
    optimizer = train(lowbit_optim.AdamW8bit(parameters(shapes=[(300,), (7, 3)])), 1)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match=r"shape \(7, 3\) that is in no parameter group"):
        optimizer.state_dict()


@pytest.mark.parametrize("key", ["min_8bit_size", "state_format", "optim_bits"])
def test_odd_settings_of_storage_do_no_harm(key):
    """Storage is this optimizer's, whatever the file says."""
    saved = train(lowbit_optim.AdamW8bit(parameters()), 1).state_dict()
    saved["param_groups"][0][key] = torch.ones(2)
    loaded = lowbit_optim.AdamW8bit(parameters())
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0][key] == {"min_8bit_size": 4096, "optim_bits": 8}.get(key)


def test_hyperparameters_come_from_the_state_dict_and_storage_stays():
    saved = lowbit_optim.AdamW8bit(parameters(), lr=0.5, betas=(0.5, 0.6), min_8bit_size=7)
    loaded = lowbit_optim.AdamW(parameters(), lr=0.1, optim_bits=32, min_8bit_size=100)
    loaded.load_state_dict(saved.state_dict())
    group = loaded.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.6))
    assert (group["optim_bits"], group["min_8bit_size"]) == (32, 100)


def test_a_scheduler_before_loading_leaves_nothing_to_one_made_after_it():
    """As where a search for a learning rate ends."""
    optimizer = lowbit_optim.SGD(parameters(), lr=0.5)
    before = optimizer.state_dict()
    optimizer.param_groups[0].update(lr=1e-7, initial_lr=1e-7)
    optimizer.load_state_dict(before)
    assert optimizer.state_dict() == before
    assert torch.optim.lr_scheduler.ConstantLR(optimizer).base_lrs == [0.5]


@CLASSES
def test_a_scheduler_resumes_with_the_optimizer(case):
    def make():
        optimizer = build(case, 8, parameters())
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def run(optimizer, scheduler, first):
        for t in range(first, first + 3):
            train(optimizer, 1, first=t)
            scheduler.step()

    straight, its_scheduler = make()
    run(straight, its_scheduler, 0)
    resumed, scheduler = make()
    scheduler.load_state_dict(its_scheduler.state_dict())
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    with_values_of(straight, resumed)
    run(straight, its_scheduler, 3)
    run(resumed, scheduler, 3)
    assert identical(snapshot(straight), snapshot(resumed))


@CLASSES
def test_32_bits_to_8_and_back(case):
    wide = train(build(case, 32, parameters()), 3)
    narrow = with_values_of(wide, build(case, 8, parameters()))
    narrow.load_state_dict(wide.state_dict())
    back = with_values_of(wide, build(case, 32, parameters()))
    back.load_state_dict(narrow.state_dict())
    for p, q, r in zip(*map(all_parameters, (wide, narrow, back)), strict=True):
        for key, signed in case.moments.items():
            codes, absmax = lowbit_optim.quantize_blockwise(wide.state[p][key], signed=signed)
            assert torch.equal(narrow.state[q][key], codes)
            assert torch.equal(narrow.state[q][f"{key}_absmax"], absmax)
            decoded = lowbit_optim.dequantize_blockwise(codes, absmax, signed=signed)
            assert torch.equal(back.state[r][key], decoded)
            assert f"{key}_absmax" not in back.state[r]
    assert {int(state["step"]) for state in back.state.values()} == {3}
    train(narrow, 1)


# torch.optim.

NAMESAKES = [
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]  # fmt: skip


def pair(name, options, bits=32):
    ours = getattr(lowbit_optim, f"{name}{bits}bit")(parameters(), lr=0.01, **options)
    return ours, getattr(torch.optim, name)(parameters(), lr=0.01, **options)


@pytest.mark.parametrize(("name", "options"), NAMESAKES)
def test_torchs_state_continues_here(name, options):
    ours, theirs = pair(name, options)
    ours.param_groups[0]["lr"] = 3.0  # to be overwritten
    train(theirs, 3)
    ours.load_state_dict(saved_and_loaded(theirs.state_dict()))
    with_values_of(theirs, ours)
    train(theirs, 3, first=3)
    train(ours, 3, first=3)
    for p, q in zip(all_parameters(ours), all_parameters(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert ours.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(("name", "options"), NAMESAKES)
def test_our_32_bit_state_continues_in_torch(name, options):
    ours, theirs = pair(name, options)
    train(ours, 3)
    theirs.load_state_dict(saved_and_loaded(ours.state_dict()))
    with_values_of(ours, theirs)
    train(theirs, 3, first=3)
    train(ours, 3, first=3)
    for p, q in zip(all_parameters(ours), all_parameters(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), NAMESAKES)
def test_torchs_state_in_8_bits(name, options):
    theirs = train(pair(name, options)[1], 3)
    ours = getattr(lowbit_optim, f"{name}8bit")(parameters(), lr=0.01, min_8bit_size=1, **options)
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(all_parameters(ours), all_parameters(theirs), strict=True):
        for key in ours.state[p].keys() - {"step"}:
            is_codes = not key.endswith("_absmax")
            assert ours.state[p][key].dtype == (torch.uint8 if is_codes else torch.float32)
            assert ours.state[p][key].device == q.device


def test_torchs_sgd_before_its_first_step_with_momentum():
    theirs = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    saved = theirs.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}, 1: {"momentum_buffer": None}}
    ours = lowbit_optim.SGD8bit(parameters(), lr=0.1, momentum=0.9, min_8bit_size=1)
    ours.load_state_dict(saved)
    fresh = lowbit_optim.SGD8bit(parameters(), lr=0.1, momentum=0.9, min_8bit_size=1)
    train(ours, 2)
    train(fresh, 2)
    assert identical(snapshot(ours), snapshot(fresh))


def test_channels_last_state_of_torch_is_read_by_position():
    (p,) = parameters(shapes=[(4, 5, 6, 7)])
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    theirs = train(torch.optim.Adam([p]), 2)
    ours = lowbit_optim.Adam32bit([p])
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[p]["exp_avg"], theirs.state[p]["exp_avg"])
    assert ours.state[p]["exp_avg"].is_contiguous()


def test_a_later_gradient_finds_its_state():
    """Parameters that had no gradient when it was saved start anew."""
    a, b = params = parameters()
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
    give_gradients([b], 0)
    optimizer.step()
    c, d = others = parameters()
    loaded = lowbit_optim.AdamW8bit(others, min_8bit_size=1)
    loaded.load_state_dict(optimizer.state_dict())
    assert set(loaded.state) == {d}
    train(loaded, 1)
    assert [int(loaded.state[p]["step"]) for p in (c, d)] == [1, 2]
    assert a not in optimizer.state
