"""A step plan is used again only while it holds: every change between steps must be seen."""

import gc
import sys
import weakref

import pytest
import torch

import lowbit_optim
from lowbit_optim_kernels import dispatch, reading
from protocol import (
    ANY_GRADIENT,
    BY_ENGINE,
    all_parameters,
    give_gradients,
    identical,
    parameters,
    snapshot,
    train,
)

SHAPES = ((12, 70), (300,), (5, 5))


def build(cls=lowbit_optim.AdamW8bit, **options):
    return cls(parameters(shapes=SHAPES), lr=0.01, min_8bit_size=200, **options)


@pytest.fixture
def reused(monkeypatch):
    """Whether each batch that is stepped was found reused, by step."""
    seen = []
    step = dispatch.step

    def spy(batches, **rest):
        seen.append([batch.reused for batch in batches])
        return step(batches, **rest)

    monkeypatch.setattr(dispatch, "step", spy)
    return seen


@pytest.fixture(params=["at once", "later torch", "moved in torch"])
def looking(request, monkeypatch):
    """How tensors are looked at: as torch.compile does, or one by one where that is not known."""
    if request.param == "later torch":
        monkeypatch.setattr(torch, "__version__", "2.16.0.dev20270101+cpu")
    elif request.param == "moved in torch":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)


def swap_data(optimizer):
    p = all_parameters(optimizer)[0]
    p.data = p.data.clone()


def swap_for_half(optimizer):
    p = all_parameters(optimizer)[0]
    p.data, p.grad = p.data.bfloat16(), None


def transpose(optimizer):
    p = all_parameters(optimizer)[0]
    p.data = p.data.t().contiguous().t()


def view_transposed(optimizer):
    """The same memory and, as it is square, the same shape."""
    p = all_parameters(optimizer)[2]
    p.data = p.data.t()


def set_its_neg_bit(optimizer):
    p = all_parameters(optimizer)[2]
    p.data = torch.complex(p.data, -p.data).conj().imag
    assert p.is_neg()


def replace_a_state_tensor(optimizer):
    state = optimizer.state[all_parameters(optimizer)[0]]
    state["exp_avg"] = state["exp_avg"].clone().fill_(200)


def move_a_state_tensor(optimizer):
    """As offloading does."""
    x = optimizer.state[all_parameters(optimizer)[1]]["exp_avg_sq"]
    x.data = x.data.clone()


def replace_a_state(optimizer):
    p = all_parameters(optimizer)[1]
    optimizer.state[p] = {key: x.clone() for key, x in optimizer.state[p].items()}


def drop_a_state(optimizer):
    del optimizer.state[all_parameters(optimizer)[1]]


def drop_all_states(optimizer):
    optimizer.state.clear()


def drop_a_moment(optimizer):
    del optimizer.state[all_parameters(optimizer)[0]]["exp_avg"]


def load_its_own(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def store_in_32_bits(optimizer):
    optimizer.param_groups[0]["optim_bits"] = 32


def store_more_in_8_bits(optimizer):
    optimizer.param_groups[0]["min_8bit_size"] = 1


def switch_amsgrad_on(optimizer):
    optimizer.param_groups[0]["amsgrad"] = True


def clip(optimizer):
    optimizer.param_groups[0]["percentile_clipping"] = 5


def turn_round(optimizer):
    optimizer.param_groups[0]["maximize"] = True


def change_numbers(optimizer):
    optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)


def round_by_other_bits(optimizer):
    optimizer.param_groups[0]["seed"] = 5


def drop_a_parameter(optimizer):
    optimizer.param_groups[0]["params"].pop(0)


def add_a_group(optimizer):
    optimizer.add_param_group({"params": parameters(shapes=((40, 9),), seed=5), "lr": 0.1})


def reorder(optimizer):
    optimizer.param_groups[0]["params"].reverse()


CHANGES = [
    swap_data, swap_for_half, transpose, view_transposed, set_its_neg_bit, replace_a_state_tensor,
    move_a_state_tensor, replace_a_state, drop_a_state, drop_all_states, drop_a_moment,
    load_its_own, store_in_32_bits, store_more_in_8_bits, switch_amsgrad_on, clip, turn_round,
    change_numbers, round_by_other_bits, drop_a_parameter, add_a_group, reorder,
]  # fmt: skip


