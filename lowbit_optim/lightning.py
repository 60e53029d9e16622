"""Help for Lightning's Trainer; Lightning itself is not imported."""

from __future__ import annotations

from typing import TypeVar

from ._optimizer import LowBitOptimizer, require_own

T = TypeVar("T", bound=LowBitOptimizer)


def unscaled_by_trainer(optimizer: T) -> T:
    """Let the Trainer divide gradients by the loss scale and clip them, whatever `fused` says.

    Without `fused=True` it does so anyway. With it the step of an optimizer divides them, as that
    of torch's fused ones, for which `precision="16-mixed"` and `"bf16-mixed"` refuse
    `gradient_clip_val`; after this call it leaves that to the scaler, too.

    Args:
        optimizer: an optimizer of this package, in `configure_optimizers`.

    Returns:
        The same optimizer.

    Raises:
        TypeError: for another optimizer.

    Example:
        >>> optimizer = unscaled_by_trainer(AdamW8bit(model.parameters(), lr=1e-3, fused=True))
    """
    require_own(optimizer, "unscaled_by_trainer")
    # On the instance: the scaler and Lightning both ask it for this attribute of torch's.
    optimizer._step_supports_amp_scaling = False
    return optimizer
