"""`lowbit-optim inspect` and `convert`: what they say and write, and what they refuse to read."""

import io
import json
import pickle
import zipfile

import pytest
import torch

import lowbit_optim
from foreign_states import foreign_state, nested
from test_cli_estimate import refused, run, safetensors

SHAPES = [(64, 256), (5000,), (10,), (64, 300)]
TORCH = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"]
OPTIONS = {"SGD": {"momentum": 0.9}, "LARS": {"momentum": 0.9}}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(5)
    made = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return made


def stepped(cls, family, params=None, **options):
    """An optimizer after two steps."""
    optimizer = cls(
        parameters() if params is None else params, lr=1e-3, **OPTIONS.get(family, {}), **options
    )
    with lowbit_optim.use_engine("torch"):
        optimizer.step()
        optimizer.step()
    return optimizer


def saved(path, optimizer, **beside):
    torch.save({"model": {}, "optimizer": optimizer.state_dict(), **beside}, path)
    return path


def inspected(path):
    result = run("inspect", path, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["states"]


def converted(source, target, *arguments):
    """The optimizer's state in what is written."""
    result = run("convert", source, target, *arguments)
    assert result.exit_code == 0, result.output
    return torch.load(target, weights_only=True)["optimizer"]


def assert_equal(one, other):
    """Two state dicts are the same, to the bit."""
    assert type(one) is type(other) or not isinstance(one, dict)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_equal(x, y)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("format", ["dynamic8", "ratio8", "ratio4", "float32"])
def test_inspect_says_format_steps_and_bytes(tmp_path, format):
    optimizer = stepped(lowbit_optim.AdamW, "AdamW", state_format=format)
    (state,) = inspected(saved(tmp_path / "run.pt", optimizer))
    assert state["where"] == "['optimizer']"
    assert state["summary"].startswith("lowbit_optim AdamW, format version 2, 4 parameters with")
    coded, plain = ("4 in float32", "") if format == "float32" else (f"3 in {format}", "1 in float")
    assert coded in state["summary"]
    assert plain in state["summary"]
    assert "after 2 steps" in state["summary"]
    held = optimizer.state_dict()["state"]
    size = sum(x.nbytes for one in held.values() for x in one.values())
    assert f"{size:,} bytes" in state["summary"]
    assert sum(kind["bytes"] for kind in state["tensors"]) == size


def test_inspect_names_other_libraries(tmp_path):
    (state,) = inspected(saved(tmp_path / "torch.pt", stepped(torch.optim.RMSprop, "RMSprop")))
    assert state["summary"].startswith("torch.optim RMSprop, 4 parameters")
    theirs = {i: foreign_state("AdamW", shape) for i, shape in enumerate(SHAPES)}
    group = {"params": [0, 1, 2, 3], "lr": 1e-3}
    torch.save({"state": theirs, "param_groups": [group]}, tmp_path / "bnb.pt")
    (state,) = inspected(tmp_path / "bnb.pt")
    assert state["where"] == "the file itself"
    assert state["summary"].startswith("bitsandbytes (the optimizer is not named in it)")


def test_inspect_finds_every_optimizer(tmp_path):
    states = [stepped(torch.optim.SGD, "SGD").state_dict() for _ in range(2)]
    torch.save({"optimizer_states": states, "loops": {"epoch": 3}}, tmp_path / "lightning.ckpt")
    found = inspected(tmp_path / "lightning.ckpt")
    assert [one["where"] for one in found] == [
        "['optimizer_states'][0]", "['optimizer_states'][1]",
    ]  # fmt: skip


def test_inspect_shows_a_table(tmp_path):
    result = run("inspect", saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW8bit, "AdamW")))
    assert result.exit_code == 0
    assert "exp_avg_absmax" in result.stdout


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of DCP in torch 2.7
def test_inspect_reads_safetensors_and_dcp_folders(tmp_path):
    path = safetensors(
        tmp_path / "model.safetensors", {"a.w": ("BF16", [8, 4]), "b.w": ("F32", [2])}
    )
    (file,) = inspected(path)
    assert file["tensors"] == [
        {"key": "w", "dtype": "BF16", "tensors": 1, "elements": 32, "bytes": 64},
        {"key": "w", "dtype": "F32", "tensors": 1, "elements": 2, "bytes": 8},
    ]
    from torch.distributed import checkpoint

    state = {"exp_avg": torch.zeros(10, 3, dtype=torch.uint8), "step": torch.tensor(1.0)}
    with pytest.warns(UserWarning, match=r"single process|no_dist"):
        checkpoint.save({"optim": {"w": state}, "x": 5}, checkpoint_id=tmp_path / "dcp")
    (folder,) = inspected(tmp_path / "dcp")
    assert folder["summary"] == "a distributed checkpoint (DCP) of 2 tensors"
    assert {kind["key"]: kind["bytes"] for kind in folder["tensors"]} == {"exp_avg": 30, "step": 4}


