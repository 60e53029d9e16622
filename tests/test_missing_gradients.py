"""Parameters that have no gradient in a step: they stay as they are, and the step plan is kept."""

import copy

import pytest
import torch

import cases
import lowbit_optim
from lowbit_optim import _step_base
from lowbit_optim_kernels.engines import registry
from protocol import all_parameters, build, give_gradients, identical, parameters, snapshot, train

SHAPES = ((12, 70), (300,), (3, 257), (64,), (0, 4))
# Of five parameters, those that have no gradient in each step. The third one comes late.
MISSING = ((2,), (2,), (0, 2), (), (1, 3, 4), (0, 1, 2, 3, 4), (), (3,), (2,))


@pytest.fixture(autouse=True)
def keeping_at_once(monkeypatch):
    """New plans have parameters without a gradient from the first one on."""
    monkeypatch.setattr(_step_base, "SETTLED", 0)


def made(case, bits, device):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=SHAPES)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5 * case.lr}]
    return build(case, bits, groups)


def steps_of(optimizer, thorough=False):
    """The numbers after each step; `thorough` makes every plan anew."""
    found = []
    for t, missing in enumerate(MISSING):
        params = all_parameters(optimizer)
        give_gradients(params, t)
        for i in missing:
            params[i].grad = None
        if thorough:
            optimizer.plans.clear()
        optimizer.step()
        found.append(snapshot(optimizer))
        for kept in optimizer.plans.values():
            found[-1]["reused"] = kept.reused
    return found


@pytest.mark.few_if_interpreted("case", "bits")
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("case", cases.one_per_class(cases.FUSED_CASES), ids=lambda c: c.id)
def test_they_are_left_out_to_the_same_bits(case, bits, engine, device):
    kept, anew = (steps_of(made(case, bits, device), thorough) for thorough in (False, True))
    reused = [step.pop("reused") for step in kept]
    assert not any(step.pop("reused", False) for step in anew)
    assert identical(kept, anew)
    # The fourth step has the third parameter in it.
    if registry.ENGINES[engine].takes_mixed_batches:
        assert reused == [False, True, True, False, *[True] * 5]


@pytest.mark.parametrize("name", ["LARS", "AdamW"])
def test_norms_in_the_history_are_of_steps_with_a_gradient(name, engine, device):
    """Nor does an overflow that a scaler finds count, for any of them."""
    case = next(c for c in cases.CASES if c.name == name and "percentile_clipping" in c.options)
    results = []
    for thorough in (False, True):
        optimizer = made(case, 8, device)
        train(optimizer, 2)
        for t in range(2, 6):
            give_gradients(all_parameters(optimizer), t)
            all_parameters(optimizer)[t % 3].grad = None
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = torch.tensor(float(t == 3), device=device)
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
        results.append(snapshot(optimizer))
    assert identical(*results)


def test_a_first_norm_of_zero_is_not_in_the_history(engine, device):
    """It tells nothing of size: all later gradients would be clipped to nothing."""
    results = []
    for percentile in (5, 100):
        p = torch.nn.Parameter(torch.ones(300, device=device))
        optimizer = lowbit_optim.SGD8bit([p], lr=0.1, percentile_clipping=percentile)
        for g in (0.0, 1.0):
            p.grad = torch.full_like(p, g)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_only_what_is_stepped_counts_as_changed(engine, device):
    """For autograd, which refuses a backward pass through what has been changed since."""
    optimizer = made(cases.CASES_FAMILY[0], 8, device)
    train(optimizer, 2)
    params = all_parameters(optimizer)
    give_gradients(params, 2)
    params[1].grad = None
    before = [p._version for p in params]
    optimizer.step()
    assert [p._version > v for p, v in zip(params, before, strict=True)] == [
        True, False, True, True, True,
    ]  # fmt: skip


def test_a_state_that_is_dropped_meanwhile_is_not_made_again(engine, device):
    optimizer = made(cases.CASES_FAMILY[0], 8, device)
    train(optimizer, 2)
    params = all_parameters(optimizer)
    for t in range(2):
        give_gradients(params, t)
        params[1].grad = None
        if t == 1:
            del optimizer.state[params[1]]
        optimizer.step()
    assert params[1] not in optimizer.state
    give_gradients(params, 3)
    optimizer.step()
    assert int(optimizer.state[params[1]]["step"]) == 1


