"""DeepSpeed on two ranks, stages 0 to 3 of ZeRO, with an optimizer of the client.

It is not among what `make frameworks` installs; `pip install deepspeed` into .venv adds this file.
"""

import importlib.util
import os

import pytest
import torch

import sharded
from lowbit_optim import AdamW8bit, AdamW32bit, GlobalOptimManager

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"),
]
STEPS = 4
INPUTS = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))


def start(rank, world):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled for it
    deepspeed.init_distributed("gloo")
    return deepspeed


def built(cls, shift=0.0):
    model = sharded.mlp()
    for p in model.parameters():
        p.data += shift
    return model, cls(model.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_size=256)


def initialized(deepspeed, stage, model, optimizer, **config):
    config = {
        "train_micro_batch_size_per_gpu": len(INPUTS),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **config,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def fit(engine, steps):
    losses = []
    for _ in range(steps):
        loss = engine(INPUTS).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def alone(cls):
    model, optimizer = built(cls)
    losses = []
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        loss = model(INPUTS).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stages(rank, world, folder):
    """Steps with 32 bits are those of one process; with 8 bits blocks run over flat tensors."""
    deepspeed = start(rank, world)
    wide, narrow = alone(AdamW32bit), alone(AdamW8bit)
    for stage in range(4):
        assert fit(initialized(deepspeed, stage, *built(AdamW32bit)), 2 * STEPS) == wide
        model, optimizer = built(AdamW8bit)
        engine = initialized(deepspeed, stage, model, optimizer)
        losses = fit(engine, STEPS)
        engine.save_checkpoint(folder, tag=f"stage{stage}")
        losses += fit(engine, STEPS)
        torch.testing.assert_close(losses, narrow, rtol=0.01, atol=0)
        assert stage or losses == narrow
        codes = [state["exp_avg"] for state in optimizer.state.values()]
        assert any(x.dtype == torch.uint8 for x in codes)
        assert {x.ndim for x in codes} == ({1} if stage else {1, 2})

        other = initialized(deepspeed, stage, *built(AdamW8bit, shift=1.0))
        other.load_checkpoint(folder, tag=f"stage{stage}")
        assert fit(other, STEPS) == losses[STEPS:]


def said(rank, world, folder):
    """What the guide says of settings and overrides."""
    deepspeed = start(rank, world)
    with pytest.raises(AssertionError, match="untested ZeRO Optimizer"):
        initialized(deepspeed, 1, *built(AdamW8bit), zero_allow_untested_optimizer=False)
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(Exception, match="ZeRO-Offload with a client provided optimizer"):
        initialized(deepspeed, 1, *built(AdamW8bit), zero_optimization=offload)
    model, optimizer = built(AdamW8bit)
    engine = initialized(
        deepspeed, 1, model, optimizer, zero_optimization=offload, zero_force_ds_cpu_optimizer=False
    )
    assert engine.optimizer.optimizer is optimizer
    fit(engine, 2)
    for stage, dtype in ((0, torch.float32), (1, torch.uint8)):
        model, optimizer = built(AdamW8bit)
        manager = GlobalOptimManager.get_instance()
        manager.register_module_override(model[0], "weight", {"optim_bits": 32})
        fit(initialized(deepspeed, stage, model, optimizer), 1)
        first = optimizer.param_groups[0]["params"][0]
        assert optimizer.state[first]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("function", [pytest.param(stages, marks=pytest.mark.slow), said])
def test_two_ranks(function, tmp_path):
    sharded.run(2, function, str(tmp_path))
