"""State dicts that are written for torch.optim and for bitsandbytes, without the latter."""

import copy

import pytest
import torch

import lowbit_optim
from foreign_files import OPTIONS
from foreign_states import MOMENTS, NESTED, TORN, WHOLE, build, flat, load, numbers, params_of, read
from lowbit_optim import create_dynamic_map, to_bitsandbytes_state_dict, to_torch_state_dict
from protocol import identical, snapshot, tensors_of

FAMILIES = pytest.mark.parametrize("family", MOMENTS)
LAYOUTS = pytest.mark.parametrize("layout", ["flat", "nested"])
RECODED = ("RMSprop", "Adagrad")
SIGNED = ("Lion", "SGD", "LARS", *RECODED)  # of one state


def trained(family, bits, shapes=WHOLE + TORN, steps=3, **options):
    """An optimizer of ours with the settings that the files of bitsandbytes have, and more."""
    more = {"decoupled_weight_decay": True} if family == "Adam" else {}
    optimizer = build(family, params_of(shapes), bits, **{**OPTIONS[family], **more, **options})
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return optimizer


@FAMILIES
@LAYOUTS
@pytest.mark.parametrize("bits", [8, 32])
def test_what_is_written_for_bitsandbytes(family, layout, bits):
    """Its keys, dtypes and shapes, and the moments; `whole` classes have one scale a tensor."""
    optimizer = trained(family, bits)
    before = copy.deepcopy(snapshot(optimizer))
    written = to_bitsandbytes_state_dict(optimizer, layout)
    assert identical(snapshot(optimizer), before)
    assert not pointers(written) & pointers(optimizer.state_dict())
    whole = family in ("LAMB", "LARS") and layout == "flat" and bits == 8
    for index, p in enumerate(optimizer.param_groups[0]["params"]):
        state = written["state"][index]
        assert (NESTED in state) == (layout == "nested")
        state = flat(state)
        assert (state["step"], type(state["step"])) == (3, int)
        assert len(pointers(state)) == len(list(tensors_of(state)))  # each is written by itself
        for i, keys in enumerate(MOMENTS[family], 1):
            lead = (len(keys),) if len(keys) > 1 else ()
            assert state[f"state{i}"].shape == (*lead, *p.shape)
            if bits == 32:
                assert state[f"state{i}"].dtype == torch.float32
                continue
            assert state[f"state{i}"].dtype == torch.uint8
            assert torch.equal(state[f"qmap{i}"], create_dynamic_map(i == 1))
            length = 1 if whole else -(-p.numel() // 256)
            scales = state[f"max{i}" if whole else f"absmax{i}"]
            assert scales.shape == (*lead, length)
            assert scales.dtype == torch.float32
        if not whole:
            for key, want in numbers(state, family).items():
                got = read(optimizer, p)[key]
                if bits == 32 or (tuple(p.shape) in WHOLE and family not in RECODED):
                    assert torch.equal(got, want), key
                else:
                    assert (got - want).abs().max() <= 0.02 * want.abs().max(), key


@LAYOUTS
@pytest.mark.parametrize("family", ["Adam", "AdamW", "LAMB"])
@pytest.mark.parametrize("form", ["ratio8", "ratio4"])
def test_other_formats_are_coded_again_for_bitsandbytes(family, layout, form):
    """`ratio4` has both moments in one byte, which is neither's alone."""
    made = trained(family, 32)
    optimizer, plain = (
        build(family, params_of(WHOLE + TORN), bits, **options)
        for bits, options in (
            (form[-1], {"state_format": form} if form == "ratio8" else {}),
            (32, {}),
        )
    )
    optimizer.load_state_dict(made.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    written = to_bitsandbytes_state_dict(optimizer, layout)
    for index, p in enumerate(plain.param_groups[0]["params"]):
        state = flat(written["state"][index])
        assert not {"exp_avg_and_sq", "exp_avg_scale"} & state.keys()
        if family == "LAMB" and layout == "flat":
            state.update({f"absmax{i}": state[f"max{i}"].expand(p.numel()) for i in (1, 2)})
        for key, got in numbers(state, family).items():
            want = plain.state[p][key]
            assert (got - want).abs().max() <= 0.02 * want.abs().max(), key


def pointers(tree):
    return {x.data_ptr() for x in tensors_of(tree) if x.numel()}


@FAMILIES
@LAYOUTS
@pytest.mark.parametrize("bits", [8, 32])
def test_what_is_written_for_bitsandbytes_comes_back(family, layout, bits):
    optimizer = trained(family, bits)
    again = build(family, params_of(WHOLE + TORN), bits)
    load(again, to_bitsandbytes_state_dict(optimizer, layout))
    groups = [{**group, "params": 0} for o in (optimizer, again) for group in o.param_groups]
    dropped = {"eps", "initial_accumulator_value"} if family in SIGNED[:3] else set()
    assert {k: x for k, x in groups[0].items() if k not in dropped} == {
        k: x for k, x in groups[1].items() if k not in dropped
    }
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, again)), strict=True):
        whole = family in ("LAMB", "LARS") and layout == "flat"
        for key, want in read(optimizer, p).items():
            got = read(again, q)[key]
            if bits == 32 or (tuple(p.shape) in WHOLE and family not in RECODED and not whole):
                assert torch.equal(got, want), key
            else:
                assert (got - want).abs().max() <= 0.02 * want.abs().max(), key


