"""Update rules of RMSprop."""

from __future__ import annotations

from .rules import CAP, TINY, Moment, Rule, gives

SQUARE = Moment("square_avg", signed=False)
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


@gives("u", "square_avg", "grad_avg")
def rmsprop_centered(p, g, square_avg, grad_avg, alpha, gain, floor, weight_decay):
    """Graves, arXiv:1308.0850, eq. 38 to 41.

    The variance v - a^2 of the new moments is alpha (variance of the old ones + gain (d - a)^2),
    which does not cancel: what quantization did to v and a cannot make the update d / eps.
    """
    d = g + weight_decay * p
    off = d - grad_avg
    before = maximum(square_avg - grad_avg * grad_avg, 0.0)
    variance = alpha * (before + gain * off * off)
    v = alpha * square_avg + gain * d * d
    return d / (sqrt(variance) + floor), v, alpha * grad_avg + gain * d


@gives("u", "square_avg", "momentum_buffer")
def rmsprop_momentum(
    p, g, square_avg, momentum_buffer, alpha, gain, floor, weight_decay, momentum
):  # fmt: skip
    """RMSprop whose updates go through a momentum buffer."""
    u, v = rmsprop(p, g, square_avg, alpha, gain, floor, weight_decay)
    b = momentum * momentum_buffer + u
    return b, v, b


@gives("u", "square_avg", "grad_avg", "momentum_buffer")
def rmsprop_centered_momentum(
    p, g, square_avg, grad_avg, momentum_buffer, alpha, gain, floor, weight_decay, momentum
):  # fmt: skip
    """Centered RMSprop whose updates go through a momentum buffer."""
    u, v, a = rmsprop_centered(p, g, square_avg, grad_avg, alpha, gain, floor, weight_decay)
    b = momentum * momentum_buffer + u
    return b, v, a, b


def rmsprop_rule(centered: bool, momentum: bool, cap: bool) -> Rule:
    """The rule of RMSprop with these options."""
    if centered:
        direction = rmsprop_centered_momentum if momentum else rmsprop_centered
    else:
        direction = rmsprop_momentum if momentum else rmsprop
    moments = (SQUARE, *((MEAN,) if centered else ()), *((BUFFER,) if momentum else ()))
    return Rule("rmsprop", direction, prepare_rmsprop, moments, (CAP,) if cap else ())
