"""LAMB, LANS, Lion, RMSprop, Adagrad, AdEMAMix, Eve: what is theirs alone.

Their trajectories are rows of `cases.py`; here are signatures, refusals, presets and edges.
"""

import inspect

import pytest
import torch

import lowbit_optim

NAMES = ("LAMB", "LANS", "Lion", "RMSprop", "Adagrad", "AdEMAMix", "Eve")
CLASSES = pytest.mark.parametrize("name", NAMES)
BITS = pytest.mark.parametrize("bits", [8, 32])
LAST = "min_8bit_size percentile_clipping block_wise"

# bitsandbytes 0.49's order for the classes that it has.
POSITIONAL = {
    "LAMB": "lr bias_correction betas eps weight_decay amsgrad adam_w_mode optim_bits args "
    f"{LAST} max_unorm",
    "Lion": f"lr betas weight_decay optim_bits args {LAST} is_paged",
    "RMSprop": f"lr alpha eps weight_decay momentum centered optim_bits args {LAST}",
    "Adagrad": f"lr lr_decay weight_decay initial_accumulator_value eps optim_bits args {LAST}",
    "AdEMAMix": "lr betas alpha t_alpha t_beta3 eps weight_decay optim_bits min_8bit_size is_paged",
    "LANS": "lr betas eps weight_decay lower_bound upper_bound clip_gradient",
    "Eve": "lr betas eps weight_decay target_rms",
}
KEYS = {
    "LAMB": {"exp_avg", "exp_avg_sq"},
    "LANS": {"exp_avg", "exp_avg_sq"},
    "Lion": {"exp_avg"},
    "RMSprop": {"square_avg"},
    "Adagrad": {"sum"},
    "AdEMAMix": {"exp_avg", "exp_avg_slow", "exp_avg_sq"},
    "Eve": {"exp_avg", "exp_avg_sq"},
}
VARIANTS = [
    ("LAMB", {"weight_decay": 0.1}),
    ("LAMB", {"weight_decay": 0.1, "trust_coefficient": 1.0, "amsgrad": True}),
    ("LAMB", {"weight_decay": 0.1, "adam_w_mode": False, "eps": 0.0}),
    ("LANS", {"weight_decay": 0.1}),
    ("LANS", {"eps": 0.0, "clip_gradient": 0.1, "max_unorm": 0.1}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"weight_decay": 0.1, "centered": True, "momentum": 0.9}),
    ("RMSprop", {"eps": 0.0}),
    ("Adagrad", {"eps": 0.0}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1, "max_unorm": 0.1}),
    ("AdEMAMix", {"t_alpha": 5, "t_beta3": 5}),
    ("AdEMAMix", {"betas": (0.0, 0.9, 0.99), "t_beta3": 5, "eps": 0.0}),
    ("Eve", {}),
    ("Eve", {"eps": 0.0, "max_unorm": 0.1}),
]
BY_VARIANT = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def optimizer_class(name, bits=""):
    return getattr(lowbit_optim, f"{name}{bits}bit" if bits else name)


def parameter(shape=(300,), seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))


def stepped(name, options, grads, bits=32, p=None):
    """The parameter and the optimizer after a step on each gradient."""
    p = parameter() if p is None else p
    optimizer = optimizer_class(name, bits)([p], **{"lr": 0.01, "min_8bit_size": 1, **options})
    for g in grads:
        p.grad = g.to(p)
        optimizer.step()
    return p, optimizer


