"""What torch.distributed does with sharded optimizers, beside plain steps and DCP's functions.

One world of two ranks runs all cases of this file, each of which compares with one process; those
on a mesh of two dimensions have four.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowbit_optim
import sharded
from lowbit_optim._gathering import ALL_GATHER
from protocol import identical

pytestmark = pytest.mark.timeout(120)
INPUTS = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))
STEPS = 4


def fully_sharded(mesh, name="", shift=0.0, **policy):
    model = sharded.mlp().to(sharded.dtype_of(name))
    for p in model.parameters():
        p.data += shift
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **policy)
    return model


def build(name, params):
    return sharded.build(name, params, min_8bit_size=256)


def trained(world, name, steps=3):
    model, spread = sharded.sharded_holder(world, 0, name)
    params = list(model.parameters())
    optimizer = sharded.build(name, params)
    sharded.train(optimizer, params, range(steps), spread)
    return model, params, optimizer, spread


def state_of(params, optimizer):
    return copy.deepcopy(sharded.everything(params, optimizer)["state"])


def mixed_precision(rank, world, folder):
    """As one process that computes in bf16 and steps fp32 weights."""
    inputs = INPUTS.bfloat16()
    for name in ("AdamW8bit", "LAMB8bit"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_sharded(init_device_mesh("cpu", (world,)), mp_policy=policy)
        sharded.fit(model, build(name, model.parameters()), STEPS, inputs)
        alone = sharded.mlp()
        optimizer = build(name, alone.parameters())
        for _ in range(STEPS):
            narrow = copy.deepcopy(alone).bfloat16()
            narrow.zero_grad()
            narrow(inputs).float().square().mean().backward()
            for p, q in zip(alone.parameters(), narrow.parameters(), strict=True):
                p.grad = q.grad.float()
            optimizer.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(sharded.full(p.detach()), q.detach(), rtol=1e-6, atol=1e-6)
            assert name != "AdamW8bit" or torch.equal(sharded.full(p.detach()), q)


def overflow_on_one_rank(rank, world, folder):
    """A GradScaler finds it on all ranks, and none takes the step."""
    for name in ("AdamW8bit", "LAMB8bit", "Cain8bit"):
        _, params, optimizer, spread = trained(world, name, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for p, g in zip(params, sharded.gradients(1), strict=True):
            p.grad = spread(4 * g)
        if rank == world - 1:
            params[0].grad._local_tensor[0, 0] = float("inf")
        before = sharded.everything(params, optimizer)
        before = copy.deepcopy(before)
        scaler.step(optimizer)
        assert identical(sharded.everything(params, optimizer), before)


def flattened_state_dicts(rank, world, folder):
    """As torchtitan saves them, so that pipeline stages can be dealt out anew."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for name in ("AdamW8bit", "LANS8bit", "AdamW8bit bf16", "LearnedGradient8bit"):
        model, params, optimizer, _ = trained(world, name)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"optim": saved}, checkpoint_id=f"{folder}/flat {name}")
        want = state_of(params, optimizer)
        model, _ = sharded.sharded_holder(world, 1, name)
        params = list(model.parameters())
        optimizer = sharded.build(name, params)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"optim": saved}, checkpoint_id=f"{folder}/flat {name}")
        set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert identical(state_of(params, optimizer), want)


def saved_meanwhile(rank, world, folder):
    """`async_save` has what there was when it was called."""
    model, params, optimizer, spread = trained(world, "AdamW8bit", 2)
    want = state_of(params, optimizer)
    weights, state = get_state_dict(model, optimizer)
    saving = dcp.async_save(
        {"model": weights, "optim": state}, checkpoint_id=f"{folder}/meanwhile",
        process_group=dist.new_group(),
    )  # fmt: skip
    sharded.train(optimizer, params, range(2, 4), spread)
    saving.result()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/meanwhile")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert identical(state_of(params, optimizer), want)


