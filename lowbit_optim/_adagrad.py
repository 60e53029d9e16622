"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.adagrad import adagrad_rule

from . import _checks
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits

_rule = lru_cache(maxsize=None)(adagrad_rule)


class Adagrad(LowBitOptimizer):
    r"""Adagrad, its sum of squares in 32 or 8 bits.

    With d the gradient plus weight_decay p and t the tensor's step:

        s = s + d^2                                   (s starts at initial_accumulator_value)
        p = p - lr / (1 + (t - 1) lr_decay) d / (sqrt(s) + eps)

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-2.
        lr_decay: decay of the learning rate over the tensor's steps. Default 0.
        weight_decay: coupled (L2) weight decay. Default 0.
        initial_accumulator_value: value that the sum of squares starts from. Default 0.
        eps: added to the denominator. Default 1e-10.
        optim_bits: 32 or 8, the width of the sum of squares. Default 32.
        args: object whose `optim_bits`, `min_8bit_size`, `percentile_clipping` and `max_unorm`
            replace these arguments where present.
        min_8bit_size: tensors with fewer elements keep 32-bit state. Default 4096.
        percentile_clipping: clip the gradient's norm to this percentile (0..100) of the last 100
            steps' norms; 100 is off, the default.
        block_wise: as in bitsandbytes; state is blockwise either way, and False warns.
        max_unorm: cap the norm of d / (sqrt(s) + eps) at max_unorm ||p||; 0 is off, the default.
        maximize: ascend instead of descend. Default False.
        foreach, fused, capturable: as in torch.optim. All tensors of a group are always stepped
            together and, on accelerators, captured safely; `fused=True` insists on a compiled
            engine and raises in `step` where there is none.
        differentiable: must be False.

    Raises:
        ValueError, TypeError: naming the argument that is not allowed.

    Example:
        >>> optimizer = Adagrad8bit(model.parameters(), lr=1e-2)

    Reference:
        Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization", JMLR 12 (2011).

    Where it differs: 32-bit state and results are torch.optim.Adagrad's, except that state is
    created at the first step and sparse gradients are refused. bitsandbytes refuses `lr_decay`
    and `initial_accumulator_value`; here both work, in 8 bits too. A sum in 8 bits stops growing
    once a step adds less than half of what two codes differ by, at most 0.35 % of its block's
    largest sum.
    """

    family = "Adagrad"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        *,
        max_unorm: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _checks.bitsandbytes_switches(block_wise)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps,
            "optim_bits": optim_bits, "min_8bit_size": min_8bit_size,
            "percentile_clipping": percentile_clipping, "max_unorm": max_unorm,
            "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.number("lr_decay", group["lr_decay"], 0.0)
        _checks.number("weight_decay", group["weight_decay"], 0.0)
        _checks.number("initial_accumulator_value", group["initial_accumulator_value"], 0.0)
        _checks.number("eps", group["eps"], 0.0)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return _rule(cap=group["max_unorm"] > 0)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {name: group[name] for name in ("lr_decay", "weight_decay", "eps")}

    def _start(self, key: str, group: Mapping[str, Any]) -> float:
        return float(group["initial_accumulator_value"])


Adagrad8bit = fixed_bits(Adagrad, 8, keep_argument=True)
Adagrad32bit = fixed_bits(Adagrad, 32, keep_argument=True)
