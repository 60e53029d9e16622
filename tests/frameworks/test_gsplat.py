"""Gaussian splatting: gsplat cuts and grows parameters, and their state with them."""

import math

import pytest
import torch
from gsplat import DefaultStrategy
from gsplat.strategy import ops

import lowbit_optim
from lowbit_optim import dequantize_state

WIDTH = 12  # pixels
RATES = {
    "means": 2e-3, "scales": 5e-3, "quats": 1e-3, "opacities": 5e-2, "sh0": 1e-2, "shN": 1e-3,
}  # fmt: skip


def splats(count=150):
    """Gaussians as gsplat's trainers have them, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    random = {
        "means": 2 * torch.rand(count, 3, generator=generator) - 1,
        "scales": torch.full((count, 3), math.log(0.2)),
        "quats": torch.randn(count, 4, generator=generator),
        "opacities": torch.full((count,), -2.0),
        "sh0": 0.3 * torch.randn(count, 1, 3, generator=generator),
        "shN": torch.zeros(count, 15, 3),
    }
    return torch.nn.ParameterDict(random)


def pixels():
    line = torch.linspace(-1, 1, WIDTH)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], -1).view(-1, 2)


def image():
    x, y = pixels().unbind(1)
    return torch.stack([(4 * x).sin() * y, (5 * y).cos(), x * y], 1) / 2 + 0.5


def render(splats):
    """A sum of flat ellipses, in place of gsplat's rasterizer, which needs a GPU."""
    means2d = splats["means"][None, :, :2] * 1.0
    means = means2d[0]
    away = pixels()[:, None] - means
    angle = torch.atan2(splats["quats"][:, 1], splats["quats"][:, 0])
    along = away[..., 0] * angle.cos() + away[..., 1] * angle.sin()
    across = away[..., 1] * angle.cos() - away[..., 0] * angle.sin()
    sizes = splats["scales"].exp()
    squares = (along / sizes[:, 0]).square() + (across / sizes[:, 1]).square()
    weights = (-squares / 2).exp() * splats["opacities"].sigmoid()
    colours = 0.5 + 0.3 * splats["sh0"][:, 0] + 0.1 * splats["shN"].sum(1)
    info = {
        "means2d": means2d, "width": WIDTH, "height": WIDTH, "n_cameras": 1, "gaussian_ids": None,
        "radii": torch.ones(1, len(means), 2, dtype=torch.int32),
    }  # fmt: skip
    return weights @ colours, info


def fit(build, steps=151):
    """Gaussians after some steps, in which they are duplicated, split and removed, and the loss."""
    torch.manual_seed(0)
    params = splats()
    optimizers = {
        name: build([{"params": [p], "lr": RATES[name]}], eps=1e-15) for name, p in params.items()
    }
    strategy = DefaultStrategy(refine_start_iter=10, refine_every=50, grow_grad2d=2e-4)
    strategy.check_sanity(params, optimizers)
    state = strategy.initialize_state()
    for step in range(steps):
        rendered, info = render(params)
        strategy.step_pre_backward(params, optimizers, state, step, info)
        loss = (rendered - image()).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
            if build is not torch.optim.Adam and step % strategy.refine_every == 0:
                dequantize_state(optimizer)
        strategy.step_post_backward(params, optimizers, state, step, info)
    return params, optimizers, loss.item()


@pytest.fixture(scope="module")
def fit_by_torch():
    return fit(torch.optim.Adam)


@pytest.mark.parametrize("state_format", ["dynamic8", "ratio8"])
def test_fits_as_torch_does(state_format, fit_by_torch):
    def build(params, **options):
        kept = {"state_format": state_format, "min_8bit_size": 1}
        return lowbit_optim.Adam8bit(params, **kept, **options)

    params, optimizers, loss = fit(build)
    theirs, _, wanted = fit_by_torch
    before, count, other = len(splats()["means"]), len(params["means"]), len(theirs["means"])
    assert other > 1.2 * before
    assert abs(count - other) < 0.1 * other
    assert loss < 1.5 * wanted
    for name, optimizer in optimizers.items():
        (state,) = optimizer.state.values()
        assert {x.shape for key, x in state.items() if key.startswith("exp_avg")} >= {
            params[name].shape
        }


def test_codes_that_gsplat_has_cut_are_refused():
    params = splats()
    optimizers = {name: lowbit_optim.Adam8bit([p]) for name, p in params.items()}
    loss = (render(params)[0] - image()).square().mean()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    state = {"grad2d": torch.zeros(len(params["means"]))}
    mask = torch.arange(len(params["means"])) % 3 == 0
    ops.duplicate(params, optimizers, state, mask)
    (render(params)[0] - image()).square().mean().backward()
    with pytest.raises(ValueError, match=r"does not fit Adam8bit: 'exp_avg' is torch\.float32"):
        optimizers["shN"].step()
