"""Cached step plans: what a step needs of parameters, states and gradients, kept while it holds.

A model has hundreds of parameters, and looking at each of them in Python takes longer than a GPU
needs to step them all. But from step to step nothing changes beside the gradients' values and
addresses. So the last step's plan is used again if a few flat comparisons say that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, eq, is_
from typing import Any, Protocol

import torch
from torch import Tensor

from .engines.registry import ENGINES
from .plan import ALIGNMENT, NO_GRADIENT, Batch


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says of other tensors that they are read as these are, or nothing of them.

    What torch.compile asks of a function's inputs: types, dtypes, devices, shapes, strides, and
    bits such as that of a negative view; of a thousand tensors in a tenth of the columns' time. It
    is not public, so only versions of torch that it was tried with are asked.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 16):  # previews, too
        return _says_nothing
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):  # no longer there, or no longer called so
        return _says_nothing
    unchanged: Callable[..., bool] = guards.check
    return unchanged


def _says_nothing(*tensors: Tensor) -> bool:
    return False


def same_objects(a: Iterable[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; tensors are not compared by value."""
    a = list(a)
    return len(a) == len(b) and all(map(is_, a, b))


# What decides how tensors are read, but their addresses. Layouts come first, as a sparse one has
# neither strides nor an address.
_COLUMNS: tuple[Callable[[Tensor], Any], ...] = (
    *map(attrgetter, ("layout", "dtype", "device", "shape")),
    Tensor.is_contiguous,
    Tensor.is_neg,
)


class _Look:
    """How tensors are read: what the columns say of each of some."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._columns = [list(map(look, tensors)) for look in _COLUMNS]
        self._guards = _guards(tensors)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether others, as many, are read in the same way."""
        if self._guards(*tensors):
            return True
        # One after the other: a thousand shapes in a list would have Python collect garbage.
        pairs = zip(_COLUMNS, self._columns, strict=True)
        return all(all(map(eq, map(look, tensors), column)) for look, column in pairs)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _alignments(addresses: Iterable[int]) -> list[int]:
    return [address % ALIGNMENT for address in addresses]


class _States:
    """The states of some parameters, asked of a mapping of all: tensors take long to hash."""

    def __init__(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._params, self.each = params, [state[p] for p in params]
        self._note(state)

    def _note(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note all of a mapping in which most are theirs."""
        most = len(state) < 4 * len(self._params)
        self._keys, self._values = (list(state), list(state.values())) if most else ([], [])

    def are_in(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether a mapping has the same ones."""
        known = bool(self._keys) and same_objects(state, self._keys)
        if known and same_objects(state.values(), self._values):
            return True
        if not same_objects(map(state.get, self._params), self.each):
            return False
        self._note(state)
        return True


def stand_in(p: Tensor) -> Tensor:
    """What a plan has in place of a gradient that is missing; it is never read."""
    return p.detach()


# What this rank holds of parameters and of their gradients, or None.
Locals = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]] | None]


def _is_its_copy(x: Tensor, work: Tensor) -> bool:
    """Whether `x.contiguous()` gives a tensor like `work`, at an address for wide accesses."""
    makes_one = not x.is_contiguous() and not x.is_neg()
    alike = work.dtype == x.dtype and work.shape == x.shape
    return makes_one and alike and work.data_ptr() % ALIGNMENT == 0


class Copies(Protocol):
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


@dataclass(frozen=True)
class _Snapshot:
    """What a later step compares before it uses a plan again.

    Attributes:
        states: of the parameters, with
        values: everything that they hold, one after the other.
        tensors, addresses: those of the parameters and states that a step reads and writes.
        held, gradients: how the parameters and their gradients are read.
        alignments: of the gradients' addresses, which may be others in each step.
        empty: how many gradients have no address, for want of elements.
        order: of each batch the places of its slots' parameters among all.
        strides: of parameters that are stepped in a new copy each time, by their places.
        copied: the places of gradients that are.
    """

    states: _States
    values: list[Any]
    tensors: list[Tensor]
    addresses: list[int]
    held: _Look
    gradients: _Look
    alignments: list[int]
    empty: int
    order: list[list[int]]
    strides: dict[int, tuple[int, ...]]
    copied: list[int]

    def is_of(self, held: list[Tensor], state: Mapping[Tensor, dict]) -> bool:
        """Whether parameters and their states are where and as they were."""
        return (
            self.held.is_of(held)  # `p.data.t()` has p's address
            and self.states.are_in(state)
            and same_objects(chain.from_iterable(map(dict.values, self.states.each)), self.values)
            and _addresses(self.tensors) == self.addresses
        )


