"""DTensors of other origin than `fully_shard`: tensor parallelism, shards that wrap tensors.

One world of two ranks runs all cases of this file, each of which compares with one process.
"""

import gc
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, ones
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor

import lowbit_optim
import sharded
from lowbit_optim import _gathering, _sums
from lowbit_optim_kernels.batch import ACCESS_BYTES, Batch, Slot
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.rules import sgd
from protocol import identical, python, silent_mesh

pytestmark = pytest.mark.timeout(120)
STEPS = 4


def gradients_dealt_otherwise(rank, world, folder):
    """Whole, as sums or by columns: a step deals them out as it does the parameter, each time."""
    mesh = init_device_mesh("cpu", (world,))

    def dealt(x, placement):
        if placement == Partial():
            return DTensor.from_local(x / world, mesh, [placement])
        return distribute_tensor(x.clone(), mesh, [placement])

    own, its = (Shard(0), Replicate()), (Replicate(), Partial(), Shard(1), Shard(0))
    cases = [(shape, placement) for shape in ((5, 70), (300, 3)) for placement in own * len(its)]
    generator = torch.Generator().manual_seed(1)
    for name in ("AdamW8bit", "LANS8bit", "Cain8bit"):
        plain = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape, _ in cases]
        spread = (dealt(p.detach(), case[1]) for p, case in zip(plain, cases, strict=True))
        params = list(map(torch.nn.Parameter, spread))
        optimizer, alone = sharded.build(name, params), sharded.build(name, plain)
        for turn in range(3):
            for i, (p, q) in enumerate(zip(params, plain, strict=True)):
                q.grad = torch.randn(q.shape, generator=generator)
                p.grad = dealt(q.grad, its[(i // 2 + turn) % len(its)])
            before = [p.grad.to_local().clone() for p in params]
            optimizer.step()
            alone.step()
            assert identical([p.grad.to_local() for p in params], before)
        for p, q in zip(params, plain, strict=True):
            assert name == "LANS8bit" or torch.equal(p.full_tensor(), q)
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-5, atol=1e-6)


def stepped(rank, world, wrapping):
    """Vectors whose shards wrap tensors or not: what a rank holds of each, and of a plain twin."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(5000 + i, generator=generator) for i in range(len(wrapping))]
    plain = [torch.nn.Parameter(x.clone()) for x in values]
    params = []
    for x, wraps in zip(values, wrapping, strict=True):
        shard = x.chunk(world)[rank].clone()
        spread = DTensor.from_local(
            TwoTensor(shard, shard.clone()) if wraps else shard, mesh, [Shard(0)],
            run_check=False, shape=x.shape, stride=x.stride(),
        )  # fmt: skip
        params.append(torch.nn.Parameter(spread))
    optimizer, alone = (lowbit_optim.AdamW8bit(some, lr=1e-2) for some in (params, plain))
    for _ in range(6):
        for p, q in zip(params, plain, strict=True):
            q.grad = torch.randn(q.shape, generator=generator)
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        optimizer.step()
        alone.step()
    return [p.to_local() for p in params], [q.detach().chunk(world)[rank] for q in plain]


def shards_that_wrap_tensors(rank, world, folder):
    """Gathered to be stepped whole, all that they hold arrives before it is read."""
    with lowbit_optim.use_engine("torch"):
        held, wanted = stepped(rank, world, [True] * 8)
    for got, want in zip(held, wanted, strict=True):
        assert torch.equal(got.a, want)
        assert torch.equal(got.b, want)


def shards_that_wrap_tensors_beside_plain_ones(rank, world, folder):
    """Each is gathered among its own: of plain shards the compiled engine gets plain copies."""
    wrapping = [False, True] * 2
    with lowbit_optim.use_engine("auto"):
        held, wanted = stepped(rank, world, wrapping)
    for got, want, wraps in zip(held, wanted, wrapping, strict=True):
        if wraps:  # stepped by torch's operators, which round otherwise
            torch.testing.assert_close(got.a, want, rtol=1e-4, atol=1e-4)
            assert torch.equal(got.a, got.b)
        else:
            assert torch.equal(got, want)


def gradients_of_another_dtype(rank, world, folder):
    """Of vectors whose shards cut blocks, so that they are stepped whole: in every step cast."""
    if not hasattr(torch.Tensor, "grad_dtype"):  # since torch 2.10
        return
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(5003 + i, generator=generator) for i in range(3)]
    plain = [torch.nn.Parameter(x.clone()) for x in values]
    params = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in values]
    optimizer, alone = (lowbit_optim.AdamW8bit(some, lr=1e-2) for some in (params, plain))
    for step in range(STEPS):
        for p, q in zip(params, plain, strict=True):
            p.grad_dtype = q.grad_dtype = None  # any
            dtype = torch.float32 if step == 1 else torch.float64
            q.grad = torch.randn(q.shape, generator=generator).to(dtype)
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        optimizer.step()
        alone.step()
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p.full_tensor(), q.detach())


def memory_between_steps(rank, world, folder):
    """Of a vector that is stepped whole a rank keeps a copy, and none of its gradient."""
    mesh = init_device_mesh("cpu", (world,))
    # Made of shards: of a tensor that is dealt out gloo's threads hold on to the whole for a while.
    p = torch.nn.Parameter(ones(5011, device_mesh=mesh, placements=[Shard(0)]))
    optimizer = lowbit_optim.AdamW8bit([p])
    for _ in range(STEPS):
        p.grad = torch.ones_like(p)
        optimizer.step()
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and len(x.shape) == 1]
        wholes = [x for x in tensors if len(x) == 5011 and x.dtype == torch.float32]
        assert len({x.data_ptr() for x in wholes}) == 1


def tensor_parallel(rank, world, folder):
    """By rows, with torch's styles; gradients may be released, and clipped by their norm."""

    def model():
        torch.manual_seed(0)
        layers = torch.nn.Embedding(60, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 50)
        return torch.nn.Sequential(*layers)

    styles = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    mesh = init_device_mesh("cpu", (world,))
    for name, clip, lr in (
        ("AdamW32bit", None, 1e-2),
        ("LAMB32bit", None, 1e-2),
        ("SGD", 0.01, 10.0),
    ):
        spread, whole = parallelize_module(model(), mesh, styles), model()
        for one in (spread, whole):
            optimizer = getattr(lowbit_optim, name)(one.parameters(), lr=lr)
            if clip:
                lowbit_optim.release_gradients(optimizer, one, clip_previous_norm=clip)
            for step in range(STEPS):
                optimizer.zero_grad()
                one(torch.arange(step, step + 40).view(4, 10)).square().mean().backward()
                optimizer.step()
        for p, q in zip(spread.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


def graphs_kept_over_a_step(rank, world, folder):
    """They hold the weights of before, as DTensors under tensor parallelism: torch refuses them."""
    mesh = init_device_mesh("cpu", (world,))
    for name in ("AdamW32bit", "LANS32bit", "Cain32bit"):
        layers = torch.nn.Linear(70, 60), torch.nn.Linear(60, 50), torch.nn.Linear(50, 40)
        styles = {str(i): ColwiseParallel(output_layouts=Replicate()) for i in range(3)}
        model = parallelize_module(torch.nn.Sequential(*layers), mesh, styles)
        optimizer = getattr(lowbit_optim, name)(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(torch.ones(4, 70)).square().mean()
            loss.backward(retain_graph=True)
            if step == 2:  # a plan that is kept leaves it out
                model[0].weight.grad = model[0].bias.grad = None
            before = [p._version for p in model.parameters()]
            optimizer.step()
            for p, version in zip(model.parameters(), before, strict=True):
                assert (p._version > version) == (p.grad is not None)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def all_cases(rank, world, folder):
    for case in (
        gradients_dealt_otherwise, gradients_of_another_dtype, graphs_kept_over_a_step,
        memory_between_steps, shards_that_wrap_tensors,
        shards_that_wrap_tensors_beside_plain_ones, tensor_parallel,
    ):  # fmt: skip
        case(rank, world, folder)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    sharded.run(2, all_cases, str(tmp_path))


def test_what_a_shard_wraps_is_sent_one_by_one(monkeypatch):
    """Of two functional calls under way at a time gloo's threads break the process at times."""
    sent = []

    def all_gather(received, x, group):
        sent.append(x)
        received.copy_(torch.cat([x, x + 1]))

    monkeypatch.setattr(torch.distributed, _gathering.ALL_GATHER, all_gather)
    x = TwoTensor(torch.zeros(3), torch.ones(3))
    whole = _gathering.all_gathered(x, SimpleNamespace(size=lambda: 2))
    assert sent[0] is x.a
    assert sent[1] is x.b
    assert type(whole) is TwoTensor
    assert whole.shape == (6,)
    assert [whole.a.tolist(), whole.b.tolist()] == [[0.0] * 3 + [1.0] * 3, [1.0] * 3 + [2.0] * 3]


def test_sums_beside_those_of_whole_tensors_are_found_by_numbers_on_the_device(monkeypatch):
    """A device waits for the copy of a list of numbers, in every step."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(10))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:mpi")
    x, step = torch.zeros(4), torch.zeros((), dtype=torch.int64)

    def batch_of(*groups):
        slots = [Slot(x, x, FLOAT32, (), step, 1, 4, 4, groups=each) for each in groups]
        return Batch(sgd.sgd_rule(False, False, True), slots, x.device, "torch")

    ranks = (("ranks", "cpu"),)
    batches = [batch_of(ranks, (), ranks), batch_of(ranks)]
    sums = [torch.arange(6.0).view(3, 2), torch.ones(1, 2)]
    _sums.all_reduce(batches, sums)
    assert [total.tolist() for total in sums] == [[[0, 10], [2, 3], [40, 50]], [[10, 10]]]
    (some,), (all_of_them,) = (batch.shards.values() for batch in batches)
    assert some.device == x.device
    assert all_of_them is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tensors_that_are_joined_of_shards_are_each_aligned(dtype):
    """Vectors of a size that is none of whole accesses, one after the other."""
    ranks = torch.arange(30.0).to(dtype).split((18, 12))  # of three vectors 6 and 4 elements each
    wholes = _gathering._Alike([0, 1, 2], torch.Size([10]), [6, 4], False).joined(ranks)
    assert [x.data_ptr() % ACCESS_BYTES for x in wholes] == [0, 0, 0]
    assert torch.equal(wholes[1], torch.cat([ranks[0][6:12], ranks[1][4:8]]))


# Meshes of the same ranks, as an expert-parallel model of one expert group has them.
MESHES = """
from torch.distributed.device_mesh import DeviceMesh
from lowbit_optim import _agreement
options = {"_init_backend": False, "_rank": 0}
meshes = {DeviceMesh("cpu", [0, 1], mesh_dim_names=(name,), **options) for name in "abcd"}
print([mesh.mesh_dim_names[0] for mesh in sorted(meshes, key=_agreement._order)])
"""


@pytest.mark.skipif(
    "_rank" not in inspect.signature(DeviceMesh).parameters,
    reason="needs meshes of ranks that are not there",
)
def test_ranks_ask_each_other_mesh_by_mesh_in_one_order():
    """Whatever the seed of Python's hashes, which each process has its own of."""
    (order,) = {python(MESHES, PYTHONHASHSEED=seed) for seed in "12"}
    assert order == "['a', 'b', 'c', 'd']"


@pytest.fixture
def mesh():
    """Of one rank, which waits for no other."""
    with silent_mesh(1) as alone:
        yield alone


def test_the_engine_of_a_dtensor_is_that_of_its_shard(mesh):
    whole = torch.ones(6, 5)
    spread = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
    assert lowbit_optim.engine_for(spread) == lowbit_optim.engine_for(whole)


@pytest.mark.parametrize("bits", [24, 32])
def test_bits_beside_weights_are_read_as_integers_in_every_step(bits, mesh):
    """Of a DTensor 16 of them are kept as a bf16 number's, in a plan that is used again, too."""
    ends = []
    for spread in (lambda x: x, lambda x: DTensor.from_local(x, mesh, [Shard(0)])):
        params = [torch.nn.Parameter(spread(torch.linspace(-1, 1, 300).bfloat16()))]
        with lowbit_optim.use_engine("torch"):
            optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, master_weight_bits=bits)
            for t in range(4):
                params[0].grad = spread(torch.linspace(-1, 1 + t, 300).bfloat16())
                optimizer.step()
        ends.append(sharded.everything(params, optimizer))
    assert identical(*ends)
