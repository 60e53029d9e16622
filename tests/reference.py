"""Naive optimizers in float64, one tensor at a time, written from the papers.

They import nothing from the package, so that sharing code cannot hide a wrong rule. Every function
has the shape `rule(p, g, state, *, lr, ...) -> new p`: `p` and `g` are float64 tensors, `state` is
a dict that starts empty and takes torch's names for what a step leaves (`exp_avg`, `step`...).
A signature of one argument a line would be longer than its rule; hence `fmt: skip`.
"""

import math

import numpy as np
import torch


def _clipped(g, state, t, percentile):
    """Scale g so that its norm is at most the given percentile of the last 100, from one not 0 on.

    The window is fp32 in every precision, and a norm is compared as it is recorded.
    """
    square = float(np.float32((g * g).sum()))
    if percentile >= 100 or (not square and "gnorm_vec" not in state):
        return g
    window = state.setdefault("gnorm_vec", [square] * 100)
    window[t % 100] = square
    limit, norm = math.sqrt(sorted(window)[percentile]), math.sqrt(square)
    return g * (limit / norm) if norm > limit else g


def _begin(g, state, maximize, percentile_clipping):
    """Count the step (from 1), flip the gradient, clip it."""
    t = state["step"] = state.get("step", 0) + 1
    return t, _clipped(-g if maximize else g, state, t, percentile_clipping)


def _ema(state, key, beta, value):
    """state[key] = beta state[key] + (1 - beta) value, from zero."""
    state[key] = beta * state.get(key, torch.zeros_like(value)) + (1 - beta) * value
    return state[key]


def _capped(u, p, max_unorm):
    """u min(1, max_unorm ||p|| / ||u||); 0 is off."""
    bound, norm = max_unorm * p.norm(), u.norm()
    return u * (bound / norm) if max_unorm > 0 and norm > bound else u


def _cautious(u, g, cautious):
    """Liang et al., arXiv:2411.16085, Alg. 1, with the least share of the authors' code."""
    agree = (u * g > 0).double()
    return u * agree / agree.mean().clamp(min=1e-3) if cautious else u


def _rms(x):
    return (x * x).mean().sqrt()


def _lars_trust(p, g, lr, decay, eta, eps, trust_clip, zero_norm, adapt, skip_wd, bounds):
    """The trust ratio tau and the weight decay wd of LARS, see docs/lars.md; `decay` is lambda."""
    wd = 0.0 if skip_wd else decay
    if eta is None or (adapt == "wd" and decay == 0):
        return 1.0, wd
    norm_p, norm_g = float(p.norm()), float(g.norm())
    low, high = bounds or (0.0, math.inf)
    top, bottom = min(max(norm_p, low), high), norm_g + decay * norm_p + eps
    degenerate = {
        "one": norm_p == 0 or norm_g == 0,
        "skip_wd": norm_p == 0 or norm_g == 0,
        "denom": norm_p == 0 or bottom == 0,
        "zero": False,
    }[zero_norm]
    tau = 1.0 if degenerate else (eta * top / bottom if bottom else 0.0)
    if degenerate and zero_norm == "skip_wd":
        return tau, 0.0
    if trust_clip:
        tau = min(tau / lr, 1.0) if lr else 1.0
    return tau, wd


def lars(p, g, state, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
         max_unorm=0.02, trust_coefficient=None, eps=0.0, trust_clip=False, scale_at="grad",
         zero_norm="one", adapt="always", skip_wd=False, weight_norm_bounds=None, maximize=False,
         percentile_clipping=100, cautious=False):  # fmt: skip
    """You, Gitman & Ginsburg, arXiv:1708.03888, in the readings that docs/lars.md lists."""
    _, g = _begin(g, state, maximize, percentile_clipping)
    trust = trust_coefficient, eps, trust_clip, zero_norm, adapt, skip_wd, weight_norm_bounds
    tau, wd = _lars_trust(p, g, lr, weight_decay, *trust)
    inner, outer = {"grad": (tau, lr), "update": (1.0, lr * tau), "lr": (lr * tau, 1.0)}[scale_at]
    d = u = inner * (g + wd * p)
    if momentum:
        first = "momentum_buffer" not in state
        b = d if first else momentum * state["momentum_buffer"] + (1 - dampening) * d
        state["momentum_buffer"] = b
        u = _cautious(d + momentum * b if nesterov else b, d, cautious)
    return p - outer * (_capped(u, p, max_unorm) if trust_coefficient is None else u)


