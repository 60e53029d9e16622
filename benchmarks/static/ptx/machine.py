"""Threads of some programs of a launch, run together.

Each thread has its own program counter. Those with the lowest one run until they branch or come to
where others wait, so that branches of a program meet again where they would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .arithmetic import SIGNED, UNSIGNED, Array
from .binding import LOCAL_BASE, SHARED_BASE, Executable, register
from .memory import (
    LINE,
    SECTOR,
    WARP,
    Counters,
    FaultError,
    GlobalMemory,
    Lanes,
    OwnMemory,
    segments,
    shared_wavefronts,
)
from .parser import Instruction, Register, UnsupportedError, split

TOGETHER = 16  # programs that are run at a time


class Machine:
    """Programs of a launch.

    Args:
        executable: what they run.
        numbers: of the programs in the launch.
        grid: programs in each dimension.
        threads: of a program.
        arguments: of the kernel, in order; missing ones are 0.
        memory: what they share.
        shared_bytes: of shared memory that each has.
        counters: where the costs go.
        counting: whether sectors and wavefronts are counted.
    """

    def __init__(
        self, executable: Executable, numbers: Sequence[int], grid: tuple[int, int, int],
        threads: int, arguments: Sequence[int], memory: GlobalMemory, shared_bytes: int,
        counters: Counters, counting: bool,
    ) -> None:  # fmt: skip
        self.executable, self.counters, self.counting = executable, counters, counting
        self.threads, self.programs = threads, len(numbers)
        self.n = threads * len(numbers)
        self.number = np.arange(self.n)
        self.lane, self.local = self.number % WARP, self.number // threads
        program = np.asarray(numbers, np.int64)[self.local]
        thread = program * threads + self.number % threads
        self.lanes = Lanes(
            thread, thread // WARP, program, np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        )
        self._specials = self._special_registers(grid, program)
        self.memory = memory
        place, each = executable.place, executable.program.local_bytes
        self.shared = OwnMemory("shared", SHARED_BASE, shared_bytes, self.programs, place["shared"])
        self.own = OwnMemory("local", LOCAL_BASE, each, self.n if each else 0, place["local"])
        self.registers: list[Array | None] = [None] * len(executable.program.registers)
        self.active: Array | None = None  # the threads that run an instruction; None for all
        self.alive = np.ones(self.n, bool)
        self.waiting: dict[int, Array] = {}  # at a barrier, by where they go on
        self.links: dict[str, Array] = {}  # which call each thread is in, by function
        self.groups: dict[int, Array] = {}
        entry = executable.program.functions[executable.program.entry]
        given = [*arguments, *[0] * (len(entry.parameters) - len(arguments))]
        for parameter, value in zip(entry.parameters, given, strict=True):
            self.write(parameter, np.array([value], UNSIGNED[parameter.bits]))

    def _special_registers(self, grid: tuple[int, int, int], program: Array) -> dict[str, Array]:
        x, y, z = grid
        found = {
            "%tid.x": self.number % self.threads, "%laneid": self.lane,
            "%ntid.x": np.array([self.threads]), "%ctaid.x": program % x,
            "%ctaid.y": program // x % y, "%ctaid.z": program // (x * y),
            "%nctaid.x": np.array([x]), "%nctaid.y": np.array([y]), "%nctaid.z": np.array([z]),
        }  # fmt: skip
        return {name: value.astype(np.uint32) for name, value in found.items()}

    # What instructions use.

    def special(self, name: str) -> Array:
        """A register that is only read."""
        if name not in self._specials:
            raise UnsupportedError(f"the emulator has no register {name}")
        return self._specials[name]

    def spread(self, value: Array) -> Array:
        """A value for each thread."""
        return value if value.shape == (self.n,) else np.repeat(value, self.n)

    def value(self, of: Register) -> Array:
        """A register, which may be read before it is written (of a packed word, some bytes)."""
        found = self.registers[of.number]
        if found is None:  # as bad as memory that nobody wrote
            found = ~np.zeros(self.n, UNSIGNED[of.bits])
        return found

    def write(self, into: Register, value: Array) -> None:
        """Give a register of the active threads a value, extended to its width."""
        if into.bits > 1 and value.dtype.itemsize * 8 != into.bits:
            value = value.astype((SIGNED if value.dtype.kind == "i" else UNSIGNED)[into.bits])
        value = self.spread(value)
        if into.bits > 1:
            value = np.ascontiguousarray(value).view(UNSIGNED[into.bits])
        if self.active is not None:
            value = np.where(self.active, value, self.value(into))
        self.registers[into.number] = value

    @contextmanager
    def only(self, some: Array) -> Iterator[None]:
        """Run instructions for some of the active threads."""
        before = self.active
        self.active = some if before is None else some & before
        yield
        self.active = before

    def warps(self) -> int:
        """How many warps have an active thread."""
        if self.active is None:
            return self.n // WARP
        return int(self.active.reshape(-1, WARP).any(1).sum())

    def whole_warps(self, members: Array | None, text: str) -> None:
        """Refuse what lanes do together when some of them are missing."""
        if members is not None and (members != np.uint32(0xFFFFFFFF)).any():
            raise UnsupportedError(f"the emulator knows only whole warps: {text}")
        if self.active is not None:
            lanes = self.active.reshape(-1, WARP)
            if (lanes.any(1) != lanes.all(1)).any():
                raise FaultError(f"some lanes of a warp do not come to {text}")

    def count_wavefronts(self, what: str, number: int) -> None:
        self.counters.wavefronts[what] += number

    # Memory.

    def _access(self, space: str, address: Array) -> tuple[str, Array, Array, Lanes]:
        """The space, threads, addresses and lanes of an access."""
        if self.active is None:
            who, lanes = self.number, self.lanes
        else:
            who = np.flatnonzero(self.active)
            lanes = Lanes(*(x[who] for x in self.lanes))
        address = address[who]
        if not space:
            local, shared = address >= LOCAL_BASE, address < SHARED_BASE + self.shared.bytes_each
            space = "local" if local.all() else "shared" if shared.all() else "global"
        return space, who, address, lanes

    def _locate(
        self, space: str, who: Array, address: Array, size: int, write: bool, text: str
    ) -> tuple[GlobalMemory | OwnMemory, Array]:
        if space == "global":
            return self.memory, self.memory.locate(address, size, write, text)
        own = self.shared if space == "shared" else self.own
        owner = self.local[who] if space == "shared" else who
        return own, own.locate(address, size, owner, text)

    def load(self, space: str, address: Array, size: int, text: str) -> Array:
        """Bytes (threads, size); of threads that are not active they mean nothing."""
        space, who, address, lanes = self._access(space, address)
        memory, at = self._locate(space, who, address, size, False, text)
        data = np.zeros((self.n, size), np.uint8)
        data[who] = memory.load(at, size, lanes, text, self.counters)
        self._count(f"load {space}", at, size, lanes)
        return data

    def store(self, space: str, address: Array, data: Array, text: str) -> None:
        """Write bytes (threads, size)."""
        space, who, address, lanes = self._access(space, address)
        memory, at = self._locate(space, who, address, data.shape[1], True, text)
        memory.store(at, data[who], lanes, text, self.counters)
        self._count(f"store {space}", at, data.shape[1], lanes)

    def _count(self, what: str, at: Array, size: int, lanes: Lanes) -> None:
        if not self.counting:
            return
        if what.endswith("shared"):
            self.count_wavefronts(what, shared_wavefronts(at, lanes.thread, size))
            return
        self.count_wavefronts(what, segments(at, lanes.warp, LINE))
        self.counters.sectors[what] += segments(at, lanes.warp, SECTOR)

    # Flow.

    def run(self) -> None:
        """Run all threads to their end."""
        entry = self.executable.program.functions[self.executable.program.entry]
        self.groups = {entry.start: self.alive.copy()}
        while self.groups:
            pc = min(self.groups)
            self._run_group(pc, self.groups.pop(pc))
        if self.waiting:
            where = [self.executable.steps[pc - 1].instruction.text for pc in self.waiting]
            raise FaultError(f"threads wait for others that never come: {'; '.join(where)}")

    def _run_group(self, pc: int, mask: Array) -> None:
        """Run threads with one program counter up to a branch, or to where others are."""
        meeting, start = min(self.groups, default=-1), pc
        everyone = None if mask.all() else mask
        self.active = everyone
        warps = self.warps()
        while pc != meeting:
            step, instruction = self.executable.steps[pc]
            if instruction.guard is not None:
                predicate, negated = instruction.guard
                value = self.value(predicate)
                active = mask & (~value if negated else value)
                self.active = None if active.all() else active
            pc += 1
            if step is None:
                self._flow(instruction, pc, mask, mask if self.active is None else self.active)
                break
            if self.active is None or self.active.any():
                step(self)
            self.active = everyone
        else:
            self._join(pc, mask)
        self.counters.instructions += warps * (pc - start)

    def _join(self, pc: int, mask: Array) -> None:
        """Let threads go on at an instruction."""
        if mask.any():
            self.groups[pc] = self.groups[pc] | mask if pc in self.groups else mask

    def _flow(self, instruction: Instruction, pc: int, mask: Array, active: Array) -> None:
        """Branches, calls and barriers; pc is that of the next instruction."""
        self._join(pc, mask & ~active)
        name, operands = instruction.opcode[0], instruction.operands
        if name == "bra":
            function = self.executable.program.function_at(pc - 1)
            label = instruction.scope.get(operands[0], operands[0])
            self._join(function.labels[label], active)
        elif name == "brx":
            self._jump(instruction, pc, active)
        elif name == "call":
            self._call(instruction, pc, active)
        elif name in ("ret", "exit"):
            self._return(name, pc, active)
        elif name == "trap":
            if active.any():
                raise FaultError(f"a trap is reached: {instruction.text}")
        elif instruction.opcode[:2] == ("bar", "warp"):
            self.lanes.warp_epoch[np.repeat(active.reshape(-1, WARP).any(1), WARP)] += 1
            self._join(pc, active)
        elif operands in (("0",), ("0", str(self.threads))):
            self.waiting[pc] = self.waiting.get(pc, False) | active
            self._release()
        else:
            raise UnsupportedError(f"the emulator knows one barrier of all: {instruction.text}")

    def _jump(self, instruction: Instruction, pc: int, active: Array) -> None:
        """A branch whose targets are numbered."""
        function = self.executable.program.function_at(pc - 1)
        index, table = instruction.operands
        chosen = self.value(register(instruction, index))
        for i in np.unique(chosen[active]).tolist():
            self._join(function.labels[function.tables[table][i]], active & (chosen == i))

    def _release(self) -> None:
        """Let the programs go on all of whose threads wait at a barrier."""
        waiting = np.zeros(self.n, bool)
        for mask in self.waiting.values():
            waiting |= mask
        complete = (waiting | ~self.alive).reshape(self.programs, -1).all(1)
        complete &= waiting.reshape(self.programs, -1).any(1)
        self.counters.barriers += int(complete.sum())
        passing = complete[self.local]
        self.lanes.epoch[passing] += 1
        self.lanes.warp_epoch[passing] += 1
        for pc, mask in list(self.waiting.items()):
            self._join(pc, mask & passing)
            self.waiting[pc] = mask & ~passing
            if not self.waiting[pc].any():
                del self.waiting[pc]

    def _call(self, instruction: Instruction, pc: int, active: Array) -> None:
        """Pass arguments, and note where to return to: no function calls itself."""
        operands = instruction.operands
        name, *given = operands[1:] if operands[0].startswith("(") else operands
        function = self.executable.program.functions[name]
        self.active = active
        arguments = split(given[0][1:-1]) if given else ()
        for parameter, argument in zip(function.parameters, arguments, strict=True):
            self.write(parameter, self.value(register(instruction, argument)))
        self.links[name] = np.where(active, pc, self.links.get(name, 0))
        self._join(function.start, active)

    def _return(self, name: str, pc: int, active: Array) -> None:
        program = self.executable.program
        function = program.function_at(pc - 1)
        if name == "exit" or function is program.functions[program.entry]:
            self.alive &= ~active
            self._release()
            return
        (link,) = (self.links[key] for key, f in program.functions.items() if f is function)
        for back in np.unique(link[active]).tolist():
            self.active = active & (link == back)
            calling = program.instructions[back - 1]
            if function.result is not None:
                into = register(calling, calling.operands[0].strip("()"))
                self.write(into, self.value(function.result))
            self._join(back, self.active)


def launch(
    executable: Executable, grid: Sequence[int], threads: int, arguments: Sequence[int],
    memory: GlobalMemory, shared_bytes: int = 0, counting: bool = True,
) -> Counters:  # fmt: skip
    """Run all programs of a launch.

    Args:
        executable: the kernel.
        grid: programs in each dimension, up to three.
        threads: of a program.
        arguments: numbers and addresses, in order; missing ones are 0.
        memory: what addresses mean; what is written stays there until `GlobalMemory.leave`.
        shared_bytes: of shared memory for each program.
        counting: whether to count what accesses cost.

    Raises:
        FaultError: for what no right kernel does.
        UnsupportedError: for what the emulator does not know.
    """
    x, y, z = (*grid, 1, 1)[:3]
    counters = Counters()
    with np.errstate(all="ignore"):
        for first in range(0, x * y * z, TOGETHER):
            numbers = range(first, min(first + TOGETHER, x * y * z))
            Machine(
                executable, numbers, (x, y, z), threads, arguments, memory, shared_bytes, counters,
                counting,
            ).run()  # fmt: skip
    return counters
