"""The threads that steps of the Numba engine run on."""

import sys
from pathlib import Path

import pytest
import torch

import lowbit_optim
from protocol import identical, parameters, python, snapshot, train

pytest.importorskip("numba")
from lowbit_optim_kernels.engines.numba import threads as numba_threads

of_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="torch's OpenMP differs on other systems"
)

# Threads of the process after operators of torch, and after a step as large. One that compiled the
# step may still be on its way out; those of a team stay.
STEP = """
import os, time, torch, lowbit_optim
torch.set_num_threads(3)
p = torch.nn.Parameter(torch.ones(1 << 20))
p.grad = p.detach().exp()
before = len(os.listdir("/proc/self/task"))
with lowbit_optim.use_engine("numba"):
    lowbit_optim.AdamW8bit([p]).step()
end = time.monotonic() + 5
while (after := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < end:
    time.sleep(0.01)
print(before, after)
"""


def test_neither_the_number_nor_the_kind_of_threads_changes_a_bit(monkeypatch):
    """torch's OpenMP team, and the pool that takes its place where there is none."""
    shapes = [(300, 400), (70_000,), (5,)]  # large enough to be shared out
    results = []
    before = torch.get_num_threads()
    try:
        for threads, team in ((1, True), (2, True), (5, True), (2, False), (5, False)):
            torch.set_num_threads(threads)
            optimizer = lowbit_optim.LARS8bit(
                parameters(shapes=shapes), lr=0.1, momentum=0.9, trust_coefficient=0.02
            )
            with monkeypatch.context() as patch:
                if not team:
                    patch.setattr(numba_threads, "_openmp", lambda: None)
                results.append(snapshot(train(optimizer, 2)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert identical(results[0], other)


@of_linux
def test_torch_has_an_openmp_team():
    """Without it a step with several threads is slow after a backward pass."""
    assert numba_threads._openmp() is not None


@of_linux
@pytest.mark.parametrize("preloaded", [False, True])
def test_a_step_has_the_team_of_torch_s_operators(tmp_path, preloaded):
    """That of a library that was preloaded, too, as PyTorch advises for CPUs."""
    of_torch = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
    if not of_torch:
        pytest.skip("torch has no OpenMP library of its own, of which a copy can be preloaded")
    copy = tmp_path / "libother.so"
    # By another name, or the loader takes the two for one.
    copy.write_bytes(of_torch[0].read_bytes().replace(b"libgomp", b"libgimp"))
    preload = str(copy) if preloaded else None
    # Without the threads of the BLAS that Numba imports with SciPy when it compiles.
    before, after = python(STEP, LD_PRELOAD=preload, OPENBLAS_NUM_THREADS="1").split()
    assert before == after
    assert int(before) >= 3
