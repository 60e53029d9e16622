"""The cases as data, and the two runners that walk a case: the package's and the reference's.

A case names a class, its options and the naive rule that says what they mean. `CASES` are those of
LARS, SGD, Adam and AdamW; `CASES_FAMILY` those of the other rules that an engine steps;
`CASES_ICEFALL` those that torch operators step, and so not in `FUSED_CASES`. A class that the
package lacks is an error.
"""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch

import reference
import reference_codec

SHAPES = [
    (1,), (7,), (255,), (256,), (257,), (4095,), (4096,), (4097,),
    (64, 147), (1000, 1000), (0,), (),
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SIGNED, UNSIGNED = True, False  # the map of codes: of first moments, and of second ones
MOMENTUM = {"momentum_buffer": SIGNED}
ADAM = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}


@dataclass(frozen=True)
class Case:
    """One optimizer with one set of options.

    `meaning` replaces `options` for the reference where the two spell an option differently.
    `moments` maps the state's keys to the map that holds them in 8 bits. Where an 8-bit group keeps
    other moments, `moments8` has them, and `rule8` is the naive rule that leaves them. `rtol`
    bounds an fp32 engine against the float64 reference after a dozen steps; `nmse` the 8-bit
    movement against the 32-bit one. `moves_all`: the rule mixes elements, so a weight without
    gradient moves too. `fused`: an engine runs the rule; otherwise it codes the moments and torch
    operators step.
    """

    name: str
    options: dict
    rule: object
    moments: dict
    meaning: dict | None = None
    moments8: dict | None = None
    rule8: object = None
    lr: float = 0.01
    rtol: float = 3e-4
    nmse: float = 5e-4
    moves_all: bool = False
    fused: bool = True

    @property
    def id(self):
        text = ",".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}({text})".replace("namespace", "")

    def build(self, params, bits=32, **more):
        """The package's optimizer of this case."""
        import lowbit_optim

        cls = getattr(lowbit_optim, f"{self.name}{bits}bit")
        return cls(params, **{"lr": self.lr, **self.options, **more})

    def stored(self, bits):
        """The moments that a group of so many bits keeps."""
        return self.moments8 if bits == 8 and self.moments8 is not None else self.moments

    def reference(self, p, g, state, lr, rule=None):
        """One step of the naive rule."""
        options = self.options if self.meaning is None else self.meaning
        return (rule or self.rule)(p, g, state, lr=lr, **options)

    def quantized(self, p, g, state, lr):
        """One step of the naive rule whose moments then go through the naive codec."""
        p = self.reference(p, g, state, lr, self.rule8)
        for key, signed in self.stored(8).items():
            codes, absmax = reference_codec.encode(state[key].numpy(), signed)
            state[key] = torch.from_numpy(reference_codec.decode(codes, absmax, signed))
            state[f"{key}_codes"], state[f"{key}_absmax"] = codes, absmax
        return p


def _lars(moments=MOMENTUM, lr=0.5, **options):
    return Case("LARS", {"momentum": 0.9, **options}, reference.lars, moments, lr=lr)


def _eta(**options):
    return _lars(**{"trust_coefficient": 0.02, "weight_decay": 0.05, **options})


def _capped(case_name, rule, moments, max_unorm, **options):
    """Adam and SGD take max_unorm through bitsandbytes' `args`."""
    given = {**options, "args": SimpleNamespace(max_unorm=max_unorm)}
    return Case(case_name, given, rule, moments, {**options, "max_unorm": max_unorm}, lr=0.1)


LARS = [
    _lars(),
    _lars(weight_decay=0.1, dampening=0.3),
    _lars(weight_decay=0.1, nesterov=True, max_unorm=0.05),
    _lars(max_unorm=0.0, lr=0.01),
    _lars(moments={}, momentum=0.0, weight_decay=0.1),
    _lars(maximize=True, percentile_clipping=5),
    _lars(scale_at="lr", weight_decay=0.1),
    _lars(scale_at="lr", max_unorm=0.0, nesterov=True, lr=0.01),
    _lars(scale_at="lr", moments={}, momentum=0.0, weight_decay=0.1),
    _lars(scale_at="update", weight_decay=0.1, skip_wd=True),
    _eta(),
    _eta(nesterov=True),
    _eta(dampening=0.5, maximize=True),
    _eta(moments={}, momentum=0.0, percentile_clipping=5),
    _eta(scale_at="update", zero_norm="denom"),
    _eta(scale_at="update", zero_norm="zero", eps=1e-3),
    _eta(scale_at="lr", zero_norm="denom"),
    _eta(scale_at="lr", zero_norm="one"),
    _eta(trust_clip=True, zero_norm="skip_wd", eps=1e-8),
    _eta(trust_clip=True, lr=0.01),
    _eta(adapt="wd", eps=1e-8),
    _eta(adapt="wd", weight_decay=0.0, lr=0.01),
    _eta(adapt="wd", zero_norm="skip_wd"),
    _eta(skip_wd=True),
    _eta(weight_norm_bounds=(0.5, 2.0)),
    _eta(zero_norm="zero", weight_norm_bounds=(0.5, 2.0)),
    _eta(trust_coefficient=1.0, scale_at="update", zero_norm="denom", lr=0.02),
]

