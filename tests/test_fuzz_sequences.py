"""Operation sequences, generated: a call is refused with nothing changed, or done completely.

An independent twin, a copy that is given the same operations, stays the same bit for bit. After
every operation what is stored is finite and `step` counts what was stepped. `replay(seed)` runs one
example again, `LOWBIT_OPTIM_FUZZ=2000` asks for 2,000 of them.
"""

import copy
import pickle

import torch

import lowbit_optim
from fuzz import (
    NON_NEGATIVE,
    STORAGE,
    engine_of,
    generator,
    in_chunks,
    is_scale,
    random_case,
    random_masters,
    random_parameters,
    random_storage,
    steps_of,
)
from fuzz_operations import (
    ACCEPTED,
    OPERATIONS,
    OVERRIDDEN,
    REFUSED,
    give_all,
    no_overrides,
    override,
    random_like,
)
from protocol import all_parameters, identical, saved_and_loaded, snapshot

SHAPES = [(), (0,), (1,), (7,), (255,), (257,), (12, 70), (12, 70), (64, 300), (4, 3, 5, 5)]
HUGE = 1e15  # squares of gradients beyond may overflow in 32-bit state, as in torch
LENGTH = 10
REFUSALS = (ValueError, TypeError, RuntimeError)


class World:
    """An optimizer, its twin, and what is known of their parameters.

    Attributes:
        optimizer, twin: two that must not differ.
        storage: how they were asked to keep their state.
        counts: how often each parameter has been stepped.
        lost: for each parameter, where a gradient was not finite; such a weight may be lost.
        huge: for each parameter, whether a gradient was huge.
    """

    def __init__(self, rng, case):
        self.case = case
        masters, dtypes = random_masters(rng)
        params = random_parameters(rng, rng.choices(SHAPES, k=3), dtypes)
        cut = rng.randrange(1, 4)
        groups = [{"params": half} for half in (params[:cut], params[cut:]) if half]
        self.storage = {"master_weight_bits": masters, **random_storage(rng, case)}
        self.optimizer = case.build(groups, **self.storage)
        self.counts, self.lost, self.huge = {}, {}, {}
        self.twin = copy.deepcopy(self.optimizer)

    def act(self, operation, seed):
        """Do an operation to both, and check all that has to hold after it."""
        counts = dict(self.counts)
        outcomes = []
        for optimizer in (self.optimizer, self.twin):
            self.counts = dict(counts)
            outcomes.append(self.act_on(optimizer, operation, generator(seed)))
            self.check(optimizer)
        assert outcomes[0] == outcomes[1], f"the twin fares differently: {outcomes}"
        self.compare()

    def compare(self):
        assert identical(snapshot(self.optimizer), snapshot(self.twin)), "the twin differs"

    def act_on(self, optimizer, operation, rng):
        """Prepare, call, and compare; the refusal's message or None."""
        before = snapshot(optimizer)
        act = operation(optimizer, rng)
        if act is None:
            return None
        for index, p in enumerate(all_parameters(optimizer)):
            if "step" not in optimizer.state.get(p, {}):
                self.counts[index] = 0
        result, said = called(act)
        if said is not None:
            assert act.verdict != ACCEPTED, said
            if act.undo is not None:
                act.undo()
            assert identical(snapshot(optimizer), before), f"refused, but changed: {said}"
            return said.split(":")[0]
        assert act.verdict != REFUSED, "not refused"
        assert result == act.result
        if act.steps:
            self.count(optimizer)
        return None

    def count(self, optimizer):
        """Note what a step was given."""
        for index, p in enumerate(all_parameters(optimizer)):
            if p.grad is None:
                continue
            self.counts[index] = self.counts.get(index, 0) + 1
            bad = ~p.grad.isfinite()
            self.lost[index] = self.lost.get(index, False) | bad
            self.huge[index] = self.huge.get(index, False) or bool((p.grad.abs() > HUGE).any())

    def check(self, optimizer):
        for index, p in enumerate(all_parameters(optimizer)):
            what = f"parameter {index}, {tuple(p.shape)}, {p.dtype}"
            lost = self.lost.get(index, torch.zeros(p.shape, dtype=torch.bool))
            if self.huge.get(index) and self.case.options.get("centered"):
                continue  # inf - inf, as in torch.optim.RMSprop, whose squares overflow as well
            assert bool((p.detach().isfinite() | lost).all()), f"{what} is not finite"
            state = optimizer.state.get(p, {})
            if "step" in state:
                assert steps_of(state) == self.counts[index], f"{what}: steps"
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.check_state(index, key, value, state, f"{what}: {key}")

    def check_state(self, index, key, value, state, what):
        """8-bit state is finite whatever the gradients were."""
        eight = is_scale(key)
        if eight or key in NON_NEGATIVE:
            assert not bool((value < 0).any()), f"{what} is negative"
        if self.huge.get(index) and not eight:
            return
        exact = ("variance", "z")  # which no format codes; the first in 8 bits, by an override, too
        of_gradients = key in (*self.case.moments, *exact)
        lost = self.lost.get(index, False) if of_gradients else False
        assert bool((value.isfinite() | lost).all()), f"{what} is not finite"

    # New twins, each made in a way in which training is resumed.

    def copied(self, make):
        self.twin = make(self.optimizer)
        pairs = zip(all_parameters(self.optimizer), all_parameters(self.twin), strict=True)
        places = dict(pairs)
        for p, config in [pair for pair in OVERRIDDEN if pair[0] in places]:
            override(places[p], config)
        assert identical(snapshot(self.optimizer), snapshot(self.twin)), "the copy differs"

    def resumed(self, optimizer):
        """A new optimizer, built with other settings, that loads a checkpoint file."""
        saved = saved_and_loaded(optimizer.state_dict())
        groups = [
            {
                "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]],
                **{key: group[key] for key in STORAGE},
            }
            for group in optimizer.param_groups
        ]
        fresh = self.case.build(groups, **self.storage)
        old, new = map(all_parameters, (optimizer, fresh))
        for p, q in zip(old, new, strict=True):
            q.requires_grad_(p.requires_grad)
        for p, config in list(OVERRIDDEN):
            at = [i for i, other in enumerate(old) if other is p]
            if at:
                override(new[at[0]], config)
        fresh.load_state_dict(saved)
        return fresh


