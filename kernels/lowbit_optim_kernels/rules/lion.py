"""Update rule of Lion."""

from __future__ import annotations

from . import SIGN, Moment, Rule, gives
from .shared import caps, cautious

MOMENTUM = (Moment("exp_avg", SIGN, decay="beta2"),)


@gives("gain1", "gain2", "shrink", "rate")
def prepare_lion(lr, beta1, beta2, weight_decay):
    """Decoupled decay; 1 - beta in fp64."""
    return 1.0 - beta1, 1.0 - beta2, 1.0 - lr * weight_decay, lr


@gives("u", "exp_avg")
def lion(g, exp_avg, beta1, beta2, gain1, gain2):
    """Chen et al., arXiv:2302.06675, Alg. 2. The sign is taken before m moves; sign(0) is 0."""
    return sign(beta1 * exp_avg + gain1 * g), beta2 * exp_avg + gain2 * g


def lion_rule(cap: bool, caution: bool = False) -> Rule:
    """The rule of Lion; `cap` for a max_unorm."""
    direction, phases = cautious((lion,), caution)
    return Rule("lion", direction, prepare_lion, MOMENTUM, (*phases, *caps(direction, cap)))
