"""The Triton engine's launch plan: device tables of a batch, built once and kept.

A plan is rebuilt when the set of tensors changes; addresses are sent again when one of them does,
hyperparameters likewise. What a CUDA graph captures gets tables of its own, which its replays fill
again, so that later steps outside the graph and replays do not disturb each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ...codegen.analysis import element_functions, element_scalars, hyper_names, reads
from ...dither import WEIGHT
from ...formats import Format, units
from ...plan import ALIGNMENT, WEIGHT_BLOCK, Batch, G, Slot, address_columns
from ...rules import Moment, Rule, RuleFunction
from ...weights import PLAIN, Weights

# Elements per program, on 4 warps: 16 a thread. With twice as many AdamW8bit takes 3 % fewer
# instructions an element, but twice the registers, so half as many programs would share a
# multiprocessor to hide each other's barriers.
TILE = 2048
ALIGNMENTS = ALIGNMENT, 4, 1  # elements that blocks may start at multiples of
LANES = 128  # tensors per program of the per-tensor kernels
NUMBER = 2**22  # what counts the kind in the first column of `work`: room for 512 kinds
WORK = 4  # width of `work`
GSCALE, LIVE, SCALARS = 0, 1, 2  # columns of `scalars` and of `floats`
FAR = 2**32  # blocks whose numbers fit 32 bits
SPARE = 2  # captures in a row without a step in between

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of p and g
TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip


class Kind(NamedTuple):
    """All that the code for a tile depends on.

    Attributes:
        p, g: dtypes.
        format: of the moments.
        whole: whether blocks are full, one after the other, and at aligned addresses.
        align: elements that every block starts at a multiple of.
        weights: how p is stored.
        far: whether numbers of blocks, which random bits are made of, take more than 32 bits.
    """

    p: torch.dtype
    g: torch.dtype
    format: Format
    whole: bool
    align: int
    weights: Weights = PLAIN
    far: bool = False


@dataclass
class Plan:
    """Device tables of a batch; `passes` says what they hold.

    Attributes:
        kinds: of the tiles there are, in one order whatever that of the tensors.
        tiles, tiles_of, most_tiles: of all tensors, of each one (int64), of the largest.
        constants: what a launch over these kinds is specialized for.
        spare: pinned memory for captures.
    """

    kinds: tuple[Kind, ...]
    constants: dict[str, Any]
    work: Tensor
    tiles: int
    tiles_of: Tensor
    most_tiles: int
    geometry: Tensor
    address: Tensor
    scalars: Tensor
    floats: Tensor
    hyper: Tensor
    count: Tensor
    pointers: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    spare: list[tuple[Tensor, Tensor]] = field(default_factory=list)


_hyper_names = cache(hyper_names)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current(batch: Batch) -> Plan:
    """The batch's plan, its tables up to date on the current stream.

    Raises:
        RuntimeError: when a CUDA graph is being captured and there is no plan yet, or when as many
            as there is pinned memory for were captured since the last step.
    """
    capturing = _capturing(batch.device)
    if batch.tables is None:
        if capturing:
            raise RuntimeError(
                "this optimizer step cannot be captured in a CUDA graph yet: take at least one "
                "step with the same parameters, gradients and options before the capture, so that "
                "its state and launch tables exist and its kernels are compiled"
            )
        batch.tables = _make(batch)
    plan: Plan = batch.tables
    pointers = _pointers(plan, batch)
    if capturing:
        plan = _for_graph(plan)
        batch.captured.append(plan)
    elif batch.device.type == "cuda":
        while len(plan.spare) < SPARE:
            plan.spare.append((_pinned_like(plan.address), _pinned_like(plan.hyper)))
    _send_addresses(plan, pointers)
    _send_hyperparameters(plan, batch)
    return plan


def _pointers(plan: Plan, batch: Batch) -> list[int]:
    """The rows of the address table, one after the other."""
    if not batch.reused:
        return [address for row in batch.addresses for address in row]
    pointers = list(plan.pointers)
    pointers[G :: address_columns(batch.rule)] = batch.gradient_addresses
    return pointers


def _for_graph(plan: Plan) -> Plan:
    """A plan for what is being captured, with tables of its own that every replay fills again."""
    if not plan.spare:
        raise RuntimeError(
            f"{SPARE} CUDA graphs of this optimizer step were captured in a row, and memory for a "
            "third cannot be pinned during its capture: take a step between them"
        )
    return replace(
        plan, address=torch.empty_like(plan.address), hyper=torch.empty_like(plan.hyper),
        scalars=torch.empty_like(plan.scalars), floats=torch.empty_like(plan.floats),
        pointers=[], values=[], spare=[plan.spare.pop()],
    )  # fmt: skip


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")


def _send(plan: Plan, which: int, target: Tensor, values: list) -> None:
    """Copy numbers to a device table without waiting for the device."""
    dtype = np.int64 if target.dtype == torch.int64 else np.float64
    source = torch.from_numpy(np.array(values, dtype=dtype)).view(target.shape)
    if target.device.type == "cuda":
        if _capturing(target.device):  # the replays read the source again: it is never reused
            source = plan.spare[0][which].copy_(source)
        else:
            source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def _send_addresses(plan: Plan, pointers: list[int]) -> None:
    if pointers != plan.pointers:
        _send(plan, 0, plan.address, pointers)
        plan.pointers = pointers


def _send_hyperparameters(plan: Plan, batch: Batch) -> None:
    given = [batch.hyper[name] for name in _hyper_names(batch.rule)]
    on_host = [0.0 if isinstance(value, Tensor) else float(value) for value in given]
    if on_host and on_host != plan.values:
        _send(plan, 1, plan.hyper, on_host)
        plan.values = on_host
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            plan.hyper[i].copy_(value.reshape(()), non_blocking=True)


# Building.


def number_of(dtype: torch.dtype) -> int:
    """What stands for a dtype in the constants of a kernel."""
    return list(TYPES).index(dtype)


def float_names(rule: Rule) -> list[str]:
    """What the columns of `floats` after the first two hold."""
    elements = element_scalars(rule, element_functions(rule))
    return list(dict.fromkeys([*rule.scalars(), *elements]))


def streams(rule: Rule) -> list[int]:
    """The streams of random bits that a rule's steps may need, the weights' first."""
    return [WEIGHT, *sorted({m.stream for m in rule.moments if m.stream and not m.exact})]


def random_column(rule: Rule) -> int:
    """Where `floats` has two numbers for each of the streams; even, as it is read by pairs."""
    return SCALARS + len(float_names(rule)) + len(float_names(rule)) % 2


def lanes(rule: Rule, fn: RuleFunction) -> int:
    """Tensors per program of a scalar function: one at a time where a history is read."""
    histories = {x.key for x in rule.lasting if x.history}
    return 1 if histories.intersection(reads(fn)) else LANES


def blocks_of_tile(format: Format) -> int:
    """How many blocks a tile has.

    Raises:
        ValueError: blocks do not divide a tile, or do not start at aligned addresses.
    """
    block = format.block
    if not 16 <= block <= TILE or TILE % block:
        raise ValueError(f"{format.name} has blocks of {block}; the Triton engine takes 16 to 2048")
    return TILE // block


def _has_scales(moments: tuple[Moment, ...], format: Format) -> bool:
    return any(part.per_block for unit in units(moments, format) for part in unit.parts)


def _shape(slot: Slot, aligned: bool, has_scales: bool) -> tuple[int, ...]:
    """Row, blocks per row, blocks, tiles, of these whole, and alignment of the blocks.

    Whole blocks in rows, and state without scales, whose blocks mean nothing, count as one row,
    if the random bits for weights, which are counted in blocks of their own, allow for it.
    """
    format, rows, row = slot.format, slot.rows, slot.row
    block, in_tile = format.block, blocks_of_tile(format)
    unbroken = not slot.weights.dithered or row % WEIGHT_BLOCK == 0
    if unbroken and (row % block == 0 or not has_scales):
        rows, row = 1, rows * row
    per_row = -(-row // block)
    blocks = rows * per_row
    whole = row // block // in_tile if rows == 1 and aligned else 0
    align = next(n for n in ALIGNMENTS if row % n == 0) if aligned else 1
    return row, per_row, blocks, -(-blocks // in_tile), whole, align


def _is_far(slot: Slot) -> bool:
    """Whether a block of a slot has a number of more than 32 bits."""
    blocks = slot.rows * -(-slot.row // slot.format.block)
    of_weights = slot.rows * -(-slot.row // WEIGHT_BLOCK)
    last = max(slot.blocks_before + blocks, slot.weight_blocks_before + of_weights)
    return last > FAR


def _make(batch: Batch) -> Plan:
    slots, device, moments = batch.slots, batch.device, batch.rule.moments
    formats = {slot.format.name: slot.format for slot in slots}  # a format's own hash is slow
    scaled = {name: _has_scales(moments, format) for name, format in formats.items()}
    shapes = np.array([
        _shape(slot, aligned, scaled[slot.format.name])
        for slot, aligned in zip(slots, batch.aligned, strict=True)
    ], dtype=np.int64)  # fmt: skip
    row, per_row, blocks, tiles, whole, align = shapes.T
    starts = np.cumsum(tiles) - tiles
    numel = np.array([slot.numel for slot in slots], dtype=np.int64)
    random = np.array([
        (slot.tensor_key, slot.blocks_before, slot.weight_blocks_before) for slot in slots
    ], dtype=np.int64)  # fmt: skip
    geometry = np.stack([row, per_row, blocks, starts, numel, *random.T], axis=1)
    width = SCALARS + len(batch.rule.scalars())
    float_width = random_column(batch.rule) + 2 * len(streams(batch.rule))
    columns = address_columns(batch.rule)

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    kinds, work = _deal(slots, tiles, whole, align, per_row)
    return Plan(
        kinds=kinds,
        constants=constants(kinds),
        work=torch.from_numpy(work).to(device),
        tiles=int(tiles.sum()),
        tiles_of=torch.from_numpy(np.ascontiguousarray(tiles)).to(device),
        most_tiles=int(tiles.max()),
        geometry=torch.from_numpy(geometry).to(device),
        address=zeros(len(slots), columns, dtype=torch.int64),
        scalars=zeros(len(slots), width),
        floats=zeros(len(slots), float_width, dtype=torch.float32),
        hyper=zeros(max(1, len(_hyper_names(batch.rule)))),
        count=torch.tensor([len(slots)], dtype=torch.int64).to(device),
    )


def _order(kind: Kind) -> tuple:
    """Whole tiles first; one order of the same kinds, so that they share a specialization."""
    p, g, format, whole, align, weights, far = kind
    return not whole, format.bits, format.name, -align, str(p), str(g), weights.bits or 0, far


def formats_of(kinds: Sequence[Kind]) -> tuple[Format, ...]:
    """The formats of these kinds, each once."""
    return tuple(dict.fromkeys(kind.format for kind in kinds))


def pieces(kinds: Sequence[Kind]) -> list[int]:
    """Blocks of a tile that a program updates at a time, for each kind.

    A kernel takes the registers of its largest kind, and with more of them fewer programs share a
    multiprocessor. So the kinds beside whole tiles of the narrowest state are cut in half, and in
    quarters always those of unaligned blocks, which have an address for every element, and whose
    sums are formed piece by piece. (Not smaller: each piece brings tables into shared memory.)
    """
    narrowest = min((kind.format.bits for kind in kinds if kind.whole), default=0)

    def of(kind: Kind) -> int:
        alone = len(kinds) == 1 or (kind.whole and kind.format.bits == narrowest)
        parts = 4 if kind.align == 1 else 1 if alone else 2
        return max(1, blocks_of_tile(kind.format) // parts)

    return [of(kind) for kind in kinds]


def constants(kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """What makes a specialization of the per-element kernels: the kinds of tiles in one launch."""
    number = {format: i for i, format in enumerate(formats_of(kinds))}
    return {
        "KINDS": tuple(
            (
                number_of(kind.p),
                number_of(kind.g),
                number[kind.format],
                kind.whole,
                kind.align,
                piece,
                kind.far,
                *_of_weights(kind.weights),
                *_runs(kind),
            )
            for kind, piece in zip(kinds, pieces(kinds), strict=True)
        )
    }


def _runs(kind: Kind) -> tuple[int, int]:
    """How many elements a thread takes in a row, at most: in a pass that reads moments, in others.

    16 bytes of p and g: with more, a warp would read every other 16 bytes at a time. A format of
    whose kernels something else is the limit has a RUN of its own.
    """
    bare = 16 // max(kind.p.itemsize, kind.g.itemsize)
    return getattr(importlib.import_module(kind.format.triton), "RUN", bare), bare


def _of_weights(weights: Weights) -> tuple[bool, int, bool, int]:
    """Whether weights are split, the bits of a residual, whether by dither, the residual's dtype.

    -1 where there is none.
    """
    residual = -1 if weights.residual is None else number_of(weights.residual)
    return weights.bits is not None, weights.extra, weights.dithered, residual


def _deal(
    slots: list[Slot], tiles: np.ndarray, whole: np.ndarray, align: np.ndarray, per_row: np.ndarray
) -> tuple[tuple[Kind, ...], np.ndarray]:
    """A program for every tile of every tensor, by kind, and the kinds."""
    members: dict[Kind, list[int]] = {}
    for i, slot in enumerate(slots):
        stored, random = (slot.p.dtype, slot.g.dtype, slot.format), (slot.weights, _is_far(slot))
        if whole[i]:
            members.setdefault(Kind(*stored, True, ALIGNMENT, *random), []).append(i)
        if whole[i] < tiles[i]:
            members.setdefault(Kind(*stored, False, int(align[i]), *random), []).append(i)
    kinds = tuple(sorted(members, key=_order))
    work = []
    for number, kind in enumerate(kinds):
        t = np.array(members[kind], dtype=np.int64)
        first = np.zeros_like(t) if kind.whole else whole[t]
        count = whole[t] if kind.whole else tiles[t] - whole[t]
        total = int(count.sum())
        tensor = np.repeat(t, count)
        within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        block = (np.repeat(first, count) + within) * blocks_of_tile(kind.format)
        line, column = np.divmod(block, per_row[tensor])
        entry = tensor + number * NUMBER
        work.append(np.stack([entry, block, line, column], axis=1).astype(np.int32))
    return kinds, np.concatenate(work) if work else np.zeros((0, 4), dtype=np.int32)
