"""Next to other parts of torch: lazy modules, autocast, compile, hooks, default devices, graphs."""

import copy
import io
from collections import UserList

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import lowbit_optim
from protocol import (
    BITS,
    CLASSES,
    ONE_PER_CLASS,
    all_parameters,
    build,
    identical,
    parameters,
    python,
    snapshot,
    train,
)


@CLASSES
def test_a_lazy_module(case):
    model = torch.nn.LazyLinear(5)
    optimizer = build(case, 8, model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight][next(iter(case.moments))].shape == (5, 3)


@CLASSES
@BITS
def test_a_step_under_autocast(case, bits):
    """Nothing of a step is done in bfloat16."""
    inside, outside = build(case, bits, parameters()), build(case, bits, parameters())
    for t in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(inside, 1, first=t)
        train(outside, 1, first=t)
    assert identical(snapshot(inside), snapshot(outside))


def test_torchs_default_device_is_not_where_state_goes():
    """In a fresh process, so that nothing has been made on another device before."""
    script = """
import torch, cases, lowbit_optim
import torch._dynamo  # torch 2.7 cannot import it while another device is the default
from protocol import ONE_PER_CLASS, build, parameters, train
for name in ("torch", "numba"):
    with lowbit_optim.use_engine(name):
        for case in ONE_PER_CLASS:
            params = parameters(shapes=[(300,)])
            params[0].grad = torch.ones(300)
            torch.set_default_device("meta")
            optimizer = build(case, 8, params, percentile_clipping=50)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            torch.set_default_device(None)
            tensors = [x for state in optimizer.state.values() for x in state.values()]
            assert {x.device.type for x in tensors if torch.is_tensor(x)} == {"cpu"}, case.name
"""
    assert python(script) == ""


@pytest.mark.filterwarnings("ignore:.*record function.*")
def test_torch_compile_leaves_the_step_and_the_codec_alone():
    optimizer, twin = (lowbit_optim.AdamW8bit(parameters(), min_8bit_size=1) for _ in "ab")
    compiled = torch.compile(optimizer.step, backend="eager")
    for t in range(2):
        train(twin, 1, first=t)
        for p, q in zip(all_parameters(optimizer), all_parameters(twin), strict=True):
            p.grad = q.grad.clone()
        compiled()
    assert identical(snapshot(optimizer), snapshot(twin))

    def rounded(x):
        return lowbit_optim.dequantize_blockwise(*lowbit_optim.quantize_blockwise(x)) + 1

    x = torch.linspace(-1, 1, 5000)
    assert torch.equal(torch.compile(rounded, backend="eager")(x), rounded(x))


