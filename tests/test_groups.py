"""`parameter_groups`: which parameter of a model lands in which group."""

import pytest
import torch
from torch import nn

import lowbit_optim
from lowbit_optim import parameter_groups
from protocol import train


class Model(nn.Module):
    """One of everything that is told apart."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.position = nn.Parameter(torch.zeros(1, 16, 8))
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.image_norm = nn.LayerNorm((4, 5, 6))
        self.rnn = nn.LSTM(8, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.RMSNorm((2, 3))])
        self.scale = nn.Parameter(torch.ones(()))
        self.pos_bias_u = nn.Parameter(torch.zeros(2, 4))  # a Transformer-XL's
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


DECAY = {
    "position",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "rnn.weight_ih_l0",
    "rnn.weight_hh_l0",
    "conv.weight",
}


def named(model, **options):
    """The names in each group, and the group's settings."""
    groups = parameter_groups(model, named=True, **options)
    return [({name for name, _ in group.pop("params")}, group) for group in groups]


def test_the_groups_of_a_model():
    model = Model()
    decayed, others, embeddings = named(model, weight_decay=0.1)
    assert decayed == (DECAY, {"weight_decay": 0.1})
    assert embeddings == ({"embedding.weight"}, {"weight_decay": 0.1, "optim_bits": 32})
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert others == (names - DECAY - {"embedding.weight"}, {"weight_decay": 0.0})


def test_every_trained_parameter_once_and_in_order():
    model = Model()
    groups = parameter_groups(model)
    listed = [p for group in groups for p in group["params"]]
    wanted = {p for p in model.parameters() if p.requires_grad}
    assert len(listed) == len(wanted)
    assert set(listed) == wanted
    order = {p: i for i, p in enumerate(model.parameters())}
    for group in groups:
        places = [order[p] for p in group["params"]]
        assert places == sorted(places)


def test_a_weight_tied_to_a_head_that_comes_first_is_an_embedding():
    model = nn.Module()
    model.head, model.embedding = nn.Linear(8, 50, bias=False), nn.Embedding(50, 8)
    model.embedding.weight = model.head.weight
    ((names, group),) = named(model)
    assert names == {"head.weight"}
    assert group["optim_bits"] == 32


def test_embeddings():
    model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 8, bias=False))
    assert [group for _, group in named(model, embedding_bits=8)][1]["optim_bits"] == 8
    assert all("optim_bits" not in group for _, group in named(model, embedding_bits=None))
    plain = named(model, decay_embeddings=False)[1]
    assert plain == ({"0.weight"}, {"weight_decay": 0.0, "optim_bits": 32})


def test_a_parametrized_embedding_is_one():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8, bias=False))
    nn.utils.parametrizations.weight_norm(model[0])
    (linear, _), (embedding, settings) = named(model)
    assert linear == {"1.weight"}
    weight = "0.parametrizations.weight"
    assert embedding == {f"{weight}.original0", f"{weight}.original1"}
    assert settings["optim_bits"] == 32


def test_the_norm_within_an_embedding_does_not_decay():
    model = nn.Embedding(50, 8)
    model.norm = nn.RMSNorm(8)
    weight, norm = named(model, weight_decay=0.1)
    assert weight == ({"weight"}, {"weight_decay": 0.1, "optim_bits": 32})
    assert norm == ({"norm.weight"}, {"weight_decay": 0.0, "optim_bits": 32})


def test_names_without_decay():
    model = Model()
    groups = named(model, no_decay=["position", "rnn.*", "embedding.*"])
    assert groups[0][0] == DECAY - {"position", "rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert groups[2] == ({"embedding.weight"}, {"weight_decay": 0.0, "optim_bits": 32})


def test_groups_that_would_be_empty_are_left_out():
    assert len(parameter_groups(nn.Linear(3, 4, bias=False))) == 1
    assert parameter_groups(nn.ReLU()) == []


@pytest.mark.parametrize("with_names", [False, True])
def test_an_optimizer_takes_them(with_names):
    model = Model()
    groups = parameter_groups(model, named=with_names)
    optimizer = train(lowbit_optim.AdamW8bit(groups, lr=0.1, min_8bit_size=1), 1)
    assert optimizer.state[model.embedding.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model.conv.weight]["exp_avg"].dtype == torch.uint8
    assert ("param_names" in optimizer.param_groups[0]) == with_names


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": None}, "weight_decay"),
        ({"embedding_bits": 16}, "embedding_bits"),
        ({"decay_embeddings": 1}, "decay_embeddings"),
        ({"named": "yes"}, "named"),
        ({"no_decay": "position"}, "no_decay"),
        ({"no_decay": ["positions"]}, "no_decay has 'positions'"),
        ({"no_decay": [5]}, "no_decay has 5"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        parameter_groups(Model(), **options)


def test_a_parameter_without_a_shape_is_refused():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'0\.weight', whose shape a first forward pass decides"):
        parameter_groups(model)
    model(torch.ones(2, 5))
    decayed, rest = parameter_groups(model)
    assert [p.ndim for p in decayed["params"] + rest["params"]] == [2, 2, 1, 1]


def test_a_list_of_parameters_is_no_model():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got list"):
        parameter_groups(list(Model().parameters()))
