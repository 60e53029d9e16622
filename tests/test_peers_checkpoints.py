"""Checkpoints from and to bitsandbytes, torchao and torch.optim, with the real libraries.

Each run is trained on one side, moved to the other half-way, and goes on on both. Losses of the
same 20 steps are compared, and moments with the library's own functions. Without the libraries,
test_foreign_checkpoints reads what they have saved. `make peers` installs them.
"""

import copy
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import lowbit_optim
from foreign_files import let_step_on_cpu, newer
from test_guides import blocks_of, run

# Their own calls of what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
STEPS = 20
WITHIN = 1e-3
NESTED = "__bnb_optimizer_quant_state__"


@dataclass(frozen=True)
class Row:
    """A class of theirs, our family, and the options of each."""

    name: str
    family: str
    theirs: dict = field(default_factory=dict)
    ours: dict = field(default_factory=dict)
    lr: float = 1e-3
    args: SimpleNamespace | None = None

    def build_theirs(self, cls, model, **options):
        if self.args is not None:
            options["args"] = self.args
        return cls(model.parameters(), lr=self.lr, **self.theirs, **options)

    def build_ours(self, bits, model):
        options = {"min_8bit_size": 1, **self.ours} if bits == 8 else self.ours
        return getattr(lowbit_optim, f"{self.family}{bits}bit")(model.parameters(), **options)


MOMENTUM = {"momentum": 0.9}
UNCAPPED = {"max_unorm": 0.0}  # bitsandbytes' caps are off in 8 bits
NO_CAP = SimpleNamespace(
    optim_bits=32, min_8bit_size=4096, percentile_clipping=100, block_wise=True, max_unorm=0.0,
    skip_zeros=False,
)  # fmt: skip
ROWS = {
    8: [
        Row("AdamW8bit", "AdamW", {"weight_decay": 0.1}),
        Row("Adam8bit", "Adam", {"weight_decay": 0.1}),
        Row("AdEMAMix8bit", "AdEMAMix", {"t_alpha": 50, "t_beta3": 50}),
        Row("Lion8bit", "Lion", lr=1e-4),
        Row("SGD8bit", "SGD", {**MOMENTUM, "weight_decay": 1e-3}, {"lr": 1.0}, lr=0.05),
        # In the signed code, where bitsandbytes keeps them, small squares become zero.
        Row("RMSprop8bit", "RMSprop", {"weight_decay": 1e-3}, lr=2e-4),
        Row("Adagrad8bit", "Adagrad", lr=3e-3),
        Row("LAMB8bit", "LAMB", {"weight_decay": 0.1}, UNCAPPED),
        Row("LARS8bit", "LARS", MOMENTUM, {**UNCAPPED, "lr": 1.0}, lr=0.03),
    ],
    32: [
        Row("AdamW32bit", "AdamW", {"weight_decay": 0.1}),
        Row("Adam32bit", "Adam", {"weight_decay": 0.1}),
        Row("AdEMAMix", "AdEMAMix", {"t_alpha": 50, "t_beta3": 50}),
        Row("Lion32bit", "Lion", lr=1e-4),
        Row("SGD32bit", "SGD", MOMENTUM, lr=0.05),
        Row("RMSprop32bit", "RMSprop", {"weight_decay": 1e-3}),
        Row("Adagrad32bit", "Adagrad", lr=1e-2),
        # The cap of 0.50 on CPUs is of moments without bias correction.
        Row("LAMB32bit", "LAMB", {"weight_decay": 0.1}, UNCAPPED, args=NO_CAP),
        Row("LARS32bit", "LARS", MOMENTUM, {"lr": 1.0}, lr=0.05),
    ],
}
BITSANDBYTES = pytest.mark.parametrize(
    ("bits", "row"), [pytest.param(b, row, id=row.name) for b in ROWS for row in ROWS[b]]
)
LAYOUTS = pytest.mark.parametrize("layout", ["flat", "nested"])


def make_model():
    """Rows of whole blocks, rows that are none, and biases."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 72), torch.nn.Tanh(), torch.nn.Linear(72, 8), torch.nn.Tanh(),
        torch.nn.Linear(8, 1),
    )  # fmt: skip


def train(model, optimizer, first, last):
    """The losses of steps `first` to `last`."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 256, generator=generator)
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1].sin() + x[:, 1:2])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_follows(losses, others):
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, others, strict=True))
    assert off < WITHIN, (off, losses[-1], others[-1])


def whole_rows(shape):
    """Whether blocks of 256 that restart every row are those of the flattened tensor."""
    row = shape.numel() // shape[0]
    return len(shape) < 2 or row < 64 or row % 256 == 0


