"""Signatures, docstrings and pickles of every class: what people, editors and tools are shown.

`SIGNATURES` is a contract: positional order and defaults are those of torch.optim and bitsandbytes.
"""

import copy
import inspect
import pickle
import pydoc
import re
from typing import Any, get_type_hints

import pytest
import torch

import lowbit_optim
from lowbit_optim._arguments import documented
from protocol import python

STORAGE = """
    optim_bits: int = 32, args: Any = None, min_8bit_size: int = 4096,
    percentile_clipping: int = 100
"""
RUN = """
    state_format: str | None = None, dither: bool = True, seed: int = 0,
    master_weight_bits: int | str | None = "auto", maximize: bool = False,
    foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
    fused: bool | None = None
"""
CAUTIOUS = "cautious: bool = False"
SIGNATURES = {  # after `params: Any`
    "SGD": """
        lr: float | Tensor = 0.001, momentum: float = 0, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, {STORAGE}, block_wise: bool = True, *,
        max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "LARS": """
        lr: float | Tensor, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
        nesterov: bool = False, {STORAGE}, max_unorm: float = 0.02, *,
        trust_coefficient: float | None = None, eps: float = 0.0, trust_clip: bool = False,
        scale_at: str = "grad", zero_norm: str = "one", adapt: str = "always",
        skip_wd: bool = False, weight_norm_bounds: tuple[float, float] | None = None,
        {CAUTIOUS}, {RUN}
    """,
    "Adam": """
        lr: float | Tensor = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: float = 0, amsgrad: bool = False, {STORAGE}, block_wise: bool = True,
        is_paged: bool = False, *, max_unorm: float = 0.0, {CAUTIOUS}, {RUN},
        decoupled_weight_decay: bool = False
    """,
    "AdamW": """
        lr: float | Tensor = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: float = 0.01, amsgrad: bool = False, {STORAGE}, block_wise: bool = True,
        is_paged: bool = False, *, max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "LAMB": """
        lr: float | Tensor = 0.001, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08, weight_decay: float = 0,
        amsgrad: bool = False, adam_w_mode: bool = True, {STORAGE}, block_wise: bool = True,
        max_unorm: float = 1.0, *, trust_coefficient: float | None = None,
        weight_norm_bounds: tuple[float, float] | None = None, {CAUTIOUS}, {RUN}
    """,
    "LANS": """
        lr: float | Tensor = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-06,
        weight_decay: float = 0, lower_bound: float | None = None,
        upper_bound: float | None = None, clip_gradient: float | None = None, *, {STORAGE},
        max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "Lion": """
        lr: float | Tensor = 0.0001, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0, {STORAGE}, block_wise: bool = True, is_paged: bool = False, *,
        max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "RMSprop": """
        lr: float | Tensor = 0.01, alpha: float = 0.99, eps: float = 1e-08,
        weight_decay: float = 0, momentum: float = 0, centered: bool = False, {STORAGE},
        block_wise: bool = True, *, max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "Adagrad": """
        lr: float | Tensor = 0.01, lr_decay: float = 0, weight_decay: float = 0,
        initial_accumulator_value: float = 0, eps: float = 1e-10, {STORAGE},
        block_wise: bool = True, *, max_unorm: float = 0.0, {RUN}
    """,
    "ADOPT": """
        lr: float | Tensor = 0.001, betas: tuple[float, float] = (0.9, 0.9999), eps: float = 1e-06,
        weight_decay: float = 0, optim_bits: int = 32, args: Any = None, min_8bit_size: int = 4096,
        percentile_clipping: int = 100, *, clip_exp: float | None = 0.25,
        decoupled_weight_decay: bool = False, max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "ScheduleFreeAdamW": """
        lr: float | Tensor = 0.0025, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0, {STORAGE}, *, warmup_steps: int = 0,
        r: float = 0.0, weight_lr_power: float = 2.0, max_unorm: float = 0.0, {RUN}
    """,
    "AdEMAMix": """
        lr: float | Tensor = 0.001, betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0, t_alpha: int | None = None, t_beta3: int | None = None,
        eps: float = 1e-08, weight_decay: float = 0.01, optim_bits: int = 32,
        min_8bit_size: int = 4096, is_paged: bool = False, *, percentile_clipping: int = 100,
        max_unorm: float = 0.0, args: Any = None, {CAUTIOUS}, {RUN}
    """,
    "Eve": """
        lr: float | Tensor = 0.001, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-08,
        weight_decay: float = 0.001, target_rms: float = 0.1, *, {STORAGE},
        max_unorm: float = 0.0, {CAUTIOUS}, {RUN}
    """,
    "Cain": """
        lr: float | Tensor = 0.01, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-08,
        scale_speed: float = 0.05, rms_eps: float = 1e-05, param_max: float = 20.0, *,
        bias_correction_fix: bool = False, {STORAGE}, {RUN}
    """,
    "LearnedGradient": """
        lr: float | Tensor = 0.03, size_lr_scale: float = 0.1, meta_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-08,
        param_min_rms: float = 1e-05, param_max_rms: float = 2.0, lr_est_period: int = 10,
        max_step_scale: float = 2.0, max_size: int | None = None, *, {STORAGE}, {RUN}
    """,
}
KEEP_OPTIM_BITS = ("Adam", "AdamW", "Adagrad")  # where bitsandbytes' X8bit has it, too
IN_4_BITS = ("Adam", "AdamW", "LAMB", "LANS", "Eve")
NAMES = [f"{name}{suffix}" for name in SIGNATURES for suffix in ("", "8bit", "32bit")]
NAMES += [f"{name}4bit" for name in IN_4_BITS]


