"""`lowbit_optim.bitsandbytes`: bitsandbytes' names and arguments, and `patch`.

`SIGNATURES` is a contract, held here so that it is also tested where bitsandbytes is not installed;
where it is (`make peers`), the table itself, which is of 0.49, is compared with it.
"""

import copy
import importlib.util
import inspect
import pickle
import re
import warnings

import pytest
import torch

import lowbit_optim
from foreign_files import newer
from lowbit_optim import bitsandbytes as ours
from lowbit_optim.bitsandbytes import _arguments
from protocol import parameters, python, train

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes: pip install 'lowbit_optim[peers]'",
)

ARGS = "args=None, min_8bit_size=4096, percentile_clipping=100"
SGD = "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False"
ADAM = "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08"
LION = "params, lr=0.0001, betas=(0.9, 0.99), weight_decay=0"
MIX = (
    "params, lr=0.001, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None, t_beta3=None, "
    "eps=1e-08, weight_decay=0.01"
)
LAMB = (
    "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, "
    "amsgrad=False, adam_w_mode=True"
)
RMSPROP = "params, lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0, momentum=0, centered=False"
ADAGRAD = (
    "params, lr=0.01, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10, "
    f"optim_bits={{bits}}, {ARGS}, block_wise=True"
)


def _of_family(name, text, *, has_bits=False, paged=None):
    """X, X8bit, X32bit and, with the end of their argument list, the paged ones."""
    bits = "" if has_bits else "optim_bits=32, "
    rows = {f"{name}{width}": text.format(bits=bits * (not width)) for width in WIDTHS}
    if paged is not None:
        short = {key: row.replace(", is_paged=False", paged) for key, row in rows.items()}
        rows |= {f"Paged{key}": row for key, row in short.items()}
    return rows


WIDTHS = ("", "8bit", "32bit")
WITH_BITS = f"optim_bits=32, {ARGS}, block_wise=True, is_paged=False"
SIGNATURES = {
    **_of_family("Adam", f"{ADAM}, weight_decay=0, amsgrad=False, {WITH_BITS}",
                 has_bits=True, paged=", is_paged=False"),
    **_of_family("AdamW", f"{ADAM}, weight_decay=0.01, amsgrad=False, {WITH_BITS}",
                 has_bits=True, paged=""),
    **_of_family("Lion", f"{LION}, {{bits}}{ARGS}, block_wise=True, is_paged=False", paged=""),
    **_of_family("AdEMAMix", f"{MIX}, {{bits}}min_8bit_size=4096, is_paged=False", paged=""),
    **_of_family("SGD", f"{SGD}, {{bits}}{ARGS}, block_wise=True"),
    **_of_family("LARS", f"{SGD}, {{bits}}{ARGS}, max_unorm=0.02"),
    **_of_family("LAMB", f"{LAMB}, {{bits}}{ARGS}, block_wise=False, max_unorm=1.0"),
    **_of_family("RMSprop", f"{RMSPROP}, {{bits}}{ARGS}, block_wise=True"),
    **{f"Adagrad{width}": ADAGRAD.format(bits=8 if width == "8bit" else 32) for width in WIDTHS},
    "PytorchLARS": "params, lr=0.01, momentum=0, dampening=0, weight_decay=0, nesterov=False, "
                   "max_unorm=0.02",
}  # fmt: skip
NAMES = sorted(SIGNATURES)
PAGED = [name for name in NAMES if name.startswith("Paged")]
SWITCHES = {"block_wise": False, "is_paged": True}


def positional(cls):
    """A class's positional arguments with their defaults, as text."""
    wanted = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(cls).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind == wanted
    )


def namesake(name):
    """This package's class of a name."""
    if name == "PytorchLARS":
        return lowbit_optim.LARS32bit
    return getattr(lowbit_optim, name.removeprefix("Paged"))


@pytest.fixture(autouse=True)
def nobody_warned(monkeypatch):
    """Each test is a process in which nobody has been warned yet."""
    monkeypatch.setattr(_arguments, "_warned", set())


def built(name, *args, **options):
    """An instance, without the warning of the paged classes."""
    options = {"lr": 0.01, **options} if not args else options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(ours.optim, name)(parameters(), *args, **options)


def test_every_name_is_there():
    classes = {name for name, x in vars(ours.optim).items() if inspect.isclass(x)}
    assert classes >= {*NAMES, "GlobalOptimManager"}
    assert ours.optim.GlobalOptimManager is lowbit_optim.GlobalOptimManager


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    assert positional(getattr(ours.optim, name)) == SIGNATURES[name]


