"""Settings between steps: what a step runs with, a checkpoint carries and a load accepts.

What is refused is refused in `step`, before anything has changed, as in `load_state_dict`.
"""

import copy
import pickle
import warnings
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import lowbit_optim
from lowbit_optim import _state_dicts
from protocol import (
    CLASSES,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    saved_and_loaded,
    snapshot,
    train,
)
from test_errors import BAD_IN_GROUPS, REFUSALS

ADAMW = lowbit_optim.AdamW8bit


def resumes(optimizer, fresh):
    """Whether a fresh optimizer continues from a file as the one that was saved."""
    fresh.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for p, q in zip(all_parameters(fresh), all_parameters(optimizer), strict=True):
        p.data.copy_(q.data)
    train(optimizer, 2, first=50)
    train(fresh, 2, first=50)
    return identical(snapshot(optimizer)["params"], snapshot(fresh)["params"])


SCHEDULES = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=97, anneal_strategy="linear", cycle_momentum=False
    ),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=0.3, end_factor=0.0, total_iters=97),
    "past zero": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 - t / 90),
    "numpy": lambda o: lr_scheduler.LambdaLR(o, lambda t: np.float32(1) / (1 + t)),
    "numpy integers": lambda o: lr_scheduler.LambdaLR(o, lambda t: np.int64(t % 2)),
}


@CLASSES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_scheduler_sets_can_be_saved_and_loaded(case, schedule):
    """Linear schedules end a rounding below zero, where torch's optimizers go on."""
    optimizer = build(case, 8, parameters(shapes=[(300,)]))
    scheduler = SCHEDULES[schedule](optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of schedulers that run before the optimizer
        for _ in range(96):
            scheduler.step()
    train(optimizer, 2)
    assert resumes(optimizer, build(case, 8, parameters(shapes=[(300,)], seed=3)))


@CLASSES
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array, torch.tensor, Fraction])
def test_numpy_and_tensors_are_as_numbers(case, kind):
    """In the constructor, in a group, and set between two steps; here numbers that fp32 holds."""
    numbers = {"lr": 0.03125, "weight_decay": 0.0625, "eps": 2.0**-20, "betas": (0.5, 0.75)}
    taken = build(case, 8, parameters()).param_groups[0]
    numbers = {key: x for key, x in numbers.items() if key in taken}
    if case.name == "LARS":
        del numbers["eps"]  # needs a trust coefficient
    if len(taken.get("betas", ())) == 3:
        numbers["betas"] = (0.5, 0.75, 0.875)

    def given(x):
        return tuple(map(kind, x)) if isinstance(x, tuple) else kind(x)

    options = {key: given(x) for key, x in numbers.items()}
    cls = getattr(lowbit_optim, f"{case.name}8bit")
    plain = cls(parameters(), min_8bit_size=1, **numbers)
    made = [
        cls(parameters(), min_8bit_size=1, **options),
        cls([{"params": parameters(), **options}], lr=0.1, min_8bit_size=1),
        cls(parameters(), lr=0.1, min_8bit_size=1),
    ]
    made[2].param_groups[0].update(options)
    train(plain, 3)
    for optimizer in made:
        train(optimizer, 3)
        assert identical(snapshot(optimizer)["params"], snapshot(plain)["params"])
    assert resumes(made[2], cls(parameters(seed=4), lr=0.1, min_8bit_size=1))


@pytest.mark.parametrize("name", ["SGD32bit", "LARS32bit"])
def test_nesterovs_momentum_may_come_to_nothing_under_a_scheduler(name):
    """As in torch, whose constructor alone asks for one: a step without it is a plain one."""
    taken = []
    for cls in (getattr(lowbit_optim, name), torch.optim.SGD):
        own = {"max_unorm": 0.0} if cls is lowbit_optim.LARS32bit else {}
        optimizer = cls(parameters(), lr=0.1, momentum=0.9, nesterov=True, **own)
        scheduler = lr_scheduler.CyclicLR(
            optimizer, 0.01, 0.1, step_size_up=2, base_momentum=0.0, max_momentum=0.9
        )
        moments = []
        for t in range(6):
            train(optimizer, 1, first=t)
            scheduler.step()
            moments.append(optimizer.param_groups[0]["momentum"])
        assert 0.0 in moments
        taken.append([p.detach().clone() for p in all_parameters(optimizer)])
        fresh = cls(parameters(), lr=0.1, momentum=0.9, nesterov=True, **own)
        fresh.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    torch.testing.assert_close(*taken, rtol=1e-6, atol=1e-7)


