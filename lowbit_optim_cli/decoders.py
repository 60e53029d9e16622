"""Weights of common decoders by their configuration alone.

Importing transformers and torch takes longer than an estimate may, so the shapes of a few decoders
are written down here. The tests of frameworks compare them with what transformers builds; any other
model, or a configuration with something unusual in it, is built by transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .footprint import Weight

Config = dict[str, Any]
Named = Iterator[tuple[str, tuple[int, ...]]]
LLAMAS = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "Phi3ForCausalLM": "phi3",
}  # fmt: skip
EMBEDDINGS = (
    "embed_tokens.weight", "embed_in.weight", "wte.weight", "wpe.weight", "_embeddings.weight",
)  # fmt: skip
GEMMAS = "gemma", "gemma2", "gemma3_text"
BIASED = "llama", "qwen3", *GEMMAS  # which `attention_bias` gives biases
BODY = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES = (*BODY, "num_attention_heads", "num_key_value_heads")
HEADS = (("num_attention_heads", "hidden_size"), ("n_head", "n_embd"), ("n_heads", "dim"))
GPT2 = ("vocab_size", "n_positions", "n_embd", "n_layer")


class Known(NamedTuple):
    """A class of transformers whose shapes are written down.

    Attributes:
        kind: the `model_type` of its configurations.
        shapes: its weights by a configuration.
        sizes: what a configuration must have as positive numbers.
        usual: settings, what they must be, and are where there are none.
        optional: what must be a positive number where it is not None.
    """

    kind: str
    shapes: Callable[[Config], Named]
    sizes: tuple[str, ...]
    usual: Mapping[str, Any] = {}
    optional: tuple[str, ...] = ()


def weights_of(config: Config, dtype: str) -> tuple[Weight, ...] | None:
    """The weights of a configuration's model in the model's order; None if it is not known here."""
    return known_weights(KNOWN, config, dtype)


def known_weights(
    known: Mapping[str, Known], config: Config, dtype: str
) -> tuple[Weight, ...] | None:
    """The weights by the entry of the configuration's class; None where there is none that fits."""
    entry = known.get(architecture(config) or "")
    if entry is None or entry.kind != config.get("model_type") or "quantization_config" in config:
        return None
    if not _has_sizes(config, entry.sizes, (*entry.optional, *(key for key, _ in HEADS))):
        return None
    for heads, width in HEADS:
        if width in entry.sizes and config[width] % (config.get(heads) or 1):
            return None
    if any(config.get(key, usual) != usual for key, usual in entry.usual.items()):
        return None
    shapes = entry.shapes(config)
    return tuple(Weight(name, shape, dtype, name.endswith(EMBEDDINGS)) for name, shape in shapes)


def architecture(config: Config) -> str | None:
    """The class that a configuration names."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) else None


def _has_sizes(config: Config, keys: tuple[str, ...], optional: tuple[str, ...]) -> bool:
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


def _llama(config: Config) -> Named:
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


def _attention(config: Config, name: str) -> Named:
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


def _perceptron(config: Config, name: str) -> Named:
    _, width, inner, *_ = (config[key] for key in SIZES)
    biased = config["model_type"] == "llama" and config.get("mlp_bias", False)
    if config["model_type"] == "phi3":
        yield f"{name}.gate_up_proj.weight", (2 * inner, width)
    else:
        yield from linear(f"{name}.gate_proj", inner, width, biased)
        yield from linear(f"{name}.up_proj", inner, width, biased)
    yield from linear(f"{name}.down_proj", width, inner, biased)


def _gpt2(config: Config) -> Named:
    """GPT-2 (Radford et al., 2019), its weights (in, out) and its head tied."""
    vocabulary, positions, width, layers = (config[key] for key in GPT2)
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


def _gpt_neox(config: Config) -> Named:
    """GPT-NeoX (Black et al., arXiv:2204.06745), Pythia among them."""
    vocabulary, width, inner, layers = (config[key] for key in BODY)
    yield "gpt_neox.embed_in.weight", (vocabulary, width)
    for i in range(layers):
        layer = f"gpt_neox.layers.{i}"
        yield from pair(f"{layer}.input_layernorm", width)
        yield from pair(f"{layer}.post_attention_layernorm", width)
        yield from linear(f"{layer}.attention.query_key_value", 3 * width, width)
        yield from linear(f"{layer}.attention.dense", width, width)
        yield from linear(f"{layer}.mlp.dense_h_to_4h", inner, width)
        yield from linear(f"{layer}.mlp.dense_4h_to_h", width, inner)
    yield from pair("gpt_neox.final_layer_norm", width)
    yield "lm_head.weight", (vocabulary, width)


KNOWN = {
    "GPT2LMHeadModel": Known("gpt2", _gpt2, GPT2, {"n_inner": None, "tie_word_embeddings": True}),
    "GPTNeoXForCausalLM": Known(
        "gpt_neox", _gpt_neox, BODY, {"attention_bias": True, "tie_word_embeddings": False}
    ),
    **{
        name: Known(kind, _llama, (*SIZES, "head_dim") if kind in GEMMAS else SIZES,
                    optional=("head_dim",))
        for name, kind in LLAMAS.items()
    },
}  # fmt: skip