def sgd(p, g, state, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
        max_unorm=0.0, maximize=False, percentile_clipping=100, cautious=False):  # fmt: skip
    """Sutskever et al., ICML 2013, in torch.optim.SGD's form."""
    _, g = _begin(g, state, maximize, percentile_clipping)
    d = u = g + weight_decay * p
    if momentum:
        first = "momentum_buffer" not in state
        b = d if first else momentum * state["momentum_buffer"] + (1 - dampening) * d
        state["momentum_buffer"] = b
        u = _cautious(d + momentum * b if nesterov else b, d, cautious)
    return p - lr * _capped(u, p, max_unorm)


def adam(p, g, state, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
         decoupled_weight_decay=False, max_unorm=0.0, maximize=False,
         percentile_clipping=100, cautious=False):  # fmt: skip
    """Kingma & Ba, arXiv:1412.6980, Alg. 1; AMSGrad: Reddi et al., arXiv:1904.09237, Alg. 2."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    decayed = p * (1 - lr * weight_decay) if decoupled_weight_decay else p
    if not decoupled_weight_decay:
        g = g + weight_decay * p
    m = _ema(state, "exp_avg", betas[0], g)
    v = _ema(state, "exp_avg_sq", betas[1], g * g)
    if amsgrad:
        v = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(v)), v)
        state["max_exp_avg_sq"] = v
    u = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return decayed - lr * _capped(_cautious(u, g, cautious), p, max_unorm)


def adamw(p, g, state, *, lr, weight_decay=0.01, **options):
    """Loshchilov & Hutter, arXiv:1711.05101, Alg. 2."""
    return adam(
        p, g, state, lr=lr, weight_decay=weight_decay, decoupled_weight_decay=True, **options
    )


def adopt(p, g, state, *, lr, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0, clip_exp=0.25,
          decoupled_weight_decay=False, max_unorm=0.0, maximize=False,
          percentile_clipping=100, cautious=False):  # fmt: skip
    """Taniguchi et al., arXiv:2411.02853, Alg. 2: x is bounded by (t - 1)^clip_exp."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    decayed = p * (1 - lr * weight_decay) if decoupled_weight_decay else p
    if not decoupled_weight_decay:
        g = g + weight_decay * p
    if t == 1:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), g * g
        return p
    x = g / state["exp_avg_sq"].sqrt().clamp(min=eps)
    if clip_exp is not None:
        x = x.clamp(-((t - 1) ** clip_exp), (t - 1) ** clip_exp)
    m = _ema(state, "exp_avg", betas[0], x)
    _ema(state, "exp_avg_sq", betas[1], g * g)
    return decayed - lr * _capped(_cautious(m, g, cautious), p, max_unorm)


def lamb(p, g, state, *, lr, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
         adam_w_mode=True, max_unorm=1.0, trust_coefficient=None, weight_norm_bounds=None,
         maximize=False, percentile_clipping=100, cautious=False):  # fmt: skip
    """You et al., arXiv:1904.00962, Alg. 2 (trust_coefficient), or bitsandbytes' cap on u."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    if not adam_w_mode:
        g, weight_decay = g + weight_decay * p, 0.0
    m = _ema(state, "exp_avg", betas[0], g)
    v = _ema(state, "exp_avg_sq", betas[1], g * g)
    if bias_correction:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    u = m / (v.sqrt() + eps)
    u = _cautious(u, g, cautious)
    if trust_coefficient is None:
        return p * (1 - lr * weight_decay) - lr * _capped(u, p, max_unorm)
    low, high = weight_norm_bounds or (0.0, math.inf)
    r = u + weight_decay * p
    top, bottom = min(max(float(p.norm()), low), high), float(r.norm())
    return p - lr * (trust_coefficient * top / bottom if top and bottom else 1.0) * r


def lans(p, g, state, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0,
         lower_bound=None, upper_bound=None, clip_gradient=None, maximize=False,
         cautious=False):  # fmt: skip
    """Zheng et al., arXiv:2006.13484, Alg. 2, with the options of MXNet's fused kernel."""
    t, g = _begin(g, state, maximize, 100)
    g = g / g.norm() if g.norm() > 0 else g
    if clip_gradient is not None:
        g = g.clamp(-clip_gradient, clip_gradient)
    m = _ema(state, "exp_avg", betas[0], g)
    v = _ema(state, "exp_avg_sq", betas[1], g * g)
    r1 = float(p.norm())
    r1 = r1 if lower_bound is None else max(r1, lower_bound)
    r1 = r1 if upper_bound is None else min(r1, upper_bound)
    denominator = (v / (1 - betas[1] ** t)).sqrt() + eps
    u_m = m / (1 - betas[0] ** t) / denominator + weight_decay * p
    u_g = g / denominator + weight_decay * p
    total = torch.zeros_like(p)
    for u, weight in ((u_m, betas[0]), (u_g, 1 - betas[0])):
        norm = float(u.norm())
        total = total + weight * (r1 / norm if r1 and norm else 1.0) * u
    return p - lr * _cautious(total, g, cautious)