def test_tensors_are_followed_when_they_change_in_place():
    lr, beta = torch.tensor(0.125), torch.tensor(0.5)
    followed = ADAMW(parameters(), lr=lr, betas=(beta, 0.75), min_8bit_size=1)
    told = ADAMW(parameters(), lr=0.125, betas=(0.5, 0.75), min_8bit_size=1)
    for optimizer in (followed, told):
        train(optimizer, 2)
    lr.fill_(0.25)
    beta.fill_(0.875)
    told.param_groups[0].update(lr=0.25, betas=(0.875, 0.75))
    for optimizer in (followed, told):
        train(optimizer, 2, first=2)
    assert identical(snapshot(followed)["params"], snapshot(told)["params"])
    assert followed.param_groups[0]["lr"] is lr


def test_a_list_is_followed_when_it_changes_in_place():
    betas = [0.5, 0.75]
    followed, told = (ADAMW(parameters(), betas=b, min_8bit_size=1) for b in (betas, (0.5, 0.75)))
    train(followed, 2)
    train(told, 2)
    betas[0] = 0.875
    told.param_groups[0]["betas"] = (0.875, 0.75)
    train(followed, 2)
    train(told, 2)
    assert identical(snapshot(followed)["params"], snapshot(told)["params"])


def refused_by_a_step(optimizer, name):
    """Whether a step refuses its settings by name; nothing has changed then."""
    give_gradients(all_parameters(optimizer), 9)
    before = snapshot(optimizer)
    message = None
    try:
        optimizer.step()
    except REFUSALS as error:
        message = str(error)
    if message is None:
        return False
    after = snapshot(optimizer)
    return name in message and all(identical(after[k], before[k]) for k in ("params", "state"))


@pytest.mark.parametrize(("case", "name", "value"), BAD_IN_GROUPS)
def test_a_step_refuses_what_a_load_refuses(case, name, value):
    """Where a step takes it, for a schedule may come to it, a load takes it as well."""
    optimizer = train(build(case, 8, parameters(shapes=[(300,)])), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0][name] = value
    saved["param_groups"][0][name] = value
    storage = name in _state_dicts.STORAGE_SETTINGS  # of the optimizer at hand, not of the file
    loaded = build(case, 8, parameters(shapes=[(300,)]))
    if refused_by_a_step(optimizer, name):
        if not storage:
            with pytest.raises(ValueError, match=name):
                loaded.load_state_dict(saved)
    else:
        assert name == "lr", "only a rate may be what a constructor refuses"
        loaded.load_state_dict(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_rate_that_is_not_finite_is_refused_in_every_step(value):
    optimizer = train(ADAMW([{"params": parameters()}, {"params": parameters(seed=2)}]), 2)
    optimizer.param_groups[1]["lr"] = value
    assert refused_by_a_step(optimizer, "lr must be finite; got")
    assert refused_by_a_step(optimizer, "lr")
    optimizer.param_groups[1]["lr"] = 0.1
    train(optimizer, 1)


@pytest.mark.parametrize("kind", [dict, lambda **given: type("Args", (), given)()])
def test_args_may_be_an_object_or_a_dict(kind):
    optimizer = lowbit_optim.AdamW(parameters(), args=kind(optim_bits=8, max_unorm=0.5))
    assert optimizer.param_groups[0]["optim_bits"] == 8
    assert optimizer.param_groups[0]["max_unorm"] == 0.5
    with pytest.raises(ValueError, match=r"args\.optim_bits must be 32"):
        lowbit_optim.AdamW32bit(parameters(), args=kind(optim_bits=8))


def test_a_rate_on_a_device_is_a_number_whatever_its_shape():
    optimizer = lowbit_optim.AdamW32bit(parameters())
    optimizer.param_groups[0]["lr"] = torch.empty(1, device="meta")
    assert optimizer._settings_of(0)["lr"].shape == ()


def test_overrides_by_tensors_that_print_alike(manager):
    a, b, c, d = parameters(shapes=[(300,)] * 4)
    rates = torch.tensor(0.10001), torch.tensor(0.10002)
    assert repr(rates[0]) == repr(rates[1])
    for p, rate in zip((a, b), rates, strict=True):
        manager.override_config(p, "lr", rate)
    grouped = [{"params": [p], "lr": float(x)} for p, x in zip((c, d), rates, strict=True)]
    c.data.copy_(a.data)
    d.data.copy_(b.data)
    train(ADAMW([a, b]), 2)
    train(ADAMW(grouped), 2)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def test_an_override_that_turns_bad_is_refused_in_the_step(manager):
    (p,) = parameters(shapes=[(300,)])
    rate = torch.tensor(0.1)
    manager.override_config(p, "lr", rate)
    optimizer = train(ADAMW([p]), 1)
    rate.fill_(float("nan"))
    assert refused_by_a_step(optimizer, "lr")


def test_a_wrapper_may_put_settings_of_its_own_among_the_defaults():
    optimizer = ADAMW(parameters())
    optimizer.defaults["every"] = 5
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 1)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        train(other, 1)
        assert other.defaults["every"] == 5


