"""Groups whose settings differ in numbers alone are stepped together, to the same bits as apart."""

from dataclasses import replace

import pytest
import torch

import cases
import lowbit_optim
from lowbit_optim_kernels.engines import registry
from lowbit_optim_kernels.overlaps import turns_of
from protocol import all_parameters, build, give_gradients, identical, parameters, snapshot, train

SHAPES = ((12, 70), (300,), (3, 257), (64,))
# Numbers of a second group; those that a class or a case has not, or has as None, stay away.
OTHER = {
    "weight_decay": 0.02, "eps": 1e-4, "momentum": 0.7, "dampening": 0.1, "alpha": 0.8,
    "trust_coefficient": 0.03, "alpha_slow": 3.0, "lr_decay": 0.2, "target_rms": 0.5, "r": 0.5,
}  # fmt: skip


def plans_of(optimizer):
    return list(optimizer.plans.values())


def batches_of(optimizer):
    return [batch for plan in plans_of(optimizer) for batch in plan.batches]


def other_numbers(group):
    """Settings of another group, which needs no other rule: a slow average stays slow."""
    numbers = {k: x for k, x in OTHER.items() if isinstance(group.get(k), float) and group[k] > 0}
    if "betas" in group:
        numbers["betas"] = tuple(0.995 * beta for beta in group["betas"])
    return numbers


def three_groups(case, bits, device):
    """The first and last group have the same settings but lr, the middle one other numbers."""
    first, *rest = (torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes=SHAPES))
    settings = other_numbers(build(case, bits, [first]).param_groups[0])
    groups = [
        {"params": [first]},
        {"params": rest[:2], "lr": 0.3 * case.lr, **settings},
        {"params": rest[2:], "lr": 2.0 * case.lr},
    ]
    return build(case, bits, groups)


def steps_of(optimizer, missing=1):
    """The numbers after some steps in which a parameter has no gradient once, and lr moves."""
    found = []
    for t in range(4):
        give_gradients(all_parameters(optimizer), t)
        if t == 2:
            optimizer.param_groups[1]["params"][missing].grad = None
        optimizer.param_groups[t % 3]["lr"] *= 0.5
        optimizer.step()
        found.append(snapshot(optimizer))
    return found


@pytest.mark.few_if_interpreted("case", "bits")
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    "case", [*cases.one_per_class(cases.FUSED_CASES), *cases.CASES_CAUTIOUS[:1]], ids=lambda c: c.id
)
def test_groups_are_stepped_together_to_the_same_bits(case, bits, engine, device, monkeypatch):
    together = three_groups(case, bits, device)
    found = steps_of(together)
    assert len(plans_of(together)) == 1
    compiled = registry.ENGINES[engine].takes_mixed_batches
    assert len(batches_of(together)) == (1 if compiled else 3)
    alone = replace(registry.ENGINES[engine], takes_mixed_batches=False)
    monkeypatch.setitem(registry.ENGINES, engine, alone)
    apart = three_groups(case, bits, device)
    assert identical(found, steps_of(apart))
    assert len(batches_of(apart)) == 3


def test_a_group_that_needs_another_rule_or_storage_has_a_plan_of_its_own(engine, device):
    params = [torch.nn.Parameter(torch.ones(300, device=device)) for _ in range(5)]
    others = [{}, {"lr": 0.1}, {"maximize": True}, {"percentile_clipping": 50}, {"optim_bits": 32}]
    groups = [{"params": [p], **other} for p, other in zip(params, others, strict=True)]
    optimizer = lowbit_optim.AdamW8bit(groups, min_8bit_size=1)
    give_gradients(params, 0)
    optimizer.step()
    found = [[id(p) for p in plan.params] for plan in plans_of(optimizer)]
    assert found == [[*map(id, params[:2])], *([id(p)] for p in params[2:])]


