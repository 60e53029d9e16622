"""Bytes of weights, gradients and state: the page and the programs."""

import json
from pathlib import Path

import pytest
import torch

import lowbit_optim
from benchmarks.common import registry
from benchmarks.footprint import estimate, networks, worker
from benchmarks.static import footprint
from protocol import run_program

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def case(name, **options):
    """What is weighed of the smallest GPT-2 with bf16 weights."""
    given = {"dtype": "bfloat16", "bits": None, "released": False, "steps": 2, **options}
    return worker.Case("gpt2", "tiny", name, bucket_bytes=0, **given)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("AdamW8bit", "dynamic8"),
        ("Lion8bit-ratio8", "ratio8"),
        ("LAMB4bit", "ratio4"),
        ("LARS32bit-paper", "float32"),
        ("torch.optim.AdamW-foreach", "as weights"),
        ("torchao.AdamW4bit", "4 bits"),
        ("bitsandbytes.AdEMAMix8bit", "dynamic8"),
        ("flashoptim.FlashLion", "8 bits"),
    ],
)
def test_each_optimizer_has_its_own_arithmetic(name, format):
    source = case(name).source()
    layout = estimate.layout(source, True, None)
    assert (layout.name, layout.format) == (source.cls, format)


def test_no_arithmetic_for_what_is_set_otherwise():
    assert estimate.layout(case("LearnedGradient8bit").source(), False, None) is None
    assert estimate.layout(case("optimi.AdamW").source(), False, None) is None


def test_what_a_training_keeps():
    with lowbit_optim.use_engine("torch"):  # which has nothing to compile
        whole = worker.train(case("AdamW8bit", bits=24), CPU, 2)
        released = worker.train(case("AdamW8bit", bits=24, released=True), CPU, 2)
    assert whole["weights"] == whole["gradients"] == 2 * whole["params"] == 2 * 67_520
    assert whole["state"] == whole["estimated_state"]
    if whole["peak"] is not None:
        assert whole["peak"] >= whole["first_peak"] > 0
        assert whole["temporary"] >= 0
    assert released["gradients"] == 2 * 64 * 256  # of the largest tensor
    assert released["temporary"] is None
    assert released["loss"] == whole["loss"]


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 124_439_808), ("resnet50", 25_557_032), ("perceptron", 102_307_850)],
)
def test_networks_have_the_parameters_of_the_published_ones(name, count):
    model = networks.NETWORKS[name]["full"].build(torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == count
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_another_library_that_refuses_is_left_out(capsys, monkeypatch):
    def refuse(params, lr):
        raise NotImplementedError("needs a GPU\nof any make")

    for peer, event in (("absent", "left out"), (None, None)):
        entry = registry.Entry("Peer", refuse, peer=peer)
        monkeypatch.setattr(registry, "weighed", lambda entry=entry: {"Peer": entry})
        spec = {"case": vars(case("Peer")), "device": "cpu", "threads": torch.get_num_threads()}
        if event is None:
            with pytest.raises(NotImplementedError):
                worker.main(spec)
        else:
            worker.main(spec)
            said = json.loads(capsys.readouterr().out)
            assert said == {"event": event, "why": "NotImplementedError: needs a GPU"}


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for rows in (footprint.states, footprint.totals, footprint.peers):
        assert f"\n\n{footprint.markdown(rows())}\n\n" in page


PUBLISHED = pytest.mark.parametrize(
    "name",
    [
        "footprint",
        "footprint_bf16",
        "footprint_perceptron",
        "footprint_resnet50",
        "footprint_100",
    ],
)


@PUBLISHED
def test_the_arithmetic_has_the_state_that_was_measured(name):
    """Byte for byte, of every optimizer that has arithmetic, other libraries' too."""
    written = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert written["rows"]
    models = {}
    for row in written["rows"]:
        weighed = worker.Case(**{field: row[field] for field in worker.Case.__dataclass_fields__})
        network, dtype = networks.NETWORKS[row["network"]][row["size"]], row["dtype"]
        if (network, dtype) not in models:
            models[network, dtype] = network.build(getattr(torch, dtype), torch.device("meta"))
        params = list(models[network, dtype].parameters())
        estimated = estimate.state_bytes(weighed.source(), params, row["bits"])
        assert estimated in (None, row["state"]), row["optimizer"]
        unknown = ("optimi.", "LearnedGradient")  # whose `max_size` is not the default
        assert estimated is not None or row["optimizer"].startswith(unknown)


@PUBLISHED
def test_the_page_of_whole_trainings_has_its_tables(name):
    tables = pytest.importorskip("benchmarks.footprint.tables")
    written = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    page = (ROOT / "docs" / "footprint.md").read_text(encoding="utf-8")
    for key in tables.groups(written):
        assert f"\n\n{tables.markdown(written, key)}\n\n" in page
    assert f"`{written['command']}`" in page


def test_the_page_of_bf16_weights_has_its_table():
    made = pytest.importorskip("benchmarks.quality.weights")
    result = ROOT / "benchmarks" / "results" / "weights.json"
    table = made.markdown(json.loads(result.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "bf16_weights.md").read_text(encoding="utf-8")
    assert f"\n\n{table}\n\n" in page


def test_footprint_weighs_a_training(tmp_path):
    pytest.importorskip("matplotlib")
    program = pytest.importorskip("benchmarks.footprint.__main__")
    result = run_program(
        program, "--network", "gpt2", "--size", "tiny", "--optimizer", "torch.optim.SGD",
        "--steps", 2, "--threads", 1, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "footprint.json").read_text())["rows"]
    assert row["weights"] == row["gradients"] == 4 * row["params"]
    assert row["error"] < 1e-9
    assert (tmp_path / "footprint.png").read_bytes()[:4] == b"\x89PNG"
    again = run_program(program, "--markdown", tmp_path / "footprint.json")
    assert "| `torch.optim.SGD` | 0.3 |" in again.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--optimizer", "Sgd"),
        ("--network", "vit"),
        ("--size", "huge"),
        ("--dtype", "fp16"),
        ("--bits", 8),
    ],
)
def test_footprint_refuses_what_it_does_not_know(flag, value):
    program = pytest.importorskip("benchmarks.footprint.__main__")
    result = run_program(program, flag, value)
    assert result.exit_code == 2
    assert f"unknown {flag[2:]} {value!r}; there are: " in " ".join(result.output.split())


