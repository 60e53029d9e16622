"""What the ranks of test_sharded.py run; every function is called by all ranks of a world."""

import faulthandler
import os
import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import lowbit_optim
from lowbit_optim_kernels.weights import as_integers

# Rows of 300 and of 512; fewer rows than ranks; flat blocks that end with a shard and that do not;
# more than 4096 elements of which a shard has fewer; a small tensor, one number; just 4096; flat
# blocks that end with a shard but for those that are dealt out over two dimensions of a mesh. (Of
# the rows of 60 two shards do not end with a block, although they would have 11 scales each.)
SHAPES = [
    (64, 300), (7, 512), (3, 2000), (6144,), (5000,), (48, 128), (4096, 16), (93, 60), (5,),
    (1, 1), (8, 512), (8190,),
]  # fmt: skip
CLASSES = {
    "AdamW8bit": {"weight_decay": 0.1},
    "SGD8bit": {"momentum": 0.9},
    "Lion8bit": {},
    "AdamW32bit": {},
    "ScheduleFreeAdamW8bit": {},
    "LARS8bit": {"momentum": 0.9, "trust_coefficient": 0.02},
    "LAMB8bit": {"trust_coefficient": 1.0, "weight_decay": 0.1},
    "LANS8bit": {"weight_decay": 0.1, "percentile_clipping": 50},
    "Eve8bit": {"max_unorm": 0.1},
    "Adam8bit": {"cautious": True},
    # Further rows of a class: formats, and weights that are rounded by dither.
    "AdamW8bit ratio8": {"weight_decay": 0.1, "state_format": "ratio8"},
    "AdamW4bit": {},
    "AdamW8bit bf16": {"master_weight_bits": 24},
    "AdamW32bit bf16": {},
    "SGD8bit bf16": {"momentum": 0.999, "state_format": "ratio8"},
    "LAMB8bit bf16": {"trust_coefficient": 1.0, "master_weight_bits": 32},
    # Rules that need the whole tensor.
    "Cain8bit": {"percentile_clipping": 50},
    "Cain8bit bf16": {"master_weight_bits": 32},
    "LearnedGradient8bit": {"lr_est_period": 2, "max_size": 512},
}
WHOLE = tuple(name for name in CLASSES if name.startswith(("Cain", "Learned")))
WITH_SUMS = ("LARS8bit", "LAMB8bit", "LANS8bit", "Eve8bit", "Adam8bit", "LAMB8bit bf16")
ELEMENTWISE = tuple(name for name in CLASSES if name not in WITH_SUMS)

fully_shard_averages = pytest.mark.skipif(
    torch.__version__.startswith("2.7."),
    reason="fully_shard of torch 2.7 adds the gradients of gloo's ranks and does not divide them",
)


def run(world, function, *args, join=True):
    """Call `function(rank, world, *args)` on so many processes of one gloo group."""
    given = world, function, f"{args[0]}/rendezvous", *args
    return mp.start_processes(_enter, given, world, join, start_method="forkserver")


def _enter(rank, world, function, address, *args):
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["LOWBIT_OPTIM_ENGINE"] = "numba"
    limit = timedelta(seconds=60)
    store = dist.FileStore(address, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        function(rank, world, *args)
        # A rank that leaves takes along its connections, which others may not be done with; a
        # barrier's own, too.
        store.set(f"left by {rank}", "")
        store.wait([f"left by {other}" for other in range(world)], limit)
    except BaseException:
        dist.destroy_process_group()
        raise
    # Threads of gloo end a process at times that unloads them in order. In torch 2.7 they may want
    # the interpreter, too, while the end of their group holds it and waits for them.
    os._exit(0)


def dtype_of(name):
    return torch.bfloat16 if name.endswith("bf16") else torch.float32


def values(seed=0, name=""):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype_of(name)) for shape in SHAPES]


def gradients(step):
    return values(seed=100 + step)


def build(name, params, **options):
    lr = 0.1 if name.startswith(("SGD", "LARS")) else 1e-2
    cls = getattr(lowbit_optim, name.split()[0])
    return cls(params, lr=lr, **{**CLASSES[name], **options})


def train(optimizer, params, steps, spread=lambda x: x):
    for step in steps:
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = spread(g.to(p.dtype))
        optimizer.step()


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def everything(params, optimizer):
    """Parameters and states with whole tensors; a collective call."""
    state = [{key: full(x) for key, x in optimizer.state[p].items()} for p in params]
    for one in state:  # 16 bits are kept as bf16 here, which can be gathered
        if one.get("master_residual") is not None:
            one["master_residual"] = as_integers(one["master_residual"])
    return {"params": [full(p.detach()) for p in params], "state": state}


def layouts(world):
    """Meshes and placements that a world of this size can have."""
    line = init_device_mesh("cpu", (world,))
    found = {"shard": (line, [Shard(0)]), "replicate": (line, [Replicate()])}
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        found["hybrid"] = (square, [Replicate(), Shard(0)])
        found["both"] = (square, [Shard(0), Shard(0)])
    return found


