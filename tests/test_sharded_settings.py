"""Settings that change in mid-run under sharding, and loads that go wrong on one rank alone."""

import copy
import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit_optim
import sharded
from lowbit_optim._sharding import has_placements_of, is_dtensor
from protocol import identical

pytestmark = pytest.mark.timeout(120)
MOMENTS = ("exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax")
LENGTH = 5000  # of two ranks' shards the first one ends within a block
CHANGES = {
    "to 8 bits": ("AdamW", {"optim_bits": 32}, {"optim_bits": 8}),
    "to 32 bits": ("AdamW", {"optim_bits": 8}, {"optim_bits": 32}),
    "larger ones only": ("LAMB", {"optim_bits": 8}, {"min_8bit_size": 10**6}),
    "with a moment": ("SGD8bit", {"momentum": 0.0}, {"momentum": 0.9}),
    "less a moment": (
        "Adam", {"amsgrad": True, "optim_bits": 8}, {"amsgrad": False, "optim_bits": 32},
    ),
}  # fmt: skip


def vector(seed, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator).bfloat16()


def changed(rank, world, folder):
    """Beside a twin that is not sharded, before and after a change, saved then, and back again."""
    mesh = init_device_mesh("cpu", (world,))
    for name, first, later in CHANGES.values():
        plain = nn.Parameter(vector(0))
        shards = nn.Parameter(distribute_tensor(vector(0), mesh, [Shard(0)]))
        cls = getattr(lowbit_optim, name)
        optimizers = [cls([p], lr=0.01, master_weight_bits=24, **first) for p in (plain, shards)]
        for step in range(4):
            plain.grad = vector(step + 1)
            shards.grad = distribute_tensor(vector(step + 1), mesh, [Shard(0)])
            for optimizer in optimizers:
                before = {**optimizer.defaults, **first}
                (group,) = optimizer.param_groups
                group.update(later if step in (1, 2) else {key: before[key] for key in later})
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.step()
            (state,) = optimizers[1].state.values()
            assert all(is_dtensor(x) for x in state.values() if x.ndim)  # none that is not kept
            got = sharded.everything([shards], optimizers[1])
            want = sharded.everything([plain], optimizers[0])
            if name == "Adam" and step == 3:
                continue  # a shard's largest squares have begun anew
            # A plain tensor has what settings no longer keep.
            (own,), (more,) = got["state"], want["state"]
            want["state"] = [{key: x for key, x in more.items() if key in own}]
            if name != "LAMB":
                assert identical(got, want), (name, step)
            for x, y in zip(got["params"], want["params"], strict=True):
                torch.testing.assert_close(x, y, rtol=0.01, atol=1e-6)


def test_settings_that_have_a_shard_stepped_whole(tmp_path):
    sharded.run(2, changed, str(tmp_path))


def resumed(rank, world, folder):
    """Codes of groups that say 32 bits: by an override, or from before the group was changed."""
    mesh = init_device_mesh("cpu", (world,))
    manager = lowbit_optim.GlobalOptimManager.get_instance()
    for override in (True, False):
        params = [nn.Parameter(distribute_tensor(vector(0), mesh, [Shard(0)])) for _ in range(2)]
        options = {} if override else {"min_8bit_size": 0}
        for p in params if override else ():
            manager.override_config(p, "min_8bit_size", 0)
        saved, loading = (
            lowbit_optim.AdamW8bit([p], **{"min_8bit_size": 10**6, **options}) for p in params
        )
        params[0].grad = distribute_tensor(vector(1), mesh, [Shard(0)])
        saved.step()
        saved.param_groups[0]["min_8bit_size"] = 10**6
        loading.load_state_dict(saved.state_dict())
        got, want = (
            sharded.everything([p], o) for p, o in zip(params, (loading, saved), strict=True)
        )
        assert identical(got["state"], want["state"])


def test_a_run_is_resumed_whose_groups_do_not_say_how_it_was_kept(tmp_path):
    sharded.run(2, resumed, str(tmp_path))


