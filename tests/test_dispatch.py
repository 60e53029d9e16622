"""Which engine runs what: the default, refusals, fallbacks."""

import dataclasses
import platform
import sys
import types
import warnings
from importlib.machinery import PathFinder

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import lowbit_optim
from lowbit_optim import EngineChoice, engine_for, use_engine
from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.engines import registry as engines
from protocol import parameters, python, train

pytest.importorskip("numba")
from lowbit_optim_kernels.engines.numba import vector

VARIABLE = "LOWBIT_OPTIM_ENGINE"
HALF_TO_SINGLE = (torch.float32, torch.bfloat16, torch.float16)

# A step of a parameter of 5000 elements, for scripts that run in a process of their own.
STEP = """
import torch, lowbit_optim
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = lowbit_optim.AdamW8bit([p], lr=0.1)
"""


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    """Whatever the environment asks for, these tests ask themselves."""
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_default_by_device_and_dtype():
    for dtype in HALF_TO_SINGLE:
        if engines.NUMBA.declines(
            torch.device("cpu"), dtype
        ):  # float16 without F16C: test_numba_portable
            continue
        choice = engine_for(torch.zeros(3, dtype=dtype))
        assert isinstance(choice, EngineChoice)
        assert choice.name == "numba"
        assert str(dtype) in choice.reason
    wide = engine_for(torch.zeros(3, dtype=torch.float64))
    assert wide.name == "torch"
    assert "does not take torch.float64" in wide.reason
    elsewhere = engine_for(torch.zeros(3, device="meta"))
    assert elsewhere == EngineChoice("torch", "the default for torch.float32 on meta")


def test_the_reason_names_the_instructions():
    compiled_for = f", compiled for {vector.instruction_set()}"
    assert engine_for(torch.zeros(3)).reason.endswith(compiled_for)
    with use_engine("numba"):
        assert engine_for(torch.zeros(3)).reason == f"use_engine asks for it{compiled_for}"


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    choice = engine_for(torch.zeros(3))
    assert choice == EngineChoice("torch", "LOWBIT_OPTIM_ENGINE asks for it")
    with use_engine("auto"):
        assert engine_for(torch.zeros(3)).name == "numba"
    monkeypatch.setenv(VARIABLE, "")
    assert engine_for(torch.zeros(3)).reason.startswith("the default for torch.float32 on cpu")
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match="LOWBIT_OPTIM_ENGINE must be one of auto, triton, numba"):
        engine_for(torch.zeros(3))


def test_numba_cannot_run_float64():
    (p,) = parameters(torch.float64, [(5000,)])
    optimizer = lowbit_optim.AdamW8bit([*parameters(), p])
    with use_engine("numba"):
        for call in (lambda: engine_for(p), lambda: train(optimizer, 1)):
            with pytest.raises(RuntimeError, match=r"'numba', but .* does not take torch\.float64"):
                call()
    assert not optimizer.state
    train(optimizer, 1)


def test_triton_without_gpu_or_interpreter():
    script = f"""{STEP}
before = p.detach().clone()
lowbit_optim.use_engine("triton")
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
assert torch.equal(p, before) and not optimizer.state
"""
    message = python(script, TRITON_INTERPRET="0")
    assert "use_engine asks for the engine 'triton', but triton compiles for CUDA" in message


def test_a_missing_numba_warns_once_and_falls_back():
    script = f"""
import sys, warnings
sys.modules["numba"] = None
{STEP}
p.grad_dtype = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = torch.nn.Parameter(torch.ones(5000, dtype=dtype))
        q.grad = torch.ones_like(q)
        lowbit_optim.SGD8bit([q], lr=0.1, momentum=0.9).step()
        optimizer.step()
assert lowbit_optim.engine_for(p).name == "torch"
assert len(caught) == 1 and caught[0].category is RuntimeWarning, caught
print(caught[0].message)
lowbit_optim.use_engine("numba")
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
"""
    warning, refusal = python(script).splitlines()
    assert "slower torch engine: numba is not installed" in warning
    assert "use_engine asks for the engine 'numba', but numba is not installed" in refusal


FALLS_BACK = f"""
import sys, types, warnings
sys.path.insert(0, {{folder!r}})
{STEP}
tensor = types.SimpleNamespace(device=torch.device({{device!r}}), dtype=torch.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        choice = lowbit_optim.engine_for(tensor)
        optimizer.step()
assert choice.name == "torch" and (p < 1).all()
assert len(caught) == 1 and caught[0].category is RuntimeWarning, caught
print(caught[0].message)
try:
    with lowbit_optim.use_engine({{engine!r}}):
        lowbit_optim.engine_for(tensor)
except RuntimeError as error:
    print(error)
"""


