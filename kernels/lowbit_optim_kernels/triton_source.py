"""The Triton engine's template: the text of the module that it writes for one rule.

A program takes a tile of blocks of one tensor, so that one launch per pass covers any number of
tensors. Tables on the device, all in int64 but for `scalars`, `hyper`, `sums` (fp64) and `partial`
(fp32):

    address   (tensors, ...)  p, g, step, moments..., absmax..., gnorm_vec
    geometry  (tensors, 4)    rows, row, blocks per row, global numel
    scalars   (tensors, ...)  gscale, live, then what the rule's scalar functions give
    work      (programs, 2)   tensor, first block
    partial   (programs, ...) sums of a reduction's terms over one tile
"""

from __future__ import annotations

from .dynamic8 import ZERO_CODE
from .lower import (
    element_functions,
    element_scalars,
    functions_source,
    hyper_names,
    reads,
    scalar_functions,
)
from .rules import Rule, RuleFunction, gradient_square

P, G, STEP, MOMENTS = 0, 1, 2, 3  # columns of `address`
GSCALE, LIVE, SCALARS = 0, 1, 2  # columns of `scalars`
LANES = 128  # tensors per program of the per-tensor kernels

HEADER = """\
import triton
import triton.language as tl
from lowbit_optim_kernels.triton_codec import decode, encode
from lowbit_optim_kernels.triton_primitives import (
    abs, exp, finite, log, maximum, minimum, narrow, only_finite, power, sign, sqrt, where,
)
"""


def _call(fn: RuleFunction) -> str:
    return f"{', '.join(fn.gives)} = {fn.__name__}({', '.join(reads(fn))})"


def _body(lines: list[str]) -> str:
    return "\n".join("    " + line for line in lines)


def address_columns(rule: Rule) -> int:
    """Width of the address table."""
    return MOMENTS + 2 * len(rule.moments) + 1


def module(rule: Rule) -> str:
    """Text of the module with all kernels of a rule; storage kinds are constexpr arguments."""
    writer = _Writer(rule)
    functions = (*scalar_functions(rule), *element_functions(rule), gradient_square)
    parts = [HEADER, functions_source(functions, "@triton.jit", literal=None)]
    parts = [_constexpr_numbers(part) for part in parts]
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


def _constexpr_numbers(source: str) -> str:
    """Module-level numbers of rules, which a kernel may read only as tl.constexpr."""
    lines = []
    for line in source.splitlines():
        name, equals, value = line.partition(" = ")
        is_global = equals and name.isidentifier() and name.isupper()
        lines.append(f"{name} = tl.constexpr({value})" if is_global else line)
    return "\n".join(lines)


