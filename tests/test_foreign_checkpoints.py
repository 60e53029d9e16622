"""State dicts of bitsandbytes are recognised and converted, without the library.

Files that it has saved (foreign_files.py), and state dicts built here (foreign_states.py).
"""

import copy
import warnings

import pytest
import torch

import lowbit_optim
from foreign_files import FOLDER, OPTIONS
from foreign_states import (
    MOMENTS,
    NESTED,
    TORN,
    WHOLE,
    build,
    flat,
    foreign,
    load,
    numbers,
    numbers_of,
    params_of,
    read,
)  # fmt: skip
from lowbit_optim import create_dynamic_map
from protocol import identical

FILES = [
    pytest.param(path.name, name, id=f"{path.stem}-{name}")
    for path in sorted(FOLDER.glob("bitsandbytes-*.pt"))
    for name in torch.load(path, weights_only=True)
]
FAMILIES = pytest.mark.parametrize("family", MOMENTS)
RECODED = ("RMSprop", "Adagrad")  # in the signed code there, in the unsigned one here


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(("file", "name"), FILES)
def test_a_file_of_bitsandbytes_goes_on(file, name, bits):
    old = torch.load(FOLDER / file, weights_only=True)[name]
    family = name.removesuffix("8bit").removesuffix("32bit")
    params = [torch.nn.Parameter(p.clone()) for p in old["params"]]
    kept = copy.deepcopy(old["state_dict"])
    with lowbit_optim.use_engine("torch"):
        optimizer = load(build(family, params, bits), old["state_dict"])
        assert identical(old["state_dict"], kept)
        assert optimizer.param_groups[0]["lr"] == OPTIONS[family]["lr"]
        for index, p in enumerate(params):
            state = flat(old["state_dict"]["state"][index])
            got = read(optimizer, p)
            exact = tuple(p.shape) in WHOLE and family not in RECODED
            exact = exact if name.endswith("8bit") == (bits == 8) else bits == 32
            for key, want in numbers(state, family).items():
                if exact:
                    assert torch.equal(got[key], want), key
                else:
                    assert (got[key] - want).abs().max() <= 0.02 * want.abs().max(), key
            assert int(optimizer.state[p]["step"]) == state["step"] == 3
        for p, g in zip(params, old["grads"], strict=True):
            p.grad = g
        optimizer.step()
    for p, before, after in zip(params, old["params"], old["after"], strict=True):
        way = (after - before).abs().max()
        same = tuple(p.shape) in WHOLE and family not in RECODED and name.endswith(f"{bits}bit")
        limit = 1e-4 if same else 0.2
        if family != "Lion":  # where a sign turns
            assert (p - after).abs().max() <= limit * way + 1e-6


@FAMILIES
@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("bits", [8, 32])
def test_every_class_and_layout(family, layout, bits):
    params = params_of(WHOLE + TORN)
    saved = foreign(family, WHOLE + TORN, layout, bits=bits)
    optimizer = load(build(family, params, bits), saved)
    for index, p in enumerate(params):
        state = optimizer.state[p]
        for i, keys in enumerate(MOMENTS[family], 1):
            theirs = flat(saved["state"][index])
            codes = theirs[f"state{i}"].reshape(len(keys), *p.shape)
            for at, key in enumerate(keys):
                recoded = bits == 8 and (p.shape in map(torch.Size, TORN) or family in RECODED)
                if recoded:
                    want = numbers(theirs, family)[key]
                    assert (read(optimizer, p)[key] - want).abs().max() <= 0.02 * want.abs().max()
                    continue
                assert torch.equal(state[key], codes[at]), key
                if bits == 8:
                    scales = theirs[f"absmax{i}"].reshape(len(keys), -1)[at]
                    assert torch.equal(state[f"{key}_absmax"].flatten(), scales)
        assert not {key for key in state if key.startswith(("state", "qmap", "max", "unorm"))}
        assert int(state["step"]) == 5


