"""Update rule of Schedule-Free AdamW."""

from __future__ import annotations

from . import SQUARE, TINY, Lasting, Moment, Phase, Rule, gives
from .shared import cap_update, parameter_and_update_norms

# z is where the steps go: an error in it is never made up for, so it stays exact.
MOMENTS = (Moment("exp_avg_sq", SQUARE, decay="beta2"), Moment("z", exact=True))
LASTING = (Lasting("weight_sum"), Lasting("lr_max"))


@gives(
    "weight_sum", "lr_max", "gain2", "root", "floor", "step_size", "share", "pull", "shrink", "rate"
)
def prepare_schedule_free(
    step, lr, beta1, beta2, eps, warmup_steps, r, weight_lr_power, weight_sum, lr_max
):  # fmt: skip
    """`share` is what z weighs in the average x, of all weights so far.

    With y = beta1 x + (1 - beta1) z, which p holds, and without x:
    y = (1 - share) y + share z - step_size (1 - beta1 (1 - share)) u.
    """
    risen = minimum(1.0, step / where(warmup_steps == 0.0, 1.0, warmup_steps))
    step_size = lr * where(warmup_steps == 0.0, 1.0, risen)
    largest = maximum(step_size, lr_max)
    weight = power(step, r) * power(largest, weight_lr_power)
    total = weight_sum + weight
    share = where(total == 0.0, 0.0, weight / where(total == 0.0, 1.0, total))
    pull = step_size * (1.0 - beta1 * (1.0 - share))
    root = 1.0 / sqrt(1.0 - power(beta2, step))
    return total, largest, 1.0 - beta2, root, eps + TINY, step_size, share, pull, 1.0, 1.0


@gives("u", "exp_avg_sq")
def normalized(p, g, exp_avg_sq, beta2, gain2, root, floor, weight_decay):
    """The gradient over the root of the second moment, and the decay of y."""
    v = beta2 * exp_avg_sq + gain2 * g * g
    return g / (root * sqrt(v) + floor) + weight_decay * p, v


@gives("cap")
def share_of_update(p_sq, u_sq, max_unorm):
    """min(1, max_unorm ||p|| / ||u||)."""
    return cap_update(p_sq, u_sq, 1.0, max_unorm)


@gives("u")
def capped(u, cap):
    """The update u of both sequences, z and y, under the cap."""
    return cap * u


@gives("u", "z")
def averaged(p, u, z, step_size, share, pull):
    """Defazio et al., arXiv:2405.15682, eq. 4 to 6, for y and z."""
    return share * (p - z) + pull * u, z - step_size * u


def schedule_free_rule(cap: bool) -> Rule:
    """The rule of Schedule-Free AdamW; `cap` for a max_unorm."""
    direction = (normalized, *((capped,) if cap else ()), averaged)
    cap_phase = Phase((normalized, parameter_and_update_norms), share_of_update)
    phases = (cap_phase,) if cap else ()
    return Rule("schedule_free", direction, prepare_schedule_free, MOMENTS, phases, LASTING)
