"""What depends on what a device can do, or is doing, without such a device."""

from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit_optim
from lowbit_optim import _eager, _state_layout
from lowbit_optim_kernels import devices, dispatch
from lowbit_optim_kernels.engines import registry as engines
from lowbit_optim_kernels.engines import torch as torch_engine
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from protocol import python

WIDE = pytest.mark.parametrize("wide", [True, False])
XPU = torch.device("xpu", 7)
CLASSES = [name for name in dir(lowbit_optim) if name.endswith("8bit")]


@pytest.fixture
def xpu(wide, monkeypatch):
    """One of Intel's GPUs, with or without fp64."""
    properties = SimpleNamespace(has_fp64=wide)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(engines, "_without_launcher", lambda kind: None)  # of which there is none
    devices.has_fp64.cache_clear()
    dispatch._resolve.cache_clear()
    yield XPU
    devices.has_fp64.cache_clear()
    dispatch._resolve.cache_clear()


@WIDE
def test_once_a_tensor_is_computed_in_fp64_where_there_is_such(xpu, wide):
    assert devices.scalar_dtype(xpu) == (torch.float64 if wide else torch.float32)
    assert devices.scalar_dtype(torch.device("cuda")) == torch.float64
    assert devices.scalar_dtype(torch.device("mps")) == torch.float32


@WIDE
def test_triton_refuses_a_gpu_without_fp64(xpu, wide):
    pytest.importorskip("triton", minversion="3.4")
    choice = dispatch.choose("auto", "", xpu, torch.float32)
    assert choice.name == ("triton" if wide else "torch")
    assert wide or choice.reason == engines.TRITON.refusal(xpu, torch.float32).reason
    assert wide or "fp64, which this GPU lacks" in choice.reason


def test_triton_is_not_asked_where_it_cannot_build_its_launcher(tmp_path):
    """As in an image without a C compiler: there the torch engine steps in, with a warning."""
    pytest.importorskip("triton", minversion="3.4")
    script = """
        import pytest, torch
        from lowbit_optim_kernels import dispatch
        torch.cuda.is_available = lambda: True
        cannot = "triton cannot build its launcher in C: RuntimeError: Failed to find C compiler"
        with pytest.warns(RuntimeWarning, match=f"slower torch engine: {cannot}"):
            assert dispatch.choose("auto", "", torch.device("cuda"), torch.float32).name == "torch"
        with pytest.raises(RuntimeError, match=cannot):
            dispatch.choose("triton", "", torch.device("cuda"), torch.float32)
    """
    (tmp_path / "libcuda.so.1").touch()  # which its build looks for first
    absent, own = str(tmp_path / "no"), str(tmp_path)
    python(
        dedent(script), CC=None, PATH=absent, TRITON_INTERPRET="0", TRITON_LIBCUDA_PATH=own,
        TRITON_CACHE_DIR=own,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_stream_that_runs_what_a_device_is_given_is_its_own(kind, monkeypatch):
    """Not that of another device of its type, which is the current one."""
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "current_stream", lambda device=None: ("stream", device))
    second = torch.device(kind, 1)
    assert devices.current_stream(second) == ("stream", second)
    assert devices.current_stream(torch.device("cpu")) is None


class Operators(TorchDispatchMode):
    """Notes the operators that give fp64 on a device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.wide = device, set()

    def __torch_dispatch__(self, operator, kinds, args=(), options=None):
        result = operator(*args, **(options or {}))
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, torch.Tensor) and (x.dtype, x.device) == (torch.float64, self.device):
                self.wide.add(str(operator))
        return result


@pytest.mark.parametrize("clipping", [100, 5])
@pytest.mark.parametrize("name", CLASSES)
def test_a_device_without_fp64_is_given_none(name, clipping, monkeypatch):
    """The meta device stands for it, as it runs what any device is given."""
    for module in (torch_engine, _state_layout, _eager):
        monkeypatch.setattr(module, "scalar_dtype", lambda device: torch.float32)
    p = torch.nn.Parameter(torch.empty(5, 100, device="meta"))
    options = {"lr": 0.1, "min_8bit_size": 1, "percentile_clipping": clipping}
    optimizer = getattr(lowbit_optim, name)([p], **options)
    noted = Operators(p.device)
    for _ in range(2):
        p.grad = torch.empty_like(p)
        with noted:
            optimizer.step()
    assert not noted.wide


def test_a_capture_of_the_torch_engine_is_refused_by_name(monkeypatch):
    """By CUDA it would be by an error that names a copy, when the step was counted."""
    (p,) = params = [torch.nn.Parameter(torch.ones(300))]
    p.grad = torch.ones_like(p)
    with lowbit_optim.use_engine("torch"):
        optimizer = lowbit_optim.AdamW8bit(params)
        optimizer.step()
        before = p.detach().clone()
        monkeypatch.setattr(devices, "capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="CUDA graph: the torch engine takes numbers from"):
            optimizer.step()
    assert optimizer.state[p]["step"] == 1
    assert torch.equal(p, before)


class Stream:
    """A stream that notes which others it waits for."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wait_stream(self, other):
        self.seen.append((self.name, other.name))