def test_groups_whose_rules_sum_more_or_less_often_are_stepped_as_alone(engine, device):
    """No norm, two, and one."""
    settings = [{}, {"percentile_clipping": 5, "max_unorm": 0.01}, {"max_unorm": 0.02}]

    def groups():
        params = (parameters(shapes=[(300,)], seed=i)[0] for i in range(len(settings)))
        return [
            {"params": [torch.nn.Parameter(p.detach().to(device))], **other}
            for p, other in zip(params, settings, strict=True)
        ]

    together = lowbit_optim.AdamW32bit(groups(), lr=0.1)
    apart = [lowbit_optim.AdamW32bit([group], lr=0.1) for group in groups()]
    for t in range(3):
        give_gradients(all_parameters(together), t)
        together.step()
        for p, one in zip(all_parameters(together), apart, strict=True):
            (q,) = all_parameters(one)
            q.grad = p.grad.clone()
            one.step()
            assert torch.equal(p, q)
    assert len(plans_of(together)) == 3


def test_a_parameter_that_moves_to_the_next_group_has_its_settings(engine, device):
    """Though all parameters follow each other as before, and as many are in each group."""
    params = [torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(4)]
    groups = [{"params": params[:2], "lr": 1.0}, {"params": params[2:], "lr": 10.0}]
    optimizer = lowbit_optim.SGD(groups)
    for p, g in zip(params, (1.0, 1.0, None, 1.0), strict=True):
        p.grad = None if g is None else torch.full_like(p, g)
    optimizer.step()
    first, last = (group["params"] for group in optimizer.param_groups)
    first[:], last[:] = (params[0], params[2]), (params[1], params[3])
    optimizer.step()
    assert [float(p.detach()[0]) for p in params] == [-2.0, -11.0, 0.0, -20.0]


def test_tensors_of_groups_keep_their_own_learning_rates(engine, device):
    rates = [torch.tensor(0.5, device=device), torch.tensor(0.25, device=device), 0.125]
    params = [torch.nn.Parameter(torch.zeros(5, device=device)) for _ in rates]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)]
    optimizer = lowbit_optim.SGD(groups)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    rates[0].fill_(4.0)
    optimizer.param_groups[2]["lr"] = 2.0
    optimizer.step()
    assert [float(p.detach()[0]) for p in params] == [-4.5, -0.5, -2.125]


def test_groups_that_come_and_go(engine, device):
    """A group that is added, frozen, set free and emptied; the others go on as alone."""
    got, want = (
        [torch.nn.Parameter(torch.ones(300, device=device)) for _ in range(3)] for _ in "ab"
    )
    optimizer = lowbit_optim.LAMB32bit([{"params": got[:1]}, {"params": got[1:2], "lr": 0.1}])
    alone = [
        lowbit_optim.LAMB32bit([p], lr=lr) for p, lr in zip(want, (1e-3, 0.1, 0.2), strict=True)
    ]
    for t in range(6):
        if t == 2:
            optimizer.add_param_group({"params": got[2:], "lr": 0.2})
        for params in (got, want):
            give_gradients(params, t)
            params[1].grad = None if t == 3 else params[1].grad
            params[2].grad = None if t < 2 else params[2].grad
        if t == 5:
            optimizer.param_groups[0]["params"].clear()
            want[0].grad = None
        optimizer.step()
        for one in alone:
            one.step()
    assert identical([p.detach() for p in got], [p.detach() for p in want])


def test_a_group_is_added_after_a_load_as_without_it(engine, device):
    """Beside those that were loaded, with the constructor's settings where it has no own."""
    options, ends = {"weight_decay": 0.3, "min_8bit_size": 1}, []
    for loads in (False, True):
        first, *others = (torch.nn.Parameter(p.detach().to(device)) for p in parameters())
        optimizer = train(lowbit_optim.AdamW8bit([first], **options), 2)
        optimizer.param_groups[0]["weight_decay"] = 0.2
        if loads:
            saved = optimizer.state_dict()
            optimizer = lowbit_optim.AdamW8bit([first], **options)
            optimizer.load_state_dict(saved)
        optimizer.add_param_group({"params": others, "lr": 0.01})
        ends.append(snapshot(train(optimizer, 2, first=2)))
    assert identical(*ends)


def test_hyperparameters_come_in_the_order_of_a_batchs_parts():
    """Of the groups that have tensors in it, which are not all."""
    dtypes = (torch.float64, torch.float32) * 2
    params = [torch.nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes]
    groups = [{"params": [p], "lr": 0.1 * (1 + i)} for i, p in enumerate(params)]
    optimizer = lowbit_optim.SGD(groups)
    give_gradients(params, 0)
    optimizer.step()
    first, second, third = batches_of(optimizer)
    assert (first.parts, second.parts, third.parts) == ((0,), (1, 3), (2,))
    assert [hyper["lr"] for hyper in second.hyper] == [0.2, 0.4]
    assert [slot.part for slot in second.slots] == [0, 1]


