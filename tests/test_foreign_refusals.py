"""State dicts of bitsandbytes that are bad are refused, and nothing has changed then."""

import copy
import re
import warnings

import pytest
import torch

import lowbit_optim
from foreign_states import NESTED, build, foreign, nested, params_of
from protocol import identical, snapshot


def at(key, value):
    """A change of a state's entry: to a value, or by a function."""

    def change(state):
        state[key] = value(state[key]) if callable(value) else value

    return change


def without(key):
    return lambda state: state.pop(key)


def put(x, index, value):
    x = x.clone()
    x.view(-1)[index] = value
    return x


BAD = [
    (without("state1"), r"state1 and state2 .*exp_avg.* needs; there is state2"),
    (without("state2"), "there is state1"),
    (without("qmap1"), "it has no 'qmap1'"),
    (without("absmax2"), "it has no 'absmax2'"),
    (without("step"), "it has no 'step'"),
    (at("step", -1), "'step' must be a whole number"),
    (at("state1", lambda x: x[:1]), r"'state1' has shape \(1, 256\), \(2, 256\) is needed"),
    (at("state1", lambda x: x.short()), "'state1' must hold uint8 codes"),
    (at("state1", lambda x: x.t().contiguous().t()), "'state1' is not contiguous"),
    (at("state1", "codes"), "'state1' has shape 'codes'"),
    (at("absmax1", lambda x: x[:0]), r"'absmax1' has shape \(0,\); .* 256 or 2048"),
    (at("absmax1", lambda x: x[:1]), "'state1' is codes in blocks of 2048 .* and 'state2' .* 256"),
    (at("state2", lambda x: x.float()), "'state1' is codes .* and 'state2' fp32"),
    (at("absmax1", lambda x: x[None]), r"'absmax1' has shape \(1, 2\)"),
    (at("absmax1", lambda x: put(x, 1, -1.0)), "'absmax1' has scales that are negative"),
    (at("absmax2", lambda x: put(x, 0, float("nan"))), "'absmax2' has scales .* not finite"),
    (at("absmax2", lambda x: put(x, 0, float("inf"))), "'absmax2' has scales .* not finite"),
    (at("absmax1", lambda x: x.to(torch.uint8)), "'absmax1' must be a dense tensor"),
    (at("absmax1", 3.0), "'absmax1' must be a tensor"),
    (at("qmap1", lambda x: x[:255]), r"'qmap1' must be a tensor of 256 numbers; got \(255,\)"),
    (at("qmap1", lambda x: x.flip(0)), "'qmap1' must be finite numbers in ascending order"),
    (at("qmap2", lambda x: put(x, 3, float("nan"))), "'qmap2' must be finite numbers"),
    (at("qmap2", lambda x: put(x, 255, float("inf"))), "'qmap2' must be finite numbers"),
    (at("qmap2", lambda x: x.int()), "'qmap2' must be a dense tensor"),
    (at("qmap2", lambda x: put(x, 0, -1.0)), "'state2' has codes of negative numbers"),
    (at("absmax1", lambda x: x.to("meta")), "'absmax1' is a tensor on the meta device"),
    (at("qmap2", lambda x: x.to("meta")), "'qmap2' is a tensor on the meta device"),
    (at("gnorm_vec", torch.ones(3)), "'gnorm_vec' must have shape"),
]


@pytest.mark.parametrize(("change", "match"), BAD, ids=[match for _, match in BAD])
@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.filterwarnings("ignore:.*converts a state_dict of bitsandbytes")
def test_what_no_step_leaves_behind_is_refused(change, match, layout):
    """In the second parameter, when the first has been read already."""
    shapes = [(300,), (2, 256)]
    saved = foreign("AdamW", shapes)
    if "gnorm_vec" in match:
        saved["state"][1]["gnorm_vec"] = None
    change(saved["state"][1])
    if "negative numbers" in match:
        saved["state"][1]["state2"].zero_()
    if layout == "nested":
        saved["state"] = {i: nested(state) for i, state in saved["state"].items()}
    assert_refused("AdamW", shapes, saved, rf"parameter 1 of shape \(2, 256\): .*{match}")


def assert_refused(family, shapes, saved, match, **options):
    params = params_of(shapes)
    optimizer = build(family, params, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(snapshot(optimizer))
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ("AdamW", "Lion", r"state1 \(state1: exp_avg\) are? what Lion needs; .*state1 and state2"),
        ("Lion", "AdamW", "AdamW needs; there is state1"),
        ("AdEMAMix", "AdamW", r"'state1' has shape \(2, 2, 256\), \(2, 256\) is needed"),
        ("AdamW", "AdEMAMix", r"'state1' has shape \(2, 256\), \(2, 2, 256\) is needed"),
        ("AdamW", "LANS", "it has no LANS, only AdEMAMix, Adagrad, Adam,"),
        ("AdamW", "Eve", "it has no Eve"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(source, target, match):
    saved = foreign(source, [(2, 256)])
    if "AdEMAMix" in (source, target):
        saved["param_groups"][0]["betas"] = (0.8, 0.9, 0.99)[: 3 if target == "AdEMAMix" else 2]
    assert_refused(target, [(2, 256)], saved, f"{target}8bit cannot load .*bitsandbytes.*{match}")


def test_other_groups_are_refused():
    saved = foreign("AdamW", [(300,), (5,)])
    assert_refused("AdamW", [(300,)], saved, "parameter group 0 of state_dict has 2 parameters")
    saved["param_groups"] *= 2
    assert_refused("AdamW", [(300,)], saved, "state_dict has 2 parameter groups")
    saved["param_groups"] = None
    assert_refused("AdamW", [(300,)], saved, r"'param_groups'\] must be a list")


def test_a_broken_layout_is_refused():
    saved = foreign("AdamW", [(300,)])
    saved["state"][0] = {"step": 3, NESTED: [1, 2]}
    assert_refused("AdamW", [(300,)], saved, "'__bnb_optimizer_quant_state__' must be a dict")
    saved = foreign("SGD", [(300,)])
    for betas in (0.9, ()):
        saved["param_groups"][0]["betas"] = betas
        match = rf"betas must be numbers.*momentum; got {re.escape(repr(betas))}"
        assert_refused("SGD", [(300,)], saved, match)
    saved = foreign("AdEMAMix", [(300,)])
    saved["param_groups"][0]["t_alpha"] = torch.ones(2)
    with pytest.warns(UserWarning, match="converts"):
        assert_refused("AdEMAMix", [(300,)], saved, "t_alpha must be an integer")


def test_a_warning_that_is_an_error_changes_nothing():
    params = params_of([(2, 256)])
    optimizer = build("AdamW", params)
    before = copy.deepcopy(snapshot(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="AdamW8bit converts a state_dict of bitsandbytes"):
            optimizer.load_state_dict(foreign("AdamW", [(2, 256)]))
    assert identical(snapshot(optimizer), before)


def test_a_class_of_ones_own_adds_settings_to_override_and_refuses_nothing_by_them(manager):
    class Tagged(lowbit_optim.AdamW8bit):
        def __init__(self, params, tag="x", *rest, **options):
            super().__init__(params, **options)

    p = torch.nn.Parameter(torch.ones(8))
    manager.override_config(p, "tag", "y")
    for name in ("rest", "options"):
        with pytest.raises(ValueError, match=f"unknown setting '{name}'"):
            manager.override_config(p, name, 1)
    source = torch.optim.AdamW([{"params": [p], "tag": "encoder"}])
    target = lowbit_optim.AdamW8bit([p])
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["tag"] == "encoder"
