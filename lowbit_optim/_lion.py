"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.lion import lion_rule

from . import _checks
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits

_rule = lru_cache(maxsize=None)(lion_rule)


class Lion(LowBitOptimizer):
    r"""Lion: the sign of a momentum, its momentum in 32 or 8 bits.

    With g the gradient:

        u = sign(beta1 m + (1 - beta1) g)             (the sign of 0 is 0)
        m = beta2 m + (1 - beta2) g
        p = p (1 - lr weight_decay) - lr u

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-4.
        betas: weight of the momentum in the update, and its decay rate. Default (0.9, 0.99).
        weight_decay: decoupled weight decay. Default 0.
        optim_bits: 32 or 8, the width of the momentum. Default 32.
        args: object whose `optim_bits`, `min_8bit_size`, `percentile_clipping` and `max_unorm`
            replace these arguments where present.
        min_8bit_size: tensors with fewer elements keep 32-bit state. Default 4096.
        percentile_clipping: clip the gradient's norm to this percentile (0..100) of the last 100
            steps' norms; 100 is off, the default.
        block_wise: as in bitsandbytes; state is blockwise either way, and False warns.
        is_paged: as in bitsandbytes; nothing is paged here, and True warns.
        max_unorm: cap ||u|| at max_unorm ||p||; 0 is off, the default.
        maximize: ascend instead of descend. Default False.
        foreach, fused, capturable: as in torch.optim. All tensors of a group are always stepped
            together and, on accelerators, captured safely; `fused=True` insists on a compiled
            engine and raises in `step` where there is none.
        differentiable: must be False.

    Raises:
        ValueError, TypeError: naming the argument that is not allowed.

    Example:
        >>> optimizer = Lion8bit(model.parameters(), lr=1e-4, weight_decay=0.1)

    Reference:
        Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu, Le, "Symbolic
        Discovery of Optimization Algorithms", arXiv:2302.06675 (2023), Alg. 2.

    Where it differs: whether bitsandbytes decouples the decay depends on its backend and on the
    width of the state, and its 8-bit Lion on CPUs moves weights whose gradient is always zero;
    here the decay is decoupled and such weights stay.
    """

    family = "Lion"
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
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _checks.bitsandbytes_order(percentile_clipping, "is_paged")
        _checks.bitsandbytes_switches(block_wise, is_paged)
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "optim_bits": optim_bits,
            "min_8bit_size": min_8bit_size, "percentile_clipping": percentile_clipping,
            "max_unorm": max_unorm, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.betas(group["betas"])
        _checks.number("weight_decay", group["weight_decay"], 0.0)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return _rule(cap=group["max_unorm"] > 0)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}


Lion8bit = fixed_bits(Lion, 8)
Lion32bit = fixed_bits(Lion, 32)
