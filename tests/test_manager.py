"""`GlobalOptimManager`: overrides of single parameters."""

import copy
import gc
import weakref

import pytest
import torch

import lowbit_optim
from lowbit_optim import GlobalOptimManager
from protocol import (
    CLASSES,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    snapshot,
    train,
)


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 15), torch.nn.Linear(15, 20))


def bits_of(optimizer, p):
    """8 or 32 by what is stored."""
    state = optimizer.state[p].items()
    moment = next(x for key, x in state if x.ndim and key != "gnorm_vec")
    return 8 if moment.dtype == torch.uint8 else 32


def test_there_is_one(manager):
    assert GlobalOptimManager.get_instance() is manager
    with pytest.raises(RuntimeError, match="get_instance"):
        GlobalOptimManager()


@CLASSES
def test_one_weight_in_32_bits(manager, case):
    model = two_layers()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    manager.override_config(model[1].bias, "optim_bits", 32)
    optimizer = train(build(case, 8, model.parameters()), 2)
    assert [bits_of(optimizer, p) for p in model.parameters()] == [32, 8, 8, 32]


@CLASSES
def test_overrides_do_what_a_group_does(manager, case):
    """Bit for bit, settings and storage, with a schedule on what is not overridden."""
    a, b, c = parameters(shapes=[(12, 70), (300,), (40, 8)])
    config = {"lr": case.lr / 4, "optim_bits": 32, "percentile_clipping": 50}
    grouped = build(case, 8, [{"params": [a]}, {"params": [b], **config}, {"params": [c]}])
    free = parameters(shapes=[(12, 70), (300,), (40, 8)])
    manager.override_config([free[1]], key_value_dict=config)
    overridden = build(case, 8, free)
    for t in range(3):
        for optimizer in (grouped, overridden):
            give_gradients((a, b, c) if optimizer is grouped else free, t)
            optimizer.step()
            for group in optimizer.param_groups[::2]:
                group["lr"] *= 0.5
    for p, q in zip((a, b, c), free, strict=True):
        assert torch.equal(p, q)
        assert identical(dict(grouped.state[p]), dict(overridden.state[q]))


def test_any_setting_of_the_optimizer(manager):
    a, b = parameters()
    manager.override_config(a, key_value_dict={"betas": (0.5, 0.6), "weight_decay": 0.5})
    manager.override_config(b, key_value_dict={"amsgrad": True, "max_unorm": 0.1, "eps": 1e-3})
    optimizer = train(lowbit_optim.AdamW8bit([a, b], min_8bit_size=1), 2)
    c, d = parameters()
    groups = [
        {"params": [c], "betas": (0.5, 0.6), "weight_decay": 0.5},
        {"params": [d], "amsgrad": True, "max_unorm": 0.1, "eps": 1e-3},
    ]
    grouped = lowbit_optim.AdamW8bit(groups, min_8bit_size=1)
    for t in range(2):
        give_gradients([c, d], t)
        grouped.step()
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert "max_exp_avg_sq" in optimizer.state[b]
    assert "max_exp_avg_sq" not in optimizer.state[a]


def test_before_or_after_the_optimizer_and_in_any_order(manager):
    model = two_layers()
    first, second = model[0].weight, model[1].weight
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1)
    manager.register_parameters(model.parameters())
    manager.override_config(first, "optim_bits", 32)
    manager.override_config([second], "optim_bits", 32)
    manager.register_parameters(model.parameters())
    manager.register_parameters([{"params": list(model.parameters())}])
    manager.register_parameters(model.named_parameters())
    train(optimizer, 1)
    assert [bits_of(optimizer, p) for p in (first, second)] == [32, 32]


def test_a_later_override_counts_and_takes_effect_at_the_next_step(manager):
    model = two_layers()
    p = model[0].weight
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1)
    expected = []
    for bits in (32, 8, 32):
        if bits == 8:
            manager.register_module_override(model[0], "weight", {"optim_bits": bits})
        else:
            manager.override_config(p, "optim_bits", bits)
        train(optimizer, 1)
        expected.append(bits_of(optimizer, p))
    assert expected == [32, 8, 32]
    assert int(optimizer.state[p]["step"]) == 3
    manager.initialize()
    train(optimizer, 1)
    assert bits_of(optimizer, p) == 8


