"""Damages of a state dict, generated.

Each of `DAMAGES` takes a `Saved`, changes its `tree` somewhere at random and returns what has to
become of it. What a damage touches is noted in `named`: a refusal has to say it. A damage that
finds nothing to touch raises `NotHere`.
"""

import re

import numpy as np
import torch

from fuzz_saved import EITHER, REFUSED, NotHere
from fuzz_settings import BAD_WHEN_SAVED, INF, NAN

DAMAGES = []
SGD_LIKE = ("SGD", "LARS")  # torch.optim.SGD counts no steps
MISSING = object()


def damage(function):
    DAMAGES.append(function)
    return function


# Numbers that cannot be.


@damage
def a_scale_that_is_no_scale(saved):
    number = saved.rng.choice([NAN, INF, -INF, -1.0, -1e-30])
    return saved.poke(saved.pick("scales"), number)


def needs_finite_moments(saved):
    """Lion's weights and cautious ones outlast a moment that is not finite, so it is taken."""
    groups = saved.tree["param_groups"]
    if saved.family == "Lion" or any(group.get("cautious") for group in groups):
        raise NotHere


@damage
def a_moment_that_is_not_finite(saved):
    needs_finite_moments(saved)
    return saved.poke(saved.pick("wide", "square"), saved.rng.choice([NAN, -INF]))


@damage
def an_infinite_moment(saved):
    """An infinite square divides: its weight stands still, as in torch.optim."""
    needs_finite_moments(saved)
    verdict = saved.poke(saved.pick("wide"), INF) if saved.rng.random() < 0.5 else None
    return verdict or (saved.poke(saved.pick("square"), INF) and EITHER)


@damage
def a_negative_square(saved):
    return saved.poke(saved.pick("square"), saved.rng.choice([-1.0, -1e-20, -INF]))


@damage
def a_history_of_norms_that_cannot_be(saved):
    return saved.poke(saved.pick("gnorm"), saved.rng.choice([NAN, INF, -INF, -0.5]))


@damage
def a_step_that_counts_nothing(saved):
    place = saved.pick("step")
    bad = [NAN, INF, -INF, -1.0, 2.5, 1e-3]
    number = saved.rng.choice(bad)
    return saved.put(place, saved.rng.choice([number, torch.tensor(number)]))


@damage
def a_step_of_another_type(saved):
    bad = ["3", "three", True, [3.0], (3,), {}, 3j, torch.tensor(3j), torch.ones(2), torch.ones(0),
           torch.tensor(True), b"3", torch.ones(1, 1, 2)]  # fmt: skip
    return saved.put(saved.pick("step"), saved.rng.choice(bad))


@damage
def a_step_that_is_missing(saved):
    state, key = saved.pick("step")
    state.pop(key) if saved.rng.random() < 0.5 else state.update({key: None})
    return EITHER if saved.family in (*SGD_LIKE, "Lion") else REFUSED


@damage
def a_step_that_is_unlikely(saved):
    bad = [
        0.0,
        1e15,
        2**24 + 2,
        torch.tensor(2**40),
        torch.ones(1),
        torch.tensor(5, dtype=torch.int8),
    ]
    saved.put(saved.pick("step"), saved.rng.choice(bad))
    return EITHER


@damage
def other_codes(saved):
    """No one can tell: a checkpoint has no checksum."""
    state, key = saved.pick("codes")
    size = state[key].shape
    values = [saved.rng.randrange(256) for _ in range(size.numel())]
    state[key] = torch.tensor(values, dtype=torch.uint8).reshape(size)
    return EITHER


@damage
def state_that_is_zero(saved):
    state, key = saved.pick("wide", "square", "scales", "codes", "gnorm")
    state[key] = torch.zeros_like(state[key])
    return EITHER


@damage
def moments_of_another_parameter(saved):
    """Where both have one shape, no one can tell."""
    places = [(i, k) for kind in ("codes", "square", "wide") for i, k in saved.keys(kind)]
    state = saved.tree["state"]
    pairs = [
        (a, b, key)
        for a, key in places
        for b, other in places
        if a < b and key == other and state[a][key].shape == state[b][key].shape
    ]
    if not pairs:
        raise NotHere
    a, b, key = saved.rng.choice(pairs)
    state[a][key], state[b][key] = state[b][key], state[a][key]
    return EITHER


# Tensors of another type, layout, device or shape.


