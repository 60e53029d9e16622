"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.lion import lion_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._saved_moments import HarmlessMask
from ._variants import fixed_bits


@documented
class Lion(LowBitOptimizer):
    r"""Lion: the sign of a momentum, its momentum in 32 or 8 bits.

    With g the gradient:

        u = sign(beta1 m + (1 - beta1) g)             (the sign of 0 is 0)
        m = beta2 m + (1 - beta2) g
        p = p (1 - lr weight_decay) - lr u

    Args:
        betas: weight of the momentum in the update, and its decay rate.
        weight_decay: decoupled weight decay.

    Example:
        >>> optimizer = Lion8bit(model.parameters(), lr=1e-4, weight_decay=0.1)

    Reference:
        Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu, Le, "Symbolic
        Discovery of Optimization Algorithms", arXiv:2302.06675 (2023), Alg. 2.

    Where it differs: up to bitsandbytes 0.49 its backend and the width of the state say whether it
    decouples the decay, and its 8-bit Lion on CPUs moves weights whose gradient is always zero;
    here the decay is decoupled and such weights stay.
    """

    family = "Lion"
    HYPER = ("weight_decay",)
    step_required = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        *,
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
        _bitsandbytes_arguments.positional_order(percentile_clipping, "is_paged")
        _bitsandbytes_arguments.switches(block_wise, is_paged)
        super().__init__(params, settings_of(locals()), args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, *self.HYPER)

    def _harmless_nonfinite(
        self, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> HarmlessMask:
        return lambda x: torch.ones_like(x, dtype=torch.bool)  # its sign is -1, 0 or 1

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._cached_rule(lion_rule, group["max_unorm"] > 0, group["cautious"])


@fixed_bits(8)
class Lion8bit(Lion):
    """`Lion` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class Lion32bit(Lion):
    """`Lion` with 32-bit state; see there for its equations."""
