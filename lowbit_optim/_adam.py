"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.adam import adam_rule

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._optimizer import LowBitOptimizer
from ._variants import fixed_bits


@documented
class Adam(LowBitOptimizer):
    r"""Adam, its moments in 32, 8 or 4 bits.

    With g the gradient (plus weight_decay p unless `decoupled_weight_decay`) and t the tensor's
    step:

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                 (amsgrad: s = max(s, v), used for v below)
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p (1 - lr weight_decay) - lr u            (without the factor unless decoupled)

    Args:
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: coupled (L2) weight decay.
        amsgrad: use the largest second moment so far, a third state.
        decoupled_weight_decay: shrink p by 1 - lr weight_decay instead (AdamW).

    Example:
        >>> optimizer = Adam8bit(model.parameters(), lr=1e-3)

    Reference:
        Kingma, Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980 (2014); AMSGrad:
        Reddi, Kale, Kumar, arXiv:1904.09237.

    Where it differs: the 32-bit state is torch.optim.Adam's. bitsandbytes refuses amsgrad, and its
    second moment can become zero where the first is not; here it cannot.
    """

    family = "Adam"
    HYPER = ("eps", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
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
        decoupled_weight_decay: bool = False,
    ) -> None:
        _bitsandbytes_arguments.positional_order(percentile_clipping, "is_paged")
        _bitsandbytes_arguments.switches(block_wise, is_paged)
        super().__init__(params, settings_of(locals()), args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.numbers(group, *self.HYPER)
        _checks.flags(group, "amsgrad", "decoupled_weight_decay")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        coupled = group["weight_decay"] != 0 and not group["decoupled_weight_decay"]
        cap, caution = group["max_unorm"] > 0, group["cautious"]
        return self._cached_rule(adam_rule, group["amsgrad"], coupled, cap, caution)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {**super()._hyper(group), "decoupled": float(group["decoupled_weight_decay"])}


@documented
class AdamW(Adam):
    r"""Adam with decoupled weight decay, its moments in 32, 8 or 4 bits.

        p = p (1 - lr weight_decay)
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                 (amsgrad: s = max(s, v), used for v below)
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p - lr u

    Args:
        weight_decay: decoupled weight decay.

    Example:
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.1)

    Reference:
        Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101
        (2017), Alg. 2.

    Where it differs: the decay is applied before the update, as torch.optim.AdamW does.
    """

    family = "AdamW"
    FIXED: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": True}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        super().__init__(
            params, args=args, block_wise=block_wise, is_paged=is_paged,
            decoupled_weight_decay=True, **settings_of(locals()),
        )  # fmt: skip

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        if not group["decoupled_weight_decay"]:
            name = type(self).__name__
            raise ValueError(f"decoupled_weight_decay must be True for {name}; use Adam")


@fixed_bits(4)
class Adam4bit(Adam):
    """`Adam` with 4-bit state, in the format `ratio4`; see there for its equations."""


@fixed_bits(8, keep_argument=True)
class Adam8bit(Adam):
    """`Adam` with 8-bit state; see there for its equations."""


@fixed_bits(32, keep_argument=True)
class Adam32bit(Adam):
    """`Adam` with 32-bit state; see there for its equations."""


@fixed_bits(4)
class AdamW4bit(AdamW):
    """`AdamW` with 4-bit state, in the format `ratio4`; see there for its equations."""


@fixed_bits(8, keep_argument=True)
class AdamW8bit(AdamW):
    """`AdamW` with 8-bit state; see there for its equations."""


@fixed_bits(32, keep_argument=True)
class AdamW32bit(AdamW):
    """`AdamW` with 32-bit state; see there for its equations."""