SGD = [
    Case("SGD", {}, reference.sgd, {}),
    Case("SGD", {"weight_decay": 0.1, "maximize": True}, reference.sgd, {}),
    Case("SGD", {"momentum": 0.9}, reference.sgd, MOMENTUM),
    Case("SGD", {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}, reference.sgd, MOMENTUM),
    Case("SGD", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, reference.sgd, MOMENTUM),
    Case("SGD", {"momentum": 0.9, "percentile_clipping": 5}, reference.sgd, MOMENTUM),
    _capped("SGD", reference.sgd, MOMENTUM, 0.05, momentum=0.9, weight_decay=0.1),
]

AMSGRAD = {**ADAM, "max_exp_avg_sq": UNSIGNED}
ADAMS = [
    Case("Adam", {}, reference.adam, ADAM),
    Case("Adam", {"weight_decay": 0.1, "maximize": True}, reference.adam, ADAM),
    Case("Adam", {"weight_decay": 0.1, "amsgrad": True}, reference.adam, AMSGRAD),
    Case("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, reference.adam, ADAM),
    Case("Adam", {"betas": (0.5, 0.9), "eps": 1e-3}, reference.adam, ADAM),
    Case("Adam", {"percentile_clipping": 5}, reference.adam, ADAM),
    _capped("Adam", reference.adam, ADAM, 0.02, weight_decay=0.1),
    Case("AdamW", {}, reference.adamw, ADAM),
    Case("AdamW", {"weight_decay": 0.2, "amsgrad": True}, reference.adamw, AMSGRAD),
    Case("AdamW", {"betas": (0.0, 0.9), "weight_decay": 0.0}, reference.adamw, ADAM),
    Case("AdamW", {"maximize": True, "percentile_clipping": 5}, reference.adamw, ADAM),
    _capped("AdamW", reference.adamw, ADAM, 0.02, weight_decay=0.1),
]

# Tighter than a case's own `rtol`: these rules do not enlarge a rounding as a ratio of norms does.
CASES = LARS + [replace(case, rtol=1e-5) for case in SGD + ADAMS]


def _lion(**options):
    """A sign turns where an error crosses zero: a larger nmse."""
    return Case("Lion", options, reference.lion, {"exp_avg": SIGNED}, nmse=5e-3)


TRUST = {"trust_coefficient": 1.0, "weight_decay": 0.05}
SLOW = {**ADAM, "exp_avg_slow": SIGNED}
SQUARE = {"square_avg": UNSIGNED}
AVERAGED = {"exp_avg_sq": UNSIGNED}  # and z, which is never coded


def _centered(moments, **options):
    first, first8 = {"square_avg": UNSIGNED}, {"variance": UNSIGNED}
    return Case(
        "RMSprop", {"centered": True, **options}, reference.rmsprop, {**first, **moments},
        moments8={**first8, **moments}, rule8=reference.rmsprop_by_variance,
    )  # fmt: skip


CASES_FAMILY = [
    Case("LAMB", {}, reference.lamb, ADAM),
    Case("LAMB", {"max_unorm": 0.02, "weight_decay": 0.1}, reference.lamb, ADAM, lr=0.1),
    Case("LAMB", {"adam_w_mode": False, "weight_decay": 0.1}, reference.lamb, ADAM),
    Case("LAMB", TRUST, reference.lamb, ADAM),
    Case("LAMB", {**TRUST, "bias_correction": False}, reference.lamb, ADAM),
    Case("LAMB", {**TRUST, "weight_norm_bounds": (0.0, 2.0)}, reference.lamb, ADAM),
    Case("LAMB", {**TRUST, "adam_w_mode": False, "maximize": True}, reference.lamb, ADAM),
    Case("LANS", {}, reference.lans, ADAM),
    Case("LANS", {"weight_decay": 0.1, "upper_bound": 2.0}, reference.lans, ADAM),
    Case("LANS", {"lower_bound": 0.5, "clip_gradient": 0.1}, reference.lans, ADAM),
    # Divided by the rounded root of one second moment, and by no later one that makes up for it.
    Case("ADOPT", {}, reference.adopt, ADAM, nmse=1e-3),
    Case("ADOPT", {"weight_decay": 0.1, "clip_exp": None, "maximize": True}, reference.adopt, ADAM),
    Case("ADOPT", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.9)},
         reference.adopt, ADAM),
    _lion(),
    _lion(weight_decay=0.1, maximize=True),
    _lion(percentile_clipping=5),
    Case("RMSprop", {}, reference.rmsprop, SQUARE),
    Case("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}, reference.rmsprop,
         {**SQUARE, **MOMENTUM}),
    _centered({"grad_avg": SIGNED}, alpha=0.9),
    _centered({"grad_avg": SIGNED, **MOMENTUM}, momentum=0.9, weight_decay=0.1, maximize=True),
    Case("Adagrad", {}, reference.adagrad, {"sum": UNSIGNED}),
    Case("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
         reference.adagrad, {"sum": UNSIGNED}),
    Case("AdEMAMix", {}, reference.ademamix, SLOW),
    Case("AdEMAMix", {"t_alpha": 10, "t_beta3": 12}, reference.ademamix, SLOW),
    Case("ScheduleFreeAdamW", {}, reference.schedule_free_adamw, AVERAGED),
    Case("ScheduleFreeAdamW", {"weight_decay": 0.1, "warmup_steps": 5, "r": 1.0, "maximize": True},
         reference.schedule_free_adamw, AVERAGED),
    Case("ScheduleFreeAdamW", {"betas": (0.5, 0.9), "weight_lr_power": 1.0, "max_unorm": 0.5,
                               "percentile_clipping": 5}, reference.schedule_free_adamw, AVERAGED),
    Case("Eve", {}, reference.eve, ADAM),
    Case("Eve", {"target_rms": 1.2, "weight_decay": 0.1}, reference.eve, ADAM),
]  # fmt: skip


