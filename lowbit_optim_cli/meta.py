"""Models that are built on the meta device, where tensors have shapes and no memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from lowbit_optim._groups import EMBEDDINGS, parameters_in

from .errors import Refused, plural, quiet, sentence
from .footprint import ITEMSIZE, TORCH_DTYPES, Model, Weight
from .known import architecture

MOST_PARAMETERS = 200_000  # tensors; a model with 256 experts in 60 layers has some 50,000
MOST_BYTES = 1 << 30  # of parameters that are not on the meta device after all
DTYPES = {getattr(torch, name): short for name, short in TORCH_DTYPES.items()}


def of_function(text: str, dtype: str | None) -> Model:
    """The model that `module:function` returns; the folder that one is in is searched, too."""
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    with _saying(f"{text} raised"):
        found: Any = importlib.import_module(module)
        for part in name.split("."):  # which may be imported when it is asked for
            if not hasattr(found, part):
                raise Refused(f"the module {module} has no {name!r}")
            found = getattr(found, part)
    if not callable(found):
        raise Refused(f"{text} must be a function that returns a model; it is {_kind(found)}")
    return _of_module(text, found, dtype, {})


def of_config(path: Path, config: dict[str, Any], dtype: str) -> Model:
    """The model of a Hugging Face configuration: the class that it names, with its heads."""
    try:
        import transformers
    except ImportError as error:
        raise Refused(
            f"{path}, a {config['model_type']!r}, needs transformers ({sentence(error)}): "
            "pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        raise Refused(
            f"{path} has the model_type {config['model_type']!r}, which transformers "
            f"{transformers.__version__} does not know"
        )
    with _saying(f"transformers cannot read {path}:"):
        settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(_decoded(config))
    # transformers imports a class when it is asked for it.
    with quiet(), _saying(f"transformers cannot import what {path} names:"):
        make = _class_of(config)

    def build() -> nn.Module:
        model: Any = make(_part_for(make, settings))
        model.tie_weights()  # transformers 5.0 leaves it undone on the meta device
        return model

    model = _of_module(str(path), build, dtype, config)
    if isinstance(make, type):
        return model
    note = "It names no class that transformers has: the model without a head is taken"
    return replace(model, notes=(note, *model.notes))


def _decoded(value: Any) -> Any:
    """A configuration with its infinities, for which transformers writes `{"__float__": ...}`.

    And without dtypes, which the caller decides; transformers takes few of them.
    """
    if isinstance(value, list):
        return list(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    dtypes = ("dtype", "torch_dtype")
    return {key: _decoded(part) for key, part in value.items() if key not in dtypes}


def _part_for(make: Callable[[Any], nn.Module], settings: Any) -> Any:
    """Settings of the part for text, where a class is of that alone; else those of all."""
    its = getattr(make, "config_class", None)
    if its is None or isinstance(settings, its):
        return settings
    text = settings.get_text_config()
    return text if isinstance(text, its) else settings


def _class_of(config: dict[str, Any]) -> Callable[[Any], nn.Module]:
    """The class in `architectures`, else the model without a head."""
    import transformers

    found = getattr(transformers, architecture(config) or "", None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    return transformers.AutoModel.from_config


def _of_module(
    text: str, build: Callable[[], Any], dtype: str | None, config: dict[str, Any]
) -> Model:
    """The model that `build` makes; a weight that several modules share is listed once."""
    with _saying(f"building {text} raised"), _bounded(text), torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise Refused(f"{text} must return a torch.nn.Module; it returned {_kind(model)}")
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(p):
            raise Refused(f"{text} has {name!r}, whose shape a first forward pass decides")
    embeddings, weights = parameters_in(model, EMBEDDINGS), []
    for name, p in model.named_parameters():
        own = str(p.dtype).removeprefix("torch.") if _is_coded(p) else dtype or DTYPES.get(p.dtype)
        if own not in ITEMSIZE:
            raise Refused(
                f"{text} has the parameter {name!r} of {p.dtype}, which is not trained; give the "
                "dtype that it will have, as in --dtype bf16"
            )
        weights.append(Weight(name, tuple(p.shape), own, p in embeddings, p.requires_grad))
    return Model(text, tuple(weights), tuple(_notes(model)), config, build)


def _notes(model: nn.Module) -> Iterator[str]:
    """Remarks on what the weights leave out, or have once."""
    names = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    shared = names - sum(1 for _ in model.parameters())
    if shared:
        yield f"{plural(shared, 'weight')} shared by two modules, counted once"
    coded = sum(1 for _ in filter(_is_coded, model.parameters()))
    if coded:
        yield f"{plural(coded, 'frozen weight')} of codes, of which each element is counted as one"
    later = sum(1 for _ in filter(_is_coded_later, model.parameters()))
    if later:
        yield f"{plural(later, 'weight')} counted in full: bitsandbytes codes them on a device only"
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    if buffers:
        yield f"{buffers:,} bytes of buffers come on top"


def _is_coded(p: nn.Parameter) -> bool:
    """Whether a parameter keeps its dtype whatever that of the others is, as a quantized one."""
    return not p.requires_grad and p.dtype not in DTYPES


def _is_coded_later(p: nn.Parameter) -> bool:
    """Whether a parameter is one of bitsandbytes', which has no codes before it is moved."""
    return type(p).__module__.startswith("bitsandbytes.") and p.dtype in DTYPES


@contextmanager
def _bounded(text: str) -> Iterator[None]:
    """Refuse a model whose modules alone, or tensors that name a device, fill the memory."""
    count = held = 0

    def register(module: nn.Module, name: str, p: nn.Parameter) -> None:
        nonlocal count, held
        count += 1
        held += 0 if p.is_meta else p.nbytes
        if count > MOST_PARAMETERS:
            raise Refused(f"{text} has more than {MOST_PARAMETERS:,} parameters")
        if held > MOST_BYTES:
            raise Refused(
                f"{text} builds more than {MOST_BYTES:,} bytes of parameters on {p.device}; it "
                "must leave the device to torch.device('meta'), under which it is called"
            )

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Put what somebody else's code raises into a sentence, and what it prints beside results."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others raises anything
        raise Refused(f"{what} {sentence(error)}") from None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
