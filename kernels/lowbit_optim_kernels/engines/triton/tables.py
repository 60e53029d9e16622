"""The Triton engine's launch tables: device tables of a batch, built once and kept.

They are rebuilt when the set of tensors changes; addresses are sent again when one of them does,
hyperparameters likewise. What a CUDA graph captures gets tables of its own, which its replays fill
again, so that later steps outside the graph and replays do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...batch import WEIGHT_BLOCK, Batch, G, P, Slot, address_columns
from ...codegen.analysis import element_functions, element_scalars, hyper_names, reads
from ...devices import capturing, current_stream
from ...dither import WEIGHT
from ...rules import Rule, RuleFunction
from . import grid
from .compiled import Compiled
from .kinds import Kind, constants, formats_of

LANES = 128  # tensors per program of the per-tensor kernels
GSCALE, LIVE, SCALARS = 0, 1, 2  # columns of `scalars` and of `floats`
SPARE = 2  # captures in a row without a step in between


@dataclass(frozen=True)
class Launch:
    """One launch of a pass over elements: the kinds of its tiles, constants, rows of `work`."""

    kinds: tuple[Kind, ...]
    constants: dict[str, Any]
    work: Tensor

    @property
    def programs(self) -> int:
        return len(self.work) * (grid.SPAN if self.kinds[0].spanned else 1)


class Code(NamedTuple):
    """The code that steps a batch.

    Attributes:
        kernels: the rule's.
        tables: look-up tables of the formats.
        options: of each launch of the update.
        scaled: whether gradients are multiplied by `gscale`.
    """

    kernels: ModuleType
    tables: Tensor
    options: list[dict[str, Any]]
    scaled: bool


@dataclass
class Tables:
    """Device tables of a batch; `passes` says what they hold.

    Attributes:
        kinds: of the tiles there are, in one order whatever that of the tensors.
        tiles, tiles_of, most_tiles: of all tensors, of each one (int64), of the largest.
        launches: of a pass over the elements, which share `work`.
        rows, numbers: the addresses that the batch had when it was made, as it has them and as a
            table.
        sent: the gradients' and parameters' addresses that were sent last in place of these.
        values: the hyperparameters that were sent last.
        stream: that the last step was on which no graph has captured; None on a CPU.
        spare: pinned memory for captures.
        code: of the kernels that read them, once there was a step.
        launched: variants that a step has launched, so that they are compiled: False where every
            tensor had a gradient, True where some had none.
        compiled: kernels that a step has launched.
    """

    kinds: tuple[Kind, ...]
    work: Tensor
    launches: list[Launch]
    tiles: int
    tiles_of: Tensor
    most_tiles: int
    geometry: Tensor
    address: Tensor
    scalars: Tensor
    floats: Tensor
    hyper: Tensor
    count: Tensor
    stream: Any
    rows: list[list[int]] = field(default_factory=list)
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    sent: tuple[list[int], Mapping[int, int]] | None = None
    values: list[float | None] = field(default_factory=list)
    spare: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    code: Code | None = None
    launched: set[bool] = field(default_factory=set)
    compiled: Compiled = field(default_factory=Compiled)


def tables_for(batch: Batch) -> Tables:
    """The batch's tables, up to date on the current stream.

    Raises:
        RuntimeError: when a CUDA graph is being captured and there are no tables yet, or when as
            many as there is pinned memory for were captured since the last step.
    """
    captured, partly = capturing(batch.device), bool(batch.missing)
    if captured and (batch.tables is None or partly not in batch.tables.launched):
        raise RuntimeError(
            "this optimizer step cannot be captured in a CUDA graph yet: take at least one "
            "step with the same parameters, gradients and options before the capture, so that "
            "its state and launch tables exist and its kernels are compiled"
        )
    if batch.tables is None:
        batch.tables = _make_tables(batch)
    tables: Tables = batch.tables
    tables.launched.add(partly)
    if captured:
        tables = _for_graph(tables)
        batch.captured.append(tables)
    else:
        _follow_stream(tables, current_stream(batch.device))
        while batch.device.type == "cuda" and len(tables.spare) < SPARE:
            tables.spare.append((_pinned_like(tables.address), _pinned_like(tables.hyper)))
    _send_addresses(tables, batch)
    _send_hyperparameters(tables, batch)
    return tables


def _follow_stream(tables: Tables, stream: Any) -> None:
    """Note that a stream fills and reads the tables from now on, as another one did before.

    It waits for that one, which the parameters alone would not have it do where a step was refused
    halfway; and memory of tables that are dropped is not given away while it may still read them.
    """
    if stream == tables.stream:
        return
    stream.wait_stream(tables.stream)
    for table in vars(tables).values():
        if isinstance(table, Tensor):
            table.record_stream(stream)
    tables.stream = stream


def _for_graph(tables: Tables) -> Tables:
    """Tables of its own for what is being captured, which every replay fills again."""
    if not tables.spare:
        raise RuntimeError(
            f"{SPARE} CUDA graphs of this optimizer step were captured in a row, and memory for a "
            "third cannot be pinned during its capture: take a step between them"
        )
    return replace(
        tables, address=torch.empty_like(tables.address), hyper=torch.empty_like(tables.hyper),
        scalars=torch.empty_like(tables.scalars), floats=torch.empty_like(tables.floats),
        sent=None, values=[], spare=[tables.spare.pop()],
    )  # fmt: skip


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")


def _on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A table of numbers, by a copy that the host does not wait for."""
    source = torch.from_numpy(numbers)
    if device.type != "cuda":
        return source.to(device)
    return source.pin_memory().to(device, non_blocking=True)


