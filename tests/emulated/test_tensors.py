"""Whole tensors coded and decoded by emulated kernels: the same bits as on the torch engine."""

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import weights

pytest.importorskip("triton", reason="the Triton engine needs the triton package")

from benchmarks.static.ptx.launch import emulated
from lowbit_optim_kernels.engines.triton import grid, kinds
from test_triton_formats import engine_triton, split_kernel, weights_of_all_kinds

SHAPES = [(4096,), (3, 272), (5, 300), (257,), (0,), ()]
ARCHITECTURES = pytest.mark.parametrize("arch", [61, 75, 80, 90, 120])
SIGNED = pytest.mark.parametrize("signed", [True, False])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def numbers(shape, dtype):
    """Of many magnitudes; some are zero, the last two no numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x = x * 10.0 ** torch.randint(-6, 3, x.shape, generator=generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x)
    if x.numel() > 2:
        x.view(-1)[-2:] = torch.tensor([float("nan"), float("inf")])
    return x.to(dtype)


@ARCHITECTURES
@SIGNED
@DTYPES
def test_whole_tensors_are_coded_as_on_torch(arch, signed, dtype):
    for shape in SHAPES:
        x = numbers(shape, dtype)
        with lowbit_optim.use_engine("torch"):
            codes, absmax = lowbit_optim.quantize_blockwise(x, signed)
            values = lowbit_optim.dequantize_blockwise(codes, absmax, signed, dtype)
        with emulated(arch) as emulation, lowbit_optim.use_engine("triton"):
            mine, mine_absmax = lowbit_optim.quantize_blockwise(x, signed)
            back = lowbit_optim.dequantize_blockwise(codes, absmax, signed, dtype)
        assert torch.equal(mine_absmax, absmax)
        assert int((mine != codes).sum()) <= 0.001 * codes.numel()
        assert torch.equal(back, values)
        for counters in emulation.counters.values():
            assert not counters.races
            assert not counters.unwritten


@ARCHITECTURES
def test_a_zero_square_is_stored_as_zero(arch):
    p = torch.nn.Parameter(torch.ones(2048))
    p.grad = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    p.grad[::3] = 0.0
    optimizer = lowbit_optim.AdamW8bit([p], min_8bit_size=1)
    with emulated(arch), lowbit_optim.use_engine("triton"):
        optimizer.step()
    assert not optimizer.state[p]["exp_avg_sq"][::3].any()


@ARCHITECTURES
def test_a_slow_average_next_to_zero_is_coded_as_on_torch(arch):
    generator, codes = torch.Generator().manual_seed(0), []
    g = torch.randn(2048, generator=generator)
    g *= 10.0 ** torch.randint(-7, 1, g.shape, generator=generator)
    for engine in ("torch", "triton"):
        p = torch.nn.Parameter(torch.ones(2048))
        p.grad = g.clone()
        optimizer = lowbit_optim.AdEMAMix8bit([p], min_8bit_size=1)
        with emulated(arch), lowbit_optim.use_engine(engine):
            optimizer.step()
        codes.append(optimizer.state[p]["exp_avg_slow"])
    assert int((codes[0] != codes[1]).sum()) <= 2


@ARCHITECTURES
@pytest.mark.parametrize("bits", [16, 24, 32])
def test_weights_are_split_and_joined_as_on_torch(arch, bits):
    """But for NaN, which is the machine's own, and residuals of zeros, which are not read."""
    kind, w = weights.WEIGHTS[bits], weights_of_all_kinds()
    w = torch.where(w.isnan(), torch.tensor([0x7FFFFFFF]).int().view(torch.float32), w)
    random = torch.randint(0, 2**32, w.shape, generator=torch.Generator().manual_seed(0))
    high, back = torch.zeros(len(w), dtype=torch.bfloat16), torch.zeros(len(w))
    low = torch.zeros(len(w), dtype=kind.residual or torch.int8)
    with emulated(arch):
        split_kernel[(1,)](
            w, random, high, low, back, EXTRA=kind.extra, DITHERED=kind.dithered, N=len(w),
            PTX=True, **engine_triton.OPTIONS,
        )  # fmt: skip
    want, residual = weights.split(w, kind.extra, random if kind.dithered else None)
    number = ~w.isnan()
    assert torch.equal(high.isnan(), ~number)
    assert torch.equal(high[number].view(torch.int16), want[number].view(torch.int16))
    joined = kind.read(want, residual.to(low.dtype) if kind.extra else None, torch.float32)
    assert torch.equal(back[number].view(torch.int32), joined[number].view(torch.int32))
    kept = number & (high != 0)
    if kind.extra:
        assert torch.equal(low[kept].long(), residual[kept])


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("name", "format"),
    [("AdamW", "dynamic8"), ("AdamW", "ratio8"), ("AdamW", "ratio4"), ("LAMB", "ratio8")],
)
def test_long_tensors_step_to_the_same_bits_by_spans(arch, name, format, monkeypatch):
    """Some formats ask for tiles ahead, which must not lie beyond a tensor's end."""

    def stepped():
        generator = torch.Generator().manual_seed(0)
        shapes = [(5 * kinds.TILE + 200,), (2 * kinds.TILE,)]
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
            for shape in shapes
        ]
        optimizer = getattr(lowbit_optim, name)(params, 1e-2, state_format=format, min_8bit_size=1)
        with emulated(arch) as emulation, lowbit_optim.use_engine("triton"):
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(p)
                optimizer.step()
        for counters in emulation.counters.values():
            assert not counters.races
            assert not counters.unwritten
        return params, optimizer.state

    together = stepped()
    monkeypatch.setattr(grid, "ALONE", 1)
    monkeypatch.setattr(grid, "LONG", 0)
    monkeypatch.setattr(kinds, "AHEAD", 3)
    apart = stepped()
    for p, q in zip(together[0], apart[0], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(together[1][p][key], x) for key, x in apart[1][q].items())
