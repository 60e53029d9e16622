"""The code of the guides and of pages beside them runs as it stands there, block after block."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import lowbit_optim
import sharded

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"


def blocks_of(page, section):
    """The Python of a section, up to the next heading of its level; of the whole page if None."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    if section is not None:
        text = re.split(r"^## ", text.partition(f"## {section}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def save_for_bitsandbytes(path):
    """What the guide loads: a model and its optimizer's state in bitsandbytes' layout."""
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    )
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), lr=3e-4)
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    saved = lowbit_optim.to_bitsandbytes_state_dict(optimizer, "nested")
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)
    return optimizer


def run(blocks, page):
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def test_bf16_weights():
    blocks = blocks_of("../bf16_weights.md", None)
    assert len(blocks) == 3
    names = run(blocks, "bf16_weights.md")
    assert set(names["whole"]) == {0, 1, 2, 3}
    for p, w in zip(names["model"].parameters(), names["pretrained"].values(), strict=True):
        torch.testing.assert_close(p.float(), w, rtol=2.0**-8, atol=0.0)


def test_gradient_release():
    """But for FSDP2, which tests/test_release_sharded.py has."""
    blocks = blocks_of("../gradient_release.md", None)
    assert len(blocks) == 4
    names = run([block for block in blocks if "fully_shard" not in block], "gradient_release.md")
    assert all(p.grad is None for p in names["model"].parameters())
    assert {int(state["step"]) for state in names["optimizer"].state.values()} == {4}


def test_coming_from_torch():
    blocks = blocks_of("coming_from_torch.md", None)
    assert len(blocks) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = run(blocks, "coming_from_torch.md")
    assert names["plain"].state_dict()["state"].keys() == {0, 1}


def test_continuing_a_run_of_bitsandbytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = save_for_bitsandbytes("bitsandbytes.pt")
    blocks = blocks_of("coming_from_bitsandbytes.md", "Continuing a run")
    assert len(blocks) == 2
    with pytest.warns(
        UserWarning, match="AdamW8bit converts a state_dict of bitsandbytes: its mom"
    ):
        names = run(blocks, "coming_from_bitsandbytes.md")
    assert names["optimizer"].param_groups[0]["lr"] == 3e-4
    for p, q in zip(
        *(o.param_groups[0]["params"] for o in (source, names["optimizer"])), strict=True
    ):
        assert torch.equal(source.state[p]["exp_avg"], names["optimizer"].state[q]["exp_avg"])
    written = torch.load("for_bitsandbytes.pt", weights_only=True)["optimizer"]
    assert "absmax1" in written["state"][0]


@pytest.mark.slow
def test_sharded_training(tmp_path):
    sharded.run(2, sharded.guide, str(tmp_path))
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
