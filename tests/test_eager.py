"""The protocol as far as Cain and LearnedGradient, which torch operators step, go their own way."""

import copy
import importlib
import math
from types import SimpleNamespace

import pytest
import torch

import cases
from lowbit_optim import _cain, _learned_gradient, dequantize_blockwise, use_engine
from lowbit_optim._cain import Cain
from lowbit_optim._learned_gradient import LearnedGradient
from protocol import NEEDS_TRITON, identical, saved_and_loaded, snapshot, train

MOMENTS = {Cain: {"delta": True, "exp_avg_sq": False}, LearnedGradient: {"exp_avg": True}}
BOTH = pytest.mark.parametrize("cls", MOMENTS, ids=lambda cls: cls.__name__)
BITS = pytest.mark.parametrize("bits", [8, 32])


def mixed_parameters(dtype, device="cpu"):
    shapes = [(12, 70), (300,), (4, 5, 6), (3,), (1, 1), (), (0, 4)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def made(cls, params, bits=8, **options):
    period = {"lr_est_period": 3} if cls is LearnedGradient else {}
    return cls(params, optim_bits=bits, min_8bit_size=1, percentile_clipping=7, **period, **options)


@pytest.mark.parametrize(("dtype", "at"), [(torch.float32, 1), (torch.bfloat16, 6)], ids=str)
@BITS
@BOTH
def test_resume_is_bit_exact(cls, bits, dtype, at):
    """Within the four steps of a size, before and after matrices moved; more in test_checkpoint."""
    whole = train(made(cls, mixed_parameters(dtype), bits), at)
    params = [torch.nn.Parameter(p.detach().clone()) for p in whole.param_groups[0]["params"]]
    resumed = made(cls, params, bits)
    resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    assert identical(snapshot(resumed)["state"], snapshot(whole)["state"])
    train(whole, 12, first=at)
    train(resumed, 12, first=at)
    assert identical(snapshot(resumed), snapshot(whole))


@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
@BOTH
def test_loading_converts_the_width_of_moments_only(cls, before, after):
    a = train(made(cls, mixed_parameters(torch.float32), before), 5)
    b = made(cls, mixed_parameters(torch.float32), after)
    b.load_state_dict(a.state_dict())
    for p, q in zip(*(o.param_groups[0]["params"] for o in (a, b)), strict=True):
        old, new = dict(a.state[p]), dict(b.state[q])
        for key, signed in MOMENTS[cls].items():
            wide, narrow = (old, new) if before == 32 else (new, old)
            assert wide[key].dtype == torch.float32
            if not p.numel():
                continue
            assert narrow[key].dtype == torch.uint8
            decoded = dequantize_blockwise(narrow[key], narrow[f"{key}_absmax"], signed)
            assert cases.distance(decoded, wide[key]) < 0.05
            for state in (old, new):
                del state[key]
                state.pop(f"{key}_absmax", None)
        assert identical(old, new)
    train(b, 2)


@BOTH
def test_a_state_that_does_not_fit_changes_nothing(cls):
    optimizer = train(made(cls, mixed_parameters(torch.float32)), 4)
    before = snapshot(optimizer)
    for key, value in (
        ("scale_exp_avg_sq", None), ("scale_exp_avg_sq", torch.zeros(2)),
        ("scale_exp_avg_sq", torch.tensor(-1.0)),
        *([("param_rms_1", torch.ones(12)), ("param_rms_0", None), ("param_rms_0", torch.zeros(12))]
          if cls is Cain else
          [("lr_0", torch.eye(13)), ("lr_1", None), ("grad_cov_0", None),
           ("scale_grads", torch.zeros(3)), ("param_rms", 2.0), ("param_rms", torch.tensor(-1.0))]),
    ):  # fmt: skip
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["state"][0][key] = value
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(state_dict)
        assert identical(snapshot(optimizer), before)
    adam = torch.optim.Adam(mixed_parameters(torch.float32))
    with pytest.raises(ValueError, match=r"does not fit|another optimizer"):
        optimizer.load_state_dict(train(adam, 1).state_dict())
    other = LearnedGradient if cls is Cain else Cain
    with pytest.raises(ValueError, match="cannot be loaded"):
        optimizer.load_state_dict(made(other, mixed_parameters(torch.float32)).state_dict())
    assert identical(snapshot(optimizer), before)


@BOTH
def test_step_is_counted_on_the_cpu(cls):
    """Also after a checkpoint that was mapped elsewhere; the rest goes to the parameter."""
    optimizer = train(made(cls, mixed_parameters(torch.float32)), 2)
    meta = made(cls, mixed_parameters(torch.float32, "meta"))
    meta.load_state_dict(optimizer.state_dict())
    for p in meta.param_groups[0]["params"]:
        state = dict(meta.state[p])
        assert state.pop("step").device.type == "cpu"
        assert all(value.device.type == "meta" for value in state.values())


@BITS
@BOTH
def test_no_value_is_read_back_from_the_device(cls, bits):
    """Meta tensors have no values: whatever reads one raises."""
    params = mixed_parameters(torch.float32, "meta")
    rate = torch.tensor(0.1, device="meta")
    optimizer = made(cls, params, bits, lr=0.1)
    for t in range(13):
        optimizer.param_groups[0]["lr"] = rate if t % 2 else 0.1
        optimizer.grad_scale = torch.tensor(2.0, device="meta")
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert int(optimizer.state[params[0]]["step"]) == t + 1


@BITS
@BOTH
def test_an_overflow_found_by_a_grad_scaler_skips_everything(cls, bits):
    optimizer = train(made(cls, mixed_parameters(torch.float32), bits), 3)
    before = snapshot(optimizer)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    train(optimizer, 1)
    assert identical(snapshot(optimizer), before)
    twin = copy.deepcopy(optimizer)
    optimizer.found_inf = torch.tensor(0.0)
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, twin)), strict=True):
        p.grad, q.grad = torch.full_like(p, 8.0), torch.ones_like(q)
    twin.found_inf = twin.grad_scale = None
    optimizer.step()
    twin.step()
    assert identical(snapshot(optimizer), snapshot(twin))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30], ids=str)
