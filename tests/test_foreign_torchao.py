"""State dicts of torchao's low-bit Adam are recognised and converted, without the library.

The file has the tensors of its subclasses as dicts; `Stored` stands in for the subclasses.
"""

import copy

import pytest
import torch

import lowbit_optim
from foreign_files import FOLDER
from foreign_states import load, numbers_of, params_of, read
from lowbit_optim import create_dynamic_map
from lowbit_optim._foreign.load import codes_of
from protocol import identical, snapshot

SHAPES = [(16, 256), (5,)]
(FILE,) = FOLDER.glob("torchao-*.pt")
NAMES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


class Stored(torch.Tensor):
    """A tensor that only has attributes, as torchao's have."""

    @staticmethod
    def __new__(cls, shape, **attributes):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="cpu")
        vars(made).update(attributes)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def saved_by_torchao(name):
    """The file's state dict with stand-ins, and the first rows of a moment as torchao reads it."""
    entry = torch.load(FILE, weights_only=True)[name]
    saved = entry["state_dict"]
    for index, shape in enumerate(SHAPES):
        state = saved["state"][index]
        for key, value in state.items():
            if isinstance(value, dict):
                codes = value["codes"]
                if name.endswith("Fp8"):
                    value["codes"] = codes.view(torch.float8_e4m3fn)
                state[key] = Stored(shape, **value)
    return saved, entry["exp_avg"]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_torchao_is_read(name, bits):
    params = params_of(SHAPES)
    saved, rows = saved_by_torchao(name)
    theirs = saved["state"][0]["exp_avg"]
    optimizer = getattr(lowbit_optim, f"AdamW{bits}bit")(params, lr=7.0, min_8bit_size=1)
    load(optimizer, saved, "torchao")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    got = read(optimizer, params[0])["exp_avg"][: len(rows)]
    if bits == 32 or name == "AdamW8bit":
        assert torch.equal(got, rows)
    else:
        assert (got - rows).abs().max() <= 0.02 * rows.abs().max()
    if bits == 8 and name == "AdamW8bit":
        state = optimizer.state[params[0]]
        assert torch.equal(state["exp_avg"], theirs.codes)
        assert torch.equal(state["exp_avg_absmax"].flatten(), theirs.scale)
    assert int(optimizer.state[params[1]]["step"]) == 3


