"""Templates of generated modules: ordinary Python files, specialized by their syntax trees.

A template is a module that is read and never run. To specialize a function of it some names are
bound to values. An expression of bound names alone is worked out and its value written instead; so

    for m in MOMENTS: ...     over a bound sequence is written out once for each item
    if MOMENTS: ...           is written as the branch that is taken
    top[m]                    with `m` an `Item` is a variable of its own, `top_<m.key>`
    top[MOMENTS]              are those variables of all items: a target, a result, `*` in a call
    all(... for m in MOMENTS), every(...), tuple(...), *(...)
                              are written out with `and`, with `&`, and one after the other
    def f(x, *NAMES)          takes the bound names; `*top` with `top` not bound the `top[MOMENTS]`
    def NAME(...)             is written under the name that NAME is bound to
    load()                    as a statement, with a `load` of the template that takes nothing, is
                              replaced by its body: it shares the variables around it. One with a
                              decorator becomes a function, which is given those that it reads
                              and returns those of them that it changes

A sequence of one item is written as that item, not as a tuple. Functions of the template that the
result calls, and the imports that it needs, are written with it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from types import CodeType, SimpleNamespace
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)
_OPEN = object()  # the value of what is not bound
_WORKED_OUT = {"zip": zip, "len": len}  # functions that are called where all they take is bound


class Variable(str):
    """A name that is written as such."""

    __slots__ = ()


class Item(SimpleNamespace):
    """Something that a template has variables for.

    Attributes:
        key: ends the variables' names. Further attributes are what a template asks about it.
    """

    key: str

    @property
    def value(self) -> Variable:
        """The variable of its value."""
        return Variable(f"value_{self.key}")


def variables(prefix: str, items: Iterable[Item]) -> tuple[Variable, ...]:
    """Variables that a template writes as `prefix[items]`."""
    return tuple(Variable(f"{prefix}_{item.key}") for item in items)


def _literal(value: Any, context: ast.expr_context) -> ast.expr:
    if isinstance(value, Variable):
        return ast.Name(str(value), context)
    if isinstance(value, tuple):
        return _one_or_tuple([_literal(x, context) for x in value], context)
    if isinstance(value, (bool, int, float)):
        return ast.Constant(value)
    raise TypeError(f"no text says {value!r}")


def _one_or_tuple(nodes: list[ast.expr], context: ast.expr_context) -> ast.expr:
    return nodes[0] if len(nodes) == 1 else ast.Tuple(nodes, context)


def _are_items(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(x, Item) for x in value)


def _function(node: ast.AST) -> str:
    """The name that is called, if one is."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _bind(target: ast.expr, value: Any) -> dict[str, Any]:
    if isinstance(target, ast.Tuple):
        pairs = zip(target.elts, value, strict=True)
        return {name: x for t, v in pairs for name, x in _bind(t, v).items()}
    assert isinstance(target, ast.Name)
    return {target.id: value}


def _copied(node: Node) -> Node:
    fields = ast.iter_fields(node)
    return type(node)(**{name: list(x) if isinstance(x, list) else x for name, x in fields})


@cache
def _names(node: ast.AST) -> frozenset[str] | None:
    """The names that an expression of a template can be worked out from; None if it cannot be."""
    nodes = list(ast.walk(node))
    if any(_function(x) not in _WORKED_OUT for x in nodes if isinstance(x, ast.Call)):
        return None
    names = frozenset(x.id for x in nodes if isinstance(x, ast.Name))
    return names if names or isinstance(node, ast.Tuple) else None


@cache
def _compiled(node: ast.AST) -> CodeType:
    return compile(ast.unparse(node), "<template>", "eval")


