"""Hugging Face's Trainer: bitsandbytes' names after `patch`, and classes of this package."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lowbit_optim import (
    LARS_PRESETS,
    AdamW8bit,
    LANS8bit,
    LARS8bit,
    ScheduleFreeAdamW8bit,
    release_gradients,
)
from lowbit_optim.bitsandbytes import optim, patch
from lowbit_optim.hf import embeddings_in_32_bits
from tiny import Sequences, bits_of, gpt2, same_parameters

STEPS = 40
BY_NAME = {
    "adamw_bnb_8bit": (optim.AdamW, 8),
    "adamw_8bit": (optim.AdamW, 8),
    "ademamix": (optim.AdEMAMix, 32),
    "ademamix_8bit": (optim.AdEMAMix, 8),
    "lion_32bit": (optim.Lion, 32),
    "lion_8bit": (optim.Lion, 8),
    "paged_adamw_32bit": (optim.AdamW, 32),
    "paged_adamw_8bit": (optim.AdamW, 8),
    "paged_ademamix_32bit": (optim.AdEMAMix, 32),
    "paged_ademamix_8bit": (optim.AdEMAMix, 8),
    "paged_lion_32bit": (optim.Lion, 32),
    "paged_lion_8bit": (optim.Lion, 8),
    "rmsprop_bnb": (optim.RMSprop, 32),
    "rmsprop_bnb_8bit": (optim.RMSprop, 8),
    "rmsprop_bnb_32bit": (optim.RMSprop, 32),
}
BY_CLASS = {
    "AdamW8bit": None,
    "LARS8bit": (LARS8bit, {"lr": 0.1, "momentum": 0.9, **LARS_PRESETS["larc"]}),
    "LANS8bit": (LANS8bit, {"lr": 1e-2}),
}


@pytest.fixture(autouse=True)
def patched():
    with patch():
        yield


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=0,
        per_device_train_batch_size=8, logging_steps=1, learning_rate=3e-3,
        **{"optim": "adamw_bnb_8bit", "save_strategy": "no", "max_steps": STEPS, **options},
    )  # fmt: skip


def losses_of(trainer):
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


@pytest.mark.filterwarnings("ignore:is_paged=True has no effect:UserWarning")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_name_of_bitsandbytes_trains_with_ours(tmp_path, name):
    trainer = Trainer(
        model=gpt2(), args=arguments(tmp_path, optim=name, max_steps=20), train_dataset=Sequences()
    )
    trainer.train()
    cls, bits = BY_NAME[name]
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is cls
    losses = losses_of(trainer)
    assert losses[20] < losses[1] - 0.5
    for where, p in trainer.model.named_parameters():
        expected = 32 if "wte" in where or "wpe" in where or p.numel() < 4096 else bits
        assert bits_of(optimizer, p) == expected, where


class Count(TrainerCallback):
    """How many steps a Trainer has taken itself."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BY_CLASS)
def test_resuming_gives_the_same_losses(tmp_path, manager, name, dtype):
    def trainer():
        manager.initialize()  # as in a new process
        model, count = gpt2(dtype), Count()
        options = {}
        if BY_CLASS[name] is not None:
            assert embeddings_in_32_bits(model) == [
                "transformer.wte.weight", "transformer.wpe.weight",
            ]  # fmt: skip
            options["optimizer_cls_and_kwargs"] = BY_CLASS[name]
        args = arguments(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
        return count, Trainer(
            model=model, args=args, train_dataset=Sequences(), callbacks=[count], **options
        )

    _, straight = trainer()
    straight.train()
    count, resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert count.steps == STEPS // 2
    assert losses_of(resumed) == losses_of(straight)
    assert same_parameters(resumed.model, straight.model)
    losses = losses_of(straight)
    assert losses[STEPS] < losses[1] - 0.3
    for one in (straight, resumed):
        body, embedding = (
            one.model.transformer.h[0].mlp.c_fc.weight, one.model.transformer.wte.weight,
        )  # fmt: skip
        assert [bits_of(one.optimizer.optimizer, p) for p in (body, embedding)] == [8, 32]


# By the name that versions before 5.24 have, too.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_released_gradients_train_and_resume_as_whole_ones(tmp_path, clip):
    def trainer(released):
        model = gpt2(torch.bfloat16)
        optimizer = AdamW8bit(model.parameters(), lr=3e-3)
        if released:
            release_gradients(optimizer, model, bucket_bytes=0, clip_previous_norm=clip)
        args = arguments(
            tmp_path, max_grad_norm=0, gradient_checkpointing=True, save_strategy="steps",
            save_steps=STEPS // 2,
        )  # fmt: skip
        return Trainer(
            model=model, args=args, train_dataset=Sequences(), optimizers=(optimizer, None)
        )

    straight = trainer(True)
    straight.train()
    assert all(p.grad is None for p in straight.model.parameters())
    resumed = trainer(True)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert losses_of(resumed) == losses_of(straight)
    assert same_parameters(resumed.model, straight.model)
    losses = losses_of(straight)
    assert losses[STEPS] < losses[1] - 0.3
    if clip is None:
        whole = trainer(False)
        whole.train()
        assert losses_of(whole) == losses
        assert same_parameters(whole.model, straight.model)


def test_schedule_free_holds_the_average_from_an_evaluation_to_the_next_step(tmp_path):
    seen = []

    class Modes(TrainerCallback):
        def note(self, args, state, control, optimizer=None, **kwargs):
            seen.append(optimizer.param_groups[0]["train_mode"])

        on_step_end = on_evaluate = note

    trainer = Trainer(
        model=gpt2(),
        args=arguments(
            tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, lr_scheduler_type="constant"
        ),
        train_dataset=Sequences(), eval_dataset=Sequences(8), callbacks=[Modes()],
        optimizer_cls_and_kwargs=(ScheduleFreeAdamW8bit, {"lr": 1e-2}),
    )  # fmt: skip
    trainer.train()
    assert seen == [True, True, False, True, True, False]
    trainer.optimizer.train()
    trainer.optimizer.eval()
    assert not trainer.optimizer.param_groups[0]["train_mode"]
