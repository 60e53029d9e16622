"""Lightning's Trainer: precision, clipping, schedules and resumption."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_optim import AdamW8bit
from tiny import Sequences, bits_of, gpt2, same_parameters

STEPS = 10  # of an epoch

pytestmark = [
    # The data are in memory.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Of Lightning's own code, by torch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # A second run in a folder, as whoever resumes has it.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Module(lightning.LightningModule):
    def __init__(self, fused):
        super().__init__()
        self.model, self.fused, self.losses = gpt2(), fused, []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = AdamW8bit(self.parameters(), lr=3e-3, fused=True if self.fused else None)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


def fit(folder, precision, clip=None, epochs=2, fused=False, resume=None):
    module = Module(fused)
    loader = torch.utils.data.DataLoader(Sequences(8 * STEPS), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, precision=precision, gradient_clip_val=clip,
        max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_resuming_is_bit_for_bit(tmp_path, precision, clip):
    straight, _ = fit(tmp_path, precision, clip)
    assert straight.losses[-1] < straight.losses[0] - 0.5
    resumed, trainer = fit(tmp_path, precision, clip, resume=tmp_path / "epoch=0.ckpt")
    assert resumed.losses == straight.losses[STEPS:]
    assert same_parameters(straight, resumed)
    (optimizer,) = trainer.optimizers
    assert bits_of(optimizer, resumed.model.transformer.h[0].mlp.c_fc.weight) == 8


def test_clipping_changes_the_training(tmp_path):
    free, _ = fit(tmp_path, "bf16-mixed", epochs=1)
    clipped, _ = fit(tmp_path, "bf16-mixed", clip=0.01, epochs=1)
    assert not same_parameters(free, clipped)


def test_mixed_precision_refuses_to_clip_what_unscales_by_itself(tmp_path):
    """Lightning's doing; once it no longer does, `unscaled_by_trainer` has had its time."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(tmp_path, "bf16-mixed", clip=0.5, fused=True)
    fit(tmp_path, "32-true", clip=0.5, fused=True, epochs=1)
