"""State of bf16 weights from plain tensors to DTensors and the other way round."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import lowbit_optim
import sharded
from lowbit_optim_kernels.weights import RESIDUAL_KEY
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


def makers(world):
    """Functions of a seed that make a model of plain tensors, and one of DTensors."""

    def plain(seed):
        return sharded.Holder(sharded.values(seed, NAME)), lambda x: x

    def spread_out(seed):
        return sharded.sharded_holder(world, seed, NAME)

    return plain, spread_out


def saved_and_read(one, other, bits, folder):
    """What DCP reads into a new optimizer, that and its model, and the state that was saved."""
    model, spread = one(0)
    optimizer, want = trained(model, spread, bits)
    weights, state = get_state_dict(model, optimizer)
    file = f"{folder}/{one.__name__} {bits}"
    dcp.save({"model": weights, "optim": state}, checkpoint_id=file)
    model, _ = other(1)
    _, another = fresh(model, bits)
    weights, state = get_state_dict(model, another)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=file)
    return model, another, (weights, state), want


def carried_over(rank, world, folder):
    """All bits of the weights come along, in the ways that the page on bf16 weights names."""
    plain, spread_out = makers(world)
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
        model, another, (weights, state), want = saved_and_read(one, other, 24, folder)
        set_state_dict(model, another, model_state_dict=weights, optim_state_dict=state)
        params = list(model.parameters())
        assert identical(sharded.everything(params, another)["state"], want), one.__name__


def refused(rank, world, folder):
    """Residuals of 16 bits that DCP has cast are refused; without them weights are bf16 numbers."""
    plain, spread_out = makers(world)
    for one, other in ((plain, spread_out), (spread_out, plain)):
        model, another, (_, state), _ = saved_and_read(one, other, 32, folder)
        before = copy.deepcopy(another.state_dict())
        with pytest.raises(ValueError, match=f"'{RESIDUAL_KEY}' .* cast from .*bf16_weights.md"):
            set_optimizer_state_dict(model, another, state)
        assert identical(another.state_dict(), before), one.__name__
        for of_one in state["state"].values():
            del of_one[RESIDUAL_KEY]
        set_optimizer_state_dict(model, another, state)
        assert all(s["step"] == 3 and not s[RESIDUAL_KEY].any() for s in another.state.values())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_bits_of_bf16_weights_come_along(tmp_path):
    sharded.run(2, carried_over, str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_residuals_that_were_cast_are_refused(tmp_path):
    sharded.run(2, refused, str(tmp_path))


def residual_of(weights, steps, lr=1e-3):
    """That of an optimizer of plain tensors which began at these fp32 weights."""
    model = torch.nn.ParameterList([torch.nn.Parameter(weights.bfloat16())])
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), lr=lr, master_weight_bits=32)
    lowbit_optim.load_master_weights(optimizer, {0: weights})
    for _ in range(steps):
        model[0].grad = torch.randn_like(model[0])
        optimizer.step()
    return optimizer, optimizer.state[model[0]][RESIDUAL_KEY]


def test_residuals_that_have_few_bits_of_their_own_are_none_that_were_cast():
    """Of weights that were fp16 or bf16, of few numbers, of 24 bits, and of one trained step."""
    torch.manual_seed(0)
    exact, half = torch.randn(64, 64).bfloat16().float(), torch.randn(64, 64).half().float()
    cases = [(exact, 0, 1e-3), (exact, 1, 0.0), (half, 0, 1e-3), (half, 1, 0.0)]
    cases += [(exact, 1, 1e-3), (half, 3, 1e-3), (torch.full((4,), 1.0), 1, 0.25)]
    for weights, steps, lr in cases:
        optimizer, want = residual_of(weights, steps, lr)
        another, _ = residual_of(torch.zeros_like(weights), 1)
        another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (state,) = another.state.values()
        assert state[RESIDUAL_KEY].equal(want), (steps, lr)


@pytest.mark.parametrize("saturates", [False, True])
def test_bf16_numbers_that_were_cast_to_integers_are_refused(saturates):
    """Whatever the device makes of numbers that an integer of 16 bits cannot be."""
    torch.manual_seed(0)
    optimizer, residual = residual_of(torch.randn(64, 64), 2)
    numbers = residual.view(torch.bfloat16).float().nan_to_num(0.0)
    within = numbers.clamp(-(2**15), 2**15 - 1)
    kept = within if saturates else numbers.where(numbers == within, 0.0)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][RESIDUAL_KEY] = kept.to(torch.int16)
    with pytest.raises(ValueError, match=re.escape("(64, 64) has numbers that were cast")):
        optimizer.load_state_dict(state)
