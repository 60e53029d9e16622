"""A CUDA graph of a step, without CUDA: what a step gives a device is noted and given again."""

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import cases
import lowbit_optim
from lowbit_optim import _settings
from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

from lowbit_optim_kernels.engines.triton import tables as engine_tables
from lowbit_optim_kernels.engines.triton.compiled import Compiled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py captures")

SHAPES = [(5, 100), (300,), (2048,)]
CLASSES = cases.one_per_class(cases.FUSED_CASES)
ADAMW = next(case for case in CLASSES if case.name == "AdamW")


class Graph(TorchDispatchMode):
    """Notes operators and launches, and runs them again in the memory that they had.

    Attributes:
        host: addresses of memory for captures.
        calls: what a device was given.
        sent: how often it was given what is there.
    """

    def __init__(self, host):
        super().__init__()
        self.host, self.calls, self.sent = host, [], 0

    def __torch_dispatch__(self, operator, kinds, args=(), options=None):
        result = operator(*args, **(options or {}))
        in_host = [isinstance(x, torch.Tensor) and x.data_ptr() in self.host for x in args]
        self.sent += operator == torch.ops.aten.copy_.default and in_host[1]
        if not any(in_host[:1]):  # which is done once
            self.calls.append((operator, args, options or {}, result))
        return result

    def replay(self):
        for call, args, options, result in self.calls:
            again = call(*args, **options)
            if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)


def plans_of(optimizer):
    return [batch.tables for plan in optimizer.plans.values() for batch in plan.batches]


@contextmanager
def captured(optimizer):
    """A graph of what is run inside, which here is run as well."""
    spare = [pair for plan in plans_of(optimizer) for pair in plan.spare]
    graph = Graph({x.data_ptr() for pair in spare for x in pair})
    launch = Compiled.launch

    def noted(*given):
        graph.calls.append((launch, given, {}, None))
        with _disable_current_modes():  # what the interpreter does is no device's
            launch(*given)

    with pytest.MonkeyPatch.context() as patch, graph:
        patch.setattr(engine_tables, "capturing", lambda device: True)
        patch.setattr(Compiled, "launch", noted)
        yield graph


def set_memory_aside(optimizer, pairs=engine_tables.SPARE):
    """As every step on a GPU does; it need not be pinned here."""
    for plan in plans_of(optimizer):
        while len(plan.spare) < pairs:
            plan.spare.append((torch.empty_like(plan.address), torch.empty_like(plan.hyper)))


@pytest.fixture
def on_device(monkeypatch):
    """Tensors among settings count as a device's, which are not read."""
    as_number = _settings.as_number

    def kept(value, wait=False):
        tensor = isinstance(value, torch.Tensor) and not wait
        return value.reshape(()) if tensor else as_number(value, wait)

    monkeypatch.setattr(_settings, "as_number", kept)


