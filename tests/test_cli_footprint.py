"""Bytes by arithmetic against what the optimizers allocate: every one, in every format."""

import math
from collections import Counter

import pytest
import torch

import lowbit_optim
from benchmarks.common import measure
from footprint_models import MODELS
from lowbit_optim_cli import optimizers
from lowbit_optim_cli.footprint import (
    BUCKET_BYTES,
    ITEMSIZE,
    ROW_LAYOUT_MIN,
    Footprint,
    Weight,
    footprint,
    largest_bucket,
    shard,
)
from lowbit_optim_kernels import formats
from lowbit_optim_kernels.formats import layout
from protocol import silent_mesh

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
}  # fmt: skip
SHAPES = [
    (300, 64), (64, 63), (5000,), (70, 100), (9, 700), (3, 5), (4096,), (4095,), (), (1,), (0,),
    (64, 3, 7, 7), (1, 5000), (5000, 1), (2, 2, 5000), (4, 1),
]  # fmt: skip
OPTIONS = {"SGD": {"momentum": 0.9}, "LARS": {"momentum": 0.9}}
ROWS = [*optimizers.own_layouts(bf16=True), *optimizers.own_layouts(bf16=False)]


def name(row):
    return f"{row.family}-{row.format}-{row.bits}"


def build(row, params):
    """Its optimizer, as a user builds it."""
    bits = {} if row.bits is None else {"master_weight_bits": row.bits}
    cls = getattr(lowbit_optim, row.family)
    options = OPTIONS.get(row.family, {})
    return cls(params, lr=1e-3, state_format=row.format, **bits, **options)


def weights_of(shapes, dtype):
    return [Weight("", tuple(shape), dtype) for shape in shapes]


def allocated(row, shapes, dtype, device="cpu"):
    """Bytes of the state that the class makes for parameters of these shapes, one at a time."""
    total = 0
    for shape, count in Counter(map(tuple, shapes)).items():
        p = torch.nn.Parameter(torch.empty(shape, dtype=DTYPES[dtype], device=device).zero_())
        optimizer = build(row, [p])
        state = optimizer._state_of(p, p, optimizer._settings_of(0), None)
        total += count * sum(x.nbytes for x in state.values())
    return total


def kept(found: Footprint):
    return found.state + found.residual


def test_every_optimizer_has_its_rows():
    families = {
        cls.family
        for cls in vars(lowbit_optim).values()
        if isinstance(cls, type) and hasattr(cls, "family")
    }
    assert families == set(optimizers.ROLES)
    assert set(optimizers.FORMATS) == set(formats.FORMATS)
    there = {(row.family, row.format) for row in ROWS}
    for family in families:
        for format in formats.FORMATS:
            cls, p = getattr(lowbit_optim, family), torch.nn.Parameter(torch.ones(1))
            try:
                cls([p], lr=1e-3, state_format=format, **OPTIONS.get(family, {}))
            except ValueError:
                assert (family, format) not in there
            else:
                assert (family, format) in there


def test_rows_have_names_of_classes():
    for row in ROWS:
        cls = getattr(lowbit_optim, row.name)
        assert cls.family == row.family


def test_the_constants_are_those_of_the_package():
    assert ROW_LAYOUT_MIN == layout.ROW_LAYOUT_MIN
    assert BUCKET_BYTES == lowbit_optim._release.BUCKET_BYTES
    of_torch = {key: DTYPES.get(key) or getattr(torch, key) for key in ITEMSIZE}
    assert {key: dtype.itemsize for key, dtype in of_torch.items()} == ITEMSIZE
    for format, bits in optimizers.BITS.items():
        assert formats.FORMATS[format].bits == bits


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_step_leaves_the_bytes_of_the_arithmetic(row):
    for dtype in ("bf16",) if row.bits else ("fp32", "fp16", "fp64"):
        params = [torch.nn.Parameter(torch.ones(s, dtype=DTYPES[dtype])) for s in SHAPES]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = build(row, params)
        with lowbit_optim.use_engine("torch"):
            optimizer.step()
        found = footprint(row, weights_of(SHAPES, dtype))
        assert measure.state_bytes(optimizer) == kept(found)
        assert found.weights == found.gradients == sum(p.nbytes for p in params)


