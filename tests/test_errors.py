"""Bad input: an error that names the argument and what is allowed, before anything has changed."""

import copy
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lowbit_optim
import lowbit_optim.bitsandbytes
from protocol import (
    BITS,
    CLASSES,
    ONE_PER_CLASS,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    snapshot,
    train,
)

NAN, INF = math.nan, math.inf
EDEN = {"batch": 0, "epoch": 0, "base_lrs": 5}
NOT_A_RATE = (-0.1, NAN, INF, 2**63, 10**400, "0.1", None, True)
EVERYWHERE = {
    "lr": (*NOT_A_RATE, torch.tensor([0.1, 0.1]), torch.tensor(-1.0), torch.tensor(NAN)),
    "weight_decay": NOT_A_RATE,
    "optim_bits": (3, 16, "8", None, True, torch.tensor([8, 8])),
    "state_format": ("dynamic9", 8, True, ["dynamic8"], "float32\n"),
    "min_8bit_size": (-1, 2**63, 4096.0, None),
    "percentile_clipping": (-1, 101, 50.0, None),
    "max_unorm": NOT_A_RATE,
    "maximize": (None, "yes"),
    "differentiable": (True, None),
    "capturable": (None,),
    "foreach": (1,),
    "fused": (1,),
}
SOMEWHERE = {
    "eps": (-1e-8, NAN, INF, "1e-8"),
    "betas": ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), 0.9, (0.9, "0.9")),
    "momentum": (-0.1, NAN, INF, "0.9"),
    "dampening": (-0.1, 1.5, NAN),
    "nesterov": (1, None),
    "amsgrad": (None, 1),
    "decoupled_weight_decay": (None,),
    "block_wise": (None, 0, "no"),
    "is_paged": (None, 1, "yes"),
    "trust_coefficient": (-1.0, NAN, "1"),
    "trust_clip": (None,),
    "skip_wd": (1,),
    "scale_at": ("Grad", None, 0, np.array(["grad", "lr"])),
    "zero_norm": ("two", None),
    "adapt": ("never", True),
    "max_step_scale": (-1.0, 2**63),
    "lr_est_period": (0, 2**63),
    "t_alpha": (0, 2**63),
    "warmup_steps": (-1, 2**63),
    "weight_norm_bounds": (1.0, (1.0,), (2.0, 1.0), (-1.0, 1.0), (0.0, NAN)),
}


def arguments_of(case):
    """The constructor arguments of a class that `SOMEWHERE` or `EVERYWHERE` knows."""
    accepted = inspect.signature(getattr(lowbit_optim, case.name)).parameters
    return [name for name in (*EVERYWHERE, *SOMEWHERE) if name in accepted]


BAD = [
    pytest.param(case, name, value, id=f"{case.name}-{name}={str(value)[:20]}")
    for case in ONE_PER_CLASS
    for name in arguments_of(case)
    for value in {**EVERYWHERE, **SOMEWHERE}[name]
]
OF_CONSTRUCTORS = ("block_wise", "is_paged")  # not of groups
BAD_IN_GROUPS = [bad for bad in BAD if bad.values[1] not in OF_CONSTRUCTORS]
REFUSALS = (ValueError, TypeError)


@pytest.mark.parametrize(("case", "name", "value"), BAD)
def test_a_bad_argument_is_named(case, name, value):
    cls = getattr(lowbit_optim, case.name)
    good = {"lr": case.lr, **case.options}
    with pytest.raises(REFUSALS, match=name):
        cls(parameters(), **{**good, name: value})


@pytest.mark.parametrize(("case", "name", "value"), BAD_IN_GROUPS)
def test_a_bad_argument_of_a_group_is_named_and_nothing_is_added(case, name, value):
    optimizer = build(case, 8, parameters())
    before = snapshot(optimizer)
    with pytest.raises(REFUSALS, match=name):
        optimizer.add_param_group({"params": parameters(), name: value})
    assert len(optimizer.param_groups) == 1
    assert identical(snapshot(optimizer), before)


def test_a_learning_rate_without_a_value():
    with pytest.raises(ValueError, match="lr must have a value"):
        lowbit_optim.SGD8bit(parameters(), lr=torch.tensor(0.1, device="meta"))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda o: lowbit_optim.engine_for("cpu"), "tensor must be a torch.Tensor; got str"),
        (lambda o: type(o)(torch.nn.Linear(2, 2)), r"model.parameters\(\); got Linear"),
        (lambda o: o.step_parameter(5), "a parameter must be a tensor; got 5"),
        (lambda o: lowbit_optim.load_master_weights(o, 5), "weights must be tensors"),
        (lambda o: lowbit_optim.Eden(o, 5, 5).load_state_dict(5), "state_dict of Eden must be"),
        (lambda o: lowbit_optim.Eden(o, 5, 5).load_state_dict(EDEN), "base_lrs must be numbers"),
        (lambda o: lowbit_optim.parameter_groups(torch.nn.ReLU(), no_decay=5), "no_decay must be"),
    ],
)
def test_what_is_of_another_kind_is_named(call, named):
    with pytest.raises(TypeError, match=named):
        call(lowbit_optim.AdamW8bit([torch.zeros(3)]))


