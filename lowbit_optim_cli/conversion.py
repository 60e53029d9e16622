"""`lowbit-optim convert`: an optimizer's state as another library's, by the package's converters.

Those want an optimizer with its parameters. Of them a state needs the shapes alone, which it tells
itself, so an optimizer is rebuilt whose parameters have shapes and no memory.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit_optim
from lowbit_optim import GlobalOptimManager, LowBitOptimizer, _saved_moments, _state_dicts
from lowbit_optim._foreign.bitsandbytes import BITSANDBYTES, NESTED
from lowbit_optim._foreign.export import require_optimizer
from lowbit_optim._foreign.load import codes_of
from lowbit_optim._foreign.to_bitsandbytes import Original, write
from lowbit_optim_kernels.formats import FORMATS, parts_of
from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.rules.shared import NORMS
from lowbit_optim_kernels.weights import RESIDUAL_KEY

from . import checkpoints
from .checkpoints import Found
from .errors import Refused, plural, sentence
from .families import FAMILIES, TORCH, family, library, named_family, written_by

THEIRS = ("float32", "dynamic8")  # the formats of bitsandbytes
OPTIONS = {"SGD": {"momentum": 0.9}, "LARS": {"momentum": 0.9}}  # which keep nothing without
# The settings that decide which moments there are.
DECIDING = {"SGD": ("momentum",), "LARS": ("momentum",), "RMSprop": ("momentum", "centered")}


def rebuilt(found: Found, name: str, format: str | None = None) -> LowBitOptimizer:
    """An optimizer of parameters without memory that has loaded a state dict.

    Args:
        found: the state dict.
        name: its family.
        format: that its moments are to be kept in; None for the one that they are in.

    Raises:
        Refused: if it is no state dict of this family.
    """
    state_dict = found.state_dict
    try:
        _state_dicts.check_groups(state_dict["param_groups"])
        groups = [
            {"params": params, **_storage(state_dict, group, name, format)}
            for group, params in zip(
                state_dict["param_groups"], _parameters(state_dict, name), strict=True
            )
        ]
        optimizer: LowBitOptimizer = getattr(lowbit_optim, name)(groups, lr=0.0)
        if format is None:
            _keep_formats(optimizer, state_dict, moments_of(name))
        optimizer.load_state_dict(state_dict)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"{found.where} cannot be read as {name}: {error}") from None
    return optimizer


def _storage(
    state_dict: Mapping[str, Any], group: Mapping[str, Any], name: str, format: str | None
) -> dict[str, Any]:
    """The format of a group's moments: as asked, as its own library says, or as they are."""
    of = library(state_dict)
    ours = _state_dicts.STORAGE_SETTINGS if of == "lowbit_optim" else ()
    kept = {key: group[key] for key in ours if key in group}
    if format is not None:
        kept.pop("optim_bits", None)  # which the format decides
        # The format is checked before the state is read, against the moments of these settings.
        deciding = {key: group[key] for key in DECIDING.get(name, ()) if key in group}
        return {**kept, **OPTIONS.get(name, {}), **deciding, "state_format": format}
    if kept:
        return kept
    return {"state_format": _foreign_format(state_dict["state"], of)}


def _foreign_format(saved: Any, of: str) -> str:
    """The format that is nearest to how another library keeps what it saved."""
    coded = of != TORCH and any(x.itemsize == 1 for x in checkpoints.tensors(saved))
    return "dynamic8" if coded else "float32"


def _keep_formats(
    optimizer: LowBitOptimizer, state_dict: Mapping[str, Any], moments: tuple[Moment, ...]
) -> None:
    """Have every parameter kept in the format that its state is in, whatever its group's is.

    An override may have decided it, of which a state dict has nothing else.
    """
    manager, of = GlobalOptimManager.get_instance(), library(state_dict)
    in_32_bits = _saved_moments.keys_of(optimizer.moments(), FORMATS["float32"])
    for group, old in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            saved = state_dict["state"].get(index)
            format = _format_of(saved, moments, of) if saved else None
            if format == "float32" and of == "lowbit_optim" and not in_32_bits <= saved.keys():
                continue  # a variance of RMSprop in 8 bits, of a parameter that is small
            if format is not None:
                own = {"state_format": format, "min_8bit_size": 0}
                manager.override_config(p, key_value_dict=own)


def _format_of(saved: Mapping[str, Any], moments: tuple[Moment, ...], of: str) -> str | None:
    """The format that a library's state of a parameter is in; None if it is in several."""
    if of != "lowbit_optim":
        return _foreign_format(saved, of)
    there = _saved_moments.saved_units(saved, _saved_moments.present_moments(saved, moments))
    formats = {unit.format.name for unit in there if not unit.format.exact} or {"float32"}
    return formats.pop() if len(formats) == 1 else None


