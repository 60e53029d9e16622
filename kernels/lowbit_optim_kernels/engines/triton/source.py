"""The Triton engine's template: the text of the module that it writes for one rule.

A program takes a tile of NB blocks of one tensor, so that one launch covers any number of tensors.
Tables on the device:

    address   int64 (tensors, ...)   p, g, step, moments..., absmax..., gnorm_vec
    geometry  int64 (tensors, 5)     row, blocks per row, blocks, first tile, global numel
    hyper     fp64  (...)            hyperparameters
    scalars   fp64  (tensors, ...)   gscale, live, then what the rule's scalar functions give
    floats    fp32  (tensors, ...)   the same, and the hyperparameters that elements need
    work      int32 (programs, 4)    tensor + kind * 2**25, first block, its row, its number there
    partial   fp32  (tiles, terms)   sums of a reduction's terms over one tile
    tables    fp32  (2048,)          codebooks and lines of the codec

A tile is WHOLE when its blocks are 256 elements each, one after the other, at aligned addresses: it
needs no mask. ALIGN is 16 where every block starts at a multiple of 16 elements, else 1. These two,
the dtypes of p and g, and the BITS of the moments are a tile's kind. `triton_kinds` writes how a
kernel takes tiles of several kinds, and what stands in the first column of `work`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from ...codegen.analysis import (
    element_functions,
    element_scalars,
    functions_source,
    hyper_names,
    indent,
    reads,
    scalar_functions,
)
from ...formats.dynamic8 import ZERO_CODE
from ...plan import STATE as MOMENTS
from ...plan import STEP, G, P, address_columns
from ...rules import Rule, RuleFunction, gradient_square
from .kinds import TENSORS, call_tile, kernel

ROW, PER_ROW, BLOCKS, TILES, NUMEL, GEOMETRY = 0, 1, 2, 3, 4, 5  # of `geometry`; its width
GSCALE, LIVE, SCALARS = 0, 1, 2  # columns of `scalars` and of `floats`
LANES = 128  # tensors per program of the per-tensor kernels

HEADER = """\
import triton
import triton.language as tl
from lowbit_optim_kernels.formats.dynamic8.triton import absmax, decode, encode
from lowbit_optim_kernels.engines.triton.primitives import (
    abs, exp, finite, log, maximum, minimum, narrow, only_finite, power, sign, total, where,
    widen,
)
"""
PLAIN = "from lowbit_optim_kernels.engines.triton.primitives import divide, sqrt\n"
FAST = """\
from lowbit_optim_kernels.engines.triton.primitives import ptx_divide as divide, ptx_sqrt as sqrt
"""

# Where the elements of NB blocks from `piece` on are: from a multiple of 16 on if each block's are.
TILE = f"""\
program = tl.program_id(0)
first = tl.load(work + 4 * program + 1)
tile = tl.arange(0, NB) + piece
lane = tl.arange(0, 256)
if WHOLE:
    base = tl.multiple_of(first.to(tl.int64) * 256, 16)
    at = tile[:, None] * 256 + lane[None, :]
    inside = None
    mask = None
    zero = None
