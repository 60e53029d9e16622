"""Loading what scripts save in place of a state dict: live groups and state, or parts of one."""

import copy
import io
import json

import pytest
import torch

import lowbit_optim
from protocol import BITS, CLASSES, all_parameters, build, identical, parameters, snapshot, train


def live(optimizer):
    return {"state": dict(optimizer.state), "param_groups": optimizer.param_groups}


@CLASSES
@BITS
def test_groups_and_state_of_an_optimizer_load(case, bits):
    straight = train(build(case, bits, parameters(), percentile_clipping=50), 2)
    file = io.BytesIO()
    torch.save(live(straight), file)
    file.seek(0)
    resumed = build(case, bits, parameters(seed=9), percentile_clipping=50)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, q in zip(all_parameters(straight), all_parameters(resumed), strict=True):
            q.copy_(p)
    assert identical(snapshot(train(straight, 2)), snapshot(train(resumed, 2)))


@CLASSES
def test_numbers_beside_groups_of_tensors_are_refused(case):
    """torch.optim goes on without the moments, and says nothing."""
    optimizer = train(build(case, 8, parameters()), 1)
    mixed = {**live(optimizer), "state": optimizer.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"an entry 0, which no parameter group lists"):
        optimizer.load_state_dict(mixed)


@CLASSES
def test_refusals_do_not_print_tensors(case):
    optimizer = train(build(case, 8, parameters()), 1)
    (p, *_) = all_parameters(optimizer)
    saved = live(optimizer)
    shape = rf"parameter of shape \({p.shape[0]}, .*'step' must be a whole number"
    with pytest.raises(ValueError, match=shape):
        optimizer.load_state_dict({**saved, "state": {p: {**optimizer.state[p], "step": -1}}})
    with pytest.raises(ValueError, match="an entry of a tensor, which no parameter group lists"):
        optimizer.load_state_dict({**saved, "state": {torch.ones(2): optimizer.state[p]}})


@CLASSES
@BITS
def test_tensors_and_settings_that_are_saved_apart(case, bits):
    """As lerobot does, by safetensors and JSON."""
    straight, resumed = (build(case, bits, parameters(seed=0)) for _ in range(2))
    straight.register_state_dict_post_hook(lambda _, saved: saved.pop("lowbit_optim") and None)
    saved = train(straight, 2).state_dict()
    settings = json.loads(json.dumps(saved.pop("param_groups")))
    assert saved.keys() == {"state"}
    tensors = copy.deepcopy(saved["state"])
    assert all(isinstance(x, torch.Tensor) for state in tensors.values() for x in state.values())
    resumed.load_state_dict({"state": tensors, "param_groups": settings})
    with torch.no_grad():
        for p, q in zip(all_parameters(straight), all_parameters(resumed), strict=True):
            q.copy_(p)
    assert identical(snapshot(train(straight, 2))["params"], snapshot(train(resumed, 2))["params"])


@pytest.mark.parametrize("bits", [24, 32])
def test_a_residual_that_torch_has_cast_is_refused(bits):
    """As by a wrapper that loads by torch.optim.Optimizer and shares its state afterwards."""
    p = torch.nn.Parameter(torch.ones(64, 70, dtype=torch.bfloat16))
    optimizer = lowbit_optim.AdamW32bit([p], master_weight_bits=bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.optim.Optimizer.load_state_dict(optimizer, optimizer.state_dict())
    before = p.detach().clone()
    refused = r"'master_residual' of a parameter .* must be of integers"
    with pytest.raises(ValueError, match=refused):
        optimizer.step()
    with pytest.raises(ValueError, match=refused):
        dict(lowbit_optim.master_weights(optimizer))
    assert torch.equal(p, before)
