"""`lowbit-optim inspect`: what a checkpoint holds, without executing or reading it as a whole."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowbit_optim import _saved_moments, _saved_state, _state_dicts

from . import checkpoints, conversion, families
from .checkpoints import Found
from .errors import Refused, plural
from .headers import read_header


@dataclass(frozen=True)
class Kind:
    """Tensors of one name and dtype.

    Attributes:
        key: their name in the states of parameters.
        dtype: their dtype.
        tensors: how many there are.
        elements: of all of them.
        bytes: of all of them.
    """

    key: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """Facts about one state, or a file's tensors.

    Attributes:
        where: the keys that lead to it.
        summary: what it is, in a sentence.
        kinds: its tensors by name and dtype.
    """

    where: str
    summary: str
    kinds: tuple[Kind, ...]


def inspect(path: Path, skip_objects: bool = False) -> list[Report]:
    """The reports of a file that `torch.save` wrote, a safetensors file or a DCP folder.

    Args:
        path: of the file or folder.
        skip_objects: whether to read a file that asks for code to be run, without what asks for it.

    Raises:
        Refused: if it is none of them, asks for code to be run, or has tensors that are not dense.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        return [_listed(path)]
    checkpoint = checkpoints.read(path, skip_objects)
    found = checkpoints.optimizers(checkpoint)
    if not found:
        held = sum(1 for _ in checkpoints.tensors(checkpoint))
        raise Refused(
            f"{path} has {plural(held, 'tensor')}, but no optimizer's state, with 'state' and "
            "'param_groups'"
        )
    checkpoints.require_dense([one.state_dict for one in found], path)
    skipped = checkpoints.objects(path) if skip_objects else None
    without = f"; skipped, and not executed: {', '.join(skipped)}" if skipped else ""
    return [replace(one, summary=one.summary + without) for one in map(_report, found)]


def _listed(path: Path) -> Report:
    """A report of a file's or a folder's tensors, by the last part of their names."""
    if path.is_dir():
        from . import distributed  # torch.distributed takes a second to import

        what, stored = "a distributed checkpoint (DCP)", distributed.read(path)
    else:
        what, entries = "a safetensors file", read_header(path)
        stored = [(e.name.rpartition(".")[2], e.dtype, e.shape, e.bytes) for e in entries]
    summary = f"{what} of {plural(len(stored), 'tensor')}"
    return Report("the file itself", summary, _kinds(stored))


def _kinds(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[Kind, ...]:
    """Tensors by name and dtype, each given with its name, dtype, shape and bytes."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for key, dtype, shape, size in tensors:
        for i, x in enumerate((1, math.prod(shape), size)):
            sums[key, dtype][i] += x
    return tuple(Kind(key, dtype, *counts) for (key, dtype), counts in sums.items())


def _report(found: Found) -> Report:
    state_dict = found.state_dict
    library, family = families.library(state_dict), families.family(state_dict)
    states = [one for one in state_dict["state"].values() if isinstance(one, Mapping) and one]
    tensors = [
        (str(key), str(x.dtype).removeprefix("torch."), tuple(x.shape), x.nbytes)
        for state in states
        for key, value in state.items()
        for x in checkpoints.tensors(value)
    ]
    said = [f"{families.written_by(state_dict)} {family or '(the optimizer is not named in it)'}"]
    head = state_dict.get(_state_dicts.KEY)
    if isinstance(head, Mapping):
        said.append(f"format version {head.get('format_version')}")
    groups = plural(len(state_dict["param_groups"]), "group")
    said.append(f"{plural(len(states), 'parameter')} with state in {groups}")
    said += _formats(found, family) if library == "lowbit_optim" and family else []
    said += _steps(states)
    said.append(f"{checkpoints.tensor_bytes(states):,} bytes")
    return Report(found.where, ", ".join(said), _kinds(tensors))


def _formats(found: Found, family: str) -> list[str]:
    """Counts of parameters by format, which the names and shapes of tensors say."""
    if family not in families.FAMILIES:
        return [f"an optimizer {family!r} that this version does not know"]
    moments = conversion.moments_of(family)
    counts: Counter[str] = Counter()
    for saved in found.state_dict["state"].values():
        if not isinstance(saved, Mapping) or not saved:
            continue
        there = _saved_moments.present_moments(saved, moments)
        units = _saved_moments.saved_units(saved, there) if there else ()
        counts[" and ".join(sorted({unit.format.name for unit in units})) or "no format"] += 1
    return [f"{count:,} in {name}" for name, count in counts.most_common()]


def _steps(states: list[Mapping[str, Any]]) -> list[str]:
    """From the fewest to the most steps that a parameter has taken."""
    steps = []
    for state in states:
        with contextlib.suppress(KeyError, ValueError):
            steps.append(_saved_state.as_step(state["step"]))
    if not steps:
        return []
    least, most = min(steps), max(steps)
    return [f"after {'' if least == most else f'{least:,} to '}{plural(most, 'step')}"]


def as_json(path: Path, reports: list[Report]) -> str:
    """The reports as JSON."""
    made = [
        {"where": one.where, "summary": one.summary, "tensors": [vars(kind) for kind in one.kinds]}
        for one in reports
    ]
    return json.dumps({"file": str(path), "states": made}, indent=2)


def show(console: Console, path: Path, reports: list[Report]) -> None:
    """Print the reports."""
    for report in reports:
        console.print(f"{path}, {report.where}: {report.summary}")
        table = Table("tensor", "dtype")
        for column in ("tensors", "elements", "bytes"):
            table.add_column(column, justify="right")
        for kind in report.kinds:
            numbers = (kind.tensors, kind.elements, kind.bytes)
            table.add_row(kind.key, kind.dtype, *(f"{number:,}" for number in numbers))
        console.print(table)