def _parameters(state_dict: Mapping[str, Any], name: str) -> Iterator[list[nn.Parameter]]:
    """The parameters of each group, without memory; an empty one where there is no state."""
    made: dict[Any, nn.Parameter] = {}
    moments = moments_of(name)
    for group in state_dict["param_groups"]:
        for index in group["params"]:
            saved = state_dict["state"].get(index)
            if saved is not None and not isinstance(saved, Mapping):
                raise ValueError(f"the state of parameter {index!r} must be a dict")
            made.setdefault(index, _parameter(saved or {}, moments))
        yield [made[index] for index in group["params"]]


def moments_of(name: str) -> tuple[Moment, ...]:
    """The moments that a class can keep, with whatever settings."""
    cls = getattr(lowbit_optim, name)
    optimizer = cls([torch.zeros(1)], lr=0.0, **OPTIONS.get(name, {}))
    return (*optimizer.moments(), *cls.SAVED_MOMENTS)


def _parameter(saved: Mapping[str, Any], moments: tuple[Moment, ...]) -> nn.Parameter:
    """A parameter of the shape that its moments or residual have, and of a dtype that fits them."""
    shape: tuple[int, ...] = (0,)
    dtype = torch.bfloat16 if RESIDUAL_KEY in saved else torch.float32
    nested = saved.get(NESTED)
    flat = {**saved, **nested} if isinstance(nested, Mapping) else saved
    if isinstance(flat.get("state1"), Tensor):
        shape = tuple(flat["state1"].shape)
        if sum(moment.signed for moment in moments) == 2:  # AdEMAMix stacks its averages
            shape = shape[1:]
    else:
        keys = [
            part.key
            for format in FORMATS.values()
            if format.refusal(moments) is None
            for part in parts_of(moments, format)
            if not part.per_block
        ]
        values = [saved[key] for key in (*keys, RESIDUAL_KEY) if isinstance(saved.get(key), Tensor)]
        if values:
            shape = tuple(values[0].shape)
            coded = not values[0].is_floating_point()  # which says nothing; what is beside it does
            telling = [x for x in checkpoints.tensors(saved) if x.ndim] if coded else values[:1]
            dtype = torch.float64 if any(x.dtype == torch.float64 for x in telling) else dtype
    return nn.Parameter(torch.zeros((), dtype=dtype).expand(shape))


def convert(
    source: Path, target: Path, to: str, name: str | None, format: str | None, layout: str
) -> list[str]:
    """Write a checkpoint with its optimizer states converted, and all else as it is.

    Args:
        source: the file to read.
        target: the file to write, which must not exist.
        to: "torch", "bitsandbytes" or "lowbit".
        name: the optimizer, where its state does not say.
        format: of the moments of "lowbit", and of "bitsandbytes" where it has it; None for the one
            that they are in.
        layout: of bitsandbytes: "flat" or "nested".

    Returns:
        What has been done, a line for each state.

    Raises:
        Refused: if something cannot be converted; nothing has been written then.
    """
    _check_request(source, target, to, format, layout)
    checkpoint = checkpoints.read(source)
    found = checkpoints.optimizers(checkpoint)
    if not found:
        raise Refused(f"{source} has no optimizer's state, with 'state' and 'param_groups'")
    checkpoints.require_dense([one.state_dict for one in found], source, whole=True)
    said, news = [], {}
    for one in found:
        own = named_family(name) if name else family(one.state_dict)
        if own not in FAMILIES:
            raise Refused(
                f"{one.where} is of {written_by(one.state_dict)} and does not say of which "
                "optimizer; name it, as in --optimizer AdamW"
            )
        news[one.path], lines = _converted(one, own, to, format, layout)
        said += lines
    _write(checkpoints.replace(checkpoint, news), target)
    return said