def dequantized(rank, world, folder):
    """Numbers have the parameter's placements, and are those of a twin that is not sharded."""
    mesh = init_device_mesh("cpu", (world,))
    for shape in ((LENGTH,), (63, 300)):
        value, *gradients = (vector(seed, math.prod(shape)).view(shape) for seed in range(4))
        plain = nn.Parameter(value.clone())
        shards = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
        optimizers = [lowbit_optim.AdamW8bit([p], master_weight_bits=24) for p in (plain, shards)]
        for g in gradients:
            plain.grad, shards.grad = g, distribute_tensor(g, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers if g is gradients[1] else ():
                lowbit_optim.dequantize_state(optimizer)
                ((p, state),) = optimizer.state.items()
                for x in (state["exp_avg"], state["exp_avg_sq"]):
                    assert x.dtype == torch.float32
                    assert has_placements_of(x, p) == is_dtensor(p)
            got, want = (
                sharded.everything([p], o)
                for p, o in zip((shards, plain), reversed(optimizers), strict=True)
            )
            assert identical(got, want)


def test_state_as_numbers(tmp_path):
    sharded.run(2, dequantized, str(tmp_path))


def weights_of_all_bits(rank, world, folder):
    """Those of vectors of which every rank keeps all bits, too, are a twin's and can be loaded."""
    mesh = init_device_mesh("cpu", (world,))
    plain = [nn.Parameter(vector(n, n)) for n in (LENGTH, 8191)]
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    twin, optimizer = (
        lowbit_optim.AdamW8bit(some, master_weight_bits=24) for some in (plain, params)
    )
    for p, q in zip(plain, params, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    twin.step()
    optimizer.step()
    want = sharded.everything(params, optimizer)
    weights = dict(lowbit_optim.master_weights(optimizer))
    wholes = {i: sharded.full(x) for i, x in weights.items()}
    assert identical(wholes, dict(lowbit_optim.master_weights(twin)))
    for given in (weights, wholes):
        lowbit_optim.load_master_weights(optimizer, {i: -x for i, x in given.items()})
        lowbit_optim.load_master_weights(optimizer, given)
        assert identical(sharded.everything(params, optimizer), want)


def test_weights_with_all_their_bits(tmp_path):
    sharded.run(2, weights_of_all_bits, str(tmp_path))


DAMAGES = {
    "codes as floats": lambda state: state.update(exp_avg=state["exp_avg"].float()),
    "a residual that was cast": lambda state: state.update(
        master_residual=state["master_residual"].to(torch.int16)
    ),
    "other entries": lambda state: state.pop("gnorm_vec"),
}


def damaged(rank, world, folder):
    """On the last rank only."""
    mesh = init_device_mesh("cpu", (world,))
    lengths = [LENGTH, 8191]  # the last block of a last shard is not full
    options = {"master_weight_bits": 24, "percentile_clipping": 50}
    plain = [nn.Parameter(vector(0, n)) for n in lengths]
    optimizer = lowbit_optim.AdamW8bit(plain, **options)
    for p in plain:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    loading = lowbit_optim.AdamW8bit(params, **{**options, "master_weight_bits": 32})
    for damage, spoil in DAMAGES.items():
        for index, length in enumerate(lengths):
            saved = copy.deepcopy(optimizer.state_dict())
            if rank == world - 1:
                spoil(saved["state"][index])
            said = r"parameter|state dicts differ"
            if damage == "other entries":
                said = rf"state dicts differ: .* shape \({length},\) they have different entries"
            with pytest.raises(ValueError, match=said):
                loading.load_state_dict(saved)
            assert not loading.state
    saved = optimizer.state_dict()
    if rank == world - 1:  # in another order, which says nothing
        saved["state"] = {i: dict(reversed(one.items())) for i, one in saved["state"].items()}
    loading.load_state_dict(saved)
    for p, q in zip(params, plain, strict=True):
        its = {key: sharded.full(loading.state[p][key]) for key in MOMENTS}
        assert identical(its, {key: optimizer.state[q][key] for key in MOMENTS})
    kept = [x.to_local() for p in params for x in loading.state[p].values() if is_dtensor(x)]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in kept)  # not the whole ones'
    before = sharded.everything(params, loading)
    for bad, said in ((torch.ones(1), "has shape"), (torch.ones(LENGTH).int(), "must be a float")):
        weights = [bad if rank == world - 1 else torch.ones(LENGTH), torch.ones(lengths[1])]
        with pytest.raises((ValueError, TypeError), match=f"the weight 0 {said}"):
            lowbit_optim.load_master_weights(loading, weights)
        assert identical(sharded.everything(params, loading), before)
    turned = DeviceMesh("cpu", list(reversed(range(world))))  # with other rows on each rank
    weights = [distribute_tensor(torch.ones(n), turned, [Shard(0)]) for n in lengths]
    said = r"the weight 0 is a DTensor on .*must be of the same mesh"
    with pytest.raises(ValueError, match=said):
        lowbit_optim.load_master_weights(loading, weights)
    assert identical(sharded.everything(params, loading), before)


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_wrong_on_one_rank_is_refused_by_all(world, tmp_path):
    sharded.run(world, damaged, str(tmp_path))


def of_experts(rank, world, folder):
    """Of a parameter that all hold shards of and one that some do, state differs in the latter."""
    all_of_them = init_device_mesh("cpu", (1, world))
    some, alone = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [world - 1]))
    params = [
        nn.Parameter(distribute_tensor(vector(0, 60), mesh, placements))
        for mesh, placements in (
            (all_of_them, [Replicate(), Shard(0)]),
            (alone if rank == world - 1 else some, [Shard(0)]),
        )
    ]
    optimizer = lowbit_optim.AdamW8bit(params, lr=0.01)
    for p in params:
        p.grad = p.detach().clone()
    optimizer.step()
    saved = optimizer.state_dict()
    if rank == 0:
        del saved["state"][1]
    before = sharded.everything(params, optimizer)
    with pytest.raises(ValueError, match=r"state dicts differ: .* have no state on some and shard"):
        optimizer.load_state_dict(saved)
    assert identical(sharded.everything(params, optimizer), before)