def gradient(seed, shape=(300,)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@CLASSES
@pytest.mark.parametrize("bits", ["", 8, 32])
def test_positional_order(name, bits):
    order = POSITIONAL[name].split()
    if bits and name != "Adagrad":
        order = [argument for argument in order if argument != "optim_bits"]
    parameters = inspect.signature(optimizer_class(name, bits).__init__).parameters.values()
    got = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert got == ["self", "params", *order]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords >= {"maximize", "foreach", "capturable", "differentiable", "fused"}
    assert {"percentile_clipping", "max_unorm", "args"} <= keywords | set(order)


@CLASSES
def test_bits(name):
    big = parameter((64, 65))
    for optimizer, dtype in (
        (optimizer_class(name)([big]), torch.float32),
        (optimizer_class(name)([big], optim_bits=8), torch.uint8),
        (optimizer_class(name, 8)([big]), torch.uint8),
        (optimizer_class(name, 32)([big]), torch.float32),
        (optimizer_class(name, 8)([big], min_8bit_size=5000), torch.float32),
    ):
        big.grad = gradient(0, big.shape)
        optimizer.step()
        state = {key for key in optimizer.state[big] if key != "step"}
        assert {key for key in state if not key.endswith("_absmax")} == KEYS[name]
        assert {optimizer.state[big][key].dtype for key in KEYS[name]} == {dtype}
        assert (f"{min(KEYS[name])}_absmax" in state) == (dtype == torch.uint8)


BAD = [
    ("LAMB", "bias_correction", 1, TypeError),
    ("LAMB", "amsgrad", None, TypeError),
    ("LAMB", "adam_w_mode", "yes", TypeError),
    ("LAMB", "trust_coefficient", -1.0, ValueError),
    ("LAMB", "weight_norm_bounds", (2.0, 1.0), ValueError),
    ("LAMB", "block_wise", None, TypeError),
    ("LAMB", "max_unorm", -0.1, ValueError),
    ("LANS", "lower_bound", -1.0, ValueError),
    ("LANS", "upper_bound", float("inf"), ValueError),
    ("LANS", "clip_gradient", 0.0, ValueError),
    ("LANS", "clip_gradient", float("nan"), ValueError),
    ("Lion", "betas", (0.9, 1.0), ValueError),
    ("Lion", "betas", (0.9,), ValueError),
    ("Lion", "is_paged", None, TypeError),
    ("RMSprop", "alpha", 1.0, ValueError),
    ("RMSprop", "alpha", -0.1, ValueError),
    ("RMSprop", "momentum", -0.1, ValueError),
    ("RMSprop", "centered", 1, TypeError),
    ("Adagrad", "lr_decay", -1, ValueError),
    ("Adagrad", "initial_accumulator_value", -0.1, ValueError),
    ("Adagrad", "initial_accumulator_value", float("inf"), ValueError),
    ("AdEMAMix", "betas", (0.9, 0.999), ValueError),
    ("AdEMAMix", "alpha", -1.0, ValueError),
    ("AdEMAMix", "t_alpha", 0, ValueError),
    ("AdEMAMix", "t_beta3", 1.5, ValueError),
    ("AdEMAMix", "is_paged", 1, TypeError),
    ("Eve", "target_rms", 0.0, ValueError),
    ("Eve", "target_rms", 10.5, ValueError),
    ("Eve", "target_rms", True, TypeError),
    ("Eve", "weight_decay", 1.5, ValueError),
]
BAD += [
    (name, argument, value, ValueError)
    for name in NAMES
    for argument, value in (
        ("lr", -1.0), ("lr", float("nan")), ("weight_decay", -0.1), ("optim_bits", 16),
        ("min_8bit_size", -1), ("percentile_clipping", 101), ("max_unorm", -1.0),
        ("differentiable", True),
    )
]  # fmt: skip
BAD += [(name, "eps", -1e-8, ValueError) for name in NAMES if name != "Lion"]


@pytest.mark.parametrize(("name", "argument", "value", "error"), BAD, ids=str)
def test_a_bad_argument_is_named(name, argument, value, error):
    with pytest.raises(error, match=argument):
        optimizer_class(name)([parameter()], **{argument: value})
    if argument not in ("block_wise", "is_paged"):
        with pytest.raises(error, match=argument):
            optimizer_class(name)([{"params": [parameter()], argument: value}])


def test_lans_refuses_bounds_out_of_order():
    with pytest.raises(ValueError, match=r"lower_bound=2\.0, upper_bound=1\.0"):
        lowbit_optim.LANS([parameter()], lower_bound=2.0, upper_bound=1.0)
    lowbit_optim.LANS([parameter()], lower_bound=1.0, upper_bound=1.0)


@BITS
@BY_VARIANT
@pytest.mark.few_if_interpreted("name", "bits")
@pytest.mark.few_if_compiled("bits", "options", "name")
def test_zero_gradient_and_zero_lr_move_nothing(engine, device, name, options, bits):
    """Fresh state, state with a history, and a parameter of zeros; eps = 0 too."""
    history = [gradient(1), gradient(2)]
    for warm_up, start in ((history, parameter), ([], parameter), ([], None)):
        p = torch.nn.Parameter(torch.zeros(300)) if start is None else start()
        p = torch.nn.Parameter(p.detach().to(device))
        p, optimizer = stepped(name, options, warm_up, bits, p)
        before = p.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(p, before)
        assert all(value.isfinite().all() for value in optimizer.state[p].values())


@BITS
@BY_VARIANT
@pytest.mark.few_if_interpreted("bits", "options", "name")
@pytest.mark.few_if_compiled("bits", "options", "name")
def test_a_bad_gradient_element_damages_only_itself(engine, device, name, options, bits):
    p = parameter(device=device)
    bad = gradient(1)
    bad[7], bad[9] = float("nan"), float("inf")
    p, optimizer = stepped(name, options, [gradient(2), bad, gradient(3)], bits, p)
    others = torch.ones(300, dtype=torch.bool, device=device)
    others[7] = others[9] = False
    assert p[others].isfinite().all()
    for value in optimizer.state[p].values():
        assert value[others if value.shape == p.shape else ...].isfinite().all()
        if bits == 32 and value.shape == p.shape:
            assert value[7].isnan()


@CLASSES
@BITS
@pytest.mark.few_if_interpreted("bits", "name")
@pytest.mark.few_if_compiled("bits", "name")
def test_max_unorm_bounds_the_update(engine, device, name, bits):
    options = {"max_unorm": 0.01, "lr": 0.1, "weight_decay": 0.0}
    p = parameter(device=device)
    before = p.detach().clone()
    stepped(name, options, [100 * gradient(1)], bits, p)
    assert float((p.detach() - before).norm() / before.norm()) == pytest.approx(0.001, rel=1e-4)


@BITS
@pytest.mark.parametrize("value", [0.1, 3])
def test_adagrad_starts_from_its_initial_value(engine, device, bits, value):
    """Codes 255 under a scale of `value` are exactly `value`."""
    for shape in ((300,), (5, 70), (), (0,)):
        p = parameter(shape, device=device)
        options = {"initial_accumulator_value": value}
        p, optimizer = stepped("Adagrad", options, [torch.zeros(shape)], bits, p)
        total = optimizer.state[p]["sum"]
        assert (total.dtype == torch.uint8) == (bits == 8 and p.numel() > 0)
        if total.dtype == torch.uint8:
            scales = optimizer.state[p]["sum_absmax"]
            total = lowbit_optim.dequantize_blockwise(total, scales, signed=False)
        assert torch.equal(total, torch.full_like(total, value))


def test_centered_rmsprop_in_8_bits_survives_a_constant_gradient(engine, device):
    """Then v - a^2 is all rounding; where it were zero, the step would be 1 / eps."""
    g = gradient(1) + 0.01 * gradient(2)
    grads = [g * (1 + 0.01 * (-1) ** t) for t in range(40 if engine != "triton" else 12)]
    options = {"centered": True, "alpha": 0.9, "lr": 1e-3}
    p, _ = stepped("RMSprop", options, grads, 8, parameter(device=device))
    q, _ = stepped("RMSprop", options, grads, 32, parameter(device=device))
    moved = (q - parameter(device=device)).abs().max()
    assert ((p - q).abs() < 0.3 * moved).all()  # of the weight that the variance's dither hits most
    assert moved < 10


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("coupled", [False, True])
def test_lamb_without_a_cap_is_adam(decay, coupled):
    """In every combination, AMSGrad included."""
    grads = [gradient(seed) for seed in range(5)]
    for amsgrad in (False, True):
        options = {"weight_decay": decay, "amsgrad": amsgrad}
        p, _ = stepped("LAMB", {**options, "max_unorm": 0.0, "adam_w_mode": not coupled}, grads)
        q, _ = stepped("Adam" if coupled else "AdamW", options, grads)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_lamb_moves_by_lr_times_the_norm(amsgrad):
    """Under the trust ratio ||dp|| = lr eta phi(||p||), whatever the gradient."""
    options = {"trust_coefficient": 0.5, "weight_decay": 0.1, "amsgrad": amsgrad, "lr": 0.02}
    for bounds, norm in ((None, None), ((0.0, 2.0), 2.0), ((100.0, 200.0), 100.0)):
        p = parameter()
        before = p.detach().clone()
        stepped("LAMB", {**options, "weight_norm_bounds": bounds}, [1e-3 * gradient(1)], p=p)
        expected = 0.02 * 0.5 * (float(before.norm()) if norm is None else norm)
        assert float((p.detach() - before).norm()) == pytest.approx(expected, rel=1e-5)


@BITS
@pytest.mark.few_if_interpreted
def test_lans_does_not_see_the_gradients_scale(engine, device, bits):
    steps = 3 if engine == "triton" else 6
    runs = []
    for scale in (1.0, 1e-8, 1e4):
        grads = [scale * gradient(seed) for seed in range(steps)]
        runs.append(stepped("LANS", {}, grads, bits, parameter(device=device))[0])
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runs[2], runs[0], rtol=1e-4, atol=1e-4)


