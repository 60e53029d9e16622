"""Count the bytes of each parameter that training keeps: weights, gradients and state.

`python -m benchmarks.static.footprint` prints the tables of `docs/memory.md`. They are of AdamW and
of matrices with rows of a multiple of 256 elements; `lowbit-optim estimate` has those of a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import typer

from benchmarks.common import tables
from lowbit_optim_cli import optimizers
from lowbit_optim_cli.footprint import Storage

STORAGE = {
    format: optimizers.storage(optimizers.ROLES["AdamW"], format) or Storage(8)
    for format in optimizers.FORMATS
}
# Name, bytes of a weight in the model, `master_weight_bits`.
WEIGHTS: tuple[tuple[str, int, int | None], ...] = (
    ("fp32", 4, None),
    ("bf16, None or 16", 2, 16),
    ("bf16, 24", 2, 24),
    ("bf16, 32", 2, 32),
)
# Library, weights and their bytes with all that is kept beside them, bytes of a gradient, and the
# state.
TORCH = (
    ("`torch.optim.AdamW`, fp32", 4, 4, Storage(8)),
    ("`torch.optim.AdamW`, bf16", 2, 2, Storage(4)),
    ("`torch.optim.AdamW`, fp32 masters of a bf16 model", 6, 2, Storage(8)),
)
PEERS = (
    ("bitsandbytes", "AdamW8bit", None, "bitsandbytes `AdamW8bit`, bf16"),
    ("torchao", "AdamW8bit", None, "torchao `AdamW8bit`, bf16"),
    ("torchao", "AdamW4bit", None, "torchao `AdamW4bit`, bf16"),
    ("flashoptim", "FlashAdamW", 24, "FlashOptim `FlashAdamW`, bf16 and 8 further bits"),
)


def state(kept: Storage) -> float:
    """Bytes for each element of the moments of Adam, scales included."""
    return kept.element + kept.scales / kept.block


def states() -> Iterator[tuple[str, ...]]:
    """The state of each format."""
    yield ("format", "codes", "scales", "sum", "a row of n elements")
    for name, kept in STORAGE.items():
        times = "" if kept.element == 1 else f"{kept.element} "
        formula = f"{times}n" + (f" + {kept.scales} ⌈n / {kept.block}⌉" if kept.scales else "")
        scales = f"{kept.scales} / {kept.block}" if kept.scales else "0"
        yield f"`{name}`", str(kept.element), scales, f"{state(kept):.3f}", formula


def totals() -> Iterator[tuple[str, ...]]:
    """Weights, gradients and state, with gradients that are whole and released."""
    yield ("weights", "kept of them", "gradient", *(f"`{name}`" for name in STORAGE))
    for name, width, bits in WEIGHTS:
        kept = width + optimizers.RESIDUAL_BYTES[bits]
        sums = [(kept + width + state(one), kept + state(one)) for one in STORAGE.values()]
        yield (
            name, str(kept), str(width), *(f"{whole:.3f} / {less:.3f}" for whole, less in sums)
        )  # fmt: skip


def peers() -> Iterator[tuple[str, ...]]:
    """The same of other libraries."""
    yield "library", "weights", "gradient", "state", "sum"
    rows = list(TORCH)
    layouts = {(one.library, one.name, one.bits): one for one in optimizers.layouts(bf16=True)}
    for library, name, bits, text in PEERS:
        layout = layouts[library, name, bits]
        if layout.coded is not None:
            rows.append((text, 2 + layout.residual, 2, layout.coded))
    for text, weights, gradient, storage in rows:
        kept = state(storage)
        yield text, str(weights), str(gradient), f"{kept:.3f}", f"{weights + gradient + kept:.3f}"


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    """A table, its first row the head."""
    return tables.markdown(next(rows), rows)


def main() -> None:
    """Print the tables of docs/memory.md."""
    print("\n\n".join(markdown(rows()) for rows in (states, totals, peers)))


if __name__ == "__main__":
    typer.run(main)