def test_a_difference_between_some_ranks_is_refused_by_all(tmp_path):
    sharded.run(3, of_experts, str(tmp_path))


def outside(rank, world, folder):
    """A parameter is on a mesh that the last rank is not part of, and is refused by all."""
    meshes = [DeviceMesh("cpu", list(range(ranks))) for ranks in (world, world - 1, world)]
    params = [nn.Parameter(distribute_tensor(vector(0, 60), mesh, [Shard(0)])) for mesh in meshes]
    optimizer = lowbit_optim.AdamW8bit(params)
    alone = [nn.Parameter(vector(0, 60)) for _ in params]
    saves = lowbit_optim.AdamW8bit(alone)
    for p in alone:
        p.grad = torch.ones_like(p)
    saves.step()
    with pytest.raises((ValueError, RuntimeError), match="this process is not part of; leave"):
        optimizer.load_state_dict(saves.state_dict())
    assert not optimizer.state


def test_state_of_a_parameter_that_a_rank_has_no_part_of_is_refused_by_all(tmp_path):
    sharded.run(2, outside, str(tmp_path))


def with_history(rank, world, folder):
    """Shards of a state that has norms, too, which each rank has whole, are taken as they lie."""
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
    optimizer = lowbit_optim.AdamW8bit([p], percentile_clipping=50)
    p.grad = distribute_tensor(x, mesh, [Shard(0)])
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["gnorm_vec"].shape == (100,)
    before = sharded.everything([p], optimizer)
    with patch.object(DTensor, "full_tensor", side_effect=AssertionError):
        optimizer.load_state_dict(saved)
    assert identical(sharded.everything([p], optimizer), before)


def test_shards_beside_a_history_of_norms_are_not_gathered(tmp_path):
    sharded.run(2, with_history, str(tmp_path))
