"""Bits by parameter: embeddings in 32 bits, one layer by hand, small tensors by size.

    python examples/per_parameter_bits.py

Three ways to say it, from the coarsest to the finest: `parameter_groups`, a key of a parameter
group, and `GlobalOptimManager`, which needs no groups at all.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from lowbit_optim import AdamW8bit, GlobalOptimManager, parameter_groups

STEPS = 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.hidden = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 500)

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens)).relu()))


def build():
    torch.manual_seed(0)
    model = Model()
    # Embeddings in 32 bits; biases and norms without decay.
    groups = parameter_groups(model, weight_decay=0.05)
    # One parameter by hand, whichever group it is in. (Not saved: say it again before a load.)
    GlobalOptimManager.get_instance().register_module_override(
        model.head, "weight", {"optim_bits": 32}
    )
    # Tensors under 1,000 elements stay in 32 bits, too.
    return model, AdamW8bit(groups, lr=3e-3, min_8bit_size=1000)


def train(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(500, (256,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 500)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    model, optimizer = build()
    straight = train(model, optimizer, 0, STEPS)
    for name, p in model.named_parameters():
        moment = optimizer.state[p]["exp_avg"]
        print(f"{name:18} {p.numel():6,} elements  {8 * moment.element_size():2} bits")
    assert optimizer.state[model.hidden.weight]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[model.embedding.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.float32

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
    print(f"loss {straight:.4f}, and {resumed:.4f} when resumed half-way: the same")
    assert resumed == straight


if __name__ == "__main__":
    main()
