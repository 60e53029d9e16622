"""What LARS and LAMB do with settings of the trust ratio where there is none, and of the cap.

And that LARS goes on from the momentum of torch's SGD.
"""

import math
from types import SimpleNamespace

import pytest
import torch

import cases
import lowbit_optim
import reference
from lowbit_optim import LARS_PRESETS
from protocol import give_gradients, identical, parameters, snapshot, train

NEEDS_TRUST = {
    "LARS": {
        "eps": 1e-8, "trust_clip": True, "zero_norm": "denom", "adapt": "wd",
        "weight_norm_bounds": (0.0, 10.0),
    },
    "LAMB": {"weight_norm_bounds": (0.0, 10.0)},
}  # fmt: skip
IN_VAIN = [
    pytest.param(name, {}, argument, value, id=f"{name}-{argument}")
    for name, given in NEEDS_TRUST.items()
    for argument, value in given.items()
]
IN_VAIN += [
    pytest.param(name, {"trust_coefficient": 0.01}, "max_unorm", 0.5, id=f"{name}-max_unorm")
    for name in NEEDS_TRUST
]
CLASSES = pytest.mark.parametrize("variant", ["", "8bit", "32bit"])


def build(name, params, **options):
    return getattr(lowbit_optim, name)(params, **{"lr": 0.1, **options})


def opposite(options):
    """The same group with the trust ratio off where it is on, and on where it is off."""
    return {"trust_coefficient": None if "trust_coefficient" in options else 0.01}


@CLASSES
@pytest.mark.parametrize(("name", "options", "argument", "value"), IN_VAIN)
def test_a_setting_without_effect_is_refused_where_it_is_given(
    name, variant, options, argument, value
):
    name += variant
    with pytest.raises(ValueError, match=rf"{argument}.*trust_coefficient"):
        build(name, parameters(), **options, **{argument: value})
    with pytest.raises(ValueError, match=rf"{argument}.*trust_coefficient"):
        build(name, [{"params": parameters(), **options, argument: value}])
    optimizer = build(name, parameters(), **options)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"{argument}.*trust_coefficient"):
        optimizer.add_param_group({"params": parameters(), argument: value})
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize(("name", "options", "argument", "value"), IN_VAIN)
def test_a_group_that_turns_the_ratio_on_or_off_inherits_the_rest(name, options, argument, value):
    """And steps, saves, loads and moves to another optimizer with it."""
    a, b = parameters()
    groups = [{"params": [a]}, {"params": [b], **opposite(options)}]
    optimizer = train(build(name, groups, **options, **{argument: value}), 2)
    loaded = build(name, [{"params": [p]} for p in parameters()])
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, 1)
    assert loaded.param_groups[1]["trust_coefficient"] == opposite(options)["trust_coefficient"]
    copies = [{**group, "params": parameters()} for group in optimizer.param_groups]
    again = type(optimizer)(copies, **optimizer.defaults)
    assert len(again.param_groups) == 2


def test_a_subclass_with_its_own_arguments():
    class Mine(lowbit_optim.LARS8bit):
        def __init__(self, params):
            super().__init__(params, lr=0.1, momentum=0.9)

    optimizer = Mine(parameters())
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": parameters(), "eps": 1e-8})


@pytest.mark.parametrize("name", list(NEEDS_TRUST))
@pytest.mark.parametrize("cap", [0, 0.0])
def test_a_cap_of_zero_goes_with_a_trust_coefficient(name, cap):
    options = {"trust_coefficient": 0.01}
    build(name, parameters(), max_unorm=cap, **options)
    optimizer = build(name, parameters(), args=SimpleNamespace(max_unorm=cap), **options)
    optimizer.add_param_group({"params": parameters(), "max_unorm": cap})
    build(name, parameters(), **options)


def test_lars_reads_sgds_momentum():
    theirs = train(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), 2)
    ours = lowbit_optim.LARS8bit(parameters(), lr=0.1, momentum=0.9, min_8bit_size=1)
    ours.load_state_dict(theirs.state_dict())
    for state, read in zip(theirs.state.values(), ours.state.values(), strict=True):
        codes, scales = lowbit_optim.quantize_blockwise(state["momentum_buffer"])
        assert torch.equal(read["momentum_buffer"], codes)
        assert torch.equal(read["momentum_buffer_absmax"], scales)
    train(ours, 1)


def heavy_ball(p, gradients, rates, momentum, decay):
    """SGD whose momentum holds lr times gradient, as Keras' SGD has it; float64."""
    b = torch.zeros_like(p)
    for g, lr in zip(gradients, rates, strict=True):
        b = momentum * b + lr * (g + decay * p)
        p = p - b
    return p


