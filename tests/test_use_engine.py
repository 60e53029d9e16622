"""`use_engine`: calls that last and blocks that end, in threads, tasks and forked children."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import os
import sys
import tracemalloc

import pytest
import torch

from lowbit_optim import engine_for, use_engine
from protocol import python

pytest.importorskip("numba")

# What `here` says for an engine that is asked for, and for none.
TORCH, NUMBA = ("torch", "use_engine asks for it"), ("numba", "use_engine asks for it")
NOBODY = ("numba", "the default for torch.float32 on cpu")


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.delenv("LOWBIT_OPTIM_ENGINE", raising=False)


def here():
    choice = engine_for(torch.zeros(3))
    return choice.name, choice.reason.partition(", compiled for ")[0]


@pytest.fixture
def threads():
    """A function that calls another one in thread 0, 1 or 2 and returns what it returns."""
    with contextlib.ExitStack() as stack:
        pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(3)]
        for pool in pools:
            stack.enter_context(pool)
        yield lambda thread, function, *args: pools[thread].submit(function, *args).result()


@pytest.mark.parametrize("name", ["cuda", "", None, 3])
def test_an_unknown_name_is_refused_and_changes_nothing(name):
    with pytest.raises(ValueError, match="name must be one of auto, triton, numba, torch"):
        use_engine(name)
    assert here() == NOBODY


def test_a_block():
    with use_engine("numba"):
        assert here() == NUMBA
        with use_engine("torch"):
            assert here() == TORCH
        assert here() == NUMBA
    assert here() == NOBODY


def test_a_block_ends_with_an_exception():
    def fail():
        with use_engine("torch"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert here() == NOBODY


def test_one_object_may_be_entered_again():
    chosen = use_engine("torch")
    for _ in range(3):
        with chosen:
            assert here() == TORCH
            with use_engine("numba"):
                with chosen:
                    assert here() == TORCH
                assert here() == NUMBA
            assert here() == TORCH
        assert here() == NOBODY


def test_use_engine_as_a_call_lasts():
    """In every thread and after other blocks, until the next call."""
    script = """
import threading, torch
from lowbit_optim import engine_for, use_engine

def here():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(engine_for(torch.zeros(3)).name))
    thread.start()
    thread.join()
    assert seen == [engine_for(torch.zeros(3)).name]
    return seen[0]

names = [here()]
use_engine("torch")
names.append(here())
with use_engine("numba"):
    names.append(here())
names.append(here())
kept = use_engine("numba")
names.append(here())
with kept:  # a block from now on, so its call no longer lasts
    pass
