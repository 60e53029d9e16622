"""Weights of common encoders by their configuration alone: as `decoders`."""

from __future__ import annotations

from typing import Any

from .decoders import Named, architecture, has_sizes, linear, pair, weights
from .footprint import Weight

SIZES = "hidden_size", "intermediate_size", "num_hidden_layers"
BERT = (*SIZES, "vocab_size", "max_position_embeddings", "type_vocab_size")
VIT = (*SIZES, "image_size", "patch_size")
HEADS = {"BertForMaskedLM": "bert", "BertForSequenceClassification": "bert",
         "ViTForImageClassification": "vit"}  # fmt: skip


def weights_of(config: dict[str, Any], dtype: str) -> tuple[Weight, ...] | None:
    """The weights of a configuration's model in the model's order; None if it is not known here."""
    name = architecture(config)
    kind = HEADS.get(name or "")
    unusual = ("quantization_config", "is_decoder", "add_cross_attention", "pruned_heads")
    if kind is None or config.get("model_type") != kind or any(map(config.get, unusual)):
        return None
    sizes = BERT if kind == "bert" else VIT
    if not has_sizes(config, sizes, ("num_channels", "num_labels")) or not _whole_labels(config):
        return None
    if kind == "vit":
        shapes = _vit(config)
    elif config.get("tie_word_embeddings", True):
        shapes = _bert(config, name == "BertForMaskedLM")
    else:
        return None
    return weights(shapes, dtype)


def _whole_labels(config: dict[str, Any]) -> bool:
    labels, count = config.get("id2label"), config.get("num_labels")
    return labels is None or (isinstance(labels, dict) and count in (None, len(labels)))


def _labels(config: dict[str, Any]) -> int:
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2


def _bert(config: dict[str, Any], masked: bool) -> Named:
    """BERT (Devlin et al., arXiv:1810.04805) with one of two heads."""
    width, inner, layers, vocabulary, positions, types = (config[key] for key in BERT)
    for name, rows in (("word", vocabulary), ("position", positions), ("token_type", types)):
        yield f"bert.embeddings.{name}_embeddings.weight", (rows, width)
    yield from pair("bert.embeddings.LayerNorm", width)
    for i in range(layers):
        layer = f"bert.encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from linear(f"{layer}.attention.{name}", width, width)
        yield from pair(f"{layer}.attention.output.LayerNorm", width)
        yield from linear(f"{layer}.intermediate.dense", inner, width)
        yield from linear(f"{layer}.output.dense", width, inner)
        yield from pair(f"{layer}.output.LayerNorm", width)
    if masked:
        yield "cls.predictions.bias", (vocabulary,)
        yield from linear("cls.predictions.transform.dense", width, width)
        yield from pair("cls.predictions.transform.LayerNorm", width)
    else:
        yield from linear("bert.pooler.dense", width, width)
        yield from linear("classifier", _labels(config), width)


def _vit(config: dict[str, Any]) -> Named:
    """The vision transformer (Dosovitskiy et al., arXiv:2010.11929) that classifies images."""
    width, inner, layers, image, patch = (config[key] for key in VIT)
    yield "vit.embeddings.cls_token", (1, 1, width)
    yield "vit.embeddings.position_embeddings", (1, (image // patch) ** 2 + 1, width)
    yield (
        "vit.embeddings.patch_embeddings.projection.weight",
        (width, config.get("num_channels") or 3, patch, patch),
    )
    yield "vit.embeddings.patch_embeddings.projection.bias", (width,)
    for i in range(layers):
        layer = f"vit.layers.{i}"
        for name in "qkv":
            biased = config.get("qkv_bias", True)
            yield from linear(f"{layer}.attention.{name}_proj", width, width, biased)
        yield from linear(f"{layer}.attention.o_proj", width, width)
        yield from pair(f"{layer}.layernorm_before", width)
        yield from pair(f"{layer}.layernorm_after", width)
        yield from linear(f"{layer}.mlp.fc1", inner, width)
        yield from linear(f"{layer}.mlp.fc2", width, inner)
    yield from pair("vit.layernorm", width)
    yield from linear("classifier", _labels(config), width)
