"""The benchmark of sharded steps, on one rank; what it measures is another matter."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.common import report, verify
from protocol import run_program

# These need the extra `cli`.
program = pytest.importorskip("benchmarks.speed.sharded")
run = partial(run_program, program)


@pytest.mark.slow
def test_sharded_times_every_pair(tmp_path):
    result = run("--optimizer", "LAMB8bit", "--ranks", 1, "--rounds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "sharded.json").read_text())
    assert 0 <= written["verified"]["LAMB8bit"] <= verify.LIMIT_8
    assert [pair["case"] for pair in written["pairs"]] == ["fp32", "bf16", "coded"]
    for pair in written["pairs"]:
        assert pair["ranks"] == 1
        assert pair["ratio"]["median"] == pytest.approx(
            pair["ms"]["median"] / pair["unsharded_ms"]["median"]
        )
    assert program.table(written["pairs"]) in result.output


def test_sharded_refuses_an_unknown_case():
    result = run("--case", "fp8")
    assert result.exit_code == 2
    assert "unknown case 'fp8'" in result.output


def test_the_page_on_sharded_training_shows_the_result_file():
    root = Path(__file__).resolve().parent.parent
    page = (root / "docs" / "guides" / "sharded.md").read_text(encoding="utf-8")
    written = json.loads((report.RESULTS / "sharded.json").read_text(encoding="utf-8"))
    assert f"\n\n{program.table(written['pairs'])}\n\n" in page
