"""Eve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.eve import eve_rule

from . import _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class Eve(LowBitOptimizer):
    r"""icefall's Eve: Adam whose decay acts only on tensors that have grown; 32, 8 or 4 bits.

    With g the gradient, t the tensor's step and n the number of elements of p:

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        if n > 1 and ||p|| > target_rms sqrt(n):  p = p (1 - weight_decay)
        p = p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    The decay is not multiplied by lr, and ||p|| is taken before it. A step with lr = 0 moves
    nothing: there is no decay in it.

    Args:
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: share of p, 0 to 1, that a step takes off while rms(p) is above the target.
        target_rms: root mean square of p above which it decays, in (0, 10].
        max_unorm: cap the norm of the update without the decay at max_unorm ||p||; 0 is off.

    Example:
        >>> optimizer = Eve8bit(model.parameters(), lr=3e-3)

    Reference:
        Povey et al., k2-fsa/icefall,
        `egs/librispeech/ASR/pruned_transducer_stateless7/optim.py` (2022); unpublished
        otherwise. It is not the Eve of Hayashi, Koushik, Neubig, arXiv:1611.01505.

    Where it differs: icefall decays with lr = 0 too, and refuses a weight_decay above 0.1.
    """

    family = "Eve"
    HYPER = ("eps", "weight_decay", "target_rms")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
        target_rms: float = 0.1,
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
        _checks.numbers(group, "eps")
        _checks.number("weight_decay", group["weight_decay"], 0.0, 1.0)
        _checks.positive("target_rms", group["target_rms"], 10.0)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        decay, cap = group["weight_decay"] != 0, group["max_unorm"] > 0
        return self._cached_rule(eve_rule, decay, cap, group["cautious"])

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {**super()._hyper(group), "decoupled": 0.0}


@fixed_bits(4)
class Eve4bit(Eve):
    """`Eve` with 4-bit state, in the format `ratio4`; see there for its equations."""


@fixed_bits(8)
class Eve8bit(Eve):
    """`Eve` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class Eve32bit(Eve):
    """`Eve` with 32-bit state; see there for its equations."""
