"""Update rule of AdEMAMix."""

from __future__ import annotations

from . import RATIO, SQUARE, TINY, Moment, Rule, gives
from .shared import caps, cautious

ADEMAMIX = (
    Moment("exp_avg", RATIO, partner="exp_avg_sq", decay="beta1"),
    Moment("exp_avg_slow", RATIO, partner="exp_avg_sq", decay="beta3"),
    Moment("exp_avg_sq", SQUARE, decay="beta2"),
)


@gives("gain1", "gain2", "keep3", "gain3", "share", "root", "floor", "shrink", "rate")
def prepare_ademamix(
    step, lr, beta1, beta2, beta3, alpha, t_alpha, t_beta3, eps, weight_decay
):  # fmt: skip
    """The schedules of alpha and beta3 (a warm-up of 0 steps is none) and Adam's corrections.

    alpha rises linearly; beta3 so that the half-life of the slow average does: 1 / log(beta) is
    linear in the step. (m1 / bias1 + alpha m2) / D = (m1 + share m2) / (root sqrt(v) + floor).
    """
    bias1 = 1.0 - power(beta1, step)
    bias2 = 1.0 - power(beta2, step)
    risen = minimum(1.0, step / where(t_alpha == 0.0, 1.0, t_alpha))
    mixed = alpha * where(t_alpha == 0.0, 1.0, risen)
    done = step / where(t_beta3 == 0.0, 1.0, t_beta3)
    scheduled = minimum(beta3, exp(1.0 / ((1.0 - done) / log(beta1) + done / log(beta3))))
    keep3 = where(step < t_beta3, scheduled, beta3)
    shrink = 1.0 - lr * weight_decay
    return (
        1.0 - beta1, 1.0 - beta2, keep3, 1.0 - keep3, mixed * bias1, bias1 / sqrt(bias2),
        bias1 * eps + TINY, shrink, lr,
    )  # fmt: skip


@gives("u", "exp_avg", "exp_avg_slow", "exp_avg_sq")
def ademamix(
    g, exp_avg, exp_avg_slow, exp_avg_sq, beta1, beta2, gain1, gain2, keep3, gain3, share, root,
    floor,
):  # fmt: skip
    """Pagliardini et al., arXiv:2409.03137, Alg. 1; the slow average is not bias-corrected."""
    fast = beta1 * exp_avg + gain1 * g
    slow = keep3 * exp_avg_slow + gain3 * g
    v = beta2 * exp_avg_sq + gain2 * g * g
    return (fast + share * slow) / (root * sqrt(v) + floor), fast, slow, v


def ademamix_rule(cap: bool, caution: bool = False) -> Rule:
    """The rule of AdEMAMix; `cap` for a max_unorm."""
    direction, phases = cautious((ademamix,), caution)
    phases = (*phases, *caps(direction, cap))
    return Rule("ademamix", direction, prepare_ademamix, ADEMAMIX, phases)
