"""Launches as Triton's own launcher passes them to NVIDIA's driver, in a first step and later."""

import shutil
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import lowbit_optim
from protocol import identical, parameters, python, snapshot

pytest.importorskip("triton", reason="the Triton engine needs the triton package")

from absent_gpu import build, launching
from benchmarks.static.ptx.launch import emulated

SHAPES = [(64, 300), (2048,), (7,), (0,), (5, 256)]


def gradient(p, seed, offset):
    """One that starts as many elements after an aligned address."""
    made = torch.randn(p.numel() + offset, generator=torch.Generator().manual_seed(seed))
    return made.to(p.dtype)[offset:].view(p.shape)


def steps(name, dtype, options):
    """With a new group, another learning rate, unaligned and missing gradients, and a scaler."""
    first, *others = parameters(getattr(torch, dtype), SHAPES)
    optimizer = getattr(lowbit_optim, name)([first], lr=0.01, **options)
    for t in range(8):
        if t == 1:
            optimizer.add_param_group({"params": others, "weight_decay": 0.1})
        for i, p in enumerate([first, *others]):
            p.grad = None if (t, i) == (5, 1) else gradient(p, 10 * t + i, int(t == 4))
        optimizer.param_groups[0]["lr"] = 0.01 if t < 3 else 0.02
        if t == 6:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        optimizer.step()
    codes, scales = lowbit_optim.quantize_blockwise(first.detach().float())
    return snapshot(optimizer), codes, lowbit_optim.dequantize_blockwise(codes, scales)


def compare(folder, *arguments):
    """Steps through the launcher and the driver in a folder, and emulated without them."""
    with lowbit_optim.use_engine("triton"):
        with emulated(90):
            expected = steps(*arguments)
        with launching(90, folder) as gpu:
            assert identical(steps(*arguments), expected)
    assert gpu.again > 0


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with a driver for no GPU."""
    if shutil.which("cc") is None:
        pytest.skip("Triton's launcher is compiled by a C compiler, which is not here")
    if torch.cuda.is_available():
        pytest.skip("there is a driver, which other tests launch with")
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("AdamW8bit", "float32", {"min_8bit_size": 1}),
        ("AdamW4bit", "bfloat16", {"min_8bit_size": 1000, "master_weight_bits": 24}),
        ("LAMB8bit", "float32", {"min_8bit_size": 1, "percentile_clipping": 50}),
        ("LARS", "bfloat16", {"momentum": 0.9, "trust_coefficient": 0.02}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_launcher_passes_on_what_the_engine_launches(name, dtype, options, driver):
    """Bit for bit what the emulator makes of it, by the kernels that Triton's binder would find."""
    arguments = str(driver), name, dtype, options
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_launcher import compare
        compare(*{arguments})
    """
    python(dedent(script), timeout=300, TRITON_LIBCUDA_PATH=str(driver), TRITON_INTERPRET="0")
