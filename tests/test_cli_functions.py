"""`lowbit-optim estimate` of a user's function: the model that it builds, and a step of it."""

import textwrap

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowbit_optim_cli import meta, optimizers
from lowbit_optim_cli.footprint import Weight, footprint
from test_cli_estimate import estimated, refused


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user's, and gives its name."""
    count = iter(range(100))
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"users_model_{next(count)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text("from torch import nn\nimport torch\n" + text)
        return name

    return write


def test_a_function_builds_a_model_on_the_meta_device(module):
    name = module(
        textwrap.dedent("""
        def build():
            model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50, bias=False))
            model[1].weight = model[0].weight
            model.register_buffer("table", torch.zeros(3))
            model.head = nn.Linear(64, 10**6)
            model.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
            return model
        """)
    )
    found = estimated(f"{name}:build", "--optimizer", "AdamW8bit")
    assert found["parameters"] == 50 * 64 + 65 * 10**6 + 7
    assert found["notes"] == [
        "1 weight shared by two modules, counted once", "12 bytes of buffers come on top",
    ]  # fmt: skip
    row = found["rows"][0]
    assert row["weights"] - row["gradients"] == 7 * 4
    weights = (Weight("", (50, 64)), Weight("", (10**6, 64)), Weight("", (10**6,)))
    assert row["state"] == footprint(optimizers.own("AdamW", "dynamic8", None), weights).state


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(): return 3", "must return a torch.nn.Module; it returned a int"),
        ("build = 3", "must be a function that returns a model; it is a int"),
        ("def build(): raise KeyError('x')", "raised KeyError: 'x'"),
        ("raise OSError('no')", "raised OSError: no"),
        (
            "raise ValueError('for a field:\\n  it is wide\\n more')",
            "raised ValueError: for a field: it is wide",
        ),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("def __getattr__(name): raise ImportError('needs x')", "raised ImportError: needs x"),
        ("def build(a): ...", "raised TypeError"),
        ("", "has no 'build'"),
        ("def build(): return nn.Linear(2, 2, dtype=torch.complex64)", "torch.complex64"),
        ("def build(): return nn.LazyLinear(2)", "has 'weight', whose shape a first forward"),
        (
            "def build(): return nn.ModuleList(nn.Linear(1, 1) for _ in range(10**9))",
            "more than 1,000 parameters",
        ),
        (
            "def build(): return nn.ModuleList(nn.Linear(9, 9, device='cpu') for _ in range(99))",
            "more than 5,000 bytes of parameters on cpu",
        ),
    ],
)
def test_functions_that_build_no_model_are_refused(module, text, said, monkeypatch):
    monkeypatch.setattr(meta, "MOST_PARAMETERS", 1000)
    monkeypatch.setattr(meta, "MOST_BYTES", 5000)
    assert said in refused("estimate", f"{module(text)}:build")


def test_a_module_that_is_missing_is_refused():
    assert "ModuleNotFoundError" in refused("estimate", "no_such_module_anywhere:build")


def test_a_fake_step_counts_activations(module):
    name = module("def build(): return nn.Sequential(nn.Linear(64, 1000), nn.ReLU())")
    found = estimated(f"{name}:build", "--measure", "32x64", "-o", "SGD")
    said = found["activations"][1]
    gigabytes = float(said.partition("at their peak: ")[2].partition(" GB")[0])
    assert 32 * 1000 * 4 <= gigabytes * 1e9 <= 10 * 32 * 1000 * 4 + 1e6
    assert "does not work for" in refused("estimate", f"{name}:build", "--measure", "32x65")
    assert "needs a model that can be built" in refused("estimate", "4x4", "--measure", "2x4")
    for shape in ("0x8", "2", ""):
        said = refused("estimate", "4x4", "--measure", shape)
        assert "must be the shape of a batch" in said


@pytest.mark.parametrize("batch", ["8by4", "0x4", "4", "9" * 5000 + "x1"])
def test_a_batch_that_is_none_is_told_before_a_model_is_built(batch):
    said = refused("estimate", "no_such_module:build", "--measure", batch)
    assert "--measure must be the shape of a batch" in said


