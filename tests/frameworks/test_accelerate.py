"""accelerate: `prepare`, accumulation, clipping, `save_state` and `load_state`."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState

from lowbit_optim import LARS_PRESETS, AdamW8bit, LANS8bit, LARS8bit
from tiny import Sequences, bits_of, gpt2, same_parameters

STEPS = 20
CASES = {
    "AdamW8bit": (AdamW8bit, {"lr": 3e-3}),
    "LARS8bit": (LARS8bit, {"lr": 0.1, "momentum": 0.9, **LARS_PRESETS["larc"]}),
    "LANS8bit": (LANS8bit, {"lr": 1e-2}),
}


@pytest.fixture(autouse=True)
def fresh_process():
    """accelerate keeps the mixed precision of a process's first Accelerator."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def prepared(case, precision, **options):
    cls, settings = CASES[case]
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    model = gpt2()
    optimizer = cls(model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (4 * STEPS))
    loader = torch.utils.data.DataLoader(Sequences(8 * STEPS), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, first, last):
    losses = []
    for number, batch in enumerate(loader):
        if first <= number < last:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_resuming_is_bit_for_bit(tmp_path, case, precision):
    one = prepared(case, precision)
    first = train(*one, 0, STEPS)
    one[0].save_state(str(tmp_path))
    straight = train(*one, STEPS, 2 * STEPS)
    assert straight[-1] < first[0] - 0.3

    other = prepared(case, precision)
    other[0].load_state(str(tmp_path))
    assert train(*other, STEPS, 2 * STEPS) == straight
    assert same_parameters(one[1], other[1])
    optimizer, model = other[2].optimizer, other[1]
    assert type(optimizer) is CASES[case][0]
    assert bits_of(optimizer, model.transformer.h[0].mlp.c_fc.weight) == 8


def test_accumulated_gradients_are_stepped_once():
    accelerator, model, optimizer, loader, scheduler = prepared(
        "AdamW8bit", "no", gradient_accumulation_steps=4
    )
    train(accelerator, model, optimizer, loader, scheduler, 0, 8)
    steps = {int(state["step"]) for state in optimizer.optimizer.state.values()}
    assert steps == {2}


@pytest.mark.parametrize("fused", [True, None])
def test_accelerate_sees_a_skipped_step_if_the_scaler_unscales(fused):
    """accelerate's doing: it takes a step that was called for a step that was taken."""
    Accelerator(cpu=True)
    p = torch.nn.Parameter(torch.ones(300))
    optimizer, scaler = AdamW8bit([p], fused=fused), torch.amp.GradScaler("cpu")
    accelerated = AcceleratedOptimizer(optimizer, scaler=scaler)
    for factor, skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
        accelerated.zero_grad()
        scaler.scale(p.sum() * factor).backward()
        accelerated.step()
        assert accelerated.step_was_skipped == (skipped and not fused)
    assert int(optimizer.state[p]["step"]) == 2