def _cautious(name, rule, moments, **options):
    """A mask turns where an error crosses zero: a larger nmse."""
    return Case(name, {"cautious": True, **options}, rule, moments, nmse=2e-2)


CASES_CAUTIOUS = [
    _cautious("SGD", reference.sgd, MOMENTUM, momentum=0.9, weight_decay=0.1),
    _cautious("LARS", reference.lars, MOMENTUM, momentum=0.9, trust_coefficient=0.02),
    _cautious("AdamW", reference.adamw, ADAM),
    _cautious("LAMB", reference.lamb, ADAM, **TRUST),
    _cautious("LANS", reference.lans, ADAM, weight_decay=0.1),
]
# The same links in other chains: what an engine makes of them the cases above have shown.
CASES_IN_DOUBLE = [
    _cautious("SGD", reference.sgd, MOMENTUM, momentum=0.9, nesterov=True),
    _cautious("LARS", reference.lars, MOMENTUM, momentum=0.9, max_unorm=0.05),
    _cautious("Adam", reference.adam, ADAM, weight_decay=0.1),
    _cautious("AdamW", reference.adamw, AMSGRAD, amsgrad=True, percentile_clipping=5),
    _cautious("LAMB", reference.lamb, ADAM),
    _cautious("ADOPT", reference.adopt, ADAM),
    _cautious("Lion", reference.lion, {"exp_avg": SIGNED}, maximize=True),
    _cautious("RMSprop", reference.rmsprop, {**SQUARE, **MOMENTUM}, momentum=0.9),
    _cautious("AdEMAMix", reference.ademamix, SLOW),
    _cautious("Eve", reference.eve, ADAM),
]


def _icefall(name, rule, moments, options):
    """Rules that scale or turn the whole tensor."""
    return Case(name, options, rule, moments, lr=0.05, moves_all=True, fused=False)


def _cain(**options):
    return _icefall("Cain", reference.cain, {"delta": SIGNED, "exp_avg_sq": UNSIGNED}, options)


