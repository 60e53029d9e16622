"""`Library`: what is asked of another library's state dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .coded import Coded


class Library(ABC):
    """Another library's state dicts.

    Attributes:
        name: what messages call it.
        families: the optimizers of ours that it has.
    """

    name: str
    families: tuple[str, ...]

    @abstractmethod
    def recognises(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether a state dict, with a dict `state` and any `param_groups`, is of this library."""

    @abstractmethod
    def group(self, saved: Mapping[str, Any], family: str) -> dict[str, Any]:
        """A saved parameter group, its settings those that mean the same here."""

    @abstractmethod
    def state(
        self, saved: Mapping[str, Any], p: Tensor, family: str
    ) -> tuple[dict[str, Any], bool]:
        """A parameter's saved state as one of ours.

        Args:
            saved: its state, not empty; None says nothing there.
            p: the parameter.
            family: of the optimizer that loads it.

        Returns:
            The state, and whether its moments are in it bit for bit.

        Raises:
            ValueError: for what the library does not leave behind for this family and parameter.
        """

    @abstractmethod
    def codes(self, saved: Mapping[str, Any], p: Tensor, family: str) -> dict[str, Coded]:
        """The moments of a saved state that `state` has read that are in codes, by our keys."""