def called(act):
    """What the call returned, and the message of its refusal or None."""
    try:
        return act.call(), None
    except REFUSALS as error:
        return None, f"{type(error).__name__}: {error}"


def settle(optimizer, other):
    """Take over settings that a checkpoint keeps as plain numbers, of the same value."""
    for group, its in zip(optimizer.param_groups, other.param_groups, strict=True):
        for key in group.keys() - {"params"}:
            if not identical(group[key], its[key]):
                assert torch.equal(as_numbers(group[key]), as_numbers(its[key])), key
                group[key] = copy.deepcopy(its[key])


def as_numbers(value):
    values = value if isinstance(value, (list, tuple)) else [value]
    return torch.tensor([float(x) for x in values], dtype=torch.float64)


# What a new twin is made by, beside the operations.


def by_deepcopy(world, rng):
    world.copied(copy.deepcopy)


def by_pickle(world, rng):
    world.copied(lambda optimizer: pickle.loads(pickle.dumps(optimizer)))


def by_checkpoint(world, rng):
    states = world.optimizer.state.values()
    values = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
    if not all(bool(x.isfinite().all()) for x in values):
        return  # as 32-bit state is after a gradient that is not finite, which a load may refuse
    for optimizer in (world.optimizer, world.twin):  # stored as it is asked for since an override
        optimizer.load_state_dict(optimizer.state_dict())
    fresh = world.resumed(world.optimizer)
    settle(world.optimizer, fresh)
    settle(world.twin, fresh)
    world.copied(lambda _: fresh)


def another_engine(world, rng):
    lowbit_optim.use_engine(rng.choice(["torch", "auto"]))


def numbers_for_codes(world, rng):
    for optimizer in (world.optimizer, world.twin):
        lowbit_optim.dequantize_state(optimizer)
        world.check(optimizer)


def parameters_one_by_one(world, rng):
    """In any order, by the twin."""
    if not world.case.fused:  # which refuses
        return
    seed = rng.randrange(2**31)
    for optimizer in (world.optimizer, world.twin):
        give_all(optimizer, generator(seed), missing=0.2)
    world.optimizer.step()
    world.count(world.optimizer)
    params = all_parameters(world.twin)
    rng.shuffle(params)
    for p in params:
        world.twin.step_parameter(p)
    world.compare()


def gradients_released(world, rng):
    """By the twin, while the backward pass goes on."""
    if not world.case.fused:
        return
    trained = [i for i, p in enumerate(all_parameters(world.twin)) if p.requires_grad]
    if not trained:
        return
    seed, some = rng.randrange(2**31), rng.sample(trained, rng.randint(1, len(trained)))
    handle = lowbit_optim.release_gradients(world.twin, bucket_bytes=rng.choice([0, 1000, 10**9]))
    for optimizer in (world.optimizer, world.twin):
        optimizer.zero_grad()
        params, given = all_parameters(optimizer), generator(seed)
        sum((params[i].double() * random_like(given, params[i])).sum() for i in some).backward()
    world.optimizer.step()
    world.count(world.optimizer)
    world.twin.step()
    handle.remove()
    world.compare()


WORLDS = (
    [parameters_one_by_one] * 2
    + [gradients_released] * 2
    + [by_deepcopy, by_pickle, by_checkpoint, by_checkpoint, another_engine, numbers_for_codes]
)


def replay(seed, length=LENGTH):
    """Run a sequence again; what is printed last before a failure says which operation it was."""
    rng = generator(seed)
    case = random_case(rng)
    no_overrides()
    with lowbit_optim.use_engine(engine_of(rng)):
        world = World(rng, case)
        described = [f"{tuple(p.shape)} {p.dtype}" for p in all_parameters(world.optimizer)]
        print(f"replay({seed}): {type(world.optimizer).__name__}, {case.id}, {described}")
        try:
            for n in range(length):
                operation = rng.choice([rng.choice(WORLDS), *rng.choices(OPERATIONS, k=4)])
                given = rng.randrange(2**31)
                print(f"replay({seed}) {n}: {operation.__name__}, {case.id}")
                if operation in WORLDS:
                    operation(world, generator(given))
                else:
                    world.act(operation, given)
        finally:
            no_overrides()


@in_chunks(default=40)
def test_a_sequence_of_operations(seeds):
    for seed in seeds:
        replay(seed)
