"""torch's generic optimizer tests over our classes: what a step does. See torch_database.

Each test here is named after the one of torch's `TestOptimRenewed` that it follows. Of torch's,
`test_peak_memory_foreach` and the tests of several GPUs and of tensors of 2**32 elements are left
out: there is one way of stepping, whatever `foreach` says, and test_traffic counts its memory.
"""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import torch_database
from protocol import identical, snapshot
from torch_database import ACCEPTED, FAMILIES, RECORDS, inputs, record

EXCEPTIONS = {
    ("Eve", "test_param_groups_lr"): "its weight decay is not multiplied by lr",
}
COMPILED = ("test_foreach_and_fused_match_forloop", "test_correctness")


@pytest.fixture(autouse=True)
def _exception(request):
    """What cannot hold for a class has to fail there: `xfail_strict` tells when it does hold."""
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("name") if callspec else None
    reason = EXCEPTIONS.get((name, request.node.originalname))
    if reason:
        request.node.add_marker(pytest.mark.xfail(reason=reason, raises=AssertionError))


@pytest.fixture(autouse=True)
def _engine(request):
    """The torch engine, which compiles nothing, but where what a compiled one does is asked."""
    compiled = request.node.originalname in COMPILED
    with torch_database.small_steps("auto" if compiled else "torch"):
        yield


class Problem:
    """A linear model's squared error: the weight, bias and loss of torch's tests."""

    def __init__(self, contiguous=True, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        last = () if contiguous else (2,)
        made = (torch.randn(*n, *last, generator=generator).to(dtype) for n in ((10, 5), (10,)))
        made = (x if contiguous else x[..., 0] for x in made)
        self.params = self.weight, self.bias = tuple(map(torch.nn.Parameter, made))
        self.x = torch.randn(5, generator=generator).to(dtype)

    def loss(self):
        """The loss, with its gradients: a closure."""
        for p in self.params:
            p.grad = None
        loss = (self.weight.mv(self.x) + self.bias).pow(2).sum()
        loss.backward()
        return loss.detach()

    def train(self, optimizer, steps=20, schedulers=()):
        """Whether the loss moved as `optimizer` was asked to move it."""
        before = self.loss()
        for _ in range(steps):
            loss = optimizer.step(self.loss)
            assert isinstance(loss, torch.Tensor), "a step returns what its closure does"
            for scheduler in schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
        after = self.loss()
        assert after.isfinite()
        return bool(after > before if optimizer.param_groups[0]["maximize"] else after < before)


@RECORDS
def test_optim_infos_do_not_specify_global_cliquey_kwargs(name, bits):
    given = inputs(record(name, bits))
    assert given
    assert not any(flag in arguments for flag in ("foreach", "fused") for arguments in given)


@RECORDS
def test_errors(name, bits):
    info = record(name, bits)
    errors = info.optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) > 6
    for error in errors:
        given = error.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(2))] if given.params is None else given.params
        if given.desc in ACCEPTED:
            info.optim_cls(params, **given.kwargs)
        elif issubclass(error.error_type, Warning):
            with pytest.warns(error.error_type, match=error.error_regex):
                info.optim_cls(params, **given.kwargs)
        else:
            with pytest.raises(error.error_type) as raised:
                info.optim_cls(params, **given.kwargs)
            names = [*(set(given.kwargs) - FAMILIES[name].required.keys()), "lr"]
            if given.params is None:  # our own message: it names the argument
                assert any(text in str(raised.value) for text in names), raised.value


@pytest.mark.parametrize(
    ("contiguous", "scheduled"), [(True, False), (False, True)], ids=["plain", "strided, scheduled"]
)
@RECORDS
@pytest.mark.few("name", "bits", "contiguous")
def test_forloop_goes_right_direction(name, bits, contiguous, scheduled):
    info = record(name, bits)
    for makers in info.scheduler_inputs if scheduled else [[]]:
        for arguments in inputs(info):
            problem = Problem(contiguous)
            optimizer = info.optim_cls(problem.params, **arguments)
            schedulers = [make(optimizer) for make in makers]
            assert problem.train(optimizer, schedulers=schedulers), arguments


@RECORDS
def test_param_group_with_lrscheduler_goes_right_direction(name, bits):
    info = record(name, bits)
    arguments = inputs(info)[0]
    for makers in info.scheduler_inputs:
        problem = Problem()
        groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}]
        optimizer = info.optim_cls(groups, **arguments)
        assert problem.train(optimizer, schedulers=[make(optimizer) for make in makers])


