"""Count the bytes of each parameter that training keeps: weights, gradients and state.

`python -m benchmarks.static.footprint` prints the tables of `docs/memory.md`. They are of AdamW and
of matrices with rows of a multiple of 256 elements; other libraries' by their documented layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

import typer

from benchmarks.common.arithmetic import RESIDUAL_BYTES, STORAGE

# Name, bytes of a weight in the model, `master_weight_bits`.
WEIGHTS: tuple[tuple[str, int, int | None], ...] = (
    ("fp32", 4, None),
    ("bf16, None or 16", 2, 16),
    ("bf16, 24", 2, 24),
    ("bf16, 32", 2, 32),
)
# Library, weights and their bytes with all that is kept beside them, bytes of a gradient, bytes of
# the state for each element and of its scales for each block, elements of a block.
PEERS = (
    ("`torch.optim.AdamW`, fp32", 4, 4, 8, 0, 1),
    ("`torch.optim.AdamW`, bf16", 2, 2, 4, 0, 1),
    ("`torch.optim.AdamW`, fp32 masters of a bf16 model", 6, 2, 8, 0, 1),
    ("bitsandbytes `AdamW8bit`, bf16", 2, 2, 2, 8, 256),
    ("torchao `AdamW8bit`, bf16", 2, 2, 2, 8, 256),
    ("torchao `AdamW4bit`, bf16", 2, 2, 1, 8, 128),
    ("FlashOptim `FlashAdamW`, bf16 and 8 further bits", 3, 2, 2, 4, 32),
)


def state(format: str) -> float:
    """Bytes for each element of what a format keeps of the moments of Adam, scales included."""
    kept = STORAGE[format]
    return kept.element + kept.scales / kept.block


def states() -> Iterator[tuple[str, ...]]:
    """The state of each format."""
    yield ("format", "codes", "scales", "sum", "a row of n elements")
    for name, kept in STORAGE.items():
        times = "" if kept.element == 1 else f"{kept.element} "
        formula = f"{times}n" + (f" + {kept.scales} ⌈n / {kept.block}⌉" if kept.scales else "")
        scales = f"{kept.scales} / {kept.block}" if kept.scales else "0"
        yield f"`{name}`", str(kept.element), scales, f"{state(name):.3f}", formula


def totals() -> Iterator[tuple[str, ...]]:
    """Weights, gradients and state, with gradients that are whole and released."""
    yield ("weights", "kept of them", "gradient", *(f"`{name}`" for name in STORAGE))
    for name, width, bits in WEIGHTS:
        kept = width + RESIDUAL_BYTES[bits]
        sums = [(kept + width + state(format), kept + state(format)) for format in STORAGE]
        yield (
            name, str(kept), str(width), *(f"{whole:.3f} / {less:.3f}" for whole, less in sums)
        )  # fmt: skip


def peers() -> Iterator[tuple[str, ...]]:
    """The same of other libraries."""
    yield "library", "weights", "gradient", "state", "sum"
    for name, weights, gradient, element, scales, block in PEERS:
        kept = element + scales / block
        yield name, str(weights), str(gradient), f"{kept:.3f}", f"{weights + gradient + kept:.3f}"


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    """A table, its first row the head."""
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rest))


def main() -> None:
    """Print the tables of docs/memory.md."""
    print("\n\n".join(markdown(rows()) for rows in (states, totals, peers)))


if __name__ == "__main__":
    typer.run(main)
