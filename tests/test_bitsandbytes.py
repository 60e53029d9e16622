"""Calls that were written for bitsandbytes: accepted with a warning, or refused with a hint."""

import inspect
import warnings

import pytest
import torch

import lowbit_optim.bitsandbytes
from protocol import ONE_PER_CLASS, parameters, train

SWITCHES = {"block_wise": False, "is_paged": True}
OF_CLASS = [
    pytest.param(f"{case.name}{variant}", switch, id=f"{case.name}{variant}-{switch}")
    for case in ONE_PER_CLASS
    for variant in ("", "8bit", "32bit")
    for switch in SWITCHES
    if switch in inspect.signature(getattr(lowbit_optim, case.name)).parameters
]


@pytest.mark.parametrize(("name", "switch"), OF_CLASS)
def test_a_switch_that_does_nothing_warns_once_where_it_was_given(name, switch):
    cls = getattr(lowbit_optim, name)
    with pytest.warns(UserWarning, match=f"{switch}={SWITCHES[switch]} has no effect") as caught:
        given = cls(parameters(), lr=1e-3, **{switch: SWITCHES[switch]})
    assert [warning.filename for warning in caught] == [__file__]
    plain = cls(parameters(), lr=1e-3, **{switch: not SWITCHES[switch]})
    for p, q in zip(*(train(o, 2).param_groups[0]["params"] for o in (given, plain)), strict=True):
        assert torch.equal(p, q)


def test_a_switch_in_args_warns_as_well():
    """bitsandbytes reads it there."""
    args, alone = {"optim_bits": 8, "block_wise": False}, {"block_wise": False}
    for module in (lowbit_optim, lowbit_optim.bitsandbytes.optim):
        for asked in (args, alone):
            with pytest.warns(UserWarning, match="block_wise=False has no effect") as caught:
                module.AdamW(parameters(), args=asked)
            assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.AdamW(parameters(), args={**args, "block_wise": True})


def test_the_warning_names_the_line_of_a_subclass():
    class Mine(lowbit_optim.AdamW8bit):
        def __init__(self, params):
            super().__init__(params, is_paged=True)

    with pytest.warns(UserWarning, match="is_paged") as caught:
        Mine(parameters())
    (warning,) = caught
    assert warning.filename == __file__
    assert warning.lineno == inspect.getsourcelines(Mine)[1] + 2


# bitsandbytes 0.50's positional order: `percentile_clipping` and `block_wise` are gone.

ADAM = (1e-3, (0.9, 0.999), 1e-8, 0.0, False, 32, None, 4096)
NEWER = [
    ("Adam", (*ADAM, False), "is_paged"),
    ("AdamW", (*ADAM, True), "is_paged"),
    ("AdamW8bit", (*ADAM[:5], 8, None, 4096, True), "is_paged"),
    ("Lion", (1e-4, (0.9, 0.99), 0.0, 32, None, 4096, True), "is_paged"),
    ("Lion8bit", (1e-4, (0.9, 0.99), 0.0, None, 4096, False), "is_paged"),
    ("LAMB", (1e-3, True, (0.9, 0.999), 1e-8, 0.0, False, True, 32, None, 4096, 1.0), "max_unorm"),
    ("LAMB8bit", (1e-3, True, (0.9, 0.999), 1e-8, 0.0, False, True, None, 4096, 0.5), "max_unorm"),
    ("LARS", (0.1, 0.9, 0.0, 0.0, False, 32, None, 4096, 0.02), "max_unorm"),
    ("LARS32bit", (0.1, 0.9, 0.0, 0.0, False, None, 4096, 0.02), "max_unorm"),
]


@pytest.mark.parametrize(("name", "arguments", "follower"), NEWER)
def test_a_call_in_the_order_of_0_50_is_recognised(name, arguments, follower):
    match = f"percentile_clipping must be .*got {arguments[-1]!r}; bitsandbytes 0.50 .*{follower}"
    with pytest.raises(ValueError, match=match):
        getattr(lowbit_optim, name)(parameters(), *arguments)


@pytest.mark.parametrize(("name", "arguments", "follower"), NEWER)
def test_the_order_of_0_49_is_accepted(name, arguments, follower):
    after = (100, True, False) if follower == "is_paged" else (100, True, 0.5)
    after = (100, 0.5) if name.startswith("LARS") else after
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = getattr(lowbit_optim, name)(parameters(), *arguments[:-1], *after)
    assert optimizer.defaults["percentile_clipping"] == 100
    assert optimizer.defaults["max_unorm"] == (0.5 if follower == "max_unorm" else 0.0)


@pytest.mark.parametrize("name", ["SGD", "SGD8bit", "SGD32bit"])
def test_sgd_has_torchs_learning_rate(name):
    ours, theirs = getattr(lowbit_optim, name)(parameters()), torch.optim.SGD(parameters())
    assert ours.defaults["lr"] == theirs.defaults["lr"]
    train(ours, 1)
    train(theirs, 1)
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q)
    with pytest.raises(TypeError, match="lr"):
        lowbit_optim.LARS(parameters())
