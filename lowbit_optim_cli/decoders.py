"""Weights of common decoders by their configuration alone.

Importing transformers and torch takes longer than an estimate may, so the shapes of a few decoders
are written down here. The tests of frameworks compare them with what transformers builds; any other
model, or a configuration with something unusual in it, is built by transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .footprint import Weight

Named = Iterator[tuple[str, tuple[int, ...]]]
LLAMAS = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
GPT2 = ("vocab_size", "n_positions", "n_embd", "n_layer")


def weights_of(config: dict[str, Any], dtype: str) -> tuple[Weight, ...] | None:
    """The weights of a configuration's model in the model's order; None if it is not known here."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    kind = config.get("model_type")
    if "quantization_config" in config:
        return None
    if (name, kind) == ("GPT2LMHeadModel", "gpt2"):
        if not _whole(config, GPT2) or config.get("n_inner") is not None:
            return None
        shapes = _gpt2(*(config[key] for key in GPT2))
        return _weights(shapes, dtype) if config.get("tie_word_embeddings", True) else None
    known = isinstance(name, str) and LLAMAS.get(name) == kind and _whole(config, SIZES)
    if not known or config["hidden_size"] % config["num_attention_heads"]:
        return None
    return _weights(_llama(config), dtype)


def _whole(config: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return all(type(config.get(key)) is int and config[key] > 0 for key in keys)


def _weights(shapes: Named, dtype: str) -> tuple[Weight, ...]:
    embeddings = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    return tuple(Weight(name, shape, dtype, name.endswith(embeddings)) for name, shape in shapes)


def _llama(config: dict[str, Any]) -> Named:
    """Llama (Touvron et al., arXiv:2302.13971) and its kin."""
    vocabulary, width, inner, layers, heads, groups = (config[key] for key in SIZES)
    kind = config["model_type"]
    default = 128 if kind == "qwen3" else width // heads
    head = config.get("head_dim") or default
    biased = config.get("attention_bias", False) if kind in ("llama", "qwen3") else False
    of_projection = {"q": heads * head, "k": groups * head, "v": groups * head}
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in of_projection.items():
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, width)
            if biased or kind == "qwen2":
                yield f"{layer}.self_attn.{name}_proj.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (width, heads * head)
        if biased:
            yield f"{layer}.self_attn.o_proj.bias", (width,)
        if kind == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        for name, shape in (
            ("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner)),
        ):  # fmt: skip
            yield f"{layer}.mlp.{name}_proj.weight", shape
            if kind == "llama" and config.get("mlp_bias", False):
                yield f"{layer}.mlp.{name}_proj.bias", shape[:1]
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocabulary, width)


def _gpt2(vocabulary: int, positions: int, width: int, layers: int) -> Named:
    """GPT-2 (Radford et al., 2019), its weights (in, out) and its head tied."""

    def pair(name: str, *shape: int) -> Named:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[-1:]

    yield "transformer.wte.weight", (vocabulary, width)
    yield "transformer.wpe.weight", (positions, width)
    for i in range(layers):
        layer = f"transformer.h.{i}"
        yield from pair(f"{layer}.ln_1", width)
        yield from pair(f"{layer}.attn.c_attn", width, 3 * width)
        yield from pair(f"{layer}.attn.c_proj", width, width)
        yield from pair(f"{layer}.ln_2", width)
        yield from pair(f"{layer}.mlp.c_fc", width, 4 * width)
        yield from pair(f"{layer}.mlp.c_proj", 4 * width, width)
    yield from pair("transformer.ln_f", width)
