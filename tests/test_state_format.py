"""`state_format`: the format that moments are stored in by its name, beside `optim_bits`."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels.formats import FORMATS
from lowbit_optim_kernels.formats.dynamic8 import Dynamic8
from protocol import CLASSES, all_parameters, build, identical, parameters, snapshot, train

BITS_OF = {"dynamic8": 8, "float32": 32}
NAMED = pytest.mark.parametrize(("name", "bits"), BITS_OF.items())
UNKNOWN = (
    "state_format must be one of None, 'dynamic8', 'float32', 'ratio8', 'ratio4'; got 'dynamic9'"
)
CONTRADICTION = (
    "optim_bits and state_format must agree; got optim_bits=32 and state_format='dynamic8', which "
    "has 8 bits"
)


@pytest.fixture
def nibbles(monkeypatch):
    """A format of 4 bits, as `optim_bits` means none; it stores what dynamic8 does."""

    @dataclass(frozen=True)
    class Nibbles(Dynamic8):
        name: str = "nibbles"
        bits: int = 6

    monkeypatch.setitem(FORMATS, "nibbles", Nibbles())
    with lowbit_optim.use_engine("torch"):  # the others have no code for it
        yield


def adam(params=None, **options):
    return lowbit_optim.Adam(params or parameters(), min_8bit_size=1, **options)


def storage(group):
    return group["optim_bits"], group["state_format"]


def stored_bits(optimizer):
    """For each parameter the bits that its state says it has."""
    states = [optimizer.state[p] for p in all_parameters(optimizer)]
    coded = [any(x.dtype == torch.uint8 for x in state.values()) for state in states]
    return [8 if codes else 32 for codes in coded]


def refused(match, call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
        call(*args, **kwargs)
    assert str(caught.value) == match
    return True


# The constructor.


@CLASSES
def test_there_is_none_unless_it_is_given(case):
    optimizer = build(case, 8, parameters())
    assert optimizer.defaults["state_format"] is None
    assert [group["state_format"] for group in optimizer.param_groups] == [None]
    saved = optimizer.state_dict()["param_groups"][0]
    assert (saved["optim_bits"], saved["state_format"]) == (8, None)


@CLASSES
@NAMED
def test_a_name_is_the_bits_it_has(case, name, bits):
    cls = getattr(lowbit_optim, case.name)
    options = {"lr": case.lr, "min_8bit_size": 1, **case.options}
    named = train(cls(parameters(), state_format=name, **options), 3)
    other = train(cls(parameters(), optim_bits=bits, **options), 3)
    assert identical(snapshot(named)["params"], snapshot(other)["params"])
    assert identical(snapshot(named)["state"], snapshot(other)["state"])
    assert storage(named.defaults) == storage(named.param_groups[0]) == (bits, name)


def test_the_default_of_optim_bits_does_not_contradict():
    assert storage(adam(state_format="dynamic8", optim_bits=32).defaults) == (8, "dynamic8")
    args = SimpleNamespace(optim_bits=32, state_format="float32")  # which is not what args has
    assert storage(adam(state_format="dynamic8", args=args).defaults) == (8, "dynamic8")
    assert storage(adam(args=args).defaults) == (32, None)
    for eight in ({"optim_bits": 8}, {"args": SimpleNamespace(optim_bits=8)}):
        with pytest.raises(ValueError, match=r"optim_bits=8 and state_format='float32'"):
            adam(state_format="float32", **eight)
    with pytest.raises(ValueError, match="optim_bits=16"):
        adam(state_format="float32", optim_bits=16)


@CLASSES
def test_of_names_that_fix_the_bits(case):
    eight, wide = (getattr(lowbit_optim, f"{case.name}{bits}bit") for bits in (8, 32))
    options = {"lr": case.lr, **case.options}
    assert storage(eight(parameters(), state_format="dynamic8", **options).defaults)[0] == 8
    assert refused(
        f"state_format must be one of 8 bits for {case.name}8bit, got 'float32', which has 32; "
        f"use {case.name}32bit",
        eight, parameters(), state_format="float32", **options,
    )  # fmt: skip
    four = f"{case.name}4bit"  # which not every optimizer has
    assert refused(
        f"state_format must be one of 8 bits for {case.name}8bit, got 'ratio4', which has 4"
        + (f"; use {four}" if hasattr(lowbit_optim, four) else ""),
        eight, parameters(), state_format="ratio4", **options,
    )  # fmt: skip
    assert storage(wide(parameters(), state_format="float32", **options).defaults)[0] == 32
    assert refused(
        f"state_format must be one of 32 bits for {case.name}32bit, got 'dynamic8', which has 8; "
        f"use {case.name}8bit",
        wide, parameters(), state_format="dynamic8", **options,
    )  # fmt: skip
    group = {"params": parameters(), "state_format": "dynamic8"}
    assert storage(wide([group], **options).param_groups[0]) == (8, "dynamic8")


def test_an_unknown_name_is_named_with_what_there_is(manager):
    p, q = parameters()
    optimizer = adam([p])
    assert refused(UNKNOWN, adam, state_format="dynamic9")
    assert refused(UNKNOWN, lowbit_optim.Adam8bit, [p], state_format="dynamic9")
    assert refused(UNKNOWN, optimizer.add_param_group, {"params": [q], "state_format": "dynamic9"})
    assert refused(UNKNOWN, manager.override_config, p, "state_format", "dynamic9")
    optimizer.param_groups[0]["state_format"] = "dynamic9"
    assert refused(UNKNOWN, train, optimizer, 1)
    assert len(optimizer.param_groups) == 1


def test_a_format_of_bits_that_mean_none(nibbles):
    optimizer = train(adam(state_format="nibbles"), 2)
    assert storage(optimizer.param_groups[0]) == (6, "nibbles")
    with pytest.raises(ValueError, match="optim_bits must be one of 4, 8, 32; got 6"):
        adam(optim_bits=6)
    optimizer.param_groups[0]["optim_bits"] = 6
    train(optimizer, 1)
    optimizer.param_groups[0]["optim_bits"] = 16
    with pytest.raises(ValueError, match="optim_bits must be one of 4, 8, 32; got 16"):
        train(optimizer, 1)
    optimizer.param_groups[0]["optim_bits"] = 6
    train(optimizer, 1)
    assert storage(optimizer.param_groups[0]) == (6, "nibbles")


# Parameter groups.


@pytest.mark.parametrize(
    ("given", "own", "ends"),
    [
        ({}, {"state_format": "dynamic8"}, (8, "dynamic8")),
        ({}, {"state_format": "dynamic8", "optim_bits": 8}, (8, "dynamic8")),
        ({"optim_bits": 8}, {"state_format": "float32"}, (32, "float32")),
        ({"state_format": "dynamic8"}, {}, (8, "dynamic8")),
        ({"state_format": "dynamic8"}, {"optim_bits": 8}, (8, "dynamic8")),
        ({"state_format": "dynamic8"}, {"optim_bits": 32}, (32, None)),
        ({"state_format": "dynamic8"}, {"state_format": None}, (8, None)),
        ({"state_format": "dynamic8"}, {"state_format": "float32"}, (32, "float32")),
        ({"state_format": "float32"}, {"optim_bits": 8}, (8, None)),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_group_of_its_own(given, own, ends, later):
    p, q = parameters()
    group = {"params": [q], **own}
    optimizer = adam([{"params": [p]}, *([] if later else [group])], **given)
    if later:
        optimizer.add_param_group(group)
    assert storage(optimizer.param_groups[1]) == ends
    assert stored_bits(train(optimizer, 1)) == [optimizer.defaults["optim_bits"], ends[0]]


@CLASSES
def test_a_group_that_contradicts_itself(case):
    group = {"params": parameters(), "optim_bits": 32, "state_format": "dynamic8"}
    assert refused(CONTRADICTION, build, case, 8, [group])
    optimizer = build(case, 8, parameters())
    assert refused(CONTRADICTION, optimizer.add_param_group, group)
    assert len(optimizer.param_groups) == 1


def test_a_group_that_is_refused_stays_as_it_was():
    """So that it can be put right and added after all."""
    optimizer, group = adam(), {"params": parameters(), "state_format": "ratio8", "lr": -1.0}
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.add_param_group(group)
    group.update(lr=1.0, state_format="ratio4")
    optimizer.add_param_group(group)
    assert storage(optimizer.param_groups[1]) == (4, "ratio4")


# Between steps.


@CLASSES
@pytest.mark.parametrize("given", [{}, {"state_format": "dynamic8"}])
@pytest.mark.parametrize(
    "key_and_values", [("optim_bits", BITS_OF.values()), ("state_format", BITS_OF)]
)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_a_change_converts_at_the_next_step(case, given, key_and_values, steps, tensor_lr):
    lr = torch.tensor(case.lr) if tensor_lr else case.lr
    cls = getattr(lowbit_optim, case.name)
    options = {**case.options, "lr": lr, "min_8bit_size": 1}
    optimizer = train(cls(parameters(), **options, **given), steps)
    (group,) = optimizer.param_groups
    key, values = key_and_values
    for value, (name, bits) in zip(values, BITS_OF.items(), strict=True):
        group[key] = value
        train(optimizer, 2, first=1)
        assert stored_bits(optimizer) == [bits, bits]
        assert group["optim_bits"] == bits
        assert group["state_format"] in (None, name)


def test_of_two_changes_that_contradict_nothing_is_done():
    optimizer = train(adam(state_format="dynamic8"), 1)
    (group,) = optimizer.param_groups
    group.update(optim_bits=8, state_format="float32")
    train(optimizer, 1)  # only one has been changed
    assert storage(group) == (32, "float32")
    group.update(optim_bits=32, state_format="dynamic8")
    group["optim_bits"] = 16
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="optim_bits=16 and state_format='dynamic8'"):
        train(optimizer, 1)
    assert identical(snapshot(optimizer), before)
    group["optim_bits"] = 8
    assert stored_bits(train(optimizer, 1)) == [8, 8]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_knows_what_a_change_starts_from(copied):
    for key, value, bits in (("optim_bits", 32, 32), ("state_format", "float32", 32)):
        optimizer = copied(train(adam(state_format="dynamic8"), 1))
        optimizer.param_groups[0][key] = value
        assert stored_bits(train(optimizer, 1)) == [bits, bits]


# Overrides.


@CLASSES
@NAMED
def test_an_override(case, manager, name, bits):
    params = parameters()
    manager.override_config(params[0], "state_format", name)
    optimizer = train(build(case, 40 - bits, params), 2)
    assert stored_bits(optimizer) == [bits, 40 - bits]


def test_an_override_of_bits_in_an_optimizer_with_a_format(manager):
    params = parameters()
    manager.override_config(params[0], "optim_bits", 32)
    assert stored_bits(train(adam(params, state_format="dynamic8"), 2)) == [32, 8]


def test_of_two_overrides_the_later_counts(manager):
    p, q = params = parameters()
    manager.override_config(p, "state_format", "dynamic8")
    manager.override_config(p, "optim_bits", 32)
    manager.override_config(q, "optim_bits", 32)
    manager.override_config(q, "state_format", "dynamic8")
    assert stored_bits(train(adam(params), 1)) == [32, 8]


def test_an_override_that_contradicts_itself(manager):
    (p, _) = parameters()
    both = {"optim_bits": 32, "state_format": "dynamic8"}
    assert refused(CONTRADICTION, manager.override_config, p, key_value_dict=both)
    assert stored_bits(train(adam([p]), 1)) == [32]


# Checkpoints.


@CLASSES
@NAMED
def test_a_load_keeps_the_format_at_hand(case, name, bits):
    saved = train(build(case, 40 - bits, parameters()), 2).state_dict()
    cls = getattr(lowbit_optim, case.name)
    options = {"lr": case.lr, **case.options, "min_8bit_size": 1}
    optimizer = cls(parameters(), state_format=name, **options)
    optimizer.load_state_dict(saved)
    assert storage(optimizer.param_groups[0]) == (bits, name)
    assert stored_bits(train(optimizer, 1, first=2)) == [bits, bits]


@pytest.mark.parametrize(("key", "value"), [("optim_bits", 32), ("state_format", "float32")])
def test_a_load_into_a_format_that_has_just_been_changed(key, value):
    saved = train(adam(state_format="dynamic8"), 2).state_dict()
    optimizer = adam(state_format="dynamic8")
    optimizer.param_groups[0][key] = value
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["optim_bits"] == 32
    assert stored_bits(optimizer) == [32, 32]


@CLASSES
def test_what_an_earlier_version_wrote_has_no_such_setting(case):
    optimizer = train(build(case, 8, parameters()), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["state_format"]
    fresh = build(case, 8, parameters())
    fresh.load_state_dict(saved)
    assert storage(fresh.param_groups[0]) == (8, None)
    pickled = optimizer.__getstate__()
    del pickled["defaults"]["state_format"], pickled["param_groups"][0]["state_format"]
    unpickled = type(optimizer).__new__(type(optimizer))
    unpickled.__setstate__(pickled)
    train(unpickled, 1)
    assert storage(unpickled.param_groups[0]) == storage(unpickled.defaults) == (8, None)
    unpickled.add_param_group({"params": parameters(seed=1)})


@pytest.mark.parametrize(
    "source",
    [torch.optim.AdamW, torch.optim.SGD, lowbit_optim.Lion8bit, lowbit_optim.Adam8bit,
     lowbit_optim.LAMB8bit],
)  # fmt: skip
def test_what_another_optimizer_pickles_is_refused(source):
    """`load_state_dict` is where the states of others are converted, or refused by their family."""
    target = train(lowbit_optim.AdamW8bit(parameters(seed=1)), 1)
    before = snapshot(target)
    other = train(source(parameters(), lr=0.1), 1).__getstate__()
    groups = copy.deepcopy(other["param_groups"])
    with pytest.raises(ValueError, match=r"^AdamW8bit.__setstate__ takes .* load_state_dict"):
        target.__setstate__(other)
    assert identical(snapshot(target), before)
    assert target.defaults.keys() <= before["groups"][0].keys()
    assert identical(groups, other["param_groups"])


@pytest.mark.parametrize("taken", ["defaults", "param_groups"])
def test_torchs_pickle_is_no_pickle_of_this_package(taken):
    state = torch.optim.AdamW(parameters()).__getstate__()
    unpickled = lowbit_optim.AdamW8bit.__new__(lowbit_optim.AdamW8bit)
    with pytest.raises(ValueError, match=r"^AdamW8bit.__setstate__ .* lacks 'optim_bits'; from"):
        unpickled.__setstate__({"state": {}, taken: state[taken]})
    assert not vars(unpickled)


def test_torch_has_no_such_setting():
    params = parameters()
    other = train(torch.optim.AdamW(params), 1)
    optimizer = lowbit_optim.AdamW(params, state_format="dynamic8", min_8bit_size=1)
    optimizer.load_state_dict(other.state_dict())
    assert storage(optimizer.param_groups[0]) == (8, "dynamic8")
    assert stored_bits(train(optimizer, 1)) == [8, 8]


@pytest.mark.parametrize("before", ["dynamic8", "ratio8", "float32"])
@pytest.mark.parametrize("after", ["dynamic8", "ratio8", "float32"])
def test_a_moment_that_was_left_behind_in_another_format(before, after):
    """The largest squares wait in the old format until they are kept again."""
    (p,) = params = [torch.nn.Parameter(torch.ones(64, 64))]
    optimizer = lowbit_optim.Adam(params, amsgrad=True, state_format=before)
    (group,) = optimizer.param_groups
    for settings in ({}, {"amsgrad": False}, {"state_format": after}, {"amsgrad": True}):
        group.update(settings)
        p.grad = torch.full_like(p, 0.1)
        optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[p]
