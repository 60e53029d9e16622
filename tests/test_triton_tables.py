"""What the Triton engine sends to a device, and which programs it launches, by its interpreter.

On a machine with a GPU the same tests run compiled.
"""

from types import SimpleNamespace

import pytest
import torch

import lowbit_optim
from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

from lowbit_optim_kernels.engines.triton import grid, kinds
from lowbit_optim_kernels.engines.triton import tables as engine_tables
from lowbit_optim_kernels.engines.triton.compiled import Compiled
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from lowbit_optim_kernels.formats.ratio import RATIO8
from lowbit_optim_kernels.weights import PLAIN

pytestmark = pytest.mark.gpu  # `make gpu-check` runs these tests too

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(count=2):
    params = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(count)]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, float(1 + i))
    return params


def test_every_tensor_of_many_is_prepared():
    """Of the last ones a program takes fewer than it could."""
    params = parameters(engine_tables.LANES + 2)
    with lowbit_optim.use_engine("triton"):
        lowbit_optim.SGD32bit(params, lr=0.5).step()
    for i, p in enumerate(params):
        assert (p == 1.0 - 0.5 * (1 + i)).all(), i


def test_only_what_has_changed_is_sent(monkeypatch):
    """Each copy to a device takes the host about as long as a launch."""
    sent, send = [], engine_tables._send

    def noted(tables, which, *given):
        sent.append(("addresses", "hyperparameters")[which])
        send(tables, which, *given)

    monkeypatch.setattr(engine_tables, "_send", noted)
    params = parameters()
    optimizer, kept = lowbit_optim.SGD32bit(params, lr=0.5), []

    def sent_in_a_step():
        sent.clear()
        optimizer.step()
        return list(sent)

    with lowbit_optim.use_engine("triton"):
        assert sent_in_a_step() == ["addresses", "hyperparameters"]
        optimizer.step()  # from here on the tables are used again
        assert sent_in_a_step() == []
        optimizer.param_groups[0]["lr"] = 0.25
        assert sent_in_a_step() == ["hyperparameters"]
        kept.append(params[1].grad)  # so that the new one is elsewhere
        params[1].grad = kept[0].clone()
        assert sent_in_a_step() == ["addresses"]
        assert sent_in_a_step() == []


def test_an_address_of_a_copy_is_that_of_its_step():
    """Later ones may step the parameter where it is."""
    address = torch.zeros(2, 2, dtype=torch.int64)
    tables = SimpleNamespace(rows=None, sent=None, address=address)
    batch = SimpleNamespace(
        addresses=[[16, 32], [48, 64]], reused=True, gradient_addresses=[32, 64]
    )
    for copies, want in (({1: 96}, [[16, 32], [96, 64]]), ({}, [[16, 32], [48, 64]])):
        batch.param_addresses = copies
        engine_tables._send_addresses(tables, batch)
        assert address.tolist() == want


def test_a_stream_waits_once_for_the_one_before(monkeypatch):
    """And memory of tables is not given away while it may still read them."""
    table, recorded, waited = torch.zeros(2), [], []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: recorded.append(given))
    tables = SimpleNamespace(stream="the first", tiles=1, address=table)
    stream = SimpleNamespace(wait_stream=waited.append)
    for _ in range(2):
        engine_tables._follow_stream(tables, stream)
    assert waited == ["the first"]
    assert recorded == [(table, stream)]
    assert tables.stream is stream


@pytest.mark.parametrize("found_inf", [None, 0.0])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_what_a_scaler_gives_is_launched_by_the_binder(scale, found_inf, monkeypatch):
    """Which looks at where it lies and at its dtype; without it, later steps need no binder."""
    keys, launch = {}, Compiled.launch

    def noted(self, key, kernel, *given):
        keys[kernel.__name__] = key
        launch(self, key, kernel, *given)

    monkeypatch.setattr(Compiled, "launch", noted)
    optimizer = lowbit_optim.SGD32bit(parameters(), lr=0.5)
    optimizer.grad_scale, optimizer.found_inf = (
        None if x is None else torch.tensor(x, device=DEVICE) for x in (scale, found_inf)
    )
    with lowbit_optim.use_engine("triton"):
        optimizer.step()
    assert (keys["begin"] is not None) == (scale is None and found_inf is None)
    assert keys["update"] is not None


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("which", ["blocks_before", "weights_before"])
def test_a_shard_is_far_by_where_it_begins(which, far):
    """Its last block decides, of its moments or of the random bits of its weights."""
    slot = SimpleNamespace(rows=1, row=1024, format=DYNAMIC8, blocks_before=0, weights_before=0)
    size = {"blocks_before": DYNAMIC8.block, "weights_before": engine_tables.WEIGHT_BLOCK}[which]
    first = grid.FAR - slot.row // size + far
    setattr(slot, which, first if which == "blocks_before" else first * size)
    assert grid._is_far(slot) == far


