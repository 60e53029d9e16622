"""The Numba engine on CPUs without AVX-512, for which it compiles other instructions."""

import platform

import pytest

from protocol import python

pytest.importorskip("numba")

CPUS = {  # Numba's names, and what the engine says that it compiles for
    "AVX2": ("haswell", "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt", "AVX2"),
    "SSE2": ("x86-64", "+sse2", f"any {platform.machine()}"),
}
pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 features"),
    pytest.mark.parametrize("cpu", CPUS),
]
START = """
import torch, lowbit_optim
from lowbit_optim_kernels.formats.dynamic8 import numba as numba_codec
assert not numba_codec.HAS_AVX512
named = lowbit_optim.engine_for(torch.zeros(1)).reason
assert named == "the default for torch.float32 on cpu, compiled for {wanted}", named

def walk(engine, cls, dtype, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000,), (64, 147), (7,), ()]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    with lowbit_optim.use_engine(engine):
        optimizer = cls(params, lr=0.01, min_8bit_size=1, **options)
        for _ in range(4):
            for p in params:
                p.grad = (torch.randn(p.shape, generator=generator) ** 7).to(dtype)
            optimizer.step()
    return [p.detach().float() for p in params], optimizer

def other_codes(cls, **options):
    count = 0
    optimizers = [walk(engine, cls, torch.float32, **options)[1] for engine in ("numba", "torch")]
    for states in zip(*(optimizer.state.values() for optimizer in optimizers)):
        for x, y in zip(*(state.values() for state in states)):
            count += int((x != y).sum()) if x.dtype == torch.uint8 else 0
    return count

def farthest(cls, dtype, **options):
    got, want = (walk(engine, cls, dtype, **options)[0] for engine in ("numba", "torch"))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want))
"""


def run(cpu, script, tmp_path):
    """Where the engine's reason names the instructions, run a script; what it prints."""
    name, features, wanted = CPUS[cpu]
    chosen = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    script = START.replace("{wanted}", wanted) + script
    return python(script, timeout=240, LOWBIT_OPTIM_CACHE_DIR=str(tmp_path), **chosen)


@pytest.mark.slow
def test_steps_are_as_on_torch(cpu, tmp_path):
    script = """
for cls, options in ((lowbit_optim.AdamW8bit, {}), (lowbit_optim.LARS8bit, {"momentum": 0.9})):
    for dtype in (torch.float32, torch.bfloat16):
        assert farthest(cls, dtype, **options) < (1e-4 if dtype == torch.float32 else 8e-3)
print("same")
"""
    assert run(cpu, script, tmp_path) == "same"


@pytest.mark.slow
def test_ratios_dither_and_master_weights_are_as_on_torch(cpu, tmp_path):
    script = """
cases = [
    (lowbit_optim.AdamW8bit, {"state_format": "ratio8"}), (lowbit_optim.AdamW8bit, {}),
    (lowbit_optim.AdamW4bit, {}), (lowbit_optim.SGD8bit, {"momentum": 0.999}),
    (lowbit_optim.SGD8bit, {"momentum": 0.999, "state_format": "ratio8"}),
]
for cls, options in cases:
    assert other_codes(cls, **options) < 8, (cls, options, other_codes(cls, **options))
for bits in (16, 24, 32):
    options = {"state_format": "ratio8", "master_weight_bits": bits}
    assert farthest(lowbit_optim.AdamW8bit, torch.bfloat16, **options) < 8e-3
print("same")
"""
    assert run(cpu, script, tmp_path) == "same"


def test_codes_are_the_nearest(cpu, tmp_path):
    script = """
import numpy as np
import reference_codec
rng = np.random.default_rng(0)
for signed in (True, False):
    x = 10.0 ** -(8 * rng.random((400, reference_codec.BLOCK)))
    x *= rng.choice([-1, 1], x.shape) if signed else 1
    x[:, 0], x[:, 1] = 1.0, 0.0
    x = x.astype(np.float32).ravel()
    codes, _ = lowbit_optim.quantize_blockwise(torch.from_numpy(x), signed)
    want, absmax = reference_codec.encode(x, signed)
    relative = reference_codec.relative(x, absmax)
    bad = reference_codec.misplaced(relative, signed, codes.numpy(), want, "numba")
    assert not len(bad), (signed, relative[bad])
print("nearest")
"""
    assert run(cpu, script, tmp_path) == "nearest"


@pytest.mark.few
def test_codes_decode_to_the_codebook(cpu, tmp_path):
    """Exactly, but within a step, where it may be two ulp off."""
    script = """
import numba
import numpy as np
import reference_codec
codes = np.arange(256, dtype=np.uint8)
for signed, decode in ((True, numba_codec.decode_s), (False, numba_codec.decode_u)):
    book, near = reference_codec.codebook(signed), np.full(256, np.nan, np.float32)
    numba.njit(lambda at, out: decode(at, out, 256))(codes.ctypes.data, near.ctypes.data)
    np.testing.assert_array_max_ulp(near, book, 2)
    assert (near == 0).tolist() == (book == 0).tolist(), signed
    exact = lowbit_optim.dequantize_blockwise(torch.from_numpy(codes), torch.ones(1), signed=signed)
    np.testing.assert_array_equal(exact.numpy(), book)
print("codebook")
"""
    assert run(cpu, script, tmp_path) == "codebook"


@pytest.mark.slow
def test_float16(cpu, tmp_path):
    """Without F16C there are no instructions for it, and Numba would crash."""
    script = """
import warnings
if {without}:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got, _ = walk("auto", lowbit_optim.AdamW8bit, torch.float16)
    assert "lacks instructions for float16" in str(seen[0].message), seen
    assert lowbit_optim.engine_for(torch.zeros(1, dtype=torch.float16)).name == "torch"
    want, _ = walk("torch", lowbit_optim.AdamW8bit, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
else:
    assert farthest(lowbit_optim.AdamW8bit, torch.float16) < 2e-3
print("done")
""".replace("{without}", str(cpu == "SSE2"))
    assert run(cpu, script, tmp_path) == "done"
