"""The pages on adding things, followed: their code runs as it stands there, on every engine."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import batch, dispatch, formats
from lowbit_optim_kernels.engines import registry, request
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8, ZERO_CODE
from lowbit_optim_kernels.rules import Moment, gives
from protocol import identical, train

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHAPES = [(64, 147), (3, 300), (257,), (5,), (2048 + 64,)]


def modules_of(page):
    """The page's blocks of code that begin with the name of a file."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Write a page's modules and make them importable; all is undone after the test."""

    def write(page):
        found = modules_of(page)
        assert found
        for name, text in found.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return found

    monkeypatch.syspath_prepend(tmp_path)
    before, known = set(sys.modules), dict(formats.FORMATS)
    yield write
    for name in formats.FORMATS.keys() - known.keys():
        del formats.FORMATS[name]
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


def params_on(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES
    ]


def test_a_format_is_added_by_its_own_files(follow, engine, device):
    """Names, shapes, conversion and all engines' code: nothing else knows of it."""
    follow("adding_a_format.md")
    linear8 = importlib.import_module("linear8").LINEAR8
    made = {}
    for name in (engine, "torch"):
        params = params_on(device)
        with lowbit_optim.use_engine(name):
            optimizer = lowbit_optim.AdamW8bit(
                params, lr=0.01, min_8bit_size=1, state_format="linear8"
            )
            train(optimizer, 1)
        made[name] = params, optimizer
    (params, optimizer), (others, other) = made[engine], made["torch"]
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for key, x in optimizer.state[p].items():
            y = other.state[q][key]
            assert (x.shape, x.dtype) == (y.shape, y.dtype), key
            if x.dtype == torch.uint8:  # where a rounding falls on the other side
                off = (x.int() - y.int()).abs()
                assert off.max() <= 1, key
                assert (off > 0).float().mean() <= 0.01, key
            else:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)
    keys = {part.key for unit in formats.units(optimizer.moments(), linear8) for part in unit.parts}
    assert optimizer.state[params[0]].keys() == keys | {"step"}
    scales = optimizer.state[params[0]]["exp_avg_scale"]
    assert scales.shape == (64, 2), "two blocks of 128 for every row of 147"


def test_an_added_format_is_saved_loaded_and_converted(follow, device, engine):
    follow("adding_a_format.md")
    importlib.import_module("linear8")
    with lowbit_optim.use_engine(engine):
        first = lowbit_optim.AdamW8bit(params_on(device), min_8bit_size=1, state_format="linear8")
        train(first, 1)
        saved = first.state_dict()
        again = lowbit_optim.AdamW8bit(params_on(device), min_8bit_size=1, state_format="linear8")
        again.load_state_dict(saved)
        assert identical(again.state_dict()["state"], saved["state"])
        wide = lowbit_optim.AdamW32bit(params_on(device))
        wide.load_state_dict(saved)
        back = lowbit_optim.AdamW8bit(params_on(device), min_8bit_size=1, state_format="linear8")
        back.load_state_dict(wide.state_dict())
    for index, state in saved["state"].items():
        value = wide.state_dict()["state"][index]["exp_avg"]
        assert value.dtype == torch.float32
        assert value.shape == SHAPES[index]
        for key, x in state.items():
            torch.testing.assert_close(back.state_dict()["state"][index][key], x, msg=key)
    narrow = lowbit_optim.AdamW8bit(params_on(device), min_8bit_size=1)
    narrow.load_state_dict(saved)
    assert "exp_avg_absmax" in narrow.state_dict()["state"][0]