@pytest.fixture
def bnb(monkeypatch):
    """bitsandbytes, stepping on the CPU; uncompiled, since every step would be compiled anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it does at import is not ours to mend
        bitsandbytes = pytest.importorskip("bitsandbytes", reason="make peers installs it")
        if not newer():
            let_step_on_cpu(bitsandbytes, monkeypatch.setattr)
    with torch.compiler.set_stance("force_eager"):
        yield bitsandbytes


def build_peer(bnb, row, bits, model):
    if not newer() and row.family in ("LARS", "LAMB"):
        pytest.skip(f"bitsandbytes {bnb.__version__} has no {row.name} for CPUs")
    options = {"min_8bit_size": 1} if bits == 8 else {}
    return row.build_theirs(getattr(bnb.optim, row.name), model, **options)


def flat(state):
    return {**state, **state.get(NESTED, {})}


def their_moments(bnb, state, family):
    """The moments of a state of bitsandbytes, as its own function reads them."""
    state, moments = flat(state), []
    for i in ("1", "2"):
        if f"state{i}" not in state:
            continue
        stacked = family == "AdEMAMix" and i == "1"
        pieces = list(state[f"state{i}"]) if stacked else [state[f"state{i}"]]
        if f"qmap{i}" in state:
            scales = list(state[f"absmax{i}"]) if stacked else [state[f"absmax{i}"]]
            pieces = [
                bnb.functional.dequantize_blockwise(
                    codes.contiguous(), absmax=scale, code=state[f"qmap{i}"], blocksize=256
                )
                for codes, scale in zip(pieces, scales, strict=True)
            ]
        moments += pieces
    return moments


def our_moments(optimizer, p):
    """The moments of a parameter of ours, as `dequantize_blockwise` reads them."""
    state = optimizer.state[p]
    return [
        lowbit_optim.dequantize_blockwise(
            state[moment.key], state[f"{moment.key}_absmax"], moment.signed
        )
        if f"{moment.key}_absmax" in state
        else state[moment.key]
        for moment in optimizer.moments()
    ]


def compare_moments(row, params, theirs, ours):
    """Bit for bit where the blocks are the same; else within what two roundings may be off."""
    recoded = row.family in ("RMSprop", "Adagrad")  # bitsandbytes has them in the signed code
    for p, their, our in zip(params, theirs, ours, strict=True):
        for x, y in zip(their, our, strict=True):
            if whole_rows(p.shape) and not recoded:
                assert torch.equal(x, y), p.shape
            else:
                assert (x - y).abs().max() <= 0.02 * x.abs().max(), p.shape


@BITSANDBYTES
def test_bitsandbytes_to_ours(bnb, bits, row):
    model = make_model()
    peer = build_peer(bnb, row, bits, model)
    train(model, peer, 0, STEPS)
    moved = copy.deepcopy(model)
    ours = row.build_ours(bits, moved)
    saved = peer.state_dict()
    with pytest.warns(UserWarning, match="bitsandbytes") as caught:
        ours.load_state_dict(saved)
    assert [warning.filename for warning in caught] == [__file__]
    assert ours.param_groups[0]["lr"] == row.lr
    theirs = [their_moments(bnb, saved["state"][i], row.family) for i in saved["state"]]
    params = list(moved.parameters())
    compare_moments(row, params, theirs, [our_moments(ours, p) for p in params])
    assert_follows(train(moved, ours, STEPS, 2 * STEPS), train(model, peer, STEPS, 2 * STEPS))


@LAYOUTS
@BITSANDBYTES
def test_ours_to_bitsandbytes(bnb, bits, row, layout):
    if row.name in ("LARS8bit", "LAMB8bit") and layout == "flat":
        pytest.skip("with one scale a tensor, which bitsandbytes steps on GPUs only")
    model = make_model()
    ours = row.build_ours(bits, model)
    for group in ours.param_groups:
        group.update(lr=row.lr, **row.theirs)
        if row.family == "Adam":
            group["decoupled_weight_decay"] = True
    train(model, ours, 0, STEPS)
    moved = copy.deepcopy(model)
    peer = build_peer(bnb, row, bits, moved)
    peer.load_state_dict(lowbit_optim.to_bitsandbytes_state_dict(ours, layout))
    params = list(moved.parameters())
    theirs = [their_moments(bnb, peer.state[p], row.family) for p in params]
    compare_moments(row, params, theirs, [our_moments(ours, p) for p in model.parameters()])
    assert_follows(train(moved, peer, STEPS, 2 * STEPS), train(model, ours, STEPS, 2 * STEPS))


@LAYOUTS
def test_there_and_back_again_is_what_it_was(bnb, layout):
    """bitsandbytes' own file, through our optimizer and out again."""
    model = make_model()
    row = ROWS[8][0]
    peer = build_peer(bnb, row, 8, model)
    train(model, peer, 0, 3)
    saved = peer.state_dict()
    ours = row.build_ours(8, model)
    with pytest.warns(UserWarning, match="bitsandbytes"):
        ours.load_state_dict(saved)
    back = lowbit_optim.to_bitsandbytes_state_dict(ours, layout)
    assert back["param_groups"] == saved["param_groups"]
    for i, p in enumerate(model.parameters()):
        if whole_rows(p.shape):
            first, second = flat(saved["state"][i]), flat(back["state"][i])
            for key in (f"{name}{i}" for name in ("state", "qmap", "absmax") for i in (1, 2)):
                assert torch.equal(first[key], second[key]), key
            assert second["step"] == first["step"] == 3


