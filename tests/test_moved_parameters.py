"""`p.data = ...` moves a parameter: it is stepped where it is, mostly by the same plan."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lowbit_optim
import sharded
from protocol import all_parameters, give_gradients, identical, parameters, snapshot

SHAPES = ((12, 70), (300,), (5, 3, 2, 2))


def build(device, cls=lowbit_optim.LAMB8bit):
    params = [torch.nn.Parameter(x.detach().to(device)) for x in parameters(shapes=SHAPES)]
    return cls(params, lr=0.01, min_8bit_size=1)


def moved(p):
    """Move a parameter; the memory that it leaves, of NaN, which no other gets while it is kept."""
    left = p.data
    p.data = left.clone(memory_format=torch.preserve_format)
    return left.fill_(torch.nan)


def channels_last(p):
    p.data = p.data.contiguous(memory_format=torch.channels_last)


def reused(optimizer):
    return [plan.reused for plan in optimizer.plans.values()]


@pytest.mark.parametrize("some", [[0], [0, 1, 2]], ids=["some", "all"])
@pytest.mark.parametrize("copied", [False, True], ids=["contiguous", "channels last"])
def test_moved_parameters_are_stepped_where_they_are(some, copied, engine, device):
    """With missing gradients, too; back where they were before; and then others."""
    stays, moves = build(device), build(device)
    if copied:
        for optimizer in (stays, moves):
            channels_last(all_parameters(optimizer)[2])
    left, seen = [], []
    for t in range(7):
        for optimizer in (stays, moves):
            params = all_parameters(optimizer)
            give_gradients(params, t)
            if t > 4 and not copied:
                params[1].grad = None
            if optimizer is moves and t in (1, 2, 3, 5):
                if t == 3:
                    for p, memory in zip(params, left, strict=False):
                        p.data = memory.copy_(p.data)
                else:
                    left = [moved(params[i]) for i in (some if t < 5 else [2])]
            optimizer.step()
        seen += reused(moves)
    assert identical(snapshot(stays), snapshot(moves))
    assert all(x.isnan().all() for x in left)
    assert seen[:5] == [False] + [True] * 4


def test_moved_parameters_that_are_stepped_by_themselves(device):
    stays, moves = (build(device, lowbit_optim.AdamW8bit) for _ in range(2))
    for t in range(4):
        left = [moved(p) for p in all_parameters(moves)]
        for optimizer in (stays, moves):
            give_gradients(all_parameters(optimizer), t)
            for p in all_parameters(optimizer):
                optimizer.step_parameter(p)
    assert identical(snapshot(stays), snapshot(moves))
    assert all(x.isnan().all() for x in left)


def test_one_that_is_no_longer_aligned_has_a_plan_of_its_own(engine, device):
    stays, moves = build(device), build(device)
    seen = []
    for t in range(4):
        if t == 2:
            p = all_parameters(moves)[0]
            p.data = torch.cat([p.data.new_zeros(1), p.data.flatten()])[1:].view(p.shape)
        for optimizer in (stays, moves):
            give_gradients(all_parameters(optimizer), t)
            optimizer.step()
        seen += reused(moves)
    assert identical(snapshot(stays), snapshot(moves))
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("alike", [True, False])
def test_two_that_come_to_share_memory_are_stepped_one_after_the_other(alike, engine, device):
    """As by plans that are made anew in every step; by one or two. And when they part."""
    made, seen = [], []
    for thorough in (True, False):
        first, second = (
            torch.nn.Parameter(torch.linspace(-0.1, 0.1, 3000, device=device)) for _ in range(2)
        )
        groups = [{"params": [first]}, {"params": [second], "maximize": not alike}]
        optimizer = lowbit_optim.LAMB8bit(groups, lr=0.1)
        for t in range(6):
            if t == 2:
                second.data = first.data
            if t == 4:
                second.data = second.data.clone()
            give_gradients([first, second], t)
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
            seen.append(reused(optimizer))
        made.append(snapshot(optimizer))
    assert identical(*made)
    plans = 2 - alike
    assert seen[6:] == [[used] * plans for used in (False, True, not alike, True, True, True)]


def test_a_parameter_whose_memory_is_freed_is_refused(device):
    optimizer = build(device)
    for t in range(3):
        p = all_parameters(optimizer)[1]
        give_gradients(all_parameters(optimizer), t)
        if t == 2:
            p.data = p.data.clone()
            p.data.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match=r"a parameter of shape \(300,\) has no memory"):
                optimizer.step()
        else:
            optimizer.step()


def moved_shards(rank, world, folder):
    """Of some DTensors every rank steps a whole copy: their blocks end within shards."""
    mesh = init_device_mesh("cpu", (world,))
    for name in ("AdamW8bit", "LAMB8bit"):
        made = []
        for moves in (False, True):
            spread = [distribute_tensor(x, mesh, [Shard(0)]) for x in sharded.values()]
            params = list(map(torch.nn.Parameter, spread))
            optimizer = sharded.build(name, params)
            for t in range(4):
                left = [moved(p._local_tensor) for p in params] if moves else []
                for p, g in zip(params, sharded.gradients(t), strict=True):
                    p.grad = distribute_tensor(g, mesh, [Shard(0)])
                optimizer.step()
            assert reused(optimizer) == [True]
            assert all(x.isnan().all() for x in left)
            made.append(sharded.everything(params, optimizer))
        (plan,) = optimizer.plans.values()
        assert 0 < len(plan.gathered.index) < len(params)
        assert identical(*made), name


@pytest.mark.timeout(120)
def test_moved_shards(tmp_path):
    sharded.run(2, moved_shards, str(tmp_path))


def test_sharpness_aware_minimization_keeps_its_plan(engine, device):
    """As its best known implementation steps: to the gradient's peak, and back by `p.data`."""
    by_copies, by_data = build(device), build(device)
    for t in range(4):
        for optimizer in (by_copies, by_data):
            params = all_parameters(optimizer)
            olds = [p.detach().clone() for p in params]
            give_gradients(params, t)
            for p, old in zip(params, olds, strict=True):
                p.data.add_(p.grad, alpha=0.05)
                p.grad = p.detach() * p.grad
                if optimizer is by_data:
                    p.data = old
                else:
                    p.data.copy_(old)
            optimizer.step()
    assert identical(snapshot(by_copies), snapshot(by_data))
    assert reused(by_data) == [True]
