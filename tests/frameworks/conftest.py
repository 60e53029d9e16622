"""Tests that run other libraries' training loops; `make frameworks` installs what they need.

They are no part of the plain suite (`norecursedirs` in pyproject.toml).
"""

import importlib.util

import pytest
import torch

NEEDED = ("transformers", "accelerate", "lightning", "peft", "bitsandbytes")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header():
    """Why there may be nothing to run."""
    return f"frameworks not installed: {', '.join(MISSING)} (make frameworks)" if MISSING else []


@pytest.fixture(scope="session", autouse=True)
def two_threads():
    """One here: these models are tiny, and threads that wait for each other only slow them down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory():
    """Not here: torch.compile traces the functions that would be replaced."""


@pytest.fixture(autouse=True)
def without_overrides(manager):
    """The helpers and integrations make them, whether or not a test asks for the manager."""


@pytest.fixture(autouse=True)
def same_start():
    torch.manual_seed(0)
