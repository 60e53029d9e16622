"""`TrustOptimizer`: what LARS and LAMB have in common, a trust ratio that can be off."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from . import _checks
from ._optimizer import LowBitOptimizer
from ._settings import with_storage


class TrustOptimizer(LowBitOptimizer):
    """Base class of the optimizers with `trust_coefficient`; not meant to be constructed.

    Without one, the settings `OF_TRUST` mean nothing; with one, `max_unorm`. Whoever gives such a
    setting is told so. But a group that turns the trust ratio on or off by itself inherits what it
    then does not use, so what is refused is what is given, not what a group ends up with.
    """

    OF_TRUST: ClassVar[tuple[str, ...]]

    def __init__(self, params: Any, defaults: dict[str, Any], args: Any = None) -> None:
        super().__init__(params, defaults, args)
        trusts = [group["trust_coefficient"] for group in (self.defaults, *self.param_groups)]
        if len({trust is None for trust in trusts}) == 1:
            self._refuse_unused(self.defaults, trusts[0])

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        if group["trust_coefficient"] is not None:
            _checks.numbers(group, "trust_coefficient")
        _checks.bounds("weight_norm_bounds", group["weight_norm_bounds"])

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        low, high = group["weight_norm_bounds"] or (0.0, math.inf)
        trust = group["trust_coefficient"] or 0.0
        return {
            **super()._hyper(group),
            "trust_coefficient": trust,
            "norm_low": low,
            "norm_high": high,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `LowBitOptimizer`."""
        if isinstance(param_group, dict):
            merged = {**self.defaults, **with_storage(param_group, self.defaults)}
            self._check_initial_settings(merged)
            # Whole groups of another optimizer have their defaults as keys of their own.
            names = [name for name in (*self.OF_TRUST, "max_unorm") if name in param_group]
            own = {k: param_group[k] for k in names if param_group[k] != self.defaults[k]}
            self._refuse_unused(own, merged["trust_coefficient"])
        super().add_param_group(param_group)

    def _refuse_unused(self, given: Mapping[str, Any], trust: float | None) -> None:
        """Raise for a setting among the given ones that has no effect with this coefficient."""
        own = next(cls for cls in type(self).__mro__ if "OF_TRUST" in vars(cls))
        arguments = inspect.signature(own).parameters
        for name in self.OF_TRUST if trust is None else ("max_unorm",):
            usual = arguments[name].default
            if name not in given or given[name] == usual or (trust is not None and not given[name]):
                continue
            if trust is None:
                raise ValueError(
                    f"{name} needs a trust_coefficient, which is None; got {given[name]!r}, only "
                    f"{usual!r} is allowed without one"
                )
            raise ValueError(
                f"{name} is not used with a trust_coefficient, which is {trust!r}; got "
                f"{given[name]!r}, only 0 or the default {usual!r} is allowed with one"
            )