def test_the_parameters_of_one_override_are_stepped_together(manager):
    """With the others, unless what is overridden decides what is run."""
    params = parameters(shapes=[(300,)] * 6)
    manager.override_config(params[:2], "lr", 0.5)
    manager.override_config(params[2:4], key_value_dict={"lr": 0.5})
    optimizer = train(lowbit_optim.SGD8bit(params, lr=0.1), 2)
    (plan,) = optimizer.plans.values()
    (batch,) = plan.batches
    assert [slot.part for slot in batch.slots] == [0, 0, 0, 0, 1, 1]
    assert [hyper["lr"] for hyper in batch.hyper] == [0.5, 0.1]
    manager.override_config(params[3:5], "maximize", True)
    plans = train(optimizer, 1).plans.values()
    assert [len(plan.params) for plan in plans] == [3, 2, 1]


# Of groups where their parameters of 300 elements begin, and what they set. In the second list the
# last parameter comes after the one before it, which need not wait as the first of its group does.
SHARED = [
    [
        ((0,), {"lr": 0.1}), ((100,), {"lr": 0.2, "maximize": True}), ((0,), {"lr": 0.3}),
        ((200,), {"lr": 0.4}),
    ],
    [((0,), {"lr": 0.1}), ((100, 500, 600), {"lr": 0.2})],
]  # fmt: skip


@pytest.mark.parametrize("shared", SHARED)
def test_groups_that_share_memory_are_stepped_in_their_order(shared, engine, device):
    """Those of other rules between them, too; and parameters that overlap in part."""
    flat = torch.linspace(0.5, 1.5, 900, dtype=torch.float64).float().to(device)
    groups = [
        {"params": [torch.nn.Parameter(flat[i : i + 300]) for i in starts], **own}
        for starts, own in shared
    ]
    optimizer = lowbit_optim.SGD(groups, weight_decay=0.5)
    want = flat.clone()
    for t in range(2):
        give_gradients(all_parameters(optimizer), t)
        optimizer.step()
        for (starts, own), group in zip(shared, groups, strict=True):
            for i, p in zip(starts, group["params"], strict=True):
                part = want[i : i + 300]
                g = (-p.grad if own.get("maximize") else p.grad) + 0.5 * part
                part -= own["lr"] * g
    torch.testing.assert_close(flat, want, rtol=1e-6, atol=1e-6)


def test_memories_of_which_each_overlaps_the_next_are_stepped_in_turn():
    """Also where the first one lies last."""
    assert turns_of([(0, 10), (5, 15), (12, 20)]) == [0, 1, 2]
    assert turns_of([(12, 20), (5, 15), (0, 10)]) == [0, 1, 2]


def test_parameters_that_exchange_overrides(manager):
    """Each override has as many as before, of the same shape, and all the rest is the same."""
    params = parameters(shapes=[(300,)] * 3)
    optimizer = lowbit_optim.AdamW8bit(params)
    for frozen in (1, 2):
        for i, p in enumerate(params):
            manager.override_config(p, "lr", 0.0 if i == frozen else 0.1)
        before = [p.detach().clone() for p in params]
        train(optimizer, 2)
        stayed = [torch.equal(p, was) for p, was in zip(params, before, strict=True)]
        assert stayed == [i == frozen for i in range(3)]


def test_a_group_that_is_counted_from_the_end_is_the_same_group():
    """Its bits have been changed, so that its format no longer counts."""
    for last in (1, -1):
        groups = [{"params": [p]} for p in parameters()]
        optimizer = lowbit_optim.AdamW8bit(groups, state_format="ratio8")
        optimizer.param_groups[1]["optim_bits"] = 32
        assert optimizer.rule(last) == optimizer.rule(1)
        assert optimizer.moments(last) == optimizer.moments(1)
        assert optimizer.param_groups[1]["state_format"] is None
    with pytest.raises(IndexError):
        optimizer.rule(2)
