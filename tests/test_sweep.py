"""All passes of a step window by window, beside the same passes one after the other.

Which is how shards take them.
"""

import ctypes
import time

import numpy as np
import pytest
import torch

import lowbit_optim
from protocol import give_gradients, identical, parameters, pass_by_pass, snapshot, train

pytest.importorskip("numba")
from lowbit_optim_kernels.engines.numba import job, tables, threads

COMBINE = job.COMBINE // job.WORD  # a word of a row

# Coded and exact moments by turns, so that tensors of one function do not follow each other; one of
# no elements; one that is larger than a window; short rows.
SHAPES = [(3, 1000), (7,), (20_000,), (0,), (5, 300), (70, 100), (), (4000,), (1, 2)]
OPTIMIZERS = {
    "LARS8bit": {"momentum": 0.9, "trust_coefficient": 0.02},
    "LAMB8bit": {},
    "LANS8bit": {},
    "Eve8bit": {},
    "AdamW8bit": {"percentile_clipping": 5, "max_unorm": 0.1},
    "LARS32bit": {"momentum": 0.9, "max_unorm": 0.5},
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(tables, "WINDOW", 1 << 12)
    monkeypatch.setattr(tables, "ALONE", 1 << 11)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(name, dtypes):
    """The state after three steps, one of them without a gradient for some."""
    params = parameters(shapes=SHAPES)
    params = [
        torch.nn.Parameter(p.detach().to(dtypes[i % len(dtypes)])) for i, p in enumerate(params)
    ]
    optimizer = getattr(lowbit_optim, name)(params, lr=0.1, min_8bit_size=512, **OPTIMIZERS[name])
    train(optimizer, 2)
    give_gradients(params, 2)
    params[2].grad = None
    optimizer.step()
    return snapshot(optimizer)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(name, [torch.float32]) for name in OPTIMIZERS]
    + [("LARS8bit", [torch.bfloat16, torch.float32])],
)
def test_windows_change_no_bit(name, dtypes, monkeypatch):
    with monkeypatch.context() as patch:
        pass_by_pass(patch)
        expected = trained(name, dtypes)
    for number, team in ((1, True), (2, True), (5, True), (5, False)):
        torch.set_num_threads(number)
        with monkeypatch.context() as patch:
            if not team:
                patch.setattr(threads, "_openmp", lambda: None)
            assert identical(trained(name, dtypes), expected)


def of_one_memory():
    """The weights after steps of two groups whose parameters share memory."""
    (p,) = parameters(shapes=[(70, 100)])
    groups = [{"params": [torch.nn.Parameter(p.data)]} for _ in range(2)]
    optimizer = lowbit_optim.LAMB8bit(groups, lr=0.1, trust_coefficient=1.0)
    train(optimizer, 3)  # whose later steps go on with the first one's plans
    return snapshot(optimizer)


def released_apart_and_together():
    """The weights after steps of either of two such groups, then of both with the same plans."""
    (p,) = parameters(shapes=[(70, 100)])
    pair = [torch.nn.Parameter(p.data) for _ in range(2)]
    groups = [{"params": [one]} for one in pair]
    optimizer = lowbit_optim.LAMB8bit(groups, lr=0.1, trust_coefficient=1.0)
    lowbit_optim.release_gradients(optimizer)
    for step, some in enumerate((pair[:1], pair[1:], pair, pair)):
        torch.stack([(one * (one.detach() + step)).sum() for one in some]).sum().backward()
        optimizer.step()
    return snapshot(optimizer)


def of_one_memory_by_two_rules():
    """The weights after a step of the second of two such groups, whose plan later steps reuse."""
    (p,) = parameters(shapes=[(70, 100)])
    pair = [torch.nn.Parameter(p.data) for _ in range(2)]
    groups = [{"params": pair[:1], "amsgrad": True}, {"params": pair[1:]}]
    optimizer = lowbit_optim.LAMB8bit(groups, lr=0.1, trust_coefficient=1.0)
    for step, some in enumerate((pair[1:], pair, pair)):
        give_gradients(some, step)
        optimizer.step()
    return snapshot(optimizer)


@pytest.mark.parametrize(
    "steps", [of_one_memory, released_apart_and_together, of_one_memory_by_two_rules]
)
def test_norms_are_taken_before_another_group_writes_the_same_memory(steps, monkeypatch):
    with monkeypatch.context() as patch:
        pass_by_pass(patch)
        expected = steps()
    assert identical(steps(), expected)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("taken", [1, threads.PIECES])
