"""Processes killed at random moments of compiling, saving and stepping: the next one goes on.

A process trains with a kernel cache that starts empty, and after every step writes a checkpoint
twice: to a temporary file that then replaces the last one, and straight to a path. It is killed,
and the next one resumes from the last whole checkpoint. `LOWBIT_OPTIM_FUZZ` asks for 200 kills.
"""

import hashlib
import multiprocessing
import os
import pickle
import random
import sys
import time
from pathlib import Path

import pytest
import torch

import lowbit_optim
from fuzz import examples
from protocol import give_gradients, parameters, tensors_of

STEPS = 30
KILLS = min(200, examples(default=6))
PER_FOLDER = 3  # kills before a new folder and an empty cache
PATIENCE = 120  # seconds; a process that takes longer hangs
SHAPES = ((64, 300), (257,))


def trained():
    """Parameters and their optimizer; two dtypes, so that there are several kernels to compile."""
    params = parameters(torch.float32, SHAPES) + parameters(torch.bfloat16, SHAPES, seed=1)
    options = {"lr": 0.01, "min_8bit_size": 1, "percentile_clipping": 50}
    return params, lowbit_optim.AdamW8bit(params, **options)


def train(folder, cache, steps):
    """A training process, from the last whole checkpoint if there is one."""
    sys.stderr = (folder / "stderr").open("w", buffering=1)
    os.environ["LOWBIT_OPTIM_CACHE_DIR"] = str(cache)
    torch.set_num_threads(2)
    params, optimizer = trained()
    first = 0
    if (folder / "whole.pt").exists():
        saved = torch.load(folder / "whole.pt", weights_only=True)
        first = saved["steps"]
        for p, value in zip(params, saved["params"], strict=True):
            p.data.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
    (folder / "began").touch()
    for t in range(first, steps):
        give_gradients(params, t)
        optimizer.step()
        saved = {
            "steps": t + 1,
            "params": [p.detach() for p in params],
            "optimizer": optimizer.state_dict(),
        }
        with (folder / "digests").open("a") as file:
            file.write(f"{t + 1} {digest(saved)}\n")
        torch.save(saved, folder / "new.pt")
        os.replace(folder / "new.pt", folder / "whole.pt")
        torch.save(saved, folder / "straight.pt")


def digest(saved):
    """Of every tensor's dtype, shape and bytes."""
    made = hashlib.sha256()
    for x in tensors_of(saved):
        made.update(f"{x.dtype} {tuple(x.shape)}".encode())
        made.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def digests(folder):
    """By the number of steps, as the process wrote them; a killed one may not end its last line."""
    if not (folder / "digests").exists():
        return []
    lines = (folder / "digests").read_text().splitlines(keepends=True)
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(int(steps), made) for steps, made in rows]


@pytest.fixture(scope="module")
def processes():
    """Fresh processes that need not import torch again: `conftest` says what they have."""
    return multiprocessing.get_context("forkserver")


def run(processes, folder, cache, seconds=PATIENCE, stepping=False):
    """Train for so long at most, `stepping` from the first step on; whether it was killed then."""
    folder.mkdir(exist_ok=True)
    before = digests(folder)
    process = processes.Process(target=train, args=(folder, cache, STEPS))
    process.start()
    while stepping and process.is_alive() and digests(folder) == before:
        time.sleep(0.001)
    process.join(seconds)
    killed = process.exitcode is None
    process.kill()
    process.join()
    assert killed or process.exitcode == 0, (folder / "stderr").read_text()[-4000:]
    return killed


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory):
    """The digests of a run that nobody kills, its cache, how long it takes, its steps alone."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    start = time.monotonic()
    assert not run(processes, folder / "cold", folder / "cache")
    whole = time.monotonic() - start
    assert not run(processes, folder / "warm", folder / "cache")
    cold = digests(folder / "cold")
    assert cold == digests(folder / "warm")
    assert len(cold) == STEPS
    written = [(folder / "warm" / name).stat().st_mtime_ns for name in ("began", "digests")]
    return dict(cold), folder / "cache", whole, (written[1] - written[0]) / 1e9


def check_checkpoints(folder, expected):
    """What lies in the folder is right, or cannot be read."""
    if (folder / "whole.pt").exists():
        saved = torch.load(folder / "whole.pt", weights_only=True)
        assert digest(saved) == expected[saved["steps"]]
    if (folder / "straight.pt").exists():
        try:
            saved = torch.load(folder / "straight.pt", weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
            return  # cut off
        assert digest(saved) == expected[saved["steps"]]


@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * KILLS)
def test_the_next_process_goes_on(processes, uninterrupted, tmp_path):
    expected, warm, whole, steps_alone = uninterrupted
    rng = random.Random(0)
    kills, folders = 0, 0
    while kills < KILLS:
        stepping = rng.random() < 0.7
        folder = tmp_path / f"{folders}"
        cache = warm if stepping else tmp_path / f"{folders}-cache"
        folders += 1
        for _ in range(min(PER_FOLDER, KILLS - kills)):
            moment = rng.random() * (steps_alone if stepping else whole)
            of = f"{moment:.3f} s of {'steps' if stepping else 'all'}"
            print(f"folder {folders}, kill {kills}: after {of}, {len(digests(folder))} steps done")
            if not run(processes, folder, cache, moment, stepping):
                break
            kills += 1
            check_checkpoints(folder, expected)
        assert not run(processes, folder, cache), "the process that was not killed hangs"
        check_checkpoints(folder, expected)
        assert all(expected[steps] == made for steps, made in digests(folder))
        assert digests(folder)[-1][0] == STEPS


def test_a_checkpoint_that_is_cut_off_does_not_load(tmp_path):
    params, optimizer = trained()
    with lowbit_optim.use_engine("torch"):
        give_gradients(params, 0)
        optimizer.step()
    path = tmp_path / "whole.pt"
    torch.save(optimizer.state_dict(), path)
    whole = path.read_bytes()
    rng = random.Random(0)
    for size in [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))]:
        cut = Path(tmp_path / "cut.pt")
        cut.write_bytes(whole[:size])
        with pytest.raises((RuntimeError, EOFError, OSError, pickle.UnpicklingError)):
            torch.load(cut, weights_only=True)
