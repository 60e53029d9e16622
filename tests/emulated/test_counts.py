"""What an emulated step costs, and which ceiling binds."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton engine needs the triton package")
pytest.importorskip("typer", reason="benchmarks.static.instructions is a command line program")

from benchmarks.static import instructions, wavefronts
from benchmarks.static.instructions import ROWS


def test_a_step_of_32_bit_state_touches_its_bytes_and_little_more():
    (found,) = wavefronts.measure(ROWS["AdamW"], 32, torch.bfloat16, 90).values()
    moved = 3 * 2 + 2 * 8  # bytes an element; p and two moments are read and written
    assert moved <= found.sectors <= 1.5 * moved  # of 32 bytes, for each 32 elements
    lines = moved / 4
    assert lines <= found.wavefronts <= 4 * lines


def test_rows_that_end_in_short_blocks_cost_more():
    whole, ragged = (
        wavefronts.measure(
            ROWS["SGD"], 8, torch.float32, 80, width, dither=False, min_8bit_size=1
        )["update"]
        for width in (2048, 300)
    )  # fmt: skip
    assert ragged.wavefronts > whole.wavefronts
    assert ragged.instructions > whole.instructions


def test_the_least_of_three_rates_binds():
    chip = instructions.CHIPS["sm_90"]
    rates = chip.rates(instructions=64.0, moved=10.0, wavefronts=32.0)
    assert rates == pytest.approx({
        "memory": 480.0, "issue": 132 * 1.98 * 2, "load/store": 132 * 1.98,
    })  # fmt: skip
    found = instructions.measure("SGD", "bf16", 8, "sm_90", emulate=True)
    assert set(found["rates"]) == {"H200 SXM", "H100 SXM"}
    own = found["rates"]["H200 SXM"]
    assert found["g_elements_per_s"] == min(own.values()) == own[found["bound"]]
    assert found["wavefronts"] > 0
    assert instructions.measure("SGD", "bf16", 8, "sm_90")["wavefronts"] is None
