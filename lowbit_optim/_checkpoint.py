"""State dicts: the header, and how saved state is fitted to a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowbit_optim_kernels.formats import Format
from lowbit_optim_kernels.plan import STEP_DTYPE
from lowbit_optim_kernels.rules import Lasting, Moment
from lowbit_optim_kernels.rules.shared import NORMS
from lowbit_optim_kernels.weights import RESIDUAL_KEY, Weights, as_integers, converted

from . import _manager, _saved, _state
from ._settings import plain

KEY = "lowbit_optim"
FORMAT_VERSION = 2
EXACT_IN_FP32 = 2**24  # every whole number up to here
MOST_STEPS = 2**53  # and up to here in fp64
# Settings of the optimizer at hand, not of the file.
STORAGE_SETTINGS = ("optim_bits", "state_format", "min_8bit_size", "master_weight_bits")


def add_header(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A hook, and the first one, so that a user's hooks are given all that is saved."""
    state_dict[KEY] = {"format_version": FORMAT_VERSION, "optimizer": optimizer.family}
    state_dict["param_groups"] = plain(state_dict["param_groups"])
    state_dict["state"] = {i: _with_saved_step(i, x) for i, x in state_dict["state"].items()}


def _with_saved_step(index: Any, one: Any) -> Any:
    """A parameter's state with `step` as torch's optimizers save it, whatever else it is.

    In memory it is an integer, because fp32 stops counting at 2**24.
    """
    is_state = isinstance(index, int) and isinstance(one, Mapping)
    counts = is_state and isinstance(one.get("step"), Tensor)
    return {**one, "step": saved_step(one["step"])} if counts else one


def saved_step(step: Tensor) -> Tensor:
    """A count of steps in fp32 while that is exact, in a tensor of its own."""
    return step.to(torch.float32 if int(step) <= EXACT_IN_FP32 else torch.float64)


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Say of what is refused inside where it is; a ValueError whatever it was."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def after_hooks(optimizer: Any, state_dict: Any) -> Any:
    """A state dict as the hooks that run before it is loaded leave it."""
    if isinstance(state_dict, Mapping):
        state_dict = dict(state_dict)  # a hook may change its keys
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    return state_dict


