"""torch.compile around a whole training step: the optimizer's step is a graph break, no error."""

import pytest
import torch

from lowbit_optim import AdamW8bit, LARS8bit, Lion8bit

STEPS = 5

pytestmark = [
    # Of torch.compile itself: it looks at the gradient of `loss` behind a graph break, and its
    # modules use what torch has deprecated.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]


def trained(cls, options, compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    optimizer = cls(model.parameters(), **options)

    def train_step(x):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = torch.compile(train_step) if compiled else train_step
    losses = []
    for t in range(STEPS):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(t))
        losses.append(step(x).item())
    return losses, optimizer


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW8bit, {"lr": 1e-2}),
        (LARS8bit, {"lr": 0.5, "momentum": 0.9}),
        (Lion8bit, {"lr": 1e-3}),
    ],
)
def test_a_compiled_training_step(cls, options):
    torch._dynamo.reset()
    compiled, optimizer = trained(cls, options, compiled=True)
    plain, _ = trained(cls, options, compiled=False)
    assert compiled[-1] < compiled[0]
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=0)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {STEPS}
