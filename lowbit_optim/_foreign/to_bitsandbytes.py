"""`to_bitsandbytes_state_dict`: an optimizer's state dict for bitsandbytes' class of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.formats import Format, units
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8, block_absmax, create_dynamic_map, encode
from lowbit_optim_kernels.rules import SIGNED, SQUARE, Moment

from .. import _checks, _saved_moments, _state_dicts
from .._optimizer import LowBitOptimizer
from .bitsandbytes import BITSANDBYTES, BLOCKS, FAMILIES, NESTED, ONE_STATE, TWO_STATES, Family
from .coded import Coded, same_blocks
from .export import Group, Member, entries_beside, groups_of, on_device, require_optimizer

LAYOUTS = ("flat", "nested")
# Settings that mean nothing while there is no weight decay.
OF_DECAY = ("decoupled_weight_decay", "adam_w_mode")
NOT_BY_CONSTRUCTOR = {"max_unorm": 0.0, "percentile_clipping": 100}


@torch.no_grad()
def to_bitsandbytes_state_dict(
    optimizer: LowBitOptimizer, layout: str = "flat", device: torch.device | str | None = None
) -> dict[str, Any]:
    """A state dict that bitsandbytes' class of the same name loads and goes on from.

    State of 8 bits stays so: its codes and scales are the same to the bit where the blocks are,
    that is for vectors and for matrices whose rows are whole blocks of 256 elements. Other moments
    are coded again, in blocks of the flattened tensor; so are those of `RMSprop` and `Adagrad`,
    which bitsandbytes keeps in the signed code. State of 32 bits is fp32.

    bitsandbytes' groups do not have `optim_bits`, `min_8bit_size`, `max_unorm` and
    `percentile_clipping`: give them to its constructor. Bits of bf16 weights that
    `master_weight_bits` keeps are left out; `master_weights` gives the weights with them.

    Args:
        optimizer: `Adam`, `AdamW`, `LAMB`, `AdEMAMix`, `SGD`, `LARS`, `Lion`, `RMSprop` or
            `Adagrad`, of any width; not changed.
        layout: "flat", which every version reads; "nested", with the tensors in a dict of their
            own, as 0.49.2 and newer save them. For 8-bit `LAMB` and `LARS` they differ in more: up
            to 0.49 those have one scale a tensor unless told otherwise, "flat", from 0.50 on one
            a block, "nested".
        device: where the tensors are put, each when it is made; by default where their parameters
            are.

    Returns:
        A dict with `state` and `param_groups` that shares no memory with the optimizer. What a user
        has put into these is in it, but for states of parameters before their first step, which
        would be taken for states without moments.

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
    device = None if device is None else torch.device(device)
    return write(optimizer, layout, Original(optimizer, {}), device)


@dataclass(frozen=True)
class Original:
    """Moments as they were before the format of the optimizer that is written rounded them.

    Attributes:
        optimizer: one of the same groups that has them in 32 bits, or the one that is written.
        codes: moments in another library's codes, by a parameter's number and by key.
    """

    optimizer: LowBitOptimizer
    codes: Mapping[int, Mapping[str, Coded]]

    def sources(self) -> dict[int, Source]:
        """Each parameter's moments, by its number."""
        members = (member for group in groups_of(self.optimizer) for member in group.members)
        return {
            one.index: Source(
                cache(partial(one.numbers, self.optimizer)), self.codes.get(one.index, {})
            )
            for one in members
        }


@dataclass(frozen=True)
class Source:
    """A parameter's moments.

    Attributes:
        numbers: gives them in 32 bits by key, made when wanted.
        codes: those that are in another library's codes, by key.
    """

    numbers: Callable[[], dict[str, Tensor]]
    codes: Mapping[str, Coded]

    def finite(self) -> dict[str, Tensor]:
        """Numbers as a step codes them: zero where one of them is not finite."""
        numbers = self.numbers()
        return dict(zip(numbers, _saved_moments.codable(list(numbers.values())), strict=True))


