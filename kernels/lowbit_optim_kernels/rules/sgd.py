"""Update rules of SGD and of LARS in all its meanings."""

from __future__ import annotations

from . import CAP, Moment, Phase, Rule, gives

MOMENTUM = (Moment("momentum_buffer", signed=True),)


@gives("keep", "take", "shrink", "rate", "inner", "wd")
def prepare_sgd(step, lr, momentum, dampening, weight_decay):
    """The momentum buffer of a first step is the gradient itself, as in torch.optim.SGD."""
    keep = where(step == 1.0, 0.0, momentum)
    take = where(step == 1.0, 1.0, 1.0 - dampening)
    return keep, take, 1.0, lr, 1.0, weight_decay


@gives("u")
def sgd_plain(p, g, wd):
    """Plain SGD, no state."""
    return g + wd * p


@gives("u", "momentum_buffer")
def sgd_momentum(p, g, momentum_buffer, wd, keep, take):
    """Polyak's heavy ball as in torch.optim.SGD."""
    b = keep * momentum_buffer + take * (g + wd * p)
    return b, b


@gives("u", "momentum_buffer")
def sgd_nesterov(p, g, momentum_buffer, wd, keep, take, momentum):
    """Nesterov's momentum as in torch.optim.SGD."""
    d = g + wd * p
    b = keep * momentum_buffer + take * d
    return d + momentum * b, b


@gives("u")
def lars_plain(p, g, inner, wd):
    """LARS without momentum, no state."""
    return inner * (g + wd * p)


@gives("u", "momentum_buffer")
def lars_momentum(p, g, momentum_buffer, inner, wd, keep, take):
    """You, Gitman, Ginsburg, arXiv:1708.03888, Alg. 1; `inner` carries the trust ratio."""
    b = keep * momentum_buffer + take * (inner * (g + wd * p))
    return b, b


@gives("u", "momentum_buffer")
def lars_nesterov(p, g, momentum_buffer, inner, wd, keep, take, momentum):
    """LARS with Nesterov's momentum."""
    d = inner * (g + wd * p)
    b = keep * momentum_buffer + take * d
    return d + momentum * b, b


@gives("p_sq", "g_sq")
def parameter_and_gradient_norms(p, g):
    """Terms of ||p||^2 and ||g||^2."""
    return p * p, g * g


# Codes of the string options `scale_at` and `zero_norm`, as hyperparameters carry them.
AT_GRAD, AT_UPDATE, AT_LR = 0.0, 1.0, 2.0
ZERO_ONE, ZERO_DENOM, ZERO_ZERO, ZERO_SKIP_WD = 0.0, 1.0, 2.0, 3.0


@gives("inner", "rate", "wd")
def trust_ratio(
    p_sq, g_sq, lr, weight_decay, skip_wd, trust_coefficient, eps, trust_clip,
    scale_at, zero_norm, adapt, norm_low, norm_high,
):  # fmt: skip
    """The local learning rate tau = eta ||p|| / (||g|| + lambda ||p|| + eps), and where it acts."""
    p_norm = sqrt(p_sq)
    g_norm = sqrt(g_sq)
    denominator = g_norm + weight_decay * p_norm + eps
    no_norm = (p_norm == 0.0) | (g_norm == 0.0)
    no_ratio = (p_norm == 0.0) | (denominator == 0.0)
    by_norm = (zero_norm == ZERO_ONE) | (zero_norm == ZERO_SKIP_WD)
    degenerate = (no_norm & by_norm) | (no_ratio & (zero_norm == ZERO_DENOM))
    kept = minimum(maximum(p_norm, norm_low), norm_high)
    ratio = trust_coefficient * kept / where(denominator == 0.0, 1.0, denominator)
    tau = where(degenerate, 1.0, where(denominator == 0.0, 0.0, ratio))
    wd = where(skip_wd == 1.0, 0.0, weight_decay)
    bare = degenerate & (zero_norm == ZERO_SKIP_WD)
    clipped = where(lr == 0.0, 1.0, minimum(tau / where(lr == 0.0, 1.0, lr), 1.0))
    tau = where(trust_clip == 1.0, where(bare, tau, clipped), tau)
    off = (adapt == 1.0) & (weight_decay == 0.0)
    tau = where(off, 1.0, tau)
    wd = where(bare, where(off, wd, 0.0), wd)
    inner = where(scale_at == AT_GRAD, tau, where(scale_at == AT_LR, lr * tau, 1.0))
    rate = where(scale_at == AT_GRAD, lr, where(scale_at == AT_LR, 1.0, lr * tau))
    return inner, rate, wd


@gives("keep", "take", "shrink", "rate", "inner", "wd")
def prepare_lars(step, lr, momentum, dampening, weight_decay, skip_wd):
    """As SGD; `inner` and `rate` are replaced where a trust ratio is asked for."""
    keep = where(step == 1.0, 0.0, momentum)
    take = where(step == 1.0, 1.0, 1.0 - dampening)
    return keep, take, 1.0, lr, 1.0, where(skip_wd == 1.0, 0.0, weight_decay)


@gives("keep", "take", "shrink", "rate", "inner", "wd")
def prepare_lars_inside(step, lr, momentum, dampening, weight_decay, skip_wd):
    """The same with lr inside momentum; a rule of its own, since `inner` is no constant here."""
    keep = where(step == 1.0, 0.0, momentum)
    take = where(step == 1.0, 1.0, 1.0 - dampening)
    return keep, take, 1.0, 1.0, lr, where(skip_wd == 1.0, 0.0, weight_decay)


TRUST = Phase(parameter_and_gradient_norms, trust_ratio)


def sgd(momentum: bool, nesterov: bool, cap: bool) -> Rule:
    """The rule of SGD with these options."""
    direction = sgd_nesterov if nesterov else sgd_momentum if momentum else sgd_plain
    moments = MOMENTUM if momentum else ()
    return Rule("sgd", direction, prepare_sgd, moments, (CAP,) if cap else ())


def lars(momentum: bool, nesterov: bool, trust: bool, cap: bool, inside: bool) -> Rule:
    """The rule of LARS: `trust` for a trust coefficient, else `cap` for bitsandbytes' max_unorm.

    `inside` says that without a trust coefficient lr is inside momentum.
    """
    direction = lars_nesterov if nesterov else lars_momentum if momentum else lars_plain
    moments = MOMENTUM if momentum else ()
    phases = (TRUST,) if trust else (CAP,) if cap else ()
    prepare = prepare_lars_inside if inside and not trust else prepare_lars
    return Rule("lars", direction, prepare, moments, phases)