@damage
def codes_of_another_dtype(saved):
    bad = [torch.int64, torch.int8, torch.float32, torch.float64, torch.complex64, torch.bool]
    place = saved.pick("codes", elements=0)
    return saved.put(place, place[0][place[1]].to(saved.rng.choice(bad)))


@damage
def a_moment_of_another_dtype(saved):
    bad = [torch.int64, torch.int32, torch.complex64, torch.complex128, torch.bool, torch.uint8]
    place = saved.pick("wide", "square", elements=0)
    return saved.put(place, place[0][place[1]].to(saved.rng.choice(bad)))


@damage
def scales_of_another_dtype(saved):
    bad = [torch.int64, torch.complex64, torch.bool, torch.uint8]
    place = saved.pick("scales")
    return saved.put(place, place[0][place[1]].to(saved.rng.choice(bad)))


@damage
def scales_of_another_float(saved):
    place = saved.pick("scales")
    kind = saved.rng.choice([torch.float16, torch.bfloat16, torch.float64])
    saved.put(place, place[0][place[1]].to(kind))
    return EITHER


@damage
def a_history_of_another_dtype(saved):
    place = saved.pick("gnorm")
    kind = saved.rng.choice([torch.complex64, torch.bool])
    return saved.put(place, place[0][place[1]].to(kind))


@damage
def a_residual_of_another_dtype(saved):
    bad = [torch.int64, torch.float32, torch.bool, torch.complex64, torch.uint8]
    place = saved.pick("residual", elements=0)
    return saved.put(place, place[0][place[1]].to(saved.rng.choice(bad)))


@damage
def on_the_meta_device(saved):
    place = saved.pick("codes", "wide", "square", "scales", "step", "gnorm", "residual")
    return saved.put(place, place[0][place[1]].to("meta"))


@damage
def a_sparse_tensor(saved):
    state, key = place = saved.pick("codes", "wide", "square", "scales", "gnorm", "residual")
    return saved.put(place, state[key].to_sparse())


@damage
def another_shape(saved):
    state, key = place = saved.pick(
        "codes", "wide", "square", "scales", "gnorm", "residual", elements=2
    )
    value = state[key]
    longer = torch.cat([value.flatten(), value.flatten()[:1]])
    changed = [value.flatten(), value.mT if value.ndim > 1 else value[None], value[..., None],
               value[:-1] if value.ndim else value[None], longer, value.flatten()[0]]  # fmt: skip
    changed = [x for x in changed if x.shape != value.shape]
    return saved.put(place, saved.rng.choice(changed).clone())


@damage
def no_tensor(saved):
    state, key = place = saved.pick("codes", "wide", "square", "scales", "gnorm", "residual")
    bad = [1.0, 3, "x", True, {}, [], state[key].tolist(), np.array(state[key].tolist()), object]
    return saved.put(place, saved.rng.choice(bad))


@damage
def a_tensor_that_requires_grad(saved):
    state, key = place = saved.pick("wide", "square", "scales", "step", "gnorm")
    leaf = state[key].clone().requires_grad_()
    with torch.enable_grad():
        saved.put(place, saved.rng.choice([leaf, leaf * 1, torch.nn.Parameter(leaf.detach())]))
    return EITHER


# Keys.


@damage
def a_key_that_is_missing(saved):
    state, key = saved.pick("codes", "wide", "square", "scales", elements=0)
    state.pop(key) if saved.rng.random() < 0.5 else state.update({key: None})
    return REFUSED


@damage
def a_residual_that_is_missing(saved):
    """As where weights are loaded without their masters."""
    state, key = saved.pick("residual", elements=0)
    state.pop(key) if saved.rng.random() < 0.5 else state.update({key: None})
    return EITHER


@damage
def a_key_too_many(saved):
    value = saved.rng.choice([torch.full((3,), 2.0), "x", None, [1], object(), torch.ones(2)])
    key = saved.rng.choice(["extra", "extra_absmax", "exp_avg_absmax", "exp_avg_slow", 7, None])
    index = saved.any_state()
    saved.tree["state"][index].setdefault(key, value)
    return EITHER


@damage
def state_under_another_key(saved):
    index = saved.any_state()
    other = saved.rng.choice([str(index), 99, -1, None, (index,), index + 0.5, b"0", f"p.{index}"])
    saved.tree["state"][other] = saved.tree["state"].pop(index)
    saved.named += [re.escape(repr(other)), "state|parameter"]
    return REFUSED


@damage
def state_under_string_keys(saved):
    """As JSON and some checkpoint libraries write it: nothing would be loaded."""
    saved.any_state()
    saved.tree["state"] = {str(index): state for index, state in saved.tree["state"].items()}
    saved.named += ["state|parameter", "'[0-9]'"]
    return REFUSED


