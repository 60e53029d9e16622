"""Update rules of ADOPT."""

from __future__ import annotations

from . import SQUARE, TINY, Moment, Rule, gives
from .shared import caps, cautious, clipped, coupled_decay

# The momentum is of gradients that have been divided already.
ADOPT = (Moment("exp_avg", decay="beta1"), Moment("exp_avg_sq", SQUARE, decay="beta2"))


@gives("gain1", "gain2", "floor", "limit", "shrink", "rate")
def prepare_adopt(step, lr, beta1, beta2, eps, weight_decay, decoupled, clips, clip_exp):
    """A first step only fills v: the gradient of a step meets the v of those before it."""
    first = step == 1.0
    gain1 = where(first, 0.0, 1.0 - beta1)
    gain2 = where(first, 1.0, 1.0 - beta2)
    limit = where(clips == 1.0, power(maximum(1.0, step - 1.0), clip_exp), 3e38)
    shrink = where(first, 1.0, 1.0 - decoupled * lr * weight_decay)
    return gain1, gain2, eps + TINY, limit, shrink, where(first, 0.0, lr)


@gives("u", "exp_avg", "exp_avg_sq")
def adopt(g, exp_avg, exp_avg_sq, beta1, beta2, gain1, gain2, floor, limit):
    """Taniguchi et al., arXiv:2411.02853, Alg. 2."""
    x = clipped(g / maximum(floor, sqrt(exp_avg_sq)), limit)
    m = beta1 * exp_avg + gain1 * x
    return m, m, beta2 * exp_avg_sq + gain2 * (g * g)


def adopt_rule(coupled: bool, cap: bool, caution: bool = False) -> Rule:
    """The rule of ADOPT; `coupled` puts the decay into the gradient."""
    chain = (coupled_decay, adopt) if coupled else (adopt,)
    direction, phases = cautious(chain, caution)
    return Rule("adopt", direction, prepare_adopt, ADOPT, (*phases, *caps(direction, cap)))
