"""The Numba engine's template: the text of the module that it writes for one rule.

Scalar functions of the rule run on fp64, one call per tensor. Element functions run on vectors of
16 fp32 lanes (`numba_vector`). Everything is addressed by int64 addresses from a table, so that one
call steps any number of tensors:

    address   int64   (tensors, ...)  p, g, step, moments..., absmax..., gnorm_vec
    geometry  int64   (tensors, 4)    rows, row, blocks per row, global numel
    scalars   float64 (tensors, ...)  gscale, then what the rule's scalar functions give
    chunks    int64   (chunks, 3)     tensor, first block, number of blocks
    partial   float64 (chunks, ...)   sums of a reduction's terms over one chunk

Each of these functions has a `..._share` that threads run, as `numba_threads` says.

A block function takes whole blocks of 256 elements, or one short block, which goes through
zero-padded scratch memory.
"""

from __future__ import annotations

from ...codegen.analysis import (
    element_functions,
    element_scalars,
    functions_source,
    hyper_names,
    reads,
    scalar_functions,
)
from ...formats.dynamic8 import ZERO_CODE
from ...plan import STATE as MOMENTS
from ...plan import STEP, G, P, address_columns
from ...rules import Moment, Rule, RuleFunction, gradient_square
from .threads import share

GSCALE, SCALARS = 0, 1  # columns of `scalars`
SIZE = {"f32": 4, "bf16": 2, "f16": 2}
SPARE = 1024  # bytes of scratch for one padded operand
ROW = 2 * 1024  # bytes of scratch for one moment: a block's numbers, and those of the one before

INNER = '@njit(nogil=True, error_model="numpy")'
# Into the function that threads run, so that it is compiled once.
INLINED = INNER[:-1] + ', inline="always")'


def _indented(lines: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]


def _call(fn: RuleFunction) -> str:
    return f"{', '.join(fn.gives)} = {fn.__name__}({', '.join(reads(fn))})"


def scalar_module(rule: Rule) -> str:
    """Text of the module with the rule's per-tensor arithmetic: `begin`, `combine_0`, ..."""
    parts = [
        "from lowbit_optim_kernels.engines.numba.scalar import *",
        functions_source(scalar_functions(rule), INNER),
        _scalar_driver(rule, "begin", "gscale, live", rule.prepare, {}),
    ]
    for k, phase in enumerate(rule.phases):
        sums = {name: f"sums[t, {i}]" for i, name in enumerate(phase.terms.gives)}
        parts.append(_scalar_driver(rule, f"combine_{k}", "sums", phase.combine, sums))
    return "\n\n\n".join(parts) + "\n"


def _scalar_driver(
    rule: Rule, name: str, arguments: str, fn: RuleFunction, known: dict[str, str]
) -> str:
    """A loop over tensors that loads what `fn` reads, calls it and stores what it gives."""
    hyper, columns = hyper_names(rule), rule.scalars()
    body = []
    if name == "begin":
        body += [f"count_step(address[t, {STEP}], live)", f"scalars[t, {GSCALE}] = gscale"]
    for read in reads(fn):
        if read in known:
            source = known[read]
        elif read == "step":
            source = f"read_step(address[t, {STEP}])"
        elif read == "numel":
            source = "float(geometry[t, 3])"
        elif read in columns:
            source = f"scalars[t, {SCALARS + columns.index(read)}]"
        else:
            source = f"hyper[{hyper.index(read)}]"
        body.append(f"{read} = {source}")
    body.append(_call(fn))
    body += [f"scalars[t, {SCALARS + columns.index(given)}] = {given}" for given in fn.gives]
    head = [
        INNER,
        f"def {name}(address, geometry, hyper, scalars, {arguments}):",
        "    for t in range(address.shape[0]):",
    ]
    return "\n".join(head + [" " * 8 + line for line in body])


def element_module(rule: Rule, p_kind: str, g_kind: str, bits: int) -> str:
    """Text of the module with the rule's passes over elements: ``update`, `reduce_0`, ....

    Args:
        rule: the rule.
        p_kind: "f32", "bf16" or "f16", how the parameter is stored.
        g_kind: how the gradient is.
        bits: 8 or 32, how moments are stored.
    """
    writer = _ElementWriter(rule, p_kind, g_kind, bits)
    parts = [
        "from lowbit_optim_kernels.engines.numba.element import *",
        functions_source((*element_functions(rule), gradient_square), INNER, literal="f32"),
    ]
    for k, phase in enumerate(rule.phases):
        parts += writer.reduction(f"reduce_{k}", phase.terms)
    parts += writer.reduction("reduce_clip", gradient_square)
    return "\n\n\n".join(parts + writer.update()) + "\n"