AO = [
    Row(name, name.removesuffix("8bit").removesuffix("4bit").removesuffix("Fp8"),
        {"weight_decay": 0.1}, {"weight_decay": 1.0})
    for name in ("AdamW8bit", "Adam8bit", "AdamW4bit", "AdamWFp8")
]  # fmt: skip


@pytest.mark.parametrize("row", AO, ids=lambda row: row.name)
def test_torchao_to_ours(row):
    """From 4 bits and fp8 the numbers are right, but then other roundings follow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optim = pytest.importorskip("torchao.optim", reason="make peers installs it")
    model = make_model()
    with torch.compiler.set_stance("force_eager"):
        peer = row.build_theirs(getattr(optim, row.name), model)
        train(model, peer, 0, STEPS)
        moved = copy.deepcopy(model)
        ours = row.build_ours(8, moved)
        with pytest.warns(UserWarning, match="torchao"):
            ours.load_state_dict(peer.state_dict())
        assert ours.param_groups[0]["lr"] == pytest.approx(row.lr)
        theirs = [
            [dequantized(peer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")]
            for p in model.parameters()
        ]
        for p, their, our in zip(
            model.parameters(),
            theirs,
            [our_moments(ours, p) for p in moved.parameters()],
            strict=True,
        ):
            exact = row.name.endswith("8bit") and hasattr(peer.state[p]["exp_avg"], "codes")
            for x, y in zip(their, our, strict=True):
                assert torch.equal(x, y) if exact else (x - y).abs().max() <= 0.02 * x.abs().max()
        later = train(moved, ours, STEPS, 2 * STEPS)
        if row.name.endswith("8bit"):
            assert_follows(later, train(model, peer, STEPS, 2 * STEPS))


def test_the_page_on_coming_from_torchao(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optim = pytest.importorskip("torchao.optim", reason="make peers installs it")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of("coming_from_torchao.md", None)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    )
    peer = optim.AdamW8bit(model.parameters(), lr=3e-4, bf16_stochastic_round=True)
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(4, 256)).square().mean().backward()
        peer.step()
    torch.save({"model": model.state_dict(), "optimizer": peer.state_dict()}, "torchao.pt")
    with pytest.warns(UserWarning, match="AdamW8bit converts a state_dict of torchao"):
        names = run([block], "coming_from_torchao.md")
    for p, q in zip(model.parameters(), names["model"].parameters(), strict=True):
        theirs = [dequantized(peer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")]
        assert all(map(torch.equal, our_moments(names["optimizer"], q), theirs))
    fresh = lowbit_optim.AdamW8bit(model.parameters())
    fresh.load_state_dict(torch.load("checkpoint.pt", weights_only=True)["optimizer"])
    assert fresh.param_groups[0]["lr"] == pytest.approx(3e-4)


def dequantized(x):
    """A moment of torchao as its own method reads it."""
    return x.dequantize() if hasattr(x, "codes") else x


TORCH = [
    Row("SGD", "SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, lr=0.05),
    Row("SGD", "SGD", {"momentum": 0.9, "dampening": 0.3}, lr=0.05),
    Row("SGD", "SGD", {}, lr=0.05),
    Row("Adam", "Adam", {"weight_decay": 0.1, "amsgrad": True}),
    Row("Adam", "Adam", {"weight_decay": 0.1, "maximize": True}),
    Row("Adam", "Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Row("AdamW", "AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.99)}),
    Row("RMSprop", "RMSprop", {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
    Row("RMSprop", "RMSprop", {"alpha": 0.9}),
    Row("Adagrad", "Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
]


@pytest.mark.parametrize("row", TORCH, ids=lambda row: f"{row.name}-{'-'.join(row.theirs)}")
@pytest.mark.parametrize("bits", [8, 32])
def test_torch_both_ways(row, bits):
    """In 32 bits within fp32 rounding; 8 bits are rounded once, on the way in."""
    model = make_model()
    peer = row.build_theirs(getattr(torch.optim, row.name), model)
    train(model, peer, 0, STEPS)
    moved = copy.deepcopy(model)
    ours = row.build_ours(bits, moved)
    ours.param_groups[0]["dither"] = False  # of a centered RMSprop's variance it would show
    ours.load_state_dict(peer.state_dict())
    back = copy.deepcopy(moved)
    again = row.build_theirs(getattr(torch.optim, row.name), back)
    again.load_state_dict(lowbit_optim.to_torch_state_dict(ours))
    assert again.state_dict()["param_groups"] == peer.state_dict()["param_groups"]
    if bits == 32:
        for key, state in peer.state_dict()["state"].items():
            other = again.state_dict()["state"].get(key, {})
            assert {k for k, x in state.items() if x is not None} == other.keys()
            for k, x in other.items():
                assert torch.equal(x, state[k]), k
                assert x.dtype == state[k].dtype
    limit = 1e-5 if bits == 32 else 5 * WITHIN
    losses = [
        train(m, o, STEPS, 2 * STEPS) for m, o in ((model, peer), (moved, ours), (back, again))
    ]
    for later in losses[1:]:
        for a, b in zip(later, losses[0], strict=True):
            assert abs(a - b) <= limit * max(1.0, abs(b))
