"""PyTorch optimizers whose moments live in 8 bits."""

from lowbit_optim_kernels.dispatch import EngineChoice as EngineChoice
from lowbit_optim_kernels.dispatch import engine_for as engine_for
from lowbit_optim_kernels.dispatch import use_engine as use_engine
from lowbit_optim_kernels.dynamic8 import create_dynamic_map as create_dynamic_map

from ._adam import Adam as Adam
from ._adam import Adam8bit as Adam8bit
from ._adam import Adam32bit as Adam32bit
from ._adam import AdamW as AdamW
from ._adam import AdamW8bit as AdamW8bit
from ._adam import AdamW32bit as AdamW32bit
from ._codec import dequantize_blockwise as dequantize_blockwise
from ._codec import quantize_blockwise as quantize_blockwise
from ._lars import LARS as LARS
from ._lars import LARS_PRESETS as LARS_PRESETS
from ._lars import LARS8bit as LARS8bit
from ._lars import LARS32bit as LARS32bit
from ._optimizer import LowBitOptimizer as LowBitOptimizer
from ._sgd import SGD as SGD
from ._sgd import SGD8bit as SGD8bit
from ._sgd import SGD32bit as SGD32bit

__version__ = "0.1.0"
