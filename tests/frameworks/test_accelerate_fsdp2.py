"""accelerate's FSDP2 plugin on two ranks: the unsharded run, and a resumed one, bit for bit.

accelerate is given the optimizer of the whole model. It puts empty tensors in place of its
parameters, and DTensors in place of these. It does so on accelerators only; here it is told that
the processes are such.
"""

import os

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

import sharded
from lowbit_optim import AdamW8bit, GlobalOptimManager, LANS8bit
from lowbit_optim.hf import embeddings_in_32_bits
from tiny import Sequences, bits_of, gpt2

pytestmark = pytest.mark.timeout(120)
WORLD, BATCH, STEPS = 2, 4, 6
CASES = {"AdamW8bit": (AdamW8bit, 3e-3), "LANS8bit": (LANS8bit, 1e-2)}
SAVED_AS = {"AdamW8bit": "SHARDED_STATE_DICT", "LANS8bit": "FULL_STATE_DICT"}


def loader(copies):
    """Batches, each of them for so many ranks."""
    numbers = torch.arange(BATCH * 2 * STEPS).view(-1, BATCH)
    dataset = torch.utils.data.Subset(Sequences(), numbers.repeat(1, copies).flatten().tolist())
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)


def built(case):
    cls, lr = CASES[case]
    model = gpt2()
    embeddings_in_32_bits(model)
    return model, cls(model.parameters(), lr=lr, weight_decay=0.1)


def prepared(case):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"], state_dict_type=SAVED_AS[case],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(*built(case), loader(WORLD))


def train(model, optimizer, batches, first, last, backward=torch.Tensor.backward):
    losses = []
    for number, batch in enumerate(batches):
        if first <= number < last:
            loss = model(**batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def weights_of(model):
    return {name: sharded.full(p.detach()).clone() for name, p in model.named_parameters()}


def all_compared(rank, world, folder):
    for name in ("", "LOCAL_"):
        os.environ.update({f"{name}RANK": str(rank), f"{name}WORLD_SIZE": str(world)})
    for case in CASES:
        compared(f"{folder}/{case}", case)


def compared(folder, case):
    model, optimizer = built(case)
    alone = train(model, optimizer, loader(1), 0, 2 * STEPS)
    assert alone[-1] < alone[0]
    want = weights_of(model)

    accelerator, model, optimizer, batches = prepared(case)
    assert all(hasattr(p, "placements") for p in model.parameters())
    losses = train(model, optimizer, batches, 0, STEPS, accelerator.backward)
    accelerator.save_state(folder)
    losses += train(model, optimizer, batches, STEPS, 2 * STEPS, accelerator.backward)
    straight = weights_of(model)
    assert bits_of(optimizer.optimizer, model.transformer.wte.weight) == 32
    assert bits_of(optimizer.optimizer, model.transformer.h[0].mlp.c_fc.weight) == 8
    if case == "AdamW8bit":  # no norms, whose sums are rounded by the shards
        assert losses == alone
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=0)
    assert straight.keys() == want.keys()
    for name, p in straight.items():
        assert case != "AdamW8bit" or torch.equal(p, want[name]), name

    GlobalOptimManager.get_instance().initialize()
    accelerator, model, optimizer, batches = prepared(case)
    for p in model.parameters():
        p.data += 1
    accelerator.load_state(folder)
    resumed = train(model, optimizer, batches, STEPS, 2 * STEPS, accelerator.backward)
    assert resumed == losses[STEPS:]
    assert all(torch.equal(p, straight[name]) for name, p in weights_of(model).items())


@pytest.mark.slow
def test_two_ranks(tmp_path):
    sharded.run(WORLD, all_compared, str(tmp_path))
