"""Time the step of 1,000 small sharded tensors beside the unsharded step of a rank's elements.

`python -m benchmarks.speed.sharded`: processes of one thread each, under `fully_shard` with gloo.
Each optimizer is first run against its naive rule; if one differs, nothing is timed.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from torch import Tensor, nn

from benchmarks.common import arguments, measure, registry, report, tables, verify

TENSORS = 1000
LR = 1e-3
CPU = torch.device("cpu")
OPTIMIZERS = ("AdamW8bit", "LAMB8bit", "LARS8bit-paper")


@dataclass(frozen=True)
class Case:
    """Vectors of a dtype; each rank holds so many elements of one."""

    dtype: torch.dtype
    elements: int


CASES = {
    "fp32": Case(torch.float32, 64),
    "bf16": Case(torch.bfloat16, 100),  # on several ranks shards end inside a block of random bits
    "coded": Case(torch.float32, 4096),  # the smallest that are kept in 8 bits
}


class _Vectors(nn.Module):
    """Vectors whose gradients are what it is called with."""

    def __init__(self, case: Case, ranks: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(TENSORS, ranks * case.elements, generator=generator).mul_(0.02)
        self.all = nn.ParameterList(value.clone() for value in values.to(case.dtype))

    def forward(self, gradients: Tensor) -> Tensor:
        """The sum of products with a row for each vector."""
        return torch.stack(list(self.all)).mul(gradients).sum()


def _vectors(case: Case, ranks: int, shards: bool) -> list[Tensor]:
    """Parameters with gradients, of this many ranks' elements; dealt out to them or not."""
    from torch.distributed.fsdp import fully_shard

    model = _Vectors(case, ranks)
    if shards:
        fully_shard(model)
    gradients = torch.randn(TENSORS, ranks * case.elements).mul_(0.01).to(case.dtype)
    model(gradients).backward()
    found = list(model.parameters())
    if not shards:  # FSDP's lie together, but layers leave gradients in memory of their own
        for p in found:
            p.grad = p.grad.clone()
    return found


def _bind(rank: int, ranks: int) -> None:
    """Keep a process on its share of the cores, where there is one for each rank.

    Elsewhere the kernel may wake two ranks on one core, where they wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[rank::ranks])


def _rank(rank: int, ranks: int, spec: dict) -> None:
    """Time all pairs on one rank; the first one writes what the slowest took in each round."""
    if spec["bind"]:
        _bind(rank, ranks)  # and the threads that gloo is going to start
    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    address = f"file://{folder}/rendezvous{ranks}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    gc.disable()
    pairs = []
    for label in spec["cases"]:
        for name in spec["optimizers"]:
            make, case = registry.REGISTRY[name].make, CASES[label]
            own, other = (make(_vectors(case, *how), LR) for how in ((ranks, True), (1, False)))
            gc.collect()
            times = torch.tensor(
                measure.interleaved(own.step, other.step, CPU, spec["rounds"], before=dist.barrier)
            )
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            milliseconds = (1e3 * times).tolist()
            ratios = (times[0] / times[1]).tolist()
            ms, alone = (measure.spread(each) for each in milliseconds)
            pairs.append({
                "case": label, "optimizer": name, "ranks": ranks, "ms": ms, "unsharded_ms": alone,
                "ratio": measure.spread(ratios),
            })  # fmt: skip
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(pairs))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads end a process at times that unloads them in order


def time_all(spec: dict, counts: list[int]) -> list[dict]:
    """Every pair on each number of ranks."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            mp.spawn(_rank, (ranks, {**spec, "folder": folder}), nprocs=ranks)
            pairs += json.loads(Path(folder, f"{ranks}.json").read_text())
    return pairs


def table(pairs: list[dict]) -> str:
    """Markdown: milliseconds and ratio by case, optimizer and number of ranks."""
    rows = [
        [
            pair["case"], str(pair["ranks"]), pair["optimizer"], f"{pair['ms']['median']:.2f}",
            f"{pair['unsharded_ms']['median']:.2f}",
            "{median:.2f} ({q25:.2f}, {q75:.2f})".format(**pair["ratio"]),
        ]
        for pair in pairs
    ]  # fmt: skip
    return tables.markdown(["vectors", "ranks", "optimizer", "ms", "unsharded", "ratio"], rows)


def main(
    optimizer: Annotated[
        list[str] | None, typer.Option(help="a name of the registry; repeatable")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help=", ".join(CASES))] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="repeatable; 1 and 2")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed steps of each of a pair")] = 30,
    bind: Annotated[bool, typer.Option(help="keep each rank on cores of its own")] = True,
    out: Annotated[Path, typer.Option(help="folder for sharded.json")] = report.LOCAL,
) -> None:
    """Time the step of 1,000 small sharded tensors beside the unsharded step."""
    console, load = Console(), report.load_average()
    with arguments.refusing():
        cases = arguments.known("case", case or CASES, CASES)
        entries = registry.select(optimizer or OPTIMIZERS)
        registry.of_dtypes(entries, *(CASES[label].dtype for label in cases))
    errors = {e.name: verify.verify(e, e.learning_rate("mnist"), CPU) for e in entries}
    chosen = {"optimizers": list(errors), "cases": cases}
    pairs = time_all({**chosen, "rounds": rounds, "bind": bind}, ranks or [1, 2])
    console.print(table(pairs), highlight=False, soft_wrap=True)
    report.say_if_busy(console, load)
    options = {"optimizer": optimizer, "case": case, "ranks": ranks, "rounds": rounds}
    options |= {} if bind else {"no-bind": True}
    written = {
        **report.origin("benchmarks.speed.sharded", options),
        "load_before": load, "tensors": TENSORS, "verified": errors, "pairs": pairs,
    }  # fmt: skip
    report.write_json(out / "sharded.json", written)


if __name__ == "__main__":
    typer.run(main)
