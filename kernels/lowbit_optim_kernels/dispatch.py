"""Which engine runs a tensor, and why not another.

auto: a CUDA, ROCm or XPU tensor goes to Triton; a CPU tensor of fp32, bf16 or fp16 to Numba;
anything else to torch. `use_engine` or the environment variable LOWBIT_OPTIM_ENGINE asks for one
engine explicitly; a request that cannot be met raises with the reason. When auto has to fall back
on torch because something is missing, it warns once. An exception inside an engine propagates.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .plan import Batch, Run

ENGINES = ("triton", "numba", "torch")
VARIABLE = "LOWBIT_OPTIM_ENGINE"
HALF_TO_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs a tensor (`name`) and the `reason` for it, in a sentence."""

    name: str
    reason: str


@cache
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module set to None in sys.modules
        return False


@cache
def _triton_release() -> tuple[int, int]:
    """Major and minor number."""
    import triton  # a distribution may have another name than the module

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _installed("triton"):
        return "triton is not installed"
    if dtype not in HALF_TO_SINGLE:
        return f"the triton engine computes in fp32 and does not take {dtype}"
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if device.type not in ("cuda", "xpu") and not (interpreted and device.type == "cpu"):
        return f"triton compiles for CUDA, ROCm and XPU devices, not for {device.type!r}"
    if device.type != "cpu" and _triton_release() < (3, 4):
        return (
            "Triton before 3.4 lacks what the compiling of the codec's look-ups needs (torch 2.8 "
            "comes with 3.4)"
        )
    return None


def _converts_half() -> bool:
    from .numba_vector import converts_half  # imports Numba, which this tensor is about to need

    return converts_half()


def _numba_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _installed("numba"):
        return "numba is not installed"
    if device.type != "cpu":
        return f"the numba engine runs CPU tensors, not {device.type!r} ones"
    if dtype not in HALF_TO_SINGLE:
        return f"the numba engine computes in fp32 and does not take {dtype}"
    if dtype == torch.float16 and not _converts_half():
        return "the CPU that numba compiles for lacks instructions for float16 (F16C)"
    return None


def _torch_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


_REFUSES: dict[str, Callable[[torch.device, torch.dtype], str | None]] = {
    "triton": _triton_refuses,
    "numba": _numba_refuses,
    "torch": _torch_refuses,
}


def _checked(name: str, source: str) -> str:
    if name not in ("auto", *ENGINES):
        allowed = ", ".join(("auto", *ENGINES))
        raise ValueError(f"{source} must be one of {allowed}; got {name!r}")
    return name


class use_engine:
    """Choose the engine for all tensors of this process; also a context manager that restores.

    Args:
        name: "auto" (the default choice by device and dtype), "triton", "numba" or "torch".

    Raises:
        ValueError: for another name. A tensor that the chosen engine cannot run raises
            RuntimeError with the reason at the first step.

    Example:
        >>> with use_engine("torch"):
        ...     optimizer.step()
    """

    _asked: str | None = None

    def __init__(self, name: str) -> None:
        _checked(name, "name")
        self._before = use_engine._asked
        use_engine._asked = name

    def __enter__(self) -> use_engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        use_engine._asked = self._before


def request() -> tuple[str, str]:
    """The engine that is asked for, or "auto", and who asks."""
    if use_engine._asked is not None:
        return use_engine._asked, "use_engine"
    return _checked(os.environ.get(VARIABLE, "auto"), VARIABLE), VARIABLE


@cache
def _warn_of_fallback(device_type: str, refusal: str) -> None:
    """Once per process, whatever the dtype."""
    warnings.warn(
        f"lowbit_optim runs {device_type} tensors on the slower torch engine: {refusal}",
        RuntimeWarning,
        stacklevel=5,
    )


@cache
def _resolve(asked: str, source: str, device: torch.device, dtype: torch.dtype) -> EngineChoice:
    if asked != "auto":
        refusal = _REFUSES[asked](device, dtype)
        if refusal:
            raise RuntimeError(
                f"{source} asks for the engine {asked!r}, but {refusal}; "
                f'ask for "auto" or "torch" for this tensor'
            )
        return EngineChoice(asked, f"{source} asks for it")
    wanted = {"cuda": "triton", "xpu": "triton", "cpu": "numba"}.get(device.type, "torch")
    refusal = _REFUSES[wanted](device, dtype)
    if refusal is None:
        return EngineChoice(wanted, f"the default for {dtype} on {device.type}")
    if "not installed" in refusal or "lacks" in refusal:
        _warn_of_fallback(device.type, refusal)
    return EngineChoice("torch", refusal)


def engine_for(tensor: Tensor) -> EngineChoice:
    """Say which engine runs a tensor's optimizer step, and why.

    Args:
        tensor: a parameter; only its device and dtype matter.

    Returns:
        EngineChoice with `name` ("triton", "numba" or "torch") and `reason`.

    Raises:
        RuntimeError: when an engine was asked for explicitly and cannot run this tensor.
    """
    return _resolve(*request(), tensor.device, tensor.dtype)


def load_engine(name: str) -> Any:
    """The engine's module; Numba and Triton are imported when first needed."""
    return importlib.import_module(f"lowbit_optim_kernels.engine_{name}")


def step(
    batches: Sequence[Batch],
    all_reduce: Callable[[list[Tensor]], None] | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Step batches; every batch's slots share a device and an engine.

    An exception, Ctrl-C among them, that comes before a batch's parameters are written leaves the
    batch's parameters, moments and step counts as they were.

    Args:
        batches: what to step; `plan.Batch` says what is read and written.
        all_reduce: given the sums of one phase of all batches, adds up the shards of other ranks
            in place; None when every tensor is whole.
        ready: called when the engines have all that they need, before anything is written.
    """
    runs: list[Run] = [load_engine(engine_for(b.slots[0].p).name).start(b) for b in batches]
    if ready is not None:
        ready()
    counted: list[Run] = []
    try:
        for run in runs:
            run.begin()
            counted.append(run)
        for phase in range(max((run.phases for run in runs), default=0)):
            active = [run for run in runs if phase < run.phases]
            sums = [run.reduce(phase) for run in active]
            if all_reduce is not None:
                all_reduce(sums)
            for run, total in zip(active, sums, strict=True):
                run.combine(phase, total)
        for run in runs:
            counted.remove(run)  # from here on its parameters may have been written
            run.finish()
    except BaseException:
        for run in counted:
            run.cancel()
        raise
