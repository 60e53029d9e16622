"""What a kept plan compares: how tensors are read, addresses, and states of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
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


def ids_of(objects: Collection[Any]) -> bytes:
    """The ids of objects, as an array of objects has them in memory: in a quarter of the time."""
    return np.fromiter(objects, object, len(objects)).tobytes()


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; tensors are not compared by value."""
    return len(a) == len(b) and all(map(is_, a, b))


# What decides how tensors are read, but their addresses. Layouts come first, as a sparse one has
# neither strides nor an address.
COLUMNS: tuple[Callable[[Tensor], Any], ...] = (
    type,
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

    It refers to nothing that they hold: who moves or deletes state between steps frees memory. So
    it knows tensors by their ids. One that got the id and the address of another does as well as
    that, if it is as large, which is asked of the largest of each state: who keeps state in another
    dtype meanwhile keeps all of it so. Of tensors in wrappers, which take time to get at, the same
    holds for addresses.
    """

    def __init__(
        self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]], tensors_of: TensorsOf
    ) -> None:
        self._params = params
        each = [state[p] for p in params]
        values = all_values(each)
        self._ids, large = ids_of(values), list(_places_of_largest(each))
        plain = [place for place, x in enumerate(values) if type(x) is Tensor and _is_strided(x)]
        self._looked_at: list[int] | None = None  # all
        if len(plain) < len(values):
            wrapped = (place for place in large if type(values[place]) is not Tensor)
            self._looked_at = [*wrapped, *plain]
        self._tensors = tensors_of(self._chosen(values))
        number = {place: k for k, place in enumerate(self._chosen(range(len(values))))}
        self._large = [number[place] for place in large]
        self._addresses, self._sizes = self._look_at(values)
        self._note(state)

    def _chosen(self, each: Any) -> Any:
        """Those that are looked at."""
        return each if self._looked_at is None else [each[place] for place in self._looked_at]

    def _look_at(self, values: list[Any]) -> tuple[list[int], list[int]]:
        """Addresses of tensors, and sizes of the largest."""
        tensors = self._tensors(self._chosen(values))
        return addresses_of(tensors), [tensors[k].nbytes for k in self._large]

    def _note(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note where the parameters are in the mapping: tensors take long to hash.

        Unless most of it is of others, as all of it is looked through.
        """
        most = len(state) < 4 * len(self._params)
        self._keys, self._places = b"", list[int]()
        if most:
            places = {id(p): place for place, p in enumerate(state)}
            self._keys, self._places = ids_of(state), [places[id(p)] for p in self._params]

    def find(self, state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Each parameter's state, if they hold what they held, where it was."""
        known = bool(self._keys) and ids_of(state) == self._keys
        if known:
            every = list(state.values())
            each = [every[place] for place in self._places]
        else:
            each = [state.get(p, {}) for p in self._params]
        values = all_values(each)
        if ids_of(values) != self._ids:
            return None
        try:
            if self._look_at(values) != (self._addresses, self._sizes):
                return None
        except (AttributeError, RuntimeError, TypeError):  # of another type, at an old id
            return None
        if not known:
            self._note(state)
        return each


def _is_strided(x: Any) -> bool:
    """Whether a value is a tensor with an address, as a sparse one that a user keeps has none."""
    return isinstance(x, Tensor) and x.layout == torch.strided


def _places_of_largest(each: Iterable[dict[str, Any]]) -> Iterator[int]:
    """Where the largest tensor of each state is among all values."""
    before = 0
    for state in each:
        sizes = [x.nbytes if _is_strided(x) else -1 for x in state.values()]
        if max(sizes, default=-1) >= 0:
            yield before + sizes.index(max(sizes))
        before += len(sizes)