@pytest.mark.parametrize("preset", ["mlperf", "paper"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.few_if_compiled("preset", "bits")
def test_mlperfs_skipped_tensors_are_momentum_sgd_with_lr_inside(engine, device, preset, bits):
    """While lr changes, which is where lr inside and outside momentum differ."""
    steps = 12 if engine != "triton" else 4
    tracks = [cases.Track((300,)), cases.Track((9, 40))]
    values, grads = cases.starts(tracks), cases.gradients(tracks, steps)
    rates = [0.01 * 10 ** math.cos(2 * t) for t in range(steps)]
    skipped, weight = cases.as_params(values, torch.float32, device)
    off = {"trust_coefficient": None, "max_unorm": 0.0, "weight_decay": 0.0}
    options = {"momentum": 0.9, "weight_decay": 0.1, **LARS_PRESETS[preset], "eps": 1e-7}
    cls = getattr(lowbit_optim, f"LARS{bits}bit")
    groups = [{"params": [weight]}, {"params": [skipped], **off}]
    optimizer = cls(groups, lr=1.0, min_8bit_size=1, **options)
    cases.walk(optimizer, [skipped, weight], grads, rates)
    want = heavy_ball(values[0], [row[0] for row in grads], rates, 0.9, 0.0)
    assert cases.distance(skipped, want) < (1e-5 if bits == 32 else 0.02)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"adapt": "wd", "skip_wd": True}, [0.1] * 4),
        ({"trust_clip": True, "zero_norm": "skip_wd"}, [2.0] * 4),  # 1 is clipped to 1 / lr
        ({"trust_clip": True}, [0.0, 0.0, 0.1, 0.1]),  # a momentum of gradients that move nothing
    ],
    ids=str,
)
def test_readings_that_only_some_learning_rates_or_decays_tell_apart(options, rates):
    options = {"momentum": 0.9, "trust_coefficient": 0.02, "weight_decay": 0.05, **options}
    tracks = [cases.TRACKS[name] for name in ("dense", "zero start", "zero gradient first")]
    values, grads = cases.starts(tracks), cases.gradients(tracks, len(rates))
    params = cases.as_params(values, torch.float64)
    cases.walk(lowbit_optim.LARS(params, lr=1.0, **options), params, grads, rates)

    def step(p, g, state, lr):
        return reference.lars(p, g, state, lr=lr, **options)

    wanted, _ = cases.walk_reference(step, values, grads, rates)
    for p, want in zip(params, wanted, strict=True):
        assert cases.distance(p, want) < 1e-12


def test_the_cap_counts_a_learning_rate_inside_momentum():
    """Then ||u|| has lr in it, and a step is at most max_unorm ||p|| long."""
    for lr, bound in ((10.0, 0.02), (1e-4, None)):
        (p,) = parameters(shapes=[(300,)])
        before = p.detach().clone()
        optimizer = lowbit_optim.LARS([p], lr=lr, scale_at="lr", momentum=0.9)
        give_gradients([p], 0)
        optimizer.step()
        want = lr * float(p.grad.norm()) if bound is None else bound * float(before.norm())
        assert float((p.detach() - before).norm()) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    ["SGD", "LARS", "Adam", "AdamW", "LAMB", "LANS", "ADOPT", "Lion", "RMSprop", "AdEMAMix", "Eve"],
)
def test_the_cap_counts_what_caution_leaves_of_an_update(name):
    """The last step goes against the momentum of every other element, which stays."""
    (p,) = parameters(shapes=[(300,)])
    options = {"momentum": 0.9} if name in ("SGD", "LARS", "RMSprop") else {}
    more = {"weight_decay": 0.0, "cautious": True, "args": SimpleNamespace(max_unorm=0.01)}
    optimizer = build(f"{name}32bit", [p], lr=1.0, **options, **more)
    for turned in (1.0, 1.0, -0.05):
        before = p.detach().clone()
        p.grad = torch.tensor([1.0, turned]).repeat(150)
        optimizer.step()
    moved = p.detach() - before
    assert (moved[1::2] == 0).all()
    assert float(moved.norm() / before.norm()) == pytest.approx(0.01, rel=1e-3)


def test_squares_whose_sum_is_beyond_fp32(engine, device):
    """So that the norm of large gradients is a number."""
    if engine == "triton":
        pytest.skip("a tile's sum is in fp32, tiles are added up in fp64")
    p = torch.nn.Parameter(torch.ones(4096, device=device))
    p.grad = torch.full_like(p, 1e18)
    lowbit_optim.LARS32bit([p], lr=0.1, trust_coefficient=1.0).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.9))


def test_a_bad_gradient_does_not_spoil_a_norm(engine, device):
    p = torch.nn.Parameter(torch.ones(300, device=device))
    p.grad = torch.ones_like(p)
    p.grad[0], p.grad[1] = math.nan, math.inf
    lowbit_optim.LARS32bit([p], lr=0.1, trust_coefficient=1.0).step()
    assert (p.detach()[2:] < 1).all()