def test_tables_are_kept_and_waited_for_on_another_stream(monkeypatch):
    """And on the one where they were made nothing is asked of a step."""
    pytest.importorskip("triton", minversion="3.4")
    from lowbit_optim_kernels.engines.triton import tables as engine_tables

    waits, kept = [], []
    a, b = (Stream(name, waits) for name in "ab")
    now = [a]
    monkeypatch.setattr(engine_tables, "current_stream", lambda device: now[0])
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: kept.append((x.data_ptr(), stream.name))
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (p,) = params = [torch.nn.Parameter(torch.ones(300, device=device))]
    with lowbit_optim.use_engine("triton"):
        optimizer = lowbit_optim.AdamW8bit(params)
        for stream, waited, recorded in ((a, 0, 0), (a, 0, 0), (b, 1, 8), (b, 1, 8), (a, 2, 16)):
            now[0], p.grad = stream, torch.ones_like(p)
            optimizer.step()
            assert (len(waits), len(kept)) == (waited, recorded)
    assert waits == [("b", "a"), ("a", "b")]
    ((batch,),) = [plan.batches for plan in optimizer.plans.values()]
    tables = {x.data_ptr() for x in vars(batch.tables).values() if isinstance(x, torch.Tensor)}
    assert {address for address, name in kept if name == "b"} == tables


def test_a_state_dict_of_what_has_no_values():
    """Of a model on the meta device, whose steps nobody counts."""
    p = torch.nn.Parameter(torch.empty(70, 70, device="meta"))
    optimizer = lowbit_optim.AdamW8bit([p])
    p.grad = torch.empty_like(p)
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    assert (saved["step"].dtype, saved["exp_avg"].dtype) == (torch.float32, torch.uint8)
    assert all(x.device.type == "meta" for x in saved.values())


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "LAMB8bit", "SGD32bit", "Cain8bit"])
def test_a_state_dict_of_what_has_no_values_loads(name):
    def trained():
        p = torch.nn.Parameter(torch.empty(70, 70, dtype=torch.bfloat16, device="meta"))
        more = {} if name == "Cain8bit" else {"percentile_clipping": 50}
        optimizer = getattr(lowbit_optim, name)([p], lr=0.1, **more)
        p.grad = torch.empty_like(p)
        optimizer.step()
        return optimizer

    optimizer, other = trained(), trained()
    optimizer.load_state_dict(other.state_dict())
    ((p, state),) = optimizer.state.items()
    (of_other,) = other.state.values()
    kinds = [{k: (x.shape, x.device) for k, x in one.items()} for one in (state, of_other)]
    assert kinds[0] == kinds[1]
    p.grad = torch.empty_like(p)
    optimizer.step()


def with_waiting_state(cls, **options):
    """An optimizer on the meta device with state on the CPU, and the parameter.

    As after a step whose state was moved until the next.
    """
    p = torch.nn.Parameter(torch.ones(64, 70, dtype=torch.bfloat16))
    optimizer = cls([p], min_8bit_size=1, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    there = torch.nn.Parameter(torch.empty_like(p, device="meta"))
    optimizer.param_groups[0]["params"] = [there]
    optimizer.state[there] = optimizer.state.pop(p)
    return optimizer, there


@pytest.mark.parametrize("bits", [16, 24])
def test_modes_bring_a_state_that_waits_elsewhere(bits):
    optimizer, p = with_waiting_state(lowbit_optim.ScheduleFreeAdamW8bit, master_weight_bits=bits)
    optimizer.eval()
    optimizer.train()
    assert {x.device.type for x in optimizer.state[p].values()} == {"meta"}


def test_master_weights_of_bits_that_wait_elsewhere():
    optimizer, _ = with_waiting_state(lowbit_optim.AdamW8bit, master_weight_bits=24)
    (weight,) = dict(lowbit_optim.master_weights(optimizer)).values()
    assert (weight.dtype, weight.device.type) == (torch.float32, "meta")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_machine_instructions_are_for_gpus_since_ampere(capability, monkeypatch):
    """Those of a T4 lack one of them: no kernel would compile."""
    pytest.importorskip("triton", minversion="3.4")
    from lowbit_optim_kernels.engines.triton import engine

    monkeypatch.setattr(engine, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert engine.takes_ptx(torch.device("cuda")) == (capability >= (8, 0))
    assert not engine.takes_ptx(XPU)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not engine.takes_ptx(torch.device("cuda"))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_triton_engine_launches_on_the_device_of_its_tensors(kind, monkeypatch):
    """Triton itself takes the current one, on which other code may be."""
    pytest.importorskip("triton", minversion="3.4")
    from lowbit_optim_kernels.engines.triton import engine

    second, current, seen = torch.device(kind, 1), [], []

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    def noted(*_):
        seen.append(list(current))

    launcher = SimpleNamespace(launch=noted)
    tables = SimpleNamespace(code="there is some", compiled=launcher)
    codec = SimpleNamespace(encode_tensors=noted, decode_tensors=noted)
    monkeypatch.setattr(torch.get_device_module(kind), "device", On)
    monkeypatch.setattr(engine, "tables_for", lambda batch: noted() or tables)
    monkeypatch.setattr(engine, "module_of", lambda format: codec)
    monkeypatch.setattr(engine, "takes_ptx", lambda device: seen.append([device]))
    run = engine.start(SimpleNamespace(device=second, rule=SimpleNamespace(phases=())))
    run._launch("key", "kernel", (1, 1, 1), ())
    unit, out = SimpleNamespace(format=DYNAMIC8), [SimpleNamespace(device=second)]
    engine.encode(unit, [], None, out)
    engine.decode(unit, [], None, out)
    assert seen == [[second]] * 6  # tables, a launch, and twice the code that is asked for and run
    assert not current
