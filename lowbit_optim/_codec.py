"""Public functions of the 8-bit codec."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.formats import Unit, units
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from lowbit_optim_kernels.rules import SIGNED, SQUARE, Moment

from . import _checks, _tensor_checks


@torch._disable_dynamo
@torch.no_grad()
def quantize_blockwise(x: Tensor, signed: bool = True) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to 8 bits with one scale per block of 256 elements.

    With absmax the largest finite magnitude of a block, each element x becomes the code whose
    value is nearest to x / absmax, a tie taking the lower code; within rounding of the middle
    between two codes an engine may take the other one. Exact zeros and non-finite elements become
    the code of zero. With `signed=False` (second moments) a positive element never becomes
    zero: it takes code 1 at least; a negative one becomes zero.

    Args:
        x: tensor of any shape and floating dtype, on any device; not modified.
        signed: True (default) for the signed map, False for the map of non-negative numbers.

    Returns:
        (codes, absmax): uint8 of x's shape, and fp32 scales. If x has two or more dimensions and at
        least 64 elements per dim-0 slice, blocks restart at every slice and absmax has shape
        (x.shape[0], ceil(slice / 256)); otherwise blocks run over the flattened tensor and it has
        shape (ceil(x.numel() / 256),).

    Raises:
        TypeError: if x is not a dense floating tensor or signed is not a bool.

    Example:
        >>> codes, absmax = quantize_blockwise(torch.randn(1000, 1000))
        >>> codes.dtype, absmax.shape
        (torch.uint8, torch.Size([1000, 4]))

    Reference:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861 (2021).
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating tensor, got {getattr(x, 'dtype', type(x))}")
    _require_dense("x", x)
    unit = _unit(signed)
    codes, absmax = dispatch.encode(unit, [x], x.shape).values()
    return codes, absmax


@torch._disable_dynamo
@torch.no_grad()
def dequantize_blockwise(
    codes: Tensor, absmax: Tensor, signed: bool = True, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of `quantize_blockwise`'s codes and scales.

    Args:
        codes: uint8 of any shape.
        absmax: fp32 scales of the layout that `quantize_blockwise` describes.
        signed: the map that the codes were made with; by default the signed one.
        dtype: of the result, a floating one; by default float32.

    Returns:
        Tensor of codes' shape and `dtype`: codebook[code] * absmax.

    Raises:
        TypeError: for codes that are not dense and uint8, a signed that is not a bool, a dtype that
            is not floating.
        ValueError: if absmax is no dense real tensor of the shape that belongs to codes' shape.

    Example:
        >>> x = torch.randn(1000)
        >>> bool((dequantize_blockwise(*quantize_blockwise(x)) - x).abs().max() < 0.05)
        True
    """
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {getattr(codes, 'dtype', type(codes))}")
    _require_dense("codes", codes)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    unit = _unit(signed)
    wanted = unit.parts[1].shape(codes.shape, unit.format.block)
    _tensor_checks.require_dense("absmax", absmax)
    if tuple(absmax.shape) != wanted:
        raise ValueError(
            f"absmax must have shape {wanted} for codes of shape {tuple(codes.shape)}; got "
            f"{tuple(absmax.shape)}"
        )
    scales = absmax.detach().to(device=codes.device, dtype=torch.float32).resolve_neg().contiguous()
    return dispatch.decode(unit, [codes.contiguous(), scales], codes.shape, dtype)[0]


def _require_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}")


def _unit(signed: bool) -> Unit:
    _checks.flag("signed", signed)
    return units((Moment("x", SIGNED if signed else SQUARE),), DYNAMIC8)[0]
