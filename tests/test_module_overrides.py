"""`GlobalOptimManager.register_module_override`: overrides of what modules have by a name."""

import gc

import pytest
import torch

import lowbit_optim
from protocol import all_parameters, parameters, train
from test_manager import bits_of, two_layers


def test_a_module_that_is_converted_after_registering(manager):
    """`to` keeps the parameter, or makes another one where torch is told to."""
    for overwrite in (False, True):
        model = two_layers()
        manager.register_module_override(model, "0.weight", {"optim_bits": 32})
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        try:
            old = model[0].weight
            model.to(torch.float64).to(torch.float32)
            assert (model[0].weight is not old) == overwrite
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
        optimizer = train(lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1), 1)
        assert [bits_of(optimizer, p) for p in model.parameters()] == [32, 8, 8, 8]


def test_a_parameter_that_replaces_another_in_its_module(manager):
    """Looked up at each parameter's own first step, so a head that is added later counts."""
    model = two_layers()
    manager.register_module_override(model[1], "weight", {"optim_bits": 32})
    optimizer = train(lowbit_optim.AdamW8bit(model[0].parameters(), min_8bit_size=1), 1)
    model[1].weight = torch.nn.Parameter(torch.ones(20, 15))
    optimizer.add_param_group({"params": [model[1].weight]})
    train(optimizer, 1)
    assert bits_of(optimizer, model[1].weight) == 32


def test_a_tied_weight(manager):
    model = torch.nn.ModuleList([torch.nn.Embedding(20, 15), torch.nn.Linear(15, 20, bias=False)])
    model[1].weight = model[0].weight
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    optimizer = train(lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1), 1)
    assert bits_of(optimizer, model[1].weight) == 32


def test_an_override_outlives_the_module_of_a_parameter_that_stays(manager):
    """Also where the optimizer gets another group."""
    model = two_layers()
    p = model[0].weight
    manager.register_module_override(model[0], "weight", {"optim_bits": 32, "lr": 0.0})
    optimizer = train(lowbit_optim.AdamW8bit([p], min_8bit_size=1), 1)
    before, model[0].weight = p.detach().clone(), torch.nn.Parameter(torch.zeros_like(p))
    optimizer.add_param_group({"params": parameters(shapes=[(7, 3)])})
    assert torch.equal(all_parameters(train(optimizer, 2))[0], before)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_what_modules_have_is_listed_by_bitsandbytes_name(manager):
    model = two_layers()
    config = {"optim_bits": 32}
    manager.register_module_override(model[0], "weight", config)
    manager.register_module_override(torch.nn.Linear(2, 2), "weight", config)  # collected at once
    gc.collect()
    ((module, name, listed),) = manager.module_weight_config_triple
    assert module is model[0]
    assert name == "weight"
    assert listed == config
    manager.initialize()
    assert not manager.module_weight_config_triple


def test_a_module_without_the_parameter(manager):
    norm = torch.nn.LayerNorm(4, elementwise_affine=False)
    for module, name in ((two_layers()[0], "weigth"), (norm, "weight"), (two_layers(), "2.weight")):
        with pytest.raises(ValueError, match=f"has no parameter '{name}'"):
            manager.register_module_override(module, name, {"optim_bits": 32})
    with pytest.raises(ValueError, match="its parameters: weight, bias"):
        manager.register_module_override(two_layers()[0], "in_features", {"optim_bits": 32})
    assert not manager._modules


@pytest.mark.parametrize("dotted", [False, True])
def test_an_override_of_a_parametrized_weight_is_of_what_it_is_made_of(manager, dotted):
    model = two_layers()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    torch.nn.utils.parametrizations.spectral_norm(model[1])
    vector = model[1].parametrizations.weight[0]._u.clone()
    for i in range(2):
        where = (model, f"{i}.weight") if dotted else (model[i], "weight")
        manager.register_module_override(*where, {"optim_bits": 32})
    optimizer = train(lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1), 1)
    for name, p in model.named_parameters():
        assert bits_of(optimizer, p) == (8 if name.endswith("bias") else 32), name
    # The weight has not been computed, which changes what the norm is estimated from.
    assert torch.equal(model[1].parametrizations.weight[0]._u, vector)


def test_an_override_of_a_tensor_that_is_no_parameter_is_of_nothing(manager):
    """As in bitsandbytes: the Trainer overrides the weight of every embedding, whatever it is."""
    frozen, normed = torch.nn.Embedding(20, 15), torch.nn.Embedding(20, 15)
    weight = frozen.weight.detach()
    del frozen.weight
    frozen.register_buffer("weight", weight)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.weight_norm(normed)
    for module in (frozen, normed):
        manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer = train(lowbit_optim.AdamW8bit(normed.parameters(), min_8bit_size=1), 1)
    assert {bits_of(optimizer, p) for p in normed.parameters()} == {8}
    del frozen.weight
    frozen.weight = torch.nn.Parameter(weight)  # from here on it is one, and found
    optimizer = train(lowbit_optim.AdamW8bit(frozen.parameters(), min_8bit_size=1), 1)
    assert bits_of(optimizer, frozen.weight) == 32
