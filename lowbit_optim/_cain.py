"""Cain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import TINY
from lowbit_optim_kernels.rules.stored import CAIN

from . import _checks
from ._arguments import documented, settings_of
from ._eager import EagerOptimizer, Extra, Work, dot, only_finite
from ._variants import fixed_bits

RESET_PERIOD = 1000  # steps after which the rank-1 factor is estimated afresh
CLAMP_PERIOD = 10


@documented
class Cain(EagerOptimizer):
    r"""icefall's Cain: Adam whose steps are relative to the weights' size; 32 or 8 bits.

    Every step is proportional to R, an estimate of |p| that is a product of one vector per
    dimension, and the size of a tensor is learned besides, as if it were a parameter exp(scale).
    With g the gradient, t the number of steps the tensor has taken before and n its elements:

        delta = beta1 delta
        n > 1:   s = sum(p g) ;  S = beta2 S + (1 - beta2) s^2
                 delta -= p lr sqrt(1 - beta2^(t+1)) scale_speed (1 - beta1) s / (sqrt(S) + eps)
                 v = beta2 v + (1 - beta2) g^2 ;  R = update_rms(p, R, t)
                 delta -= g / (sqrt(v) + eps) R (1 - beta1) lr (1 - beta2^t)
        n == 1:  v = beta2 v + (1 - beta2) g^2
                 delta -= g / (sqrt(v) + eps) (1 - beta1) lr sqrt(1 - beta2^t)
        p = p + delta
        every 10th step, from the first, unless lr = 0:  p = clamp(p, -param_max, param_max)

        update_rms:  every 1000th step, from the first: R = 1, then for every dimension in order,
                     in the others only for dimension t mod ndim:
                         f = max(p^2, rms_eps^2) / R^2, its mean over everything if
                             n <= 2 shape[dim], else over the other dimensions
                         R = R sqrt(f)

    Args:
        lr: learning rate, a number or a tensor of one element: the size of a step relative to the
            weights.
        betas: decay rates of `delta` and of the squared gradients.
        eps: added to the denominators.
        scale_speed: learning rate of a tensor's size, relative to lr, in (0, 1).
        rms_eps: smaller weights count as this large in R, in (0, 0.1).
        param_max: no weight grows beyond this magnitude, in (0.1, 1e4].
        bias_correction_fix: correct v's bias as Adam does, by sqrt(1 - beta2^(t+1)), in both
            branches; False keeps the exponents above, with which a first step moves nothing but a
            tensor's size.

    Example:
        >>> optimizer = Cain8bit(model.parameters(), lr=1e-2)
        >>> scheduler = Eden(optimizer, lr_batches=5000, lr_epochs=6)

    Reference:
        Povey, `egs/librispeech/ASR/pruned_transducer_stateless7/optim.py` in the history of
        danpovey/icefall (2022); unpublished otherwise.

    Where it differs: icefall stores R as a tensor of p's size and ignores `scale_speed`, always
    0.05. `step` is a CPU tensor, read without waiting for the device; only under an AMP GradScaler
    is anything read back, its `found_inf`, once a step. A non-finite gradient element damages no
    other weight.
    """

    family = "Cain"
    STORE = CAIN

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        scale_speed: float = 0.05,
        rms_eps: float = 1e-5,
        param_max: float = 20.0,
        *,
        bias_correction_fix: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        state_format: str | None = None,
        dither: bool = True,
        seed: int = 0,
        master_weight_bits: int | str | None = "auto",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings_of(locals()), args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, "eps")
        for name, high in (("scale_speed", 1.0), ("rms_eps", 0.1)):
            _checks.number(name, group[name], 0.0, high, open_low=True, open_high=True)
        _checks.number("param_max", group["param_max"], 0.1, 1e4, open_low=True)
        _checks.flags(group, "bias_correction_fix")

    def _extras(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, Extra]:
        if p.numel() <= 1:
            return {}
        vectors = {
            _vector(dim): Extra((size,), 1.0, must_be="> 0") for dim, size in enumerate(p.shape)
        }
        return {"scale_exp_avg_sq": Extra((), must_be=">= 0"), **vectors}

    def _update(self, work: Work) -> Tensor:
        group, p, g, t = work.group, work.p, work.g, work.t
        beta1, beta2 = group["betas"]
        whole = p.numel() > 1
        delta = work.moments["delta"].mul_(beta1)
        if whole:
            delta.add_(p * _size_step(work))
        square = work.moments["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = square.sqrt().add_(group["eps"] + TINY)
        torch.div(g, u, out=u)
        if whole:
            for vector in _update_rms(work):
                u.mul_(vector)
        fix = group["bias_correction_fix"]
        correction = 1 - beta2 ** (t + 1 if fix else t)
        if fix or not whole:
            correction = math.sqrt(correction)
        delta.sub_(u.mul_(work.lr * ((1 - beta1) * correction)))
        new = torch.where(delta != 0, p + delta, p)  # adding 0 would turn -0 into 0
        return new if t % CLAMP_PERIOD else _clamped(new, work)


def _clamped(p: Tensor, work: Work) -> Tensor:
    """Clamp p to ±param_max, but not with lr = 0, which moves nothing."""
    lr, limit = work.lr, work.group["param_max"]
    if isinstance(lr, Tensor):
        return torch.where(lr != 0, p.clamp(-limit, limit), p)
    return p.clamp(-limit, limit) if lr else p


def _vector(dim: int) -> str:
    """Key of R's vector along a dimension."""
    return f"param_rms_{dim}"


def _size_step(work: Work) -> Tensor:
    """Relative change of the tensor's size: Adam, without momentum, on its logarithm."""
    group, square = work.group, work.state["scale_exp_avg_sq"]
    beta1, beta2 = group["betas"]
    s = dot(work.p, work.g)
    square.mul_(beta2).add_(s * s, alpha=1 - beta2)
    step = s / (square.sqrt() + (group["eps"] + TINY))
    correction = math.sqrt(1 - beta2 ** (work.t + 1))
    return step * (work.lr * (-correction * group["scale_speed"] * (1 - beta1)))


def _update_rms(work: Work) -> list[Tensor]:
    """Refresh R and return its vectors, which broadcast over p."""
    p, t = work.p, work.t
    vectors = [
        work.state[_vector(dim)].view([-1 if d == dim else 1 for d in range(p.ndim)])
        for dim in range(p.ndim)
    ]
    least = max(work.group["rms_eps"] ** 2, torch.finfo(p.dtype).tiny)
    square = only_finite(p * p).clamp_(min=least)
    refreshed = [t % p.ndim]
    if t % RESET_PERIOD == 0:
        refreshed = list(range(p.ndim))
        for vector in vectors:
            vector.fill_(1.0)
    for dim in refreshed:
        f = square / (vectors[0] * vectors[0])
        for vector in vectors[1:]:
            f.div_(vector * vector)
        others = [d for d in range(p.ndim) if d != dim]
        f = f.mean() if p.numel() <= 2 * p.shape[dim] else f.mean(others, keepdim=True)
        vectors[dim].mul_(f.sqrt())
    return vectors


@fixed_bits(8)
class Cain8bit(Cain):
    """`Cain` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class Cain32bit(Cain):
    """`Cain` with 32-bit state; see there for its equations."""