class _ElementWriter:
    """Writes the element passes of one rule for given storage kinds."""

    def __init__(self, rule: Rule, p_kind: str, g_kind: str, bits: int) -> None:
        self.rule, self.moments, self.bits = rule, rule.moments, bits
        self.p_kind, self.g_kind = p_kind, g_kind

    def update(self) -> list[str]:
        """The pass that writes parameters and moments.

        A block's new scales are known only after its last element, so it is encoded while the next
        block is updated: an update waits for divisions and square roots, encoding does not.
        """
        functions = [self.rule.direction]
        scalars = element_scalars(self.rule, functions)
        scalars += [name for name in ("shrink", "rate") if name not in scalars]
        eight = self.bits == 8 and bool(self.moments)
        body = [
            _call(self.rule.direction),
            f"store_{self.p_kind}(p_at + {SIZE[self.p_kind]} * j, rounded(shrink, p) - rate * u)",
        ]
        for k, m in enumerate(self.moments):
            body.append(f"store_f32({self._moment_at(k, m)} + 4 * j, {m.key})")
            if eight:
                reach = "reach" if m.signed else "reach_unsigned"
                body.append(f"top_{m.key} = {reach}(top_{m.key}, {m.key})")
        vector = self._vector(functions, True, body)
        if eight:
            lines = self._updated_blocks(functions, vector)
        else:
            lines = ["for j in range(0, n, 16):", *_indented(vector, 4)]
        block = self._block("update_block", scalars, functions, lines)
        return [*self._mended(eight), block, self._driver("update", scalars, functions, None)]

    def _each_block(self, functions: list[RuleFunction], lines: list[str]) -> list[str]:
        """A loop over blocks: `lines` for the elements from start to stop.

        A block's moments are decoded, but not scaled; element j of the first is at row + 4 j. (Few
        elements at a time: what is loaded early must not have left the first-level cache.)
        """
        head = ["stop = min(n, start + 256)"]
        if self.bits == 8 and self._reads_state(functions):
            head.append("row = scratch + 4 * (start & 256) - 4 * start")
            for k, m in enumerate(self.moments):
                row = f"row + {ROW * k} + 4 * start"
                head.append(f"decode_{_kind(m)}(at_{m.key} + start, {row}, stop - start)")
                head.append(f"scale_{m.key} = read_f32(absmax_{m.key} + start // 64)")
        return ["for start in range(0, n, 256):", *_indented(head + lines, 4)]

    def _updated_blocks(self, functions: list[RuleFunction], vector: list[str]) -> list[str]:
        """The loops that update block after block, each with the encoding of the one before.

        The two are interleaved 16 elements at a time: so many instructions wait for a division that
        those after the next one must be work of another kind.
        """
        lines = ["past = scratch + 4 * (~start & 256) - 4 * (start - 256)"]
        lines += [f"top_{m.key} = splat(f32(0.0))" for m in self.moments]
        lines += ["if start == 0:", "    for j in range(start, stop, 16):"]
        lines += _indented(vector, 8)
        lines += ["else:", "    for i in range(start, stop, 64):"]
        for quarter in range(4):
            lines += _indented([f"j = i + {16 * quarter}", *vector], 8)
            for k, m in enumerate(self.moments):
                number = f"load_f32(past + {ROW * k} + 4 * (j - 256))"
                place = f"place_{_kind(m)}({number}, inverse_{m.key})"
                lines.append(f"        {m.key}_{quarter} = {place}")
        for m in self.moments:
            places = ", ".join(f"{m.key}_{quarter}" for quarter in range(4))
            lines.append(f"        put_{_kind(m)}_64({places}, at_{m.key} + (i - 256))")
        lines += self._new_scales()
        before = [f"inverse_{m.key} = f32(0.0)" for m in self.moments]
        before.append("row = start = stop = 0")
        after = []
        for k, m in enumerate(self.moments):
            encode = f"encode_{_kind(m)}(row + {ROW * k} + 4 * start, inverse_{m.key}, "
            after.append(f"{encode}at_{m.key} + start, stop - start)")
        return [*before, *self._each_block(functions, lines), *after]

    def _new_scales(self) -> list[str]:
        """Store the block's new scales, and have what multiplies the moments to encode them."""
        keys = [m.key for m in self.moments]
        largest = ", ".join(f"largest_{key}" for key in keys)
        inverse = ", ".join(f"inverse_{key}" for key in keys)
        usual = " and ".join(f"LEAST < largest_{key} < MOST" for key in keys)
        return [
            f"{largest} = {', '.join(f'highest(top_{key})' for key in keys)}",
            f"if {usual}:",
            f"    {inverse} = {', '.join(f'ONE_DOWN / largest_{key}' for key in keys)}",
            "else:",
            f"    {largest}, {inverse} = mend(row + 4 * start, stop - start, {largest})",
            *(f"write_f32(absmax_{key} + start // 64, largest_{key})" for key in keys),
        ]

    def _mended(self, eight: bool) -> list[str]:
        """What a block with unusual numbers needs: zeroes for what is not finite, other scales."""
        if not eight:
            return []
        largest = ", ".join(f"largest_{m.key}" for m in self.moments)
        lines = [INNER[:-1] + ', inline="never")', f"def mend(row, n, {largest}):"]
        finite = " and ".join(f"largest_{m.key} < INFINITY" for m in self.moments)
        lines.append(f"    if not ({finite}):")
        lines += [f"        top_{m.key} = splat(f32(0.0))" for m in self.moments]
        lines.append("        for j in range(0, n, 16):")
        for k, m in enumerate(self.moments):
            lines.append(f"            {m.key} = load_f32(row + {ROW * k} + 4 * j)")
        lines.append(f"            ok = {' & '.join(f'finite({m.key})' for m in self.moments)}")
        for k, m in enumerate(self.moments):
            lines += [
                f"            {m.key} = where(ok, {m.key}, splat(f32(0.0)))",
                f"            store_f32(row + {ROW * k} + 4 * j, {m.key})",
                f"            top_{m.key} = reach(top_{m.key}, {m.key})",
            ]
        lines += [f"        largest_{m.key} = highest(top_{m.key})" for m in self.moments]
        for k, m in enumerate(self.moments):
            inverse = f"inverse_of(row + {ROW * k}, largest_{m.key}, n)"
            lines.append(f"    inverse_{m.key} = {inverse}")
        inverse = ", ".join(f"inverse_{m.key}" for m in self.moments)
        lines.append(f"    return {largest}, {inverse}")
        return ["\n".join(lines)]

    def reduction(self, name: str, terms_of: RuleFunction) -> list[str]:
        """The pass `name` that sums the terms of a function over each chunk.

        A rule's terms are summed over finite elements only: one bad gradient must not spoil the
        norm of its tensor. The norm of percentile clipping is taken as it is.
        """
        functions = [terms_of]
        body = []
        if "u" in reads(terms_of):
            functions.append(self.rule.direction)
            body.append(_call(self.rule.direction))
        terms = terms_of.gives
        body.append(_call(terms_of))
        keep = "" if terms_of is gradient_square else "only_finite"
        body += [f"sum_{term} = sum_{term} + {keep}({term})" for term in terms]
        scalars = element_scalars(self.rule, functions)
        lines = ["for j in range(start, stop, 16):"]
        lines += _indented(self._vector(functions, False, body), 4)
        lines = [f"sum_{term} = splat(f32(0.0))" for term in terms] + lines
        lines += [f"total_{term} += total(sum_{term})" for term in terms]
        lines = [f"total_{term} = 0.0" for term in terms] + self._each_block(functions, lines)
        lines.append(f"return {', '.join(f'total_{term}' for term in terms)}")
        block = self._block(f"{name}_block", scalars, functions, lines)
        return [block, self._driver(name, scalars, functions, terms)]

    def _reads_state(self, functions: list[RuleFunction]) -> bool:
        keys = {moment.key for moment in self.moments}
        return any(keys & set(reads(fn)) for fn in functions)

    def _tensors(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Of p and g, what functions read; with p where it is written."""
        wanted = {read for fn in functions for read in reads(fn)}
        return [name for name in "pg" if name in wanted or (writes and name == "p")]

    def _arguments(self, functions: list[RuleFunction], writes: bool) -> list[str]:
        """Addresses that a block function takes."""
        names = [f"{name}_at" for name in self._tensors(functions, writes)]
        if self._reads_state(functions):
            names += [f"at_{m.key}" for m in self.moments]
            if self.bits == 8:
                names += [f"absmax_{m.key}" for m in self.moments]
        return names

    def _moment_at(self, k: int, moment: Moment) -> str:
        """Address of the fp32 values of moment k, less 4 bytes an element."""
        return f"row + {ROW * k}" if self.bits == 8 else f"at_{moment.key}"

    def _vector(self, functions: list[RuleFunction], writes: bool, body: list[str]) -> list[str]:
        """Lines for the 16 elements at j: loads of what is read, then `body`."""
        tensors = self._tensors(functions, writes)
        lines = []
        if "p" in tensors:
            lines.append(f"p = load_{self.p_kind}(p_at + {SIZE[self.p_kind]} * j)")
        if "g" in tensors:
            lines.append(f"g = load_{self.g_kind}(g_at + {SIZE[self.g_kind]} * j) * gscale")
        if self._reads_state(functions):
            for k, m in enumerate(self.moments):
                scale = f" * scale_{m.key}" if self.bits == 8 else ""
                lines.append(f"{m.key} = load_f32({self._moment_at(k, m)} + 4 * j){scale}")
        return lines + body

    def _block(
        self, name: str, scalars: list[str], functions: list[RuleFunction], lines: list[str]
    ) -> str:
        """A function over n elements: full blocks, or a short one of n % 64 == 0."""
        names = self._arguments(functions, name == "update_block")
        arguments = [*names, "n", "scratch", "gscale", *scalars]
        head = f"def {name}({', '.join(arguments)}):"
        return "\n".join([INLINED, head, *_indented(lines, 4)])

    def _driver(
        self, name: str, scalars: list[str], functions: list[RuleFunction], terms: tuple | None
    ) -> str:
        """What the threads call: the blocks of chunks lo..hi."""
        hyper, columns = hyper_names(self.rule), self.rule.scalars()
        lines = [f"scratch = stack({ROW * max(1, len(self.moments))})"]
        lines += [f"spare = stack({SPARE * (2 + len(self.moments))})"]
        lines += ["for c in range(lo, hi):", "    t = chunks[c, 0]"]
        lines += [f"    gscale = f32(scalars[t, {GSCALE}])"]
        for s in scalars:
            column = f"scalars[t, {SCALARS + columns.index(s)}]" if s in columns else ""
            lines.append(f"    {s} = f32({column or f'hyper[{hyper.index(s)}]'})")
        lines += ["    row, per_row = geometry[t, 1], geometry[t, 2]"]
        lines += [f"    sum_{term} = 0.0" for term in terms or ()]
        lines += [
            "    b, end = chunks[c, 1], chunks[c, 1] + chunks[c, 2]",
            "    while b < end:",
            "        column = b % per_row * 256",
            "        first = b // per_row * row + column",
            "        whole = min(row - column, 256 * (end - b)) // 256",
            "        size = 256 * whole if whole > 0 else row - column",
            "        n = (size + 63) // 64 * 64",
        ]
        homes, enters, leaves = self._operands(functions, writes=terms is None)
        names = self._arguments(functions, terms is None)
        call = f"{name}_block({', '.join(names)}, n, scratch, gscale"
        call += "".join(f", {s}" for s in scalars) + ")"
        if terms is not None:
            call = f"{', '.join(f'term_{term}' for term in terms)} = {call}"
        lines += _indented([*homes, *enters, call, *leaves], 8)
        lines += [f"        sum_{term} += term_{term}" for term in terms or ()]
        lines.append("        b += max(whole, 1)")
        lines += [f"    partial[c, {i}] = sum_{term}" for i, term in enumerate(terms or ())]
        last = ", partial" if terms is not None else ""
        head = f"def {name}(lo, hi, address, geometry, chunks, hyper, scalars{last}):"
        driver = "\n".join([INLINED, head, *_indented(lines, 4)])
        return f"{driver}\n\n\n{self._share(name, len(terms or ()))}"

    def _share(self, name: str, terms: int) -> str:
        """What threads run: the driver on piece after piece of the chunks."""
        columns = address_columns(self.moments)
        tables = [f"int_table({{}}, tensors, {columns})", "int_table({}, tensors, 4)"]
        tables += ["int_table({}, count, 3)", "float_list({}, hyper)"]
        tables.append(f"float_table({{}}, tensors, {SCALARS + len(self.rule.scalars())})")
        tables += [f"float_table({{}}, count, {terms})"] if terms else []
        return share(name, ("tensors", "hyper"), tables)

    def _operands(self, functions: list[RuleFunction], writes: bool) -> tuple[list[str], ...]:
        """Addresses of a block's operands; copies into scratch and back where it is short."""
        operands = [("p", f"address[t, {P}]", SIZE[self.p_kind], 0, writes)]
        operands.append(("g", f"address[t, {G}]", SIZE[self.g_kind], 0, False))
        tensors = self._tensors(functions, writes)
        operands = [operand for operand in operands if operand[0] in tensors]
        homes, enters, leaves = [], [], []
        if self._reads_state(functions):
            for k, m in enumerate(self.moments):
                pad = ZERO_CODE[m.signed] if self.bits == 8 else 0
                column = f"address[t, {MOMENTS + k}]"
                operands.append((m.key, column, 1 if self.bits == 8 else 4, pad, writes))
                if self.bits == 8:
                    column = f"address[t, {MOMENTS + len(self.moments) + k}]"
                    homes.append(f"absmax_{m.key} = {column} + 4 * b")
        for k, (name, column, size, pad, written) in enumerate(operands):
            at = f"{name}_at" if name in "pg" else f"at_{name}"
            homes.append(f"home_{name} = {column} + {size} * first")
            enters.append(f"{at} = enter(home_{name}, spare + {SPARE * k}, size, n, {size}, {pad})")
            if written:
                leaves.append(f"leave(home_{name}, {at}, size, {size})")
        return homes, enters, leaves


def _kind(moment: Moment) -> str:
    return "s" if moment.signed else "u"
