"""Instructions of a program bound to what runs them: reading and writing registers and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .arithmetic import UNSIGNED, Array, dtype_of
from .instructions import operation
from .machine import Machine
from .memory import LOCAL_BASE, SHARED_BASE, WARP
from .parser import Depot, Instruction, Program, Register, UnsupportedError, parse, split, width

SPACES = ("global", "shared", "local")
_HINTS = {
    "L1_evict_last", "L1_evict_first", "L1_no_allocate", "evict_last", "evict_first", "nc",
    "L2_cache_hint",  # which a policy follows as the last operand
}  # fmt: skip
_MATRIX_BYTES = 16  # of a row of a matrix of ldmatrix

Reader = Callable[["Machine"], Array]
Step = Callable[["Machine"], None]


class Bound(NamedTuple):
    """An instruction that can be run: by `step`, or what changes the flow, by its name."""

    step: Step | None
    instruction: Instruction


class Executable:
    """A program whose instructions are bound.

    Attributes:
        steps: in the order of the program's instructions.
        place: the narrowest access of each space, in bytes.
    """

    def __init__(self, text: str) -> None:
        self.program = parse(text)
        self.place = dict.fromkeys(SPACES, _MATRIX_BYTES)
        self.steps = [Bound(self._bind(i), i) for i in self.program.instructions]

    def _bind(self, instruction: Instruction) -> Step | None:
        name = instruction.opcode[0]
        if name in FLOW:
            return None
        if name == "mov" and "{" in "".join(instruction.operands[:2]):
            return _packing(self, instruction)
        return _BINDERS.get(name, _computing)(self, instruction)


FLOW = ("bra", "brx", "call", "ret", "exit", "bar", "barrier", "trap")


def register(instruction: Instruction, name: str) -> Register:
    """The register that an operand names.

    Raises:
        UnsupportedError: if it is no register.
    """
    found = instruction.scope.get(name)
    if not isinstance(found, Register):
        raise UnsupportedError(f"{name!r} is no register in {instruction.text}")
    return found


def reader(program: Program, instruction: Instruction, name: str, kind: str) -> Reader:
    """A function that gives an operand as an array of a type."""
    dtype = dtype_of(kind)
    found = instruction.scope.get(name)
    if isinstance(found, Register):
        return _of_register(found, kind, instruction)
    if isinstance(found, Depot):
        constant = np.array([LOCAL_BASE + found.offset], dtype)
    elif name == program.shared:
        constant = np.array([SHARED_BASE], dtype)
    elif name.startswith("%"):
        return lambda machine: machine.special(name).astype(dtype)
    else:
        constant = immediate(name, kind)
    return lambda machine: constant


def _of_register(found: Register, kind: str, instruction: Instruction) -> Reader:
    dtype, bits = dtype_of(kind), width(kind)
    if bits > found.bits:
        raise UnsupportedError(f".{kind} is wider than a register of {instruction.text}")
    narrow = UNSIGNED[bits] if bits < found.bits else None

    def read(machine: Machine) -> Array:
        value = machine.value(found)
        if narrow is not None:
            value = value.astype(narrow)
        return value if value.dtype == dtype else value.view(dtype)

    return read


def immediate(text: str, kind: str) -> Array:
    """A number as it is written, of one element."""
    bits = width(kind)
    if text[:2].lower() in ("0f", "0d"):
        unsigned = {"f": np.uint32, "d": np.uint64}[text[1].lower()]
        return np.array([int(text[2:], 16)], unsigned).view(dtype_of(kind))
    number = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.array([number != 0])
    return np.array([number & ((1 << bits) - 1)], UNSIGNED[bits]).view(dtype_of(kind))


def vector(text: str) -> tuple[str, ...]:
    """The operands in braces, or one that has none."""
    return split(text[1:-1]) if text.startswith("{") else (text,)


def _computing(executable: Executable, instruction: Instruction) -> Step:
    target, *operands = instruction.operands
    found = operation(instruction.opcode, len(operands))
    function = found.function
    into = [register(instruction, name) for name in target.split("|")]
    if len(operands) != len(found.inputs):
        raise UnsupportedError(
            f"the emulator knows {len(found.inputs)} operands of this instruction, which has "
            f"{len(operands)}: {instruction.text}"
        )
    reads = [
        reader(executable.program, instruction, name, kind)
        for name, kind in zip(operands, found.inputs, strict=True)
    ]
    if len(into) == 1:
        return lambda machine: machine.write(into[0], function(*(read(machine) for read in reads)))

    def compare(machine: Machine) -> None:
        halves = function(*(read(machine) for read in reads))
        for one, half in zip(into, halves.T, strict=True):
            machine.write(one, np.ascontiguousarray(half))

    return compare


def _packing(executable: Executable, instruction: Instruction) -> Step:
    """A mov between a register and a vector of narrower ones."""
    kind, (target, source) = instruction.opcode[-1], instruction.operands
    parts = vector(target) if target.startswith("{") else vector(source)
    each = width(kind) // len(parts)
    narrow, whole = UNSIGNED[each], UNSIGNED[width(kind)]
    if target.startswith("{"):
        read = reader(executable.program, instruction, source, kind)
        into = [None if x == "_" else register(instruction, x) for x in parts]

        def unpack(machine: Machine) -> None:
            value = read(machine)
            for i, one in enumerate(into):
                if one is not None:
                    machine.write(one, (value >> whole(i * each)).astype(narrow))

        return unpack
    reads = [reader(executable.program, instruction, x, f"b{each}") for x in parts]
    one = register(instruction, target)

    def pack(machine: Machine) -> None:
        value = reads[0](machine).astype(whole)
        for i, read in enumerate(reads[1:], 1):
            value = value | read(machine).astype(whole) << whole(i * each)
        machine.write(one, value)

    return pack


def _address(executable: Executable, instruction: Instruction, text: str, space: str) -> Reader:
    """A function that gives the addresses of `[base+offset]` as int64."""
    base, _, offset = text.strip("[] ").partition("+")
    kind = "u32" if space == "shared" else "u64"
    read = reader(executable.program, instruction, base.strip(), kind)
    distance = int(offset or "0", 0)
    return lambda machine: machine.spread(read(machine).astype(np.int64) + distance)


def _accessing(executable: Executable, instruction: Instruction) -> Step:
    """ld and st."""
    name, *middle, kind = instruction.opcode
    if middle[:1] == ["param"]:
        return _passing(executable, instruction)
    space = middle.pop(0) if middle and middle[0] in SPACES else ""  # of generic addresses
    if set(middle) - _HINTS - {"v2", "v4", "v8"}:
        raise UnsupportedError(f"the emulator does not know the access {instruction.text}")
    pair = instruction.operands[:-1] if "L2_cache_hint" in middle else instruction.operands
    target, value = pair if name == "st" else pair[::-1]
    names, each = vector(value), width(kind) // 8
    size = each * len(names)
    for one in (space,) if space else SPACES:
        executable.place[one] = min(executable.place[one], size)
    at = _address(executable, instruction, target, space)
    if name == "st":
        reads = [reader(executable.program, instruction, x, kind) for x in names]

        def store(machine: Machine) -> None:
            columns = [machine.spread(read(machine)).view(UNSIGNED[each * 8]) for read in reads]
            data = np.stack(columns, axis=1).view(np.uint8)
            machine.store(space, at(machine), data, instruction.text)

        return store
    into = [None if x == "_" else register(instruction, x) for x in names]

    def load(machine: Machine) -> None:
        data = machine.load(space, at(machine), size, instruction.text)
        for i, one in enumerate(into):
            if one is not None:
                part = np.ascontiguousarray(data[:, i * each : (i + 1) * each])
                machine.write(one, part.view(dtype_of(kind)).ravel())

    return load


def _asking(executable: Executable, instruction: Instruction) -> Step:
    """prefetch: the emulator has no cache, but the addresses have to be a tensor's."""
    if instruction.opcode[1:] != ("global", "L2"):
        raise UnsupportedError(f"the emulator does not know the prefetch {instruction.text}")
    at = _address(executable, instruction, instruction.operands[0], "global")
    return lambda machine: machine.ask(at(machine), instruction.text)