def test_a_numba_that_does_not_compile_is_a_reason():
    script = FALLS_BACK.format(folder="", device="cpu", engine="numba")
    warning, refusal = python(script, NUMBA_DISABLE_JIT="1").splitlines()
    assert "runs cpu tensors on the slower torch engine: NUMBA_DISABLE_JIT is set" in warning
    assert "use_engine asks for the engine 'numba', but NUMBA_DISABLE_JIT is set" in refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "package", "error"),
    [
        ("numba", "llvmlite", "OSError('libllvmlite.so: no such file')"),
        ("numba", "numba", "ImportError('Numba needs NumPy 2.2 or less. Got NumPy 2.9.')"),
        ("numba", "numba", "SystemError('initialization of _internal failed')"),
        ("triton", "triton", "ImportError('libtriton.so: undefined symbol')"),
    ],
)
def test_what_is_installed_but_does_not_import_is_a_reason(tmp_path, engine, package, error):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}\n")
    device = "cpu" if engine == "numba" else "cuda"
    script = FALLS_BACK.format(folder=str(tmp_path), device=device, engine=engine)
    warning, refusal = python(script).splitlines()
    text = error.partition("'")[2].partition("'")[0]
    for message in (warning, refusal):
        assert f"{engine} is installed but does not import: " in message
        assert message.partition("import: ")[2].startswith(error.partition("(")[0])
        assert text in message


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError, ValueError])
def test_what_is_built_for_another_library_is_a_reason(monkeypatch, error):
    """Such as NumPy, whose changes show in many ways."""

    def fail(*call):
        raise error("of a test")

    monkeypatch.setattr(engines, "uninterrupted", fail)
    reason = f"numba is installed but does not import: {error.__name__}: of a test"
    assert engines._broken.__wrapped__("numba") == engines.Refusal(reason, warn=True)


@pytest.mark.parametrize("chosen", [engines.NUMBA, engines.TRITON], ids=lambda one: one.name)
def test_a_folder_of_a_compilers_name_is_no_compiler(tmp_path, monkeypatch, chosen):
    """Such as a checkout of its sources next to a program."""
    (tmp_path / chosen.requires).mkdir()
    finder = types.SimpleNamespace(
        find_spec=lambda name, path=None, target=None: PathFinder.find_spec(name, [str(tmp_path)])
    )
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, chosen.requires, raising=False)
        patch.setattr(sys, "meta_path", [finder])
        patch.setattr(engines, "_installed", engines._installed.__wrapped__)
        refusal = chosen.refusal(torch.device(next(iter(chosen.devices))), torch.float32)
    assert refusal == engines.Refusal(f"{chosen.requires} is not installed", warn=True)


@pytest.mark.parametrize("chosen", [engines.NUMBA, engines.TRITON], ids=lambda one: one.name)
def test_nothing_is_compiled_without_sources(monkeypatch, chosen):
    pytest.importorskip(chosen.requires)
    missing = engines.Refusal("a test has no sources", warn=True)
    monkeypatch.setattr(engines, "_without_sources", lambda: missing)
    device = torch.device(next(iter(chosen.devices)))
    assert chosen.refusal(device, torch.float32) == missing


@pytest.mark.parametrize("stub", [None, types.ModuleType("numba")], ids=["None", "a stub"])
def test_what_a_program_puts_in_the_place_of_a_compiler_is_none(monkeypatch, stub):
    """So that others import what they would not use."""
    monkeypatch.setitem(sys.modules, "numba", stub)
    monkeypatch.setattr(engines, "_installed", engines._installed.__wrapped__)
    refusal = engines.NUMBA.refusal(torch.device("cpu"), torch.float32)
    assert refusal == engines.Refusal("numba is not installed", warn=True)


def test_what_wraps_tensors_is_run_by_the_torch_engine_alone():
    """Whoever asks for it."""
    cpu = torch.device("cpu")
    for asked in ("auto", "torch"):
        assert dispatch.choose(asked, "", cpu, torch.float32, TwoTensor).name == "torch"
    with pytest.raises(RuntimeError, match=r"'numba', but .* and a TwoTensor has none"):
        dispatch.choose("numba", "", cpu, torch.float32, TwoTensor)


def test_instructions_that_numba_is_told_to_leave_are_left():
    """LLVM would end the process: `NUMBA_ENABLE_AVX=0`, or a /proc/cpuinfo that says nothing."""
    script = f"{STEP}optimizer.step()\nprint(lowbit_optim.engine_for(p).reason, p.max().item())"
    chosen = {"NUMBA_ENABLE_AVX": "0", "NUMBA_CPU_NAME": None, "NUMBA_CPU_FEATURES": None}
    reason = python(script, **chosen)
    assert f"compiled for any {platform.machine()} 0.89" in reason


def test_only_a_tensor_that_needs_a_compiler_imports_it():
    script = """
import sys, torch
before = set(sys.modules)
import lowbit_optim
lowbit_optim.engine_for(torch.ones(3, dtype=torch.float64))
lowbit_optim.engine_for(torch.ones(3, device="meta"))
print({"numba", "llvmlite", "triton"} & (set(sys.modules) - before))
"""
    assert python(script) == "set()"