def mixed_groups(rank, world, folder):
    """Whole parameters, shards and copies on two meshes; a reduction is one call a mesh."""
    line, square = (init_device_mesh("cpu", shape) for shape in ((world,), (1, world)))
    deal = [
        lambda x: distribute_tensor(x.clone(), line, [Shard(0)]),
        torch.clone,
        lambda x: distribute_tensor(x.clone(), square, [Replicate(), Shard(0)]),
        lambda x: distribute_tensor(x.clone(), line, [Replicate()]),
    ]
    all_reduce, calls = dist.all_reduce, []

    def counted(*args, **options):
        calls.append(args)
        return all_reduce(*args, **options)

    def groups(params):
        params = list(map(torch.nn.Parameter, params))
        return [{"params": params[:5], "lr": 0.02}, {"params": params[5:]}], params

    for name in ("LAMB8bit", "LANS8bit"):
        own, dealt = groups(deal[i % 4](x) for i, x in enumerate(sharded.values()))
        whole, plain = groups(map(torch.clone, sharded.values()))
        optimizer, alone = sharded.build(name, own), sharded.build(name, whole)
        for step in range(3):
            for i, g in enumerate(sharded.gradients(step)):
                unused = step == 1 and i in (0, 6)
                dealt[i].grad = None if unused else deal[i % 4](g)
                plain[i].grad = None if unused else g
            calls.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_reduce", counted)
                optimizer.step()
            (batch,) = optimizer.plans[next(iter(optimizer.plans))].batches
            meshes = 1 if line.get_group() is square.get_group(1) else 2
            assert len(calls) <= meshes * len(batch.rule.phases)
            alone.step()
        for p, q in zip(dealt, plain, strict=True):
            torch.testing.assert_close(sharded.full(p.detach()), q.detach(), rtol=1e-6, atol=1e-6)


