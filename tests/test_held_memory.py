"""What optimizers hold on to between steps: nothing of a state that its owner moves or deletes."""

import copy
import weakref
from collections import defaultdict

import pytest
import torch

import lowbit_optim
from protocol import all_parameters, identical, parameters, snapshot, train

SHAPES = ((12, 70), (300,))


def state_tensors(optimizer):
    """References to everything that is kept of parameters, which keep none of it."""
    held = [x for state in optimizer.state.values() for x in state.values()]
    return [weakref.ref(x) for x in held if isinstance(x, torch.Tensor)]


def offload(optimizer):
    """As trainers do that need the memory between two steps."""
    for state in optimizer.state.values():
        state.update({key: x.clone() for key, x in state.items() if isinstance(x, torch.Tensor)})


@pytest.mark.parametrize("take", ["offload", "clear", "delete"])
def test_state_that_is_taken_out_is_freed_at_once(take, engine, device):
    """And the next step goes on with what has come in its place, if anything has."""
    made = parameters(torch.bfloat16, shapes=SHAPES)
    params = [torch.nn.Parameter(p.detach().to(device)) for p in made]
    options = {"master_weight_bits": 24, "percentile_clipping": 50, "min_8bit_size": 1}
    optimizer = train(lowbit_optim.AdamW8bit(params, **options), 3)
    twin = copy.deepcopy(optimizer)
    before = state_tensors(optimizer)
    if take == "offload":
        offload(optimizer)
    elif take == "clear":
        optimizer.state.clear()
        twin.state = defaultdict(dict)
    else:
        del optimizer.state[params[0]]
        del twin.state[all_parameters(twin)[0]]
        before = before[: len(before) // 2]
    assert not any(reference() is not None for reference in before)
    for one in (optimizer, twin):
        train(one, 2)
    assert identical(snapshot(optimizer), snapshot(twin))


def test_state_of_parameters_that_wait_is_freed():
    """Those of a wider plan, which is kept for when more of its parameters have gradients."""
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(40)]
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
    for step in range(6):
        for p in params if step < 5 else params[:1]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    before = [weakref.ref(x) for p in params[1:] for x in optimizer.state.pop(p).values()]
    assert not any(reference() is not None for reference in before)


def test_a_parameter_group_that_is_taken_out_is_freed():
    groups = [{"params": [torch.nn.Parameter(torch.ones(64))]} for _ in range(2)]
    for cls in (lowbit_optim.AdamW8bit, lowbit_optim.Cain8bit):
        optimizer = train(cls(groups, min_8bit_size=1), 2)
        (p,) = optimizer.param_groups.pop()["params"]
        reference = weakref.ref(p)
        del optimizer.state[p], p
        twin = groups.pop()
        groups.append({"params": [torch.nn.Parameter(torch.ones(64))]})
        del twin
        train(optimizer, 1)
        assert reference() is None


@pytest.mark.parametrize("when", ["dequantized", "cleared"])
@pytest.mark.parametrize("how", ["in its list", "with its list", "with its group"])
def test_a_parameter_that_another_one_takes_the_place_of_is_freed(when, how):
    """Gaussian splatting replaces them between two steps, trainers of a block of layers in one."""
    (p,) = params = [torch.nn.Parameter(torch.ones(5000))]
    optimizer = train(lowbit_optim.AdamW8bit(params), 2)
    (group,) = optimizer.param_groups
    if when == "dequantized":
        lowbit_optim.dequantize_state(optimizer)
    new, reference = torch.nn.Parameter(torch.ones(6000)), weakref.ref(p)
    del optimizer.state[p], p
    if how == "in its list":
        group["params"][0] = new
    elif how == "with its list":
        group["params"] = [new]
    else:
        optimizer.param_groups = [{**group, "params": [new]}]
    del group, params
    if when == "cleared":
        optimizer.zero_grad()
    assert reference() is None
    train(optimizer, 1)
    assert int(optimizer.state[new]["step"]) == 1


@pytest.mark.parametrize("cls", [lowbit_optim.AdamW32bit, lowbit_optim.AdamW8bit])
def test_state_of_another_dtype_at_the_same_address_is_not_written_beyond_its_end(cls, engine):
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = cls([p], lr=0.1, min_8bit_size=10_000)
    memory, moments = torch.zeros(20_000), None
    for t in range(4):
        p.grad = torch.randn(5000)
        if t == 1:
            moments = optimizer.state[p]["exp_avg"]
            moments.data = memory[:5000].copy_(moments)
        elif t == 3:
            moments.data = memory.view(torch.bfloat16)[:5000].copy_(moments.clone())
            memory[2500:] = 7.0
        optimizer.step()
    assert (memory[2500:] == 7).all()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
