"""Sharded checkpoints whose save was cut short, or that were damaged since: refused by all ranks.

A process is killed in the middle of a save; the others get an error. Nothing that is loaded from
what is left, or from a checkpoint that lacks something, gives a state: every rank gets the same
error, and its parameters and its optimizer are as they were.
"""

import copy
import os
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import lowbit_optim
import sharded
from protocol import identical

# Of a checkpoint's optimizer, the one that it is read into, and what its error says.
CASTS = {
    "8 to 32 bits": ("AdamW8bit", {}, {"optim_bits": 32}, "'exp_avg' has codes of 'dynamic8'"),
    "ratio8 to 32 bits": (
        "AdamW8bit ratio8", {}, {"optim_bits": 32}, "codes of 'ratio8'",
    ),
    "fewer in 8 bits": ("AdamW8bit", {}, {"min_8bit_size": 6000}, r"parameter 'p4'.*'exp_avg' has"),
    "24 to 32 bits": (
        "AdamW8bit bf16", {}, {"master_weight_bits": 32},
        r"is torch.int16.*=24, which is torch.int8",
    ),
    "32 to 24 bits": (
        "AdamW8bit bf16", {"master_weight_bits": 32}, {"master_weight_bits": 24},
        r"is torch.int8.*=32, which is torch.int16",
    ),
}  # fmt: skip

# Optimizers whose moments torch casts to the codes of one of 8 bits, and what the error says.
BROADCAST = {
    "torch": (torch.optim.AdamW, "AdamW8bit", {}, r"'exp_avg' has codes of .* its scales are 0"),
    "torch, ratio8": (
        torch.optim.AdamW, "AdamW8bit", {"state_format": "ratio8"}, "scales are 0.*sharded.md",
    ),
    "32 bits": (lowbit_optim.AdamW32bit, "AdamW8bit", {}, "saved with 32 bits.*sharded.md"),
    "no sign": (lowbit_optim.Adagrad32bit, "Adagrad8bit", {}, "'sum' .* saved with 32 bits"),
    "more in 8 bits": (
        partial(lowbit_optim.Adagrad8bit, min_8bit_size=2**20), "Adagrad8bit", {},
        "'sum' .* saved with 32 bits",
    ),
}  # fmt: skip

pytestmark = pytest.mark.timeout(120)
WORLD = 2
DAMAGES = ("0.99", "0.5", "0", "no data", "no metadata", "short metadata")  # or what is left
PATIENCE = 60  # seconds; ranks that take longer hang
MOMENTS = {"data": 1, "metadata": 0}  # what is being written, and the rank that is killed then


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class KillsInData(dcp.DefaultSavePlanner):
    """Ends its process at the twentieth tensor, when others lie in the file."""

    left = 20

    def resolve_data(self, write_item):
        self.left -= 1
        if not self.left:
            die()
        return super().resolve_data(write_item)


class KillsInMetadata(dcp.FileSystemWriter):
    """Ends its process when all has been written but the name of the metadata."""

    def finish(self, metadata, results):
        self.fs.rename = lambda path, new_path: die()
        super().finish(metadata, results)


def trained(world, steps, seed=0):
    model, spread = sharded.sharded_holder(world, seed)
    optimizer = sharded.build("AdamW8bit", list(model.parameters()))
    sharded.train(optimizer, list(model.parameters()), range(steps), spread)
    return model, optimizer


def everything(model, optimizer):
    return copy.deepcopy(sharded.everything(list(model.parameters()), optimizer))


def save(model, optimizer, folder, **options):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder, **options)


