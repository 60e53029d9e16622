"""`EagerOptimizer`: stepped a tensor at a time with torch operators, for rules that need it whole.

A rule that multiplies a tensor by matrices or averages it along single dimensions does not fit the
engines' passes over elements. Here it gets the whole tensor, its moments decoded, in fp32 (fp64 for
fp64 parameters). What happens in which step is decided on the host, so `step` lives on the CPU and
is read without waiting for the device. Of a DTensor every rank gathers the tensor and its gradient,
one tensor at a time, steps it with the whole state and keeps its own rows.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.batch import STEP_DTYPE, WEIGHT_BLOCK, Batch, Slot
from lowbit_optim_kernels.devices import refuse_capture, scalar_dtype
from lowbit_optim_kernels.dither import tensor_key
from lowbit_optim_kernels.engines import torch as torch_engine
from lowbit_optim_kernels.formats import compute_dtype, parts_of, units
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import Lasting, Moment, Rule
from lowbit_optim_kernels.rules.shared import CLIP, NORMS, with_dither
from lowbit_optim_kernels.weights import RESIDUAL_KEY

from . import _saved_state, _sharding, _tensor_checks
from ._arguments import documented
from ._checkpoint_base import steppable
from ._gathering import GatheredCopies
from ._optimizer import LowBitOptimizer
from ._state_layout import TensorSpec


@dataclass
class Work:
    """One parameter's step, all floating tensors in the dtype that is computed in.

    Attributes:
        p: the parameter's values; only read.
        g: the gradient, unscaled, flipped and clipped; only read.
        t: how many steps the parameter has taken before.
        lr: a number, or a 0-d tensor on p's device.
        group: the parameter group.
        state: the parameter's state; what it holds beside moments is written in place.
        moments: by key, the decoded moments, to be overwritten in place.
    """

    p: Tensor
    g: Tensor
    t: int
    lr: float | Tensor
    group: Mapping[str, Any]
    state: dict[str, Any]
    moments: dict[str, Tensor]


class Extra(NamedTuple):
    """A tensor of a parameter's state beside its moments, of the dtype that is computed in.

    Attributes:
        shape: of its tensor.
        start: its first value everywhere, unless the optimizer's `_initial_tensor` says otherwise.
        must_be: ">= 0" or "> 0" if its numbers have to be, else "".
    """

    shape: tuple[int, ...]
    start: float = 0.0
    must_be: Literal["", ">= 0", "> 0"] = ""


_IS = {">= 0": operator.ge, "> 0": operator.gt}  # with 0 as the second number


def only_finite(x: Tensor) -> Tensor:
    """The tensor x itself, now with zeros in place of what is not finite."""
    return x.nan_to_num_(0.0, 0.0, 0.0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of the finite elements of a * b; 0-d, and 0 where its square would overflow."""
    total = only_finite(a * b).sum(dtype=scalar_dtype(a.device)).to(a.dtype)
    return torch.where((4 * total * total).isfinite(), total, 0.0)


def rms(x: Tensor) -> Tensor:
    """Root mean square of x, an element without a finite square counting as zero; 0-d."""
    return only_finite(x * x).mean(dtype=scalar_dtype(x.device)).sqrt().to(x.dtype)