def test_combinations_that_contradict_each_other():
    for cls in (lowbit_optim.SGD, lowbit_optim.LARS8bit):
        with pytest.raises(ValueError, match="nesterov"):
            cls(parameters(), lr=0.1, nesterov=True)
        with pytest.raises(ValueError, match="nesterov"):
            cls(parameters(), lr=0.1, momentum=0.9, dampening=0.1, nesterov=True)
    with pytest.raises(ValueError, match="foreach and fused"):
        lowbit_optim.AdamW(parameters(), foreach=True, fused=True)
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        lowbit_optim.AdamW([{"params": parameters(), "decoupled_weight_decay": False}])


def test_bits_that_a_name_fixes():
    with pytest.raises(ValueError, match="optim_bits must be 8 for AdamW8bit"):
        lowbit_optim.AdamW8bit(parameters(), optim_bits=32)
    with pytest.raises(ValueError, match="optim_bits must be 8 for SGD8bit"):
        lowbit_optim.SGD8bit(parameters(), lr=0.1, optim_bits=32)
    with pytest.raises(ValueError, match=r"args\.optim_bits must be 32 for Adam32bit"):
        lowbit_optim.Adam32bit(parameters(), args=SimpleNamespace(optim_bits=8))
    with pytest.raises(ValueError, match="optim_bits must be 32 for PagedAdam32bit"):
        lowbit_optim.bitsandbytes.optim.PagedAdam32bit(parameters(), optim_bits=8)


def test_args_are_checked_like_arguments():
    for name, value in (("percentile_clipping", 101), ("max_unorm", -1), ("optim_bits", 3)):
        with pytest.raises(REFUSALS, match=name):
            lowbit_optim.AdamW(parameters(), args=SimpleNamespace(**{name: value}))
    for args in (3, {"bits": 8}):  # another argument in its place, and a misspelt one
        with pytest.raises(TypeError, match="args must be an object or a dict with any of"):
            lowbit_optim.AdamW(parameters(), args=args)


@CLASSES
def test_unknown_and_missing_arguments(case):
    cls = getattr(lowbit_optim, f"{case.name}8bit")
    with pytest.raises(TypeError, match="weight_decai"):
        cls(parameters(), lr=0.1, weight_decai=0.1)
    with pytest.raises(TypeError, match="params"):
        cls()


# Parameters.


@CLASSES
@pytest.mark.parametrize(
    "dtype",
    [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool],
    ids=str,
)
def test_parameters_that_are_not_real_and_floating(case, dtype):
    bad = torch.zeros(300).to(dtype)
    with pytest.raises(TypeError, match=str(dtype)):
        build(case, 8, [bad])
    optimizer = train(build(case, 8, parameters()), 1)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=str(dtype)):
        optimizer.add_param_group({"params": [*parameters(), bad]})
    assert identical(snapshot(optimizer), before)


