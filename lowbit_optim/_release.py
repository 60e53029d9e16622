"""Gradient release: each parameter is stepped as soon as its gradient is there, which then goes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lowbit_optim_kernels.batch import ProcessGroups
from lowbit_optim_kernels.devices import current_stream, scalar_dtype

from . import _checks, _gradients, _sharding, _sums
from ._optimizer import LowBitOptimizer, require_own
from ._parameter_numbers import all_parameters
from ._settings import PREVIOUS_NORM

BUCKET_BYTES = 64 << 20

_released_params = WeakTensorKeyDictionary()  # those that hooks step, with a reference to whose


def release_gradients(
    optimizer: LowBitOptimizer,
    model: nn.Module | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    clip_previous_norm: float | None = None,
    accumulate: int = 1,
) -> ReleasedGradients:
    """Step every parameter during the backward pass and drop its gradient at once.

    Gradients then take the memory of a few layers instead of the whole model's. A hook on each
    parameter steps it when its gradient has been accumulated, and sets `p.grad` to None;
    `optimizer.step()` steps what is still waiting, runs a closure and counts for schedulers.
    Weights and state are bit for bit those of a run without: step counts and random bits are each
    parameter's own. Settings are read when a hook runs, so change `lr` between backward passes.

    Args:
        optimizer: any of this package but Cain and LearnedGradient.
        model: the model that is trained, to check that its gradients are complete when a hook runs;
            optional.
        bucket_bytes: step when gradients of so many bytes are waiting; 0 steps each by itself.
            Default 64 MiB: parameters that are stepped together cost fewer launches.
        clip_previous_norm: None, or scale gradients by min(1, clip_previous_norm / N) with N the
            norm of all gradients in the step before, because that of this step is not known yet.
            The first step is not scaled. N is kept in `state_dict()`.
        accumulate: backward passes for each step; must be 1.

    Returns:
        A handle; its `remove()` undoes it, and parameters keep their gradients again.

    Raises:
        ValueError, TypeError: for `accumulate` > 1, a model under DistributedDataParallel, Cain or
            LearnedGradient, flat parameters of FSDP1, or an optimizer or a parameter that is
            released already.
        RuntimeError: by a hook or `step()`: for a second backward pass before `step()`, or under a
            GradScaler.

    Example:
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        >>> handle = release_gradients(optimizer, model)
        >>> model.body(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()

    Reference:
        Lv, Yang, Liu, Gao, Guo, Qiu, "Full Parameter Fine-tuning for Large Language Models with
        Limited Resources", arXiv:2306.09782 (2023), for stepping in the backward pass.

    Where it differs: torch's `_apply_optimizer_in_backward` makes an optimizer for each parameter,
    and so as many state dicts.
    """
    require_own(optimizer, "release_gradients")
    optimizer._check_single_steps()
    _checks.integer("bucket_bytes", bucket_bytes, 0)
    _checks.integer("accumulate", accumulate, 1)
    if accumulate > 1:
        raise ValueError(
            f"accumulate must be 1, got {accumulate}: a gradient that is released cannot be added "
            "to; use smaller batches in every step, or do not release gradients"
        )
    if clip_previous_norm is not None:
        _checks.positive("clip_previous_norm", clip_previous_norm)
    if model is not None:
        _check_model(model)
    if optimizer._released is not None:
        raise ValueError(
            f"the gradients of this {type(optimizer).__name__} are released already; call "
            "remove() of that handle first"
        )
    return ReleasedGradients(optimizer, bucket_bytes, clip_previous_norm)


def _check_model(model: nn.Module) -> None:
    _checks.module("model", model)
    if any(isinstance(x, nn.parallel.DistributedDataParallel) for x in model.modules()):
        raise ValueError(
            "gradients cannot be released under DistributedDataParallel, which reduces those of "
            "all ranks after the hooks of parameters have run; use fully_shard (FSDP2), which runs "
            "them afterwards, or call optimizer.step_parameter(p) in a hook after the all-reduce"
        )


@dataclass
class _Bucket:
    """Parameters that wait to be stepped, and the bytes of their gradients."""

    params: list[Tensor] = field(default_factory=list)
    nbytes: int = 0


def _stream(p: Tensor) -> Any:
    """The stream that a parameter's hook runs on; None where there is one only."""
    return current_stream(_sharding.local(p).device)


def _is_released(p: Tensor) -> bool:
    """Whether hooks that still do anything step a parameter."""
    reference = _released_params.get(p)
    return reference is not None and _alive(reference) is not None


def _alive(reference: weakref.ref[ReleasedGradients]) -> ReleasedGradients | None:
    """What a reference is to, if its optimizer is there, too."""
    released = reference()
    return None if released is None or released._reference() is None else released


def _hook_of(released: ReleasedGradients) -> Callable[[Tensor], None]:
    """A hook that keeps nothing alive: Python's collector sees no circle through tensors' hooks."""
    reference = weakref.ref(released)

    def take(p: Tensor) -> None:
        alive = _alive(reference)
        if alive is not None:
            alive._take(p)

    return take


class ReleasedGradients:
    """Released gradients: the hooks, and the parameters that wait to be stepped."""

    def __init__(
        self, optimizer: LowBitOptimizer, bucket_bytes: int, clip_previous_norm: float | None
    ) -> None:
        self._reference = weakref.ref(optimizer)  # which has this, and would be kept by it
        self._bucket_bytes, self._clip = bucket_bytes, clip_previous_norm
        # By streams: what one of them has left to do, another does not wait for before the backward
        # pass is over.
        self._waiting: dict[Any, _Bucket] = {}
        self._squares: dict[tuple[Any, ProcessGroups], Tensor] = {}
        self._taken: set[Tensor] = set()  # since the last step
        self._lock = threading.Lock()  # the backward pass has a thread for each device
        self._hooks: dict[Tensor, RemovableHandle] = {}
        params = all_parameters(optimizer.param_groups)
        try:
            self._hook(params)
            if clip_previous_norm is not None and params:
                self._norm()
        except BaseException:
            self.remove()
            raise
        optimizer._released = self

    @property
    def _optimizer(self) -> LowBitOptimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the optimizer of these released gradients is no longer there")
        return optimizer

    def _hook(self, params: Iterable[Tensor]) -> None:
        """Have those of these parameters stepped by hooks that are trained and have none yet."""
        new = [p for p in dict.fromkeys(params) if p.requires_grad and p not in self._hooks]
        taken = next((p for p in new if _is_released(p)), None)
        if taken is not None:
            raise ValueError(
                f"a parameter of shape {tuple(taken.shape)} is stepped in the backward pass by "
                "another optimizer already; call remove() of that handle first"
            )
        if any(getattr(p, "_is_flat_param", False) for p in new):
            raise ValueError(
                "gradients of flat parameters cannot be released: FullyShardedDataParallel uses "
                "them after the hooks have run; use fully_shard (FSDP2)"
            )
        take = _hook_of(self)
        self._hooks.update((p, p.register_post_accumulate_grad_hook(take)) for p in new)
        _released_params.update(dict.fromkeys(new, weakref.ref(self)))

    def _unhook(self, params: Iterable[Tensor]) -> None:
        for p in params:
            self._hooks.pop(p).remove()
            _released_params.pop(p, None)

    def remove(self) -> None:
        """Take the hooks away; gradients that wait to be stepped stay for `optimizer.step()`."""
        self._unhook(list(self._hooks))
        self.forget()
        optimizer = self._reference()
        if optimizer is not None and optimizer._released is self:
            optimizer._released = None
            for group in optimizer.param_groups:
                group.pop(PREVIOUS_NORM, None)

    def forget(self) -> None:
        """Forget what a backward pass has left, as if the last step had been the last thing."""
        self._waiting, self._squares, self._taken = {}, {}, set()

    def _norm(self) -> Tensor:
        """The norm of all gradients in the step before, beside the first parameter; 0 at first.

        A state dict that is loaded may have none, or one on a CPU, which every step would wait for.
        """
        groups = self._optimizer.param_groups
        group = next((one for one in groups if PREVIOUS_NORM in one), groups[0])
        device = _sharding.local(next(p for one in groups for p in one["params"])).device
        norm = torch.as_tensor(group.get(PREVIOUS_NORM, 0.0), dtype=torch.float32, device=device)
        group[PREVIOUS_NORM] = norm
        return norm

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Take a parameter whose gradient is complete; in no group any more it is left alone."""
        with self._lock:
            if self._is_listed(p):
                self._wait(p, _stream(p))

    def _is_listed(self, p: Tensor) -> bool:
        optimizer = self._optimizer
        return optimizer._numbers.place_of(p, optimizer.param_groups) is not None

    def _wait(self, p: Tensor, stream: Any) -> None:
        """Have a parameter stepped once there are enough of its stream."""
        if p in self._taken:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a second gradient since the last "
                "optimizer.step(), and its first one was released: call step() after every "
                "backward pass, or zero_grad() after one that failed; gradients that are to be "
                "accumulated cannot be released. A layer "
                "that is used twice has one gradient, but two under reentrant checkpointing: call "
                "checkpoint with use_reentrant=False"
            )
        # Of the whole parameter, so that all ranks step at the same time.
        self._taken.add(p)
        bucket = self._waiting.setdefault(stream, _Bucket())
        bucket.params.append(p)
        bucket.nbytes += p.numel() * p.element_size()
        if bucket.nbytes >= self._bucket_bytes:
            self._flush(self._waiting.pop(stream).params, stream)

    def _flush(self, params: Iterable[Tensor], stream: Any) -> None:
        """Step parameters on a stream, and drop their gradients."""
        # Some may be zeroed by now, or taken out of the optimizer.
        waiting = [p for p in params if p.grad is not None and self._is_listed(p)]
        if not waiting:
            return
        optimizer = self._optimizer
        optimizer._check_unscaled()
        if self._clip is None:
            optimizer._step_subset(waiting)
        else:
            squares = self._squares_with(waiting, stream)
            optimizer.grad_scale = (self._norm() / self._clip).clamp(min=1.0)  # which they have
            try:
                optimizer._step_subset(waiting)
            finally:
                del optimizer.grad_scale
            self._squares = squares  # once: a step that raises may be taken again
        for p in waiting:
            p.grad = None

    def _squares_with(
        self, params: Iterable[Tensor], stream: Any
    ) -> dict[tuple[Any, ProcessGroups], Tensor]:
        """Squared norms of this step's gradients and of these, by who has the other shards."""
        squares, at = dict(self._squares), self._norm().device
        name = type(self._optimizer).__name__
        for p in params:
            key = stream, _sharding.shard_groups(p)
            its = _gradients.checked(p, name)
            square = torch.linalg.vector_norm(its, dtype=torch.float32)
            total = squares.get(key)
            square = square.to(at).to(scalar_dtype(at)) ** 2
            squares[key] = square if total is None else total + square
        return squares

    @torch.no_grad()
    def finish(self) -> None:
        """Step what still waits, and what had no hook yet; the step is over."""
        params = all_parameters(self._optimizer.param_groups)
        self._unhook(self._hooks.keys() - params)  # which have left the groups, or been replaced
        self._hook(params)
        waiting = [p for bucket in self._waiting.values() for p in bucket.params]
        self._waiting = {}
        self._flush(dict.fromkeys(waiting + params), None)  # those without gradients drop
        self._taken = set()
        if self._clip is None or not self._squares:
            return
        total: Any = 0.0
        for (_, groups), square in self._squares.items():
            there = square.clone()
            for group, device in groups:
                there = there.to(device)
                _sums.add_up(there, group)
            total = total + there.to(square.device)
        self._squares = {}
        norm = total.sqrt()
        self._norm().copy_(torch.where(norm.isfinite(), norm, 0.0))
