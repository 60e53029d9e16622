"""Triton's own launcher without a GPU: `absent_gpu.c` takes the place of NVIDIA's driver.

What arrives there is compared with what was launched, and emulated. It needs a process of its own:
others that look for a driver would find this one.
"""

import ctypes
import subprocess
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.static.ptx.launch import Driver, Emulation, noting_batches, taking_cpu_tensors
from benchmarks.static.ptx.memory import WARP

LIBRARY = "libcuda.so.1"  # what Triton's launcher is linked to
ADDRESS, NUMBERS = ctypes.c_uint64, {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
LAUNCHED = ctypes.CFUNCTYPE(
    None, ctypes.c_long, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
)


def build(folder: Path) -> None:
    """Compile the driver into a folder, which TRITON_LIBCUDA_PATH then has to name."""
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", folder / LIBRARY, source]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


class AbsentGPU(Driver):
    """Triton's driver object, whose GPU emulates what Triton's launcher passes on.

    Attributes:
        emulation: of all launches.
        again: how many of them were of what an earlier one had compiled.
    """

    def __init__(self, arch: int, folder: str) -> None:
        super().__init__(arch)
        library = ctypes.CDLL(f"{folder}/{LIBRARY}", mode=ctypes.RTLD_GLOBAL)
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.emulation, self.again = Emulation(arch), 0
        self._kernels, self._options = {}, {}  # by the library's numbers; by kernel
        self._expected = None
        self._launched = LAUNCHED(self._arrived)  # lives as long as the library knows it
        library.tell(self._launched)

    def get_current_device(self) -> int:
        return 0

    def loaded(self, kernel):
        """Note a kernel that Triton loaded into the driver."""
        self._kernels[kernel.function] = kernel

    def bound(self, run, function, args, grid, named):
        """Launch by Triton's binder, `run`."""
        given = {**dict(zip(function.arg_names, args, strict=False)), **named}
        options = {key: given.pop(key) for key in named if key not in function.arg_names}
        self._expected = grid, given
        kernel = run(function, *args, grid=grid, **named)
        self._require_arrival()
        self._options[kernel] = options
        return kernel

    def launched_again(self, run, kernel, launch, args, grid):
        """Launch what the binder compiled once; it has to find the same now."""
        function = kernel.src.fn
        found = run(function, *args, grid=grid, **{**self._options[kernel], "warmup": True})
        assert found is kernel, f"{function.__name__} is not what these arguments need"
        self._expected = grid, dict(zip(function.arg_names, args, strict=True))
        launch(*args)
        self._require_arrival()
        self.again += 1

    def _require_arrival(self):
        assert self._expected is None, "the launch did not arrive, or not as it was made"

    def _arrived(self, number, sizes, parameters):
        """Emulate a launch. An exception is printed, and goes no further."""
        kernel, (grid, given) = self._kernels[number], self._expected
        name, threads = kernel.src.fn.__name__, kernel.metadata.num_warps * WARP
        programs = [*grid, 1, 1][:3]
        assert sizes[:7] == [*programs, threads, 1, 1, kernel.metadata.shared], name
        types = [x for x in kernel.src.signature.items() if x[1] != "constexpr"]
        for (argument, kind), parameter in zip(types, parameters, strict=False):  # an endless array
            is_address, expected = kind.startswith("*"), given[argument]
            own = ctypes.POINTER(ADDRESS if is_address else NUMBERS[kind])
            arrived = ctypes.cast(parameter, own).contents.value
            assert arrived == (expected.data_ptr() if is_address else expected), (name, argument)
        self.emulation.launch(kernel, name, tuple(programs), given)
        self._expected = None


@contextmanager
def launching(arch: int, folder: str):
    """Let the Triton engine step CPU tensors by Triton's launcher and the driver in a folder."""
    gpu, run = AbsentGPU(arch, folder), JITFunction.run
    load, launcher = CompiledKernel._init_handles, CompiledKernel.__getitem__

    def loading(self):
        load(self)
        gpu.loaded(self)

    def running(self, *args, grid, **named):
        return gpu.bound(run, self, args, grid, named)

    def again(self, grid):
        return lambda *args: gpu.launched_again(run, self, launcher(self, grid), args, grid)

    with (
        taking_cpu_tensors(gpu),
        noting_batches(gpu.emulation),
        patch.object(CompiledKernel, "_init_handles", loading),
        patch.object(JITFunction, "run", running),
        patch.object(CompiledKernel, "__getitem__", again),
    ):
        yield gpu
