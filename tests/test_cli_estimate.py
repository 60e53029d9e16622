"""`lowbit-optim estimate` as a user calls it: models, rows, sums, and what it does not take."""

import json
import os
import struct
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer import testing

from footprint_models import MODELS
from lowbit_optim_cli import estimate, headers, models, optimizers
from lowbit_optim_cli.app import app
from lowbit_optim_cli.errors import Refused
from protocol import ENV


def run(*arguments):
    return testing.CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(a) for a in arguments])


def refused(*arguments):
    """What is said on stderr: one sentence, with exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("lowbit-optim: ")
    return line


def estimated(*arguments):
    result = run("estimate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def safetensors(path, tensors, cut=0, **entry):
    """A file with zeros for tensors, given as name: (dtype, shape)."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        size = headers.Entry(name, dtype, tuple(shape)).bytes
        place = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        header[name] = {**place, **entry}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + bytes(end))[: -cut or None])
    return path


def test_every_row_has_the_sums_of_its_columns():
    found = estimated("4096x4096,4096", "--dtype", "bf16", "--optimizer", "all")
    assert len(found["rows"]) == len(optimizers.layouts(bf16=True))
    for row in found["rows"]:
        parts = ("weights", "gradients", "state", "residual")
        assert row["sum"] == sum(row[part] for part in parts)
        assert row["per_rank"]["sum"] == row["sum"]
        if row["gradients_released"] is not None:
            less = row["gradients"] - row["gradients_released"]
            assert row["sum_released"] == row["sum"] - less
    assert found["parameters"] == 4096 * 4097
    assert found["largest_gradient"]["shape"] == [4096, 4096]


def test_a_table_names_the_rows_and_what_is_left_out():
    text = run("estimate", "4096x4096,4096", "--dtype", "bf16").stdout
    for name in ("AdamW8bit", "AdamW4bit", "FlashAdamW*", "torchao", "bitsandbytes", "ratio8"):
        assert name in text
    assert "by its documented layout" in text
    assert "Activations are not in the table" in text
    assert "Largest gradient: tensor 0 [4096, 4096], 33.6 MB" in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_table_has_every_digit_at_any_width(width):
    from rich.console import Console

    model = models.read_model("40960x40960,4096", "bf16")
    rows = estimate.rows_of(model, estimate.choose(["AdamW"], True), 2, False)
    console = Console(width=width, record=True)
    estimate.show(console, model, rows, 1, [])
    text = console.export_text()
    assert "…" not in text
    for row in rows:
        assert f"{row.whole.state / 1e9:.3f}" in text


def test_shards_are_those_of_the_fullest_rank():
    found = estimated("10x1000,4096", "--shards", "4", "--optimizer", "AdamW8bit")
    for row in found["rows"]:
        assert row["per_rank"]["weights"] == 4 * (3 * 1000 + 1024)
    for row in estimated("10x1000", "--shards", "4", "--optimizer", "Cain")["rows"]:
        assert row["per_rank"]["weights"] == 4 * 3 * 1000
        assert row["per_rank"]["state"] == row["state"]
    said = "Every rank keeps the whole state of Cain and LearnedGradient."
    several = ("-o", "Cain", "-o", "LearnedGradient", "-o", "AdamW")
    assert said in run("estimate", "10x1000", "--shards", "4", *several).stdout
    assert said not in run("estimate", "10x1000", *several).stdout


def test_what_fits_a_gpu_is_printed_cheapest_first():
    found = estimated("1000x1000000", "--gpu", "12GB")["rows"]
    least = [min(x for x in (r["sum"], r["sum_released"]) if x is not None) for r in found]
    assert least == sorted(least)
    assert least[-1] <= 12e9
    assert 0 < len(found) <= estimate.FIRST
    said = refused("estimate", "1000x1000000", "--gpu", "1GB")
    assert "nothing fits 1GB" in said
    assert "FlashAdamW with 172 bytes;" in refused("estimate", "4x4", "--gpu", "0.000001MB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24e9), ("24", 24e9), ("79.6 GiB", 79.6 * 2**30), ("500mb", 5e8)],
)
def test_sizes(text, size):
    assert estimate.size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "24 XB", "0GB", "1e3GB", "٣GB"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(Refused, match="--gpu must be a size"):
        estimate.size_of(text)


