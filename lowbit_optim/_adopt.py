"""ADOPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.adopt import adopt_rule

from . import _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class ADOPT(LowBitOptimizer):
    r"""ADOPT: Adam that converges with any beta2, its moments in 32 or 8 bits.

    A gradient is divided by the root of the second moment of the steps before it, and only then
    enters the first moment. With g the gradient (plus weight_decay p unless
    `decoupled_weight_decay`) and t the tensor's step:

        v = g^2                                       t = 1: p does not move
        x = g / max(sqrt(v), eps)                     t > 1
        x = clamp(x, -(t - 1)^clip_exp, (t - 1)^clip_exp)
        m = beta1 m + (1 - beta1) x
        v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr weight_decay) - lr u            (u = m; without the factor unless decoupled)

    Args:
        betas: decay rates of the first and second moment.
        eps: least value of the root of the second moment.
        weight_decay: coupled (L2) weight decay.
        clip_exp: exponent of the bound on the divided gradient, which grows with the step; None
            for no bound.
        decoupled_weight_decay: shrink p by 1 - lr weight_decay instead.

    Example:
        >>> optimizer = ADOPT8bit(model.parameters(), lr=1e-3)

    Reference:
        Taniguchi, Harada, Minegishi, Oshima, Jeong, Nagahara, Iiyama, Suzuki, Iwasawa, Matsuo,
        "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", arXiv:2411.02853
        (2024), Alg. 2.

    Where it differs: the authors' code takes the bound as a function of the step, which a
    checkpoint cannot hold; `clip_exp` is timm's name for its exponent, and 0.25 the authors'.
    """

    family = "ADOPT"
    HYPER = ("eps", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        *,
        clip_exp: float | None = 0.25,
        decoupled_weight_decay: bool = False,
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
        if group["clip_exp"] is not None:
            _checks.numbers(group, "clip_exp")
        _checks.flags(group, "decoupled_weight_decay")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        coupled = group["weight_decay"] != 0 and not group["decoupled_weight_decay"]
        return self._cached_rule(adopt_rule, coupled, group["max_unorm"] > 0, group["cautious"])

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {
            **super()._hyper(group),
            "decoupled": float(group["decoupled_weight_decay"]),
            "clips": float(group["clip_exp"] is not None),
            "clip_exp": group["clip_exp"] or 0.0,
        }


@fixed_bits(8)
class ADOPT8bit(ADOPT):
    """`ADOPT` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class ADOPT32bit(ADOPT):
    """`ADOPT` with 32-bit state; see there for its equations."""
