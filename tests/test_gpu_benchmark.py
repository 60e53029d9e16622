"""`speed.gpu` without a GPU: its tables, its counting and a run of tiny tensors on the CPU."""

import io
import math

import pytest
import torch

pytest.importorskip("typer", reason="the benchmarks are command line programs")
from rich.console import Console

from benchmarks.common import report
from benchmarks.speed import gpu


def test_the_tensor_lists_are_the_models():
    counts = {name: sum(map(math.prod, tensors)) for name, tensors in gpu.WORKLOADS.items()}
    assert counts["llama-3.2-1b"] == 1_235_814_400
    assert counts["resnet50"] == 25_557_032
    assert len(gpu.WORKLOADS["resnet50"]) == 161


def test_bytes_of_a_step():
    params = [torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))]
    adamw, lars = gpu.CONTENDERS["AdamW8bit"], gpu.CONTENDERS["LARS8bit"]
    assert gpu.bytes_of_step(adamw, params, 2 * 260) == 3 * 512 + 4 * 260
    assert gpu.bytes_of_step(lars, params, 260) == 5 * 512 + 2 * 260


@pytest.mark.slow
def test_a_run_checks_times_and_reports(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    names = ["AdamW8bit", "torch AdamW", "LARS8bit", "flashoptim FlashAdamW"]
    device = torch.device("cpu")
    assert gpu.check(["AdamW8bit", "LARS8bit"], device, console)["AdamW8bit"] < 1e-3
    found = gpu.run(names, {"tiny": ((64, 100), (5000,))}, ["bf16", "fp32"], device, 2, console)
    done = {row["optimizer"] for row in found["rows"]}
    assert {"AdamW8bit", "torch AdamW", "LARS8bit"} <= done
    assert done | {label.partition(",")[0] for label in found["skipped"]} == set(names)
    gpu.show(console, found["rows"])
    report.write_json(tmp_path / "gpu.json", found)
    assert "1.00x" in console.file.getvalue()
