"""`StepBase`: a step of an optimizer's parameters, planned and run."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch, dither
from lowbit_optim_kernels.batch import Batch, Slot, batches_of, note_order
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.formats import parts_of
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.overlaps import memory_of
from lowbit_optim_kernels.reading import PLAIN_TYPES
from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.step_plan import StepPlan, stand_in, too_many
from lowbit_optim_kernels.weights import RESIDUAL_KEY

from . import _gradients, _sharding, _sums
from ._checkpoint_base import CheckpointBase, steppable
from ._gathering import GatheredCopies
from ._state_layout import fits
from ._tensor_checks import has_address

# Settings by which state is stored, code is compiled and an engine is chosen.
STORAGE_AND_ENGINE = (
    "optim_bits", "state_format", "min_8bit_size", "seed", "master_weight_bits", "maximize",
    "fused",
)  # fmt: skip

# Plans in a row in which nothing is stepped for the first time, before one has parameters without
# a gradient, too: as long as new ones appear, it would be made anew with all of them.
SETTLED = 3


class _InCommon(NamedTuple):
    """What parts of groups that are stepped together have in common.

    Attributes:
        rule: what is run.
        settings: the values of STORAGE_AND_ENGINE.
    """

    rule: Rule
    settings: tuple[Any, ...]


class _Member(NamedTuple):
    """A parameter of a new step plan.

    Attributes:
        part, group: the number and settings of its part of a group.
        p: the parameter.
        gradient: as this rank's engine reads it; a stand-in where there is none.
        engine: the name of the engine that steps it.
        share: this rank's share of a DTensor.
    """

    part: int
    group: Mapping[str, Any]
    p: Tensor
    gradient: Tensor
    engine: str
    share: _sharding.Share | None


class StepBase(CheckpointBase):
    """An optimizer whose parameters are stepped together, by plans that are kept."""

    _captured: list[Any]

    def _step_parts(
        self, parts: list[tuple[Any, Mapping[str, Any]]], last: Mapping[Any, StepPlan]
    ) -> dict[Any, StepPlan]:
        """Step parts of groups; step plans by the keys of their parts.

        Neighbours that differ in hyperparameters at most are stepped together. (Others would be
        stepped in another order than they are listed in, which shows where they share memory.)
        """
        alike = self._alike(parts)
        plans: dict[Any, StepPlan] = {}
        for in_common, members in alike:
            key = tuple(members)
            plans[key] = self._plan(in_common, list(members.values()), last.get(key))
        for (key, plan), (_, members) in zip(plans.items(), alike, strict=True):
            self._set_values(plan, list(members.values()))
            plan.take_tables(last.get(key))
        steps = [
            (plan, batch)
            for plan in plans.values()
            for batch in plan.batches
            if len(batch.missing) < len(batch.slots)
        ]

        def keep_states() -> None:
            for plan in plans.values():
                self._keep_states(plan.new_states)

        sharded = any(batch.shards for _, batch in steps)
        all_reduce = _sums.all_reduce if sharded else None
        for together in _in_turn(steps):
            batches = [batch for _, batch in together]
            dispatch.step(batches, all_reduce=all_reduce, ready=keep_states)
            for plan, batch in together:
                plan.write_back(batch)
        written = [p for plan in plans.values() for p in plan.written()]
        # Compiled engines write through addresses, which autograd's version counters do not see.
        if written:
            torch.autograd.graph.increment_version(written)
        for plan in plans.values():
            plan.freeze(self.state)
        return plans

    def _alike(
        self, parts: list[tuple[Any, Mapping[str, Any]]]
    ) -> list[tuple[_InCommon, dict[Any, Mapping[str, Any]]]]:
        """Runs of neighbouring parts that differ in hyperparameters at most, by their keys."""
        alike: list[tuple[_InCommon, dict[Any, Mapping[str, Any]]]] = []
        for key, part in parts:
            known: dict[str, Any] = getattr(part, "worked_out", {})  # of overridden ones nothing
            if "in_common" not in known:
                settings = tuple(map(part.get, STORAGE_AND_ENGINE))
                known["in_common"] = _InCommon(self._step_rule(part), settings)
            in_common = known["in_common"]
            if not alike or in_common != alike[-1][0]:
                alike.append((in_common, {}))
            alike[-1][1][key] = part
        return alike

    def _checked_gradients(
        self, group: Mapping[str, Any], kept: Container[Tensor] = ()
    ) -> Iterator[tuple[Tensor, Tensor, str]]:
        """Each parameter that has a gradient, with its gradient and engine; checked.

        And those of `kept`, with a stand-in for the gradient that they have not.
        """
        for p in dict.fromkeys(group["params"]):  # one that is listed twice is stepped once
            held = _sharding.local(p)
            if p.grad is None:
                if p in kept and self._may_wait(p, held, group):
                    yield p, stand_in(held), dispatch.engine_for(held).name
                continue
            engine = dispatch.engine_for(held)
            if group["fused"] and engine.name == "torch":
                raise RuntimeError(f"fused=True, but the engine is 'torch': {engine.reason}")
            yield p, _gradients.checked(p, type(self).__name__), engine.name

    def _plan(
        self, in_common: _InCommon, groups: list[Mapping[str, Any]], last: StepPlan | None
    ) -> StepPlan:
        """The step plan of parts that are alike: the last step's if it holds, else a new one."""
        listed = [p for group in groups for p in group["params"]]
        form = (
            in_common, dispatch.request(), self._numbers.version,
            tuple(len(group["params"]) for group in groups),
            self._amp_tensor("grad_scale") is None, self._amp_tensor("found_inf") is None,
        )  # fmt: skip
        if last is None or not last.is_for(form, listed):
            return self._new_plan(in_common.rule, form, listed, groups, set())
        found = _gradients.gradients_of(listed)
        for plan in filter(None, (last, last.wider)):
            if plan.take_gradients(found, self.state):
                return plan
        present = [p for p, g in zip(listed, found, strict=True) if g is not None]
        waiting = [p for p, g in zip(listed, found, strict=True) if g is None]
        settled = last.settled + 1 if all(p in self.state for p in present) else 0
        kept: set[Tensor] = set()
        if settled >= SETTLED and last.can_leave_out():
            kept = self._to_keep(waiting, present, last)
        plan = self._new_plan(in_common.rule, form, listed, groups, kept)
        plan.settled, plan.wider = settled, last.wider_than(present)
        return plan

    def _to_keep(self, waiting: list[Tensor], present: list[Tensor], last: StepPlan) -> set[Tensor]:
        """Of parameters without a gradient those for a plan to have beside those present."""
        if too_many(min(len(waiting), len(self.state)), len(present)):
            return set()
        known = {(p.device, p.dtype) for p in (*present, *last.params)}
        return {p for p in waiting if p in self.state and (p.device, p.dtype) in known}

    def _may_wait(self, p: Tensor, held: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether a plan can have a parameter without a gradient, and its state as it is.

        Without a collective call, as it may be another rank's plan that has it.
        """
        if type(held) not in PLAIN_TYPES or not held.is_contiguous() or held.is_neg():
            return False
        if not ENGINES[dispatch.engine_for(held).name].takes_mixed_batches:
            return False
        share, state = self._share(p, group), self.state[p]
        if share is not None:
            if share.whole or not share.holds(state):
                return False
            state, group = _sharding.unwrapped(state), share.settings_for_shard(group)
        stored = self._stored(held, group, state)
        return fits(state, stored) and all(
            has_address(state[key]) or not state[key].numel() for key in stored
        )

    @steppable()
    def _new_plan(
        self, rule: Rule, form: tuple, listed: list[Tensor], groups: list[Mapping[str, Any]],
        kept: set[Tensor],
    ) -> StepPlan:  # fmt: skip
        """A step plan; states are created that do not exist yet.

        Args:
            rule: what is run.
            form: see `StepPlan`.
            listed: the parameters of the groups.
            groups: the parts of groups.
            kept: parameters to have in it even if they have no gradient.
        """
        members = [
            _Member(part, group, p, g, engine, self._share(p, group))
            for part, group in enumerate(groups)
            for p, g, engine in self._checked_gradients(group, kept)
        ]
        params = [member.p for member in members]
        held = list(map(_sharding.local, params))
        plan = StepPlan(form, listed, params, held, [], _sharding.Locals(params))
        wholes = [i for i, x in enumerate(members) if x.share is not None and x.share.whole]
        plan.gathered = GatheredCopies(params, wholes)
        stepped = plan.gathered.renew(plan.held, [member.gradient for member in members])
        slots: list[tuple[Slot, str, int]] = []
        dithers = any(moment.stream for moment in rule.moments)
        for i, (member, p, g) in enumerate(zip(members, *stepped, strict=True)):
            slot = self._planned_slot(plan, i, member, p, g)
            if dithers or slot.weights.dithered:
                number = self._place(member.p).number
                slot.tensor_key = dither.tensor_key(member.group["seed"], number)
            slots.append((slot, member.engine, member.part))
        # Last, so that tensors which every step looks at lie together in memory.
        for p, share in ((member.p, member.share) for member in members):
            if share is not None and p in plan.new_states:
                plan.new_states[p] = share.wrapped(plan.new_states[p])
        given = (x.gradient if x.p.grad is None else x.p.grad for x in members)
        plan.gradients = list(map(_sharding.local, given))
        plan.missing = frozenset(i for i, p in enumerate(params) if p.grad is None)
        plan.batches = batches_of(rule, slots, self._captured)
        return plan

    def _planned_slot(
        self, plan: StepPlan, i: int, member: _Member, stepped: Tensor, g: Tensor
    ) -> Slot:
        """The slot of a plan's i-th parameter, and in the plan its copy and new state, if any.

        `stepped` and g are the plain tensors that this rank steps, and its gradient.
        """
        p, group, share = member.p, member.group, member.share
        work = stepped.resolve_neg().contiguous()
        own_part = work if share is None else share.written(work)
        if own_part is not plan.held[i]:
            plan.staged[i] = own_part
        state, new = self._local_state(p, stepped, group, share)
        if new:
            plan.new_states[p] = state
        slot = self._slot(p, work, dispatch.readable(g, member.engine), group, state)
        slot.index = i
        if i in plan.staged:
            slot.memory = memory_of(plan.held[i])
        if share is not None:
            share.locate(slot)
        return slot

    def _amp_tensor(self, name: str) -> Tensor | None:
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
            batch.grad_scale = self._amp_tensor("grad_scale")
            batch.found_inf = self._amp_tensor("found_inf")

    def _slot(
        self, p: Tensor, work: Tensor, g: Tensor, group: Mapping[str, Any], state: dict[str, Any]
    ) -> Slot:
        moments = self._moments(group)
        format = self._format(p, group) if moments else FLOAT32
        layout = Layout.of(work.shape, format.block)
        return Slot(
            p=work, g=g, format=format, step=state["step"],
            state=tuple(state[part.key] for part in parts_of(moments, format)),
            rows=layout.rows, row=layout.row, numel=p.numel(),
            lasting=tuple(state[x.key] for x in self._lasting(group)),
            weights=self._weights(p, group), residual=state.get(RESIDUAL_KEY),
        )  # fmt: skip


def _in_turn(
    steps: list[tuple[StepPlan, Batch]],
) -> Iterator[list[tuple[StepPlan, Batch]]]:
    """Batches of plans that are stepped together; one by one where copies share memory.

    A copy is made anew then from what the batches before have written.
    """
    if not any(plan.staged for plan, _ in steps):
        yield from filter(None, [steps])
        return
    note_order([batch for _, batch in steps])
    if not any(
        batch.sharing.intersection(plan.copied(batch)) for plan, batch in steps if batch.sharing
    ):
        yield steps
        return
    for plan, batch in steps:
        plan.renew_copies(batch)
        yield [(plan, batch)]
