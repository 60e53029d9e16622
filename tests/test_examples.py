"""The examples run as a reader would run them; those of docstrings give what they say."""

import doctest
import inspect
import subprocess
import sys

import pytest
import torch

import lowbit_optim
import sharded
from protocol import ENV, ROOT

FOLDER = ROOT / "examples"
FRAMEWORKS = {"hf_trainer.py"}  # they need more; tests/frameworks runs them
MARKS = {"fsdp2.py": [pytest.mark.slow, sharded.fully_shard_averages]}  # it starts processes
SCRIPTS = [
    pytest.param(name, marks=MARKS.get(name, []))
    for name in sorted({path.name for path in FOLDER.glob("*.py")} - FRAMEWORKS)
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.few
def test_example_runs(script, tmp_path):
    """From another directory; each asserts by itself that it trains and resumes."""
    done = subprocess.run(
        [sys.executable, "-W", "error", FOLDER / script], env=ENV,
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout


def public():
    """What the package exports that has an example."""
    for name, value in sorted(vars(lowbit_optim).items()):
        if not name.startswith("_") and ">>>" in (inspect.getdoc(value) or ""):
            yield pytest.param(value, id=name)


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("value", list(public()))
def test_docstring_example(value):
    model = torch.nn.Module()
    model.body, model.embedding = torch.nn.Linear(8, 8), torch.nn.Embedding(20, 8)
    model.head = torch.nn.Linear(8, 20)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    names = {**vars(lowbit_optim), "torch": torch, "model": model}
    names["optimizer"] = lowbit_optim.LearnedGradient(model.parameters())
    names["loader"], names["train_one"] = [None] * 2, lambda batch: None
    finder = doctest.DocTestFinder(recurse=True)
    tests = [t for t in finder.find(value, globs=names) if t.examples]
    assert tests
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0
