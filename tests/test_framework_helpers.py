"""`lowbit_optim.hf`, `.lightning` and `.timm`, without the frameworks. With: tests/frameworks."""

import copy
import doctest
import pickle

import pytest
import torch

import lowbit_optim
import lowbit_optim.bitsandbytes
import lowbit_optim.hf
import lowbit_optim.lightning
from protocol import identical, parameters, python, train

pytestmark = pytest.mark.usefixtures("manager")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.bag = torch.nn.ModuleDict({"bag": torch.nn.EmbeddingBag(20, 8)})
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 20)
        self.head.weight = self.embedding.weight


def test_embeddings_are_in_32_bits_in_every_optimizer():
    model = Model()
    assert lowbit_optim.hf.embeddings_in_32_bits(model) == ["embedding.weight", "bag.bag.weight"]
    for cls in (lowbit_optim.AdamW8bit, lowbit_optim.LANS8bit):
        optimizer = cls(model.parameters(), min_8bit_size=1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        wide = [
            n
            for n, p in model.named_parameters()
            if optimizer.state[p]["exp_avg"].is_floating_point()
        ]
        assert wide == ["embedding.weight", "bag.bag.weight"]


def test_an_embedding_alone_and_a_model_without():
    assert lowbit_optim.hf.embeddings_in_32_bits(torch.nn.Embedding(4, 4)) == ["weight"]
    assert lowbit_optim.hf.embeddings_in_32_bits(torch.nn.Linear(4, 4)) == []
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got list"):
        lowbit_optim.hf.embeddings_in_32_bits([torch.nn.Embedding(4, 4)])


def test_a_parametrized_embedding_is_in_32_bits():
    embedding = torch.nn.utils.parametrizations.weight_norm(torch.nn.Embedding(4, 4))
    names = lowbit_optim.hf.embeddings_in_32_bits(embedding)
    assert names == [name for name, _ in embedding.named_parameters()]
    optimizer = train(lowbit_optim.AdamW8bit(embedding.parameters(), min_8bit_size=1), 1)
    assert all(state["exp_avg"].is_floating_point() for state in optimizer.state.values())


def test_docstring_examples():
    model = Model()
    del model.bag
    names = {"model": model, "AdamW8bit": lowbit_optim.AdamW8bit}
    failed, tried = 0, 0
    for module in (lowbit_optim.hf, lowbit_optim.lightning):
        found = doctest.testmod(module, extraglobs=names)
        failed, tried = failed + found.failed, tried + found.attempted
    assert (failed, tried) == (0, 2)


def scaled(gradients, **options):
    """Parameters, state and calls of a hook after steps through a scaler."""
    params = parameters()
    optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, min_8bit_size=1, **options)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(params[0].grad.clone()))
    for value in gradients:
        loss = sum((p * p).sum() * value for p in params)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return ([p.detach() for p in params], optimizer.state_dict()["state"]), seen


def test_the_scaler_unscales_unless_the_step_is_fused():
    """With the same result, a step that is skipped for an infinite gradient included."""
    gradients = [1.0, 0.5, float("inf"), 2.0]
    with lowbit_optim.use_engine("numba"):
        by_step, scaled_ones = scaled(gradients, fused=True)
        by_scaler, plain_ones = scaled(gradients)
    assert identical(list(by_step), list(by_scaler))
    assert {int(state["step"]) for state in by_step[1].values()} == {3}
    # Hooks of the step see what a step of torch.optim would show them, and no skipped step.
    assert (len(scaled_ones), len(plain_ones)) == (4, 3)
    assert identical(scaled_ones[:2], [1024 * g for g in plain_ones[:2]])


def test_a_wrapper_that_forwards_attributes_steps_with_plain_gradients():
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def step(self):
            self.inner.step()

    results = []
    for wrap in (Wrapper, lambda optimizer: optimizer):
        (p,) = parameters(shapes=[(300,)])
        optimizer = wrap(lowbit_optim.SGD8bit([p], lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale((p * p).sum()).backward()
        scaler.step(optimizer)
        results.append(p.detach())
    assert identical(*results)


def test_lightning_unscales_what_it_clips():
    one, other = (lowbit_optim.Lion8bit(parameters(), fused=True) for _ in range(2))
    assert lowbit_optim.lightning.unscaled_by_trainer(one) is one
    assert (one._step_supports_amp_scaling, other._step_supports_amp_scaling) == (False, True)
    one.load_state_dict(other.state_dict())
    assert not one._step_supports_amp_scaling
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), copy.copy(one)):
        assert not copied._step_supports_amp_scaling
    assert copy.deepcopy(other)._step_supports_amp_scaling
    assert not lowbit_optim.Lion8bit(parameters())._step_supports_amp_scaling
    with pytest.raises(TypeError, match=r"takes an optimizer of .* got torch\.optim\.sgd\.SGD"):
        lowbit_optim.lightning.unscaled_by_trainer(torch.optim.SGD(parameters()))


def test_timm_is_asked_for_when_it_is_needed():
    script = """
import sys
sys.modules["timm"] = None
import lowbit_optim.timm
try:
    lowbit_optim.timm.register()
except ImportError as error:
    print(error)
"""
    assert "timm" in python(script)


def test_no_framework_is_imported():
    script = """
import sys
import lowbit_optim.bitsandbytes, lowbit_optim.hf, lowbit_optim.lightning, lowbit_optim.timm
print(sorted({"bitsandbytes", "lightning", "timm", "transformers"} & set(sys.modules)))
"""
    assert python(script) == "[]"
