"""Times optimizers beside torch's at one thread count (`cpu` starts it)."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Mapping

import torch

from benchmarks.common import measure, registry, shapes, verify
from benchmarks.common.worker import emit
from benchmarks.static import traffic

_LR = 1e-3


def bytes_per_element(optimizer: torch.optim.Optimizer, count: int) -> float:
    """Bytes that one fp32 step has to move: p read and written, g read, state read and written.

    What a rule reads twice for a norm counts twice, whether or not a cache holds it.
    """
    state = measure.state_bytes(optimizer) / count
    again = {"param": 4.0, "grad": 4.0, "state": state}
    return 8.0 + 4.0 + 2.0 * state + sum(again[name] for name in traffic.extra_reads(optimizer))


def _tensors(case: str, device: torch.device) -> tuple[list, list, list]:
    """Two copies of a case's parameters, and one list of gradients that both share."""
    generator = torch.Generator(device).manual_seed(0)
    first, second, grads = [], [], []
    for shape in shapes.SHAPES[case]:
        value = torch.randn(shape, generator=generator, device=device).mul_(0.02)
        first.append(torch.nn.Parameter(value))
        second.append(torch.nn.Parameter(value.clone()))
        grads.append(torch.randn(shape, generator=generator, device=device).mul_(0.01))
    for params in (first, second):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    return first, second, grads


def time_pair(
    entry: registry.Entry,
    baseline: registry.Entry,
    tensors: tuple[list, list, list],
    device: torch.device,
    rounds: int,
    apart: bool,
) -> dict[str, object]:
    """Milliseconds a step of both, in turn; the ratio is taken round by round.

    With `apart` each tensor has a parameter group of its own.

    Returns:
        `ms`, `baseline_ms`, `ratio` (median, quartiles, least, greatest), `ratio_of_minima` (what a
        quiet machine would show), `bytes_per_element`, `gb_per_s` (1e9, at the median) and the same
        two of the baseline.
    """
    count = sum(param.numel() for param in tensors[0])
    first, second = (
        [{"params": [p], "lr": _LR} for p in own] if apart else own for own in tensors[:2]
    )
    ours, theirs = entry.make(first, _LR), baseline.make(second, _LR)
    gc.collect()
    gc.disable()
    try:
        times = measure.interleaved(ours.step, theirs.step, device, rounds)
    finally:
        gc.enable()
    ratios = [mine / other for mine, other in zip(*times, strict=True)]
    result: dict[str, object] = {"ratio": measure.spread(ratios), "elements": count}
    result["ratio_of_minima"] = min(times[0]) / min(times[1])
    sides = (("", ours, times[0]), ("baseline_", theirs, times[1]))
    for prefix, optimizer, seconds in sides:
        moved = bytes_per_element(optimizer, count)
        spread = measure.spread([1e3 * second for second in seconds])
        result[f"{prefix}ms"] = spread
        result[f"{prefix}bytes_per_element"] = round(moved, 3)
        result[f"{prefix}gb_per_s"] = round(moved * count / spread["median"] / 1e6, 2)
    return result


def needed_bytes(case: str) -> int:
    """Memory of a case: two copies of p, one g, two fp32 moments twice, and a little more."""
    return 30 * shapes.elements(shapes.SHAPES[case])


def time_case(case: str, spec: Mapping[str, object], device: torch.device) -> None:
    """Time every pair of one case."""
    free = measure.available_bytes()
    if device.type == "cpu" and free is not None and needed_bytes(case) > free:
        gib = needed_bytes(case) / 2**30
        emit("skipped", case=case, why=f"needs {gib:.1f} GiB, {free / 2**30:.1f} are free")
        return
    tensors = _tensors(case, device)
    for name in spec["optimizers"]:
        entry = registry.REGISTRY[name]
        beside = entry.foreach if case.startswith("small") else entry.fused
        emit("start", case=case, optimizer=name)
        baseline = registry.REGISTRY[beside]
        rounds, apart = int(spec["rounds"]), bool(spec["apart"])
        result = time_pair(entry, baseline, tensors, device, rounds, apart)
        emit("pair", case=case, optimizer=name, baseline=beside, **result)


def instruction_sets(device: torch.device) -> dict[str, str]:
    """The vector instructions of the CPU engine and of torch, which may be told to use fewer.

    (NUMBA_CPU_NAME with NUMBA_CPU_FEATURES, and ATEN_CPU_CAPABILITY, are theirs.)
    """
    if device.type != "cpu":
        return {}
    from lowbit_optim_kernels.engines.numba import vector  # Numba need not be there for a GPU

    ours, theirs = vector.instruction_set(), torch.backends.cpu.get_cpu_capability()
    return {"instruction_set": ours, "torch_instruction_set": theirs}


def first_step(name: str, device: torch.device) -> None:
    """Seconds of this process's first step, Numba's or Triton's import included, and the next.

    Of the first one also the processor's, which can be compared where other programs run.
    """
    start = time.perf_counter()
    entry = registry.REGISTRY[name]
    params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in ((16,), (256, 256))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = entry.make(params, _LR)
    built, used = time.perf_counter(), time.process_time()
    first = measure.seconds(optimizer.step, device)
    used = time.process_time() - used
    second = measure.seconds(optimizer.step, device)
    times = {"first_step_s": first, "first_step_cpu_s": used, "second_step_s": second}
    emit("first", import_s=built - start, **times)


def main(spec: Mapping[str, object]) -> None:
    """Verify every optimizer, measure the copy bandwidth, then time the cases."""
    torch.set_num_threads(int(spec["threads"]))
    device = torch.device(spec["device"])
    if "first_step" in spec:
        first_step(spec["first_step"], device)
        return
    for name in spec["verify"]:
        entry = registry.REGISTRY[name]
        error = verify.verify(entry, entry.learning_rate("mnist"), device)
        emit("verified", optimizer=name, error=error if math.isfinite(error) else None)
    emit("copy", gb_per_s=measure.copy_gb_per_s(device), **instruction_sets(device))
    for case in spec["cases"]:
        time_case(case, spec, device)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
