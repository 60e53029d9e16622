"""First steps on cache folders, in processes forked from one that has imported everything.

Scripts of test_cache.py and test_cache_folder.py import this in an interpreter of their own: only a
process that has not stepped yet compiles, or loads, what a first step needs.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numba
import torch

import lowbit_optim
from lowbit_optim_kernels.engines.numba import cache as numba_cache
from lowbit_optim_kernels.engines.registry import NUMBA


def numbers(optimizer):
    """A digest of all bits of parameters and state."""
    digest = hashlib.sha256()
    for p in optimizer.param_groups[0]["params"]:
        for tensor in (p.detach(), *optimizer.state[p].values()):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def make(name):
    """An optimizer of one parameter of 5000 elements with a gradient."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5000, generator=generator))
    p.grad = torch.randn(5000, generator=generator)
    options = {"momentum": 0.9} if name.startswith("SGD") else {}
    return getattr(lowbit_optim, name)([p], lr=0.1, **options)


# What torch and Numba load when they are first used is loaded here, once for all forks.
assert NUMBA.code
numba.njit(lambda x: x + 1.0)(1.0)
make("SGD32bit")


def first_step(name="SGD32bit"):
    """Take it; what was found and compiled, warned of, and computed, and in which time."""
    hits, misses = [], []
    linked, compiled = numba_cache._linked, numba_cache._compiled

    def counting_hits(kept):
        hits.append(len(kept))
        return linked(kept)

    def counting_misses(function, key):
        misses.append(function.__qualname__)
        return compiled(function, key)

    numba_cache._linked, numba_cache._compiled = counting_hits, counting_misses
    stepped = make(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        stepped.step()
        seconds = time.perf_counter() - began
    numba_cache._linked, numba_cache._compiled = linked, compiled
    return {
        "modules": sum(n.startswith("lowbit_optim_generated") for n in sys.modules),
        "hits": hits,
        "misses": misses,
        "warnings": [str(w.message) for w in caught if w.category is RuntimeWarning],
        "numbers": numbers(stepped),
        "seconds": seconds,
    }


def start(function, *args, **environment):
    """Fork a process that calls the function; its number, and the pipe that it answers through."""
    answer, end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(environment)
            tempfile.tempdir = None  # TMPDIR may be another one
            os.write(end, json.dumps(function(*args)).encode())
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)  # nothing of the parent's is flushed or torn down twice
    os.close(end)
    return child, answer


def finish(child, answer):
    """Wait for a process; what its function returned, or None if it was killed."""
    with os.fdopen(answer, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    assert status == 0, "the process failed, as it says above"
    return json.loads(text)


def in_a_fork(function, *args, **environment):
    return finish(*start(function, *args, **environment))


# Damage.


def _flip(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "byte": _flip,
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"x",
    "deleted": None,
}


def damage(folder, suffix, how):
    """Damage every file of a suffix in a folder; how many there were."""
    paths = sorted(Path(folder).glob(f"*{suffix}"))
    for path in paths:
        change = DAMAGES[how]
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))
    return len(paths)


def exchange(folder):
    """Exchange the files of compiled code: each is whole, none is what its name says."""
    files = sorted(Path(folder).glob("*.code"))
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


# Processes that are killed.


def _victim(seed):
    """A first step that, for odd seeds, ends at one of its file operations instead of anywhere."""
    if seed % 2:
        left = random.Random(seed).randrange(1, 24)

        def operation(event, args):
            nonlocal left
            if event in ("open", "os.rename", "tempfile.mkstemp") and "cache" in str(args):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(operation)
    return first_step()


def killed(folder, count, seed, a_round=5):
    """Kill `count` processes at random moments of their first step, `a_round` tries a folder.

    A fast machine is often done before, so that there are more tries than kills. After each round
    the next process runs, and finds or compiles what it needs. Returns how many were killed, and
    the numbers and warnings of those that ran to their end.
    """
    draw = random.Random(seed)
    whole = in_a_fork(first_step, LOWBIT_OPTIM_CACHE_DIR=str(Path(folder) / "cache_whole"))
    seconds = 1.1 * whole["seconds"]
    kills, survivors, k = 0, [whole], 0
    while kills < count:
        k += 1
        settings = {"LOWBIT_OPTIM_CACHE_DIR": str(Path(folder) / f"cache_{k}")}
        for _ in range(a_round):
            victim_seed = draw.randrange(1 << 30)
            child, answer = start(_victim, victim_seed, **settings)
            if victim_seed % 2 == 0:
                time.sleep(draw.uniform(0.0, seconds))
                os.kill(child, signal.SIGKILL)
            result = finish(child, answer)
            kills += result is None
            survivors += [] if result is None else [result]
        survivors.append(in_a_fork(first_step, **settings))
    return {
        "killed": kills,
        "numbers": sorted({s["numbers"] for s in survivors}),
        "warnings": sorted({w for s in survivors for w in s["warnings"]}),
    }


def cut_writes(limit):
    """From now on a file ends at `limit` bytes, as on a disk that is full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
