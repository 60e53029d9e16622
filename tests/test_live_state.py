"""State that scripts use themselves: what they keep in it, and save in place of a state dict."""

import copy
import io
import json

import pytest
import torch

import lowbit_optim
from protocol import (
    BITS,
    CLASSES,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    saved_and_loaded,
    snapshot,
    tensors_of,
    train,
)


def live(optimizer):
    return {"state": dict(optimizer.state), "param_groups": optimizer.param_groups}


@CLASSES
@BITS
def test_groups_and_state_of_an_optimizer_load(case, bits):
    straight = train(build(case, bits, parameters(), percentile_clipping=50), 2)
    file = io.BytesIO()
    torch.save(live(straight), file)
    file.seek(0)
    resumed = build(case, bits, parameters(seed=9), percentile_clipping=50)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, q in zip(all_parameters(straight), all_parameters(resumed), strict=True):
            q.copy_(p)
    assert identical(snapshot(train(straight, 2)), snapshot(train(resumed, 2)))


@CLASSES
def test_numbers_beside_groups_of_tensors_are_refused(case):
    """torch.optim goes on without the moments, and says nothing."""
    optimizer = train(build(case, 8, parameters()), 1)
    mixed = {**live(optimizer), "state": optimizer.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"an entry 0, which no parameter group lists"):
        optimizer.load_state_dict(mixed)


@CLASSES
def test_refusals_do_not_print_tensors(case):
    optimizer = train(build(case, 8, parameters()), 1)
    (p, *_) = all_parameters(optimizer)
    saved = live(optimizer)
    shape = rf"parameter of shape \({p.shape[0]}, .*'step' must be a whole number"
    with pytest.raises(ValueError, match=shape):
        optimizer.load_state_dict({**saved, "state": {p: {**optimizer.state[p], "step": -1}}})
    with pytest.raises(ValueError, match="an entry of a tensor, which no parameter group lists"):
        optimizer.load_state_dict({**saved, "state": {torch.ones(2): optimizer.state[p]}})


@pytest.mark.parametrize("entry", [99, "99"])
def test_an_entry_of_no_parameter_is_only_said_to_be(entry):
    """That numbers must not be strings is said where they then were a parameter's."""
    optimizer = train(lowbit_optim.AdamW8bit(parameters()), 1)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"an entry {entry!r}, which no .* group lists$"):
        optimizer.load_state_dict({**saved, "state": {entry: saved["state"][0]}})


@CLASSES
@BITS
def test_tensors_and_settings_that_are_saved_apart(case, bits):
    """As lerobot does, by safetensors and JSON."""
    straight, resumed = (build(case, bits, parameters(seed=0)) for _ in range(2))
    straight.register_state_dict_post_hook(lambda _, saved: saved.pop("lowbit_optim") and None)
    saved = train(straight, 2).state_dict()
    settings = json.loads(json.dumps(saved.pop("param_groups")))
    assert saved.keys() == {"state"}
    tensors = copy.deepcopy(saved["state"])
    assert all(isinstance(x, torch.Tensor) for state in tensors.values() for x in state.values())
    resumed.load_state_dict({"state": tensors, "param_groups": settings})
    with torch.no_grad():
        for p, q in zip(all_parameters(straight), all_parameters(resumed), strict=True):
            q.copy_(p)
    assert identical(snapshot(train(straight, 2))["params"], snapshot(train(resumed, 2))["params"])