@BITS
@BOTH
def test_a_bad_gradient_element_costs_no_other_weight(cls, bits, bad):
    """In 5000 weights and in 4; matrices are estimated in the bad step itself too."""
    shapes = [(50, 100), (4,)]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    period = {"lr_est_period": 1} if cls is LearnedGradient else {}
    optimizer = cls(params, optim_bits=bits, min_8bit_size=1, percentile_clipping=5, **period)
    for t in range(12):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
            if t == 3:
                p.grad.view(-1)[2] = bad
        optimizer.step()
    for p in params:
        lost = ~p.isfinite().view(-1)
        lost[2] = False
        assert not lost.any()
        for key, value in optimizer.state[p].items():
            values = value.double()
            if key in MOMENTS[cls] and bits == 32:
                values.view(-1)[2] = 0.0  # as in torch.optim
            assert values.isfinite().all(), key


@pytest.mark.parametrize("huge", [math.inf, 1e30], ids=str)
@BOTH
def test_a_weight_without_a_finite_square_keeps_no_other_from_moving(cls, huge):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, 100, generator=generator))
    p.data.view(-1)[2] = huge
    start = p.detach().clone()
    optimizer = cls([p])
    for _ in range(12):
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    moved = (p - start).abs().view(-1)
    moved[2] = 0.1
    assert (moved > 0).all()
    assert (moved < 1).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1e4, 1e18, 1e30], ids=str)
@BOTH
def test_any_gradient_scale_stays_finite(cls, scale):
    period = {"lr_est_period": 2} if cls is LearnedGradient else {}
    params = mixed_parameters(torch.float32)
    optimizer = cls(params, **period)
    for t in range(9):
        for p in params:
            p.grad = scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@BOTH
def test_eps_may_be_zero(cls):
    p = torch.nn.Parameter(torch.ones(6, 7))
    optimizer = cls([p], eps=0.0)
    for g in (torch.zeros_like(p), torch.ones_like(p)):
        p.grad = g
        optimizer.step()
        assert p.isfinite().all()