@RECORDS
def test_tensor_lr(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        number, tensor = Problem(), Problem()
        first = info.optim_cls(number.params, **{**arguments, "lr": 1e-3})
        second = info.optim_cls(tensor.params, **{**arguments, "lr": torch.tensor(1e-3)})
        for _ in range(5):
            first.step(number.loss)
            second.step(tensor.loss)
        for p, q in zip(number.params, tensor.params, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


@RECORDS
def test_rosenbrock_sparse_is_refused(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        params = [torch.nn.Parameter(torch.tensor([1.5, 1.5])) for _ in range(2)]
        optimizer = info.optim_cls(params, **arguments)
        params[0].grad = torch.ones(2)
        params[1].grad = torch.sparse_coo_tensor([[0, 0]], [0.5, 1.5], (2,), check_invariants=True)
        before = snapshot(optimizer)
        with pytest.raises(RuntimeError, match=rf"{name}.*sparse"):
            optimizer.step()
        assert identical(before, snapshot(optimizer))


@RECORDS
def test_complex_is_refused(name, bits):
    info = record(name, bits)
    arguments = inputs(info)[0]
    mixed = [torch.randn(3), torch.randn(10, 5, dtype=torch.complex64)]
    with pytest.raises(TypeError, match="complex64"):
        info.optim_cls(mixed, **arguments)
    optimizer = info.optim_cls(mixed[:1], **arguments)
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": mixed[1:]})
    assert len(optimizer.param_groups) == 1


def walk(info, arguments, dtype=torch.float32, default_dtype=torch.float32):
    """What seven steps leave: one of no gradients, two of a frozen layer, a tensor without size."""
    generator = torch.Generator().manual_seed(1)
    x = torch.arange(1, 7, dtype=dtype).reshape(3, 2) / 10
    shapes = ((3, 2), (3,), (1, 3), (1,), (), (0,))
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    params = [torch.nn.Parameter(value) for value in values]
    first, bias, second, shift, alone, empty = params
    torch.set_default_dtype(default_dtype)
    try:
        optimizer = info.optim_cls(params, **arguments)
        alone.grad, empty.grad = torch.ones_like(alone), torch.zeros_like(empty)
        for i in range(7):
            for p in params[:4]:
                p.grad = None
            second.requires_grad_(i not in (3, 4))
            if i != 2:
                hidden = torch.sigmoid(torch.nn.functional.linear(x, first, bias))
                torch.sigmoid(torch.nn.functional.linear(hidden, second, shift)).sum().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.isfinite().all() for p in params)
    result = snapshot(optimizer)
    return result["params"], result["state"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@RECORDS
@pytest.mark.few(("name", "bits"), "dtype")
def test_foreach_and_fused_match_forloop(name, bits, dtype):
    """In all bits: there is one implementation, which the flags do not change."""
    info = record(name, bits)
    flags = [{flag: on} for flag in info.supported_impls for on in (False, True)]
    if dtype == torch.float64:
        flags = [flag for flag in flags if flag != {"fused": True}]
    for arguments in inputs(info)[:2]:
        want = walk(info, arguments, dtype)
        for flag in flags or [{"foreach": False}, {"fused": False}]:
            assert identical(walk(info, {**arguments, **flag}, dtype), want), (arguments, flag)


@RECORDS
def test_fused_in_float64_is_refused_by_the_step(name, bits):
    """No compiled engine runs it, so `fused=True` cannot be met; nothing has changed then."""
    info = record(name, bits)
    if "fused" not in info.supported_impls:
        pytest.skip(f"{name} refuses fused=True when it is constructed: test_errors")
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = info.optim_cls([p], **inputs(info)[0], fused=True)
    p.grad = torch.ones_like(p)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="fused"):
        optimizer.step()
    assert identical(before, snapshot(optimizer))


@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=str)
@RECORDS
@pytest.mark.few("name", "bits", "default")
def test_set_default_dtype_works(name, bits, default):
    info = record(name, bits)
    for arguments in inputs(info)[:2]:
        assert identical(walk(info, arguments, default_dtype=default), walk(info, arguments))


@RECORDS
def test_mixed_device_dtype(name, bits):
    """Tensors of four dtypes in one group are stepped as each alone."""
    info = record(name, bits)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(2, 3, generator=generator).to(dtype) for dtype in dtypes]
    for arguments in inputs(info)[:2]:
        together = [torch.nn.Parameter(value.clone()) for value in values]
        alone = [torch.nn.Parameter(value.clone()) for value in values]
        # Random bits are of a tensor's number, so without them.
        options = {**arguments, "dither": False, "master_weight_bits": None}
        optimizers = [info.optim_cls(params, **options) for params in (together, *zip(alone))]
        for t in range(3):
            for p, q in zip(together, alone, strict=True):
                p.grad, q.grad = torch.full_like(p, t + 1), torch.full_like(q, t + 1)
            for optimizer in optimizers:
                optimizer.step()
        assert identical([p.detach() for p in together], [q.detach() for q in alone]), arguments


