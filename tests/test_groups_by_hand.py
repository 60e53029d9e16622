"""Parameter groups that somebody else than `add_param_group` has made or changed."""

import numpy as np
import pytest
import torch

import lowbit_optim
from lowbit_optim._parameter_numbers import ParameterNumbers
from protocol import CLASSES, all_parameters, build, identical, parameters, snapshot, train
from test_settings import refused_by_a_step


def constants(optimizer):
    """The settings that have one value in all groups of a class."""
    return optimizer.FIXED.keys() - {optimizer.MODE}


@CLASSES
@pytest.mark.parametrize("steps", [0, 1])
def test_a_group_that_lacks_a_setting(case, steps):
    """As one that was put into the list by hand; a load gives it those of the file."""
    optimizer = train(build(case, 8, parameters()), 1)
    complete = optimizer.state_dict()
    for key in complete["param_groups"][0].keys() - {"params"} - constants(optimizer):
        optimizer = train(build(case, 8, parameters()), steps)
        value = optimizer.param_groups[0].pop(key)
        lacks = f"parameter group 0 must have every setting of the optimizer, and lacks '{key}'"
        assert refused_by_a_step(optimizer, lacks)
        switches = [optimizer.train, optimizer.eval] if hasattr(optimizer, "eval") else []
        for use in (optimizer.rule, optimizer.moments, *switches) if case.fused else ():
            with pytest.raises(ValueError, match=lacks):
                use()
        optimizer.param_groups[0][key] = value
        train(optimizer, 1)
    del optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(complete)
    train(optimizer, 1)


@CLASSES
@pytest.mark.parametrize("steps", [0, 1])
def test_groups_that_a_wrapper_makes_of_the_defaults(case, steps):
    """As BAdam does, of which a block of layers is trained at a time."""
    results = []
    for remade in (False, True):
        optimizer = train(build(case, 8, parameters()), steps)
        (group,) = optimizer.param_groups
        mode = {key: group[key] for key in {optimizer.MODE} & group.keys()}
        if remade:
            optimizer.param_groups = [{"params": group["params"], **optimizer.defaults, **mode}]
            assert constants(optimizer).isdisjoint(optimizer.param_groups[0])
            optimizer.state_dict()
            assert constants(optimizer).isdisjoint(optimizer.param_groups[0])
        results.append(snapshot(train(optimizer, 2)))
        optimizer.load_state_dict(optimizer.state_dict())
    assert identical(*results)


@CLASSES
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_of_two_groups(case, steps):
    """As one that was put into the list by hand; add_param_group refuses it."""
    groups = [{"params": parameters()}, {"params": parameters()}]
    optimizer = train(build(case, 8, groups), steps)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"][0])
    where = "a parameter of shape (12, 70) is in parameter groups 0 and 1; it can be in one only"
    for _ in range(2):
        assert refused_by_a_step(optimizer, where)
    optimizer.param_groups[1]["params"].pop()
    train(optimizer, 1)


def set_to(name, value):
    return lambda optimizer: optimizer.param_groups[1].update({name: value})


def add_to_the_first(optimizer):
    optimizer.param_groups[0]["params"].append(parameters(torch.bfloat16, [(70,)])[0])


def move_to_the_second(optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())


CHANGES = {
    "a seed": ({}, set_to("seed", 5)),
    "min_8bit_size": ({}, set_to("min_8bit_size", 10**6)),
    "master_weight_bits": ({}, set_to("master_weight_bits", 24)),
    "those of a plan of its own": ({"optim_bits": 32}, set_to("master_weight_bits", 24)),
    "a parameter that has another group": ({}, move_to_the_second),
    "numbers of parameters": ({"optim_bits": 32}, add_to_the_first),
}


@pytest.mark.parametrize(("first", "change"), CHANGES.values(), ids=CHANGES)
def test_what_is_changed_between_steps_counts_in_the_next(first, change):
    found = []
    for changes, anew in ((True, False), (True, True), (False, True)):
        groups = [{"params": parameters(torch.bfloat16), "lr": 0.1, **first}]
        groups.append({"params": parameters(torch.bfloat16, seed=1)})
        optimizer = train(lowbit_optim.AdamW(groups, optim_bits=8, min_8bit_size=1), 2)
        before = [p for group in optimizer.param_groups for p in group["params"]]
        if changes:
            change(optimizer)
        if anew:
            optimizer.plans.clear()
        train(optimizer, 2, first=2)
        found.append((snapshot(optimizer), [p.detach().clone() for p in before]))
    (kept, weights), (made, _), (_, unchanged) = found
    assert identical(kept, made)
    assert not identical(weights, unchanged)


def test_bits_that_are_changed_after_a_load_count_alone():
    saved = train(lowbit_optim.AdamW(parameters(), state_format="ratio8"), 1).state_dict()
    optimizer = lowbit_optim.AdamW(parameters(), state_format="ratio8")
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["optim_bits"] = 32
    train(optimizer, 1)
    assert optimizer.param_groups[0]["state_format"] is None


