"""State of bf16 weights from plain tensors to DTensors and the other way round."""

import copy

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import sharded
from protocol import identical

NAME = "AdamW8bit bf16"
WHOLE = StateDictOptions(full_state_dict=True)


def trained(model, spread, bits):
    params = list(model.parameters())
    optimizer = sharded.build(NAME, params, master_weight_bits=bits)
    sharded.train(optimizer, params, range(3), spread)
    return optimizer, copy.deepcopy(sharded.everything(params, optimizer)["state"])


def fresh(model, bits):
    params = list(model.parameters())
    return params, sharded.build(NAME, params, master_weight_bits=bits)


def carried_over(rank, world, folder):
    """All bits of the weights come along, in the ways that the page on bf16 weights names."""

    def plain(seed):
        return sharded.Holder(sharded.values(seed, NAME)), lambda x: x

    def spread_out(seed):
        return sharded.sharded_holder(world, seed, NAME)

    for bits in (24, 32):
        model, spread = plain(0)
        optimizer, want = trained(model, spread, bits)
        whole = copy.deepcopy(optimizer.state_dict())
        params, another = fresh(spread_out(1)[0], bits)
        another.load_state_dict(whole)
        assert identical(sharded.everything(params, another)["state"], want), bits

        model, spread = spread_out(0)
        optimizer, want = trained(model, spread, bits)
        _, whole = copy.deepcopy(get_state_dict(model, optimizer, options=WHOLE))
        model, _ = plain(1)
        params, another = fresh(model, bits)
        set_optimizer_state_dict(model, another, whole, options=WHOLE)
        assert identical(sharded.everything(params, another)["state"], want), bits

    for one, other in ((plain, spread_out), (spread_out, plain)):
        model, spread = one(0)
        optimizer, want = trained(model, spread, 24)
        weights, state = get_state_dict(model, optimizer)
        file = f"{folder}/{one.__name__}"
        dcp.save({"model": weights, "optim": state}, checkpoint_id=file)
        model, _ = other(1)
        params, another = fresh(model, 24)
        weights, state = get_state_dict(model, another)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=file)
        set_state_dict(model, another, model_state_dict=weights, optim_state_dict=state)
        assert identical(sharded.everything(params, another)["state"], want), one.__name__


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_bits_of_bf16_weights_come_along(tmp_path):
    sharded.run(2, carried_over, str(tmp_path))
