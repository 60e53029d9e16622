"""`lowbit-optim estimate` of configurations of transformers, built on the meta device."""

import json
import sys

import pytest
import torch
import transformers

from footprint_models import MODELS
from lowbit_optim_cli import encoders
from lowbit_optim_cli.known import ALIASES
from lowbit_optim_cli.models import KNOWN, read_model
from test_cli_estimate import estimated, refused

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
CONFIGS = {
    "GPT-2 small": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
    "Llama 1B": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Llama 8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    },
}  # fmt: skip

ENCODER = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2,
           "num_attention_heads": 4}  # fmt: skip
BERT = {
    "model_type": "bert",
    "vocab_size": 500,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224,
       "patch_size": 16}  # fmt: skip
DISTILBERT = {"model_type": "distilbert", "dim": 96, "hidden_dim": 200, "n_layers": 2, "n_heads": 4,
              "vocab_size": 500, "max_position_embeddings": 64}  # fmt: skip

SMALL = {**ENCODER, "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 24, "pad_token_id": 0,
         "eos_token_id": 1, "bos_token_id": 1}  # fmt: skip
EXPERTS = {"num_local_experts": 3, "num_experts": 3, "moe_intermediate_size": 72,
           "shared_expert_intermediate_size": 56}  # fmt: skip
BIASED = {**EXPERTS, "attention_bias": True, "mlp_bias": True, "head_dim": 32,
          "tie_word_embeddings": True}  # fmt: skip
OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 500,
       "hidden_size": 96, "ffn_dim": 200, "num_hidden_layers": 2, "num_attention_heads": 4,
       "max_position_embeddings": 64}  # fmt: skip
T5 = {"vocab_size": 500, "d_model": 96, "d_kv": 16, "d_ff": 200, "num_layers": 2, "num_heads": 4,
      "relative_attention_num_buckets": 32}  # fmt: skip
BART = {"vocab_size": 500, "d_model": 96, "max_position_embeddings": 64, "encoder_layers": 2,
        "encoder_ffn_dim": 200, "encoder_attention_heads": 4, "decoder_layers": 3,
        "decoder_ffn_dim": 160, "decoder_attention_heads": 2, "num_mel_bins": 80,
        "max_source_positions": 150, "max_target_positions": 44, "pad_token_id": 1}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


VARIANTS = [
    *CONFIGS.values(),
    {**CONFIGS["GPT-2 small"], "n_inner": 100},
    {**CONFIGS["Llama 1B"], "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    {**CONFIGS["Llama 1B"], "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    {**CONFIGS["Llama 8B"], "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    {**CONFIGS["Llama 1B"], "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    {**CONFIGS["Llama 8B"], "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
     "attention_bias": True, "head_dim": 64},
    *({**CONFIGS["Llama 1B"], "model_type": kind, "architectures": [f"{name}ForCausalLM"],
       "head_dim": 256}
      for name, kind in (("Gemma", "gemma"), ("Gemma2", "gemma2"), ("Gemma3", "gemma3_text"))),
    {**CONFIGS["Llama 8B"], "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"],
     "head_dim": 64, "attention_bias": True},
    {**CONFIGS["Llama 8B"], "model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
     "pad_token_id": None},
    {**ENCODER, **BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 5},
    *(
        {**sizes, "architectures": [name + task]}
        for name, sizes in (
            ("Bert", {**ENCODER, **BERT}), ("DistilBert", DISTILBERT),
            ("Roberta", {**ENCODER, **BERT, "model_type": "roberta"}),
            ("XLMRoberta", {**ENCODER, **BERT, "model_type": "xlm-roberta"}),
            ("ModernBert", {**ENCODER, "vocab_size": 500, "model_type": "modernbert",
                            "pad_token_id": 0}),
        )
        for task in encoders.TASKS
    ),
    {**ENCODER, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
     "vocab_size": 500},
    *({**SMALL, **EXPERTS, "model_type": kind, "architectures": [f"{name}ForCausalLM"]}
      for kind, name in (
          ("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"),
          ("gpt_oss", "GptOss"), ("olmo2", "Olmo2"), ("olmo3", "Olmo3"), ("smollm3", "SmolLM3"),
          ("granite", "Granite"), ("cohere", "Cohere"), ("cohere2", "Cohere2"), ("phi", "Phi"))),
    *({**SMALL, **BIASED, "model_type": kind, "architectures": [f"{name}ForCausalLM"]}
      for kind, name in (
          ("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe"), ("gpt_oss", "GptOss"),
          ("olmo2", "Olmo2"), ("smollm3", "SmolLM3"), ("granite", "Granite"), ("cohere", "Cohere"),
          ("cohere2", "Cohere2"))),
    OPT,
    {**OPT, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
    *({**T5, "model_type": kind, "architectures": [f"{kind.upper()}ForConditionalGeneration"]}
      for kind in ("t5", "mt5", "umt5")),
    {**T5, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
     "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
    {**T5, "model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"],
     "feed_forward_proj": "gated-gelu", "is_gated_act": False},
    *({**BART, "model_type": kind, "architectures": [f"{name}ForConditionalGeneration"]}
      for kind, name in (("bart", "Bart"), ("mbart", "MBart"), ("whisper", "Whisper"))),
    *({**SMALL, "model_type": kind, "architectures": [name]}
      for kind, name in (
          ("llama", "LlamaModel"), ("llama", "LlamaForSequenceClassification"),
          ("qwen3", "Qwen3Model"), ("gemma3_text", "Gemma3TextModel"), ("cohere", "CohereModel"))),
    {**SMALL, **EXPERTS, "model_type": "gpt_oss", "num_labels": 1,
     "architectures": ["GptOssForSequenceClassification"]},
    {**ENCODER, **VIT, "architectures": ["ViTModel"], "pooler_output_size": 40},
    {**ENCODER, **VIT},
    {**ENCODER, **VIT, "qkv_bias": False, "num_channels": 1, "patch_size": 32,
     "id2label": {str(i): f"kind {i}" for i in range(10)}},
]  # fmt: skip
SIZES = {"vocab_size": 1000, "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 128}


@pytest.mark.parametrize("config", VARIANTS)
def test_shapes_that_are_written_down_are_those_of_transformers(folder, config):
    if config["model_type"] == "gpt2":
        config = {**config, **SIZES}
    path = str(folder(config))
    written, built = read_model(path), read_model(path, build=True)
    assert written.weights == built.weights
    assert (written.build is None) == ("n_inner" not in config)


def test_classes_that_are_written_down_are_those_of_transformers():
    assert [name for name in KNOWN if not hasattr(transformers, name)] == []


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIGS["GPT-2 small"], "add_cross_attention": True},
        {**ENCODER, **BERT, "architectures": ["BertForMaskedLM"], "is_decoder": True},
        {**DISTILBERT, "architectures": ["DistilBertForMaskedLM"], "sinusoidal_pos_embds": True},
        {**ENCODER, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
         "vocab_size": 500, "attention_bias": False, "tie_word_embeddings": True},
        {**SMALL, **EXPERTS, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
         "mlp_only_layers": [0]},
        {**SMALL, "model_type": "cohere", "architectures": ["CohereForCausalLM"],
         "use_qk_norm": True},
        {**ENCODER, **VIT, "id2label": {}},
        {**ENCODER, **VIT, "head_dim": 40},
        {**ENCODER, **VIT, "num_labels": 0},
        {**{key: x for key, x in ENCODER.items() if key != "num_attention_heads"}, **VIT},
        {**BART, "model_type": "mbart", "architectures": ["MBartForConditionalGeneration"],
         "num_hidden_layers": 4},
    ],
)  # fmt: skip
def test_unusual_configurations_are_built(folder, config):
    assert read_model(str(folder(config))).build is not None


