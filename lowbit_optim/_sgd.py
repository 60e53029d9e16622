"""SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.sgd import sgd_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class SGD(LowBitOptimizer):
    r"""Stochastic gradient descent with momentum, its momentum in 32 or 8 bits.

    With g the gradient:

        d = g + weight_decay p
        b = d                                         in the tensor's first step with momentum
        b = momentum b + (1 - dampening) d            in later ones
        u = d + momentum b  if nesterov  else  b      (u = d if momentum is 0: no state is kept)
        p = p - lr u

    Args:
        momentum: decay of the momentum buffer; 0 keeps no state.
        dampening: what is taken off the gradient's share.
        weight_decay: coupled (L2) weight decay.
        nesterov: use Nesterov's momentum.

    Example:
        >>> optimizer = SGD8bit(model.parameters(), lr=0.1, momentum=0.9)

    Reference:
        Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013; the form is torch.optim.SGD's.

    Where it differs: torch.optim.SGD keeps no `step`; this class does. bitsandbytes ignores
    `dampening` and `nesterov`; this class does not.
    """

    family = "SGD"
    UNDAMPED = "momentum_buffer"
    HYPER = ("momentum", "dampening", "weight_decay")
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
        _bitsandbytes_arguments.switches(block_wise)
        super().__init__(params, settings_of(locals()), args)

    def _check_initial_settings(self, group: Mapping[str, Any]) -> None:
        super()._check_initial_settings(group)
        _checks.nesterov(group, getattr(self, "defaults", {}))

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.momentum(group)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        momentum, cap = group["momentum"] != 0, group["max_unorm"] > 0
        return self._cached_rule(sgd_rule, momentum, group["nesterov"], cap, group["cautious"])


@fixed_bits(8)
class SGD8bit(SGD):
    """`SGD` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class SGD32bit(SGD):
    """`SGD` with 32-bit state; see there for its equations."""
