"""`to_bitsandbytes_state_dict`: an optimizer's state dict for bitsandbytes' class of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.formats import Format, units
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8, block_absmax, create_dynamic_map, encode
from lowbit_optim_kernels.rules import SIGNED, SQUARE, Moment

from .. import _checks, _saved_moments
from .._optimizer import LowBitOptimizer
from .bitsandbytes import BITSANDBYTES, BLOCKS, FAMILIES, NESTED, ONE_STATE, TWO_STATES, Family
from .coded import same_blocks
from .export import Group, Member, groups_of, require_optimizer

Numbers = Callable[[], dict[str, Tensor]]  # a parameter's moments in 32 bits, made when wanted
LAYOUTS = ("flat", "nested")
# Settings that mean nothing while there is no weight decay.
OF_DECAY = ("decoupled_weight_decay", "adam_w_mode")
NOT_BY_CONSTRUCTOR = {"max_unorm": 0.0, "percentile_clipping": 100}


@torch.no_grad()
def to_bitsandbytes_state_dict(optimizer: LowBitOptimizer, layout: str = "flat") -> dict[str, Any]:
    """A state dict that bitsandbytes' class of the same name loads and goes on from.

    State of 8 bits stays so: its codes and scales are the same to the bit where the blocks are,
    that is for vectors and for matrices whose rows are whole blocks of 256 elements. Other moments
    are coded again, in blocks of the flattened tensor; so are those of `RMSprop` and `Adagrad`,
    which bitsandbytes keeps in the signed code. State of 32 bits is fp32.

    bitsandbytes' groups do not have `optim_bits`, `min_8bit_size`, `max_unorm` and
    `percentile_clipping`: give them to its constructor.

    Args:
        optimizer: `Adam`, `AdamW`, `LAMB`, `AdEMAMix`, `SGD`, `LARS`, `Lion`, `RMSprop` or
            `Adagrad`, of any width; not changed.
        layout: "flat", which every version reads; "nested", with the tensors in a dict of their
            own, as 0.49.2 and newer save them. For 8-bit `LAMB` and `LARS` they differ in more: up
            to 0.49 those have one scale a tensor unless told otherwise, "flat", from 0.50 on one
            a block, "nested".

    Returns:
        A dict with `state` and `param_groups` that shares no memory with the optimizer.

    Raises:
        TypeError: if it is no optimizer of this package.
        ValueError: for another layout, if bitsandbytes has no class of its name, or does not have
            what a setting asks for, `nesterov`, a `trust_coefficient` or overrides by
            `GlobalOptimManager` for example; and for DTensors.

    Example:
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        >>> optimizer.step()
        >>> saved = to_bitsandbytes_state_dict(optimizer)
        >>> saved["state"][0]["state1"].shape == model.body.weight.shape
        True
    """
    _checks.one_of("layout", layout, LAYOUTS)
    function = "to_bitsandbytes_state_dict"
    require_optimizer(optimizer, function, "bitsandbytes", BITSANDBYTES.families)
    its, groups = FAMILIES[optimizer.family], list(groups_of(optimizer))
    packed = [group.packed(_settings(its, group)) for group in groups]
    state: dict[int, dict[str, Any]] = {}
    for member in (member for group in groups for member in group.members):
        if member.state:
            flat = _state(optimizer, its, member, whole=its.whole and layout == "flat")
            state[member.index] = flat if layout == "flat" else _nested(flat)
    return {"state": state, "param_groups": packed}


def _settings(its: Family, group: Group) -> dict[str, Any]:
    """A group's settings as bitsandbytes has them."""
    ours = group.settings
    required = dict(its.replaced)
    if ours["weight_decay"] == 0:
        required = {key: x for key, x in required.items() if key not in OF_DECAY}
    if not its.by_constructor:
        required.update(NOT_BY_CONSTRUCTOR)
    if not all(member.state for member in group.members):  # its Adagrad begins at zero
        required["initial_accumulator_value"] = 0.0
    group.require(required, "bitsandbytes")
    unused = {"betas": (0.0, 0.0), "eps": 0.0, "alpha": 0.0, "t_alpha": None, "t_beta3": None}
    theirs: dict[str, Any] = {**unused, **{key: ours[key] for key in its.settings}}
    if its.first_beta is not None:
        theirs["betas"] = (ours[its.first_beta], 0.0)
    if its.first_beta == "momentum" and ours["momentum"] == 0:
        raise ValueError(f"{group.name} has momentum=0, which bitsandbytes refuses")
    return {key: theirs[key] for key in (ONE_STATE if len(its.states) == 1 else TWO_STATES)}


def _state(optimizer: LowBitOptimizer, its: Family, member: Member, whole: bool) -> dict[str, Any]:
    """A parameter's state in the flat layout; `whole` for one scale a tensor."""
    numbers = cache(partial(member.numbers, optimizer))
    # Asked of all together: a format may have two moments in one byte.
    stored = _saved_moments.saved_units(member.state, tuple(chain.from_iterable(its.states)))
    formats = {moment: unit.format for unit in stored for moment in unit.moments}
    exact = all(format.exact for format in formats.values())
    state: dict[str, Any] = {"step": member.steps}
    for i, moments in enumerate(its.states, 1):
        if exact:
            parts = [{f"state{i}": numbers()[moment.key].float()} for moment in moments]
        else:
            # Its classes of one state have the signed code whatever the state is.
            signed = moments[0].signed or len(its.states) == 1
            state[f"qmap{i}"] = create_dynamic_map(signed).to(member.p.device)
            parts = [_coded(member, numbers, m, formats[m], signed, i, whole) for m in moments]
        for key in parts[0]:
            state[key] = torch.stack([part[key] for part in parts]) if parts[1:] else parts[0][key]
    if its.by_constructor:  # a scratch that its step wants under a max_unorm
        state["unorm_vec"] = torch.zeros(1, dtype=torch.float32, device=member.p.device)
    if "gnorm_vec" in member.state:
        state["gnorm_vec"] = member.state["gnorm_vec"].detach().clamp(min=0)  # -1 is no norm yet
    return state


def _coded(
    member: Member, numbers: Numbers, moment: Moment, format: Format, signed: bool, i: int,
    whole: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """A moment's codes and scales; those that there are, if they are what bitsandbytes has."""
    shape = member.p.shape
    if whole:
        x = numbers()[moment.key]
        scale = block_absmax(x.reshape(1, -1)).reshape(1)
        codes = encode(x, scale, signed)
        return {f"state{i}": codes, f"max{i}": scale, f"new_max{i}": scale.clone()}
    if format is DYNAMIC8 and signed == moment.signed and same_blocks(shape, BLOCKS[0]):
        (unit,) = units((moment,), DYNAMIC8)
        codes, scales = (member.state[part.key].detach().clone() for part in unit.parts)
    else:
        (unit,) = units((Moment(moment.key, SIGNED if signed else SQUARE),), DYNAMIC8)
        flat = numbers()[moment.key].flatten()
        codes, scales = dispatch.encode(unit, [flat], flat.shape).values()
    return {f"state{i}": codes.reshape(shape), f"absmax{i}": scales.flatten()}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its tensors in a dict of their own, where FSDP does not gather them."""
    hidden = {key: x for key, x in flat.items() if isinstance(x, Tensor)}
    return {**{key: x for key, x in flat.items() if key not in hidden}, NESTED: hidden}
