"""The memory of two training steps of one configuration (`memory` starts it)."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping

import torch
from torch import nn

import lowbit_optim
from benchmarks.common import measure, models
from benchmarks.common.worker import emit
from lowbit_optim_cli import optimizers
from lowbit_optim_cli.footprint import Weight, footprint, largest_bucket

CONTEXT = 4  # few positions, so that activations are small beside weights
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, tuple[str, dict[str, object]]] = {
    "AdamW8bit": ("dynamic8", {}),
    "AdamW8bit-ratio8": ("ratio8", {"state_format": "ratio8"}),
    "AdamW4bit": ("ratio4", {}),
    "AdamW32bit": ("float32", {}),
}


def build(name: str, params: object, bits: int) -> lowbit_optim.LowBitOptimizer:
    """An optimizer of the table."""
    cls = getattr(lowbit_optim, name.partition("-")[0])
    return cls(params, lr=1e-5, master_weight_bits=bits, **OPTIMIZERS[name][1])


def bf16_gpt(width: int, layers: int) -> nn.Module:
    """A GPT whose weights have never been anything but bf16, small random numbers."""
    with torch.device("meta"):
        model = models.ByteGPT(CONTEXT, width=width, layers=layers, expansion=4).bfloat16()
    model = model.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.02, generator=generator)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step of one short sequence."""
    tokens = torch.arange(CONTEXT)[None]
    nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(
    name: str, bits: int, released: bool, bucket_bytes: int, width: int, layers: int
) -> dict[str, object]:
    """Two steps of a model in this process.

    Returns:
        Bytes: `weights`, `gradients` (the most that are there at once), `state` and `state_counted`
        (by arithmetic, and of the tensors themselves), `expected` (the sum of the first three),
        and where the system says, `peak`, the growth of the resident set over both steps. Besides
        these `params`, the number of parameters.
    """
    gc.collect()
    before = measure.resident_bytes()
    measure.reset_peak(CPU)
    model = bf16_gpt(width, layers)
    optimizer = build(name, model.parameters(), bits)
    if released:
        lowbit_optim.release_gradients(optimizer, model, bucket_bytes=bucket_bytes)
    step(model, optimizer)
    step(model, optimizer)
    peak = measure.peak_bytes(CPU)
    params = list(model.parameters())
    sizes = [p.nbytes for p in params]
    arriving = largest_bucket(reversed(sizes), bucket_bytes)
    gradients = arriving if released else sum(sizes)
    layout = optimizers.own("AdamW", OPTIMIZERS[name][0], bits)
    kept = footprint(layout, [Weight("", tuple(p.shape), "bf16") for p in params])
    state = kept.state + kept.residual
    return {
        "params": sum(p.numel() for p in params),
        "weights": sum(sizes),
        "gradients": gradients,
        "state": state,
        "state_counted": measure.state_bytes(optimizer),
        "expected": sum(sizes) + gradients + state,
        "peak": None if peak is None or before is None else peak - before,
    }


def main(spec: Mapping[str, object]) -> None:
    """Have one layer load all code first, which is no part of the figures."""
    torch.set_num_threads(int(spec["threads"]))
    arguments = [spec[key] for key in ("optimizer", "bits", "released", "bucket_bytes")]
    run(*arguments, width=spec["width"], layers=1)
    emit("memory", **run(*arguments, width=spec["width"], layers=spec["layers"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
