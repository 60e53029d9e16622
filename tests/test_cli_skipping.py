"""`lowbit-optim inspect --skip-objects`: a state beside objects, of which none is made."""

import collections
import enum
import functools
import json
import os

import numpy as np
import pytest
import torch

import lowbit_optim
from test_cli_checkpoints import Bomb, refused, run, saved, stepped


class Phase(enum.Enum):
    LAST = 1


BESIDE = {
    "a partial of a class": functools.partial(torch.optim.AdamW, lr=1e-3),
    "a class": lowbit_optim.AdamW8bit,
    "a model": torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)),
    "NumPy's numbers": {"loss": np.float64(0.5), "history": np.arange(3)},
    "a defaultdict": collections.defaultdict(list, {"loss": [0.5, 0.25]}),
    "a deque": collections.deque([0.5, 0.25], maxlen=8),
    "an enumeration": Phase.LAST,
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_what_is_beside_a_state_is_skipped_if_asked(tmp_path, beside):
    optimizer, plain = stepped(lowbit_optim.AdamW8bit, "AdamW"), tmp_path / "plain.pt"
    saved(plain, optimizer, beside=None)
    (expected,) = json.loads(run("inspect", plain, "--json").stdout)["states"]
    path = tmp_path / "run.pt"
    saved(path, optimizer, beside=beside)
    assert refused("inspect", path).endswith("it is not executed; --skip-objects reads the rest")
    (found,) = json.loads(run("inspect", path, "--skip-objects", "--json").stdout)["states"]
    summary, _, skipped = found["summary"].partition("; skipped, and not executed: ")
    assert skipped
    assert {**found, "summary": summary} == expected


def test_what_is_skipped_is_not_executed(tmp_path):
    path, mark = tmp_path / "bomb.pt", tmp_path / "executed"
    torch.save({"state": {}, "param_groups": [], "bomb": Bomb(mark)}, path)
    assert "open" in run("inspect", path, "--skip-objects").stdout
    assert not mark.exists()


class Call:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_pickle_that_asks_for_the_system_is_refused_whatever_is_asked(tmp_path):
    torch.save({"state": {}, "param_groups": [], "call": Call()}, tmp_path / "run.pt")
    said = refused("inspect", tmp_path / "run.pt", "--skip-objects")
    assert said.endswith(f"asks for {os.name}.system; it is not executed")


def test_a_state_with_objects_in_it_is_inspected_without_them(tmp_path):
    state = {"step": np.int64(3), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    group = {"params": [0], "lr": np.float64(1e-3)}
    torch.save({"state": {0: state}, "param_groups": [group]}, tmp_path / "run.pt")
    (found,) = json.loads(run("inspect", tmp_path / "run.pt", "--skip-objects", "--json").stdout)[
        "states"
    ]
    assert [kind["key"] for kind in found["tensors"]] == ["exp_avg", "exp_avg_sq"]
    assert " after " not in found["summary"]