def _check_request(source: Path, target: Path, to: str, format: str | None, layout: str) -> None:
    """Refuse what needs no reading of the file to be refused."""
    if os.path.lexists(target):  # which a link to nothing does, too
        raise Refused(f"{target} exists; name a file that does not")
    if target.suffix == ".safetensors":
        raise Refused(f"{target} would be what torch.save writes; name a file as in run.pt")
    if source.is_dir():
        raise Refused(
            f"{source} is a folder; `python -m torch.distributed.checkpoint.format_utils "
            "dcp_to_torch FOLDER FILE` makes a file of a distributed checkpoint (DCP)"
        )
    if format is not None and format not in FORMATS:
        raise Refused(f"--format must be one of {', '.join(FORMATS)}; got {format!r}")
    if not target.parent.is_dir():
        raise Refused(f"there is no folder {str(target.parent)!r}")
    if format is not None and to == "torch":
        raise Refused(
            f"--format {format} would round what --to torch writes: torch.optim keeps numbers"
        )
    if format is not None and to == "bitsandbytes" and format not in THEIRS:
        raise Refused(
            f"--format {format} would round what --to bitsandbytes codes again: bitsandbytes has "
            f"{' and '.join(THEIRS)}"
        )
    if layout != "flat" and to != "bitsandbytes":
        raise Refused(f"--layout is of --to bitsandbytes; got {layout!r} with --to {to}")


def _converted(
    found: Found, name: str, to: str, format: str | None, layout: str
) -> tuple[dict[str, Any], list[str]]:
    """A state dict of another library, and what is to be said of it."""
    was = library(found.state_dict)
    if to == "torch" and was != "lowbit_optim":
        format = "float32"  # what another library has coded would be coded anew before it is read
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = rebuilt(found, name, format)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [state for p in params if (state := optimizer.state.get(p))]
    if to == "torch" and name == "Adagrad" and len(states) < len(params):
        raise Refused(
            f"{found.where} has parameters without state, which torch.optim.Adagrad has from the "
            "start; their shapes are not in it: use lowbit_optim.to_torch_state_dict"
        )
    try:
        if to == "torch":
            new = lowbit_optim.to_torch_state_dict(optimizer)
        elif to == "bitsandbytes":
            new = _for_bitsandbytes(found, optimizer, layout)
        else:
            new = optimizer.state_dict()
    except ValueError as error:
        raise Refused(f"{found.where} cannot be converted to {to}: {error}") from None
    count, coded = plural(len(states), "parameter"), _foreign_format(states, was) == "dynamic8"
    lines = [f"{found.where}: {name} of {was} to {to}, {count} with state"]
    if to == "bitsandbytes" and was != "lowbit_optim" and format != "float32" and coded:
        lines.append("codes in the same blocks are taken bit for bit, others made once, of numbers")
    else:
        lines += [str(warning.message) for warning in caught]
    if to != "lowbit" and any(RESIDUAL_KEY in state for state in states):
        lines.append(
            f"the bits beyond bf16 of its weights ({RESIDUAL_KEY}) are not in it; "
            "`lowbit_optim.master_weights` gives the weights with them"
        )
    if to == "torch" and any(NORMS.key in state for state in states):
        lines.append(
            f"the norms that percentile_clipping goes by ({NORMS.key}) are not in it: torch.optim "
            "does not clip"
        )
    return _renamed(new, found.state_dict), lines


def _for_bitsandbytes(found: Found, optimizer: LowBitOptimizer, layout: str) -> dict[str, Any]:
    """The state dict for bitsandbytes of what an optimizer has loaded, coded once at most.

    The optimizer may have coded in blocks of its own what bitsandbytes has in others.
    """
    require_optimizer(optimizer, "--to bitsandbytes", "bitsandbytes", BITSANDBYTES.families)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which the first one has said
        exact = rebuilt(found, optimizer.family, "float32")
    original = Original(exact, codes_of(exact, found.state_dict))
    return write(optimizer, layout, original)


def _renamed(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose parameters are called what they are in another one of the same groups.

    What that one has beside its state and groups, as what a wrapper puts there, it has, too.
    """
    names: dict[Any, Any] = {}
    groups = []
    for group, its in zip(new["param_groups"], old["param_groups"], strict=True):
        names.update(zip(group["params"], its["params"], strict=True))
        groups.append({**group, "params": list(its["params"])})
    state = {names.get(key, key): one for key, one in new["state"].items()}
    beside = {key: value for key, value in old.items() if key != _state_dicts.KEY}
    return {**beside, **new, "state": state, "param_groups": groups}


def _write(value: Any, target: Path) -> None:
    """Write a file whole or not at all.

    Raises:
        Refused: if it cannot be written, with what the system says of it.
        KeyboardInterrupt: if a user has interrupted it.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            whole = Path(folder, target.name)
            with whole.open("wb") as file:  # given a name, torch would not say why it fails
                torch.save(value, file)
            whole.replace(target)
    except (OSError, RuntimeError) as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error)):
            raise KeyboardInterrupt from None
        raise Refused(f"{target} cannot be written: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Why a file cannot be written, as the system says it."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return sentence(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those before it: torch raises one of its own upon whatever ends its writing."""
    while error is not None:
        yield error
        error = error.__context__
