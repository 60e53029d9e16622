"""LAMB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.lamb import lamb_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._trust import TrustOptimizer
from ._variants import fixed_bits


@documented
class LAMB(TrustOptimizer):
    r"""Layer-wise adaptive moments for large batches, its moments in 32, 8 or 4 bits.

    Without `trust_coefficient` this is bitsandbytes' LAMB: AdamW whose update is capped at
    `max_unorm` times the parameter's norm. With `trust_coefficient=1.0` it is the LAMB of the
    paper. With g the gradient (plus weight_decay p if not `adam_w_mode`), t the tensor's step and
    all norms L2 norms of one whole tensor:

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                 (amsgrad: s = max(s, v), used for v below)
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
                                                      (without 1 - beta^t if not bias_correction)
        no trust_coefficient:
            p = p (1 - lr weight_decay) - lr u min(1, max_unorm ||p|| / ||u||)
        trust_coefficient:
            r = u + weight_decay p
            P = clamp(||p||, weight_norm_bounds)
            p = p - lr (trust_coefficient P / ||r||) r    (without the factor if P or ||r|| is 0)
        not adam_w_mode: weight_decay is 0 in these last lines, it is in the gradient already

    Args:
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: weight decay.
        amsgrad: use the largest second moment so far, a third state.
        adam_w_mode: True keeps weight decay out of the moments; False adds it to the gradient.
        max_unorm: cap of ||u|| / ||p|| when `trust_coefficient` is None; 0 is off. A parameter that
            is exactly zero does not move under the cap.
        trust_coefficient: None for the cap; 1.0 for the paper. A group may have its own, None
            included, and then does not use what it inherits for the other meaning.
        weight_norm_bounds: None or (low, high), the paper's phi: bounds of ||p|| in the trust
            ratio. Needs a `trust_coefficient`.

    Example:
        >>> optimizer = LAMB8bit(model.parameters(), lr=2e-3, trust_coefficient=1.0)

    Reference:
        You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh, "Large Batch
        Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962 (2019),
        Alg. 2; the cap is bitsandbytes' (Dettmers et al., arXiv:2110.02861).

    Where it differs: bitsandbytes' LAMB ignores `bias_correction`, `amsgrad`, `adam_w_mode` and
    `max_unorm` (always 1), and its LAMB8bit has no cap in blockwise 8 bits; here all work, in 8
    bits as in 32. apex and timm clip the global gradient norm first, and groups without weight
    decay get no trust ratio there unless asked for; here they do.
    """

    family = "LAMB"
    HYPER = ("eps", "weight_decay")
    OF_TRUST = ("weight_norm_bounds",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        max_unorm: float = 1.0,
        *,
        trust_coefficient: float | None = None,
        weight_norm_bounds: tuple[float, float] | None = None,
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
        _bitsandbytes_arguments.positional_order(percentile_clipping, "max_unorm")
        _bitsandbytes_arguments.switches(block_wise)
        super().__init__(params, settings_of(locals()), args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, *self.HYPER)
        _checks.flags(group, "bias_correction", "amsgrad", "adam_w_mode")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._cached_rule(
            lamb_rule,
            use_amsgrad=group["amsgrad"],
            decay=group["weight_decay"] != 0,
            coupled=not group["adam_w_mode"],
            trust=group["trust_coefficient"] is not None,
            cap=group["max_unorm"] > 0,
            caution=group["cautious"],
        )

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        trust = group["trust_coefficient"] is not None
        return {
            **super()._hyper(group),
            "decoupled": float(group["adam_w_mode"] and not trust),
            "bias_correction": float(group["bias_correction"]),
        }


@fixed_bits(4)
class LAMB4bit(LAMB):
    """`LAMB` with 4-bit state, in the format `ratio4`; see there for its equations."""


@fixed_bits(8)
class LAMB8bit(LAMB):
    """`LAMB` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class LAMB32bit(LAMB):
    """`LAMB` with 32-bit state; see there for its equations."""