@needs_bitsandbytes
@pytest.mark.parametrize("name", NAMES)
def test_signature_of_the_installed_bitsandbytes(bitsandbytes, name):
    expected = SIGNATURES[name]
    if newer():
        expected = re.sub(r", (percentile_clipping=100|block_wise=(True|False))", "", expected)
    assert positional(getattr(bitsandbytes.optim, name)) == expected


@needs_bitsandbytes
def test_bitsandbytes_has_no_other_name(bitsandbytes):
    theirs = {name for name, x in vars(bitsandbytes.optim).items() if inspect.isclass(x)}
    assert theirs == {*NAMES, "GlobalOptimManager"}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_its_namesake_with_bitsandbytes_in_its_text(name):
    cls = getattr(ours.optim, name)
    assert issubclass(cls, namesake(name))
    assert "bitsandbytes" in str(cls)
    assert (cls.__name__, cls.__qualname__) == (name, name)
    assert pickle.loads(pickle.dumps(cls)) is cls
    optimizer = built(name)
    assert optimizer.mng is lowbit_optim.GlobalOptimManager.get_instance()
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(other) is cls
        assert other.defaults == optimizer.defaults


@pytest.mark.parametrize("name", NAMES)
def test_trains_like_its_namesake(name):
    """With bitsandbytes' defaults, bit for bit, and a checkpoint goes both ways."""
    options = {"lr": 0.01, **({} if name == "PytorchLARS" else {"min_8bit_size": 1})}
    mine = train(built(name, **options), 3)
    plain = train(namesake(name)(parameters(), **options), 3)
    for p, q in zip(*(o.param_groups[0]["params"] for o in (mine, plain)), strict=True):
        assert torch.equal(p, q)
    mine.load_state_dict(plain.state_dict())
    plain.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"PytorchLARS"}))  # which has few arguments
def test_defaults_make_another_one(name):
    optimizer = built(name, lr=0.01, seed=3)
    other = type(optimizer)(parameters(), **optimizer.defaults)
    assert other.defaults == optimizer.defaults


@pytest.mark.parametrize("name", ["Lion8bit", "PagedLion8bit"])
def test_other_bits_are_refused_in_a_class_of_one_width(name):
    with pytest.raises(ValueError, match=f"optim_bits must be 8 for {name}, got 32"):
        built(name, optim_bits=32)


