"""Saved state beside that of the optimizer that loads it: the file's format is read, and no other.

torch's `set_optimizer_state_dict` puts a whole state dict into the state that it has made in the
optimizer at hand, where two formats may then have all of their tensors.
"""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit_optim
from lowbit_optim import _saved_moments
from lowbit_optim_kernels.formats import FORMATS
from protocol import BY_ENGINE, identical

WHOLE = StateDictOptions(full_state_dict=True)
BY_BITS = {"dynamic8": 8, "ratio4": 4, "float32": 32}
CODED = ("dynamic8", "ratio8", "ratio4")
SETTINGS = {
    "AdamW": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9},
    "Lion": {},
}
OPTIMIZERS = pytest.mark.parametrize("name", SETTINGS)
ROWS = (
    ("AdamW", CODED), ("RMSprop", CODED[:2]), ("SGD", CODED[:2]), ("Lion", CODED[:2]),
)  # fmt: skip
PAIRS = [
    (name, saved, wanted)
    for name, formats in ROWS
    for saved in (*formats, "float32")
    for wanted in (*formats, "float32")
]


def build(name, model, **options):
    return getattr(lowbit_optim, name)(model.parameters(), lr=1e-2, **SETTINGS[name], **options)


def trained(name, model, gradient=torch.randn, steps=3, **options):
    optimizer = build(name, model, **options)
    for _ in range(steps):
        model.weight.grad = gradient(model.weight.shape)
        optimizer.step()
    model.weight.grad = None  # or torch makes no state
    return optimizer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(300, 64, bias=False)


@pytest.fixture(params=["as registered", "reversed"])
def order(request, monkeypatch):
    """Which of two formats is looked at first."""
    if request.param == "reversed":
        monkeypatch.setattr(_saved_moments, "FORMATS", dict(reversed(FORMATS.items())))


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize(("name", "saved", "wanted"), PAIRS)
def test_a_whole_state_dict_loads_as_a_plain_one_or_is_refused(
    name, saved, wanted, by_bits, model, order
):
    of_saved = {"state_format": saved}
    if by_bits and saved in BY_BITS:
        of_saved = {"optim_bits": BY_BITS[saved]}
    optimizer = trained(name, model, **of_saved)
    plain = build(name, model, state_format=wanted)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    whole = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    loads = build(name, model, state_format=wanted)
    if saved == "float32" and wanted in CODED:
        said = r"parameter 'weight'.*(is torch.float32 and its scales|says 'float32', )"
        with pytest.raises(ValueError, match=said):
            set_optimizer_state_dict(model, loads, whole, options=WHOLE)
        return
    set_optimizer_state_dict(model, loads, whole, options=WHOLE)
    assert identical(loads.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize(("saved", "wanted"), [("ratio8", "dynamic8"), ("ratio4", "ratio8")])
def test_an_optimizer_that_has_stepped_takes_the_saved_format(saved, wanted, model, order):
    optimizer = trained("AdamW", model, state_format=saved)
    whole = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    loads = trained("AdamW", model, steps=1, state_format=wanted)
    set_optimizer_state_dict(model, loads, whole, options=WHOLE)
    plain = build("AdamW", model, state_format=wanted)
    plain.load_state_dict(optimizer.state_dict())
    assert identical(loads.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("saved", CODED)
def test_a_key_that_is_missing_is_named(saved, model):
    state_dict = trained("AdamW", model, state_format=saved).state_dict()
    for key in [key for key in state_dict["state"][0] if key != "step"]:
        damaged = copy.deepcopy(state_dict)
        del damaged["state"][0][key]
        with pytest.raises(ValueError, match=rf"parameter 0 .*\b{key}\b"):
            build("AdamW", model, state_format=saved).load_state_dict(damaged)


@pytest.mark.parametrize("wanted", CODED)
def test_a_whole_state_dict_of_torch_is_refused(wanted, model):
    """Whose group says nothing, so that torch leaves in it what the optimizer at hand has."""
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.randn(model.weight.shape)
    optimizer.step()
    model.weight.grad = None
    whole = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    loads = build("AdamW", model, state_format=wanted)
    said = r"parameter 'weight'.*(is torch.float32 and its scales|this optimizer has 'ratio4')"
    with pytest.raises(ValueError, match=said):
        set_optimizer_state_dict(model, loads, whole, options=WHOLE)


def test_small_parameters_at_hand_take_the_saved_format(model):
    optimizer = trained("AdamW", model, state_format="ratio4")
    whole = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    loads = build("AdamW", model, state_format="ratio4", min_8bit_size=2**20)
    set_optimizer_state_dict(model, loads, whole, options=WHOLE)
    plain = build("AdamW", model, state_format="float32")
    plain.load_state_dict(optimizer.state_dict())
    assert identical(loads.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"state_format": "ratio4"}, "'ratio4'"),
        ({"state_format": None, "optim_bits": 32}, "'float32'"),
        ({"state_format": None, "optim_bits": 6}, "None"),
    ],
)
def test_two_formats_of_which_the_group_names_none_are_refused(group, said, model):
    saved = trained("AdamW", model, state_format="ratio8").state_dict()
    other = build("AdamW", model, state_format="dynamic8")
    other.load_state_dict(saved)
    saved["state"][0] = {**other.state_dict()["state"][0], **saved["state"][0]}
    saved["param_groups"][0].update(group)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=rf"'dynamic8' and 'ratio8'.*says {said}, .*sharded.md"):
        build("AdamW", model, state_format="dynamic8").load_state_dict(saved)
    assert identical(other.state_dict(), before)


