"""Cached step plans: what a step needs of parameters, states and gradients, kept while it holds.

A model has hundreds of parameters, and looking at each of them in Python takes longer than a GPU
needs to step them all. But from step to step nothing changes beside the gradients' values and
addresses. So the last step's plan is used again if a few flat comparisons say that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, Protocol

import torch
from torch import Tensor

from .plan import ALIGNMENT, Batch


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


class Copies(Protocol):
    """Copies of parameters that are stepped in place of what this rank holds of them."""

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
        states: of each parameter, with
        values: everything that they hold, one after the other.
        tensors, addresses: those of the parameters and states that a step reads and writes.
        held, gradients: how the parameters and their gradients are read.
        alignments: of the gradients' addresses, which may be others in each step.
        empty: how many gradients have no address, for want of elements.
        order: of each batch the places of its slots' parameters among all.
    """

    states: list[dict[str, Any]]
    values: list[Any]
    tensors: list[Tensor]
    addresses: list[int]
    held: _Look
    gradients: _Look
    alignments: list[int]
    empty: int
    order: list[list[int]]

    def is_of(self, held: list[Tensor], state: Mapping[Tensor, dict], params: list[Tensor]) -> bool:
        """Whether parameters and their states are where and as they were."""
        return (
            self.held.is_of(held)  # `p.data.t()` has p's address
            and same_objects(map(state.get, params), self.states)
            and same_objects(chain.from_iterable(map(dict.values, self.states)), self.values)
            and _addresses(self.tensors) == self.addresses
        )


@dataclass
class StepPlan:
    """The step of some parameters whose settings differ in hyperparameters at most.

    Attributes:
        form: the settings that decide how state is stored, what is run and by which engine, and how
            many of the parameters are of each part of a group.
        params: the parameters that have a gradient, each once.
        held, gradients: of each the plain tensor that this rank holds, and that of its gradient.
        batches: the parameters by device and engine, as the engines are given them. Each keeps the
            engine's tables, which the plan after this one takes over if they fit.
        work: of each parameter the tensor that is stepped.
        copies: those of them that are whole copies of shards, to be renewed in every step.
        staged: what is held of parameters that are stepped in a copy, with its part of the copy.
        new_states: states that are to be kept once the step can no longer fail.
        reused: whether this is the last step's plan, with new gradients.
    """

    form: tuple
    params: list[Tensor]
    held: list[Tensor]
    gradients: list[Tensor]
    batches: list[Batch] = field(default_factory=list)
    work: list[Tensor] = field(default_factory=list)
    copies: Copies | None = None
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    new_states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    reused: bool = False
    _snapshot: _Snapshot | None = None  # None where this plan cannot be used again

    def take_tables(self, last: StepPlan | None) -> None:
        """Take over the tables of the last step's plan that fit, once the values are set."""
        if self is last:
            return
        before = {} if last is None else {batch.place: batch for batch in last.batches}
        for batch in self.batches:
            batch.look()
            old = before.get(batch.place)
            if old is not None and old.key == batch.key:
                batch.tables = old.tables

    def write_back(self) -> None:
        """Copy what was stepped in copies to where it is held."""
        held, work = [held for held, _ in self.staged], [work for _, work in self.staged]
        if any(map(Tensor.is_neg, held)):  # which foreach operators refuse
            for to, source in self.staged:
                to.copy_(source)
        elif held:
            torch._foreach_copy_(held, work)

    def freeze(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note after a step what a later one has to compare, and keep no more than that."""
        usable = self.reused or self._is_usable_again()
        gradients, self.gradients, self.new_states = self.gradients, [], {}
        self._release(usable)
        if usable and not self.reused:
            self._snapshot = self._take_snapshot(state, gradients)

    def _is_usable_again(self) -> bool:
        """Not where a parameter or a gradient is copied to be stepped, but for whole copies."""
        copies = [] if self.copies is None else self.copies.tensors
        renewed = [] if self.copies is None else self.copies.gradients
        own = set(map(id, [*self.gradients, *renewed]))
        slots = (slot for batch in self.batches for slot in batch.slots)
        return len(self.staged) == len(copies) and all(id(slot.g) in own for slot in slots)

    def _release(self, usable: bool) -> None:
        """Let go of gradients and copies: the next backward pass needs their memory."""
        if self.copies is not None:
            self.copies.gradients = []
        if not usable:
            self.staged, self.work = [], []
            held = set(map(id, self.held))
            for slot in chain.from_iterable(batch.slots for batch in self.batches):
                slot.p = slot.p if id(slot.p) in held else slot.p.new_empty(0)
        for batch in self.batches:
            for slot in batch.slots:
                slot.g = slot.p

    def _take_snapshot(
        self, state: Mapping[Tensor, dict[str, Any]], gradients: list[Tensor]
    ) -> _Snapshot:
        slots = [slot for batch in self.batches for slot in batch.slots]
        states = [state[p] for p in self.params]
        tensors = [*self.held, *chain.from_iterable(slot.owned() for slot in slots)]
        at = {id(x): i for i, x in enumerate(self.work)}
        addresses = _addresses(gradients)
        return _Snapshot(
            states=states,
            values=[value for one in states for value in one.values()],
            tensors=tensors,
            addresses=_addresses(tensors),
            held=_Look(self.held),
            gradients=_Look(gradients),
            alignments=_alignments(addresses),
            empty=addresses.count(0),
            order=[[at[id(slot.p)] for slot in batch.slots] for batch in self.batches],
        )

    def with_gradients(
        self, form: tuple, params: list[Tensor], held: list[Tensor], gradients: list[Tensor],
        state: Mapping[Tensor, dict[str, Any]],
    ) -> StepPlan | None:  # fmt: skip
        """This plan with new gradients, if nothing else is new; else None."""
        before = self._snapshot
        if before is None or form != self.form or not same_objects(params, self.params):
            return None
        if not (
            before.gradients.is_of(gradients)
            and (held is params or same_objects(held, self.held))
            and before.is_of(held, state, params)
        ):
            return None
        addresses = _addresses(gradients)
        if _alignments(addresses) != before.alignments or addresses.count(0) != before.empty:
            return None
        stepped = gradients
        if self.copies is not None and self.copies.tensors:
            _, stepped = self.copies.renew(held, gradients)
            addresses = _addresses(stepped)
        for batch, order in zip(self.batches, before.order, strict=True):
            batch.take_gradients([stepped[i] for i in order], [addresses[i] for i in order])
        self.gradients, self.reused = gradients, True
        return self