def test_a_parameter_without_a_gradient_is_moved_meanwhile(engine, device):
    optimizer = made(cases.CASES_FAMILY[0], 8, device)
    train(optimizer, 2)
    params = all_parameters(optimizer)
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        mine = all_parameters(one)
        give_gradients(mine, 2)
        mine[1].grad = None
        one.step()
        if one is twin:
            mine[1].data = mine[1].data.clone()
        give_gradients(mine, 3)
        mine[0].grad = None
        one.step()
    assert identical(snapshot(optimizer), snapshot(twin))
    assert params[0]._version < params[2]._version


def test_an_interrupt_takes_back_the_counts_of_what_it_counted(engine, device, monkeypatch):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=SHAPES)]
    groups = [{"params": params[:2]}, {"params": params[2:], "maximize": True}]
    optimizer = train(lowbit_optim.AdamW8bit(groups, min_8bit_size=1), 2)
    before, calls = snapshot(optimizer), []
    batch = next(iter(optimizer.plans.values())).batches[0]
    run = type(registry.ENGINES[engine].code.start(batch))
    begin = run.begin

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        begin(self)

    give_gradients(params, 2)
    params[1].grad = None
    monkeypatch.setattr(run, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("moved", [False, True])
def test_a_batch_that_was_left_out_as_a_whole(moved, engine, device):
    """Of a parameter with another one's memory, which comes a turn later.

    Its plan is made anew meanwhile: with new tables, or those of before, which have old addresses.
    """
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=SHAPES[:3])]
    params.insert(1, torch.nn.Parameter(params[0].detach()))
    optimizer = lowbit_optim.SGD32bit(params, lr=0.1, momentum=0.9)
    twin = lowbit_optim.SGD32bit(copy.deepcopy(params), lr=0.1, momentum=0.9)
    twin.param_groups[0]["params"][1].data = twin.param_groups[0]["params"][0].data
    for t, missing in enumerate(((3,), (1,), ())):
        for one in (optimizer, twin):
            mine = all_parameters(one)
            give_gradients(mine, t)
            if t == 1 and moved:
                mine[0].data = mine[1].data = mine[0].data.clone()
            if t == 0 and not moved:  # another alignment than the parameter's own, and later ones
                g = mine[1].grad
                mine[1].grad = torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape)
            for i in missing:
                mine[i].grad = None
            if one is twin:
                one.plans.clear()
            one.step()
    assert identical(snapshot(optimizer), snapshot(twin))


def test_batches_of_one_memory_that_were_left_out_know_their_order(engine, device):
    """Where a norm is taken before any of them is updated, whichever are stepped."""
    results = []
    for thorough in (False, True):
        memory = parameters(shapes=[(20, 70)])[0].detach().to(device)
        params = [torch.nn.Parameter(memory) for _ in range(3)]
        params.append(torch.nn.Parameter(torch.ones(300, device=device)))
        optimizer = lowbit_optim.LAMB8bit(params, lr=0.5, min_8bit_size=1)
        for t, present in enumerate(((0, 1, 2), (3,), (1, 2), (2, 1, 0))):
            give_gradients(params, t)
            for i, p in enumerate(params):
                p.grad = p.grad if i in present else None
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
        results.append(snapshot(optimizer))
    assert identical(*results)