def _send(tables: Tables, which: int, target: Tensor, numbers: np.ndarray) -> None:
    """Copy numbers, which nobody changes later, to a device table; the host does not wait."""
    source = torch.from_numpy(numbers).view(target.dtype).view(target.shape)
    if capturing(target.device):  # the replays read the source again: it is never reused
        source = tables.spare[0][which].copy_(source)
    elif target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def _send_addresses(tables: Tables, batch: Batch) -> None:
    """Send the addresses where any is another one than when they were sent last."""
    if tables.rows is not batch.addresses:
        tables.rows, tables.sent = batch.addresses, None
        # Addresses of Intel's GPUs have the upper bit set.
        tables.numbers = np.array(batch.addresses, dtype=np.uint64)
    new = (batch.gradient_addresses, batch.param_addresses) if batch.reused else ([], {})
    if new == tables.sent:
        return
    numbers = tables.numbers.copy()
    if batch.reused:
        numbers[:, G] = batch.gradient_addresses
    for place, address in batch.param_addresses.items():
        numbers[place, P] = address
    _send(tables, 0, tables.address, numbers)
    tables.sent = new


def _send_hyperparameters(tables: Tables, batch: Batch) -> None:
    names = hyper_names(batch.rule)
    given = [hyper[name] for hyper in batch.hyper for name in names]
    # (What a tensor has filled is no number's yet: 0.0 in its place would be taken for sent.)
    on_host = [None if isinstance(value, Tensor) else float(value) for value in given]
    if on_host and on_host != tables.values:
        numbers = np.array([value or 0.0 for value in on_host], dtype=np.float64)
        _send(tables, 1, tables.hyper, numbers)
        tables.values = on_host
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            tables.hyper.view(-1)[i].copy_(value, non_blocking=True)


# Building.


def float_names(rule: Rule) -> list[str]:
    """Names of the columns of `floats` after the first two."""
    elements = element_scalars(rule, element_functions(rule))
    return list(dict.fromkeys([*rule.scalars(), *elements]))


def streams(rule: Rule) -> list[int]:
    """The streams of random bits that a rule's steps may need, the weights' first."""
    return [WEIGHT, *sorted({m.stream for m in rule.moments if m.stream and not m.exact})]


def random_column(rule: Rule) -> int:
    """First column of `floats` with two numbers for each stream; even, as pairs are read."""
    columns = SCALARS + len(float_names(rule))
    return columns + columns % 2


def lanes(rule: Rule, fn: RuleFunction) -> int:
    """Tensors per program of a scalar function: one at a time where a history is read."""
    histories = {x.key for x in rule.lasting if x.history}
    return 1 if histories.intersection(reads(fn)) else LANES


def _weights_before(slot: Slot) -> int:
    """The column WEIGHTS_BEFORE: the number of the first weight's block, or its place."""
    return slot.weights_before if slot.shifted else slot.weights_before // WEIGHT_BLOCK


def _key(slot: Slot) -> int:
    """The column KEY: that of a slot's random bits, and above these 32 bits its part.

    Not in a column of its own: kernels of elements use nearly all registers that there are, and of
    what is next to spilling one was spilled by another width of the table.
    """
    return slot.part << 32 | slot.tensor_key


def _launches(tiling: grid.Grid, work: Tensor) -> list[Launch]:
    formats = formats_of(tiling.kinds)
    starts = [0, *(end for _, end in tiling.launches)]
    return [
        Launch(kinds, constants(kinds, formats), work[start:end])
        for start, (kinds, end) in zip(starts, tiling.launches, strict=False)
    ]


def _make_tables(batch: Batch) -> Tables:
    slots, device = batch.slots, batch.device
    tiling = grid.make_grid(slots, batch.rule.moments, batch.aligned)
    tiles, work = np.array(tiling.tiles, dtype=np.int64), _on_device(tiling.work, device)
    columns_of = [
        (*shape, first, slot.numel, _key(slot), slot.blocks_before, _weights_before(slot))
        for shape, first, slot in zip(tiling.shapes, np.cumsum(tiles) - tiles, slots, strict=True)
    ]
    width = SCALARS + len(batch.rule.scalars())
    float_width = random_column(batch.rule) + 2 * len(streams(batch.rule))
    columns = address_columns(batch.rule)

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Tables(
        kinds=tiling.kinds,
        work=work,
        launches=_launches(tiling, work),
        tiles=int(tiles.sum()),
        tiles_of=_on_device(tiles, device),
        most_tiles=int(tiles.max()),
        geometry=_on_device(np.array(columns_of, dtype=np.int64), device),
        address=zeros(len(slots), columns, dtype=torch.int64),
        scalars=zeros(len(slots), width),
        floats=zeros(len(slots), float_width, dtype=torch.float32),
        hyper=zeros(len(batch.parts), max(1, len(hyper_names(batch.rule)))),
        count=_on_device(np.array([len(slots)], dtype=np.int64), device),
        stream=current_stream(device),
    )
