"""`speed.gpu` without a GPU: its tables, its counting and a run of tiny tensors on the CPU."""

import io
import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer", reason="the benchmarks are command line programs")
from rich.console import Console

from benchmarks.common import report, shapes
from benchmarks.speed import gpu
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import adam
from lowbit_optim_kernels.weights import WEIGHTS


def test_the_tensor_lists_are_the_models():
    counts = {name: shapes.elements(tensors) for name, tensors in gpu.WORKLOADS.items()}
    assert counts == {
        "one-1B": 10**9,
        "resnet50": 25_557_032,
        "gpt2": 124_439_808,
        "llama-3.1-8B": 8_030_261_248,
        "lora-16": 41_943_040,
    }
    tensors = {name: len(tensors) for name, tensors in gpu.WORKLOADS.items()}
    assert tensors == {
        "one-1B": 1, "resnet50": 161, "gpt2": 148, "llama-3.1-8B": 291, "lora-16": 448,
    }  # fmt: skip


def test_ours_stand_beside_torchs_forms_and_the_peers():
    beside = [name for name, one in gpu.CONTENDERS.items() if one.row.name == "AdamW"]
    assert beside == [
        "AdamW8bit", "AdamW8bit-ratio8", "AdamW4bit", "torch AdamW fused", "torch AdamW foreach",
        "bitsandbytes AdamW8bit", "torchao AdamW8bit", "flashoptim FlashAdamW",
    ]  # fmt: skip


def test_weights_of_peers_are_as_wide_as_those_that_they_stand_beside():
    for name, contender in gpu.CONTENDERS.items():
        given = contender.make.options.get("master_weight_bits", "by default")
        assert given == (None if name.startswith("flashoptim") else "by default")


def test_bytes_of_a_step():
    params = [torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))]
    adamw, lars = gpu.CONTENDERS["AdamW8bit"], gpu.CONTENDERS["LARS8bit"]
    assert gpu.bytes_of_step(adamw, params, 2 * 260) == 3 * 512 + 4 * 260
    assert gpu.bytes_of_step(lars, params, 260) == 5 * 512 + 2 * 260


@pytest.mark.slow
def test_a_run_checks_times_and_reports(tmp_path, capsys):
    console = Console(file=io.StringIO(), width=120)
    names = ["AdamW8bit", "torch AdamW fused", "LARS8bit", "flashoptim FlashAdamW"]
    device, path = torch.device("cpu"), tmp_path / "gpu.json"
    assert gpu.check(["AdamW8bit", "LARS8bit"], device, console)["AdamW8bit"] < 1e-3
    kept = []

    def keep(found):
        kept.append(len(found["rows"]))
        report.write_json(path, found)

    workloads = {"tiny": ((64, 100), (5000,)), "tinier": ((64,),)}
    found = gpu.run(names, workloads, ["bf16", "fp32"], device, 2, console, keep)
    done = {row["optimizer"] for row in found["rows"]}
    assert {"AdamW8bit", "torch AdamW fused", "LARS8bit"} <= done
    assert done | {label.partition(",")[0] for label in found["skipped"]} == set(names)
    assert kept == [*range(1, 4 * len(done) + 1), 4 * len(done)]
    gpu.show(console, found)
    gpu.main(markdown=path)
    printed = capsys.readouterr().out
    for dtype in ("bf16", "fp32"):
        row = next(x for x in found["rows"] if x["dtype"] == dtype)
        cell = f"{row['ms']['median'] * 1e9 / row['elements']:.3g} ("
        assert f"{dtype}, steps: ms" in console.file.getvalue()
        assert cell in console.file.getvalue()
        assert f"{dtype}, steps:\n\n|  | tiny | tinier |" in printed
        assert f"| AdamW8bit | {cell}" in printed


