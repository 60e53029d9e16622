"""LearnedGradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import TINY
from lowbit_optim_kernels.rules.stored import LEARNED_GRADIENT

from . import _checks, _rate_matrices, _sharding
from ._arguments import documented, settings_of
from ._eager import EagerOptimizer, Extra, Work, dot, rms
from ._master_weights import weight_of
from ._state_layout import TensorSpec
from ._variants import fixed_bits

SIZE_PERIOD = 4  # steps from one change of a tensor's size to the next
SMALL = 5  # tensors of so many elements have no learning-rate matrices


@documented
class LearnedGradient(EagerOptimizer):
    r"""icefall's draft of an optimizer that learns learning-rate matrices; 32 or 8 bits.

    Every dimension of a tensor has a positive definite matrix L that multiplies the averaged
    gradient, and that is itself moved so that the steps would have lowered the loss more. All steps
    are relative to r, the root mean square (rms) of the weights, and the size of a tensor is
    learned besides. With g the gradient, t the number of steps the tensor has taken before and n
    its elements, in this order:

        n > 1:  s = sum(p g)
        n > 1, every 4th step (t mod 4 == 3), the means over the last 4 s:
            r = max(rms(p), eps)
            E2 = beta2^4 E2 + (1 - beta2^4) mean(s^2) ;  E1 = beta1^4 E1 + (1 - beta1^4) mean(s)
            c = -4 lr size_lr_scale sqrt(1 - beta2^(t+1)) E1 / (sqrt(E2) + 1e-10)
            c = 4 lr size_lr_scale if r < param_min_rms, -4 lr size_lr_scale if r > param_max_rms
            p = p (1 + c)
        n > 5, t > 0 and t mod lr_est_period == 0, for every dimension d of size neither 1 nor n:
            C_d = beta2 C_d + G_d^T G_d                (G_d is g as a matrix of rows along d)
            D = m multiplied by every L ;  E = D multiplied by every C / mean(diag C)
            H_d = slope of sum(g D) / sqrt(mean(E D)) by L_d
            B = sym(H) L ;  B *= meta_lr / rms(B) ;  meta_lr = lr meta_lr_scale
            A = I + meta_lr B ;  L = A L A^T ;  L = sym(L) / mean(diag L)
        n > 5:
            m = beta1 m + (1 - beta1) g ;  D = m multiplied by every L ;  q = rms(D) + eps
            p = p - lr r clamp(D, ±max_step_scale q) / (q sqrt(1 - beta1^2) / (1 - beta1))
        n <= 5:
            m, v as Adam's ;  p = p - lr (r if n > 1) m / (sqrt(mean(v) / (1 - beta2^(t+1))) + eps)

    **What the matrices cost.** A dimension of size k has two fp32 matrices, L and C: 8 k^2 bytes.
    They dominate everything else: 16 bytes per weight for a square weight, 34 for one of 4096 x
    1024, 5 GB for an embedding of 25000 x 512; besides, m takes 4 bytes per weight, or 1.02 in 8
    bits. Every step multiplies by every L, about 2 k floating operations per weight and dimension.
    `max_size` keeps long dimensions without matrices, as one of size 1.

    Args:
        lr: learning rate, a number or a tensor of one element: the size of a step relative to the
            weights.
        size_lr_scale: learning rate of a tensor's size, relative to lr.
        meta_lr_scale: learning rate of the matrices, relative to lr.
        betas: decay rates of m, and of v and C.
        eps: added to the denominators and to the first r.
        param_min_rms: tensors with a smaller rms grow.
        param_max_rms: tensors with a larger rms shrink.
        lr_est_period: steps from one change of the matrices to the next.
        max_step_scale: no element moves more than so many times the rms of all.
        max_size: a longer dimension gets no matrices; None for no limit. It is read in a
            parameter's first step.

    Example:
        >>> optimizer = LearnedGradient8bit(model.parameters(), lr=3e-2, max_size=2048)

    Reference:
        Povey, `egs/librispeech/ASR/pruned_transducer_stateless7/optim.py` in the history of
        danpovey/icefall (2022), the first draft; later ones move the matrices by another rule.
        Unpublished otherwise.

    Where it differs: the draft never ran; names that it never defines, a momentum that it computes
    and throws away, and tensors of 2 to 5 elements without an r are put right. meta_lr acts twice
    on a matrix, as in the draft. `step` is a CPU tensor, read without waiting for the device; only
    under an AMP GradScaler is anything read back, its `found_inf`, once a step. An element whose
    gradient is not finite (or has no finite square) takes no part in a step and its m starts again.
    """

    family = "LearnedGradient"
    STORE = LEARNED_GRADIENT

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-2,
        size_lr_scale: float = 0.1,
        meta_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        param_min_rms: float = 1e-5,
        param_max_rms: float = 2.0,
        lr_est_period: int = 10,
        max_step_scale: float = 2.0,
        max_size: int | None = None,
        *,
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
        _checks.numbers(group, "size_lr_scale", "meta_lr_scale", "eps", "param_min_rms")
        _checks.positive("max_step_scale", group["max_step_scale"])
        _checks.positive("param_max_rms", group["param_max_rms"])
        if group["param_min_rms"] > group["param_max_rms"]:
            raise ValueError(
                f"param_min_rms must be <= param_max_rms; got {group['param_min_rms']!r} > "
                f"{group['param_max_rms']!r}"
            )
        _checks.integer("lr_est_period", group["lr_est_period"], 1)
        if group["max_size"] is not None:
            _checks.integer("max_size", group["max_size"], 1)

    def _extras(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, Extra]:
        extras: dict[str, Extra] = {}
        n = p.numel()
        if n > 1:
            extras = {
                "param_rms": Extra((), must_be=">= 0"),
                "scale_exp_avg": Extra(()),
                "scale_exp_avg_sq": Extra((), must_be=">= 0"),
                "scale_grads": Extra((SIZE_PERIOD,)),
            }
        if n <= SMALL:
            return {**extras, "exp_avg_sq": Extra(tuple(p.shape), must_be=">= 0")}
        limit = group["max_size"] or n
        for dim, size in enumerate(p.shape):
            pair = f"lr_{dim}", f"grad_cov_{dim}"
            begins = 1 < size < n and size <= limit
            wanted = any(key in state for key in pair) if "step" in state else begins
            if wanted:
                extras.update(dict.fromkeys(pair, Extra((size, size))))
        return extras

    def _initial_tensor(
        self, key: str, stored: TensorSpec, p: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        if key == "param_rms":
            return _first_rms(p.detach(), stored.dtype, group)
        if key.startswith("lr_"):
            return torch.eye(*stored.shape, dtype=stored.dtype, device=stored.device)
        return super()._initial_tensor(key, stored, p, group)

    def _restart_from_weight(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state.get(p, {})
        if "param_rms" in state and int(state["step"]) == 0:
            size = state["param_rms"]
            size.copy_(_first_rms(weight_of(self, p, group), size.dtype, group))

    def _update(self, work: Work) -> Tensor:
        group = work.group
        bad = ~(work.g * work.g).isfinite()
        work.g = work.g.masked_fill(bad, 0.0)
        if work.p.numel() > 1:
            work.p = _resized(work)
        m = work.moments["exp_avg"]
        rates = _matrices(work, "lr")
        with _no_autocast(work.p.device):
            if work.t > 0 and work.t % group["lr_est_period"] == 0:
                covariances = _matrices(work, "grad_cov")
                meta_lr = work.lr * group["meta_lr_scale"]
                _rate_matrices.accumulate(work.g, covariances, group["betas"][1])
                _rate_matrices.learn(work.g, m, rates, covariances, meta_lr)
            beta1 = group["betas"][0]
            m.mul_(beta1).add_(work.g, alpha=1 - beta1).masked_fill_(bad, 0.0)
            if work.p.numel() <= SMALL:
                return _small_step(work, bad)
            d = _rate_matrices.multiply_all(m, rates)
        q = rms(d) + (group["eps"] + TINY)
        limit = group["max_step_scale"] * q
        alone = math.sqrt(1 - beta1 * beta1) / (1 - beta1)  # a gradient's rms over that of m
        rate = work.lr * work.state["param_rms"] / (q * alone)
        return work.p - d.clamp(-limit, limit) * rate


def _first_rms(p: Tensor, dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    return rms(_sharding.gathered(p).to(dtype)) + group["eps"]


def _no_autocast(device: torch.device) -> AbstractContextManager:
    """Matrices are multiplied in the dtype they have, whatever surrounds the step."""
    name = device.type
    if torch.amp.is_autocast_available(name) and torch.is_autocast_enabled(name):
        return torch.autocast(name, enabled=False)
    return nullcontext()


def _matrices(work: Work, name: str) -> dict[int, Tensor]:
    keys = {dim: f"{name}_{dim}" for dim in range(work.p.ndim)}
    return {dim: work.state[key] for dim, key in keys.items() if key in work.state}


def _resized(work: Work) -> Tensor:
    """The parameter after this step's change of its size, if any; Adam on the size's logarithm."""
    group, state, p, t = work.group, work.state, work.p, work.t
    s = state["scale_grads"]
    s[t % SIZE_PERIOD] = dot(p, work.g)
    if t % SIZE_PERIOD != SIZE_PERIOD - 1:
        return p
    beta1, beta2 = (beta**SIZE_PERIOD for beta in group["betas"])
    r = state["param_rms"].copy_(rms(p).clamp(min=group["eps"]))
    square = state["scale_exp_avg_sq"].mul_(beta2).add_((s * s).mean(), alpha=1 - beta2)
    mean = state["scale_exp_avg"].mul_(beta1).add_(s.mean(), alpha=1 - beta1)
    rate = work.lr * (SIZE_PERIOD * group["size_lr_scale"])
    correction = math.sqrt(1 - beta2 ** ((t + 1) // SIZE_PERIOD))
    change = mean / (square.sqrt() + 1e-10) * (-rate * correction)
    change = torch.where(r < group["param_min_rms"], rate, change)
    change = torch.where(r > group["param_max_rms"], -rate, change)
    return p * (1 + change)


def _small_step(work: Work, bad: Tensor) -> Tensor:
    """The step of a tensor of a few elements: Adam with one denominator for all of them."""
    group, g = work.group, work.g
    beta2 = group["betas"][1]
    square = work.state["exp_avg_sq"]
    square.mul_(beta2).addcmul_(g, g, value=1 - beta2).masked_fill_(bad, 0.0)
    mean = square.mean() / (1 - beta2 ** (work.t + 1))
    rate = work.lr / (mean.sqrt() + (group["eps"] + TINY))
    if work.p.numel() > 1:
        rate = rate * work.state["param_rms"]
    return work.p - work.moments["exp_avg"] * rate


@fixed_bits(8)
class LearnedGradient8bit(LearnedGradient):
    """`LearnedGradient` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class LearnedGradient32bit(LearnedGradient):
    """`LearnedGradient` with 32-bit state; see there for its equations."""