def test_a_format_that_an_override_decided_is_not_taken_for_the_groups(model, manager):
    manager.override_config(model.weight, "state_format", "dynamic8")
    optimizer = trained("AdamW", model, state_format="ratio8")
    whole = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    assert "exp_avg_absmax" in whole["state"]["weight"]
    manager._modules.clear()
    manager._parameters.clear()
    loads = build("AdamW", model, state_format="ratio8")
    said = r"of 'dynamic8' and 'ratio8', .* says 'ratio8', does not tell .*has 'ratio8'\)"
    with pytest.raises(ValueError, match=said):
        set_optimizer_state_dict(model, loads, whole, options=WHOLE)


@pytest.mark.parametrize("state_format", CODED)
def test_codes_whose_scales_are_all_0_are_refused(state_format, model):
    saved = trained("AdamW", model, state_format=state_format).state_dict()
    for value in saved["state"][0].values():
        if value.ndim and value.is_floating_point():
            value.zero_()
    with pytest.raises(ValueError, match=rf"codes of '{state_format}' and all of its scales are 0"):
        build("AdamW", model, state_format=state_format).load_state_dict(saved)


@BY_ENGINE
@pytest.mark.parametrize("state_format", CODED)
@OPTIMIZERS
def test_moments_of_gradients_that_were_always_0_load(name, state_format, engine, model):
    if state_format == "ratio4" and name != "AdamW":
        pytest.skip("it keeps one moment and its square")
    with lowbit_optim.use_engine(engine):
        optimizer = trained(name, model, torch.zeros, state_format=state_format)
        saved = copy.deepcopy(optimizer.state_dict())
        loads = build(name, model, state_format=state_format)
        loads.load_state_dict(saved)
        assert identical(loads.state_dict(), saved)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_state_of_codes_and_numbers_is_loaded_in_the_order_of_one_that_steps_made(key, model):
    optimizer = trained("AdamW", model, state_format="dynamic8")
    saved = copy.deepcopy(optimizer.state_dict())
    state = saved["state"][0]
    del state[f"{key}_absmax"]
    state[key] = torch.rand(model.weight.shape)
    loads = build("AdamW", model, state_format="dynamic8")
    loads.load_state_dict(saved)
    assert list(loads.state[model.weight]) == list(optimizer.state[model.weight])


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_of_fp8_are_refused_in_a_sentence(wide, model):
    optimizer = trained("AdamW", model, state_format="dynamic8")
    saved = copy.deepcopy(optimizer.state_dict())
    if wide:
        del saved["state"][0]["exp_avg_absmax"]
    saved["state"][0]["exp_avg"] = torch.rand(model.weight.shape).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"'exp_avg' must be a dense tensor of .*float8"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("state_format", CODED)