def _learned(**options):
    rule = reference.learned_gradient
    return _icefall("LearnedGradient", rule, {"exp_avg": SIGNED}, options)


CASES_ICEFALL = [
    _cain(),
    _cain(bias_correction_fix=True, param_max=0.5),
    _cain(betas=(0.0, 0.9), rms_eps=0.05, scale_speed=0.9, eps=1e-3),
    _cain(maximize=True, percentile_clipping=5),
    _learned(lr_est_period=2),  # first, so that the tests of few steps learn matrices as well
    _learned(),
    _learned(lr_est_period=3, param_max_rms=0.5),
    _learned(lr_est_period=1, betas=(0.0, 0.5), max_step_scale=0.5),
    _learned(lr_est_period=2, meta_lr_scale=5.0, size_lr_scale=0.7),
    _learned(lr_est_period=2, max_size=4, param_min_rms=3.0, param_max_rms=9.0),
    _learned(lr_est_period=4, maximize=True, percentile_clipping=5),
]

FUSED_CASES = CASES + CASES_FAMILY + CASES_CAUTIOUS
ALL_CASES = FUSED_CASES + CASES_ICEFALL


def one_per_class(cases=None):
    """The first case of every class that keeps state: for tests that multiply by shape or dtype."""
    stateful = [case for case in (cases or ALL_CASES) if case.moments]
    return list({case.name: case for case in reversed(stateful)}.values())[::-1]


@dataclass(frozen=True)
class Track:
    """One parameter of a trajectory: its shape, where it starts, when it has which gradient."""

    shape: tuple
    start: float = 1.0
    zero: object = field(default=lambda t: False)
    missing: object = field(default=lambda t: False)


TRACKS = {
    "dense": Track((5, 7)),
    "vector": Track((9,)),
    "zero start": Track((3, 4), start=0.0),
    "zero gradient": Track((6,), zero=lambda t: True),
    "zero gradient at times": Track((4, 3), zero=lambda t: t % 3 == 1),
    "zero gradient first": Track((8,), zero=lambda t: t < 3),
    "no gradient at times": Track((3, 5), missing=lambda t: t % 3 == 1),
    "no gradient first": Track((2, 6), missing=lambda t: t < 2),
    "1x1": Track((1, 1)),
    "scalar": Track(()),
    "3-D": Track((2, 3, 4)),
    "4-D": Track((2, 3, 2, 2)),
    "column": Track((6, 1)),
    "all zero": Track((5,), start=0.0, zero=lambda t: True),
}


def starts(tracks, seed=0):
    """Initial parameters, float64 numbers that fp32 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [
        track.start * torch.randn(track.shape, generator=generator).double() for track in tracks
    ]


def gradients(tracks, steps, seed=1):
    """For every step, the list of gradients; None where a parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for t in range(steps):
        row = [torch.randn(track.shape, generator=generator).double() for track in tracks]
        out.append([
            None if track.missing(t) else g * 0 if track.zero(t) else g * (1 + 0.3 * math.sin(t))
            for track, g in zip(tracks, row, strict=True)
        ])  # fmt: skip
    return out


def rates(lr, steps):
    """A learning rate that changes every step."""
    return [lr * (1 + 0.5 * math.sin(t)) for t in range(steps)]


def walk_reference(step, values, grads, lrs):
    """New parameters and states after `step(p, g, state, lr)` over all gradients."""
    values, states = [p.clone() for p in values], [{} for _ in values]
    for row, lr in zip(grads, lrs, strict=True):
        for i, g in enumerate(row):
            if g is not None:
                values[i] = step(values[i], g, states[i], lr)
    return values, states


def walk(optimizer, params, grads, lrs):
    """The same on the package's (or torch's) optimizer, all parameters in one group."""
    for row, lr in zip(grads, lrs, strict=True):
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.to(p)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return params


def as_params(values, dtype, device="cpu"):
    """Leaf parameters in `dtype`."""
    return [torch.nn.Parameter(p.to(device, dtype, copy=True)) for p in values]


def distance(got, want):
    """Largest difference relative to the largest value wanted; where that is 0, absolute."""
    got, want = (torch.as_tensor(x).detach().cpu().double() for x in (got, want))
    if not want.numel():
        return 0.0
    scale = float(want.abs().max())
    worst = float((got - want).abs().max()) / (scale or 1.0)
    return worst if math.isfinite(worst) else math.inf
