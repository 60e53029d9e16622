"""PTX text as functions of instructions."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

_HEAD = re.compile(r"\.(entry|func)\b([^{;]*)([{;])")
_SIGNATURE = re.compile(r"\s*(?:\(([^()]*)\)\s*)?([\w$.]+)\s*(?:\(([^()]*)\))?")
_TOKEN = re.compile(r"\s*(?:([$\w]+):|([{}])|([^;]*);)")
_SKIPPED = (".pragma", ".noreturn")
_SHARED = re.compile(r"\.shared\s[^;]*?([\w$]+)\[\];")
# What a device assertion says, and where a thread that fails it says so. A trap follows.
_MESSAGE = re.compile(r"\.b8 (assertMessage_\d+)\[\d+\] = \{([^}]*)\};")
_ASSERTION = re.compile(
    r"\{ // callseq (\d+),(?:(?!// callseq).)*?\b(assertMessage_\d+)\b(?:(?!// callseq).)*?"
    r"\b__assertfail\b(?:(?!// callseq).)*?\} // callseq \1\n",
    re.DOTALL,
)


class UnsupportedError(NotImplementedError):
    """PTX that the emulator does not know."""


@dataclass(frozen=True)
class Register:
    """A register, or a parameter, which is passed like one.

    Attributes:
        number: its own in the whole program.
        bits: its width; 1 for a predicate.
    """

    number: int
    bits: int


@dataclass(frozen=True)
class Depot:
    """An array of a function in local memory: where it starts, in bytes."""

    offset: int


Scope = MutableMapping[str, "Register | Depot"]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with what follows its name, e.g. ("ld", "global", "v2", "b32").
        operands: as they are written.
        guard: a predicate, and whether it is negated.
        scope: what the names in operands mean.
        text: for errors, with the line of the source that it was compiled from.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[Register, bool] | None
    scope: Scope
    text: str


@dataclass
class Function:
    """A kernel or a function that one calls.

    Attributes:
        start: the number of its first instruction in the program.
        parameters, result: where arguments come from, and where what it returns goes.
        labels: numbers of instructions.
        tables: labels that a computed branch chooses from, by the label of their list.
    """

    start: int
    parameters: list[Register] = field(default_factory=list)
    result: Register | None = None
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class Program:
    """The instructions of all functions of a PTX text, one after the other.

    Attributes:
        instructions: of all functions.
        functions: by name; that of each instruction is the last one that starts before it.
        entry: the name of the kernel.
        registers: widths of them all.
        local_bytes: of local memory per thread.
        shared: the name of shared memory, whose size a launch decides.
    """

    instructions: list[Instruction] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    entry: str = ""
    registers: list[int] = field(default_factory=list)
    local_bytes: int = 0
    shared: str = "global_smem"

    def register(self, type_name: str) -> Register:
        """A new register of a type."""
        self.registers.append(width(type_name))
        return Register(len(self.registers) - 1, self.registers[-1])

    def function_at(self, pc: int) -> Function:
        """The function that an instruction belongs to."""
        return max((f for f in self.functions.values() if f.start <= pc), key=lambda f: f.start)


def width(type_name: str) -> int:
    """Bits of a type."""
    if type_name == "pred":
        return 1
    found = re.fullmatch(r"(?:bf|[busf])(8|16|32|64)(x2)?", type_name)
    if found is None:
        raise UnsupportedError(f"the emulator has no type .{type_name}")
    return int(found[1]) * (2 if found[2] else 1)


def split(text: str) -> tuple[str, ...]:
    """Operands, with vectors in braces whole."""
    return tuple(x.strip() for x in re.split(r",(?![^{(\[]*[})\]])", text) if x.strip())


def _without_comments(text: str) -> str:
    """The text without comments and debug sections; the comment of a .loc is its source line.

    That of a trap is what a device assertion says.
    """
    text = re.split(r"^\s*\.section", text, maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(
        r"^\s*\.loc\s[^\n/]*(?://\s*(\S*)[^\n]*)?$", r".loc \1;", text, flags=re.MULTILINE
    )
    said = {name: bytes(map(int, x.split(","))).decode() for name, x in _MESSAGE.findall(text)}
    text = _ASSERTION.sub(lambda found: f".loc {said[found[2]]};\n", text)
    return re.sub(r"//[^\n]*", "", text)


def parse(text: str) -> Program:
    """The program of a PTX text with one kernel.

    Raises:
        UnsupportedError: for a declaration that the emulator does not know.
    """
    # Since there are clusters of programs, a program's own shared memory has the longer name, too.
    program, text = Program(), _without_comments(text).replace(".shared::cta", ".shared")
    shared = _SHARED.search(text)
    if shared:
        program.shared = shared[1]
    at = 0
    while head := _HEAD.search(text, at):
        at = head.end()
        if head[3] == "{":
            at = _function(program, head, text, at)
    if not program.entry:
        raise UnsupportedError("the PTX text has no kernel")
    return program


def _function(program: Program, head: re.Match, text: str, at: int) -> int:
    """Read a function whose body begins at `at`, up to its end."""
    signature = _SIGNATURE.match(head[2])
    assert signature is not None
    function, scope = Function(len(program.instructions)), {}
    program.functions[signature[2]] = function
    if head[1] == "entry":
        program.entry = signature[2]
    for given in split(signature[3] or ""):
        words = given.split()  # .param .u64 .ptr .global .align 1 name
        scope[words[-1]] = program.register(words[1].lstrip("."))
        function.parameters.append(scope[words[-1]])
    if signature[1]:
        words = signature[1].split()
        function.result = scope[words[-1]] = program.register(words[1].lstrip("."))
    return _body(program, function, scope, text, at)


def _body(program: Program, function: Function, names: dict, text: str, at: int) -> int:
    scopes, source, last = [ChainMap(names)], "", ""
    while scopes:
        token = _TOKEN.match(text, at)
        if token is None:
            raise UnsupportedError(f"a function has no end: {text[at : at + 60]!r}")
        label, brace, statement = token.groups()
        at = token.end()
        statement = " ".join((statement or "").split())
        if label:
            if len(scopes) > 1:  # of inline assembly, where other scopes may have one of that name
                scopes[-1][label] = label = f"{label} at {len(program.instructions)}"
            function.labels[label], last = len(program.instructions), label
        elif brace == "{":
            scopes.append(scopes[-1].new_child())
        elif brace == "}":
            scopes.pop()
        elif statement.partition(" ")[0] == ".loc":
            source = statement[5:]
        elif statement.startswith(".branchtargets"):
            function.tables[last] = split(statement.partition(" ")[2])
        elif statement.startswith("."):
            _declaration(program, scopes[-1], statement)
        elif statement:
            program.instructions.append(_instruction(statement, scopes[-1], source))
    return at


def _declaration(program: Program, scope: ChainMap, statement: str) -> None:
    """`.reg .b32 %r<12>`, `.reg .pred p, q`, `.param .b64 param0` or an array in local memory."""
    if statement.startswith(_SKIPPED):
        return
    depot = re.fullmatch(r"\.local \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", statement)
    if depot:
        align, name, size = int(depot[1]), depot[2], int(depot[3])
        start = -(-program.local_bytes // align) * align
        scope[name], program.local_bytes = Depot(start), start + size
        return
    found = re.fullmatch(r"\.(?:reg|param) \.(\w+) ([^\[\]]*)", statement)
    if found is None:
        raise UnsupportedError(f"the emulator does not know the declaration {statement!r}")
    for name in _names(found[2]):
        scope[name] = program.register(found[1])


def _names(text: str) -> Iterator[str]:
    for name in split(text):
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        yield from (f"{many[1]}{i}" for i in range(int(many[2]))) if many else (name,)


def _instruction(statement: str, scope: ChainMap, source: str) -> Instruction:
    text, guard = f"{statement} ({source})", None
    if statement.startswith("@"):
        predicate, statement = statement[1:].split(None, 1)
        guard = scope[predicate.lstrip("!")], predicate.startswith("!")
    opcode, _, operands = statement.partition(" ")
    parts = tuple(opcode.replace("::", "_").split("."))
    return Instruction(parts, split(operands), guard, scope, text)
