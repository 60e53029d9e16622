"""What every test shares: two threads, poisoned memory, and a choice of engine.

`engine` is a session fixture with one value per engine; a test that asks for it runs once on each,
inside `lowbit_optim.use_engine`. `device` is where that engine's tensors live.
"""

import os
from functools import cache

os.environ.setdefault("NUMBA_NUM_THREADS", "2")  # read when numba is first imported

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

ENGINES = ("torch", "numba", "triton")

# No deadline: the first example compiles. No database: a test leaves no files behind.
hypothesis.settings.register_profile("suite", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("suite")


# On a CPU without F16C numba refuses float16, and the torch engine steps it with a warning.
WITHOUT_HALF = "lacks instructions for float16"


def runs_triton(item):
    """Whether a test is one of those that are multiplied by engines, on Triton."""
    return "triton" in getattr(getattr(item, "callspec", None), "params", {}).values()


@cache
def numba_lacks_half():
    from lowbit_optim_kernels.engines import registry as engines

    return WITHOUT_HALF in str(engines.NUMBA.declines(torch.device("cpu"), torch.float16))


def pytest_collection_modifyitems(items):
    """Marks that depend on the machine."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("slow_if_interpreted") and runs_triton(item):
                item.add_marker(pytest.mark.slow)
    if numba_lacks_half():  # that warning is no error; test_numba_portable asks for it
        expected = pytest.mark.filterwarnings(f"ignore:.*{WITHOUT_HALF}:RuntimeWarning")
        for item in items:
            item.add_marker(expected)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """There a test that asks numba for float16 cannot run."""
    try:
        return (yield)
    except RuntimeError as error:
        if WITHOUT_HALF in str(error) and numba_lacks_half():
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session", autouse=True)
def two_threads():
    torch.set_num_threads(2)


def _poison(x):
    """Fill fresh memory with what no test can overlook: NaN, or 0xFF for codes."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x.fill_(0xFF) if x.dtype == torch.uint8 else x


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Uninitialised memory is mostly zero by luck, which hides a missing write."""

    def poisoning(make):
        return lambda *args, **kwargs: _poison(make(*args, **kwargs))

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
        pytest.importorskip("triton", reason="the Triton engine needs the triton package")
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


@pytest.fixture(scope="session")
def device(engine):
    """Where the engine's tensors live: Triton runs on a GPU, or interpreted on the CPU."""
    return "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