def lion(p, g, state, *, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, max_unorm=0.0,
         maximize=False, percentile_clipping=100, cautious=False):  # fmt: skip
    """Chen et al., arXiv:2302.06675, Alg. 2."""
    _, g = _begin(g, state, maximize, percentile_clipping)
    m = state.get("exp_avg", torch.zeros_like(g))
    u = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    u = _cautious(u, g, cautious)
    _ema(state, "exp_avg", betas[1], g)
    return p * (1 - lr * weight_decay) - lr * _capped(u, p, max_unorm)


def rmsprop(p, g, state, *, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0,
            centered=False, max_unorm=0.0, maximize=False, percentile_clipping=100,
            cautious=False):  # fmt: skip
    """Tieleman & Hinton 2012, lecture 6.5; centered: Graves, arXiv:1308.0850, eq. 38 to 41."""
    _, g = _begin(g, state, maximize, percentile_clipping)
    g = g + weight_decay * p
    variance = _ema(state, "square_avg", alpha, g * g)
    if centered:
        variance = (variance - _ema(state, "grad_avg", alpha, g) ** 2).clamp(min=0)
    u = g / (variance.sqrt() + eps)
    if momentum:
        u = state["momentum_buffer"] = momentum * state.get("momentum_buffer", 0.0) + u
        u = _cautious(u, g, cautious)
    return p - lr * _capped(u, p, max_unorm)


def rmsprop_by_variance(p, g, state, **options):
    """Centered RMSprop that leaves `variance`, v - a^2, where the other leaves v: `square_avg`."""
    a = state.get("grad_avg", torch.zeros_like(g))
    state["square_avg"] = state.pop("variance", torch.zeros_like(g)) + a * a
    p = rmsprop(p, g, state, **options)
    state["variance"] = (state.pop("square_avg") - state["grad_avg"] ** 2).clamp(min=0)
    return p