@pytest.mark.parametrize("engine", ["numba", "torch"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.usefixtures("looking")
def test_a_change_is_seen(change, engine):
    """The same as with an optimizer that looks at everything in every step."""
    with lowbit_optim.use_engine(engine):
        steady, thorough = build(), build()
        for optimizer in (steady, thorough):
            for t in range(6):
                if t == 3:
                    change(optimizer)
                if optimizer is thorough:
                    optimizer.plans.clear()
                train(optimizer, 1, first=t)
    assert identical(snapshot(steady), snapshot(thorough))


@pytest.mark.parametrize("engine", ["numba", "torch"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_new_number_is_seen(group, engine):
    """A parameter's random bits are those of its number, which others may shift unnoticed."""

    def after_a_change(looks_at_everything):
        before, p, frozen = parameters(torch.bfloat16, shapes=((5, 5), (12, 70), (3,)))
        groups = [{"params": [before]}, {"params": [p]}]
        optimizer = lowbit_optim.AdamW8bit(groups, min_8bit_size=1)
        for t in range(3):
            if t == 1:
                optimizer.param_groups[group]["params"].insert(0, frozen)
            if looks_at_everything:
                optimizer.plans.clear()
            give_gradients([before, p], t)
            optimizer.step()
        return snapshot(optimizer)

    with lowbit_optim.use_engine(engine):
        assert identical(after_a_change(False), after_a_change(True))


@pytest.mark.parametrize("engine", ["numba", "torch"])
@pytest.mark.parametrize("change", [transpose, view_transposed, set_its_neg_bit])
def test_a_parameter_is_updated_as_it_is_read(change, engine):
    """In whatever order and sign its memory holds the numbers."""
    with lowbit_optim.use_engine(engine):
        changed, plain = build(), build()
        train(changed, 1)
        train(plain, 1)
        before = [p.detach().clone() for p in all_parameters(changed)]
        change(changed)
        for p, q, value in zip(all_parameters(changed), all_parameters(plain), before, strict=True):
            turned = not torch.equal(p, value)
            q.data = p.detach().clone(memory_format=torch.contiguous_format) if turned else q.data
        train(changed, 1, first=1)
        train(plain, 1, first=1)
    assert identical(snapshot(changed)["params"], snapshot(plain)["params"])


@pytest.mark.usefixtures("looking")
def test_nothing_new_is_found_again(reused):
    """Also with other gradients, another lr and other betas."""
    optimizer = build()
    train(optimizer, 2)
    change_numbers(optimizer)
    train(optimizer, 2)
    assert reused == [[False], [True], [True], [True]]


@pytest.mark.skipif(torch.__version__ >= "2.16", reason="torch's own check is not known there")
def test_tensors_that_are_as_before_are_looked_at_at_once(monkeypatch):
    looked = []

    def counted(column):
        return lambda tensor: looked.append(tensor) or column(tensor)

    monkeypatch.setattr(reading, "COLUMNS", tuple(map(counted, reading.COLUMNS)))
    optimizer = build()
    train(optimizer, 2)
    looked.clear()
    train(optimizer, 2)
    assert not looked
    give_gradients(all_parameters(optimizer), 0)
    all_parameters(optimizer)[0].requires_grad_(False)
    optimizer.step()
    assert looked


GRADIENTS = {
    "none": lambda g: None,
    "bfloat16": lambda g: g.bfloat16(),
    "not contiguous": lambda g: g.t().contiguous().t(),
    "negative view": lambda g: torch.complex(g, -g).conj().imag,
    "contiguous and negative": torch._neg_view,
}


@ANY_GRADIENT
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.usefixtures("looking")
def test_another_kind_of_gradient_is_seen(kind, reused):
    made = []
    for thorough in (False, True):
        optimizer = build()
        p = all_parameters(optimizer)[0]
        p.grad_dtype = None  # any
        for t in range(6):
            give_gradients(all_parameters(optimizer), t)
            if t in (3, 4):
                g, p.grad = GRADIENTS[kind](p.grad), None
                p.grad = g
            if thorough:
                optimizer.plans.clear()
            optimizer.step()
        made.append(snapshot(optimizer))
    assert identical(*made)
    # What is missing is left out of a step, and what is negative looked at in each.
    held = kind == "none", kind == "none" or "negative" not in kind, kind == "none"
    assert [step[0] for step in reused[:6]] == [False, True, True, *held]


def test_a_sparse_gradient_is_refused_after_dense_ones():
    optimizer = build()
    train(optimizer, 2)
    p = all_parameters(optimizer)[0]
    p.grad = p.detach().to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@ANY_GRADIENT
def test_a_complex_gradient_is_refused_after_real_ones():
    """Its imaginary part would be dropped."""
    optimizer = build()
    train(optimizer, 2)
    p = all_parameters(optimizer)[0]
    p.grad, p.grad_dtype = None, None  # any
    p.grad = torch.complex(p.detach(), p.detach())
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="complex gradients"):
        optimizer.step()
    assert identical(snapshot(optimizer), before)


def test_another_engine_is_taken(reused):
    optimizer = build()
    train(optimizer, 2)
    with lowbit_optim.use_engine("torch"):
        train(optimizer, 1, first=2)
    train(optimizer, 1, first=3)
    assert reused == [[False], [True], [False], [False]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_what_a_user_keeps_beside_the_state_may_be_sparse(layout):
    """Plans looked for its address when the step had been taken."""
    made = []
    for kept in ({}, {"mask": getattr(torch.eye(100), layout)()}):
        optimizer = train(lowbit_optim.AdamW8bit(parameters(), min_8bit_size=1), 1)
        p, _ = all_parameters(optimizer)
        optimizer.state[p].update(kept)
        train(optimizer, 3, first=1)
        made.append(p.detach())
        assert optimizer.state[p]["step"] == 4
        assert kept.items() <= optimizer.state[p].items()
    assert torch.equal(*made)


def test_a_parameter_listed_twice_is_stepped_once():
    made = []
    for copies in (1, 2):
        (p,) = parameters(shapes=((300,),))
        optimizer = lowbit_optim.AdamW8bit([p], lr=0.01, min_8bit_size=1)
        optimizer.param_groups[0]["params"] = [p] * copies
        for t in range(4):
            give_gradients([p], t)
            optimizer.step()
        made.append(p.detach())
    assert torch.equal(*made)


@BY_ENGINE
def test_parameters_of_one_memory_are_stepped_one_after_the_other(engine, reused):
    """As by an optimizer each; together the threads of a step would overwrite one another's."""
    made = []
    for together in (True, False):
        memory = torch.linspace(-1, 1, 200_000)
        shapes = (200_000,), (500, 400), (400, 500)
        params = [torch.nn.Parameter(memory.view(shape)) for shape in shapes]
        groups = [params] if together else [[p] for p in params]
        optimizers = [lowbit_optim.AdamW8bit(each, lr=0.1, dither=False) for each in groups]
        for t in range(4):
            give_gradients(params, t)
            with lowbit_optim.use_engine(engine):
                for optimizer in optimizers:
                    optimizer.step()
        made.append(memory)
    assert torch.equal(*made)
    assert reused[1] == [True] * 3


def test_a_step_that_fails_is_not_used_again(monkeypatch, reused):
    optimizer = build()
    train(optimizer, 2)
    with monkeypatch.context() as patch:

        def fail(batches, **_):
            raise RuntimeError("out of memory")

        patch.setattr(dispatch, "step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
    train(optimizer, 2)
    assert reused == [[False], [True], [False], [True]]


def test_gradients_are_not_kept():
    """A backward pass after `zero_grad` must not find the old gradients still in memory."""
    optimizer = build()
    for t in range(3):
        train(optimizer, 1, first=t)
        alive = [weakref.ref(p.grad) for p in all_parameters(optimizer)]
        optimizer.zero_grad(set_to_none=True)
        assert [ref() for ref in alive] == [None] * len(SHAPES)


def test_copies_are_gone_after_the_step():
    """A channels_last model would otherwise keep more beside its weights than 8 bits save."""
    shape = (6, 53, 3, 3)  # no other test's
    p = torch.nn.Parameter(torch.randn(shape).contiguous(memory_format=torch.channels_last))
    p.grad = torch.randn_like(p)
    optimizer = lowbit_optim.AdamW8bit([p], min_8bit_size=1)
    optimizer.step()
    p.grad = None
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    memory = {x.data_ptr() for x in tensors if x.shape == shape and x.dtype == torch.float32}
    assert memory == {p.data_ptr()}