@pytest.mark.parametrize("name", [name for name in NAMES if "Adam" in name and "W" not in name])
def test_adam_decouples_weight_decay_as_there(name):
    """Under the names of torch's Adam alone it is added to the gradient."""
    options = {"lr": 0.01, "weight_decay": 0.1, "min_8bit_size": 1}
    coupled = {**options, "decoupled_weight_decay": False}
    for mine, twin in (
        (built(name, **options), namesake(name.replace("Adam", "AdamW"))),
        (built(name, **coupled), namesake(name)),
    ):
        other = train(twin(parameters(), **options), 3)
        train(mine, 3)
        for p, q in zip(*(o.param_groups[0]["params"] for o in (mine, other)), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_keyword_is_named_with_the_class(name):
    cls = getattr(ours.optim, name)
    with pytest.raises(TypeError, match=rf"^{name}\b.* unexpected keyword argument 'x'$"):
        cls(parameters(), lr=0.01, x=1)
    with pytest.raises(TypeError, match=rf"^{name}\b.* missing .*'params'$"):
        cls()


@pytest.mark.parametrize("name", NAMES)
def test_help_describes_every_argument(name):
    cls = getattr(ours.optim, name)
    section = inspect.getdoc(cls).split("\nArgs:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^    (\w+): ", section, flags=re.MULTILINE)
    assert entries == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"])
def test_optim_bits_says_nothing_in_the_8bit_classes_of_adam(name):
    assert built(name).defaults["optim_bits"] == 8
    assert built(name, optim_bits=32).defaults["optim_bits"] == 8
    assert built(name, optim_bits=8).defaults["optim_bits"] == 8
    in_order = built(name, 1e-3, (0.9, 0.99), 1e-8, 0.0, False, 32, None, 1, 100, True)
    assert in_order.defaults["optim_bits"] == 8
    assert in_order.defaults["min_8bit_size"] == 1
    with pytest.raises(ValueError, match=f"optim_bits must be 8 for {name}, got 16"):
        built(name, optim_bits=16)
    with pytest.raises(ValueError, match="optim_bits must be one of"):
        built(name, optim_bits=torch.tensor([8, 8]))


def warned(name, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(ours.optim, name)(parameters(), lr=0.01, **options)
    return caught


@pytest.mark.parametrize(
    ("name", "switch"),
    [(n, s) for n in NAMES for s in SWITCHES if f"{s}=" in SIGNATURES[n]],
)
def test_a_switch_warns_once_a_class(name, switch):
    if name in PAGED:
        warned(name)
    (warning,) = warned(name, **{switch: SWITCHES[switch]})
    assert warning.filename == __file__
    assert f"{switch}={SWITCHES[switch]} has no effect" in str(warning.message)
    assert not warned(name, **{switch: SWITCHES[switch]})
    with pytest.raises(TypeError, match=f"{switch} must be True or False; got 3"):
        built(name, **{switch: 3})


@pytest.mark.parametrize("name", PAGED)
def test_a_paged_class_warns_once(name):
    (warning,) = warned(name)
    assert warning.filename == __file__
    assert str(warning.message).startswith(f"{name} pages nothing")
    assert not warned(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PAGED])
def test_the_defaults_warn_of_nothing(name):
    assert not warned(name)


def test_the_order_of_0_50_is_recognised():
    with pytest.raises(ValueError, match=r"bitsandbytes 0\.50 dropped"):
        built("AdamW8bit", 1e-3, (0.9, 0.999), 1e-8, 0.0, False, 32, None, 4096, True)


# patch


@pytest.fixture
def bitsandbytes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it does at import is not ours to mend
        yield pytest.importorskip("bitsandbytes")


def contents(bitsandbytes):
    """What every module of bitsandbytes has under every name."""
    import sys

    return {
        (module, name): value
        for module in sorted(sys.modules)
        if module.partition(".")[0] == "bitsandbytes"
        for name, value in vars(sys.modules[module]).items()
    }


@needs_bitsandbytes
def test_patch_replaces_the_leaves_everywhere_and_nothing_else(bitsandbytes):
    before = contents(bitsandbytes)
    with ours.patch():
        after = contents(bitsandbytes)
        changed = {key for key in before if after[key] is not before[key]}
        assert {name for _, name in changed} == {*NAMES, "GlobalOptimManager"}
        for _, name in changed:
            assert getattr(bitsandbytes.optim, name) is getattr(ours.optim, name)
        assert bitsandbytes.optim.adamw.AdamW8bit is ours.optim.AdamW8bit
        assert bitsandbytes.nn.modules.GlobalOptimManager is lowbit_optim.GlobalOptimManager
        assert "bitsandbytes.optim.optimizer" not in {module for module, _ in changed}
    assert contents(bitsandbytes) == before


@needs_bitsandbytes
def test_a_call_lasts_until_it_is_undone_and_patches_nest(bitsandbytes):
    theirs = bitsandbytes.optim.AdamW8bit
    made = ours.patch()
    try:
        with ours.patch() as inner:
            assert bitsandbytes.optim.AdamW8bit is ours.optim.AdamW8bit
        inner.undo()
        assert bitsandbytes.optim.AdamW8bit is ours.optim.AdamW8bit
    finally:
        made.undo()
    assert bitsandbytes.optim.AdamW8bit is theirs
    with ours.patch():
        made.undo()
        assert bitsandbytes.optim.AdamW8bit is ours.optim.AdamW8bit
    assert bitsandbytes.optim.AdamW8bit is theirs


@needs_bitsandbytes
def test_classes_derived_from_bitsandbytes_bases_go_on_with_its_own_manager(bitsandbytes):
    class Mine(bitsandbytes.optim.optimizer.Optimizer2State):
        def __init__(self, params):
            super().__init__("adam", params)

    with ours.patch():
        mine = Mine(parameters())
        assert mine.mng is bitsandbytes.optim.optimizer.GlobalOptimManager.get_instance()
        mine.check_overrides()


@needs_bitsandbytes
@pytest.mark.usefixtures("manager")
def test_embeddings_of_bitsandbytes_are_in_32_bits(bitsandbytes):
    with ours.patch():
        embedding = bitsandbytes.nn.StableEmbedding(100, 64)
        linear = torch.nn.Linear(100, 64)
        optimizer = bitsandbytes.optim.Adam8bit([embedding.weight, linear.weight])
        for p in (embedding.weight, linear.weight):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[embedding.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[linear.weight]["exp_avg"].dtype == torch.uint8


def test_without_bitsandbytes_the_names_work_and_patch_says_what_is_missing():
    script = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
import sys, torch
from lowbit_optim import bitsandbytes as bnb
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
bnb.optim.AdamW8bit([p]).step()
assert "bitsandbytes" not in sys.modules and (p < 1).all()
try:
    bnb.patch()
except ImportError as error:
    print(error)
"""
    assert python(script) == (
        "patch() puts classes into bitsandbytes, which is not installed; without it import them "
        "from lowbit_optim.bitsandbytes.optim"
    )
