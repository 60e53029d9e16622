"""Weights of common encoders by their configuration alone: as `known` says."""

from __future__ import annotations

from .known import Config, Known, Named, architecture, labels, linear, pair

SIZES = "hidden_size", "intermediate_size", "num_hidden_layers"
BERT = (*SIZES, "vocab_size", "max_position_embeddings", "type_vocab_size")
MODERNBERT = (*SIZES, "vocab_size")
DISTILBERT = ("dim", "hidden_dim", "n_layers", "vocab_size", "max_position_embeddings")
VIT = (*SIZES, "image_size", "patch_size")
BASES = {"bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta", "distilbert": "distilbert",
         "modernbert": "model", "vit": "vit"}  # fmt: skip
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
         "ForQuestionAnswering")  # fmt: skip


def _encoder(config: Config) -> Named:
    """A base model and what its class has beside it."""
    kind = config["model_type"]
    if _is(config, "Model"):
        yield from BODIES[kind](config)
        return
    body = ((f"{BASES[kind]}.{name}", shape) for name, shape in BODIES[kind](config))
    if kind != "xlm-roberta":
        yield from body
        yield from _head(config)
        return
    yield from _head(config)  # which is made first there, so that a tied weight is the head's
    if _is(config, "ForMaskedLM"):
        yield "lm_head.decoder.weight", next(body)[1]
    yield from body


def _is(config: Config, *tasks: str) -> bool:
    return str(architecture(config)).endswith(tasks)


def _head(config: Config) -> Named:
    kind, width = config["model_type"], config.get("hidden_size") or config["dim"]
    if kind == "modernbert":
        yield "head.dense.weight", (width, width)
        yield "head.norm.weight", (width,)
    if _is(config, "ForMaskedLM"):
        yield from _masked_head(kind, width, config["vocab_size"])
    elif _is(config, "ForQuestionAnswering") and kind != "modernbert":
        yield from linear("qa_outputs", labels(config), width)
    elif not _is(config, "ForSequenceClassification"):
        yield from linear("classifier", labels(config), width)
    elif "roberta" in kind:
        yield from linear("classifier.dense", width, width)
        yield from linear("classifier.out_proj", labels(config), width)
    else:
        if kind == "distilbert":
            yield from linear("pre_classifier", width, width)
        yield from linear("classifier", labels(config), width)


def _masked_head(kind: str, width: int, vocabulary: int) -> Named:
    """The head that predicts masked words, its last weight tied."""
    if kind == "distilbert":
        yield from linear("vocab_transform", width, width)
        yield from pair("vocab_layer_norm", width)
        yield "vocab_projector.bias", (vocabulary,)
    elif kind == "bert":
        yield "cls.predictions.bias", (vocabulary,)
        yield from linear("cls.predictions.transform.dense", width, width)
        yield from pair("cls.predictions.transform.LayerNorm", width)
    elif kind == "modernbert":
        yield "decoder.bias", (vocabulary,)
    else:
        yield "lm_head.bias", (vocabulary,)
        yield from linear("lm_head.dense", width, width)
        yield from pair("lm_head.layer_norm", width)


def _bert(config: Config) -> Named:
    """BERT (Devlin et al., arXiv:1810.04805)."""
    width, _, _, vocabulary, positions, types = (config[key] for key in BERT)
    for name, rows in (("word", vocabulary), ("position", positions), ("token_type", types)):
        yield f"embeddings.{name}_embeddings.weight", (rows, width)
    yield from pair("embeddings.LayerNorm", width)
    yield from _bert_layers(config)
    if _is(config, "Model", "ForSequenceClassification"):
        yield from linear("pooler.dense", width, width)


def _roberta(config: Config) -> Named:
    """RoBERTa (Liu et al., arXiv:1907.11692) and XLM-R (Conneau et al., arXiv:1911.02116)."""
    width, _, _, vocabulary, positions, types = (config[key] for key in BERT)
    yield "embeddings.word_embeddings.weight", (vocabulary, width)
    yield "embeddings.token_type_embeddings.weight", (types, width)
    yield from pair("embeddings.LayerNorm", width)
    yield "embeddings.position_embeddings.weight", (positions, width)
    yield from _bert_layers(config)
    if _is(config, "Model"):
        yield from linear("pooler.dense", width, width)


