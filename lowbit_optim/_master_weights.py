"""Master weights: what training goes on with of parameters that are stored in fewer bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import compute_dtype
from lowbit_optim_kernels.overlaps import memory_of, overlaps
from lowbit_optim_kernels.weights import RESIDUAL_KEY, as_integers, converted

from . import _checks, _sharding
from ._agreement import agreeing
from ._checkpoint_base import steppable
from ._gradients import is_left_alone
from ._optimizer import LowBitOptimizer, require_own
from ._saved_state import require_integers
from ._tensor_checks import has_address, require_dense, require_shape, require_values

PIECE = 1 << 18  # elements

Name = str | int


def master_weights(optimizer: LowBitOptimizer) -> Iterator[tuple[Name, Tensor]]:
    """The weights of an optimizer's parameters with all bits that are kept.

    Args:
        optimizer: any of this package.

    Yields:
        For each parameter its name, if the optimizer was given names, or else its number in
        `state_dict()`; and its weight, fp32 (fp64 of an fp64 parameter) and of its shape: a
        DTensor of a DTensor, and of an fp32 parameter its own memory. Frozen parameters of other
        dtypes, as quantized weights are, are left out.

    Raises:
        TypeError: for another optimizer.
        ValueError: for a group that has names, but not one for each parameter.

    Example:
        >>> optimizer = AdamW8bit(model.bfloat16().parameters(), master_weight_bits=24)
        >>> weights = dict(master_weights(optimizer))
    """
    require_own(optimizer, "master_weights")
    return _weights(optimizer)


@torch.no_grad()
def _weights(optimizer: LowBitOptimizer) -> Iterator[tuple[Name, Tensor]]:
    for name, p, group in _named(optimizer):
        yield name, weight_of(optimizer, p, group)


@torch.no_grad()
def load_master_weights(
    optimizer: LowBitOptimizer,
    weights: Mapping[Name, Tensor] | Iterable[tuple[Name, Tensor]] | Iterable[Tensor],
) -> None:
    """Set parameters, and what is kept beside them, to weights of more bits.

    Rounded to nearest, so that the same weights always give the same parameters.

    Args:
        optimizer: any of this package.
        weights: of all parameters that `master_weights` gives: by name or number, as a dict or as
            pairs, or tensors in the order of the optimizer's groups; each of the parameter's shape,
            whole or placed as it is.

    Raises:
        ValueError, TypeError: for a weight that is missing, is none's, has another shape or mesh or
            is no floating tensor, and for names that several parameters have; nothing has been
            changed then.

    Example:
        >>> pretrained = {name: p.detach().clone() for name, p in model.named_parameters()}
        >>> optimizer = AdamW8bit(model.bfloat16().named_parameters(), master_weight_bits=24)
        >>> load_master_weights(optimizer, pretrained)
    """
    require_own(optimizer, "load_master_weights")
    members = list(_named(optimizer))
    with agreeing([p for _, p, _ in members]):
        given = _in_order(weights, [name for name, _, _ in members])
        for (name, p, _), weight in zip(members, given, strict=True):
            _check_weight(name, weight, p)
    given = _apart(given, [p for _, p, _ in members])
    with steppable():
        for (_, p, group), weight in zip(members, given, strict=True):
            set_weight(optimizer, p, group, weight)
            optimizer._restart_from_weight(p, group)


def _check_weight(name: Name, weight: Any, p: Tensor) -> None:
    if not (isinstance(weight, Tensor) and weight.is_floating_point()):
        got = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"the weight {name!r} must be a floating tensor; got {got}")
    require_dense(f"the weight {name}", weight, (weight.dtype,))
    require_values({f"the weight {name}": weight}, p)
    require_shape(f"the weight {name!r}", weight, p.shape)
    _sharding.require_mesh_of(p, weight, f"the weight {name!r}")


def _apart(weights: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """The weights, in memory that setting the parameters one after the other does not change."""
    places = [_sharding.local(x).detach() for x in (*params, *weights)]
    memories = [memory_of(x) if has_address(x) else (0, 0) for x in places]
    shared = {
        j - len(params)
        for i, j in overlaps(memories)
        if i < len(params) <= j
        and not (i == j - len(params) and places[i].is_set_to(places[j]))  # it is the parameter
    }
    return [w.clone() if k in shared else w for k, w in enumerate(weights)]


def weight_of(optimizer: LowBitOptimizer, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A parameter's weight with all bits that are kept; of an fp32 parameter its own memory."""
    local, kept_as = _sharding.local(p).detach(), optimizer._weights(p, group)
    residual = optimizer.state.get(p, {}).get(RESIDUAL_KEY)  # None before the first step
    if kept_as.residual is None:  # of bits that the next step drops
        residual = None
    elif residual is not None:
        if not _sharding.is_dtensor(p):
            require_integers(optimizer.state[p], p)
        residual = as_integers(_sharding.shard_of(residual, p)).to(local.device)
        residual = converted(residual, kept_as.residual)
    return _sharding.as_dtensor(kept_as.read(local, residual, compute_dtype(p)), p)


