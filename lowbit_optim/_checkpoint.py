"""State dicts: the header, and how saved state is fitted to a parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.dynamic8 import Layout
from lowbit_optim_kernels.plan import GNORM_HISTORY
from lowbit_optim_kernels.rules import Moment

from . import _manager
from ._codec import dequantize_blockwise, quantize_blockwise

KEY = "lowbit_optim"
FORMAT_VERSION = 1
STORAGE_SETTINGS = ("optim_bits", "min_8bit_size")  # of the optimizer at hand, not of the file


def header(family: str) -> dict[str, Any]:
    """What `state_dict()` says of itself."""
    return {"format_version": FORMAT_VERSION, "optimizer": family}


def plain(value: Any) -> Any:
    """A tree without NumPy's numbers, which `torch.load(weights_only=True)` does not read."""
    if isinstance(value, float):  # as numpy.float64 is
        return float(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def check_header(state_dict: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> None:
    """Refuse a state dict of a newer format or of another optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict has no {key!r}; it is not an optimizer's state dict")
    head = state_dict.get(KEY)
    if head is None:  # torch.optim's, or one that a checkpoint library has rebuilt
        foreign = {key for group in state_dict["param_groups"] for key in group}
        foreign = foreign & _manager.settings() - defaults.keys()
        if foreign:
            raise ValueError(
                f"state_dict is of another optimizer than {family!r}, which has no "
                f"{', '.join(sorted(foreign))}"
            )
        return
    if head["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"state_dict has format_version {head['format_version']}, newer than the "
            f"{FORMAT_VERSION} that this lowbit_optim reads; update lowbit_optim"
        )
    if head["optimizer"] != family:
        raise ValueError(
            f"state_dict is of the optimizer {head['optimizer']!r} and cannot be loaded into "
            f"{family!r}"
        )


def merged_groups(
    groups: list[dict[str, Any]], state_dict: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
    """Saved groups with the current parameters, storage settings and any key they lack."""
    saved = state_dict["param_groups"]
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
        kept = {key: group[key] for key in ("params", *STORAGE_SETTINGS)}
        copied = {key: _copied(value) for key, value in old.items()}
        merged.append({**group, **copied, **kept})
    return merged


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def saved_states(
    groups: Iterable[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Mapping[str, Any], Mapping[str, Any]]]:
    """Each parameter that has saved state, with its group and that state."""
    for group, old in zip(groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            if state_dict["state"].get(index):
                yield p, group, state_dict["state"][index]


def as_state(state: Mapping[Tensor, dict[str, Any]]) -> defaultdict[Tensor, dict[str, Any]]:
    """The container that torch.optim.Optimizer keeps state in."""
    return defaultdict(dict, state)


def fitted(
    saved: Mapping[str, Any], p: Tensor, moments: tuple[Moment, ...], bits: int, name: str
) -> dict[str, Any]:
    """A parameter's state, copied from `saved`, on the parameter's device and `bits` wide."""
    saved = {key: value for key, value in saved.items() if value is not None}
    if not saved:
        return {}  # torch.optim.SGD before its first step with momentum
    state: dict[str, Any] = {}
    used = {"step"}
    for moment in moments:
        if moment.key not in saved:
            raise ValueError(
                f"state_dict does not fit {name}: it has no {moment.key!r} for a parameter "
                f"of shape {tuple(p.shape)}, only {sorted(saved)}"
            )
        used |= {moment.key, f"{moment.key}_absmax"}
        state.update(_fitted_moment(saved, p, moment, bits, name))
    state["step"] = _fitted_step(saved, p)
    for key, value in saved.items():
        if key == "gnorm_vec":
            state[key] = _fitted_norms(value, p, name)
        elif key not in used:
            state[key] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
    return state


def _fitted_step(saved: Mapping[str, Any], p: Tensor) -> Tensor:
    # torch.optim.SGD counts no steps: a momentum buffer says that there has been one.
    step = saved.get("step", 1.0)
    made = torch.as_tensor(step, dtype=torch.float32, device=p.device)
    return made.clone().reshape(())


def _fitted_norms(value: Any, p: Tensor, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != (GNORM_HISTORY,):
        raise ValueError(
            f"state_dict does not fit {name}: 'gnorm_vec' must have shape ({GNORM_HISTORY},); got "
            f"{tuple(value.shape) if isinstance(value, Tensor) else value!r}"
        )
    return value.to(device=p.device, dtype=torch.float32, copy=True)


def _fitted_moment(
    saved: Mapping[str, Any], p: Tensor, moment: Moment, bits: int, name: str
) -> dict[str, Any]:
    value = saved[moment.key]
    scales = saved.get(f"{moment.key}_absmax")
    if not isinstance(value, Tensor) or value.shape != p.shape:
        raise ValueError(
            f"state_dict does not fit {name}: {moment.key!r} has shape "
            f"{tuple(value.shape) if isinstance(value, Tensor) else value!r}, "
            f"its parameter {tuple(p.shape)}"
        )
    if (value.dtype == torch.uint8) != (scales is not None):
        raise ValueError(
            f"state_dict does not fit {name}: {moment.key!r} is {value.dtype} and its scales "
            f"{moment.key}_absmax are {'missing' if scales is None else 'present'}"
        )
    if scales is not None:
        wanted = Layout.of(p.shape).absmax_shape
        if tuple(scales.shape) != wanted:
            raise ValueError(
                f"state_dict does not fit {name}: {moment.key}_absmax has shape "
                f"{tuple(scales.shape)}, {wanted} is needed for a parameter of {tuple(p.shape)}"
            )
        scales = scales.to(device=p.device, dtype=torch.float32, copy=True)
        value = value.to(p.device, copy=True).contiguous()
        if bits == 8:
            return {moment.key: value, f"{moment.key}_absmax": scales}
        value = dequantize_blockwise(value, scales, moment.signed)
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    value = value.to(device=p.device, dtype=wide, copy=True).contiguous()
    if bits == 32:
        return {moment.key: value}
    codes, absmax = quantize_blockwise(value, moment.signed)
    return {moment.key: codes, f"{moment.key}_absmax": absmax}
