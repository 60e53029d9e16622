"""State dicts that other libraries have saved, as files of plain tensors in tests/data/foreign.

    python tests/foreign_files.py bitsandbytes      in an environment that has it
    python tests/foreign_files.py torchao

writes one file for the version that is installed. The tests read them without the library.
"""

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "data" / "foreign"
SHAPES = [(2, 256), (3, 70), (5,)]  # rows of whole blocks, rows that are none, a vector
STEPS = 3
OPTIONS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1}, "Adam": {"lr": 1e-3, "weight_decay": 0.1},
    "AdEMAMix": {"lr": 1e-3, "t_alpha": 9, "t_beta3": 9}, "Lion": {"lr": 1e-3},
    "LAMB": {"lr": 1e-3}, "SGD": {"lr": 0.01, "momentum": 0.9},
    "LARS": {"lr": 0.01, "momentum": 0.9}, "RMSprop": {"lr": 1e-3}, "Adagrad": {"lr": 1e-2},
}  # fmt: skip
# Before 0.50 not every class steps on CPUs, whatever is let through.
BEFORE_0_50 = ("AdamW8bit", "AdEMAMix8bit", "AdamW32bit")


def newer():
    """Whether bitsandbytes is 0.50 or newer, which steps CPU tensors by itself; not if missing."""
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (0, 50)


def let_step_on_cpu(bitsandbytes, setattr=setattr):
    """Let an older one do so, too.

    Its classes refuse CPU tensors, and 8-bit state has only the form in torch operators that its
    Triton kernels are tested with.
    """
    functional = importlib.import_module("bitsandbytes.functional")
    operators = importlib.import_module("bitsandbytes.backends.triton.kernels_optim")

    def update(name, g, p, *state, **more):
        step = operators.optimizer_update_8bit_blockwise_pytorch
        step(p, g, *state, **more, optimizer_name=name)

    setattr(functional, "is_on_gpu", lambda tensors: True)
    setattr(functional, "optimizer_update_8bit_blockwise", update)


def run(cls, shapes, **options):
    """An optimizer some steps on, its parameters there, the next gradients, and where they lead."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    optimizer = cls(params, **options)
    for step in range(STEPS + 1):
        grads = [torch.randn(s, generator=generator) for s in shapes]
        if step == STEPS:
            yield optimizer, [p.detach().clone() for p in params], grads
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    yield [p.detach().clone() for p in params]


def shared(tree, known):
    """A tree with a copy of each tensor, and one object for those that are equal."""
    if isinstance(tree, torch.Tensor):
        key = (tree.dtype, tuple(tree.shape), tree.detach().contiguous().numpy().tobytes())
        return known.setdefault(key, tree.detach().clone())
    if isinstance(tree, dict):
        return {key: shared(value, known) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(shared(value, known) for value in tree)
    return tree


def of_bitsandbytes():
    bitsandbytes = importlib.import_module("bitsandbytes")
    names = [f"{name}8bit" for name in OPTIONS]
    if not newer():
        let_step_on_cpu(bitsandbytes)
        names = BEFORE_0_50
    files, known = {}, {}
    for name in names:
        bits = 8 if name.endswith("8bit") else 32
        options = {"min_8bit_size": 1, **OPTIONS[name.removesuffix(f"{bits}bit")]}
        runs = run(getattr(bitsandbytes.optim, name), SHAPES, **options)
        optimizer, params, grads = next(runs)
        saved = shared(optimizer.state_dict(), known)
        files[name] = {
            "state_dict": saved,
            "params": params,
            "grads": shared(grads, known),
            "after": next(runs),
        }
    return bitsandbytes.__version__, files


def of_torchao():
    """Each tensor subclass as a dict of what it has, and its first rows as it reads them itself."""
    torchao = importlib.import_module("torchao")
    optim = importlib.import_module("torchao.optim")
    files, known = {}, {}
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        optimizer, _, _ = next(run(getattr(optim, name), [(16, 256), (5,)], lr=1e-3))
        saved = optimizer.state_dict()
        numbers = saved["state"][0]["exp_avg"].dequantize()[:4]
        for state in saved["state"].values():
            for key, value in state.items():
                if hasattr(value, "codes"):
                    state[key] = {a: getattr(value, a) for a in value.tensor_attrs}
        files[name] = {"state_dict": without_fp8(saved), "exp_avg": numbers.clone()}
    return torchao.__version__, shared(files, known)


def without_fp8(tree):
    """A tree whose fp8 tensors are bytes, which every version of torch can save."""
    if isinstance(tree, torch.Tensor):
        return tree.view(torch.uint8) if tree.dtype == torch.float8_e4m3fn else tree
    if isinstance(tree, dict):
        return {key: without_fp8(value) for key, value in tree.items()}
    return [without_fp8(value) for value in tree] if isinstance(tree, list) else tree


def write(library):
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        version, files = {"bitsandbytes": of_bitsandbytes, "torchao": of_torchao}[library]()
    torch.save(files, FOLDER / f"{library}-{version}.pt")


if __name__ == "__main__":
    write(sys.argv[1])
