"""Help for the Trainer of Hugging Face's transformers; transformers itself is not imported."""

from __future__ import annotations

from torch import nn

from . import _checks
from ._groups import EMBEDDINGS
from ._manager import GlobalOptimManager


def embeddings_in_32_bits(model: nn.Module) -> list[str]:
    """Keep the state of a model's embeddings in 32 bits, in every optimizer of this package.

    The Trainer does this by itself for optimizers with bitsandbytes' names only. The overrides are
    `GlobalOptimManager`'s: they are not saved, so call this in the script that resumes, too.

    Args:
        model: the model, before it is trained or a checkpoint is loaded.

    Returns:
        The names of the embeddings' weights.

    Raises:
        TypeError: if `model` is no module.

    Example:
        >>> embeddings_in_32_bits(model)
        ['embedding.weight']
    """
    _checks.module("model", model)
    manager = GlobalOptimManager.get_instance()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS):
            for own, _ in module.named_parameters():  # of a parametrized weight several
                manager.register_module_override(module, own, {"optim_bits": 32})
                found.append(f"{name}.{own}" if name else own)
    return found
