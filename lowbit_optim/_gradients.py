"""Checks of a parameter and its gradient before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lowbit_optim_kernels.engines.registry import is_wrapper

from . import _sharding
from ._tensor_checks import REAL, require_memory


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Each parameter's gradient, without asking subclasses such as DTensor how to get at it."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.grad for p in params]


def _is_steppable(p: Tensor) -> bool:
    return p.dtype in REAL and p.layout == torch.strided


def is_left_alone(p: Tensor) -> bool:
    """Whether a parameter is one that no step could change and, being frozen, none is to.

    So are the weights of a quantized model whose adapters are trained.
    """
    return isinstance(p, torch.nn.Parameter) and not p.requires_grad and not _is_steppable(p)


def require_steppable(p: Tensor, name: str) -> None:
    """Raise a TypeError for a parameter that no step could change; `name` is the optimizer's."""
    if not _is_steppable(p):
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in REAL)
        raise TypeError(
            f"{name} takes dense parameters of dtype {allowed}; got {p.dtype}, {p.layout}"
        )


def checked(p: Tensor, name: str) -> Tensor:
    """A parameter's gradient as the engines read it: contiguous, without a negative bit.

    That of a DTensor is this rank's shard.

    Args:
        p: a parameter that has a gradient.
        name: the optimizer's, for errors.

    Raises:
        TypeError: for a parameter that no step could change.
        RuntimeError: for a DTensor that is not sharded by rows, a FakeTensor, a sparse or complex
            gradient, one of another type, shape or on another device than the parameter, memory
            that has been freed, tensors of a torch.func transform, which have none, or a parameter
            whose elements share memory.
    """
    g = p.grad
    assert g is not None
    require_steppable(p, name)
    if _sharding.is_dtensor(p):
        p, g = _sharding.local(p), _sharding.gradient(p, name)
    if is_wrapper(type(g)) and hasattr(g, "wait"):
        g = g.wait()  # of a functional collective, which may still run
    if is_wrapper(type(g)) and not is_wrapper(type(p)):
        raise RuntimeError(
            f"{name}: a parameter of shape {tuple(p.shape)} is a plain tensor and its gradient a "
            f"{type(g).__name__}"
        )
    if isinstance(p, FakeTensor):
        raise RuntimeError(
            f"{name}: a parameter of shape {tuple(p.shape)} is a FakeTensor, which has no values "
            "to step; `lowbit-optim estimate` says what a model's state takes"
        )
    if g.layout != torch.strided:
        raise RuntimeError(
            f"{name} does not support sparse gradients; "
            "use sparse=False in the layer, or torch.optim.SparseAdam, SGD or Adagrad"
        )
    if g.is_complex():
        raise RuntimeError(f"{name} does not support complex gradients; take their real part")
    if g.shape != p.shape:
        raise RuntimeError(
            f"{name}: a parameter of shape {tuple(p.shape)} has a gradient of "
            f"shape {tuple(g.shape)}"
        )
    if g.device != p.device:
        raise RuntimeError(
            f"{name}: a parameter is on {p.device} and its gradient on "
            f"{g.device}; move the model before constructing the optimizer"
        )
    _check_memory(p, g, name)
    return g.resolve_neg().contiguous()


def _check_memory(p: Tensor, g: Tensor, name: str) -> None:
    """Raise a RuntimeError for tensors without memory, or elements that share theirs."""
    require_memory(p, "a parameter", name)
    require_memory(g, "a gradient", name)
    if torch._debug_has_internal_overlap(p) == 1:
        raise RuntimeError(
            f"{name}: a parameter of shape {tuple(p.shape)} and strides "
            f"{p.stride()} has elements that share memory, as an expanded tensor has; clone it"
        )
