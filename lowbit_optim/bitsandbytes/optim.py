"""The names of `bitsandbytes.optim` 0.49: this package's optimizers with bitsandbytes' arguments.

Every class is a subclass of its namesake in `lowbit_optim`, whose docstring has the equations. Its
arguments differ in little: `SGD` has no default `lr`, the 8-bit classes of Adam and AdamW have
`optim_bits=32`, which means nothing there, LAMB has `block_wise=False`, and Adam decouples its
weight decay as AdamW does: `decoupled_weight_decay=False` is torch's Adam. Only here are the paged
classes and `PytorchLARS`.
"""

from __future__ import annotations

from typing import Any

from .. import _adagrad, _adam, _ademamix, _lamb, _lars, _lion, _rmsprop, _sgd
from .._arguments import documented
from .._manager import GlobalOptimManager as GlobalOptimManager
from ._arguments import REQUIRED, Bitsandbytes, bitsandbytes_arguments


@bitsandbytes_arguments()
class Adagrad(_adagrad.Adagrad, Bitsandbytes):
    """`lowbit_optim.Adagrad` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class Adagrad8bit(_adagrad.Adagrad8bit, Bitsandbytes):
    """`lowbit_optim.Adagrad8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class Adagrad32bit(_adagrad.Adagrad32bit, Bitsandbytes):
    """`lowbit_optim.Adagrad32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(decoupled_weight_decay=True)
class Adam(_adam.Adam, Bitsandbytes):
    """`lowbit_optim.Adam` with bitsandbytes' arguments."""


@bitsandbytes_arguments(optim_bits=32, decoupled_weight_decay=True)
class Adam8bit(_adam.Adam8bit, Bitsandbytes):
    """`lowbit_optim.Adam8bit` with bitsandbytes' arguments.

    Args:
        optim_bits: 32, which says nothing, or 8; state is in 8 bits either way.
    """


@bitsandbytes_arguments(decoupled_weight_decay=True)
class Adam32bit(_adam.Adam32bit, Bitsandbytes):
    """`lowbit_optim.Adam32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(paged=True)
class PagedAdam(Adam):
    """`Adam`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True)
class PagedAdam8bit(Adam8bit):
    """`Adam8bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True)
class PagedAdam32bit(Adam32bit):
    """`Adam32bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments()
class AdamW(_adam.AdamW, Bitsandbytes):
    """`lowbit_optim.AdamW` with bitsandbytes' arguments."""


@bitsandbytes_arguments(optim_bits=32)
class AdamW8bit(_adam.AdamW8bit, Bitsandbytes):
    """`lowbit_optim.AdamW8bit` with bitsandbytes' arguments.

    Args:
        optim_bits: 32, which says nothing, or 8; state is in 8 bits either way.
    """


@bitsandbytes_arguments()
class AdamW32bit(_adam.AdamW32bit, Bitsandbytes):
    """`lowbit_optim.AdamW32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdamW(AdamW):
    """`AdamW`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdamW8bit(AdamW8bit):
    """`AdamW8bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdamW32bit(AdamW32bit):
    """`AdamW32bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments()
class AdEMAMix(_ademamix.AdEMAMix, Bitsandbytes):
    """`lowbit_optim.AdEMAMix` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class AdEMAMix8bit(_ademamix.AdEMAMix8bit, Bitsandbytes):
    """`lowbit_optim.AdEMAMix8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class AdEMAMix32bit(_ademamix.AdEMAMix32bit, Bitsandbytes):
    """`lowbit_optim.AdEMAMix32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdEMAMix(AdEMAMix):
    """`AdEMAMix`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdEMAMix8bit(AdEMAMix8bit):
    """`AdEMAMix8bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedAdEMAMix32bit(AdEMAMix32bit):
    """`AdEMAMix32bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(block_wise=False)
class LAMB(_lamb.LAMB, Bitsandbytes):
    """`lowbit_optim.LAMB` with bitsandbytes' arguments."""


@bitsandbytes_arguments(block_wise=False)
class LAMB8bit(_lamb.LAMB8bit, Bitsandbytes):
    """`lowbit_optim.LAMB8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(block_wise=False)
class LAMB32bit(_lamb.LAMB32bit, Bitsandbytes):
    """`lowbit_optim.LAMB32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class LARS(_lars.LARS, Bitsandbytes):
    """`lowbit_optim.LARS` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class LARS8bit(_lars.LARS8bit, Bitsandbytes):
    """`lowbit_optim.LARS8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class LARS32bit(_lars.LARS32bit, Bitsandbytes):
    """`lowbit_optim.LARS32bit` with bitsandbytes' arguments."""


@documented
class PytorchLARS(_lars.LARS32bit, Bitsandbytes):
    """`lowbit_optim.LARS32bit` with the arguments of bitsandbytes' LARS in torch operators."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        max_unorm: float = 0.02,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, max_unorm=max_unorm
        )


@bitsandbytes_arguments()
class Lion(_lion.Lion, Bitsandbytes):
    """`lowbit_optim.Lion` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class Lion8bit(_lion.Lion8bit, Bitsandbytes):
    """`lowbit_optim.Lion8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class Lion32bit(_lion.Lion32bit, Bitsandbytes):
    """`lowbit_optim.Lion32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedLion(Lion):
    """`Lion`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedLion8bit(Lion8bit):
    """`Lion8bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments(paged=True, without=("is_paged",))
class PagedLion32bit(Lion32bit):
    """`Lion32bit`: its state is not paged, which a warning says."""


@bitsandbytes_arguments()
class RMSprop(_rmsprop.RMSprop, Bitsandbytes):
    """`lowbit_optim.RMSprop` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class RMSprop8bit(_rmsprop.RMSprop8bit, Bitsandbytes):
    """`lowbit_optim.RMSprop8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments()
class RMSprop32bit(_rmsprop.RMSprop32bit, Bitsandbytes):
    """`lowbit_optim.RMSprop32bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(lr=REQUIRED)
class SGD(_sgd.SGD, Bitsandbytes):
    """`lowbit_optim.SGD` with bitsandbytes' arguments."""


@bitsandbytes_arguments(lr=REQUIRED)
class SGD8bit(_sgd.SGD8bit, Bitsandbytes):
    """`lowbit_optim.SGD8bit` with bitsandbytes' arguments."""


@bitsandbytes_arguments(lr=REQUIRED)
class SGD32bit(_sgd.SGD32bit, Bitsandbytes):
    """`lowbit_optim.SGD32bit` with bitsandbytes' arguments."""