def test_what_a_function_prints_is_no_result(module):
    text = """
    print("imported")
    def build():
        print("built")
        return nn.Linear(2, 2)
    """
    found = estimated(f"{module(textwrap.dedent(text))}:build", "--measure", "1x2")
    assert found["parameters"] == 6


def peak(name, *batch):
    (said,) = estimated(name, "--measure", *batch, "-o", "SGD")["activations"][1:]
    return float(said.partition("at their peak: ")[2].partition(" GB")[0])


def test_a_fake_step_of_frozen_layers_holds_less(module):
    text = """
    def build(frozen=()):
        layers = [layer for _ in range(4) for layer in (nn.Linear(1000, 1000), nn.GELU())]
        model = nn.Sequential(*layers)
        for i in frozen:
            model[i].requires_grad_(False)
        return model

    def last(): return build((0, 2, 4))
    def first(): return build((2, 4, 6))
    """
    name = module(textwrap.dedent(text))
    batch = 5000  # of 20 MB in each layer
    whole, first, last = (
        peak(f"{name}:{one}", f"{batch}x1000") for one in ("build", "first", "last")
    )
    assert last + 0.04 <= first
    assert first + 0.04 <= whole
    assert last >= 3 * 0.02


QUANTIZED = """
class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.zeros(4000, 2000, dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4000, 1, dtype=torch.bfloat16), requires_grad=False)
        self.adapter = nn.Linear(2000, 4000)
    def forward(self, x):
        return x @ (self.codes * self.scale).float().T + self.adapter(x)
def build(): return Quantized()
"""


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_quantized_model_has_frozen_weights_of_codes(module, dtype):
    """They have their own width whatever the others are cast to; one element may be two weights."""
    name, wide = f"{module(QUANTIZED)}:build", {None: 4, "bf16": 2}[dtype]
    found = estimated(name, *(("--dtype", dtype) if dtype else ()))
    row, adapter = found["rows"][0], 4000 * 2000 + 4000
    assert row["weights"] == 4000 * 2000 + 4000 * 2 + adapter * wide
    assert row["gradients"] == adapter * wide
    (note,) = found["notes"]
    assert note == "1 frozen weight of codes, of which each element is counted as one"
    widths = {row["master_weight_bits"] for row in found["rows"]}
    assert widths == ({None, 16, 24, 32} if dtype else {None}), "which are of trained weights"


def test_weights_that_bitsandbytes_will_code_are_said_to_be_counted_in_full(module):
    text = """
    class Params4bit(nn.Parameter):
        __module__ = "bitsandbytes.nn.modules"
    def build():
        model = nn.Linear(64, 64)
        model.base = Params4bit(torch.zeros(64, 64), requires_grad=False)
        return model
    """
    (note,) = estimated(f"{module(textwrap.dedent(text))}:build")["notes"]
    assert note == "1 weight counted in full: bitsandbytes codes them on a device only"


def test_trained_weights_of_fp8_need_a_dtype(module):
    text = "def build(): return nn.Linear(4, 4, dtype=torch.float8_e4m3fn)"
    name = f"{module(text)}:build"
    assert "of torch.float8_e4m3fn, which is not trained; give the" in refused("estimate", name)
    assert estimated(name, "--dtype", "bf16")["rows"][0]["weights"] == 20 * 2


def test_a_fake_step_of_a_quantized_model_counts_its_activations(module):
    wide = 4000 * 2000 * (2 + 4)  # what the codes are multiplied out to
    assert wide / 1e9 <= peak(f"{module(QUANTIZED)}:build", "8x2000") <= 2 * wide / 1e9


def fake_tensors_can_be_cast():
    with FakeTensorMode():
        try:
            torch.nn.Linear(4, 4).bfloat16()
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize(
    ("forward", "cast", "said"),
    [
        ("x", ".bfloat16()", "casts the model after it is made"),
        ("x * x.sum().item()", "", "asks for a number in a tensor"),
    ],
)
def test_what_fake_tensors_cannot_do_is_said(module, forward, cast, said):
    if cast and fake_tensors_can_be_cast():
        pytest.skip("this version of torch casts fake tensors")
    text = f"""
class Model(nn.Linear):
    def forward(self, x): return {forward}
def build(): return Model(4, 4){cast}
"""
    assert said in refused("estimate", f"{module(text)}:build", "--measure", "2x4")
