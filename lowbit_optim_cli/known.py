"""Weights of common models by their configuration alone.

Importing transformers and torch takes longer than an estimate may, so the shapes of common models
are written down, by kind: `decoders`, `encoders`, `encoder_decoders`. The tests of frameworks
compare them with what transformers builds; any other model, or a configuration with something
unusual in it, is built by transformers itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .footprint import Weight

Config = dict[str, Any]
Named = Iterator[tuple[str, tuple[int, ...]]]
# Names that embeddings have in the usual libraries; one of them is that of a tied head.
EMBEDDING = re.compile(
    r"(^|\.)(embed_(tokens|in|positions)|(tokens|positions|pos)_embed|tok_embeddings|embeddings?"
    r"|\w*(word|position|type|distance|input)_embeddings?|wte|wpe|shared|relative_attention_bias"
    r"|lm_head\.decoder)\.weight$"
)
HEADS = (
    ("num_attention_heads", "hidden_size"), ("n_head", "n_embd"), ("n_heads", "dim"),
    ("encoder_attention_heads", "d_model"), ("decoder_attention_heads", "d_model"),
)  # fmt: skip
# Other names of sizes that transformers reads too, of some kinds, and before a kind's own.
ALIASES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "d_model": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "d_kv": "head_dim", "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads", "num_local_experts": "num_experts",
}  # fmt: skip


class Known(NamedTuple):
    """A class of transformers whose shapes are written down.

    Attributes:
        kind: the `model_type` of its configurations.
        shapes: its weights by a configuration.
        sizes: what a configuration must have as positive numbers.
        usual: settings, what they must be, and are where there are none.
        optional: what must be a positive number where it is not None.
        frozen: a weight that is not trained.
    """

    kind: str
    shapes: Callable[[Config], Named]
    sizes: tuple[str, ...]
    usual: Mapping[str, Any] = {}
    optional: tuple[str, ...] = ()
    frozen: str = ""


def known_weights(
    known: Mapping[str, Known], config: Config, dtype: str
) -> tuple[Weight, ...] | None:
    """The weights in the model's order; None where no entry fits the configuration.

    Args:
        known: entries by class.
        config: of transformers.
        dtype: of all weights.
    """
    entry = known.get(architecture(config) or "")
    if entry is None or entry.kind != config.get("model_type"):
        return None
    if not _has_sizes(config, entry.sizes, (*entry.optional, *(key for key, _ in HEADS))):
        return None
    for heads, width in HEADS:
        if width in entry.sizes and config[width] % (config.get(heads) or 1):
            return None
    if any(config.get(key, usual) != usual for key, usual in entry.usual.items()):
        return None
    if not _has_whole_labels(config) or _has_two_sizes(config):
        return None
    return tuple(
        Weight(name, shape, dtype, bool(EMBEDDING.search(name)), name != entry.frozen)
        for name, shape in entry.shapes(config)
    )


def architecture(config: Config) -> str | None:
    """The class that a configuration names."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) else None


def _has_sizes(config: Config, keys: tuple[str, ...], optional: tuple[str, ...]) -> bool:
    """Whether a configuration has a positive number under each key, or nothing where optional."""
    there = (*keys, *(key for key in optional if config.get(key) is not None))
    return all(type(config.get(key)) is int and config[key] > 0 for key in there)


def _has_two_sizes(config: Config) -> bool:
    """Whether a configuration says something else by a size's other name."""
    there = ((own, alias) for own, alias in ALIASES.items() if {own, alias} <= config.keys())
    return any(config[own] != config[alias] for own, alias in there)


def _has_whole_labels(config: Config) -> bool:
    """Whether a configuration has the usual two labels, or one or more."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if labels is None:
        return count is None or (type(count) is int and count > 0)
    return isinstance(labels, dict) and len(labels) > 0 and count in (None, len(labels))


def linear(name: str, rows: int, columns: int, biased: bool = True) -> Named:
    """The weight of a layer and, if it has one, its bias."""
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def pair(name: str, *shape: int) -> Named:
    """A weight and a bias of its last size: of a norm, or of a layer whose weight is (in, out)."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def labels(config: Config) -> int:
    """The number of labels that a classifier of this configuration has."""
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2