def test_overrides_of_different_settings_add_up(manager):
    model = two_layers()
    p = model[0].weight
    manager.override_config(p, "lr", 0.0)
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1)
    before = p.detach().clone()
    train(optimizer, 1)
    assert torch.equal(p, before)
    assert bits_of(optimizer, p) == 32


def test_a_config_is_copied(manager):
    model, config = two_layers(), {"optim_bits": 32}
    manager.register_module_override(model[0], "weight", config)
    config["optim_bits"] = 8
    optimizer = train(lowbit_optim.AdamW8bit(model.parameters(), min_8bit_size=1), 1)
    assert bits_of(optimizer, model[0].weight) == 32


def test_a_list_of_a_config_is_copied(manager):
    model, betas = two_layers(), [0.9, 0.99]
    p = model[0].weight
    manager.override_config(p, "betas", betas)
    betas[1] = 0.5
    optimizer = train(lowbit_optim.AdamW32bit(model.parameters()), 1)
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], 0.01 * p.grad.square())


def test_every_optimizer_of_the_process(manager):
    a, b = parameters()
    manager.override_config(a, "optim_bits", 32)
    for cls in (lowbit_optim.AdamW8bit, lowbit_optim.Adam8bit):
        optimizer = train(cls([a, b], min_8bit_size=1), 1)
        assert [bits_of(optimizer, p) for p in (a, b)] == [32, 8]
    other = train(lowbit_optim.AdamW8bit(parameters(), min_8bit_size=1), 1)
    assert {bits_of(other, p) for p in all_parameters(other)} == {8}


def test_a_checkpoint_resumes_bit_for_bit(manager):
    def make():
        params = parameters()
        manager.override_config(params[0], key_value_dict={"optim_bits": 32, "lr": 0.02})
        return lowbit_optim.AdamW8bit(params, lr=0.1, min_8bit_size=1)

    straight = train(make(), 3)
    resumed = make()
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for p, q in zip(all_parameters(resumed), all_parameters(straight), strict=True):
        p.data.copy_(q.data)
    assert identical(snapshot(straight), snapshot(resumed))
    train(straight, 2, first=3)
    train(resumed, 2, first=3)
    assert identical(snapshot(straight), snapshot(resumed))
    assert resumed.param_groups[0]["lr"] == 0.1


def test_a_residual_of_other_bits_than_the_groups_is_loaded(manager):
    """The group says what a state was saved with, but not what was overridden then."""
    for group_bits, bits in ((32, 24), (24, 32)):
        p = torch.nn.Parameter(torch.randn(300).bfloat16())
        resumed = torch.nn.Parameter(p.detach().clone())
        manager.override_config([p, resumed], "master_weight_bits", bits)
        options = {"master_weight_bits": group_bits}
        first, second = (lowbit_optim.AdamW8bit([x], **options) for x in (p, resumed))
        train(first, 1)
        second.load_state_dict(first.state_dict())
        assert identical(second.state[resumed], first.state[p])


def test_one_moment_of_whole_numbers_in_32_bits_is_loaded(manager):
    """As gradients of whole numbers leave it; codes that were cast are whole in all moments."""
    model = two_layers()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), betas=(0.0, 0.99), min_8bit_size=1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].unique().tolist() == [3.0]
    optimizer.load_state_dict(saved)
    assert identical(optimizer.state_dict()["state"], saved["state"])
    saved["state"][0]["exp_avg_sq"].fill_(9.0)
    with pytest.raises(ValueError, match="'exp_avg' has codes of 'dynamic8'"):
        optimizer.load_state_dict(saved)


def test_nothing_is_kept_alive_and_no_id_is_taken_for_another(manager):
    model = two_layers()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    for _ in range(200):
        (p,) = parameters(shapes=[(4,)])
        manager.override_config(p, "lr", 0.0)
    gone = weakref.ref(model[0])
    del model, p
    gc.collect()
    assert gone() is None
    many = [torch.nn.Parameter(torch.ones(4)) for _ in range(400)]
    optimizer = lowbit_optim.SGD8bit(many, lr=1.0)
    for q in many:
        q.grad = torch.ones(4)
    optimizer.step()
    assert all(not q.any() for q in many)
    assert not manager._parameters
    assert not manager._modules