@documented
class EagerOptimizer(LowBitOptimizer):
    """Base class of the optimizers that torch operators step; not meant to be constructed.

    A subclass gives `family`, `STORE`, `_validate`, `_extras` and `_update`. `STORE` is a rule of
    `rules.stored`: it has the moments, which the engines code by it, as in a step of their own.

    Args:
        defaults: the groups' settings; `max_unorm` need not be among them.
        args: object or dict whose `optim_bits`, `min_8bit_size` and `percentile_clipping` replace
            these arguments where present; its `max_unorm` must be 0.
        foreach: must not be True; the tensors are stepped one at a time with torch operators, with
            temporaries of a tensor's size in fp32.
        capturable: must be False; the host decides in every step what to do.
        fused: must not be True; see `foreach`.
    """

    STORE: ClassVar[Rule]
    FIXED: ClassVar[Mapping[str, Any]] = {"max_unorm": 0.0}
    needs_whole = True

    def __init__(self, params: Any, defaults: dict[str, Any], args: Any = None) -> None:
        super().__init__(params, {**self.FIXED, **defaults}, args)

    def _reset_caches(self) -> None:
        super()._reset_caches()
        # What engines have made of the moments of each parameter, by the key of its random bits.
        self._tables: dict[int, tuple[Any, Any]] = {}

    @abstractmethod
    def _extras(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, Extra]:
        """All state beside the moments by key; `state` is empty before the first step."""

    @abstractmethod
    def _update(self, work: Work) -> Tensor:
        """The parameter's new values; moments and other state are written in place."""

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        name = type(self).__name__
        for flag in ("foreach", "fused"):
            if group[flag]:
                raise ValueError(
                    f"{flag} must be None or False for {name}, got True: its tensors are stepped "
                    "one at a time with torch operators"
                )
        if group["capturable"]:
            raise ValueError(
                f"capturable must be False for {name}, got True: the host decides in every step "
                "what to do, which a CUDA graph cannot replay"
            )
        if group["max_unorm"] != 0:
            raise ValueError(
                f"max_unorm must be 0 for {name}, got {group['max_unorm']!r}: its update is "
                "proportional to the size of the parameter already"
            )

    def _moments(self, group: Mapping[str, Any]) -> tuple[Moment, ...]:
        return self.STORE.moments

    def _lasting(self, group: Mapping[str, Any]) -> tuple[Lasting, ...]:
        return (NORMS,) if group["percentile_clipping"] < 100 else ()

    def _stored(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, TensorSpec]:
        stored = super()._stored(p, group, state)
        stored["step"] = stored["step"]._replace(device=torch.device("cpu"))
        for key, extra in self._extras(p, group, state).items():
            stored[key] = TensorSpec(extra.shape, compute_dtype(p), p.device, extra.start)
        return stored

    def _check_saved(self, saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> None:
        super()._check_saved(saved, p, group)
        for key, extra in self._extras(p, group, saved).items():
            if key in saved:
                _check_extra(key, saved[key], extra.must_be)

    def _state_for_settings(
        self, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        state = super()._state_for_settings(saved, p, group)
        if not state:
            return state
        steps = _saved_state.as_step(saved["step"])
        state["step"] = torch.tensor(steps, dtype=STEP_DTYPE, device="cpu")
        for key, extra in self._extras(p, group, state).items():
            value = state.get(key)
            found = _tensor_checks.shape_or_value(value)
            if found != extra.shape:
                raise ValueError(f"{key!r} must have shape {extra.shape}; got {found!r}")
            state[key] = state[key].to(compute_dtype(p)).contiguous()
        return state

    def _step_groups(self) -> None:
        self._renumbered()
        if torch.cuda.is_initialized():
            refuse_capture(torch.device("cuda"), "the host decides in every step what to do")
        indices = range(len(self.param_groups))
        parts = [part for index in indices for _, part in self._parts(index)]
        # All that is refused is refused here, before any parameter's state has changed.
        todo = [(p, g, part) for part in parts for p, g, _ in self._checked_gradients(part)]
        with steppable():
            states = {p: self._state_of(p, p, part, self._share(p, part)) for p, _, part in todo}
        self._keep_states(states)
        found_inf = self._amp_tensor("found_inf")
        # The only value ever read back, and only under a GradScaler, which for most of torch's
        # optimizers reads it back itself.
        if found_inf is not None and bool(found_inf):
            return
        for p, g, part in todo:
            self._step_parameter(p, g, part, _sharding.unwrapped(self.state[p]))
            if _sharding.is_dtensor(p):  # of which torch operators have written the shard
                torch.autograd.graph.increment_version(p)

    def _check_single_steps(self) -> None:
        raise ValueError(
            f"{type(self).__name__} cannot step parameters in the backward pass: its rates follow "
            "sizes of whole tensors, which torch operators work out between passes; use step()"
        )

    def _step_parameter(
        self, p: Tensor, g: Tensor, group: Mapping[str, Any], state: dict[str, Any]
    ) -> None:
        """Step a parameter, given what this rank holds of its gradient."""
        if p.numel() == 0:
            state["step"] += 1
            return
        key = tensor_key(group["seed"], self._place(p).number)
        share = self._share(p, group)
        if share is None or not share.whole:
            self._step_tensor(_sharding.local(p), g, group, state, key)
            return
        (copy,), (g,) = GatheredCopies([p], [0]).renew([_sharding.local(p)], [g])
        self._step_tensor(copy, g, group, state, key)
        _sharding.local(p).copy_(share.written(copy))

    def _step_tensor(
        self, p: Tensor, g: Tensor, group: Mapping[str, Any], state: dict[str, Any], key: int
    ) -> None:
        """Step a whole tensor; `key` is that of its random bits."""
        t, dtype = int(state["step"]), compute_dtype(p)
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(p.device, dtype)
        weights, residual = self._weights(p, group), state.get(RESIDUAL_KEY)
        work = Work(
            p=weights.read(p.detach(), residual, dtype),
            g=self._prepared(g.to(dtype), t, group, state),
            t=t, lr=lr, group=group, state=state,
            moments=self._decoded(p, group, state, dtype),
        )  # fmt: skip
        new = self._update(work)
        state["step"] += 1
        random = None
        if weights.dithered:
            layout = Layout.of(p.shape, WEIGHT_BLOCK)
            of_weights = torch_engine.Random(key, state["step"], 0, p.device)
            random = of_weights.of_weights(torch_engine.ALL, (layout.rows, layout.row))
            random = random.view(p.shape)
        weights.write(new, p, residual, random)
        self._store(work, key)

    def _prepared(
        self, g: Tensor, t: int, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Tensor:
        """The gradient without the loss scale, flipped by `maximize`, and clipped."""
        grad_scale = self._amp_tensor("grad_scale")
        if grad_scale is not None:
            g = g / grad_scale.to(device=g.device, dtype=g.dtype)
        if group["maximize"]:
            g = -g
        if group["percentile_clipping"] < 100:
            g = g * _clip_factor(g, state[NORMS.key], t + 1, group["percentile_clipping"])
        return g

    def _decoded(
        self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The moments' numbers by key."""
        numbers: dict[str, Tensor] = {}
        for unit in units(self.STORE.moments, self._format(p, group)):
            stored = [state[part.key] for part in unit.parts]
            values = dispatch.decode(unit, stored, p.shape, dtype)
            numbers.update(zip(unit.keys, values, strict=True))
        return numbers

    def _store(self, work: Work, key: int) -> None:
        """Code the new moments, where they are not stored as they are; `key` as above.

        That is a step of `STORE` on the engine of their device, whose p is the first moment and
        whose g the last one.
        """
        p, group, state = work.p, work.group, work.state
        format = self._format(p, group)
        if format.exact:
            return  # decoding gave the state itself, and the rule has written it
        rule = with_dither(self.STORE, self._dithered(group))
        layout = Layout.of(p.shape, format.block)
        values = [work.moments[moment.key] for moment in rule.moments]
        slot = Slot(
            p=values[0], g=values[-1], format=format, rows=layout.rows, row=layout.row,
            state=tuple(state[part.key] for part in parts_of(rule.moments, format)),
            step=torch.full((), work.t, dtype=STEP_DTYPE, device=p.device),  # which it counts
            numel=p.numel(), tensor_key=key,
        )  # fmt: skip
        batch = Batch(rule, [slot], p.device, dispatch.engine_for(values[0]).name)
        batch.note_addresses()
        fits = batch.identity, batch.key  # as tables of step plans
        before, tables = self._tables.get(key, (None, None))
        batch.tables = tables if before == fits else None
        dispatch.step([batch])
        self._tables[key] = fits, batch.tables


def _check_extra(key: str, value: Any, must_be: str) -> None:
    """Refuse numbers that no step leaves in a state beside the moments."""
    _tensor_checks.require_dense(key, value)
    if not _tensor_checks.all_finite(value):
        raise ValueError(f"{key!r} has elements that are not finite")
    if must_be and not _IS[must_be](_tensor_checks.extent(value)[0], 0):
        raise ValueError(f"{key!r} has elements that are not {must_be}")


def _clip_factor(g: Tensor, history: Tensor, step: int, percentile: int) -> Tensor:
    """Record ||g||^2 and return the factor of percentile clipping; `step` counts from 1."""
    values = {
        "gscale": 1.0, "live": True, "percentile": percentile, NORMS.key: [history],
        "g_sq": (g * g).sum(dtype=scalar_dtype(g.device)).reshape(1),
        "step": torch.full((1,), step, device=g.device),
    }  # fmt: skip
    return torch_engine.call(CLIP.combine, values)["gscale"][0].to(g.dtype)
