"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import parts_of
from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.adagrad import adagrad_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._gradients import is_left_alone
from ._optimizer import LowBitOptimizer
from ._sharding import local
from ._variants import fixed_bits


@documented
class Adagrad(LowBitOptimizer):
    r"""Adagrad, its sum of squares in 32 or 8 bits.

    With d the gradient plus weight_decay p and t the tensor's step:

        s = s + d^2                                   (s starts at initial_accumulator_value)
        p = p - lr / (1 + (t - 1) lr_decay) d / (sqrt(s) + eps)

    Args:
        lr_decay: decay of the learning rate over the tensor's steps.
        weight_decay: coupled (L2) weight decay.
        initial_accumulator_value: value that the sum of squares starts from.
        eps: added to the denominator.
        max_unorm: cap the norm of d / (sqrt(s) + eps) at max_unorm ||p||; 0 is off.

    Example:
        >>> optimizer = Adagrad8bit(model.parameters(), lr=1e-2)

    Reference:
        Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization", JMLR 12 (2011).

    Where it differs: 32-bit state and results are torch.optim.Adagrad's, except that state is
    created at the first step, or by `share_memory`, and sparse gradients are refused. bitsandbytes
    refuses `lr_decay` and `initial_accumulator_value`; here both work, in 8 bits too. With
    `dither=False` a sum in 8 bits that is below its block's largest stops growing once a step adds
    less than half of what two codes differ by, at most 0.35 % of the largest.
    """

    family = "Adagrad"
    HYPER = ("lr_decay", "weight_decay", "eps")

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

    @torch.no_grad()
    def share_memory(self) -> None:
        """Move the moments into shared memory, for processes that train the same parameters.

        State that does not exist yet is created. As in torch.optim.Adagrad, each process counts
        its own steps.
        """
        for number in range(len(self.param_groups)):
            for _, part in self._parts(number):
                for p in part["params"]:
                    if not is_left_alone(p):
                        self._share_state(p, part)

    def _share_state(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state = self._kept_state(p, group, self._share(p, group))
        for part in parts_of(self._moments(group), self._format(p, group)):
            local(state[part.key]).share_memory_()

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._cached_rule(adagrad_rule, cap=group["max_unorm"] > 0)

    def _initial_value(self, group: Mapping[str, Any]) -> float:
        return float(group["initial_accumulator_value"])


@fixed_bits(8, keep_argument=True)
class Adagrad8bit(Adagrad):
    """`Adagrad` with 8-bit state; see there for its equations."""


@fixed_bits(32, keep_argument=True)
class Adagrad32bit(Adagrad):
    """`Adagrad` with 32-bit state; see there for its equations."""