@FAMILIES
def test_groups_say_what_they_said_there(family):
    saved = foreign(family, [(5,)])
    saved["param_groups"][0].update(initial_lr=0.75, optim_bits=8, block_wise=True, is_paged=False)
    optimizer = load(build(family, params_of([(5,)])), saved)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5
    assert group["weight_decay"] == 0.25
    assert group["initial_lr"] == 0.75
    for key in ("betas", "eps", "alpha", "t_beta3"):
        if key in optimizer.defaults and (family, key) not in OTHER_MEANING:
            assert group[key] == saved["param_groups"][0][key], key
        elif (family, key) not in OTHER_MEANING:
            assert key not in group
    first = {"SGD": "momentum", "LARS": "momentum", "RMSprop": "alpha"}.get(family)
    assert first is None or group[first] == 0.8
    fixed = {"dampening": 0, "nesterov": False, "amsgrad": False, "centered": False, "lr_decay": 0}
    assert all(group[key] == value for key, value in fixed.items() if key in group)
    assert group.get("decoupled_weight_decay", True) is True
    assert not group.keys() & {"block_wise", "is_paged"}
    if family == "AdEMAMix":
        assert group["t_alpha"] is None


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_none_is_nothing(layout):
    (p,) = params_of([(300,)])
    saved = foreign("Lion", [(300,)], layout)
    state = saved["state"][0]
    state.get(NESTED, state).update(state2=None, qmap2=None)
    assert "exp_avg_absmax" in load(build("Lion", [p]), saved).state[p]


def test_a_group_that_says_no_momentum_has_that_of_the_optimizer():
    saved = foreign("SGD", [(5,)])
    del saved["param_groups"][0]["betas"]
    optimizer = load(build("SGD", params_of([(5,)]), momentum=0.25), saved)
    assert optimizer.param_groups[0]["momentum"] == 0.25


OTHER_MEANING = {("LARS", "eps"), ("RMSprop", "alpha")}


@pytest.mark.parametrize("step", [5, 5.0, torch.tensor(5), torch.tensor(5.0), torch.tensor([5])])
def test_step_may_be_a_number_or_a_tensor(step):
    (p,) = params_of([(300,)])
    optimizer = load(build("AdamW", [p]), foreign("AdamW", [(300,)], step=step))
    assert int(optimizer.state[p]["step"]) == 5


@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 4096), {"block": 2048}), ((3000,), {"block": 2048}), ((8, 512), {"whole": True})],
)
@pytest.mark.parametrize("bits", [8, 32])
def test_older_blocks_are_read(shape, options, bits):
    """Blocks of 2048, as before 0.44, and one scale a tensor."""
    (p,) = params_of([shape])
    saved = foreign("LAMB", [shape], **options)
    got = read(load(build("LAMB", [p], bits), saved), p)
    state = saved["state"][0]
    block = options.get("block", p.numel())
    for i, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        scales = state.get(f"absmax{i}", state.get(f"max{i}"))
        want = numbers_of(state[f"state{i}"], scales, state[f"qmap{i}"], block)
        if bits == 32:
            assert torch.equal(got[key], want)
        else:
            assert (got[key] - want).abs().max() <= 0.02 * want.abs().max()


def linear(signed):
    return torch.linspace(-1.0 if signed else 0.0, 1.0, 256)


@pytest.mark.parametrize("book", [linear, lambda signed: create_dynamic_map(signed).bfloat16()])
def test_another_code_book_is_read_as_numbers(book):
    (p,) = params_of([(2, 256)])
    saved = foreign("AdamW", [(2, 256)], book=book)
    got = read(load(build("AdamW", [p], 32), saved), p)
    state = saved["state"][0]
    want = numbers_of(state["state1"], state["absmax1"], state["qmap1"].float(), 256)
    assert torch.equal(got["exp_avg"], want)


def test_what_else_a_state_has():
    (p,) = params_of([(300,)])
    saved = foreign("AdamW", [(300,)])
    norms = torch.rand(100)
    saved["state"][0].update(gnorm_vec=norms, unorm_vec=torch.zeros(1), mine=torch.ones(2))
    saved["state"]["note"] = "of a user"
    state = load(build("AdamW", [p], percentile_clipping=5), saved).state
    assert torch.equal(state[p]["gnorm_vec"], norms)
    assert torch.equal(state[p]["mine"], torch.ones(2))
    assert "unorm_vec" not in state[p]
    assert state["note"] == "of a user"


