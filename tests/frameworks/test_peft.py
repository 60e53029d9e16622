"""PEFT's LoRA: the adapters are trained in 8 bits, the frozen model has no state."""

import sys

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from lowbit_optim import LARS_PRESETS, AdamW, AdamW8bit, LARS8bit
from test_cli_estimate import estimated
from tiny import Sequences, bits_of, gpt2

STEPS = 12
pytestmark = [
    # GPT-2's layers are Conv1D, whose weights peft transposes by itself, with a warning.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    # What peft asks transformers for has got another name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def adapted():
    torch.manual_seed(1)
    return get_peft_model(gpt2(), LoraConfig(r=8, target_modules=["c_attn", "c_fc"]))


def train(model, optimizer, first, last):
    data, losses = Sequences(), []
    for step in range(first, last):
        tokens = data.tokens[8 * step : 8 * step + 8]
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW8bit, {"lr": 1e-2}),
        # A ratio of 1 for the half of the adapters that starts as zeros, which a cap would hold.
        (LARS8bit, {"lr": 0.5, "momentum": 0.9, **LARS_PRESETS["larc"]}),
    ],
)
def test_adapters_are_trained_saved_and_resumed(tmp_path, cls, options):
    def build():
        model = adapted()
        return model, cls(model.parameters(), min_8bit_size=256, **options)

    model, optimizer = build()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    first = train(model, optimizer, 0, STEPS)
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    straight = train(model, optimizer, STEPS, 2 * STEPS)
    assert straight[-1] < first[0]
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name])
            assert p not in optimizer.state
        else:
            assert bits_of(optimizer, p) == 8

    base = gpt2()
    again = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    other = cls(again.parameters(), min_8bit_size=256, **options)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert train(again, other, STEPS, 2 * STEPS) == straight


def test_loraplus_takes_a_class_whose_name_says_no_bits(monkeypatch):
    """At the sight of others peft imports bitsandbytes."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = adapted()
    options = {"lr": 1e-3, "loraplus_lr_ratio": 16, "min_8bit_size": 256}
    optimizer = create_loraplus_optimizer(model, AdamW, optim_bits=8, **options)
    losses = train(model, optimizer, 0, STEPS)
    assert losses[-1] < losses[0]
    assert {group["lr"] for group in optimizer.param_groups if group["params"]} == {1e-3, 16e-3}
    assert {bits_of(optimizer, p) for p in optimizer.state} == {8}
    with pytest.raises(ImportError, match="bitsandbytes"):
        create_loraplus_optimizer(model, AdamW8bit, **options)


def test_an_adapter_s_folder_is_estimated_by_what_is_trained(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    found = estimated(tmp_path)
    assert found["parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    (note,) = found["notes"]
    assert note.endswith("the frozen weights of the model that it adapts come on top")
