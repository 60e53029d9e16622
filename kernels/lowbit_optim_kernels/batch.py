"""Batches: tensors of an optimizer's groups that an engine steps together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .engines.registry import ENGINES
from .formats import Format, parts_of
from .overlaps import memory_of, overlaps, turns_of
from .rules import Moment, Rule
from .weights import PLAIN, RESIDUAL_KEY, Weights, as_integers

STEP_DTYPE = torch.int64  # fp32 would stop counting at 2**24

P, G, STEP, RESIDUAL, STATE = 0, 1, 2, 3, 4  # columns of a compiled engine's address table
ACCESS_BYTES = 16  # bytes of the widest access
NO_GRADIENT = 1  # in the place of an address, which no tensor of floats has
WEIGHT_BLOCK = 64  # elements whose weights are rounded by the random bits of one block

ProcessGroups = tuple[tuple[Any, str], ...]  # each with the type of its devices


class StepTensors(NamedTuple):
    """What a step's slots take their tensors from, by the places of parameters in its plan.

    Attributes:
        params: the parameters' values, or copies of them, as they are stepped.
        gradients: as they are read.
        states: all that is kept of each parameter, by its keys.
        local: gives this rank's tensor of a value in them.
    """

    params: Sequence[Tensor]
    gradients: Sequence[Tensor]
    states: Sequence[Mapping[str, Any]]
    local: Callable[[Any], Tensor]


@dataclass
class Slot:
    """The tensors of one parameter. All are contiguous, on one device, and local when sharded.

    It has them during a step; see `Batch.bind`.

    Attributes:
        p: the parameter's values; written.
        g: the gradient, of p's shape, any float dtype; only read.
        format: how the moments are stored that need not stay exact; `float32` without moments.
        state: the tensors of `formats.units`, one unit's after the other; written.
        step: 0-d int64, the number of steps taken so far; written.
        rows, row: blocks restart every `row` elements; rows * row == p.numel().
        numel: element count of the global tensor.
        groups: process groups over which a shard's sums are added up, one after the other; none of
            a whole tensor.
        lasting: a tensor for each of the rule's `lasting`: 0-d, or fp32 of shape (100,).
        index: its parameter's among those of its step plan.
        part: which of its batch's `hyper` are its hyperparameters.
        weights: how p is stored.
        residual: what is kept beside it, of its shape; written.
        tensor_key: of the random bits that round its moments and weights; see `dither`.
        blocks_before: the number of its first block in the global tensor.
        weights_before: the place of its first weight there: `WEIGHT_BLOCK` times the number of the
            block of random bits that it is rounded by, and the lane in that.
        memory: where that of the parameter begins and ends, of which p may be a copy.
    """

    p: Tensor
    g: Tensor
    format: Format
    state: tuple[Tensor, ...]
    step: Tensor
    rows: int
    row: int
    numel: int
    lasting: tuple[Tensor, ...] = ()
    index: int = 0
    part: int = 0
    groups: ProcessGroups = ()
    weights: Weights = PLAIN
    residual: Tensor | None = None
    tensor_key: int = 0
    blocks_before: int = 0
    weights_before: int = 0
    memory: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = memory_of(self.p)

    def take(self, tensors: StepTensors, rule: Rule) -> None:
        """Take the tensors of a step."""
        kept = tensors.states[self.index]

        def own(keys: Iterable[str]) -> tuple[Tensor, ...]:
            return tuple(tensors.local(kept[key]) for key in keys)

        self.p, self.g = tensors.params[self.index], tensors.gradients[self.index]
        self.state = own(part.key for part in parts_of(rule.moments, self.format))
        self.lasting = own(x.key for x in rule.lasting)
        (self.step,) = own(["step"])
        if self.weights.residual is not None:
            self.residual = as_integers(*own([RESIDUAL_KEY]))

    def let_go(self) -> None:
        """Refer to no tensor any more."""
        del self.p, self.g, self.step
        self.state, self.lasting, self.residual = (), (), None

    @property
    def shifted(self) -> bool:
        """Whether it begins within a block of the random bits that round its weights."""
        return self.weights.dithered and self.weights_before % WEIGHT_BLOCK > 0

    def addresses(self, rule: Rule) -> list[int]:
        """The slot's row of a compiled engine's address table, as wide as `address_columns` says.

        p, g, step, residual, what `state_columns` says, lasting; 0 for what the slot does not have.
        """
        row = [0] * address_columns(rule)
        row[P], row[G], row[STEP] = self.p.data_ptr(), self.g.data_ptr(), self.step.data_ptr()
        if self.residual is not None:
            row[RESIDUAL] = self.residual.data_ptr()
        for column, x in zip(state_columns(rule.moments, self.format), self.state, strict=True):
            row[column] = x.data_ptr()
        for k, x in enumerate(self.lasting):
            row[lasting_column(rule, k)] = x.data_ptr()
        return row


def address_columns(rule: Rule) -> int:
    """Width of a compiled engine's address table: room for two tensors a moment."""
    return lasting_column(rule, len(rule.lasting))