def steps_of_all(rank, world, folder):
    """Three steps of every class under every layout, saved by rank 0."""
    results = {}
    for label, (mesh, placements) in layouts(world).items():

        def spread(x, mesh=mesh, placements=placements):
            return distribute_tensor(x.clone(), mesh, placements)

        for name in CLASSES if label == "shard" else ("AdamW8bit", "LANS8bit", *WHOLE):
            params = [torch.nn.Parameter(spread(x)) for x in values(0, name)]
            optimizer = build(name, params)
            train(optimizer, params, range(3), spread)
            if label == "shard":
                for p in params:
                    plain_keys = {"step", "gnorm_vec", "weight_sum", "lr_max"}
                    if name in WHOLE:
                        plain_keys |= set(optimizer._extras(p, optimizer._settings_of(0), {}))
                    for key, x in optimizer.state[p].items():
                        plain = key in plain_keys
                        assert hasattr(x, "placements") != plain, key
            results[label, name] = everything(params, optimizer)
    if rank == 0:
        torch.save(results, f"{folder}/world{world}.pt")


class Holder(torch.nn.Module):
    """A module of parameters, which is what DCP's functions ask for."""

    def __init__(self, tensors):
        super().__init__()
        for i, x in enumerate(tensors):
            self.register_parameter(f"p{i}", torch.nn.Parameter(x))


def sharded_holder(world, seed=0, name=""):
    mesh = init_device_mesh("cpu", (world,))

    def spread(x):
        return distribute_tensor(x.clone(), mesh, [Shard(0)])

    return Holder([spread(x) for x in values(seed, name)]), spread


SAVED = ("AdamW8bit", "LARS8bit", "LANS8bit", "ScheduleFreeAdamW8bit", "AdamW8bit bf16",
         "AdamW4bit", "Cain8bit", "Cain8bit bf16", "LearnedGradient8bit")  # fmt: skip


def save(rank, world, folder):
    """Three steps, then checkpoints of DCP and whole ones."""
    for name in SAVED:
        model, spread = sharded_holder(world, 0, name)
        optimizer = build(name, list(model.parameters()))
        train(optimizer, list(model.parameters()), range(3), spread)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            torch.save(whole, f"{folder}/{name}.pt")


def load(rank, world, folder):
    """Continue both kinds of checkpoints for three steps."""
    results = {}
    for name in SAVED:
        model, spread = sharded_holder(world, 1, name)
        params = list(model.parameters())
        optimizer = build(name, params)
        weights, state = get_state_dict(model, optimizer)
        both = {"model": weights, "optim": state}
        dcp.load(both, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"]
        )
        train(optimizer, params, range(3, 6), spread)
        results["dcp", name] = everything(params, optimizer)
        model, spread = sharded_holder(world, 1, name)
        params = list(model.parameters())
        optimizer = build(name, params)
        whole = torch.load(f"{folder}/{name}.pt", weights_only=True) if rank == 0 else ({}, {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole[0], options=options)
        set_optimizer_state_dict(model, optimizer, whole[1], options=options)
        train(optimizer, params, range(3, 6), spread)
        results["broadcast", name] = everything(params, optimizer)
    if rank == 0:
        torch.save(results, f"{folder}/loaded{world}.pt")


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(70, 130), torch.nn.LayerNorm(130), torch.nn.Linear(130, 67, bias=False)
    )


def fit(model, optimizer, steps, inputs):
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()


def fsdp(rank, world, folder):
    """A model under fully_shard, with and without offload and mixed precision."""
    results = {}
    inputs = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))
    policies = {
        "resident": {},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    }
    for label, policy in policies.items():
        for name in ("AdamW8bit", "LANS8bit", "Cain8bit", "LearnedGradient8bit"):
            model = mlp()
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), **policy)
            optimizer = build(name, model.parameters(), min_8bit_size=256)
            fit(model, optimizer, 4, inputs.bfloat16() if label == "mixed" else inputs)
            results[label, name] = everything(list(model.parameters()), optimizer)
    if rank == 0:
        torch.save(results, f"{folder}/fsdp.pt")