@pytest.mark.parametrize("model", ["ResNet-50", "ViT-B", "GPT-2 small"])
@pytest.mark.parametrize("row", ROWS, ids=name)
@pytest.mark.few("row", "model")
def test_models_have_the_bytes_that_are_allocated(row, model):
    dtype = "bf16" if row.bits else "fp32"
    # The matrices of an embedding's 50,257 rows would take 20 GB.
    device = "meta" if row.family == "LearnedGradient" else "cpu"
    found = footprint(row, weights_of(MODELS[model], dtype))
    assert kept(found) == allocated(row, MODELS[model], dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ResNet-50", "ViT-B", "GPT-2 small"])
@pytest.mark.parametrize("format", optimizers.FORMATS)
def test_a_step_of_a_model_leaves_the_bytes_of_the_arithmetic(format, model):
    row = optimizers.own("AdamW", format, 24)
    params = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in MODELS[model]]
    for p in params:
        p.grad = p.detach().clone()
    optimizer = build(row, params)
    optimizer.step()
    assert measure.state_bytes(optimizer) == kept(footprint(row, weights_of(MODELS[model], "bf16")))


@pytest.mark.parametrize(("model", "parameters"), [("Llama 1B", 1.24e9), ("Llama 8B", 8.03e9)])
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_large_models_have_the_bytes_that_the_classes_ask_for(row, model, parameters):
    dtype = "bf16" if row.bits else "fp32"
    weights = weights_of(MODELS[model], dtype)
    assert sum(math.prod(w.shape) for w in weights) == pytest.approx(parameters, rel=0.005)
    assert kept(footprint(row, weights)) == allocated(row, MODELS[model], dtype, "meta")


def test_embeddings_may_keep_32_bits():
    row = optimizers.own("AdamW", "dynamic8", None)
    weights = [Weight("embedding", (100, 64), embedding=True), Weight("body", (100, 64))]
    without, with_32 = footprint(row, weights), footprint(row, weights, embeddings_in_32_bits=True)
    assert with_32.state - without.state == 100 * 64 * 8 - 100 * (64 * 2 + 8)


def test_frozen_weights_have_no_gradient_and_no_state():
    row = optimizers.own("AdamW", "dynamic8", None)
    frozen = Weight("", (100, 64), trained=False)
    assert footprint(row, [frozen]) == Footprint(25600, 0, 0, 0, 0)


@pytest.mark.parametrize(("bucket_bytes", "largest"), [(0, 5), (4, 6), (7, 11), (100, 15)])
def test_the_largest_bucket(bucket_bytes, largest):
    assert largest_bucket([1, 2, 3, 5, 4], bucket_bytes) == largest


def test_buckets_of_shards_are_full_by_whole_gradients():
    """As `release_gradients` has it, so that all ranks step at the same time."""
    row = optimizers.own("AdamW", "dynamic8", None)
    weights = [Weight(str(i), (4096, 1024)) for i in range(8)]  # 16 MiB each, four in a bucket
    for shards in (1, 4):
        assert footprint(row, weights, shards).gradients_released == (64 << 20) // shards


@pytest.fixture
def four_ranks():
    with silent_mesh(4) as mesh:
        yield mesh


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_rank_keeps_the_bytes_of_the_arithmetic(row, four_ranks):
    from torch.distributed.tensor import DTensor, Shard

    dtype = "bf16" if row.bits else "fp32"
    shapes = [(300, 64), (301, 64), (64, 63), (66, 100), (5000,), (8192,), (4096,), (9, 700)]
    for shape in shapes:
        held = torch.zeros(shard(shape, 4), dtype=DTYPES[dtype])
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(
            held, four_ranks, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        p = torch.nn.Parameter(spread)
        optimizer = build(row, [p])
        group = optimizer._settings_of(0)
        share = optimizer._share(p, group)
        state = optimizer._state_of(p, share.stepped(), group, share)
        found = footprint(row, weights_of([shape], dtype), shards=4)
        assert kept(found) == sum(getattr(x, "_local_tensor", x).nbytes for x in state.values())
        assert found.weights == held.nbytes
