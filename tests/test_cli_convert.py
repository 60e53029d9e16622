"""`lowbit-optim convert`: what it keeps, above all of what `get_state_dict` has rebuilt.

The state dicts of that function of torch.distributed call parameters by their names in the model,
and have no header.
"""

import re
from argparse import Namespace
from pathlib import Path, PureWindowsPath

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

import lowbit_optim
from test_cli_checkpoints import assert_equal, converted, inspected, parameters, saved, stepped
from test_cli_estimate import refused, run

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch 2.7


def rebuilt(path, cls=lowbit_optim.LAMB8bit, **options):
    """A model, an optimizer after two steps, and its rebuilt state dict, which is in a file."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Linear(300, 8))
    optimizer = cls(model.parameters(), lr=1e-3, **options)
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optimizer": state}, path)
    return model, optimizer, state


def test_inspect_knows_a_state_without_its_header(tmp_path):
    rebuilt(tmp_path / "run.pt")
    (state,) = inspected(tmp_path / "run.pt")
    assert state["summary"].startswith(
        "lowbit_optim (the optimizer is not named in it), 4 parameters with state in 1 group, after"
    )


def test_convert_asks_which_optimizer_it_is(tmp_path):
    rebuilt(tmp_path / "run.pt")
    said = refused("convert", tmp_path / "run.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert "is of lowbit_optim and does not say of which optimizer" in said


@pytest.mark.parametrize("key", ["caution", "decoupled_decay"])
def test_an_optimizer_with_more_settings_than_torch_s_is_not_taken_for_it(tmp_path, key):
    """timm's SGDW and RMSpropTF have all that torch.optim's have, and mean something else."""
    optimizer = stepped(torch.optim.SGD, "SGD")
    optimizer.add_param_group({"params": parameters(shapes=[(3,)]), key: True})
    run = saved(tmp_path / "run.pt", optimizer)
    said = refused("convert", run, tmp_path / "out.pt", "--to", "lowbit")
    assert "is of a library with torch.optim's layout and does not say of which optimizer" in said
    (state,) = inspected(run)
    assert state["summary"].startswith("a library with torch.optim's layout (the optimizer is not")


@pytest.mark.parametrize("key", ["initial_lr", "min_lr", "max_momentum", "swa_lr", "name"])
def test_what_schedulers_add_to_a_group_is_no_other_optimizer(tmp_path, key):
    optimizer = stepped(torch.optim.SGD, "SGD")
    optimizer.param_groups[0][key] = 0.5
    (state,) = inspected(saved(tmp_path / "run.pt", optimizer))
    assert state["summary"].startswith("torch.optim SGD")


def test_a_class_is_named_in_any_case(tmp_path):
    rebuilt(tmp_path / "run.pt")
    converted(tmp_path / "run.pt", tmp_path / "out.pt", "--to", "lowbit", "-o", "lamb8BIT")


def test_parameters_keep_their_names_and_moments_their_format(tmp_path):
    _, _, state = rebuilt(tmp_path / "run.pt", state_format="ratio8")
    same = converted(
        tmp_path / "run.pt", tmp_path / "same.pt", "--to", "lowbit", "--optimizer", "LAMB"
    )
    assert same.pop("lowbit_optim")["optimizer"] == "LAMB"
    assert_equal(same, dict(state))


@pytest.mark.parametrize("to", ["torch", "bitsandbytes", "lowbit"])
def test_what_is_beside_state_and_groups_stays(tmp_path, to):
    state = stepped(lowbit_optim.AdamW8bit, "AdamW").state_dict()
    torch.save({"optimizer": {**state, "scale": 2.0}}, tmp_path / "run.pt")
    new = converted(tmp_path / "run.pt", tmp_path / "new.pt", "--to", to)
    assert new["scale"] == 2
    assert ("lowbit_optim" in new) == (to == "lowbit")


@pytest.mark.parametrize("to", ["torch", "bitsandbytes", "lowbit"])
def test_what_a_user_has_put_into_states_stays(tmp_path, to):
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW")
    optimizer.state[optimizer.param_groups[0]["params"][0]]["mine"] = torch.ones(2)
    optimizer.state["epoch"] = 3
    source = saved(tmp_path / "run.pt", optimizer)
    state = converted(source, tmp_path / "new.pt", "--to", to)["state"]
    assert torch.equal(state[0]["mine"], torch.ones(2))
    assert state["epoch"] == 3


def test_norms_of_percentile_clipping_are_said_to_be_lost(tmp_path):
    """A state of bitsandbytes says no more of its clipping."""
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW", percentile_clipping=50)
    state = lowbit_optim.to_bitsandbytes_state_dict(optimizer)
    torch.save({"optimizer": state}, tmp_path / "run.pt")
    for to in ("torch", "bitsandbytes"):
        said = run("convert", tmp_path / "run.pt", tmp_path / to, "--to", to, "-o", "AdamW").stdout
        assert ("(gnorm_vec) are not in it" in said) == (to == "torch")


@pytest.mark.parametrize(
    ("to", "fresh"),
    [
        (("lowbit", "--format", "ratio4"), lowbit_optim.AdamW4bit),
        (("lowbit", "--format", "float32"), lowbit_optim.AdamW32bit),
        (("torch",), torch.optim.AdamW),
    ],
)
def test_what_is_converted_loads_by_names(tmp_path, to, fresh):
    model, optimizer, state = rebuilt(tmp_path / "run.pt", lowbit_optim.AdamW8bit)
    of = "--optimizer", "AdamW"
    new = converted(tmp_path / "run.pt", tmp_path / "new.pt", "--to", *to, *of)
    assert list(new["state"]) == list(state["state"])
    theirs = fresh(model.parameters())
    set_optimizer_state_dict(model, theirs, new)
    if fresh is not torch.optim.AdamW:
        here = fresh(model.parameters())
        here.load_state_dict(optimizer.state_dict())
        assert_equal(theirs.state_dict()["state"], here.state_dict()["state"])
    else:
        here = lowbit_optim.to_torch_state_dict(optimizer)
        assert_equal(theirs.state_dict()["state"], here["state"])


def test_another_format_changes_nothing_else(tmp_path):
    params = parameters(torch.bfloat16)
    kept = {"min_8bit_size": 1, "master_weight_bits": 24}
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW", params, **kept)
    run = saved(tmp_path / "run.pt", optimizer)
    new = converted(run, tmp_path / "new.pt", "--to", "lowbit", "--format", "ratio4")
    assert kept.items() <= new["param_groups"][0].items()
    for key, now in new["state"].items():
        assert torch.equal(now["master_residual"], optimizer.state[params[key]]["master_residual"])
        assert now["exp_avg_and_sq"].dtype == torch.uint8


def test_a_residual_may_be_all_that_is_kept(tmp_path):
    params = parameters(torch.bfloat16)
    optimizer = stepped(lowbit_optim.SGD, "", params, master_weight_bits=24)
    assert optimizer.state[params[0]].keys() == {"step", "master_residual"}
    same = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "same.pt", "--to", "lowbit")
    assert_equal(same, optimizer.state_dict())


@pytest.mark.parametrize("family", ["AdamW", "LARS"])
def test_an_overridden_parameter_keeps_its_format(tmp_path, family, manager):
    params = parameters()
    manager.override_config(params[0], "optim_bits", 32)
    optimizer = stepped(getattr(lowbit_optim, f"{family}8bit"), family, params)
    same = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "same.pt", "--to", "lowbit")
    assert_equal(same, optimizer.state_dict())


@pytest.mark.parametrize("overridden", [False, True])
def test_a_small_parameter_keeps_its_variance(tmp_path, overridden, manager):
    """Which is a mean square in 32 bits that an override has asked for."""
    params = parameters()
    if overridden:
        manager.override_config(params[2], "optim_bits", 32)
    optimizer = stepped(lowbit_optim.RMSprop8bit, "RMSprop", params, centered=True)
    assert ("square_avg" in optimizer.state[params[2]]) == overridden
    same = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "same.pt", "--to", "lowbit")
    assert_equal(same, optimizer.state_dict())


@pytest.mark.parametrize("family", ["ScheduleFreeAdamW", "Cain"])
def test_what_is_beside_codes_stays_in_fp64(tmp_path, family):
    optimizer = stepped(getattr(lowbit_optim, f"{family}8bit"), family, parameters(torch.float64))
    same = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "same.pt", "--to", "lowbit")
    assert_equal(same, optimizer.state_dict())


def test_embeddings_in_32_bits_come_to_other_libraries_as_they_are(tmp_path, manager):
    params = parameters()
    manager.override_config(params[0], "optim_bits", 32)
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW", params)
    run = saved(tmp_path / "run.pt", optimizer)
    theirs = converted(run, tmp_path / "theirs.pt", "--to", "bitsandbytes")
    assert_equal(theirs["state"][0]["state1"], optimizer.state[params[0]]["exp_avg"])
    ours = "--to", "lowbit", "--optimizer", "AdamW"
    back = converted(tmp_path / "theirs.pt", tmp_path / "back.pt", *ours)
    assert_equal(back["state"][0], optimizer.state_dict()["state"][0])
    plain = converted(run, tmp_path / "torch.pt", "--to", "torch")
    assert_equal(plain, lowbit_optim.to_torch_state_dict(optimizer))


def test_a_sum_whose_shape_nobody_knows_is_refused(tmp_path):
    """torch.optim.Adagrad has a state of every parameter, and would load any shape of it."""
    params = parameters()
    params[2].grad = None
    run = saved(tmp_path / "run.pt", stepped(lowbit_optim.Adagrad8bit, "Adagrad", params))
    said = refused("convert", run, tmp_path / "new.pt", "--to", "torch")
    assert "has parameters without state, which torch.optim.Adagrad has from the start" in said


@pytest.mark.parametrize(
    ("cls", "options", "moments"),
    [
        (lowbit_optim.SGD8bit, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (lowbit_optim.SGD, {"momentum": 0}, "none"),
        (lowbit_optim.RMSprop, {"centered": True}, "variance, grad_avg"),
    ],
)
def test_a_format_is_refused_by_the_moments_that_there_are(tmp_path, cls, options, moments):
    run = saved(tmp_path / "run.pt", stepped(cls, "", **options))
    of = "--optimizer", cls.__name__
    said = refused("convert", run, tmp_path / "new.pt", "--to", "lowbit", "--format", "ratio4", *of)
    assert said.endswith(f"its moments are {moments}")


def test_options_and_paths_beside_a_state_are_kept(tmp_path):
    """A checkpoint of timm has the options of its run; code is refused where they hold it, too."""
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW")
    args = Namespace(lr=0.1, data=Path("images"), log=PureWindowsPath("log"))
    torch.save({"optimizer": optimizer.state_dict(), "args": args}, tmp_path / "run.pt")
    assert run("convert", tmp_path / "run.pt", tmp_path / "new.pt", "--to", "torch").exit_code == 0
    new = torch.load(tmp_path / "new.pt", weights_only=False)
    assert_equal(new["optimizer"], lowbit_optim.to_torch_state_dict(optimizer))
    assert new["args"] == args
    args.code = open
    torch.save({"optimizer": optimizer.state_dict(), "args": args}, tmp_path / "run.pt")
    said = refused("inspect", tmp_path / "run.pt")
    assert f"asks for {open.__module__}.open; it is not executed" in said


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_a_folder_of_the_trainer_or_accelerate_is_its_optimizer_s(tmp_path, name):
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW")
    (tmp_path / "checkpoint-5").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-5" / name)
    (state,) = inspected(tmp_path / "checkpoint-5")
    assert state["summary"].startswith("lowbit_optim AdamW, ")
    assert f"{name}, the file itself: " in run("inspect", tmp_path / "checkpoint-5").stdout
    said = run("convert", tmp_path / "checkpoint-5", tmp_path / "new.pt", "--to", "torch")
    assert said.exit_code == 0
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    assert_equal(new, lowbit_optim.to_torch_state_dict(optimizer))


def test_a_state_that_a_file_holds_twice_is_converted_at_both_places(tmp_path):
    optimizer = stepped(lowbit_optim.AdamW8bit, "AdamW")
    state = optimizer.state_dict()
    beside = {"states": [state, {}], "pairs": [("main", state)], "numbers": (1, 2)}
    beside["again"] = beside  # as no framework has it
    torch.save({"optimizer": state, "beside": beside}, tmp_path / "run.pt")
    new = converted(tmp_path / "run.pt", tmp_path / "new.pt", "--to", "torch")
    assert_equal(new, lowbit_optim.to_torch_state_dict(optimizer))
    beside = torch.load(tmp_path / "new.pt", weights_only=True)["beside"]
    assert beside["again"] is beside
    assert beside["numbers"] == (1, 2)
    first, second = beside["states"][0], beside["pairs"][0][1]
    assert first is second
    assert_equal(first, new)


def test_a_scale_a_block_becomes_one_a_tensor(tmp_path):
    """The two layouts of 8-bit LAMB, of codes that are bitsandbytes' already."""
    optimizer = stepped(lowbit_optim.LAMB8bit, "LAMB")
    state = lowbit_optim.to_bitsandbytes_state_dict(optimizer, "nested")
    torch.save({"optimizer": state}, tmp_path / "nested.pt")
    whole = "--to", "bitsandbytes", "--layout", "flat", "-o", "LAMB"
    new = converted(tmp_path / "nested.pt", tmp_path / "flat.pt", *whole)["state"]
    scales = [one[f"max{i}"] for one in new.values() if "qmap1" in one for i in (1, 2)]
    assert scales
    assert all(x.shape == (1,) for x in scales)


