"""LANS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.lans import lans_rule

from . import _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class LANS(LowBitOptimizer):
    r"""LAMB with Nesterov's momentum and normalized gradients, its moments in 32, 8 or 4 bits.

    With t the tensor's step and all norms L2 norms of one whole tensor:

        g = g / ||g||                                 (a zero gradient stays zero)
        g = clip(g, -clip_gradient, clip_gradient)    if given
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        D = sqrt(v / (1 - beta2^t)) + eps
        u_m = m / (1 - beta1^t) / D + weight_decay p
        u_g = g / D + weight_decay p
        P = clamp(||p||, lower_bound, upper_bound)
        u = beta1 (P / ||u_m||) u_m + (1 - beta1) (P / ||u_g||) u_g
                                                      (a ratio is 1 if P or its norm is 0)
        p = p - lr u

    Args:
        betas: decay rates of the first and second moment.
        eps: added to the denominator, whose gradients have norm 1.
        weight_decay: weight decay, inside the trust ratios.
        lower_bound: least value of ||p|| in the trust ratios; None for 0.
        upper_bound: greatest value of ||p|| in the trust ratios; None for no bound.
        clip_gradient: limit of each element's magnitude after the gradient has been normalized;
            None for none.
        percentile_clipping: records the gradient's norms and clips, as in the other optimizers; the
            step is the same, because LANS normalizes the gradient afterwards. 100 is off.
        max_unorm: cap ||u||, trust ratios included, at max_unorm ||p||; 0 is off.

    Example:
        >>> optimizer = LANS8bit(model.parameters(), lr=7e-3, weight_decay=0.01)

    Reference:
        Zheng, Lin, Zha, Li, "Accelerated Large Batch Optimization of BERT Pretraining in 54
        minutes", arXiv:2006.13484 (2020), Alg. 2.

    Where it differs: this is MXNet's fused kernel, whose u_g uses the old p; MXNet with
    `use_fused_step=False` uses p after the first half of the update. MXNet reads a bound or a
    `clip_gradient` of 0 as None; here a bound of 0 means 0, and a clip of 0 is refused.
    """

    family = "LANS"
    HYPER = ("eps", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        clip_gradient: float | None = None,
        *,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        max_unorm: float = 0.0,
        cautious: bool = False,
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
        _checks.numbers(group, *self.HYPER)
        low, high = group["lower_bound"], group["upper_bound"]
        if low is not None:
            _checks.number("lower_bound", low, 0.0)
        if high is not None:
            _checks.number("upper_bound", high, 0.0)
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"lower_bound must be <= upper_bound; got lower_bound={low!r}, upper_bound={high!r}"
            )
        if group["clip_gradient"] is not None:
            _checks.positive("clip_gradient", group["clip_gradient"])

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        clip = group["clip_gradient"] is not None
        return self._cached_rule(lans_rule, clip, group["max_unorm"] > 0, group["cautious"])

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        high = group["upper_bound"]
        return {
            **super()._hyper(group),
            "lower_bound": group["lower_bound"] or 0.0,
            "upper_bound": math.inf if high is None else high,
            "clip_gradient": group["clip_gradient"] or 0.0,
        }


@fixed_bits(4)
class LANS4bit(LANS):
    """`LANS` with 4-bit state, in the format `ratio4`; see there for its equations."""


@fixed_bits(8)
class LANS8bit(LANS):
    """`LANS` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class LANS32bit(LANS):
    """`LANS` with 32-bit state; see there for its equations."""
