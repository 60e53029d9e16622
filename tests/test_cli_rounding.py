"""`lowbit-optim convert`: moments of another library are read as they are, and coded once."""

import pytest
import torch

import lowbit_optim
from foreign_states import MOMENTS, TORN, WHOLE, flat, foreign
from test_cli_checkpoints import assert_equal, converted, saved, stepped

SHAPES = WHOLE + TORN  # blocks as here, and others
TORCH = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"]


def file_of_bitsandbytes(path, family, shapes=SHAPES, **options):
    state = foreign(family, shapes, **options)
    torch.save({"optimizer": state}, path)
    return state


@pytest.mark.filterwarnings("ignore:.* converts a state_dict of bitsandbytes")
@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("family", TORCH)
def test_torch_is_given_the_numbers_that_bitsandbytes_has_coded(tmp_path, family, layout):
    state = file_of_bitsandbytes(tmp_path / "theirs.pt", family, layout=layout)
    of = "--to", "torch", "--optimizer", family
    new = converted(tmp_path / "theirs.pt", tmp_path / "new.pt", *of)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    needed = {"lr": 1.0, "momentum": 0.9} if family == "SGD" else {}
    exact = getattr(lowbit_optim, f"{family}32bit")(params, **needed)
    exact.load_state_dict(state)
    assert_equal(new, lowbit_optim.to_torch_state_dict(exact))


@pytest.mark.parametrize("layouts", [("flat", "nested"), ("nested", "flat"), ("flat", "flat")])
@pytest.mark.parametrize("family", MOMENTS)
def test_bitsandbytes_keeps_its_codes_in_another_layout(tmp_path, family, layouts):
    source, target = layouts
    whole = family in ("LAMB", "LARS") and target == "flat"
    state = file_of_bitsandbytes(tmp_path / "a.pt", family, layout=source, whole=whole)
    of = "--to", "bitsandbytes", "--layout", target, "--optimizer", family
    new = converted(tmp_path / "a.pt", tmp_path / "b.pt", *of)
    for index, old in state["state"].items():
        now = flat(new["state"][index])
        kept = [key for key in flat(old) if not key.startswith("new_max")]
        assert_equal({key: now[key] for key in kept}, {key: flat(old)[key] for key in kept})


def coded_once(numbers, signed=True):
    codes, scales = lowbit_optim.quantize_blockwise(numbers.flatten(), signed=signed)
    return codes.reshape(numbers.shape), scales.flatten()


@pytest.mark.parametrize("library", [torch.optim, lowbit_optim])
@pytest.mark.parametrize("family", ["AdamW", "RMSprop"])
def test_numbers_are_coded_once_for_bitsandbytes(tmp_path, family, library):
    optimizer = stepped(getattr(library, family), family)
    of = "--to", "bitsandbytes", "--format", "dynamic8"
    new = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "new.pt", *of)
    for i, (key,) in enumerate(MOMENTS[family], 1):
        numbers = optimizer.state[optimizer.param_groups[0]["params"][3]][key]
        codes, scales = coded_once(numbers, signed=i == 1)
        assert torch.equal(new["state"][3][f"state{i}"], codes)
        assert torch.equal(new["state"][3][f"absmax{i}"], scales)


def test_an_element_whose_square_is_infinite_is_coded_as_zero(tmp_path):
    """Both of its moments, as in a step."""
    optimizer = stepped(torch.optim.AdamW, "AdamW")
    optimizer.state[optimizer.param_groups[0]["params"][3]]["exp_avg_sq"].view(-1)[1] = torch.inf
    of = "--to", "bitsandbytes", "--format", "dynamic8"
    new = converted(saved(tmp_path / "run.pt", optimizer), tmp_path / "new.pt", *of)["state"][3]
    coded = [new[f"qmap{i}"][new[f"state{i}"].view(-1)[:2].long()] for i in (1, 2)]
    assert [float(x[1]) for x in coded] == [0, 0]
    assert all(float(x[0]) for x in coded)


def test_an_empty_tensor_has_a_scale_a_tensor_too(tmp_path):
    file_of_bitsandbytes(tmp_path / "a.pt", "LARS", [(0,)])
    of = "--to", "bitsandbytes", "--layout", "flat", "--optimizer", "LARS"
    new = converted(tmp_path / "a.pt", tmp_path / "b.pt", *of)["state"][0]
    assert new["max1"].shape == new["new_max1"].shape == (1,)


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_one_scale_a_tensor_is_coded_once_into_blocks_and_back(tmp_path, layout):
    """8-bit LAMB and LARS of bitsandbytes before and after 0.50."""
    state = file_of_bitsandbytes(tmp_path / "a.pt", "LARS", [(4, 300)], whole=layout == "nested")
    of = "--to", "bitsandbytes", "--layout", layout, "--optimizer", "LARS"
    new = flat(converted(tmp_path / "a.pt", tmp_path / "b.pt", *of)["state"][0])
    old = state["state"][0]
    name, blocks = ("max1", 1200) if layout == "nested" else ("absmax1", 256)
    scales = old[name].repeat_interleave(blocks)[:1200].reshape(4, 300)
    numbers = old["qmap1"][old["state1"].long()] * scales
    name, blocks = ("max1", 1200) if layout == "flat" else ("absmax1", 256)
    scales = new[name].repeat_interleave(blocks)[:1200].reshape(4, 300)
    if layout == "nested":
        codes, want = coded_once(numbers)
        assert torch.equal(new["state1"], codes)
        assert torch.equal(new[name], want)
    distance = (new["qmap1"][new["state1"].long()] * scales - numbers).abs()
    nearest = (new["qmap1"][:, None] * scales.flatten() - numbers.flatten()).abs().amin(0)
    torch.testing.assert_close(distance.flatten(), nearest, rtol=0, atol=1e-6)
