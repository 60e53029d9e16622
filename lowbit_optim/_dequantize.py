"""`dequantize_state`: moments as numbers, for whoever changes the rows of parameters."""

from __future__ import annotations

from ._checkpoint_base import steppable
from ._optimizer import LowBitOptimizer, require_own
from ._settings import EXACT


@steppable()
def dequantize_state(optimizer: LowBitOptimizer) -> None:
    """Replace the codes in an optimizer's state by the numbers that they stand for, until its step.

    State then has what that of the 32-bit optimizer has, under the same keys: moments in fp32 of
    their parameters' shapes, and no scales. Rows can be cut out of it, added and set to zero as out
    of torch's. The next step codes what it finds, rounded to nearest, and so does
    `load_state_dict`; until then it takes the memory of 32-bit state. Parameters whose place others
    take before that step are freed at once. Collective for DTensors: a rank that raises leaves the
    others waiting, as in a step.

    Args:
        optimizer: any of this package. State that is kept in 32 bits stays as it is.

    Raises:
        TypeError: if it is no optimizer of this package.
        ValueError: for state that no step could go on from.

    Example:
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        >>> optimizer.step()
        >>> dequantize_state(optimizer)
        >>> optimizer.state[model.embedding.weight]["exp_avg"].dtype
        torch.float32
    """
    require_own(optimizer, "dequantize_state")
    for index in range(len(optimizer.param_groups)):
        for _, part in optimizer._parts(index):
            exact = {**part, **EXACT}
            for p in part["params"]:
                if "step" in optimizer.state.get(p, {}):
                    optimizer._kept_state(p, exact, optimizer._share(p, exact))
    optimizer._forget_parameters()
