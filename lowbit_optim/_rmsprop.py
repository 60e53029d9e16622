"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.rmsprop import MEAN, MEAN_SQUARE, VARIANCE, rmsprop_rule

from . import _bitsandbytes_arguments, _checks, _state_layout
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._saved_moments import is_exact, read_with_error, saved_units
from ._variants import fixed_bits


@documented
class RMSprop(LowBitOptimizer):
    r"""RMSprop, its state in 32 or 8 bits.

    With d the gradient plus weight_decay p:

        v = alpha v + (1 - alpha) d^2
        a = alpha a + (1 - alpha) d                   centered only
        u = d / (sqrt(v) + eps)                       centered: d / (sqrt(v - a^2) + eps)
        b = momentum b + u                            momentum > 0 only, used for u below
        p = p - lr u

    Args:
        alpha: decay rate of the squares or, if centered, of variance and mean.
        eps: added to the denominator.
        weight_decay: coupled (L2) weight decay.
        momentum: decay of the momentum buffer; 0 keeps none.
        centered: divide by the root of the variance instead of the mean square, a further state.

    Example:
        >>> optimizer = RMSprop8bit(model.parameters(), lr=1e-3, momentum=0.9)

    Reference:
        Tieleman, Hinton, "Lecture 6.5: RMSprop", Coursera, Neural Networks for Machine Learning
        (2012); centered: Graves, "Generating Sequences With Recurrent Neural Networks",
        arXiv:1308.0850 (2013).

    Where it differs: 32-bit state and results are torch.optim.RMSprop's. With `optim_bits=8` and
    `centered` the variance s = v - a^2 itself is the state, `variance` instead of `square_avg`,
    since 8 bits cannot tell two nearly equal numbers apart: s = alpha (s + (1 - alpha) (d - a)^2)
    with the old a, which is equal. `load_state_dict` turns each into the other. bitsandbytes
    ignores `momentum` and refuses `centered`; here both work. TensorFlow has eps inside the root.
    """

    family = "RMSprop"
    HYPER = ("alpha", "eps", "weight_decay", "momentum")
    SAVED_MOMENTS = (MEAN_SQUARE, MEAN, VARIANCE)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
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

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.number("alpha", group["alpha"], 0.0, 1.0, open_high=True)
        _checks.numbers(group, "eps", "weight_decay", "momentum")
        _checks.flags(group, "centered")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        as_torch = _state_layout.format_of(group).exact
        momentum, cap = group["momentum"] != 0, group["max_unorm"] > 0
        options = group["centered"], momentum, cap, as_torch, group["cautious"]
        return self._cached_rule(rmsprop_rule, *options)

    def _with_equivalent_moments(
        self, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """With the second moment that `group` keeps: the mean square or the variance."""
        wanted = self._moments(group)[0]
        kept = VARIANCE if saved.get(VARIANCE.key) is not None else MEAN_SQUARE
        if saved.get(kept.key) is None:
            return saved
        # Codes of a mean square, as an earlier version kept, know no variance.
        sound = kept == VARIANCE or not group["centered"] or is_exact(saved, MEAN_SQUARE)
        if wanted == kept and sound:
            return saved
        x, known = read_with_error(saved, p, kept)
        a, a_known = torch.zeros_like(x), torch.zeros_like(x)
        if saved.get(MEAN.key) is not None:
            a, a_known = read_with_error(saved, p, MEAN)
        variance = x
        if kept == MEAN_SQUARE:
            slack = known + 2 * a.abs() * a_known + a_known * a_known
            variance = torch.where(x > 0, torch.maximum(x - a * a, slack), 0.0)
        read = {part.key for unit in saved_units(saved, (kept,)) for part in unit.parts}
        converted = {key: value for key, value in saved.items() if key not in read}
        return {**converted, wanted.key: variance if wanted == VARIANCE else variance + a * a}


@fixed_bits(8)
class RMSprop8bit(RMSprop):
    """`RMSprop` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class RMSprop32bit(RMSprop):
    """`RMSprop` with 32-bit state; see there for its equations."""
