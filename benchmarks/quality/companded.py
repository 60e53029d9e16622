"""AdamW with the code that another library published, as a reference of its formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Companded(torch.optim.Optimizer):
    """AdamW whose moments go through the code that FlashOptim published, without weight decay.

    Groups of 32 elements with fp16 scales s, the largest magnitude of a group:

        m:  y = m / s,  code = round(127 * 2 y / (1 + |y|))
        v:  code = round(255 sqrt(v) / s), s of sqrt(v)

    Reference: FlashOptim (arXiv:2602.23349), algorithms 2 and 3. This is the code alone, not the
    library.
    """

    GROUP = 32

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": eps})

    def _groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Groups as rows, divided by their scales; and those."""
        rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % self.GROUP))
        rows = rows.view(-1, self.GROUP)
        scale = rows.abs().amax(-1, keepdim=True).half()
        wide = scale.float()
        return torch.where(wide > 0, rows / wide, 0.0), scale

    def _encode(self, m: Tensor, v: Tensor) -> dict[str, Tensor]:
        y, scale = self._groups(m)
        root, root_scale = self._groups(v.sqrt())
        return {
            "exp_avg": (254 * y / (1 + y.abs())).round().clamp(-127, 127).to(torch.int8),
            "exp_avg_scale": scale,
            "exp_avg_sq": (255 * root).round().clamp(0, 255).to(torch.uint8),
            "exp_avg_sq_scale": root_scale,
        }

    def _decode(self, state: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
        y = state["exp_avg"].float() / 127
        m = y / (2 - y.abs()) * state["exp_avg_scale"].float()
        root = state["exp_avg_sq"].float() / 255 * state["exp_avg_sq_scale"].float()
        m, root = (x.flatten()[: shape.numel()].view(shape) for x in (m, root))
        return m, root * root

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m, v = self._decode(state, p.shape) if state else (p * 0.0, p * 0.0)
                m = beta1 * m + (1 - beta1) * p.grad
                v = beta2 * v + (1 - beta2) * p.grad * p.grad
                count = state.get("step", 0) + 1
                state.update(self._encode(m, v), step=count)
                root = (v / (1 - beta2**count)).sqrt()
                p.addcdiv_(m, root + group["eps"], value=-group["lr"] / (1 - beta1**count))
