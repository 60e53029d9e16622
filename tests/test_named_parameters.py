"""Parameters by their names, which two groups may have in common, or by numbers."""

import pytest
import torch

import lowbit_optim
from lowbit_optim import load_master_weights, master_weights
from protocol import identical, parameters, train


def test_weights_in_order_are_each_parameters_own_whatever_it_is_called():
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    groups = [{"params": list(model.named_parameters())} for model in models]
    optimizer = lowbit_optim.AdamW8bit(groups, lr=0.1)
    params = [p for model in models for p in model.parameters()]
    load_master_weights(optimizer, [torch.full_like(p, i) for i, p in enumerate(params)])
    assert [p.unique().tolist() for p in params] == [[0.0], [1.0], [2.0], [3.0]]
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"in order, not by name, .* called \['weight', 'bias'\]"):
        load_master_weights(optimizer, dict(master_weights(optimizer)))
    assert identical([p.detach() for p in params], before)


def test_a_parameter_that_was_put_into_a_list_of_named_ones_by_hand():
    optimizer = lowbit_optim.AdamW8bit(torch.nn.Linear(3, 3).named_parameters())
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="group 0 must have a name for each of its 3 parameters"):
        list(master_weights(optimizer))


def test_weights_are_numbered_as_in_the_state_dict_whatever_is_left_out():
    """A frozen parameter of codes, as a quantized model has, is counted."""
    codes = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = lowbit_optim.AdamW8bit([{"params": [codes, p]}, {"params": [q]}])
    saved = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    assert saved == [[0, 1], [2]]
    assert list(dict(master_weights(optimizer))) == [1, 2]


def test_names_stay_where_a_state_dict_has_none():
    """As in torch.optim."""
    model = torch.nn.Linear(3, 3)
    named = lowbit_optim.AdamW8bit(model.named_parameters())
    named.load_state_dict(lowbit_optim.AdamW8bit(model.parameters()).state_dict())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.fixture
def trained():
    """An optimizer of three parameters of one shape in two groups, and their states."""
    params = parameters(shapes=[(300,)] * 3)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = train(lowbit_optim.AdamW8bit(groups, min_8bit_size=1), 2)
    return optimizer, params, [dict(optimizer.state[p]) for p in params]


def test_a_state_is_that_of_the_number_which_a_group_lists(trained):
    """In whatever order, as torch.optim reads it: groups may have been put together anew."""
    optimizer, params, states = trained
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"], saved["param_groups"][1]["params"] = [2, 0], [1]
    optimizer.load_state_dict(saved)
    assert identical([optimizer.state[p] for p in params], [states[i] for i in (2, 0, 1)])


def test_a_parameter_without_a_saved_state_begins_anew(trained):
    """What it had belongs to the run that the load ends."""
    optimizer, params, states = trained
    saved = optimizer.state_dict()
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert params[1] not in optimizer.state
    train(optimizer, 1)
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 1, 3]
    assert [int(state["step"]) for state in states] == [2, 2, 2]
