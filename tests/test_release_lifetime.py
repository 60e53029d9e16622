"""What released gradients hold on to: parameters, models and optimizers that come and go."""

import gc
import weakref

import torch
from torch import nn

import lowbit_optim
from lowbit_optim import release_gradients
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
