"""One optimizer on one task, all its seeds, in a process of its own (`compare` starts it)."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping

import torch

from benchmarks.common import measure, models, registry, workloads
from benchmarks.common.worker import emit
from lowbit_optim_kernels.formats.dynamic8 import TOP_CODE, ZERO_CODE

_REPORT_EVERY = 5


def schedule(step: int, steps: int) -> float:
    """Factor on the peak learning rate: linear over the first tenth, then half a cosine to 2 %."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 of all weights, which every optimizer has to start from alike."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_engine(entry: registry.Entry, device: torch.device) -> dict[str, float | None]:
    """Step throw-away weights of its dtype once: what loading or compiling the kernels costs.

    Returns:
        `first_step_s`, seconds of that step, and `engine_mib`, by how much the resident set grew.
    """
    shapes = ((16,), (8192,), (64, 256), (32, 16, 3, 3))
    ones = (torch.ones(shape, dtype=entry.dtype, device=device) for shape in shapes)
    params = [torch.nn.Parameter(one) for one in ones]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = entry.make(params, 1e-3)
    before = measure.resident_bytes()
    took = measure.seconds(optimizer.step, device)
    after = measure.resident_bytes()
    grown = None if before is None or after is None else round((after - before) / 2**20, 1)
    return {"first_step_s": round(took, 3), "engine_mib": grown}


def coarsen(optimizer: torch.optim.Optimizer, every: int) -> None:
    """After each step round all 8-bit codes to every `every`-th one, counted from zero's.

    What is not negative and not zero stays so, as in the code itself.
    """
    count = len(optimizer.param_groups)
    signed = {m.key: m.signed for index in range(count) for m in optimizer.moments(index)}

    def after(*_: object) -> None:
        for state in optimizer.state.values():
            for key, is_signed in signed.items():
                codes, zero = state[key], ZERO_CODE[is_signed]
                if codes.dtype == torch.uint8:
                    coarse = ((codes.int() - zero) / every).round() * every + zero
                    if not is_signed:
                        coarse = coarse.maximum(codes.clamp(max=1))
                    codes.copy_(coarse.clamp(0, TOP_CODE))

    optimizer.register_step_post_hook(after)


def switch(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """`optimizer.train()` or `optimizer.eval()`, where the model is an average of its steps."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def train(
    task: workloads.Task,
    entry: registry.Entry,
    data: workloads.Data,
    seed: int,
    spec: Mapping[str, object],
    progress: Callable[..., None] = emit,
) -> dict[str, object]:
    """One run; progress goes to the parent, or to where `progress` puts it.

    A `min_8bit_size` in `spec` replaces the optimizer's own, where it has one; `coarsen` in `spec`
    is for the control of `equivalence`.

    Returns:
        `quality` (None if the loss stopped being finite), `losses` by step in nats, `step_ms`,
        milliseconds of every `optimizer.step()`, `state_bytes`, `share_8bit` (of the parameters,
        those with 8-bit moments), `params`, `weights` (their fingerprint in fp32).
    """
    steps, device = int(spec["steps"]), torch.device(spec["device"])
    torch.manual_seed(seed)
    model = task.model().to(device)
    start = fingerprint(model)
    model = model.to(entry.dtype)
    arithmetic = models.arithmetic(entry.dtype, device)
    batches = torch.Generator().manual_seed(seed)
    optimizer = entry.make(model.parameters(), float(spec["lr"]))
    for group in optimizer.param_groups:
        if "min_8bit_size" in group and spec.get("min_8bit_size") is not None:
            group["min_8bit_size"] = spec["min_8bit_size"]
    if spec.get("coarsen"):
        coarsen(optimizer, int(spec["coarsen"]))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    result = {"weights": start, "params": sum(p.numel() for p in model.parameters())}
    losses, step_ms, finite = [], [], True
    switch(optimizer, "train")
    for step in range(steps):
        inputs, targets = task.batch(data, batches)
        inputs = inputs.to(device, arithmetic if inputs.is_floating_point() else None)
        loss = models.loss(model, inputs, targets.to(device), arithmetic)
        optimizer.zero_grad()
        loss.backward()
        step_ms.append(1e3 * measure.seconds(optimizer.step, device))
        scheduler.step()
        value = loss.item()
        finite = math.isfinite(value)
        if not finite:
            break
        losses.append(round(value, 4))
        if step % _REPORT_EVERY == 0 or step == steps - 1:
            progress("step", seed=seed, step=step + 1, loss=value)
    model.eval()
    switch(optimizer, "eval")
    with torch.no_grad():  # in fp32 arithmetic for all
        quality = task.quality(model.float(), data, device) if finite else None
    result.update(quality=quality, losses=losses, step_ms=step_ms)
    result["state_bytes"] = measure.state_bytes(optimizer)
    result["share_8bit"] = measure.share_8bit(optimizer)
    return result


def main(spec: Mapping[str, object]) -> None:
    """Load the engine, then train every seed and report each run and the peak memory."""
    torch.set_num_threads(int(spec["threads"]))
    device = torch.device(spec["device"])
    task, entry = workloads.TASKS[spec["task"]], registry.REGISTRY[spec["optimizer"]]
    data = torch.load(spec["data"], weights_only=True)
    memory = load_engine(entry, device)
    baseline = measure.resident_bytes()
    measure.reset_peak(device)
    for seed in range(int(spec["seeds"])):
        emit("run", seed=seed, **train(task, entry, data, seed, spec))
    peak = measure.peak_bytes(device)
    memory["peak_mib"] = None if peak is None else round(peak / 2**20, 1)
    memory["baseline_mib"] = None if baseline is None else round(baseline / 2**20, 1)
    emit("memory", **memory)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