class _Specializer(ast.NodeTransformer):
    """Specializes one function."""

    def __init__(self, functions: dict[str, ast.FunctionDef], bound: dict[str, Any]) -> None:
        self.functions, self.bound = functions, {**_WORKED_OUT, **bound}
        self.called: list[str] = []  # functions of the template
        self.apart: dict[str, tuple[ast.FunctionDef, ast.Assign]] = {}  # fragments, and their calls

    def known(self, node: ast.AST) -> Any:
        """The value of an expression of bound names alone; else `_OPEN`."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, _OPEN)
        if isinstance(node, ast.Attribute):
            value = self.known(node.value)
            return _OPEN if value is _OPEN else getattr(value, node.attr)
        names = _names(node)
        if names is None or not names <= self.bound.keys():
            return _OPEN
        return eval(_compiled(node), {"__builtins__": {}}, self.bound)

    def each(
        self, loop: ast.For | ast.comprehension, build: Callable[[], list]
    ) -> list[Any] | None:
        """Nodes built for each item that a loop goes through; None if it is none of ours."""
        values = self.known(loop.iter)
        if values is _OPEN:
            return None
        outer = self.bound
        made: list[Any] = []
        for value in values:
            self.bound = {**outer, **_bind(loop.target, value)}
            made += build()
        self.bound = outer
        return made

    def sequence(self, node: ast.expr) -> list[ast.expr] | None:
        """The expressions that stand for a sequence; None if this is not one of ours."""
        context = getattr(node, "ctx", None) or ast.Load()
        if isinstance(node, ast.Call) and _function(node) == "tuple":
            return self.sequence(node.args[0])
        if isinstance(node, ast.GeneratorExp):
            (loop,) = node.generators
            return self.each(loop, lambda: [self.visit(node.elt)])
        if isinstance(node, ast.Subscript) and self.known(node.value) is _OPEN:
            items = self.known(node.slice)
            if isinstance(node.value, ast.Name) and _are_items(items):
                return [_literal(x, context) for x in variables(node.value.id, items)]
            return None
        value = _OPEN if isinstance(node, ast.Tuple) else self.known(node)
        return [_literal(x, context) for x in value] if isinstance(value, tuple) else None

    def spread(self, nodes: list[ast.expr], targets: bool = False) -> list[ast.expr]:
        """Elements of a tuple or arguments of a call, with sequences in place."""
        made: list[ast.expr] = []
        for node in nodes:
            inner = node.value if isinstance(node, ast.Starred) else node if targets else None
            several = None if inner is None else self.sequence(inner)
            made += [self.visit(node)] if several is None else several
        return made

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in body:
            result = self.visit(statement)
            made += result if isinstance(result, list) else [result]
        return made

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Tuple):
            value = self.known(node)
            if value is not _OPEN:
                return _literal(value, getattr(node, "ctx", None) or ast.Load())
            several = self.sequence(node)
            if several is not None:
                return _one_or_tuple(several, getattr(node, "ctx", None) or ast.Load())
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """As the base class does, but of a copy: a template is specialized many times."""
        return super().generic_visit(_copied(node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        made, arguments = _copied(node), _copied(node.args)
        if arguments.vararg is not None:
            name = arguments.vararg.arg
            names = (
                self.bound[name] if name in self.bound else variables(name, self.bound["MOMENTS"])
            )
            arguments.args += [ast.arg(str(x)) for x in names]
            arguments.vararg = None
        made.name, made.args = str(self.bound.get(node.name, node.name)), arguments
        made.body = self.statements(_body(node))
        own = {x.arg for x in arguments.args}.union(_used(made, ast.Store))
        for fragment, call in self.apart.values():
            _connect(fragment, call, own)
        return made

    def visit_For(self, node: ast.For) -> Any:
        made = self.each(node, lambda: self.statements(node.body))
        return self.generic_visit(node) if made is None else made

    def visit_If(self, node: ast.If) -> Any:
        taken = self.known(node.test)
        if taken is _OPEN:
            return self.generic_visit(node)
        return self.statements(node.body if taken else node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        taken = self.known(node.test)
        if taken is _OPEN:
            return self.generic_visit(node)
        return self.visit(node.body if taken else node.orelse)

    def visit_Expr(self, node: ast.Expr) -> Any:
        fragment = self.functions.get(_function(node.value))
        if fragment is None or ast.unparse(fragment.args):
            return self.generic_visit(node)
        body = self.statements(_body(fragment))
        if not fragment.decorator_list:
            return body
        made = _copied(fragment)
        made.body = body
        first, call = self.apart.setdefault(made.name, (made, ast.Assign([], node.value)))
        assert ast.dump(first) == ast.dump(made), f"{made.name} is not the same everywhere"
        return call

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        item, *rest = map(self.known, index)
        if not isinstance(item, Item) or not isinstance(node.value, ast.Name):
            return self.generic_visit(node)
        return ast.Name("_".join([node.value.id, item.key, *map(str, rest)]), node.ctx)

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        return ast.Tuple(self.spread(node.elts, isinstance(node.ctx, ast.Store)), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = _function(node)
        parts = self.sequence(node.args[0]) if name in ("all", "every") else None
        if parts is not None:
            if len(parts) == 1:
                return parts[0]
            if name == "all":
                return ast.BoolOp(ast.And(), parts)
            return reduce(lambda x, y: ast.BinOp(x, ast.BitAnd(), y), parts)
        if name in self.functions:
            self.called.append(name)
        keywords = [self.visit(keyword) for keyword in node.keywords]
        return ast.Call(self.visit(node.func), self.spread(node.args), keywords)


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    """Its statements, without the docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def _used(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """The names that are read, or written, in some part of a function."""
    nodes = (x for x in ast.walk(node) if isinstance(x, ast.Name))
    return [x.id for x in nodes if isinstance(x.ctx, context)]


def _connect(fragment: ast.FunctionDef, call: ast.Assign, around: set[str]) -> None:
    """Give a fragment what it reads of the variables around it, and these what it changes."""
    read, written = dict[str, None](), set[str]()
    for statement in fragment.body:
        names = _used(statement, ast.Load)
        read.update(dict.fromkeys(x for x in names if x in around and x not in written))
        written.update(_used(statement, ast.Store))
    changed = [Variable(x) for x in read if x in written]
    fragment.args = ast.arguments(
        [], [ast.arg(x) for x in read], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    fragment.body.append(ast.Return(_literal(tuple(changed), ast.Load())))
    call.targets = [_literal(tuple(changed), ast.Store())]
    call.value = ast.Call(
        ast.Name(fragment.name, ast.Load()), [ast.Name(x, ast.Load()) for x in read], []
    )


Imports = dict[str, tuple[str, str | None]]  # a name: its module and its name there, if any


@cache
def _parsed(template: str) -> tuple[dict[str, ast.FunctionDef], Imports]:
    """Functions of a template, and the names that it imports."""
    spec: Any = importlib.util.find_spec(template)
    tree = ast.parse(spec.loader.get_source(template))  # which a zip file's loader has, too
    functions: dict[str, ast.FunctionDef] = {}
    imports: Imports = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, template.rpartition(".")[0])
            imports.update({x.asname or x.name: (module, x.name) for x in node.names})
        elif isinstance(node, ast.Import):
            imports.update({x.asname or x.name: (x.name, None) for x in node.names})
    return functions, imports


class Writer:
    """Writes a module of functions that templates have.

    Args:
        templates: names of the templates' modules; of two functions of a name the later one is it.
    """

    def __init__(self, *templates: str) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.imports: Imports = {}
        for template in templates:
            functions, imports = _parsed(template)
            self.functions.update(functions)
            self.imports.update(imports)
        self.written: dict[str, ast.FunctionDef] = {}

    def add(self, name: str, **bound: Any) -> None:
        """Write a function with some names bound, after those of the templates that it calls."""
        specializer = _Specializer(self.functions, bound)
        made = specializer.visit(self.functions[name])
        for called in specializer.called:
            if called not in self.written:
                self.add(called, **bound)
        for function in (*(fragment for fragment, _ in specializer.apart.values()), made):
            self.written[function.name] = ast.fix_missing_locations(function)

    def text(self, head: str = "") -> str:
        """The imports, a text of other things, and the functions."""
        nodes = [x for function in self.written.values() for x in ast.walk(function)]
        used = dict.fromkeys(x.id for x in nodes if isinstance(x, ast.Name))
        imports = []
        for name in used:
            module, there = self.imports.get(name, (None, None))
            if module is not None:
                what = f"import {module}" if there is None else f"from {module} import {there}"
                imports.append(what if name in (module, there) else f"{what} as {name}")
        functions = map(ast.unparse, self.written.values())
        return "\n\n\n".join(["\n".join(sorted(imports)), head, *functions]) + "\n"
