"""Update rule of Adagrad."""

from __future__ import annotations

from . import CAP, TINY, Moment, Rule, gives

SQUARES = (Moment("sum", signed=False),)


@gives("floor", "shrink", "rate")
def prepare_adagrad(step, lr, lr_decay, eps):
    """The learning rate of step t is lr / (1 + (t - 1) lr_decay)."""
    return eps + TINY, 1.0, lr / (1.0 + (step - 1.0) * lr_decay)


@gives("u", "sum")
def adagrad(p, g, sum, floor, weight_decay):
    """Duchi, Hazan & Singer, JMLR 12 (2011), in torch.optim.Adagrad's form."""
    d = g + weight_decay * p
    total = sum + d * d
    return d / (sqrt(total) + floor), total


def adagrad_rule(cap: bool) -> Rule:
    """The rule of Adagrad; `cap` for a max_unorm."""
    return Rule("adagrad", adagrad, prepare_adagrad, SQUARES, (CAP,) if cap else ())
