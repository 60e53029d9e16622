"""What a user may do with an optimizer between and in steps, generated.

Each of `OPERATIONS` takes an optimizer and an example's randomness, prepares what comes before the
call that is watched, and returns an `Act`. Given twins and the same randomness it does the same to
both. One that finds nothing to do returns None.
"""

from dataclasses import dataclass
from typing import Any

import torch

import lowbit_optim
from fuzz import MASTERED, registrar
from fuzz_settings import CONFIGS, INF, INVALID, NAN, ODD, valid_for
from protocol import all_parameters

REFUSED, EITHER, ACCEPTED = "refused", "either", "accepted"
OPERATIONS = []
often = registrar(OPERATIONS)
OVERRIDDEN = []  # pairs of a parameter and its override, to be made again for a copy


@dataclass
class Act:
    """What is called, what has to become of it, and what makes good after a refusal.

    Attributes:
        call: by default a step.
        verdict: whether the call has to be refused.
        undo: brings back what was there before; called after a refusal.
        steps: whether the call steps the parameters that have a gradient.
        result: what the call has to return.
    """

    call: Any
    verdict: str = ACCEPTED
    undo: Any = None
    steps: bool = True
    result: Any = None


def random_like(rng, p):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(p.shape, generator=generator, dtype=torch.float32)


def give(p, g):
    """A gradient of any dtype and layout; torch checks the dtype unless it is told not to."""
    p.grad = None
    if not hasattr(p, "grad_dtype"):  # before torch 2.10
        g = g.to(p.dtype)
    if g.dtype != p.dtype:
        p.grad_dtype = None
    p.grad = g


def give_all(optimizer, rng, scale=1.0, missing=0.0):
    for p in all_parameters(optimizer):
        give(p, (random_like(rng, p) * scale).to(p.dtype))
        if rng.random() < missing:
            p.grad = None


def one_of(optimizer, rng, allowed):
    """A random parameter that is allowed; None if there is none."""
    return rng.choice([p for p in all_parameters(optimizer) if allowed(p)] or [None])


# Steps.


@often(6)
def a_step(optimizer, rng):
    give_all(optimizer, rng, rng.choice([1.0, 1.0, 0.01, 10.0]), rng.choice([0, 0.3]))
    return Act(optimizer.step)


@often(3)
def a_step_with_the_same_gradients_overwritten(optimizer, rng):
    """As `zero_grad(set_to_none=False)` leaves them, of p's dtype: a twin may have none yet."""
    for p in all_parameters(optimizer):
        g = random_like(rng, p).bfloat16().half()  # held exactly by every dtype
        if p.grad is not None and p.grad.is_contiguous() and p.grad.dtype == p.dtype:
            p.grad.copy_(g)
        else:
            give(p, g.to(p.dtype))
    return Act(optimizer.step)


@often(1)
def a_step_without_gradients(optimizer, rng):
    optimizer.zero_grad()
    return Act(optimizer.step)


@often(1)
def a_step_with_zero_gradients(optimizer, rng):
    give_all(optimizer, rng, 0.0)
    return Act(optimizer.step)


@often(2)
def a_step_of_tiny_or_huge_gradients(optimizer, rng):
    scale = rng.choice([1e-30, 1e-15, 1e4, 1e30])
    give_all(optimizer, rng)
    for p in all_parameters(optimizer):
        p.grad.mul_(min(scale, 1e4) if p.dtype == torch.float16 else scale)
    return Act(optimizer.step)


@often(2)
def a_step_with_bad_elements(optimizer, rng):
    give_all(optimizer, rng)
    p = one_of(optimizer, rng, torch.Tensor.numel)
    if p is None:
        return None
    for _ in range(rng.choice([1, 3])):
        p.grad.view(-1)[rng.randrange(p.numel())] = rng.choice([NAN, INF, -INF])
    return Act(optimizer.step)


@often(2)
def a_step_of_other_gradients(optimizer, rng):
    """Of another dtype or layout than the parameter."""
    give_all(optimizer, rng, 0.5)
    for p in all_parameters(optimizer):
        g = p.grad
        other = g.to(rng.choice([torch.float32, torch.bfloat16, torch.float64]))
        apart = torch.stack([g, g], -1)[..., 1]
        turned = g.mT.contiguous().mT if g.ndim > 1 else g
        one = g.flatten()[:1].expand(g.numel()).reshape(g.shape) if g.numel() else g
        give(p, rng.choice([other, apart, turned, one, g]))
    return Act(optimizer.step)


@often(2)
def a_step_with_a_closure(optimizer, rng):
    params = [p for p in all_parameters(optimizer) if p.requires_grad]
    pairs = [(p, random_like(rng, p)) for p in params]
    if not pairs:
        return None

    def closure():
        optimizer.zero_grad()
        loss = sum((p.double() * w).sum() for p, w in pairs)
        loss.backward()
        return 1.5

    return Act(lambda: optimizer.step(closure), result=1.5)


@often(1)
def a_closure_that_raises(optimizer, rng):
    def closure():
        raise ValueError("the user's")

    return Act(lambda: optimizer.step(closure), REFUSED)


@often(1)
def a_sparse_gradient(optimizer, rng):
    give_all(optimizer, rng)
    p = one_of(optimizer, rng, lambda p: p.ndim == 2)
    if p is None:
        return None
    p.grad = None
    p.grad = random_like(rng, p).to(p.dtype).to_sparse()
    return Act(optimizer.step, REFUSED, optimizer.zero_grad)


# Groups.


