"""Update rules of Adam, AdamW and AMSGrad."""

from __future__ import annotations

from . import RATIO, SQUARE, TINY, Chain, Moment, Rule, gives
from .shared import caps, cautious, coupled_decay

ADAM = (
    Moment("exp_avg", RATIO, partner="exp_avg_sq", decay="beta1"),
    Moment("exp_avg_sq", SQUARE, decay="beta2"),
)
AMSGRAD = (*ADAM, Moment("max_exp_avg_sq", SQUARE, maximum=True))


def gains(beta1, beta2):
    """The gains of new moments: d = gain1 g, and v gains gain_sq d^2 = (1 - beta2) g^2.

    Taken of d, and not of g, that is a multiplication less for every element. 1 - beta is in fp64:
    in fp32, 1 - 0.999 is off by 5e-5 of itself.
    """
    gain1 = 1.0 - beta1
    return gain1, (1.0 - beta2) / (gain1 * gain1)


@gives("gain1", "gain_sq", "root", "floor", "shrink", "rate")
def prepare_adam(step, lr, beta1, beta2, eps, weight_decay, decoupled):
    """Bias corrections are in the denominator: bc1 (sqrt(v / bc2) + eps) = root sqrt(v) + floor."""
    gain1, gain_sq = gains(beta1, beta2)
    bias1 = 1.0 - power(beta1, step)
    bias2 = 1.0 - power(beta2, step)
    shrink = 1.0 - decoupled * lr * weight_decay
    return gain1, gain_sq, bias1 / sqrt(bias2), bias1 * eps + TINY, shrink, lr


@gives("u", "exp_avg", "exp_avg_sq")
def adam(g, exp_avg, exp_avg_sq, beta1, beta2, gain1, gain_sq, root, floor):
    """Kingma & Ba, arXiv:1412.6980, Alg. 1; with decoupled decay arXiv:1711.05101, Alg. 2."""
    d = gain1 * g
    m = beta1 * exp_avg + d
    v = beta2 * exp_avg_sq + gain_sq * (d * d)
    return m / (root * sqrt(v) + floor), m, v


@gives("u", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
def amsgrad(g, exp_avg, exp_avg_sq, max_exp_avg_sq, beta1, beta2, gain1, gain_sq, root, floor):
    """Reddi, Kale, Kumar, arXiv:1904.09237, Alg. 2, as in torch.optim."""
    d = gain1 * g
    m = beta1 * exp_avg + d
    v = beta2 * exp_avg_sq + gain_sq * (d * d)
    largest = maximum(max_exp_avg_sq, v)
    return m / (root * sqrt(largest) + floor), m, v, largest


def adam_chain(use_amsgrad: bool, coupled: bool) -> Chain:
    """Adam's direction; `coupled` puts the decay into the gradient."""
    return (*((coupled_decay,) if coupled else ()), amsgrad if use_amsgrad else adam)


def adam_rule(use_amsgrad: bool, coupled: bool, cap: bool, caution: bool = False) -> Rule:
    """The rule of Adam and AdamW with these options."""
    direction, phases = cautious(adam_chain(use_amsgrad, coupled), caution)
    moments = AMSGRAD if use_amsgrad else ADAM
    return Rule("adam", direction, prepare_adam, moments, (*phases, *caps(direction, cap)))