@pytest.mark.parametrize("scale", [None, 1.0])
@RECORDS
def test_fused_does_not_step_if_foundinf(name, bits, scale):
    info = record(name, bits)
    for arguments in inputs(info):
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(5)]
        optimizer = info.optim_cls(params, **arguments)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.grad_scale = None if scale is None else torch.full((1,), scale)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert all(p.item() == 1 for p in params)
        assert all(state["step"] == 0 for state in optimizer.state.values())


@RECORDS
@pytest.mark.few("name", "bits")
def test_param_groups_weight_decay(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        problem = Problem()
        without = {**arguments, **({"weight_decay": 0.0} if "weight_decay" in arguments else {})}
        groups = [{"params": [problem.weight], **arguments}, {"params": [problem.bias], **without}]
        assert problem.train(info.optim_cls(groups, **FAMILIES[name].required)), arguments


@RECORDS
@pytest.mark.few("name", "bits")
def test_param_groups_lr(name, bits):
    info = record(name, bits)
    for arguments in inputs(info):
        problem, other = Problem(), torch.nn.Parameter(torch.tensor([0.5, -1.5]))
        other.grad = torch.tensor([0.3, 0.7])
        mine = {"lr": 1e-3, **arguments}
        groups = [{"params": problem.params, **mine}, {"params": [other]}]
        optimizer = info.optim_cls(groups, lr=1e-28)
        assert problem.train(optimizer), arguments
        assert torch.equal(other, torch.tensor([0.5, -1.5]))


@RECORDS
def test_step_is_noop_when_params_have_no_grad(name, bits):
    info = record(name, bits)
    for arguments in inputs(info, flags=True):
        params = [torch.randn(2, 3, requires_grad=False) for _ in range(2)]
        optimizer = info.optim_cls(params, **arguments)
        before = snapshot(optimizer)
        assert optimizer.step(lambda: 1) == 1
        assert identical(before, snapshot(optimizer))
        assert not optimizer.state


@pytest.mark.parametrize("shape", [(5, 1), (0,), (3, 0)], ids=str)
@RECORDS
def test_step_is_noop_for_zero_grads(name, bits, shape):
    """And for tensors of no elements, whatever the settings."""
    info = record(name, bits)
    p = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    before = p.detach().clone()
    for arguments in inputs(info, flags=True):
        optimizer = info.optim_cls([p], **arguments)
        if p.numel() and optimizer.param_groups[0].get("weight_decay", 0) != 0:
            continue
        p.grad = torch.zeros_like(p)
        for _ in range(3):
            optimizer.step()
        assert torch.equal(p, before), arguments


@RECORDS
def test_step_refuses_overlapping_params(name, bits):
    """Elements that share memory cannot each be stepped; nothing has moved when that is said."""
    info = record(name, bits)
    arguments = {**FAMILIES[name].required, "lr": 0.01}
    plain = torch.nn.Parameter(torch.ones(3))
    overlapping = torch.ones(1).expand(4).requires_grad_()
    plain.grad, overlapping.grad = torch.ones(3), torch.ones(4)
    with pytest.raises((RuntimeError, ValueError)):
        info.optim_cls([plain, overlapping], **arguments).step()
    assert torch.equal(plain, torch.ones(3))
    assert torch.equal(overlapping, torch.ones(4))


def in_dtype(value, dtype):
    """A copy of an argument; torch's class computes with tensors in the dtype that they have."""
    if isinstance(value, tuple):
        return tuple(in_dtype(item, dtype) for item in value)
    return value.to(dtype, copy=True) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.twin])
def test_correctness(name, dtype):
    """As torch's class of that name, over all its inputs, schedulers included."""
    info = record(name, 32)
    theirs = getattr(torch.optim, name)
    rtol = 1e-12 if dtype == torch.float64 else 2e-6
    known = torch_database.database().optim_db
    makers = next(r for r in known if r.optim_cls is theirs).scheduler_inputs
    for arguments in inputs(info):
        for schedulers in ([], *makers):
            problems = Problem(dtype=dtype), Problem(dtype=dtype)
            for problem, cls in zip(problems, (info.optim_cls, theirs), strict=True):
                given = {key: in_dtype(value, dtype) for key, value in arguments.items()}
                if cls is theirs:  # on CPUs it refuses to be capturable
                    given.pop("capturable", None)
                optimizer = cls(problem.params, **given)
                problem.train(optimizer, 10, [make(optimizer) for make in schedulers])
            for p, q in zip(*(problem.params for problem in problems), strict=True):
                torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


def test_the_database_leaves_nothing_behind():
    """Importing it changes the settings of other tests, which has to be undone."""
    import hypothesis

    torch_database.database()
    assert hypothesis.settings().max_examples == 100
    assert not torch.backends.flags_frozen()
    with pytest.raises(UserWarning, match="still an error"):
        warnings.warn("still an error", UserWarning, stacklevel=1)