@pytest.mark.parametrize("named", [[], None, ["NoSuchForCausalLM"]])
def test_a_configuration_without_a_class_is_said_to_be_taken_without_a_head(folder, named):
    config = {**SMALL, "model_type": "llama", "architectures": named}
    model = read_model(str(folder(config)))
    headless = read_model(str(folder({**config, "architectures": ["LlamaModel"]})), build=True)
    assert [w.shape for w in model.weights] == [w.shape for w in headless.weights]
    said = "It names no class that transformers has: the model without a head is taken"
    assert model.notes[0] == said
    assert said not in headless.notes


def test_other_names_of_sizes_are_those_of_transformers():
    for kind, entry in {entry.kind: entry for entry in KNOWN.values()}.items():
        aliases = transformers.CONFIG_MAPPING[kind].attribute_map
        for alias, own in aliases.items():
            assert own not in entry.sizes or ALIASES[own] == alias


def test_a_size_s_other_name_is_the_one_that_counts(folder):
    config = {**BART, "model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    plain = read_model(str(folder({**config, "num_hidden_layers": 2})))
    more = read_model(str(folder({**config, "num_hidden_layers": 4})))
    assert plain.build is None
    names = {
        weight.name.split(".")[3] for weight in more.weights if ".encoder.layers" in weight.name
    }
    assert names == {"0", "1", "2", "3"}


def test_weights_are_tied_where_transformers_leaves_it_undone(folder, monkeypatch):
    path = str(folder({**CONFIGS["GPT-2 small"], **SIZES}))
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
    model = read_model(path, build=True)
    assert model.weights == read_model(path).weights
    assert "1 weight shared by two modules, counted once" in model.notes


def test_a_quantization_is_left_out(folder):
    config = {**SMALL, **EXPERTS, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    whole = read_model(str(folder(config)))
    path = str(folder({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    for model in (read_model(path), read_model(path, build=True)):
        assert model.weights == whole.weights
        assert "quantization is left out" in model.notes[0]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("said", ["float8_e4m3fn", "int8", "torch.bfloat16", "no_such_dtype", None])
def test_a_dtype_that_is_not_trained_is_left_out_of_what_transformers_builds(folder, key, said):
    config = {**ENCODER, **BERT, key: said}
    path = str(folder(config))
    model = read_model(path)
    assert model.build is not None
    assert {w.dtype for w in model.weights} == {"bf16" if said == "torch.bfloat16" else "fp32"}
    assert estimated(path, "--measure", "1x8")["activations"][1]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_has_the_weights_of_its_model(folder, name):
    model = read_model(str(folder(CONFIGS[name])))
    assert sorted(w.shape for w in model.weights) == sorted(map(tuple, MODELS[name]))
    assert {w.dtype for w in model.weights} == {"bf16" if name == "Llama 8B" else "fp32"}
    embeddings = [w.shape for w in model.weights if w.embedding]
    assert embeddings == [tuple(s) for s in MODELS[name][: len(embeddings)]] != []


def test_a_small_model_takes_the_bytes_of_the_estimate(folder):
    from lowbit_optim import AdamW8bit

    config = {**CONFIGS["GPT-2 small"], "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500}
    row = estimated(folder(config), "-o", "AdamW8bit")["rows"][0]
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict(config))
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    model(torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    held = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    assert row["state"] == held
    assert row["weights"] == sum(p.nbytes for p in model.parameters())
    assert row["gradients"] == sum(p.grad.nbytes for p in model.parameters())


def test_a_model_without_a_class_has_no_head(folder):
    config = {"model_type": "bert", "num_hidden_layers": 1, "architectures": ["No", 3]}
    found = estimated(folder(config), "--embeddings-32")
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig.from_dict(config))
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ("Mamba2Config", None),  # with an infinity, which no JSON has
        ("Gemma3nTextConfig", None),  # with a vocabulary for each layer
        ("Qwen3_5Config", "text_config"),  # of text and images
    ],
)
def test_configurations_as_transformers_writes_them(tmp_path, config, part):
    """A class for text alone is built of the part for text, where a configuration has more."""
    made = getattr(transformers, config)(**{part: {"num_hidden_layers": 2}} if part else {})
    name = transformers.AutoModelForCausalLM._model_mapping[type(made)]
    made.architectures = [name.__name__]
    made.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = name(getattr(made, part) if part else made)
        model.tie_weights()
    found = estimated(tmp_path)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


def test_a_transformer_has_a_formula_and_a_measure(folder):
    config = {**CONFIGS["GPT-2 small"], "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500}
    formula, measured = estimated(folder(config), "--measure", "2x16")["activations"]
    assert "for 1 x 1024 tokens" in formula
    gigabytes = float(measured.partition("at their peak: ")[2].partition(" GB")[0])
    assert gigabytes * 1e9 + 1e6 >= 2 * 16 * 500 * 4


def multiplies_experts_in_fp32():
    """Whether torch does without their numbers, as from 2.15 on."""
    x, weights, ends = (torch.empty(shape, device="meta") for shape in ((4, 16), (2, 16, 16), (2,)))
    try:
        torch._grouped_mm(x, weights, offs=ends.int())
    except RuntimeError:
        return False
    return True


def test_experts_are_measured_in_bf16(folder):
    config = {**SMALL, **EXPERTS, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    in_fp32 = (folder(config), "--dtype", "fp32", "--measure", "2x16")
    if multiplies_experts_in_fp32():
        assert any("at their peak: " in line for line in estimated(*in_fp32)["activations"])
    else:
        assert "fake experts in bf16 alone: --dtype bf16" in refused("estimate", *in_fp32)
    measured = estimated(folder(config), "--dtype", "bf16", "--measure", "2x16")["activations"]
    assert any("at their peak: " in line for line in measured)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "no_such_model"}, "the model_type 'no_such_model', which transformers"),
        ({**CONFIGS["GPT-2 small"], "n_head": 7}, "building"),
        ({**CONFIGS["GPT-2 small"], "n_embd": "wide"}, "transformers cannot read"),
        ({**CONFIGS["GPT-2 small"], "activation_function": "no"}, "building"),
        ({**CONFIGS["Llama 1B"], "head_dim": "wide"}, "transformers cannot read"),
        ({**CONFIGS["Llama 1B"], "head_dim": -4}, "building"),
        ({**ENCODER, **BERT, "architectures": ["BertForMaskedLM"], "hidden_size": 98}, "building"),
        ({**DISTILBERT, "architectures": ["DistilBertForMaskedLM"], "n_heads": 7}, "building"),
        ({**ENCODER, **VIT, "num_channels": "three"}, "transformers cannot read"),
        ({**ENCODER, **VIT, "num_labels": "two"}, "transformers cannot read"),
        (
            {
                **ENCODER,
                **BERT,
                "architectures": ["BertForSequenceClassification"],
                "id2label": ["no"],
            },
            "transformers cannot read",
        ),
    ],
)
def test_configurations_that_no_model_has_are_refused(folder, config, said):
    assert said in refused("estimate", folder(config))


def test_a_class_that_transformers_cannot_import_is_said(folder, monkeypatch):
    lazy = sys.modules["transformers"]  # which another module takes the place of at times
    monkeypatch.setitem(lazy._class_to_module, "LostForCausalLM", "lost")
    config = {"model_type": "gpt_neox", "architectures": ["LostForCausalLM"]}
    said = refused("estimate", folder(config))
    assert "Could not import module 'LostForCausalLM'" in said