def test_an_optimizer_per_parameter_inside_the_backward_pass():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 15), torch.nn.ReLU(), torch.nn.Linear(15, 1))
    twin = copy.deepcopy(model)
    options = {"min_8bit_size": 1, "dither": False}  # random bits are of a parameter's number
    inside = {p: lowbit_optim.AdamW8bit([p], **options) for p in model.parameters()}

    def step(p):
        inside[p].step()
        inside[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    outside = lowbit_optim.AdamW8bit(twin.parameters(), **options)
    for t in range(3):
        x = torch.full((4, 20), 1.0 + t)
        model(x).sum().backward()
        outside.zero_grad()
        twin(x).sum().backward()
        outside.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is None
        assert torch.equal(p, q)


@CLASSES
def test_a_step_in_inference_mode(case):
    optimizer, twin = build(case, 8, parameters()), build(case, 8, parameters())
    train(optimizer, 1)
    train(twin, 1)
    for t in (1, 2):
        train(twin, 1, first=t)
        for p, q in zip(all_parameters(optimizer), all_parameters(twin), strict=True):
            p.grad = q.grad.clone()
        with torch.inference_mode(t == 1):
            optimizer.step()
    assert identical(snapshot(optimizer), snapshot(twin))


@CLASSES
@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_a_first_step_in_inference_mode(case, engine):
    """Its state is stepped outside as well, where torch's optimizers refuse theirs."""
    with lowbit_optim.use_engine(engine):
        options = {"percentile_clipping": 50, "master_weight_bits": 24}
        optimizer, twin = (build(case, 8, parameters(torch.bfloat16), **options) for _ in "ab")
        for t in range(3):
            train(twin, 1, first=t)
            with torch.inference_mode(t == 0):
                train(optimizer, 1, first=t)
        assert identical(snapshot(optimizer), snapshot(twin))


@CLASSES
@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_what_is_loaded_in_inference_mode_is_stepped_outside(case, engine):
    with lowbit_optim.use_engine(engine):
        source, target = build(case, 8, parameters()), build(case, 8, parameters())
        train(source, 2)
        with torch.inference_mode():
            target.load_state_dict(source.state_dict())
        train(target, 1)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_weights_that_are_loaded_in_inference_mode_are_stepped_outside(engine):
    with lowbit_optim.use_engine(engine):
        ends = []
        for within in (False, True):
            params = parameters(torch.bfloat16)
            optimizer = lowbit_optim.AdamW8bit(params, master_weight_bits=24, min_8bit_size=1)
            given = [p.detach().float() + 1e-4 for p in params]
            with torch.inference_mode(within):
                lowbit_optim.load_master_weights(optimizer, given)
            ends.append(snapshot(train(optimizer, 1)))
        assert identical(*ends)


@CLASSES
@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_numbers_of_a_scaler_may_have_a_dimension(case, engine, overflow):
    """As those of FSDP's ShardedGradScaler have."""
    optimizers = [build(case, 8, parameters()) for _ in range(2)]
    for optimizer, shape in zip(optimizers, ((), (1,)), strict=True):
        optimizer.grad_scale = torch.full(shape, 8.0)
        optimizer.found_inf = torch.full(shape, overflow)
        train(optimizer, 2)
    assert identical(*map(snapshot, optimizers))


@CLASSES
def test_weights_in_shared_memory(case):
    shared, own = parameters(), parameters()
    for p in shared:
        p.share_memory_()
    places = [p.data_ptr() for p in shared]
    optimizer, twin = train(build(case, 8, shared), 2), train(build(case, 8, own), 2)
    assert [p.data_ptr() for p in shared] == places
    assert all(torch.equal(p, q) for p, q in zip(shared, own, strict=True))
    assert all(p.is_shared() for p in all_parameters(optimizer))
    assert len(twin.state) == 2


def test_a_parameter_that_wraps_tensors_is_stepped_by_its_operators():
    """It has no address that a compiled engine could write to."""
    (p,), g = parameters(shapes=[(300, 20)]), torch.randn(300, 20)
    twin = torch.nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone()))
    choice = lowbit_optim.engine_for(twin)
    assert (choice.name, "a TwoTensor has none" in choice.reason) == ("torch", True)
    optimizer = lowbit_optim.AdamW8bit([twin])
    with lowbit_optim.use_engine("torch"):
        other = lowbit_optim.AdamW8bit([p])
        for _ in range(2):
            p.grad = g
            other.step()
    for _ in range(2):
        twin.grad = TwoTensor(g, g)
        optimizer.step()
    assert torch.equal(twin.a, p)
    assert torch.equal(twin.b, p)
    with lowbit_optim.use_engine("numba"), pytest.raises(RuntimeError, match="TwoTensor"):
        optimizer.step()


@pytest.mark.parametrize("before", [0, 1])
def test_a_gradient_that_wraps_tensors(before):
    """That of a functional collective is waited for; no other one is taken for a plain one."""
    optimizer, twin = (train(lowbit_optim.AdamW8bit(parameters()), before) for _ in "ab")
    params = all_parameters(optimizer)
    kept = snapshot(optimizer)
    for p in params:
        p.grad = TwoTensor(torch.ones_like(p), torch.ones_like(p))
    with pytest.raises(RuntimeError, match="is a plain tensor and its gradient a TwoTensor"):
        optimizer.step()
    assert identical(snapshot(optimizer), kept)
    for p, q in zip(params, all_parameters(twin), strict=True):
        q.grad = torch.ones_like(q)
        p.grad = AsyncCollectiveTensor(torch.ones_like(p))
    optimizer.step()
    twin.step()
    assert identical(snapshot(optimizer), snapshot(twin))


def test_fake_tensors_are_refused():
    """After a real step, too, which has left what a fake one would come across."""
    train(lowbit_optim.AdamW8bit(parameters()), 1)
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.ones(300))
        p.grad = torch.ones(300)
        with pytest.raises(RuntimeError, match="FakeTensor, which has no values"):
            lowbit_optim.AdamW8bit([p]).step()
    train(lowbit_optim.AdamW8bit(parameters()), 1)


def give_functional(optimizer):
    for p in all_parameters(optimizer):
        p.grad = torch._to_functional_tensor(torch.ones_like(p))
    optimizer.step()


def keep_functional(optimizer):
    train(optimizer, 1)
    state = optimizer.state[all_parameters(optimizer)[0]]
    state["step"] = torch._to_functional_tensor(state["step"].clone())
    optimizer.step()


def step_within(transform):
    """A step whose gradients are those of a function that is transformed."""

    def step(optimizer):
        def loss(x):
            for p in all_parameters(optimizer):
                p.grad = (x + torch.zeros_like(p)).detach()
            optimizer.step()
            return x.sum()

        transform(loss)(torch.ones(3, 1) if transform is torch.func.vmap else torch.ones(1))

    return step


WITHOUT_MEMORY = {
    "gradient": give_functional,
    "state": keep_functional,
    "functionalize": step_within(torch.func.functionalize),
    "vmap": step_within(torch.func.vmap),
    "grad": step_within(torch.func.grad),
}