def stem(name):
    return re.sub("(4|8|32)bit$", "", name)


def expected(name):
    """The signature of a class: names, kinds, defaults, annotations."""
    text = SIGNATURES[stem(name)].format(
        STORAGE=STORAGE.strip(), RUN=RUN.strip(), CAUTIOUS=CAUTIOUS
    )
    made = {"Any": Any, "Tensor": torch.Tensor}
    exec(f"def f(params: Any, {text}) -> None: ...", made)
    signature = inspect.signature(made["f"])
    bits = name.removeprefix(stem(name)).removesuffix("bit")
    parameters = dict(signature.parameters)
    if bits:
        parameters["optim_bits"] = parameters["optim_bits"].replace(default=int(bits))
        if stem(name) not in KEEP_OPTIM_BITS or bits == "4":
            del parameters["optim_bits"]
    if bits in ("4", "32"):
        del parameters["state_format"]
    return signature.replace(parameters=list(parameters.values()))


def class_of(name):
    return getattr(lowbit_optim, name)


def built(name, **options):
    return class_of(name)([torch.nn.Parameter(torch.ones(70, 80))], lr=0.01, **options)


def test_every_class_is_listed():
    base = lowbit_optim.LowBitOptimizer
    classes = {name for name, x in vars(lowbit_optim).items() if inspect.isclass(x)}
    assert {name for name in classes if issubclass(class_of(name), base)} == {
        *NAMES, base.__name__,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    cls = class_of(name)
    assert inspect.signature(cls, eval_str=True) == expected(name)
    types = {x.name: x.annotation for x in expected(name).parameters.values()}
    hints = {
        key: Any if x == (Any | None) else x for key, x in get_type_hints(cls.__init__).items()
    }
    assert hints.items() - {("return", type(None))} == types.items()  # Python 3.10 adds the default


@pytest.mark.parametrize("name", NAMES)
def test_help_describes_every_argument_with_its_default(name):
    cls = class_of(name)
    parameters = inspect.signature(cls).parameters
    section = inspect.getdoc(cls).split("\nArgs:\n")[1].split("\n\n")[0]
    entries = [entry.split(": ", 1) for entry in re.split(r"^    (?=\S)", section, flags=re.M)[1:]]
    assert [argument for argument, _ in entries] == list(parameters)
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for argument, text in entries:
        assert f"{argument}: {text.splitlines()[0]}" in shown
        default = parameters[argument].default
        end = "" if default is inspect.Parameter.empty else f" Default {default!r}."
        assert " ".join(text.split()).endswith(f".{end}")
        assert "default" not in text.removesuffix(end)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_one_of_its_module(name):
    cls = class_of(name)
    assert (cls.__name__, cls.__qualname__) == (name, name)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert issubclass(cls, class_of(stem(name)))
    source = inspect.getsource(cls)
    assert f"class {name}(" in source
    optimizer = built(name)
    for other in (
        pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer), copy.copy(optimizer),
    ):  # fmt: skip
        assert type(other) is cls
        assert other.defaults == optimizer.defaults


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_arguments(name):
    """But what only a constructor has, and bitsandbytes' switches."""
    optimizer = built(name)
    parameters = inspect.signature(class_of(stem(name))).parameters
    settings = [x for x in parameters if x not in ("params", "args", "block_wise", "is_paged")]
    assert optimizer.defaults.keys() == set(settings)
    groups_alone = {"max_unorm", "decoupled_weight_decay", "train_mode"}
    assert optimizer.param_groups[0].keys() - optimizer.defaults.keys() - {"params"} <= groups_alone
    for setting in set(settings) - {"lr", "optim_bits"}:
        assert optimizer.defaults[setting] == parameters[setting].default


@pytest.mark.parametrize("name", NAMES)
def test_defaults_make_another_one(name):
    """As wrappers and libraries for meta-learning do; groups that are added later are as before."""
    optimizer = built(name, min_8bit_size=1, seed=3)
    others = [type(optimizer)([torch.nn.Parameter(torch.ones(3))], **optimizer.defaults)]
    others.append(pickle.loads(pickle.dumps(others[0])))
    for other in others:
        other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        assert other.defaults == optimizer.defaults
        for group in other.param_groups:
            assert {**group, "params": []} == {**optimizer.param_groups[0], "params": []}


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("bit")])
def test_errors_of_a_fixed_name_say_it(name):
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match=f"^{name}: got an unexpected keyword argument 'x'$"):
        class_of(name)(params, lr=0.01, x=1)
    with pytest.raises(TypeError, match=f"^{name}: missing a required argument: 'params'$"):
        class_of(name)()
    bits = int(name.removeprefix(stem(name)).removesuffix("bit"))
    assert built(name, optim_bits=bits).defaults["optim_bits"] == bits
    for other in {4, 8, 16, 32} - {bits}:
        wrong = f"^optim_bits must be {bits} for {name}, got {other}; use"
        with pytest.raises(ValueError, match=wrong):
            built(name, optim_bits=other)


def test_docstrings_of_a_fixed_name_offer_what_it_takes():
    for name in NAMES:
        bits = stem(name) != name and int(name.removeprefix(stem(name)).removesuffix("bit"))
        if not bits:
            continue
        words = " ".join(class_of(name).__doc__.split())
        if "optim_bits: " in words:
            assert f"optim_bits: must be {bits};" in words
        if "state_format: " in words:
            offered = re.search(r"state_format: [^:]*: ([^.]*)\. None is (\w+)\.", words)
            for format in offered[1].split(", "):
                built(name, state_format=format)
            assert built(name).param_groups[0]["state_format"] in (None, offered[2])


def test_a_subclass_of_a_user():
    class Mine(lowbit_optim.AdamW8bit):
        """AdamW for me."""

        def __init__(self, params, lr=0.5, **others):
            super().__init__(params, lr, **others)

    optimizer = Mine([torch.nn.Parameter(torch.ones(3))], eps=1e-6)
    assert Mine.__doc__ == "AdamW for me."
    assert list(inspect.signature(Mine).parameters) == ["params", "lr", "others"]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["optim_bits"]) == (0.5, 1e-6, 8)
    with pytest.raises(TypeError, match="x"):
        Mine([torch.nn.Parameter(torch.ones(3))], x=1)


def test_an_argument_that_nothing_describes():
    class Half(lowbit_optim.Lion):
        """Half a Lion."""

        def __init__(self, params, lr, share):
            super().__init__(params, lr * share)

    with pytest.raises(TypeError, match=r"^Half: nothing describes the argument 'share'$"):
        documented(Half)


@pytest.mark.slow
def test_without_docstrings():
    script = (
        "import lowbit_optim as l, torch;"
        "print(l.Lion8bit.__doc__, len(l.Lion8bit([torch.nn.Parameter(torch.ones(2))]).defaults))"
    )
    assert python(script, PYTHONOPTIMIZE="2") == f"None {len(built('Lion8bit').defaults)}"