else:
    line = tl.load(work + 4 * program + 2).to(tl.int64)
    left = tl.load(work + 4 * program + 3)
    row = tl.load(geometry + t * {GEOMETRY} + {ROW})
    per_row = tl.load(geometry + t * {GEOMETRY} + {PER_ROW}).to(tl.uint32)
    inside = tile < tl.load(geometry + t * {GEOMETRY} + {BLOCKS}) - first
    down = ((left + tile).to(tl.uint32) // per_row).to(tl.int32)
    column = left + tile - down * per_row.to(tl.int32)
    start = down * row.to(tl.int32) + (column - left) * 256  # blocks of a tile are neighbours
    size = tl.minimum(row - column.to(tl.int64) * 256, 256).to(tl.int32)
    size = tl.multiple_of(tl.where(inside, size, 0), ALIGN)
    base = tl.multiple_of(line * row + left.to(tl.int64) * 256, ALIGN)
    at = tl.multiple_of(start, ALIGN)[:, None] + lane[None, :]
    mask = lane[None, :] < size[:, None]
    zero = 0
block = first + tile"""


def _call(fn: RuleFunction) -> str:
    return f"{', '.join(fn.gives)} = {fn.__name__}({', '.join(reads(fn))})"


def float_names(rule: Rule) -> list[str]:
    """What the columns of `floats` after the first two hold."""
    elements = element_scalars(rule, element_functions(rule))
    return list(dict.fromkeys([*rule.scalars(), *elements]))


def _literals(rule: Rule) -> dict[str, float]:
    """Per-tensor values that `prepare` gives as a number and no phase replaces."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(rule.prepare)))
    (result,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    values = result.elts if isinstance(result, ast.Tuple) else [result]
    given = zip(rule.prepare.gives, values, strict=True)
    replaced = {name for phase in rule.phases for name in phase.combine.gives}
    return {
        name: node.value
        for name, node in given
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and name not in replaced
    }


def module(rule: Rule, ptx: bool) -> str:
    """Text of the module with all kernels of a rule; storage kinds are constexpr arguments.

    Args:
        rule: the rule.
        ptx: for an NVIDIA GPU: single machine instructions where Triton itself would take several.
    """
    writer = _Writer(rule, ptx)
    functions = (*scalar_functions(rule), *element_functions(rule), gradient_square)
    source = functions_source(functions, "@triton.jit", literal=None)
    parts = [HEADER + (FAST if ptx else PLAIN), _for_triton(source)]
    parts.append(writer.scalar_kernel("begin", rule.prepare, {}))
    for k, phase in enumerate(rule.phases):
        sums = {
            name: f"tl.load(sums + t * {len(phase.terms.gives)} + {i}, mask=mask, other=0.0)"
            for i, name in enumerate(phase.terms.gives)
        }
        parts.append(writer.scalar_kernel(f"combine_{k}", phase.combine, sums))
        parts.append(writer.reduction(f"reduce_{k}", phase.terms))
    parts.append(writer.reduction("reduce_clip", gradient_square))
    parts.append(writer.update())
    return "\n\n\n".join(parts) + "\n"


class _Divisions(ast.NodeTransformer):
    """Turn a / b into divide(a, b), which is bound like the other operations of a rule."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        by_number = isinstance(node.right, ast.Constant) or _is_number(node.right)
        if not isinstance(node.op, ast.Div) or by_number:
            return node
        return ast.Call(ast.Name("divide", ast.Load()), [node.left, node.right], [])


def _is_number(node: ast.expr) -> bool:
    """Whether a name is one of a module's numbers."""
    return isinstance(node, ast.Name) and node.id.isupper()


def _for_triton(source: str) -> str:
    """Source of rule functions, with bound divisions; their modules' numbers as tl.constexpr."""
    texts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and _is_number(node.targets[0]):
            name, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
            texts.append(f"{name} = tl.constexpr({value})")
        else:
            texts.append(ast.unparse(_Divisions().visit(node)))
    return "\n\n\n".join(texts)


class _Writer:
    """Writes the kernels of one rule."""

    def __init__(self, rule: Rule, ptx: bool) -> None:
        self.rule, self.ptx, self.moments = rule, ptx, rule.moments
        self.hyper, self.columns = hyper_names(rule), rule.scalars()
        self.width, self.stride = SCALARS + len(self.columns), address_columns(rule.moments)
        self.floats = float_names(rule)
        self.float_width = SCALARS + len(self.floats)

    # Per-tensor kernels: a lane per tensor, fp64.

    def scalar_kernel(self, name: str, fn: RuleFunction, known: dict[str, str]) -> str:
        """A kernel that loads what `fn` reads for each tensor, calls it, stores what it gives."""
        begin = name == "begin"
        step = f"tl.load(address + t * {self.stride} + {STEP}, mask=mask, other=0)"
        numel = f"tl.load(geometry + t * {GEOMETRY} + {NUMEL}, mask=mask, other=1)"
        lines = [
            f"t = tl.program_id(0) * {LANES} + tl.arange(0, {LANES})",
            "mask = t < tl.load(count)",
            f"row = scalars + t * {self.width}",
            f"floats_row = floats + t * {self.float_width}",
        ]
        if begin or "step" in reads(fn):
            lines.append(f"step_at = {step}.to(tl.pointer_type(tl.int64))")
            lines.append("step = tl.load(step_at, mask=mask, other=1).to(tl.float64)")
        if begin:
            lines += self._begin()
        for read in reads(fn):
            if read == "step":
                continue
            if read in known:
                source = known[read]
            elif read == "numel":
                source = f"{numel}.to(tl.float64)"
            elif read in self.columns:
                column = SCALARS + self.columns.index(read)
                source = f"tl.load(row + {column}, mask=mask, other=0.0)"
            else:
                source = f"tl.load(hyper + {self.hyper.index(read)} + 0 * t)"
            lines.append(f"{read} = {source}")
        lines.append(_call(fn))
        for given in fn.gives:
            column = SCALARS + self.columns.index(given)
            lines.append(f"tl.store(row + {column}, {given}, mask=mask)")
            lines.append(self._keep_float(given, given))
        if begin:
            for given in self.floats:
                if given not in self.columns:
                    source = f"tl.load(hyper + {self.hyper.index(given)} + 0 * t)"
                    lines.append(self._keep_float(given, source))
        switches = ("MAXIMIZE", "UNSCALE", "GUARDED")
        extra = ["grad_scale", "found_inf", *(f"{x}: tl.constexpr" for x in switches)]
        tables = ["address", "geometry", "hyper", "scalars", "floats", "count"]
        arguments = ", ".join([*tables, *(extra if begin else ["sums"])])
        return f"@triton.jit\ndef {name}({arguments}):\n{indent(lines, 4)}"

    def _keep_float(self, name: str, source: str) -> str:
        column = SCALARS + self.floats.index(name)
        return f"tl.store(floats_row + {column}, {source}, mask=mask)"

    def _begin(self) -> list[str]:
        return [
            "live = tl.full((), 1.0, tl.float64)",
            "if GUARDED:",
            "    live = tl.where(tl.load(found_inf).to(tl.float64) == 0.0, 1.0, 0.0)",
            "gscale = tl.full((), -1.0 if MAXIMIZE else 1.0, tl.float64)",
            "if UNSCALE:",
            "    gscale = gscale / tl.load(grad_scale).to(tl.float64)",
            "step = step + live",
            "tl.store(step_at, step.to(tl.int64), mask=mask)",
            f"tl.store(row + {GSCALE}, gscale, mask=mask)",
            f"tl.store(row + {LIVE}, live, mask=mask)",
            f"tl.store(floats_row + {GSCALE}, gscale, mask=mask)",
            f"tl.store(floats_row + {LIVE}, live, mask=mask)",
        ]

    # Per-element kernels: a program per tile of NB blocks.

    def _head(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Where the tile's elements are, and the per-tensor values that the functions read."""
        lines = [
            *TILE.splitlines(),
            f"row_at = address + t * {self.stride}",
            f"row_of = floats + t * {self.float_width}",
        ]
        scalars = element_scalars(self.rule, functions)
        if writes:
            scalars += [name for name in ("shrink", "rate") if name not in scalars]
        literals = _literals(self.rule)  # the compiler drops a multiplication by 1
        for name in scalars:
            source = f"tl.load(row_of + {SCALARS + self.floats.index(name)})"
            if name in literals:
                source = f"tl.full((), {literals[name]}, tl.float32)"
            lines += [f"{name} = {source}"]
        return lines

    def _loads(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Loads of p, g and decoded moments, as far as the functions read them."""
        wanted = {read for fn in functions for read in reads(fn)}
        lines = []
        if writes or "p" in wanted:
            lines += self._pointer("p", P, "P_TYPE")
            lines.append(f"p = widen(tl.load(p_at, mask=mask, other=zero), {self.ptx})")
        if "g" in wanted:
            lines += self._pointer("g", G, "G_TYPE")
            lines.append(f"g = widen(tl.load(g_at, mask=mask, other=zero), {self.ptx})")
            lines += ["if SCALED:", f"    g *= tl.load(row_of + {GSCALE})"]
        if wanted & {m.key for m in self.moments}:
            for k in range(len(self.moments)):
                lines += self._moment(k)
        return lines

    def _moment(self, k: int) -> list[str]:
        """The load of a moment, decoded if it is stored in 8 bits."""
        m, column = self.moments[k], MOMENTS + len(self.moments) + k
        zero = ZERO_CODE[m.signed]
        wide = [
            *self._pointer(m.key, MOMENTS + k, "tl.float32"),
            f"{m.key} = tl.load({m.key}_at, mask=mask, other=zero)",
        ]
        scale_at = f"tl.load(row_at + {column}).to(tl.pointer_type(tl.float32)) + block"
        narrow = [
            *self._pointer(m.key, MOMENTS + k, "tl.uint8"),
            f"{m.key}_codes = tl.load({m.key}_at, mask=mask, other=None if WHOLE else {zero})",
            f"{m.key}_scale_at = {scale_at}",
            f"{m.key}_scale = tl.load({m.key}_scale_at, mask=inside, other=zero)[:, None]",
            f"{m.key} = decode({m.key}_codes, tables, {m.signed}) * {m.key}_scale",
        ]
        return [
            *("if BITS == 8:", *("    " + x for x in narrow)),
            *("else:", *("    " + x for x in wide)),
        ]

    @staticmethod
    def _pointer(name: str, column: int, kind: str) -> list[str]:
        return [
            f"{name}_at = tl.load(row_at + {column}).to(tl.pointer_type({kind}))",
            f"{name}_at = tl.multiple_of({name}_at, ALIGN) + base + at",
        ]

    def reduction(self, name: str, terms_of: RuleFunction) -> str:
        """The kernel that sums the terms of a function over each tile."""
        functions, tensors = [terms_of], (*TENSORS, "partial")
        if "u" in reads(terms_of):
            functions.append(self.rule.direction)
        lines = self._head(functions, False) + self._loads(functions, False)
        if self.rule.direction in functions:
            lines.append(_call(self.rule.direction))
        lines.append(_call(terms_of))
        sums = terms_of.gives
        first = "tl.load(work + 4 * tl.program_id(0) + 1)"
        tiles = f"tl.load(geometry + t * {GEOMETRY} + {TILES}) + {first} // NB"
        partial_at = f"partial_at = partial + ({tiles}) * {len(sums)}"
        blocks, at_once = [], [partial_at]
        for i, term in enumerate(sums):
            clean = [] if terms_of is gradient_square else [f"{term} = only_finite({term})"]
            clean += ["if not WHOLE:", f"    {term} = tl.where(mask, {term}, 0.0)"]
            blocks += clean
            at_once += [*clean, f"tl.store(partial_at + {i}, total({term}))"]
        blocks.append(f"return {', '.join(f'tl.sum({term}, 1)' for term in sums)}")
        lines += ["if ALIGN == 1:", *("    " + x for x in blocks)]
        lines += ["else:", *("    " + x for x in at_once)]
        given = ", ".join(f"{term}_of" for term in sums)
        by_kind = [
            "if ALIGN == 1:",
            *(f"    {term} = tl.zeros([NB], tl.float32)" for term in sums),
            "    for piece in range(0, NB):",
            f"        {given} = {call_tile(name, tensors, 'piece', '1')}",
            "        here = tl.arange(0, NB) == piece",
            *(f"        {term} = tl.where(here, {term}_of, {term})" for term in sums),
            f"    {partial_at}",
            *(f"    tl.store(partial_at + {i}, tl.sum({term}, 0))" for i, term in enumerate(sums)),
            "else:",
            f"    {call_tile(name, tensors, '0', 'NB')}",
        ]
        return kernel(name, lines, by_kind, tensors)

    def update(self) -> str:
        """The kernel that writes parameters and moments."""
        functions = [self.rule.direction]
        lines = self._head(functions, True) + self._loads(functions, True)
        lines.append(_call(self.rule.direction))
        lines.append("tl.store(p_at, narrow(shrink * p - rate * u, P_TYPE), mask=mask)")
        if self.moments:
            wide = [f"tl.store({m.key}_at, {m.key}, mask=mask)" for m in self.moments]
            lines += ["if BITS == 8:", *("    " + x for x in self._encodes())]
            lines += ["else:", *("    " + x for x in wide)]
        by_kind = [
            "for piece in range(0, NB, PIECE):",
            "    " + call_tile("update", TENSORS, "piece", "PIECE"),
        ]
        skipped = f"tl.load(floats + t * {self.float_width} + {LIVE}) == 0.0"
        guard = f"if GUARDED:\n    if {skipped}:\n        return"
        return kernel("update", lines, by_kind, TENSORS, guard)

    def _encodes(self) -> list[str]:
        """New codes and scales.

        One test serves all moments of an element: their sum overflows only next to where one does.
        All absmax come before any code, or predicates live long and are spilled into registers.
        """
        total = " + ".join(f"abs({m.key})" for m in self.moments)
        lines = [f"ok = finite({total})"]
        for m in self.moments:
            lines += [
                f"{m.key} = tl.where(ok, {m.key}, 0.0)",
                f"{m.key}_top = absmax({m.key}, {m.signed})",
                f"tl.store({m.key}_scale_at, {m.key}_top, mask=inside)",
            ]
        for m in reversed(self.moments):
            coded = f"encode({m.key}, {m.key}_top, tables, {m.signed}, {self.ptx})"
            lines.append(f"tl.store({m.key}_at, {coded}, mask=mask)")
        return lines