def zero_resumes(rank, world, folder):
    """ZeroRedundancyOptimizer, from the state dict that rank 0 has put together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def start():
        model = torch.nn.parallel.DistributedDataParallel(sharded.mlp())
        options = {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 256}
        cls = lowbit_optim.AdamW8bit
        return model, ZeroRedundancyOptimizer(model.parameters(), cls, **options)

    model, optimizer = start()
    sharded.fit(model, optimizer, STEPS, INPUTS)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/zero.pt")
    dist.barrier()
    sharded.fit(model, optimizer, STEPS, INPUTS)
    straight = [p.detach().clone() for p in model.parameters()]
    model, optimizer = start()
    weights, state = torch.load(f"{folder}/zero.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    sharded.fit(model, optimizer, STEPS, INPUTS)
    assert identical([p.detach() for p in model.parameters()], straight)


def vectors_in_bf16(rank, world, folder):
    """Those whose codes are cut are gathered together, in every step; others are not at all."""
    mesh = init_device_mesh("cpu", (world,))
    shapes = [(100,), (257,), (3,), (1,), (5, 7), (257,), (0,)]
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes * 5]
    gather, calls = getattr(dist, ALL_GATHER), []

    def dealt(x):
        return distribute_tensor(x.clone(), mesh, [Shard(0)])

    def counted(*args, **options):
        calls.append(args)
        return gather(*args, **options)

    for options, gathers in (
        ({}, 0), ({"master_weight_bits": 24}, 0), ({"min_8bit_size": 1}, 1),
    ):  # fmt: skip
        params = [torch.nn.Parameter(dealt(x)) for x in values]
        plain = [torch.nn.Parameter(x.clone()) for x in values]
        both = (lowbit_optim.AdamW8bit(some, lr=1e-2, **options) for some in (params, plain))
        optimizer, alone = both
        for step in range(4):
            for p, q in zip(params, plain, strict=True):
                if step == 2:  # by somebody else
                    p.to_local().data.mul_(2)
                    q.data.mul_(2)
                q.grad = torch.randn(q.shape, generator=generator).bfloat16()
                p.grad = dealt(q.grad)
            calls.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, ALL_GATHER, counted)
                optimizer.step()
            assert len(calls) == gathers
            (plan,) = optimizer.plans.values()
            assert plan.reused == (step > 0)
            alone.step()
        for p, q in zip(params, plain, strict=True):
            assert torch.equal(p.full_tensor(), q)
        assert identical(
            sharded.everything(params, optimizer)["state"],
            sharded.everything(plain, alone)["state"],
        )


def whole_state_of_before(rank, world, folder):
    """Versions that gathered these vectors kept all of their state on every rank."""
    model, params, optimizer, spread = trained(world, "AdamW8bit bf16")
    want = state_of(params, optimizer)

    def replicated(x):
        mesh = getattr(x, "device_mesh", None)
        return x if mesh is None else x.redistribute(mesh, [Replicate()])

    def cut(x):
        return getattr(x, "ndim", 0) == 1 and hasattr(x, "placements")

    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({key: replicated(x) for key, x in state.items() if cut(x)})
    optimizer.load_state_dict(saved)
    assert identical(state_of(params, optimizer), want)
    _, state = get_state_dict(model, optimizer)
    for one in state["state"].values():
        one.update({key: replicated(x) for key, x in one.items() if cut(x)})
    dcp.save({"optim": state}, checkpoint_id=f"{folder}/before")
    sharded.train(optimizer, params, range(1), spread)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"optim": state}, checkpoint_id=f"{folder}/before")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert identical(state_of(params, optimizer), want)


CASES = (
    mixed_precision, overflow_on_one_rank, flattened_state_dicts, saved_meanwhile, mixed_groups,
    zero_resumes, vectors_in_bf16, whole_state_of_before,
)  # fmt: skip


def all_cases(rank, world, folder):
    for case in CASES:
        case(rank, world, folder)


def hybrid(rank, world, folder):
    """HSDP: as one process, saved, and continued on four ranks in a line."""
    for name in ("AdamW8bit", "LANS8bit", "AdamW8bit bf16", "Cain8bit"):
        inputs = INPUTS.to(sharded.dtype_of(name))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        model = fully_sharded(square, name)
        optimizer = build(name, model.parameters())
        sharded.fit(model, optimizer, STEPS, inputs)
        optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
        sharded.fit(model, optimizer, STEPS, inputs)
        straight = [sharded.full(p.detach()) for p in model.parameters()]

        model = fully_sharded(init_device_mesh("cpu", (world,)), name, shift=1.0)
        optimizer = build(name, model.parameters())
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        sharded.fit(model, optimizer, STEPS, inputs)
        alone = sharded.mlp().to(sharded.dtype_of(name))
        sharded.fit(alone, build(name, alone.parameters()), 2 * STEPS, inputs)
        for p, q, r in zip(straight, model.parameters(), alone.parameters(), strict=True):
            for other in (sharded.full(q.detach()), r.detach()):
                assert name == "LANS8bit" or torch.equal(p, other)
                torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-6)


def placed_in_two_ways(rank, world, folder):
    """What is stepped whole is gathered apart where one mesh has it placed otherwise."""
    square = init_device_mesh("cpu", (2, 2))
    ways = [Replicate(), Shard(0)], [Shard(0), Replicate()]
    plain = [torch.nn.Parameter(x) for x in sharded.values()]
    params = [
        torch.nn.Parameter(distribute_tensor(p.detach(), square, ways[i % 2]))
        for i, p in enumerate(plain)
    ]
    optimizer, alone = (sharded.build("AdamW8bit", some) for some in (params, plain))
    for step in range(3):
        for p, q, g in zip(params, plain, sharded.gradients(step), strict=True):
            p.grad, q.grad = distribute_tensor(g, square, p.placements), g
        optimizer.step()
        alone.step()
    (plan,) = optimizer.plans.values()
    assert {i % 2 for i in plan.gathered.index} == {0, 1}
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p.full_tensor(), q)


def two_dimensions(rank, world, folder):
    for case in (hybrid, placed_in_two_ways):
        case(rank, world, folder)


@sharded.fully_shard_averages
@pytest.mark.slow
def test_two_ranks(tmp_path):
    sharded.run(2, all_cases, str(tmp_path))


@sharded.fully_shard_averages
@pytest.mark.slow
def test_four_ranks_of_two_dimensions(tmp_path):
    sharded.run(4, two_dimensions, str(tmp_path))
