"""Every argument of every class does something: no value is accepted and ignored.

`CHANGES` has, for every argument, options under which it matters and two values that lead to
different parameters. What changes no parameter is in `STORED` or, with its reason, in `EXCEPTIONS`.
"""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

import lowbit_optim
from protocol import ONE_PER_CLASS, identical, snapshot

STEPS = 6
SHAPES = ((64, 70), (300,), (5,))  # above min_8bit_size, below it, and one that starts at zero
HEAVY = {"momentum": 0.9}
NARROW = {"optim_bits": 8, "min_8bit_size": 1}
SLOW = {"LARS": {"momentum": 0.999}, "SGD": {"momentum": 0.999}, "Lion": {"betas": (0.9, 0.999)},
        "LearnedGradient": {"betas": (0.995, 0.98)}}  # fmt: skip
FORGETFUL = {"betas": (0.5, 0.6)}
TRUST = {"trust_coefficient": 0.02, **HEAVY}
OFTEN = {"lr_est_period": 2}

EVERYWHERE = {
    "lr": ({}, 0.01, 0.02),
    "args": ({}, None, SimpleNamespace(percentile_clipping=5)),
    "percentile_clipping": ({}, 100, 5),
    "max_unorm": ({}, 0.0, 1e-3),
    "maximize": ({}, False, True),
    "cautious": ({}, False, True),
    "dither": (NARROW, True, False),
    "seed": (NARROW, 0, 1),
    "master_weight_bits": ({"dtype": torch.bfloat16}, None, 16),
}
ADAM = {
    "betas": ({}, (0.9, 0.99), (0.5, 0.6)),
    "eps": ({}, 1e-8, 1e-2),
    "weight_decay": ({}, 0.0, 0.1),
    "amsgrad": (FORGETFUL, False, True),
}
SGD = {
    "momentum": ({}, 0.0, 0.9),
    "dampening": (HEAVY, 0.0, 0.5),
    "weight_decay": ({}, 0.0, 0.1),
    "nesterov": (HEAVY, False, True),
}
CHANGES = {
    "LARS": {
        **SGD,
        "cautious": (HEAVY, False, True),
        "trust_coefficient": ({}, None, 0.02),
        "eps": (TRUST, 0.0, 1.0),
        "trust_clip": (TRUST, False, True),
        "scale_at": (HEAVY, "grad", "lr"),
        "zero_norm": (TRUST, "one", "zero"),
        "adapt": (TRUST, "always", "wd"),
        "skip_wd": ({"weight_decay": 0.1}, False, True),
        "weight_norm_bounds": (TRUST, None, (0.0, 0.5)),
    },
    "SGD": {**SGD, "cautious": (HEAVY, False, True)},
    "Adam": {**ADAM, "decoupled_weight_decay": ({"weight_decay": 0.1}, False, True)},
    "AdamW": ADAM,
    "LAMB": {
        **ADAM,
        "bias_correction": ({}, True, False),
        "adam_w_mode": ({"weight_decay": 0.1}, True, False),
        "trust_coefficient": ({}, None, 0.02),
        "weight_norm_bounds": ({"trust_coefficient": 1.0}, None, (0.0, 0.5)),
    },
    "LANS": {
        **ADAM,
        "lower_bound": ({}, None, 100.0),
        "upper_bound": ({}, None, 0.1),
        "clip_gradient": ({}, None, 1e-3),
        "percentile_clipping": ({"eps": 1.0}, 100, 5),  # the gradient is normalized
        "args": ({}, None, SimpleNamespace(max_unorm=1e-3)),
    },
    "Lion": ADAM,
    "RMSprop": {
        "alpha": ({}, 0.9, 0.99),
        "eps": ({}, 1e-8, 1e-2),
        "weight_decay": ({}, 0.0, 0.1),
        "momentum": ({}, 0.0, 0.9),
        "centered": ({}, False, True),
        "cautious": (HEAVY, False, True),
    },
    "Adagrad": {
        "lr_decay": ({}, 0.0, 0.1),
        "weight_decay": ({}, 0.0, 0.1),
        "initial_accumulator_value": ({}, 0.0, 0.1),
        "eps": ({}, 1e-10, 1e-2),
    },
    "ADOPT": {
        **ADAM,
        "clip_exp": ({}, 0.25, None),
        "decoupled_weight_decay": ({"weight_decay": 0.1}, False, True),
    },
    "ScheduleFreeAdamW": {
        **ADAM,
        "warmup_steps": ({}, 0, 3),
        "r": ({}, 0.0, 2.0),
        "weight_lr_power": ({}, 2.0, 0.0),
    },
    "AdEMAMix": {
        **ADAM,
        "betas": ({}, (0.9, 0.99, 0.999), (0.9, 0.99, 0.9)),
        "alpha": ({}, 5.0, 1.0),
        "t_alpha": ({}, None, 10),
        "t_beta3": ({}, None, 10),
    },
    "Eve": {**ADAM, "target_rms": ({}, 0.1, 5.0)},
    "Cain": {
        **ADAM,
        "scale_speed": ({}, 0.05, 0.5),
        "rms_eps": ({}, 1e-5, 0.09),
        "param_max": ({}, 20.0, 0.5),
        "bias_correction_fix": ({}, False, True),
    },
    "LearnedGradient": {
        **ADAM,
        "size_lr_scale": ({}, 0.1, 1.0),
        "meta_lr_scale": (OFTEN, 1.0, 5.0),
        "param_min_rms": ({}, 1e-5, 1.9),
        "param_max_rms": ({}, 2.0, 0.5),
        "lr_est_period": ({}, 10, 2),
        "max_step_scale": ({}, 2.0, 0.5),
        "max_size": (OFTEN, None, 4),
    },
}
STORED = {
    "optim_bits": ({}, 32, 8),
    "state_format": ({}, None, "dynamic8"),
    "min_8bit_size": ({"optim_bits": 8}, 4096, 10_000),
}
EXCEPTIONS = {
    "params": "they are what is stepped",
    "foreach": "all tensors of a group are always stepped together; raises where they are not",
    "capturable": "nothing is captured on a CPU; raises where nothing can be captured",
    "fused": "True raises in `step` where no compiled engine runs",
    "differentiable": "True raises",
    "block_wise": "False warns: test_bitsandbytes.py",
    "is_paged": "True warns: test_bitsandbytes.py",
}
NAMES = [case.name for case in ONE_PER_CLASS]
EAGER = [case.name for case in ONE_PER_CLASS if not case.fused]


