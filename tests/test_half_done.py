"""A step that does not come to its end leaves parameters, moments and counts as they were.

Where it cannot, the class docstring of `LowBitOptimizer` says so.
"""

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.weights import Weights
from protocol import (
    CLASSES,
    NEEDS_TRITON,
    ONE_PER_CLASS,
    SHAPES,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    pass_by_pass,
    python,
    snapshot,
    train,
)


def continues_like(optimizer, twin):
    """Whether an optimizer whose step was broken off trains as one that never saw it."""
    train(optimizer, 2, first=5)
    train(twin, 2, first=5)
    return identical(snapshot(optimizer), snapshot(twin))


@CLASSES
@pytest.mark.parametrize("call", [0, 3, 5])
def test_memory_that_runs_out_while_state_is_made(case, call, monkeypatch):
    optimizer, twin = (build(case, 8, parameters(), percentile_clipping=5) for _ in range(2))
    give_gradients(all_parameters(optimizer), 0)
    full, calls = torch.full, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == call + 1:
            raise MemoryError
        return full(*args, **options)

    before = snapshot(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full", failing)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert identical(snapshot(optimizer), before)
    assert continues_like(optimizer, twin)


@CLASSES
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_whose_elements_share_memory(case, steps):
    """It is refused before those in front of it have moved."""
    params = parameters(shapes=[(12, 70), (5, 300)])
    optimizer = train(build(case, 8, params), steps)
    give_gradients(params, 5)
    params[1].data = torch.ones(1, 300).expand(5, 300)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"shape \(5, 300\) .* share memory"):
        optimizer.step()
    assert identical(snapshot(optimizer), before)


@CLASSES
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_memory_that_was_freed(case, steps, what):
    """As some wrappers free a parameter's between passes; an address of nothing is not followed."""
    params = parameters(shapes=[(12, 70), (5, 300), (0, 3)])
    optimizer = train(build(case, 8, params), steps)
    give_gradients(params, 5)
    freed = (params[1] if what == "parameter" else params[1].grad).untyped_storage()
    size, kept = freed.nbytes(), params[1].detach().clone()
    freed.resize_(0)
    with pytest.raises(RuntimeError, match=rf"a {what} of shape \(5, 300\) has no memory"):
        optimizer.step()
    freed.resize_(size)
    with torch.no_grad():
        params[1].copy_(kept)
    give_gradients(params, 5)
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in params)


def compiled(name):
    if name == "triton":
        pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    return ENGINES[name].code


RUNS = {"torch": "TorchRun", "numba": "NumbaRun", "triton": "TritonRun"}


