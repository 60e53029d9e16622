"""Threads and forks. What could abort or hang the process runs in one of its own."""

import signal
import threading
import time

import pytest
import torch

from lowbit_optim import quantize_blockwise
from lowbit_optim_kernels.uninterrupted import uninterrupted
from protocol import FORK, python

# Optimizers of different classes and bits with tensors large enough for the pool of threads.
SETUP = """
import os, signal, sys, threading, time
import torch, lowbit_optim

def make(seed, cls):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(300, 400), (70_000,), (33,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return cls(params, lr=0.01)

def steps(optimizer, count):
    # as bytes: torch's own operators may hang in a forked child
    for _ in range(count):
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in optimizer.param_groups[0]["params"]]

def in_a_child(act):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends one that hangs
        act()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

CLASSES = [lowbit_optim.AdamW8bit, lowbit_optim.LARS8bit]
"""


def run(script, **environment):
    """In a process that may use several threads, with a bound on its time."""
    return python(SETUP + script, timeout=240, NUMBA_NUM_THREADS=None, **environment)


def test_threads_step_their_own_optimizers_at_once():
    """Numba's default threading layer would abort the process here."""
    script = """
torch.set_num_threads(2)
work = [(seed, cls) for seed in range(2) for cls in CLASSES]
want = [steps(make(*which), 150) for which in work]
got = [None] * len(work)
barrier = threading.Barrier(len(work))

def run(k):
    optimizer = make(*work[k])
    barrier.wait()
    got[k] = steps(optimizer, 150)

threads = [threading.Thread(target=run, args=(k,)) for k in range(len(work))]
[t.start() for t in threads]
[t.join() for t in threads]
assert got == want
print("same")
"""
    assert run(script) == "same"


@pytest.mark.slow
def test_threads_take_their_first_step_at_once(tmp_path):
    """Both compile, or find what the other has compiled, in an empty cache folder."""
    script = """
got = {}
barrier = threading.Barrier(2)

def run(k):
    optimizer = make(0, lowbit_optim.SGD8bit)
    barrier.wait()
    got[k] = steps(optimizer, 2)

threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
assert got[0] == got[1]
print("same")
"""
    assert run(script, LOWBIT_OPTIM_CACHE_DIR=str(tmp_path)) == "same"


@pytest.mark.slow
@FORK
@pytest.mark.parametrize("name", ["numba", "torch"])
def test_a_forked_child_steps_after_its_parent(name):
    """The child's pool of threads is its own; the parent goes on afterwards.

    In a forked child torch's own operators hang on large tensors where it uses GNU's OpenMP.
    """
    script = f"""
import warnings
warnings.simplefilter("ignore")  # Python warns of threads when a process forks
lowbit_optim.use_engine({name!r})
torch.set_num_threads(2 if {name!r} == "numba" else 1)
optimizer, twin = make(0, CLASSES[0]), make(0, CLASSES[0])
steps(optimizer, 3)
want = steps(twin, 6)
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if steps(optimizer, 3) == want else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert steps(optimizer, 3) == want
print("same")
"""
    assert run(script) == "same"


@pytest.mark.slow
@FORK
def test_a_forked_child_steps_what_its_parent_has_not():
    """By memory that they share. (A child that waits for OpenMP's threads is killed.)"""
    script = """
import warnings
warnings.simplefilter("ignore")
torch.set_num_threads(2)
torch.ones(1_000_000).add_(1)  # starts them
make_one = lambda: lowbit_optim.Adagrad8bit([torch.nn.Parameter(torch.ones(5000))], lr=0.1)

def step(optimizer):
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    return p[0].item()

optimizer, twin = make_one(), make_one()
for p in optimizer.param_groups[0]["params"]:
    p.share_memory_()
optimizer.share_memory()
in_a_child(lambda: step(optimizer))
step(twin)
assert step(optimizer) == step(twin)
print("same")
"""
    assert run(script) == "same"


@pytest.mark.slow
@FORK
def test_forks_while_another_thread_steps():
    """A lock that the other thread holds at the fork must not stay locked in the child."""
    script = """
import warnings
warnings.simplefilter("ignore")
torch.set_num_threads(2)
optimizer = make(2, CLASSES[0])
steps(optimizer, 1)
stop = threading.Event()

def busy():
    another = make(0, CLASSES[0])
    while not stop.is_set():
        another.step()

thread = threading.Thread(target=busy)
thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            steps(optimizer, 2)
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            stop.set()
            sys.exit("a child hangs")
        time.sleep(0.01)
    assert status == 0, status
stop.set()
thread.join()
print("done")
"""
    assert run(script) == "done"


@FORK
def test_a_forked_child_has_a_pool_of_its_own():
    """Another thread may have been at its parent's."""
    pytest.importorskip("numba")
    script = """
import warnings
from lowbit_optim_kernels.engines.numba import threads
warnings.simplefilter("ignore")
torch.set_num_threads(2)
optimizer = make(0, lowbit_optim.SGD32bit)
steps(optimizer, 1)
threads._pool.lock.acquire()
in_a_child(optimizer.step)
print("done")
"""
    assert run(script) == "done"


