"""DTensors that have no gradient in a step: they stay as they are, and the step plan is kept."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit_optim
import sharded
from lowbit_optim import _sharding, _step_base, _sums
from protocol import identical

pytestmark = pytest.mark.timeout(120)

SHAPES = ((64, 300), (7, 512), (1, 40), (6144,), (300,), (12, 9))
# Of the parameters, those that have no gradient in each step once all have had one. In turn shards
# alone have one, and replicas alone, of which no sums are added up.
MISSING = ((), (), (1,), (0, 4), (0, 2, 4), (), (1, 3, 5), (0, 1, 2, 3, 4, 5), (5,), (2, 3), ())
NAMES = ("AdamW8bit", "AdamW8bit ratio8", "AdamW32bit bf16", "LAMB8bit", "LANS8bit", "Eve8bit")


def gradient_of(p, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def without_gradients(rank, world, folder):
    """Beside a twin that is not sharded; a rank makes its plan anew where others keep theirs."""
    _step_base.SETTLED = 0
    mesh = init_device_mesh("cpu", (world,))
    placements = [[Shard(0)], [Replicate()]]
    for name in NAMES:
        values = [gradient_of(torch.empty(shape), i) for i, shape in enumerate(SHAPES)]
        plain = [nn.Parameter(x.to(sharded.dtype_of(name))) for x in values]
        spread = [
            distribute_tensor(p.detach(), mesh, placements[i % 2]) for i, p in enumerate(plain)
        ]
        params = list(map(nn.Parameter, spread))
        optimizer, alone = (
            sharded.build(name, [{"params": some[:3]}, {"params": some[3:], "lr": 0.02}])
            for some in (params, plain)
        )
        for step, missing in enumerate(MISSING):
            for i, (p, q) in enumerate(zip(params, plain, strict=True)):
                q.grad = None if i in missing else gradient_of(q, 100 + 10 * step + i)
                p.grad = None if i in missing else distribute_tensor(q.grad, mesh, p.placements)
            if step % world == rank and step % 3 == 1:
                optimizer.plans.clear()
            optimizer.step()
            alone.step()
            if step > 2 and not step % 3:  # no rank has made its plan anew, nor in the last step
                assert all(plan.reused for plan in optimizer.plans.values()), (name, step)
        got, want = (sharded.everything(*one) for one in ((params, optimizer), (plain, alone)))
        if name in sharded.ELEMENTWISE:
            assert identical(got, want), name
        for x, y in zip(got["params"], want["params"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_they_are_left_out_whichever_rank_makes_its_plan_anew(world, tmp_path):
    sharded.run(world, without_gradients, str(tmp_path))


def specs_of_gradients(rank, world, folder):
    """Those that operators return are others than the parameters', and equal."""
    mesh = init_device_mesh("cpu", (world,))
    make = [DTensor.from_local(torch.ones(3), mesh, [Shard(0)]) for _ in range(2)]
    p, g = nn.Parameter(make[0]), make[1]
    locals_of = _sharding.Locals([p])
    assert g._spec is not p._spec
    compare, compared = _sharding._says_the_same, []
    _sharding._says_the_same = lambda *specs: compared.append(specs) or compare(*specs)
    for _ in range(2):
        held, gradients = locals_of([g])
        assert held[0] is p._local_tensor
        assert gradients[0] is g._local_tensor
    assert len(compared) == 1
    _sharding._says_the_same = compare
    replicated = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    assert locals_of([replicated]) is None
    assert locals_of([torch.ones(3)]) is None
    assert _sharding.Locals([p, p])([g, replicated]) is None
    elsewhere = init_device_mesh("cpu", (world,), mesh_dim_names=("other",))
    assert locals_of([DTensor.from_local(torch.ones(3), elsewhere, [Shard(0)])]) is None
    assert _sharding.Locals([p, torch.ones(3)])([g, g]) is None
    assert locals_of([p]) is not None
    optimizer = lowbit_optim.AdamW32bit([p])
    for _ in range(2):
        p.grad = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        optimizer.step()
    assert all(plan.reused for plan in optimizer.plans.values())


def test_gradients_with_specs_of_their_own_are_known_again(tmp_path):
    sharded.run(1, specs_of_gradients, str(tmp_path))


def sums_of_gloo(rank, world, folder):
    """Gathered or not, every rank has the same."""
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(1000, 2, generator=generator, dtype=torch.float64)
    found = []
    for most in (_sums.MOST_GATHERED, 0):
        _sums.MOST_GATHERED, total = most, own.clone()
        _sums.add_up(total, torch.distributed.group.WORLD)
        found.append(total)
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], own)
    least, largest = found[0].clone(), found[0].clone()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    assert torch.equal(least, largest)


def test_small_sums_are_gathered_by_gloo_to_the_same_bits_on_all_ranks(tmp_path):
    sharded.run(3, sums_of_gloo, str(tmp_path))
