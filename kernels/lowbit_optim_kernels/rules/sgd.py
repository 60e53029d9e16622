"""Update rules of SGD and of LARS in all its meanings."""

from __future__ import annotations

from . import Moment, Phase, Rule, gives
from .shared import caps, cautious, coupled_decay

MOMENTUM = (Moment("momentum_buffer", decay="momentum"),)


def shares(step, momentum, dampening):
    """Shares of buffer and gradient in the new buffer: a first one is the gradient, as in torch."""
    return where(step == 1.0, 0.0, momentum), where(step == 1.0, 1.0, 1.0 - dampening)


@gives("keep", "take", "shrink", "rate")
def prepare_sgd(step, lr, momentum, dampening):
    """The momentum buffer b becomes keep b + take g."""
    keep, take = shares(step, momentum, dampening)
    return keep, take, 1.0, lr


@gives("u")
def gradient(g):
    """Without momentum, and without state."""
    return g


@gives("u", "momentum_buffer")
def heavy_ball(g, momentum_buffer, keep, take):
    """Polyak's momentum as in torch.optim.SGD."""
    b = keep * momentum_buffer + take * g
    return b, b


@gives("u", "momentum_buffer")
def nesterov_momentum(g, momentum_buffer, keep, take, momentum):
    """Nesterov's momentum as in torch.optim.SGD."""
    b = keep * momentum_buffer + take * g
    return g + momentum * b, b


def accelerated(momentum: bool, nesterov: bool):
    """The function that makes a direction of the gradient, and its moments."""
    if not momentum:
        return gradient, ()
    return nesterov_momentum if nesterov else heavy_ball, MOMENTUM


@gives("g")
def local_gradient(p, g, inner, wd):
    """You, Gitman, Ginsburg, arXiv:1708.03888, Alg. 1; `inner` carries the trust ratio."""
    return inner * where(wd == 0.0, g, g + wd * p)  # see `coupled_decay`


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
    kept = minimum(norm_high, maximum(norm_low, p_norm))
    ratio = trust_coefficient * kept / where(denominator == 0.0, 1.0, denominator)
    tau = where(degenerate, 1.0, where(denominator == 0.0, 0.0, ratio))
    wd = where(skip_wd == 1.0, 0.0, weight_decay)
    bare = degenerate & (zero_norm == ZERO_SKIP_WD)
    clipped = where(lr == 0.0, 1.0, minimum(1.0, tau / where(lr == 0.0, 1.0, lr)))
    tau = where(trust_clip == 1.0, where(bare, tau, clipped), tau)
    off = (adapt == 1.0) & (weight_decay == 0.0)
    tau = where(off, 1.0, tau)
    wd = where(bare, 0.0, wd)
    inner = where(scale_at == AT_GRAD, tau, where(scale_at == AT_LR, lr * tau, 1.0))
    rate = where(scale_at == AT_GRAD, lr, where(scale_at == AT_LR, 1.0, lr * tau))
    return inner, rate, wd


@gives("keep", "take", "shrink", "rate", "inner", "wd")
def prepare_lars(step, lr, momentum, dampening, weight_decay, skip_wd):
    """As SGD; `inner` and `rate` are replaced where a trust ratio is asked for."""
    keep, take = shares(step, momentum, dampening)
    return keep, take, 1.0, lr, 1.0, where(skip_wd == 1.0, 0.0, weight_decay)


@gives("keep", "take", "shrink", "rate", "inner", "wd")
def prepare_lars_inside(step, lr, momentum, dampening, weight_decay, skip_wd):
    """The same with lr inside momentum; a rule of its own, since `inner` is no constant here."""
    keep, take = shares(step, momentum, dampening)
    return keep, take, 1.0, 1.0, lr, where(skip_wd == 1.0, 0.0, weight_decay)


TRUST = Phase((parameter_and_gradient_norms,), trust_ratio)


def sgd_rule(momentum: bool, nesterov: bool, cap: bool, caution: bool = False) -> Rule:
    """The rule of SGD with these options."""
    step, moments = accelerated(momentum, nesterov)
    direction, phases = cautious((coupled_decay, step), caution)
    return Rule("sgd", direction, prepare_sgd, moments, (*phases, *caps(direction, cap)))


def lars_rule(
    momentum: bool, nesterov: bool, trust: bool, cap: bool, inside: bool, caution: bool = False
) -> Rule:
    """The rule of LARS: `trust` for a trust coefficient, else `cap` for bitsandbytes' max_unorm.

    `inside` says that without a trust coefficient lr is inside momentum.
    """
    step, moments = accelerated(momentum, nesterov)
    direction, agreeing = cautious((local_gradient, step), caution)
    phases = (TRUST, *agreeing) if trust else (*agreeing, *caps(direction, cap))
    prepare = prepare_lars_inside if inside and not trust else prepare_lars
    return Rule("lars", direction, prepare, moments, phases)
