"""Costs of each format of AdamW's state: errors of the update, long runs, milliseconds.

`python -m benchmarks.quality.formats`: the total update against AdamW in float64, of synthetic
gradients of many scales and of gradients that are recorded from training; step sizes beside the
32-bit twin's long after gradients have become smaller; CPU time. Other libraries take part where
they are installed and run on a CPU. `--markdown FILE` prints the tables of a result file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.common import measure, models, plot, registry, report, workloads
from benchmarks.common.registry import Source
from benchmarks.quality.compare_worker import schedule
from benchmarks.quality.formats_tables import tables

LR = 1e-3
SHAPE, STEPS = (128, 128), 20
SCALES = (1e-8, 1e-6, 1e-2, 1.0, 1e4)
TINY_EPS = 1e-20  # of synthetic gradients: what is smaller than 1e-8 has to be seen
EPS = 1e-8  # of recorded gradients: AdamW's default
# Task, layer, rows that are kept of it, and the name in the tables.
LAYERS = (
    ("gpt", "blocks.0.qkv.weight", 64, "gpt-qkv"),
    ("gpt", "blocks.1.down.weight", 64, "gpt-down"),
    ("gpt", "head.weight", 256, "gpt-head"),
    ("mnist", "5.weight", 32, "cnn"),
)
LONG_SHAPE, SHRINK, SPIKE = (16, 256), 0.01, 1e4
WINDOWS = 80  # into which the steps of a long run fall

Gradients = Callable[[], Iterable[Tensor]]
EACH = {"min_8bit_size": 1}  # every tensor's state is coded


def _ours(bits: int = 8, **options: object) -> Source:
    return Source("lowbit_optim", f"AdamW{bits}bit", {**EACH, **options})


NEAREST = "dynamic8, dither=False"
OURS = {
    NEAREST: _ours(dither=False),
    "dynamic8": _ours(),
    "ratio8": _ours(state_format="ratio8"),
    "ratio4": _ours(4),
}
PEERS = {
    "bitsandbytes AdamW8bit": Source("bitsandbytes.optim", "AdamW8bit", EACH),
    "torchao AdamW8bit": Source("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": Source("torchao.optim", "AdamW4bit"),
    "FlashOptim's code": Source("benchmarks.quality.companded", "Companded"),
}
# Of other optimizers: the name in the table, class, learning rate, options and steps. At this alpha
# the update is AdEMAMix's slow momentum alone.
SLOW = {"betas": (0.9, 0.999, 0.9999), "alpha": 1e4, "eps": TINY_EPS, "weight_decay": 0.0}
RULES: tuple[tuple[str, str, float, dict[str, object], int], ...] = (
    ("SGD, momentum .9", "SGD", 0.1, {"momentum": 0.9}, 60),
    ("AdEMAMix, slow momentum", "AdEMAMix", LR, SLOW, 300),
    ("RMSprop", "RMSprop", LR, {}, 300),
    ("RMSprop, centered", "RMSprop", LR, {"centered": True}, 300),
    ("Adagrad", "Adagrad", 1e-2, {}, 300),
)
EIGHT = ("dynamic8", "ratio8")
TWIN = Source("lowbit_optim", "AdamW32bit")
EXACT = Source("torch.optim", "AdamW")


def make(source: Source, p: torch.nn.Parameter, eps: float) -> torch.optim.Optimizer:
    """The optimizer of one parameter, without weight decay."""
    decay = {} if source.cls == "Companded" else {"weight_decay": 0.0}
    given = {**source.options, **decay, "eps": eps}
    return Source(source.module, source.cls, given)([p], LR)


def refusal(source: Source) -> str | None:
    """Why another library takes no part: it is not installed, or does not run on a CPU."""
    p = torch.nn.Parameter(torch.zeros(64, 256))
    p.grad = torch.ones_like(p)
    try:
        make(source, p, EPS).step()
    except ImportError:
        return "not installed"
    except RuntimeError as error:
        return str(error).splitlines()[0].strip()[:120]
    return None


def displacements(
    source: Source,
    gradients: Iterable[Tensor],
    stops: Iterable[int],
    eps: float,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Weights that begin at zero, after so many steps, float64."""
    p, optimizer, wanted = None, None, set(stops)
    for count, gradient in enumerate(gradients, 1):
        if p is None:
            p = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=dtype))
            optimizer = make(source, p, eps)
        p.grad = gradient.to(dtype)
        optimizer.step()
        if count in wanted:
            yield p.detach().double().clone()


def errors(
    methods: Mapping[str, Source], gradients: Gradients, stops: Iterable[int], eps: float
) -> dict[str, list[float]]:
    """Normalised mean squared error of each method's total update, after so many steps each."""
    stops = list(stops)
    exact = list(displacements(EXACT, gradients(), stops, eps, torch.float64))
    found = {}
    for name, source in methods.items():
        got = displacements(source, gradients(), stops, eps, torch.float32)
        found[name] = [
            float((one - want).square().sum() / want.square().sum())
            for one, want in zip(got, exact, strict=True)
        ]
    return found


