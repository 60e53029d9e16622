"""Choice of the engine that runs a tensor, and the calls that go to it: encode, decode, step.

auto: a CUDA, ROCm or XPU tensor goes to Triton; a CPU tensor of fp32, bf16 or fp16 to Numba;
anything else to torch. `use_engine` or the environment variable LOWBIT_OPTIM_ENGINE asks for one
engine explicitly; a request that cannot be met raises with the reason. When auto has to fall back
on torch because something is missing, it warns once. An exception inside an engine propagates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .batch import Batch, Run, note_order
from .engines.registry import ENGINES, FALLBACK, Engine, default_engine
from .engines.request import request
from .formats import Unit
from .formats.layout import Layout


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs a tensor.

    Attributes:
        name: "triton", "numba" or "torch".
        reason: for the choice, in a sentence; of the Numba engine it ends with the vector
            instructions that are compiled for.
    """

    name: str
    reason: str


@cache
def _warn_of_fallback(device_type: str, reason: str) -> None:
    """Once per process, whatever the dtype."""
    warnings.warn(
        f"lowbit_optim runs {device_type} tensors on the slower torch engine: {reason}",
        RuntimeWarning,
        stacklevel=5,
    )


def _choice(engine: Engine, reason: str) -> EngineChoice:
    if engine.instructions is not None:
        reason = f"{reason}, compiled for {engine.instructions()}"
    return EngineChoice(engine.name, reason)


def choose(
    asked: str, source: str, device: torch.device, dtype: torch.dtype, tensor_type: type = Tensor
) -> EngineChoice:
    """The engine for tensors of a device, a dtype and a type.

    Args:
        asked: the name of an engine, or "auto".
        source: who asks for it, for the error.
        device: the tensors' device.
        dtype: their dtype.
        tensor_type: their type.

    Raises:
        RuntimeError: when the engine that is asked for cannot run them.
    """
    if asked != "auto":
        refusal = ENGINES[asked].refusal(device, dtype, tensor_type)
        if refusal is not None:
            raise RuntimeError(
                f"{source} asks for the engine {asked!r}, but {refusal.reason}; "
                f'ask for "auto" or "torch" for this tensor'
            )
        return _choice(ENGINES[asked], f"{source} asks for it")
    wanted = default_engine(device.type)
    refusal = wanted.refusal(device, dtype, tensor_type)
    if refusal is None:
        return _choice(wanted, f"the default for {dtype} on {device.type}")
    if refusal.warn:
        _warn_of_fallback(device.type, refusal.reason)
    return EngineChoice(FALLBACK, refusal.reason)


_resolve = cache(choose)


def engine_for(tensor: Tensor) -> EngineChoice:
    """Say which engine runs a tensor's optimizer step, and why.

    Args:
        tensor: a parameter; only its device, dtype and type matter, of a DTensor the shard's.

    Returns:
        EngineChoice with `name` ("triton", "numba" or "torch") and `reason`.

    Raises:
        TypeError: for what is no tensor.
        RuntimeError: when an engine was asked for explicitly and cannot run this tensor.

    Example:
        >>> engine_for(torch.zeros(3, dtype=torch.float64)).name
        'torch'
    """
    if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
        raise TypeError(f"tensor must be a torch.Tensor; got {type(tensor).__name__}")
    tensor_type: type = type(getattr(tensor, "_local_tensor", tensor))
    return _resolve(*request(), tensor.device, tensor.dtype, tensor_type)


def readable(g: Tensor, engine: str) -> Tensor:
    """A gradient in a dtype that an engine reads, which are those of parameters that it takes."""
    return g if ENGINES[engine].refusal(g.device, g.dtype) is None else g.float()


def encode(unit: Unit, values: Sequence[Tensor], shape: torch.Size) -> dict[str, Tensor]:
    """Tensors of a unit's parts, by key, rounded to nearest; the given ones of an exact format.

    Args:
        unit: moments and the format that keeps them.
        values: a tensor for each moment, of this shape; bad numbers count as zero.
        shape: of the parameter.
    """
    if unit.format.exact:
        return {part.key: x for part, x in zip(unit.parts, values, strict=True)}
    layout, device = Layout.of(shape, unit.format.block), values[0].device
    out = [
        torch.empty(part.shape(shape, layout.block), dtype=part.dtype, device=device)
        for part in unit.parts
    ]
    values = [x.detach().resolve_neg().contiguous() for x in values]
    ENGINES[engine_for(values[0]).name].code.encode(unit, values, layout, out)
    return {part.key: x for part, x in zip(unit.parts, out, strict=True)}


def decode(
    unit: Unit, stored: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype
) -> list[Tensor]:
    """The numbers of a unit's moments.

    Args:
        unit: moments and the format that keeps them.
        stored: a contiguous tensor for each part.
        shape: of the parameter.
        dtype: of the numbers.
    """
    if unit.format.exact:
        return [x.to(dtype) for x in stored]
    layout = Layout.of(shape, unit.format.block)
    out = [torch.empty(shape, dtype=dtype, device=stored[0].device) for _ in unit.moments]
    ENGINES[engine_for(out[0]).name].code.decode(unit, stored, layout, out)
    return out


def step(
    batches: Sequence[Batch],
    all_reduce: Callable[[list[Batch], list[Tensor]], None] | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Step batches; every batch's slots share a device and an engine.

    An exception, Ctrl-C among them, that comes before a batch's parameters are written leaves the
    batch's parameters, moments and step counts as they were.

    Args:
        batches: what to step; `batch.Batch` says what is read and written.
        all_reduce: given batches and each one's sums of one phase, adds up those of other ranks'
            shards in place; None when every tensor is whole.
        ready: called when the engines have all that they need, before anything is written.
    """
    note_order(batches)
    for batch in batches:
        if batch.tables is None or not ENGINES[batch.engine].by_address:
            batch.bind()
    runs: list[Run] = [ENGINES[batch.engine].code.start(batch) for batch in batches]
    if ready is not None:
        ready()
    counted: list[tuple[Batch, Run]] = []
    try:
        for batch, run in zip(batches, runs, strict=True):
            run.begin()
            counted.append((batch, run))
        for phase in range(max((run.phases for run in runs), default=0)):
            active = [(batch, run) for batch, run in counted if phase < run.phases]
            sums = [run.reduce(phase) for _, run in active]
            if all_reduce is not None:
                all_reduce([batch for batch, _ in active], sums)
            for (_, run), total in zip(active, sums, strict=True):
                run.combine(phase, total)
        for run in runs:
            run.finish()
    except BaseException:
        for batch, run in counted:
            if not run.wrote:
                batch.uncount()
        raise