@pytest.mark.parametrize("as_tensor", [False, True])
@BOTH
def test_zero_gradient_and_zero_lr_leave_every_bit(cls, as_tensor):
    """-0.0 and weights beyond param_max included."""
    p = torch.nn.Parameter(torch.tensor([[-0.0, 0.0, 30.0], [1.0, -50.0, 1e-20]]))
    start = p.detach().clone()
    optimizer = cls([p], lr=torch.zeros(()) if as_tensor else 0.0)
    for _ in range(12):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.view(torch.int32), start.view(torch.int32))


def test_one_parameter_overrides_its_group(manager):
    a, b = (torch.nn.Parameter(torch.ones(70, 80)) for _ in "ab")
    manager.override_config(b, "optim_bits", 32)
    optimizer = train(_cain.Cain8bit([a, b]), 2)
    assert optimizer.state[a]["delta"].dtype == torch.uint8
    assert optimizer.state[b]["delta"].dtype == torch.float32


@BOTH
def test_refusals_come_before_anything_has_changed(cls):
    a, b = (torch.nn.Parameter(torch.ones(6, 7)) for _ in "ab")
    optimizer = cls([a, b])
    a.grad = torch.ones_like(a)
    b.grad = torch.ones_like(b).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(a, torch.ones(6, 7))
    assert not optimizer.state[a]


def test_the_engine_in_use_only_codes():
    p, q = (torch.nn.Parameter(torch.ones(6, 7)) for _ in "pq")
    for engine, x in (("numba", p), ("torch", q)):
        with use_engine(engine):
            train(Cain([x]), 1)
    assert torch.equal(p, q)


@pytest.mark.parametrize("state_format", ["dynamic8", "ratio8"])
@BOTH
def test_the_engine_in_use_dithers_as_torch_does(cls, state_format, monkeypatch):
    """Torch operators work the step out, but do not code it."""
    betas = (0.995, 0.98)  # so slow an average that it is dithered, too
    states = []
    for engine in ("numba", "torch"):
        with use_engine(engine), monkeypatch.context() as patch:
            if engine == "numba":
                patch.delattr("lowbit_optim_kernels.engines.torch.TorchRun")
            params = mixed_parameters(torch.float32)
            made_of = made(cls, params, state_format=state_format, betas=betas)
            states.append([made_of.state[p] for p in train(made_of, 1).param_groups[0]["params"]])
    for state, other in zip(*states, strict=True):
        for key in MOMENTS[cls]:
            differ = (state[key].int() - other[key].int()).abs()
            assert int(differ.sum()) <= 3, key


