"""Models by what a user has of them: a file, a folder, a function or only the shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import decoders, encoder_decoders, encoders
from .errors import Refused, plural
from .footprint import TORCH_DTYPES, Model, Weight
from .headers import Entry, read_header, read_index, read_json
from .known import EMBEDDING, known_weights

CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"  # of peft
# What a folder is taken for, in this order: a configuration of diffusers is none of transformers.
FILES = (
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
    CONFIG, "model.safetensors.index.json", "model.safetensors", ADAPTER,
)  # fmt: skip
MOST_ELEMENTS = 1 << 50
MOST_LAYERS = 100_000  # also of labels and whatever else a configuration makes lists of
SIZE = "[0-9]{1,18}"
SHAPES = re.compile(f"{SIZE}(x{SIZE})*(,{SIZE}(x{SIZE})*)*")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
# Names that buffers have in the usual libraries, and scales of fp8: a file does not say what they
# are.
BUFFER = re.compile(
    r"(^|\.)(running_(mean|var)|(rotary_emb\.)?inv_freq|freqs_cis|masked_bias|position_ids"
    r"|final_logits_bias|e_score_correction_bias)$"
    r"|weight_scale(_inv)?$|(^|\.)h\.\d+\.attn\.bias$"
)
# Names of numbers of which lists are made; those that are widths of one are not.
LISTED = re.compile(r"^(?!.*(size|dim)).*(layer|label|depth)")
# Names that tensors of integers have where they are weights, and those several to a number.
QUANTIZED = re.compile(r"(weight(_packed)?|_blocks|W_q)$")
KNOWN = {**decoders.KNOWN, **encoders.KNOWN, **encoder_decoders.KNOWN}
TAKEN = (
    "a config.json or a folder with one, a safetensors file or its index.json, module:function, or "
    "shapes such as 4096x4096,4096"
)


def read_model(text: str, dtype: str | None = None, build: bool = False) -> Model:
    """The model that an argument names.

    Args:
        text: the argument.
        dtype: of all its weights, instead of what it says itself.
        build: whether it has to be one that can be built, where that can be chosen.

    Raises:
        Refused: if there is no such model, or its description is not sound.
    """
    model = _read(text, dtype, build)
    if not any(weight.trained and math.prod(weight.shape) for weight in model.weights):
        raise Refused(f"{text} has no parameters to train")
    if model.parameters > MOST_ELEMENTS:
        raise Refused(f"{text} has too many parameters; at most 2^50 are reckoned")
    return model


def _read(text: str, dtype: str | None, build: bool) -> Model:
    path = Path(text)
    try:
        found = bool(text) and path.exists()
    except OSError:  # a name that is too long, for instance
        found = False
    if found:
        return _of_path(path, dtype, build)
    if SHAPES.fullmatch(text):
        return _of_shapes(text, dtype)
    if FUNCTION.fullmatch(text):
        from . import meta

        return meta.of_function(text, dtype)
    raise Refused(f"{text!r} is no model: there is no such file, and MODEL is {TAKEN}")


def _of_path(path: Path, dtype: str | None, build: bool) -> Model:
    if path.is_dir():
        for name in FILES:
            if (path / name).is_file():
                return _of_path(path / name, dtype, build)
        raise Refused(f"the folder {path} has no {', '.join(FILES[:-1])} or {FILES[-1]}")
    if not path.is_file():  # a pipe may never end
        raise Refused(f"{path} is no file; MODEL is {TAKEN}")
    if path.name.endswith(".index.json"):
        return _of_entries(str(path), read_index(path), dtype)
    if path.suffix == ".json":
        return _of_config(path, dtype, build)
    if path.suffix == ".safetensors":
        model = _of_entries(str(path), read_header(path), dtype)
        on_top = "An adapter alone: the frozen weights of the model that it adapts come on top"
        return replace(model, notes=(*model.notes, on_top)) if path.name == ADAPTER else model
    raise Refused(f"{path} is no model; MODEL is {TAKEN}")


def _of_config(path: Path, dtype: str | None, build: bool) -> Model:
    """The model of a Hugging Face configuration, by its sizes or built by transformers."""
    config = read_json(path)
    if isinstance(config, dict) and "_diffusers_version" in config:
        raise Refused(f"{path} is of diffusers; give the safetensors file of its weights")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise Refused(f"{path} has no 'model_type'; it is not a configuration of transformers")
    _check_sizes(path, config)
    said = str(_dtype(config) or "float32").removeprefix("torch.")
    own = dtype or TORCH_DTYPES.get(said, "fp32")
    weights = None if build else known_weights(KNOWN, config, own)
    if weights is not None:
        model = Model(str(path), weights, config=config)
    else:
        from . import meta

        model = meta.of_config(path, config, own)
    notes = []
    if config.get("quantization_config"):
        notes.append(f"Its quantization is left out: all weights are trained, in {own}")
    if dtype is None and said not in TORCH_DTYPES:
        notes.append(
            f"Its dtype {said!r} is not one of those that are trained here: {own} is taken"
        )
    return replace(model, notes=(*notes, *model.notes))


def _dtype(config: dict[str, Any]) -> Any:
    """The dtype of a configuration; where it has none, that of the part for text."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    said = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next(filter(None, said), None)


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    """Refuse numbers of which lists are made that no memory holds."""
    for key, value in config.items():
        listed = bool(LISTED.search(key))
        if isinstance(value, dict):
            _check_sizes(path, value)
        elif type(value) is int and (abs(value) >= 1 << 40 or (listed and value > MOST_LAYERS)):
            most = f"{MOST_LAYERS:,}" if listed else "2^40"
            raise Refused(f"{path} has {key}={value}; at most {most} is taken")


def _of_shapes(text: str, dtype: str | None) -> Model:
    shapes = [tuple(map(int, one.split("x"))) for one in text.split(",")]
    weights = (Weight(f"tensor {i}", s, dtype or "fp32") for i, s in enumerate(shapes))
    return Model(plural(len(shapes), "shape"), tuple(weights))


def _of_entries(where: str, entries: Iterable[Entry], dtype: str | None) -> Model:
    """The floating tensors of files, those with names of buffers left out."""
    weights, left_out = [], []
    for entry in entries:
        floating = entry.dtype[0] in "FC" or entry.dtype == "BF16"
        if not floating and QUANTIZED.search(entry.name):
            raise Refused(
                f"{where} has quantized weights, as {entry.name!r} in {entry.dtype}, whose shapes "
                f"may not be the model's; give its {CONFIG}"
            )
        if not floating or BUFFER.search(entry.name):
            left_out.append(entry.name)
            continue
        own = dtype or DTYPES.get(entry.dtype)
        if own is None:
            raise Refused(
                f"{where} has the tensor {entry.name!r} in {entry.dtype}, which is not trained; "
                "give the dtype that it will have, as in --dtype bf16"
            )
        weights.append(Weight(entry.name, entry.shape, own, bool(EMBEDDING.search(entry.name))))
    notes = []
    if left_out:
        notes.append(f"{plural(len(left_out), 'tensor')} left out as buffers, as {left_out[0]}")
    return Model(where, tuple(weights), tuple(notes))