def begun(case, lr):
    """An optimizer after a step, in which its memory for captures was set aside."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    optimizer = case.build(params, 8, min_8bit_size=1, lr=lr)
    for p in params:
        p.grad = torch.empty_like(p)
    step(optimizer, 0)
    set_memory_aside(optimizer)
    return optimizer


def give(optimizer, seed):
    """New gradients in the memory of the old ones."""
    generator = torch.Generator().manual_seed(seed)
    for p in optimizer.param_groups[0]["params"]:
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def step(optimizer, seed):
    give(optimizer, seed)
    optimizer.step()


def assert_same(one, other):
    pairs = zip(*(x.param_groups[0]["params"] for x in (one, other)), strict=True)
    for p, q in pairs:
        assert torch.equal(p, q)
        for key, value in other.state[q].items():
            assert torch.equal(one.state[p][key], value), key


@pytest.mark.parametrize("case", CLASSES, ids=lambda case: case.id)
def test_replays_go_on_counting_and_read_the_learning_rate(case, on_device):
    """Step counts, random bits and what lasts, as in steps."""
    rates = [torch.tensor(case.lr) for _ in range(2)]
    with lowbit_optim.use_engine("triton"):
        one, other = (begun(case, lr) for lr in rates)
        give(one, 1)
        with captured(one) as graph:
            one.step()
        step(other, 1)
        for seed in (2, 3):
            for lr in rates:
                lr.fill_(case.lr / seed)
            give(one, seed)
            graph.replay()
            step(other, seed)
            assert_same(one, other)


def test_replays_and_steps_in_between_do_not_disturb_each_other():
    """Numbers and addresses are those of each capture, and of the last step outside."""
    with lowbit_optim.use_engine("triton"):
        one, other = (begun(ADAMW, 0.1) for _ in range(2))
        params, graphs = one.param_groups[0]["params"], []
        static = [p.grad for p in params]
        elsewhere = [torch.empty_like(p) for p in params]
        for seed, lr, graph in (
            (1, 0.1, "new"), (2, 0.01, "new"), (3, 0.05, None), (4, 0.1, 0), (5, 0.05, None),
            (6, 0.01, 1),
        ):  # fmt: skip
            other.param_groups[0]["lr"] = lr
            step(other, seed)
            for p, g in zip(params, elsewhere if graph is None else static, strict=True):
                p.grad = g
            give(one, seed)
            if graph in (0, 1):
                graphs[graph].replay()
            else:
                one.param_groups[0]["lr"] = lr
                with captured(one) if graph else nullcontext() as new:
                    one.step()
                graphs.append(new)
            assert_same(one, other)
        assert [graph.sent for graph in graphs[:2]] == [2, 2], "addresses and numbers"


def test_memory_that_replays_read_is_kept_when_the_plan_is_dropped():
    """As that from which they send addresses and numbers."""
    with lowbit_optim.use_engine("triton"):
        optimizer = begun(ADAMW, 0.1)
        (plan,) = plans_of(optimizer)
        memory = [weakref.ref(x) for x in plan.spare[-1]]
        with captured(optimizer):
            optimizer.step()
    del plan
    optimizer.plans.clear()
    gc.collect()
    assert all(x() is not None for x in memory)


def test_a_third_capture_in_a_row_asks_for_a_step():
    with lowbit_optim.use_engine("triton"):
        optimizer = begun(ADAMW, 0.1)
        for _ in range(engine_tables.SPARE):
            with captured(optimizer):
                optimizer.step()
        with captured(optimizer), pytest.raises(RuntimeError, match="take a step between them"):
            optimizer.step()
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 3


def test_a_capture_of_a_step_with_a_missing_gradient_wants_one_like_it_before():
    """Whose kernels are compiled; and a replay goes on leaving that tensor out."""
    with lowbit_optim.use_engine("triton"):
        one, other, refused = (begun(ADAMW, 0.1) for _ in range(3))
        for optimizer in (one, other, refused):
            p, *others = optimizer.param_groups[0]["params"]
            p.grad = None
            for x in others:
                x.grad.fill_(0.5)
        before = [p.detach().clone() for p in refused.param_groups[0]["params"]]
        like_it = pytest.raises(RuntimeError, match="at least one step with the same")
        with like_it, captured(refused):
            refused.step()
        assert all(map(torch.equal, before, refused.param_groups[0]["params"]))
        one.step()
        set_memory_aside(one)
        with captured(one) as graph:
            one.step()
        (plan,) = one.plans.values()
        assert plan.missing
        graph.replay()
        for _ in range(3):
            other.step()
        assert_same(one, other)


def test_a_capture_after_a_parameter_was_moved_leaves_later_steps_their_addresses():
    with lowbit_optim.use_engine("triton"):
        one, other = (begun(ADAMW, 0.1) for _ in range(2))
        moved = one.param_groups[0]["params"][0]
        old, moved.data = moved.data, moved.data.clone()
        kept = old.clone()
        give(one, 1)
        with captured(one):
            one.step()
        step(other, 1)
        for seed in (2, 3):
            step(one, seed)
            step(other, seed)
        assert_same(one, other)
        assert torch.equal(old, kept)