def steps_of_some(present, device, thorough, before=lambda optimizer, t: None):
    """The numbers after steps of 40 small tensors of which some have gradients, and each plan."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=[(70,)] * 40)]
    optimizer = lowbit_optim.LAMB8bit(params, lr=0.1, min_8bit_size=1)
    plans = []
    for t, chosen in enumerate(present):
        give_gradients(params, t)
        for i, p in enumerate(params):
            p.grad = p.grad if i in chosen else None
        if thorough:
            optimizer.plans.clear()
        before(optimizer, t)
        optimizer.step()
        plans += [(len(plan.params), plan.reused) for plan in optimizer.plans.values()]
    return snapshot(optimizer), plans


def test_a_plan_takes_in_all_once_no_new_ones_appear(engine, device, monkeypatch):
    """Before, it would be made anew with all of them as often as one is stepped that never was."""
    monkeypatch.undo()
    count = 3 + _step_base.SETTLED
    present = [range(20), range(20, 39), range(39, 40), *[range(t, 40, 3) for t in range(count)]]
    kept, plans = steps_of_some(present, device, thorough=False)
    anew, _ = steps_of_some(present, device, thorough=True)
    assert identical(kept, anew)
    few = [(len(chosen), False) for chosen in present[: 2 + _step_base.SETTLED]]
    if registry.ENGINES[engine].takes_mixed_batches:
        assert plans == [*few, (40, False), *[(40, True)] * 3]
    else:
        assert plans == [(len(chosen), False) for chosen in present]


def test_few_of_many_have_a_plan_of_their_own(engine, device):
    """Whose making takes less than to look at all others."""
    present = [range(40), *[[t, t + 20] for t in range(4)], *[[t] for t in range(4)], []]
    kept, plans = steps_of_some(present, device, thorough=False)
    anew, _ = steps_of_some(present, device, thorough=True)
    assert identical(kept, anew)
    assert plans[5:9] == [(1, False)] * 4
    if registry.ENGINES[engine].takes_mixed_batches:
        assert plans[1:5] == [(2, False)] * 4


def test_the_plan_of_many_outlasts_steps_of_few(engine, device):
    """As where a head is trained in between; so does one whose others are all left out."""
    present = [range(40), [0], range(40), [3], [2], range(40), range(39), [39], range(39)]
    kept, plans = steps_of_some(present, device, thorough=False)
    anew, _ = steps_of_some(present, device, thorough=True)
    assert identical(kept, anew)
    assert [plans[t] for t in (1, 2, 4, 5)] == [(1, False), (40, True), (1, False), (40, True)]
    if registry.ENGINES[engine].takes_mixed_batches:
        assert plans[6:] == [(40, True), (1, False), (40, True)]


def test_a_state_that_is_damaged_is_refused_when_it_is_stepped(engine, device):
    def damage(optimizer, t):
        state = optimizer.state[optimizer.param_groups[0]["params"][3]]
        if t == 1:
            state.update(exp_avg=state["exp_avg"][:4])
            state.pop("exp_avg_absmax")

    present = [range(40), range(4, 20), range(20, 40), range(4, 40)]
    steps_of_some(present, device, False, damage)
    with pytest.raises(ValueError, match="does not fit LAMB8bit"):
        steps_of_some([*present, [3]], device, False, damage)


def test_a_state_that_does_not_fit_is_left_alone(engine, device):
    """As it is, as long as its parameter is not stepped."""
    wide = torch.ones(70, device=device)

    def widen(optimizer, t):
        state = optimizer.state[optimizer.param_groups[0]["params"][3]]
        if t == 1:
            state.update(exp_avg=wide, exp_avg_sq=wide.clone())
            state.pop("exp_avg_absmax"), state.pop("exp_avg_sq_absmax")
        assert t in (0, 4) or state["exp_avg"] is wide

    present = [range(40), range(4, 20), range(20, 40), range(4, 40), range(3, 40)]
    (kept, _), (anew, _) = (steps_of_some(present, device, x, widen) for x in (False, True))
    assert identical(kept, anew)


def test_a_state_without_memory_is_left_alone(engine, device):
    """As where it is moved away for as long as its parameter is frozen."""
    frozen = {}

    def free(optimizer, t):
        state = optimizer.state[optimizer.param_groups[0]["params"][3]]
        storage = state["exp_avg"].untyped_storage() if state else None
        if t == 1:
            frozen["size"], frozen["codes"] = storage.nbytes(), state["exp_avg"].clone()
            storage.resize_(0)
        if t == 4:
            storage.resize_(frozen["size"])
            state["exp_avg"].copy_(frozen["codes"])

    present = [range(40), range(4, 20), range(20, 40), range(4, 40), range(3, 40)]
    (kept, _), (anew, _) = (steps_of_some(present, device, x, free) for x in (False, True))
    assert identical(kept, anew)


def test_state_that_waits_may_have_been_freed():
    """It is refused once it is read, and a plan without it goes on until then."""
    params = parameters(shapes=[(300,), (70,)])
    optimizer = train(lowbit_optim.AdamW8bit(params, min_8bit_size=1), 2)
    freed = optimizer.state[params[1]]["exp_avg"].untyped_storage()
    size = freed.nbytes()
    freed.resize_(0)
    for t in range(2, 5):
        give_gradients(params[:1], t)
        params[1].grad = None
        optimizer.step()
    give_gradients(params, 5)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of shape .* has no memory"):
        optimizer.step()
    freed.resize_(size)


@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
def test_state_that_waits_keeps_its_width(before, after, engine, device):
    shapes = [(300,), (70,), (64,)]
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=shapes)]
    optimizer = train(lowbit_optim.AdamW(params, optim_bits=before, min_8bit_size=1), 2)
    kept = dict(optimizer.state[params[1]])
    optimizer.param_groups[0]["optim_bits"] = after
    for t, present in enumerate((params[:1], params[::2], params[2:]), 2):
        optimizer.zero_grad()
        give_gradients(present, t)
        optimizer.step()
    assert all(optimizer.state[params[1]][key] is x for key, x in kept.items())
