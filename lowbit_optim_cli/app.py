"""The command line: what each command takes, and one sentence for what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .errors import Refused

UsageError: Any = typer.BadParameter.__base__  # click's, which newer versions of typer have inside
ESTIMATE = """
Bytes that training a model keeps, by optimizer and format, without making it.

[bold]Examples[/bold]

  lowbit-optim estimate 4096x4096,4096

  lowbit-optim estimate model.safetensors --dtype bf16 --gpu 24GB

  lowbit-optim estimate path/to/model --optimizer AdamW --optimizer Lion --shards 8

  lowbit-optim estimate package.module:build --json
"""
INSPECT = """
What a checkpoint's optimizer states hold: tensors, formats, sizes, and who wrote them.

No pickle is executed, and tensors are not read.

[bold]Examples[/bold]

  lowbit-optim inspect checkpoint.pt

  lowbit-optim inspect folder/of/a/distributed/checkpoint

  lowbit-optim inspect lightning.ckpt --skip-objects
"""
CONVERT = """
Write a checkpoint's optimizer state as another library's.

[bold]Examples[/bold]

  lowbit-optim convert run.pt out.pt --to torch

  lowbit-optim convert bitsandbytes.pt out.pt --to lowbit --optimizer AdamW
"""
DOCTOR = """
Versions, engines, and which one steps each dtype and device here, and why.

[bold]Example[/bold]

  lowbit-optim doctor
"""
COMPARE = """
Train a small model from one start with 32-, 8- and 4-bit state, side by side.

[bold]Examples[/bold]

  lowbit-optim compare

  lowbit-optim compare --optimizer Lion --steps 500
"""


@contextmanager
def one_sentence() -> Iterator[None]:
    """Say in a sentence what is refused, and exit with code 2."""
    try:
        yield
    except Refused as error:
        said = str(error)
    except BrokenPipeError:  # whoever reads has enough, which typer ends with
        raise
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except UsageError as error:
        # The lines of choices are one, and the words in front of a reason are pydantic's.
        said = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    except (MemoryError, RecursionError) as error:
        said = f"the input is too large ({type(error).__name__})"
    else:
        return
    typer.echo(f"lowbit-optim: {said}", err=True)
    raise typer.Exit(2)


class Group(TyperGroup):
    """Commands whose refusals are one sentence and exit code 2."""

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        """Parse the options before the command; without arguments there is help."""
        if not args:
            return super().make_context(info_name, args, *more, **extra)
        with one_sentence():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with one_sentence():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group, help="Optimizers with low-bit state: what they take, hold and do.",
    no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


class Dtype(str, Enum):
    """Dtypes of weights."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp16 = "fp16"


class Library(str, Enum):
    """Libraries that states are converted to."""

    torch = "torch"
    bitsandbytes = "bitsandbytes"
    lowbit = "lowbit"


class Layout(str, Enum):
    """Layouts of bitsandbytes' states."""

    flat = "flat"
    nested = "nested"


AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _names() -> list[str]:
    """Optimizers, for the shell's completion."""
    from .optimizers import ROLES

    return list(ROLES)


def _formats() -> list[str]:
    """Formats, likewise."""
    from .optimizers import FORMATS

    return list(FORMATS)


def console() -> Console:
    """The console of results, printed as they are; wide enough for tables if no terminal."""
    width = None if Console().is_terminal else 200
    return Console(width=width, markup=False, emoji=False, highlight=False)