def test_pieces_of_a_thread_that_does_not_come_back_are_done_again(number, taken, monkeypatch):
    """The first of each owner, which may be empty, or all of them, of every reduction."""
    torch.set_num_threads(number)
    expected = trained("LANS8bit", [torch.float32])

    def run(job):
        tickets = running[-1].tickets
        tickets[:, :-1, 1:, 0] = taken
        original(job)
        assert (tickets[:, :-1, 1:, 1] & 1).any()

    def sweep(self, part):
        running.append(self)
        whole(self, part)

    running, original, whole = [], threads.Job.run, tables.Sweep.run
    monkeypatch.setattr(tables.Sweep, "run", sweep)
    monkeypatch.setattr(threads.Job, "run", run)
    assert identical(trained("LANS8bit", [torch.float32]), expected)
    assert len(running) == 3


def test_pieces_of_an_update_are_never_done_again(monkeypatch):
    """The thread that has one writes the weights, however late it comes back."""
    torch.set_num_threads(2)

    def run(job):
        updates = running[-1].tickets[:, -1, 1:]
        updates[..., 0] = 1
        original(job)
        assert not (updates[..., 1] & 1).any()
        done.append(bool((updates[..., 1] > 1).any()))

    def sweep(self, part):
        running.append(self)
        whole(self, part)

    running, done, original, whole = [], [], threads.Job.run, tables.Sweep.run
    monkeypatch.setattr(tables.Sweep, "run", sweep)
    monkeypatch.setattr(threads.Job, "run", run)
    trained("LANS8bit", [torch.float32])
    assert any(done)


def test_no_thread_goes_on_before_the_norms_are_combined(monkeypatch):
    """Which another thread may take its time for; those that wait let others have their core."""
    torch.set_num_threads(2)
    expected = trained("LANS8bit", [torch.float32])
    function, seen, whole = ctypes.CFUNCTYPE(None, ctypes.c_int64), [], tables.Sweep.run
    let, yielding = [], ctypes.CFUNCTYPE(ctypes.c_int)(lambda: let.append(True) or 0)
    address_of_yielding = ctypes.cast(yielding, ctypes.c_void_p).value
    monkeypatch.setattr(threads, "let_others", lambda: address_of_yielding)

    def slow(row):
        combine = function(int(row[COMBINE]))
        combined = ctypes.c_int64.from_address(int(row[job.TICKETS // job.WORD]) + job.COMBINED)

        def combine_slowly(tensor):
            seen.append(combined.value)
            time.sleep(0.002)
            combine(tensor)

        return function(combine_slowly)

    def sweep(self, part):
        reductions = self.parts[part][:, job.TERMS // job.WORD] > 0
        before = self.parts[part].copy()
        combining = [slow(row) for row in before[reductions]]
        addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in combining]
        self.parts[part][reductions, COMBINE] = addresses
        whole(self, part)
        self.parts[part][:] = before

    monkeypatch.setattr(tables.Sweep, "run", sweep)
    assert identical(trained("LANS8bit", [torch.float32]), expected)
    assert seen
    assert not any(seen)
    assert let


@pytest.mark.parametrize("most", [1, 100, 1000, 10**6])
def test_a_window_has_whole_tensors(most):
    blocks = [1, 3, 1, 1, 0, 2, 9, 1]
    rows = [(t, b, 1) for t, count in enumerate(blocks) for b in range(max(count, 1))]
    sizes = [100 * count for count in blocks]
    bucket = tables.Bucket({}, np.array(rows, dtype=np.int64), sizes)
    windows = bucket.windows(most)
    assert sum(elements for _, _, elements in windows) == sum(sizes)
    following, tensors = 0, []
    for first, chunks, elements in windows:
        assert first == following
        following += chunks
        own = sorted({t for t, _, _ in rows[first:following]})
        tensors += own
        assert elements == sum(sizes[t] for t in own)
        assert elements <= most or len([t for t in own if sizes[t]]) == 1
    assert tensors == list(range(len(blocks)))


def test_a_skipped_step_changes_nothing():
    shapes = parameters(shapes=SHAPES)
    optimizer = lowbit_optim.LAMB8bit(shapes, lr=0.1, min_8bit_size=512, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train(optimizer, 1)
    before = snapshot(optimizer)
    params = optimizer.param_groups[0]["params"]
    scaler.scale(sum(p.sum() for p in params)).backward()
    params[0].grad[0, 0] = torch.inf
    scaler.step(optimizer)
    assert identical(snapshot(optimizer), before)
