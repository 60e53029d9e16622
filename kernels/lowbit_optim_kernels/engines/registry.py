"""The engines: what each of them takes, and why it refuses the rest.

An engine is one record in `ENGINES`. Its module is imported when a tensor first needs it, and what
it is built on (Numba, Triton) when such a tensor is first asked about.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..devices import has_fp64
from ..uninterrupted import uninterrupted

HALF_TO_SINGLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
FALLBACK = "torch"  # the engine that runs what no other one takes

# What a broken installation raises when it is imported: a library that is missing or cannot be
# loaded, or one that was compiled for another NumPy, Python or LLVM.
_BROKEN = (ImportError, OSError, AttributeError, RuntimeError, SystemError, TypeError, ValueError)
_TRITONS_TRUE = ("1", "true", "on", "yes", "y")  # in its environment variables, in any case


@dataclass(frozen=True)
class Refusal:
    """Why an engine does not run a tensor.

    Attributes:
        reason: the sentence that an error or a warning ends with.
        warn: whether to warn when the tensor falls back on the torch engine: something is missing
            that the user can mend. Otherwise that engine is the one for such tensors.
    """

    reason: str
    warn: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine: code that runs optimizer steps.

    Attributes:
        name: what `use_engine` and LOWBIT_OPTIM_ENGINE call it.
        module: what has its `start`, `encode` and `decode`; relative to this package, or
            absolute.
        requires: the module that it is built on, or None.
        devices: types of devices whose tensors it is the automatic choice for.
        dtypes: dtypes of parameters that it takes; None for all.
        by_address: whether it steps by the addresses in its tables: then slots have their tensors
            only in a step for which there are no tables yet; see `Batch.bind`.
        takes_mixed_batches: whether a batch may have slots of several parts of parameter groups,
            and slots without a gradient; else all have the hyperparameters `batch.hyper[0]`, and a
            gradient.
        declines: given a device and a dtype out of `dtypes`, why it does not run them, or None.
        instructions: says which instructions its code is chosen for, where that is not the
            device's own matter; called for what it does not refuse.
    """

    name: str
    module: str
    requires: str | None
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] | None
    declines: Callable[[torch.device, torch.dtype], Refusal | None]
    instructions: Callable[[], str] | None = None
    by_address: bool = False
    takes_mixed_batches: bool = False

    def refusal(
        self, device: torch.device, dtype: torch.dtype, tensor_type: type = Tensor
    ) -> Refusal | None:
        """Why this engine does not run tensors of a device, a dtype and a type; None if it does."""
        if self.name != FALLBACK and is_wrapper(tensor_type):
            reason = (
                f"the {self.name} engine needs addresses, and a {tensor_type.__name__} has none"
            )
            return Refusal(reason)
        if self.requires is not None and not _installed(self.requires):
            return Refusal(f"{self.requires} is not installed", warn=True)
        if self.dtypes is not None and dtype not in self.dtypes:
            return Refusal(f"the {self.name} engine computes in fp32 and does not take {dtype}")
        return self.declines(device, dtype)

    @cached_property
    def code(self) -> Any:
        """Its module; Numba and Triton are imported when it is first needed."""
        return uninterrupted(importlib.import_module, self.module, __package__)


