"""`LowBitOptimizer`: groups, state and the step loop of every optimizer. No mathematics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch, dither
from lowbit_optim_kernels.formats import units
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.plan import Slot, batches_of
from lowbit_optim_kernels.rules import Moment, Rule
from lowbit_optim_kernels.step_plan import StepPlan
from lowbit_optim_kernels.weights import RESIDUAL_KEY

from . import _checks, _gradients, _manager, _sharding, _state
from ._gathering import Copies
from ._loads_state import LoadsState
from ._settings import Settings, plain, resolved

# Settings that decide how state is stored, what is compiled and which engine takes it.
FORM = (
    "optim_bits", "state_format", "min_8bit_size", "seed", "master_weight_bits", "maximize",
    "fused",
)  # fmt: skip
# Settings that every group has, whether or not the class has arguments for them.
EVERYWHERE = {"state_format": None, "dither": True, "seed": 0, "master_weight_bits": "auto"}


class LowBitOptimizer(LoadsState):
    """Base class of the package's optimizers; not meant to be constructed.

    A subclass gives its defaults, `HYPER`, `_validate` and `_rule`. Groups are read afresh in
    every step, state is created at a parameter's first step, and all parameters are stepped
    together by the engine that `lowbit_optim.engine_for` names, those of several groups, too, if
    the groups differ in numbers alone.

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

    On a GPU the last kernel of such a group is compiled when those before it have been launched.
    """

    grad_scale: Tensor  # which a GradScaler sets while it has `step` called
    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _manager.know_settings(inspect.signature(cls.__init__).parameters)

    def __init__(self, params: Any, defaults: dict[str, Any], args: Any = None) -> None:
        _checks.replace_by_args(defaults, args)
        defaults = {**EVERYWHERE, **plain(defaults)}
        own = {key: defaults.get(key) for key in ("optim_bits", "state_format")}
        _checks.optim_bits(own["optim_bits"])
        if own["optim_bits"] == 32:  # may be the default, which a state_format replaces
            del own["optim_bits"]
        defaults.update(_state.with_storage(own, {}))
        self._check_given(defaults)
        self._reset_caches()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What earlier versions had not, and what it was in effect.
        added: dict[str, Any] = {
            "state_format": None, "dither": False, "seed": 0, "master_weight_bits": None,
        }  # fmt: skip
        if "cautious" in inspect.signature(type(self)).parameters:
            added["cautious"] = False
        self.defaults = {**added, **self.defaults}
        self._reset_caches()
        for index, group in enumerate(self.param_groups):
            for key, value in added.items():
                group.setdefault(key, value)
            self._settings.remember(index, group)

    def _reset_caches(self) -> None:
        self.plans: dict[Any, StepPlan] = {}
        self._captured: list[Any] = []
        self._settings = Settings()
        self._overrides = _manager.Overrides()
        self._partial_plans: dict[Any, StepPlan] = {}
        self._places, self._numbered, self._numbering = {}, [], 0
        # What steps what the hooks of released gradients leave.
        self._released: Callable[[], None] | None = getattr(self, "_released", None)

    def _check_given(self, group: Mapping[str, Any]) -> None:
        """Raise for settings that a user may not write; a step may come to others."""
        settings = resolved(group)
        _checks.initial_learning_rate(settings["lr"])
        self._check(settings)

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

    def _settings_of(self, index: int) -> Mapping[str, Any]:
        return self._settings.of(index, self.param_groups[index], self._check)

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
            settings = {key: value for key, value in param_group.items() if key != "params"}
            settings = _state.with_storage(plain(settings), self.defaults)
            self._check_given({**self.defaults, **settings})
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
            RuntimeError: for a sparse gradient, a gradient on another device than its parameter,
                or an engine that was asked for and cannot run a parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._released is not None:
            self._check_unscaled()
            self._released()
        self._step_groups()
        return loss

    @torch._disable_dynamo
    @torch.no_grad()
    def step_parameter(
        self, p: Tensor, group: dict[str, Any] | None = None, i: int | None = None
    ) -> None:
        """Step one parameter now, as `step()` would, in a hook of a trainer for example.

        `release_gradients` registers such hooks and steps several parameters at once.

        Args:
            p: the parameter; without a gradient it stays as it is. The gradient is kept.
            group: its parameter group, and
            i: its place there, which some trainers say; they must be right.

        Raises:
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
            self._step_some([p])

    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """`step_parameter`, by the name that some trainers call it."""
        self.step_parameter(p, group)

    def _check_single_steps(self) -> None:
        """Raise a ValueError if parameters cannot be stepped by themselves."""

    def _check_unscaled(self) -> None:
        """Raise a RuntimeError if gradients have a scale that is known only in `step()`."""
        if self._scaler("grad_scale") is not None or self._scaler("found_inf") is not None:
            raise RuntimeError(
                f"{type(self).__name__}: gradients that a GradScaler scales cannot be stepped in "
                "the backward pass, as their scale and overflows are known only after it; train "
                "in bf16, which needs no GradScaler, or do not release gradients"
            )

    # The step loop.

    def _step_groups(self) -> None:
        """Step every parameter that has a gradient.

        Every check and allocation, and on CPUs every compilation, comes before the first change of
        a parameter or its state.
        """
        last, self.plans, self._places = self.plans, {}, {}
        params = self._renumbered()
        if self._released is not None and all(p.grad is None for p in params):
            return
        parts = [part for index in range(len(self.param_groups)) for part in self._parts(index)]
        self.plans = self._step_parts(parts, last)

    def _step_some(self, params: list[Tensor]) -> None:
        """Step parameters that have gradients; plans are kept for when the same ones recur."""
        of_groups: dict[int, dict[Tensor, int]] = {}
        for p in params:
            number, index, _ = self._place(p)
            of_groups.setdefault(index, {})[p] = number
        parts = [
            ((index, key, tuple((id(p), n) for p, n in some.items())), part)
            for index, some in of_groups.items()
            for key, part in self._overridden({**self._settings_of(index), "params": list(some)})
        ]
        last = self._partial_plans
        self._partial_plans = {} if len(last) > len(self._places) else last
        self._partial_plans.update(self._step_parts(parts, last))

    def _step_parts(
        self, parts: list[tuple[Any, Mapping[str, Any]]], last: Mapping[Any, StepPlan]
    ) -> dict[Any, StepPlan]:
        """Step parts of groups; step plans by the keys of their parts.

        Parts that differ in hyperparameters at most are stepped together.
        """
        alike: dict[tuple, dict[Any, Mapping[str, Any]]] = {}
        for key, part in parts:
            form = self._step_rule(part), *map(part.get, FORM)
            alike.setdefault(form, {})[key] = part
        plans: dict[Any, StepPlan] = {}
        for (rule, *_), members in alike.items():
            key = tuple(members)
            plans[key] = self._plan(rule, list(members.values()), last.get(key))
        for (key, plan), members in zip(plans.items(), alike.values(), strict=True):
            self._set_values(plan, list(members.values()))
            plan.take_tables(last.get(key))
        batches = [batch for plan in plans.values() for batch in plan.batches]

        def keep_states() -> None:
            for plan in plans.values():
                self.state.update(plan.new_states)

        if batches:
            sharded = any(batch.shards for batch in batches)
            all_reduce = _sharding.all_reduce if sharded else None
            dispatch.step(batches, all_reduce=all_reduce, ready=keep_states)
        written = [p for plan in plans.values() for p in plan.held]
        for plan in plans.values():
            plan.write_back()
        # Compiled engines write through addresses, which autograd's version counters do not see.
        if written:
            torch.autograd.graph.increment_version(written)
        for plan in plans.values():
            plan.freeze(self.state)
        return plans

    def _parts(self, index: int) -> list[tuple[Any, Mapping[str, Any]]]:
        """A group's settings by what is overridden of its parameters; each part with a key."""
        return [((index, key), part) for key, part in self._overridden(self._settings_of(index))]

    def _checked_gradients(self, group: Mapping[str, Any]) -> list[tuple[Tensor, Tensor, str]]:
        """Each parameter that has a gradient, with its gradient and engine; checked."""
        found = []
        for p in dict.fromkeys(group["params"]):  # one that is listed twice is stepped once
            if p.grad is None:
                continue
            engine = dispatch.engine_for(_sharding.local(p))
            if group["fused"] and engine.name == "torch":
                raise RuntimeError(f"fused=True, but the engine is 'torch': {engine.reason}")
            found.append((p, _gradients.checked(p, type(self).__name__), engine.name))
        return found

    def _plan(
        self, rule: Rule, groups: list[Mapping[str, Any]], last: StepPlan | None
    ) -> StepPlan:
        """The step plan of parts of groups: the last step's if it holds, else a new one."""
        listed = [p for group in groups for p in group["params"]]
        found = _gradients.of(listed)
        params = [p for p, g in zip(listed, found, strict=True) if g is not None]
        gradients = [g for g in found if g is not None]
        sizes = [len(group["params"]) for group in groups]
        if len(params) < len(listed):
            rest = iter(found)
            sizes = [sum(g is not None for g in islice(rest, size)) for size in sizes]
        form = (
            rule, dispatch.request(), *map(groups[0].get, FORM), tuple(sizes), self._numbering,
            self._scaler("grad_scale") is None, self._scaler("found_inf") is None,
        )  # fmt: skip
        if last is not None and (held := _sharding.locals_of(params, gradients)) is not None:
            plan = last.with_gradients(form, params, *held, self.state)
            if plan is not None:
                return plan
        return self._new_plan(rule, form, groups)

    def _new_plan(self, rule: Rule, form: tuple, groups: list[Mapping[str, Any]]) -> StepPlan:
        """A step plan; states are created that do not exist yet."""
        checked = [
            (part, *found)
            for part, group in enumerate(groups)
            for found in self._checked_gradients(group)
        ]
        params = [p for _, p, _, _ in checked]
        plan = StepPlan(form, params, list(map(_sharding.local, params)), [])
        shares = [self._share(p, groups[part]) for part, p, _, _ in checked]
        wholes = [i for i, share in enumerate(shares) if share is not None and share.whole]
        plan.copies = Copies(params, wholes)
        copied = plan.copies.renew(plan.held, [g for _, _, g, _ in checked])
        slots: list[tuple[Slot, str]] = []
        dithers = any(moment.stream for moment in rule.moments)
        each = zip(checked, shares, plan.held, *copied, strict=True)
        for (part, p, _, engine), share, held, stepped, g in each:
            group = groups[part]
            work = stepped.resolve_neg().contiguous()
            plan.work.append(work)
            own_part = work if share is None else share.written(work)
            if own_part is not held:
                plan.staged.append((held, own_part))
            state, new = self._plain_state(p, stepped, group, share)
            if new:
                plan.new_states[p] = state
            slot = self._slot(p, work, dispatch.readable(g, engine), group, state)
            slot.part = part
            if share is not None:
                share.locate(slot)
            if dithers or slot.weights.dithered:
                slot.tensor_key = dither.tensor_key(group["seed"], self._place(p).number)
            slots.append((slot, engine))
        # Last, so that tensors which every step looks at lie together in memory.
        for p, share in zip(params, shares, strict=True):
            if share is not None and p in plan.new_states:
                plan.new_states[p] = share.wrapped(plan.new_states[p])
        plan.gradients = [_sharding.local(p.grad) for p in params]
        plan.batches = batches_of(rule, slots, self._captured)
        return plan

    def _scaler(self, name: str) -> Tensor | None:
        """An AMP scaler's tensor for this step, 0-d; FSDP's is of shape (1,), an int 0 is none."""
        return x.reshape(()) if isinstance(x := getattr(self, name, None), Tensor) else None

    def _set_values(self, plan: StepPlan, groups: list[Mapping[str, Any]]) -> None:
        """Give a plan's batches the values of this step."""
        hyper = [
            {
                "lr": group["lr"], "max_unorm": group["max_unorm"],
                "percentile": group["percentile_clipping"], **self._hyper(group),
            }
            for group in groups
        ]  # fmt: skip
        for batch in plan.batches:
            batch.hyper = [hyper[part] for part in batch.parts]
            batch.maximize = groups[0]["maximize"]
            batch.grad_scale = self._scaler("grad_scale")
            batch.found_inf = self._scaler("found_inf")

    def _slot(
        self, p: Tensor, work: Tensor, g: Tensor, group: Mapping[str, Any], state: dict[str, Any]
    ) -> Slot:
        moments = self._moments(group)
        format = self._format(p, group) if moments else FLOAT32
        layout = Layout.of(work.shape, format.block)
        return Slot(
            p=work, g=g, format=format, step=state["step"],
            state=tuple(state[part.key] for unit in units(moments, format) for part in unit.parts),
            rows=layout.rows, row=layout.row, numel=p.numel(),
            lasting=tuple(state[x.key] for x in self._lasting(group)),
            weights=self._weights(p, group), residual=state.get(RESIDUAL_KEY),
        )  # fmt: skip


def require_own(optimizer: Any, function: str) -> None:
    """Refuse what is no optimizer of this package."""
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(
            f"{function} takes an optimizer of lowbit_optim, got {type(optimizer).__name__}"
        )
