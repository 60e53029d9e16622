"""Schedule-Free AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lowbit_optim_kernels.formats import compute_dtype
from lowbit_optim_kernels.rules import Rule
from lowbit_optim_kernels.rules.schedule_free import schedule_free_rule
from lowbit_optim_kernels.step_plan import StepPlan

from . import _checks, _sharding
from ._arguments import documented, settings_of
from ._checkpoint_base import steppable
from ._master_weights import set_weight, weight_of
from ._optimizer import LowBitOptimizer
from ._state_layout import TensorSpec
from ._variants import fixed_bits


@documented
class ScheduleFreeAdamW(LowBitOptimizer):
    r"""AdamW that needs no learning rate schedule: the model is an average of its steps.

    Its second moment is kept in 32 or 8 bits; z always in 32, since every step adds to it.

    Call `train()` before training and `eval()` before the model is evaluated or saved: the
    parameters hold y in training, and x, the average, after `eval()`, in which `step` raises a
    RuntimeError. With g the gradient at y and
    t the tensor's step:

        lr_t = lr min(1, t / warmup_steps);  w = t^r max(lr_1, ..., lr_t)^weight_lr_power
        v = beta2 v + (1 - beta2) g^2
        u = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y
        z = z - lr_t u                                (y, x and z start as the parameter)
        x = (1 - c) x + c z                           c = w / (sum of all w so far)
        y = beta1 x + (1 - beta1) z

    Args:
        betas: how far y is on its way from z to x, above 0; decay rate of the second moment.
        eps: added to the denominator.
        weight_decay: decay of y, times the learning rate.
        warmup_steps: steps of linear warm-up of the learning rate.
        r: a step t weighs t^r in the average.
        weight_lr_power: and the largest learning rate so far to this power.
        max_unorm: cap ||u|| at max_unorm ||y||; 0 is off.

    Example:
        >>> optimizer = ScheduleFreeAdamW8bit(model.parameters(), lr=2.5e-3, warmup_steps=100)

    Reference:
        Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky, "The Road Less Scheduled",
        arXiv:2405.15682 (2024), eq. 4 to 6 and Alg. 1.

    Where it differs: the authors' package starts in eval mode and counts steps and weights per
    group, this one starts in train mode, where y = x = z, and counts them for each parameter, by
    the steps that it had a gradient in. Its z has the parameter's dtype; here it is fp32 beside a
    bf16 parameter, too. A bf16 parameter is rounded at every `eval()` and `train()` in both, here
    with the bits that `master_weight_bits` keeps beside it.
    """

    family = "ScheduleFreeAdamW"
    FIXED: ClassVar[Mapping[str, Any]] = {"train_mode": True}
    MODE = "train_mode"
    HYPER = ("eps", "weight_decay", "warmup_steps", "r", "weight_lr_power")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        *,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        max_unorm: float = 0.0,
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
        super().__init__(params, {**settings_of(locals()), **self.FIXED}, args)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_apart": self._apart}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._apart |= state.get("_apart", set())

    def _reset_caches(self) -> None:
        super()._reset_caches()
        # Those that hold the other point than their group's: where a switch was interrupted.
        self._apart: set[Tensor] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in the mode that the optimizer is in."""
        if isinstance(param_group, dict) and self.param_groups:
            param_group.setdefault("train_mode", self.param_groups[0]["train_mode"])
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state dict, as every optimizer has one, with the mode in `train_mode` of its groups.

        Raises:
            ValueError: as every optimizer's.
            RuntimeError: until a call of `train()` or `eval()` that was interrupted is repeated.
        """
        if self._apart:
            raise RuntimeError(
                f"{type(self).__name__}.state_dict: a call of train() or eval() did not come to "
                "its end, and parameters hold different points; call it again"
            )
        return super().state_dict()

    def train(self) -> None:
        """Put y into the parameters, for training; nothing where they hold it already."""
        self._switch(True)

    def eval(self) -> None:
        """Put the average x into the parameters, for evaluation; nothing where they hold it."""
        self._switch(False)

    @steppable()  # state that a cast or moved model needs may be made, as in a step
    def _switch(self, train: bool) -> None:
        """Put one of the two points into all parameters; what is interrupted can be repeated."""
        for index, group in enumerate(self.param_groups):
            parts = self._parts(index)
            already = group["train_mode"] == train
            if already and self._apart.isdisjoint(group["params"]):
                continue
            for _, part in parts:
                beta1 = part["betas"][0]
                share = 1.0 - beta1 if train else 1.0 - 1.0 / beta1
                for p in part["params"]:  # one that is listed twice is moved once, by `_apart`
                    z = self.state.get(p, {}).get("z")
                    if z is None or already == (p not in self._apart):
                        continue
                    if (z.dtype, z.device) != (compute_dtype(p), p.device):
                        z = self._kept_state(p, part, self._share(p, part))["z"]
                    moved = weight_of(self, p, part).lerp(_sharding.redistributed_as(z, p), share)
                    set_weight(self, p, part, moved)
                    self._apart ^= {p}
            group["train_mode"] = train
            self._apart -= set(group["params"])

    def _step_parts(
        self, parts: list[tuple[Any, Mapping[str, Any]]], last: Mapping[Any, StepPlan]
    ) -> dict[Any, StepPlan]:
        if self._apart or not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}.step in eval mode: the parameters hold the average; call "
                "the optimizer's train() before training, and eval() before evaluating"
            )
        return super()._step_parts(parts, last)

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        if group["betas"][0] == 0:
            raise ValueError(f"betas[0] must be above 0, got {group['betas']!r}: y would be z")
        _checks.numbers(group, "eps", "weight_decay", "r", "weight_lr_power")
        _checks.integer("warmup_steps", group["warmup_steps"], 0)
        _checks.flags(group, "train_mode")

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._cached_rule(schedule_free_rule, group["max_unorm"] > 0)

    def _initial_tensor(
        self, key: str, stored: TensorSpec, p: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        new = super()._initial_tensor(key, stored, p, group)
        return new.copy_(p) if key == "z" else new

    def _restart_from_weight(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state.get(p, {})
        if "z" in state and int(state["step"]) == 0:
            z = state["z"]
            _sharding.local(z).copy_(_sharding.shard_of(weight_of(self, p, group), z))


@fixed_bits(8)
class ScheduleFreeAdamW8bit(ScheduleFreeAdamW):
    """`ScheduleFreeAdamW` with an 8-bit second moment; see there for its equations."""


@fixed_bits(32)
class ScheduleFreeAdamW32bit(ScheduleFreeAdamW):
    """`ScheduleFreeAdamW` with 32-bit state; see there for its equations."""