def _policy(executable: Executable, instruction: Instruction) -> Step:
    """createpolicy, which says how long caches keep something: the emulator has none."""
    into = register(instruction, instruction.operands[0])
    return lambda machine: machine.write(into, np.zeros(1, np.uint64))


def _passing(executable: Executable, instruction: Instruction) -> Step:
    """ld.param and st.param, which move registers."""
    kind, (target, source) = instruction.opcode[-1], instruction.operands
    if "+" in target + source or "{" in target + source:
        raise UnsupportedError(f"the emulator knows no parameter of parts: {instruction.text}")
    read = reader(executable.program, instruction, source.strip("[] "), kind)
    into = register(instruction, target.strip("[] "))
    return lambda machine: machine.write(into, read(machine))


def _shuffling(executable: Executable, instruction: Instruction) -> Step:
    """shfl.sync of whole warps; a predicate after the target says whether there is a source."""
    how = instruction.opcode[2]
    target, _, valid = instruction.operands[0].partition("|")
    into, flag = register(instruction, target), register(instruction, valid) if valid else None
    value, distance, clamp, members = (
        reader(executable.program, instruction, x, "b32") for x in instruction.operands[1:]
    )
    if how not in ("bfly", "down", "up", "idx") or instruction.opcode[1] != "sync":
        raise UnsupportedError(f"the emulator does not know the shuffle {instruction.text}")

    def shuffle(machine: Machine) -> None:
        machine.whole_warps(members(machine), instruction.text)
        lane, by = machine.lane, machine.spread(distance(machine)).astype(np.int64) & 31
        limits = machine.spread(clamp(machine)).astype(np.int64)
        segment = limits >> 8 & 31
        first = lane & segment
        last = first | limits & 31 & ~segment
        source = {
            "bfly": lane ^ by, "down": lane + by, "up": lane - by, "idx": first | by & ~segment,
        }[how]  # fmt: skip
        inside = source >= last if how == "up" else source <= last
        source = np.where(inside, source, lane)
        machine.count_wavefronts("shuffle", machine.warps())
        machine.write(into, machine.spread(value(machine))[machine.number - lane + source])
        if flag is not None:
            machine.write(flag, inside)

    return shuffle


