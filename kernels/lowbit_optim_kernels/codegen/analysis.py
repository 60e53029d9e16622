"""From a rule to source text: what the compiled engines share.

Each engine writes a module per rule (and dtypes), which `module_cache` imports.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeGuard

from ..rules import PER_TENSOR, PRIMITIVES, Chain, Rule, RuleFunction

SUFFIX = "_of_rule"  # of the names of rules' functions, beside an engine's own


@cache
def reads(fn: RuleFunction) -> tuple[str, ...]:
    """Names that a rule function reads."""
    return tuple(inspect.signature(fn).parameters)


def name_of(fn: RuleFunction) -> str:
    """The name of a rule function in a generated module."""
    return fn.__name__ + SUFFIX


def inputs(chain: Chain) -> set[str]:
    """Names that a chain reads, but those that its own functions have given before."""
    wanted: set[str] = set()
    given: set[str] = set()
    for fn in chain:
        wanted |= set(reads(fn)) - given
        given |= set(fn.gives)
    return wanted


class _Plain(ast.NodeTransformer):
    """Drop docstrings, decorators and annotations; rename functions, and wrap numbers if asked."""

    def __init__(self, literal: str | None, renamed: Mapping[str, str]) -> None:
        self.literal, self.renamed = literal, renamed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.name += SUFFIX
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.renamed.get(node.id, node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if self.literal and isinstance(node.value, float):
            wrapped = ast.parse(f"{self.literal}({node.value!r})", mode="eval")
            return wrapped.body
        return node


class _FusedSums(ast.NodeTransformer):
    """See `with_fused_sums`."""

    def __init__(self, negative: Callable[[ast.expr], ast.expr]) -> None:
        self.negative = negative

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, (ast.Add, ast.Sub)):
            return node
        left, right, minus = node.left, node.right, isinstance(node.op, ast.Sub)
        if _is_product(left):
            return call_of("fused", left.left, left.right, self.negative(right) if minus else right)
        if _is_product(right):
            a = self.negative(right.left) if minus else right.left
            return call_of("fused", a, right.right, left)
        return node


def _is_product(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def call_of(name: str, *operands: ast.expr) -> ast.Call:
    """A call of one of the operations that an engine binds."""
    return ast.Call(ast.Name(name, ast.Load()), list(operands), [])


def with_fused_sums(tree: ast.AST, negative: Callable[[ast.expr], ast.expr]) -> Any:
    """A tree with fused(a, b, c) for a * b + c, of two products the left one; differences likewise.

    They are rounded once. Were it left to a compiler, which of two products it fuses would depend
    on what else is in a kernel. `negative` makes the negative of an expression.
    """
    return _FusedSums(negative).visit(tree)


def _globals_used(fn: RuleFunction) -> list[str]:
    bound = (*PRIMITIVES, *PER_TENSOR)
    return [x for x in fn.__code__.co_names if x not in bound and x in fn.__globals__]


def functions_source(
    functions: Iterable[RuleFunction], decorator: str, literal: str | None = None
) -> str:
    """Source of rule functions, and of the rule functions and numbers that they use.

    Args:
        functions: rule functions.
        decorator: text of the decorator, e.g. "@njit".
        literal: wrap float literals in a call of this name, so that they do not widen fp32.

    Raises:
        ValueError: for two functions, or two numbers, of one name.
    """
    done: dict[str, str] = {}
    known: dict[str, Any] = {}

    def know(name: str, value: Any) -> None:
        if known.setdefault(name, value) != value:
            kind = "functions" if callable(value) else "numbers"
            raise ValueError(f"a rule has two {kind} {name!r}; rename one of them")

    def add(fn: RuleFunction) -> None:
        know(fn.__name__, fn)
        if fn.__name__ in done:
            return
        used = {name: fn.__globals__[name] for name in _globals_used(fn)}
        for name, value in used.items():
            if callable(value):
                add(value)
            else:
                know(name, value)
                number = ast.unparse(ast.Constant(value))  # infinity too, as 1e309
                wrapped = f"{literal}({number})" if literal else number
                done[name] = f"{name} = {wrapped}\n"
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
        renamed = {name: name_of(value) for name, value in used.items() if callable(value)}
        plain = _Plain(literal, renamed)
        text = ast.unparse(ast.fix_missing_locations(plain.visit(tree)))
        done[fn.__name__] = f"{decorator}\n{text}\n"

    for fn in functions:
        add(fn)
    return "\n\n".join(done.values())


def scalar_functions(rule: Rule) -> tuple[RuleFunction, ...]:
    """The functions of a rule that run once per tensor."""
    return (rule.prepare, *(phase.combine for phase in rule.phases))


def element_functions(rule: Rule) -> tuple[RuleFunction, ...]:
    """The functions of a rule that run once per element, each once."""
    chains = (rule.direction, *(phase.terms for phase in rule.phases))
    return tuple(dict.fromkeys(fn for chain in chains for fn in chain))


def element_names(rule: Rule) -> set[str]:
    """Names that stand for one element, not for a per-tensor value."""
    given = {name for fn in element_functions(rule) for name in fn.gives}
    return {"p", "g", *(moment.key for moment in rule.moments), *given}


def element_scalars(rule: Rule, functions: Iterable[RuleFunction]) -> list[str]:
    """Per-tensor values and hyperparameters that element functions read, each once."""
    of_elements = element_names(rule)
    names = dict.fromkeys(name for fn in functions for name in reads(fn))
    return [name for name in names if name not in of_elements]


@cache
def hyper_names(rule: Rule) -> tuple[str, ...]:
    """Hyperparameters that any function of the rule reads, in order of first use."""
    given = {"step", "numel", "gscale", "live", *element_names(rule), *rule.scalars()}
    given |= {x.key for x in rule.lasting}
    functions = (*scalar_functions(rule), *element_functions(rule))
    names = dict.fromkeys(name for fn in functions for name in reads(fn))
    return tuple(name for name in names if name not in given)
