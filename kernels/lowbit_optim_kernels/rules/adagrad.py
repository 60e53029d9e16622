"""Update rule of Adagrad."""

from __future__ import annotations

from . import SQUARE, TINY, Moment, Rule, gives
from .shared import caps, coupled_decay

SQUARES = (Moment("sum", SQUARE),)


@gives("floor", "shrink", "rate")
def prepare_adagrad(step, lr, lr_decay, eps):
    """The learning rate of step t is lr / (1 + (t - 1) lr_decay)."""
    return eps + TINY, 1.0, lr / (1.0 + (step - 1.0) * lr_decay)


@gives("u", "sum")
def adagrad(g, sum, floor):
    """Duchi, Hazan & Singer, JMLR 12 (2011), in torch.optim.Adagrad's form."""
    total = sum + g * g
    return g / (sqrt(total) + floor), total


def adagrad_rule(cap: bool) -> Rule:
    """The rule of Adagrad; `cap` for a max_unorm."""
    direction = (coupled_decay, adagrad)
    return Rule("adagrad", direction, prepare_adagrad, SQUARES, caps(direction, cap))