def refused(rank, world, folder):
    """What cannot be stepped or loaded is refused by name, on every rank, and changes nothing."""
    mesh = init_device_mesh("cpu", (world,))
    for placement, said in ((Shard(1), r"Shard\(dim=1\)|S\(1\)"), (Partial(), "Partial|P")):
        p = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh, [placement]))
        p.grad = DTensor.from_local(torch.ones(4, 6), mesh, [placement])
        sentence = rf"AdamW8bit: a parameter of shape.* with the placement ({said})"
        with pytest.raises(RuntimeError, match=sentence):
            lowbit_optim.AdamW8bit([p]).step()
        assert torch.equal(p._local_tensor, torch.ones(4, 6))
    other = init_device_mesh("cpu", (1, world))
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4, 6), other, [Replicate(), Shard(0)])
    with pytest.raises(RuntimeError, match=r"DeviceMesh.*its gradient.*must be of the same mesh"):
        lowbit_optim.AdamW8bit([p]).step()
    again = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]))
    optimizer = lowbit_optim.AdamW8bit([again])
    for ones in (torch.ones(4, 6), AsyncCollectiveTensor(torch.ones(4, 6))):
        again.grad = DTensor.from_local(ones, mesh, [Replicate()], run_check=False)
        assert type(again.grad._local_tensor) is type(ones)
        optimizer.step()  # which waits for what a collective has yet to give
    assert int(optimizer.state[again]["step"]) == 2
    elsewhere = DTensor.from_local(torch.ones(4, 6, device="meta"), mesh, [Shard(0)])
    elsewhere = torch.nn.Parameter(elsewhere)
    elsewhere.grad = elsewhere.detach()
    said = r"AdamW8bit: a .* DTensor on meta, but its mesh is of cpu devices"
    with lowbit_optim.use_engine("torch"), pytest.raises(RuntimeError, match=said):
        lowbit_optim.AdamW8bit([elsewhere]).step()
    alone = DeviceMesh("cpu", [0])  # which the other ranks are not part of
    p_alone = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), alone, [Shard(0)]))
    p_alone.grad = distribute_tensor(torch.ones(4, 6), alone, [Shard(0)])
    optimizer = lowbit_optim.LAMB8bit([p_alone])
    said = r"LAMB8bit: a .* on DeviceMesh.*, which this process is not part of; leave"
    with pytest.raises(RuntimeError, match=said) if rank else nullcontext():
        optimizer.step()
    assert len(optimizer.state) == (rank == 0)
    plain = torch.nn.Parameter(torch.ones(4, 6))
    for cls in (lowbit_optim.Cain, lowbit_optim.LearnedGradient):
        plain.grad = torch.ones(4, 6)
        p.grad = distribute_tensor(torch.ones(4, 6), other, [Replicate(), Shard(0)])
        optimizer = cls([{"params": [plain]}, {"params": [p]}])
        with pytest.raises(RuntimeError, match=rf"{cls.__name__}: .*must be of the same mesh"):
            optimizer.step()
        assert torch.equal(plain, torch.ones(4, 6))
        assert torch.equal(p._local_tensor, torch.ones(p._local_tensor.shape))
        assert not optimizer.state
    model, spread = sharded_holder(world)
    params = list(model.parameters())
    optimizer = build("AdamW8bit", params)
    train(optimizer, params, range(2), spread)
    before = everything(params, optimizer)["state"]
    saved = optimizer.state_dict()
    damaged = {**saved["state"][0], "exp_avg_absmax": saved["state"][0]["exp_avg_absmax"].clone()}
    damaged["exp_avg_absmax"]._local_tensor.fill_(float("nan"))
    whole = {**saved, "state": dict(enumerate(before))}
    last = rank == world - 1
    for state_dict, said in (
        ({**saved, "state": {**saved["state"], 0: damaged}}, r"parameter 0.*has scales that are"),
        ({**whole, "lowbit_optim": {"format_version": 99, "optimizer": "adam"}}, "version 99"),
        (whole, "state dicts differ: .*have whole tensors on some and shards"),
        ({**saved, "state": {0: saved["state"][0]}}, "have no state on some and shards"),
    ):
        good = whole if "version" in said else saved
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(state_dict if last else good)
        after = everything(params, optimizer)["state"]
        for a, b in zip(before, after, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


def others(rank, world, folder):
    """DDP and ZeroRedundancyOptimizer, which hand plain tensors over."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    inputs = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))
    results = {}
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    fit(model, build("LANS8bit", model.parameters(), min_8bit_size=256), 4, inputs)
    results["ddp"] = [p.detach() for p in model.parameters()]
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    options = {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 256}
    # Each rank's optimizer counts its own parameters from 0, and so has other random bits.
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), lowbit_optim.AdamW8bit, **options, dither=False
    )
    fit(model, optimizer, 4, inputs)
    results["zero"] = [p.detach() for p in model.parameters()]
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    fit(model, build("AdamW32bit", model.parameters()), 4, inputs)
    with FullyShardedDataParallel.summon_full_params(model):
        results["fsdp1"] = [p.detach().clone() for p in model.parameters()]
    if rank == 0:
        torch.save(results, f"{folder}/others.pt")


def guide(rank, world, folder):
    """The page on sharded training, block after block."""
    text = (Path(__file__).parent.parent / "docs" / "guides" / "sharded.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names = {"folder": f"{folder}/checkpoint"}
    for block in blocks:
        exec(compile(block, "sharded.md", "exec"), names)
    assert names["state"]["state"]
    Path(folder, f"done{rank}").touch()
