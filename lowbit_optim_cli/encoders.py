"""Weights of common encoders by their configuration alone: as `known` says."""

from __future__ import annotations

from collections.abc import Iterator

from .known import Config, Known, Named, architecture, linear, pair

SIZES = "hidden_size", "intermediate_size", "num_hidden_layers"
BERT = (*SIZES, "vocab_size", "max_position_embeddings", "type_vocab_size")
DISTILBERT = ("dim", "hidden_dim", "n_layers", "vocab_size", "max_position_embeddings")
VIT = (*SIZES, "image_size", "patch_size")


def _labels(config: Config) -> int:
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2


def _has_masked_head(config: Config) -> bool:
    return str(architecture(config)).endswith("ForMaskedLM")


def _bert(config: Config) -> Named:
    """BERT (Devlin et al., arXiv:1810.04805) with one of two heads."""
    width, _, _, vocabulary, positions, types = (config[key] for key in BERT)
    for name, rows in (("word", vocabulary), ("position", positions), ("token_type", types)):
        yield f"bert.embeddings.{name}_embeddings.weight", (rows, width)
    yield from pair("bert.embeddings.LayerNorm", width)
    yield from _bert_layers(config, "bert")
    if _has_masked_head(config):
        yield "cls.predictions.bias", (vocabulary,)
        yield from linear("cls.predictions.transform.dense", width, width)
        yield from pair("cls.predictions.transform.LayerNorm", width)
    else:
        yield from linear("bert.pooler.dense", width, width)
        yield from linear("classifier", _labels(config), width)


def _roberta(config: Config) -> Named:
    """RoBERTa (Liu et al., arXiv:1907.11692) with one of two heads."""
    width, _, _, vocabulary, positions, types = (config[key] for key in BERT)
    yield "roberta.embeddings.word_embeddings.weight", (vocabulary, width)
    yield "roberta.embeddings.token_type_embeddings.weight", (types, width)
    yield from pair("roberta.embeddings.LayerNorm", width)
    yield "roberta.embeddings.position_embeddings.weight", (positions, width)
    yield from _bert_layers(config, "roberta")
    if _has_masked_head(config):
        yield "lm_head.bias", (vocabulary,)
        yield from linear("lm_head.dense", width, width)
        yield from pair("lm_head.layer_norm", width)
    else:
        yield from linear("classifier.dense", width, width)
        yield from linear("classifier.out_proj", _labels(config), width)


def _bert_layers(config: Config, model: str) -> Named:
    width, inner, layers = (config[key] for key in SIZES)
    for i in range(layers):
        layer = f"{model}.encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from linear(f"{layer}.attention.{name}", width, width)
        yield from pair(f"{layer}.attention.output.LayerNorm", width)
        yield from linear(f"{layer}.intermediate.dense", inner, width)
        yield from linear(f"{layer}.output.dense", width, inner)
        yield from pair(f"{layer}.output.LayerNorm", width)


def _distilbert(config: Config) -> Named:
    """DistilBERT (Sanh et al., arXiv:1910.01108) with one of two heads."""
    width, inner, layers, vocabulary, positions = (config[key] for key in DISTILBERT)
    yield "distilbert.embeddings.word_embeddings.weight", (vocabulary, width)
    yield "distilbert.embeddings.position_embeddings.weight", (positions, width)
    yield from pair("distilbert.embeddings.LayerNorm", width)
    for i in range(layers):
        layer = f"distilbert.transformer.layer.{i}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield from linear(f"{layer}.attention.{name}", width, width)
        yield from pair(f"{layer}.sa_layer_norm", width)
        yield from linear(f"{layer}.ffn.lin1", inner, width)
        yield from linear(f"{layer}.ffn.lin2", width, inner)
        yield from pair(f"{layer}.output_layer_norm", width)
    if _has_masked_head(config):
        yield from linear("vocab_transform", width, width)
        yield from pair("vocab_layer_norm", width)
        yield "vocab_projector.bias", (vocabulary,)
    else:
        yield from linear("pre_classifier", width, width)
        yield from linear("classifier", _labels(config), width)


def _vit(config: Config) -> Named:
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


def _known() -> Iterator[tuple[str, Known]]:
    tied = {"tie_word_embeddings": True}
    usual = {"is_decoder": False, "add_cross_attention": False, "pruned_heads": {}, **tied}
    for name, kind, shapes, sizes, settings in (
        ("Bert", "bert", _bert, BERT, usual),
        ("Roberta", "roberta", _roberta, BERT, usual),
        ("DistilBert", "distilbert", _distilbert, DISTILBERT,
         {"sinusoidal_pos_embds": False, "pruned_heads": {}, **tied}),
    ):  # fmt: skip
        for head in ("ForMaskedLM", "ForSequenceClassification"):
            yield name + head, Known(kind, shapes, sizes, settings, ("num_labels",))
    yield (
        "ViTForImageClassification",
        Known("vit", _vit, VIT, {"pruned_heads": {}}, ("num_channels", "num_labels")),
    )


KNOWN = dict(_known())
