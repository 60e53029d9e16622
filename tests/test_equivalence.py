"""The equivalence test: its statistics, its control, and the committed result and page."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.common import intervals, registry, workloads
from benchmarks.quality import compare_worker
from protocol import run_program

# These need the extra `cli`.
equivalence = pytest.importorskip("benchmarks.quality.equivalence")
tune = pytest.importorskip("benchmarks.quality.tune")
pytest.importorskip("scipy")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def test_paired_interval_by_hand():
    """Differences 1, 2, 3: mean 2, sd 1, t(0.975, 2) = 4.302653."""
    found = intervals.paired([11.0, 12.0, 13.0], [10.0, 10.0, 10.0], margin=5.0)
    assert (found["mean"], found["sd"]) == (2.0, 1.0)
    half = 4.302653 / math.sqrt(3)
    assert found["low"] == pytest.approx(2 - half, rel=1e-6)
    assert found["high"] == pytest.approx(2 + half, rel=1e-6)
    # For 2 degrees of freedom P(T > t) = 1/2 - t / (2 sqrt(2 + t^2)); the nearer end is 5 - 2 away.
    t = 3 * math.sqrt(3)
    assert found["tost_p"] == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-9)
    assert found["equivalent"]


@pytest.mark.parametrize(("shift", "equivalent"), [(0.0, True), (2.6, False), (-2.6, False)])
def test_the_whole_interval_has_to_lie_inside(shift, equivalent):
    ours = [shift - 1.0, shift, shift + 1.0]
    found = intervals.paired(ours, [0.0, 0.0, 0.0], margin=5.0)
    assert abs(found["mean"]) < 5.0
    assert found["equivalent"] == equivalent


def test_equal_differences_need_no_t():
    assert intervals.paired([1.0, 2.0], [1.0, 2.0], 0.5)["tost_p"] == 0.0
    apart = intervals.paired([2.0, 3.0], [1.0, 2.0], 0.5)
    assert (apart["low"], apart["high"], apart["tost_p"]) == (1.0, 1.0, 1.0)
    assert not apart["equivalent"]


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_diverged_run_is_a_failure(lost):
    found = intervals.paired([99.0, lost], [99.0, 99.0], 0.5)
    assert found["differences"] == [0.0, None]
    assert found["mean"] is None
    assert not found["equivalent"]


@pytest.mark.parametrize("ours", [[1.0], [1.0, 2.0, 3.0]])
def test_an_interval_needs_the_same_two_seeds(ours):
    with pytest.raises(ValueError, match="same two or more seeds"):
        intervals.paired(ours, [1.0], 0.5)


def test_a_run_whose_state_is_not_in_8_bits_is_no_evidence():
    side = {"share_8bit": 0.9, "quality": {"values": [1.0]}}
    twin = {"share_8bit": 0.0, "quality": {"values": [1.0]}}
    rows = {"optimizers": {"SGD8bit": side, "SGD32bit": twin}}
    with pytest.raises(RuntimeError, match=r"SGD8bit: 8-bit shares \(0.9, 0.0\)"):
        equivalence.judge([registry.REGISTRY["SGD8bit"]], rows, 0.5)


@pytest.mark.parametrize(
    ("name", "count"),
    [("", 16), ("_control32", 16), ("_ratio8", 16), ("_ratio4", 5)],
)
def test_committed_result_is_of_every_pair_and_the_page_shows_it(name, count):
    written = json.loads((RESULTS / f"equivalence{name}.json").read_text())
    pairs = equivalence.all_pairs(written.get("state_format"))
    assert [pair["optimizer"] for pair in written["pairs"]] == pairs
    assert len(written["pairs"]) == count
    for pair in written["pairs"]:
        found = intervals.paired(pair["quality_8bit"], pair["quality_32bit"], written["margin"])
        assert pair["differences"] == found["differences"]
        assert len(found["differences"]) == pair["seeds_with_another_loss_curve"] == 20
        for name in ("mean", "sd", "low", "high", "tost_p"):
            assert pair[name] == pytest.approx(found[name], rel=1e-6, abs=1e-12)
        assert pair["equivalent"] == found["equivalent"]
    passed = sum(pair["equivalent"] for pair in written["pairs"])
    assert passed == count if written["coarsen"] is None else passed < count
    page = (ROOT / "docs" / "equivalence.md").read_text()
    assert f"\n\n{intervals.markdown(written)}\n\n" in page
    options = written["command"].partition(".equivalence ")[2]
    assert f"`python -m benchmarks.quality.equivalence {options}`" in page
    assert written["date"][:10] in page


@pytest.mark.parametrize("name", ["SGD8bit-ratio8", "AdamW4bit"])
@pytest.mark.slow
def test_equivalence_of_another_format(tmp_path, name):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    state_format = registry.REGISTRY[name].state_format
    result = run_program(
        equivalence, "--optimizer", name, "--format", state_format, "--seeds", 2,
        "--steps", 2, "--threads", 1, "--device", "cpu", "--margin", 100, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / f"equivalence_{state_format}.json").read_text())
    (pair,) = written["pairs"]
    assert (pair["optimizer"], pair["share_8bit"]) == (name, 1.0)
    assert f"--format {state_format}" in written["command"]
    assert f" {'4' if state_format == 'ratio4' else '8'} bits |" in intervals.markdown(written)


def test_a_rate_at_the_edge_of_stability_is_not_chosen():
    def row(lr, mean, loss=0.1):
        return {"lr": lr, "quality": {"mean": mean}, "loss": loss}

    digits, gpt = workloads.TASKS["digits"], workloads.TASKS["gpt"]
    tried = [row(0.1, 98.0), row(0.3, 98.5), row(1.0, 98.5, 0.05), row(3.0, 99.0), row(10.0, 20.0)]
    assert tune.choose(digits, tried) == 1.0
    assert tune.choose(digits, [*tried[:4], row(10.0, None, None)]) == 1.0
    assert tune.choose(gpt, [row(1.0, 3.5), row(3.0, 3.4), row(10.0, 3.5)]) == 3.0
    assert tune.choose(digits, tried[3:]) is None


def test_a_run_trains_and_evaluates_in_the_optimizers_modes(monkeypatch):
    """Schedule-Free's held-out quality is that of the average, which `eval()` puts in place."""
    entry, digits = registry.REGISTRY["ScheduleFreeAdamW8bit"], workloads.TASKS["digits"]
    made, modes = [], []

    def make(params, lr):
        made.append(entry.make(params, lr))
        made[0].eval()  # as the authors' package starts: a step would be refused
        return made[0]

    def quality(task, model, data, device):
        modes.append(made[0].param_groups[0]["train_mode"])
        return 0.0

    monkeypatch.setattr(type(digits), "quality", quality)
    data = {
        "train": torch.zeros(10, 64),
        "train_labels": torch.zeros(10, dtype=torch.long),
    }
    spec = {"steps": 2, "device": "cpu", "lr": 0.01}
    run = compare_worker.train(
        digits, registry.Entry(entry.name, make), data, 0, spec, lambda *_, **__: None
    )
    assert len(run["losses"]) == 2
    assert modes == [False]


@pytest.mark.parametrize("name", ["AdamW8bit", "SGD8bit"])
def test_the_control_leaves_every_nth_code(name):
    param = torch.nn.Parameter(torch.randn(4, 300))
    optimizer = registry.REGISTRY[name].make([param], 0.1)
    optimizer.param_groups[0]["min_8bit_size"] = 1
    compare_worker.coarsen(optimizer, 32)
    param.grad = torch.randn(4, 300)
    optimizer.step()
    for key, codes in optimizer.state[param].items():
        if codes.dtype == torch.uint8:
            signed = {0, 31, 63, 95, 127, 159, 191, 223, 255}
            kept = {1, 32, 64, 96, 128, 160, 192, 224, 255} if key == "exp_avg_sq" else signed
            assert set(codes.unique().tolist()) <= kept
            assert len(codes.unique()) > 3
