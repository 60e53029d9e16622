"""Parts of update rules that several of them have: decay, caps, clipping, caution."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from . import SQUARE, Chain, Lasting, Moment, Phase, Rule, gives

NORMS = Lasting("gnorm_vec", start=-1.0, history=True)  # squared, of the last steps' gradients
LEAST_SHARE = 1e-3  # of the elements that `cautious` counts as kept


def clipped(x, limit):
    """A number between -limit and limit; NaN stays."""
    return where(x > limit, limit, where(x < -limit, -limit, x))


@gives("g")
def coupled_decay(p, g, weight_decay):
    """The decay as a part of the gradient: that of weight_decay / 2 ||p||^2 (L2 regularization).

    None is none: 0 times an infinite weight, as one that masks something, would be NaN.
    """
    return where(weight_decay == 0.0, g, g + weight_decay * p)


@gives("u")
def decay_in_direction(p, u, weight_decay):
    """The decay as a part of the direction, so that a trust ratio scales it, too."""
    return u + weight_decay * p


@gives("p_sq", "u_sq")
def parameter_and_update_norms(p, u):
    """Terms of ||p||^2 and ||u||^2."""
    return p * p, u * u


@gives("rate")
def cap_update(p_sq, u_sq, rate, max_unorm):
    """`max_unorm` of bitsandbytes: rate *= min(1, max_unorm ||p|| / ||u||)."""
    limit = max_unorm * sqrt(p_sq)
    norm = sqrt(u_sq)
    return where(norm > limit, rate * limit / where(norm > limit, norm, 1.0), rate)


def caps(direction: Chain, cap: bool) -> tuple[Phase, ...]:
    """The phase of a max_unorm, if there is one."""
    return (Phase((*direction, parameter_and_update_norms), cap_update),) if cap else ()


@gives("agrees")
def agreement(g, u):
    """One where the direction has the sign of the gradient; their sum is how many elements have."""
    return where(u * g > 0.0, 1.0, 0.0)


@gives("boost")
def boost_agreeing(agrees, numel):
    """The factor that makes up for elements that stay: one over the share of those that move."""
    return 1.0 / maximum(LEAST_SHARE, agrees / maximum(1.0, numel))


@gives("u")
def only_agreeing(g, u, boost):
    """Liang, Chen, Liu, Liu, arXiv:2411.16085, Alg. 1: no step against the gradient."""
    return where(u * g > 0.0, boost * u, 0.0)


def cautious(direction: Chain, caution: bool) -> tuple[Chain, tuple[Phase, ...]]:
    """A direction that moves only where it agrees with the gradient, and the phase for it."""
    if not caution:
        return direction, ()
    return (*direction, only_agreeing), (Phase((*direction, agreement), boost_agreeing),)


@gives("g_sq")
def gradient_square(g):
    """Term of ||g||^2."""
    return g * g


@gives("gscale")
def clip_to_percentile(gscale, g_sq, gnorm_vec, step, percentile, live):
    """Bitsandbytes' percentile clipping: ||g|| is at most that percentile of the last norms."""
    square = single(g_sq)
    limit = sqrt(recorded(gnorm_vec, step, square, percentile, live))
    norm = sqrt(square)
    return where(norm > limit, gscale * (limit / norm), gscale)


# A norm that is not finite has to be seen, and then nothing is clipped.
CLIP = Phase((gradient_square,), clip_to_percentile, finite=False)


def _streams(moments: tuple[Moment, ...]) -> dict[str, int]:
    """The random bits that each moment has: 3 of a square, 2 and 4 of others, 5 of any further."""
    squares, others = iter((3,)), iter((2, 4))
    return {m.key: next(squares if m.role == SQUARE else others, 5) for m in moments}


def dithered(moments: tuple[Moment, ...], keys: frozenset[str]) -> tuple[Moment, ...]:
    """Moments of a rule, those with these keys rounded by dither."""
    streams = _streams(moments)
    return tuple(replace(m, stream=streams[m.key]) if m.key in keys else m for m in moments)


@cache
def with_dither(rule: Rule, keys: frozenset[str]) -> Rule:
    """A rule some of whose moments are rounded by dither."""
    return replace(rule, moments=dithered(rule.moments, keys)) if keys else rule


def outlasting(moments: tuple[Moment, ...], keys: frozenset[str]) -> tuple[Moment, ...]:
    """Moments of a rule, those with these keys such as outlast their partners."""
    return tuple(replace(m, outlasts=True) if m.key in keys else m for m in moments)


@cache
def with_outlasting(rule: Rule, keys: frozenset[str]) -> Rule:
    """A rule some of whose moments outlast their partners."""
    return replace(rule, moments=outlasting(rule.moments, keys)) if keys else rule


@cache
def with_clipping(rule: Rule) -> Rule:
    """A rule whose gradients percentile clipping scales first."""
    return replace(rule, phases=(CLIP, *rule.phases), lasting=(*rule.lasting, NORMS))