@pytest.mark.parametrize("format", ["ratio8", "ratio4"])
def test_a_format_that_bitsandbytes_lacks_is_refused(tmp_path, format):
    run = saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW8bit, "AdamW"))
    out = tmp_path / "out.pt"
    said = refused("convert", run, out, "--to", "bitsandbytes", "--format", format)
    assert "bitsandbytes has float32 and dynamic8" in said
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:.*(single process|no_dist)")
def test_a_dcp_folder_is_made_a_file_first(tmp_path):
    _, _, state = rebuilt(tmp_path / "run.pt")
    folder, file, new = (tmp_path / name for name in ("folder", "file.pt", "new.pt"))
    checkpoint.save({"optimizer": state}, checkpoint_id=folder)
    assert "dcp_to_torch" in refused("convert", folder, new, "--to", "lowbit")
    dcp_to_torch_save(folder, file)
    same = converted(file, new, "--to", "lowbit", "--optimizer", "LAMB")
    assert_equal(same["state"], dict(state["state"]))


@pytest.mark.filterwarnings("ignore:.*(single process|no_dist)")
@pytest.mark.parametrize("cls", [lowbit_optim.AdamW8bit, torch.optim.AdamW])
def test_numbers_of_parameters_that_dcp_made_strings_of_are_numbers_again(tmp_path, cls):
    optimizer = stepped(cls, "AdamW")
    optimizer.state["epoch"] = 3  # which is of no parameter
    folder, file = tmp_path / "folder", tmp_path / "file.pt"
    checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    dcp_to_torch_save(folder, file)
    assert "0" in torch.load(file, weights_only=True)["optimizer"]["state"]
    new = converted(file, tmp_path / "new.pt", "--to", "lowbit")
    plain = saved(tmp_path / "plain.pt", optimizer)
    same = converted(plain, tmp_path / "same.pt", "--to", "lowbit")
    assert_equal(new, same)


def test_an_encrypted_file_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    torch.save({"state": {}, "param_groups": []}, path)
    data = bytearray(path.read_bytes())
    for start, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # of each entry, and in the directory
        for found in re.finditer(re.escape(start), bytes(data)):
            data[found.start() + flags] |= 1
    path.write_bytes(data)
    for arguments in (("inspect", path), ("convert", path, tmp_path / "out", "--to", "torch")):
        assert "has encrypted parts" in refused(*arguments)


@pytest.mark.parametrize("protocol", [0, 4, 5])
def test_a_pickle_of_another_protocol_is_refused(tmp_path, protocol):
    """torch's restricted reader knows the instructions of protocol 2."""
    state = stepped(lowbit_optim.AdamW8bit, "AdamW").state_dict()
    path = tmp_path / "run.pt"
    torch.save({"optimizer": state}, path, pickle_protocol=protocol)
    for arguments in (("inspect", path), ("convert", path, tmp_path / "out", "--to", "torch")):
        assert "pickle_protocol that is not torch.save's own, 2" in refused(*arguments)