@pytest.mark.parametrize("cls", [lowbit_optim.AdamW8bit, lowbit_optim.Cain8bit])
def test_a_parameter_that_was_replaced_is_not_kept_alive(cls, manager):
    """As by methods that add and remove points of a scene while they train."""
    a, b = parameters(shapes=[(4,), (8,)])
    manager.override_config(a, "lr", 0.0)
    optimizer = train(cls([a, b], lr=1e-3), 1)
    gone = weakref.ref(b)
    optimizer.param_groups[0]["params"][1] = parameters(shapes=[(16,)])[0]
    del optimizer.state[b], b
    train(optimizer, 2)
    gc.collect()
    assert gone() is None


def test_without_overrides_a_groups_settings_are_used_as_they_are(manager):
    """Also while there are overrides of the parameters of no optimizer."""
    optimizer = train(lowbit_optim.AdamW8bit(parameters(), min_8bit_size=1), 1)
    (plan,) = optimizer.plans.values()
    manager.override_config(parameters()[0], "lr", 0.0)
    train(optimizer, 1)
    assert list(optimizer.plans.values()) == [plan]
    assert plan.reused


# Bad input.


def test_an_unknown_key(manager):
    model = two_layers()
    for call in (
        lambda: manager.override_config(model[0].weight, "optim_bit", 32),
        lambda: manager.override_config(model[0].weight, key_value_dict={"optim_bit": 32}),
        lambda: manager.register_module_override(model[0], "weight", {"optim_bit": 32}),
        lambda: manager.override_config(model[0].weight, "foreach", True),
        lambda: manager.override_config(model[0].weight, "params", []),
        lambda: manager.override_config(model[0].weight, "defaults", {}),
    ):
        with pytest.raises(
            ValueError, match=r"unknown setting '(optim_bit|foreach|params|defaults)'"
        ):
            call()
    assert not manager._parameters
    assert not manager._modules


@pytest.mark.parametrize(
    ("key", "value"),
    [("optim_bits", 16), ("lr", -1.0), ("percentile_clipping", 101), ("min_8bit_size", -1)],
)
def test_a_bad_value_of_a_setting_that_all_have(manager, key, value):
    (p,) = parameters(shapes=[(20,)])
    with pytest.raises(ValueError, match=key):
        manager.override_config(p, key, value)
    assert not manager._parameters


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"momentum": 0.9}, "'momentum', a setting that this"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": {0.9: 0.99}}, "betas"),
    ],
)
def test_what_an_optimizer_refuses_at_its_first_step(manager, config, match):
    """With its own checks, and before anything has changed."""
    a, b = params = parameters()
    manager.override_config(b, key_value_dict=config)
    optimizer = lowbit_optim.AdamW8bit([{"params": [a]}, {"params": [b]}], min_8bit_size=1)
    give_gradients(params, 0)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.step()
    assert identical(snapshot(optimizer), before)


def test_arguments_of_the_wrong_kind(manager):
    (p,) = parameters(shapes=[(20,)])
    with pytest.raises(ValueError, match="either key and value, or key_value_dict"):
        manager.override_config(p)
    with pytest.raises(ValueError, match="either key and value, or key_value_dict"):
        manager.override_config(p, "lr", 0.1, {"lr": 0.1})
    with pytest.raises(ValueError, match="either key and value, or key_value_dict"):
        manager.override_config(p, value=0.1, key_value_dict={"lr": 0.2})
    with pytest.raises(TypeError, match="parameters must be tensors; got 5"):
        manager.override_config(5, "lr", 0.1)
    with pytest.raises(TypeError, match="parameters must be tensors; got str"):
        manager.override_config([p, "weight"], "lr", 0.1)
    with pytest.raises(TypeError, match="params must be tensors; got int"):
        manager.register_parameters([p, 3])
    with pytest.raises(TypeError, match="params must be tensors; got NoneType"):
        manager.register_parameters([{"parameters": [p]}])
    with pytest.raises(TypeError, match="an override must be a dict"):
        manager.register_module_override(torch.nn.Linear(2, 2), "weight", 32)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module; got Parameter"):
        manager.register_module_override(p, "weight", {"optim_bits": 32})
    with pytest.raises(TypeError, match="param_name must be a string; got None"):
        manager.register_module_override(torch.nn.Linear(2, 2), None, {"optim_bits": 32})
    assert not manager._parameters
    assert not manager._modules