@pytest.mark.parametrize("format", ["dynamic8", "float32"])
@pytest.mark.parametrize("family", TORCH)
def test_ours_becomes_torchs_and_comes_back(tmp_path, family, format):
    optimizer = stepped(getattr(lowbit_optim, family), family, state_format=format)
    theirs = converted(saved(tmp_path / "a.pt", optimizer), tmp_path / "b.pt", "--to", "torch")
    assert_equal(theirs, lowbit_optim.to_torch_state_dict(optimizer))
    getattr(torch.optim, family)(parameters(), lr=1e-3).load_state_dict(theirs)
    again = converted(tmp_path / "b.pt", tmp_path / "c.pt", "--to", "lowbit", "--format", format)
    fresh = getattr(lowbit_optim, family)(
        parameters(), lr=1e-3, state_format=format, **OPTIONS.get(family, {})
    )
    fresh.load_state_dict(again)
    assert_equal(again["state"], fresh.state_dict()["state"])


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("family", ["AdamW", "AdEMAMix", "Lion", "LARS"])
def test_ours_becomes_bitsandbytes_and_comes_back(tmp_path, family, layout):
    optimizer = stepped(getattr(lowbit_optim, f"{family}8bit"), family)
    source = saved(tmp_path / "a.pt", optimizer, epoch=3)
    arguments = ("--to", "bitsandbytes", "--layout", layout)
    theirs = converted(source, tmp_path / "b.pt", *arguments)
    assert_equal(theirs, lowbit_optim.to_bitsandbytes_state_dict(optimizer, layout))
    assert torch.load(tmp_path / "b.pt", weights_only=True)["epoch"] == 3
    back = ("--to", "lowbit", "--optimizer", f"{family}8bit")
    ours = converted(tmp_path / "b.pt", tmp_path / "c.pt", *back)
    fresh = getattr(lowbit_optim, family)(
        parameters(), lr=1e-3, state_format="dynamic8", **OPTIONS.get(family, {})
    )
    with pytest.warns(UserWarning, match="converts a state_dict of bitsandbytes"):
        fresh.load_state_dict(theirs)
    assert_equal(ours, fresh.state_dict())


def test_formats_of_ours_become_each_other(tmp_path):
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW")
    source = saved(tmp_path / "a.pt", optimizer)
    ours = converted(source, tmp_path / "b.pt", "--to", "lowbit", "--format", "ratio4")
    fresh = lowbit_optim.AdamW(parameters(), lr=1e-3, state_format="ratio4")
    fresh.load_state_dict(optimizer.state_dict())
    assert_equal(ours, fresh.state_dict())


def test_bits_beyond_bf16_are_said_to_be_lost(tmp_path):
    params = parameters(torch.bfloat16)
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW", params, master_weight_bits=24)
    source = saved(tmp_path / "a.pt", optimizer)
    said = run("convert", source, tmp_path / "b.pt", "--to", "torch").stdout
    assert "master_residual) are not in it" in said
    ours = converted(source, tmp_path / "c.pt", "--to", "lowbit")
    assert_equal(ours, optimizer.state_dict())


def test_parameters_without_state_are_kept(tmp_path):
    params = parameters()
    params[1].grad = None
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW", params)
    optimizer.state["epoch"] = 3  # which is of no parameter
    source = saved(tmp_path / "a.pt", optimizer)
    ours = converted(source, tmp_path / "b.pt", "--to", "lowbit")
    assert_equal(ours, optimizer.state_dict())
    said = run("convert", source, tmp_path / "c.pt", "--to", "torch").stdout
    assert said.startswith("['optimizer']: AdamW of lowbit_optim to torch, 3 parameters with state")


