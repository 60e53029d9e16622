"""Operation sequences on shards, generated: what comes of them is what comes of whole tensors.

Every rank has an optimizer of whole parameters, too, which is given the same operations. Both
refuse a call or none does, and afterwards weights and states are the same bit for bit. Where a rule
has norms, whose sums shards add up in another order, they are close after each operation, and the
whole ones go on from the shards' numbers. `LOWBIT_OPTIM_FUZZ=2000` asks for 2,000 examples.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import lowbit_optim
import sharded
from fuzz import (
    examples,
    generator,
    random_case,
    random_masters,
    random_parameters,
    random_storage,
    registrar,
)
from fuzz_operations import allowed, random_like
from fuzz_settings import CONFIGS, INVALID, valid_for
from lowbit_optim._sharding import as_dtensor
from protocol import identical, saved_and_loaded

# Rows that blocks fill and that they do not, fewer rows than ranks, none; flat blocks that shards
# end in and that they do not.
SHAPES = [
    (), (0,), (1,), (7,), (257,), (600,), (1024,), (12, 70), (12, 70), (3, 70), (1, 300), (5, 300),
    (2, 64), (129, 16), (0, 70), (4, 3, 5, 5),
]  # fmt: skip
LENGTH = 8
WITH_NORMS = ("LARS", "LAMB", "LANS", "Eve")
REFUSALS = (ValueError, TypeError, RuntimeError)
OPERATIONS = []
often = registrar(OPERATIONS)


class Pair:
    """An optimizer of whole parameters and one of their shards.

    Attributes:
        whole, shards: the parameters.
        storage: how they are asked to keep their state.
        optimizers: of the whole ones, and of the shards.
        layouts: the meshes and placements there are, by name; `layout` is the present one.
        overrides: pairs of a parameter's index and what it is given.
        exact: whether both have the same bits.
    """

    def __init__(self, rng, layouts):
        self.rng, self.layouts, self.layout = rng, layouts, rng.choice(sorted(layouts))
        self.case = random_case(rng)
        masters, dtypes = random_masters(rng)
        self.storage = {"master_weight_bits": masters, **random_storage(rng, self.case)}
        self.whole = random_parameters(rng, rng.choices(SHAPES, k=rng.randrange(2, 5)), dtypes)
        self.shards = [torch.nn.Parameter(self.spread(p.detach())) for p in self.whole]
        self.cut, self.overrides = rng.randrange(1, 5), []
        self.optimizers = self.new_optimizers()
        group = self.optimizers[0].param_groups[0]
        normed = self.case.name in WITH_NORMS or group["percentile_clipping"] < 100
        self.exact = not (normed or group.get("max_unorm") or group.get("cautious"))

    def placements(self, x):
        mesh, placements = self.layouts[self.layout]
        return mesh, placements if x.ndim else [Replicate()] * mesh.ndim

    def spread(self, x):
        return distribute_tensor(x.clone(), *self.placements(x))

    def new_optimizers(self):
        """Both, with the overrides that there are."""
        self.override()
        made = []
        for params in (self.whole, self.shards):
            groups = [{"params": x} for x in (params[: self.cut], params[self.cut :]) if x]
            made.append(self.case.build(groups, **self.storage))
        return made

    def override(self):
        """Make the overrides, of the present parameters."""
        manager = lowbit_optim.GlobalOptimManager.get_instance()
        manager.initialize()
        for index, config in self.overrides:
            for p in (self.whole[index], self.shards[index]):
                manager.override_config(p, key_value_dict=dict(config))

    def give(self, scale=1.0, missing=0.0, spread=None):
        """Gradients of both, of the same values; `spread` makes those of shards of them."""
        for p, shard in zip(self.whole, self.shards, strict=True):
            g = (random_like(self.rng, p) * scale).to(p.dtype)
            p.grad = shard.grad = None
            if self.rng.random() >= missing:
                p.grad, shard.grad = g, (spread or self.spread)(g)

    def step(self, refused=False):
        """A step of both, which both of them refuse or neither."""
        for optimizer in self.optimizers:
            with pytest.raises(REFUSALS) if refused else nullcontext():
                optimizer.step()

    def gathered(self):
        """The shards' state dict, of whole tensors."""
        tree = self.optimizers[1].state_dict()
        tree["state"] = {
            index: {key: sharded.full(x) for key, x in state.items()}
            for index, state in tree["state"].items()
        }
        return tree

    def check(self):
        """Compare, and where there are norms let the whole ones go on from the shards' numbers."""
        got = sharded.everything(self.shards, self.optimizers[1])
        want = sharded.everything(self.whole, self.optimizers[0])
        # Shards keep no more than settings ask for.
        pairs = zip(want["state"], got["state"], strict=True)
        want["state"] = [{key: x for key, x in a.items() if key in b} for a, b in pairs]
        if self.exact:
            assert identical(got, want)
            return
        assert shapes(got["state"]) == shapes(want["state"])
        for a, b in zip(got["params"], want["params"], strict=True):
            coarse = a.dtype in (torch.bfloat16, torch.float16)
            rtol, atol = (2e-2, 1e-3) if coarse else (1e-4, 1e-5)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        for p, value in zip(self.whole, got["params"], strict=True):
            p.data.copy_(value)
        self.optimizers[0].load_state_dict(self.gathered())