def test_a_misspelt_optimizer_has_its_nearest_names():
    assert "did you mean AdamW8bit" in refused("estimate", "4x4", "-o", "AdmW8bit")
    assert "there are all, ADOPT" in refused("estimate", "4x4", "-o", "qqqqqq")


def test_optimizers_are_chosen_by_family_class_and_library():
    def names(*chosen):
        rows = estimated("4x4", *(x for one in chosen for x in ("-o", one)))["rows"]
        return {(row["library"], row["optimizer"]) for row in rows}

    assert ("torch", "SGD") in names("sgd")
    assert names("FlashLion") == {("flashoptim", "FlashLion")}
    assert names("torchao.AdamW8bit") == {("torchao", "AdamW8bit")}
    assert len(names("AdamW", "Lion")) > len(names("AdamW"))


def test_all_dtypes_that_safetensors_writes_of_torch_are_known(tmp_path):
    for dtype, size in (("F8_E4M3FNUZ", 1), ("F8_E5M2FNUZ", 1), ("C64", 8)):
        place = {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}
        text = json.dumps({"w": place}).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * size))
        assert f" {2 * size} " in run("inspect", path).stdout


def test_a_safetensors_file_is_known_by_its_header(tmp_path):
    path = safetensors(
        tmp_path / "model.safetensors",
        {"wte.weight": ("BF16", [100, 64]), "w": ("BF16", [64, 64]), "ids": ("I64", [5]),
         "bn.running_mean": ("F32", [64]), "norm": ("F32", [64]),
         "final_logits_bias": ("F32", [1, 100]), "gate.e_score_correction_bias": ("F32", [8])},
    )  # fmt: skip
    found = estimated(path)
    assert found["parameters"] == 100 * 64 + 64 * 64 + 64
    assert found["notes"] == ["4 tensors left out as buffers, as ids"]
    assert found["rows"][0]["weights"] == 2 * (100 * 64 + 64 * 64) + 4 * 64
    as_fp32 = estimated(path, "--dtype", "fp32", "--optimizer", "AdamW8bit")["rows"][0]
    in_32 = estimated(path, "--dtype", "fp32", "--optimizer", "AdamW8bit", "--embeddings-32")
    more = in_32["rows"][0]["state"] - as_fp32["state"]
    assert more == 100 * 64 * 8 - 100 * (64 * 2 + 8)


def test_a_folder_of_diffusers_is_known_by_its_weights(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"_class_name": "UNet2DModel", "_diffusers_version": "0.35.1"}')
    for name in (tmp_path, config):
        assert "is of diffusers; give the safetensors file" in refused("estimate", name)
    safetensors(tmp_path / "diffusion_pytorch_model.safetensors", {"w": ("F16", [64, 64])})
    assert estimated(tmp_path)["parameters"] == 64 * 64


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_of_gpt_2_s_attention_are_buffers(tmp_path, prefix):
    """In floats where code as nanoGPT's keeps them; what attention adds has other names."""
    tensors = {"attn.bias": ("F32", [1, 1, 16, 16]), "attn.c_attn.bias": ("F32", [3])}
    named = {f"{prefix}h.0.{name}": tensor for name, tensor in tensors.items()}
    assert estimated(safetensors(tmp_path / "model.safetensors", named))["parameters"] == 3