@pytest.mark.parametrize("bits", [24, 32])
def test_a_residual_that_torch_has_cast_is_refused(bits):
    """As by a wrapper that loads by torch.optim.Optimizer and shares its state afterwards."""
    p = torch.nn.Parameter(torch.ones(64, 70, dtype=torch.bfloat16))
    optimizer = lowbit_optim.AdamW32bit([p], master_weight_bits=bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.optim.Optimizer.load_state_dict(optimizer, optimizer.state_dict())
    before = p.detach().clone()
    refused = r"'master_residual' of a parameter .* must be of integers"
    with pytest.raises(ValueError, match=refused):
        optimizer.step()
    with pytest.raises(ValueError, match=refused):
        dict(lowbit_optim.master_weights(optimizer))
    assert torch.equal(p, before)


def with_averages(optimizer):
    """What a user keeps beside each parameter, such as an average, before its first step."""
    for p in all_parameters(optimizer):
        optimizer.state[p]["ema"] = p.detach().clone()
    return optimizer


@CLASSES
@BITS
def test_what_is_kept_before_the_first_step_changes_none(case, bits):
    plain, kept = (build(case, bits, parameters()) for _ in range(2))
    with_averages(kept)
    lowbit_optim.dequantize_state(kept)
    assert all(list(one) == ["ema"] for one in kept.state.values())
    for optimizer in (plain, kept):
        weights = [p.detach() + 1 for p in all_parameters(optimizer)]
        lowbit_optim.load_master_weights(optimizer, weights)
        train(optimizer, 3)
    without = {p: {k: x for k, x in its.items() if k != "ema"} for p, its in kept.state.items()}
    kept.state.update(without)
    assert identical(snapshot(kept), snapshot(plain))


@CLASSES
@BITS
def test_what_is_kept_of_a_parameter_without_a_step_is_loaded(case, bits):
    """As torch.optim's optimizers do; of another package's file the lack of a step is refused."""
    first, second = parameters()
    straight = with_averages(build(case, bits, [first, second]))
    give_gradients([first], 0)
    straight.step()
    saved = straight.state_dict()
    resumed = build(case, bits, parameters())
    if straight.step_required:
        foreign = {key: saved[key] for key in ("state", "param_groups")}
        with pytest.raises(ValueError, match=r"it has no '.*', only \['ema'\]"):
            resumed.load_state_dict(foreign)
    resumed.load_state_dict(saved)
    loaded = all_parameters(resumed)
    assert list(resumed.state[loaded[1]]) == ["ema"]
    assert torch.equal(resumed.state[loaded[1]]["ema"], second)
    with torch.no_grad():
        loaded[0].copy_(first)
    assert identical(snapshot(train(straight, 2, 1)), snapshot(train(resumed, 2, 1)))


REPLACED = {
    "cut": lambda x: setattr(x, "data", x.data[:150]),
    "made sparse": lambda x: torch.utils.swap_tensors(x, torch.zeros(300).to_sparse()),
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_tensor_of_the_state_that_becomes_another_in_place_is_refused(replaced):
    """At the old id, which is what a plan that is kept knows, and perhaps the old address."""
    params = parameters(shapes=[(300,)])
    optimizer = train(lowbit_optim.AdamW32bit(params), 3)
    REPLACED[replaced](optimizer.state[params[0]]["exp_avg"])
    with pytest.raises(ValueError, match="does not fit AdamW32bit: 'exp_avg'"):
        train(optimizer, 1)


def test_what_a_user_keeps_in_state_is_copied_by_a_load():
    """Beside parameters' states, and in them before a first step and after."""
    p, q = params = parameters()
    optimizer = with_averages(lowbit_optim.AdamW8bit(params))
    give_gradients([q], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"]["ema"] = {"decay": [torch.ones(3)]}
    optimizer.load_state_dict(saved)
    saved["state"]["ema"]["decay"][0].zero_()
    assert torch.equal(optimizer.state["ema"]["decay"][0], torch.ones(3))
    states = list(optimizer.state.values())
    kept = copy.deepcopy(states)
    for x in tensors_of(saved["state"]):
        x.zero_()
    assert identical(states, kept)
    assert all("ema" in optimizer.state[x] for x in (p, q))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("AdamW", "amsgrad", True), ("SGD", "momentum", 0.9), ("RMSprop", "momentum", 0.9),
        ("RMSprop", "centered", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stored", [{"optim_bits": 32}, {}, {"state_format": "ratio8"}], ids=str)
def test_a_parameter_not_stepped_since_a_setting_asked_for_another_moment(name, key, value, stored):
    """Is saved with the moment that its next step would make, or no load would take it."""
    make = {"lr": 0.01, "min_8bit_size": 1, "optim_bits": 8, **stored}
    optimizer = getattr(lowbit_optim, name)(parameters(), **make)
    train(optimizer, 2)
    optimizer.param_groups[0][key] = value
    first, *others = all_parameters(optimizer)
    for p in others:
        p.grad = None
    first.grad = torch.ones_like(first)
    optimizer.step()
    straight = copy.deepcopy(optimizer)
    resumed = getattr(lowbit_optim, name)(copy.deepcopy(all_parameters(optimizer)), **make)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert identical(snapshot(train(straight, 2)), snapshot(train(resumed, 2)))


@BITS
def test_a_moment_in_another_order_of_memory_is_read_by_its_elements(bits):
    made = []
    for turned in (False, True):
        cls = getattr(lowbit_optim, f"AdamW{bits}bit")
        optimizer = train(cls(parameters(), min_8bit_size=1), 1)
        state = optimizer.state[all_parameters(optimizer)[0]]
        if turned:
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        made.append(snapshot(train(optimizer, 2, first=1)))
    assert identical(*made)


@pytest.mark.parametrize("order", ["as before", "exchanged, too"])
def test_states_that_two_parameters_exchange_count_in_the_next_step(order):
    """Also where each is found in the other's place among all of them."""
    found = []
    for thorough in (False, True):
        optimizer = train(lowbit_optim.AdamW8bit(parameters(shapes=[(300,)] * 2)), 2)
        state, (p, q) = optimizer.state, all_parameters(optimizer)
        its, others = state.pop(p), state.pop(q)
        for one, kept in ((q, its), (p, others))[:: -1 if order == "as before" else 1]:
            state[one] = kept
        if thorough:
            optimizer.plans.clear()
        found.append(snapshot(train(optimizer, 2, first=2)))
        assert state[q] is its
    assert identical(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["AdamW", "ScheduleFreeAdamW"])
def test_numbers_of_another_dtype_are_loaded_in_that_of_a_step(name, bits, dtype):
    """Engines read them by their addresses."""
    options = {"percentile_clipping": 50}
    saved = train(getattr(lowbit_optim, name)(parameters(), **options), 2).state_dict()
    ends = []
    for back in (lambda x: x, torch.Tensor.double):
        optimizer = getattr(lowbit_optim, name)(
            parameters(), **options, optim_bits=bits, min_8bit_size=1
        )
        states = {
            i: {key: back(x.to(dtype)) for key, x in state.items()}
            for i, state in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": states})
        ends.append(snapshot(train(optimizer, 2, first=2)))
    assert identical(*ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_a_view_negates_is_read_as_torch_reads_it(dtype, engine, device):
    """Memory has the opposite of such numbers; `x.conj().imag` is one."""
    bits = 32 if dtype == torch.bfloat16 else "auto"
    options = {"min_8bit_size": 1, "percentile_clipping": 50, "master_weight_bits": bits}
    ends = []
    for look in (torch.clone, lambda x: torch._neg_view(-x)):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(dtype)]
        optimizer = train(lowbit_optim.AdamW8bit(params, **options), 2)
        for state in optimizer.state.values():
            state.update({k: look(x) for k, x in state.items() if x.dtype.is_signed and x.dim()})
        ends.append(snapshot(train(optimizer, 2, first=2)))
    assert identical(*ends)
