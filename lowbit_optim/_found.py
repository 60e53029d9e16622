"""What a step finds out about parameters, states and gradients, kept while none of it changes.

A model has hundreds of parameters, and looking at each of them in Python takes longer than a GPU
needs to step them all. But from step to step nothing changes beside the gradients' values and
addresses. So what the last step found is used again if a few flat comparisons say that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.plan import Slot


def _same_objects(a: Iterable[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; tensors are not compared by value."""
    a = list(a)
    return len(a) == len(b) and all(map(is_, a, b))


def _columns(gradients: Sequence[Tensor]) -> Iterator[list]:
    """All that decides how gradients are read; layouts first, as a sparse one has no strides."""
    yield [g.layout for g in gradients]
    yield [g.dtype for g in gradients]
    yield [g.device for g in gradients]
    yield [g.shape for g in gradients]
    yield [g.is_contiguous() for g in gradients]
    yield [g.is_neg() for g in gradients]


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


@dataclass
class Found:
    """A part of a group in one step.

    Attributes:
        form: the settings that decide how state is stored and which engine steps it.
        params, gradients: the parameters that have a gradient, each once, and their `grad`.
        slots: what the engines are given of them.
        batches: the slots by device and engine.
        staged: parameters that are stepped in a contiguous copy, with the copy.
        new_states: states that are to be kept once the step can no longer fail.
        again: whether this is the last step's, with new gradients.
    """

    form: tuple
    params: list[Tensor]
    gradients: list[Tensor]
    slots: list[Slot] = field(default_factory=list)
    batches: dict[tuple[torch.device, str], list[Slot]] = field(default_factory=dict)
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    new_states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    again: bool = False

    def close(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Note what a later step has to compare; False if nothing can be used again as it is.

        That is so where a parameter or a gradient is copied to be stepped.
        """
        lasting = not self.staged
        lasting = lasting and _same_objects((slot.g for slot in self.slots), self.gradients)
        for slot in self.slots:
            slot.g = slot.p  # gradients would keep memory that the next backward pass needs
        if self.again or not lasting:
            return self.again
        self._states = [state[p] for p in self.params]
        self._values = [value for one in self._states for value in one.values()]
        self._tensors = [*self.params, *(x for x in self._values if isinstance(x, Tensor))]
        self._addresses = _addresses(self._tensors)
        self._columns = list(_columns(self.gradients))
        self.gradients = []
        return True

    def holds(self, now: Found, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether `now`, before its slots are known, has nothing new but gradients of this kind."""
        return (
            now.form == self.form
            and _same_objects(now.params, self.params)
            and all(map(eq, _columns(now.gradients), self._columns))
            and all(map(Tensor.is_contiguous, now.params))  # `p.data.t()` has p's address
            and _same_objects(map(state.get, now.params), self._states)
            and _same_objects(chain.from_iterable(map(dict.values, self._states)), self._values)
            and _addresses(self._tensors) == self._addresses
        )

    def renew(self, gradients: list[Tensor]) -> Found:
        """This, with new gradients."""
        for slot, g in zip(self.slots, gradients, strict=True):
            slot.g = g
        self.again = True
        return self
