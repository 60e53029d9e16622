"""`GlobalOptimManager`: settings of single parameters, whichever group they are in."""

from __future__ import annotations

import difflib
import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from . import _checks
from ._arguments import NON_SETTING_ARGUMENTS
from ._settings import COMMON_DEFAULTS, Validate, resolved, with_storage

NOT_PER_PARAMETER = ("foreach", "fused", "capturable", "differentiable")
NEUTRAL = {
    "lr": 0.0, "optim_bits": 32, "min_8bit_size": 4096, "percentile_clipping": 100,
    "max_unorm": 0.0, "maximize": False, "capturable": False, "differentiable": False,
    "foreach": None, "fused": None, **COMMON_DEFAULTS,
}  # fmt: skip

_all_settings: dict[str, None] = {}
_own_settings: set[str] = set()  # of the optimizers of this package
_counter = itertools.count(1)


def know_settings(cls: type) -> None:
    """Add the constructor arguments of an optimizer to what may be overridden."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        name
        for name, argument in inspect.signature(cls).parameters.items()
        if argument.kind not in variable and name not in NON_SETTING_ARGUMENTS + NOT_PER_PARAMETER
    ]
    _all_settings.update(dict.fromkeys(names))
    if cls.__module__.partition(".")[0] == __package__:
        _own_settings.update(names)


def own_settings() -> set[str]:
    """The constructor arguments of this package's optimizers, but those that say how to run.

    Not those of classes that a user has made of them: any group may have keys of such a name.
    """
    return set(_own_settings)


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an override that names only settings, each with a value that may be right."""
    if not isinstance(config, Mapping):
        raise TypeError(f"an override must be a dict of settings; got {config!r}")
    for key in config:
        if key not in _all_settings:
            near = difflib.get_close_matches(str(key), _all_settings)
            allowed = ", ".join(near or sorted(_all_settings))
            hint = "did you mean" if near else "there are"
            raise ValueError(f"an override names the unknown setting {key!r}; {hint}: {allowed}")
    settings = resolved({**NEUTRAL, **with_storage(config, NEUTRAL)})
    _checks.initial_learning_rate(settings["lr"])
    _checks.common(settings)
    return {key: list(x) if isinstance(x, list) else x for key, x in config.items()}


