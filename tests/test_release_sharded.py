"""Gradient release under fully_shard: its hooks run when a shard's gradient has been reduced."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import lowbit_optim
import sharded
from protocol import identical

pytestmark = pytest.mark.timeout(300)
NAMES = ("AdamW8bit", "LAMB8bit")
STEPS = 4


def train(rank, world, name, bucket_bytes):
    """A bf16 model under FSDP2 whose gradients are released, or with None are not.

    Returns:
        Parameters and states with whole tensors, and by step and parameter whether a shard had
        changed when `backward` returned.
    """
    model = sharded.mlp().bfloat16()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    optimizer = sharded.build(name, params, min_8bit_size=256, master_weight_bits=24)
    if bucket_bytes is not None:
        lowbit_optim.release_gradients(optimizer, model, bucket_bytes=bucket_bytes)
    during = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(9 * step + rank)
        inputs = torch.randn(8, 70, generator=generator).bfloat16()
        before = [p.to_local().detach().clone() for p in params]
        model(inputs).float().square().mean().backward()
        during += [not torch.equal(p.to_local(), q) for p, q in zip(params, before, strict=True)]
        if bucket_bytes == 0:
            assert all(p.grad is None for p in params)
        optimizer.step()
        optimizer.zero_grad()
    return sharded.everything(params, optimizer), during


def both(rank, world, folder):
    """Each class with whole gradients, released one by one, and in buckets."""
    for name in NAMES:
        want, none = train(rank, world, name, None)
        assert not any(none)
        for bucket_bytes in (0, 20_000, 1 << 26):
            got, during = train(rank, world, name, bucket_bytes)
            assert identical(got, want), (name, bucket_bytes)
            assert all(during) if bucket_bytes == 0 else any(during) == (bucket_bytes < 1 << 20)
        assert any("master_residual" in state for state in want["state"])


def clipped(rank, world, folder):
    """The norm is that of all shards, also over two dimensions of a mesh."""
    placed = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)]
    p = torch.nn.Parameter(distribute_tensor(torch.ones(10), *placed))
    optimizer = lowbit_optim.SGD([p], lr=1.0)
    lowbit_optim.release_gradients(optimizer, clip_previous_norm=1.0)
    p.grad = distribute_tensor(torch.arange(10.0), *placed)
    optimizer.step()
    (group,) = optimizer.param_groups
    assert group["previous_gradient_norm"].item() == pytest.approx(285**0.5)


def page(rank, world, folder):
    """The page on gradient release, up to FSDP2."""
    text = (Path(__file__).parent.parent / "docs" / "gradient_release.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks[:3]:
        if "fully_shard" in block:
            names["handle"].remove()
            names["fully_shard"] = lambda layer: fully_shard(
                layer, mesh=init_device_mesh("cpu", (world,))
            )
        exec(compile(block, "gradient_release.md", "exec"), names)
    model = names["model"]
    model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
    names["optimizer"].step()
    assert len(names["optimizer"].state) == 4
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_the_page_on_gradient_release(tmp_path):
    sharded.run(2, page, str(tmp_path))


@pytest.mark.slow
def test_released_is_as_unreleased_under_fully_shard(tmp_path):
    sharded.run(2, both, str(tmp_path))


@pytest.mark.slow
def test_clipping_by_the_norm_of_shards_over_two_dimensions(tmp_path):
    sharded.run(4, clipped, str(tmp_path))