IN_PLACE = {
    "a tensor": (lambda x: {"lr": torch.tensor(x)}, lambda given, x: given["lr"].fill_(x)),
    "an array": (lambda x: {"lr": np.array(x)}, lambda given, x: given["lr"].fill(x)),
    "a list": (lambda x: {"betas": [x, 0.5]}, lambda given, x: given["betas"].__setitem__(0, x)),
    "a tensor in a tuple": (
        lambda x: {"betas": (torch.tensor(x), 0.5)}, lambda given, x: given["betas"][0].fill_(x)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "change"), IN_PLACE.values(), ids=IN_PLACE)
def test_what_is_changed_in_place_counts_in_the_next(make, change):
    """Whoever keeps what a group was given in hand need not put it there again."""
    found = []
    for in_place in (True, False):
        optimizer = lowbit_optim.AdamW8bit(parameters(), min_8bit_size=1)
        (group,) = optimizer.param_groups
        group.update(make(0.5))
        for t, x in enumerate((0.5, 0.25, 0.125)):
            change(group, x) if in_place else group.update(make(x))
            train(optimizer, 1, first=t)
        found.append(snapshot(optimizer)["params"])
    assert identical(*found)


def test_a_learning_rate_may_be_that_of_an_earlier_step_again():
    """The very object, as where a schedule takes turns between two that it holds."""
    high, low = 0.5, 0.125
    found = []
    for same in (True, False):
        optimizer = lowbit_optim.AdamW8bit(parameters(), lr=high, min_8bit_size=1)
        for t, x in enumerate((high, low, high, low, low, high)):
            optimizer.param_groups[0]["lr"] = x if same else float(str(x))
            train(optimizer, 1, first=t)
        found.append(snapshot(optimizer)["params"])
    assert identical(*found)


def test_the_first_place_of_a_parameter_that_is_listed_twice_counts():
    """As in torch's state dicts; its random bits follow from that."""
    p, q = parameters(shapes=((3,), (4,)))
    groups, numbers = [{"params": [p, q, p]}], ParameterNumbers()
    assert numbers.place_of(p, groups) == (0, 0, 0)
    groups[0]["params"].insert(0, q)
    assert numbers.place_of(p, groups) == (1, 0, 1)


def test_the_last_change_of_bits_or_format_counts():
    """Also after another one, and where it leads back to what the group had at first."""
    optimizer = lowbit_optim.AdamW(parameters(), optim_bits=8, min_8bit_size=1)
    (group,) = optimizer.param_groups
    for change, then in (
        ({"state_format": "ratio4"}, (4, "ratio4")),
        ({"optim_bits": 8}, (8, None)),
        ({"state_format": "ratio8"}, (8, "ratio8")),
        ({"optim_bits": 32}, (32, None)),
        ({"state_format": "ratio4"}, (4, "ratio4")),
    ):
        group.update(change)
        train(optimizer, 1)
        assert (group["optim_bits"], group["state_format"]) == then


def test_places_follow_lists_between_steps():
    """As of parameters that are stepped one by one; what has gone is let go in the next step."""
    p, q, r = parameters(shapes=((3,), (4,), (5,)))
    groups, numbers = [{"params": [p]}, {"params": [q]}], ParameterNumbers()
    assert numbers.renew([p, q], groups)
    assert numbers.place_of(q, groups) == (1, 1, 0)
    groups[0]["params"].insert(0, r)
    assert numbers.place_of(q, groups) == (2, 1, 0)
    groups.pop()
    assert numbers.place_of(q, groups) is None
    assert numbers.place_of(p, groups) == (1, 0, 1)
    groups[0]["params"].pop()
    assert numbers.place_of(p, groups) is None
    assert numbers.renew([r], groups)
    assert not numbers.places


@pytest.mark.parametrize("name", ["SGD32bit", "LARS32bit"])
def test_a_group_that_inherits_nesterovs_momentum_may_have_none(name):
    """As in torch.optim, which steps it plainly; one that asks for it itself is refused."""
    taken = []
    for cls in (getattr(lowbit_optim, name), torch.optim.SGD):
        own = {"max_unorm": 0.0} if cls is lowbit_optim.LARS32bit else {}
        first, *rest = parameters()
        groups = [{"params": [first], "momentum": 0.0}, {"params": rest, "dampening": 0.1}]
        optimizer = cls(groups, lr=0.1, momentum=0.9, nesterov=True, **own)
        train(optimizer, 3)
        taken.append([p.detach() for p in all_parameters(optimizer)])
    torch.testing.assert_close(*taken)
    cls = getattr(lowbit_optim, name)
    for asks in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
            cls([{"params": parameters(), "nesterov": True, **asks}], lr=0.1)
