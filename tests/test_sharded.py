"""DTensor parameters on several ranks equal the whole parameters of one process."""

import pytest
import torch

import lowbit_optim
import sharded

pytestmark = pytest.mark.timeout(300)
LARGER = [pytest.param(world, marks=pytest.mark.slow) for world in (3, 4)]


@pytest.fixture(autouse=True)
def one_thread():
    """As on the ranks: torch's own sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(name, steps=3):
    params = [torch.nn.Parameter(x) for x in sharded.values(0, name)]
    with lowbit_optim.use_engine("numba"):
        optimizer = sharded.build(name, params)
        sharded.train(optimizer, params, range(steps))
    return sharded.everything(params, optimizer)


def assert_same(got, want, exact):
    for p, q in zip(got["params"], want["params"], strict=True):
        if exact:
            assert torch.equal(p, q), p.shape
        else:
            # One rounding of bf16, where a sum's last bit moved a weight over a boundary.
            rtol = 1e-6 if p.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(p, q, rtol=rtol, atol=1e-6)
    for a, b in zip(got["state"], want["state"], strict=True):
        assert a.keys() == b.keys()
        for key, x in a.items():
            assert (x.shape, x.dtype) == (b[key].shape, b[key].dtype), key
            if exact:
                assert torch.equal(x, b[key]), key


@pytest.mark.parametrize("world", [2, *LARGER])
@pytest.mark.slow
def test_ranks_equal_one_process(world, tmp_path):
    sharded.run(world, sharded.steps_of_all, str(tmp_path))
    results = torch.load(tmp_path / f"world{world}.pt")
    assert {name for label, name in results if label == "shard"} == set(sharded.CLASSES)
    for (_, name), got in results.items():
        assert_same(got, alone(name), name in sharded.ELEMENTWISE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    sharded.run(2, sharded.save, str(folder))
    return folder


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), *LARGER])
def test_checkpoints_are_continued_by_any_number_of_ranks(world, saved):
    (saved / "rendezvous").unlink(missing_ok=True)
    sharded.run(world, sharded.load, str(saved))
    results = torch.load(saved / f"loaded{world}.pt")
    assert len(results) == 2 * len(sharded.SAVED)
    for (_, name), got in results.items():
        assert_same(got, alone(name, 6), name in sharded.ELEMENTWISE)


# The mean of three equal gradients is not always that gradient, as it is of two and four.
@sharded.fully_shard_averages
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fully_shard_equals_one_process(world, tmp_path):
    sharded.run(world, sharded.fsdp, str(tmp_path))
    results = torch.load(tmp_path / "fsdp.pt")
    inputs = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))
    for (label, name), got in results.items():
        model = sharded.mlp()
        optimizer = sharded.build(name, model.parameters(), min_8bit_size=256)
        if label == "mixed":  # test_sharded_torch has its gradients, which are in bf16
            assert all(p.isfinite().all() for p in got["params"])
            assert {x.dtype for x in got["params"]} == {torch.float32}
            continue
        sharded.fit(model, optimizer, 4, inputs)
        want = sharded.everything(list(model.parameters()), optimizer)
        assert_same(got, want, name in sharded.ELEMENTWISE)


def test_what_cannot_be_done_is_refused_on_every_rank(tmp_path):
    sharded.run(2, sharded.refused, str(tmp_path))


@pytest.mark.slow
def test_plain_tensors_of_ddp_and_zero(tmp_path):
    sharded.run(2, sharded.others, str(tmp_path))
    results = torch.load(tmp_path / "others.pt")
    inputs = torch.randn(8, 70, generator=torch.Generator().manual_seed(5))
    for label, name in (("ddp", "LANS8bit"), ("zero", "AdamW8bit"), ("fsdp1", "AdamW32bit")):
        model = sharded.mlp()
        options = {"min_8bit_size": 256, "dither": label != "zero"}
        sharded.fit(model, sharded.build(name, model.parameters(), **options), 4, inputs)
        got, want = (
            torch.cat([p.detach().flatten() for p in params])
            for params in (results[label], model.parameters())
        )
        assert torch.equal(got, want), label  # FSDP1's are one flat tensor