def test_an_engine_is_one_record(monkeypatch):
    """It is the choice for its devices, can be asked for, refuses with a reason, and steps."""
    torch_engine, started = engines.TORCH.code, []
    module = types.ModuleType("toy_engine")
    module.start = lambda batch: started.append(batch) or torch_engine.start(batch)
    monkeypatch.setitem(sys.modules, "toy_engine", module)
    no_half = engines.Refusal("the toy engine is too small for halves")
    toy = engines.Engine(
        name="toy",
        module="toy_engine",
        requires=None,
        devices=frozenset({"mps"}),
        dtypes=frozenset({torch.float32, torch.float16}),
        declines=lambda device, dtype: no_half if dtype == torch.float16 else None,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        toy.name = "other"
    monkeypatch.setitem(engines.ENGINES, "toy", toy)
    mps = torch.device("mps")
    assert dispatch.choose("auto", "", mps, torch.float32).name == "toy"
    assert dispatch.choose("auto", "", mps, torch.float16) == EngineChoice("torch", no_half.reason)
    assert "not take torch.float64" in dispatch.choose("auto", "", mps, torch.float64).reason
    with pytest.raises(RuntimeError, match="but the toy engine is too small"):
        dispatch.choose("toy", "", mps, torch.float16)
    with use_engine("toy"):
        train(lowbit_optim.AdamW8bit(parameters()), 2)
    assert len(started) == 2


@pytest.mark.parametrize("warn", [False, True])
def test_a_refusal_says_whether_to_warn(monkeypatch, warn):
    refusal = engines.Refusal(f"a test wants {warn}", warn)
    picky = dataclasses.replace(engines.NUMBA, declines=lambda device, dtype: refusal)
    monkeypatch.setitem(engines.ENGINES, "numba", picky)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in HALF_TO_SINGLE:
            choice = dispatch.choose("auto", "", torch.device("cpu"), dtype)
            assert choice == EngineChoice("torch", refusal.reason)
    assert len(caught) == warn


@pytest.mark.parametrize("half", [torch.float16, torch.float32], ids=str)
def test_gradients_are_read_in_dtypes_that_an_engine_takes(monkeypatch, half):
    """Without instructions for fp16, code that reads it would end the process."""
    monkeypatch.setattr(vector, "converts_half", lambda: half == torch.float16)
    read = {torch.float16: half, torch.bfloat16: torch.bfloat16, torch.float64: torch.float32}
    for dtype, wanted in read.items():
        g = torch.ones(3, dtype=dtype)
        assert dispatch.readable(g, "numba").dtype == wanted
        assert dispatch.readable(g, "torch") is g


@pytest.mark.parametrize("method", ["begin", "finish"])
def test_an_exception_inside_an_engine_propagates(monkeypatch, method):
    """It is never turned into a run on another engine."""

    def fail(self):
        raise ZeroDivisionError("inside the engine")

    monkeypatch.setattr(engines.NUMBA.code.NumbaRun, method, fail)
    with pytest.raises(ZeroDivisionError, match="inside the engine"):
        train(lowbit_optim.AdamW8bit(parameters()), 1)


def test_an_engine_that_does_not_import_propagates(monkeypatch):
    broken = dataclasses.replace(engines.NUMBA, module="a_module_that_is_missing")
    monkeypatch.setitem(engines.ENGINES, "numba", broken)
    with pytest.raises(ImportError, match="a_module_that_is_missing"):
        train(lowbit_optim.AdamW8bit(parameters()), 1)


def test_the_engine_may_change_between_steps():
    """State belongs to the format, not to the engine."""
    optimizer = lowbit_optim.AdamW8bit(parameters(), lr=0.1, min_8bit_size=1)
    other = lowbit_optim.AdamW8bit(parameters(), lr=0.1, min_8bit_size=1)
    for t, name in enumerate(("torch", "numba", "torch", "numba")):
        with use_engine(name):
            train(optimizer, 1, first=t)
    train(other, 4)
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, other)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_a_triton_that_cannot_compile_the_kernels_is_not_asked_to(monkeypatch):
    triton = pytest.importorskip("triton")
    cuda = torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for found in ("3.4.0", "3.10.0", "4.0.0+git1"):
        monkeypatch.setattr(triton, "__version__", found)
        assert engines.TRITON.refusal(cuda, torch.float32) is None
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    refusal = engines.TRITON.refusal(cuda, torch.float32)
    assert "3.4" in refusal.reason
    assert refusal.warn
    with pytest.warns(RuntimeWarning, match="slower torch engine: kernels need Triton 3.4"):
        choice = dispatch.choose("auto", "", cuda, torch.float32)
    assert choice.name == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert engines.TRITON.refusal(torch.device("cpu"), torch.float32) is None, "interpreted"


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_tritons_interpreter_is_not_given_a_devices_addresses(monkeypatch, device):
    pytest.importorskip("triton")
    for value in ("1", "True", "on", "YES", "y"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        refusal = engines.TRITON.refusal(torch.device(device), torch.float32)
        assert refusal.reason.startswith("TRITON_INTERPRET is set")
        assert refusal.warn
