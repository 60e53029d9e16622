"""LARS, in every meaning the name has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules import sgd as rules_sgd

from . import _checks
from ._trust import TrustOptimizer
from ._variants import fixed_bits

_rule = lru_cache(maxsize=None)(rules_sgd.lars)

SCALE_AT = {
    "grad": rules_sgd.AT_GRAD,
    "update": rules_sgd.AT_UPDATE,
    "lr": rules_sgd.AT_LR,
}
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
            trust_clip: tau = min(tau / lr, 1)
        inner, outer = (tau, lr)      scale_at "grad"
                     = (1, lr tau)    scale_at "update"
                     = (lr tau, 1)    scale_at "lr"
        d = inner (g + wd p)
        b = d in the first step, else momentum b + (1 - dampening) d
        u = d + momentum b  if nesterov  else  b      (u = d if momentum is 0: no state is kept)
        no trust_coefficient, and ||u|| > max_unorm ||p||, max_unorm > 0:
            outer *= max_unorm ||p|| / ||u||
        p = p - outer u

    Args:
        params: parameters, named parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        momentum: decay of the momentum buffer. Default 0, which keeps no state.
        dampening: what is taken off the gradient's share. Default 0.
        weight_decay: coupled weight decay. Default 0.
        nesterov: use Nesterov's momentum. Default False.
        optim_bits: 32 or 8, the width of the momentum buffer. Default 32.
        args: object whose `optim_bits`, `min_8bit_size`, `percentile_clipping` and `max_unorm`
            replace these arguments where present.
        min_8bit_size: tensors with fewer elements keep 32-bit state. Default 4096.
        percentile_clipping: clip the gradient's norm to this percentile (0..100) of the last 100
            steps' norms; 100 is off, the default.
        max_unorm: cap of ||u|| / ||p|| when `trust_coefficient` is None. Default 0.02; 0 is off.
            A parameter that is exactly zero does not move under the cap.
        trust_coefficient: eta of the paper; None, the default, for the cap. A group may have its
            own, None included, and then does not use what it inherits for the other meaning.
        eps: added to the denominator D. Default 0. It, `trust_clip`, `zero_norm`, `adapt` and
            `weight_norm_bounds` need a `trust_coefficient`.
        trust_clip: let the trust ratio only lower the learning rate (apex LARC). Default False.
        scale_at: where the trust ratio acts: on the "grad" before momentum (default), on the
            "update" after it, or as a local "lr" inside momentum, which is the paper. Without a
            `trust_coefficient` the ratio is 1, and "lr" still keeps lr inside momentum.
        zero_norm: what a zero norm means: "one" (default), "denom", "zero" or "skip_wd".
        adapt: "always" (default), or "wd" to adapt only groups with weight decay.
        skip_wd: leave weight decay out of the update; it stays in D. Default False.
        weight_norm_bounds: None (default) or (low, high), bounds of ||p|| in the ratio.
        maximize: ascend instead of descend. Default False.
        foreach, fused, capturable: as in torch.optim. All tensors of a group are always stepped
            together and, on accelerators, captured safely; `fused=True` insists on a compiled
            engine and raises in `step` where there is none.
        differentiable: must be False.

    Raises:
        ValueError, TypeError: naming the argument that is not allowed.

    Example:
        >>> optimizer = LARS8bit(model.parameters(), lr=4.0, momentum=0.9, weight_decay=1e-4,
        ...                      **LARS_PRESETS["paper"])

    Reference:
        You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888
        (2017); the cap is bitsandbytes' (Dettmers et al., arXiv:2110.02861).

    Where it differs: bitsandbytes' LARS8bit drops the cap; here it works in 8 bits as in 32, counts
    weight decay, and honours nesterov and dampening.
    """

    family = "LARS"
    step_required = False
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
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _checks.bitsandbytes_order(percentile_clipping, "max_unorm")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "optim_bits": optim_bits, "min_8bit_size": min_8bit_size,
            "percentile_clipping": percentile_clipping, "max_unorm": max_unorm,
            "trust_coefficient": trust_coefficient, "eps": eps, "trust_clip": trust_clip,
            "scale_at": scale_at, "zero_norm": zero_norm, "adapt": adapt, "skip_wd": skip_wd,
            "weight_norm_bounds": weight_norm_bounds, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, args)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        _checks.momentum(group)
        if group["trust_coefficient"] is not None:
            _checks.number("trust_coefficient", group["trust_coefficient"], 0.0)
        _checks.number("eps", group["eps"], 0.0)
        _checks.flag("trust_clip", group["trust_clip"])
        _checks.flag("skip_wd", group["skip_wd"])
        _checks.one_of("scale_at", group["scale_at"], tuple(SCALE_AT))
        _checks.one_of("zero_norm", group["zero_norm"], tuple(ZERO_NORM))
        _checks.one_of("adapt", group["adapt"], tuple(ADAPT))
        _checks.bounds("weight_norm_bounds", group["weight_norm_bounds"])

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        trust = group["trust_coefficient"] is not None
        cap = group["max_unorm"] > 0 and not trust
        inside = group["scale_at"] == "lr" and not trust
        return _rule(group["momentum"] != 0, group["nesterov"], trust, cap, inside)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        low, high = group["weight_norm_bounds"] or (0.0, math.inf)
        names = ("momentum", "dampening", "weight_decay", "eps")
        return {
            **{name: group[name] for name in names},
            "trust_coefficient": group["trust_coefficient"] or 0.0,
            "trust_clip": float(group["trust_clip"]),
            "skip_wd": float(group["skip_wd"]),
            "scale_at": SCALE_AT[group["scale_at"]],
            "zero_norm": ZERO_NORM[group["zero_norm"]],
            "adapt": ADAPT[group["adapt"]],
            "norm_low": low,
            "norm_high": high,
        }


LARS8bit = fixed_bits(LARS, 8)
LARS32bit = fixed_bits(LARS, 32)
