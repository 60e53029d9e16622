"""Whom a rank asks: the ranks of a parameter's own mesh, and none where it holds all of it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sharded
from lowbit_optim import _sharding
from protocol import identical

pytestmark = pytest.mark.timeout(120)


def nothing_to_ask(rank, world, folder):
    """Of a shard that is all there is, and of replicas, whatever the rule needs."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.ones(5000)  # of two shards the first one would end within a block
    for name, placement in (
        ("LAMB8bit", Shard(0)), ("LAMB8bit", Replicate()), ("Cain8bit", Replicate()),
    ):  # fmt: skip
        p = nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
        optimizer = sharded.build(name, [p])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        for plan in optimizer.plans.values():
            assert not plan.gathered.index
            assert not any(batch.shards for batch in plan.batches)
        share = optimizer._share(p, optimizer.param_groups[0])
        assert not share.whole
        assert share.placements == (placement,)
        assert _sharding.shard_groups(p) == ()


def test_ranks_that_hold_all_of_a_parameter_ask_no_other(tmp_path):
    sharded.run(1, nothing_to_ask, str(tmp_path))


def vector(seed):
    return torch.randn(700, generator=torch.Generator().manual_seed(seed))


def two_lines(rank, world, folder):
    """Vectors on the rows and on the columns of a mesh; their shards end within blocks."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    meshes = [square["rows"], square["columns"]] * 2
    for name in ("AdamW8bit", "LAMB8bit"):
        plain = [nn.Parameter(vector(i)) for i in range(4)]
        pairs = zip(plain, meshes, strict=True)
        dealt = [distribute_tensor(p.detach(), mesh, [Shard(0)]) for p, mesh in pairs]
        params = list(map(nn.Parameter, dealt))
        optimizer, alone = (sharded.build(name, x, min_8bit_size=1) for x in (params, plain))
        for step in range(3):
            for i, (p, q) in enumerate(zip(params, plain, strict=True)):
                q.grad = vector(100 + 10 * step + i)
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
            optimizer.step()
            alone.step()
        assert all(len(plan.gathered.index) == 4 for plan in optimizer.plans.values())
        assert identical(sharded.everything(params, optimizer), sharded.everything(plain, alone))


@pytest.mark.slow
def test_shards_are_gathered_of_the_ranks_of_their_own_mesh(tmp_path):
    sharded.run(4, two_lines, str(tmp_path))