BAD = [
    (Cain, "scale_speed", (0.0, 1.0, -0.1, math.nan)),
    (Cain, "param_max", (0.1, 0.0, 10001.0, math.inf)),
    (Cain, "rms_eps", (0.0, 0.1, -1e-5)),
    (LearnedGradient, "size_lr_scale", (-0.1, math.inf)),
    (LearnedGradient, "meta_lr_scale", (-1.0,)),
    (LearnedGradient, "param_min_rms", (-1e-5, 3.0)),
    (LearnedGradient, "param_max_rms", (0.0, math.nan)),
    (LearnedGradient, "lr_est_period", (0, -3, 2.5)),
    (LearnedGradient, "max_step_scale", (0.0, -1.0)),
    (LearnedGradient, "max_size", (0, -1, 2.5)),
    *((cls, name, values) for cls in MOMENTS for name, values in (
        ("lr", (-0.1, math.nan)), ("betas", ((0.9,), (1.0, 0.9), (0.9, -0.1))), ("eps", (-1e-8,)),
        ("optim_bits", (16,)), ("percentile_clipping", (101, -1)), ("min_8bit_size", (-1,)),
        ("foreach", (True,)), ("fused", (True,)), ("capturable", (True,)),
        ("differentiable", (True,)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "name", "values"), BAD)
def test_bad_arguments_are_named(cls, name, values):
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = cls([p])
    for value in values:
        with pytest.raises(ValueError, match=name):
            cls([p], **{name: value})
        with pytest.raises(ValueError, match=name):
            optimizer.add_param_group({"params": [q], name: value})
        assert len(optimizer.param_groups) == 1


@BOTH
def test_errors_name_the_class(cls):
    class Mine(cls):
        pass

    for given in ({"foreach": True}, {"capturable": True}):
        with pytest.raises(ValueError, match="for Mine, got"):
            Mine([torch.nn.Parameter(torch.ones(3))], **given)


@BOTH
def test_arguments_of_a_wrong_type(cls):
    p = torch.nn.Parameter(torch.ones(3))
    for name, value in (("eps", "1"), ("maximize", 1), ("lr", None)):
        with pytest.raises(TypeError, match=name):
            cls([p], **{name: value})
    with pytest.raises(ValueError, match="max_unorm"):
        cls([p], args=SimpleNamespace(max_unorm=0.1))
    with pytest.raises(ValueError, match="max_unorm"):
        cls([{"params": [p], "max_unorm": 0.1}])
    assert cls([p], args=SimpleNamespace(optim_bits=8)).defaults["optim_bits"] == 8


def test_arguments_of_cain_alone():
    p = torch.nn.Parameter(torch.ones(3))
    for name, value in (("scale_speed", True), ("rms_eps", "x"), ("bias_correction_fix", 1)):
        with pytest.raises(TypeError, match=name):
            Cain([p], **{name: value})
    assert Cain([p], 0.1, (0.8, 0.9), 1e-7, 0.1, 1e-4, 1e4).defaults["param_max"] == 1e4


def test_names_fix_the_bits():
    p = torch.nn.Parameter(torch.ones(3))
    for eight, wide in (
        (_cain.Cain8bit, _cain.Cain32bit),
        (_learned_gradient.LearnedGradient8bit, _learned_gradient.LearnedGradient32bit),
    ):
        assert eight([p]).defaults["optim_bits"] == 8
        assert wide([p]).defaults["optim_bits"] == 32
        with pytest.raises(ValueError, match="optim_bits must be 8"):
            eight([p], optim_bits=32)


@BOTH
def test_what_an_engine_makes_of_the_moments_is_made_once(cls, engine, device, monkeypatch):
    if engine == "torch":
        pytest.skip("makes nothing")
    module = importlib.import_module(f"lowbit_optim_kernels.engines.{engine}.tables")
    name = "_make_tables"
    make, made = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda batch: made.append(batch) or make(batch))
    params = [torch.nn.Parameter(torch.ones(4, 70, device=device)) for _ in range(2)]
    optimizer = cls(params, optim_bits=8, min_8bit_size=1)
    with use_engine(engine):
        train(optimizer, 3)
    assert len(made) == 2


@BOTH
def test_another_engine_goes_on_with_the_moments(cls):
    """What one engine has made is not another's."""
    p = torch.nn.Parameter(torch.ones(4, 70))
    optimizer = cls([p], optim_bits=8, min_8bit_size=1)
    pytest.importorskip("numba")
    pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    for engine in ("numba", "triton", "numba", "torch", "numba"):
        with use_engine(engine):
            train(optimizer, 1)
    assert int(optimizer.state[p]["step"]) == 5


@BOTH
def test_dither_decides_how_moments_are_coded(cls):
    codes = []
    for dither in (True, False):
        p = torch.nn.Parameter(torch.ones(300))
        optimizer = cls([p], optim_bits=8, min_8bit_size=1, dither=dither, betas=(0.95, 0.98))
        for scale in (1.0, 0.9):
            p.grad = scale * torch.rand(300, generator=torch.Generator().manual_seed(0))
            optimizer.step()
        codes.append(torch.cat([optimizer.state[p][key].flatten() for key in MOMENTS[cls]]))
    assert not torch.equal(*codes)


@BOTH
def test_steps_of_a_parameter_without_elements_are_counted(cls):
    """As torch's optimizers count them, and as of the parameters beside it."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((300,), (0, 3))]
    optimizer = train(cls(params), 2)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2]