@torch.no_grad()
def write(
    optimizer: LowBitOptimizer,
    layout: str,
    original: Original,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """`to_bitsandbytes_state_dict` with moments from elsewhere, so that they are coded once.

    Args:
        optimizer: one that bitsandbytes has; it says what is coded.
        layout: one of `LAYOUTS`.
        original: the moments. Codes are taken as they are where bitsandbytes' blocks are the same.
        device: where the tensors are put; None where their parameters are.
    """
    its, groups = FAMILIES[optimizer.family], list(groups_of(optimizer))
    packed = [group.packed(_settings(its, group)) for group in groups]
    state: dict[int, dict[str, Any]] = {}
    sources, whole = original.sources(), its.whole and layout == "flat"
    for member in (member for group in groups for member in group.members):
        if member.begun and member.index not in state:  # one that is listed twice
            flat = on_device(_state(its, member, sources.pop(member.index), whole), device)
            laid_out = flat if layout == "flat" else _nested(flat)
            state[member.index] = {**laid_out, **member.added}
    return {"state": {**state, **entries_beside(optimizer)}, "param_groups": packed}


def _settings(its: Family, group: Group) -> dict[str, Any]:
    """A group's settings as bitsandbytes has them."""
    ours = group.settings
    required = dict(its.replaced)
    if ours["weight_decay"] == 0:
        required = {key: x for key, x in required.items() if key not in OF_DECAY}
    if not its.by_constructor:
        required.update(NOT_BY_CONSTRUCTOR)
    if not all(member.begun for member in group.members):  # its Adagrad begins at zero
        required["initial_accumulator_value"] = 0.0
    group.require(required, "bitsandbytes")
    unused = {"betas": (0.0, 0.0), "eps": 0.0, "alpha": 0.0, "t_alpha": None, "t_beta3": None}
    theirs: dict[str, Any] = {**unused, **{key: ours[key] for key in its.settings}}
    if its.first_beta is not None:
        theirs["betas"] = (ours[its.first_beta], 0.0)
    if its.first_beta == "momentum" and ours["momentum"] == 0:
        raise ValueError(f"{group.name} has momentum=0, which bitsandbytes refuses")
    return {key: theirs[key] for key in (ONE_STATE if len(its.states) == 1 else TWO_STATES)}


def _state(its: Family, member: Member, source: Source, whole: bool) -> dict[str, Any]:
    """A parameter's state in the flat layout; `whole` for one scale a tensor."""
    # Asked of all together: a format may have two moments in one byte.
    with _state_dicts.refusing(member.where):
        stored = _saved_moments.saved_units(member.state, tuple(chain.from_iterable(its.states)))
    formats = {moment: unit.format for unit in stored for moment in unit.moments}
    state: dict[str, Any] = {"step": member.steps}
    for i, moments in enumerate(its.states, 1):
        if all(format.exact for format in formats.values()):
            parts = [{f"state{i}": source.numbers()[moment.key].float()} for moment in moments]
        else:
            # Its classes of one state have the signed code whatever the state is.
            signed = moments[0].signed or len(its.states) == 1
            state[f"qmap{i}"] = create_dynamic_map(signed).to(member.p.device)
            keys = (f"state{i}", f"max{i}" if whole else f"absmax{i}")
            coded = [_coded(member, source, m, formats[m], signed, whole) for m in moments]
            parts = [dict(zip(keys, pair, strict=True)) for pair in coded]
        for key in parts[0]:
            state[key] = torch.stack([part[key] for part in parts]) if parts[1:] else parts[0][key]
        if f"max{i}" in state:
            state[f"new_max{i}"] = state[f"max{i}"].clone()
    if its.by_constructor:  # a scratch that its step wants under a max_unorm
        state["unorm_vec"] = torch.zeros(1, dtype=torch.float32, device=member.p.device)
    if "gnorm_vec" in member.state:
        state["gnorm_vec"] = member.state["gnorm_vec"].detach().clamp(min=0)  # -1 is no norm yet
    return state


def _coded(
    member: Member, source: Source, moment: Moment, format: Format, signed: bool, whole: bool
) -> tuple[Tensor, Tensor]:
    """A moment's codes and scales; those that there are, if they are what bitsandbytes has."""
    shape = member.p.shape
    there, block = source.codes.get(moment.key), shape.numel() if whole else BLOCKS[0]
    if there is not None and shape.numel() and there.is_in(block, create_dynamic_map(signed)):
        return there.codes.clone(), there.scales.float().clone()
    if whole:
        x = source.finite()[moment.key]
        # Of nothing there is no largest number, and a scale all the same.
        scale = block_absmax(x.reshape(1, -1)).reshape(1) if x.numel() else x.new_zeros(1).float()
        return encode(x, scale, signed).reshape(shape), scale
    if format is DYNAMIC8 and signed == moment.signed and same_blocks(shape, BLOCKS[0]):
        (unit,) = units((moment,), DYNAMIC8)
        with _state_dicts.refusing(member.where):
            _saved_moments.check_stored(member.state, member.p, unit)
        codes, scales = (member.state[part.key].detach().clone() for part in unit.parts)
    else:
        (unit,) = units((Moment(moment.key, SIGNED if signed else SQUARE),), DYNAMIC8)
        flat = source.finite()[moment.key].flatten()
        codes, scales = dispatch.encode(unit, [flat], flat.shape).values()
    return codes.reshape(shape), scales.flatten()


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its tensors in a dict of their own, where FSDP does not gather them."""
    hidden = {key: x for key, x in flat.items() if isinstance(x, Tensor)}
    return {**{key: x for key, x in flat.items() if key not in hidden}, NESTED: hidden}