@CLASSES
def test_frozen_parameters_of_other_dtypes_are_left_alone(case):
    """A quantized model whose adapters are trained is given whole, as to torch's optimizers."""
    codes = torch.nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    eighths = torch.nn.Parameter(torch.ones(6).to(torch.float8_e4m3fn), requires_grad=False)
    trained = parameters()
    optimizer = build(case, 8, [codes, *trained, eighths])
    give_gradients(trained, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert set(optimizer.state) == set(trained)
    assert codes.tolist() == list(range(6))
    weights = dict(lowbit_optim.master_weights(optimizer))
    assert list(weights) == list(range(1, 1 + len(trained)))
    lowbit_optim.load_master_weights(optimizer, weights)
    before = copy.deepcopy([*trained, optimizer.state_dict()["state"]])
    eighths.requires_grad_(True).grad = eighths.detach()
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        optimizer.step()
    assert identical([*trained, optimizer.state_dict()["state"]], before)


@CLASSES
def test_parameters_that_are_no_dense_leaves(case):
    (p,) = parameters(shapes=[(20, 15)])
    with pytest.raises(TypeError, match="sparse"):
        build(case, 8, [torch.nn.Parameter(p.detach().to_sparse())])
    with pytest.raises(ValueError, match="non-leaf"):
        build(case, 8, [p * 2])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        build(case, 8, p)
    with pytest.raises(ValueError, match="empty parameter list"):
        build(case, 8, [])
    with pytest.raises(ValueError, match=r"must have 'params', got \['lr'\]"):
        build(case, 8, [{"lr": 0.1}])
    optimizer = build(case, 8, [p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


# Gradients.


def refused(optimizer, error, match):
    """Whether a step raises and leaves parameters, state and groups as they were."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=match):
        optimizer.step()
    assert identical(snapshot(optimizer), before)
    return True


@CLASSES
@BITS
@pytest.mark.parametrize("steps", [0, 1])
def test_a_sparse_gradient(case, bits, steps):
    """The parameters before it in the same group and in others are left alone as well."""
    embedding = torch.nn.Embedding(20, 15, sparse=True)
    groups = [{"params": parameters()}, {"params": [*parameters(), embedding.weight]}]
    optimizer = train(build(case, bits, groups), steps)
    give_gradients(all_parameters(optimizer), 5)
    embedding.weight.grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    assert refused(
        optimizer, RuntimeError, f"{case.name}{bits}bit does not support sparse gradients"
    )


@CLASSES
def test_a_gradient_of_another_shape(case):
    """Compiled engines would read past the end of such a gradient."""
    params = parameters()
    b = params[1]
    optimizer = train(build(case, 8, params), 1)
    give_gradients(params, 1)
    b.data = b.data[:100].clone()
    assert refused(optimizer, RuntimeError, "gradient of shape")
    b.grad = torch.ones(100)
    with pytest.raises(ValueError, match=r"shape \(300,\), its parameter \(100,\)"):
        optimizer.step()


@pytest.mark.parametrize(
    "case", [case for case in ONE_PER_CLASS if case.fused], ids=lambda case: case.name
)
def test_fused_on_an_engine_that_does_not_fuse(case):
    (p,) = parameters(torch.float64, [(300,)])
    optimizer = build(case, 8, [*parameters(), p], fused=True)
    give_gradients(all_parameters(optimizer), 0)
    assert refused(optimizer, RuntimeError, "fused=True, but the engine is 'torch'")
    p.grad = None
    optimizer.step()


# State dicts.


def without_a_parameter(saved):
    saved["param_groups"][0]["params"].pop()


def without_a_group(saved):
    saved["param_groups"] = []


def of_another_shape(saved):
    for key, value in saved["state"][1].items():
        if value.dtype == torch.uint8:
            saved["state"][1][key] = value[:-1]


def with_scales_of_another_shape(saved):
    for key, value in saved["state"][1].items():
        if key.endswith("_absmax"):
            saved["state"][1][key] = value[:-1]


def without_scales(saved):
    for key in [key for key in saved["state"][1] if key.endswith("_absmax")]:
        del saved["state"][1][key]


def without_a_moment(saved):
    state = saved["state"][1]
    saved["state"][1] = {key: state[key] for key in ("step", "gnorm_vec")}


def with_a_short_history(saved):
    saved["state"][1]["gnorm_vec"] = torch.zeros(7)


def of_a_newer_format(saved):
    saved["lowbit_optim"]["format_version"] = 1000


def of_another_class(saved):
    saved["lowbit_optim"]["optimizer"] = "Adafactor"


def with_a_bad_setting(saved):
    saved["param_groups"][0]["lr"] = NAN


def with_numbers_as_strings(saved):
    saved["state"] = {str(key): state for key, state in saved["state"].items()}


def with_nothing(saved):
    saved.clear()


DAMAGES = [
    (without_a_parameter, "parameter"),
    (without_a_group, "0 parameter groups, this .* has 1"),
    (of_another_shape, r"shape \(299,\), its parameter \(300,\)"),
    (with_scales_of_another_shape, "_absmax has shape"),
    (without_scales, "_absmax are missing"),
    (without_a_moment, "it has no"),
    (with_a_short_history, "gnorm_vec"),
    (of_a_newer_format, "format_version 1000, newer than the 2"),
    (of_another_class, "of the optimizer 'Adafactor'"),
    (with_a_bad_setting, "lr"),
    (with_numbers_as_strings, "'0', which no .* must be integers"),
    (with_nothing, "has no 'state'"),
]


@CLASSES
@pytest.mark.parametrize(("damage", "match"), DAMAGES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_state_that_does_not_fit(case, damage, match):
    optimizer = train(build(case, 8, parameters(), percentile_clipping=50), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    train(optimizer, 1, first=2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert identical(snapshot(optimizer), before)


OTHERS = [
    (torch.optim.Adam, {}, lowbit_optim.SGD8bit),
    (torch.optim.Adam, {}, lowbit_optim.LARS32bit),
    (torch.optim.SGD, {"momentum": 0.9}, lowbit_optim.Adam8bit),
    (torch.optim.SGD, {}, lowbit_optim.AdamW32bit),
    (torch.optim.RMSprop, {}, lowbit_optim.AdamW32bit),
    (lowbit_optim.AdamW8bit, {}, lowbit_optim.Adam8bit),
    (lowbit_optim.SGD8bit, {"momentum": 0.9}, lowbit_optim.LARS8bit),
]


@pytest.mark.parametrize(("source", "options", "target"), OTHERS)
def test_a_state_of_another_class(source, options, target):
    saved = train(source(parameters(), lr=0.1, **options), 1).state_dict()
    optimizer = target(parameters(), lr=0.1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="optimizer"):
        optimizer.load_state_dict(saved)
    assert identical(snapshot(optimizer), before)


def test_a_load_hook_that_raises_changes_nothing():
    optimizer = train(lowbit_optim.AdamW8bit(parameters()), 1)
    saved, before = optimizer.state_dict(), snapshot(optimizer)

    def refuse(*_):
        raise KeyError("not this one")

    optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(KeyError, match="not this one"):
        optimizer.load_state_dict(saved)
    assert identical(snapshot(optimizer), before)