def _bert_layers(config: Config) -> Named:
    width, inner, layers = (config[key] for key in SIZES)
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from linear(f"{layer}.attention.{name}", width, width)
        yield from pair(f"{layer}.attention.output.LayerNorm", width)
        yield from linear(f"{layer}.intermediate.dense", inner, width)
        yield from linear(f"{layer}.output.dense", width, inner)
        yield from pair(f"{layer}.output.LayerNorm", width)


def _distilbert(config: Config) -> Named:
    """DistilBERT (Sanh et al., arXiv:1910.01108)."""
    width, inner, layers, vocabulary, positions = (config[key] for key in DISTILBERT)
    yield "embeddings.word_embeddings.weight", (vocabulary, width)
    yield "embeddings.position_embeddings.weight", (positions, width)
    yield from pair("embeddings.LayerNorm", width)
    for i in range(layers):
        layer = f"transformer.layer.{i}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield from linear(f"{layer}.attention.{name}", width, width)
        yield from pair(f"{layer}.sa_layer_norm", width)
        yield from linear(f"{layer}.ffn.lin1", inner, width)
        yield from linear(f"{layer}.ffn.lin2", width, inner)
        yield from pair(f"{layer}.output_layer_norm", width)


def _modernbert(config: Config) -> Named:
    """ModernBERT (Warner et al., arXiv:2412.13663), without biases."""
    width, inner, layers, vocabulary = (config[key] for key in MODERNBERT)
    yield "embeddings.tok_embeddings.weight", (vocabulary, width)
    yield "embeddings.norm.weight", (width,)
    for i in range(layers):
        if i:
            yield f"layers.{i}.attn_norm.weight", (width,)
        yield f"layers.{i}.attn.Wqkv.weight", (3 * width, width)
        yield f"layers.{i}.attn.Wo.weight", (width, width)
        yield f"layers.{i}.mlp_norm.weight", (width,)
        yield f"layers.{i}.mlp.Wi.weight", (2 * inner, width)
        yield f"layers.{i}.mlp.Wo.weight", (width, inner)
    yield "final_norm.weight", (width,)


def _vit(config: Config) -> Named:
    """The vision transformer (Dosovitskiy et al., arXiv:2010.11929)."""
    width, inner, layers, image, patch = (config[key] for key in VIT)
    yield "embeddings.cls_token", (1, 1, width)
    yield "embeddings.position_embeddings", (1, (image // patch) ** 2 + 1, width)
    yield (
        "embeddings.patch_embeddings.projection.weight",
        (width, config.get("num_channels") or 3, patch, patch),
    )
    yield "embeddings.patch_embeddings.projection.bias", (width,)
    for i in range(layers):
        layer = f"layers.{i}"
        for name in "qkv":
            biased = config.get("qkv_bias", True)
            yield from linear(f"{layer}.attention.{name}_proj", width, width, biased)
        yield from linear(f"{layer}.attention.o_proj", width, width)
        yield from pair(f"{layer}.layernorm_before", width)
        yield from pair(f"{layer}.layernorm_after", width)
        yield from linear(f"{layer}.mlp.fc1", inner, width)
        yield from linear(f"{layer}.mlp.fc2", width, inner)
    yield from pair("layernorm", width)
    if _is(config, "Model"):
        yield from linear("pooler.dense", config.get("pooler_output_size") or width, width)


BODIES = {"bert": _bert, "roberta": _roberta, "xlm-roberta": _roberta, "distilbert": _distilbert,
          "modernbert": _modernbert, "vit": _vit}  # fmt: skip
TIED = {"tie_word_embeddings": True, "pruned_heads": {}}
BARE = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False)
UNCROSSED = {"is_decoder": False, "add_cross_attention": False, **TIED}
KNOWN = {
    **{
        name + task: Known(kind, _encoder, sizes, usual, ("num_labels",))
        for name, kind, sizes, usual in (
            ("Bert", "bert", BERT, UNCROSSED),
            ("Roberta", "roberta", BERT, UNCROSSED),
            ("XLMRoberta", "xlm-roberta", BERT, UNCROSSED),
            ("ModernBert", "modernbert", MODERNBERT,
             {**BARE, "decoder_bias": True, "tie_word_embeddings": True}),
            ("DistilBert", "distilbert", DISTILBERT, {"sinusoidal_pos_embds": False, **TIED}),
        )
        for task in TASKS
    },
    **{
        name: Known(
            "vit", _encoder, (*VIT, "num_attention_heads"), {"pruned_heads": {}, "head_dim": None},
            ("num_channels", "num_labels", "pooler_output_size"),
        )
        for name in ("ViTModel", "ViTForImageClassification")
    },
}  # fmt: skip
