"""A state dict to be changed at random, and the changes that leave it as good as it was.

Each of `CONTROLS` takes a `Saved` and changes its `tree`, which has to load all the same; one that
finds nothing to change raises `NotHere`.
"""

import re

import numpy as np
import torch

from fuzz import NON_NEGATIVE, STORAGE, is_scale
from protocol import saved_and_loaded

REFUSED, EITHER, ACCEPTED = "refused", "either", "accepted"
CONTROLS = []


class NotHere(Exception):
    """A state dict has nothing that this damage can touch."""


class Saved:
    """A state dict in the making, with what is known of the optimizer it is for.

    Attributes:
        rng: the example's randomness.
        tree: the state dict.
        shapes: of the parameters, by index.
        family: of the optimizer.
        named: regular expressions that a refusal's message must match, each of them.
    """

    def __init__(self, rng, tree, shapes, family):
        self.rng, self.tree, self.shapes, self.family = rng, tree, shapes, family
        self.named = []

    def name(self, index, key):
        """Note that a refusal has to say this parameter, by index or shape, and this key."""
        shape = re.escape(str(tuple(self.shapes[index])))
        moment = re.sub("_absmax$|_and_sq$|_scale$", "", key)
        self.named += [rf"{shape}|\b{index}\b", re.escape(moment)]

    def keys(self, kind):
        """Where the tensors of a kind are, as (index, key)."""
        return [
            (index, key)
            for index, state in self.tree["state"].items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and kind_of(key, value) == kind
        ]

    def pick(self, *kinds, elements=1):
        """A random tensor of these kinds with so many elements at least; its place and value."""
        places = [place for kind in kinds for place in self.keys(kind)]
        places = [(i, k) for i, k in places if self.tree["state"][i][k].numel() >= elements]
        if not places:
            raise NotHere
        index, key = self.rng.choice(places)
        self.name(index, key)
        return self.tree["state"][index], key

    def any_state(self):
        """A random parameter's index that has state."""
        if not self.tree["state"]:
            raise NotHere
        return self.rng.choice(list(self.tree["state"]))

    def group(self):
        return self.rng.choice(self.tree["param_groups"])

    def put(self, place, value):
        state, key = place
        state[key] = value
        return REFUSED

    def poke(self, place, number):
        """Overwrite one element."""
        state, key = place
        value = state[key].clone()
        value.view(-1)[self.rng.randrange(value.numel())] = number
        return self.put(place, value)


def kind_of(key, value):
    """What a state's tensor is: step, gnorm, scales, codes, residual, square or wide."""
    if key == "step":
        return "step"
    if key == "gnorm_vec":
        return "gnorm"
    if is_scale(key):
        return "scales"
    if key == "master_residual":
        return "residual"
    if value.dtype == torch.uint8:
        return "codes"
    return "square" if key in NON_NEGATIVE else "wide"


def control(function):
    CONTROLS.append(function)
    return function


def changed(tree, change):
    """A tree with `change` applied to all that is neither dict nor list nor tuple."""
    if isinstance(tree, dict):
        return {key: changed(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(changed(value, change) for value in tree)
    return change(tree)


@control
def as_it_is(saved):
    pass


@control
def through_a_file(saved):
    saved.tree = saved_and_loaded(saved.tree)


@control
def tuples_for_lists(saved):
    groups = [{**g, "params": tuple(g["params"])} for g in saved.tree["param_groups"]]
    saved.tree["param_groups"] = tuple(groups)


@control
def lists_for_tuples(saved):
    for group in saved.tree["param_groups"]:
        for key, value in group.items():
            group[key] = list(value) if isinstance(value, tuple) else value


@control
def moments_of_another_float(saved):
    state, key = saved.pick("wide", "square")
    state[key] = state[key].to(saved.rng.choice([torch.float64, torch.bfloat16]))


@control
def steps_of_another_type(saved):
    change = saved.rng.choice([int, float, torch.Tensor.long, torch.Tensor.double, np.float32])
    for index, key in saved.keys("step"):
        saved.tree["state"][index][key] = change(saved.tree["state"][index][key])


@control
def without_a_header(saved):
    """As torch.optim's, or as a checkpoint library rebuilds it."""
    del saved.tree["lowbit_optim"]


@control
def without_storage_settings(saved):
    for group in saved.tree["param_groups"]:
        for key in STORAGE:
            del group[key]


@control
def without_a_history_of_norms(saved):
    state, key = saved.pick("gnorm")
    del state[key]


@control
def without_a_state(saved):
    del saved.tree["state"][saved.any_state()]


@control
def numbers_of_numpy(saved):
    """As `LambdaLR` leaves them in a group."""
    kind = saved.rng.choice([np.float32, np.float64])
    for group in saved.tree["param_groups"]:
        for key in ("lr", "weight_decay", "eps"):
            if key in group:
                group[key] = kind(group[key])


@control
def a_learning_rate_as_a_tensor(saved):
    group = saved.group()
    group["lr"] = torch.tensor(group["lr"])


@control
def other_strides(saved):
    state, key = saved.pick("codes", "wide", "square", "scales", elements=2)
    value = state[key]
    twice = torch.stack([value, value], -1)
    apart = value.mT.contiguous().mT if value.ndim > 1 else value.clone()
    state[key] = saved.rng.choice([twice[..., 0], apart])


@control
def settings_of_someone_else(saved):
    group = saved.group()
    group["initial_lr"], group["name"] = 0.5, "decoder"