@pytest.mark.parametrize("name", ["torch AdamW fused", "torch AdamW foreach", "torch SGD foreach"])
def test_torchs_steps_are_timed_as_they_come(name, monkeypatch):
    """Capturable ones of the foreach form take more operators; a capture alone needs them."""
    stepped, cpu = [], torch.device("cpu")
    make = type(gpu.CONTENDERS[name].make).__call__

    def noted(source, params, lr):
        optimizer = make(source, params, lr)
        (group,) = optimizer.param_groups
        optimizer.register_step_pre_hook(lambda *_: stepped.append(group.get("capturable")))
        made.append(optimizer)
        return optimizer

    made: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(type(gpu.CONTENDERS[name].make), "__call__", noted)
    gpu.time_one(gpu.CONTENDERS[name], ((64,),), torch.float32, cpu, 2)
    assert len(stepped) > 4
    assert not any(stepped)
    (optimizer,) = made
    gpu.capturable(optimizer)
    assert all(group.get("capturable", True) for group in optimizer.param_groups)


def test_what_does_not_fit_is_left_out_and_the_rest_timed(monkeypatch):
    def time_one(contender, *given):
        if contender.name == "torch AdamW foreach":
            raise torch.OutOfMemoryError("of 1 GiB")
        return {"ms": {"median": 2.0}, "gb_per_s": 1.0, "elements": 10**9}

    monkeypatch.setattr(gpu, "time_one", time_one)
    console, names = Console(file=io.StringIO()), ["torch AdamW foreach", "AdamW8bit"]
    workloads, device = {"tiny": ((64,),)}, torch.device("cpu")
    found = gpu.run(names, workloads, ["bf16"], device, 2, console, lambda found: None)
    assert [row["optimizer"] for row in found["rows"]] == ["AdamW8bit"]
    assert found["skipped"] == {"torch AdamW foreach, tiny, bf16": "OutOfMemoryError: of 1 GiB"}


def launched(tensors):
    """The kinds of each launch of a pass of AdamW8bit over bf16 parameters of these shapes."""
    pytest.importorskip("triton", reason="the Triton engine needs the triton package")
    from lowbit_optim_kernels.engines.triton import grid

    slots = []
    for shape in tensors:
        layout = Layout.of(shape)
        slot = SimpleNamespace(
            p=SimpleNamespace(dtype=torch.bfloat16), g=SimpleNamespace(dtype=torch.bfloat16),
            format=DYNAMIC8 if math.prod(shape) >= 4096 else FLOAT32, weights=WEIGHTS[16],
            rows=layout.rows, row=layout.row, blocks_before=0, weights_before=0, shifted=False,
        )  # fmt: skip
        slots.append(slot)
    moments = adam.adam_rule(False, False, False).moments
    made = grid.make_grid(slots, moments, [True] * len(slots))
    return [kinds for kinds, _ in made.launches]


@pytest.mark.parametrize("name", gpu.WORKLOADS)
def test_stand_ins_take_the_same_launches_in_little_memory(name):
    tensors = gpu.WORKLOADS[name]
    small = gpu.stand_in(tensors)
    assert shapes.elements(small) <= 2**29
    assert launched(small) == launched(tensors)


@pytest.mark.slow
def test_what_is_timed_is_compiled_by_processes():
    """Which raise what a step does."""
    lists = [((64,), (10, 300))]
    gpu.compile_all(["AdamW8bit", "torch AdamW fused"], lists, ["bf16"], "cpu", 2)
    with pytest.raises(RuntimeError, match="device string"):
        gpu.compile_all(["AdamW8bit"], lists, ["bf16"], "no such", 1)


def test_replays_have_tables_of_their_own():
    row = {"workload": "tiny", "dtype": "bf16", "elements": 10**9, "bytes": 4e9}
    row["ms"] = {"median": 4.0}
    rows = [
        {**row, "optimizer": "AdamW8bit", "replayed_ms": {"median": 2.0}},
        {**row, "optimizer": "torchao AdamW8bit", "replayed_ms": None},
    ]
    found = {"rows": rows, "copy_gb_per_s": [4000.0, 3900.0]}
    assert gpu.cells(found, "bf16") == (
        ["", "tiny"], [["AdamW8bit", "4 (25%)"], ["torchao AdamW8bit", "4 (25%)"]]
    )  # fmt: skip
    assert gpu.cells(found, "bf16", "replayed_ms") == (["", "tiny"], [["AdamW8bit", "2 (50%)"]])
