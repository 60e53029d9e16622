"""Layouts of the optimizers: this package's in every format, and other libraries'.

Numbers, so that they are known without importing torch. `tests/test_cli_footprint.py` compares
this package's with what the classes and their `Format` objects allocate, and `make peers` the
others' with what the installed libraries do; what cannot run on a CPU is marked `documented`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .footprint import BUCKET_BYTES, Layout, Shape, Storage

OWN = "lowbit_optim"
STEP_BYTES = 8  # an int64 count for each parameter
RESIDUAL_BYTES: dict[int | None, int] = {None: 0, 16: 0, 24: 1, 32: 2}  # by master_weight_bits
FORMATS = ("float32", "dynamic8", "ratio8", "ratio4")
BITS = {"float32": 32, "dynamic8": 8, "ratio8": 8, "ratio4": 4}
# The roles of the moments that each optimizer keeps with its default settings; SGD and LARS with
# momentum. One that is exact has 32 bits in every format.
ROLES: dict[str, tuple[str, ...]] = {
    "Adam": ("ratio", "square"),
    "AdamW": ("ratio", "square"),
    "LAMB": ("ratio", "square"),
    "LANS": ("ratio", "square"),
    "Eve": ("ratio", "square"),
    "ADOPT": ("signed", "square"),
    "AdEMAMix": ("ratio", "signed", "square"),
    "ScheduleFreeAdamW": ("square", "exact"),
    "SGD": ("signed",),
    "LARS": ("signed",),
    "Lion": ("sign",),
    "RMSprop": ("square",),
    "Adagrad": ("square",),
    "Cain": ("signed", "square"),
    "LearnedGradient": ("signed",),
}
FIXED = {"ScheduleFreeAdamW": 16}  # two fp64 numbers beside the steps
EAGER = ("Cain", "LearnedGradient")  # stepped tensor by tensor


def _cain(shape: Shape) -> int:
    """Numbers of a vector along each dimension, and one more."""
    return sum(shape) + 1 if math.prod(shape) > 1 else 0


def _learned_gradient(shape: Shape) -> int:
    """Numbers of two matrices for each dimension, and seven; of tensors of 5 elements a square."""
    numel = math.prod(shape)
    numbers = 7 if numel > 1 else 0
    if numel <= 5:
        return numbers + numel
    return numbers + 2 * sum(size * size for size in shape if 1 < size < numel)


FURTHER = {"Cain": _cain, "LearnedGradient": _learned_gradient}


def _fits_ratio4(roles: tuple[str, ...]) -> bool:
    return sorted(roles) == ["ratio", "square"]


def storage(roles: tuple[str, ...], format: str) -> Storage | None:
    """Storage of moments of these roles in a format; None for one that keeps numbers.

    Raises:
        ValueError: if the format cannot keep them.
    """
    coded = [role for role in roles if role != "exact"]
    if format == "float32":
        return None
    if format == "ratio4":
        if not _fits_ratio4(roles):
            raise ValueError(f"ratio4 keeps a ratio and a square; got {roles}")
        return Storage(1, 6, 64)
    if format == "dynamic8" or set(coded) == {"sign"}:
        return Storage(len(coded), 4 * len(coded), 256)
    scales = sum(4 if role == "square" else 2 for role in coded)
    return Storage(len(coded), scales, 64)


def own(family: str, format: str, bits: int | None) -> Layout:
    """An optimizer of this package.

    Args:
        family: a key of `ROLES`.
        format: one of `FORMATS`.
        bits: `master_weight_bits`.
    """
    roles = ROLES[family]
    return Layout(
        OWN, family, f"{family}{BITS[format]}bit", format, len(roles),
        coded=storage(roles, format), exact=roles.count("exact"), least_width=4,
        fixed=STEP_BYTES + FIXED.get(family, 0), further=FURTHER.get(family), bits=bits,
        residual=RESIDUAL_BYTES[bits], overrides=True, own=True,
        bucket_bytes=None if family in EAGER else BUCKET_BYTES, whole=family in EAGER,
    )  # fmt: skip


def own_layouts(bf16: bool) -> Iterator[Layout]:
    """Every optimizer of this package in each format, and each width of weights of bf16 ones."""
    widths = (16, 24, 32) if bf16 else (None,)
    for family, roles in ROLES.items():
        for format in FORMATS:
            if format != "ratio4" or _fits_ratio4(roles):
                yield from (own(family, format, bits) for bits in widths)


def _torch() -> Iterator[Layout]:
    """Moments in the parameter's dtype, and an fp32 count of steps."""
    moments = {"Adam": 2, "AdamW": 2, "RMSprop": 1, "Adagrad": 1}
    for family, count in moments.items():
        yield Layout("torch", family, family, "as weights", count, fixed=4)
    yield Layout("torch", "SGD", "SGD", "as weights", 1)


SINGLE = ("SGD", "Lion", "RMSprop", "Adagrad")  # of one moment


def _bitsandbytes() -> Iterator[Layout]:
    """Blocks over the flattened tensor, and code books that all parameters share."""
    moments = {"Adam": 2, "AdamW": 2, "AdEMAMix": 3, **dict.fromkeys(SINGLE, 1)}
    for family, count in moments.items():
        yield Layout(
            "bitsandbytes", family, f"{family}8bit", "dynamic8", count,
            coded=Storage(count, 4 * count, 256, by_rows=False), least_width=4,
            shared=1024 if count == 1 else 2048, overrides=True,
        )  # fmt: skip
    # One scale a tensor, kept twice, and a number for the cap.
    for family, count in (("LAMB", 2), ("LARS", 1)):
        yield Layout(
            "bitsandbytes", family, f"{family}8bit", "dynamic8, one block", count,
            coded=Storage(count), least_width=4, fixed=4, tables=8 * count, shared=1024 * count,
            overrides=True,
        )  # fmt: skip
    for family, count in moments.items():
        name = family if family == "AdEMAMix" else f"{family}32bit"
        yield Layout("bitsandbytes", family, name, "float32", count, least_width=4)


def _torchao() -> Iterator[Layout]:
    """Blocks over the flattened tensor, and code books for each; others in the weights' dtype."""
    for family in ("Adam", "AdamW"):
        for suffix, format, element, block, tables in (
            ("8bit", "dynamic8", 2, 256, 2048), ("4bit", "4 bits", 1, 128, 128),
            ("Fp8", "fp8", 2, 256, 0),
        ):  # fmt: skip
            yield Layout(
                "torchao", family, f"{family}{suffix}", format, 2,
                coded=Storage(element, 8, block, by_rows=False), fixed=4, tables=tables,
                multiple=block,
            )  # fmt: skip


def _flashoptim(bf16: bool) -> Iterator[Layout]:
    """Groups of 32 elements with an fp16 scale for each moment; bits beside bf16 weights."""
    moments = {"Adam": 2, "AdamW": 2, "SGD": 1, "Lion": 1}
    for family, count in moments.items():
        for bits in (24, 32) if bf16 else (None,):
            yield Layout(
                "flashoptim", family, f"Flash{family}", "8 bits", count,
                coded=Storage(count, 2 * count, 32, by_rows=False), least=0, bits=bits,
                fixed=STEP_BYTES if count == 2 else 0, residual=RESIDUAL_BYTES[bits],
                bucket_bytes=0, documented=True,
            )  # fmt: skip


def layouts(bf16: bool) -> list[Layout]:
    """Every row: this package's, then torch's, bitsandbytes', torchao's and FlashOptim's."""
    return [
        *own_layouts(bf16), *_torch(), *_bitsandbytes(), *_torchao(), *_flashoptim(bf16),
    ]  # fmt: skip
