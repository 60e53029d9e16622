"""Activations: what a formula says of a transformer, and what torch's memory tracker counts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from .errors import Refused, quiet, sentence
from .footprint import TORCH_DTYPES, Model

if TYPE_CHECKING:
    from torch import nn

BATCH = re.compile(r"[1-9][0-9]{0,17}(x[1-9][0-9]{0,17})+")
# What configurations call the width, the layers, their heads and the vocabulary.
KEYS = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("vocab_size",),
)
# Errors of torch where tensors are fake, and what is meant.
REASONS = {
    "DataDependentOutputException": "its code asks for a number in a tensor, and fake tensors hold "
    "none",
    "_apply(): Couldn't swap": "its code casts the model after it is made, which fake tensors do "
    "not allow; leave that out and give the dtype, as in --dtype bf16",
    "Expected inputs of BF16 type": "torch multiplies fake experts in bf16 alone: --dtype bf16",
}
GENERAL = (
    "Activations are not in the table: of a transformer of L layers of width h with a heads, for "
    "b sequences of s tokens, about s b h L (34 + 5 a s / h) bytes, or 34 s b h L with fused "
    "attention"
)
ASSUMED = (
    "16-bit activations, an MLP of 4 h, dropout, nothing recomputed; without the logits "
    "(arXiv:2205.05198, eq. 1)"
)


def formula(config: dict[str, Any]) -> str:
    """Memory of the activations of one sequence, with the assumptions; numbers if there are."""
    found = [[config[key] for key in keys if type(config.get(key)) is int] for keys in KEYS]
    if not all(found):
        return f"{GENERAL}; {ASSUMED}."
    width, layers, heads, vocabulary = (values[0] for values in found)
    tokens = 1024
    fused = 34 * tokens * width * layers
    whole = fused + 5 * heads * tokens * tokens * layers
    return (
        f"{GENERAL}: for 1 x {tokens} tokens {whole / 1e9:.2f} GB, fused {fused / 1e9:.2f} GB; "
        f"{ASSUMED}, which take {6 * tokens * vocabulary / 1e9:.2f} GB more in 16 and 32 bits."
    )


def shape_of(batch: str) -> tuple[int, ...]:
    """The shape that "8x1024" means.

    Raises:
        Refused: if it means none.
    """
    if not BATCH.fullmatch(batch):
        raise Refused(f"--measure must be the shape of a batch, as in 8x1024; got {batch!r}")
    return tuple(map(int, batch.split("x")))


def measure(model: Model, batch: str) -> str:
    """The peak of activations in a forward and a backward pass of tensors without memory.

    Args:
        model: one that can be built.
        batch: shape of its input: of tokens if it has embeddings, else of numbers.

    Raises:
        Refused: if it cannot be built, or does not run so.
    """
    shape = shape_of(batch)
    if model.build is None:
        raise Refused("--measure needs a model that can be built: a config.json or module:function")
    try:
        with quiet(), redirect_stdout(sys.stderr):
            found = _peak(model, shape)
    except Exception as error:  # noqa: BLE001  # a model's code raises anything
        raise Refused(f"--measure does not work for {model.source}: {_reason(error)}") from None
    return (
        f"Activations and temporaries of a forward and a backward pass of {batch} (the sum of the "
        f"output as loss), at their peak: {found / 1e9:.3f} GB, by torch's MemTracker on fake "
        "tensors."
    )


def _reason(error: Exception) -> str:
    """The reason why a step cannot be taken, in a user's words where torch has its own."""
    said = sentence(error)
    return next((reason for torchs, reason in REASONS.items() if torchs in said), said)


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Have frozen parameters want gradients: the tracker puts hooks on all that it is shown."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _keep_integers_as_buffers(model: nn.Module) -> None:
    """Make buffers of parameters that cannot want gradients, as those of a quantized model."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if not (p.is_floating_point() or p.is_complex()):
                delattr(module, name)
                module.register_buffer(name, p.detach())


def _peak(model: Model, shape: tuple[int, ...]) -> int:
    """All that is there at the peak but parameters, buffers and gradients."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

    before = torch.get_default_dtype()
    known = {short: getattr(torch, name) for name, short in TORCH_DTYPES.items()}
    dtype = next(known[weight.dtype] for weight in model.weights if weight.dtype in known)
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            built = model.build().train()
        finally:
            torch.set_default_dtype(before)
        tokens = any(weight.embedding for weight in model.weights)
        x = torch.zeros(shape, dtype=torch.long) if tokens else torch.zeros(shape, dtype=dtype)
        _keep_integers_as_buffers(built)
        tracker = MemTracker()
        with _all_trained(built):  # `track_external` would leave the hooks to the forward pass
            tracker._track_module_params_and_buffers(built)
        with tracker:
            out = built(x)
            out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
            out.float().sum().backward()
    there = (_MemRefType.PARAM, _MemRefType.BUFFER, _MemRefType.GRAD)
    peak = tracker.get_tracker_snapshot("peak").values()
    return sum(size for one in peak for kind, size in one.items() if kind not in (*there, "Total"))
