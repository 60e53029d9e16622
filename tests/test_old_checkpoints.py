"""Checkpoints that an earlier version wrote load bit for bit and go on as that version did.

`tests/data/checkpoints` has one for each class, made by `python tests/test_old_checkpoints.py` at
the version before state formats became objects (state dicts of format version 1).
"""

from pathlib import Path

import pytest
import torch

import cases
import lowbit_optim

FOLDER = Path(__file__).parent / "data" / "checkpoints"
NAMES = sorted(path.stem for path in FOLDER.glob("*.pt"))
SHAPES = [(3, 70), (5,)]  # blocks by rows with short ends, and over the flattened tensor
STEPS = 3


def step(optimizer, params, grads):
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        optimizer.step()


def write():
    """One file a class: where it was after some steps, and where after some more."""
    lowbit_optim.use_engine("torch")  # whose results no compiler has a hand in
    generator = torch.Generator().manual_seed(10)
    for case in cases.one_per_class():
        for bits in (8, 32):
            values = [torch.randn(shape, generator=generator) for shape in SHAPES]
            grads = [
                [torch.randn(shape, generator=generator) for shape in SHAPES]
                for _ in range(2 * STEPS)
            ]
            params = [torch.nn.Parameter(p) for p in values]
            optimizer = case.build(params, bits, min_8bit_size=1)
            step(optimizer, params, grads[:STEPS])
            saved = {
                "options": {"lr": case.lr, **case.options, "min_8bit_size": 1},
                "params": [p.detach().clone() for p in params],
                "state_dict": optimizer.state_dict(),
                "grads": grads[STEPS:],
            }
            torch.save(saved, FOLDER / "part.tmp")
            saved = torch.load(FOLDER / "part.tmp")
            step(optimizer, params, grads[STEPS:])
            saved["after"] = [p.detach().clone() for p in params]
            saved["state_after"] = optimizer.state_dict()["state"]
            torch.save(saved, FOLDER / f"{case.name}{bits}bit.pt")
            (FOLDER / "part.tmp").unlink()


def assert_same_state(state, wanted):
    assert state.keys() == wanted.keys()
    for index, tensors in wanted.items():
        assert state[index].keys() == tensors.keys()
        for key, value in tensors.items():
            assert state[index][key].dtype == value.dtype, key
            assert torch.equal(state[index][key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_an_old_checkpoint_goes_on(name):
    old = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    with lowbit_optim.use_engine("torch"):
        params = [torch.nn.Parameter(p.clone()) for p in old["params"]]
        optimizer = getattr(lowbit_optim, name)(params, **old["options"])
        optimizer.load_state_dict(old["state_dict"])
        assert_same_state(optimizer.state_dict()["state"], old["state_dict"]["state"])
        step(optimizer, params, old["grads"])
    # Sums in another order, on a CPU with other vectors, may turn the last bit.
    for p, wanted in zip(params, old["after"], strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=2e-6, atol=1e-7)
    state = optimizer.state_dict()["state"]
    for index, tensors in old["state_after"].items():
        for key, value in tensors.items():
            got = state[index][key].double()
            if value.dtype == torch.uint8:
                assert (got - value.double()).abs().max() <= 1, key
            else:
                # Matrix products of LearnedGradient are as exact as their largest elements.
                atol = 1e-7 * value.abs().max().item()
                torch.testing.assert_close(got, value.double(), rtol=1e-5, atol=max(atol, 1e-9))


def test_every_class_of_that_version_has_one():
    assert len(NAMES) == 26


if __name__ == "__main__":
    write()