def test_embeddings_of_a_file_are_known_by_their_names(tmp_path):
    names = ("wte", "gpt_neox.embed_in", "decoder.embed_positions", "relative_attention_bias")
    names = (*names, "rwkv.embeddings", "embeddings.position_embedding", "tokens_embed")
    others = ("mlp.embed_out", "embeddings.patch_embedding")
    tensors = {f"{name}.weight": ("F32", [4, 4]) for name in (*names, *others)}
    model = models.read_model(str(safetensors(tmp_path / "model.safetensors", tensors)))
    assert [w.name for w in model.weights if w.embedding] == [f"{name}.weight" for name in names]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("q_proj.weight", "U8"), ("q_proj.qweight", "I32"), ("q_proj.weight_packed", "I32"),
        ("experts.gate_up_proj_blocks", "U8"), ("q_proj.W_q", "U8"),
    ],
)  # fmt: skip
def test_a_file_of_quantized_weights_is_not_reckoned_without_them(tmp_path, name, dtype):
    tensors = {"norm.weight": ("BF16", [64]), name: (dtype, [64, 32]), "steps": ("I64", [])}
    path = safetensors(tmp_path / "model.safetensors", tensors)
    for dtypes in ((), ("--dtype", "bf16")):
        said = refused("estimate", path, *dtypes)
        assert f"has quantized weights, as {name!r} in {dtype}" in said
        assert "give its config.json" in said


def test_scales_of_fp8_are_no_weights(tmp_path):
    tensors = {"w.weight": ("F8_E4M3", [256, 256]), "w.weight_scale_inv": ("F32", [2, 2])}
    path = safetensors(tmp_path / "model.safetensors", tensors)
    found = estimated(path, "--dtype", "bf16")
    assert found["parameters"] == 256 * 256
    assert found["notes"] == ["1 tensor left out as buffers, as w.weight_scale_inv"]