def check_header(state_dict: Any, family: str, known: Collection[str]) -> None:
    """Refuse what is no state dict, one of a newer format or of another optimizer.

    Args:
        state_dict: what is to be loaded.
        family: the optimizer's.
        known: what its parameter groups hold; a user may have put more there than it reads.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict has no {key!r}; it is not an optimizer's state dict")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError(f"state_dict['state'] must be a dict, got {_named(state_dict['state'])}")
    check_groups(state_dict["param_groups"])
    head = state_dict.get(KEY)
    if head is None:
        _check_without_header(state_dict, family, known)
        return
    if not isinstance(head, Mapping) or not {"format_version", "optimizer"} <= head.keys():
        raise ValueError(
            f"state_dict[{KEY!r}] must be a dict with format_version and optimizer; got {head!r}"
        )
    version = head["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"state_dict has format_version {version!r}; it must be an integer >= 1")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"state_dict has format_version {version}, newer than the "
            f"{FORMAT_VERSION} that this lowbit_optim reads; update lowbit_optim"
        )
    if head["optimizer"] != family:
        raise ValueError(
            f"state_dict is of the optimizer {head['optimizer']!r} and cannot be loaded into "
            f"{family!r}"
        )


def _check_without_header(
    state_dict: Mapping[str, Any], family: str, known: Collection[str]
) -> None:
    """Refuse what is neither torch.optim's nor ours, rebuilt by a checkpoint library.

    That is settings of another optimizer, or a momentum that contains the learning rate, as that of
    timm's RMSpropTF does.
    """
    keys = {key for group in state_dict["param_groups"] for key in group}
    foreign = (keys & _manager.all_settings()).difference(known)
    if foreign:
        raise ValueError(
            f"state_dict is of another optimizer than {family!r}, which has no "
            f"{', '.join(sorted(foreign))}"
        )
    for group in state_dict["param_groups"]:
        params = group["params"] if group.get("lr_in_momentum") else ()
        states = map(state_dict["state"].get, params)
        if any(isinstance(one, Mapping) and "momentum_buffer" in one for one in states):
            raise ValueError(
                "state_dict has lr_in_momentum=True, as of timm's RMSpropTF: its momentum_buffer "
                "contains the learning rate, which here it does not; delete momentum_buffer from "
                "the states to begin with a new one"
            )


def _named(value: Any) -> str:
    """A value that should have been something else, in a few words."""
    return "None" if value is None else f"a {type(value).__name__}"


def check_groups(groups: Any) -> None:
    """Refuse parameter groups that are not a list of dicts, each with a list of parameters."""
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"state_dict['param_groups'] must be a list, got {_named(groups)}")
    for i, group in enumerate(groups):
        where = f"parameter group {i} of state_dict"
        if not isinstance(group, Mapping):
            raise ValueError(f"{where} must be a dict, got {_named(group)}")
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"{where} must have a list 'params', got {_named(params)}")
        for index in params:
            if not isinstance(index, (int, str)):
                raise ValueError(
                    f"{where} must list parameters by index or name, got {_named(index)}"
                )


def merged_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Saved groups with the current parameters, storage settings and any setting they lack.

    What else a group has is the file's alone, as in torch: an `initial_lr` that stayed would be the
    base of schedulers made later. A run of an earlier version goes on as it was, without dither.
    How another optimizer takes its steps is not how this one does.
    """
    groups, name = optimizer.param_groups, type(optimizer).__name__
    saved = state_dict["param_groups"]
    head = state_dict.get(KEY)
    ignored = ("foreach", "fused") if head is None else ()
    lacking = {"dither": False} if head is not None and head["format_version"] == 1 else {}
    if len(saved) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved)} parameter groups, this {name} has {len(groups)}"
        )
    merged = []
    for i, (group, old) in enumerate(zip(groups, saved, strict=True)):
        if len(old["params"]) != len(group["params"]):
            raise ValueError(
                f"parameter group {i} of state_dict has {len(old['params'])} parameters, "
                f"that of this {name} has {len(group['params'])}"
            )
        kept = {key: group[key] for key in ("params", *STORAGE_SETTINGS) if key in group}
        own = {key: group[key] for key in (*optimizer.defaults, "param_names") if key in group}
        settings = {key: copied(value) for key, value in old.items() if key not in ignored}
        merged.append({**own, **lacking, **settings, **kept})
    return merged


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A tree with tensors of its own, perhaps on another device, and `plain` else."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item, device) for item in value)
    return plain(value)


class SavedState(NamedTuple):
    """The state that a state dict has of a parameter.

    Attributes:
        where: what errors call the parameter.
        p: itself.
        group: its group, as it will be.
        saved_group: its group in the state dict.
        state: what was saved.
    """

    where: str
    p: Tensor
    group: Mapping[str, Any]
    saved_group: Mapping[str, Any]
    state: dict[str, Any]