@damage
def a_state_that_is_no_dict(saved):
    index = saved.any_state()
    bad = ["state", [1], 5, torch.ones(3), [], 0, "", (), torch.zeros(()), True]
    saved.tree["state"][index] = saved.rng.choice(bad)
    saved.named += [rf"\b{index}\b|{re.escape(str(tuple(saved.shapes[index])))}"]
    return REFUSED


@damage
def a_state_that_is_empty(saved):
    saved.tree["state"][saved.any_state()] = saved.rng.choice([None, {}])
    return EITHER


# Groups and their settings.


@damage
def groups_that_are_none(saved):
    groups = saved.tree["param_groups"]
    bad = [None, {}, dict(enumerate(groups)), "groups", 3, [], [*groups, groups[0]], [None],
           [[] for _ in groups], ["g" for _ in groups], [list(g.items()) for g in groups],
           MISSING]  # fmt: skip
    value = saved.rng.choice(bad)
    saved.tree["param_groups"] = value
    if value is MISSING:
        del saved.tree["param_groups"]
    saved.named += ["group"]
    return REFUSED


@damage
def members_that_are_none(saved):
    group = saved.group()
    members = group["params"]
    bad = [None, 5, "0", {}, members[:-1], [*members, 77], [members[0]] * (len(members) + 1),
           [None] * len(members), [str(i) for i in members], [[i] for i in members],
           [torch.ones(2) for _ in members], [i + 0.5 for i in members], MISSING]  # fmt: skip
    if len(members) > 1:
        bad.append([members[0]] * len(members))
    value = saved.rng.choice(bad)
    group["params"] = value
    if value is MISSING:
        del group["params"]
    saved.named += ["param"]
    return REFUSED


@damage
def a_bad_setting(saved):
    group = saved.group()
    key = saved.rng.choice([key for key in BAD_WHEN_SAVED if key in group])
    group[key] = saved.rng.choice(BAD_WHEN_SAVED[key])
    saved.named.append(key)
    return REFUSED


@damage
def any_setting_of_any_type(saved):
    group = saved.group()
    key = saved.rng.choice([key for key in group if key not in ("params", "fused")])
    group[key] = saved.rng.choice([-1, NAN, "x", None, [], {}, 1e400, 3j, torch.ones(2), object(),
                                   True, 0, 1, 2, (0.1, 0.2), np.ones(2), b"x"])  # fmt: skip
    saved.named.append(key)
    return EITHER


@damage
def settings_missing_or_too_many(saved):
    group = saved.group()
    if saved.rng.random() < 0.5:
        key = saved.rng.choice([key for key in group if key != "params"])
        del group[key]
    else:
        group[saved.rng.choice(["note", "initial_lr", 3])] = saved.rng.choice([None, "x", NAN])
    return EITHER


# The whole and its header.


@damage
def a_header_that_is_none(saved):
    head = saved.tree["lowbit_optim"]
    bad = [
        [],
        "x",
        3,
        {},
        [1],
        list(head.items()),
        {"format_version": 1},
        {"optimizer": saved.family},
        torch.ones(2),
        {"format_version": None, **head},
        *({**head, "format_version": v} for v in ("1", "x", None, 1.5, NAN, 3, 10**9, [1], 1j)),
        *({**head, "optimizer": v} for v in (None, 3, "", "Adafactor", [saved.family])),
    ]
    saved.tree["lowbit_optim"] = saved.rng.choice([b for b in bad if b != head])
    saved.named.append("format_version|optimizer|lowbit_optim")
    return REFUSED


@damage
def a_header_that_may_be(saved):
    head = saved.tree["lowbit_optim"]
    maybe = [
        None,
        *({**head, "format_version": v} for v in (1.0, 0, -1, True)),
        {**head, "more": 1},
    ]
    saved.tree["lowbit_optim"] = saved.rng.choice(maybe)
    return EITHER


@damage
def no_state(saved):
    bad = [None, [], "state", 3, list(saved.tree["state"].items()), torch.ones(2), MISSING, (), 0]
    saved.tree["state"] = value = saved.rng.choice(bad)
    if value is MISSING:
        del saved.tree["state"]
    saved.named.append("state")
    return REFUSED


@damage
def no_state_dict(saved):
    saved.tree = saved.rng.choice([None, [], "x", 3, {}, ["state"], torch.ones(2)])
    return REFUSED
