"""timm's registry: our names, what timm passes, and what the families mean there."""

import contextlib
import importlib.util
import sys
import types

import pytest
import torch

import cases
import lowbit_optim
import lowbit_optim.timm

NAMES = [
    f"lowbit{family}{bits}"
    for family in (
        "adagrad", "adam", "adamw", "ademamix", "adopt", "eve", "lamb", "lans", "lars", "lion",
        "rmsprop", "sgd",
    )
    for bits in ("", "8bit", "32bit")
]  # fmt: skip
NAMES += [f"lowbit{family}4bit" for family in ("adam", "adamw", "eve", "lamb", "lans")]
FAMILIES = pytest.mark.parametrize(
    "family", ["adagrad", "adam", "adamw", "adopt", "lars", "lion", "rmsprop", "sgd"]
)


@contextlib.contextmanager
def hollow_timm():
    """`timm.optim`; where torchvision is missing, which the rest of timm requires, it alone."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("needs timm: pip install --no-deps timm")
    if importlib.util.find_spec("torchvision") is not None:
        yield importlib.import_module("timm.optim")
        return
    (folder,) = spec.submodule_search_locations
    try:
        for name in ("timm", "timm.layers", "timm.models"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = ["/".join([folder, *name.split(".")[1:]])]
        # All that timm.optim takes from the two.
        sys.modules["timm.layers"].use_reentrant_ckpt = lambda: False
        manipulate = importlib.import_module("timm.models._manipulate")
        sys.modules["timm.models"].group_parameters = manipulate.group_parameters
        yield importlib.import_module("timm.optim")
    finally:  # nobody else gets the empty shells
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def optim():
    with hollow_timm() as module:
        yield module


@pytest.fixture(autouse=True)
def registered(optim):
    assert lowbit_optim.timm.register() == sorted(NAMES)


class Model(torch.nn.Module):
    """Has what timm asks models for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(32, 144)
        self.norm = torch.nn.LayerNorm(144)
        self.head = torch.nn.Linear(144, 32)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)))

    def group_matcher(self, coarse=False):
        return {"stem": "^stem", "blocks": [("^norm", None), ("^head", (9,))]}


def train(model, optimizer, steps=3):
    for t in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("layer_decay", [None, 0.75])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_is_created_by_name(optim, name, layer_decay):
    model = Model()
    optimizer = optim.create_optimizer_v2(
        model, opt=name, lr=1e-3, weight_decay=0.05, layer_decay=layer_decay
    )
    assert type(optimizer).__name__.lower() == name.removeprefix("lowbit")
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.05}
    assert all(x.isfinite().all() for x in train(model, optimizer))
    info = optim.get_optimizer_info(name)
    assert ("momentum" in optimizer.defaults) == info.has_momentum
    assert optimizer.defaults.get("momentum", 0.9) == 0.9
    assert len(optimizer.defaults.get("betas", (0, 0))) == info.num_betas


@FAMILIES
def test_a_family_means_what_it_means_in_timm(optim, family):
    ours, theirs = Model(), Model()
    options = {"lr": 0.1 if family == "lars" else 1e-3, "weight_decay": 0.05}
    got = train(ours, optim.create_optimizer_v2(ours, opt=f"lowbit{family}32bit", **options))
    want = train(theirs, optim.create_optimizer_v2(theirs, opt=family, **options))
    for start, p, q in zip(Model().parameters(), got, want, strict=True):
        assert cases.distance(p - start, q - start) < 1e-4


@FAMILIES
def test_without_a_learning_rate_it_is_timms(optim, family):
    made = (optim.create_optimizer_v2(Model(), opt=name) for name in (f"lowbit{family}", family))
    ours, theirs = (one.defaults["lr"] for one in made)
    assert ours == theirs


def test_a_wrapper_stands_before_the_name(optim):
    model = Model()
    optimizer = optim.create_optimizer_v2(model, opt="lookahead_lowbitadamw8bit", lr=1e-3)
    train(model, optimizer, 7)
    assert type(optimizer._base_optimizer) is lowbit_optim.AdamW8bit


def test_other_arguments_go_to_the_class(optim):
    model = Model()
    made = optim.create_optimizer_v2(
        model, opt="lowbitlars8bit", lr=1.0, trust_coefficient=0.02, percentile_clipping=50
    )
    assert made.defaults["trust_coefficient"] == 0.02
    assert made.defaults["percentile_clipping"] == 50
    with pytest.raises(TypeError, match=r"^AdamW8bit: .* argument 'caution'"):
        optim.create_optimizer_v2(model, opt="lowbitadamw8bit", lr=1e-3, caution=True)


def test_registering_again_changes_nothing(optim, caplog):
    before = {name: optim.get_optimizer_info(name) for name in NAMES}
    lowbit_optim.timm.register()
    assert {name: optim.get_optimizer_info(name) for name in NAMES} == before
    assert not caplog.records
