"""PyTorch optimizers whose moments live in 8 bits."""

from lowbit_optim_kernels.dispatch import EngineChoice as EngineChoice
from lowbit_optim_kernels.dispatch import engine_for as engine_for
from lowbit_optim_kernels.engines.request import use_engine as use_engine
from lowbit_optim_kernels.formats.dynamic8 import create_dynamic_map as create_dynamic_map

from ._adagrad import Adagrad as Adagrad
from ._adagrad import Adagrad8bit as Adagrad8bit
from ._adagrad import Adagrad32bit as Adagrad32bit
from ._adam import Adam as Adam
from ._adam import Adam8bit as Adam8bit
from ._adam import Adam32bit as Adam32bit
from ._adam import AdamW as AdamW
from ._adam import AdamW8bit as AdamW8bit
from ._adam import AdamW32bit as AdamW32bit
from ._ademamix import AdEMAMix as AdEMAMix
from ._ademamix import AdEMAMix8bit as AdEMAMix8bit
from ._ademamix import AdEMAMix32bit as AdEMAMix32bit
from ._adopt import ADOPT as ADOPT
from ._adopt import ADOPT8bit as ADOPT8bit
from ._adopt import ADOPT32bit as ADOPT32bit
from ._cain import Cain as Cain
from ._cain import Cain8bit as Cain8bit
from ._cain import Cain32bit as Cain32bit
from ._codec import dequantize_blockwise as dequantize_blockwise
from ._codec import quantize_blockwise as quantize_blockwise
from ._eden import Eden as Eden
from ._eve import Eve as Eve
from ._eve import Eve8bit as Eve8bit
from ._eve import Eve32bit as Eve32bit
from ._groups import parameter_groups as parameter_groups
from ._lamb import LAMB as LAMB
from ._lamb import LAMB8bit as LAMB8bit
from ._lamb import LAMB32bit as LAMB32bit
from ._lans import LANS as LANS
from ._lans import LANS8bit as LANS8bit
from ._lans import LANS32bit as LANS32bit
from ._lars import LARS as LARS
from ._lars import LARS_PRESETS as LARS_PRESETS
from ._lars import LARS8bit as LARS8bit
from ._lars import LARS32bit as LARS32bit
from ._learned_gradient import LearnedGradient as LearnedGradient
from ._learned_gradient import LearnedGradient8bit as LearnedGradient8bit
from ._learned_gradient import LearnedGradient32bit as LearnedGradient32bit
from ._lion import Lion as Lion
from ._lion import Lion8bit as Lion8bit
from ._lion import Lion32bit as Lion32bit
from ._manager import GlobalOptimManager as GlobalOptimManager
from ._optimizer import LowBitOptimizer as LowBitOptimizer
from ._rmsprop import RMSprop as RMSprop
from ._rmsprop import RMSprop8bit as RMSprop8bit
from ._rmsprop import RMSprop32bit as RMSprop32bit
from ._sgd import SGD as SGD
from ._sgd import SGD8bit as SGD8bit
from ._sgd import SGD32bit as SGD32bit

__version__ = "0.1.0"
