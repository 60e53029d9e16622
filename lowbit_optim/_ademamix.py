"""AdEMAMix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.ademamix import ademamix_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class AdEMAMix(LowBitOptimizer):
    r"""Adam with a second, slow average of the gradient, its moments in 32 or 8 bits.

    With g the gradient and t the tensor's step:

        a_t = min(t / t_alpha, 1) alpha               alpha without `t_alpha`
        1 / log(b) = (1 - s) / log(beta1) + s / log(beta3),   s = min(t / t_beta3, 1)
        b_t = min(b, beta3)                           beta3 without `t_beta3`
        m1 = beta1 m1 + (1 - beta1) g
        m2 = b_t m2 + (1 - b_t) g
        v = beta2 v + (1 - beta2) g^2
        u = (m1 / (1 - beta1^t) + a_t m2) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p (1 - lr weight_decay) - lr u

    The state is `exp_avg` (m1), `exp_avg_slow` (m2) and `exp_avg_sq` (v).

    Args:
        betas: decay rates of the fast average, the second moment and the slow average.
        alpha: weight of the slow average.
        t_alpha: steps over which alpha rises from 0, usually the whole training; None for no
            warm-up.
        t_beta3: steps over which the slow average's decay rate rises from beta1; None for no
            warm-up.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.

    Example:
        >>> optimizer = AdEMAMix8bit(model.parameters(), lr=1e-3, t_alpha=100_000, t_beta3=100_000)

    Reference:
        Pagliardini, Ablin, Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
        arXiv:2409.03137 (2024), Alg. 1 and its schedulers.

    Where it differs: bitsandbytes stacks the two averages in one tensor; here they are two. It
    has neither percentile clipping nor `max_unorm` for AdEMAMix; here both work. It reads
    `t_alpha=0` as None; here it is refused.
    """

    family = "AdEMAMix"
    HYPER = ("alpha", "eps", "weight_decay")
    BETAS = 3

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: int = 32,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        max_unorm: float = 0.0,
        args: Any = None,
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
        _bitsandbytes_arguments.switches(is_paged=is_paged)
        super().__init__(params, settings_of(locals()), args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, *self.HYPER)
        for name in ("t_alpha", "t_beta3"):
            if group[name] is not None:
                _checks.integer(name, group[name], 1)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._cached_rule(ademamix_rule, group["max_unorm"] > 0, group["cautious"])

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        warm_ups = {name: float(group[name] or 0) for name in ("t_alpha", "t_beta3")}
        return {**super()._hyper(group), **warm_ups}


@fixed_bits(8)
class AdEMAMix8bit(AdEMAMix):
    """`AdEMAMix` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class AdEMAMix32bit(AdEMAMix):
    """`AdEMAMix` with 32-bit state; see there for its equations."""
