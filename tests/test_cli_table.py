"""The table of `lowbit-optim estimate` on terminals of any width."""

import io

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from lowbit_optim_cli import estimate, models
from test_cli_estimate import run, safetensors


def lines(width, shards, *optimizers):
    """The rows, and the lines of their table as a terminal of a width is sent them."""
    model = models.read_model("409600x409600,4096", "bf16")
    rows = estimate.rows_of(model, estimate.choose(optimizers, True), shards, False)
    terminal = io.StringIO()
    console = Console(file=terminal, width=width, markup=False, highlight=False)
    estimate.show(console, model, rows, shards, [])
    return rows, terminal.getvalue().partition("Largest gradient")[0].splitlines()


@pytest.mark.parametrize("optimizers", [("AdamW",), ("all",)])
@pytest.mark.parametrize("shards", [1, 8])
def test_no_terminal_cuts_a_number(shards, optimizers):
    for width in range(60, 201, 10):
        rows, table = lines(width, shards, *optimizers)
        shown = [line.split() for line in table if line[:2] == "  " and line.strip()][-len(rows) :]
        assert not any("…" in line for line in table), width
        for row, cells in zip(rows, shown, strict=True):
            assert f"{row.whole.state / 1e9:.3f}" in cells, width
            assert f"{row.rank.sum / 1e9:.3f}" in cells, width
            assert str(row.layout.bits or "-") in cells, width
            assert len(cells) - len(row.layout.format.split()) == len(shown[0]) - 1, width


def test_a_terminal_that_is_wide_enough_has_all_columns():
    for shards, width in ((1, 140), (8, 160)):
        (head,) = (line for line in lines(width, shards, "AdamW8bit")[1] if "optimizer" in line)
        assert {"weights", "gradients"} <= set(head.split())
        assert len(head) <= width


def test_a_narrow_terminal_has_weights_and_gradients_in_the_title():
    table = lines(80, 1, "AdamW8bit")[1]
    assert "weights 335.544, gradients 335.544" in " ".join(" ".join(table).split())
    assert max(map(len, table)) <= 80


def test_one_is_no_plural():
    assert "1 shape: 1 parameter, in MB" in run("estimate", "1").stdout


def test_names_that_look_like_an_emoji_are_printed_as_they_are(tmp_path):
    path = safetensors(tmp_path / ":fire:.safetensors", {":key:": ("F32", [64, 64])})
    for command in ("estimate", "inspect"):
        said = run(command, path).stdout
        assert ":fire:" in said
        assert ":key:" in said
