"""Dither: random bits that are counted, not drawn, so that rounding has no state and no order.

A number that changes by less than half a step of its code at a time would stay where it is for ever
if it were rounded to nearest: a slow average of gradients, or a bf16 weight. Rounded up with the
probability of its distance, it moves as it should on average. The bits for it are

    mix(x):  x = (x ^ x >> 16) * 0x7FEB352D ;  x = (x ^ x >> 15) * 0x846CA68B ;  return x ^ x >> 16
    key    = mix(mix(seed ^ mix(tensor + 1)) + stream)
    base   = mix(block's lower half ^ key) + mix(its upper half + key) + step * TIME
    bits   = base + lane * SPACE                                          all modulo 2**32

of a group's seed, a parameter's number in `state_dict()`, what is rounded (`stream`), the number of
a block in the whole parameter and the element's place in it. So they are the same on every engine,
for any shard, replica or order of parameters, and after a checkpoint. Over steps each element sees
a golden-ratio sequence, over lanes another one, over blocks a hash. A block's scale, where it is
dithered, is so by a hash of its first element's bits.

This file has them for Python's numbers and for torch; each compiled engine has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TIME, SPACE = 0x9E3779B9, 0xC13FA9A9
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))  # of `mix`: shifts and factors
MASK = 0xFFFFFFFF
WEIGHT = 1  # the stream of the parameter's own rounding
SEEDS = 2**32


def mix(x: Any) -> Any:
    """A hash of 32 bits, of a number or of an int64 tensor."""
    for shift, factor in ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 16)


def tensor_key(seed: int, tensor: int) -> int:
    """The key that all streams of a parameter share."""
    return int(mix((seed ^ mix((tensor + 1) & MASK)) & MASK))


def stream_key(tensor_key: int, stream: int) -> int:
    """The key of one stream."""
    return int(mix((tensor_key + stream) & MASK))


def bits(key: int, step: Tensor, blocks: Tensor, lanes: Tensor) -> Tensor:
    """Random bits, int64 numbers below 2**32; `blocks` and `lanes` are int64 and broadcast.

    Args:
        key: a `stream_key`.
        step: the number of the step, from 1; 0-d.
        blocks: numbers of blocks in the whole parameter.
        lanes: places in them.
    """
    upper = mix(((blocks >> 32) + key) & MASK)
    base = mix((blocks & MASK) ^ key) + upper + (step.to(torch.int64) & MASK) * TIME
    return (base + lanes * SPACE) & MASK


def fraction(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits as numbers in [0, 1)."""
    return (bits >> 8).to(dtype) * 2.0**-24


def dithered_scale(scale: Tensor, first: Tensor) -> Tensor:
    """Scales of blocks in bf16, rounded up with the probability of the distance.

    Args:
        scale: fp32 numbers that are not negative, at most bf16's largest.
        first: the fraction of each block's first element.
    """
    random = mix((first * 2.0**24).to(torch.int64)) >> 16
    bits = scale.view(torch.int32) + random.to(torch.int32)
    return (bits >> 16 << 16).view(torch.float32).to(torch.bfloat16)
