"""`lowbit-optim compare`: one small model trained with 32-, 8- and 4-bit state from one start.

The data are made here: symbols that follow the two before them with chances that a small network
has to learn. What the rows show is that they learn alike, and what their state takes; a model of
this size says nothing of the speed of large ones.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import lowbit_optim

from .checkpoints import tensor_bytes
from .conversion import OPTIONS
from .errors import plural
from .families import named_family
from .optimizers import BITS, own_layouts

SYMBOLS, WIDTH, BATCH = 32, 256, 256
# Learning rates at which the 32-bit optimizers learn this; 1e-3 for the others.
LR = {"SGD": 0.1, "LARS": 1.0, "Lion": 3e-4, "LAMB": 1e-2, "LANS": 1e-2, "Adagrad": 1e-2,
      "Cain": 1e-2, "LearnedGradient": 1e-2}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Result of one optimizer.

    Attributes:
        optimizer: its class.
        format: of its state.
        loss: mean cross-entropy of the last tenth of the steps, in nats.
        state_bytes: of the optimizer, for each parameter of the model.
        step_ms: median time of its step, without the first ones.
    """

    optimizer: str
    format: str
    loss: float
    state_bytes: float
    step_ms: float


@dataclass(frozen=True)
class Form:
    """An optimizer in one format; torch's own where there is none.

    Attributes:
        family: the optimizer without its bits.
        format: of its state.
    """

    family: str
    format: str | None

    @property
    def name(self) -> str:
        """Its class."""
        if self.format is None:
            return f"torch.optim.{self.family}"
        return f"{self.family}{BITS[self.format]}bit"

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters."""
        options = {"lr": LR.get(self.family, 1e-3), **OPTIONS.get(self.family, {})}
        if self.format is None:
            return getattr(torch.optim, self.family)(model.parameters(), **options)
        cls = getattr(lowbit_optim, self.family)
        return cls(model.parameters(), state_format=self.format, **options)


class Chain:
    """Symbols of which each follows the two before it with some chance."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=self.generator)
        self.chances = logits.softmax(-1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Pairs of symbols, and what follows each."""
        pairs = torch.randint(SYMBOLS, (BATCH, 2), generator=self.generator)
        chances = self.chances[pairs[:, 0], pairs[:, 1]]
        return pairs, torch.multinomial(chances, 1, generator=self.generator).flatten()


def network(seed: int) -> nn.Module:
    """An embedding of two symbols, and a network of one hidden layer; 288,000 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(),
        nn.Linear(2 * WIDTH, SYMBOLS),
    )  # fmt: skip


def forms(family: str) -> list[Form]:
    """Torch's class of a name, if there is one, and ours in every format."""
    torchs = [Form(family, None)] if hasattr(torch.optim, family) else []
    rows = (row for row in own_layouts(bf16=False) if row.family == family)
    return [*torchs, *(Form(family, row.format) for row in rows)]


def compare(console: Console, names: Sequence[str], steps: int, seed: int) -> list[Result]:
    """Train every form of these optimizers from one start, in turn on each batch."""
    chosen = [form for name in dict.fromkeys(map(named_family, names)) for form in forms(name)]
    start, chain = network(seed), Chain(seed)
    runs = [Run(form, copy.deepcopy(start)) for form in chosen]
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(steps), description="training"):
            batch = chain.batch()
            for run in runs:
                run.step(*batch)
    return [run.result() for run in runs]


class Run:
    """A model that is trained with one form."""

    def __init__(self, form: Form, model: nn.Module) -> None:
        self.form, self.model, self.optimizer = form, model, form.build(model)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step; its time is the optimizer's alone."""
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        began = time.perf_counter()
        self.optimizer.step()
        self.times.append(time.perf_counter() - began)
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def result(self) -> Result:
        """Its result."""
        steps, numel = len(self.losses), sum(p.numel() for p in self.model.parameters())
        return Result(
            optimizer=self.form.name,
            format=self.form.format or "as weights",
            loss=statistics.fmean(self.losses[-max(1, steps // 10) :]),
            state_bytes=tensor_bytes(self.optimizer.state) / numel,
            step_ms=1e3 * statistics.median(self.times[steps // 10 :]),
        )


def as_json(results: Sequence[Result]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(one) for one in results], indent=2)


def show(console: Console, results: Sequence[Result], steps: int) -> None:
    """Print the table."""
    title = f"{plural(steps, 'step')} of one model, start and batches"
    guess = f"a uniform guess has a loss of {math.log(SYMBOLS):.3f}"
    table = Table("optimizer", "format", title=f"{title}; {guess}")
    for column in ("loss", "state, bytes per parameter", "ms per step"):
        table.add_column(column, justify="right")
    for one in results:
        table.add_row(
            one.optimizer, one.format, f"{one.loss:.4f}", f"{one.state_bytes:.3f}",
            f"{one.step_ms:.2f}",
        )  # fmt: skip
    console.print(table)