def allowed(optimizer, group):
    try:
        optimizer._check_settings(group)
    except (ValueError, TypeError):
        return False
    return not has_masters(group) or all(p.dtype in MASTERED for p in group["params"])


def has_masters(group):
    """Whether parameters of other dtypes than `MASTERED` are refused."""
    return group["master_weight_bits"] not in (None, "auto")


def set_in(group, key, value):
    """Set a key; a function that sets it back."""
    before = group[key]
    group[key] = value

    def undo():
        group[key] = before

    return undo


def clonable(value):
    """Twins do not share a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@often(6)
def a_setting_changes(optimizer, rng):
    group = rng.choice(optimizer.param_groups)
    key, values = rng.choice(list(valid_for(group).items()))
    undo = set_in(group, key, clonable(rng.choice(values)))
    if not allowed(optimizer, group):
        undo()
    give_all(optimizer, rng)
    return Act(optimizer.step)


def _set(optimizer, rng, table, verdict):
    group = rng.choice([g for g in optimizer.param_groups if g["params"]])
    key = rng.choice([key for key in table if key in group])
    give_all(optimizer, rng)
    undo = set_in(group, key, clonable(rng.choice(table[key])))
    return Act(optimizer.step, verdict, undo)


@often(3)
def an_invalid_setting(optimizer, rng):
    return _set(optimizer, rng, INVALID, REFUSED)


@often(1)
def an_odd_setting(optimizer, rng):
    """What is accepted here, a checkpoint has to carry."""
    return _set(optimizer, rng, ODD, EITHER)


@often(1)
def a_new_group(optimizer, rng):
    dtype = rng.choice([torch.float32, torch.bfloat16])
    p = torch.nn.Parameter(random_like(rng, torch.empty(rng.choice([3, 300]))).to(dtype))
    group = {"params": [p], "lr": 0.01, "min_8bit_size": 1}
    return Act(lambda: optimizer.add_param_group(group), steps=False)


@often(1)
def a_new_group_that_is_invalid(optimizer, rng):
    new = torch.nn.Parameter(torch.ones(3))
    group = rng.choice([
        {"params": [new], "lr": "x"}, {"params": [new], "optim_bits": 5},
        {"params": [torch.ones(3, dtype=torch.int64)]}, {"params": all_parameters(optimizer)[:1]},
        {"params": [new], "percentile_clipping": 0.5}, {"lr": 0.1}, {"params": ["x"]}, [new],
        {"params": [torch.ones(3, dtype=torch.complex64)]}, {"params": {new}},
    ])  # fmt: skip

    def add():
        try:
            optimizer.add_param_group(group)
        except KeyError as error:  # torch's own for a group without params
            raise ValueError("params") from error

    return Act(add, REFUSED, steps=False)


# Parameters and state.


@often(2)
def values_in_another_tensor(optimizer, rng):
    for p in all_parameters(optimizer):
        x = p.data
        made = [x.clone(), torch.stack([x, x], -1)[..., 0]]
        if x.ndim > 1:
            made.append(x.mT.contiguous().mT)
        if x.ndim == 4:
            made.append(x.contiguous(memory_format=torch.channels_last))
        p.data = rng.choice(made)
    give_all(optimizer, rng)
    return Act(optimizer.step)


@often(2)
def an_expanded_parameter(optimizer, rng):
    p = one_of(optimizer, rng, lambda p: p.numel() > 1)
    if p is None:
        return None
    give_all(optimizer, rng)
    before = p.data

    def undo():
        p.data = before

    p.data = before.flatten()[0].clone().expand(before.shape)
    return Act(optimizer.step, REFUSED, undo)


@often(1)
def the_model_in_another_dtype(optimizer, rng):
    mastered = any(map(has_masters, optimizer.param_groups))
    dtype = rng.choice(MASTERED if mastered else [torch.float16, *MASTERED])
    optimizer.zero_grad()
    params = all_parameters(optimizer)
    if any(p.numel() and not bool((p.abs() < 1e3).all()) for p in params):
        return None
    for p in params:
        p.data = p.data.to(dtype)
    give_all(optimizer, rng)
    return Act(optimizer.step)


@often(1)
def gradients_on_or_off(optimizer, rng):
    for p in all_parameters(optimizer):
        p.requires_grad_(rng.random() < 0.5)
    give_all(optimizer, rng)
    return Act(optimizer.step)


@often(1)
def state_forgotten(optimizer, rng):
    if rng.random() < 0.5:
        optimizer.state.clear()
    else:
        optimizer.state.pop(rng.choice(all_parameters(optimizer)), None)
    give_all(optimizer, rng)
    return Act(optimizer.step)


def override(p, config):
    lowbit_optim.GlobalOptimManager.get_instance().override_config(p, key_value_dict=config)
    OVERRIDDEN.append((p, config))


def no_overrides():
    lowbit_optim.GlobalOptimManager.get_instance().initialize()
    OVERRIDDEN.clear()


@often(2)
def an_override(optimizer, rng):
    for p in rng.sample(all_parameters(optimizer), 2):
        override(p, rng.choice(CONFIGS))
    give_all(optimizer, rng)
    return Act(optimizer.step)


@often(1)
def an_override_that_does_not_fit(optimizer, rng):
    config = rng.choice([{"betas": (0.9,)}, {"alpha": "x"}, {"scale_at": 3}, {"momentum": -2.0}])
    override(rng.choice(all_parameters(optimizer)), config)
    give_all(optimizer, rng)
    return Act(optimizer.step, REFUSED, no_overrides)


@often(1)
def overrides_removed(optimizer, rng):
    no_overrides()
    give_all(optimizer, rng)
    return Act(optimizer.step)
