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
    "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "Phi3ForCausalLM": "phi3",
}  # fmt: skip
EMBEDDINGS = "embed_tokens.weight", "wte.weight", "wpe.weight", "_embeddings.weight"
GEMMAS = "gemma", "gemma2", "gemma3_text"
BIASED = "llama", "qwen3", *GEMMAS  # which `attention_bias` gives biases
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
GPT2 = ("vocab_size", "n_positions", "n_embd", "n_layer")


def weights_of(config: dict[str, Any], dtype: str) -> tuple[Weight, ...] | None:
    """The weights of a configuration's model in the model's order; None if it is not known here."""
    name, kind = architecture(config), config.get("model_type")
    if "quantization_config" in config:
        return None
    if (name, kind) == ("GPT2LMHeadModel", "gpt2"):
        if not has_sizes(config, GPT2) or config.get("n_inner") is not None:
            return None
        shapes = _gpt2(*(config[key] for key in GPT2))
        return weights(shapes, dtype) if config.get("tie_word_embeddings", True) else None
    known = LLAMAS.get(name or "") == kind and has_sizes(config, SIZES, ("head_dim",))
    if not known or config["hidden_size"] % config["num_attention_heads"]:
        return None
    if kind in GEMMAS and not has_sizes(config, ("head_dim",)):
        return None
    return weights(_llama(config), dtype)


def architecture(config: dict[str, Any]) -> str | None:
    """The class that a configuration names."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) else None


def has_sizes(
    config: dict[str, Any], keys: tuple[str, ...], optional: tuple[str, ...] = ()
) -> bool:
    """Whether a configuration has a positive number under each key, or nothing where optional."""
    there = (*keys, *(key for key in optional if config.get(key) is not None))
    return all(type(config.get(key)) is int and config[key] > 0 for key in there)


def linear(name: str, rows: int, columns: int, biased: bool = True) -> Named:
    """The weight of a layer and, if it has one, its bias."""
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def pair(name: str, *shape: int) -> Named:
    """A weight and a bias of its last size: of a norm, or of a layer whose weight is (in, out)."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def weights(shapes: Named, dtype: str) -> tuple[Weight, ...]:
    """The weights of these names and shapes."""
    return tuple(Weight(name, shape, dtype, name.endswith(EMBEDDINGS)) for name, shape in shapes)


def _llama(config: dict[str, Any]) -> Named:
    """Llama (Touvron et al., arXiv:2302.13971) and its kin."""
    vocabulary, width, _, layers, *_ = (config[key] for key in SIZES)
    kind = config["model_type"]
    norms = ["input", "post_attention"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward", "post_feedforward"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield from _attention(config, f"{layer}.self_attn")
        yield from _perceptron(config, f"{layer}.mlp")
        for norm in norms:
            yield f"{layer}.{norm}_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", kind in GEMMAS):
        yield "lm_head.weight", (vocabulary, width)


def _attention(config: dict[str, Any], name: str) -> Named:
    _, width, _, _, heads, groups = (config[key] for key in SIZES)
    kind = config["model_type"]
    head = config.get("head_dim") or (128 if kind == "qwen3" else width // heads)
    biased = kind in BIASED and config.get("attention_bias", False)
    out = linear(f"{name}.o_proj", width, heads * head, biased)
    if kind == "phi3":
        yield from out
        yield f"{name}.qkv_proj.weight", ((heads + 2 * groups) * head, width)
        return
    for which, count in (("q", heads), ("k", groups), ("v", groups)):
        yield from linear(f"{name}.{which}_proj", count * head, width, biased or kind == "qwen2")
    yield from out
    if kind in ("qwen3", "gemma3_text"):
        yield f"{name}.q_norm.weight", (head,)
        yield f"{name}.k_norm.weight", (head,)


def _perceptron(config: dict[str, Any], name: str) -> Named:
    _, width, inner, *_ = (config[key] for key in SIZES)
    biased = config["model_type"] == "llama" and config.get("mlp_bias", False)
    if config["model_type"] == "phi3":
        yield f"{name}.gate_up_proj.weight", (2 * inner, width)
    else:
        yield from linear(f"{name}.gate_proj", inner, width, biased)
        yield from linear(f"{name}.up_proj", inner, width, biased)
    yield from linear(f"{name}.down_proj", width, inner, biased)


def _gpt2(vocabulary: int, positions: int, width: int, layers: int) -> Named:
    """GPT-2 (Radford et al., 2019), its weights (in, out) and its head tied."""
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
