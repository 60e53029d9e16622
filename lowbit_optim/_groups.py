"""`parameter_groups`: the usual parameter groups of a model."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from . import _checks

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    model: nn.Module,
    weight_decay: float = 0.01,
    *,
    embedding_bits: int | None = 32,
    decay_embeddings: bool = True,
    no_decay: Iterable[str] = (),
    named: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups of a model: weights with decay, the rest without, embeddings in 32 bits.

    No decay for biases, for the parameters of normalization layers and for all parameters of fewer
    than two dimensions. Embeddings get 32-bit state because tokens are so unevenly distributed that
    their gradients vary the most of all (arXiv:2110.02861, on its stable embedding layer). A weight
    that two modules share is listed once; one that is both an embedding and a head counts as an
    embedding. Parameters that do not require gradients are left out.

    Args:
        model: the model. In each group its parameters are in the order of
            `model.named_parameters()`.
        weight_decay: of the groups with decay. Default 0.01.
        embedding_bits: 32 (default), 8 or 4, `optim_bits` of embeddings; None leaves it to the
            optimizer.
        decay_embeddings: whether embeddings have weight decay. Default True.
        no_decay: names of further parameters without decay; `*` stands for any part of a name, as
            in "*.position".
        named: give the optimizer names with the parameters, which it then keeps in its
            `state_dict()`. Default False.

    Returns:
        Up to four groups, without the empty ones: `params`, `weight_decay` and, for embeddings,
        `optim_bits`.

    Raises:
        ValueError, TypeError: naming the argument that is not allowed, the name in `no_decay` that
            no parameter has, or a lazy module's parameter that has no shape yet.

    Example:
        >>> groups = parameter_groups(model, weight_decay=0.1)
        >>> optimizer = AdamW8bit(groups, lr=1e-3)

    Reference:
        Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
        arXiv:2110.02861 (2021).
    """
    _checks.module("model", model)
    _checks.number("weight_decay", weight_decay, 0.0)
    _checks.one_of("embedding_bits", embedding_bits, (4, 8, 32, None))
    _checks.flag("decay_embeddings", decay_embeddings)
    _checks.flag("named", named)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in trained:
        if is_lazy(p):  # and looks like a vector
            raise ValueError(
                f"model has {name!r}, whose shape a first forward pass decides; run one before"
            )
    excluded = _matching([name for name, _ in trained], no_decay)
    embeddings, norms = parameters_in(model, EMBEDDINGS), parameters_in(model, NORM_MODULES)
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, p in trained:
        embedding = p in embeddings
        weight = p.ndim >= 2 and p not in norms and not _is_bias(name)
        decays = weight and (decay_embeddings or not embedding) and name not in excluded
        groups.setdefault((embedding, decays), []).append((name, p) if named else p)
    bits = {} if embedding_bits is None else {"optim_bits": embedding_bits}
    return [
        {
            "params": groups[embedding, decays],
            "weight_decay": weight_decay if decays else 0.0,
            **(bits if embedding else {}),
        }
        for embedding in (False, True)
        for decays in (True, False)
        if (embedding, decays) in groups
    ]


def parameters_in(model: nn.Module, module_types: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    """The parameters of a model's modules of these types, those of their parametrizations too."""
    found = (module for module in model.modules() if isinstance(module, module_types))
    return {p for module in found for p in module.parameters()}


def _is_bias(name: str) -> bool:
    """Whether a name is a bias's, as `bias`, `bias_ih_l0`, `in_proj_bias` and `pos_bias_u` are."""
    last = name.rpartition(".")[2]
    return last.startswith("bias") or last.endswith("bias") or "_bias_" in last


def _matching(names: list[str], patterns: Iterable[str]) -> set[str]:
    _checks.several("no_decay", patterns, "several names, as in ['*.position']")
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, str(pattern))}
        if not matches:
            raise ValueError(f"no_decay has {pattern!r}, which matches no trainable parameter")
        found |= matches
    return found