def _reducing(executable: Executable, instruction: Instruction) -> Step:
    """redux.sync of whole warps."""
    how, kind = instruction.opcode[2:]
    function = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[how]  # fmt: skip
    value = reader(executable.program, instruction, instruction.operands[1], kind)
    members = reader(executable.program, instruction, instruction.operands[2], "b32")
    into = register(instruction, instruction.operands[0])

    def reduce(machine: Machine) -> None:
        machine.whole_warps(members(machine), instruction.text)
        values = machine.spread(value(machine)).reshape(-1, WARP)
        found = function.reduce(values, axis=1, dtype=values.dtype)
        machine.count_wavefronts("shuffle", machine.warps())
        machine.write(into, np.repeat(found, WARP))

    return reduce


def _matrix(executable: Executable, instruction: Instruction) -> Step:
    """ldmatrix and stmatrix: 8 x 8 halves each, whose rows 8 lanes give the addresses of."""
    opcode = ".".join(instruction.opcode)
    found = re.fullmatch(
        r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", opcode
    )
    if found is None:
        raise UnsupportedError(f"the emulator does not know the instruction {instruction.text}")
    count, transposed = int(found[2]), found[3] is not None
    where, names = instruction.operands if found[1] == "st" else instruction.operands[::-1]
    at = _address(executable, instruction, where, "shared")
    registers = [register(instruction, x) for x in vector(names)]

    def load(machine: Machine) -> None:
        machine.whole_warps(None, instruction.text)
        with machine.only(machine.lane < 8 * count):
            rows = machine.load("shared", at(machine), _MATRIX_BYTES, instruction.text)
        halves = rows.view(np.uint16).reshape(-1, WARP, 8)[:, : 8 * count]
        halves = halves.reshape(-1, count, 8, 8)
        halves = halves.swapaxes(2, 3) if transposed else halves
        words = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, count, WARP)
        for i, one in enumerate(registers):
            machine.write(one, words[:, i].ravel())

    def store(machine: Machine) -> None:
        machine.whole_warps(None, instruction.text)
        values = [machine.value(one) for one in registers]
        words = np.stack([x.reshape(-1, WARP) for x in values], axis=1)
        halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        halves = halves.swapaxes(2, 3) if transposed else halves
        rows = np.zeros((len(halves), WARP, 8), np.uint16)
        rows[:, : 8 * count] = halves.reshape(-1, 8 * count, 8)
        with machine.only(machine.lane < 8 * count):
            data = rows.reshape(-1, 8).view(np.uint8)
            machine.store("shared", at(machine), data, instruction.text)

    return load if found[1] == "ld" else store


_BINDERS: dict[str, Callable[[Executable, Instruction], Step]] = {
    "createpolicy": _policy,
    "ld": _accessing,
    "prefetch": _asking,
    "st": _accessing,
    "shfl": _shuffling,
    "redux": _reducing,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
}
