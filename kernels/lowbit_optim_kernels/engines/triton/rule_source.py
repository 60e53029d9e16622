"""The text of a rule's functions as Triton takes it: bound operations, and fused sums."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import partial

from ...codegen.analysis import call_of, with_fused_sums


class _Divisions(ast.NodeTransformer):
    """Turn a / b into divide(a, b), which is bound like the other operations of a rule."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        by_number = isinstance(node.right, ast.Constant) or _is_number(node.right)
        if not isinstance(node.op, ast.Div) or by_number:
            return node
        return call_of("divide", node.left, node.right)


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
                changed = with_fused_sums(changed, partial(call_of, "negative"))
            texts.append(ast.unparse(changed))
    return "\n\n\n".join(texts)
