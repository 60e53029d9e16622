"""Bytes of weights, gradients and state: the page and the programs."""

import json
from pathlib import Path

import pytest
import torch

import lowbit_optim
from benchmarks.speed import memory_worker
from benchmarks.static import footprint
from test_benchmarks import run

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", memory_worker.OPTIMIZERS)
def test_a_released_step_keeps_no_gradient(name):
    model = memory_worker.bf16_gpt(width=64, layers=1)
    optimizer = memory_worker.build(name, model.parameters(), 24)
    handle = lowbit_optim.release_gradients(optimizer, model, bucket_bytes=0)
    tokens = torch.arange(memory_worker.CONTEXT)[None]
    model(tokens).float().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    handle.remove()
    found = memory_worker.run(name, 24, True, 1 << 26, width=64, layers=1)
    assert found["state"] == found["state_counted"]


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for rows in (footprint.states, footprint.totals, footprint.peers):
        assert f"\n\n{footprint.markdown(rows())}\n\n" in page


def test_the_pages_have_the_measured_tables():
    for program, name in (("speed.memory", "memory"), ("quality.weights", "bf16_weights")):
        made = pytest.importorskip(f"benchmarks.{program}")
        result = ROOT / "benchmarks" / "results" / f"{program.partition('.')[2]}.json"
        table = made.markdown(json.loads(result.read_text(encoding="utf-8")))
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert f"\n\n{table}\n\n" in page


def test_memory_weighs_each_configuration(tmp_path):
    program = pytest.importorskip("benchmarks.speed.memory")
    result = run(
        program, "--optimizer", "AdamW4bit", "--bits", 24, "--width", 64, "--layers", 1,
        "--threads", 1, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    whole, released = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert whole["gradients"] == released["gradients"] == whole["weights"] == 2 * whole["params"]
    again = run(program, "--markdown", tmp_path / "memory.json")
    assert again.output.count("`AdamW4bit` | 24 |") == 2
    assert "unknown optimizer 'SGD'" in run(program, "--optimizer", "SGD").output


def test_weights_are_compared(tmp_path):
    pytest.importorskip("matplotlib")
    program = pytest.importorskip("benchmarks.quality.weights")
    result = run(
        program, "--lr", 1e-5, "--seeds", 2, "--steps", 2, "--pretrain", 2, "--width", 16,
        "--threads", 1, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "weights.json").read_text())["learning_rates"]["1e-05"]
    assert list(rows) == list(program.VARIANTS)
    assert rows["32"]["nmse_of_fp32_masters"]["mean"] == 0
    assert rows["24"]["nmse_of_fp32_masters"]["mean"] < rows["auto"]["nmse_of_fp32_masters"]["mean"]
    assert (tmp_path / "weights.png").read_bytes()[:4] == b"\x89PNG"
    again = run(program, "--markdown", tmp_path / "weights.json")
    assert "| bf16, `auto` |" in again.output
    refused = run(program, "--folder", "absent")
    assert "no folder 'absent'" in refused.output.replace("\n", " ")