@pytest.mark.parametrize("name", ["Eve", "RMSprop", "LARS", "AdEMAMix"])
def test_rates_of_other_types_on_the_torch_engine(name):
    """Whose scalar arithmetic NumPy's numbers would take over, and fractions refuse."""
    results = []
    for lr in (0.1, np.float64(0.1), Fraction(0.1)):
        with lowbit_optim.use_engine("torch"):
            optimizer = getattr(lowbit_optim, f"{name}8bit")(parameters(), lr=0.1)
            optimizer.param_groups[0]["lr"] = lr
            results.append(snapshot(train(optimizer, 2))["params"])
    assert all(identical(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [torch.tensor(8), np.array(8), np.int64(8)], ids=repr)
def test_bits_as_tensors_and_arrays_of_one_number(bits):
    for given in ({"optim_bits": bits}, {"optim_bits": bits, "state_format": "dynamic8"}):
        p = torch.nn.Parameter(torch.ones(64, 64))
        group = lowbit_optim.AdamW([p], **given).param_groups[0]
        assert group["optim_bits"] == 8
        assert lowbit_optim.AdamW8bit([p], **given).param_groups[0]["optim_bits"] == 8
        assert lowbit_optim.AdamW([{"params": [p], **given}]).param_groups[0]["optim_bits"] == 8


def test_numpy_in_other_places():
    groups = lowbit_optim.parameter_groups(torch.nn.Linear(3, 3), weight_decay=np.float32(0.5))
    switches = {"amsgrad": np.True_, "block_wise": np.True_, "is_paged": np.False_}
    optimizer = ADAMW(groups, lr=np.float32(0.5), min_8bit_size=np.int64(1), **switches)
    scheduler = lowbit_optim.Eden(optimizer, np.float32(10), np.int64(2))
    scheduler.step_batch(np.int64(3))
    saved = saved_and_loaded([optimizer.state_dict(), scheduler.state_dict()])
    assert saved[0]["param_groups"][0]["amsgrad"] is True
    assert saved[1]["batch"] == 3


@pytest.mark.parametrize(
    "several", [iter, set, lambda params: params[0], lambda params: dict(enumerate(params)), id],
    ids=["iter", "set", "one", "dict", "number"],
)  # fmt: skip
def test_parameters_that_are_no_list_are_refused(several):
    """A generator, as `model.parameters()` is one, is empty when it is read again."""
    optimizer = train(ADAMW(parameters()), 1)
    params = all_parameters(optimizer)
    optimizer.param_groups[0]["params"] = several(params)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(TypeError, match="parameter group 0 must be a list; got"):
            use()
    optimizer.param_groups[0]["params"] = tuple(params)
    optimizer.load_state_dict(train(optimizer, 1).state_dict())


class Rate(float):
    """As YAML's that is written back as it was has them; so are those that follow."""


class Count(int):
    pass


class Word(str):
    __slots__ = ()


class Pair(list):
    pass


class Betas(NamedTuple):
    first: float
    second: Any


def test_settings_of_a_configurations_own_classes_are_saved_as_pythons():
    own = {
        "lr": Rate(0.5), "betas": Pair([Rate(0.5), 0.75]), "min_8bit_size": Count(1),
        "state_format": Word("ratio8"),
    }  # fmt: skip
    saved = []
    for settings in (own, {"lr": 0.5, "betas": [0.5, 0.75], "state_format": "ratio8"}):
        constructed = train(ADAMW(parameters(), **{"min_8bit_size": 1, **settings}), 1)
        later = ADAMW(parameters(), min_8bit_size=1)
        later.param_groups[0].update(settings)
        saved += [saved_and_loaded(x.state_dict()) for x in (constructed, train(later, 1))]
    assert identical(saved[:2], saved[2:])


@pytest.mark.parametrize("second", [0.75, torch.tensor(0.75)], ids=["number", "tensor"])
def test_named_tuples_are_saved_as_tuples(second):
    """`torch.load(weights_only=True)` knows no class of a user's."""
    constructed = train(ADAMW(parameters(), betas=Betas(0.5, second)), 1)
    later = ADAMW(parameters())
    later.param_groups[0]["betas"] = Betas(0.5, second)
    train(later, 1)
    noted = Betas(1, "of the user's")
    constructed.add_param_group({"params": parameters(seed=1), "noted": noted})
    assert constructed.param_groups[1]["noted"] is noted
    for optimizer in (constructed, copy.deepcopy(constructed), later):
        betas = saved_and_loaded(optimizer.state_dict())["param_groups"][0]["betas"]
        assert (type(betas), betas) == (tuple, (0.5, second))
    later.load_state_dict(later.state_dict())
    assert type(later.param_groups[0]["betas"]) is tuple


def test_a_group_whose_parameters_are_a_view_of_a_dict():
    optimizer, twin = (lowbit_optim.AdamW8bit(parameters()) for _ in range(2))
    given = dict(enumerate(all_parameters(optimizer)))
    optimizer.param_groups[0]["params"] = given.values()
    train(optimizer, 2)
    train(twin, 2)
    assert identical(snapshot(optimizer)["params"], snapshot(twin)["params"])
    assert optimizer.param_groups[0]["params"] == list(given.values())


@CLASSES
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 24), (torch.float64, 16)])
def test_frozen_parameters_have_no_master_weights(case, dtype, bits):
    """As the fp16 base of a model whose bf16 adapters are trained; it is refused once unfrozen."""
    trained, (frozen,) = parameters(torch.bfloat16), parameters(dtype, shapes=[(300,)])
    frozen.requires_grad_(False)
    optimizer = build(case, 8, [frozen, *trained], master_weight_bits=bits)
    give_gradients(trained, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    weights = dict(lowbit_optim.master_weights(optimizer))
    assert torch.equal(weights[0], frozen.to(weights[0].dtype))
    lowbit_optim.load_master_weights(optimizer, weights)
    assert set(optimizer.state) == set(trained)
    frozen.requires_grad_(True)
    assert refused_by_a_step(
        optimizer, f"master_weight_bits must be None or 'auto' for parameters of {dtype}"
    )


def test_state_of_a_parameter_that_is_quantized_now_is_taken_along():
    """It is frozen, and its `master_weight_bits` mean nothing any more."""
    options = {"master_weight_bits": 24}
    before = lowbit_optim.AdamW8bit(parameters(torch.bfloat16), **options)
    saved = train(before, 1).state_dict()
    shapes = [p.shape for p in parameters()]
    quantized = [torch.nn.Parameter(torch.zeros(n, dtype=torch.uint8), False) for n in shapes]
    after = lowbit_optim.AdamW8bit(quantized, **options)
    after.load_state_dict(saved)
    after.step()
    assert identical(after.state_dict()["state"], before.state_dict()["state"])


def test_bits_that_a_frozen_weight_has_not_are_refused_once_it_has_a_gradient():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
    optimizer = lowbit_optim.AdamW8bit([p], master_weight_bits=24)
    optimizer.step()
    p.grad = torch.ones_like(p)
    assert refused_by_a_step(optimizer, "master_weight_bits must be None or 'auto'")