def arguments_of(name):
    return list(inspect.signature(getattr(lowbit_optim, name)).parameters)


def having(table):
    """(class, argument, options, first, second) for every argument that the table has.

    Nothing is dithered but squares and slow averages.
    """
    return [
        pytest.param(
            name,
            argument,
            {**row[argument][0], **slow},
            *row[argument][1:],
            id=f"{name}-{argument}",
        )
        for name in NAMES
        for row in [{**table, **(CHANGES[name] if table is EVERYWHERE else {})}]
        for argument in arguments_of(name)
        if argument in row
        for slow in [SLOW.get(name, {}) if argument in ("dither", "seed") else {}]
    ]


def run(name, options):
    """A snapshot after some steps whose lr and gradients change."""
    generator = torch.Generator().manual_seed(0)
    dtype, options = options.get("dtype"), {k: x for k, x in options.items() if k != "dtype"}
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]
    params[-1].data.zero_()
    optimizer = getattr(lowbit_optim, name)(params, **{"lr": 0.01, **options})
    lr = optimizer.param_groups[0]["lr"]
    with lowbit_optim.use_engine("torch"):
        for t in range(STEPS):
            optimizer.param_groups[0]["lr"] = lr * (1 + 0.5 * math.sin(t))
            for p in params:
                g = torch.randn(p.shape, generator=generator) * 3.0 ** -(t % 3)
                p.grad = g.to(p.dtype)
            optimizer.step()
    return snapshot(optimizer)


def test_every_class_and_argument_is_listed():
    stems = {name.removesuffix("8bit") for name in dir(lowbit_optim) if name.endswith("8bit")}
    assert set(NAMES) == set(CHANGES) == stems
    known = EVERYWHERE.keys() | STORED.keys() | EXCEPTIONS.keys()
    for name in NAMES:
        assert set(arguments_of(name)) <= known | CHANGES[name].keys(), name


@pytest.mark.parametrize(("name", "argument", "options", "first", "second"), having(EVERYWHERE))
def test_the_argument_changes_a_step(name, argument, options, first, second):
    runs = [run(name, {**options, argument: value})["params"] for value in (first, second)]
    assert not any(p.isnan().any() for values in runs for p in values)
    assert not identical(*runs)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_change_nothing_changes(name):
    """So that the test above means something."""
    assert identical(run(name, {}), run(name, {}))


@pytest.mark.parametrize(("name", "argument", "options", "first", "second"), having(STORED))
def test_the_argument_changes_what_is_stored(name, argument, options, first, second):
    moments = {**HEAVY, **options} if "momentum" in arguments_of(name) else options
    runs = [run(name, {**moments, argument: value})["state"][0] for value in (first, second)]
    dtypes = [{value.dtype for value in state.values()} for state in runs]
    assert torch.uint8 in set.union(*dtypes) - set.intersection(*dtypes)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_had_is_refused(name):
    with pytest.raises(ValueError, match="differentiable"):
        run(name, {"differentiable": True})
    error, match = (ValueError if name in EAGER else RuntimeError), "fused"
    with pytest.raises(error, match=match):
        run(name, {"fused": True})
    for argument in ("foreach", "capturable"):
        if name in EAGER:
            with pytest.raises(ValueError, match=argument):
                run(name, {argument: True})
        else:
            assert identical(run(name, {argument: True})["params"], run(name, {})["params"])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_of_gradients_are_not_skipped(name):
    asked = {"optim_bits": 32, "skip_zeros": False}
    assert identical(run(name, {"args": asked}), run(name, {}))
    alone = {"skip_zeros": True}
    for args in ({**asked, **alone}, SimpleNamespace(max_unorm=0.0, skip_zeros=True), alone):
        with pytest.raises(ValueError, match="args asks for skip_zeros"):
            run(name, {"args": args})


def test_a_tensor_of_min_8bit_size_elements_has_codes_and_one_of_fewer_has_none():
    params = [torch.nn.Parameter(torch.ones(size)) for size in (99, 100)]
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=100)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert kept == [torch.float32, torch.uint8]