@BY_ENGINE
def test_what_an_infinite_square_freezes_stays_so_in_codes(engine, state_format):
    """Without its first moment: over a square that codes have as 0 it would be a leap."""
    p = torch.nn.Parameter(torch.zeros(300))
    wide = lowbit_optim.AdamW32bit([p])
    p.grad = torch.ones_like(p)
    wide.step()
    wide.state[p]["exp_avg_sq"][7] = torch.inf
    bits = BY_BITS.get(state_format, 8)
    named = {} if bits == 4 else {"state_format": state_format}
    optimizer = lowbit_optim.AdamW([p], optim_bits=bits, min_8bit_size=1, **named)
    with lowbit_optim.use_engine(engine):
        optimizer.load_state_dict(wide.state_dict())
    lowbit_optim.dequantize_state(optimizer)
    m = optimizer.state[p]["exp_avg"]
    assert m[7] == 0
    assert (m != 0).sum() == 299


def test_a_ratio_that_was_replaced_by_numbers_is_coded_with_its_square():
    p = torch.nn.Parameter(torch.zeros(300))
    optimizer = lowbit_optim.AdamW([p], state_format="ratio8", min_8bit_size=1, dither=False)
    p.grad = torch.rand(300, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    state = optimizer.state[p]
    numbers = 0.01 * torch.ones(300)
    state["exp_avg"] = numbers
    del state["exp_avg_scale"]
    again = lowbit_optim.AdamW([p], state_format="ratio8", min_8bit_size=1, dither=False)
    again.load_state_dict(optimizer.state_dict())
    wide = lowbit_optim.AdamW32bit([p])
    wide.load_state_dict(again.state_dict())
    error = (wide.state[p]["exp_avg"] - numbers) / wide.state[p]["exp_avg_sq"].sqrt()
    assert error.abs().max() < 0.01 * (numbers / wide.state[p]["exp_avg_sq"].sqrt()).max()


def test_an_average_that_outlasts_its_square_is_converted_as_it_is_stepped():
    """Relative to what the square is decoded as, where that is more than it was."""
    p = torch.nn.Parameter(torch.zeros(64))
    options = {"betas": (0.98, 0.9)}
    wide = lowbit_optim.AdamW32bit([p], **options)
    p.grad = torch.ones_like(p)
    wide.step()
    wide.state[p]["exp_avg_sq"][1:] = 1e-14
    optimizer = lowbit_optim.AdamW([p], state_format="ratio8", min_8bit_size=1, **options)
    optimizer.load_state_dict(wide.state_dict())
    m = wide.state[p]["exp_avg"]
    lowbit_optim.dequantize_state(optimizer)
    assert (optimizer.state[p]["exp_avg"].abs() <= 1.01 * m.abs()).all()


@pytest.mark.parametrize("after", [24, 32])
@pytest.mark.parametrize("before", [16, 24, 32])
def test_bits_of_master_weights_may_be_set_before_a_save(before, after):
    """With no step between: the file has what the next step would have, for either width."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 64, generator=generator).bfloat16())
    p.grad = torch.ones_like(p)
    optimizer = lowbit_optim.AdamW8bit([p], lr=1e-4, master_weight_bits=before)
    optimizer.step()
    optimizer.param_groups[0]["master_weight_bits"] = after
    saved = optimizer.state_dict()
    for bits in (before, after):
        q = torch.nn.Parameter(p.detach().clone())
        q.grad = torch.ones_like(q)
        loaded = lowbit_optim.AdamW8bit([q], lr=1e-4, master_weight_bits=bits)
        loaded.load_state_dict(saved)
    loaded.step()
    optimizer.step()
    assert identical(loaded.state_dict(), optimizer.state_dict())
    assert torch.equal(p, q)


def test_a_residual_goes_with_the_bits_that_asked_for_it():
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = lowbit_optim.AdamW32bit([p], lr=1e-3, master_weight_bits=24)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert "master_residual" in optimizer.state[p]
    optimizer.param_groups[0]["master_weight_bits"] = 16
    optimizer.step()
    assert list(optimizer.state[p]) == ["step", "exp_avg", "exp_avg_sq"]


def test_a_number_in_place_of_a_history():
    p = torch.nn.Parameter(torch.ones(300))
    p.grad = torch.ones_like(p)
    optimizer = lowbit_optim.AdamW8bit([p], percentile_clipping=5)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["gnorm_vec"] = 3.0
    with pytest.raises(ValueError, match=r"'gnorm_vec' must have shape \(100,\); got 3.0"):
        optimizer.load_state_dict(saved)
