"""This package's optimizers under names of timm's registry."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import lowbit_optim

from ._lars import LARS_PRESETS
from ._optimizer import LowBitOptimizer

PREFIX = "lowbit"
# What timm's own optimizers of these names compute, where our constructors' defaults differ.
AS_IN_TIMM: dict[str, dict[str, Any]] = {
    "sgd": {"nesterov": True},
    "lars": {"lr": 1.0, **LARS_PRESETS["timm"]},
    "lamb": {"trust_coefficient": 1.0, "eps": 1e-6},
    "rmsprop": {"alpha": 0.9},
    "adagrad": {"eps": 1e-8},
    "adopt": {"clip_exp": 0.333},
}


def register() -> list[str]:
    """Make timm's `create_optimizer_v2` and its scripts' `--opt` know this package's optimizers.

    A name is "lowbit" and the class's in lower case: "lowbitadamw8bit", as timm has "bnbadamw8bit".
    (timm reads what stands before an underscore as a wrapper, as in "lookahead_lowbitadamw8bit".)
    Arguments are the class's own, but for what the families mean in timm: `sgd` has Nesterov's
    momentum, `lars` is `LARS_PRESETS["timm"]` with an `lr` of 1.0, `rmsprop` has an `alpha` of 0.9,
    `adagrad` an `eps` of 1e-8, `adopt` a `clip_exp` of 0.333, and `lamb` the paper's trust ratio
    (timm's also clips the norm of all gradients together, and adapts only what has weight decay).
    timm gives a momentum of 0.9 to all that have one. Left out are `Cain` and `LearnedGradient`,
    which have no weight decay, and timm always passes one, and `ScheduleFreeAdamW`, whose `eval()`
    timm's scripts do not call.

    Calling it again changes nothing.

    Returns:
        The names, sorted.

    Raises:
        ImportError: if timm is not installed, or does not import.

    Example:
        >>> lowbit_optim.timm.register()
        >>> optimizer = timm.optim.create_optimizer_v2(model, opt="lowbitadamw8bit", lr=1e-3)
    """
    optim = importlib.import_module("timm.optim")
    registry = importlib.import_module("timm.optim._optim_factory").default_registry
    names = {f"{PREFIX}{cls.__name__.lower()}": cls for cls in _classes()}
    for name in sorted(names.keys() - set(registry.list_optimizers(f"{PREFIX}*"))):
        registry.register(_info(optim.OptimInfo, name, names[name]))
    return sorted(names)


def _classes() -> list[type[LowBitOptimizer]]:
    """The optimizers that can be constructed as timm does it."""
    return [
        cls
        for cls in vars(lowbit_optim).values()
        if inspect.isclass(cls) and issubclass(cls, LowBitOptimizer)
        if "weight_decay" in inspect.signature(cls).parameters and not hasattr(cls, "eval")
    ]


def _info(make: Any, name: str, cls: type[LowBitOptimizer]) -> Any:
    """A row of timm's registry."""
    arguments = inspect.signature(cls).parameters
    betas = arguments["betas"].default if "betas" in arguments else ()
    narrow = re.search("[48](?=bit$)", name)
    family = re.sub("(4|8|32)bit$", "", name.removeprefix(PREFIX))
    return make(
        name=name,
        opt_class=cls,
        description=f"lowbit_optim {cls.family} with {narrow[0] if narrow else 32}-bit state",
        has_eps="eps" in arguments,
        has_momentum="momentum" in arguments,
        has_betas=bool(betas),
        num_betas=len(betas) or 2,
        defaults=AS_IN_TIMM.get(family),
    )
