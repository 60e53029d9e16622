"""The `dynamic8` format by brute force, importing nothing of the package."""

import hashlib

import numpy as np
import torch

BLOCK = 256
DIGESTS = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
ZERO = {True: 127, False: 0}


def codebook(signed):
    """The 256 values of a code, float32, ascending; made in float32 as bitsandbytes makes them."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
        decade = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).numpy()
        values += [*decade, *(-decade if signed else [])]
    return np.sort(np.array(values)).astype(np.float32)


def digest(table):
    """SHA-256 of the table's little-endian float32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(table, "<f4").tobytes()).hexdigest()


def midpoints(signed):
    """The 255 midpoints between neighbours: exact in float64."""
    values = codebook(signed).astype(np.float64)
    return (values[:-1] + values[1:]) / 2


def nearest_by_argmin(x, signed):
    """The code nearest to each float64 in `x`, by comparing with all 256; a tie takes the lower."""
    distance = np.abs(np.asarray(x, np.float64)[..., None] - codebook(signed).astype(np.float64))
    return distance.argmin(-1).astype(np.uint8)  # argmin returns the first of equals


def nearest(x, signed):
    """The same by counting the midpoints below x: fast enough for millions of values."""
    return np.searchsorted(midpoints(signed), np.asarray(x, np.float64), side="left").astype(
        np.uint8
    )


# What an engine may round off, in units of 2**-24, half an ulp of 1. First relative to the number:
# 1 / absmax, the quotient (a whole ulp where it is rounded up), the slope (fitted to the codebook
# within 2.5 ulp), and its product where multiply and add are not fused.
OF_NUMBER = 1 + 2 + 5 + 1
# Then relative to the end of a decade, as the affine value is: the offset, the sum, the half added
# to round, how far the codebook, itself made in float32, lies off its line, and what is taken off
# so that the tie next to zero turns.
OF_DECADE = 0.5 + 1 + 1 + 1.5 + 0.5
# Triton's affine value is the code less 128: half an ulp is up to 2**-18 of a gap, in product and
# sum, and its lines miss a midpoint by up to 1e-5 of a gap. A line that only one midpoint fixes
# may be five times as flat.
OF_GAP = {"torch": 0.0, "numba": 0.0, "triton": 5 * (2 * 2.0**-18 + 1e-5)}


def rounding(signed, engine):
    """How far from each of the 255 midpoints an engine may still give the other code.

    Engines may differ only where float rounding puts a number on the other side of a
    midpoint. All divide by absmax and take an affine function of the quotient within a decade;
    this is the sum of what those operations may round off, relative to absmax.
    """
    values = codebook(signed).astype(np.float64)
    lower = np.minimum(np.abs(values[:-1]), np.abs(values[1:]))
    decade = 10.0 ** np.ceil(np.log10(np.maximum(lower, 1e-6)))
    number = OF_NUMBER * np.abs(midpoints(signed)) + OF_DECADE * decade
    return 2.0**-24 * number + OF_GAP[engine] * np.diff(values)


def other_codes(numel, encodings, engine):
    """How many of `numel` numbers an engine may give another code, after some encodings of each.

    A code may differ where the number, itself off by a few ulp, lies within `rounding` of a
    midpoint. Over so short a distance numbers are spread evenly; a code that differs may lead to
    others in later steps, so their shares add up. Allowed are four standard deviations, and two
    for the tail of a small mean.
    """
    shares = []
    for signed in (True, False):
        number = 8 * 2.0**-24 * np.abs(midpoints(signed))
        gap = np.diff(codebook(signed).astype(np.float64))
        shares.append(np.max(2 * (rounding(signed, engine) + number) / gap))
    mean = max(shares) * encodings * numel
    return mean + 4 * mean**0.5 + 2


def misplaced(x, signed, codes, expected, engine):
    """Indices of codes that rounding does not explain; x relative to absmax, all arrays flat."""
    codes, expected = codes.astype(int), expected.astype(int)
    differ = np.flatnonzero(codes != expected)
    x, codes, expected = (np.asarray(a)[differ] for a in (x, codes, expected))
    below = np.minimum(codes, expected)
    distance = np.abs(x.astype(np.float64) - midpoints(signed)[below])
    near = distance <= rounding(signed, engine)[below]
    return differ[~near | (np.abs(codes - expected) != 1)]


def layout(shape):
    """Shape of `absmax` for a tensor of `shape`: block rows, or blocks of the flattened tensor."""
    numel = int(np.prod(shape, dtype=np.int64))
    row = numel // shape[0] if shape and shape[0] else 0
    if len(shape) >= 2 and row >= 64:
        return (shape[0], -(-row // BLOCK))
    return (-(-numel // BLOCK),)


def _rows(x):
    """`x` as (rows, row length) of its layout: one row when blocks run over the flat tensor."""
    return x.reshape(x.shape[0], -1) if len(layout(x.shape)) == 2 else x.reshape(1, -1)


def block_index(shape):
    """For every element, the flat index of its block in `absmax`."""
    rows = _rows(np.zeros(shape))
    per_row = -(-rows.shape[1] // BLOCK)
    index = np.arange(rows.shape[0])[:, None] * per_row + np.arange(rows.shape[1])[None] // BLOCK
    return index.reshape(shape)


def encode(x, signed, find=nearest):
    """Codes in x's shape and float32 scales in its layout.

    Non-finite elements do not enter absmax and get the zero code; a zero block has absmax 0 and
    zero codes; a positive element of the unsigned map never gets code 0.
    """
    x = np.asarray(x)
    finite = np.isfinite(x)
    clean = np.where(finite, x, 0).astype(np.float64)
    absmax = _largest(np.abs(clean))
    codes = find(relative(x, absmax), signed)
    if not signed:
        codes = np.where((codes == 0) & (clean > 0), 1, codes)
    return codes.astype(np.uint8), absmax


def _largest(magnitude):
    """That of each block, in float32."""
    index = block_index(magnitude.shape)
    starts = np.flatnonzero(np.diff(index.ravel(), prepend=-1))  # blocks lie one after another
    found = np.maximum.reduceat(magnitude.ravel(), starts) if magnitude.size else np.zeros(0)
    return found.astype(np.float32).reshape(layout(magnitude.shape))


def dithered_scales(x):
    """Those of signed numbers that are dithered: no finite one lies below the lowest code.

    The factor is a float32 number; the product is of x's type, and at most the largest float32.
    """
    reach = np.float32(-1) / codebook(True)[0]
    clean = np.where(np.isfinite(x), x, 0)
    with np.errstate(over="ignore"):
        needed = np.where(clean < 0, clean * -reach, clean)
    return _largest(np.minimum(needed, np.finfo(np.float32).max))


def relative(x, absmax):
    """Every finite element over its block's scale, in float64; zero in a zero block."""
    x = np.asarray(x)
    scale = np.asarray(absmax, np.float64).ravel()[block_index(x.shape)]
    clean = np.where(np.isfinite(x), x, 0).astype(np.float64)
    return np.divide(clean, scale, out=np.zeros_like(clean), where=scale > 0)


def decode(codes, absmax, signed):
    """Float64 values of codes."""
    scale = np.asarray(absmax, np.float64).ravel()[block_index(codes.shape)]
    return np.asarray(codebook(signed).astype(np.float64)[codes] * scale)
