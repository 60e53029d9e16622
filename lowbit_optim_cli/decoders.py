"""Weights of common decoders by their configuration alone: as `known` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .known import Config, Known, Named, architecture, labels, linear, pair

BODY = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES = (*BODY, "num_attention_heads", "num_key_value_heads")
GPT2 = ("vocab_size", "n_positions", "n_embd", "n_layer")
OPT = ("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "max_position_embeddings",
       "num_attention_heads")  # fmt: skip
EXPERTS = {
    "mixtral": ("num_local_experts",), "gpt_oss": ("num_local_experts",),
    "qwen2_moe": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}  # fmt: skip
BEFORE, AFTER = ("input", "post_attention"), ("post_attention", "post_feedforward")
AROUND = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class Kin(NamedTuple):
    """Options of a decoder: its differences from Llama's first.

    Attributes:
        name: its class, without `ForCausalLM`.
        norms: of a layer.
        attention_bias: of the attention's layers, where the configuration has none; None: no bias.
        qkv_bias: of the first three of them; None: as of the fourth.
        mlp_bias: whether the perceptron's layers may have a bias.
        qk_norm: whether queries and keys have a norm: over a "head" or over the "row" of all.
        head: the width of a head that has none in the configuration; None: the hidden one's share.
        tied: whether the head of the model is the embedding, where the configuration is silent.
        base: its class without a head, where that has another name.
        classifies: whether there is one with a head for sequences.
    """

    name: str
    norms: tuple[str, ...] = BEFORE
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: str = ""
    head: int | None = None
    tied: bool = False
    base: str = ""
    classifies: bool = True

    def classes(self) -> Iterator[str]:
        """The classes of transformers that are known of it."""
        base = self.base or self.name
        yield f"{self.name}ForCausalLM"
        yield f"{base}Model"
        if self.classifies:
            yield f"{base}ForSequenceClassification"


LLAMAS = {
    "llama": Kin("Llama", attention_bias=False, mlp_bias=True),
    "mistral": Kin("Mistral"),
    "mixtral": Kin("Mixtral"),
    "qwen2": Kin("Qwen2", qkv_bias=True),
    "qwen2_moe": Kin("Qwen2Moe", qkv_bias=True),
    "qwen3": Kin("Qwen3", attention_bias=False, qk_norm="head", head=128),
    "qwen3_moe": Kin("Qwen3Moe", attention_bias=False, qk_norm="head"),
    "gemma": Kin("Gemma", attention_bias=False, head=256, tied=True),
    "gemma2": Kin("Gemma2", AROUND, attention_bias=False, head=256, tied=True),
    "gemma3_text": Kin("Gemma3", AROUND, attention_bias=False, qk_norm="head", head=256, tied=True,
                       base="Gemma3Text"),
    "phi3": Kin("Phi3"),
    "olmo2": Kin("Olmo2", AFTER, attention_bias=False, qk_norm="row"),
    "olmo3": Kin("Olmo3", AFTER, attention_bias=False, qk_norm="row"),
    "smollm3": Kin("SmolLM3", attention_bias=False, mlp_bias=True, tied=True),
    "granite": Kin("Granite", attention_bias=False, mlp_bias=True, classifies=False),
    "cohere": Kin("Cohere", ("input",), attention_bias=False, tied=True, classifies=False),
    "cohere2": Kin("Cohere2", ("input",), attention_bias=False, tied=True, classifies=False),
    "gpt_oss": Kin("GptOss", attention_bias=True, head=64),
}  # fmt: skip
# Settings that change the weights in a way that is not written down here.
UNUSUAL: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "cohere": {"use_qk_norm": False},
}


def _llama(config: Config) -> Named:
    """Llama (Touvron et al., arXiv:2302.13971) and its kin, with a head or none."""
    kind, name = config["model_type"], str(architecture(config))
    kin, model = LLAMAS[kind], "" if name.endswith("Model") else "model."
    vocabulary, width, inner, layers, *_ = (config[key] for key in SIZES)
    yield f"{model}embed_tokens.weight", (vocabulary, width)
    for i in range(layers):
        layer = f"{model}layers.{i}"
        yield from _attention(config, f"{layer}.self_attn", kin)
        if kind in EXPERTS:
            yield from _experts(config, f"{layer}.mlp")
        elif kind == "phi3":
            yield f"{layer}.mlp.gate_up_proj.weight", (2 * inner, width)
            yield f"{layer}.mlp.down_proj.weight", (width, inner)
        else:
            biased = kin.mlp_bias and config.get("mlp_bias", False)
            yield from _perceptron(f"{layer}.mlp", width, inner, biased)
        for norm in kin.norms:
            yield f"{layer}.{norm}_layernorm.weight", (width,)
    yield f"{model}norm.weight", (width,)
    if name.endswith("ForSequenceClassification"):
        yield "score.weight", (labels(config), width)
    elif name.endswith("ForCausalLM") and not config.get("tie_word_embeddings", kin.tied):
        yield "lm_head.weight", (vocabulary, width)


def _attention(config: Config, name: str, kin: Kin) -> Named:
    _, width, _, _, heads, groups = (config[key] for key in SIZES)
    kind = config["model_type"]
    head = config.get("head_dim") or kin.head or width // heads
    biased = kin.attention_bias is not None and config.get("attention_bias", kin.attention_bias)
    if kind == "phi3":
        yield f"{name}.o_proj.weight", (width, heads * head)
        yield f"{name}.qkv_proj.weight", ((heads + 2 * groups) * head, width)
        return
    if kind == "gpt_oss":
        yield f"{name}.sinks", (heads,)
    for which, count in (("q", heads), ("k", groups), ("v", groups)):
        yield from linear(f"{name}.{which}_proj", count * head, width, kin.qkv_bias or biased)
    yield from linear(f"{name}.o_proj", width, heads * head, biased)
    if kin.qk_norm:
        whole = kin.qk_norm == "row"
        yield f"{name}.q_norm.weight", (heads * head if whole else head,)
        yield f"{name}.k_norm.weight", (groups * head if whole else head,)


def _perceptron(name: str, width: int, inner: int, biased: bool = False) -> Named:
    yield from linear(f"{name}.gate_proj", inner, width, biased)
    yield from linear(f"{name}.up_proj", inner, width, biased)
    yield from linear(f"{name}.down_proj", width, inner, biased)


def _experts(config: Config, name: str) -> Named:
    """A perceptron for each expert, their weights in one tensor, and what chooses among them."""
    kind, width, own = config["model_type"], config["hidden_size"], config["intermediate_size"]
    count, inner, shared, *_ = *(config[key] for key in EXPERTS[kind]), own, own
    if kind == "gpt_oss":
        yield from linear(f"{name}.router", count, width)
        yield f"{name}.experts.gate_up_proj", (count, width, 2 * inner)
        yield f"{name}.experts.gate_up_proj_bias", (count, 2 * inner)
        yield f"{name}.experts.down_proj", (count, inner, width)
        yield f"{name}.experts.down_proj_bias", (count, width)
        return
    gate = f"{name}.gate.weight", (count, width)
    if kind != "qwen3_moe":
        yield gate
    yield f"{name}.experts.gate_up_proj", (count, 2 * inner, width)
    yield f"{name}.experts.down_proj", (count, width, inner)
    if kind == "qwen3_moe":
        yield gate
    if kind == "qwen2_moe":
        yield from _perceptron(f"{name}.shared_expert", width, shared)
        yield f"{name}.shared_expert_gate.weight", (1, width)


def _phi(config: Config) -> Named:
    """Phi (Gunasekar et al., arXiv:2306.11644), its attention beside its perceptron."""
    vocabulary, width, inner, layers, heads, groups = (config[key] for key in SIZES)
    head = config.get("head_dim") or width // heads
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for which, count in (("q", heads), ("k", groups), ("v", groups)):
            yield from linear(f"{layer}.self_attn.{which}_proj", count * head, width)
        yield from linear(f"{layer}.self_attn.dense", width, heads * head)
        yield from linear(f"{layer}.mlp.fc1", inner, width)
        yield from linear(f"{layer}.mlp.fc2", width, inner)
        yield from pair(f"{layer}.input_layernorm", width)
    yield from pair("model.final_layernorm", width)
    yield from linear("lm_head", vocabulary, width)


def _opt(config: Config) -> Named:
    """OPT (Zhang et al., arXiv:2205.01068), its head tied."""
    vocabulary, width, inner, layers, positions, _ = (config[key] for key in OPT)
    own = config.get("word_embed_proj_dim") or width
    yield "model.decoder.embed_tokens.weight", (vocabulary, own)
    yield "model.decoder.embed_positions.weight", (positions + 2, width)
    if own != width:
        yield "model.decoder.project_out.weight", (own, width)
        yield "model.decoder.project_in.weight", (width, own)
    if config.get("do_layer_norm_before", True):
        yield from pair("model.decoder.final_layer_norm", width)
    for i in range(layers):
        layer = f"model.decoder.layers.{i}"
        for which in ("k", "v", "q", "out"):
            yield from linear(f"{layer}.self_attn.{which}_proj", width, width)
        yield from pair(f"{layer}.self_attn_layer_norm", width)
        yield from linear(f"{layer}.fc1", inner, width)
        yield from linear(f"{layer}.fc2", width, inner)
        yield from pair(f"{layer}.final_layer_norm", width)


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
    "GPT2LMHeadModel": Known(
        "gpt2", _gpt2, GPT2,
        {"n_inner": None, "tie_word_embeddings": True, "add_cross_attention": False},
    ),
    "GPTNeoXForCausalLM": Known(
        "gpt_neox", _gpt_neox, BODY, {"attention_bias": True, "tie_word_embeddings": False}
    ),
    "PhiForCausalLM": Known(
        "phi", _phi, SIZES, {"qk_layernorm": False, "tie_word_embeddings": False}, ("head_dim",)
    ),
    "OPTForCausalLM": Known(
        "opt", _opt, OPT,
        {"enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
         "_remove_final_layer_norm": False},
        ("word_embed_proj_dim",),
    ),
    **{
        name: Known(
            kind, _llama, (*SIZES, *EXPERTS.get(kind, ())), UNUSUAL.get(kind, {}),
            ("head_dim", "num_labels"),
        )
        for kind, kin in LLAMAS.items()
        for name in kin.classes()
    },
}  # fmt: skip