@pytest.mark.parametrize("method", ["begin", "reduce", "combine"])
@pytest.mark.parametrize("batch", [0, 1])
def test_an_interrupt_before_anything_is_written(engine, device, method, batch, monkeypatch):
    """In the first or the second of two groups that are not stepped together."""
    if engine == "triton" and (method, batch) != ("combine", 1):
        pytest.skip("one case is enough for the interpreter: dispatch does the work")

    shapes = SHAPES if engine != "triton" else [(300,)]

    def groups():
        made = [parameters(shapes=shapes), parameters(shapes=shapes, seed=7)]
        return [
            {"params": [p.detach().to(device).requires_grad_() for p in one], "maximize": i == 1}
            for i, one in enumerate(made)
        ]

    options = {"lr": 0.1, "momentum": 0.9, "percentile_clipping": 5, "min_8bit_size": 1}
    optimizer, twin = (lowbit_optim.LARS8bit(groups(), **options) for _ in range(2))
    train(optimizer, 1)
    train(twin, 1)
    run = getattr(compiled(engine), RUNS[engine])
    do, calls = getattr(run, method), []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == batch + 1:
            raise KeyboardInterrupt
        return do(self, *args)

    give_gradients(all_parameters(optimizer), 1)
    before = snapshot(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(run, method, interrupted)
        if engine == "numba":  # else all is one call that no interrupt breaks off
            pass_by_pass(patch)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    after = snapshot(optimizer)
    for state in (*before["state"].values(), *after["state"].values()):
        state.pop("gnorm_vec")  # the next step writes the same place again
    assert identical(after, before)
    train(optimizer, 1, first=1)
    train(twin, 1, first=1)
    assert continues_like(optimizer, twin)


def test_a_step_that_an_overflow_skips_is_not_uncounted(engine, device, monkeypatch):
    (p,) = params = [torch.zeros(300, device=device, requires_grad=True)]
    optimizer = train(lowbit_optim.LARS32bit(params, lr=0.1, momentum=0.9), 2)
    optimizer.found_inf = torch.ones((), device=device)
    give_gradients(params, 2)

    def interrupted(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(compiled(engine), RUNS[engine]), "combine", interrupted)
    if engine == "numba":
        pass_by_pass(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_step_that_has_begun_to_write_stays_counted(monkeypatch):
    """What has moved once would else be moved as in the same step again."""
    (p,) = params = [torch.zeros(300, requires_grad=True)]
    write = Weights.write

    def interrupted(self, *args):
        write(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Weights, "write", interrupted)
    optimizer = lowbit_optim.SGD32bit(params, lr=0.1, momentum=0.9)
    give_gradients(params, 0)
    with lowbit_optim.use_engine("torch"), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert p.detach().any()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("broken", ["_keep", "_pass"])
def test_a_kernel_that_does_not_compile_after_others_were_launched(broken, device, monkeypatch):
    """What has been written stays counted; where nothing has, the count is taken back."""
    engine_triton = compiled("triton")
    with lowbit_optim.use_engine("triton"):
        params = [p.detach().to(device).requires_grad_() for p in parameters(shapes=[(300,)])]
        optimizer = train(lowbit_optim.ScheduleFreeAdamW8bit(params, min_8bit_size=1), 1)
        before = snapshot(optimizer)

        def fails(*args, **options):
            raise RuntimeError("does not compile")

        give_gradients(params, 1)
        with monkeypatch.context() as patch:
            patch.setattr(engine_triton.TritonRun, broken, fails)
            with pytest.raises(RuntimeError, match="does not compile"):
                optimizer.step()
        (state,) = optimizer.state.values()
        assert int(state["step"]) == (2 if broken == "_keep" else 1)
        assert identical(snapshot(optimizer), before) == (broken == "_pass")


@pytest.mark.parametrize("name", ["stack", "where", "finish"])
def test_memory_that_runs_out_within_a_step_of_torch_operators(name, monkeypatch):
    """In `begin`, in a reduction, and in what `finish` does before it writes."""

    def full(*args, **options):
        raise MemoryError

    engine = compiled("torch")
    optimizer, twin = (
        lowbit_optim.LAMB8bit(parameters(), lr=0.1, min_8bit_size=1) for _ in range(2)
    )
    with lowbit_optim.use_engine("torch"):
        train(optimizer, 1)
        train(twin, 1)
        give_gradients(all_parameters(optimizer), 1)
        before = snapshot(optimizer)
        with monkeypatch.context() as patch:
            if name == "finish":
                patch.setattr(engine.TorchRun, "_write", full)
            else:
                patch.setattr(torch, name, full)
            with pytest.raises(MemoryError):
                optimizer.step()
        assert identical(snapshot(optimizer), before)
        train(optimizer, 1, first=1)
        train(twin, 1, first=1)
        assert continues_like(optimizer, twin)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.2, 1.0, 2.5])
def test_an_interrupt_while_the_first_step_compiles(after, tmp_path):
    """A real signal, at some moment of compiling; the folder of compiled code is empty."""
    script = f"""
import signal, threading
import torch, lowbit_optim
import llvmlite.binding  # imported already: an import that is broken off is another matter
import numba
numba.njit(lambda x: x + 1.0)(1.0)  # which imports the rest of Numba
from lowbit_optim_kernels.engines.numba import engine as engine_numba
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = lowbit_optim.LAMB8bit([p], lr=0.1, percentile_clipping=5)

armed = True

def interrupt(*_):
    if armed:  # one that was on its way when the timer was stopped is no second Ctrl-C
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, {after}, 0.1)  # again, should somebody swallow the first
try:
    optimizer.step()
    print("too late")
except KeyboardInterrupt:
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    counts = [int(state["step"]) for state in optimizer.state.values()]
    assert sum(counts) == 0, counts
    assert torch.equal(p.detach(), torch.ones(5000))
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1
    assert bool((p < 1).all())
    print("mended")
"""
    outcome = python(script, LOWBIT_OPTIM_CACHE_DIR=str(tmp_path))
    assert outcome == "mended" or (after > 2 and outcome == "too late")