def _print_version(asked: bool) -> None:
    """Print the version, and end."""
    if asked:
        import lowbit_optim

        typer.echo(f"lowbit_optim {lowbit_optim.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""


@app.command(help=ESTIMATE)
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="config.json, model folder, safetensors file or index, module:function, or shapes"
        ),
    ],
    optimizer: Annotated[
        list[str],
        typer.Option(
            "--optimizer",
            "-o",
            help="an optimizer, class or all; repeatable",
            autocompletion=lambda: [*_names(), "all"],
        ),
    ] = ["AdamW"],  # noqa: B006  # typer copies it
    dtype: Annotated[
        Dtype | None, typer.Option(help="of the weights, instead of their own")
    ] = None,
    shards: Annotated[int, typer.Option(min=1, max=1 << 20, help="ranks, as in FSDP")] = 1,
    embeddings_in_32_bits: Annotated[
        bool, typer.Option("--embeddings-32", help="as `lowbit_optim.hf.embeddings_in_32_bits`")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="print the first rows that fit, as in 24GB; cheapest first")
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="activations of a fake step: a batch, as in 8x1024")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes")] = False,
) -> None:
    """Print the table."""
    from . import activations
    from . import estimate as estimates
    from .models import read_model

    # What is misspelt is said before a model is built.
    size = None if gpu is None else estimates.size_of(gpu)
    estimates.choose(optimizer, bf16=True)
    if measure is not None:
        activations.shape_of(measure)
    found = read_model(model, dtype.value if dtype else None, build=measure is not None)
    bf16 = any(weight.dtype == "bf16" and weight.trained for weight in found.weights)
    if embeddings_in_32_bits and not any(weight.embedding for weight in found.weights):
        raise Refused(f"--embeddings-32: no embedding is known in {model}")
    rows = estimates.rows_of(
        found, estimates.choose(optimizer, bf16), shards, embeddings_in_32_bits
    )
    if size is not None:
        rows = estimates.fitting(rows, size, str(gpu))
    further = [activations.formula(found.config)]
    further += [] if measure is None else [activations.measure(found, measure)]
    if as_json:
        typer.echo(estimates.as_json(found, rows, shards, further))
    else:
        estimates.show(console(), found, rows, shards, further)


@app.command(help=INSPECT)
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="torch.save's file, safetensors, Trainer's or DCP folder")
    ],
    skip_objects: Annotated[
        bool, typer.Option("--skip-objects", help="read it without the code that it asks for")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a checkpoint holds."""
    from . import inspection

    checkpoint = _there(checkpoint)
    reports = inspection.inspect(checkpoint, skip_objects)
    if as_json:
        typer.echo(inspection.as_json(checkpoint, reports))
    else:
        inspection.show(console(), checkpoint, reports)


@app.command(help=CONVERT)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="torch.save's file, Trainer's folder")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="the file to write, a new one")],
    to: Annotated[Library, typer.Option(help="whose state it is to be")],
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer", "-o", help="its optimizer, if it does not say", autocompletion=_names
        ),
    ] = None,
    state_format: Annotated[
        str | None,
        typer.Option("--format", help="of the moments, instead of theirs", autocompletion=_formats),
    ] = None,
    layout: Annotated[Layout, typer.Option(help="of bitsandbytes' tensors")] = Layout.flat,
) -> None:
    """Write a converted checkpoint."""
    from . import conversion

    said = conversion.convert(
        _there(source), target, to.value, optimizer, state_format, layout.value
    )
    for line in said:
        typer.echo(line)


@app.command(help=DOCTOR)
def doctor(as_json: AsJson = False) -> None:
    """Print what there is."""
    from . import doctor as doctors

    found = doctors.report()
    if as_json:
        typer.echo(doctors.as_json(found))
    else:
        doctors.show(console(), found)


@app.command(help=COMPARE)
def compare(
    optimizer: Annotated[
        list[str],
        typer.Option("--optimizer", "-o", help="an optimizer; repeatable", autocompletion=_names),
    ] = ["AdamW"],  # noqa: B006  # typer copies it
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="of each optimizer")] = 300,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="of weights and batches")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train and print the table."""
    from . import comparison

    results = comparison.compare(Console(stderr=True), optimizer, steps, seed)
    if as_json:
        typer.echo(comparison.as_json(results))
    else:
        comparison.show(console(), results, steps)


def _there(path: Path) -> Path:
    """Where a checkpoint may be; of a folder of the Trainer or accelerate the optimizer's file.

    A device or a pipe may never end.
    """
    if not (path.is_file() or path.is_dir()):
        raise Refused(f"there is no file or folder {str(path)!r}")
    files = [path / name for name in ("optimizer.pt", "optimizer.bin")]
    return next((file for file in files if file.is_file()), path)
