"""Registers and memory of threads of some programs of a launch, which run together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from .arithmetic import SIGNED, UNSIGNED, Array
from .memory import (
    LINE,
    LOCAL_BASE,
    SECTOR,
    SHARED_BASE,
    WARP,
    Counters,
    FaultError,
    GlobalMemory,
    Lanes,
    OwnMemory,
    segments,
    shared_wavefronts,
)
from .parser import Program, Register, UnsupportedError


class Machine:
    """Programs of a launch.

    Args:
        program: what they run.
        place: the narrowest access of each space, in bytes.
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
        self, program: Program, place: Mapping[str, int], numbers: Sequence[int],
        grid: tuple[int, int, int], threads: int, arguments: Sequence[int], memory: GlobalMemory,
        shared_bytes: int, counters: Counters, counting: bool,
    ) -> None:  # fmt: skip
        self.program, self.counters, self.counting = program, counters, counting
        self.threads, self.programs = threads, len(numbers)
        self.n = threads * len(numbers)
        self.number = np.arange(self.n)
        self.lane, self.local = self.number % WARP, self.number // threads
        number = np.asarray(numbers, np.int64)[self.local]
        thread = number * threads + self.number % threads
        self.lanes = Lanes(
            thread, thread // WARP, number, np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        )
        self._specials = self._special_registers(grid, number)
        self.memory = memory
        each = program.local_bytes
        self.shared = OwnMemory("shared", SHARED_BASE, shared_bytes, self.programs, place["shared"])
        self.own = OwnMemory("local", LOCAL_BASE, each, self.n if each else 0, place["local"])
        self.registers: list[Array | None] = [None] * len(program.registers)
        self.active: Array | None = None  # the threads that run an instruction; None for all
        entry = program.functions[program.entry]
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
        """The number of warps with an active thread."""
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

    def ask(self, address: Array, text: str) -> None:
        """Have the sectors of these bytes of global memory brought into a cache."""
        space, who, address, lanes = self._access("global", address)
        _, at = self._locate(space, who, address, 1, False, text)
        self._count("ask global", at, 1, lanes)

    def _count(self, what: str, at: Array, size: int, lanes: Lanes) -> None:
        if not self.counting:
            return
        if what.endswith("shared"):
            self.count_wavefronts(what, shared_wavefronts(at, lanes.thread, size))
            return
        self.count_wavefronts(what, segments(at, lanes.warp, LINE))
        self.counters.sectors[what] += segments(at, lanes.warp, SECTOR)