def test_what_is_compiled_does_not_wait_for_what_another_thread_compiles():
    lock = pytest.importorskip("numba.core.compiler_lock").global_compiler_lock
    x, held, over = torch.ones(300), threading.Event(), threading.Event()
    quantize_blockwise(x)

    def hold():
        with lock:
            held.set()
            over.wait()

    threads = [
        threading.Thread(target=hold),
        threading.Thread(target=quantize_blockwise, args=(x,)),
    ]
    threads[0].start()
    held.wait()
    threads[1].start()
    threads[1].join(10)
    waits = threads[1].is_alive()
    over.set()
    [thread.join() for thread in threads]
    assert not waits


@FORK
@pytest.mark.parametrize("lock", ["cache.global_compiler_lock", "module_cache._import_lock"])
def test_forks_while_another_thread_compiles(lock):
    """The child's first step needs what no thread of it would let go of."""
    pytest.importorskip("numba")
    script = f"""
import warnings
from lowbit_optim_kernels.codegen import module_cache
from lowbit_optim_kernels.engines.numba import cache, engine
warnings.simplefilter("ignore")
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer, held = lowbit_optim.SGD32bit([p], lr=0.1, momentum=0.9), threading.Event()

def hold():
    with {lock}:
        held.set()
        time.sleep(0.5)

thread = threading.Thread(target=hold)
thread.start()
held.wait()
in_a_child(optimizer.step)
thread.join()
print("done")
"""
    assert run(script) == "done"


def test_steps_while_the_interpreter_shuts_down():
    """In a thread that outlives the main thread, and in an exit handler.

    Python's own thread pools are shut down before either.
    """
    script = """
import atexit
torch.set_num_threads(2)
optimizer, other = make(0, CLASSES[0]), make(0, CLASSES[0])
want = steps(make(0, CLASSES[0]), 3)
steps(optimizer, 1)
steps(other, 1)
main = threading.main_thread()

def train():
    main.join()
    print(steps(optimizer, 2) == want, flush=True)

atexit.register(lambda: print(steps(other, 2) == want, flush=True))
threading.Thread(target=train).start()
"""
    assert run(script).split() == ["True", "True"]


def test_optimizers_leave_no_threads_behind():
    """One small pool for the process, however many optimizers there are."""
    script = """
torch.set_num_threads(4)
for seed in range(4):
    for cls in CLASSES:
        steps(make(seed, cls), 1)
print(threading.active_count())
"""
    assert int(run(script)) <= 4


class Share:
    """Stands for a compiled share: what a thread does that is given a job."""

    def __init__(self, by_main, by_helper):
        self.calls, self.ended = 0, 0
        self.actions = by_main, by_helper

    def ctypes(self, address):
        self.calls += 1
        main = threading.current_thread() is threading.main_thread()
        self.actions[0 if main else 1](self)
        self.ended += 1


@pytest.fixture
def run_in_pool(monkeypatch):
    """Runs a job of two threads where there is no OpenMP, as in a forked child."""
    numba_threads = pytest.importorskip("lowbit_optim_kernels.engines.numba.threads")
    monkeypatch.setattr(numba_threads, "_openmp", lambda: None)
    return lambda share: numba_threads.Job(share, 2, 2, []).run()


def wait_for_two_calls(share):
    while share.calls < 2:
        time.sleep(0.001)


def test_a_job_that_fails_ends_when_its_helpers_have(run_in_pool):
    """They work on the caller's memory."""

    def fail(share):
        wait_for_two_calls(share)
        raise MemoryError

    share = Share(fail, lambda share: time.sleep(0.3))
    with pytest.raises(MemoryError):
        run_in_pool(share)
    assert share.ended == 1


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals of threads")
def test_a_job_that_is_interrupted_ends_when_its_helpers_have(run_in_pool):
    """Ctrl-C while the caller waits, and again while it still waits."""
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it

    def interrupt(share):
        for _ in range(3):
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)

    share = Share(wait_for_two_calls, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_pool(share)
    finally:
        signal.signal(signal.SIGINT, before)
    assert share.ended == 2


def fail(error):
    raise error


def refuse(thread):
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_leaves_nothing_for_later(run_in_pool, monkeypatch):
    """Its job would be over by then, and the job's memory another's."""
    numba_threads = pytest.importorskip("lowbit_optim_kernels.engines.numba.threads")
    monkeypatch.setattr(numba_threads, "_pool", numba_threads._Pool())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = Share(lambda share: None, lambda share: None)
        run_in_pool(first)
    assert first.calls == 1
    second = Share(wait_for_two_calls, lambda share: None)
    run_in_pool(second)
    assert (first.calls, second.calls, second.ended) == (1, 2, 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start", [threading.Thread.start, refuse], ids=["a thread", "none left"])
def test_a_call_that_is_not_interrupted_always_ends(start, monkeypatch):
    """Whatever it raises, and wherever it runs; else who waits for it would wait for ever."""
    monkeypatch.setattr(threading.Thread, "start", start)
    assert uninterrupted(divmod, 7, 4) == (1, 3)
    for error in (KeyError, SystemExit, KeyboardInterrupt):
        with pytest.raises(error):
            uninterrupted(fail, error)
