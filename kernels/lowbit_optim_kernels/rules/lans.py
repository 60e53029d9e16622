"""Update rules of LANS."""

from __future__ import annotations

from . import TINY, Phase, Rule, gives
from .adam import ADAM
from .sgd import parameter_and_gradient_norms
from .shared import caps, cautious, clipped


@gives("gain1", "gain2", "lift", "root", "floor", "shrink", "rate")
def prepare_lans(step, lr, beta1, beta2, eps):
    """With D = sqrt(v / bias2) + eps = root sqrt(v) + floor, and `lift` the correction of m."""
    bias1 = 1.0 - power(beta1, step)
    bias2 = 1.0 - power(beta2, step)
    return 1.0 - beta1, 1.0 - beta2, 1.0 / bias1, 1.0 / sqrt(bias2), eps + TINY, 1.0, lr


@gives("inverse_norm", "p_norm")
def normalize(p_sq, g_sq, lower_bound, upper_bound):
    """The factor that makes the gradient a unit vector, 0 for a zero one; and bounded ||p||."""
    inverse_norm = where(g_sq == 0.0, 0.0, 1.0 / sqrt(where(g_sq == 0.0, 1.0, g_sq)))
    return inverse_norm, minimum(upper_bound, maximum(lower_bound, sqrt(p_sq)))


@gives("g")
def normalized(g, inverse_norm):
    """The gradient as a unit vector."""
    return g * inverse_norm


@gives("g")
def clipped_gradient(g, clip_gradient):
    """Clipped once it is normalized, an option of MXNet's kernel."""
    return clipped(g, clip_gradient)


@gives("exp_avg", "exp_avg_sq", "scale")
def moments(g, exp_avg, exp_avg_sq, beta1, beta2, gain1, gain2, root, floor):
    """The new moments, and 1 / D."""
    m = beta1 * exp_avg + gain1 * g
    v = beta2 * exp_avg_sq + gain2 * g * g
    return m, v, 1.0 / (root * sqrt(v) + floor)


@gives("um_sq", "ug_sq")
def norms(p, g, exp_avg, scale, lift, weight_decay):
    """Terms of ||u_m||^2 and ||u_g||^2."""
    decay = weight_decay * p
    u_m = lift * exp_avg * scale + decay
    u_g = g * scale + decay
    return u_m * u_m, u_g * u_g


@gives("share_m", "share_g", "share_p")
def trust_ratios(um_sq, ug_sq, p_norm, lift, beta1, weight_decay):
    """Weights of m / D, g / D and p in beta1 (P / ||u_m||) u_m + (1 - beta1) (P / ||u_g||) u_g.

    A ratio is 1 where a norm is 0.
    """
    no_m = (p_norm == 0.0) | (um_sq == 0.0)
    no_g = (p_norm == 0.0) | (ug_sq == 0.0)
    of_m = beta1 * where(no_m, 1.0, p_norm / sqrt(where(no_m, 1.0, um_sq)))
    of_g = (1.0 - beta1) * where(no_g, 1.0, p_norm / sqrt(where(no_g, 1.0, ug_sq)))
    return of_m * lift, of_g, (of_m + of_g) * weight_decay


@gives("u")
def lans(p, g, exp_avg, scale, share_m, share_g, share_p):
    """Zheng, Lin, Zha, Li, arXiv:2006.13484, Alg. 2."""
    return (share_m * exp_avg + share_g * g) * scale + share_p * p


NORMALIZE = Phase((parameter_and_gradient_norms,), normalize)


def lans_rule(clip: bool, cap: bool, caution: bool = False) -> Rule:
    """The rule of LANS; `clip` for a clip_gradient, `cap` for a max_unorm on the whole update."""
    chain = (normalized, *((clipped_gradient,) if clip else ()), moments)
    direction, agreeing = cautious((*chain, lans), caution)
    trust = Phase((*chain, norms), trust_ratios)
    phases = (NORMALIZE, trust, *agreeing, *caps(direction, cap))
    return Rule("lans", direction, prepare_lans, ADAM, phases)