@pytest.mark.parametrize("bits", [8, 32])
def test_codes_whose_scales_are_all_zero_are_read_as_zeros(bits):
    """A number divided by such a scale has any code in bitsandbytes."""
    (p,) = params_of([(300,)])
    saved = foreign("AdamW", [(300,)])
    for i in (1, 2):
        saved["state"][0][f"absmax{i}"].zero_()
    optimizer = load(build("AdamW", [p], bits), saved)
    assert not any(read(optimizer, p)[key].any() for key in ("exp_avg", "exp_avg_sq"))
    p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("kept", [{}, {"initial_lr": 0.5, "lr_scale": 0.1, "name": "head"}])
@pytest.mark.parametrize("family", ["AdamW", "Lion"])
def test_before_the_first_step(family, kept):
    """Schedulers and users may keep more in a group; only settings tell whose it is."""
    saved = foreign(family, [(300,)])
    saved["state"] = {}
    saved["param_groups"][0].update(kept)
    said = "bitsandbytes: it has no moments yet"
    optimizer = load(build(family, params_of([(300,)])), saved, said)
    assert not optimizer.state
    assert optimizer.param_groups[0].items() >= {"lr": 0.5, **kept}.items()


def test_an_empty_state_is_none_yet():
    params = params_of([(300,), (5,)])
    saved = foreign("AdamW", [(300,), (5,)])
    saved["state"][1] = {}
    optimizer = load(build("AdamW", params), saved)
    assert int(optimizer.state[params[0]]["step"]) == 5
    assert not optimizer.state.get(params[1])


def test_small_tensors_stay_32_bit_as_the_optimizer_was_built():
    params = params_of([(2, 256), (5,)])
    optimizer = load(build("AdamW", params, min_8bit_size=100), foreign("AdamW", [(2, 256), (5,)]))
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert dtypes == [torch.uint8, torch.float32]


def test_nothing_is_said_of_our_own_and_of_torchs():
    (p,) = params_of([(300,)])
    p.grad = torch.ones_like(p)
    for cls in (lowbit_optim.AdamW8bit, torch.optim.AdamW):
        source = cls([p])
        source.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build("AdamW", [p]).load_state_dict(source.state_dict())


@pytest.mark.parametrize(("bits", "form"), [(32, "dynamic8"), (8, "ratio8")])
def test_the_warning_is_of_what_is_read_and_not_of_what_is_kept(bits, form):
    (p,) = params_of([(2, 256)])
    optimizer = lowbit_optim.AdamW([p], state_format=form, min_8bit_size=1)
    with pytest.warns(UserWarning, match="bitsandbytes: its moments are read bit for bit"):
        optimizer.load_state_dict(foreign("AdamW", [(2, 256)], bits=bits))
    assert optimizer.state[p]["exp_avg"].dtype == torch.uint8


def test_nothing_is_shared_with_the_file():
    params = params_of(WHOLE)
    saved = foreign("AdEMAMix", WHOLE, "nested")
    kept = copy.deepcopy(saved)
    optimizer = load(build("AdEMAMix", params), saved)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert identical(saved, kept)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_how_torch_took_its_steps_is_not_taken_over(how):
    """A Trainer's `adamw_torch_fused` could not resume where no engine compiles."""
    params = [torch.nn.Parameter(torch.ones(5, 5))]
    params[0].grad = torch.ones(5, 5)
    old = torch.optim.AdamW(params, lr=0.5, **how)
    old.step()
    with lowbit_optim.use_engine("torch"):
        optimizer = lowbit_optim.AdamW8bit(params)
        optimizer.load_state_dict(old.state_dict())
        optimizer.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, None, None)
    assert int(optimizer.state[params[0]]["step"]) == 2


def test_codes_of_blocks_whose_scale_is_0_are_0():
    """There bitsandbytes has divided by 0."""
    params = params_of(WHOLE)
    saved = foreign("Adam", WHOLE)
    for state in saved["state"].values():
        state["absmax1"].zero_()
        state["state1"].fill_(3)
    optimizer = load(build("Adam", params), saved)
    for p in params:
        assert not read(optimizer, p)["exp_avg"].any()