def is_wrapper(tensor_type: type) -> bool:
    """Whether tensors of a type keep their numbers in others, so that only operators reach them."""
    return (
        issubclass(tensor_type, Tensor)
        and tensor_type.__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


@cache
def _installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module that a program has made itself, in place of the real one
        return False
    return spec is not None and spec.origin is not None  # a folder of that name may be on the path


@cache
def _broken(module: str) -> Refusal | None:
    """Why an installed module does not import."""
    try:
        uninterrupted(importlib.import_module, module)
    except _BROKEN as error:
        reason = f"{module} is installed but does not import: {type(error).__name__}: {error}"
        return Refusal(reason, warn=True)
    return None


@cache
def _without_sources() -> Refusal | None:
    """Why nothing is compiled where this package has bytecode alone, as in a frozen program."""
    try:
        inspect.getsource(sys.modules[__name__])
    except OSError:
        package = __name__.partition(".")[0]
        reason = f"kernels are generated from the source files of {package}, which are missing"
        return Refusal(reason, warn=True)
    return None


def _triton_declines(device: torch.device, dtype: torch.dtype) -> Refusal | None:
    interpreter = os.environ.get("TRITON_INTERPRET", "").lower() in _TRITONS_TRUE
    interpreted = interpreter and device.type == "cpu"
    if device.type not in TRITON.devices and not interpreted:
        return Refusal(f"triton compiles for CUDA, ROCm and XPU devices, not for {device.type!r}")
    broken = _broken("triton") or _without_sources()
    if broken or interpreted:
        return broken
    if interpreter:  # which ends the process where it follows an address
        reason = "TRITON_INTERPRET is set, and its interpreter cannot read a device's memory"
        return Refusal(reason, warn=True)
    import triton  # its distribution may have another name, so the version is asked of the module

    major, minor, *_ = triton.__version__.split(".")
    if (int(major), int(minor)) < (3, 4):
        found = triton.__version__
        reason = f"kernels need Triton 3.4 or newer, which torch 2.8 comes with; this is {found}"
        return Refusal(reason, warn=True)
    if not has_fp64(device):
        return Refusal(
            "the triton engine computes a tensor's own numbers in fp64, which this GPU lacks"
        )
    return _without_launcher(device.type)


@cache
def _without_launcher(kind: str) -> Refusal | None:
    """Why Triton launches nothing on devices that are there: as it compiles what does that in C."""
    if not torch.get_device_module(kind).is_available():
        return None
    from triton.runtime.driver import driver

    try:
        uninterrupted(attrgetter("active.get_current_target"), driver)
    except (*_BROKEN, AssertionError, subprocess.SubprocessError) as error:
        reason = f"triton cannot build its launcher in C: {type(error).__name__}: {error}"
        return Refusal(reason, warn=True)
    return None


def _numba_declines(device: torch.device, dtype: torch.dtype) -> Refusal | None:
    if device.type not in NUMBA.devices:
        return Refusal(f"the numba engine runs CPU tensors, not {device.type!r} ones")
    broken = _broken("numba") or _without_sources()
    if broken:
        return broken
    import numba

    if vars(numba.config)["DISABLE_JIT"]:  # numba makes its settings when it is imported
        return Refusal("NUMBA_DISABLE_JIT is set, so that numba compiles nothing", warn=True)
    if dtype == torch.float16 and not _converts_half():
        reason = "the CPU that numba compiles for lacks instructions for float16 (F16C)"
        return Refusal(reason, warn=True)
    return None


def _converts_half() -> bool:
    from .numba.vector import converts_half

    return converts_half()


def _numba_instructions() -> str:
    from .numba.vector import instruction_set

    return instruction_set()


def _declines_nothing(device: torch.device, dtype: torch.dtype) -> Refusal | None:
    return None


TRITON = Engine(
    name="triton",
    module=".triton.engine",
    requires="triton",
    devices=frozenset({"cuda", "xpu"}),  # torch calls ROCm devices cuda
    dtypes=HALF_TO_SINGLE,
    declines=_triton_declines,
    by_address=True,
    takes_mixed_batches=True,
)
NUMBA = Engine(
    name="numba",
    module=".numba.engine",
    requires="numba",
    devices=frozenset({"cpu"}),
    dtypes=HALF_TO_SINGLE,
    declines=_numba_declines,
    instructions=_numba_instructions,
    by_address=True,
    takes_mixed_batches=True,
)
TORCH = Engine(
    name=FALLBACK,
    module=".torch",
    requires=None,
    devices=frozenset(),
    dtypes=None,
    declines=_declines_nothing,
)
ENGINES = {engine.name: engine for engine in (TRITON, NUMBA, TORCH)}


def default_engine(device_type: str) -> Engine:
    """The engine for tensors of a type of device, as far as it takes their dtype."""
    chosen = (engine for engine in ENGINES.values() if device_type in engine.devices)
    return next(chosen, ENGINES[FALLBACK])
