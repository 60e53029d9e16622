"""`LowBitOptimizer`: groups, state and the step loop of every optimizer. No mathematics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import Moment, Rule
from lowbit_optim_kernels.step_plan import StepPlan

from . import _bitsandbytes_arguments, _checks, _gradients, _manager, _settings
from ._parameter_numbers import ParameterNumbers
from ._settings import COMMON_DEFAULTS, WIDTH_AND_FORMAT, Settings, plain, resolved
from ._step_base import StepBase

# Plans of some parameters that are kept have at most so many for each that there is: those that are
# stepped together are the same ones in every backward pass, or others each time.
MOST_LISTED = 4


class Released(Protocol):
    """What has gradients released."""

    def finish(self) -> None:
        """Step what the hooks have left."""

    def forget(self) -> None:
        """Begin anew, as after a step."""


class LowBitOptimizer(StepBase):
    """Base class of the package's optimizers; not meant to be constructed.

    A subclass gives `family`, its defaults, `HYPER`, `_validate` and `_rule`. Groups are read
    afresh in every step, state is created at a parameter's first step, and all parameters are
    stepped together by the engine that `lowbit_optim.engine_for` names, those of neighbouring
    groups, too, that differ in numbers alone.

    A step that raises before the first parameter is written leaves parameters, moments and counts
    of steps as they were: for bad settings, parameters or gradients, when memory for state runs
    out, while code is compiled, and at Ctrl-C until then. (Only the norm of its gradient may stay
    in the history of `percentile_clipping`.) Undoing a later one would take a copy of all
    parameters, so Ctrl-C or a lack of memory leaves it partly done:

    - between groups that are not stepped together;
    - between two parts of a tensor on the torch engine;
    - between a tensor that is not contiguous and its copy;
    - in `Cain` and `LearnedGradient`, whose state comes first;
    - in the microseconds in which a compiled engine counts a step or begins to write.

    On a GPU the kernel of an update is compiled when those before it have been launched.
    """

    grad_scale: Tensor  # which a GradScaler may set while it has `step` called
    _unscales: bool | None = None  # what users say of it, as they may to torch's optimizers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _manager.know_settings(cls)

    def __init__(self, params: Any, defaults: dict[str, Any], args: Any = None) -> None:
        _checks.parameters(params)
        _bitsandbytes_arguments.replace_by_args(defaults, args)
        defaults = {**COMMON_DEFAULTS, **plain(defaults)}
        own = {key: defaults.get(key) for key in WIDTH_AND_FORMAT}
        _checks.optim_bits(own["optim_bits"])
        if own["optim_bits"] == 32:  # may be the default, which a state_format replaces
            del own["optim_bits"]
        defaults.update(_settings.with_storage(own, {}))
        self._check_initial_settings(defaults)
        self._reset_caches()
        super().__init__(params, defaults)
        self._set_defaults(defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves gradients scaled, and their scale to `step`.

        It does with `fused=True`, as with torch's optimizers; else hooks and wrappers would take
        scaled gradients for plain ones. Released gradients it cannot unscale: `step` refuses them.
        """
        if self._released is not None:
            return True
        fused = all(group.get("fused") for group in self.param_groups)
        return fused if self._unscales is None else self._unscales

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._unscales = value

    def __getstate__(self) -> dict[str, Any]:
        said = {} if self._unscales is None else {"_unscales": self._unscales}
        own = {"family": self.family, "_needed": self._needed}
        return {**super().__getstate__(), **own, **said}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What earlier versions had not, and what it was in effect.
        added: dict[str, Any] = {
            "state_format": None, "dither": False, "seed": 0, "master_weight_bits": None,
        }  # fmt: skip
        if "cautious" in inspect.signature(type(self)).parameters:
            added["cautious"] = False
        self._require_own_state(state, added)
        super().__setstate__({key: value for key, value in state.items() if key != "family"})
        self._set_defaults({**added, **self.defaults})
        self._reset_caches()
        for index, group in enumerate(self.param_groups):
            for key, value in added.items():
                group.setdefault(key, value)
            self._settings.remember(index, group)

    def _set_defaults(self, settings: Mapping[str, Any]) -> None:
        """Make those `defaults` that the constructor takes; every group must have all settings.

        What a wrapper puts among the defaults later, no group needs.
        """
        self._needed = getattr(self, "_needed", None) or frozenset((*settings, *self.FIXED))
        self.defaults = {key: value for key, value in settings.items() if key not in self.FIXED}

    def _require_own_state(self, state: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        """Refuse what another optimizer's `__getstate__` gave; settings may lack what was added."""
        needed = {"optim_bits", *getattr(self, "defaults", ())} - added.keys()
        lacking = needed - set(state.get("defaults", needed))
        if any("optim_bits" not in group for group in state.get("param_groups", ())):
            lacking.add("optim_bits")
        family = state.get("family", self.family)
        if lacking or family != self.family:
            found = (
                f"lacks {', '.join(map(repr, sorted(lacking)))}" if lacking else f"is {family}'s"
            )
            raise ValueError(
                f"{type(self).__name__}.__setstate__ takes a state with its own settings, and this "
                f"one {found}; from another optimizer take load_state_dict(other.state_dict())"
            )

    def _reset_caches(self) -> None:
        self.plans: dict[Any, StepPlan] = {}
        self._captured: list[Any] = []
        constants = {key: value for key, value in self.FIXED.items() if key != self.MODE}
        self._settings = Settings(constants)
        self._overrides = _manager.Overrides()
        self._partial_plans: dict[Any, StepPlan] = {}
        self._numbers = ParameterNumbers()
        # What steps what the hooks of released gradients leave.
        self._released: Released | None = getattr(self, "_released", None)

    def _check_initial_settings(self, group: Mapping[str, Any]) -> None:
        """Raise for settings that a user may not write; a step may come to others."""
        settings = resolved(group)
        _checks.initial_learning_rate(settings["lr"])
        self._check_settings(settings)

    # What tools, tests and benchmarks may look at, beside `plans`.

    def rule(self, index: int = 0) -> Rule:
        """The update rule of a parameter group, by its index.

        Raises:
            NotImplementedError: by `Cain` and `LearnedGradient`, which torch operators step.
        """
        return self._step_rule(self._settings_of(index))

    def moments(self, index: int = 0) -> tuple[Moment, ...]:
        """The moments that a parameter group keeps."""
        return self._moments(self._settings_of(index))

    def _settings_of(self, index: int) -> _settings.Resolved:
        group = self.param_groups[index]
        index %= len(self.param_groups)  # which may be counted from the end
        return self._settings.resolved_for(index, group, self._needed, self._check_settings)

    # torch.optim.Optimizer's protocol.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its keys override the constructor's values.

        Args:
            param_group: a dict with `params` and any of the constructor's settings.

        Raises:
            ValueError, TypeError: for a setting that is not allowed, a dict without `params` or a
                parameter that is not real and floating, unless it is frozen, as quantized weights
                are; nothing has been added then.
        """
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError(f"a parameter group must have 'params', got {list(param_group)}")
            given = {**self.FIXED, **param_group}
            settings = {
                key: plain(value) if key in self.defaults else value
                for key, value in given.items()
                if key != "params"
            }
            settings = _settings.with_storage(settings, self.defaults)
            self._check_initial_settings({**self.defaults, **settings})
            param_group.update(settings)
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            for p in added["params"]:
                if not _gradients.is_left_alone(p):
                    _gradients.require_steppable(p, type(self).__name__)
                    self._weights(p, resolved(added))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._settings.remember(len(self.param_groups) - 1, added)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError, TypeError: for settings that no step can run with.
            TypeError: for a parameter that no step could change, as one of integers.
            RuntimeError: for a sparse or complex gradient, one of another shape or on another
                device than its parameter, a DTensor with other placements than Shard(0) and
                Replicate(), an engine that was asked for and cannot run a parameter, a GradScaler
                with released gradients, and in a CUDA graph for a step whose like has not been
                taken before the capture.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._released is not None:
            self._check_unscaled()
            self._released.finish()
        self._step_groups()
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; see `torch.optim.Optimizer.zero_grad`.

        Released ones begin anew, too, as after a backward pass that failed. Parameters that others
        have taken the place of are let go of.
        """
        super().zero_grad(set_to_none)
        if self._numbers.lists_others([p for group in self.param_groups for p in group["params"]]):
            self._forget_parameters()
        if self._released is not None:
            self._released.forget()

    @torch._disable_dynamo
    @torch.no_grad()
    def step_parameter(
        self, p: Tensor, group: dict[str, Any] | None = None, i: int | None = None
    ) -> None:
        """Step one parameter now, as `step()` would, in a hook of a trainer for example.

        `release_gradients` registers such hooks and steps several parameters at once.

        Args:
            p: the parameter; without a gradient it stays as it is. The gradient is kept.
            group: its parameter group, if the caller says it; it must be the right one.
            i: its place there, likewise.

        Raises:
            TypeError: for what is no tensor.
            ValueError: for a parameter that is not in this optimizer, or elsewhere in it; and by
                `Cain` and `LearnedGradient`.
            RuntimeError: as `step()`, and under a GradScaler, whose scale is known only later.
        """
        self._check_single_steps()
        self._check_unscaled()
        index = self._place(p).group
        its = self.param_groups[index]
        if group is not None and group is not its:
            raise ValueError(f"group must be that of the parameter, parameter group {index}")
        if i is not None and not (i in range(len(its["params"])) and its["params"][i] is p):
            raise ValueError(f"i must be the parameter's place in its group; got {i!r}")
        if p.grad is not None:
            self._step_subset([p])

    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """`step_parameter`, by the name that some trainers call it."""
        self.step_parameter(p, group)

    def _check_single_steps(self) -> None:
        """Raise a ValueError if parameters cannot be stepped by themselves."""

    def _check_unscaled(self) -> None:
        """Raise a RuntimeError if gradients have a scale that is known only in `step()`."""
        # After `scaler.unscale_()` grad_scale is None and found_inf a tensor. That is too late: by
        # then hooks have stepped scaled gradients.
        if any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise RuntimeError(
                f"{type(self).__name__}: gradients that a GradScaler scales cannot be stepped in "
                "the backward pass, as their scale and overflows are known only after it; train "
                "in bf16, which needs no GradScaler, or do not release gradients"
            )

    # The step loop.

    def _forget_parameters(self) -> None:
        """Let go of all parameters, any that are gone among them; the next step plans anew."""
        self.plans, self._partial_plans = {}, {}
        self._numbers.forget()
        self._settings.forget()

    def _step_groups(self) -> None:
        """Step every parameter that has a gradient.

        Every check and allocation, and on CPUs every compilation, comes before the first change of
        a parameter or its state.
        """
        last, self.plans = self.plans, {}
        version, params = self._numbers.version, self._renumbered()
        if self._numbers.version != version:
            self._partial_plans = {}  # by old numbers, some perhaps of parameters that are gone
        if self._released is not None and all(p.grad is None for p in params):
            return
        parts = [part for index in range(len(self.param_groups)) for part in self._parts(index)]
        self.plans = self._step_parts(parts, last)

    def _step_subset(self, params: list[Tensor]) -> None:
        """Step parameters that have gradients; plans are kept for when the same ones recur."""
        of_groups: dict[int, dict[Tensor, int]] = {}
        for p in params:
            number, index, _ = self._place(p)
            of_groups.setdefault(index, {})[p] = number
        parts = [
            ((index, key, tuple((id(p), n) for p, n in some.items())), part)
            for index, some in of_groups.items()
            for key, part in self._overridden(self._settings_of(index).having("params", list(some)))
        ]
        kept = self._partial_plans
        try:
            plans = self._step_parts(parts, kept)
            if not plans.keys() <= kept.keys():
                listed = sum(len(plan.listed) for plan in kept.values())
                if listed > MOST_LISTED * len(self._numbers.places):
                    kept.clear()
            kept.update(plans)
        except BaseException:
            self._partial_plans = {}  # some hold the gradients of this step
            raise

    def _parts(self, index: int) -> list[tuple[Any, Mapping[str, Any]]]:
        """A group's settings by what is overridden of its parameters; each part with a key."""
        return [((index, key), part) for key, part in self._overridden(self._settings_of(index))]


def require_own(optimizer: Any, function: str) -> None:
    """Refuse what is no optimizer of this package."""
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(
            f"{function} takes an optimizer of lowbit_optim, got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