@LAYOUTS
@pytest.mark.parametrize("family", ["LAMB", "LARS", "AdamW"])
@pytest.mark.parametrize("coded", [{}, {"min_8bit_size": 0}], ids=str)
def test_scalars_and_empty_tensors_come_back(family, coded, layout):
    shapes = [(), (0,), (0, 300), (3, 0)]
    optimizer = trained(family, 8, shapes, state_format="dynamic8", **coded)
    again = build(family, params_of(shapes), **coded)
    load(again, to_bitsandbytes_state_dict(optimizer, layout))
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, again)), strict=True):
        for key, want in read(optimizer, p).items():
            torch.testing.assert_close(read(again, q)[key], want, rtol=1e-2, atol=0)


def test_other_keys_of_a_group_and_norms_are_written():
    optimizer = trained("AdamW", 8, percentile_clipping=5)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    written = to_bitsandbytes_state_dict(optimizer)
    (group,) = written["param_groups"]
    assert group == {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0,
        "t_alpha": None, "t_beta3": None, "initial_lr": 0.5, "params": list(range(8)),
    }  # fmt: skip
    for index, p in enumerate(optimizer.param_groups[0]["params"]):
        assert torch.equal(written["state"][index]["gnorm_vec"], optimizer.state[p]["gnorm_vec"])
    for state in optimizer.state.values():
        state["gnorm_vec"].fill_(-1)  # as a first step that was skipped leaves them
    written = to_bitsandbytes_state_dict(optimizer)
    assert not any(bool(state["gnorm_vec"].any()) for state in written["state"].values())


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_what_a_group_has_beside_settings_is_copied(write):
    optimizer = lowbit_optim.AdamW8bit(params_of([(5,)]), lr=torch.tensor(0.5))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    group = optimizer.param_groups[0]
    group["mine"] = [torch.arange(3)]
    lowbit_optim.release_gradients(optimizer, clip_previous_norm=1.0)
    (written,) = write(optimizer)["param_groups"]
    assert type(written["initial_lr"]) is float
    assert torch.equal(written["mine"][0], group["mine"][0])
    assert not pointers(written) & pointers(group)
    assert "previous_gradient_norm" not in written, "which is of no other library"


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
@pytest.mark.parametrize("format", ["dynamic8", "ratio8", "float32"])
def test_what_a_user_has_put_into_state_is_copied(write, format):
    """Not what the optimizer has kept with other settings, as codes of a moment."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    options = {"percentile_clipping": 50, "amsgrad": True, "master_weight_bits": 32}
    optimizer = lowbit_optim.AdamW([p], state_format=format, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0].update(amsgrad=False, percentile_clipping=100)
    wanted = write(optimizer)["state"]
    assert not {"max_exp_avg_sq", "master_residual"} & wanted[0].keys()
    optimizer.state[p]["mine"] = optimizer.state["note"] = torch.ones(2)
    written = write(optimizer)["state"]
    assert not pointers(written) & pointers(dict(optimizer.state))
    assert torch.equal(written[0].pop("mine"), written.pop("note"))
    assert identical(written, wanted)
    del optimizer.state[p]["exp_avg"]
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(64, 64\): it has no 'exp_avg'"):
        write(optimizer)


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_what_is_written_does_not_follow_the_default_dtype(write):
    optimizer = trained("AdamW", 8)
    wanted = write(optimizer)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert identical(write(optimizer), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_counts_for_torch_do_not_follow_the_default_device():
    optimizer = build("Adagrad", params_of([(5,)]))
    torch.set_default_device("meta")
    try:
        written = to_torch_state_dict(optimizer)
    finally:
        torch.set_default_device(None)
    assert written["state"][0]["step"].device.type == "cpu"


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_groups_share_one_numbering(write):
    p, q, r = params_of([(5,), (6,), (7,)])
    groups = [{"params": [p]}, {"params": [q, r], "lr": torch.tensor(0.25)}]
    optimizer = lowbit_optim.AdamW(groups, lr=0.5)
    r.grad = torch.ones_like(r)
    optimizer.step()
    written = write(optimizer)
    assert [group["params"] for group in written["param_groups"]] == [[0], [1, 2]]
    assert [group["lr"] for group in written["param_groups"]] == [0.5, 0.25]
    assert written["state"].keys() == {2}


NO_PEER = ["LANS", "Eve", "ADOPT", "Cain", "LearnedGradient"]


@pytest.mark.parametrize("name", NO_PEER)
def test_an_optimizer_that_the_other_has_not(name):
    optimizer = getattr(lowbit_optim, name)(params_of([(5,)]))
    with pytest.raises(ValueError, match=f"torch.optim has no {name}; .* takes SGD, Adam"):
        to_torch_state_dict(optimizer)
    with pytest.raises(ValueError, match=f"bitsandbytes has no {name}; .* takes AdEMAMix, Ada"):
        to_bitsandbytes_state_dict(optimizer)


@pytest.mark.parametrize("name", ["Lion", "LARS", "LAMB", "AdEMAMix"])
def test_torch_has_fewer(name):
    with pytest.raises(ValueError, match=f"torch.optim has no {name};"):
        to_torch_state_dict(build(name, params_of([(5,)])))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"maximize": True}),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": False}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("LARS", {"momentum": 0.9, "trust_coefficient": 0.001}),
        ("LARS", {"momentum": 0.9, "scale_at": "lr"}),
        ("LAMB", {"trust_coefficient": 1.0}),
        ("LAMB", {"bias_correction": False}),
        ("LAMB", {"weight_decay": 0.1, "adam_w_mode": False}),
        ("RMSprop", {"centered": True}),
        ("RMSprop", {"momentum": 0.5}),
        ("Adagrad", {"lr_decay": 0.5}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("AdEMAMix", {"max_unorm": 0.5}),
        ("Lion", {"cautious": True}),
        ("AdEMAMix", {"percentile_clipping": 5}),
    ],
    ids=str,
)
def test_a_setting_that_bitsandbytes_has_not(name, options):
    key, value = list(options.items())[-1]
    params = params_of([(5,), (5,)])
    params[0].grad = torch.ones(5)  # the other one has not begun
    optimizer = build(name, params, **options)
    optimizer.step()
    match = f"parameter group 0 has {key}={value!r}, and bitsandbytes has only"
    with pytest.raises(ValueError, match=match):
        to_bitsandbytes_state_dict(optimizer)


def test_coupling_is_nothing_without_decay():
    optimizer = lowbit_optim.Adam8bit(params_of([(5,)]))
    assert to_bitsandbytes_state_dict(optimizer)["state"] == {}
    with pytest.raises(ValueError, match="momentum=0, which bitsandbytes refuses"):
        to_bitsandbytes_state_dict(lowbit_optim.SGD(params_of([(5,)])))


@pytest.mark.parametrize(
    "options", [{"max_unorm": 0.5}, {"percentile_clipping": 5}, {"cautious": True}], ids=str
)
def test_a_setting_that_torch_has_not(options):
    ((key, value),) = options.items()
    optimizer = lowbit_optim.AdamW(params_of([(5,)]), **options)
    with pytest.raises(ValueError, match=f"has {key}={value}, and torch.optim has only"):
        to_torch_state_dict(optimizer)


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_settings_of_single_parameters(write, manager):
    p, q = params_of([(300,), (300,)])
    optimizer = lowbit_optim.AdamW8bit([p, q], min_8bit_size=1)
    manager.override_config(p, "optim_bits", 32)
    for x in (p, q):
        x.grad = torch.ones_like(x)
    optimizer.step()
    written = write(optimizer)["state"]
    if write is to_bitsandbytes_state_dict:
        assert [written[i]["state1"].dtype for i in (0, 1)] == [torch.float32, torch.uint8]
    manager.override_config(p, "lr", 0.5)
    with pytest.raises(ValueError, match=r"GlobalOptimManager overrides 'lr' .* group 0"):
        write(optimizer)


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_other_objects_are_refused(write):
    with pytest.raises(TypeError, match=f"{write.__name__} takes an optimizer of lowbit_optim"):
        write(torch.optim.AdamW(params_of([(5,)])))


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_moments_of_another_shape_are_refused(write, bits):
    """As those of a parameter that has had a projection of itself in the step."""
    params = params_of([(5,), (32, 256)])
    optimizer = lowbit_optim.AdamW(params, optim_bits=bits, min_8bit_size=1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[1].grad, params[1].data = None, torch.zeros(512, 256)
    place = r"the state of parameter 1 of shape \(512, 256\): 'exp_avg' has shape \(32, 256\)"
    with pytest.raises(ValueError, match=place):
        write(optimizer)


def test_layouts_are_two():
    optimizer = lowbit_optim.AdamW(params_of([(5,)]))
    with pytest.raises(ValueError, match="layout must be one of 'flat', 'nested'; got 'deep'"):
        to_bitsandbytes_state_dict(optimizer, "deep")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.few("name", "bits", "dtype")
def test_torch_goes_on(name, bits, dtype):
    """Every class, in every dtype; a parameter that has no state yet is stepped, too."""
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"centered": True, "momentum": 0.9}}
    options = options.get(name, {})
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in params_of(WHOLE + TORN)]
    optimizer = getattr(lowbit_optim, f"{name}{bits}bit")(
        params, lr=0.01, min_8bit_size=1, **options
    )
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    written = to_torch_state_dict(optimizer)
    assert not pointers(written) & pointers(optimizer.state_dict())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = getattr(torch.optim, name)(copies, **options)
    theirs.load_state_dict(written)
    for p, q in zip(params, copies, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer.step()
    theirs.step()
    limit = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float64: 1e-7}[dtype]
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=limit, atol=limit if bits == 32 else 1e-3)
    if name == "SGD":
        assert not any("step" in state for state in written["state"].values())
    else:
        assert written["state"][1]["step"].dtype == torch.float32


def test_a_skipped_first_step_is_none_to_torch():
    """The first step that counts fills the buffer undamped, whoever takes it."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    params = [torch.nn.Parameter(torch.ones(5))]
    ours = lowbit_optim.SGD(params, **options)
    params[0].grad = torch.full((5,), torch.inf)
    ours.found_inf, ours.grad_scale = torch.ones(()), torch.ones(())
    ours.step()
    del ours.found_inf, ours.grad_scale
    others = [torch.nn.Parameter(torch.ones(5))]
    theirs = torch.optim.SGD(others, **options)
    theirs.load_state_dict(to_torch_state_dict(ours))
    for optimizer, p in ((ours, params[0]), (theirs, others[0])):
        for _ in range(2):
            p.grad = torch.ones(5)
            optimizer.step()
    torch.testing.assert_close(params[0], others[0])


def test_settings_come_along_to_torch():
    optimizer = lowbit_optim.AdamW8bit(params_of([(5,)]), lr=0.5, betas=(0.5, 0.6), foreach=True)
    theirs = torch.optim.AdamW(params_of([(5,)]))
    theirs.load_state_dict(to_torch_state_dict(optimizer))
    (group,) = theirs.param_groups
    assert group["lr"] == 0.5
    assert group["betas"] == (0.5, 0.6)
    assert group["foreach"] is None
    assert group.keys() == torch.optim.AdamW(params_of([(5,)])).param_groups[0].keys()