def set_weight(
    optimizer: LowBitOptimizer, p: Tensor, group: Mapping[str, Any], weight: Tensor
) -> None:
    """Store a weight, rounded to nearest: in the parameter and in what is kept beside it.

    Args:
        optimizer: the parameter's.
        p: the parameter.
        group: the settings that it is stepped with.
        weight: of its shape, whole or placed as the parameter is.
    """
    kept_as, local = optimizer._weights(p, group), _sharding.local(p)
    value = _sharding.shard_of(weight, p).to(local.device)
    if kept_as.residual is None:
        if kept_as.bits is not None:  # as in a step, no finite weight becomes infinite
            value, largest = value.float(), torch.finfo(local.dtype).max
            value = torch.where(value.isfinite(), value.clamp(-largest, largest), value)
        local.copy_(value)
        return
    share = optimizer._share(p, group)
    residual = as_integers(_sharding.local(optimizer._kept_state(p, group, share)[RESIDUAL_KEY]))
    to = local
    if share is not None and share.whole:
        value = _sharding.gathered(weight).to(local.device)
        to = torch.empty_like(value, dtype=local.dtype)
    for w, p_rows, low in _in_pieces(value, to, residual):
        kept_as.write(w, p_rows, low, None)
    if share is not None and share.whole:
        local.copy_(share.written(to))


def _in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of tensors of one shape, some at a time.

    Splitting a weight takes temporaries of many times its size.
    """
    tensors = tuple(x if x.ndim else x[None] for x in tensors)
    shape = tensors[0].shape
    rows = max(1, PIECE // max(1, shape[1:].numel()))
    return zip(*(x.split(rows) for x in tensors), strict=True)


def _named(optimizer: LowBitOptimizer) -> Iterator[tuple[Name, Tensor, Mapping[str, Any]]]:
    """Each parameter's name, itself and the settings that it is stepped with."""
    seen: set[Tensor] = set()
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        settings: dict[Tensor, Mapping[str, Any]] = {}
        for _, part in optimizer._parts(index):
            settings.update(dict.fromkeys(part["params"], part))
        params = group["params"]
        names = group.get("param_names") or range(number, number + len(params))
        if len(names) != len(params):
            raise ValueError(
                f"parameter group {index} must have a name for each of its {len(params)} "
                f"parameters; its 'param_names' are {len(names)}"
            )
        for name, p in zip(names, params, strict=True):
            if p not in seen and not is_left_alone(p):
                seen.add(p)
                yield name, p, settings[p]
            number += 1


def _in_order(weights: Any, names: list[Name]) -> list[Any]:
    """A weight for each parameter; `names` are theirs."""
    if isinstance(weights, Mapping):
        return _by_name(dict(weights), names)
    _checks.several("weights", weights, "tensors, in order or by name")
    given = list(weights)
    if given and all(map(_is_named, given)):
        named = [name for name, _ in given]
        if named != names:
            _refuse_shared(named)
            return _by_name(dict(given), names)
        given = [weight for _, weight in given]
    if len(given) != len(names):
        raise ValueError(
            f"weights must have one tensor for each of {len(names)} parameters; got {len(given)}"
        )
    return given


def _is_named(weight: Any) -> bool:
    return isinstance(weight, tuple) and len(weight) == 2 and isinstance(weight[0], (str, Integral))


def _by_name(weights: dict[Any, Any], names: list[Name]) -> list[Any]:
    missing, extra = [n for n in names if n not in weights], weights.keys() - set(names)
    if missing or extra:
        which = f"lack {missing}" if missing else f"have {sorted(map(str, extra))} beside them"
        raise ValueError(f"weights must have one tensor for each parameter; they {which}")
    _refuse_shared(names)
    return [weights[name] for name in names]


def _refuse_shared(names: list[Name]) -> None:
    shared = [name for name, count in Counter(names).items() if count > 1]
    if shared:
        raise ValueError(
            f"weights must be in order, not by name, as several parameters are called {shared}"
        )