def test_footprint_goes_on_after_one_that_fails(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    program = pytest.importorskip("benchmarks.footprint.__main__")

    def stream(module, spec, threads, extra):
        if spec["case"]["optimizer"] == "AdamW8bit":
            raise RuntimeError("killed")
        yield {"event": "weighed", **worker.train(worker.Case(**spec["case"]), CPU, 1)}

    monkeypatch.setattr(program.worker, "stream", stream)
    result = run_program(
        program, "--network", "gpt2", "--size", "tiny", "--optimizer", "AdamW8bit",
        "--optimizer", "torch.optim.SGD", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 1
    assert "not weighed: AdamW8bit: killed" in result.output
    written = json.loads((tmp_path / "footprint.json").read_text())
    assert [row["optimizer"] for row in written["rows"]] == ["torch.optim.SGD"]
    assert written["rows"][0]["state"] == written["rows"][0]["estimated_state"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["bfloat16", "float32"])
def test_weights_are_compared(tmp_path, monkeypatch, arithmetic):
    pytest.importorskip("matplotlib")
    program = pytest.importorskip("benchmarks.quality.weights")

    def chosen(dtype, device):
        return getattr(torch, arithmetic) if dtype == torch.bfloat16 else dtype

    monkeypatch.setattr(program.models, "arithmetic", chosen)
    result = run_program(
        program, "--lr", 1e-5, "--seeds", 2, "--steps", 2, "--pretrain", 2, "--width", 16,
        "--threads", 1, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert ("bf16 are cast to fp32" in result.output) == (arithmetic == "float32")
    written = json.loads((tmp_path / "weights.json").read_text())
    assert written["arithmetic"] == arithmetic
    rows = written["learning_rates"]["1e-05"]
    assert list(rows) == list(program.VARIANTS)
    assert rows["32"]["nmse_of_fp32_masters"]["mean"] == 0
    assert rows["24"]["nmse_of_fp32_masters"]["mean"] < rows["auto"]["nmse_of_fp32_masters"]["mean"]
    assert (tmp_path / "weights.png").read_bytes()[:4] == b"\x89PNG"
    again = run_program(program, "--markdown", tmp_path / "weights.json")
    assert "| bf16, `auto` |" in again.output
    refused = run_program(program, "--folder", "absent")
    assert "no folder 'absent'" in refused.output.replace("\n", " ")
