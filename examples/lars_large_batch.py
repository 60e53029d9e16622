"""Large batches with LARS: the recipe of the paper and of MLPerf's ResNet, in 8 bits.

    python examples/lars_large_batch.py

Weights are adapted layer by layer; biases and the parameters of normalization layers have neither
trust ratio nor weight decay. The learning rate warms up and then falls as a polynomial.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lowbit_optim import LARS_PRESETS, LARS8bit

STEPS, WARMUP, BATCH = 40, 8, 2048


def schedule(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 - (step - WARMUP) / (STEPS - WARMUP)) ** 2


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)
    )
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": weights},
        # As MLPerf skips these: momentum SGD, with lr inside momentum as in the preset.
        {"params": others, "trust_coefficient": None, "max_unorm": 0.0, "weight_decay": 0.0},
    ]
    optimizer = LARS8bit(groups, lr=4.0, momentum=0.9, weight_decay=1e-4, **LARS_PRESETS["mlperf"])
    return model, optimizer, LambdaLR(optimizer, schedule)


def train(model, optimizer, scheduler, first, last):
    labels = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    for step in range(first, last):
        generator = torch.Generator().manual_seed(2 + step)
        x = torch.randn(BATCH, 64, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x @ labels).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


def main():
    before = train(*build(), 0, 1)
    model, optimizer, scheduler = build()
    straight = train(model, optimizer, scheduler, 0, STEPS)
    print(f"loss {before:.3f} -> {straight:.3f} in {STEPS} steps of {BATCH}")
    assert straight < before / 2

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        built = build()
        train(*built, 0, STEPS // 2)
        torch.save([part.state_dict() for part in built], checkpoint)

        built = build()
        for part, saved in zip(built, torch.load(checkpoint, weights_only=True), strict=True):
            part.load_state_dict(saved)
        resumed = train(*built, STEPS // 2, STEPS)
    print(f"loss {resumed:.3f} when resumed half-way: the same")
    assert resumed == straight


if __name__ == "__main__":
    main()