def adagrad(p, g, state, *, lr=1e-2, lr_decay=0.0, weight_decay=0.0,
            initial_accumulator_value=0.0, eps=1e-10, max_unorm=0.0, maximize=False,
            percentile_clipping=100):  # fmt: skip
    """Duchi, Hazan & Singer, JMLR 12 (2011), in torch.optim.Adagrad's form."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    g = g + weight_decay * p
    state["sum"] = state.get("sum", torch.full_like(g, initial_accumulator_value)) + g * g
    u = g / (state["sum"].sqrt() + eps)
    return p - lr / (1 + (t - 1) * lr_decay) * _capped(u, p, max_unorm)


def ademamix(p, g, state, *, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None,
             t_beta3=None, eps=1e-8, weight_decay=1e-2, maximize=False,
             cautious=False):  # fmt: skip
    """Pagliardini, Ablin & Grangier, arXiv:2409.03137, Alg. 1 and the schedules of eq. 4 and 5."""
    t, g = _begin(g, state, maximize, 100)
    beta1, beta2, beta3 = betas
    if t_alpha is not None:
        alpha = min(t * alpha / t_alpha, alpha)
    if t_beta3 is not None:
        fast, slow, done = math.log(beta1), math.log(beta3), min(t / t_beta3, 1)
        beta3 = min(math.exp(fast * slow / ((1 - done) * slow + done * fast)), beta3)
    m = _ema(state, "exp_avg", beta1, g)
    slow = _ema(state, "exp_avg_slow", beta3, g)
    v = _ema(state, "exp_avg_sq", beta2, g * g)
    u = (m / (1 - beta1**t) + alpha * slow) / ((v / (1 - beta2**t)).sqrt() + eps)
    return p - lr * (_cautious(u, g, cautious) + weight_decay * p)


def schedule_free_adamw(p, g, state, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                  warmup_steps=0, r=0.0, weight_lr_power=2.0, max_unorm=0.0, maximize=False,
                  percentile_clipping=100):  # fmt: skip
    """Defazio et al., arXiv:2405.15682, eq. 4 to 6, with x itself; p is y, the gradient's place."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    lr = lr * min(1.0, t / warmup_steps) if warmup_steps else lr
    state["lr_max"] = max(lr, state.get("lr_max", 0.0))
    weight = t**r * state["lr_max"] ** weight_lr_power
    state["weight_sum"] = state.get("weight_sum", 0.0) + weight
    c = weight / state["weight_sum"] if state["weight_sum"] else 0.0
    z = state.get("z", p)
    x = (p - (1 - betas[0]) * z) / betas[0]
    v = _ema(state, "exp_avg_sq", betas[1], g * g)
    u = g / ((v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * p
    z = state["z"] = z - lr * _capped(u, p, max_unorm)
    return betas[0] * ((1 - c) * x + c * z) + (1 - betas[0]) * z


def eve(p, g, state, *, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=1e-3, target_rms=0.1,
        maximize=False, cautious=False):  # fmt: skip
    """icefall's Eve: AdamW whose decay acts only while rms(p) exceeds `target_rms`."""
    t, g = _begin(g, state, maximize, 100)
    m = _ema(state, "exp_avg", betas[0], g)
    v = _ema(state, "exp_avg_sq", betas[1], g * g)
    denominator = v.sqrt() * (1 - betas[1] ** t) ** -0.5 + eps
    if p.numel() > 1 and p.norm() > target_rms * math.sqrt(p.numel()):
        p = p * (1 - weight_decay)
    return p - lr / (1 - betas[0] ** t) * _cautious(m / denominator, g, cautious)


def _cain_rms(p, state, t, rms_eps):
    """R: a factored estimate of |p|, refreshed one dimension a step, all of them every 1000."""
    if t % 1000 == 0:
        state["R"] = torch.ones_like(p)
    for dim in range(p.ndim) if t % 1000 == 0 else [t % p.ndim]:
        f = (p * p).clamp(min=rms_eps**2) / state["R"] ** 2
        others = [d for d in range(p.ndim) if d != dim]
        everything = p.numel() <= 2 * p.shape[dim]
        f = f.mean() if everything else f.mean(others, keepdim=True)
        state["R"] = state["R"] * f.sqrt()
    return state["R"]


def cain(p, g, state, *, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, scale_speed=0.05, rms_eps=1e-5,
         param_max=20.0, bias_correction_fix=False, maximize=False,
         percentile_clipping=100):  # fmt: skip
    """icefall's Cain as its docstring states it; t counts the previous steps."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    t, (beta1, beta2) = t - 1, betas
    delta = beta1 * state.get("delta", torch.zeros_like(p))
    if p.numel() > 1:
        s = (p * g).sum()
        big = _ema(state, "scale_exp_avg_sq", beta2, s * s)
        root = math.sqrt(1 - beta2 ** (t + 1))
        delta = delta + p * (-lr * root * scale_speed * (1 - beta1) * s / (big.sqrt() + eps))
    v = _ema(state, "exp_avg_sq", beta2, g * g)
    correction = 1 - beta2 ** (t + 1 if bias_correction_fix else t)
    if p.numel() == 1 or bias_correction_fix:
        correction = math.sqrt(correction)
    scale = _cain_rms(p, state, t, rms_eps) if p.numel() > 1 else 1.0
    delta = state["delta"] = delta - g / (v.sqrt() + eps) * scale * (lr * (1 - beta1) * correction)
    p = p + delta
    return p.clamp(-param_max, param_max) if t % 10 == 0 else p


def _on_every_dim(x, matrices):
    """x multiplied by a matrix on each dimension that has one."""
    for dim, matrix in matrices.items():
        x = torch.tensordot(matrix, x, dims=([1], [dim])).movedim(0, dim)
    return x


def _lg_size(p, state, t, lr, beta1, beta2, eps, low, high):
    """LearnedGradient: learn the size of p from the last four <p, g>; lr includes its scale."""
    s = torch.stack(state["scale_grads"][-4:])
    state["rms"] = r = _rms(p).clamp(min=eps)
    square = _ema(state, "scale_exp_avg_sq", beta2**4, (s * s).mean())
    mean = _ema(state, "scale_exp_avg", beta1**4, s.mean())
    correction = math.sqrt(1 - beta2 ** (t + 1))  # beta2 to the 4k, and 4k = t + 1
    c = -4 * lr * correction * mean / (square.sqrt() + 1e-10)
    c = 4 * lr if r < low else -4 * lr if r > high else c
    return p * (1 + c)


def _lg_matrices(g, state, meta_lr, beta2):
    """LearnedGradient: one step of every learning-rate matrix, its gradient by autograd."""
    for dim, covariance in state["C"].items():
        unfolded = g.movedim(dim, -1).reshape(-1, g.shape[dim])
        state["C"][dim] = beta2 * covariance + unfolded.T @ unfolded
    scaled = {dim: c / (c.diag().mean() + 1e-20) for dim, c in state["C"].items()}
    leaves = {dim: matrix.clone().requires_grad_() for dim, matrix in state["L"].items()}
    with torch.enable_grad():
        d = _on_every_dim(state["exp_avg"], leaves)
        square = (_on_every_dim(d, scaled) * d).mean()
        gain = (g * d).sum() / square.sqrt()
        moved = bool(leaves) and float(square.detach()) > 0  # no movement yet: nothing to learn
        slopes = torch.autograd.grad(gain, list(leaves.values())) if moved else []
    for (dim, matrix), slope in zip(list(state["L"].items())[: len(slopes)], slopes, strict=True):
        b = (slope + slope.T) / 2 @ matrix
        a = torch.eye(len(b), dtype=b.dtype) + meta_lr * (meta_lr * b / (_rms(b) + 1e-20))
        new = a @ matrix @ a.T
        state["L"][dim] = (new + new.T) / 2 / (new.diag().mean() + 1e-20)


def learned_gradient(p, g, state, *, lr=3e-2, size_lr_scale=0.1, meta_lr_scale=1.0,
                     betas=(0.9, 0.98), eps=1e-8, param_min_rms=1e-5, param_max_rms=2.0,
                     lr_est_period=10, max_step_scale=2.0, max_size=None, maximize=False,
                     percentile_clipping=100):  # fmt: skip
    """icefall's draft, repaired as LearnedGradient's docstring says; t counts previous steps."""
    t, g = _begin(g, state, maximize, percentile_clipping)
    t, (beta1, beta2), n = t - 1, betas, p.numel()
    if t == 0:
        sizes = {d: k for d, k in enumerate(p.shape) if 1 < k < n and k <= (max_size or n)}
        state.update(
            rms=_rms(p) + eps,
            scale_grads=[],
            exp_avg=torch.zeros_like(p),
            L={d: torch.eye(k, dtype=p.dtype) for d, k in sizes.items()},
            C={d: torch.zeros(k, k, dtype=p.dtype) for d, k in sizes.items()},
        )
    state["scale_grads"].append((p * g).sum())
    if n > 1 and t % 4 == 3:
        p = _lg_size(
            p, state, t, lr * size_lr_scale, beta1, beta2, eps, param_min_rms, param_max_rms
        )
    if n > 5 and t > 0 and t % lr_est_period == 0:
        _lg_matrices(g, state, lr * meta_lr_scale, beta2)
    m = _ema(state, "exp_avg", beta1, g)
    r = state["rms"] if n > 1 else 1.0
    if n <= 5:
        v = _ema(state, "exp_avg_sq", beta2, g * g)
        return p - lr * r * m / ((v.mean() / (1 - beta2 ** (t + 1))).sqrt() + eps)
    d = _on_every_dim(m, state["L"])
    q = _rms(d) + eps
    spread = q * math.sqrt(1 - beta1**2) / (1 - beta1)
    return (
        p
        - lr * r * torch.minimum(torch.maximum(d, -max_step_scale * q), max_step_scale * q) / spread
    )