def test_the_torch_engine_has_short_blocks_decoded_as_if_zeros_followed(monkeypatch):
    """So a format reads nothing but codes that it has made."""
    (unit,), shape, seen = formats.units((Moment("exp_avg"),), DYNAMIC8), torch.Size((3, 300)), []
    decode = type(DYNAMIC8).decode

    def watched(self, moments, stored, dtype):
        seen.append(stored[0])
        return decode(self, moments, stored, dtype)

    monkeypatch.setattr(type(DYNAMIC8), "decode", watched)
    with lowbit_optim.use_engine("torch"):
        stored = dispatch.encode(unit, [torch.ones(shape)], shape)
        (x,) = dispatch.decode(unit, list(stored.values()), shape, torch.float32)
    (codes,) = seen
    assert codes.shape == (3, 2, DYNAMIC8.block)
    assert (codes[:, 1, 300 - DYNAMIC8.block :] == ZERO_CODE[True]).all()
    assert (x == 1.0).all()


def test_an_engine_is_added_by_its_record(tmp_path, monkeypatch):
    """The page's record, with a module that counts what the torch engine does for it."""
    text = (DOCS / "adding_an_engine.md").read_text(encoding="utf-8")
    (record,) = re.findall(r"^```python\n(from .*?)^```$", text, re.DOTALL | re.MULTILINE)
    module = """
from lowbit_optim_kernels.engines.torch import decode as decode, encode as encode
from lowbit_optim_kernels.engines.torch import start as other
batches = []
def start(batch):
    batches.append(batch)
    return other(batch)
"""
    (tmp_path / "my_engine.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "ENGINES", dict(registry.ENGINES))
    for user in (dispatch, batch, request):
        monkeypatch.setattr(user, "ENGINES", registry.ENGINES)
    exec(compile(record, "adding_an_engine.md", "exec"), {})
    got, want = params_on("cpu"), params_on("cpu")
    for name, params in (("mine", got), ("torch", want)):
        with lowbit_optim.use_engine(name):
            assert lowbit_optim.engine_for(params[0]).name == name
            train(lowbit_optim.LANS8bit(params, min_8bit_size=1), 2)
    assert len(sys.modules["my_engine"].batches) == 2
    assert identical([p.detach() for p in got], [p.detach() for p in want])
    refused = pytest.raises(RuntimeError, match="the mine engine computes in fp32 and does not")
    with lowbit_optim.use_engine("mine"), refused:
        lowbit_optim.engine_for(torch.zeros(3, dtype=torch.float64))
    del sys.modules["my_engine"]


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"'dynamic8', 'float32', 'ratio8', 'ratio4'; got 'linear8'"
    ):
        lowbit_optim.AdamW8bit(params_on("cpu"), state_format="linear8")


@pytest.mark.parametrize("bits", [8, 32])
def test_an_optimizer_is_added_by_its_own_files(follow, engine, device, bits):
    follow("adding_an_optimizer.md")
    cls = getattr(importlib.import_module("sign_momentum"), f"SignMomentum{bits}bit")
    params = params_on(device)
    optimizer = cls(params, lr=0.01, weight_decay=0.1, min_8bit_size=1)
    grads = []
    expected = [p.detach().double().cpu() for p in params]
    buffers = [torch.zeros_like(p) for p in expected]
    for t in range(3):
        train(optimizer, 1, first=t)
        grads = [p.grad.double().cpu() for p in params]
        for i, g in enumerate(grads):
            buffers[i] = 0.9 * buffers[i] + g
            expected[i] = expected[i] * (1 - 0.01 * 0.1) - 0.01 * buffers[i].sign()
    for p, q in zip(params, expected, strict=True):
        off = (p.detach().cpu().double() - q).abs() > 1e-4
        assert off.double().mean() <= (0.0 if bits == 32 else 0.05), "a sign may turn near zero"
    assert "momentum: decay of the momentum. Default 0.9." in cls.__doc__
    assert "maximize: ascend" in cls.__doc__


def test_a_rules_function_reads_nothing_of_a_function_around_it():
    factor = 0.5
    with pytest.raises(ValueError, match="'prepare' reads factor of a function around it"):

        @gives("shrink", "rate")
        def prepare(lr):
            return 1.0, factor * lr