def test_an_index_is_known_by_the_headers_of_its_files(tmp_path):
    safetensors(tmp_path / "a.safetensors", {"a": ("F32", [64, 64])})
    safetensors(tmp_path / "b.safetensors", {"b": ("F32", [32, 64])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert estimated(index)["parameters"] == estimated(tmp_path)["parameters"] == 96 * 64
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert "names the tensor 'a', which its files do not have" in refused("estimate", index)
    index.write_text(json.dumps({"weight_map": {"a": "c.safetensors"}}))
    assert "names the file 'c.safetensors', which is missing" in refused("estimate", index)
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    assert "not in its own folder" in refused("estimate", index)
    index.write_text(json.dumps({"weight_map": {"a": ""}}))
    assert "names the file '', which is not in its own folder" in refused("estimate", index)
    index.write_text("{}")
    assert "has no 'weight_map'" in refused("estimate", index)


def test_headers_that_lie_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for data, said in (
        (b"", "no whole safetensors file"),
        (b"\0\0\0", "no whole safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", "would have 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 2) + b"{", "no whole safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "must be a JSON object"),
        (struct.pack("<Q", 10000) + b"[" * 10000, "is not JSON"),
        (struct.pack("<Q", 5) + b'"\xff\xfe"', "no whole safetensors file"),
        (struct.pack("<Q", 4) + b'"\xff\xfe"', "is not JSON"),
    ):
        path.write_bytes(data)
        assert said in refused("estimate", path)
    tensor = {"a": ("F32", [4, 4])}
    for entry, said in (
        ({"dtype": "F4"}, "the dtype 'F4'"),
        ({"dtype": ["F32"]}, "the dtype"),
        ({"shape": [-1]}, "which is no list of sizes"),
        ({"shape": [True]}, "which is no list of sizes"),
        ({"shape": [2**62, 2**62]}, "in the file are needed"),
        ({"shape": [2**62] * 64}, "in the file are needed"),
        ({"shape": [2**62] * 300}, "which is no list of sizes, 64 at most"),
        ({"shape": [4, 5]}, "where 80 bytes of the 64"),
        ({"data_offsets": [0, 2**60]}, "the place"),
        ({"data_offsets": [64, 0]}, "the place"),
        ({"data_offsets": None}, "the place None"),
    ):
        assert said in refused("estimate", safetensors(path, tensor, **entry))
    twice = {"a": ("F32", [4, 4]), "b": ("F32", [4, 4])}
    path = safetensors(path, twice, cut=64, data_offsets=[0, 64])
    assert "has tensors that overlap" in refused("estimate", path)
    assert "where 64 bytes of the 63" in refused("estimate", safetensors(path, tensor, cut=1))
    assert "has no parameters to train" in refused("estimate", safetensors(path, {}))
    assert "in F8_E4M3" in refused("estimate", safetensors(path, {"a": ("F8_E4M3", [4])}))
    assert estimated(path, "--dtype", "bf16")["parameters"] == 4
    assert "in C64, which is" in refused("estimate", safetensors(path, {"a": ("C64", [4])}))


def test_a_huge_header_takes_no_memory(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # without blocks on disk
    done = subprocess.run(
        [sys.executable, "-m", "lowbit_optim_cli", "estimate", path], env=ENV,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "a header of 8,589,934,592 bytes; at most" in done.stderr


@pytest.mark.parametrize(
    "text",
    ["4x", "x4", "4,,4", "4x4x", "-4x4", "4 x 4", "４x4", "a" * 5000, "", "4x4\n", "9" * 5000],
)
def test_shapes_that_do_not_parse_are_refused(text):
    assert "is no model" in refused("estimate", "--", text)


def test_models_without_a_use_are_refused(tmp_path):
    assert "has no parameters to train" in refused("estimate", "0x4")
    assert "at most 2^50" in refused("estimate", "9999999999x9999999999")
    assert "at most 2^50" in refused("estimate", "x".join(["9" * 18] * 400))
    assert "has no diffusion_pytorch_model.safetensors" in refused("estimate", tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    assert "is no model; MODEL is" in refused("estimate", tmp_path / "model.bin")
    assert "no embedding is known" in refused("estimate", "4x4", "--embeddings-32")
    assert "--shards" in refused("estimate", "4x4", "--shards", "0")
    assert "--dtype" in refused("estimate", "4x4", "--dtype", "int8")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)  # without which a reader would wait for one that writes
    os.write(end, bytes(8))
    assert "is no file; MODEL is" in refused("estimate", path)
    os.close(end)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"), ("[]", "has no 'model_type'"), ("{}", "has no 'model_type'"),
        ('{"model_type": 3}', "has no 'model_type'"), ("[" * 100_000, "is not JSON"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "n_layer=1000000000; at most 100,000"),
        ('{"model_type": "gpt2", "dtype": [3], "n_head": {"x_layers": 200000}}', "x_layers=200000"),
        ('{"model_type": "gpt2", "num_labels": 1000000000}', "at most 100,000"),
        ('{"model_type": "gpt2", "layer_size": 100001, "depth": 100001}', " depth=100001; at most"),
        (f'{{"model_type": "gpt2", "n_embd": 1e400, "vocab_size": {2**50}}}', "at most 2^40"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_sound_are_refused(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert said in refused("estimate", path)


def test_a_configuration_without_transformers_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert"}')
    said = refused("estimate", path)
    assert "a 'bert', needs transformers" in said
    assert "pip install transformers" in said


@pytest.mark.parametrize(
    "setting", [{"hidden_size": 32}, {"num_hidden_layers": None}, {"id2label": {}}]
)
def test_a_configuration_that_says_two_sizes_is_not_reckoned_by_one(tmp_path, monkeypatch, setting):
    """transformers reads the other name of a size before its own."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    path, usual = tmp_path / "config.json", {"hidden_size": 64, "num_hidden_layers": 1}
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 1,
        "n_positions": 16, "vocab_size": 100, "n_head": 2,
    }  # fmt: skip
    path.write_text(json.dumps({**config, **usual}))
    assert models.read_model(str(path)).build is None
    path.write_text(json.dumps({**config, **usual, **setting}))
    assert "needs transformers" in refused("estimate", path)


def test_common_decoders_need_no_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "config.json"
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50257,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    model = models.read_model(str(path))
    assert sorted(w.shape for w in model.weights) == sorted(map(tuple, MODELS["GPT-2 small"]))
    assert [w.name for w in model.weights if w.embedding] == [
        "transformer.wte.weight", "transformer.wpe.weight",
    ]  # fmt: skip


def test_the_command_runs_without_importing_torch(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", {"a": ("F32", [64, 64])})
    script = f"""
import sys
from lowbit_optim_cli.app import app
try:
    app(["estimate", {str(path)!r}])
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENV, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AdamW8bit" in done.stdout
