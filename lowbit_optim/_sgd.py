"""SGD."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.sgd import sgd

from . import _checks
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits

_rule = lru_cache(maxsize=None)(sgd)


class SGD(LowBitOptimizer):
    r"""Stochastic gradient descent with momentum, its momentum in 32 or 8 bits.

    With g the gradient and t the tensor's step:

        d = g + weight_decay p
        b = d                                         t = 1
        b = momentum b + (1 - dampening) d            t > 1
        u = d + momentum b  if nesterov  else  b      (u = d if momentum is 0: no state is kept)
        p = p - lr u

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-3.
        momentum: decay of the momentum buffer. Default 0, which keeps no state.
        dampening: what is taken off the gradient's share. Default 0.
        weight_decay: coupled (L2) weight decay. Default 0.
        nesterov: use Nesterov's momentum. Default False.
        optim_bits: 32 or 8, the width of the momentum buffer. Default 32.
        args: object whose `optim_bits`, `min_8bit_size`, `percentile_clipping` and `max_unorm`
            replace these arguments where present.
        min_8bit_size: tensors with fewer elements keep 32-bit state. Default 4096.
        percentile_clipping: clip the gradient's norm to this percentile (0..100) of the last 100
            steps' norms; 100 is off, the default.
        block_wise: as in bitsandbytes; state is blockwise either way, and False warns.
        max_unorm: cap ||u|| at max_unorm ||p||; 0 is off, the default.
        maximize: ascend instead of descend. Default False.
        foreach, fused, capturable: as in torch.optim. All tensors of a group are always stepped
            together and, on accelerators, captured safely; `fused=True` insists on a compiled
            engine and raises in `step` where there is none.
        differentiable: must be False.

    Raises:
        ValueError, TypeError: naming the argument that is not allowed.

    Example:
        >>> optimizer = SGD8bit(model.parameters(), lr=0.1, momentum=0.9)

    Reference:
        Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013; the form is torch.optim.SGD's.

    Where it differs: torch.optim.SGD keeps no `step`; this class does. bitsandbytes ignores
    `dampening` and `nesterov`; this class does not.
    """

    family = "SGD"
    step_required = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
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
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "optim_bits": optim_bits, "min_8bit_size": min_8bit_size,
            "percentile_clipping": percentile_clipping, "max_unorm": max_unorm,
            "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.momentum(group)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return _rule(group["momentum"] != 0, group["nesterov"], group["max_unorm"] > 0)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {name: group[name] for name in ("momentum", "dampening", "weight_decay")}


SGD8bit = fixed_bits(SGD, 8)
SGD32bit = fixed_bits(SGD, 32)
