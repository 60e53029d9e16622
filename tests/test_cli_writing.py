"""`lowbit-optim convert`: the file that it writes, whole or not at all."""

import errno
import os
import subprocess
import sys
import tempfile

import pytest

import lowbit_optim
from protocol import ENV
from test_cli_checkpoints import parameters, saved, stepped
from test_cli_estimate import refused

WRITTEN = ("--to", "torch")


@pytest.fixture
def run_file(tmp_path):
    """A checkpoint, whose state takes some 300 KB in 32 bits."""
    return saved(tmp_path / "run.pt", stepped(lowbit_optim.AdamW8bit, "AdamW", parameters()))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(run_file):
    resource = pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-m", "lowbit_optim_cli", "convert", run_file, "out.pt", *WRITTEN],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
        env=ENV, cwd=run_file.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    said = f"lowbit-optim: out.pt cannot be written: {os.strerror(errno.EFBIG)}"
    assert done.stderr.splitlines() == [said]
    assert list(run_file.parent.iterdir()) == [run_file]


def test_a_folder_that_cannot_be_written_is_told_by_the_name_of_out(run_file, monkeypatch):
    def no_folder(suffix=None, prefix=None, dir=None):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{dir}/tmp0123")

    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    out = run_file.with_name("out.pt")
    said = refused("convert", run_file, out, *WRITTEN)
    assert said == f"lowbit-optim: {out} cannot be written: {os.strerror(errno.EACCES)}"


def test_a_file_is_not_named_as_what_it_is_not(run_file):
    out = run_file.with_name("out.safetensors")
    assert "would be what torch.save writes" in refused("convert", run_file, out, *WRITTEN)
    assert not out.exists()


def test_a_link_to_nothing_is_not_replaced(run_file):
    link = run_file.with_name("out.pt")
    try:
        link.symlink_to(run_file.with_name("nothing.pt"))
    except OSError:
        pytest.skip("links cannot be made here")
    assert f"{link} exists" in refused("convert", run_file, link, *WRITTEN)
    assert link.is_symlink()


def test_an_interrupt_is_one_and_leaves_nothing(run_file):
    """In the middle of torch's zip file, whose writer raises an error of its own upon it."""
    script = f"""
import sys, torch
from lowbit_optim_cli import main

save = torch.save

class Interrupted:
    def __init__(self, file): self.file, self.written = file, 0
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        self.written += len(data)
        if self.written > 10_000: raise KeyboardInterrupt
        return self.file.write(data)

torch.save = lambda value, file: save(value, Interrupted(file))
sys.argv = ["lowbit-optim", "convert", {str(run_file)!r}, "out.pt", "--to", "torch"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENV, cwd=run_file.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "cannot be written" not in done.stderr
    assert list(run_file.parent.iterdir()) == [run_file]