@pytest.mark.parametrize("row", [96, 256, 260, 301, 512, 600])
@pytest.mark.parametrize("rows", [1, 2, 9, 64, 65])
def test_a_tensors_tiles_have_all_its_blocks(rows, row):
    """Neighbours and full ones, then short ones, and no tile more than they need."""
    x = torch.zeros(0)
    slot = SimpleNamespace(
        rows=rows, row=row, p=x, g=x, format=DYNAMIC8, weights=PLAIN, shifted=False,
        blocks_before=0, weights_before=0,
    )  # fmt: skip
    full, rest = divmod(row, DYNAMIC8.block)
    wanted = {kinds.LINE: full + (rest > 0)} if rows == 1 else {kinds.FULL: rows * full}
    if rest and rows > 1:
        wanted[kinds.SHORT] = rows
    found, tiles = dict.fromkeys(wanted, 0), 0
    for kind, tile, count, block, *_ in grid._tile_ranges(slot, row, rows, True):
        assert tile == tiles, "numbered one after the other"
        assert block == found[kind.blocks]
        tiles += count
        found[kind.blocks] += count * kind.in_tile
        beyond = found[kind.blocks] - wanted[kind.blocks]
        assert beyond < (1 if kind.whole else kind.in_tile)
    assert all(found[blocks] >= count for blocks, count in wanted.items())


@pytest.mark.parametrize(
    ("tiles", "spanned"),
    [
        ([100, 100], [100, 100]),
        ([800, 70], [800]),  # the other is little beside it
        ([804, 70], [804]),  # the last row has fewer tiles
        ([100, 70], []),  # and here it would have to be launched with other kinds
        ([100, 70, 70], [100]),  # or enough for a launch of its own
        ([90], []),
    ],
)
def test_long_tensors_share_rows_where_that_leaves_few_others(tiles, spanned, monkeypatch):
    monkeypatch.setattr(grid, "ALONE", 100)
    monkeypatch.setattr(grid, "SPAN", 10)
    monkeypatch.setattr(grid, "LONG", 8)
    kind = kinds.Kind(torch.float32, torch.float32, DYNAMIC8, True, 16)
    members = {kind: [(i, 0, n, 0, 4 * n, 0) for i, n in enumerate(tiles)]}
    found = {k.spanned: [n for _, _, n, *_ in of] for k, of in grid._spanned(members).items()}
    assert found.get(True, []) == spanned
    assert sorted(n for of in found.values() for n in of) == sorted(tiles)
    rows = [grid._programs(0, *of)[:, 0] for of in grid._spanned(members).items() if of[0].spanned]
    in_row = [int(x) // grid.NUMBER for of in rows for x in of]
    assert set(in_row) <= set(range(1, 11))
    assert sum(in_row) == sum(spanned), "none beyond a tensor's end"


@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [torch.float32, torch.bfloat16], ids=str)
def test_a_thread_reads_16_bytes_of_the_wider_one(p, g):
    _, bare = kinds._lengths(kinds.Kind(p, g, DYNAMIC8, True, kinds.ALIGNED))
    assert bare == 16 // max(p.itemsize, g.itemsize)


def test_caches_are_told_of_16_bit_weights_alone():
    """Steps in fp32 take longer so; and only spans know which tiles come after their own."""
    for dtype in (torch.float32, torch.bfloat16):
        kind = kinds.Kind(dtype, dtype, DYNAMIC8, True, kinds.ALIGNED)
        narrow = dtype == torch.bfloat16
        assert kinds._once(kind) == narrow
        for spanned in (False, True):
            asking = kind._replace(format=RATIO8, spanned=spanned)
            assert (kinds._ahead(asking) > 0) == (narrow and spanned)
