"""Shards of a vector have the weights of the whole, bit for bit, wherever it is cut."""

from itertools import pairwise

import pytest
import torch

from lowbit_optim_kernels import weights
from lowbit_optim_kernels.batch import WEIGHT_BLOCK, Batch, Slot
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import adam

RULE = adam.adam_rule(False, False, False)
HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": 1.0}
# Cut at multiples of 64, 16, 4 and 1; pieces of less than a block, of none, and of a tile and more.
CUTS = [0, 128, 240, 244, 253, 261, 261, 2048 + 272, 2603]
ORIGINS = [0, (2**32 - 3) * WEIGHT_BLOCK]  # the number of a block may take more than 32 bits


def stepped(engine, device, cuts, origin, bits):
    """A vector after two steps as pieces between these elements: its tensors, joined again."""
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(CUTS[-1], generator=generator).to(device, torch.bfloat16) for _ in "pg")
    stored, slots = weights.WEIGHTS[bits], []
    for start, stop in pairwise(cuts):
        zeros = torch.zeros(stop - start, device=device)
        residual = None if stored.residual is None else zeros.to(stored.residual)
        slots.append(Slot(
            p[start:stop].clone(), g[start:stop].clone(), FLOAT32, (zeros, zeros.clone()),
            torch.zeros((), dtype=torch.int64, device=device), 1, stop - start, CUTS[-1],
            weights=stored, residual=residual, tensor_key=0x12345678, weights_before=origin + start,
        ))  # fmt: skip
    batch = Batch(RULE, slots, p.device, engine, hyper=[HYPER])
    batch.note_addresses()
    for _ in range(2):
        run = ENGINES[engine].code.start(batch)
        run.begin()
        run.finish()
    pieces = [(slot.p, *slot.state, *filter(torch.is_tensor, [slot.residual])) for slot in slots]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def assert_whole(engine, device, origin, bits):
    whole = stepped(engine, device, [0, CUTS[-1]], origin, bits)
    for x, y in zip(stepped(engine, device, CUTS, origin, bits), whole, strict=True):
        assert torch.equal(x, y)
    by_torch = stepped("torch", device, [0, CUTS[-1]], origin, bits)  # fp32 may round otherwise
    assert int((whole[0] != by_torch[0]).sum()) <= 0.01 * CUTS[-1]
    with_other_bits = stepped(engine, device, [0, CUTS[-1]], origin + WEIGHT_BLOCK, bits)
    assert not all(map(torch.equal, whole, with_other_bits))


@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("origin", ORIGINS)
def test_pieces_of_a_vector_are_stepped_as_in_the_whole(engine, device, origin, bits):
    assert_whole(engine, device, origin, bits)


def test_a_shard_begins_at_its_element_unless_rows_have_blocks_of_their_own():
    """Of a matrix with shorter rows, too."""
    for shape in ((2603,), (300, 63)):
        assert Layout.of(shape, WEIGHT_BLOCK).positions_before(261) == 261
    assert Layout.of((300, 65), WEIGHT_BLOCK).positions_before(261) == 261 * 2 * WEIGHT_BLOCK
