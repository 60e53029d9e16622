"""`StateBase`: the state of each of an optimizer's parameters, made, found and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowbit_optim_kernels.devices import refuse_capture
from lowbit_optim_kernels.formats import Format
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.rules import HISTORY, RATIO, SIGN, SQUARE, Lasting, Moment, Rule
from lowbit_optim_kernels.rules.shared import (
    NORMS,
    outlasting,
    with_clipping,
    with_dither,
    with_outlasting,
)
from lowbit_optim_kernels.weights import RESIDUAL_KEY, Weights

from . import (
    _checks,
    _saved_moments,
    _saved_state,
    _sharding,
    _state_dicts,
    _state_layout,
    _tensor_checks,
)
from ._sharding import Share
from ._state_layout import TensorSpec

# An average with a larger coefficient may change by less than a code in a step. Where its sign
# alone counts, a small number that becomes 0 is worse than a large one that stays.
SLOW, SLOW_SIGN = 0.9, 0.99


class StateBase(Optimizer):
    """An optimizer's state of its parameters, by the settings `group` that apply to each.

    `_format`, `_kept_state`, `_loaded_state`, `_local_state`, `_restart_from_weight`, `_share`,
    `_state_of` and `_weights` take DTensors, too, of which a rank keeps its shard; the other
    methods plain tensors, but for optimizers that step DTensors by themselves.
    """

    family: ClassVar[str]
    needs_whole: ClassVar[bool] = False  # whether the rule cannot step a tensor by its rows
    step_required: ClassVar[bool] = True  # in a checkpoint; torch.optim.SGD saves none
    SAVED_MOMENTS: ClassVar[tuple[Moment, ...]] = ()  # that are converted, if a checkpoint has them

    # What a front-end supplies.

    HYPER: ClassVar[tuple[str, ...]] = ()  # settings that the rule reads by their own names
    BETAS: ClassVar[int] = 2  # how many `betas` there are, which it reads as beta1, beta2, ...
    FIXED: ClassVar[Mapping[str, Any]] = {}  # settings that every group has from no argument
    MODE: ClassVar[str] = ""  # the one of these that changes
    UNDAMPED: ClassVar[str] = ""  # the moment that a first gradient, of step 1, enters undamped

    def _validate(self, group: Mapping[str, Any]) -> None:
        """Raise for settings that no step can run with; `group` has them all, resolved."""
        _checks.common(group)
        if "betas" in group:
            _checks.betas(group["betas"], self.BETAS)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule that these settings ask for."""
        raise NotImplementedError

    @staticmethod
    @cache
    def _cached_rule(make: Callable[..., Rule], *options: Any, **named: Any) -> Rule:
        """The rule that `make` returns for these options: the same object each time."""
        return make(*options, **named)

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """The rule's hyperparameters by name, but lr and max_unorm."""
        betas = {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}
        return {**betas, **{name: group[name] for name in self.HYPER}}

    def _initial_value(self, group: Mapping[str, Any]) -> float:
        """The value, not negative, that every element of new moments has."""
        return 0.0

    # What follows from it.

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise for settings that no step can run with."""
        self._validate(settings)
        self._check_format(settings)

    def _clipping_rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule that these settings ask for, with percentile clipping if they do for that."""
        rule = self._rule(group)
        return with_clipping(rule) if group["percentile_clipping"] < 100 else rule

    def _step_rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule that a step runs: with clipping, and with what formats are told of moments."""
        rule = with_outlasting(self._clipping_rule(group), self._outlasting(group))
        return with_dither(rule, self._dithered(group))

    def _dithered(self, group: Mapping[str, Any]) -> frozenset[str]:
        """The keys of the moments whose codes are rounded by dither."""
        format = _state_layout.format_of(group)
        if not (format.dithers and group["dither"]):
            return frozenset()
        hyper = self._hyper(group)
        return frozenset(
            moment.key
            for moment in self._moments(group)
            if not (moment.exact or moment.maximum)
            and (moment.role == SQUARE or format.dithers_all or _is_slow(moment, hyper))
        )

    def _outlasting(self, group: Mapping[str, Any]) -> frozenset[str]:
        """The keys of the moments that outlast their partners, where the format codes ratios."""
        if not _state_layout.format_of(group).relative:
            return frozenset()
        hyper, moments = self._hyper(group), self._moments(group)
        squares = {moment.key: moment for moment in moments if moment.role == SQUARE}
        return frozenset(
            moment.key
            for moment in moments
            if moment.role == RATIO and _outlasts(moment, squares[str(moment.partner)], hyper)
        )

    def _moments(self, group: Mapping[str, Any]) -> tuple[Moment, ...]:
        """The moments that these settings keep."""
        return self._rule(group).moments

    def _lasting(self, group: Mapping[str, Any]) -> tuple[Lasting, ...]:
        """Numbers that these settings keep of a parameter beside its moments and step."""
        return self._clipping_rule(group).lasting

    def _format(self, p: Tensor, group: Mapping[str, Any]) -> Format:
        """The format of a parameter's moments."""
        if p.numel() < group["min_8bit_size"]:
            return FLOAT32
        return _state_layout.format_of(group).for_moments(self._moments(group))

    def _weights(self, p: Tensor, group: Mapping[str, Any]) -> Weights:
        """The storage of the parameter itself."""
        return _state_layout.weights_of(p, group)

    def _check_format(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for a format that cannot keep what the rule does."""
        format = _state_layout.format_of(group)
        moments = self._moments(group)
        refusal = format.refusal(moments)
        if refusal is not None:
            asked = f"state_format={format.name!r}"
            if group["state_format"] is None:
                asked = f"optim_bits={group['optim_bits']!r}, which means {asked}"
            kept = ", ".join(moment.key for moment in moments) or "none"
            raise ValueError(
                f"{type(self).__name__} cannot have {asked}: {refusal}; its moments are {kept}"
            )

    def _loaded_state(
        self, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A parameter's state, checked and copied from `saved` and stored as `group` asks."""
        share = self._share(p, group)
        if share is None:
            self._check_saved(saved, p, group)
            return self._state_for_settings(saved, p, group)
        _sharding.check(p, type(self).__name__)
        by_shards = not share.whole and _sharding.all_placed_as(saved, p)
        if by_shards:
            plain, there = share.stepped(), _sharding.unwrapped(saved)
            group = share.settings_for_shard(group)
        else:
            plain = share.p.detach().full_tensor()
            there = {key: _sharding.gathered(x) for key, x in saved.items()}
        self._check_saved(there, plain, group)
        state = share.without_others(self._state_for_settings(there, plain, group), saved)
        return share.wrapped(state if by_shards else share.local_part(state))

    def _check_saved(self, saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> None:
        """Raise for numbers that no step leaves in a parameter's state."""
        moments = dict.fromkeys((*self._moments(group), *self.SAVED_MOMENTS))
        harmless = self._harmless_nonfinite(saved, group)
        _saved_state.check_values(saved, p, moments, self._lasting(group), harmless)
        if self.step_required and "step" not in saved:
            raise _tensor_checks.missing("step", saved)

    def _harmless_nonfinite(
        self, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> _saved_moments.HarmlessMask:
        """A function: which non-finite elements of a saved moment leave the weight finite.

        A cautious one does after NaN, which never has the gradient's sign, and after infinity over
        an infinite square, which is NaN.
        """
        if not group.get("cautious", False):
            return lambda x: torch.zeros_like(x, dtype=torch.bool)
        squares = [
            saved[moment.key]
            for moment in self._moments(group)
            if moment.role == SQUARE and isinstance(saved.get(moment.key), Tensor)
        ]

        def harmless(x: Tensor) -> Tensor:
            lost = x.isnan()
            for square in squares:
                if square.shape == x.shape:  # codes are finite, too
                    lost |= ~square.detach().to(x.device).isfinite()
            return lost

        return harmless

    def _state_for_settings(
        self, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A parameter's state, copied from `saved` and stored as `group` asks."""
        saved = self._with_equivalent_moments(saved, p, group)
        format, lasting = self._format(p, group), self._lasting(group)
        weights = self._weights(p, group)
        moments = outlasting(self._moments(group), self._outlasting(group))
        return _saved_state.state_in_format(saved, p, moments, format, lasting, weights)

    def _with_equivalent_moments(
        self, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`saved` with the moments that `group` keeps, where it has others that say the same."""
        return saved

    def _stored(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, TensorSpec]:
        """Every tensor that a step wants in a parameter's state; `state` is what there is."""
        return _state_layout.state_layout(
            p, self._moments(group), self._initial_value(group), self._format(p, group),
            self._lasting(group), self._weights(p, group),
        )  # fmt: skip

    def _initial_tensor(
        self, key: str, stored: TensorSpec, p: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        """One tensor of a new state."""
        refuse_capture(p.device, "a parameter has no state yet; take one step before the capture")
        return torch.full(stored.shape, stored.start, dtype=stored.dtype, device=stored.device)

    def _restart_from_weight(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Have a state that no step has changed yet begin with the weight as it is now."""

    def _share(self, p: Tensor, group: Mapping[str, Any]) -> Share | None:
        """This rank's share of a DTensor; None for a plain tensor."""
        if not _sharding.is_dtensor(p):
            return None
        return Share.of(p, self._moments(group), self._format(p, group), self.needs_whole)

    def _state_of(
        self, p: Tensor, stepped: Tensor, group: Mapping[str, Any], share: Share | None
    ) -> dict[str, Any]:
        """A parameter's state, the one there is if it is as wanted; nothing has been changed yet.

        Args:
            p: the parameter.
            stepped: the plain tensor that this rank steps of it.
            group: its settings.
            share: this rank's share of a DTensor.
        """
        state, new = self._local_state(p, stepped, group, share)
        if not new:
            return self.state[p]
        return state if share is None else share.wrapped(state)

    def _kept_state(
        self, p: Tensor, group: Mapping[str, Any], share: Share | None
    ) -> dict[str, Any]:
        """A parameter's state, made and kept if there is none as wanted; see `_state_of`."""
        stepped = p if share is None else share.stepped()
        self._keep_states({p: self._state_of(p, stepped, group, share)})
        return self.state[p]

    def _keep_states(self, new: Mapping[Tensor, dict[str, Any]]) -> None:
        """Keep new states, in the dicts that parameters have: others may hold them, as torch's."""
        for p, its in new.items():
            there = self.state.setdefault(p, its)
            if list(its)[: len(there)] == list(there):
                there.update(its)
            else:  # some keys would go, and an interrupt leave a mixed state
                self.state[p] = its

    def _local_state(
        self, p: Tensor, stepped: Tensor, group: Mapping[str, Any], share: Share | None
    ) -> tuple[dict[str, Any], bool]:
        """`_state_of` with plain tensors, those that this rank steps; and whether it is new."""
        before = self.state.get(p, {})
        if share is None:
            _saved_state.require_integers(before, p)
            state = self._existing_or_new_state(before, stepped, group)
            return state, state is not before
        held = share.holds(before)
        there = _sharding.unwrapped(before) if held else self._resharded_state(before, group, share)
        state = self._existing_or_new_state(there, stepped, share.settings_for_shard(group))
        if held and state is there:
            return state, False
        return share.without_others(state, before), True

    def _resharded_state(
        self, there: dict[str, Any], group: Mapping[str, Any], share: Share
    ) -> dict[str, Any]:
        """A state of which a rank kept all, and is to keep a shard now, or the other way round."""
        whole = _sharding.unwrapped({key: _sharding.gathered(x) for key, x in there.items()})
        state = self._existing_or_new_state(whole, share.p.detach().full_tensor(), group)
        return share.local_part(state)

    def _existing_or_new_state(
        self, state: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """This state if it is as wanted, else a new one.

        A new state is made where there is none, or where the one there is lacks something, is on
        another device than p or of another width or shape than it should be.
        """
        state = self._with_equivalent_moments(state, p, group)
        stored = self._stored(p, group, state)
        self._require_memory(state, stored)
        if _state_layout.fits(state, stored):
            return state
        state = self._state_that_fits(state, stored, p, group)
        self._require_memory(state, stored)  # which new tensors within a transform have not
        return state

    def _require_memory(self, state: Mapping[str, Any], stored: Iterable[str]) -> None:
        """Raise a RuntimeError for tensors of a state that a step would read and that have none."""
        for key in stored:
            x = state.get(key)
            if not isinstance(x, Tensor) or _tensor_checks.has_address(x):
                continue
            if x.layout == torch.strided:
                _tensor_checks.require_memory(x, f"the state {key!r}", type(self).__name__)

    def _state_that_fits(
        self, state: dict[str, Any], stored: Mapping[str, TensorSpec], p: Tensor,
        group: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """A new state, made of one that is not as wanted."""
        if RESIDUAL_KEY not in stored:
            state = {key: x for key, x in state.items() if key != RESIDUAL_KEY}
        where = f"the state of a parameter of shape {tuple(p.shape)} does not fit "
        where += type(self).__name__
        missing = [key for key in stored if key not in state]
        if missing:
            moments, format = self._moments(group), self._format(p, group)
            with _state_dicts.refusing(where):
                kept = _saved_moments.keys_of_present(state, moments, format)
            new = {
                key: self._initial_tensor(key, stored[key], p, group)
                for key in missing
                if key not in kept
            }
            if self.UNDAMPED in new and group["dampening"] != 0 and "step" in state:
                new |= _starting_over(state)
            state = {**state, **new}
        if _state_layout.fits(state, stored):
            return state
        with _state_dicts.refusing(where):
            return self._state_for_settings(state, p, group)


def _starting_over(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a state has instead if its steps are counted from 0 again.

    The history of percentile clipping goes on: the places for later steps follow the newest norm.
    """
    step = state["step"]
    changed = {"step": torch.zeros_like(step)}
    if NORMS.key in state:
        history = state[NORMS.key]
        places = torch.arange(HISTORY, device=history.device) + step.to(torch.int64)
        changed[NORMS.key] = history[places % HISTORY]
    return changed


def _is_slow(moment: Moment, hyper: Mapping[str, float | Tensor]) -> bool:
    """Whether a step changes an average so little that rounding to nearest would freeze it.

    One whose coefficient is a tensor on an accelerator, which is not read back, may be.
    """
    if moment.decay is None:
        return False
    coefficient = hyper[moment.decay]
    limit = SLOW_SIGN if moment.role == SIGN else SLOW
    return isinstance(coefficient, Tensor) or coefficient > limit


def _outlasts(moment: Moment, square: Moment, hyper: Mapping[str, float | Tensor]) -> bool:
    """Whether a moment decays no faster than the root of the square that divides it.

    One that is no average does not decay. With a tensor, as in `_is_slow`, it may be so.
    """
    own, other = (1.0 if x.decay is None else hyper[x.decay] for x in (moment, square))
    return isinstance(own, Tensor) or isinstance(other, Tensor) or own * own >= other
