"""`CheckpointBase`: state dicts of an optimizer, written and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import parts_of
from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.weights import RESIDUAL_KEY, as_integers

from . import _cast_checks, _checks, _settings, _sharding, _state_dicts
from ._agreement import agreeing
from ._foreign.load import as_ours
from ._gradients import is_left_alone
from ._manager import Overrides
from ._parameter_numbers import ParameterNumbers, Place, all_parameters
from ._saved_moments import present_moments
from ._saved_state import has_begun
from ._settings import PREVIOUS_NORM, Settings, as_number, resolved
from ._state_base import StateBase

# Of the settings that ask for further moments, values that do not.
NO_MORE_MOMENTS = {"amsgrad": False, "momentum": 0.0, "centered": False}


@contextmanager
def _collecting(errors: list[Exception], where: str) -> Iterator[None]:
    """Go on after an error: other ranks may go on to where all are needed."""
    try:
        with _state_dicts.refusing(where):
            yield
    except (ValueError, RuntimeError) as error:  # one rank may be no part of a mesh
        errors.append(error)


@contextmanager
def steppable() -> Iterator[None]:
    """Make tensors that a later step may write, under `torch.inference_mode()`, too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _lacks_any(state: Mapping[str, Any], moments: tuple[Moment, ...]) -> bool:
    """Whether a state has not all of some moments, in whatever format."""
    named = {moment.key for moment in moments} <= state.keys()
    return not named and len(present_moments(state, moments)) < len(moments)


