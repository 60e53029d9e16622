"""What tests share: two threads, poisoned memory, a choice of engine, and the one manager.

`engine` is a session fixture with one value per engine; a test that asks for it runs once on each,
inside `lowbit_optim.use_engine`. `device` is where that engine's tensors live.
"""

import multiprocessing
import os
from collections import Counter
from functools import cache

os.environ.setdefault("NUMBA_NUM_THREADS", "2")  # read when numba is first imported
# Read when torch is. Else a thread that waits for work keeps its core from one that has some: two
# processes of two threads each take several times as long on two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

# What takes seconds to import, and ranks and others that a forkserver makes have from it.
multiprocessing.set_forkserver_preload(
    ["numba", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
)

ENGINES = ("torch", "numba", "triton")

# No deadline: the first example compiles. No database: a test leaves no files behind.
hypothesis.settings.register_profile("suite", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("suite")


# On a CPU without F16C numba refuses float16, and the torch engine steps it with a warning.
WITHOUT_HALF = "lacks instructions for float16"


def arguments_of(item):
    """What a test is parametrized with, by name."""
    return getattr(getattr(item, "callspec", None), "params", {})


def running(engine, items):
    """The tests on an engine among some whose marks speak of it: all are that name no engine."""
    for item in items:
        engines = set(ENGINES).intersection(map(str, arguments_of(item).values()))
        if not engines or engine in engines:
            yield item


def covering(items, *names):
    """One of a test's items for each value of its first named argument; a case counts by its class.

    The first may be several arguments: one for each of their combinations. The values of the others
    take turns, so that each of them is among those chosen. Without a name it is one item.
    """
    firsts = names[0] if names and isinstance(names[0], tuple) else names[:1]

    def value(item, name):
        argument = arguments_of(item)[name]
        return name, str(getattr(argument, "name", argument))

    by_first, uses = {}, Counter()
    for item in items:
        by_first.setdefault(tuple(value(item, name) for name in firsts), []).append(item)
    for alike in by_first.values():
        chosen = min(alike, key=lambda item: [uses[value(item, name)] for name in names[1:]])
        uses.update(value(chosen, name) for name in names[1:])
        yield chosen


def slow_but_few(items, mark):
    """Mark tests that have this mark as slow, but for those that cover its arguments' values.

    Of those that are not slow already, so that one of two marks does not take what the other keeps.
    """
    alike = {}
    for item in items:
        few = item.get_closest_marker(mark)
        if few and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            alike.setdefault((test, few.args), []).append(item)
    for (_, arguments), test in alike.items():
        for item in set(test).difference(covering(test, *arguments)):
            item.add_marker(pytest.mark.slow)


def spare_the_interpreter(items):
    """Mark as slow what is too much for Triton's interpreter, all of a test or all but a few."""
    on_triton = list(running("triton", items))
    slow_but_few(on_triton, "few_if_interpreted")
    for item in on_triton:
        few = item.get_closest_marker("few_if_interpreted")
        if not few and item.get_closest_marker("slow_if_interpreted"):
            item.add_marker(pytest.mark.slow)


def refuse_sets(items):
    """A set's text has another order in each process: workers would disagree on a test's name."""
    for item in items:
        for name, value in arguments_of(item).items():
            if isinstance(value, (set, frozenset)) and len(value) > 1 and str(value) in item.name:
                raise pytest.UsageError(f"{item.nodeid}: give {name} as a list, which has an order")


@cache
def numba_lacks_half():
    from lowbit_optim_kernels.engines import registry as engines

    return WITHOUT_HALF in str(engines.NUMBA.declines(torch.device("cpu"), torch.float16))


def pytest_collection_modifyitems(config, items):
    """Marks that depend on the machine; and those tests first that are given more time than others.

    The other processes would wait for one that came late.
    """
    refuse_sets(items)
    usual = float(config.getini("timeout"))

    def given(item):
        mark = item.get_closest_marker("timeout")
        return max(usual, mark.args[0]) if mark else usual

    items.sort(key=given, reverse=True)  # which leaves the others in their order
    if not torch.cuda.is_available():
        spare_the_interpreter(items)
    slow_but_few(running("numba", items), "few_if_compiled")
    slow_but_few(items, "few")
    if numba_lacks_half():  # that warning is no error; test_numba_portable asks for it
        expected = pytest.mark.filterwarnings(f"ignore:.*{WITHOUT_HALF}:RuntimeWarning")
        for item in items:
            item.add_marker(expected)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip tests that ask numba for float16 on a CPU without F16C."""
    try:
        return (yield)
    except RuntimeError as error:
        if WITHOUT_HALF in str(error) and numba_lacks_half():
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session", autouse=True)
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """Triton's interpreter patches its language when any function is called: most of its time.

    Once for a launch and module is enough.
    """
    try:
        from triton.runtime import interpreter

        scope = interpreter._LangPatchScope
    except (ImportError, AttributeError):  # no Triton, or one that never takes its patches back
        yield
        return
    patch, restore, patched = interpreter._patch_lang, scope.restore, set()

    def patch_once(function):
        module = id(function.__globals__)
        if module in patched:
            return scope()
        patched.add(module)
        return patch(function)

    def restore_all(launch):
        patched.clear()
        restore(launch)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(scope, "restore", restore_all)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_integer_overflows():
    """An error where Triton's interpreter has integers that overflow.

    It computes whether they do, for a third of its time, and tells nobody. A GPU stops there, with
    TRITON_DEBUG=1.
    """
    try:
        from triton.language.semantic import TritonSemantic
        from triton.runtime.interpreter import TensorHandle
    except ImportError:  # no Triton, or an older one
        yield
        return
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    operators = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_numbers(semantic, a, b, operation):
        if not isinstance(a.handle, TensorHandle):
            return check(semantic, a, b, operation)
        kind, name = a.type.scalar, operation.__name__
        if kind.int_bitwidth < 64:
            numbers = operators[name](*(x.handle.data.astype(np.int64) for x in (a, b)))
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            fit = low <= numbers.min() and numbers.max() <= high
            assert fit, f"{kind} overflows: {name} of {a.handle.data} and {b.handle.data}"
        return None

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TritonSemantic, check.__name__, check_numbers)
        yield


def _poison(x):
    """Fill fresh memory with what no test can overlook: NaN, or 0xFF for codes."""
    with torch.no_grad():  # which some of torch asks for with it
        if x.is_floating_point() or x.is_complex():
            return x.fill_(float("nan"))
        return x.fill_(0xFF) if x.dtype == torch.uint8 else x


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory():
    """Uninitialised memory is mostly zero by luck, which hides a missing write."""

    def poisoning(make):
        return lambda *args, **kwargs: _poison(make(*args, **kwargs))

    with torch.device("meta"):
        torch.empty(0)  # torch notes here, for good, which functions a device context is for
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoning(getattr(owner, name)))
        yield


@pytest.fixture(scope="session", params=ENGINES)
def engine(request):
    """The name of an engine; tests that ask for it are grouped by engine."""
    if request.param == "triton":
        from protocol import NEEDS_TRITON

        pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    return request.param


@pytest.fixture(autouse=True)
def _engine_in_use(request):
    """Run a test that asked for `engine` on that engine."""
    if "engine" not in request.fixturenames:
        yield
        return
    import lowbit_optim

    with lowbit_optim.use_engine(request.getfixturevalue("engine")):
        yield


@pytest.fixture(autouse=True)
def _emulated_gpu(request):
    """A test that wants a GPU has an emulated H100 where Triton compiles and there is none."""
    compiles = os.environ.get("TRITON_INTERPRET") == "0" and not torch.cuda.is_available()
    if not compiles or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from benchmarks.static.ptx.launch import emulated

    with emulated(90):
        yield


@pytest.fixture
def manager():
    """The manager of overrides, which has none before and after a test."""
    from lowbit_optim import GlobalOptimManager

    it = GlobalOptimManager.get_instance()
    it.initialize()
    yield it
    it.initialize()


@pytest.fixture(scope="session")
def device(engine):
    """Where the engine's tensors live: Triton runs on a GPU, or interpreted on the CPU."""
    return "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