class GlobalOptimManager:
    """Overrides settings of single parameters, in every optimizer of this package; one per process.

    It has the methods of bitsandbytes' class of this name. An override belongs to the parameter,
    not to an optimizer or to a place in a group, and it can be made before or after the optimizer
    is constructed. It is looked up at the parameter's first step, and again after a later override.
    A setting that is overridden no longer follows its group: a scheduler does not move an
    overridden `lr`. Of two overrides of one setting the later counts.

    Parameters and modules are held weakly. An override lives as long as the parameter or the module
    that it was made for, and is not part of `state_dict()`: make it again before a checkpoint is
    loaded.

    Raises:
        RuntimeError: when constructed; there is one, from `get_instance`.

    Example:
        >>> manager = GlobalOptimManager.get_instance()
        >>> manager.register_module_override(model.embedding, "weight", {"optim_bits": 32})
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)

    Where it differs: bitsandbytes ignores unknown keys and identifies parameters by `id`, which
    Python gives again to later objects. An `override_config` that `register_parameters` follows
    counts there for whatever parameter has the same position in any optimizer, too; up to 0.49 one
    that it does not follow has no effect.
    """

    _instance: GlobalOptimManager | None = None
    _version: int
    _parameters: WeakTensorKeyDictionary
    _modules: list[tuple[int, weakref.ref[nn.Module], str, dict[str, Any]]]

    def __init__(self) -> None:
        raise RuntimeError("GlobalOptimManager is one per process: use get_instance()")

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        """The process's manager."""
        if cls._instance is None:
            made = cls.__new__(cls)
            made.initialize()
            cls._instance = made
        return cls._instance

    def initialize(self) -> None:
        """Forget every override."""
        self._version = next(_counter)
        self._parameters = WeakTensorKeyDictionary()
        self._modules = []

    def register_parameters(self, params: Iterable[Any]) -> None:
        """Check that `params` are tensors, alone or in groups; nothing has to be registered here.

        bitsandbytes wants this call so that overrides find their parameters again. Here they stay
        with the parameter, through `module.to(device)` too.

        Args:
            params: parameters, named parameters or parameter groups.

        Raises:
            TypeError: for anything else.
        """
        for item in _listed(params, "params"):
            members = item.get("params", [None]) if isinstance(item, dict) else [item]
            for member in _listed(members, "params"):
                _require_tensor(member[-1] if isinstance(member, tuple) else member, "params")

    def override_config(
        self,
        parameters: Tensor | Iterable[Tensor],
        key: str | None = None,
        value: Any = None,
        key_value_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Override settings of parameters.

        Args:
            parameters: one parameter or several.
            key: a setting, e.g. "optim_bits", "lr" or "betas".
            value: what `key` is for these parameters.
            key_value_dict: several settings with their values, in place of `key` and `value`.

        Raises:
            ValueError, TypeError: for a key that no optimizer has, a value that a setting which all
                have does not allow, `parameters` that are not tensors, or when both or neither of
                `key` and `key_value_dict` are given. Nothing has been overridden then. A setting
                that a certain optimizer does not have, or does not allow, raises at its first step.

        Example:
            >>> manager = GlobalOptimManager.get_instance()
            >>> manager.override_config(model.head.weight, "optim_bits", 32)
        """
        if (key is None) == (key_value_dict is None) or (key is None and value is not None):
            raise ValueError("override_config takes either key and value, or key_value_dict")
        config = _checked({str(key): value} if key_value_dict is None else key_value_dict)
        members = _listed(parameters, "parameters")
        for p in members:
            _require_tensor(p, "parameters")
        self._version = next(_counter)
        for p in members:
            self._parameters.setdefault(p, []).append((self._version, config))

    def register_module_override(
        self, module: nn.Module, param_name: str, config: Mapping[str, Any]
    ) -> None:
        """Override settings of a module's parameter, found by its name when it is first stepped.

        Other than `override_config` this also holds when the module gets another parameter of that
        name before training starts, as `torch.distributed.fsdp.fully_shard` does. Of a parametrized
        weight it holds for the parameters that it is made of. A tensor that is no parameter, such
        as a buffer, is accepted as in bitsandbytes, and nothing is overridden: the Trainer of
        transformers registers the weight of every embedding without a look at it.

        Args:
            module: a module that has the parameter.
            param_name: its name in the module, e.g. "weight"; of a submodule's, with dots.
            config: settings with their values.

        Raises:
            ValueError, TypeError: if `module` is none or has no such parameter, for a key that no
                optimizer has, or for a value that is not allowed, as by `override_config`. Nothing
                has been overridden then.
        """
        _checks.module("module", module)
        if not isinstance(param_name, str):
            raise TypeError(f"param_name must be a string; got {param_name!r}")
        if _parameters_of(module, param_name) is None:
            has = ", ".join(name for name, _ in module.named_parameters()) or "none"
            raise ValueError(
                f"{type(module).__name__} has no parameter {param_name!r}; its parameters: {has}"
            )
        entry = (weakref.ref(module), param_name, _checked(config))
        self._version = next(_counter)
        self._modules.append((self._version, *entry))

    @property
    def module_weight_config_triple(self) -> tuple[tuple[Any, str, dict[str, Any]], ...]:
        """A copy of what is overridden of modules that live: module, name and settings of each."""
        found = ((module(), name, dict(config)) for _, module, name, config in self._modules)
        return tuple(entry for entry in found if entry[0] is not None)

    def _finder(self) -> Callable[[Tensor], dict[str, Any]]:
        """A function that gives a parameter's overrides, for the modules as they are now."""
        self._modules = [entry for entry in self._modules if entry[1]() is not None]
        of_modules: dict[Tensor, list[tuple[int, dict[str, Any]]]] = {}
        for version, module, name, config in self._modules:
            for p in _parameters_of(module(), name) or ():
                of_modules.setdefault(p, []).append((version, config))

        def find(p: Tensor) -> dict[str, Any]:
            found = [*of_modules.get(p, ()), *self._parameters.get(p, ())]
            merged: dict[str, Any] = {}
            for _, config in sorted(found, key=lambda pair: pair[0]):
                merged.update(with_storage(config, merged))
            return merged

        return find


def _listed(value: Any, name: str) -> list[Any]:
    """One tensor, or several things, as a list."""
    if isinstance(value, Tensor):
        return [value]
    _checks.several(name, value, "tensors")
    return list(value)


def _require_tensor(value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be tensors; got {type(value).__name__}")


def _parameters_of(module: nn.Module | None, name: str) -> list[Tensor] | None:
    """The parameters behind a name, none of a tensor that is no parameter; None without either."""
    if module is None:
        return None
    path, _, own = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        # Not asked for its value, which would be computed, and spectral_norm change by it.
        if parametrize.is_parametrized(owner, own):
            made_of = owner.get_submodule(f"parametrizations.{own}")
            return list(made_of.parameters(recurse=False))
        value = getattr(owner, own)
    except AttributeError:  # torch's way to say that there is none
        return None
    if isinstance(value, nn.Parameter):
        return [value]
    return [] if isinstance(value, Tensor) else None


class Overrides:
    """Overrides of one optimizer's parameters; each parameter is looked up once."""

    def __init__(self) -> None:
        self._version = 0
        self._known: dict[Tensor, tuple[tuple, dict[str, Any]]] = {}

    def keep(self, params: Iterable[Tensor]) -> None:
        """Forget what is known of other parameters than these, which it would keep alive."""
        self._known = {p: self._known[p] for p in params if p in self._known}

    def parts(
        self, group: Mapping[str, Any], validate: Validate
    ) -> list[tuple[tuple, Mapping[str, Any]]]:
        """A group, cut up by what is overridden of its parameters.

        Args:
            group: a parameter group's resolved settings.
            validate: raises for settings that the optimizer does not allow.

        Returns:
            Pairs of a key that is the same in every step, and a parameter group. Without overrides
            that is the group itself.
        """
        manager = GlobalOptimManager._instance
        if manager is None or not (manager._modules or manager._parameters):
            return [((), group)]
        self._look_up(manager, group)
        members: dict[tuple, list[Tensor]] = {}
        configs: dict[tuple, dict[str, Any]] = {}
        for p in group["params"]:
            key, config = self._known[p]
            members.setdefault(key, []).append(p)
            configs[key] = config
        if not any(configs.values()):
            return [((), group)]
        parts: list[tuple[tuple, Mapping[str, Any]]] = [
            (key, {**group, **with_storage(resolved(configs[key]), group), "params": members[key]})
            for key in members
        ]
        for _, part in parts:
            validate(part)
        return parts

    def _look_up(self, manager: GlobalOptimManager, group: Mapping[str, Any]) -> None:
        if self._version != manager._version:
            self._version, self._known = manager._version, {}
        missing = [p for p in group["params"] if p not in self._known]
        if not missing:
            return
        find = manager._finder()
        found = {p: find(p) for p in missing}
        for config in found.values():
            for key in config:
                if key not in group:
                    raise ValueError(
                        f"GlobalOptimManager overrides {key!r}, a setting that this optimizer "
                        f"does not have; it has {', '.join(k for k in group if k in _all_settings)}"
                    )
        self._known.update((p, (_key(config), config)) for p, config in found.items())


def _key(config: Mapping[str, Any]) -> tuple:
    """A key that tells an override from others; a tensor is itself, whatever its value is now."""
    return tuple((name, _told_apart(value)) for name, value in sorted(config.items()))


def _told_apart(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_told_apart, value))
    plain = isinstance(value, Hashable) and not isinstance(value, Tensor)
    return value if plain else id(value)
