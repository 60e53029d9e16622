"""`patch`: this package's classes in the place of bitsandbytes' own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Mapping

from . import optim

# Other libraries derive from the base classes here, which use the manager of this module.
BASES = "bitsandbytes.optim.optimizer"

_lock = threading.Lock()
_replaced: dict[type, type] = {}  # bitsandbytes' classes by those that stand in their place


class Patch:
    """A record of what `patch` replaced; as a context manager it is undone when the block ends.

    A patch that was made while another was in force has done nothing, and undoes nothing.
    """

    def __init__(self) -> None:
        self._mine = False
        with _lock:
            if not _replaced:
                pairs = _pairs()
                _exchange({theirs: ours for ours, theirs in pairs.items()})
                _replaced.update(pairs)
                self._mine = True

    def undo(self) -> None:
        """Put bitsandbytes' own classes back. What has been constructed stays as it is."""
        with _lock:
            if self._mine:
                _exchange(_replaced)
                _replaced.clear()
                self._mine = False

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


def patch() -> Patch:
    """Put this package's optimizers and manager into the installed bitsandbytes.

    Afterwards `bitsandbytes.optim.AdamW8bit` is `lowbit_optim.bitsandbytes.optim.AdamW8bit`, and so
    with every optimizer that both have and with `GlobalOptimManager`, wherever a module of
    bitsandbytes has them. Call it before other code takes these names out of bitsandbytes by
    `from bitsandbytes.optim import ...`. A plain call lasts; in a `with` block it ends with it.

    `bitsandbytes.optim.optimizer` is left as it is: its base classes, which other libraries derive
    from, and the manager that they use.

    Returns:
        An object with `undo()`, which is also a context manager.

    Raises:
        ImportError: if bitsandbytes is not installed. `lowbit_optim.bitsandbytes.optim` has the
            same names without it.

    Example:
        >>> with patch():
        ...     optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    """
    return Patch()


def _pairs() -> dict[type, type]:
    """The classes that both packages have: bitsandbytes' by ours."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            "patch() puts classes into bitsandbytes, which is not installed; without it import "
            "them from lowbit_optim.bitsandbytes.optim",
            name="bitsandbytes",
        )
    # Its parts that take names from bitsandbytes.optim have to be there to be changed.
    importlib.import_module("bitsandbytes")
    theirs = vars(importlib.import_module("bitsandbytes.optim"))
    return {
        ours: theirs[name]
        for name, ours in vars(optim).items()
        if inspect.isclass(ours) and name in theirs
    }


def _exchange(instead: Mapping[type, type]) -> None:
    """Replace classes by others in every module of bitsandbytes that has them."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "bitsandbytes" or module_name == BASES:
            continue
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value in instead:
                setattr(module, name, instead[value])
