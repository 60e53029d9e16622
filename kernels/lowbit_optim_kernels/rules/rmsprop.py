"""Update rules of RMSprop."""

from __future__ import annotations

from . import SQUARE, TINY, Moment, Rule, gives
from .shared import caps, cautious, coupled_decay

MEAN_SQUARE = Moment("square_avg", SQUARE, decay="alpha")
VARIANCE = Moment("variance", SQUARE, decay="alpha")
# No ratio to the variance, which is next to zero where the gradient hardly changes.
MEAN = Moment("grad_avg", decay="alpha")
BUFFER = Moment("momentum_buffer", decay="momentum")


@gives("gain", "floor", "shrink", "rate")
def prepare_rmsprop(lr, alpha, eps):
    """1 - alpha in fp64."""
    return 1.0 - alpha, eps + TINY, 1.0, lr


@gives("u", "square_avg")
def rmsprop(g, square_avg, alpha, gain, floor):
    """Tieleman & Hinton, lecture 6.5 (2012), in torch.optim.RMSprop's form."""
    v = alpha * square_avg + gain * g * g
    return g / (sqrt(v) + floor), v


@gives("u", "variance", "grad_avg")
def rmsprop_centered(g, variance, grad_avg, alpha, gain, floor):
    """Graves, arXiv:1308.0850, eq. 38 to 41, from the variance v - a^2 of the old moments.

    That of the new ones is alpha (variance + gain (g - a)^2), in which nothing cancels; and 8 bits
    would not know it of v and a.
    """
    off = g - grad_avg
    spread = alpha * (variance + gain * off * off)
    return g / (sqrt(spread) + floor), spread, alpha * grad_avg + gain * g


@gives("u", "square_avg", "grad_avg")
def rmsprop_centered_as_torch(g, square_avg, grad_avg, alpha, gain, floor):
    """Centered RMSprop with torch.optim.RMSprop's moments."""
    before = square_avg - grad_avg * grad_avg
    before = where(before > 0.0, before, 0.0)  # of infinities too, whose difference is NaN
    u, _spread, a = rmsprop_centered(g, before, grad_avg, alpha, gain, floor)
    return u, alpha * square_avg + gain * g * g, a


@gives("u", "momentum_buffer")
def momentum_of_updates(u, momentum_buffer, momentum):
    """The updates go through a momentum buffer."""
    b = momentum * momentum_buffer + u
    return b, b


def rmsprop_rule(
    centered: bool, momentum: bool, cap: bool, as_torch: bool, caution: bool = False
) -> Rule:
    """The rule of RMSprop; `as_torch` for torch.optim's moments where it is centered."""
    step = rmsprop
    if centered:
        step = rmsprop_centered_as_torch if as_torch else rmsprop_centered
    chain = (coupled_decay, step, *((momentum_of_updates,) if momentum else ()))
    direction, phases = cautious(chain, caution)
    first = VARIANCE if centered and not as_torch else MEAN_SQUARE
    moments = (first, *((MEAN,) if centered else ()), *((BUFFER,) if momentum else ()))
    phases = (*phases, *caps(direction, cap))
    return Rule("rmsprop", direction, prepare_rmsprop, moments, phases)
