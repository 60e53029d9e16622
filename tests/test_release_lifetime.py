"""What released gradients hold on to: parameters, models and optimizers that come and go."""

import gc
import weakref

import torch
from torch import nn

import lowbit_optim
from lowbit_optim import _optimizer, release_gradients
from test_release import backward, model, run


def test_a_model_that_is_dropped_is_gone():
    """With its optimizer and the handle, which hooks of parameters do not keep alive."""
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, net)
    run(optimizer, net, steps=2)
    dropped = [weakref.ref(x) for x in (*net.parameters(), optimizer, handle)]
    del optimizer, handle
    gc.collect()
    release_gradients(lowbit_optim.SGD(net.parameters()), net).remove()  # nobody else steps them
    del net
    gc.collect()
    assert all(reference() is None for reference in dropped)


def test_a_handle_that_was_removed_holds_nothing_that_waited():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, net)
    backward(net, 0)
    handle.remove()
    weight = weakref.ref(net[0].weight)
    del optimizer, net
    gc.collect()
    assert weight() is None


def test_a_parameter_that_is_replaced_is_gone():
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, net)
    run(optimizer, net, steps=2)
    params = optimizer.param_groups[0]["params"]
    old = weakref.ref(net[0].weight)
    optimizer.state.pop(net[0].weight)
    params[0] = net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    run(optimizer, net, steps=2)
    gc.collect()
    assert old() is None
    assert params[0] in optimizer.state
    handle.remove()


def test_a_parameter_that_is_taken_out_keeps_its_gradient():
    net = model()
    optimizer = lowbit_optim.AdamW8bit([{"params": [p]} for p in net.parameters()])
    release_gradients(optimizer, net)
    run(optimizer, net, steps=1)
    taken = optimizer.param_groups.pop()["params"][0]
    optimizer.state.pop(taken)
    before = taken.detach().clone()
    for t in (1, 2):
        backward(net, t)
        assert taken.grad is not None
        optimizer.step()
    optimizer.add_param_group({"params": [taken]})
    optimizer.step()  # which has the hooks made
    taken.grad = None
    before = taken.detach().clone()
    backward(net, 3)
    optimizer.param_groups.pop()  # while it waits
    optimizer.step()
    assert torch.equal(taken, before)
    assert all(p.grad is None for p in net.parameters() if p is not taken)


def test_an_optimizer_that_is_dropped_is_gone_at_once():
    """Its state is the memory that a process has waited for: no collection is needed."""
    net = model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    handle = release_gradients(optimizer, net)
    run(optimizer, net, steps=2)
    dropped = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert dropped() is None
    finally:
        gc.enable()
    backward(net, 0)  # whose hooks do nothing any more
    assert all(p.grad is not None for p in net.parameters())
    handle.remove()


def test_zero_grad_begins_anew_after_a_backward_pass_that_failed():
    net, twin = model(), model()
    optimizer = lowbit_optim.AdamW8bit(net.parameters())
    other = lowbit_optim.AdamW8bit(twin.parameters())
    release_gradients(optimizer, net, bucket_bytes=0)
    release_gradients(other, twin, bucket_bytes=0)
    backward(twin, 0)
    other.step()
    backward(net, 0)  # and an error, before the step
    optimizer.zero_grad()
    for t in (1, 2):
        for one, of in ((optimizer, net), (other, twin)):
            backward(of, t)
            one.step()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


def test_plans_of_parameters_that_are_stepped_together_are_not_kept_without_end():
    """Other ones in every backward pass, as where layers are dropped or experts chosen."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(12)]
    optimizer = lowbit_optim.AdamW8bit(params)
    handle = release_gradients(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        some = torch.randperm(12, generator=generator)[:6].tolist()
        torch.stack([params[i].sum() for i in some]).sum().backward()
        optimizer.step()
        kept = optimizer._partial_plans.values()
        assert sum(len(plan.listed) for plan in kept) <= (_optimizer.MOST_LISTED + 1) * len(params)
    handle.remove()
