"""The folder of generated and compiled code: shared, found again, damaged, full, gone."""

import errno
import inspect
import linecache
import math
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache_scripts import MODES, STEP, VARIABLE, steps
from lowbit_optim_kernels.codegen import module_cache
from protocol import FORK, python

pytest.importorskip("numba")
import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock

from lowbit_optim_kernels.engines.numba import cache, modules
from lowbit_optim_kernels.engines.numba.memory import read_f64, write_f64

KILLS = "LOWBIT_OPTIM_TEST_KILLS"  # how many processes the stress test kills


def files_of(folder):
    """Every file below a folder with the time of its last change."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


# Filled, found again.


@pytest.fixture(scope="module")
def filled_at_once(tmp_path_factory):
    """A cache folder that two processes have filled at the same time, and what they counted."""
    folder = tmp_path_factory.mktemp("cache") / "made" / "on_demand"
    script = """
both = [start(first_step) for _ in range(2)]
print(json.dumps([finish(*each) for each in both]))
"""
    return folder, steps(script, **{VARIABLE: str(folder)})


@FORK
@pytest.mark.slow
def test_two_processes_may_fill_a_folder_at_once(filled_at_once):
    """Both write the same file names; neither sees the other's half-written file."""
    folder, counted = filled_at_once
    assert len({one["modules"] for one in counted}) == 1
    assert len({one["numbers"] for one in counted}) == 1
    assert max(len(one["misses"]) for one in counted) > 0
    assert not any(one["warnings"] for one in counted)
    assert any(name.endswith(".code") for name in files_of(folder))
    assert not list(folder.glob("*.tmp"))


@FORK
def test_a_later_process_compiles_nothing(filled_at_once):
    folder, counted = filled_at_once
    before = files_of(folder)
    later = steps("print(json.dumps(first_step()))", **{VARIABLE: str(folder)})
    assert later["modules"] >= 2
    assert later["hits"]
    assert not later["misses"]
    assert later["numbers"] == counted[0]["numbers"]
    assert files_of(folder) == before


