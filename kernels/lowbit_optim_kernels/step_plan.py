"""Cached step plans: what a step needs of parameters, states and gradients, kept while it holds.

A model has hundreds of parameters, and looking at each of them in Python takes longer than a GPU
needs to step them all. But from step to step nothing changes beside values and the addresses of
gradients, and of parameters that `p.data = ...` moves, as for sharpness-aware minimization. So the
last step's plan is used again if a few flat comparisons say that it holds.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor

from .batch import ACCESS_BYTES, NO_GRADIENT, Batch, StepTensors
from .engines.registry import ENGINES
from .overlaps import memory_of, overlaps
from .reading import (
    PLAIN_TYPES,
    Places,
    ReadSignature,
    Snapshot,
    States,
    Unwrapping,
    addresses_of,
    alignments_of,
    same_objects,
)

# Parameters without a gradient for each one that has one, at most: to look at them all costs more
# then than to make a plan of the few.
MOST_MISSING = 16


def too_many(missing: int, present: int) -> bool:
    """Whether so many parameters without a gradient are better left out of a plan."""
    return missing > MOST_MISSING * present > 0


def stand_in(p: Tensor) -> Tensor:
    """A tensor in place of a gradient that is missing; it is never read."""
    return p.detach() if type(p) in PLAIN_TYPES else p  # a DTensor, which takes long to detach


class Locals(Unwrapping, Protocol):
    """What this rank holds of parameters, of their gradients and of their states."""

    def __call__(self, gradients: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Its tensors of parameters and gradients; None if that takes a closer look."""

    def one(self, value: Any) -> Tensor:
        """Its tensor of a value."""


def _is_its_copy(x: Tensor, work: Tensor) -> bool:
    """Whether `x.contiguous()` gives a tensor like `work`, at an address for wide accesses."""
    makes_one = not x.is_contiguous() and not x.is_neg()
    alike = work.dtype == x.dtype and work.shape == x.shape
    return makes_one and alike and work.data_ptr() % ACCESS_BYTES == 0