def test_convert_refuses_what_it_cannot(tmp_path):
    out = tmp_path / "out.pt"
    lion = saved(tmp_path / "lion.pt", stepped(lowbit_optim.Lion8bit, "Lion"))
    assert "torch.optim has no Lion" in refused("convert", lion, out, "--to", "torch")
    theirs = {0: foreign_state("AdamW", (64, 256))}
    torch.save({"state": theirs, "param_groups": [{"params": [0]}]}, tmp_path / "bnb.pt")
    source = tmp_path / "bnb.pt"
    assert "name it, as in --optimizer" in refused("convert", source, out, "--to", "torch")
    wrong = ("--to", "lowbit", "--optimizer", "Lion")
    assert "cannot be read as Lion" in refused("convert", source, out, *wrong)
    misspelt = ("--to", "lowbit", "--optimizer", "AdmW8bit")
    assert "did you mean AdamW" in refused("convert", source, out, *misspelt)
    unknown = ("--to", "lowbit", "--format", "int8")
    assert "--format must be one of" in refused("convert", lion, out, *unknown)
    assert "ratio4" in refused("convert", lion, out, "--to", "lowbit", "--format", "ratio4")
    assert "there is no file" in refused("convert", tmp_path / "absent", out, "--to", "torch")
    assert "exists; name a file" in refused("convert", lion, lion, "--to", "lowbit")
    nowhere = ("convert", lion, tmp_path / "absent" / "out.pt", "--to", "lowbit")
    assert refused(*nowhere) == f"lowbit-optim: there is no folder {str(tmp_path / 'absent')!r}"
    coded = ("--to", "torch", "--format", "ratio4")
    assert "torch.optim keeps numbers" in refused("convert", lion, out, *coded)
    laid_out = ("--to", "torch", "--layout", "nested")
    assert "--layout is of --to bitsandbytes" in refused("convert", lion, out, *laid_out)
    torch.save({"model": {"w": torch.zeros(3)}}, tmp_path / "model.pt")
    assert "has no optimizer's state" in refused(
        "convert", tmp_path / "model.pt", out, "--to", "torch"
    )
    assert "1 tensor, but no optimizer's state" in refused("inspect", tmp_path / "model.pt")
    assert not out.exists()
    assert not list(tmp_path.glob("*.tmp"))
    assert not any(path.is_dir() for path in tmp_path.iterdir())


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_pickle_that_runs_code_is_refused(tmp_path, command):
    path, mark = tmp_path / "bomb.pt", tmp_path / "executed"
    more = [tmp_path / "out.pt", "--to", "torch"] if command == "convert" else []
    torch.save({"state": {}, "param_groups": [], "bomb": Bomb(mark)}, path)
    assert "open; it is not executed" in refused(command, path, *more)
    path.write_bytes(pickle.dumps(Bomb(mark)))
    assert "is no whole checkpoint" in refused(command, path, *more)
    assert not mark.exists()