def test_lion_leaves_weights_without_gradient_alone(engine, device):
    """bitsandbytes' 8-bit Lion moves them on CPUs: its code for zero is not zero."""
    masks = [gradient(seed) * (torch.arange(300) % 2) for seed in range(3)]
    p = parameter(device=device)
    before = p.detach().clone()
    stepped("Lion", {"weight_decay": 0.0}, masks, 8, p)
    assert torch.equal(p[::2], before[::2])
    assert (p[1::2] != before[1::2]).all()


@pytest.mark.parametrize("beta3", [0.9999, 0.8])
def test_ademamix_schedules_end_at_their_values(beta3):
    """After the warm-up a step is that of constant alpha and beta3; before it, it is not.

    Of a beta3 below beta1, too, where the half-life would go on to fall.
    """
    grads = [gradient(seed) for seed in range(6)]
    options = {"betas": (0.9, 0.999, beta3)}
    scheduled = {**options, "t_alpha": 4, "t_beta3": 4}
    p, optimizer = stepped("AdEMAMix", scheduled, grads[:4])
    q = torch.nn.Parameter(p.detach().clone())
    constant = optimizer_class("AdEMAMix", 32)([q], lr=0.01)
    state = optimizer.state_dict()
    state["param_groups"][0].update(t_alpha=None, t_beta3=None)
    constant.load_state_dict(state)
    for g in grads[4:]:
        p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        constant.step()
    assert torch.equal(p, q)
    assert not torch.equal(
        stepped("AdEMAMix", scheduled, grads)[0], stepped("AdEMAMix", options, grads)[0]
    )


