"""The slopes of LearnedGradient's gain: by finite differences, by autograd, and as a direction."""

import pytest
import torch

import cases
from lowbit_optim._rate_matrices import accumulate, learn, multiply, slopes

LETTERS = "abcd"


def example(shape, dims, seed=0):
    """Gradient, moment, matrices near the identity and covariances, float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rates, covariances = {}, {}
    for dim in dims:
        size = shape[dim]
        noise = 0.3 * randn(size, size)
        rates[dim] = torch.eye(size, dtype=torch.float64) + noise + noise.T
        rows = randn(2 * size, size)
        covariances[dim] = rows.T @ rows
    return randn(*shape), randn(*shape), rates, covariances


def by_einsum(x, matrices):
    """x multiplied by all matrices, written out in indices."""
    letters = LETTERS[: x.ndim]
    for dim, matrix in matrices.items():
        x = torch.einsum(
            f"{letters},z{letters[dim]}->{letters.replace(letters[dim], 'z')}", x, matrix
        )
    return x


def gain(g, m, rates, covariances):
    """As LearnedGradient's docstring: sum(g d) / sqrt(mean((Π C_d / mean diag C) d ∘ d))."""
    d = by_einsum(m, rates)
    scaled = {dim: c / (c.diagonal().mean() + 1e-20) for dim, c in covariances.items()}
    return (g * d).sum() / (by_einsum(d, scaled) * d).mean().sqrt()


EXAMPLES = pytest.mark.parametrize(
    ("shape", "dims"),
    [((4, 3), (0, 1)), ((4, 3), (1,)), ((2, 3, 4), (0, 1, 2)), ((2, 1, 3, 2), (0, 2, 3))],
)


@EXAMPLES
def test_slopes_equal_finite_differences(shape, dims):
    g, m, rates, covariances = example(shape, dims)
    found, _ = slopes(g, m, rates, covariances)
    for dim in dims:
        for i, j in ((0, 0), (0, 1), (1, 0), (shape[dim] - 1, 1)):
            ends = []
            for h in (1e-5, -1e-5):
                moved = {k: matrix.clone() for k, matrix in rates.items()}
                moved[dim][i, j] += h
                ends.append(gain(g, m, moved, covariances))
            assert float(found[dim][i, j]) == pytest.approx(
                float(ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8
            )


@EXAMPLES
def test_slopes_equal_autograd(shape, dims):
    g, m, rates, covariances = example(shape, dims)
    leaves = {dim: matrix.clone().requires_grad_() for dim, matrix in rates.items()}
    want = torch.autograd.grad(gain(g, m, leaves, covariances), list(leaves.values()))
    found, _ = slopes(g, m, rates, covariances)
    for dim, slope in zip(leaves, want, strict=True):
        assert cases.distance(found[dim], slope) < 1e-12


@EXAMPLES
def test_the_gain_does_not_know_the_size_of_a_matrix_or_of_m(shape, dims):
    g, m, rates, covariances = example(shape, dims)
    found, _ = slopes(g, m, rates, covariances)
    other, _ = slopes(g, 1e-30 * m, rates, covariances)
    for dim in dims:
        assert abs(float((found[dim] * rates[dim]).sum())) < 1e-12 * float(found[dim].norm())
        assert cases.distance(other[dim], found[dim]) < 1e-12


@EXAMPLES
def test_learning_raises_the_gain(shape, dims):
    g, m, rates, covariances = example(shape, dims)
    before = gain(g, m, rates, covariances)
    learn(g, m, rates, covariances, 0.01)
    assert gain(g, m, rates, covariances) > before


def test_multiply_is_along_its_dimension():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for dim in range(3):
        matrix = torch.randn(x.shape[dim], x.shape[dim], dtype=torch.float64)
        assert cases.distance(multiply(x, matrix, dim), by_einsum(x, {dim: matrix})) < 1e-14


def test_matrices_that_cannot_be_learned_keep_their_values():
    g, m, rates, covariances = example((4, 3), (0, 1))
    before = {dim: matrix.clone() for dim, matrix in rates.items()}
    learn(g, torch.zeros_like(m), rates, covariances, 0.1)  # no direction yet
    learn(g, m, rates, covariances, float("inf"))
    for dim, matrix in rates.items():
        assert torch.equal(matrix, before[dim])


def test_a_covariance_that_would_overflow_keeps_its_values():
    covariances = {0: torch.eye(4), 1: torch.eye(3)}
    accumulate(torch.full((4, 3), 1.8e19), covariances, 0.9)
    for matrix in covariances.values():
        assert torch.equal(matrix, torch.eye(len(matrix)))
    accumulate(torch.ones(4, 3), covariances, 0.5)
    assert torch.equal(covariances[0], 0.5 * torch.eye(4) + 3)