def synthetic(scale: float | None, steps: int = STEPS) -> Iterator[Tensor]:
    """Normal gradients of one scale; without one, of exp(N(0, 1)) an element."""
    generator = torch.Generator().manual_seed(3)
    each = torch.tensor(scale) if scale else torch.randn(SHAPE, generator=generator).exp()
    for _ in range(steps):
        yield each * torch.randn(SHAPE, generator=generator)


def record(task: workloads.Task, layers: Mapping[str, int], steps: int) -> dict[str, list[Tensor]]:
    """Gradients of some layers, their first rows, in a training by torch's AdamW."""
    torch.manual_seed(0)
    data, model = task.load(), task.model()
    batches = torch.Generator().manual_seed(0)
    entry = registry.REGISTRY["torch.optim.AdamW"]
    optimizer = entry.make(model.parameters(), entry.learning_rate(task.name))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    recorded: dict[str, list[Tensor]] = {name: [] for name in layers}
    for _ in range(steps):
        optimizer.zero_grad()
        models.loss(model, *task.batch(data, batches)).backward()
        for name, rows in layers.items():
            recorded[name].append(model.get_parameter(name).grad[:rows].clone())
        optimizer.step()
        scheduler.step()
    return recorded


def of_training(methods: Mapping[str, Source], steps: int) -> dict[str, dict[str, list[float]]]:
    """By layer, the errors after 20 steps of recorded gradients and after all."""
    found = {}
    for task in workloads.select(list(dict.fromkeys(layer[0] for layer in LAYERS))):
        layers = {layer[1]: layer for layer in LAYERS if layer[0] == task.name}
        kept = record(task, {name: layer[2] for name, layer in layers.items()}, steps)
        for name, layer in layers.items():
            gradients = kept.pop(name)
            found[layer[3]] = errors(methods, lambda g=gradients: g, stops(steps), EPS)
    return found


def stops(steps: int) -> list[int]:
    """After how many steps of recorded gradients errors are taken."""
    return sorted({min(STEPS, steps), steps})


def all_shrink(step: int, steps: int, g: Tensor) -> Tensor:
    """Gradients that become 100 times smaller after a quarter of the steps."""
    return g * SHRINK if step >= steps // 4 else g


def half_shrinks(step: int, steps: int, g: Tensor) -> Tensor:
    """The same of the first half of every 32 elements; the others keep their block's scale."""
    if step >= steps // 4:
        g[:, _first_halves(g)] *= SHRINK
    return g


def spike(step: int, steps: int, g: Tensor) -> Tensor:
    """One gradient of 1e4 in every 256 elements, once, after an eighth of the steps."""
    if step == steps // 8:
        g[:, 0] = SPIKE
    return g


def _first_halves(g: Tensor) -> Tensor:
    return torch.arange(g.shape[1]) % 32 < 16


# The gradients; which columns are looked at; the first step that counts, as a part of all.
LONG: dict[str, tuple[Callable[[int, int, Tensor], Tensor], Callable[[Tensor], Tensor], float]] = {
    "all shrink": (all_shrink, lambda g: torch.arange(g.shape[1]) >= 0, 0.5),
    "half shrinks": (half_shrinks, _first_halves, 0.5),
    "spike": (spike, lambda g: (torch.arange(g.shape[1]) > 0) & (torch.arange(g.shape[1]) < 64),
              0.875),
}  # fmt: skip


def of_rules() -> dict[str, dict[str, float]]:
    """Errors of other optimizers' total updates beside their 32-bit twins', in 8 bits."""
    found = {}
    for label, cls, lr, options, steps in RULES:
        sources = {
            "": Source("lowbit_optim", f"{cls}32bit", options),
            **{
                name: Source(
                    "lowbit_optim", f"{cls}8bit", {**EACH, **options, "state_format": name}
                )
                for name in EIGHT
            },
        }
        moved = {}
        for name, source in sources.items():
            p = torch.nn.Parameter(torch.zeros(SHAPE))
            optimizer = source([p], lr)
            for gradient in synthetic(1.0, steps):
                p.grad = gradient
                optimizer.step()
            moved[name] = p.detach().double()
        found[label] = {
            name: float((moved[name] - moved[""]).square().sum() / moved[""].square().sum())
            for name in EIGHT
        }
    return found


