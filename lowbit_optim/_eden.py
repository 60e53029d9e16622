"""The scheduler Eden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from . import _checks
from ._settings import plain

COUNTS = ("batch", "epoch")  # which a state dict must have


class Eden:
    r"""icefall's Eden: a learning rate that falls with the square root of batches and of epochs.

    With b batches and e epochs done, B = lr_batches and E = lr_epochs:

        lr = base ((b^2 + B^2) / B^2)^(-1/4) ((e^2 + E^2) / E^2)^(-1/4) warmup

    where `warmup` rises linearly from warmup_start to 1 over the first warmup_batches batches. The
    base is the group's `initial_lr`, or the `base_lr` that icefall has in its place, or its `lr`
    where there is neither yet. The learning rates are set when the scheduler is constructed, in
    every call of `step_batch` and `step_epoch`, and by `load_state_dict`; a parameter group that
    was added since is taken in then. An `lr` that is a tensor is written in place.

    Args:
        optimizer: any torch.optim.Optimizer.
        lr_batches: batches after which the learning rate begins to fall, > 0; icefall suggests
            5000.
        lr_epochs: epochs after which it begins to fall, > 0; icefall suggests 6 for a training of
            20 to 40 epochs.
        warmup_batches: length of the warm-up in batches; 0, the default, for none.
        warmup_start: factor that the warm-up starts from, 0 to 1. Default 0.5.

    Raises:
        TypeError: if optimizer is not a torch.optim.Optimizer.
        ValueError, TypeError: naming the argument that is not allowed.

    Example:
        >>> scheduler = Eden(optimizer, lr_batches=5000, lr_epochs=6)
        >>> for epoch in range(30):
        ...     scheduler.step_epoch(epoch)
        ...     for batch in loader:
        ...         train_one(batch)
        ...         scheduler.step_batch()

    Reference:
        Povey et al., k2-fsa/icefall,
        `egs/librispeech/ASR/pruned_transducer_stateless7/optim.py` (2022).

    Where it differs: icefall sets the first learning rate only in the first call of a step method,
    where warm-up is 500 batches by default, and refuses groups that were added later. The names in
    `state_dict()` are icefall's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_batches: float,
        lr_epochs: float,
        warmup_batches: float = 0,
        warmup_start: float = 0.5,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        _checks.positive("lr_batches", lr_batches)
        _checks.positive("lr_epochs", lr_epochs)
        _checks.number("warmup_batches", warmup_batches, 0.0)
        _checks.number("warmup_start", warmup_start, 0.0, 1.0)
        self.optimizer = optimizer
        self.lr_batches = lr_batches
        self.lr_epochs = lr_epochs
        self.warmup_batches = warmup_batches
        self.warmup_start = warmup_start
        self.batch: float = 0
        self.epoch: float = 0
        self._set_lrs()

    def step_batch(self, batch: float | None = None) -> None:
        """Count a batch, or say how many there have been, and set the learning rates.

        Args:
            batch: batches since training began, over all epochs; None for one more.

        Raises:
            ValueError, TypeError: if batch is no finite number >= 0.
        """
        self.batch = _counted("batch", self.batch, batch)
        self._set_lrs()

    def step_epoch(self, epoch: float | None = None) -> None:
        """Count an epoch, or say how many there have been, and set the learning rates.

        Args:
            epoch: epochs that are over, given at the start of an epoch; None for one more, called
                at the end of an epoch.

        Raises:
            ValueError, TypeError: if epoch is no finite number >= 0.
        """
        self.epoch = _counted("epoch", self.epoch, epoch)
        self._set_lrs()

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group, as last set."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Numbers only: the progress of training (`batch`, `epoch`) and the groups' `base_lrs`."""
        base_lrs = [float(group["initial_lr"]) for group in self._groups()]
        return plain({"batch": self.batch, "epoch": self.epoch, "base_lrs": base_lrs})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, and set the learning rates.

        The schedule's own settings (lr_batches, lr_epochs, warm-up) stay as constructed.

        Args:
            state_dict: as returned by `state_dict()`, or by icefall's Eden; without `base_lrs`,
                which later versions of that do not save, the groups keep theirs.

        Raises:
            ValueError, TypeError: if it lacks an entry, has one that is not allowed, or is of an
                optimizer with another number of parameter groups; nothing has been changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict of Eden must be a dict, got {state_dict!r}")
        missing = [key for key in COUNTS if key not in state_dict]
        if missing:
            raise ValueError(f"state_dict of Eden has no {', '.join(map(repr, missing))}")
        groups = self._groups()
        base_lrs = state_dict.get("base_lrs", [float(g["initial_lr"]) for g in groups])
        if not isinstance(base_lrs, (list, tuple)):
            raise TypeError(f"base_lrs must be numbers in a list; got {base_lrs!r}")
        if len(base_lrs) != len(groups):
            raise ValueError(
                f"state_dict has base_lrs for {len(base_lrs)} parameter groups, the optimizer has "
                f"{len(groups)}"
            )
        for name in COUNTS:
            _checks.number(name, state_dict[name], 0.0)
        for base in base_lrs:
            _checks.number("base_lrs", base, 0.0)
        self.batch, self.epoch = state_dict["batch"], state_dict["epoch"]
        for group, base in zip(groups, base_lrs, strict=True):
            group["initial_lr"] = base
        self._set_lrs()

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, each with a base."""
        for group in self.optimizer.param_groups:
            if group.get("initial_lr") is None:
                group["initial_lr"] = float(group.get("base_lr", group["lr"]))
        return self.optimizer.param_groups

    def _factor(self) -> float:
        by_batch = 1 + _square(self.batch / self.lr_batches)
        by_epoch = 1 + _square(self.epoch / self.lr_epochs)
        warmup = 1.0
        if self.batch < self.warmup_batches:
            done = self.batch / self.warmup_batches
            warmup = self.warmup_start + (1.0 - self.warmup_start) * done
        return float((by_batch * by_epoch) ** -0.25 * warmup)  # counts may be NumPy's

    def _set_lrs(self) -> None:
        factor, last = self._factor(), []
        for group in self._groups():
            lr = float(group["initial_lr"]) * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            last.append(lr)
        self._last_lr = last


def _square(x: float) -> float:
    try:
        return x**2
    except OverflowError:
        return math.inf


def _counted(name: str, before: float, given: float | None) -> float:
    """One more, or the number that is given."""
    if given is None:
        return before + 1
    _checks.number(name, given, 0.0)
    return given
