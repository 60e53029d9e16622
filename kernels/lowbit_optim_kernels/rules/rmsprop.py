"""Update rules of RMSprop."""

from __future__ import annotations

from . import CAP, TINY, Moment, Rule, gives

SQUARE = Moment("square_avg", signed=False)
VARIANCE = Moment("variance", signed=False)
MEAN = Moment("grad_avg", signed=True)
BUFFER = Moment("momentum_buffer", signed=True)


@gives("gain", "floor", "shrink", "rate")
def prepare_rmsprop(lr, alpha, eps):
    """1 - alpha in fp64."""
    return 1.0 - alpha, eps + TINY, 1.0, lr


@gives("u", "square_avg")
def rmsprop(p, g, square_avg, alpha, gain, floor, weight_decay):
    """Tieleman & Hinton, lecture 6.5 (2012), in torch.optim.RMSprop's form."""
    d = g + weight_decay * p
    v = alpha * square_avg + gain * d * d
    return d / (sqrt(v) + floor), v


def centered_step(d, variance, grad_avg, alpha, gain, floor):
    """Graves, arXiv:1308.0850, eq. 38 to 41, from the variance v - a^2 of the old moments.

    That of the new ones is alpha (variance + gain (d - a)^2), in which nothing cancels.
    """
    off = d - grad_avg
    spread = alpha * (variance + gain * off * off)
    return d / (sqrt(spread) + floor), spread, alpha * grad_avg + gain * d


@gives("u", "variance", "grad_avg")
def rmsprop_centered(p, g, variance, grad_avg, alpha, gain, floor, weight_decay):
    """Centered RMSprop whose moment is the variance: 8 bits would not know that of v and a."""
    d = g + weight_decay * p
    return centered_step(d, variance, grad_avg, alpha, gain, floor)


@gives("u", "square_avg", "grad_avg")
def rmsprop_centered_as_torch(p, g, square_avg, grad_avg, alpha, gain, floor, weight_decay):
    """Centered RMSprop with torch.optim.RMSprop's moments."""
    d = g + weight_decay * p
    before = maximum(square_avg - grad_avg * grad_avg, 0.0)
    u, _spread, a = centered_step(d, before, grad_avg, alpha, gain, floor)
    return u, alpha * square_avg + gain * d * d, a


@gives("u", "square_avg", "momentum_buffer")
def rmsprop_momentum(
    p, g, square_avg, momentum_buffer, alpha, gain, floor, weight_decay, momentum
):  # fmt: skip
    """RMSprop whose updates go through a momentum buffer."""
    u, v = rmsprop(p, g, square_avg, alpha, gain, floor, weight_decay)
    b = momentum * momentum_buffer + u
    return b, v, b


@gives("u", "variance", "grad_avg", "momentum_buffer")
def rmsprop_centered_momentum(
    p, g, variance, grad_avg, momentum_buffer, alpha, gain, floor, weight_decay, momentum
):  # fmt: skip
    """Centered RMSprop whose updates go through a momentum buffer."""
    u, v, a = rmsprop_centered(p, g, variance, grad_avg, alpha, gain, floor, weight_decay)
    b = momentum * momentum_buffer + u
    return b, v, a, b


@gives("u", "square_avg", "grad_avg", "momentum_buffer")
def rmsprop_centered_momentum_as_torch(
    p, g, square_avg, grad_avg, momentum_buffer, alpha, gain, floor, weight_decay, momentum
):  # fmt: skip
    """The same with torch.optim.RMSprop's moments."""
    u, v, a = rmsprop_centered_as_torch(
        p, g, square_avg, grad_avg, alpha, gain, floor, weight_decay
    )
    b = momentum * momentum_buffer + u
    return b, v, a, b


def rmsprop_rule(centered: bool, momentum: bool, cap: bool, as_torch: bool) -> Rule:
    """The rule of RMSprop; `as_torch` for torch.optim's moments where it is centered."""
    if not centered:
        direction = rmsprop_momentum if momentum else rmsprop
    elif as_torch:
        direction = rmsprop_centered_momentum_as_torch if momentum else rmsprop_centered_as_torch
    else:
        direction = rmsprop_centered_momentum if momentum else rmsprop_centered
    first = VARIANCE if centered and not as_torch else SQUARE
    moments = (first, *((MEAN,) if centered else ()), *((BUFFER,) if momentum else ()))
    return Rule("rmsprop", direction, prepare_rmsprop, moments, (CAP,) if cap else ())
