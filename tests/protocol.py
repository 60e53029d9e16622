"""What the tests of the optimizer protocol share: the classes, small parameters, snapshots.

`CLASSES` has one case of every class in `cases.ALL_CASES`, so a new optimizer is tested with its
case row. 8-bit cases take `min_8bit_size=1`: small tensors, and codes all the same.
"""

import copy
import io
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import cases

ROOT = Path(__file__).resolve().parent.parent
# Of processes that find the packages as this one does, installed or not.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
ONE_PER_CLASS = cases.one_per_class()
CLASSES = pytest.mark.parametrize("case", ONE_PER_CLASS, ids=lambda case: case.name)
BITS = pytest.mark.parametrize("bits", [8, 32])
# All on the one that compiles nothing; on the one that would be chosen those that `make test` has.
BY_ENGINE = pytest.mark.parametrize("engine", ["torch", "auto"])
NEEDS_TRITON = "the Triton engine needs the triton package, 3.4 or newer"
ANY_GRADIENT = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch.Tensor.grad_dtype, of torch 2.10"
)
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SHAPES = ((12, 70), (300,))


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    """Parameters with random values that bfloat16 and float16 hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]
    return [torch.nn.Parameter(value.bfloat16().half().to(dtype)) for value in values]


def build(case, bits, params, **options):
    """The optimizer of a case, its state in 8 bits whatever the size."""
    return case.build(params, bits, min_8bit_size=1, **options)


def all_parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)


def train(optimizer, steps, first=0):
    """Steps with random gradients, the same for the same step number."""
    for t in range(first, first + steps):
        give_gradients(all_parameters(optimizer), t)
        optimizer.step()
    return optimizer


def snapshot(optimizer):
    """Copies of everything a step or a load may change."""
    params = all_parameters(optimizer)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {i: dict(optimizer.state[p]) for i, p in enumerate(params) if p in optimizer.state}
    values = [p.detach() for p in params]
    return copy.deepcopy({"params": values, "groups": groups, "state": state})


def identical(a, b):
    """Whether two trees of tensors and values are the same bit for bit, dtypes and NaN included."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        numbers = [torch.where(x == x, x, 0) for x in (a, b)]  # a NaN's own bits mean nothing
        signs = [x.signbit() for x in numbers] if a.dtype.is_floating_point else [a, a]
        return all(map(torch.equal, (a != a, numbers[0], signs[0]), (b != b, numbers[1], signs[1])))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and a == b


def pass_by_pass(patch):
    """Have the Numba engine hand out the sums of whole tensors, too, as it does of shards."""
    from lowbit_optim_kernels.engines.numba.tables import Tables

    sweep = Tables.sweep
    patch.setattr(Tables, "sweep", lambda tables, threads, whole: sweep(tables, threads, False))


def tensors_of(tree):
    """Every tensor in a tree of dicts, whatever their order, and lists."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for item in tree for tensor in tensors_of(item)]


def python(script, timeout=120, **environment):
    """Run a script in a fresh interpreter that finds the package; what it prints."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={key: value for key, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def run_program(program, *arguments):
    """Call a program's command line in this process; its workers are processes of their own.

    It needs the extra `cli`.
    """
    import typer
    from typer import testing

    app = typer.Typer()
    app.command()(program.main)
    return testing.CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(a) for a in arguments])


def saved_and_loaded(state_dict, **options):
    """A state dict through a file, loaded without unpickling anything but data."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def with_values_of(optimizer, other):
    """Give `other` the parameter values of `optimizer`."""
    for p, q in zip(all_parameters(other), all_parameters(optimizer), strict=True):
        p.data.copy_(q.data)
    return other


@contextmanager
def silent_mesh(ranks):
    """A mesh of ranks, of which this process is the first and the others never answer."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        torch.distributed.destroy_process_group()
