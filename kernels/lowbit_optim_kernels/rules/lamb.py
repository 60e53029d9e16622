"""Update rules of LAMB."""

from __future__ import annotations

from . import CAP, TINY, Phase, Rule, gives, parameter_and_update_norms
from .adam import ADAM, AMSGRAD, adam, adam_coupled, amsgrad, amsgrad_coupled, gains


@gives("gain1", "gain2", "root", "floor", "shrink", "rate")
def prepare_lamb(step, lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction):
    """As Adam; both corrections are 1 without `bias_correction`."""
    gain1, gain2 = gains(beta1, beta2)
    bias1 = where(bias_correction == 1.0, 1.0 - power(beta1, step), 1.0)
    bias2 = where(bias_correction == 1.0, 1.0 - power(beta2, step), 1.0)
    shrink = 1.0 - decoupled * lr * weight_decay
    return gain1, gain2, bias1 / sqrt(bias2), bias1 * eps + TINY, shrink, lr


@gives("u", "exp_avg", "exp_avg_sq")
def lamb(p, g, exp_avg, exp_avg_sq, beta1, beta2, gain1, gain2, root, floor, weight_decay):
    """You et al., arXiv:1904.00962, Alg. 2; the trust ratio is in the rate."""
    u, m, v = adam(p, g, exp_avg, exp_avg_sq, beta1, beta2, gain1, gain2, root, floor)
    return u + weight_decay * p, m, v


@gives("u", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
def lamb_amsgrad(
    p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, beta1, beta2, gain1, gain2, root, floor, weight_decay
):
    """LAMB over AMSGrad's second moment."""
    u, m, v, largest = amsgrad(
        p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, beta1, beta2, gain1, gain2, root, floor
    )
    return u + weight_decay * p, m, v, largest


@gives("rate")
def trust_ratio(p_sq, u_sq, lr, trust_coefficient, norm_low, norm_high):
    """The learning rate times eta phi(||p||) / ||r||; the ratio is 1 where a norm is 0."""
    kept = minimum(maximum(sqrt(p_sq), norm_low), norm_high)
    norm = sqrt(u_sq)
    degenerate = (kept == 0.0) | (norm == 0.0)
    return where(degenerate, lr, lr * trust_coefficient * kept / where(degenerate, 1.0, norm))


TRUST = Phase(parameter_and_update_norms, trust_ratio)


def lamb_rule(use_amsgrad: bool, decay: bool, coupled: bool, trust: bool, cap: bool) -> Rule:
    """The rule of LAMB: `trust` for a trust coefficient, else `cap` for bitsandbytes' max_unorm.

    `decay` says that there is weight decay, `coupled` that it goes into the gradient. Under a cap
    decoupled decay is no part of the direction: it shrinks p, as AdamW's does.
    """
    if decay and coupled:
        direction = amsgrad_coupled if use_amsgrad else adam_coupled
    elif decay and trust:
        direction = lamb_amsgrad if use_amsgrad else lamb
    else:
        direction = amsgrad if use_amsgrad else adam
    phases = (TRUST,) if trust else (CAP,) if cap else ()
    return Rule("lamb", direction, prepare_lamb, AMSGRAD if use_amsgrad else ADAM, phases)