def lasting_column(rule: Rule, k: int) -> int:
    """The column of the address table for the k-th of a rule's `lasting`."""
    return STATE + 2 * len(rule.moments) + k


@cache
def state_columns(moments: tuple[Moment, ...], format: Format) -> tuple[int, ...]:
    """The columns of the address table for the tensors of `Slot.state`.

    Those with a number an element come first, those per block len(moments) columns later.
    """
    parts = parts_of(moments, format)
    free = {False: STATE, True: STATE + len(moments)}
    columns = []
    for part in parts:
        columns.append(free[part.per_block])
        free[part.per_block] += 1
    return tuple(columns)


@dataclass
class Batch:
    """Slots of one device and engine, their rule, and this step's run-time values.

    No two slots share a parameter's memory: such ones are stepped in batches one after the other.
    (Two whose memory is interleaved, as that of two columns of a matrix, count as sharing it.)

    Attributes:
        rule: the update rule.
        slots: parameters that have, or had, a gradient.
        device: of all slots.
        engine: the name of the engine that steps them.
        parts: the parts of parameter groups that they are from, by their numbers in the step plan.
        hyper: of each part hyperparameters by name; numbers, or 0-d tensors that stay on their
            device.
        maximize: True flips the gradient.
        grad_scale, found_inf: 0-d tensors of an AMP scaler, or None.
        missing: places of slots that have no gradient in this step and stay as they are.
        tables: what the engine has made of the slots; None in a first step. They belong to batches
            of one `key`, and have the addresses of the one that was started last.
        reused: whether nothing is new since the step plan was made beside values, and addresses of
            gradients and parameters.
        captured: tables that CUDA graphs read for as long as they are replayed.
        addresses: the rows of a compiled engine's address table, when the tables were made.
        gradient_addresses: the gradients', or NO_GRADIENT, in a step that reuses the tables.
        param_addresses: then those of parameters that are not stepped where they were when the step
            plan was made, as they have moved or are stepped in a new copy; by their places.
        aligned: whether vectors of a slot's elements can be read and written at once.
        key: all that the engine's tables depend on beside addresses.
        tensors: of a step that reuses the tables, for slots that have let go of theirs.
        bound: whether the slots have their tensors.
        turn: how many batches before it in its step plan have parameters of the same memory.
        follows: whether any batch before it in the step has.
        sharing: the places of slots with whose parameters others in the step share memory.
        noted: ids of the step's batches when `follows` and `sharing` were worked out.
    """

    rule: Rule
    slots: list[Slot]
    device: torch.device
    engine: str
    parts: tuple[int, ...] = (0,)
    hyper: Sequence[Mapping[str, float | Tensor]] = field(default_factory=lambda: [{}])
    maximize: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    missing: frozenset[int] = frozenset()
    tables: Any = None
    reused: bool = False
    captured: list[Any] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    gradient_addresses: list[int] = field(default_factory=list)
    param_addresses: Mapping[int, int] = field(default_factory=dict)
    aligned: list[bool] = field(default_factory=list)
    key: tuple = ()
    tensors: StepTensors | None = None
    bound: bool = True
    turn: int = 0
    follows: bool = False
    sharing: frozenset[int] = frozenset()
    noted: list[int] = field(default_factory=list)

    @property
    def counts(self) -> list[Tensor]:
        """The numbers of steps of the slots that are stepped."""
        self.bind()
        return [slot.step for i, slot in enumerate(self.slots) if i not in self.missing]

    def uncount(self) -> None:
        """Take the step that `Run.begin` has counted back."""
        counts = self.counts
        if self.found_inf is None:
            torch._foreach_sub_(counts, 1)
        else:
            live = (self.found_inf.to(self.device) == 0).to(STEP_DTYPE)
            torch._foreach_sub_(counts, [live] * len(counts))

    @property
    def identity(self) -> tuple[Any, ...]:
        """The key that tells the batches of a step plan apart."""
        return self.device, self.engine, self.turn, self.parts

    @cached_property
    def shards(self) -> dict[ProcessGroups, Tensor | None]:
        """The slots whose sums are added up over processes, by these; None for all slots.

        Their numbers are on the device: indexing by a list would have each step wait for its copy.
        """
        return self._shards_but(frozenset())

    @property
    def stepped_shards(self) -> dict[ProcessGroups, Tensor | None]:
        """Those that are stepped: another rank may have a plan without what has no gradient."""
        return self._shards_but(self.missing) if self.missing else self.shards

    def _shards_but(self, missing: frozenset[int]) -> dict[ProcessGroups, Tensor | None]:
        found: dict[ProcessGroups, list[int]] = {}
        for i, slot in enumerate(self.slots):
            if slot.groups and i not in missing:
                found.setdefault(slot.groups, []).append(i)
        every = len(self.slots)
        return {
            groups: None if len(index) == every else torch.tensor(index, device=self.device)
            for groups, index in found.items()
        }

    def note_addresses(self) -> None:
        """Note addresses and the key, while slots and values are what this step has."""
        self.addresses = [slot.addresses(self.rule) for slot in self.slots]
        last = STATE + len(self.rule.moments)
        self.aligned = [
            not any(address % ACCESS_BYTES for address in (row[P], row[G], *row[RESIDUAL:last]))
            for row in self.addresses
        ]
        for i in self.missing:
            self.addresses[i][G] = NO_GRADIENT
        switches = (self.maximize, self.grad_scale is None, self.found_inf is None)
        kinds = [
            (
                s.p.dtype, s.g.dtype, s.format, s.weights, aligned, s.rows, s.row, s.numel,
                s.tensor_key, s.blocks_before, s.weights_before, s.part,
            )
            for s, aligned in zip(self.slots, self.aligned, strict=True)
        ]  # fmt: skip
        self.key = (self.rule, *switches, kinds)

    def take_gradients(
        self, tensors: StepTensors, addresses: list[int], missing: frozenset[int] = frozenset(),
        param_addresses: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Go on with new gradients of the same kind; those of missing ones are not read.

        And with parameters that are stepped elsewhere, by their places.
        """
        self.reused, self.gradient_addresses, self.missing = True, addresses, missing
        self.param_addresses, self.tensors = param_addresses, tensors

    def bind(self) -> None:
        """Give the slots their tensors where they have let go of those of an earlier step."""
        if self.bound or self.tensors is None:
            return
        for slot in self.slots:
            slot.take(self.tensors, self.rule)
        self.bound = True

    def let_go(self) -> None:
        """Refer to no tensor of a step any more: whoever moves or deletes one frees memory."""
        if self.bound:
            for slot in self.slots:
                slot.let_go()
        self.tensors, self.bound = None, False


def batches_of(
    rule: Rule, slots: Sequence[tuple[Slot, str, int]], captured: list[Any]
) -> list[Batch]:
    """Slots by device and engine, each with its engine's name and its part's number in the plan.

    Of slots that share parameters' memory each comes a turn later than the one before it.
    """
    found: dict[tuple[Any, ...], list[tuple[Slot, int]]] = {}
    turns = turns_of([slot.memory for slot, _, _ in slots])
    for (slot, engine, part), turn in zip(slots, turns, strict=True):
        own = None if ENGINES[engine].takes_mixed_batches else part
        found.setdefault((turn, slot.p.device, engine, own), []).append((slot, part))
    batches = []
    for (turn, device, engine, _), its in sorted(found.items(), key=lambda item: item[0][0]):
        parts = tuple(dict.fromkeys(part for _, part in its))
        rows = {part: row for row, part in enumerate(parts)}
        for slot, part in its:
            slot.part = rows[part]
        members = [slot for slot, _ in its]
        batches.append(Batch(rule, members, device, engine, parts, captured=captured, turn=turn))
    return batches


def note_order(batches: Sequence[Batch]) -> None:
    """Note which batches of a step have parameters that an earlier one, or any other, writes."""
    order = [id(batch) for batch in batches]
    if all(batch.noted == order for batch in batches):
        return
    places = [(k, place) for k, batch in enumerate(batches) for place in range(len(batch.slots))]
    memories = [slot.memory for batch in batches for slot in batch.slots]
    pairs = [(places[i], places[j]) for i, j in overlaps(memories)]
    later = {j for (i, _), (j, _) in pairs if i != j}
    sharing = {one for pair in pairs for one in pair}
    for k, batch in enumerate(batches):
        batch.follows, batch.noted = k in later, order
        batch.sharing = frozenset(place for i, place in sharing if i == k)


class Run(Protocol):
    """One step of one batch on one engine, in the order `begin`, (`reduce`, `combine`)*, `finish`.

    Before `begin` nothing is written. An engine that compiles does so before, as far as it can.

    The sums are handed out between `reduce` and `combine` so that a caller who holds only a shard
    of each tensor can add up the shards of all of them in one all-reduce. Of whole tensors an
    engine may keep them to itself, and has no `phases` then: `finish` does it all.

    `wrote` says whether a parameter or a moment may have been; else a step that fails is uncounted.
    """

    phases: int
    wrote: bool

    def begin(self) -> None:
        """Count the step and compute the per-tensor values that need no reduction."""

    def reduce(self, phase: int) -> Tensor:
        """Sums of the phase's terms, shape (slots, terms), on the batch's device."""

    def combine(self, phase: int, sums: Tensor) -> None:
        """Turn (global) sums into per-tensor values."""

    def finish(self) -> None:
        """Write parameters and moments."""
