"""Memory that a launch addresses: every access is checked, and what it costs is counted.

An access has to lie in what was allocated and to be aligned to its own width, or it is a Fault.
Two accesses to one place, one of them writing, are a race unless something orders them: a barrier
of the program, one of the warp, or that one thread does both. Programs are ordered by nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from .arithmetic import Array

WARP = 32
LINE, SECTOR, BANKS, WORD = 128, 32, 32, 4  # bytes, bytes, banks, bytes of a bank's word
# Where shared and local memory start: no array of a launch lies there, so that every address is a
# generic one too.
SHARED_BASE, LOCAL_BASE = 1 << 12, 1 << 60
_MANY = -2  # in place of an agent


class FaultError(Exception):
    """A fault: no right kernel does this."""


class Lanes(NamedTuple):
    """The threads of one access, each with its program, its warp and what orders it.

    Attributes:
        thread, warp, program: numbers in the launch.
        epoch: barriers of the program so far.
        warp_epoch: barriers of the program and of the warp so far.
    """

    thread: Array
    warp: Array
    program: Array
    epoch: Array
    warp_epoch: Array

    def repeated(self, times: int) -> Lanes:
        return Lanes(*(np.repeat(x, times) for x in self)) if times > 1 else self


@dataclass
class Counters:
    """Counts of a launch: its cost, and what was found wrong with it.

    Attributes:
        instructions: of warps; an instruction that no thread of a warp comes to is none of it.
        barriers: of programs.
        sectors: of 32 bytes, that requests of global memory touch, by "load global", ...
        wavefronts: cycles of the load/store unit: one for each line of 128 bytes of a global
            request, as many as its bank conflicts make of a shared one, one of a shuffle.
        races, unwritten: how often each instruction took part, and bytes that nobody wrote.
    """

    instructions: int = 0
    barriers: int = 0
    sectors: Counter[str] = field(default_factory=Counter)
    wavefronts: Counter[str] = field(default_factory=Counter)
    races: Counter[str] = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counters) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class _Log:
    """Who last wrote and read each place, and when.

    Accesses at one time are unordered; those of one agent are a thing of another log.
    """

    def __init__(self, places: int) -> None:
        self.writer, self.written = np.full((2, places), -1, np.int64)
        self.reader, self.read = np.full((2, places), -1, np.int64)
        self.several = np.zeros(places, bool)  # agents wrote it at once, the last one noted

    def load(self, at: Array, agent: Array, time: Array) -> Array:
        """Whether each access takes part in a race."""
        raced = (self.written[at] == time) & (self.writer[at] != agent)
        others = (self.read[at] == time) & (self.reader[at] != agent)
        noted = np.where(others, _MANY, agent)
        self.reader[at], self.read[at] = noted, time
        lost = self.reader[at] != noted  # another agent of this very access was noted
        self.reader[at[lost]] = _MANY
        return raced

    def store(self, at: Array, agent: Array, time: Array, equal: Array) -> Array:
        """Likewise; equal: whether the place now has what the access wrote.

        Agents that write the same value at once do no harm: it does not matter whose is kept. But
        one of them that writes again may do so before the others have.
        """
        raced = (self.written[at] == time) & ((self.writer[at] != agent) | self.several[at])
        raced |= (self.read[at] == time) & (self.reader[at] != agent)
        self.writer[at], self.written[at] = agent, time
        others = self.writer[at] != agent
        self.several[at] = False
        self.several[at[others]] = True
        return raced | (others & ~equal)


class Space:
    """Bytes with checks.

    Args:
        name: for errors.
        size: in bytes.
        place: bytes that no access is narrower than.
        between_programs: whether programs share it.
    """

    def __init__(self, name: str, size: int, place: int, between_programs: bool = False) -> None:
        self.name, self.place = name, place
        self.raw = np.full(-(-size // LINE) * LINE, 0xFF, np.uint8)
        places = len(self.raw) // place
        self.written = np.zeros(places, bool)
        levels = ("lanes", "warps", "programs") if between_programs else ("lanes", "warps")
        self.logs = {level: _Log(places) for level in levels}

    def load(self, at: Array, size: int, lanes: Lanes, text: str, counters: Counters) -> Array:
        """Bytes (lanes, size) from these offsets."""
        places, who = self._places(at, size), lanes.repeated(size // self.place)
        fresh = int((~self.written[places]).sum())
        if fresh:
            counters.unwritten[f"{self.name}: {text}"] += fresh * self.place
        for level, log in self.logs.items():
            raced = log.load(places, *_agent_and_time(level, who))
            self._note(level, raced, text, counters)
        words = self.raw.view(f"V{size}")[at // size]
        return words.view(np.uint8).reshape(len(at), size)

    def store(self, at: Array, data: Array, lanes: Lanes, text: str, counters: Counters) -> None:
        """Write bytes (lanes, size) at these offsets."""
        size = data.shape[1]
        places, who = self._places(at, size), lanes.repeated(size // self.place)
        words = self.raw.view(f"V{size}")
        words[at // size] = np.ascontiguousarray(data).view(f"V{size}").ravel()
        kept = words[at // size].view(np.uint8).reshape(-1, self.place)
        equal = (kept == data.reshape(-1, self.place)).all(1)
        for level, log in self.logs.items():
            raced = log.store(places, *_agent_and_time(level, who), equal)
            self._note(level, raced, text, counters)
        self.written[places] = True

    def _places(self, at: Array, size: int) -> Array:
        per = size // self.place
        first = at // self.place
        return (first[:, None] + np.arange(per)).ravel() if per > 1 else first

    def _note(self, level: str, raced: Array, text: str, counters: Counters) -> None:
        if raced.any():
            counters.races[f"{self.name}, between {level}: {text}"] += int(raced.sum())


def _agent_and_time(level: str, lanes: Lanes) -> tuple[Array, Array]:
    if level == "lanes":
        return lanes.thread, lanes.warp << 32 | lanes.warp_epoch
    if level == "warps":
        return lanes.warp, lanes.program << 32 | lanes.epoch
    return lanes.program, np.zeros_like(lanes.program)


class Allocation(NamedTuple):
    """An array that a launch may address.

    Attributes:
        address: of its first byte.
        data: its bytes.
        name: for errors.
        writable: whether it may be written.
    """

    address: int
    data: Array
    name: str
    writable: bool = True


class GlobalMemory(Space):
    """Arrays at their addresses, and nothing else.

    Args:
        allocations: the arrays, to which `leave` copies what was written.
        place: bytes that no access is narrower than.
    """

    def __init__(self, allocations: Iterable[Allocation], place: int) -> None:
        ordered = sorted(allocations, key=itemgetter(0))
        starts, self.arrays, self.names, writable = zip(*ordered, strict=True)
        self.starts, self.writable = np.array(starts, np.int64), np.array(writable)
        self.sizes = np.array([len(x) for x in self.arrays], np.int64)
        if (self.starts[:-1] + self.sizes[:-1] > self.starts[1:]).any():
            raise ValueError(f"arrays overlap in memory, among {', '.join(self.names)}")
        # As aligned as the addresses, as far as accesses go; but each begins with a line, as on a
        # GPU, where arrays start at multiples of 256 bytes.
        inset = self.starts % SECTOR
        rooms = -(-(inset + self.sizes) // LINE) * LINE
        self.bases = np.cumsum(rooms) - rooms + inset
        super().__init__("global", int(rooms.sum()), place, between_programs=True)
        self.written[:] = True
        for x, base in zip(self.arrays, self.bases, strict=True):
            self.raw[base : base + len(x)] = x

    def locate(self, address: Array, size: int, write: bool, text: str) -> Array:
        """Offsets of accesses."""
        which = np.maximum(np.searchsorted(self.starts, address, "right") - 1, 0)
        offset = address - self.starts[which]
        outside = (offset < 0) | (offset + size > self.sizes[which])
        if outside.any():
            i = int(np.argmax(outside))
            raise FaultError(
                f"out of bounds: byte {offset[i]} to {offset[i] + size} of {self.names[which[i]]}, "
                f"which has {self.sizes[which[i]]}, in {int(outside.sum())} lanes of {text}"
            )
        aligned(address, size, text)
        if write and not self.writable[which].all():
            name = self.names[which[int(np.argmin(self.writable[which]))]]
            raise FaultError(f"{name} is only to be read: {text}")
        return self.bases[which] + offset

    def leave(self) -> None:
        """Copy what the launch wrote back."""
        for x, base, writable in zip(self.arrays, self.bases, self.writable, strict=True):
            if writable:
                x[:] = self.raw[base : base + len(x)]


class OwnMemory(Space):
    """Memory that each program, or each thread, has for itself: so many bytes from `base` on."""

    def __init__(self, name: str, base: int, bytes_each: int, owners: int, place: int) -> None:
        self.base, self.bytes_each = base, bytes_each
        self.pitch = -(-bytes_each // LINE) * LINE
        super().__init__(name, self.pitch * owners, place)

    def locate(self, address: Array, size: int, owner: Array, text: str) -> Array:
        """Offsets of accesses."""
        offset = address - self.base
        outside = (offset < 0) | (offset + size > self.bytes_each)
        if outside.any():
            raise FaultError(
                f"out of bounds: byte {offset[outside][0]} of {self.bytes_each} of {self.name} "
                f"memory, in {int(outside.sum())} lanes of {text}"
            )
        aligned(address, size, text)
        return offset + owner * self.pitch


def aligned(address: Array, size: int, text: str) -> None:
    bad = int((address % size != 0).sum())
    if bad:
        raise FaultError(f"misaligned: {bad} lanes of {text}")


def segments(offset: Array, warp: Array, size: int) -> int:
    """The number of different segments of memory that warps touch."""
    return len(np.unique(warp << 44 | offset // size))


def shared_wavefronts(offset: Array, thread: Array, size: int) -> int:
    """Cycles that accesses of shared memory take.

    Halves of a warp (8 bytes a lane) or quarters (16 bytes) take turns. In each turn a bank gives
    one word to all lanes that want it, a cycle a word.
    """
    words = max(1, size // WORD)
    turn = np.repeat(thread // (WARP // words), words)
    word = (offset[:, None] // WORD + np.arange(words)).ravel()
    wanted = np.unique(turn << 32 | word)  # each once
    turns, bank = wanted >> 32, wanted % BANKS
    banks, cycles = np.unique(turns * BANKS + bank, return_counts=True)
    starts = np.flatnonzero(np.r_[True, np.diff(banks // BANKS) > 0])
    return int(np.maximum.reduceat(cycles, starts).sum())
