"""What a kept plan compares: how tensors are read, addresses, and states of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


class States:
    """The states of some parameters, as a mapping of all had them.

    Tensors take long to hash. So where most of the mapping are theirs, all of it is compared first.
    """

    def __init__(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._params, self.each = params, [state[p] for p in params]
        self._note(state)

    def _note(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        most = len(state) < 4 * len(self._params)
        self._keys, self._values = (list(state), list(state.values())) if most else ([], [])

    def matches(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether a mapping has the same ones."""
        known = bool(self._keys) and same_objects(state, self._keys)
        if known and same_objects(state.values(), self._values):
            return True
        if not same_objects(map(state.get, self._params), self.each):
            return False
        self._note(state)
        return True
