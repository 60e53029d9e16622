"""State dicts for other libraries on another device than the parameters', a parameter at a time.

And of parameters that are fp64, listed twice, have not been stepped yet, or are shards.
"""

import weakref
from functools import partial

import pytest
import torch

import lowbit_optim
from lowbit_optim import to_bitsandbytes_state_dict, to_torch_state_dict
from lowbit_optim._foreign.export import Member
from protocol import identical, silent_mesh, tensors_of


def trained(family, **options):
    params = [torch.nn.Parameter(torch.ones(50, 100)) for _ in range(4)]
    for p in params[:3]:
        p.grad = torch.ones_like(p)
    options = {"lr": 0.01, "min_8bit_size": 1, **options}
    optimizer = getattr(lowbit_optim, f"{family}8bit")(params, **options)
    optimizer.step()
    return optimizer


def written(family, layout):
    if layout is None:
        return to_torch_state_dict
    return partial(to_bitsandbytes_state_dict, layout=layout)


WRITTEN = pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("AdamW", None),
        ("Adagrad", None),
        ("AdamW", "flat"),
        ("LAMB", "flat"),
        ("AdEMAMix", "nested"),
    ],
)


@WRITTEN
def test_tensors_are_put_on_the_device_that_is_asked_for(family, layout):
    optimizer, write = trained(family), written(family, layout)
    elsewhere, here = write(optimizer, device="meta"), write(optimizer)
    assert identical(write(optimizer, device=torch.device("cpu")), here)
    assert elsewhere["state"].keys() == here["state"].keys()
    for index, state in here["state"].items():
        there = elsewhere["state"][index]
        assert there.keys() == state.keys()
        assert torch.as_tensor(there["step"]).device.type == "cpu"
        moved = [x for key, x in there.items() if key != "step"]
        found = list(tensors_of(moved))
        assert found
        assert {x.device.type for x in found} == {"meta"}
        kept = tensors_of([x for key, x in state.items() if key != "step"])
        assert [x.shape for x in found] == [x.shape for x in kept]


@WRITTEN
def test_a_device_that_does_not_exist_is_refused(family, layout):
    optimizer = getattr(lowbit_optim, f"{family}8bit")([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(RuntimeError, match="device"):
        written(family, layout)(optimizer, device="nowhere")


def test_numbers_are_let_go_when_they_are_coded(monkeypatch):
    """Those of all parameters would take four times the memory of the state."""
    seen, alive = [], []
    numbers = Member.numbers

    def noted(member, optimizer):
        alive.append(sum(each() is not None for each in seen))
        found = numbers(member, optimizer)
        seen.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(Member, "numbers", noted)
    to_bitsandbytes_state_dict(trained("AdamW"))
    assert len(alive) == 3
    assert max(alive) <= 2


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_a_parameter_that_is_listed_twice_is_written_once(write):
    optimizer = trained("AdamW")
    wanted = write(optimizer)["state"]
    optimizer.param_groups[0]["params"] *= 2
    written = write(optimizer)
    assert written["param_groups"][0]["params"] == [0, 1, 2, 3] * 2
    assert identical(written["state"], wanted)


def test_state_of_an_fp64_parameter_is_fp32_for_bitsandbytes():
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    optimizer = lowbit_optim.AdamW32bit([p])
    optimizer.step()
    assert to_bitsandbytes_state_dict(optimizer)["state"][0]["state2"].dtype == torch.float32


@pytest.mark.parametrize("family", ["SGD", "Adagrad", "AdamW", "RMSprop"])
def test_what_a_user_keeps_before_the_first_step_is_no_state(family):
    """To most classes of the others it would be one, without moments; torch's SGD reads its own."""
    optimizer = trained(family, **({"momentum": 0.9} if family == "SGD" else {}))
    optimizer.state[optimizer.param_groups[0]["params"][3]]["mine"] = 3
    assert to_bitsandbytes_state_dict(optimizer)["state"].keys() == {0, 1, 2}
    written = to_torch_state_dict(optimizer)["state"]
    read = {"SGD": {"mine"}, "Adagrad": {"mine", "sum", "step"}}.get(family)
    assert (written[3].keys() if 3 in written else None) == read


def test_a_state_without_a_step_is_written_for_sgd():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = lowbit_optim.SGD([p], momentum=0.9)
    optimizer.state[p]["mine"] = 3
    assert to_torch_state_dict(optimizer)["state"] == {0: {"mine": 3}}


@pytest.mark.parametrize("write", [to_torch_state_dict, to_bitsandbytes_state_dict])
def test_shards_are_refused(write):
    """Other libraries know none, and a rank has only its own."""
    with silent_mesh(2) as mesh:
        from torch.distributed.tensor import DTensor, Shard

        spread = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        optimizer = lowbit_optim.AdamW8bit([torch.nn.Parameter(spread)])
        with pytest.raises(ValueError, match=r"parameter group 0 has DTensors; .*full_state_dict"):
            write(optimizer)


@pytest.mark.parametrize(
    ("family", "key", "value", "moment"),
    [("AdamW", "amsgrad", True, "max_exp_avg_sq"), ("SGD", "momentum", 0.9, "momentum_buffer")],
)
def test_a_moment_that_a_setting_has_asked_for_since_the_last_step(family, key, value, moment):
    """Is written as the next step would make it."""
    optimizer = trained(family)
    optimizer.param_groups[0][key] = value
    states = to_torch_state_dict(optimizer)["state"]
    assert len(states) == 3
    assert all(torch.equal(one[moment], torch.zeros(50, 100)) for one in states.values())