def killed(rank, world, folder, moment):
    """A save that works, then one in which a rank dies."""
    model, optimizer = trained(world, 2)
    whole = f"{folder}/whole"
    save(model, optimizer, whole)
    saved = everything(model, optimizer)
    if rank == 0:
        torch.save(saved, f"{whole}.pt")
    # Written over, and killed meanwhile, it might be a mixture that loads: the guide says this.
    writer = dcp.FileSystemWriter(whole, overwrite=False)
    with pytest.raises(dcp.api.CheckpointException, match="already exists"):
        save(model, optimizer, None, storage_writer=writer)

    cut, options = f"{folder}/cut", {}
    if rank == MOMENTS[moment]:
        options = {
            "data": {"planner": KillsInData()},
            "metadata": {"storage_writer": KillsInMetadata(cut)},
        }[moment]
    with pytest.raises(RuntimeError):  # the connection is closed
        save(model, optimizer, cut, **options)
    Path(folder, "survived").touch()
    os._exit(0)


def interrupted(folder, moment):
    """Run `killed`; nobody is waited for longer than a group of processes waits for its members."""
    folder.mkdir()
    processes = sharded.run(WORLD, killed, str(folder), moment, join=False).processes
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes[MOMENTS[moment]] == -signal.SIGKILL
    assert codes[1 - MOMENTS[moment]] == 0
    assert (folder / "survived").exists()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("interrupted")


def refused(rank, world, folder, damaged):
    """What is damaged raises on this rank, as on the others; what is whole is loaded."""
    model, optimizer = trained(world, 1, seed=1)
    before = everything(model, optimizer)
    for name in damaged:
        weights, state = copy.deepcopy(get_state_dict(model, optimizer))
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
        said = [None] * world
        dist.all_gather_object(said, str(caught.value))
        assert said == [said[0]] * world, name
        assert identical(everything(model, optimizer), before), name
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/data/whole")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    whole = torch.load(f"{folder}/data/whole.pt", weights_only=True)
    assert identical(everything(model, optimizer), whole)