@FORK
@MODES
def test_what_is_made_is_for_this_user_only(filled_at_once):
    folder, _ = filled_at_once
    for path in (folder.parent, folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


@FORK
def test_the_text_of_a_module_can_be_read_in_the_folder(filled_at_once):
    folder, _ = filled_at_once
    texts = [path.read_text() for path in folder.glob("*.py")]
    assert len(texts) >= 2
    assert any("def update_share(" in text for text in texts)
    assert not (folder / "__pycache__").exists(), "Python's own compiled files are not checked"


def test_nothing_is_generated_before_the_first_step(tmp_path):
    folder = tmp_path / "cache"
    python(STEP, LOWBIT_OPTIM_CACHE_DIR=str(folder))
    assert not folder.exists()


@FORK
@pytest.mark.slow
def test_functions_of_one_name_are_not_mixed_up(tmp_path):
    """Two processes name what they compile by counters; a third one loads what both have kept."""
    script = """
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from lowbit_optim_kernels.codegen import module_cache
from lowbit_optim_kernels.engines.numba import cache as numba_cache
from lowbit_optim_kernels.engines.numba.memory import write_f64

@global_compiler_lock
def keep(number):
    def f(job):
        write_f64(job, number)

    numba_cache._compiled(f, str(number))

for number in (1.0, 2.0):
    in_a_fork(keep, number)
kept = [module_cache.load(str(number)) for number in (1.0, 2.0)]
linked, out = [numba_cache._linked(one) for one in kept], np.zeros(2)
for k, (address, owner) in enumerate(linked):
    numba_cache.CFunction("f", address, owner).ctypes(out[k:].ctypes.data)
heads = [one[: one.index(0)].split()[0] for one in kept]
print(json.dumps([len(set(heads)), out.tolist()]))
"""
    symbols, answers = steps(script, **{VARIABLE: str(tmp_path)})
    assert symbols == 1
    assert answers == [1.0, 2.0]


def test_what_code_needs_of_its_process_is_kept_with_it(monkeypatch):
    """As that of a format of one's own may; a later process may not have it."""
    kept = []
    monkeypatch.setattr(module_cache, "store", lambda key, data: kept.append(data))

    def fraction(job):
        write_f64(job, math.frexp(read_f64(job))[0])

    with global_compiler_lock:
        cache._compiled(fraction, "key")
    assert b"numba_frexp" in kept[0].partition(b"\0")[0].split()


@pytest.mark.slow
def test_code_that_needs_what_is_not_there_is_compiled():
    """LLVM would end the process that links it."""
    script = """
from lowbit_optim_kernels.engines.numba import cache as numba_cache
print(json.dumps(numba_cache._linked(b"symbol memcpy no_such_function\\0code")))
"""
    assert steps(script) is None


# Damaged, or written in halves.


@FORK
@pytest.mark.slow
def test_damaged_files_are_made_again(tmp_path):
    """Empty, cut, one bit changed, longer, gone, another function's: never wrong, never fatal."""
    script = f"""
import shutil
good, results = {str(tmp_path / "good")!r}, {{}}
fresh = in_a_fork(first_step, {VARIABLE}=good)
for suffix in (".py", ".code"):
    for how in DAMAGES:
        folder = {str(tmp_path)!r} + "/" + how + suffix
        shutil.copytree(good, folder)
        damaged = damage(folder, suffix, how)
        runs = [in_a_fork(first_step, {VARIABLE}=folder) for _ in range(2)]
        results[how + suffix] = [damaged, *runs]
folder = {str(tmp_path / "exchanged.code")!r}
shutil.copytree(good, folder)
exchange(folder)
runs = [in_a_fork(first_step, {VARIABLE}=folder) for _ in range(2)]
results["exchanged.code"] = [2, *runs]
print(json.dumps([fresh, results]))
"""
    fresh, results = steps(script)
    assert len(fresh["misses"]) >= 2
    assert len(results) == 13
    for name, (damaged, first, second) in results.items():
        assert damaged >= 2, name
        assert first["numbers"] == second["numbers"] == fresh["numbers"], name
        assert not first["warnings"], name
        assert sorted(first["misses"]) == (sorted(fresh["misses"]) if "code" in name else []), name
        assert not second["misses"], f"{name} was not written again"
    texts = {p.name: p.read_bytes() for p in (tmp_path / "good").glob("*.py")}
    for name in results:
        again = {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.py")}
        assert again == texts, name


@pytest.mark.slow
@FORK
def test_a_file_that_is_no_plain_file_of_this_user_is_not_read(tmp_path):
    """A link, a FIFO (opening one waits for a writer) and a file that others can write."""
    script = f"""
import os, shutil
good, results = {str(tmp_path / "good")!r}, []
in_a_fork(first_step, {VARIABLE}=good)
for name in ("link", "fifo", "mode"):
    folder = Path({str(tmp_path)!r}) / name
    shutil.copytree(good, folder)
    os.environ["{VARIABLE}"] = str(folder)
    for path in folder.glob("*.code"):
        if name == "mode":
            path.chmod(0o666)
        else:
            moved = path.rename(folder / (path.name + ".moved"))
            os.mkfifo(path) if name == "fifo" else path.symlink_to(moved)
    results += [in_a_fork(first_step), in_a_fork(first_step)]
print(json.dumps([[len(r["misses"]), r["warnings"]] for r in results]))
"""
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs FIFOs")
    assert steps(script) == [[3, []], [0, []]] * 3


def test_files_left_behind_by_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module_cache, "cache_folder", lambda: tmp_path)
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (1.0, 1.0))
    module_cache.store("name", b"data")
    assert module_cache.load("name") == b"data"
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


@FORK
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_processes_killed_while_they_compile(tmp_path):
    """At any moment, or at one of their file operations: the next process is none the worse."""
    count = int(os.environ.get(KILLS, "10"))
    script = f"print(json.dumps(killed({str(tmp_path)!r}, {count}, seed=9)))"
    result = steps(script, timeout=3500)
    assert result["killed"] >= count
    assert len(result["numbers"]) == 1
    assert not result["warnings"]


# Full, gone.


@FORK
@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """Steps go on with the code in memory, all of them count, and one warning says why."""
    script = f"""
def two(limit=None):
    if limit is not None:
        cut_writes(limit)
    return [first_step(), first_step("Lion32bit")]

folder = {str(tmp_path)!r} + "/cache"
print(json.dumps([in_a_fork(two, n, {VARIABLE}=folder + str(n)) for n in (None, 0, 1_999)]))
"""
    elsewhere, *full = steps(script)
    for limit, (first, second) in zip((0, 1_999), full, strict=True):
        folder = tmp_path / f"cache{limit}"
        assert [first["numbers"], second["numbers"]] == [one["numbers"] for one in elsewhere]
        (warning,) = first["warnings"]
        assert f"compiled code cannot be kept in {folder}" in warning
        assert "File too large" in warning
        assert not second["warnings"]
        assert all(path.suffix == ".py" for path in folder.iterdir()), "nothing half-written"
        assert any(folder.iterdir()) == bool(limit)


