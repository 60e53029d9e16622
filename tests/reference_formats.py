"""The formats `ratio8`, `ratio4`, dither and split weights again, in NumPy and as they are defined.

Written from the specification alone, a block or a number at a time, to hold the package against.
"""

import hashlib
import math

import numpy as np

f32, u32 = np.float32, np.uint32
MASK = 0xFFFFFFFF


def mix(x):
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def dither(seed, tensor, stream, step, block, lane):
    """The 32 random bits of one element, as a Python number."""
    key = mix((mix(seed ^ mix(tensor + 1)) + stream) & MASK)
    base = mix((block & MASK) ^ key) + mix(((block >> 32) + key) & MASK) + step * 0x9E3779B9
    return (base + lane * 0xC13FA9A9) & MASK


def dithers(seed, tensor, stream, step, blocks, width=64):
    """Those of some blocks, uint32 (blocks, width)."""
    rows = [[dither(seed, tensor, stream, step, int(b), j) for j in range(width)] for b in blocks]
    return np.array(rows, dtype=np.uint64).astype(u32)


def fraction(bits):
    return (bits >> u32(8)).astype(f32) * f32(2**-24)


def bf16(x):
    """Rounded to bf16, ties to even."""
    bits = np.asarray(x, f32).view(u32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(u32).view(f32)


def inverse(scale):
    return f32(1) / scale if scale > 0 else f32(0)


def square(v, levels, random=0.5):
    """Codes and the scale of one block of squares."""
    s = np.sqrt(v.astype(f32))
    scale = f32(s.max() / f32(levels * levels))
    codes = np.floor(np.sqrt(s * inverse(scale)) + f32(1) * random)
    return np.where(v > 0, np.clip(codes, 1, levels), 0).astype(int), scale


def cut(x, random):
    """A positive number rounded to bf16 by 16 random bits."""
    bits = int(np.asarray(x, f32).view(u32)) + random & 0xFFFF0000
    return np.array(bits, u32).view(f32)


def ratio(m, v, levels, random=None, rounded=True, least=0):
    """Codes and the scale of one block of ratios; this to bf16 if `rounded`.

    They are to roots of `least` at least.
    """
    s = np.where(v > 0, np.maximum(np.sqrt(v.astype(f32)), f32(least)), f32(0))
    r = np.where(s > 0, m / np.where(s > 0, s, f32(1)), f32(0)).astype(f32)
    scale = f32(np.abs(r).max() / f32(levels))
    scale = bf16(scale) if rounded else scale
    if not (2.0**-126 <= scale < math.inf):
        scale = f32(0)
    y = r * inverse(scale)
    codes = np.rint(y) if random is None else np.floor(y + random)
    return np.where(r == 0, 0, np.clip(codes, -levels, levels)).astype(int), scale


def soft(m, random=None, rounded=True):
    """Codes and the scale of one block by the softsign; this to bf16 if `rounded`."""
    a = np.abs(m)
    scale = min(bf16(a.max()) if rounded else a.max(), f32(3.3895314e38))
    y = f32(254) * a / np.where(scale > 0, scale + a, f32(1))
    codes = np.rint(y) if random is None else np.floor(y + random)
    return (np.minimum(codes, 127) * np.sign(m)).astype(int), scale


def digest(*arrays):
    joined = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    return hashlib.sha256(joined).hexdigest()[:16]
