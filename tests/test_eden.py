"""The scheduler Eden."""

import copy
import io
import math

import numpy as np
import pytest
import torch

from lowbit_optim import SGD, AdamW8bit
from lowbit_optim._eden import Eden


def optimizer(lr=0.1, **options):
    return SGD([torch.nn.Parameter(torch.ones(3))], lr=lr, **options)


def formula(base, b, e, big_b, big_e, warmup=1.0):
    by_batch = ((b**2 + big_b**2) / big_b**2) ** -0.25
    return base * by_batch * ((e**2 + big_e**2) / big_e**2) ** -0.25 * warmup


def test_the_rate_follows_the_formula():
    o = optimizer()
    scheduler = Eden(o, lr_batches=50, lr_epochs=2)
    for epoch in range(5):
        scheduler.step_epoch(epoch)
        for _ in range(30):
            b = scheduler.batch
            want = formula(0.1, b, epoch, 50, 2)
            assert o.param_groups[0]["lr"] == pytest.approx(want, rel=1e-14)
            assert scheduler.get_last_lr() == [o.param_groups[0]["lr"]]
            scheduler.step_batch()
    assert (scheduler.batch, scheduler.epoch) == (150, 4)
    assert o.param_groups[0]["initial_lr"] == 0.1


def test_the_last_rate_is_valid_at_once():
    o = optimizer()
    assert Eden(o, 50, 2).get_last_lr() == [0.1]
    warm = Eden(o, 50, 2, warmup_batches=10, warmup_start=0.3)
    assert warm.get_last_lr() == [pytest.approx(0.03)]
    assert o.param_groups[0]["lr"] == pytest.approx(0.03)


@pytest.mark.parametrize(("length", "start"), [(10, 0.5), (10, 0.0), (7.5, 0.2), (10, 1.0)])
def test_warm_up_is_linear_in_batches(length, start):
    o = optimizer()
    scheduler = Eden(o, 50, 2, warmup_batches=length, warmup_start=start)
    for b in range(20):
        warmup = min(1.0, start + (1 - start) * b / length)
        assert o.param_groups[0]["lr"] == pytest.approx(formula(0.1, b, 0, 50, 2, warmup))
        scheduler.step_batch()


def test_counts_may_be_given():
    o = optimizer()
    scheduler = Eden(o, 50, 2)
    scheduler.step_batch(120)
    scheduler.step_epoch(3)
    assert o.param_groups[0]["lr"] == pytest.approx(formula(0.1, 120, 3, 50, 2))
    scheduler.step_batch()
    scheduler.step_epoch()
    assert o.param_groups[0]["lr"] == pytest.approx(formula(0.1, 121, 4, 50, 2))
    scheduler.step_batch(0)
    scheduler.step_epoch(0)
    assert o.param_groups[0]["lr"] == 0.1
    for name, step in (("batch", scheduler.step_batch), ("epoch", scheduler.step_epoch)):
        for value in (-1, math.nan):
            with pytest.raises(ValueError, match=name):
                step(value)
    assert o.param_groups[0]["lr"] == 0.1


def test_every_group_has_its_base_also_one_added_later():
    a, b, c = (torch.nn.Parameter(torch.ones(3)) for _ in "abc")
    o = AdamW8bit([{"params": [a]}, {"params": [b], "lr": 0.5, "initial_lr": 0.4}], lr=0.1)
    scheduler = Eden(o, 50, 2)
    assert scheduler.get_last_lr() == [0.1, 0.4]
    scheduler.step_batch(100)
    o.add_param_group({"params": [c], "lr": 2.0})
    scheduler.step_batch(100)
    want = [formula(base, 100, 0, 50, 2) for base in (0.1, 0.4, 2.0)]
    assert scheduler.get_last_lr() == pytest.approx(want)
    assert [group["lr"] for group in o.param_groups] == scheduler.get_last_lr()


def test_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.1, dtype=torch.float64)
    o = optimizer(lr=rate)
    scheduler = Eden(o, 50, 2)
    scheduler.step_batch(100)
    assert o.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(formula(0.1, 100, 0, 50, 2))
    assert scheduler.state_dict() == {"batch": 100, "epoch": 0, "base_lrs": [0.1]}


def test_any_torch_optimizer():
    o = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    Eden(o, 50, 2).step_batch(100)
    assert o.param_groups[0]["lr"] == pytest.approx(formula(0.1, 100, 0, 50, 2))