def long_run(
    methods: Mapping[str, Source], case: str, steps: int, twin: Source = TWIN
) -> dict[str, dict]:
    """Steps beside the 32-bit twin's, over the steps and elements that count.

    Returns:
        of each method `size`, the mean of |p - p before| by the twin's; `along`, the part of its
        steps that goes along the twin's, in which noise averages out; and `windows`, the size over
        the whole run.
    """
    change, looked_at, start = LONG[case]
    generator = torch.Generator().manual_seed(5)
    weights = {n: torch.nn.Parameter(torch.zeros(LONG_SHAPE)) for n in (twin.cls, *methods)}
    made = {n: make(methods.get(n, twin), p, TINY_EPS) for n, p in weights.items()}
    sizes: dict[str, list[float]] = {name: [] for name in weights}
    products = dict.fromkeys(weights, 0.0)
    columns, first = looked_at(torch.zeros(LONG_SHAPE)), int(start * steps)
    for step in range(steps):
        g = change(step, steps, torch.randn(LONG_SHAPE, generator=generator))
        for name, p in weights.items():
            p.data.zero_()  # so that a step is not rounded to the weight's own numbers
            p.grad = g
            made[name].step()
            moved = p.detach()[:, columns]
            sizes[name].append(float(moved.abs().mean()))
            if step >= first:
                products[name] += float((moved * weights[twin.cls].detach()[:, columns]).mean())
    width, right = max(1, steps // WINDOWS), sizes[twin.cls]
    return {
        name: {
            "size": sum(sizes[name][first:]) / sum(right[first:]),
            "along": products[name] / products[twin.cls],
            "windows": [
                round(sum(sizes[name][k : k + width]) / sum(right[k : k + width]), 4)
                for k in range(0, steps - width + 1, width)
            ],
        }
        for name in methods
    }


def times(side: int, rounds: int) -> dict[str, dict]:
    """Milliseconds of a step of one square fp32 weight, each optimizer in turn in every round."""
    p = torch.nn.Parameter(torch.zeros(side, side))
    p.grad = torch.randn(side, side, generator=torch.Generator().manual_seed(0)) * 1e-3
    sources = {
        "torch fused": Source("torch.optim", "AdamW", {"fused": True}),
        "float32": TWIN,
        **OURS,
    }
    made = {name: make(source, p, EPS) for name, source in sources.items()}
    took: dict[str, list[float]] = {name: [] for name in made}
    for count in range(rounds + 1):
        for name, optimizer in made.items():
            seconds = measure.seconds(optimizer.step, p.device)
            if count:  # the first step compiles, and creates the state
                took[name].append(1e3 * seconds)
    fused = took["torch fused"]
    return {
        name: {
            "ms": measure.spread(ms),
            "ratio": measure.spread([a / b for a, b in zip(ms, fused, strict=True)]),
            "state_bytes": measure.state_bytes(made[name]) / p.numel(),
        }
        for name, ms in took.items()
    }


def main(
    recorded: Annotated[int, typer.Option(min=1, help="steps of recorded gradients")] = 300,
    long: Annotated[int, typer.Option(min=80, help="steps of the long runs")] = 4000,
    side: Annotated[int, typer.Option(min=1, help="of the weight that is timed")] = 4096,
    rounds: Annotated[int, typer.Option(min=0, help="of timing; 0 times nothing")] = 15,
    peers: Annotated[bool, typer.Option(help="other libraries, where installed")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    markdown: Annotated[Path | None, typer.Option(help="print this result file's tables")] = None,
    out: Annotated[Path, typer.Option(help="folder for formats.json and .png")] = report.LOCAL,
) -> None:
    """Measure what each format of AdamW's state costs."""
    console, start, load = Console(), time.perf_counter(), report.load_average()
    if markdown is not None:
        print("\n\n".join(tables(json.loads(markdown.read_text(encoding="utf-8")))))
        return
    used = threads or report.cores()
    torch.set_num_threads(used)
    skipped = {}
    for name, source in PEERS.items() if peers else ():
        why = refusal(source)
        if why is not None:
            skipped[name] = why
            console.print(f"{name} left out: {why}", highlight=False)
    others = {name: source for name, source in PEERS.items() if peers and name not in skipped}
    methods = {**OURS, **others}
    timed = times(side, rounds) if rounds else {}
    made = {
        f"{scale:g}" if scale else "lognormal": errors(
            methods, lambda scale=scale: synthetic(scale), [STEPS], TINY_EPS
        )
        for scale in (*SCALES, None)
    }
    options = {"recorded": recorded, "long": long, "side": side, "rounds": rounds,
               "no_peers": not peers, "threads": threads}  # fmt: skip
    slow = {
        name: Source("lowbit_optim", "AdEMAMix8bit", {**EACH, "state_format": name})
        for name in EIGHT
    }
    written = {
        **report.origin("benchmarks.quality.formats", options),
        "threads": used,
        "load_before": load,
        "skipped": skipped,
        "steps": {"synthetic": STEPS, "recorded": stops(recorded), "long": long},
        "synthetic": made,
        "recorded": of_training(methods, recorded),
        "long": {case: long_run(OURS, case, long) for case in LONG},
        "ademamix": long_run(slow, "all shrink", long, Source("lowbit_optim", "AdEMAMix32bit")),
        "rules": of_rules(),
        "time": timed,
    }
    written["wall_s"] = round(time.perf_counter() - start, 1)
    for table in tables(written):
        console.print(table, highlight=False, soft_wrap=True)
        console.print()
    if rounds:
        report.say_if_busy(console, load)
    report.write_json(out / "formats.json", written)
    plot.formats(out / "formats.png", written)
    console.print(f"{written['wall_s']:.0f} s\nresults: {out / 'formats.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
