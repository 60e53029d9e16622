"""Bytes that the passes of a step move between memory and processor.

`python -m benchmarks.static.traffic` prints the table of docs/traffic.md. The count is derived from
what the functions of a rule read; a test holds it against the addresses that the Numba engine's
code touches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.common import registry, tables
from lowbit_optim_kernels import formats
from lowbit_optim_kernels.codegen.analysis import inputs
from lowbit_optim_kernels.rules import Moment, Phase, Rule
from lowbit_optim_kernels.weights import PLAIN, Weights

COLUMNS = (
    ("fp32, 8 bits", 4, 8),
    ("bf16, 8 bits", 2, 8),
    ("fp32, 32 bits", 4, 32),
)  # bytes of an element of parameter and gradient, bits of the state


@dataclass(frozen=True)
class Pass:
    """One walk over all elements.

    Attributes:
        name: "reduce_0", ... for the norms, then "update".
        reads, writes: of "p", "g" and the moments' keys. All that a pass touches twice it touches
            while the tile is in the first-level cache or in registers, so it counts once.
        moments: of the rule, all of which it reads if any, and all of which it writes.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    moments: tuple[Moment, ...]

    def moved(self, width: int, bits: int) -> float:
        """Bytes per element with `width` bytes an element of p and g and a state of `bits`."""
        return self.moved_with(width, width, formats.FORMATS[formats.OF_BITS[bits]])

    def moved_with(
        self, p: int, g: int, format: formats.Format, weights: Weights = PLAIN,
        block: float | None = None,
    ) -> float:  # fmt: skip
        """Bytes per element.

        Args:
            p, g: bytes of an element of the parameter and of the gradient.
            format: of the moments.
            weights: how the parameter is stored.
            block: elements that share a scale, on average; those of a whole block if None.
        """
        sharing = block or format.block
        state = sum(
            (part.dtype or torch.float32).itemsize / (sharing if part.per_block else 1)
            for part in formats.parts_of(self.moments, format)
        )
        width = {"p": p + (weights.residual.itemsize if weights.residual else 0), "g": g}
        total = 0.0
        for names in (self.reads, self.writes):
            total += sum(width[name] for name in names if name in width)
            total += state if set(names) - width.keys() else 0.0
        return total


def _reduction(rule: Rule, name: str, phase: Phase) -> Pass:
    """A norm: it reads what its terms do."""
    wanted = inputs(phase.terms)
    moments = tuple(moment.key for moment in rule.moments)
    # An engine decodes all moments if a pass reads any.
    state = moments if wanted & set(moments) else ()
    return Pass(name, tuple(name for name in "pg" if name in wanted) + state, (), rule.moments)


def passes(rule: Rule) -> list[Pass]:
    """The passes of a step, in their order."""
    moments = tuple(moment.key for moment in rule.moments)
    norms = [_reduction(rule, f"reduce_{k}", phase) for k, phase in enumerate(rule.phases)]
    return [*norms, Pass("update", ("p", "g", *moments), ("p", *moments), rule.moments)]


def bytes_of(
    rule: Rule, name: str, p: int, g: int, format: formats.Format, weights: Weights = PLAIN,
    block: float | None = None,
) -> float:  # fmt: skip
    """Bytes per element that the pass `name` reads and writes; see `Pass.moved_with`."""
    (found,) = (one for one in passes(rule) if one.name == name)
    return found.moved_with(p, g, format, weights, block)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule of an optimizer's first group; None of another library's, Cain or LearnedGradient.

    These two are composed of torch operations.
    """
    try:
        return optimizer.rule()
    except (AttributeError, NotImplementedError):
        return None


def extra_reads(optimizer: torch.optim.Optimizer) -> list[str]:
    """The tensors that norms of a step read once more, out of "param", "grad" and "state"."""
    rule = rule_of(optimizer)
    again: list[str] = []
    for one in passes(rule)[:-1] if rule else ():
        names = ["param" if n == "p" else "grad" if n == "g" else "state" for n in one.reads]
        again += dict.fromkeys(names)
    return again


def rules(**options: object) -> Iterator[tuple[registry.Row, Rule]]:
    """The rows of the registry that have a rule, which their options and these choose."""
    for row in registry.ROWS:
        rule = rule_of(row.source(8, **options)([torch.nn.Parameter(torch.zeros(1))], 1e-3))
        if rule is not None:
            yield row, rule


def table() -> str:
    """The table of docs/traffic.md: a row for each pass, and the sum where there are several."""
    head = ("optimizer", "pass", "reads", "writes", *(name for name, _, _ in COLUMNS))
    rows: list[tuple[str, ...]] = []
    for row, rule in rules():
        if row.lr is None:
            continue
        name, walked = row.entry_name(""), passes(rule)
        for one in walked:
            moved = (f"{one.moved(width, bits):.2f}" for _, width, bits in COLUMNS)
            rows.append((name, one.name, _codes(one.reads), _codes(one.writes), *moved))
        if len(walked) > 1:
            sums = (sum(one.moved(width, bits) for one in walked) for _, width, bits in COLUMNS)
            rows.append((name, "**all**", "", "", *(f"**{total:.2f}**" for total in sums)))
    return tables.markdown(head, rows)


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(table())
