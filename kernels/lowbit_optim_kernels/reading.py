"""What a kept plan compares: how tensors are read, addresses, and states of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from .batch import ACCESS_BYTES


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


_DTYPE = attrgetter("dtype")

# What decides how tensors are read, but their addresses. Layouts come first, as a sparse one has
# neither strides nor an address.
COLUMNS: tuple[Callable[[Tensor], Any], ...] = (
    *map(attrgetter, ("layout", "dtype", "device", "shape")),
    Tensor.is_contiguous,
    Tensor.is_neg,
)


class ReadSignature:
    """Read signature of some tensors: all that decides how each is read but its address."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._columns = [list(map(look, tensors)) for look in COLUMNS]
        self._guards = _guards(tensors)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether others, as many, are read in the same way."""
        if self._guards(*tensors):
            return True
        # One after the other: a thousand shapes in a list would have Python collect garbage.
        pairs = zip(COLUMNS, self._columns, strict=True)
        return all(all(map(eq, map(look, tensors), column)) for look, column in pairs)


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Addresses of tensors, 0 for those without memory."""
    return list(map(Tensor.data_ptr, tensors))


def alignments_of(addresses: Iterable[int]) -> list[int]:
    """Distances of addresses from those for the widest accesses, in bytes."""
    return [address % ACCESS_BYTES for address in addresses]


# Given values, a function that finds this rank's tensors of other values of the same types.
TensorsOf = Callable[[list[Any]], Callable[[list[Any]], list[Tensor]]]


def all_values(each: Iterable[dict[str, Any]]) -> list[Any]:
    """What all states hold, one after the other."""
    return list(chain.from_iterable(map(dict.values, each)))


class States:
    """What the states of some parameters have to be for a plan to hold.

    It refers to nothing that they hold: who moves or deletes state between steps frees memory. That
    a tensor is another one does not matter if it is of the same dtype, at the same address.
    """

    def __init__(
        self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]], tensors_of: TensorsOf
    ) -> None:
        self._params = params
        values = all_values(state[p] for p in params)
        self._count, self._tensors = len(values), tensors_of(values)
        tensors = self._tensors(values)
        self._addresses, self._dtypes = addresses_of(tensors), list(map(_DTYPE, tensors))
        self._note(state)

    def _note(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note where the parameters are in the mapping: tensors take long to hash.

        Unless most of it is of others, as all of it is looked through.
        """
        most = len(state) < 4 * len(self._params)
        self._keys = list(map(id, state)) if most else []
        places = {key: place for place, key in enumerate(self._keys)}
        self._places = [places[id(p)] for p in self._params] if most else []

    def find(self, state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Each parameter's state, if their tensors are where they were, and of the same dtypes."""
        known = bool(self._keys) and list(map(id, state)) == self._keys
        if known:
            every = list(state.values())
            each = [every[place] for place in self._places]
        else:
            each = [state.get(p, {}) for p in self._params]
        values = all_values(each)
        if len(values) != self._count:
            return None
        try:
            tensors = self._tensors(values)
            same = addresses_of(tensors) == self._addresses
        except (AttributeError, RuntimeError, TypeError):  # of other types than they were
            return None
        if not (same and list(map(_DTYPE, tensors)) == self._dtypes):
            return None
        if not known:
            self._note(state)
        return each
