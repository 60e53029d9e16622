"""The text of a rule's functions as Triton takes it: bound operations, and fused sums."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import TypeGuard


class _Divisions(ast.NodeTransformer):
    """Turn a / b into divide(a, b), which is bound like the other operations of a rule."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        by_number = isinstance(node.right, ast.Constant) or _is_number(node.right)
        if not isinstance(node.op, ast.Div) or by_number:
            return node
        return ast.Call(ast.Name("divide", ast.Load()), [node.left, node.right], [])


class _FusedSums(ast.NodeTransformer):
    """Turn a * b + c into fused(a, b, c), of two products the left one: rounded once.

    Were it left to the compiler, which of two it fuses would depend on what else is in a kernel.
    """

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, (ast.Add, ast.Sub)):
            return node
        left, right, minus = node.left, node.right, isinstance(node.op, ast.Sub)
        if _is_product(left):
            return _fused(left.left, left.right, _negative(right) if minus else right)
        if _is_product(right):
            return _fused(_negative(right.left) if minus else right.left, right.right, left)
        return node


def _is_product(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _negative(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("negative", ast.Load()), [node], [])


def _fused(*operands: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("fused", ast.Load()), list(operands), [])


def _is_number(node: ast.expr) -> bool:
    """Whether a name is one of a module's numbers."""
    return isinstance(node, ast.Name) and node.id.isupper()


def for_triton(source: str, of_elements: Collection[str]) -> str:
    """Source of rule functions, with bound divisions; their modules' numbers as tl.constexpr.

    Those of elements, by their names, have fused sums, too. (A literal would be fp32 there, so
    the others, which compute in fp64, have none.)
    """
    texts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and _is_number(node.targets[0]):
            name, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
            texts.append(f"{name} = tl.constexpr({value})")
        else:
            changed = _Divisions().visit(node)
            if isinstance(changed, ast.FunctionDef) and changed.name in of_elements:
                changed = _FusedSums().visit(changed)
            texts.append(ast.unparse(changed))
    return "\n\n\n".join(texts)
