"""What the tests call identical is so to the bit, of numbers that are none as well."""

import pytest
import torch

from protocol import identical

MOST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("a", "b"),
    [([float("inf")], [MOST]), ([0.0], [-0.0]), ([float("nan")], [0.0]), ([1.0], [1.0, 1.0])],
)
def test_what_differs_is_not_identical(a, b):
    assert not identical(torch.tensor(a), torch.tensor(b))
    assert not identical({"a": [torch.tensor(b)]}, {"a": [torch.tensor(a)]})


@pytest.mark.parametrize(
    "a", [torch.tensor([float("nan"), 1.0, -0.0]), torch.tensor([1, 2]), torch.tensor(True), 0.5]
)
def test_a_copy_is_identical(a):
    assert identical([a], [a.clone() if isinstance(a, torch.Tensor) else a])
