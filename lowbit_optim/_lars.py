"""LARS, in every meaning the name has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules import sgd as rules_sgd

from . import _bitsandbytes_arguments, _checks
from ._arguments import documented, settings_of
from ._trust import TrustOptimizer
from ._variants import fixed_bits

SCALE_AT = {"grad": rules_sgd.AT_GRAD, "update": rules_sgd.AT_UPDATE, "lr": rules_sgd.AT_LR}
ZERO_NORM = {
    "one": rules_sgd.ZERO_ONE,
    "denom": rules_sgd.ZERO_DENOM,
    "zero": rules_sgd.ZERO_ZERO,
    "skip_wd": rules_sgd.ZERO_SKIP_WD,
}
ADAPT = {"always": 0.0, "wd": 1.0}

LARS_PRESETS: dict[str, dict[str, Any]] = {
    "holocron": {"trust_coefficient": 1.0, "scale_at": "update", "zero_norm": "denom"},
    "discriminative": {
        "trust_coefficient": 0.001, "eps": 1e-15, "scale_at": "update", "zero_norm": "zero",
    },
    "paper": {"trust_coefficient": 0.001, "scale_at": "lr", "zero_norm": "denom"},
    "mlperf": {"trust_coefficient": 0.001, "scale_at": "lr", "zero_norm": "one"},
    "larc": {
        "trust_coefficient": 0.02, "eps": 1e-8, "trust_clip": True, "zero_norm": "skip_wd",
    },
    "timm": {"trust_coefficient": 0.001, "eps": 1e-8, "adapt": "wd"},
    "bolts": {"trust_coefficient": 0.001, "eps": 1e-8, "zero_norm": "skip_wd", "adapt": "wd"},
}  # fmt: skip
"""Keyword arguments of `LARS` that give the LARS of another library or paper, by its name."""


@documented
class LARS(TrustOptimizer):
    r"""Layer-wise adaptive rate scaling; "LARS" means different things in different libraries.

    Without `trust_coefficient` this is bitsandbytes' LARS: SGD with momentum whose update is capped
    at `max_unorm` times the parameter's norm. With `trust_coefficient` it is the LARS of the paper
    and its descendants, and `LARS_PRESETS` has the arguments of seven of them: "paper", "mlperf",
    "larc" (apex), "timm", "bolts", "holocron", "discriminative".

    With g the gradient and all norms L2 norms of one whole tensor:

        wd = 0 if skip_wd else weight_decay ;  tau = 1
        trust_coefficient given, and adapt == "always" or weight_decay != 0:
            P = clamp(||p||, weight_norm_bounds) ;  D = ||g|| + weight_decay ||p|| + eps
            degenerate = ||p|| == 0 or ||g|| == 0    zero_norm "one" or "skip_wd"
                       = ||p|| == 0 or D == 0        zero_norm "denom"
                       = never                       zero_norm "zero"
            tau = 1 if degenerate else trust_coefficient P / D   (0 if D == 0)
            zero_norm "skip_wd" and degenerate: wd = 0
            else, with trust_clip: tau = min(tau / lr, 1)
        inner, outer = (tau, lr)      scale_at "grad"
                     = (1, lr tau)    scale_at "update"
                     = (lr tau, 1)    scale_at "lr"
        d = inner (g + wd p)
        b = d in the first step with momentum, else momentum b + (1 - dampening) d
        u = d + momentum b  if nesterov  else  b      (u = d if momentum is 0: no state is kept)
        no trust_coefficient, and ||u|| > max_unorm ||p||, max_unorm > 0:
            outer *= max_unorm ||p|| / ||u||
        p = p - outer u

    Args:
        momentum: decay of the momentum buffer; 0 keeps no state.
        dampening: what is taken off the gradient's share.
        weight_decay: coupled weight decay.
        nesterov: use Nesterov's momentum.
        max_unorm: cap of ||u|| / ||p|| when `trust_coefficient` is None; 0 is off. A parameter that
            is exactly zero does not move under the cap.
        trust_coefficient: eta of the paper; None for the cap. A group may have its own, None
            included, and then does not use what it inherits for the other meaning.
        eps: added to the denominator D. It, `trust_clip`, `zero_norm`, `adapt` and
            `weight_norm_bounds` need a `trust_coefficient`.
        trust_clip: let the trust ratio only lower the learning rate (apex LARC).
        scale_at: where the trust ratio acts: on the "grad" before momentum, on the "update" after
            it, or as a local "lr" inside momentum, which is the paper. Without a
            `trust_coefficient` the ratio is 1, and "lr" still keeps lr inside momentum.
        zero_norm: what a zero norm means: "one", "denom", "zero" or "skip_wd".
        adapt: "always", or "wd" to adapt only groups with weight decay.
        skip_wd: leave weight decay out of the update; it stays in D.
        weight_norm_bounds: None or (low, high), bounds of ||p|| in the ratio.

    Example:
        >>> optimizer = LARS8bit(model.parameters(), lr=4.0, momentum=0.9, weight_decay=1e-4,
        ...                      **LARS_PRESETS["paper"])

    Reference:
        You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888
        (2017); the cap is bitsandbytes' (Dettmers et al., arXiv:2110.02861).

    Where it differs: bitsandbytes' LARS8bit drops the cap from 0.50 on; here it works in 8 bits as
    in 32, counts weight decay, and honours nesterov and dampening.
    """

    family = "LARS"
    UNDAMPED = "momentum_buffer"
    step_required = False
    HYPER = ("momentum", "dampening", "weight_decay", "eps")
    OF_TRUST = ("eps", "trust_clip", "zero_norm", "adapt", "weight_norm_bounds")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        max_unorm: float = 0.02,
        *,
        trust_coefficient: float | None = None,
        eps: float = 0.0,
        trust_clip: bool = False,
        scale_at: str = "grad",
        zero_norm: str = "one",
        adapt: str = "always",
        skip_wd: bool = False,
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
        super().__init__(params, settings_of(locals()), args)

    def _check_initial_settings(self, group: Mapping[str, Any]) -> None:
        super()._check_initial_settings(group)
        _checks.nesterov(group, getattr(self, "defaults", {}))

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.momentum(group)
        _checks.numbers(group, "eps")
        _checks.flags(group, "trust_clip", "skip_wd")
        _checks.one_of("scale_at", group["scale_at"], tuple(SCALE_AT))
        _checks.one_of("zero_norm", group["zero_norm"], tuple(ZERO_NORM))
        _checks.one_of("adapt", group["adapt"], tuple(ADAPT))

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        trust, inside = group["trust_coefficient"] is not None, group["scale_at"] == "lr"
        momentum, cap, caution = group["momentum"] != 0, group["max_unorm"] > 0, group["cautious"]
        options = momentum, group["nesterov"], trust, cap, inside, caution
        return self._cached_rule(rules_sgd.lars_rule, *options)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {
            **super()._hyper(group),
            "trust_clip": float(group["trust_clip"]),
            "skip_wd": float(group["skip_wd"]),
            "scale_at": SCALE_AT[group["scale_at"]],
            "zero_norm": ZERO_NORM[group["zero_norm"]],
            "adapt": ADAPT[group["adapt"]],
        }


@fixed_bits(8)
class LARS8bit(LARS):
    """`LARS` with 8-bit state; see there for its equations."""


@fixed_bits(32)
class LARS32bit(LARS):
    """`LARS` with 32-bit state; see there for its equations."""