class _Writer:
    """Writes the kernels of one rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.moments = rule, rule.moments
        self.hyper, self.columns = hyper_names(rule), rule.scalars()
        self.width, self.stride = SCALARS + len(self.columns), address_columns(rule)

    # Per-tensor kernels: a lane per tensor, fp64.

    def scalar_kernel(self, name: str, fn: RuleFunction, known: dict[str, str]) -> str:
        """A kernel that loads what `fn` reads for each tensor, calls it, stores what it gives."""
        begin = name == "begin"
        step = f"tl.load(address + t * {self.stride} + {STEP}, mask=mask, other=0)"
        lines = [
            f"t = tl.program_id(0) * {LANES} + tl.arange(0, {LANES})",
            "mask = t < tl.load(count)",
            f"row = scalars + t * {self.width}",
        ]
        if begin or "step" in reads(fn):
            lines.append(f"step_at = {step}.to(tl.pointer_type(tl.float32))")
            lines.append("step = tl.load(step_at, mask=mask, other=1.0).to(tl.float64)")
        if begin:
            lines += self._begin()
        for read in reads(fn):
            if read == "step":
                continue
            if read in known:
                source = known[read]
            elif read == "numel":
                source = "tl.load(geometry + t * 4 + 3, mask=mask, other=1).to(tl.float64)"
            elif read in self.columns:
                source = f"tl.load(row + {SCALARS + self.columns.index(read)}, mask=mask, other=0.0)"
            else:
                source = f"tl.load(hyper + {self.hyper.index(read)} + 0 * t)"
            lines.append(f"{read} = {source}")
        lines.append(_call(fn))
        for given in fn.gives:
            column = SCALARS + self.columns.index(given)
            lines.append(f"tl.store(row + {column}, {given}, mask=mask)")
        extra = "grad_scale, found_inf, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, "
        extra += "GUARDED: tl.constexpr"
        arguments = f"address, geometry, hyper, scalars, count, {extra if begin else 'sums'}"
        return f"@triton.jit\ndef {name}({arguments}):\n{_body(lines)}"

    def _begin(self) -> list[str]:
        return [
            "live = tl.full((), 1.0, tl.float64)",
            "if GUARDED:",
            "    live = tl.where(tl.load(found_inf).to(tl.float64) == 0.0, 1.0, 0.0)",
            "gscale = tl.full((), -1.0 if MAXIMIZE else 1.0, tl.float64)",
            "if SCALED:",
            "    gscale = gscale / tl.load(grad_scale).to(tl.float64)",
            "step = step + live",
            "tl.store(step_at, step.to(tl.float32), mask=mask)",
            f"tl.store(row + {GSCALE}, gscale, mask=mask)",
            f"tl.store(row + {LIVE}, live, mask=mask)",
        ]

    # Per-element kernels: a program per tile of NB blocks.

    def _head(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Where the tile's elements are, and the per-tensor values that the functions read."""
        lines = [
            "program = tl.program_id(0).to(tl.int64)",
            "t = tl.load(work + 2 * program)",
            "block = tl.load(work + 2 * program + 1) + tl.arange(0, NB)",
            "rows = tl.load(geometry + t * 4)",
            "length = tl.load(geometry + t * 4 + 1)",
            "per_row = tl.load(geometry + t * 4 + 2)",
            "inside = block < rows * per_row",
            "if FLAT:",
            "    start = block * 256",
            "    size = tl.minimum(length - start, 256)",
            "else:",
            "    row = block // per_row",
            "    column = (block - row * per_row) * 256",
            "    start = row * length + column",
            "    size = tl.where(inside, tl.minimum(length - column, 256), 0)",
            "start = tl.multiple_of(start, ALIGN)",
            "size = tl.multiple_of(size, ALIGN)",
            "lane = tl.arange(0, 256)",
            "at = start[:, None] + lane[None, :]",
            "mask = lane[None, :] < size[:, None]",
            f"row_at = address + t * {self.stride}",
            f"row_of = scalars + t * {self.width}",
            f"gscale = tl.load(row_of + {GSCALE}).to(tl.float32)",
        ]
        scalars = element_scalars(self.rule, functions)
        if writes:
            scalars += [name for name in ("shrink", "rate") if name not in scalars]
        for name in scalars:
            if name in self.columns:
                source = f"row_of + {SCALARS + self.columns.index(name)}"
            else:
                source = f"hyper + {self.hyper.index(name)}"
            lines.append(f"{name} = tl.load({source}).to(tl.float32)")
        return lines

    def _loads(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Loads of p, g and decoded moments, as far as the functions read them."""
        wanted = {read for fn in functions for read in reads(fn)}
        lines = []
        if writes or "p" in wanted:
            lines += self._pointer("p", P, "P_TYPE")
            lines.append("p = tl.load(p_at, mask=mask, other=0.0).to(tl.float32)")
        if "g" in wanted:
            lines += self._pointer("g", G, "G_TYPE")
            lines.append("g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32) * gscale")
        if not wanted & {m.key for m in self.moments}:
            return lines
        for k, m in enumerate(self.moments):
            wide = [
                *self._pointer(m.key, MOMENTS + k, "tl.float32"),
                f"{m.key} = tl.load({m.key}_at, mask=mask, other=0.0)",
            ]
            column = MOMENTS + len(self.moments) + k
            table = f"decode_{'signed' if m.signed else 'unsigned'}"
            codes = f"tl.load({m.key}_at, mask=mask, other={ZERO_CODE[m.signed]})"
            narrow = [
                *self._pointer(m.key, MOMENTS + k, "tl.uint8"),
                f"{m.key}_scale_at = tl.load(row_at + {column}).to(tl.pointer_type(tl.float32))"
                " + block",
                f"{m.key}_scale = tl.load({m.key}_scale_at, mask=inside, other=0.0)",
                f"{m.key} = decode({codes}, {table}) * {m.key}_scale[:, None]",
            ]
            lines += ["if BITS == 8:", *("    " + x for x in narrow)]
            lines += ["else:", *("    " + x for x in wide)]
        return lines

    @staticmethod
    def _pointer(name: str, column: int, kind: str) -> list[str]:
        base = f"tl.load(row_at + {column}).to(tl.pointer_type({kind}))"
        return [f"{name}_at = tl.multiple_of({base}, POINTER_ALIGN) + at"]

    def reduction(self, name: str, terms_of: RuleFunction) -> str:
        """The kernel that sums the terms of a function over each tile."""
        functions = [terms_of]
        if "u" in reads(terms_of):
            functions.append(self.rule.direction)
        lines = self._head(functions, False) + self._loads(functions, False)
        if self.rule.direction in functions:
            lines.append(_call(self.rule.direction))
        lines.append(_call(terms_of))
        terms = terms_of.gives
        keep = "" if terms_of is gradient_square else "only_finite"
        for i, term in enumerate(terms):
            total = f"tl.sum(tl.sum(tl.where(mask, {keep}({term}), 0.0), 1), 0)"
            lines.append(f"tl.store(partial + program * {len(terms)} + {i}, {total})")
        return self._kernel(name, ", partial", lines)

    def update(self) -> str:
        """The kernel that writes parameters and moments."""
        functions = [self.rule.direction]
        lines = self._head(functions, True)
        lines += [
            "if GUARDED:",
            f"    live = tl.load(row_of + {LIVE}).to(tl.int64)",
            "    size = size * live",
            "    mask = lane[None, :] < size[:, None]",
            "    inside = size > 0",
        ]
        lines += self._loads(functions, True)
        lines.append(_call(self.rule.direction))
        lines.append("tl.store(p_at, narrow(shrink * p - rate * u, P_TYPE), mask=mask)")
        if self.moments:
            narrow = ["ok = " + " & ".join(f"finite({m.key})" for m in self.moments)]
            for m in self.moments:
                kind = "signed" if m.signed else "unsigned"
                narrow += [
                    f"{m.key} = tl.where(ok, {m.key}, 0.0)",
                    f"{m.key}_top = tl.max(tl.abs({m.key}), 1)",
                    f"tl.store({m.key}_scale_at, {m.key}_top, mask=inside)",
                    f"{m.key}_codes = encode({m.key}, {m.key}_top, encode_{kind}, {m.signed})",
                    f"tl.store({m.key}_at, {m.key}_codes, mask=mask)",
                ]
            wide = [f"tl.store({m.key}_at, {m.key}, mask=mask)" for m in self.moments]
            lines += ["if BITS == 8:", *("    " + x for x in narrow)]
            lines += ["else:", *("    " + x for x in wide)]
        return self._kernel("update", ", GUARDED: tl.constexpr", lines)

    def _kernel(self, name: str, extra: str, lines: list[str]) -> str:
        tables = "decode_signed, decode_unsigned, encode_signed, encode_unsigned"
        kinds = "P_TYPE, G_TYPE, BITS, FLAT, ALIGN, POINTER_ALIGN, NB"
        constants = ", ".join(f"{kind}: tl.constexpr" for kind in kinds.split(", "))
        arguments = f"address, geometry, work, hyper, scalars, {tables}{extra}, {constants}"
        return f"@triton.jit\ndef {name}({arguments}):\n{_body(lines)}"
