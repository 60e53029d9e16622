"""Rows of the benchmarks: what is stepped, loaded and counted is what their names say."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import measure, models, registry, summary, workloads
from benchmarks.quality import compare_worker
from protocol import run_program

# These need the extra `cli`.
speed_program = pytest.importorskip("benchmarks.speed.cpu")
compare_program = pytest.importorskip("benchmarks.quality.compare")
passes_program = pytest.importorskip("benchmarks.speed.passes")


def test_the_engine_is_loaded_for_the_weights_that_are_trained(monkeypatch):
    entry, seen = registry.REGISTRY["AdamW8bit-bf16"], []
    make = type(entry.make).__call__

    def noted(source, params, lr):
        seen.extend(p.dtype for p in params)
        return make(source, params, lr)

    monkeypatch.setattr(type(entry.make), "__call__", noted)
    compare_worker.load_engine(entry, torch.device("cpu"))
    assert set(seen) == {torch.bfloat16}


def test_bf16_is_computed_in_fp32_where_the_cpu_lacks_it(monkeypatch):
    """It would take 35 times as long."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert models.arithmetic(torch.bfloat16, cpu) == torch.float32
    assert models.arithmetic(torch.float32, cpu) == torch.float32
    assert models.arithmetic(torch.bfloat16, gpu) == torch.bfloat16


def test_compare_says_where_weights_are_cast(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain, bf16 = (registry.REGISTRY[name] for name in ("AdamW8bit", "AdamW8bit-bf16"))
    said = compare_program.notes([plain, bf16], "cpu").removeprefix(summary.notes("cpu"))
    assert said == (
        " Weights in bf16 are cast to fp32 for the model's arithmetic: this CPU has no"
        " instructions for bf16."
    )
    assert compare_program.notes([plain], "cpu") == summary.notes("cpu")
    assert compare_program.notes([bf16], "cuda") == summary.notes("cuda")


def test_weights_are_cast_for_the_arithmetic():
    """As if they were in that dtype; their gradients are rounded to their own."""
    model = models.digits_mlp().bfloat16()
    twin = copy.deepcopy(model).float()
    inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
    loss = models.loss(model, inputs, targets, torch.float32)
    want = models.loss(twin, inputs, targets)
    assert torch.equal(loss, want)
    loss.backward()
    want.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.bfloat16())


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_weights_are_trained_with_either_arithmetic(monkeypatch, arithmetic):
    entry, seen = registry.REGISTRY["AdamW8bit-bf16"], set()
    loss = models.loss

    def noted(model, inputs, targets, given=None):
        seen.update((given, inputs.dtype, *(p.dtype for p in model.parameters())))
        return loss(model, inputs, targets, given)

    monkeypatch.setattr(models, "arithmetic", lambda *_: arithmetic)
    monkeypatch.setattr(models, "loss", noted)
    generator = torch.Generator().manual_seed(0)
    data = {
        "train": torch.randn(32, 64, generator=generator),
        "train_labels": torch.arange(32) % 10,
    }
    task = workloads.TASKS["digits"]
    monkeypatch.setattr(type(task), "quality", lambda *_: 0.0)
    run = compare_worker.train(
        task, entry, data, 0, {"steps": 30, "device": "cpu", "lr": 0.01}, lambda *_, **__: None
    )
    assert seen == {arithmetic, torch.bfloat16}
    assert run["losses"][-1] < 0.5 * run["losses"][0]


@pytest.mark.parametrize(
    ("name", "dtypes", "refusal"),
    [
        ("AdamW8bit", ["float32"], None),
        ("AdamW8bit", ["bfloat16"], None),
        ("AdamW8bit-bf16", ["bfloat16"], None),
        ("AdamW8bit-bf16", ["float32"], "is of bfloat16 weights, not of float32"),
        ("AdamW8bit-bf16", ["float32", "bfloat16"], "not of float32, bfloat16"),
    ],
)
def test_names_of_rows_are_held_against_the_dtype_that_is_stepped(name, dtypes, refusal):
    given = [registry.REGISTRY[name]], *(getattr(torch, dtype) for dtype in dtypes)
    if refusal is None:
        registry.of_dtypes(*given)
        return
    with pytest.raises(ValueError, match=refusal):
        registry.of_dtypes(*given)


def test_each_run_in_a_file_says_its_command(tmp_path, monkeypatch):
    timed = {"device": "cpu", "threads": 1, "pairs": [], "skipped": {}, "copy_gb_per_s": 1.0}
    timed |= {"instruction_set": "", "torch_instruction_set": ""}
    monkeypatch.setattr(speed_program, "time_all", lambda *_: [dict(timed)])
    for options in (("--rounds", 3), ("--rounds", 5, "--append")):
        given = (*options, "--no-first", "--out", tmp_path)
        result = run_program(speed_program, *given)
        assert result.exit_code == 0, result.output
    first, second = json.loads((tmp_path / "speed.json").read_text())["sections"]
    assert "--rounds 3" in first["command"]
    assert "--rounds 5" in second["command"]


@pytest.mark.parametrize("program", [speed_program, passes_program])
def test_speed_programs_refuse_rows_of_other_weights(program):
    result = run_program(program, "--optimizer", "AdamW8bit-bf16-nearest")
    assert result.exit_code == 2
    assert "is of bfloat16 weights" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "dtype", "moved"),
    [
        ("AdamW32bit", torch.float32, 28.0),
        ("AdamW8bit", torch.float32, 12 + 2 * (2 + 8 / 256)),
        ("AdamW8bit-ratio8", torch.float32, 12 + 2 * (2 + 12 / 128)),
        ("AdamW4bit", torch.float32, 12 + 2 * (1 + 12 / 128)),
        ("ScheduleFreeAdamW8bit", torch.bfloat16, 6 + 2 * (1 + 4 / 256) + 8),
    ],
)
def test_passes_count_the_bytes_of_the_state_that_is_kept(name, dtype, moved, monkeypatch):
    monkeypatch.setattr(passes_program, "LARGE", 1 << 16)
    (row,) = passes_program.rows_of(name, dtype, 1, 10.0)
    assert row["bytes_per_element"] == pytest.approx(moved)


def test_state_in_objects_of_another_library_counts():
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer, codes = torch.optim.SGD([p], lr=1.0), torch.zeros(64, dtype=torch.int8)
    kept = SimpleNamespace(_quantized=codes, _scales=torch.zeros(2).half(), _data=None)
    optimizer.state[p] = {"exp_avg": kept, "step": torch.tensor(0), "error_bits": codes.clone()}
    assert measure.state_bytes(optimizer) == 64 + 4 + 8 + 64