class GatheredCopies(Protocol):
    """Copies of parameters that are stepped in place of what this rank holds of them.

    Attributes:
        index: the places of the parameters.
        tensors, gradients: the copies, and those of the gradients in this step.
    """

    index: list[int]
    tensors: list[Tensor]
    gradients: list[Tensor]

    def renew(
        self, held: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and gradients as they are stepped, from those that this rank holds."""


@dataclass
class StepPlan:
    """The step of some parameters whose settings differ in hyperparameters at most.

    Parameters that have no gradient later are left out of a step, where engines can do that.

    Attributes:
        form: all that decides how state is stored, what is run and by which engine: settings, the
            engine that is asked for, the version of the parameters' numbers, how many of them each
            part of a group lists, and which tensors of an AMP scaler there are.
        listed: the parameters that those list.
        params: those of them that have or had a gradient, each once.
        held, gradients: of each the plain tensor that this rank holds, and that of its gradient,
            during a step.
        locals_of: finds both in a later step.
        missing: the places of those that have no gradient; a `stand_in` is in its place.
        batches: the parameters by device and engine, as the engines are given them. Each keeps the
            engine's tables, which the plan after this one takes over if they fit.
        gathered: whole copies of shards, to be renewed in every step.
        staged: of parameters that are stepped in a copy, by their places, the part of the copy that
            is held.
        new_states: states that are to be kept once the step can no longer fail.
        reused: whether this is the last step's plan, with new gradients.
        settled: how many plans before it, one after the other, stepped nothing for the first time.
        wider: one before it with so many more parameters that it was not used for these few.
    """

    form: tuple
    listed: list[Tensor]
    params: list[Tensor]
    held: list[Tensor]
    gradients: list[Tensor]
    locals_of: Locals
    missing: frozenset[int] = frozenset()
    batches: list[Batch] = field(default_factory=list)
    gathered: GatheredCopies | None = None
    staged: dict[int, Tensor] = field(default_factory=dict)
    new_states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    reused: bool = False
    settled: int = 0
    wider: StepPlan | None = None
    _snapshot: Snapshot | None = None  # None where this plan cannot be used again

    def __post_init__(self) -> None:
        known = set(self.params)
        self._in_plan = [p in known for p in self.listed]
        # Of gradients and of what is held, which are aligned as in the first step; and the places
        # of parameters that were elsewhere then.
        self._addresses: list[int] = []
        self._held_addresses: list[int] = []
        self._moved: set[int] = set()

    def take_tables(self, last: StepPlan | None) -> None:
        """Take over the tables of the last step's plan that fit, once the values are set."""
        if self.reused:
            return
        before = {} if last is None else {batch.identity: batch for batch in last.batches}
        for batch in self.batches:
            batch.missing = self._positions_in(batch, self.missing)
            batch.note_addresses()
            old = before.get(batch.identity)
            if old is not None and old.key == batch.key:
                batch.tables = old.tables

    def wider_than(self, present: list[Tensor]) -> StepPlan | None:
        """This plan or its wider one, where these parameters are few of its own."""
        plan = self.wider or self
        waiting = sum(p.grad is None for p in plan.params)
        return plan if too_many(waiting, len(present)) else None

    @staticmethod
    def _positions_in(batch: Batch, of: Container[int]) -> frozenset[int]:
        """Positions in a batch of its slots of these parameters."""
        return frozenset(k for k, slot in enumerate(batch.slots) if slot.index in of)

    def written(self) -> list[Tensor]:
        """The parameters that are stepped."""
        if not self.missing:
            return self.params
        return [p for i, p in enumerate(self.params) if i not in self.missing]

    def copied(self, batch: Batch) -> dict[int, int]:
        """The places of parameters that a batch steps in copies, by those of their slots in it."""
        if not self.staged:
            return {}
        return {k: slot.index for k, slot in enumerate(batch.slots) if slot.index in self.staged}

    def renew_copies(self, batch: Batch) -> None:
        """Copy what is held to where a batch steps it."""
        for i in self.copied(batch).values():
            self.staged[i].copy_(self.held[i])

    def write_back(self, batch: Batch) -> None:
        """Copy what a batch has stepped in copies to where it is held."""
        written = self.copied(batch).values()
        held, work = [self.held[i] for i in written], [self.staged[i] for i in written]
        if any(map(Tensor.is_neg, held)):  # which foreach operators refuse
            for to, source in zip(held, work, strict=True):
                to.copy_(source)
        elif held:
            torch._foreach_copy_(held, work)

    def freeze(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note after a step what a later one has to compare, and keep no more than that."""
        if not self.reused:
            self._snapshot = self._take_snapshot(state)
        self._release()

    def _release(self) -> None:
        """Let go of gradients, copies and state: others need their memory, or may move them."""
        self.gradients, self.new_states = [], {}
        self.held = self.params if same_objects(self.held, self.params) else []
        stay: Sequence[int] = ()
        if self.gathered is not None:
            self.gathered.gradients = []
            stay = self.gathered.index if self._snapshot is not None else ()
        self.staged = {i: self.staged[i] for i in stay}
        for batch in self.batches:
            batch.let_go()

    def _contiguous_copies(self) -> tuple[list[int], list[int]] | None:
        """Parameters and gradients that are copied in every step, as they are not contiguous.

        None if any are for another reason, but for whole copies.
        """
        wholes: dict[int, Tensor] = {}
        if self.gathered is not None:
            wholes = dict(zip(self.gathered.index, self.gathered.gradients, strict=True))
        copied: list[tuple[Tensor, Tensor]] = []
        params: list[int] = []
        gradients: list[int] = []
        for slot in (slot for batch in self.batches for slot in batch.slots):
            i = slot.index
            if i in wholes:
                if slot.g is not wholes[i]:
                    return None
                continue
            if i in self.staged:
                params.append(i)
                copied.append((self.held[i], slot.p))
            if slot.g is not self.gradients[i]:
                gradients.append(i)
                copied.append((self.gradients[i], slot.g))
        only_these = all(_is_its_copy(x, made) for x, made in copied)
        return (params, gradients) if only_these else None

    def _take_snapshot(self, state: Mapping[Tensor, dict[str, Any]]) -> Snapshot | None:
        """None where a parameter is listed twice, or one or a gradient changed for a step.

        And where one is in a wrapper, which may have to be waited for.
        """
        copied = self._contiguous_copies()
        if copied is None or sum(self._in_plan) > len(self.params):
            return None
        if not PLAIN_TYPES.issuperset(map(type, (*self.held, *self.gradients))):
            return None
        self._addresses = addresses_of(self.gradients)
        self._held_addresses = addresses_of(self.held)
        return Snapshot(
            states=States(self.params, state, self.locals_of),
            held=ReadSignature(self.held),
            gradients=ReadSignature(self.gradients),
            held_places=Places(self._held_addresses),
            gradient_places=Places(self._addresses),
            orders=[[slot.index for slot in batch.slots] for batch in self.batches],
            copied_params={i: self.held[i].stride() for i in copied[0]},
            copied_gradients=copied[1],
        )

    def is_for(self, form: tuple, listed: list[Tensor]) -> bool:
        """Whether it may be the plan of these parameters, too."""
        usable = self._snapshot is not None
        return usable and form == self.form and same_objects(listed, self.listed)

    def can_leave_out(self) -> bool:
        """Whether some of its parameters can be left out of a step."""
        mixed = all(ENGINES[batch.engine].takes_mixed_batches for batch in self.batches)
        return mixed and not self.staged

    def take_gradients(
        self, found: list[Tensor | None], state: Mapping[Tensor, dict[str, Any]]
    ) -> bool:
        """Go on with new gradients, if nothing else is new.

        Args:
            found: of the listed parameters.
            state: of all parameters.
        """
        before, chosen = self._snapshot, self._with_stand_ins(found)
        if before is None or chosen is None:
            return False
        given, missing = chosen
        local = self.locals_of(given)
        if local is None:
            return False
        held, gradients = local
        addresses = self._addresses_if_unchanged(before, held, gradients, missing)
        states = None if addresses is None else before.states.find(state)
        if addresses is None or states is None:
            return False
        copies = self._renew_contiguous_copies(before, held, gradients, missing)
        if copies is None:
            return False
        copied, stepped = copies
        params = held
        if self.gathered is not None and self.gathered.tensors:
            params, stepped = self.gathered.renew(held, stepped)
        if copied:
            params = [copied.get(i, p) for i, p in enumerate(params)]
        self.held, self.gradients, self.missing, self.reused = held, gradients, missing, True
        self._addresses = addresses
        self.staged.update(copied)
        tensors = StepTensors(params, stepped, states, self.locals_of.one)
        addresses = list(addresses) if stepped is gradients else addresses_of(stepped)
        for i in missing:
            addresses[i] = NO_GRADIENT
        elsewhere = self._elsewhere(copied)
        for batch, order in zip(self.batches, before.orders, strict=True):
            its = self._positions_in(batch, elsewhere) if elsewhere else ()
            batch.take_gradients(
                tensors, [addresses[i] for i in order],
                self._positions_in(batch, missing) if missing else frozenset(),
                {k: elsewhere[order[k]] for k in its},
            )  # fmt: skip
        return True

    def _elsewhere(self, copied: Mapping[int, Tensor]) -> dict[int, int]:
        """Addresses of parameters that are not stepped where they were in the first step."""
        whole = () if self.gathered is None else self.gathered.index
        moved = {i: self._held_addresses[i] for i in self._moved.difference(whole)}
        return moved | {i: x.data_ptr() for i, x in copied.items()}

    def _with_stand_ins(
        self, found: list[Tensor | None]
    ) -> tuple[list[Tensor], frozenset[int]] | None:
        """The gradients of its parameters, and the places of those that have none.

        None if others have gradients, or some have none that cannot be left out.
        """
        gradients = [g for g in found if g is not None]
        if [g is not None for g in found] == self._in_plan:
            return gradients, frozenset()
        own = list(compress(found, self._in_plan))
        missing = frozenset(i for i, g in enumerate(own) if g is None)
        others = len(gradients) + len(missing) > len(own)
        if others or too_many(len(missing), len(gradients)) or not self.can_leave_out():
            return None
        pairs = zip(self.params, own, strict=True)
        return [stand_in(p) if g is None else g for p, g in pairs], missing

    def _addresses_if_unchanged(
        self, before: Snapshot, held: list[Tensor], gradients: list[Tensor],
        missing: frozenset[int],
    ) -> list[int] | None:  # fmt: skip
        """Addresses of the gradients, old ones for missing ones; None if anything else is new."""
        if not (before.gradients.matches(gradients) and self._find(before, held)):
            return None
        try:
            addresses = addresses_of(gradients)
        except RuntimeError:  # of a tensor without a storage, which a new plan refuses
            return None
        for i in missing:
            addresses[i] = self._addresses[i]
        if addresses == self._addresses or before.gradient_places.are_like(addresses):
            return addresses
        return None

    def _find(self, before: Snapshot, held: list[Tensor]) -> bool:
        """Whether what is held can be stepped where it is; `p.data = ...` may have moved it."""
        if not before.reads(held):
            return False
        addresses = addresses_of(held)
        if addresses == self._held_addresses:
            return True
        if not before.held_places.are_like(addresses):
            return False
        pairs = enumerate(zip(addresses, self._held_addresses, strict=True))
        moved = {i for i, (now, then) in pairs if now != then}
        slots = [slot for batch in self.batches for slot in batch.slots]
        memories = [memory_of(held[x.index]) if x.index in moved else x.memory for x in slots]
        if any(overlaps(memories)):
            return False
        for slot, memory in zip(slots, memories, strict=True):
            slot.memory = memory
        for batch in self.batches:
            batch.noted = []
        self._held_addresses, self._moved = addresses, self._moved | moved
        return True

    def _renew_contiguous_copies(
        self, before: Snapshot, held: list[Tensor], gradients: list[Tensor],
        missing: frozenset[int],
    ) -> tuple[dict[int, Tensor], list[Tensor]] | None:  # fmt: skip
        """Copies of parameters that are not contiguous, and the gradients as they are stepped.

        None if memory is given out at addresses for narrow accesses.
        """
        if not (before.copied_params or before.copied_gradients):
            return {}, gradients
        params = {i: held[i].contiguous() for i in before.copied_params if i not in missing}
        stepped = list(gradients)
        for i in before.copied_gradients:
            stepped[i] = gradients[i].contiguous()
        made = [*params.values(), *(stepped[i] for i in before.copied_gradients)]
        return None if any(alignments_of(addresses_of(made))) else (params, stepped)
