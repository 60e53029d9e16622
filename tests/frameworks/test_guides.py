"""The pages of docs/guides, followed: their code runs as it stands there, from top to bottom."""

import re
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import lowbit_optim
from lowbit_optim.bitsandbytes import optim, patch
from test_gsplat import RATES, image, render, splats
from test_timm import hollow_timm
from tiny import Sequences, bits_of, gpt2

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"


def run(page, **names):
    """Execute a page's blocks of Python in one namespace, which is returned.

    What is about continuing a run needs no framework; tests/test_guides.py follows it.
    """
    text = (GUIDES / page).read_text(encoding="utf-8").partition("## Continuing a run\n")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def unpatched():
    """A patch that lasts in a page does nothing in this one, and is undone with it."""
    with patch():
        yield


@pytest.fixture
def loader():
    return torch.utils.data.DataLoader(Sequences(64), batch_size=8)


def test_every_page_is_followed():
    tested = {
        "hf_trainer", "accelerate", "lightning", "timm", "coming_from_bitsandbytes", "small_gpu",
        "gaussian_splatting",
    }  # fmt: skip
    # In tests/test_guides.py, the last in tests/test_peers_checkpoints.py.
    elsewhere = {"coming_from_torch", "sharded", "coming_from_torchao"}
    without_code = {"deepspeed"}
    assert {page.stem for page in GUIDES.glob("*.md")} == tested | elsewhere | without_code


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_hf_trainer(tmp_path):
    done = run("hf_trainer.md", model=gpt2(), dataset=Sequences(), folder=str(tmp_path))
    model, optimizer = done["model"], done["trainer"].optimizer.optimizer
    assert type(optimizer) is lowbit_optim.LARS8bit
    assert bits_of(optimizer, model.transformer.wte.weight) == 32
    assert bits_of(optimizer, model.transformer.h[0].mlp.c_fc.weight) == 8
    assert done["trainer"].state.global_step == 20


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_small_gpu(tmp_path):
    done = run("small_gpu.md", model=gpt2(), dataset=Sequences(64), folder=str(tmp_path))
    model, optimizer = done["model"], done["trainer"].optimizer.optimizer
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in model.parameters())
    assert optimizer is done["optimizer"]
    assert {int(state["step"]) for state in optimizer.state.values()} == {10}
    assert bits_of(optimizer, model.transformer.h[0].mlp.c_fc.weight) == 8


def test_accelerate(tmp_path, loader):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    done = run("accelerate.md", model=gpt2(), loader=loader, folder=str(tmp_path))
    optimizer = done["optimizer"].optimizer
    assert bits_of(optimizer, done["model"].transformer.wte.weight) == 32
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on loggers and workers
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_lightning(tmp_path, loader):
    done = run("lightning.md", build_model=gpt2, loader=loader, folder=str(tmp_path))
    (optimizer,) = done["trainer"].optimizers
    assert type(optimizer) is lowbit_optim.AdamW8bit
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}


def test_timm():
    with hollow_timm():
        done = run("timm.md", model=gpt2())
    assert type(done["optimizer"]) is lowbit_optim.AdamW8bit


def test_gaussian_splatting():
    images = [image()] * 701  # gsplat begins to refine after 500
    done = run(
        "gaussian_splatting.md", splats=splats(100), rates=RATES, images=images, render=render
    )
    count, optimizer = len(done["splats"]["means"]), done["optimizers"]["shN"]
    assert count > 110
    optimizer.zero_grad()
    (rendered, _), (state,) = render(done["splats"]), optimizer.state.values()
    assert state["exp_avg"].dtype == torch.float32
    assert state["exp_avg"].shape == (count, 15, 3)
    rendered.sum().backward()
    optimizer.step()
    assert state["exp_avg"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore:PagedAdamW8bit pages nothing:UserWarning")
def test_coming_from_bitsandbytes(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"  # which the page's patched.py is to start
    script.write_text(
        "import bitsandbytes, sys\nprint(bitsandbytes.optim.AdamW8bit.__module__, sys.argv[1:])\n"
    )
    monkeypatch.setattr(sys, "argv", ["patched.py", str(script), "--use_8bit_adam"])
    model = torch.nn.Module()
    model.embedding, model.body = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)
    done = run("coming_from_bitsandbytes.md", model=model)
    assert capsys.readouterr().out == "lowbit_optim.bitsandbytes.optim ['--use_8bit_adam']\n"
    assert type(done["optimizer"]) is optim.PagedAdamW8bit
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    done["optimizer"].step()
    assert bits_of(done["optimizer"], model.embedding.weight) == 32
    assert bits_of(done["optimizer"], model.body.weight) == 8