def test_eve_decays_large_tensors_only(engine, device):
    zero = [torch.zeros(())]
    for value, count, decays in ((0.2, 300, True), (0.05, 300, False), (0.2, 1, False)):
        p = torch.nn.Parameter(torch.full((count,), value, device=device))
        before = p.detach().clone()
        stepped("Eve", {"weight_decay": 0.01}, [zero[0].expand(count)], 32, p)
        expected = before * (0.99 if decays else 1.0)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "switch", "key"),
    [
        ("RMSprop", {"centered": True}, "grad_avg"),
        ("RMSprop", {"momentum": 0.9}, "momentum_buffer"),
        ("LAMB", {"amsgrad": True}, "max_exp_avg_sq"),
    ],
)
@BITS
@pytest.mark.few
def test_an_option_may_be_switched_on_between_steps(name, switch, key, bits):
    p, optimizer = stepped(name, {}, [gradient(1)], bits)
    optimizer.param_groups[0].update(switch)
    p.grad = gradient(2)
    optimizer.step()
    assert optimizer.state[p][key].shape == p.shape
    assert p.isfinite().all()


@CLASSES
@BITS
def test_resume_is_bit_exact(name, bits):
    grads = [gradient(seed) for seed in range(4)]
    p, _ = stepped(name, {}, grads, bits)
    q, optimizer = stepped(name, {}, grads[:2], bits)
    r = torch.nn.Parameter(q.detach().clone())
    resumed = optimizer_class(name, bits)([r], lr=0.5, min_8bit_size=1)
    resumed.load_state_dict(optimizer.state_dict())
    for g in grads[2:]:
        r.grad = g
        resumed.step()
    assert torch.equal(p, r)


@BITS
def test_adagrad_shares_its_sums_between_processes(bits):
    """Also those that no step has made yet; and steps go on with what is shared."""
    grads = [gradient(seed) for seed in range(3)]
    p, _ = stepped("Adagrad", {}, grads, bits)
    q, optimizer = stepped("Adagrad", {}, [], bits)
    for g in grads:
        optimizer.share_memory()
        state = optimizer.state[q]
        shared = {key: x.data_ptr() for key, x in state.items() if x.is_shared()}
        assert shared.keys() == state.keys() - {"step"}
        q.grad = g.to(q)
        optimizer.step()
        assert optimizer.state[q] is state
        assert shared == {key: state[key].data_ptr() for key in shared}
    assert torch.equal(p, q)