def test_metadata_that_runs_code_is_refused(tmp_path):
    mark = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    assert f"asks for {open.__module__}.open; it is not executed" in refused("inspect", tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    assert "is damaged" in refused("inspect", tmp_path)
    assert not mark.exists()
    (tmp_path / ".metadata").unlink()
    assert "it is not a DCP checkpoint" in refused("inspect", tmp_path)


def rezipped(path, change, **how):
    """A checkpoint whose pickle has been changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", **how) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if name.endswith("data.pkl") else data)
    path.write_bytes(out.getvalue())


def test_files_that_are_no_whole_checkpoint_are_refused(tmp_path):
    path = saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW8bit, "AdamW"))
    whole = path.read_bytes()
    for part in (b"", whole[:10], whole[: len(whole) // 2], whole[:-5], b"\0" * 1000):
        path.write_bytes(part)
        assert "is no whole checkpoint" in refused("inspect", path)
    for change, said in (
        (lambda pickled: pickled[: len(pickled) // 2], "damaged"),
        (lambda pickled: b"", "damaged"),
        (lambda pickled: b"\x80\x02N.", "0 tensors, but no optimizer's state"),
        (lambda pickled: b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\1\x85R.", "bytearray"),
        (lambda pickled: b"\x80\x02(" * 100_000, ""),
    ):
        path.write_bytes(whole)
        rezipped(path, change)
        assert said in refused("inspect", path)
    path.write_bytes(whole)
    rezipped(path, lambda pickled: pickled + bytes(1 << 20), compression=zipfile.ZIP_DEFLATED)
    assert "has compressed parts" in refused("inspect", path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    assert "not one that torch.save wrote" in refused("inspect", path)


def test_any_byte_may_be_wrong(tmp_path):
    path = saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW8bit, "AdamW", shapes_of_two()))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        text = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    start = whole.index(text)
    generator = torch.Generator().manual_seed(1)
    for place in torch.randint(start, start + len(text), (60,), generator=generator).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        for arguments in (("inspect", path), ("convert", path, tmp_path / "out", "--to", "torch")):
            result = run(*arguments)
            assert result.exit_code in (0, 2), (place, result.exception)
            assert result.exception is None or isinstance(result.exception, SystemExit)
        (tmp_path / "out").unlink(missing_ok=True)


def shapes_of_two():
    return parameters(shapes=[(70, 64), (3,)])


def test_tensors_larger_than_their_bytes_are_refused(tmp_path):
    wide = torch.zeros(1).expand(1 << 40)
    state = {0: {"step": 1, "exp_avg": wide, "exp_avg_sq": wide}}
    group = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    torch.save({"state": state, "param_groups": [group]}, tmp_path / "wide.pt")
    (found,) = inspected(tmp_path / "wide.pt")
    assert found["summary"].endswith(", 4 bytes")
    said = refused("convert", tmp_path / "wide.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert "that is not stored as a whole" in said


@pytest.mark.parametrize("odd", [torch.zeros((), device="meta"), torch.ones(1).to_sparse()])
def test_tensors_without_dense_memory_are_refused(tmp_path, odd):
    optimizer = stepped(lowbit_optim.AdamW, "AdamW", shapes_of_two())
    optimizer.state[next(iter(optimizer.state))]["odd"] = odd
    path = saved(tmp_path / "odd.pt", optimizer)
    for arguments in (("inspect", path), ("convert", path, tmp_path / "out.pt", "--to", "torch")):
        assert "that is not stored as a whole" in refused(*arguments)


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path):
    state = {0: {"step": 1, "a[/b]": torch.zeros(3), "[red]": torch.zeros(3)}}
    torch.save({"state": state, "param_groups": [{"params": [0]}]}, tmp_path / "odd.pt")
    text = run("inspect", tmp_path / "odd.pt").stdout
    assert "a[/b]" in text
    assert "[red]" in text
    (tmp_path / "model[v2]").mkdir()
    safetensors(tmp_path / "model[v2]" / "model.safetensors", {"w": ("F32", (8,))})
    title = run("estimate", tmp_path / "model[v2]").stdout
    assert "model[v2]" in title


def test_what_is_written_can_be_read_by_those_who_may_read_a_new_file(tmp_path):
    path = saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW, "AdamW"))
    converted(path, tmp_path / "out.pt", "--to", "torch")
    assert (tmp_path / "out.pt").stat().st_mode == path.stat().st_mode
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.pt", "run.pt"]


@pytest.mark.parametrize(
    "state_dict",
    [
        {"state": {}, "param_groups": []},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
        {"state": {0: torch.ones(2)}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": [{}]},
        {"state": {0: {"exp_avg": None}}, "param_groups": [{"params": [0], "lr": "x"}]},
        {"state": {0: {"state1": 3}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"__bnb_optimizer_quant_state__": 3}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"__bnb_optimizer_quant_state__": torch.ones(2)}},
         "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": [0], "betas": (0.9, 0.99), "amsgrad": False,
                                        "decoupled_weight_decay": torch.ones(2)}]},
        {"state": {}, "param_groups": [{"params": [[]]}]},
        {"state": {}, "param_groups": [{"params": [0]}], "lowbit_optim": 3},
        {"state": {}, "param_groups": [], "lowbit_optim": {"optimizer": "X", "format_version": 9}},
    ],
)  # fmt: skip
def test_odd_state_dicts_have_no_traceback(tmp_path, state_dict):
    torch.save(state_dict, tmp_path / "odd.pt")
    for arguments in ((), ("--optimizer", "AdamW")):
        result = run(
            "convert", tmp_path / "odd.pt", tmp_path / "out.pt", "--to", "lowbit", *arguments
        )
        assert result.exit_code in (0, 2), result.exception
        (tmp_path / "out.pt").unlink(missing_ok=True)
    assert run("inspect", tmp_path / "odd.pt").exit_code in (0, 2)


def test_cycles_end(tmp_path):
    ring = []
    ring.append(ring)
    state = nested(foreign_state("AdamW", (10,)))
    torch.save({"ring": ring, "o": {"state": {0: state}, "param_groups": [{"params": [0]}]}},
               tmp_path / "ring.pt")  # fmt: skip
    assert len(inspected(tmp_path / "ring.pt")) == 1
