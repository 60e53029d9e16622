"""`benchmarks.speed.cpu`: it verifies, times and writes, and keeps what a file has."""

import json
from functools import partial

import pytest
import torch

from benchmarks.common import verify
from lowbit_optim_kernels.engines.numba import vector
from protocol import run_program

# These need the extra `cli`.
program = pytest.importorskip("benchmarks.speed.cpu")
typer = pytest.importorskip("typer")
run = partial(run_program, program)


def test_speed_refuses_an_unknown_case():
    result = run("--case", "huge")
    assert result.exit_code == 2
    assert "unknown case 'huge'" in result.output


def test_speed_refuses_an_optimizer_without_a_baseline():
    result = run("--optimizer", "torch.optim.AdamW")
    assert result.exit_code == 2
    assert "no torch optimizer to be timed beside" in result.output.replace("\n", "")


def test_speed_verifies_and_writes(tmp_path):
    arguments = (
        "--optimizer", "SGD8bit", "--case", "small1000", "--threads", 1, "--rounds", 2,
        "--no-first", "--out", tmp_path,
    )  # fmt: skip
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "speed.json").read_text())
    section = written["sections"][0]
    assert section["copy_gb_per_s"] > 0
    assert section["instruction_set"] == vector.instruction_set()
    assert section["torch_instruction_set"] == torch.backends.cpu.get_cpu_capability()
    assert 0 <= section["verified"]["SGD8bit"] <= verify.LIMIT_8
    (pair,) = section["pairs"]
    assert pair["baseline"] == "torch.optim.SGD-foreach"
    assert pair["elements"] == 64_000
    assert pair["ratio"]["min"] <= pair["ratio"]["median"] <= pair["ratio"]["max"]
    assert "1,000 tensors" in result.output
    assert program.earlier(tmp_path / "speed.json", written) == written
    with pytest.raises(typer.BadParameter, match="is of other versions"):
        program.earlier(tmp_path / "speed.json", {**written, "versions": {}})
    written["first_step"] = {"Lion8bit": {"seconds": 1}}
    (tmp_path / "speed.json").write_text(json.dumps(written))
    assert run(*arguments, "--append").exit_code == 0
    appended = json.loads((tmp_path / "speed.json").read_text())
    assert len(appended["sections"]) == 2
    assert appended["first_step"] == written["first_step"]
