"""FullyShardedDataParallel, the older FSDP: how a run with 8-bit state is resumed.

It asks for one number an element in everything that an optimizer keeps, which scales are not. So
each rank saves the optimizer's own state dict, or FSDP is given one of 32 bits.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import lowbit_optim
import sharded
from protocol import identical

pytestmark = [
    pytest.mark.timeout(120),
    # torch's own, of its older state dicts
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
INPUTS = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))


def build(use_orig_params, cls=lowbit_optim.AdamW8bit, shift=0.0):
    model = sharded.mlp()
    for p in model.parameters():
        p.data += shift
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    return wrapped, optimizer_of(wrapped, cls)


def optimizer_of(model, cls):
    return cls(model.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_size=256)


def everything(model, optimizer):
    params = list(model.parameters())
    state = [dict(optimizer.state[p]) for p in params]
    return copy.deepcopy({"params": [p.detach() for p in params], "state": state})


def by_ranks(rank, world, folder, use_orig_params):
    """Each rank saves its own state: the run goes on bit for bit."""
    model, optimizer = build(use_orig_params)
    sharded.fit(model, optimizer, 3, INPUTS)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/model")
    torch.save(optimizer.state_dict(), f"{folder}/optimizer{rank}.pt")
    sharded.fit(model, optimizer, 3, INPUTS)
    straight = everything(model, optimizer)
    assert any("exp_avg_absmax" in state for state in straight["state"])

    model, optimizer = build(use_orig_params, shift=1.0)
    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=f"{folder}/model")
    set_model_state_dict(model, weights)
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer{rank}.pt", weights_only=True))
    sharded.fit(model, optimizer, 3, INPUTS)
    assert identical(everything(model, optimizer), straight)


def by_32_bits(rank, world, folder, use_orig_params):
    """FSDP saves a 32-bit optimizer's state: the same moments, but for the rounding of scales."""
    model, optimizer = build(use_orig_params)
    sharded.fit(model, optimizer, 3, INPUTS)
    with pytest.raises((AssertionError, RuntimeError)):  # torch's, before anything is written
        get_state_dict(model, optimizer)
    saved = everything(model, optimizer)
    wide = optimizer_of(model, lowbit_optim.AdamW32bit)
    wide.load_state_dict(optimizer.state_dict())
    weights, state = get_state_dict(model, wide)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/both")
    before = everything(model, wide)

    model, wide = build(use_orig_params, lowbit_optim.AdamW32bit, shift=1.0)
    weights, state = get_state_dict(model, wide)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/both")
    set_state_dict(model, wide, model_state_dict=weights, optim_state_dict=state)
    assert identical(everything(model, wide), before)
    narrow = optimizer_of(model, lowbit_optim.AdamW8bit)
    narrow.load_state_dict(wide.state_dict())
    after = everything(model, narrow)["state"]
    for old, new in zip(saved["state"], after, strict=True):
        assert old.keys() == new.keys()
        for key, x in old.items():
            torch.testing.assert_close(new[key], x, rtol=0.01, atol=0)
    sharded.fit(model, narrow, 1, INPUTS)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", [by_ranks, by_32_bits], ids=lambda way: way.__name__)
@pytest.mark.slow
def test_a_run_is_resumed(way, use_orig_params, tmp_path):
    sharded.run(2, way, str(tmp_path), use_orig_params)