class CheckpointBase(StateBase):
    """An optimizer's state dicts: its settings and the state of its parameters, out and in."""

    _settings: Settings
    _overrides: Overrides
    _numbers: ParameterNumbers

    def _overridden(self, settings: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
        """Settings by what `GlobalOptimManager` overrides of the parameters."""
        return self._overrides.parts(settings, self._check_settings)

    def _with_defaults(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings as numbers; where it lacks one, that of the optimizer."""
        return resolved({**self.FIXED, **self.defaults, **group})

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers, strings, None, lists, tuples and dicts only.

        Beside torch's `state` and `param_groups` it has `lowbit_optim`: the format version and the
        optimizer's family. An 8-bit moment `<key>` is uint8 codes of the parameter's shape, with
        its scales beside it: in `<key>_absmax`, in fp32, or, in the formats `ratio8` and `ratio4`,
        in `<key>_scale`, in fp32 for a square and in bf16 else. The codes of `ratio4` are those of
        both moments, under `exp_avg_and_sq`.

        Raises:
            ValueError: if `state` has a parameter that is in no parameter group.
        """
        if _state_dicts.add_header not in self._optimizer_state_dict_post_hooks.values():
            self.register_state_dict_post_hook(_state_dicts.add_header, prepend=True)
        all_parameters(self.param_groups)  # which refuses what would be read only once
        self._follow_settings()
        try:
            return super().state_dict()
        except KeyError:  # an address, which says nothing
            self._require_listed()
            raise

    @steppable()
    def _follow_settings(self) -> None:
        """Give states the moments and the residuals that settings of now ask for, as a step would.

        Those of parameters that have not been stepped since `momentum`, `amsgrad` or
        `master_weight_bits` was set: a load would miss the moments, and take a residual of another
        width for one that was cast. Where no step can run with the settings there is nothing to
        add, and a moment that all settings ask for has been lost: a load says so.
        """
        for group in self.param_groups:
            settings = self._with_defaults(group)
            try:
                parts = self._overridden(settings)
                self._check_settings(settings)
            except (TypeError, ValueError):
                continue
            for _, part in parts:
                always = self._moments({**part, **NO_MORE_MOMENTS})
                asked_for = tuple(x for x in self._moments(part) if x not in always)
                for p in part["params"]:
                    state = self.state.get(p) or {}
                    if "step" in state and (
                        _lacks_any(state, asked_for) or self._has_another_residual(state, p, part)
                    ):
                        self._kept_state(p, part, self._share(p, part))

    def _has_another_residual(
        self, state: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> bool:
        """Whether a state has a residual of another width than the parameter's group asks for."""
        residual = state.get(RESIDUAL_KEY)
        if not isinstance(residual, Tensor) or p.dtype != torch.bfloat16:
            return False
        wanted = self._weights(p, group).residual
        return wanted not in (None, as_integers(_sharding.local(residual)).dtype)

    def _require_listed(self) -> None:
        """Refuse state of parameters that are in no parameter group."""
        listed = set(all_parameters(self.param_groups))
        for p in self.state:
            if isinstance(p, Tensor) and p not in listed:
                raise ValueError(
                    f"{type(self).__name__}.state has a parameter of shape {tuple(p.shape)} that "
                    "is in no parameter group; delete its entry, or where another one has taken "
                    "its place, state[other] = state.pop(p)"
                )

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of its torch.optim or bitsandbytes counterpart.

        Hyperparameters come from `state_dict`, of another library's not `foreach` and `fused`; how
        state is stored (`optim_bits`, `state_format`, `min_8bit_size`, `master_weight_bits`) stays
        as this optimizer was built, and moments are quantized or dequantized to fit. Codes and
        scales of the right layout are copied bit for bit. A state dict of bitsandbytes, or of
        torchao's low-bit Adam or AdamW, is converted, with a UserWarning that says so.

        Args:
            state_dict: as returned by `state_dict()`.

        Raises:
            ValueError: when it is known by its settings or entries for one of another optimizer, is
                of a newer format, or does not fit the parameters; nothing has been changed then.
        """
        params = all_parameters(self.param_groups)
        # What one rank can look at alone comes first: a rank that raises while others ask all for
        # their shards would leave them waiting.
        with agreeing(params) as its_saved:
            state_dict = _state_dicts.after_hooks(self, state_dict)
            with steppable():
                state_dict, groups = self._checked(state_dict)
            found = list(_state_dicts.saved_states(groups, state_dict))
            its_saved.update((one.p, one.state) for one in found)
        with agreeing(params), steppable():
            state = self._states_from(found)
            state.update(_state_dicts.other_entries(state_dict))
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if self._codes_are_zero() and any(one.state.get("step") for one in found):
            _checks.warn_user(
                f"{type(self).__name__} has loaded moments that are all 0 in 8 or 4 bits, although "
                "steps have been taken: broadcast_from_rank0 casts 32-bit moments below 1 to that, "
                "see docs/guides/sharded.md",
                "torch",
            )

    def _checked(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A state dict in this package's terms, and its groups; nothing has been changed."""
        state_dict = as_ours(self, state_dict)
        known = {key for group in (self.defaults, *self.param_groups) for key in group}
        _state_dicts.check_header(state_dict, self.family, known)
        for index, group in enumerate(self.param_groups):
            self._settings.settle(index, group)
        groups = _state_dicts.merged_groups(self, state_dict)
        for index, group in enumerate(groups):
            with _state_dicts.refusing(f"parameter group {index} of state_dict"):
                self._check_settings(self._with_defaults(group))
                norm = as_number(group.get(PREVIOUS_NORM, 0.0), wait=True)
                _checks.number(PREVIOUS_NORM, norm, 0.0)
        return state_dict, groups

    def _states_from(self, found: list[_state_dicts.SavedState]) -> dict[Any, Any]:
        """The parameters' states of what `saved_states` has found; nothing has been changed."""
        state: dict[Any, Any] = {}
        errors: list[Exception] = []
        for place, p, group, saved_group, saved, ours in found:
            settings = resolved(group)
            ((_, part),) = self._overridden({**settings, "params": [p]})
            if is_left_alone(p) or (ours and not has_begun(saved, self._moments(part))):
                state[p] = _settings.plain_copy(saved, p.device)
                continue
            where = f"state_dict does not fit {type(self).__name__}: {place}"
            kept = saved
            with _collecting(errors, where):
                moments, residual = self._moments(part), self._weights(p, part).residual
                if part["master_weight_bits"] != settings["master_weight_bits"]:
                    residual = None
                own = self._format(p, part)
                cast_to = residual, own if own is self._format(p, settings) else None
                _cast_checks.require_uncast(saved, p, moments, saved_group, *cast_to)
                kept = _cast_checks.without_own(saved, moments, saved_group, own)
            with _collecting(errors, where):
                state[p] = self._loaded_state(kept, p, part)
        if errors:
            raise errors[0]
        return state

    def _codes_are_zero(self) -> bool:
        """Whether moments in codes of DTensors, on this rank, are 0 where no code tells a cast.

        A signed moment would: its 0 is another code than that of a number below 1.
        """
        scales = [
            _sharding.local(self.state[p][part.key])
            for group in self.param_groups
            for _, settings in self._overridden(resolved(group))
            for p in settings["params"]
            if _sharding.is_dtensor(p) and p in self.state and p.device.type != "meta"
            if not any(moment.signed for moment in self._moments(settings))
            for part in parts_of(self._moments(settings), self._format(p, settings))
            if part.per_block and part.key in self.state[p]
        ]
        return any(x.numel() for x in scales) and not any(bool(x.any()) for x in scales)

    def _renumbered(self) -> list[Tensor]:
        """All parameters; `_numbers.version` is another one if some have new numbers."""
        self._settings.keep_first(len(self.param_groups))
        listed = all_parameters(self.param_groups)
        if self._numbers.renew(listed, self.param_groups):
            self._overrides.keep(listed)
        return listed

    def _place(self, p: Tensor) -> Place:
        """A parameter's place; users may have changed the groups since it was last asked."""
        if not isinstance(p, Tensor):
            raise TypeError(f"a parameter must be a tensor; got {p!r}")
        place = self._numbers.place_of(p, self.param_groups)
        if place is None:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is not in this {type(self).__name__}"
            )
        return place