def damage(whole, name):
    """A copy of a checkpoint in which something is missing."""
    folder = whole.parent / name
    shutil.copytree(whole, folder)
    files = sorted(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if name == "short metadata":
        os.truncate(folder / ".metadata", (folder / ".metadata").stat().st_size // 2)
    elif name == "no metadata":
        (folder / ".metadata").unlink()
    elif name == "no data":
        files[0].unlink()
    else:
        os.truncate(files[-1], int(files[-1].stat().st_size * float(name)))
    return name


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_the_others_get_an_error_when_a_rank_is_killed(moment, root):
    interrupted(root / moment, moment)
    written = {path.name: path.stat().st_size for path in (root / moment / "cut").iterdir()}
    assert ".metadata" not in written
    assert sum(written.values()) > 10_000


@pytest.mark.slow
def test_nothing_is_loaded_of_what_is_not_whole(root):
    """Of what the test before has left, and of a checkpoint that lacks something."""
    for moment in MOMENTS:
        if not (root / moment).exists():
            interrupted(root / moment, moment)
    cut = [f"{moment}/cut" for moment in MOMENTS]
    damaged = [f"data/{damage(root / 'data' / 'whole', name)}" for name in DAMAGES]
    sharded.run(WORLD, refused, str(root), [*cut, *damaged])


def read_as_other(rank, world, folder):
    """DCP casts codes to the numbers of an optimizer of other settings; this is refused."""
    for label, (name, saved, other, said) in CASTS.items():
        model, spread = sharded.sharded_holder(world, 0, name)
        optimizer = sharded.build(name, list(model.parameters()), **saved)
        sharded.train(optimizer, list(model.parameters()), range(2), spread)
        before = everything(model, optimizer)
        save(model, optimizer, f"{folder}/{label}")
        model, spread = sharded.sharded_holder(world, 0, name)
        into = lowbit_optim.AdamW(model.parameters(), lr=1e-2, **{"optim_bits": 8, **other})
        sharded.train(into, list(model.parameters()), range(2), spread)
        untouched = everything(model, into)["state"]
        _, state = copy.deepcopy(get_state_dict(model, into))
        dcp.load({"optim": state}, checkpoint_id=f"{folder}/{label}")
        with pytest.raises(ValueError, match=said):
            set_optimizer_state_dict(model, into, state)
        assert identical(everything(model, into)["state"], untouched), label
        # The way that the error names.
        into.zero_grad()
        same = sharded.build(name, list(model.parameters()), **saved)
        _, state = get_state_dict(model, same)
        dcp.load({"optim": state}, checkpoint_id=f"{folder}/{label}")
        set_optimizer_state_dict(model, same, state)
        assert identical(everything(model, same)["state"], before["state"]), label
        into.load_state_dict(same.state_dict())
        sharded.train(into, list(model.parameters()), range(2, 3), spread)


@pytest.mark.slow
def test_codes_that_were_cast_to_numbers_are_refused(tmp_path):
    sharded.run(WORLD, read_as_other, str(tmp_path))


def broadcast_into_other(rank, world, folder):
    """torch casts the numbers of rank 0 to codes; what is refused loads without a broadcast."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    values = sharded.values()
    for label, (cls, name, settings, said) in BROADCAST.items():
        alone = sharded.Holder([x.clone() for x in values])
        optimizer = cls(alone.parameters())
        sharded.train(optimizer, list(alone.parameters()), range(2))
        optimizer.zero_grad()
        saved = get_optimizer_state_dict(alone, optimizer, options=StateDictOptions())
        plain = getattr(lowbit_optim, name)(alone.parameters(), **settings)
        plain.load_state_dict(optimizer.state_dict())

        model, _ = sharded.sharded_holder(world)
        into = getattr(lowbit_optim, name)(model.parameters(), **settings)
        given = copy.deepcopy(saved) if rank == 0 else {}
        with pytest.raises(ValueError, match=said):
            set_optimizer_state_dict(model, into, given, options=options)
        into.load_state_dict(saved)
        want = sharded.everything(list(alone.parameters()), plain)
        assert identical(everything(model, into)["state"], want["state"]), label


def broadcast_zeros(rank, world, folder):
    """Moments that are 0 are taken, those of 8 bits by broadcast, too."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for state_format in ("dynamic8", "ratio8", "ratio4"):
        alone = sharded.Holder(sharded.values())
        saves = lowbit_optim.AdamW(alone.parameters(), state_format=state_format)
        for p in alone.parameters():
            p.grad = torch.zeros_like(p)
        saves.step()
        saves.zero_grad()
        saved = get_optimizer_state_dict(alone, saves, options=StateDictOptions())
        model, _ = sharded.sharded_holder(world)
        into = lowbit_optim.AdamW(model.parameters(), state_format=state_format)
        given = saved if rank == 0 else {}
        set_optimizer_state_dict(model, into, given, options=options)
        want = sharded.everything(list(alone.parameters()), saves)
        assert identical(everything(model, into)["state"], want["state"]), state_format


def broadcast_below_one(rank, world, folder):
    """Torch's squares below 1 become codes of 0: nothing else tells, so there is a warning."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for steps, warned in ((2, True), (0, False)):
        alone = sharded.Holder(sharded.values())
        saves = torch.optim.Adagrad(alone.parameters())
        for _ in range(steps):
            for p in alone.parameters():
                p.grad = torch.full_like(p, 1e-3)
            saves.step()
        saves.zero_grad()
        saved = get_optimizer_state_dict(alone, saves, options=StateDictOptions())
        model, _ = sharded.sharded_holder(world)
        into = lowbit_optim.Adagrad8bit(model.parameters())
        given = saved if rank == 0 else {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_optimizer_state_dict(model, into, given, options=options)
        assert any("moments that are all 0" in str(w.message) for w in caught) == warned, steps


@pytest.mark.parametrize("function", [broadcast_into_other, broadcast_zeros, broadcast_below_one])
@pytest.mark.slow
def test_numbers_that_were_cast_to_codes_are_refused(function, tmp_path):
    sharded.run(WORLD, function, str(tmp_path))
