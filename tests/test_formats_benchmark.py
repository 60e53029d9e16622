"""`benchmarks.quality.formats`: a tiny run, its reference of a published code, and its page."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common import registry
from protocol import run_program

formats_program = pytest.importorskip("benchmarks.quality.formats")


@pytest.mark.slow
def test_formats_measures_errors_long_runs_and_times(tmp_path, monkeypatch):
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(formats_program, "SCALES", (1e-8, 1.0))
    few = [(*rule[:4], 3) for rule in formats_program.RULES]
    monkeypatch.setattr(formats_program, "RULES", few)
    result = run_program(
        formats_program, "--recorded", 2, "--long", 80, "--side", 64, "--rounds", 1, "--no-peers",
        "--threads", 1, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "formats.json").read_text())
    assert written["command"].endswith("--rounds 1 --no-peers --threads 1")
    assert list(written["synthetic"]) == ["1e-08", "1", "lognormal"]
    for errors in (*written["synthetic"].values(), *written["recorded"].values()):
        assert list(errors) == list(formats_program.OURS)
        assert all(0 < x < 0.2 for each in errors.values() for x in each)
    assert set(written["long"]) == {"all shrink", "half shrinks", "spike"}
    assert list(written["rules"]["Adagrad"]) == list(written["ademamix"]) == ["dynamic8", "ratio8"]
    assert written["time"]["torch fused"]["ratio"]["median"] == 1
    assert written["time"]["ratio4"]["state_bytes"] == pytest.approx(1.094, abs=0.01)
    assert (tmp_path / "formats.png").read_bytes()[:4] == b"\x89PNG"
    again = run_program(formats_program, "--markdown", tmp_path / "formats.json")
    assert again.output.startswith("| state | 1e-08 | 1 | lognormal |")


def test_formats_leaves_out_what_is_not_there():
    absent = registry.Source("absent_library.optim", "AdamW8bit")
    assert formats_program.refusal(absent) == "not installed"
    assert formats_program.refusal(formats_program.PEERS["FlashOptim's code"]) is None


def test_a_published_code_is_as_it_is_published():
    """Of 32 numbers the largest comes back as it is in fp16, others within about half a code."""
    p = torch.nn.Parameter(torch.zeros(4, 8))
    companded = formats_program.make(formats_program.PEERS["FlashOptim's code"], p, 1e-8)
    m = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    back, square = companded._decode(companded._encode(m, m * m), m.shape)
    largest = float(m.abs().max())
    assert float(back.abs().max()) == pytest.approx(largest, rel=1e-3)
    # The softsign has a slope of 1/2 at the largest number: half a code is 1/127 of it there.
    assert float((back - m).abs().max()) <= 1.1 * largest / 127
    assert float((square.sqrt() - m.abs()).abs().max()) <= 0.6 * largest / 255


def test_the_format_page_shows_the_result_file():
    root = Path(__file__).resolve().parent.parent
    page = (root / "docs" / "which_format.md").read_text(encoding="utf-8")
    written = json.loads((root / "benchmarks" / "results" / "formats.json").read_text())
    tables = list(formats_program.tables(written))
    assert len(tables) == 5
    for table in tables:
        assert f"\n\n{table}\n\n" in page
    assert f"`{written['command']}`" in page
    plots = (root / "docs" / "which_format.png", root / "benchmarks" / "results" / "formats.png")
    assert plots[0].read_bytes() == plots[1].read_bytes()
