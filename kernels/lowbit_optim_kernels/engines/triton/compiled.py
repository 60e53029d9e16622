"""Launches of kernels: the first of a kind by Triton's binder, later ones of what that compiled.

To find the code that was compiled for a launch, the binder looks at all of its arguments and
writes its constants out as text, which takes the host longer than the launch itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Compiled:
    """The compiled kernels of a batch's launches."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, list[Any]]] = {}  # and the values of their constants

    def launch(
        self, key: Any, kernel: Any, programs: tuple[int, int, int], tensors: Sequence[Tensor],
        constants: Mapping[str, Any], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel on the current device and stream.

        Args:
            key: another one for each launch of the batch that differs in more than the number of
                programs and where tensors are, which is at a multiple of 16 bytes; None for one
                whose tensors may be anywhere, or of any dtype.
            kernel: the function.
            programs: how many, in three dimensions.
            tensors: its first arguments.
            constants: its others, by name.
            options: what Triton compiles with.
        """
        if key in self._kept:
            compiled, values = self._kept[key]
            compiled[programs](*tensors, *values)
            return
        compiled = kernel[programs](*tensors, **constants, **options)
        if compiled is not None and key is not None:  # Triton's interpreter compiles nothing
            values = [constants[name] for name in kernel.arg_names[len(tensors) :]]
            self._kept[key] = compiled, values
