"""Train on two processes with fully_shard, save with DCP, and go on with one process.

Run it as `python examples/fsdp2.py`; it starts its processes by itself, on CPUs with gloo. On GPUs
torchrun would start the script, and the group would be of "nccl" and the mesh of "cuda".
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowbit_optim import AdamW8bit

STEPS = 20


def build(world):
    """A model sharded over all processes, and its optimizer: AdamW8bit as anywhere else."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 300), torch.nn.GELU(),
        torch.nn.Linear(300, 10),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, AdamW8bit(model.parameters(), lr=1e-3)


def train(model, optimizer, first, last):
    """Steps first to last; every process has the same batches, so that runs can be compared."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 64, generator=generator)
        labels = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def process(rank, world, folder, resume):
    torch.set_num_threads(1)
    address = f"file://{folder}/rendezvous{world}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    model, optimizer = build(world)
    if resume:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        loss = train(model, optimizer, STEPS, 2 * STEPS)
    else:
        train(model, optimizer, 0, STEPS)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/checkpoint")
        loss = train(model, optimizer, STEPS, 2 * STEPS)
    if rank == 0:
        torch.save(loss, f"{folder}/loss{world}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads end a process at times that unloads them in order


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (2, folder, False), nprocs=2)
        mp.spawn(process, (1, folder, True), nprocs=1)
        on_two, on_one = (torch.load(f"{folder}/loss{world}.pt") for world in (2, 1))
    print(f"loss after {2 * STEPS} steps on two processes: {on_two:.6f}")
    print(f"after {STEPS} on two and {STEPS} on one:        {on_one:.6f}")
    assert abs(on_two - on_one) < 1e-5, "resuming on another number of processes changed the run"
    print("the same")


if __name__ == "__main__":
    main()
