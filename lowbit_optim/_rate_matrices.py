"""The matrix mathematics of LearnedGradient: a learning-rate matrix for each dimension of a tensor.

Here d = Π L m is a tensor m multiplied by a matrix on every dimension that has one. The matrices
are dicts from dimension to square tensor; dimensions without one are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import TINY

from ._eager import rms

DIVIDES = 1e-20  # added to an rms or a mean diagonal that divides

Matrices = Mapping[int, Tensor]


def multiply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Multiply x by a matrix on one dimension: y[.. i ..] = sum_j matrix[i, j] x[.. j ..]."""
    return (x.movedim(dim, -1) @ matrix.mT).movedim(-1, dim)


def multiply_all(x: Tensor, matrices: Matrices) -> Tensor:
    """Multiply x by a matrix on each dimension that has one."""
    for dim, matrix in matrices.items():
        x = multiply(x, matrix, dim)
    return x


def unfold(x: Tensor, dim: int) -> Tensor:
    """View x as a matrix of shape (the rest, x.shape[dim])."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def symmetric(x: Tensor) -> Tensor:
    """The symmetric part of a matrix."""
    return (x + x.mT) / 2


def _over_mean_diagonal(x: Tensor) -> Tensor:
    return x / (x.diagonal().mean() + DIVIDES)


def accumulate(g: Tensor, covariances: Matrices, beta2: float) -> None:
    """C_d = beta2 C_d + G_d^T G_d in place, G_d being g unfolded; g is finite.

    A matrix that would overflow keeps its values.
    """
    for dim, covariance in covariances.items():
        rows = unfold(g, dim)
        new = beta2 * covariance + rows.mT @ rows
        covariance.copy_(torch.where(new.isfinite().all(), new, covariance))


def slopes(
    g: Tensor, m: Tensor, rates: Matrices, covariances: Matrices
) -> tuple[dict[int, Tensor], Tensor]:
    """Slopes of the gain of a step along d = Π L m, by every matrix L.

    The gain is ℓ = Σ g·d / √q with q = mean((Π Ĉ d) ∘ d), Ĉ = C / mean diag C: the step's size is
    measured by the gradients' covariance, so that scaling L changes nothing. With n elements,

        ∂ℓ/∂d = W = g / √q - (Σ g·d) (Π Ĉ d) / (n q^(3/2))

    and ∂ℓ/∂L_k is W, taken back through the matrices after L_k, times m taken through those before.

    Args:
        g: gradient.
        m: the moment that d is made of; g's shape.
        rates: the matrices L.
        covariances: the symmetric matrices C, of the same dimensions.

    Returns:
        (slopes by dimension, q up to a positive factor); where q is not positive the slopes mean
        nothing.
    """
    # ℓ does not depend on the size of m, whose squares could underflow.
    d, before = m / (m.abs().amax() + TINY), {}
    for dim, matrix in rates.items():
        before[dim] = d
        d = multiply(d, matrix, dim)
    whitened = multiply_all(d, {k: _over_mean_diagonal(c) for k, c in covariances.items()})
    q = (whitened * d).mean()
    root = q.sqrt()
    w = g / root - whitened * ((g * d).sum() / (d.numel() * q * root))
    out = {}
    for dim, matrix in reversed(list(rates.items())):
        out[dim] = unfold(w, dim).mT @ unfold(before[dim], dim)
        w = multiply(w, matrix.mT, dim)
    return out, q


def learn(
    g: Tensor, m: Tensor, rates: Matrices, covariances: Matrices, meta_lr: float | Tensor
) -> None:
    """Move every learning-rate matrix L along its slope H, in place.

        B = sym(H) L ;  B *= meta_lr / rms(B) ;  A = I + meta_lr B
        L = A L A^T ;  L = sym(L) / mean diag L

    L stays positive definite, its mean diagonal 1. A matrix keeps its values where d = 0, which
    says nothing about rates, and where the result is not finite.

    Args:
        g: gradient, finite.
        m: the moment of the step before.
        rates: the matrices L; written.
        covariances: the matrices C.
        meta_lr: the matrices' learning rate.
    """
    by_dim, q = slopes(g, m, rates, covariances)
    for dim, matrix in rates.items():
        b = symmetric(by_dim[dim]) @ matrix
        b = b * (meta_lr / (rms(b) + DIVIDES))
        a = torch.eye(len(b), dtype=b.dtype, device=b.device) + meta_lr * b
        new = _over_mean_diagonal(symmetric(a @ matrix @ a.mT))
        matrix.copy_(torch.where((q > 0) & new.isfinite().all(), new, matrix))
