"""Threads of some programs of a launch, run together.

Each thread has its own program counter. Those with the lowest one run until they branch or come to
where others wait, so that branches of a program meet again where they would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Array
from .binding import Executable, reader, register
from .machine import Machine
from .memory import WARP, Counters, FaultError, GlobalMemory
from .parser import Instruction, UnsupportedError, split

TOGETHER = 16  # programs that are run at a time


class Threads(Machine):
    """Programs of a launch and where their threads are; see `Machine`."""

    def __init__(self, executable: Executable, *launch: Any) -> None:
        super().__init__(executable.program, executable.place, *launch)
        self.steps = executable.steps
        self.alive = np.ones(self.n, bool)
        self.waiting: dict[int, Array] = {}  # at a barrier, by where they go on
        self.links: dict[str, Array] = {}  # which call each thread is in, by function
        self.groups: dict[int, Array] = {}  # the others, by their program counter

    def run(self) -> None:
        """Run all threads to their end."""
        entry = self.program.functions[self.program.entry]
        self.groups = {entry.start: self.alive.copy()}
        while self.groups:
            pc = min(self.groups)
            self._run_group(pc, self.groups.pop(pc))
        if self.waiting:
            where = [self.steps[pc - 1].instruction.text for pc in self.waiting]
            raise FaultError(f"threads wait for others that never come: {'; '.join(where)}")

    def _run_group(self, pc: int, mask: Array) -> None:
        """Run threads with one program counter up to a branch, or to where others are."""
        meeting, start = min(self.groups, default=-1), pc
        everyone = None if mask.all() else mask
        self.active = everyone
        warps = self.warps()
        while pc != meeting:
            step, instruction = self.steps[pc]
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
            function = self.program.function_at(pc - 1)
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
            self.active = active
            members = reader(self.program, instruction, operands[0], "b32")
            self.whole_warps(members(self), instruction.text)
            self.lanes.warp_epoch[np.repeat(active.reshape(-1, WARP).any(1), WARP)] += 1
            self._join(pc, active)
        elif instruction.opcode[1] == "sync" and operands in (("0",), ("0", str(self.threads))):
            self.waiting[pc] = self.waiting.get(pc, False) | active
            self._release()
        else:
            raise UnsupportedError(f"the emulator knows one barrier of all: {instruction.text}")

    def _jump(self, instruction: Instruction, pc: int, active: Array) -> None:
        """A branch whose targets are numbered."""
        function = self.program.function_at(pc - 1)
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
        function = self.program.functions[name]
        self.active = active
        arguments = split(given[0][1:-1]) if given else ()
        for parameter, argument in zip(function.parameters, arguments, strict=True):
            self.write(parameter, self.value(register(instruction, argument)))
        self.links[name] = np.where(active, pc, self.links.get(name, 0))
        self._join(function.start, active)

    def _return(self, name: str, pc: int, active: Array) -> None:
        program = self.program
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
            Threads(
                executable, numbers, (x, y, z), threads, arguments, memory, shared_bytes, counters,
                counting,
            ).run()  # fmt: skip
    return counters
