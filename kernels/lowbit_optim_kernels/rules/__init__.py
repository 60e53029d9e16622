"""The vocabulary of an update rule, and how an engine reads one.

An optimizer is a `Rule`: plain Python functions over fp32 numbers that never see storage, blocks,
tensors or devices. Everything is wired by name. A function's parameters say what it reads, its
`@gives(...)` says what it returns, and each engine supplies the names:

====================  ==========================================================================
`p`, `g`              one element of the parameter and of its (clipped, unscaled) gradient
a moment's key        one decoded element of that moment, e.g. `exp_avg`
`step`, `numel`       per tensor: the number of this step (from 1), the *global* element count
`gscale`, `live`      per tensor: what gradients are multiplied by, and whether the step counts,
                      which an AMP scaler may have found to overflow
a `Lasting`'s key     per tensor: its number, as the step before left it
hyperparameters       per group: `lr`, `beta1`, ... as the front-end names them
earlier `@gives`      what functions before this one gave: per tensor `prepare` and the `combine` of
                      earlier phases, per element those before it in its chain
====================  ==========================================================================

`prepare` and `combine` run once per tensor in fp64. Functions over elements run in fp32 (fp64 for
fp64 parameters) and come in chains: what one gives, those after it read, under a new name or in
place of what had it. `(coupled_decay, adam)` is Adam of a gradient with the decay in it.

The chain `direction` gives `u` and every moment; the engine then writes, for every element,

    p = shrink * p - rate * u

so `prepare` or a `combine` must give `shrink` and `rate`. The bare names of `PRIMITIVES` are bound
per engine; `maximum` and `minimum` are NaN where their second argument is, so a bound stands first.
Rules are straight-line code: assignments and one return. What several rules have in common is in
`shared`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

PRIMITIVES = ("sqrt", "where", "abs", "sign", "maximum", "minimum", "power", "log", "exp")
# And for functions that run once per tensor: rounded to fp32; `recorded`, see `Lasting`.
PER_TENSOR = ("single", "recorded")

HISTORY = 100  # numbers of a `Lasting` history

# Added to a denominator's eps: lost in the rounding of any eps in use, and with eps = 0 it makes an
# update of 0 / 0 zero. About the smallest fp32 number that no device flushes to zero.
TINY = 2e-38


class RuleFunction(Protocol):
    """A function of a rule: the names that it returns, and ordinary function attributes."""

    __name__: str
    __code__: Any
    __globals__: dict[str, Any]
    gives: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        """Compute the values called `gives`."""

    def __hash__(self) -> int:
        """Functions are kept in caches."""


Chain = tuple[RuleFunction, ...]


def gives(*names: str) -> Callable[[Any], RuleFunction]:
    """Declare the names of the values that a rule function returns, in order.

    Raises:
        ValueError: for a function that reads a variable of a function around it: engines take its
            code alone.
    """

    def mark(fn: Any) -> RuleFunction:
        if fn.__code__.co_freevars:
            raise ValueError(
                f"the rule function {fn.__name__!r} reads {', '.join(fn.__code__.co_freevars)} of "
                "a function around it; it can read hyperparameters, and numbers of its module"
            )
        fn.gives = names
        return fn

    return mark


# Roles of moments, by which formats choose a code. A square is never negative, and a code keeps a
# positive one from becoming zero. A ratio is an average whose update divides it by the root of a
# square, its partner. Of a sign moment small numbers count as much as large ones.
SIGNED, SIGN, SQUARE, RATIO = "signed", "sign", "square", "ratio"


@dataclass(frozen=True)
class Moment:
    """One moment of the optimizer state.

    Attributes:
        key: its name in `state_dict()`.
        role: what it is to the update: one of SIGNED, SIGN, SQUARE and RATIO.
        partner: the key of the square that a ratio is divided by.
        decay: the hyperparameter that is its averaging coefficient, if it is an average.
        exact: whether it is kept in 32 bits whatever the state's format is.
        maximum: whether it is the largest value so far, which dither would make creep upward.
        stream: which random bits dither its codes; 0 where they are rounded to nearest. A rule as
            it is written has none: `shared.with_dither` gives them.
        outlasts: whether it decays no faster than the root of its partner, so that what a small
            root is off by would grow in a ratio to it. As `stream`, from `shared.with_outlasting`.
    """

    key: str
    role: str = SIGNED
    partner: str | None = None
    decay: str | None = None
    exact: bool = False
    maximum: bool = False
    stream: int = 0
    outlasts: bool = False

    @property
    def signed(self) -> bool:
        """Whether it can be negative."""
        return self.role != SQUARE


@dataclass(frozen=True)
class Lasting:
    """A number or history of a tensor that lasts from step to step, beside moments and step.

    Attributes:
        key: its name in `state_dict()`.
        start: its value before the first step.
        history: whether it is the last `HISTORY` numbers, in fp32, of what `recorded` is given; a
            negative `start` says that nothing has been recorded. Otherwise it is one number, of
            `devices.scalar_dtype`, and what a function gives under its key is kept when the step
            is finished.

    `recorded(history, step, x, rank, live)` puts x >= 0 into its place, or everywhere at first, and
    is the number of this rank, from 0, in order of size. It is infinite, and nothing is recorded,
    when x is not finite, the step does not count, or a first x is 0: which tells nothing of size.
    """

    key: str
    start: float = 0.0
    history: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its tensor."""
        return (HISTORY,) if self.history else ()


@dataclass(frozen=True)
class Phase:
    """A reduction over whole tensors: `terms` per element, summed; then `combine` per tensor.

    Attributes:
        terms: a chain, whose last function gives the terms.
        combine: reads their sums under the same names.
        finite: whether only finite terms are summed, lest one bad gradient spoil a norm.
    """

    terms: Chain
    combine: RuleFunction
    finite: bool = True

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums."""
        return self.terms[-1].gives


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic. See the module's text for what the functions may read."""

    name: str
    direction: Chain
    prepare: RuleFunction
    moments: tuple[Moment, ...] = ()
    phases: tuple[Phase, ...] = ()
    lasting: tuple[Lasting, ...] = ()

    def scalars(self) -> tuple[str, ...]:
        """Names of the per-tensor values the rule computes, in order of first appearance."""
        names: dict[str, None] = {}
        for fn in (self.prepare, *(phase.combine for phase in self.phases)):
            names.update(dict.fromkeys(fn.gives))
        return tuple(names)

    def kept(self) -> tuple[str, ...]:
        """Names of the lasting numbers that a step gives."""
        return tuple(x.key for x in self.lasting if not x.history)