def saved_states(
    groups: Iterable[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[SavedState]:
    """The states of a state dict's parameters that have any."""
    states = dict(state_dict["state"])
    named: dict[Any, Tensor] = {}
    for group, old in zip(groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            where = f"parameter {index!r} of shape {tuple(p.shape)}"
            if named.setdefault(index, p) is not p:
                raise ValueError(f"state_dict's parameter groups list {where} for another one, too")
            saved = states.pop(index, None)
            if saved is not None and not isinstance(saved, Mapping):
                raise ValueError(f"the state of {where} must be a dict, got {_named(saved)}")
            if saved:
                there = {key: x for key, x in saved.items() if x is not None}
                yield SavedState(where, p, group, old, there)
    for key, value in states.items():
        # By a word of its own an optimizer around this one keeps what is of no parameter.
        if isinstance(value, Mapping) and not (isinstance(key, str) and key.isidentifier()):
            number = isinstance(key, str) and key.isdecimal() and int(key) in named
            hint = "; numbers of parameters must be integers, not strings" if number else ""
            raise ValueError(
                f"state_dict['state'] has an entry {key!r}, which no parameter group lists{hint}"
            )


def other_entries(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """What a user has put beside the parameters' states, which torch's optimizers carry along."""
    listed = {index for group in state_dict["param_groups"] for index in group["params"]}
    entries = state_dict["state"].items()
    return {key: copied(value) for key, value in entries if key not in listed}


def check_values(
    saved: Mapping[str, Any], p: Tensor, moments: Iterable[Moment], lasting: Iterable[Lasting],
    outlasted: _saved.Outlasted,
) -> None:  # fmt: skip
    """Refuse numbers that no step leaves behind, and that would make parameters non-finite."""
    _saved.require_values(saved, p)
    if "step" in saved:
        as_step(saved["step"])
    for x in dict.fromkeys((*lasting, NORMS)):
        if x.key in saved:
            _check_lasting(x, saved[x.key])
        elif not x.history:
            raise _saved.missing(x.key, saved)
    if RESIDUAL_KEY in saved:
        _check_residual(saved[RESIDUAL_KEY], p)
    there = _saved.known(saved, tuple(moments))
    for unit in _saved.saved_units(saved, there):
        _saved.check(saved, p, unit, outlasted)


def _check_residual(value: Any, p: Tensor) -> None:
    _saved.require_shape(repr(RESIDUAL_KEY), value, p.shape)
    allowed = torch.int8, torch.int16, torch.bfloat16  # the last are an int16's bits, of DTensors
    _saved.require_dense(RESIDUAL_KEY, value, allowed)


def _residual(saved: Mapping[str, Any], p: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept beside a parameter; nothing where none is saved."""
    value = saved.get(RESIDUAL_KEY)
    if value is None:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    _saved.require_shape(repr(RESIDUAL_KEY), value, p.shape)
    moved = value.detach().to(p.device, copy=True).contiguous()
    return converted(as_integers(moved), dtype)


def as_step(value: Any) -> int:
    """The number of steps that a checkpoint says have been taken."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ValueError(f"'step' must be one number, got a tensor of shape {tuple(value.shape)}")
    step = value.item() if isinstance(value, Tensor) else value
    whole = isinstance(step, Real) and not isinstance(step, bool) and step == step // 1
    if not whole or not 0 <= step <= MOST_STEPS:
        raise ValueError(f"'step' must be a whole number >= 0, got {step!r}")
    return int(step)


def _check_lasting(x: Lasting, value: Any) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != x.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else value
        raise ValueError(f"{x.key!r} must have shape {x.shape}; got {got!r}")
    _saved.require_dense(x.key, value)
    good = (value >= 0) & value.isfinite()
    if not bool(good.all() or (x.history and (value == x.start).all())):
        raise ValueError(f"{x.key!r} must hold finite numbers >= 0")


def fitted(
    saved: Mapping[str, Any], p: Tensor, moments: tuple[Moment, ...], format: Format,
    lasting: Iterable[Lasting], kept_as: Weights,
) -> dict[str, Any]:  # fmt: skip
    """A parameter's state, copied from `saved`, on the parameter's device and in this format."""
    if not saved:
        return {}  # torch.optim.SGD before its first step with momentum
    kept, used = _saved.fitted(saved, p, moments, format)
    # torch.optim.SGD counts no steps: a momentum buffer says that there has been one.
    step = as_step(saved.get("step", 1))
    # In the order of `_state.stored`: who compares two state dicts walks through both at once.
    state: dict[str, Any] = {"step": torch.tensor(step, dtype=STEP_DTYPE, device=p.device)}
    used |= {RESIDUAL_KEY}
    if kept_as.residual is not None:
        state[RESIDUAL_KEY] = _residual(saved, p, kept_as.residual)
    for x in dict.fromkeys((*lasting, NORMS)):
        if x.key in saved:
            dtype = _state.stored_of(x, p).dtype
            state[x.key] = saved[x.key].detach().to(p.device, dtype, copy=True)
    state |= kept
    for key, value in saved.items():
        if key not in used | state.keys():
            state[key] = copied(value, p.device)
    return state
