"""Parameters by their names, which two groups may have in common, or by numbers."""

import pytest
import torch

import lowbit_optim
from lowbit_optim import load_master_weights, master_weights
from protocol import identical


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