def shapes(states):
    """What of states does not depend on rounding."""
    return [
        {key: x if key == "step" else (x.shape, x.dtype) for key, x in state.items()}
        for state in states
    ]


@often(8)
def a_step(pair):
    pair.give(pair.rng.choice([1.0, 1.0, 0.01, 10.0]), pair.rng.choice([0, 0.3]))
    pair.step()


@often(3)
def a_step_of_tiny_or_no_gradients(pair):
    pair.give(pair.rng.choice([0.0, 1e-15, 1e-4]), pair.rng.choice([0, 1]))
    pair.step()


@often(2)
def a_step_with_bad_elements(pair):
    def spoilt(g):
        return torch.where(torch.rand(g.shape, generator=random) < 0.1, bad, g).to(g.dtype)

    random = torch.Generator().manual_seed(pair.rng.randrange(2**31))
    bad = pair.rng.choice([math.nan, math.inf, -math.inf])
    pair.give()
    for p, shard in zip(pair.whole, pair.shards, strict=True):
        p.grad = spoilt(p.grad)
        shard.grad = pair.spread(p.grad)
    pair.step()


@often(4)
def a_step_of_gradients_that_are_placed_or_stored_otherwise(pair):
    def spread(g):
        mesh, _ = pair.placements(g)
        kind = pair.rng.choice(["replicated", "partial", "turned", "as it is"])
        if kind == "replicated":
            return DTensor.from_local(g.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        if kind == "partial":  # -0 is what nothing is lost by that is added to it
            mine = g.clone() if dist.get_rank() == 0 else torch.full_like(g, -0.0)
            return DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
        made = pair.spread(g)
        if kind == "turned" and g.ndim > 1:
            made = as_dtensor(made._local_tensor.mT.contiguous().mT, made)
        return made

    pair.give(missing=pair.rng.choice([0, 0.3]), spread=spread)
    pair.step()


@often(2)
def a_step_of_a_scaler(pair):
    pair.give()
    infinite = pair.rng.choice([0.0, 1.0])
    for optimizer in pair.optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(infinite)
    pair.step()
    for optimizer in pair.optimizers:
        del optimizer.grad_scale, optimizer.found_inf


@often(2)
def a_step_of_the_torch_engine(pair):
    pair.give()
    with lowbit_optim.use_engine("torch"):
        pair.step()


def set_in_both(pair, values_for):
    """Set a key of a group in both; the groups, and a function that sets it back."""
    index = pair.rng.randrange(len(pair.optimizers[0].param_groups))
    groups = [optimizer.param_groups[index] for optimizer in pair.optimizers]
    table = values_for(groups[0])
    key = pair.rng.choice([key for key in table if key in groups[0]])
    value, before = pair.rng.choice(table[key]), groups[0][key]
    for group in groups:
        group[key] = value
    if key in ("percentile_clipping", "max_unorm"):
        pair.exact = False

    def undo():
        for group in groups:
            group[key] = before

    return groups, undo


@often(6)
def a_setting_changes(pair):
    changed, undo = set_in_both(pair, valid_for)
    if not all(map(allowed, pair.optimizers, changed)):
        undo()
    pair.give()
    pair.step()


@often(2)
def an_invalid_setting(pair):
    _, undo = set_in_both(pair, lambda group: INVALID)
    pair.give()
    pair.step(refused=True)
    undo()


@often(2)
def an_override(pair):
    index, config = pair.rng.randrange(len(pair.whole)), pair.rng.choice(CONFIGS)
    if "percentile_clipping" in config:
        pair.exact = False
    pair.overrides.append((index, config))
    pair.override()
    pair.give()
    pair.step()


@often(1)
def state_forgotten(pair):
    index = pair.rng.randrange(len(pair.whole))
    for optimizer, params in zip(pair.optimizers, (pair.whole, pair.shards), strict=True):
        optimizer.state.pop(params[index], None)
    pair.give()
    pair.step()


@often(1)
def numbers_for_codes(pair):
    for optimizer in pair.optimizers:
        lowbit_optim.dequantize_state(optimizer)
    pair.check()
    pair.give()
    pair.step()


@often(2)
def values_in_another_tensor(pair):
    for p, shard in zip(pair.whole, pair.shards, strict=True):
        p.data = p.data.clone()
        mine = shard._local_tensor.clone()
        if mine.ndim > 1 and pair.rng.random() < 0.5:
            mine = mine.mT.contiguous().mT
        shard.data = as_dtensor(mine, shard)
    pair.give()
    pair.step()


@often(1)
def copies(pair):
    pair.whole, pair.shards, pair.optimizers = copy.deepcopy(
        (pair.whole, pair.shards, pair.optimizers)
    )
    pair.override()


@often(3)
def state_dicts_in_new_optimizers(pair):
    """The shards' own, one of whole tensors, and that of the whole parameters."""
    kind = pair.rng.choice(["shards", "a file of shards", "whole", "of the whole"])
    before = pair.optimizers[0].state_dict()
    tree = copy.deepcopy(before) if kind == "of the whole" and pair.exact else pair.gathered()
    if "shards" in kind:
        tree = pair.optimizers[1].state_dict()
    if kind == "a file of shards":
        tree = saved_and_loaded(tree)
    pair.optimizers = pair.new_optimizers()
    for optimizer, saved in zip(pair.optimizers, (copy.deepcopy(before), tree), strict=True):
        optimizer.load_state_dict(saved)


@often(3)
def another_layout(pair):
    """The parameters placed otherwise, which load the state of before."""
    before = pair.optimizers[0].state_dict()
    tree = pair.gathered() if pair.rng.random() < 0.5 else pair.optimizers[1].state_dict()
    pair.layout = pair.rng.choice(sorted(pair.layouts))
    pair.shards = [torch.nn.Parameter(pair.spread(sharded.full(p.detach()))) for p in pair.shards]
    pair.optimizers = pair.new_optimizers()
    for optimizer, saved in zip(pair.optimizers, (before, tree), strict=True):
        optimizer.load_state_dict(saved)


def replay(seed, layouts):
    """Run a sequence again; what is printed last before a failure says which operation it was."""
    rng = generator(seed)
    with lowbit_optim.use_engine(rng.choice(["torch", "torch", "torch", "auto"])):
        pair = Pair(rng, layouts)
        described = [f"{tuple(p.shape)} {p.dtype}" for p in pair.whole]
        print(f"replay({seed}): {pair.case.id}, {pair.layout}, {described}", flush=True)
        for n in range(LENGTH):
            operation = rng.choice(OPERATIONS)
            print(f"replay({seed}) {n}: {operation.__name__}", flush=True)
            operation(pair)
            pair.check()


def replay_all(rank, world, folder, seeds):
    layouts = sharded.layouts(world)
    for seed in seeds:
        replay(seed, layouts)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_sequence_of_operations_on_shards(world, tmp_path):
    first = 10**6 * world
    sharded.run(world, replay_all, str(tmp_path), range(first, first + examples(default=12)))
