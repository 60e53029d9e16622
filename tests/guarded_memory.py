"""Tensors beside pages that may not be touched: the system ends a process that reads or writes one.

Scripts of test_memory_bounds.py import this in an interpreter of their own.
"""

import ctypes
import mmap

import torch

import lowbit_optim
from cases import FUSED_CASES, one_per_class

# Rows and vectors that end in short blocks, at addresses of any alignment.
SHAPES = [
    (1,), (5,), (255,), (256,), (257,), (4099,), (16, 256), (17, 272), (33, 300), (13, 301),
    (41, 96), (7, 1000), (64, 17), (3, 5, 7),
]  # fmt: skip
WEIGHTS = [
    (torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, "auto"),
    (torch.bfloat16, 24),
]  # fmt: skip
PAGE, NO_ACCESS = mmap.PAGESIZE, 0
_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(x, at_end):
    """A copy of a tensor in memory of its own, whose end or start is beside a forbidden page."""
    if not x.numel():
        return x
    room = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + room):
        assert _libc.mprotect(page, PAGE, NO_ACCESS) == 0
    offset = PAGE + (room - x.nbytes if at_end else 0)
    own = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset)
    return own.view(x.shape).copy_(x)


def train(cls, dtype, at_end, **options):
    """Steps of a class on guarded tensors, those of its state from the second on; their number."""
    generator = torch.Generator().manual_seed(0)

    def random(shape):
        return torch.randn(shape, generator=generator).to(dtype)

    params = [torch.nn.Parameter(guarded(random(shape), at_end)) for shape in SHAPES]
    for p in params:
        p.grad = guarded(random(p.shape), at_end)
    optimizer = cls(params, min_8bit_size=1, **options)
    optimizer.step()
    count = 0
    for state in optimizer.state.values():
        for key, x in state.items():
            state[key] = guarded(x, at_end)
            count += 1
    for _ in range(2):
        optimizer.step()
    assert all(p.isfinite().all() for p in params)
    return count


def code(at_end):
    """A tensor of each shape coded and decoded, by itself."""
    for shape in SHAPES:
        for signed in (True, False):
            x = torch.randn(shape) if signed else torch.rand(shape)
            coded = lowbit_optim.quantize_blockwise(guarded(x, at_end), signed)
            moved = (guarded(part, at_end) for part in coded)
            torch.testing.assert_close(
                lowbit_optim.dequantize_blockwise(*moved, signed), x, rtol=0.1, atol=0.1
            )


def settings(case):
    """What state is kept in: 32 bits, and each format that the class has."""
    yield {"optim_bits": 32}
    yield {"optim_bits": 8}
    yield {"optim_bits": 8, "state_format": "ratio8"}
    if hasattr(lowbit_optim, f"{case.name}4bit"):
        yield {"optim_bits": 4}


def train_all(name):
    """Every format, dtype and alignment of a class; how many tensors were guarded."""
    (case,) = (case for case in one_per_class(FUSED_CASES) if case.name == name)
    return sum(
        train(
            getattr(lowbit_optim, name), dtype, at_end, lr=case.lr, master_weight_bits=bits,
            **case.options, **options,
        )
        for options in settings(case)
        for dtype, bits in WEIGHTS
        for at_end in (False, True)
    )  # fmt: skip