@pytest.mark.slow
@FORK
def test_a_folder_that_vanishes(tmp_path):
    """Between two optimizers' first steps; a third one is not warned of it again."""
    script = f"""
import shutil

def vanishing():
    first = first_step()
    shutil.rmtree({str(tmp_path / "cache")!r})
    return [first, first_step("Lion32bit"), first_step("Adagrad32bit")]

print(json.dumps([one["warnings"] for one in in_a_fork(vanishing)]))
"""
    first, second, third = steps(script, **{VARIABLE: str(tmp_path / "cache")})
    assert not first
    (warning,) = second
    assert f"compiled code cannot be kept in {tmp_path / 'cache'} ([Errno 2]" in warning
    assert not third


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """What it has is used; what is new is not kept, which is said once."""
    monkeypatch.setattr(module_cache, "_warned", set())
    monkeypatch.setattr(module_cache, "cache_folder", lambda: tmp_path)
    module_cache.store("old", b"data")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.warns(RuntimeWarning, match=f"cannot be kept in {tmp_path} .*Read-only"):
        module_cache.store("new", b"data")
    module_cache.store("newer", b"data")
    assert module_cache.load("old") == b"data"
    assert module_cache.load("new") is None


@MODES
@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_what_inspect_gives_a_compiler_is_the_text_that_ran(tmp_path, monkeypatch, how):
    """Whatever the file for readers has come to hold."""
    monkeypatch.setattr(module_cache, "cache_folder", lambda: tmp_path)
    text = f"def answer():\n    return 42  # {how}\n"
    module = module_cache.import_source("test", text, ())
    (path,) = tmp_path.glob("*.py")
    assert path.read_text() == text
    path.write_text("def answer():\n    return 43\n") if how == "damaged" else path.unlink()
    assert module.answer() == 42
    linecache.checkcache()
    assert inspect.getsource(module.answer) == text
    assert module_cache.import_source("test", text, ()) is module
    del sys.modules[module.__name__]
    assert module_cache.import_source("test", text, ()).answer() == 42
    assert path.read_text() == text
    del sys.modules[module.__name__]


def test_code_for_another_processor_is_not_looked_for(monkeypatch):
    """A folder that several machines share has it too, and it would end the process."""
    sought, module = [], SimpleNamespace(__name__="generated", share=None)
    monkeypatch.setattr(cache, "_made", {})
    monkeypatch.setattr(cache, "_compiled", lambda function, key: (1, None))
    monkeypatch.setattr(module_cache, "load", sought.append)
    for processor in ("one", "another", "one"):
        monkeypatch.setattr(cache, "processor", lambda name=processor: name)
        cache.c_function(module, "share")
    assert len(sought) == len(set(sought)) == 2


def test_code_of_another_compiler_is_not_looked_for(monkeypatch):
    named = {modules.depends.__wrapped__()}
    for package in (numba, llvmlite, np):
        with monkeypatch.context() as patch:
            patch.setattr(package, "__version__", "another")
            named.add(modules.depends.__wrapped__())
    assert len(named) == 4


def test_a_processor_is_what_numba_is_told_to_compile_for(monkeypatch):
    """Code with instructions that another process was told to leave is not for this one."""
    named = set()
    for name in ("haswell", "skylake-avx512", None):
        for features in ("+avx2", "+avx2,+avx512f", None):
            monkeypatch.setattr(config, "CPU_NAME", name)
            monkeypatch.setattr(config, "CPU_FEATURES", features)
            named.add(cache.processor.__wrapped__())
    assert len(named) == 9


def test_a_module_that_cannot_be_run_yet_is_run_again(tmp_path, monkeypatch):
    """Else a later step would find the half of it that had been there when it failed."""
    monkeypatch.setattr(module_cache, "cache_folder", lambda: tmp_path)
    text = "half = True\nfrom missing_in_a_test import answer\n"
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(ImportError):
            module_cache.import_source("test", text, ())
    assert set(sys.modules) == before
    monkeypatch.setitem(sys.modules, "missing_in_a_test", SimpleNamespace(answer=42))
    module = module_cache.import_source("test", text, ())
    assert module.answer == 42
    del sys.modules[module.__name__]


def test_another_python_or_another_helper_has_modules_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(module_cache, "cache_folder", lambda: tmp_path)
    names = []
    for version, depends in (("3.11", ()), ("3.12", ()), ("3.12", ("x",)), ("3.12", ("y",))):
        monkeypatch.setattr(sys, "version", version)
        names.append(module_cache.import_source("test", "", depends).__name__)
        del sys.modules[names[-1]]
    assert len(set(names)) == 4
