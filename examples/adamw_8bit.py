"""Train with 8-bit AdamW, save half-way, resume, and end at the same loss.

    python examples/adamw_8bit.py

Only the import differs from a script that trains with `torch.optim.AdamW`.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from lowbit_optim import AdamW8bit

STEPS = 60


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    return model, AdamW8bit(model.parameters(), lr=3e-3, weight_decay=0.01)


def train(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(128, 64, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin() * x[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    model, optimizer = build()
    straight = train(model, optimizer, 0, STEPS)
    state = [x for one in optimizer.state.values() for x in one.values()]
    held, wide = sum(x.nbytes for x in state), sum(8 * p.numel() for p in model.parameters())
    print(f"loss {straight:.4f} with {held:,} bytes of state; 32-bit AdamW keeps {wide:,}")

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        model, optimizer = build()
        train(model, optimizer, 0, STEPS // 2)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

        model, optimizer = build()
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        resumed = train(model, optimizer, STEPS // 2, STEPS)
    print(f"loss {resumed:.4f} when resumed half-way: the same")
    assert resumed == straight


if __name__ == "__main__":
    main()
