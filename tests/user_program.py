"""A user's program: `make release` runs it beside the installed wheel, and mypy --strict reads it.

It is no test module, and has nothing but what a user has: torch and the package.
"""

from pathlib import Path

import torch
from torch import nn

import lowbit_optim
from lowbit_optim import AdamW8bit, EngineChoice, GlobalOptimManager, LowBitOptimizer


def train(model: nn.Module, optimizer: LowBitOptimizer, steps: int) -> float:
    """Steps on one batch; the last loss."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 64, generator=generator), torch.arange(64) % 10
    loss = None

    def closure() -> float:
        optimizer.zero_grad()
        found = nn.functional.cross_entropy(model(inputs), targets)
        found.backward()
        return found.item()

    for _ in range(steps):
        loss = optimizer.step(closure)
    assert loss is not None
    return loss


def build() -> tuple[nn.Module, AdamW8bit]:
    """A model whose first weight has state in 8 bits, and its head in 32."""
    torch.manual_seed(0)
    head = nn.Linear(128, 10)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), head)
    GlobalOptimManager.get_instance().override_config(head.weight, "optim_bits", 32)
    groups = lowbit_optim.parameter_groups(model, weight_decay=0.01)
    return model, AdamW8bit(groups, lr=1e-2, betas=(0.9, 0.99))


def main() -> None:
    """Train, save, resume, and ask what ran."""
    model, optimizer = build()
    first = train(model, optimizer, 5)
    saved = Path("checkpoint.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    last = train(model, optimizer, 5)
    again, resumed = build()
    loaded: dict[str, dict[str, object]] = torch.load(saved, weights_only=True)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert train(again, resumed, 5) == last < first
    choice: EngineChoice = lowbit_optim.engine_for(next(model.parameters()))
    print(f"lowbit_optim {lowbit_optim.__version__}, torch {torch.__version__}, {choice.name}:")
    print(f"loss {first:.4f}, then {last:.4f}, the same when resumed")


if __name__ == "__main__":
    main()
