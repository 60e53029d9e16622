"""Optimizer steps of the Triton engine on CPU tensors: what it launches is compiled and emulated.

    with emulated(90) as emulation, lowbit_optim.use_engine("triton"):
        optimizer.step()
    emulation.counters["update"].races

The engine's own plan, tables and launches are used; Triton's driver and launcher are replaced. A
launch may address its arguments and the tensors of the step, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.batch import Batch
from lowbit_optim_kernels.engines import registry
from lowbit_optim_kernels.engines.triton import engine

from . import flow
from .binding import Executable
from .memory import WARP, Allocation, Counters, GlobalMemory


class Driver:
    """An NVIDIA GPU that is not there; its number is that of its architecture."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)


@dataclass
class Emulation:
    """Record of what was launched.

    Attributes:
        arch: the architecture that is compiled for, e.g. 90.
        counting: whether the costs of accesses are counted.
        counters: of all launches of each kernel, by its name.
        kernels: the last one of each name, as Triton compiled it.
        batches: those that were started, whose tensors may be addressed, by where their tables of
            addresses are.
    """

    arch: int
    counting: bool = False
    counters: dict[str, Counters] = field(default_factory=lambda: defaultdict(Counters))
    kernels: dict[str, Any] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)

    def executable(self, name: str) -> Executable:
        """The program of a kernel's last launch."""
        return _executable(self.kernels[name].asm["ptx"])

    def launch(self, kernel: Any, name: str, grid: tuple, given: Mapping[str, Any]) -> None:
        """Run a compiled kernel with the arguments of a launch, by name."""
        self.kernels[name] = kernel
        executable = self.executable(name)
        types = kernel.src.signature.items()
        arguments = {x: given[x] for x, kind in types if kind != "constexpr"}
        memory = self._memory(arguments, executable.place["global"])
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments.values()]
        counters = flow.launch(
            executable, grid, kernel.metadata.num_warps * WARP, values, memory,
            kernel.metadata.shared, self.counting,
        )  # fmt: skip
        memory.leave()
        self.counters[name].add(counters)

    def _memory(self, arguments: Mapping[str, Any], place: int) -> GlobalMemory:
        """The arguments, and tensors of the step: all but gradients may be written."""
        found: dict[int, Allocation] = {}
        tensors = [(x, name, True) for name, x in arguments.items() if isinstance(x, torch.Tensor)]
        table = arguments.get("address")
        slots = () if table is None else self.batches[table.data_ptr()].slots
        for i, slot in enumerate(slots):
            tensors += [(slot.p.detach(), f"parameter {i}", True), (slot.g, f"gradient {i}", False)]
            kept = *slot.state, slot.step, *slot.lasting, slot.residual
            tensors += [
                (x, f"state {k} of parameter {i}", True)
                for k, x in enumerate(kept)
                if x is not None
            ]
        for x, name, writable in tensors:
            if not x.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
            flat, address = x.as_strided((x.numel(),), (1,)), x.data_ptr()
            data = flat.view(torch.uint8).numpy()
            if len(data) > (len(found[address].data) if address in found else 0):
                found[address] = Allocation(address, data, f"{name} {tuple(x.shape)}", writable)
        return GlobalMemory(found.values(), place)


@cache
def _executable(text: str) -> Executable:
    return Executable(text)


@contextmanager
def taking_cpu_tensors(device: Driver) -> Iterator[None]:
    """Let the Triton engine take CPU tensors and compile for a GPU that is not there."""
    if engine.INTERPRETED.value:
        raise RuntimeError("Triton interprets here: set TRITON_INTERPRET=0, as `make emulate` does")
    takes_all = replace(registry.TRITON, declines=lambda device, dtype: None)
    before = vars(driver)["_active"]
    with ExitStack() as stack:
        stack.callback(driver.set_active, before)
        driver.set_active(device)
        stack.enter_context(patch.object(engine, "takes_ptx", lambda _: device.arch >= 80))
        stack.callback(dispatch._resolve.cache_clear)
        stack.enter_context(patch.dict(registry.ENGINES, triton=takes_all))
        dispatch._resolve.cache_clear()
        yield


@contextmanager
def noting_batches(emulation: Emulation) -> Iterator[None]:
    """Let launches of the engine address the tensors of their batch."""
    start = engine.start

    def starting(batch: Batch) -> Any:
        batch.bind()
        run = start(batch)
        emulation.batches[run.tables.address.data_ptr()] = batch
        return run

    with patch.object(engine, "start", starting):
        yield


@contextmanager
def emulated(arch: int, counting: bool = False) -> Iterator[Emulation]:
    """Let the Triton engine run in the emulator; see `taking_cpu_tensors`.

    Args:
        arch: its architecture: 80, 90, ...
        counting: whether to count what accesses cost.
    """
    emulation, compiling = Emulation(arch, counting), JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compiling(self, *args, grid=grid, warmup=True, **options)
        given = {**dict(zip(self.arg_names, args, strict=False)), **options}
        emulation.launch(kernel, self.__name__, grid, given)
        return kernel

    def compiled(self: Any, grid: tuple) -> Callable[..., None]:
        function = self.src.fn

        def launch(*args: Any) -> None:
            given = dict(zip(function.arg_names, args, strict=True))
            emulation.launch(self, function.__name__, grid, given)

        return launch

    with (
        taking_cpu_tensors(Driver(arch)),
        noting_batches(emulation),
        patch.object(JITFunction, "run", run),
        patch.object(CompiledKernel, "__getitem__", compiled),
    ):
        yield emulation
