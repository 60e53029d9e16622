"""Damaged state dicts, generated: refused with nothing changed, or trained on with finite numbers.

`replay(seed)` runs one example again, `LOWBIT_OPTIM_FUZZ=2000` asks for 2,000 of them.
"""

import copy
import re

import lowbit_optim
from fuzz import (
    STORAGE,
    engine_of,
    generator,
    in_chunks,
    random_case,
    random_masters,
    random_parameters,
    random_storage,
    unfit,
)
from fuzz_saved import (
    ACCEPTED,
    CONTROLS,
    REFUSED,
    NotHere,
    Saved,
    as_it_is,
    other_strides,
    through_a_file,
    tuples_for_lists,
)
from fuzz_state_dicts import DAMAGES
from protocol import all_parameters, identical, snapshot, train

ALIKE = (as_it_is, through_a_file, tuples_for_lists, other_strides)  # training goes on bit for bit
SHAPES = [(12, 70), (12, 70), (300,), (300,), (7,), (3, 2, 66), (257,), (1,), (), (0,)]


def in_groups(rng, params):
    """The parameters in one or two groups."""
    cut = rng.randrange(len(params))
    return [{"params": half} for half in (params[:cut], params[cut:]) if half]


def example(rng):
    """A trained optimizer's state dict, its case, and an optimizer that is to load it."""
    case = random_case(rng)
    masters, dtypes = random_masters(rng)
    params = random_parameters(rng, rng.choices(SHAPES, k=3), dtypes)
    groups = in_groups(rng, params)
    source = case.build(groups, master_weight_bits=masters, **random_storage(rng, case))
    if rng.random() < 0.4:
        for group in source.param_groups:
            group["percentile_clipping"] = 50
    train(source, rng.randrange(1, 4))
    values = copy.deepcopy(params)
    places = dict(zip(params, values, strict=True))
    copies = [{"params": [places[p] for p in g["params"]]} for g in groups]
    target = case.build(copies, master_weight_bits=masters, **random_storage(rng, case))
    if rng.random() < 0.5:
        train(target, 1, first=50)
    shapes = [p.shape for p in all_parameters(target)]
    return Saved(rng, copy.deepcopy(source.state_dict()), shapes, case.name), case, source, target


def refusal(optimizer, state_dict):
    """Load; the message of the refusal, or None."""
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        return str(error)
    return None


def check(target, saved, verdict):
    """Load: refused with nothing changed, saying why, or accepted and trained with."""
    before = snapshot(target)
    said = refusal(target, saved.tree)
    if said is None:
        assert verdict != REFUSED, "accepted"
        train(target, 3, first=100)
        wrong = unfit(target)
        assert wrong is None, f"accepted, and three steps later {wrong}"
        again = refusal(target, target.state_dict())
        assert again is None, f"accepted, and what is saved three steps later is refused: {again}"
        return
    assert identical(snapshot(target), before), f"refused, but something changed: {said}"
    assert verdict != ACCEPTED, f"a good state dict is refused: {said}"
    if verdict == REFUSED:
        for pattern in saved.named:
            assert re.search(pattern, said), f"{pattern!r} is not in: {said}"


def damaged(seed):
    """The example of a seed: its damage's name, and what `check` takes."""
    rng = generator(seed)
    saved, case, _, target = example(rng)
    while True:
        saved.named.clear()
        make = rng.choice(DAMAGES)
        try:
            verdict = make(saved)
        except NotHere:
            continue
        return f"{make.__name__}, {case.id}, {type(target).__name__}", (target, saved, verdict)


def replay(seed):
    """Run a damaged state dict again; what is printed last before a failure says which it was."""
    with lowbit_optim.use_engine(engine_of(generator(-1 - seed))):
        story, parts = damaged(seed)
        print(f"replay({seed}): {story}")
        check(*parts)


def replay_control(seed):
    """Run a state dict again that has to load."""
    rng = generator(seed)
    with lowbit_optim.use_engine(engine_of(rng)):
        saved, case, source, target = example(rng)
        make = CONTROLS[seed % len(CONTROLS)]
        print(f"replay_control({seed}): {make.__name__}, {case.id}, {type(target).__name__}")
        try:
            make(saved)
        except NotHere:
            return
        check_control(source, target, saved, make in ALIKE and stored_alike(source, target))


def stored_alike(*optimizers):
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return len({tuple(map(group.get, STORAGE)) for group in groups}) == 1


def check_control(source, target, saved, same):
    """Where the state is stored alike, training goes on bit for bit."""
    for p, q in zip(all_parameters(source), all_parameters(target), strict=True):
        q.data.copy_(p.data)
    if not same:
        check(target, saved, ACCEPTED)
        return
    target.load_state_dict(saved.tree)
    assert identical(snapshot(target), snapshot(source))
    for optimizer in (source, target):
        train(optimizer, 3, first=100)
    assert identical(snapshot(target), snapshot(source))
    assert unfit(target) is None


@in_chunks(default=80)
def test_a_damaged_state_dict_is_refused_or_harmless(seeds):
    for seed in seeds:
        replay(seed)


@in_chunks(default=32)
def test_a_good_state_dict_loads(seeds):
    for seed in seeds:
        replay_control(seed)
