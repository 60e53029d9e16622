"""Schedule-Free AdamW's modes, and what it keeps beside moments; its numbers are cases."""

import copy
import pickle

import pytest
import torch

import lowbit_optim
import reference
from protocol import identical, train

SHAPES = [(64, 70), (300,), (5,)]
FEW_ROWS = [(3, 70), (300,), (5,)]  # for Triton's interpreter


def build(bits=8, dtype=torch.float32, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    cls = getattr(lowbit_optim, f"ScheduleFreeAdamW{bits}bit")
    return params, cls(params, **{"lr": 0.01, "min_8bit_size": 1, **options})


COPIES = {
    "itself": lambda x: x,
    "copied": copy.deepcopy,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("back", [False, True])
def test_a_switch_that_is_interrupted_can_be_repeated(copied, back, monkeypatch):
    params, optimizer = build()
    twins, twin = build()
    for one in (optimizer, twin):
        train(one, 3)
    lerp, calls = torch.Tensor.lerp, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return lerp(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "lerp", failing)
        with pytest.raises(MemoryError):
            optimizer.eval()
    params, optimizer = COPIES[copied]((params, optimizer))
    with pytest.raises(RuntimeError, match="in eval mode"):
        train(optimizer, 1)
    with pytest.raises(RuntimeError, match="did not come to its end"):
        optimizer.state_dict()
    for p in params:
        p.grad = None
    if not back:
        optimizer.eval()
        twin.eval()
        assert identical(params, twins)
    optimizer.train()
    twin.train()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    train(optimizer, 1)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("weight_lr_power", [0.0, 2.0])
@pytest.mark.few("engine", "bits", "weight_lr_power")
def test_eval_is_the_weighted_average_of_z(engine, bits, weight_lr_power):
    shapes, steps = (FEW_ROWS, 4) if engine == "triton" else (SHAPES, 8)
    with lowbit_optim.use_engine(engine):
        params, optimizer = build(bits, shapes=shapes, weight_lr_power=weight_lr_power)
        total, average = 0.0, [torch.zeros(s, dtype=torch.float64) for s in shapes]
        largest = 0.0
        for t in range(steps):
            lr = optimizer.param_groups[0]["lr"] = 0.01 * (1 + t % 3)
            train(optimizer, 1)
            largest = max(largest, lr)
            weight = largest**weight_lr_power
            total += weight
            for x, p in zip(average, params, strict=True):
                x.add_(optimizer.state[p]["z"].double(), alpha=weight)
        optimizer.eval()
    for x, p in zip(average, params, strict=True):
        torch.testing.assert_close(p.double(), x / total, rtol=1e-5, atol=1e-6)
        state = optimizer.state[p]
        assert state["weight_sum"].dtype == torch.float64
        assert state["weight_sum"].item() == pytest.approx(total, rel=1e-12)
        assert state["lr_max"].item() == largest


def test_modes_and_back(engine):
    with lowbit_optim.use_engine(engine):
        params, optimizer = build(shapes=FEW_ROWS)
        before = [p.detach().clone() for p in params]
        optimizer.eval()
        optimizer.train()
        assert identical(before, [p.detach() for p in params]), "y = x = z before the first step"
        train(optimizer, 3)
        at = [p.detach().clone() for p in params]
        optimizer.train()
        assert identical(at, [p.detach() for p in params])
        optimizer.eval()
        there = [p.detach().clone() for p in params]
        assert not identical(at, there)
        optimizer.eval()
        assert identical(there, [p.detach() for p in params])
        optimizer.train()
    for p, y in zip(params, at, strict=True):
        torch.testing.assert_close(p.detach(), y, rtol=1e-6, atol=1e-6)


def test_a_step_in_eval_mode_raises_and_changes_nothing():
    params, optimizer = build()
    train(optimizer, 2)
    optimizer.eval()
    before, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"step in eval mode.*train\(\)"):
        optimizer.step()
    assert identical(before, [p.detach() for p in params])
    assert identical(state, optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert optimizer.param_groups[1]["train_mode"] is False, "the mode of the others"


@pytest.mark.parametrize("released", [True, False])
def test_no_parameter_is_stepped_by_itself_in_eval_mode(released):
    (p, *_), optimizer = build()
    handle = lowbit_optim.release_gradients(optimizer, bucket_bytes=0) if released else None
    optimizer.eval()
    before = p.detach().clone()
    p.grad = None if released else torch.ones_like(p)
    step = p.sum().backward if released else lambda: optimizer.step_parameter(p)
    with pytest.raises(RuntimeError, match="in eval mode"):
        step()
    assert torch.equal(p, before)
    if handle is not None:
        handle.remove()


def test_a_checkpoint_has_the_mode_and_what_lasts(tmp_path):
    params, optimizer = build()
    train(optimizer, 3)
    optimizer.eval()
    torch.save([[p.detach() for p in params], optimizer.state_dict()], tmp_path / "saved.pt")
    weights, saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    others, other = build()
    for p, x in zip(others, weights, strict=True):
        p.data.copy_(x)
    other.load_state_dict(saved)
    assert other.param_groups[0]["train_mode"] is False
    for one in (optimizer, other):
        one.train()
        train(one, 3)
    assert identical([p.detach() for p in params], [p.detach() for p in others])
    assert identical(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("key", ["weight_sum", "lr_max", "z"])
def test_a_checkpoint_without_what_lasts_is_refused(key):
    _, optimizer = build()
    train(optimizer, 1)
    saved = optimizer.state_dict()
    del saved["state"][1][key]
    with pytest.raises(ValueError, match=f"parameter 1 of shape.*has no '{key}'"):
        build()[1].load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["state"][1]["weight_sum"] = torch.tensor(-1.0)
    with pytest.raises(ValueError, match="'weight_sum' must hold numbers >= 0 that are finite"):
        build()[1].load_state_dict(saved)


@pytest.mark.parametrize("weight_lr_power", [0.0, 2.0])
def test_first_steps_without_a_learning_rate(engine, weight_lr_power):
    """They weigh nothing, or to the power of 0 as much as any."""
    with lowbit_optim.use_engine(engine):
        (p,), optimizer = build(32, shapes=[(5,)], weight_lr_power=weight_lr_power)
        want, state = p.detach().double(), {}
        for lr in (0.0, 0.0, 0.1, 0.1):
            optimizer.param_groups[0]["lr"] = lr
            train(optimizer, 1)
            want = reference.schedule_free_adamw(
                want, p.grad.double(), state, lr=lr, weight_lr_power=weight_lr_power
            )
    torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[p]["weight_sum"]) == pytest.approx(state["weight_sum"])


def test_an_overflowed_step_adds_no_weight(engine):
    with lowbit_optim.use_engine(engine):
        params, optimizer = build(shapes=FEW_ROWS)
        train(optimizer, 2)
        before = copy.deepcopy(optimizer.state_dict())
        for p in params:
            p.grad = torch.full_like(p, float("inf"))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        optimizer.step()
    assert identical(before, optimizer.state_dict())


def test_bf16_parameters_keep_z_in_fp32():
    params, optimizer = build(dtype=torch.bfloat16)
    train(optimizer, 2)
    assert all(optimizer.state[p]["z"].dtype == torch.float32 for p in params)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [("float32", "float64"), ("bfloat16", "float64"), ("float64", "float32"), ("float64", "half")],
)
def test_modes_of_a_model_that_was_cast(before, after, bits, inference):
    """State follows at the next step, and before it, where the mode changes first."""
    params, optimizer = build(bits, getattr(torch, before))
    train(optimizer, 3)
    for p in params:
        p.grad, p.data = None, p.data.to(getattr(torch, after))
    y, z = [p.detach().clone() for p in params], [optimizer.state[p]["z"] for p in params]
    with torch.inference_mode(inference):
        optimizer.eval()
    for p, *points in zip(params, y, z, strict=True):
        wide, near = (x.to(torch.float64) for x in points)
        x = wide.lerp(near, 1 - 1 / 0.9)
        torch.testing.assert_close(p.double(), x, rtol=2e-3 if after == "half" else 1e-6, atol=1e-6)
    optimizer.train()
    train(optimizer, 2, first=3)


def test_bits_that_were_asked_for_before_a_switch_in_inference_mode():
    params, optimizer = build(dtype=torch.bfloat16)
    train(optimizer, 2)
    optimizer.param_groups[0]["master_weight_bits"] = 24
    with torch.inference_mode():
        optimizer.eval()
    assert all("master_residual" in optimizer.state[p] for p in params)
    optimizer.train()
    train(optimizer, 1)


@pytest.mark.parametrize(("bits", "rounding"), [(24, 2.0**-16), (32, 2.0**-22)])
def test_modes_keep_the_bits_beside_bf16_parameters(bits, rounding):
    params, optimizer = build(dtype=torch.bfloat16, master_weight_bits=bits)
    train(optimizer, 5)
    y = dict(lowbit_optim.master_weights(optimizer))
    optimizer.eval()
    x = dict(lowbit_optim.master_weights(optimizer))
    for i, p in enumerate(params):
        z = optimizer.state[p]["z"]
        torch.testing.assert_close(y[i], x[i].lerp(z, 0.1), rtol=2 * rounding, atol=rounding)
        assert ((x[i] - p).abs() <= 2.0**-8 * x[i].abs()).all(), "p is x, rounded to bf16"
    optimizer.train()
    for i, weight in lowbit_optim.master_weights(optimizer):
        torch.testing.assert_close(weight, y[i], rtol=3 * rounding, atol=rounding)


def test_the_reference_is_the_paper():
    """y of the reference is that of the paper's own three sequences."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(6, generator=generator).double()
    betas, lr = (0.9, 0.99), 0.1
    beta1, beta2 = betas
    p, state = y.clone(), {}
    x = z = y
    v, total = torch.zeros_like(y), 0.0
    for t in range(1, 6):
        g = torch.randn(6, generator=generator).double()
        p = reference.schedule_free_adamw(p, g, state, lr=lr, betas=betas, weight_decay=0.1)
        v = beta2 * v + (1 - beta2) * g * g
        y = beta1 * x + (1 - beta1) * z
        z = z - lr * (g / ((v / (1 - beta2**t)).sqrt() + 1e-8) + 0.1 * y)
        total += lr**2
        x = x + lr**2 / total * (z - x)
        torch.testing.assert_close(p, beta1 * x + (1 - beta1) * z)


def test_a_parameter_that_is_listed_twice_is_switched_once():
    ends = []
    for times in (1, 2):
        params, optimizer = build(shapes=[(300,)])
        train(optimizer, 3)
        optimizer.param_groups[0]["params"] *= times
        optimizer.eval()
        ends.append(params[0].detach().clone())
        optimizer.train()
        ends.append(params[0].detach().clone())
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
    assert not torch.equal(ends[0], ends[1])


def test_a_state_dict_that_does_not_say_the_mode_changes_none():
    """As one that a script has cut down to torch's keys."""
    _, optimizer = build()
    train(optimizer, 1)
    optimizer.eval()
    saved = optimizer.state_dict()
    mode = {key: saved["param_groups"][0].pop(key) for key in optimizer.FIXED}
    optimizer.load_state_dict(saved)
    assert mode.items() <= optimizer.param_groups[0].items()
    optimizer.train()
    train(optimizer, 1)