def test_numpy_counts_and_settings_leave_pythons_numbers():
    """As torch.load(weights_only=True) reads them, which refuses NumPy's."""
    o = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    scheduler = Eden(o, lr_batches=np.float32(50), lr_epochs=np.int64(2))
    scheduler.step_batch(np.int64(100))
    assert [type(x) for x in (o.param_groups[0]["lr"], *scheduler.get_last_lr())] == [float] * 2
    assert o.param_groups[0]["lr"] == pytest.approx(formula(0.1, 100, 0, 50, 2))


def saved_and_loaded(tree):
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_counts_beyond_all_training_end_in_a_rate_of_0():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(3))], lr=2.0)
    eden = Eden(optimizer, lr_batches=1e-300, lr_epochs=6)
    eden.step_batch(1e200)
    assert eden.get_last_lr() == [0.0]
    eden.load_state_dict({"batch": 0, "epoch": 1e200, "base_lrs": [3.0]})
    assert optimizer.param_groups[0]["lr"] == 0.0
    eden.step_epoch(0)
    assert eden.get_last_lr() == [3.0]


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resume(optimizer_first):
    """Whichever is loaded first, and constructed on a fresh or on a loaded optimizer."""
    o = optimizer()
    scheduler = Eden(o, 50, 2, warmup_batches=40)
    scheduler.step_epoch(1)
    scheduler.step_batch(30)
    saved = saved_and_loaded({"o": o.state_dict(), "s": scheduler.state_dict()})
    other = optimizer(lr=0.7)
    if optimizer_first:
        other.load_state_dict(saved["o"])
    resumed = Eden(other, 50, 2, warmup_batches=40)
    resumed.load_state_dict(saved["s"])
    if not optimizer_first:
        other.load_state_dict(saved["o"])
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    for _ in range(30):
        assert other.param_groups[0]["lr"] == o.param_groups[0]["lr"]
        scheduler.step_batch()
        resumed.step_batch()
    assert resumed.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_run_of_icefalls_zipformer_recipe_goes_on(optimizer_first):
    """Its scheduler saves no bases, and its groups have them as `base_lr`."""
    o = optimizer()
    saved = o.state_dict()
    saved["param_groups"][0].update(base_lr=0.1, lr=0.02)  # which has fallen since
    if optimizer_first:
        o.load_state_dict(saved)
    scheduler = Eden(o, 50, 2)
    if not optimizer_first:
        o.load_state_dict(saved)
    scheduler.load_state_dict({"batch": 30, "epoch": 1})
    assert scheduler.get_last_lr() == [pytest.approx(formula(0.1, 30, 1, 50, 2), rel=1e-14)]


def test_a_state_that_does_not_fit_changes_nothing():
    o = optimizer()
    scheduler = Eden(o, 50, 2)
    scheduler.step_batch(7)
    before = copy.deepcopy((scheduler.state_dict(), scheduler.get_last_lr(), o.param_groups))
    good = scheduler.state_dict()
    for bad, name in (
        ({}, "batch"),
        ({**good, "base_lrs": [0.1, 0.2]}, "base_lrs"),
        ({**good, "base_lrs": [-0.1]}, "base_lrs"),
        ({**good, "base_lrs": {0.1: 0}}, "base_lrs must be numbers in a list"),
        ({**good, "base_lrs": iter([0.1])}, "base_lrs must be numbers in a list"),
        ({**good, "batch": -1}, "batch"),
        ({key: good[key] for key in ("batch", "base_lrs")}, "epoch"),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            scheduler.load_state_dict(bad)
    after = (scheduler.state_dict(), scheduler.get_last_lr(), o.param_groups)
    assert repr(after) == repr(before)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr_batches", (0, -5, math.nan, math.inf)),
        ("lr_epochs", (0, -0.5, math.nan)),
        ("warmup_batches", (-1, math.inf)),
        ("warmup_start", (-0.1, 1.1)),
    ],
)
def test_bad_arguments_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            Eden(optimizer(), **{"lr_batches": 50, "lr_epochs": 2, name: value})
    with pytest.raises(TypeError, match=name):
        Eden(optimizer(), **{"lr_batches": 50, "lr_epochs": 2, name: "5"})


@pytest.mark.parametrize("other", [None, 3, torch.nn.Linear(2, 2), SGD], ids=str)
def test_what_is_no_optimizer_is_refused(other):
    with pytest.raises(TypeError, match="optimizer"):
        Eden(other, 50, 2)