names.append(here())
threading.Thread(target=use_engine, args=("auto",)).start()
names.append(here())
print(*names)
"""
    assert python(script) == "numba torch numba torch numba torch numba"


def test_a_call_in_a_block_holds_until_the_block_ends():
    with use_engine("numba"):
        use_engine("torch")
        assert here() == TORCH
        with use_engine("numba"):
            assert here() == NUMBA
        assert here() == TORCH
        use_engine("numba")
        assert here() == NUMBA
    assert here() == NOBODY


def block_that_ends():
    with use_engine("torch"):
        pass


@pytest.mark.parametrize("ask", [lambda: use_engine("torch"), block_that_ends])
def test_neither_calls_nor_blocks_pile_up(ask):
    """What no longer counts would be looked through in every step, too."""
    with use_engine("auto"):
        for _ in range(5_000):  # Python keeps memory of freed tuples, of so many at most
            ask()
        tracemalloc.start()
        try:
            for _ in range(5_000):
                ask()
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert used < 50_000  # bytes


def test_blocks_of_two_threads_in_every_interleaving(threads):
    """Constructed, entered, asked, left: each thread sees its own, and nothing is left."""
    names, seen = ("torch", "numba"), {0: TORCH, 1: NUMBA}

    def act(thread, done):
        if done == 0:
            blocks[thread] = threads(thread, use_engine, names[thread])
        elif done == 1:
            threads(thread, blocks[thread].__enter__)
        elif done == 2:
            assert threads(thread, here) == seen[thread]
        else:
            threads(thread, blocks[thread].__exit__, None, None, None)

    for first in itertools.combinations(range(8), 4):
        blocks, done = {}, {0: 0, 1: 0}
        for turn in range(8):
            thread = 0 if turn in first else 1
            act(thread, done[thread])
            done[thread] += 1
        assert [here(), *(threads(k, here) for k in range(3))] == [NOBODY] * 4, first


def test_two_threads_share_an_object(threads):
    chosen = use_engine("torch")
    threads(0, chosen.__enter__)
    threads(1, chosen.__enter__)
    threads(0, chosen.__exit__, None, None, None)
    assert threads(1, here) == TORCH
    with use_engine("numba"):  # which the thread runs that has left its own block
        assert [threads(k, here) for k in range(2)] == [NUMBA, TORCH]
    threads(1, chosen.__exit__, None, None, None)
    assert [here(), *(threads(k, here) for k in range(2))] == [NOBODY] * 3


def test_a_thread_without_a_block_runs_what_was_asked_for_last(threads):
    assert [threads(k, here) for k in range(2)] == [NOBODY] * 2  # started now, in no block
    with use_engine("torch"):
        assert threads(0, here) == TORCH
        other = threads(1, use_engine("numba").__enter__)
        assert threads(0, here) == NUMBA
        assert here() == TORCH
        use_engine("torch")  # in the older of the two blocks
        assert threads(0, here) == TORCH
        threads(1, other.__exit__, None, None, None)
        assert threads(0, here) == TORCH
    assert threads(0, here) == NOBODY


def test_a_thread_that_inherits_a_block_is_in_it_until_it_ends(threads):
    inherits = getattr(sys.flags, "thread_inherit_context", False)  # Python 3.14 may
    with use_engine("torch"):
        assert threads(0, here) == TORCH
        with use_engine("numba"):
            assert threads(0, here) == (TORCH if inherits else NUMBA)
    assert threads(0, here) == NOBODY


def test_blocks_of_tasks_overlap():
    async def run(name, turns):
        with use_engine(name):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert here()[0] == name
        return here()

    async def both():
        return await asyncio.gather(run("torch", 2), run("numba", 4))

    assert asyncio.run(both()) == [NUMBA, NOBODY]
    assert here() == NOBODY


def test_a_block_may_end_in_another_context():
    """As that of an asynchronous generator does."""
    context = contextvars.copy_context()
    block = context.run(use_engine("torch").__enter__)
    assert context.run(here) == TORCH
    block.__exit__(None, None, None)
    assert [here(), context.run(here)] == [NOBODY, NOBODY]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_the_blocks_of_its_own_thread():
    """Threads that the fork leaves behind could not end theirs."""
    script = """
import os, threading, torch, warnings
from lowbit_optim import engine_for, use_engine
warnings.simplefilter("ignore")  # Python warns of threads when a process forks
entered, stop = threading.Event(), threading.Event()

def other():
    with use_engine("torch"):
        entered.set()
        stop.wait()

def ask():
    with use_engine("torch"):
        pass

def in_child():
    child = os.fork()
    if child == 0:
        name = engine_for(torch.zeros(3, dtype=torch.float64)).reason.split()[0]
        asking = threading.Thread(target=ask, daemon=True)  # finds no lock that is held
        asking.start()
        asking.join(30)
        os._exit(4 if asking.is_alive() else {"use_engine": 1, "the": 2}.get(name, 3))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

thread = threading.Thread(target=other)
thread.start()
entered.wait()
statuses = [in_child()]
with use_engine("torch"):
    statuses.append(in_child())
stop.set()
thread.join()
print(*statuses)
"""
    assert python(script) == "2 1"
