"""`to_torch_state_dict`: an optimizer's state dict for torch.optim's class of the same name."""

from __future__ import annotations

from typing import Any

import torch

from lowbit_optim_kernels.batch import STEP_DTYPE

from .. import _saved_state
from .._optimizer import LowBitOptimizer
from .export import Group, Member, entries_beside, groups_of, on_device, require_optimizer

FAMILIES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
HOW_TO_RUN = ("foreach", "fused", "capturable", "differentiable")  # what they compute is the same
NOT_IN_TORCH = {"max_unorm": 0.0, "percentile_clipping": 100, "cautious": False}


@torch.no_grad()
def to_torch_state_dict(
    optimizer: LowBitOptimizer, device: torch.device | str | None = None
) -> dict[str, Any]:
    """A state dict that torch.optim's class of the same name loads and goes on from.

    Moments are fp32 numbers (fp64 of fp64 parameters), whatever they are stored as here; of 32-bit
    state it is the same state to the bit. Settings are this optimizer's, but for `foreach`,
    `fused`, `capturable` and `differentiable`, which have torch's defaults. Bits of bf16 weights
    that `master_weight_bits` keeps are left out; `master_weights` gives the weights with them.

    Args:
        optimizer: `SGD`, `Adam`, `AdamW`, `RMSprop` or `Adagrad`, of any width; not changed.
        device: where moments are put, each when it is made: "cpu" where a GPU has no room for them
            in 32 bits; by default where their parameters are.

    Returns:
        A dict with `state` and `param_groups` that shares no memory with the optimizer. What a user
        has put into these is in it, but for states of parameters before their first step where
        its class would take them for states without moments.

    Raises:
        TypeError: if it is no optimizer of this package.
        ValueError: if torch.optim has no class of its name, or does not have what a setting asks
            for: `max_unorm`, `percentile_clipping`, `cautious`, or overrides by
            `GlobalOptimManager`; and for DTensors.

    Example:
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        >>> optimizer.step()
        >>> plain = torch.optim.AdamW(model.parameters())
        >>> plain.load_state_dict(to_torch_state_dict(optimizer))
        >>> plain.param_groups[0]["lr"]
        0.001
    """
    require_optimizer(optimizer, "to_torch_state_dict", "torch.optim", FAMILIES)
    device = None if device is None else torch.device(device)
    groups = list(groups_of(optimizer))
    for group in groups:
        group.require(NOT_IN_TORCH, "torch.optim")
    packed = [group.packed(_settings(optimizer.family, group)) for group in groups]
    members = (member for group in groups for member in group.members)
    states = {member.index: _state(optimizer, member, device) for member in members}
    state = {i: own for i, own in states.items() if own}
    return {"state": {**state, **entries_beside(optimizer)}, "param_groups": packed}


def _settings(family: str, group: Group) -> dict[str, Any]:
    """The settings that torch's groups have in the version that is installed."""
    theirs = getattr(torch.optim, family)([torch.zeros(1)]).param_groups[0]
    own = {key: x for key, x in group.settings.items() if key in theirs and key not in HOW_TO_RUN}
    return {**{key: x for key, x in theirs.items() if key != "params"}, **own}


def _state(
    optimizer: LowBitOptimizer, member: Member, device: torch.device | None
) -> dict[str, Any]:
    state = member.added
    # A buffer says to torch's SGD, which counts no steps, that there has been one. A step that an
    # AMP scaler has skipped was none.
    if member.begun and not (optimizer.family == "SGD" and member.steps == 0):
        state.update(on_device(member.numbers(optimizer), device))
    elif optimizer.family == "Adagrad":  # torch's has state from the start
        start = member.settings["initial_accumulator_value"]
        state["sum"] = torch.full_like(member.p, start, device=device)
    else:  # what a user has there would be a state without moments to its other classes
        return state if optimizer.family == "SGD" else {}
    if optimizer.family != "SGD":  # torch's counts no steps
        steps = torch.tensor(member.steps, dtype=STEP_DTYPE, device="cpu")
        state["step"] = _saved_state.saved_step(steps)
    return state
