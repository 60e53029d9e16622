"""Weights of common models with an encoder and a decoder, by their configuration alone: `known`."""

from __future__ import annotations

from .known import Config, Known, Named, linear, pair

T5 = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads",
      "relative_attention_num_buckets")  # fmt: skip
BOTH = ("encoder_layers", "encoder_ffn_dim", "decoder_layers", "decoder_ffn_dim")
BART = ("vocab_size", "d_model", "max_position_embeddings", *BOTH)
WHISPER = ("vocab_size", "d_model", "num_mel_bins", "max_source_positions", "max_target_positions",
           *BOTH)  # fmt: skip


def _t5(config: Config) -> Named:
    """T5 (Raffel et al., arXiv:1910.10683), its versions and UMT5, its embeddings tied."""
    vocabulary, width, *_ = (config[key] for key in T5)
    yield "shared.weight", (vocabulary, width)
    layers = config["num_layers"]
    yield from _t5_stack(config, "encoder", layers)
    yield from _t5_stack(config, "decoder", config.get("num_decoder_layers") or layers)


def _t5_stack(config: Config, name: str, layers: int) -> Named:
    _, width, head, inner, _, heads, buckets = (config[key] for key in T5)
    proj = str(config.get("feed_forward_proj", GATED[config["model_type"]]))
    gated = config.get("is_gated_act", proj.startswith("gated-"))
    for i in range(layers):
        parts = ["SelfAttention", *(["EncDecAttention"] if name == "decoder" else [])]
        for j, part in enumerate(parts):
            layer = f"{name}.block.{i}.layer.{j}"
            for which in "qkv":
                yield f"{layer}.{part}.{which}.weight", (heads * head, width)
            yield f"{layer}.{part}.o.weight", (width, heads * head)
            if j == 0 and (i == 0 or config["model_type"] == "umt5"):
                yield f"{layer}.{part}.relative_attention_bias.weight", (buckets, heads)
            yield f"{layer}.layer_norm.weight", (width,)
        layer = f"{name}.block.{i}.layer.{len(parts)}"
        for which in ("wi_0", "wi_1") if gated else ("wi",):
            yield f"{layer}.DenseReluDense.{which}.weight", (inner, width)
        yield f"{layer}.DenseReluDense.wo.weight", (width, inner)
        yield f"{layer}.layer_norm.weight", (width,)
    yield f"{name}.final_layer_norm.weight", (width,)


def _bart(config: Config) -> Named:
    """BART (Lewis et al., arXiv:1910.13461) and mBART, their embeddings tied."""
    vocabulary, width, positions, *_ = (config[key] for key in BART)
    yield "model.shared.weight", (vocabulary, width)
    for name in ("encoder", "decoder"):
        yield f"model.{name}.embed_positions.weight", (positions + 2, width)
        yield from _layers(config, name)
        yield from pair(f"model.{name}.layernorm_embedding", width)
        if config["model_type"] == "mbart":
            yield from pair(f"model.{name}.layer_norm", width)


def _whisper(config: Config) -> Named:
    """Whisper (Radford et al., arXiv:2212.04356), its head tied."""
    vocabulary, width, bins, sources, targets, *_ = (config[key] for key in WHISPER)
    for i, channels in ((1, bins), (2, width)):
        yield f"model.encoder.conv{i}.weight", (width, channels, 3)
        yield f"model.encoder.conv{i}.bias", (width,)
    yield SINES, (sources, width)
    yield from _layers(config, "encoder")
    yield from pair("model.encoder.layer_norm", width)
    yield "model.decoder.embed_tokens.weight", (vocabulary, width)
    yield "model.decoder.embed_positions.weight", (targets, width)
    yield from _layers(config, "decoder")
    yield from pair("model.decoder.layer_norm", width)


def _layers(config: Config, name: str) -> Named:
    """The layers of BART's encoder or decoder, or of Whisper's, whose keys have no bias."""
    width, inner = config["d_model"], config[f"{name}_ffn_dim"]
    for i in range(config[f"{name}_layers"]):
        layer = f"model.{name}.layers.{i}"
        for part in ("self_attn", "encoder_attn") if name == "decoder" else ("self_attn",):
            for which in "k", "v", "q", "out":
                biased = which != "k" or config["model_type"] != "whisper"
                yield from linear(f"{layer}.{part}.{which}_proj", width, width, biased)
            yield from pair(f"{layer}.{part}_layer_norm", width)
        yield from linear(f"{layer}.fc1", inner, width)
        yield from linear(f"{layer}.fc2", width, inner)
        yield from pair(f"{layer}.final_layer_norm", width)


GATED = {"t5": "relu", "mt5": "gated-gelu", "umt5": "gated-gelu"}
SINES = "model.encoder.embed_positions.weight"
TIED = {"tie_word_embeddings": True}
KNOWN = {
    **{
        f"{kind.upper()}ForConditionalGeneration": Known(
            kind, _t5, T5, {"is_decoder": False}, ("num_decoder_layers",)
        )
        for kind in GATED
    },
    "BartForConditionalGeneration": Known("bart", _bart, BART, TIED),
    "MBartForConditionalGeneration": Known("mbart", _bart, BART, TIED),
    "WhisperForConditionalGeneration": Known("whisper", _whisper, WHISPER, TIED, frozen=SINES),
}
