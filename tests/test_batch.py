"""Batches: what their tables depend on, how their slots are read, in which order they come."""

from dataclasses import replace

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import batch as batch_module
from lowbit_optim_kernels.batch import Batch, Slot, note_order
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.formats import parts_of
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.rules import adam, sgd
from lowbit_optim_kernels.weights import WEIGHTS
from protocol import parameters, train

VALUES, ZERO = torch.zeros(12), torch.zeros((), dtype=torch.int64)
SLOT = Slot(VALUES[:8], VALUES[:8], FLOAT32, (), ZERO, rows=2, row=4, numel=8)
RULE, OTHER_RULE = (sgd.sgd_rule(False, False, plain) for plain in (True, False))
OF_A_SLOT = {
    "p": SLOT.p.half(), "g": SLOT.g.half(), "format": DYNAMIC8, "weights": WEIGHTS[16], "rows": 1,
    "row": 8, "numel": 16, "tensor_key": 1, "blocks_before": 1, "weights_before": 64, "part": 1,
}  # fmt: skip
NARROW = {"p": VALUES[1:9], "g": VALUES[1:9]}
OF_A_BATCH = {"rule": OTHER_RULE, "maximize": True, "grad_scale": ZERO, "found_inf": ZERO}


@pytest.mark.parametrize(
    ("of_slot", "of_batch"),
    [
        *(pytest.param({k: x}, {}, id=k) for k, x in OF_A_SLOT.items()),
        *(pytest.param({k: x}, {}, id=f"narrow {k}") for k, x in NARROW.items()),
        *(pytest.param({}, {k: x}, id=k) for k, x in OF_A_BATCH.items()),
    ],
)
def test_tables_are_not_taken_over_where_one_thing_that_they_depend_on_is_new(of_slot, of_batch):
    """Whatever else is as it was: most of it comes with something else that is new."""

    def key(of_slot, of_batch):
        slots = [replace(SLOT), replace(SLOT, **of_slot)]
        batch = Batch(**{"rule": RULE, **of_batch}, slots=slots, device=ZERO.device, engine="torch")
        batch.note_addresses()
        return batch.key

    assert key({}, {}) == key({}, {})
    assert key({}, {}) != key(of_slot, of_batch)


@pytest.mark.parametrize("what", ["p", "g", "residual", 0, 1, 2, 3])
def test_vectors_are_read_where_all_that_has_a_number_an_element_is_aligned(what):
    """The moments' codes and what is kept beside a weight, too; not the scales of blocks."""
    rule, x = adam.adam_rule(False, False, False), torch.zeros(64, dtype=torch.uint8)
    per_block = [part.per_block for part in parts_of(rule.moments, DYNAMIC8)]
    state = [VALUES[:1] if each else x[:8] for each in per_block]
    tensors = {"p": SLOT.p, "g": SLOT.g, "residual": x[32:40]}
    slot = replace(SLOT, **tensors, format=DYNAMIC8, state=tuple(state), rows=1, row=8)
    batch = Batch(rule, [slot], x.device, "torch")
    batch.note_addresses()
    assert batch.aligned == [True]
    if what in tensors:
        narrow = VALUES[1:9] if what != "residual" else x[33:41]
        batch.slots = [replace(slot, **{what: narrow})]
    else:
        state[what] = VALUES[1:2] if per_block[what] else x[1:9]
        batch.slots = [replace(slot, state=tuple(state))]
    batch.note_addresses()
    assert batch.aligned == [what not in tensors and per_block[what]]


def test_tensors_are_not_looked_up_where_tables_have_their_addresses(engine, device, monkeypatch):
    """A step of hundreds of parameters would take most of its time for that."""
    params = [torch.nn.Parameter(x.detach().to(device)) for x in parameters(shapes=[(300,)])]
    optimizer, looked_up = lowbit_optim.AdamW8bit(params, min_8bit_size=1), []
    take = Slot.take
    monkeypatch.setattr(Slot, "take", lambda *given: looked_up.append(given) or take(*given))
    train(optimizer, 3)
    assert len(looked_up) == (0 if ENGINES[engine].by_address else 2)


@pytest.mark.parametrize("name", ["AdamW8bit", "LAMB8bit"])
def test_a_batch_of_nothing_but_empty_tensors_counts_its_steps(name, engine, device):
    """As a rank may have it of small parameters, without one element in any."""
    shapes = (0,), (0, 70), (3, 0)
    params = [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
    options = {"min_8bit_size": 1, "percentile_clipping": 50}
    optimizer = train(getattr(lowbit_optim, name)(params, **options), 2)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2, 2]


def test_a_step_that_has_written_stays_counted_whatever_comes_then(engine, device, monkeypatch):
    """Its parameters have moved; Ctrl-C may come before it returns."""
    p = torch.nn.Parameter(torch.ones(300, device=device))
    optimizer = train(lowbit_optim.AdamW8bit([p], min_8bit_size=1), 1)
    run, before = getattr(ENGINES[engine].code, f"{engine.capitalize()}Run"), p.detach().clone()
    finish = run.finish

    def interrupted(self):
        finish(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, 1, first=1)
    assert not torch.equal(p, before)
    assert int(optimizer.state[p]["step"]) == 2


def test_the_order_of_batches_is_noted_anew_when_it_changes():
    first = torch.zeros(8)
    step = torch.zeros((), dtype=torch.int64)
    slots = [Slot(x, x, FLOAT32, (), step, 1, 4, 4) for x in (first[:4], first[2:6], first[4:])]
    rule = sgd.sgd_rule(False, False, True)
    batches = [Batch(rule, [slot], first.device, "torch") for slot in slots]
    note_order(batches)
    assert [batch.follows for batch in batches] == [False, True, True]
    note_order(batches[::-1])
    assert [batch.follows for batch in batches] == [True, True, False]
    note_order(batches[::2])
    assert [batch.follows for batch in batches[::2]] == [False, False]
    note_order(batches[::-1])  # as it was when the one that was left out last took part
    assert [batch.follows for batch in batches] == [True, True, False]


def test_batches_that_share_no_memory_are_noted_as_such_and_looked_at_once(monkeypatch):
    """Beside two that do; they would be stepped one by one, and compared in every step."""
    x, step = torch.zeros(12), torch.zeros((), dtype=torch.int64)
    slots = [Slot(part, part, FLOAT32, (), step, 1, 4, 4) for part in (x[:4], x[2:6], x[8:])]
    rule = sgd.sgd_rule(False, False, True)
    batches = [Batch(rule, [slot], x.device, "torch") for slot in slots]
    note_order(batches)
    assert [batch.sharing for batch in batches] == [{0}, {0}, set()]
    looked = []
    monkeypatch.setattr(batch_module, "overlaps", lambda memories: looked.append(1) or [])
    note_order(batches)
    assert not looked
