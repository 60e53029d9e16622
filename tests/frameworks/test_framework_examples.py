"""The examples that need a framework run as a reader would run them; each asserts by itself."""

import subprocess
import sys

import pytest

from protocol import ENV
from test_examples import FOLDER, FRAMEWORKS


@pytest.mark.parametrize("script", sorted(FRAMEWORKS))
def test_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / script], env=ENV,
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout
