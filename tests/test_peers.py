"""Our classes against those of the libraries they stand in for, run here, on the CPU.

A row says which of our options mean the same as a peer's: for LARS, what docs/lars.md says. What a
peer gets wrong is a row with a `fault`: expected to differ, it fails once it no longer does.
torch.optim, which is always there, is in test_trajectories. `make peers` installs the others; a row
whose peer is missing is skipped.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import cases
import foreign_files
import lowbit_optim

STEPS = 8
EVERY = tuple(cases.TRACKS.values())
# Some libraries count the steps of a group, not those of a parameter.
PRESENT = tuple(track for name, track in cases.TRACKS.items() if "no gradient" not in name)
NOT_SCALAR = tuple(track for track in EVERY if track.shape)
MATRICES = tuple(track for track in PRESENT if len(track.shape) > 1)
VECTORS = tuple(track for track in PRESENT if len(track.shape) < 2)
# Importing these packages imports torchvision or Lightning; their optimizers need neither, so the
# tests load single files. The values are the names on PyPI.
HOLLOW = {"timm": "timm", "holocron": "pylocron", "pl_bolts": "lightning-bolts"}
PRESETS = lowbit_optim.LARS_PRESETS


@dataclass(frozen=True)
class Row:
    """A peer's class and options, our family and the options that mean the same.

    `rtol` bounds the difference of the movements, relative to the largest of a tensor.
    """

    peer: str
    theirs: dict
    family: str
    ours: dict
    lr: float = 0.01
    tracks: tuple = EVERY
    dtype: torch.dtype = torch.float64
    rtol: float = 1e-11
    fault: str | None = None
    raises: type = AssertionError

    @property
    def id(self):
        options = {k: v.max_unorm if k == "args" else v for k, v in self.theirs.items()}
        return f"{self.peer}({','.join(f'{k}={v}' for k, v in options.items())})"


def _bnb(name, theirs, ours=None, family=None, **more):
    """bitsandbytes computes in fp32 whatever the parameter."""
    family = family or name.removesuffix("32bit")
    ours = theirs if ours is None else ours
    more = {"dtype": torch.float32, "rtol": 3e-5, **more}
    return Row(f"bitsandbytes.optim.{name}", theirs, family, ours, **more)


def _capped(max_unorm):
    """bitsandbytes' `args` replaces every one of its attributes; ours those that are present."""
    return {
        "args": SimpleNamespace(
            optim_bits=32, min_8bit_size=4096, percentile_clipping=100, block_wise=True,
            max_unorm=max_unorm, skip_zeros=False,
        )
    }  # fmt: skip


NEWER = foreign_files.newer()


def _cured(fault):
    """A fault that versions up to 0.49 have."""
    return None if NEWER else fault


UNCORRECTED = "from 0.50 on bitsandbytes' CPU backend caps moments without bias correction"
OF_CAP = {"tracks": NOT_SCALAR, "fault": UNCORRECTED if NEWER else None}
MOMENTUM = {"momentum": 0.9}
DECAY = {"weight_decay": 0.1}
ROUND = {"momentum": 0.9, "weight_decay": 0.1}  # SGD's usual round of options
TRUST = {"trust_coefficient": 1.0}
VERSION_3 = {"bias_correction": False, "weight_norm_bounds": (0.0, 10.0)}  # of LAMB's paper
SCHEDULES = {"t_alpha": 5, "t_beta3": 6}
BITSANDBYTES = [
    _bnb("Adam32bit", {}),
    _bnb("Adam32bit", DECAY, {**DECAY, "decoupled_weight_decay": True}),
    _bnb("Adam32bit", {"betas": (0.5, 0.8), "eps": 1e-3}),
    _bnb("Adam32bit", _capped(0.02), **OF_CAP),
    _bnb("Adam32bit", {"amsgrad": True}, fault="bitsandbytes takes amsgrad and ignores it"),
    _bnb("Adam32bit", _capped(0.02), tracks=(cases.TRACKS["scalar"],),
         raises=AssertionError if NEWER else RuntimeError,
         fault=_cured("bitsandbytes' CPU backend raises for a 0-d parameter under the cap")
         or UNCORRECTED),
    _bnb("AdamW32bit", {}),
    _bnb("AdamW32bit", {**DECAY, **_capped(0.02)}, **OF_CAP),
    _bnb("SGD32bit", MOMENTUM),
    _bnb("SGD32bit", ROUND),
    _bnb("SGD32bit", {**MOMENTUM, **_capped(0.05)}, tracks=NOT_SCALAR),
    _bnb("SGD32bit", {**ROUND, **_capped(0.05)}, tracks=NOT_SCALAR,
         fault=_cured("bitsandbytes' cap measures the update without its weight decay")),
    _bnb("SGD32bit", {**MOMENTUM, "dampening": 0.4}, fault="bitsandbytes ignores dampening"),
    _bnb("SGD32bit", {**MOMENTUM, "nesterov": True}, fault="bitsandbytes ignores nesterov"),
    _bnb("Lion32bit", {}),
    _bnb("Lion32bit", {"betas": (0.5, 0.6)}),
    _bnb("Lion32bit", DECAY,
         fault=_cured("bitsandbytes' CPU backend adds Lion's decay to the gradient")),
    _bnb("RMSprop32bit", {}),
    _bnb("RMSprop32bit", {**DECAY, "alpha": 0.9, "eps": 1e-3}),
    # Its cap of a rule with one moment is eps higher, which counts where the parameter is zero.
    _bnb("RMSprop32bit", _capped(0.02), tracks=tuple(t for t in NOT_SCALAR if t.start)),
    _bnb("RMSprop32bit", MOMENTUM, fault="bitsandbytes ignores RMSprop's momentum"),
    _bnb("Adagrad32bit", {}),
    _bnb("Adagrad32bit", {**DECAY, "eps": 1e-3}),
    _bnb("Adagrad32bit", _capped(0.02), tracks=NOT_SCALAR,
         fault="bitsandbytes' CPU backend leaves Adagrad's cap out"),
    _bnb("AdEMAMix", {}),
    _bnb("AdEMAMix", {**DECAY, **SCHEDULES}),
    _bnb("AdEMAMix", {"alpha": 2.0, "betas": (0.8, 0.9, 0.99), "t_beta3": 4}),
    _bnb("AdEMAMix32bit", {}, raises=RuntimeError,
         fault="bitsandbytes' AdEMAMix32bit allocates one average where its rule keeps two"),
    # Its LAMB is Adam's kernel under a cap, its LARS32bit SGD's if any backend had a rule for it.
    _bnb("Adam32bit", _capped(1.0), {}, family="LAMB", **OF_CAP),
    _bnb("Adam32bit", {**DECAY, **_capped(0.02)}, {**DECAY, "max_unorm": 0.02}, family="LAMB",
         **OF_CAP),
    _bnb("SGD32bit", {**MOMENTUM, **_capped(0.02)}, MOMENTUM, family="LARS", tracks=NOT_SCALAR),
    _bnb("LARS32bit", MOMENTUM, raises=KeyError,
         fault=_cured("bitsandbytes has a rule of the name lars in 8 bits only")),
    _bnb("LAMB32bit", {}, raises=AssertionError if NEWER else KeyError,
         fault=_cured("bitsandbytes' CPU backend has no rule of the name lamb") or UNCORRECTED),
]  # fmt: skip


def _torch_lars(**options):
    """bitsandbytes' LARS in torch operators, which its own tests compare the kernel with."""
    dtype, rtol = (torch.float32, 3e-5) if options.get("max_unorm", 1) else (torch.float64, 1e-11)
    return Row("bitsandbytes.optim.lars.PytorchLARS", options, "LARS", options, 0.5,
               dtype=dtype, rtol=rtol)  # fmt: skip


def _reference_ademamix(fault=None, **more):
    options = {**DECAY, **SCHEDULES}
    peer = "bitsandbytes.optim.ademamix._ReferenceAdEMAMix"
    return Row(peer, options, "AdEMAMix", options, fault=fault, **more)


BITSANDBYTES += [
    _torch_lars(momentum=0.9),
    _torch_lars(momentum=0.9, weight_decay=0.1, dampening=0.3),
    _torch_lars(momentum=0.9, weight_decay=0.1, nesterov=True, max_unorm=0.05),
    _torch_lars(momentum=0.9, weight_decay=0.1, max_unorm=0.0),
    *(_reference_ademamix(tracks=(track,)) for track in PRESENT[:2]),
    _reference_ademamix(
        "_ReferenceAdEMAMix carries alpha and beta3 over from one parameter to the next",
        tracks=PRESENT,
    ),
]


def _timm_lars(theirs, ours, **more):
    peer = "timm.optim.lars.Lars"
    return Row(peer, theirs, "LARS", {**PRESETS["timm"], **ours}, **{"lr": 1.0, **more})


def _timm_lamb(theirs, ours):
    """timm clips the global gradient norm unless told not to."""
    theirs = {"max_grad_norm": None, **theirs}
    return Row("timm.optim.lamb.Lamb", theirs, "LAMB", {"eps": 1e-6, **ours}, tracks=PRESENT)


TIMM = [
    _timm_lars(ROUND, ROUND),
    _timm_lars({**ROUND, "foreach": False}, ROUND),
    _timm_lars({**ROUND, "nesterov": True}, {**ROUND, "nesterov": True}),
    _timm_lars({**ROUND, "dampening": 0.4}, {**ROUND, "dampening": 0.4}),
    _timm_lars(MOMENTUM, MOMENTUM, lr=0.01),
    _timm_lars({**MOMENTUM, "always_adapt": True}, {**MOMENTUM, "adapt": "always"}),
    _timm_lars({**ROUND, "trust_coeff": 0.02, "trust_clip": True},
               {**ROUND, "trust_coefficient": 0.02, "trust_clip": True}, lr=0.05),
    _timm_lars({**DECAY, "trust_coeff": 0.02, "eps": 1e-3},
               {**DECAY, "trust_coefficient": 0.02, "eps": 1e-3}),
    _timm_lamb(DECAY, {**TRUST, **DECAY}),
    _timm_lamb({**DECAY, "foreach": False}, {**TRUST, **DECAY}),
    _timm_lamb({**DECAY, "bias_correction": False}, {**TRUST, **DECAY, "bias_correction": False}),
    _timm_lamb({"weight_decay": 0.0, "always_adapt": True}, TRUST),
    _timm_lamb({"weight_decay": 0.0}, {"max_unorm": 0}),
    Row("timm.optim.lion.Lion", {**DECAY, "maximize": True}, "Lion", {**DECAY, "maximize": True}),
    Row("timm.optim.lion.Lion", {"foreach": False, "betas": (0.5, 0.6)}, "Lion",
        {"betas": (0.5, 0.6)}),
]  # fmt: skip


def _holocron(name, theirs, ours, **more):
    return Row(f"holocron.optim.{name.lower()}.{name}", theirs, name, ours, **more)


def _bolts(theirs, **more):
    ours = {**PRESETS["bolts"], **theirs}
    return Row("pl_bolts.optimizers.lars.LARS", theirs, "LARS", ours, **{"lr": 1.0, **more})


LIGHTNING = [
    _bolts(ROUND),
    _bolts({**ROUND, "nesterov": True}),
    _bolts({**ROUND, "dampening": 0.4, "trust_coefficient": 0.02, "eps": 1e-3}),
    _bolts(DECAY),
    _bolts(MOMENTUM, lr=0.01),
]
HOLOCRON = [
    *(
        _holocron("LARS", options, {**PRESETS["holocron"], **options})
        for options in ({}, ROUND, {**ROUND, "nesterov": True}, {**ROUND, "dampening": 0.4})
    ),
    _holocron("LAMB", DECAY, {**TRUST, **DECAY, **VERSION_3}),
    _holocron("LAMB", {"scale_clip": (0.5, 2.0)}, {**TRUST, "bias_correction": False,
                                                   "weight_norm_bounds": (0.5, 2.0)}),
    Row("holocron.optim.ademamix.AdEMAMix", {"alpha": 2.0}, "AdEMAMix",
        {"alpha": 2.0, "weight_decay": 0.0}),
]  # fmt: skip


def _pytorch_optimizer(name, theirs, family, ours, **more):
    row = {"tracks": PRESENT, **more}
    return Row(f"pytorch_optimizer.{name}", theirs, family, ours, **row)


PLAIN = {"trust_coefficient": None, "max_unorm": 0, "weight_decay": 0}
MIXED = {"weight_decouple": True, **DECAY}
SMALL = {"eps": 1e-15}  # Lamb adds it also to the norm that it divides by
PYTORCH_OPTIMIZER = [
    _pytorch_optimizer("LARS", ROUND, "LARS",
                       {**ROUND, "trust_coefficient": 0.001, "zero_norm": "denom"},
                       tracks=MATRICES, lr=1.0),
    _pytorch_optimizer("LARS", {**ROUND, "nesterov": True, "foreach": False, "maximize": True},
                       "LARS", {**ROUND, "nesterov": True, "trust_coefficient": 0.001,
                                "zero_norm": "denom", "maximize": True}, tracks=MATRICES, lr=1.0),
    _pytorch_optimizer("LARS", ROUND, "LARS", {**ROUND, **PLAIN}, tracks=VECTORS),
    _pytorch_optimizer("LARS", {**MOMENTUM, "dampening": 0.4}, "LARS",
                       {**MOMENTUM, **PLAIN, "dampening": 0.4}, tracks=VECTORS,
                       fault="pytorch_optimizer dampens the first gradient, torch does not"),
    _pytorch_optimizer("Lamb",
                       {**SMALL, **DECAY, "weight_decouple": False, "adam_debias": True},
                       "LAMB", {**SMALL, **DECAY, **TRUST, **VERSION_3}),
    _pytorch_optimizer("Lamb", {**SMALL, "adam_debias": True, "foreach": False}, "LAMB",
                       {**SMALL, **TRUST, **VERSION_3}),
    _pytorch_optimizer("Lamb", {**SMALL, "adam": True, "adam_debias": True}, "LAMB",
                       {**SMALL, "max_unorm": 0, "bias_correction": False}),
    _pytorch_optimizer("Lamb", SMALL, "LAMB", {**SMALL, **TRUST, **VERSION_3},
                       fault="pytorch_optimizer divides lr by 1 - beta1^t, outside of the ratio"),
    _pytorch_optimizer("Lamb", {**SMALL, **DECAY, "adam_debias": True}, "LAMB",
                       {**SMALL, **DECAY, **TRUST, **VERSION_3},
                       fault="pytorch_optimizer's default leaves the decay out of the ratio"),
    _pytorch_optimizer("Lion", DECAY, "Lion", DECAY),
    _pytorch_optimizer("Lion", {"maximize": True, "foreach": False}, "Lion", {"maximize": True}),
    _pytorch_optimizer("AdEMAMix", MIXED, "AdEMAMix", DECAY),
    _pytorch_optimizer("AdEMAMix", {**MIXED, "t_alpha_beta3": 5}, "AdEMAMix",
                       {**DECAY, "t_alpha": 5, "t_beta3": 5}),
]  # fmt: skip
ROWS = [*BITSANDBYTES, *TIMM, *LIGHTNING, *HOLOCRON, *PYTORCH_OPTIMIZER]


def make_hollow(module):
    """Put the packages of `module` into sys.modules without running their __init__."""
    parents = module.split(".")[:-1]
    (folder,) = importlib.util.find_spec(parents[0]).submodule_search_locations
    for depth in range(1, len(parents) + 1):
        package = types.ModuleType(".".join(parents[:depth]))
        package.__path__ = [str(Path(folder, *parents[1:depth]))]
        sys.modules[package.__name__] = package
    # Bolts decorates its classes with a warning that comes from Lightning.
    stability = types.ModuleType("pl_bolts.utils.stability")
    stability.under_review = lambda: lambda cls: cls
    sys.modules[stability.__name__] = stability


@functools.cache
def peer_class(path):
    """The class, or None where its library is not installed."""
    module, _, name = path.rpartition(".")
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what they do at import is not ours to mend
        if top in HOLLOW:
            stack.enter_context(mock.patch.dict(sys.modules))  # nobody else gets the empty shells
            make_hollow(module)
        return getattr(importlib.import_module(module), name)


@pytest.fixture
def bitsandbytes_on_cpu(monkeypatch):
    """Let bitsandbytes' 32-bit classes reach the rules of its own CPU backend.

    They refuse CPU tensors before that. And uncompiled: torch.compile would make a new kernel for
    every step, lr and shape.
    """
    if importlib.util.find_spec("bitsandbytes") is not None:
        peer_class("bitsandbytes.optim.Adam32bit")
        functional = importlib.import_module("bitsandbytes.functional")
        monkeypatch.setattr(functional, "is_on_gpu", lambda tensors: True)
    with torch.compiler.set_stance("force_eager"):
        yield


def movements(row, build):
    """How far every parameter of the row's tracks goes."""
    values = cases.starts(row.tracks)
    params = cases.as_params(values, row.dtype)
    cases.walk(
        build(params), params, cases.gradients(row.tracks, STEPS), cases.rates(row.lr, STEPS)
    )
    return [p.detach().double() - start for p, start in zip(params, values, strict=True)]


def parametrized(row):
    differs = [pytest.mark.xfail(raises=row.raises, reason=row.fault)] if row.fault else []
    return pytest.param(row, id=row.id, marks=differs)


@pytest.mark.usefixtures("bitsandbytes_on_cpu")
@pytest.mark.parametrize("row", [parametrized(row) for row in ROWS])
def test_equals_the_peer(row):
    cls = peer_class(row.peer)
    if cls is None:
        package = HOLLOW.get(row.peer.partition(".")[0])
        how = f"--no-deps {package}" if package else "'lowbit_optim[peers]'"
        pytest.skip(f"needs {row.peer.partition('.')[0]}: pip install {how}")
    want = movements(row, lambda params: cls(params, lr=row.lr, **row.theirs))
    family = getattr(lowbit_optim, f"{row.family}32bit")
    got = movements(row, lambda params: family(params, lr=row.lr, **row.ours))
    for track, moved, expected in zip(row.tracks, got, want, strict=True):
        assert cases.distance(moved, expected) < row.rtol, track
