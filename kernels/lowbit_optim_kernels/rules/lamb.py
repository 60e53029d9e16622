"""Update rules of LAMB: You et al., arXiv:1904.00962, Alg. 2; the trust ratio is in the rate."""

from __future__ import annotations

from . import TINY, Phase, Rule, gives
from .adam import ADAM, AMSGRAD, adam_chain, gains
from .shared import caps, cautious, decay_in_direction, parameter_and_update_norms


@gives("gain1", "gain_sq", "root", "floor", "shrink", "rate")
def prepare_lamb(step, lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction):
    """As Adam; both corrections are 1 without `bias_correction`."""
    gain1, gain_sq = gains(beta1, beta2)
    bias1 = where(bias_correction == 1.0, 1.0 - power(beta1, step), 1.0)
    bias2 = where(bias_correction == 1.0, 1.0 - power(beta2, step), 1.0)
    shrink = 1.0 - decoupled * lr * weight_decay
    return gain1, gain_sq, bias1 / sqrt(bias2), bias1 * eps + TINY, shrink, lr


@gives("rate")
def trust_rate(p_sq, u_sq, lr, trust_coefficient, norm_low, norm_high):
    """The learning rate times eta phi(||p||) / ||r||; the ratio is 1 where a norm is 0."""
    kept = minimum(norm_high, maximum(norm_low, sqrt(p_sq)))
    norm = sqrt(u_sq)
    degenerate = (kept == 0.0) | (norm == 0.0)
    return where(degenerate, lr, lr * trust_coefficient * kept / where(degenerate, 1.0, norm))


def lamb_rule(
    use_amsgrad: bool, decay: bool, coupled: bool, trust: bool, cap: bool, caution: bool = False
) -> Rule:
    """The rule of LAMB: `trust` for a trust coefficient, else `cap` for bitsandbytes' max_unorm.

    `decay` says that there is weight decay, `coupled` that it goes into the gradient. Under a cap
    decoupled decay is no part of the direction: it shrinks p, as AdamW's does.
    """
    direction, phases = cautious(adam_chain(use_amsgrad, decay and coupled), caution)
    if decay and trust and not coupled:
        direction = (*direction, decay_in_direction)
    last = Phase((*direction, parameter_and_update_norms), trust_rate)
    phases = (*phases, last) if trust else (*phases, *caps(direction, cap))
    return Rule("lamb", direction, prepare_lamb, AMSGRAD if use_amsgrad else ADAM, phases)