@pytest.mark.parametrize(("shape", "block"), [((4, 300), 100), ((64,), 32)])
def test_other_blocks_and_books_are_read_as_numbers(shape, block):
    (p,) = params_of([shape])
    codes = torch.randint(0, 256, p.shape, dtype=torch.uint8)
    book, scale = create_dynamic_map(), torch.rand(p.numel() // block)
    moments = {
        "exp_avg": Stored(p.shape, codes=codes, scale=scale, qmap=book),
        "exp_avg_sq": Stored(p.shape, codes=codes, scale=scale, qmap=book.abs().sort().values),
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    saved = {
        "state": {0: {"step": torch.tensor(3.0), **moments}},
        "param_groups": [{**group, "params": [0]}],
    }
    got = read(load(lowbit_optim.Adam32bit([p]), saved, "torchao"), p)
    assert torch.equal(got["exp_avg"], numbers_of(codes, scale, book, block))
    want = numbers_of(codes, scale, book.abs().sort().values, block)
    assert torch.equal(got["exp_avg_sq"], want)


def cut(attribute, change):
    def apply(stored):
        vars(stored)[attribute] = change(getattr(stored, attribute))

    return apply


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("AdamW8bit", cut("scale", lambda x: -x), "'exp_avg.scale' has scales that are negative"),
        ("AdamW8bit", cut("scale", lambda x: x * torch.inf), "'exp_avg.scale' .* not finite"),
        ("AdamW8bit", cut("scale", lambda x: x[:7]), r"'exp_avg.scale' has shape \(7,\).* 4096"),
        ("AdamW8bit", cut("scale", lambda x: x[:0]), r"'exp_avg.scale' has shape \(0,\)"),
        ("AdamW8bit", cut("scale", lambda x: x[None]), r"'exp_avg.scale' has shape \(1, 16\)"),
        ("AdamW8bit", cut("scale", lambda x: x.to("meta")), "'exp_avg.scale' is .* meta device"),
        ("AdamW8bit", cut("codes", lambda x: x[:3]), r"'exp_avg.codes' has shape \(3, 256\)"),
        ("AdamW8bit", cut("codes", lambda x: x.short()), "'exp_avg.codes' must be .*uint8"),
        ("AdamW8bit", cut("qmap", lambda x: x[:9]), "'exp_avg.qmap' must be a tensor of 256"),
        ("AdamW8bit", cut("qmap", lambda x: x.flip(0)), "'exp_avg.qmap' .* ascending order"),
        ("AdamW4bit", cut("codes", lambda x: x[:5]), r"'exp_avg.codes' has shape \(5,\)"),
        ("AdamW4bit", cut("qmap", lambda x: x * torch.nan), "'exp_avg.qmap' must be finite"),
        ("AdamWFp8", cut("codes", lambda x: x.float()), "'exp_avg.codes' must be .*float8"),
        (
            "AdamWFp8",
            cut("codes", lambda x: torch.full_like(x.float(), torch.nan).to(x.dtype)),
            "'exp_avg.codes' has elements that are not finite",
        ),
    ],
)
def test_what_is_bad_is_refused(name, change, match):
    params = params_of(SHAPES)
    saved, _ = saved_by_torchao(name)
    change(saved["state"][0]["exp_avg"])
    optimizer = lowbit_optim.AdamW8bit(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(snapshot(optimizer))
    with pytest.raises(ValueError, match=rf"torchao: parameter 0 of shape \(16, 256\): {match}"):
        optimizer.load_state_dict(saved)
    assert identical(snapshot(optimizer), before)


def test_two_codes_a_byte_need_an_even_count():
    saved, _ = saved_by_torchao("AdamW4bit")
    book = saved["state"][0]["exp_avg"].qmap
    codes, scale = torch.zeros(2, dtype=torch.uint8), torch.ones(1)
    saved["state"][1]["exp_avg"] = Stored((5,), codes=codes, scale=scale, qmap=book)
    with pytest.raises(ValueError, match=r"'exp_avg.codes' has shape \(2,\), \(5,\) is needed"):
        lowbit_optim.AdamW8bit(params_of(SHAPES)).load_state_dict(saved)


def test_another_optimizer_or_parameter_is_refused():
    saved, _ = saved_by_torchao("AdamW8bit")
    with pytest.raises(ValueError, match="it has no Lion, only Adam, AdamW"):
        lowbit_optim.Lion8bit(params_of(SHAPES)).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'exp_avg' has shape \(16, 256\), its parameter"):
        lowbit_optim.AdamW8bit(params_of([(256, 16), (5,)])).load_state_dict(saved)


def test_a_largest_mean_square_is_read_too():
    """Of another book than ours; a parameter counts as read bit for bit if all its moments are."""
    params = params_of(SHAPES)
    saved, rows = saved_by_torchao("AdamW8bit")
    stored = saved["state"][0]["exp_avg_sq"]
    linear = torch.linspace(0.0, 1.0, 256)
    largest = Stored(SHAPES[0], codes=stored.codes, scale=stored.scale, qmap=linear)
    saved["state"][0]["max_exp_avg_sq"] = largest
    saved["state"][1] = {}
    saved["param_groups"][0]["amsgrad"] = True
    optimizer = lowbit_optim.AdamW32bit(params, amsgrad=True)
    load(optimizer, saved, "torchao: the moments of 0 of 1 parameters are read bit for bit")
    got = read(optimizer, params[0])
    assert torch.equal(got["exp_avg"][: len(rows)], rows)
    want = numbers_of(stored.codes, stored.scale, linear, 256)
    assert torch.equal(got["max_exp_avg_sq"], want)
    assert codes_of(optimizer, saved)[0].keys() == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_codes_are_under_the_numbers_that_the_optimizer_saves():
    """Whatever they were saved under, beside what else a user keeps there."""
    saved, _ = saved_by_torchao("AdamW8bit")
    saved["state"] = {"note": "of a user", 9: saved["state"][1], 7: saved["state"][0]}
    saved["param_groups"][0]["params"] = [7, 9]
    optimizer = lowbit_optim.AdamW8bit(params_of(SHAPES))
    load(optimizer, saved, "torchao")
    codes = codes_of(optimizer, saved)
    assert codes[0].keys() == {"exp_avg", "exp_avg_sq"}
    assert codes.keys() <= {0, 1}


@pytest.mark.filterwarnings("ignore:.*converts a state_dict of torchao")
def test_a_learning_rate_of_two_numbers_is_refused():
    saved, _ = saved_by_torchao("AdamW8bit")
    saved["param_groups"][0]["lr"] = torch.ones(2)
    with pytest.raises(ValueError, match="lr"):
        lowbit_optim.AdamW8bit(params_of(SHAPES)).load_state_dict(saved)


def test_a_state_dict_without_groups_is_refused():
    saved, _ = saved_by_torchao("AdamW8bit")
    del saved["param_groups"]
    with pytest.raises(ValueError, match="param_groups"):
        lowbit_optim.AdamW8bit(params_of(SHAPES)).load_state_dict(saved)
