"""Rules that only store: torch operators have worked their moments out, which are there as p and g.

Of `Cain` and `LearnedGradient`, whose steps need whole tensors. p and g are temporary tensors.
"""

from __future__ import annotations

from . import SQUARE, Moment, Rule, gives


@gives("shrink", "rate")
def leave_p():
    """Nothing is to be written to p."""
    return 1.0, 0.0


@gives("u", "delta", "exp_avg_sq")
def store_both(p, g):
    """A moment as p and a square as g."""
    return p, p, g


@gives("u", "exp_avg")
def store_average(p):
    """A moment as p."""
    return p, p


CAIN = Rule(
    "cain", (store_both,), leave_p,
    (Moment("delta", decay="beta1"), Moment("exp_avg_sq", SQUARE, decay="beta2")),
)  # fmt: skip
LEARNED_GRADIENT = Rule(
    "learned_gradient", (store_average,), leave_p, (Moment("exp_avg", decay="beta1"),)
)
