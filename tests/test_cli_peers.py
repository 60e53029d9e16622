"""Bytes of other libraries' state by arithmetic against what they allocate here, on the CPU.

`make peers` installs bitsandbytes and torchao; what is missing is skipped. FlashOptim refuses to
run without a CUDA device, so its layout is read in its source and marked so.
"""

import pytest
import torch

import lowbit_optim
from benchmarks.common import measure
from footprint_models import MODELS
from foreign_files import newer
from lowbit_optim_cli import optimizers
from lowbit_optim_cli.footprint import footprint
from test_cli_checkpoints import assert_equal, converted, inspected
from test_cli_footprint import DTYPES, SHAPES, weights_of

ROWS = [row for row in optimizers.layouts(bf16=True) if not row.own]
MODULES = {"torch": "torch.optim", "bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
SOME = [shape for shape in SHAPES if 0 not in shape]


def build(row, params):
    module = pytest.importorskip(MODULES[row.library])
    if "one block" in row.format and newer():
        pytest.skip("from bitsandbytes 0.50 on its LAMB8bit and LARS8bit are in blocks, too")
    options = {"momentum": 0.9} if row.family in ("SGD", "LARS") else {}
    return getattr(module, row.name)(params, lr=1e-3, **options)


def with_state(row, shapes, dtype):
    """Its optimizer with the state that it has after a step."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=DTYPES[dtype])) for shape in shapes]
    optimizer = build(row, params)
    for index, p in enumerate(params):
        p.grad = torch.zeros_like(p)
        if row.library == "bitsandbytes":  # its step refuses some classes' tensors on the CPU
            optimizer.init_state(optimizer.param_groups[0], p, 0, index)
    if row.library != "bitsandbytes":
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return optimizer


def name(row):
    return f"{row.library}.{row.name}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("row", [row for row in ROWS if not row.documented], ids=name)
def test_state_has_the_bytes_of_the_arithmetic(row, dtype):
    found = footprint(row, weights_of(SOME, dtype))
    assert measure.state_bytes(with_state(row, SOME, dtype)) == found.state
    assert found.residual == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if not row.documented], ids=name)
def test_a_model_has_the_bytes_of_the_arithmetic(row):
    shapes = MODELS["ResNet-50"]
    found = footprint(row, weights_of(shapes, "bf16"))
    assert measure.state_bytes(with_state(row, shapes, "bf16")) == found.state


def test_only_what_cannot_run_here_is_marked_as_documented():
    assert {row.library for row in ROWS if row.documented} == {"flashoptim"}
    assert {row.library for row in ROWS if not row.documented} == set(MODULES)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_checkpoints_of_torchao_are_inspected_and_converted(tmp_path, name):
    """Its tensors are of classes of its own, which torch reads once torchao is imported."""
    (row,) = (row for row in ROWS if row.name == name and row.library == "torchao")
    saved = with_state(row, [(64, 256), (10,)], "fp32").state_dict()
    torch.save({"optimizer": saved}, tmp_path / "run.pt")
    (state,) = inspected(tmp_path / "run.pt")
    assert state["summary"].startswith("torchao (the optimizer is not named in it), 2 parameters")
    arguments = ("--to", "lowbit", "--optimizer", "AdamW")
    ours = converted(tmp_path / "run.pt", tmp_path / "ours.pt", *arguments)
    assert ours["state"][0]["exp_avg"].dtype == torch.uint8
    fresh = lowbit_optim.AdamW8bit([torch.nn.Parameter(torch.zeros(s)) for s in [(64, 256), (10,)]])
    with pytest.warns(UserWarning, match="converts a state_dict of torchao"):
        fresh.load_state_dict(saved)
    assert_equal(ours["state"], fresh.state_dict()["state"])
    exact = lowbit_optim.AdamW32bit(
        [torch.nn.Parameter(torch.zeros(s)) for s in [(64, 256), (10,)]]
    )
    with pytest.warns(UserWarning, match="converts a state_dict of torchao"):
        exact.load_state_dict(saved)
    arguments = ("--optimizer", "AdamW", "--to")
    plain = converted(tmp_path / "run.pt", tmp_path / "plain.pt", *arguments, "torch")
    assert_equal(plain["state"], lowbit_optim.to_torch_state_dict(exact)["state"])
    theirs = converted(tmp_path / "run.pt", tmp_path / "theirs.pt", *arguments, "bitsandbytes")
    if name == "AdamW8bit":
        assert torch.equal(theirs["state"][0]["state1"], saved["state"][0]["exp_avg"].codes)
        assert torch.equal(theirs["state"][0]["absmax1"], saved["state"][0]["exp_avg"].scale)