@dataclass
class StepPlan:
    """The step of some parameters whose settings differ in hyperparameters at most.

    Parameters that have no gradient later are left out of a step, where engines can do that.

    Attributes:
        form: the settings that decide how state is stored, what is run and by which engine, and how
            many parameters each part of a group lists.
        listed: the parameters that those list.
        params: those of them that have or had a gradient, each once.
        held, gradients: of each the plain tensor that this rank holds, and that of its gradient.
        missing: the places of those that have no gradient; a `stand_in` is in its place.
        batches: the parameters by device and engine, as the engines are given them. Each keeps the
            engine's tables, which the plan after this one takes over if they fit.
        work: of each parameter the tensor that is stepped.
        copies: those of them that are whole copies of shards, to be renewed in every step.
        staged: of parameters that are stepped in a copy, by their places, the part of the copy that
            is held.
        new_states: states that are to be kept once the step can no longer fail.
        reused: whether this is the last step's plan, with new gradients.
    """

    form: tuple
    listed: list[Tensor]
    params: list[Tensor]
    held: list[Tensor]
    gradients: list[Tensor]
    missing: frozenset[int] = frozenset()
    batches: list[Batch] = field(default_factory=list)
    work: list[Tensor] = field(default_factory=list)
    copies: Copies | None = None
    staged: dict[int, Tensor] = field(default_factory=dict)
    new_states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    reused: bool = False
    _snapshot: _Snapshot | None = None  # None where this plan cannot be used again

    def __post_init__(self) -> None:
        known = set(self.params)
        self._known = [p in known for p in self.listed]
        self._addresses: list[int] = []  # of gradients that are aligned as in the first step

    def take_tables(self, last: StepPlan | None) -> None:
        """Take over the tables of the last step's plan that fit, once the values are set."""
        if self is last:
            return
        before = {} if last is None else {batch.place: batch for batch in last.batches}
        missing = {id(self.work[i]) for i in self.missing}
        for batch in self.batches:
            if missing:
                places = (i for i, slot in enumerate(batch.slots) if id(slot.p) in missing)
                batch.missing = frozenset(places)
            batch.look()
            old = before.get(batch.place)
            if old is not None and old.key == batch.key:
                batch.tables = old.tables

    def written(self) -> list[Tensor]:
        """What is held of the parameters that are stepped."""
        if not self.missing:
            return self.held
        return [p for i, p in enumerate(self.held) if i not in self.missing]

    def write_back(self) -> None:
        """Copy what was stepped in copies to where it is held."""
        written = [i for i in self.staged if i not in self.missing]
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
        """Let go of gradients and copies: the next backward pass needs their memory."""
        self.gradients, self.work, self.new_states = [], [], {}
        wholes: dict[int, Tensor] = {}
        if self.copies is not None:
            self.copies.gradients = []
            if self._snapshot is not None:
                wholes = dict(zip(self.copies.index, self.copies.tensors, strict=True))
        slots = [slot for batch in self.batches for slot in batch.slots]
        if len(self.staged) > len(wholes):
            stay = {id(p) for i, p in enumerate(self.held) if i not in self.staged}
            stay.update(map(id, wholes.values()))
            self.staged = {i: self.staged[i] for i in wholes}
            for slot in slots:
                slot.p = slot.p if id(slot.p) in stay else slot.p.new_empty(0)
        for slot in slots:
            slot.g = slot.p

    def _copied(self, order: list[list[int]]) -> tuple[list[int], list[int]] | None:
        """Parameters and gradients that are copied in every step, as they are not contiguous.

        None if any are for another reason, but for whole copies.
        """
        wholes = set() if self.copies is None else set(self.copies.index)
        params = [i for i in self.staged if i not in wholes]
        slots = (slot for batch in self.batches for slot in batch.slots)
        read = dict(zip(chain.from_iterable(order), (slot.g for slot in slots), strict=True))
        own = self.gradients
        gradients = [i for i, g in read.items() if g is not own[i] and i not in wholes]
        copied = [(self.held[i], self.work[i]) for i in params]
        copied += [(own[i], read[i]) for i in gradients]
        only_these = all(_is_its_copy(x, work) for x, work in copied)
        return (params, gradients) if only_these else None

    def _take_snapshot(self, state: Mapping[Tensor, dict[str, Any]]) -> _Snapshot | None:
        """None where a parameter is listed twice, or one or a gradient changed for a step."""
        at = {id(x): i for i, x in enumerate(self.work)}
        order = [[at[id(slot.p)] for slot in batch.slots] for batch in self.batches]
        copied = self._copied(order)
        if copied is None or sum(self._known) > len(self.params):
            return None
        slots = [slot for batch in self.batches for slot in batch.slots]
        states = _States(self.params, state)
        tensors = [*self.held, *chain.from_iterable(slot.owned() for slot in slots)]
        addresses = _addresses(self.gradients)
        return _Snapshot(
            states=states,
            values=[value for one in states.each for value in one.values()],
            tensors=tensors,
            addresses=_addresses(tensors),
            held=_Look(self.held),
            gradients=_Look(self.gradients),
            alignments=_alignments(addresses),
            empty=addresses.count(0),
            order=order,
            strides={i: self.held[i].stride() for i in copied[0]},
            copied=copied[1],
        )

    def is_for(self, form: tuple, listed: list[Tensor]) -> bool:
        """Whether it may be the plan of these parameters, too."""
        usable = self._snapshot is not None
        return usable and form == self.form and same_objects(listed, self.listed)

    def can_leave_out(self) -> bool:
        """Whether some of its parameters can be left out of a step."""
        return (
            not self.staged
            and same_objects(self.held, self.params)
            and all(ENGINES[batch.engine].by_tables for batch in self.batches)
        )

    def kept(self, state: Mapping[Tensor, dict[str, Any]]) -> set[Tensor]:
        """The parameters that the next plan is to have even if they have no gradient then.

        Not those that are copied in every step.
        """
        before = self._snapshot
        if before is None or not self.can_leave_out():
            return set()
        if not before.is_of(self.params, state):
            return set()
        return {p for i, p in enumerate(self.params) if i not in before.strides}

    def _own(self, found: list[Tensor | None]) -> tuple[list[Tensor], list[int]] | None:
        """The gradients of its parameters, and the places of those that have none.

        None if others have gradients, or some have none that cannot be left out.
        """
        gradients = [g for g in found if g is not None]
        if [g is not None for g in found] == self._known:
            return gradients, []
        own = list(compress(found, self._known))
        missing = [i for i, g in enumerate(own) if g is None]
        if len(gradients) + len(missing) > len(own) or not self.can_leave_out():
            return None
        pairs = zip(self.params, own, strict=True)
        return [stand_in(p) if g is None else g for p, g in pairs], missing

    def take_gradients(
        self, found: list[Tensor | None], locals_of: Locals, state: Mapping[Tensor, dict[str, Any]]
    ) -> bool:
        """Go on with new gradients, if nothing else is new.

        Args:
            found: of the listed parameters.
            locals_of: gives what this rank holds of parameters and their gradients; None if that
                takes a closer look.
            state: of all parameters.
        """
        before, own = self._snapshot, self._own(found)
        local = None if own is None else locals_of(self.params, own[0])
        if before is None or own is None or local is None:
            return False
        (held, gradients), missing = local, own[1]
        if not (
            before.gradients.is_of(gradients)
            and (held is self.params or same_objects(held, self.held))
            and before.is_of(held, state)
        ):
            return False
        if any(held[i].stride() != stride for i, stride in before.strides.items()):
            return False
        addresses = _addresses(gradients)
        if addresses != self._addresses:
            if _alignments(addresses) != before.alignments or addresses.count(0) != before.empty:
                return False
            self._addresses = addresses
        copies = {i: held[i].contiguous() for i in before.strides if i not in missing}
        stepped = list(gradients) if before.copied else gradients
        for i in before.copied:
            stepped[i] = gradients[i].contiguous()
        if any(_alignments(_addresses((*copies.values(), *(stepped[i] for i in before.copied))))):
            return False
        if self.copies is not None and self.copies.tensors:
            _, stepped = self.copies.renew(held, stepped)
        addresses = list(addresses) if stepped is gradients else _addresses(stepped)
        for i in missing:
            addresses[i] = NO_GRADIENT
        self.missing = frozenset(missing)
        self.staged.update(copies)
        for batch, order in zip(self.batches, before.order, strict=True):
            places = dict(zip(order, range(len(order)), strict=True)) if missing or copies else {}
            batch.take_gradients(
                [stepped[i] for i in order], [addresses[i] for i in order],
                frozenset(places[i] for i in missing if i in places),
                {places[i]: p for i, p in copies.items() if i in places},
            )  # fmt: skip
        self.gradients, self.reused = gradients, True
        return True