# One that engines step and one that torch operators do.
ONE_AND_ONE = pytest.mark.parametrize(
    "case", [case for case in ONE_PER_CLASS if case.name in ("AdamW", "Cain")],
    ids=lambda case: case.name,
)  # fmt: skip


@ONE_AND_ONE
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("use", WITHOUT_MEMORY)
def test_tensors_of_transforms_are_refused(case, steps, use, engine):
    """They have no address, or that of nothing."""
    optimizer = train(build(case, 8, parameters()), steps)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"of shape .* is a tensor of a transform of torch.func"):
        WITHOUT_MEMORY[use](optimizer)
    if use != "state":
        assert identical(snapshot(optimizer), before)
        train(optimizer, 1)


def test_a_state_that_would_be_made_within_a_transform_is_refused(engine):
    """Of plain parameters and gradients, too."""
    params = parameters()
    optimizer = lowbit_optim.SGD32bit(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"the state 'step' of shape .* torch.func"):
        torch.func.functionalize(lambda x: optimizer.step() or x)(torch.ones(1))
    assert identical(snapshot(optimizer), before)
    train(optimizer, 1)


def test_a_parameter_of_a_transform_is_refused():
    p = torch.nn.Parameter(torch._to_functional_tensor(torch.ones(300)))
    p.grad = torch.ones(300)
    with pytest.raises(
        RuntimeError, match=r"a parameter of shape \(300,\) is a tensor of a transf"
    ):
        lowbit_optim.AdamW8bit([p]).step()


@ONE_AND_ONE
def test_a_state_whose_memory_was_freed_is_refused(case, engine):
    optimizer = train(build(case, 8, parameters()), 2)
    (p, _), (key, *_) = all_parameters(optimizer), case.moments
    optimizer.state[p][key].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"the state '{key}' of shape .* has no memory"):
        optimizer.step()


def test_numbers_of_numpy_do_not_spoil_a_checkpoint():
    """numpy.float64 is a float, and torch.load(weights_only=True) refuses it."""
    settings = {"lr": np.float64(0.1), "betas": (np.float64(0.8), 0.9)}
    optimizer = train(lowbit_optim.AdamW8bit(parameters(), **settings), 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    group = torch.load(file, weights_only=True)["param_groups"][0]
    assert (group["lr"], group["betas"]) == (0.1, (0.8, 0.9))
    assert type(group["lr"]) is float


@CLASSES
def test_a_setting_that_only_others_have_is_loaded_without_the_header(case):
    """Trainers give every group `weight_decay`; torch.distributed.checkpoint leaves the header."""
    groups = [{"params": parameters(), "weight_decay": 0.1}]
    optimizer = train(build(case, 8, groups), 1)
    saved = optimizer.state_dict()
    del saved["lowbit_optim"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_list_of_a_configuration_is_taken_and_saved_as_a_list():
    """Those of OmegaConf and Hydra are sequences, and neither lists nor tuples."""
    betas = UserList([0.8, 0.9])
    groups = [{"params": parameters()}, {"params": parameters(), "betas": UserList([0.5, 0.6])}]
    optimizer = train(lowbit_optim.AdamW8bit(groups, betas=betas), 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["param_groups"]
    assert [group["betas"] for group in saved] == [[0.8, 0.9], [0.5, 0.6]]
    optimizer.param_groups[0]["betas"] = betas  # later, and followed when it changes in place
    train(optimizer, 1)
    betas[0] = 2.0
    with pytest.raises(ValueError, match=r"betas\[0\] must be .* got 2.0"):
        train(optimizer, 1)


@CLASSES
@BITS
def test_a_state_dict_that_is_written_in_place_counts_once_it_is_loaded(case, bits):
    """Its `step` is a copy, while its moments are the optimizer's own."""
    with lowbit_optim.use_engine("torch"):
        first, other = (train(build(case, bits, parameters()), steps) for steps in (3, 1))
        for p, q in zip(all_parameters(other), all_parameters(first), strict=True):
            p.data.copy_(q.data)
        sent, written = first.state_dict(), other.state_dict()
        for index, state in written["state"].items():
            for key, value in state.items():
                value.copy_(sent["state"][index][key])
        other.load_state_dict(written)
        assert identical(snapshot(train(first, 2, first=3)), snapshot(train(other, 2, first=3)))


def test_a_scaler_steps_an_optimizer_without_gradients():
    """As torch's fused optimizers, which unscale in their step, too."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    idle, other = (lowbit_optim.AdamW8bit([p], fused=True) for p in params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(params[1].sum()).backward()
    scaler.step(other)
    scaler.step(idle)
    scaler.update()
    assert torch.equal(params[0], torch.ones(3))
    assert bool((params[1] < 1).all())