BY_NUMBA = """
import os, signal, sys, threading
import torch, lowbit_optim
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = lowbit_optim.AdamW8bit([p], lr=0.1)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(10))

class Importing:
    armed = True

    def find_spec(self, name, *_):
        if name == "numba.core.types" and self.armed:
            self.armed = False
            interrupt()

class Registered(list):
    armed = False

    def __len__(self):  # asked for by the generator that reads a registry
        if self.armed:
            self.armed = False
            interrupt()
        return super().__len__()

def registered():
    import numba
    from numba.core.registry import cpu_target
    from numba.core.typing.templates import Registry
    numba.njit(lambda x: x + 1.0)(1.0)
    registry = Registry()
    registry.functions = functions = Registered()
    context = type(cpu_target.typing_context)
    refresh = context.refresh
    context.refresh = lambda self: (refresh(self), self.install_registry(registry))
    cpu_target.typing_context.refresh()
    functions.armed = True
    return functions

def step_twice(armed):
    try:
        optimizer.step()
        print("not interrupted")
    except KeyboardInterrupt:
        assert not armed.armed
        try:
            optimizer.step()
            print("steps", int(optimizer.state[p]["step"]))
        except (AttributeError, RuntimeError):
            print("broken")

def start(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

if THREADS == "none":
    threading.Thread.start = start
if WHEN == "imported":
    numba = Importing()
    sys.meta_path.insert(0, numba)
else:
    numba = registered()
step_twice(numba)
"""


@pytest.mark.parametrize("when", ["imported", "compiling"])
@pytest.mark.parametrize("threads", ["some", "none"])
def test_an_interrupt_that_would_break_numba(when, threads, tmp_path):
    """Where no thread can be started it does."""
    script = f"WHEN, THREADS = {when!r}, {threads!r}\n" + BY_NUMBA
    outcome = python(script, LOWBIT_OPTIM_CACHE_DIR=str(tmp_path))
    assert outcome == ("steps 1" if threads == "some" else "broken")


def test_no_state_is_kept_of_a_step_that_an_engine_does_not_begin(engine, device, monkeypatch):
    """As where its code does not compile, or memory for its tables runs out."""

    def fail(batch):
        raise MemoryError

    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=[(300,)])]
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
    monkeypatch.setattr(ENGINES[engine].code, "start", fail)
    with pytest.raises(MemoryError):
        train(optimizer, 1)
    assert not optimizer.state


# What a step counts.


@pytest.mark.parametrize("case", [ONE_PER_CLASS[0], ONE_PER_CLASS[-1]], ids=lambda case: case.name)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.few_if_interpreted("case", "bits")
def test_steps_are_counted_beyond_what_fp32_can(case, bits, engine, device):
    if engine == "triton" and not case.fused:
        pytest.skip("torch operators step it, the engine only codes moments")
    params = [p.detach().to(device).requires_grad_() for p in parameters()]
    optimizer = train(build(case, bits, params, percentile_clipping=5), 1)
    for state in optimizer.state.values():
        state["step"].fill_(2**24 - 2)
    for count in (2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2):
        train(optimizer, 1, first=count)
        saved = optimizer.state_dict()["state"]
        for index, p in enumerate(params):
            assert int(optimizer.state[p]["step"]) == int(saved[index]["step"]) == count
            dtype = torch.float32 if count <= 2**24 else torch.float64
            assert saved[index]["step"].dtype == dtype
            norms = optimizer.state[p]["gnorm_vec"]
            torch.testing.assert_close(norms[count % 100], p.grad.float().square().sum())
    again = build(case, bits, params, percentile_clipping=5)
    again.load_state_dict(optimizer.state_dict())
    train(again, 1)
    assert {int(state["step"]) for state in again.state.values()} == {2**24 + 3}
