"""The folder of generated and compiled code: found, shared, damaged, full, not private, gone."""

import concurrent.futures
import errno
import inspect
import json
import linecache
import os
import sys
import tempfile
from pathlib import Path

import pytest

from lowbit_optim_kernels import module_cache, private_folder
from protocol import python

pytest.importorskip("numba")

VARIABLE = module_cache.CACHE_VARIABLE
KILLS = "LOWBIT_OPTIM_TEST_KILLS"  # how many processes the stress test kills
MODES = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX modes and owners")
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away"
)

# A step of a parameter of 5000 elements, for scripts that run in a process of their own.
STEP = """
import torch, lowbit_optim
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = lowbit_optim.AdamW8bit([p], lr=0.1)
"""
FOLDER = "from lowbit_optim_kernels import module_cache; print(module_cache.cache_folder())"
FIRST_STEP = """
import json
from first_steps import *
"""


def steps(script, **environment):
    """What a script with `first_steps` prints, read as JSON."""
    return json.loads(python(FIRST_STEP + script, timeout=280, **environment))


def files_of(folder):
    """Every file below a folder with the time of its last change."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Chooses a folder anew, for a process with a home and a temporary folder of its own."""
    monkeypatch.setattr(module_cache, "_warned", set())
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return module_cache.cache_folder.__wrapped__


def give_away(monkeypatch, path):
    """Let it look as if a file or folder belonged to somebody else."""
    real = os.lstat(path)

    def claimed(info):
        same = (info.st_dev, info.st_ino) == (real.st_dev, real.st_ino)
        return not same and info.st_uid in (private_folder.ROOT, os.getuid())

    monkeypatch.setattr(private_folder, "_is_ours", claimed)


# Filled, found again.


@pytest.fixture(scope="module")
def filled_at_once(tmp_path_factory):
    """A cache folder that two processes have filled at the same time, and what they counted."""
    folder = tmp_path_factory.mktemp("cache") / "made" / "on_demand"
    script = "print(json.dumps(first_step()))"

    def run(_):
        return steps(script, **{VARIABLE: str(folder)})

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return folder, list(pool.map(run, range(2)))


def test_two_processes_may_fill_a_folder_at_once(filled_at_once):
    """Both write the same file names; neither sees the other's half-written file."""
    folder, counted = filled_at_once
    assert len({one["modules"] for one in counted}) == 1
    assert len({one["numbers"] for one in counted}) == 1
    assert max(len(one["misses"]) for one in counted) > 0
    assert not any(one["warnings"] for one in counted)
    assert any(name.endswith(".code") for name in files_of(folder))
    assert not list(folder.glob("*.tmp"))


def test_a_later_process_compiles_nothing(filled_at_once):
    folder, counted = filled_at_once
    before = files_of(folder)
    later = steps("print(json.dumps(first_step()))", **{VARIABLE: str(folder)})
    assert later["modules"] >= 2
    assert later["hits"]
    assert not later["misses"]
    assert later["numbers"] == counted[0]["numbers"]
    assert files_of(folder) == before


@MODES
def test_what_is_made_is_for_this_user_only(filled_at_once):
    folder, _ = filled_at_once
    for path in (folder.parent, folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_text_of_a_module_can_be_read_in_the_folder(filled_at_once):
    folder, _ = filled_at_once
    texts = [path.read_text() for path in folder.glob("*.py")]
    assert len(texts) >= 2
    assert any("def update(" in text for text in texts)
    assert not (folder / "__pycache__").exists(), "Python's own compiled files are not checked"


def test_nothing_is_generated_before_the_first_step(tmp_path):
    folder = tmp_path / "cache"
    python(STEP, LOWBIT_OPTIM_CACHE_DIR=str(folder))
    assert not folder.exists()


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


@FORK
def test_a_file_that_is_no_plain_file_of_this_user_is_not_read(tmp_path):
    """A link, a FIFO (opening one waits for a writer) and a file that others can write."""
    script = f"""
import os
results = []
for name in ("link", "fifo", "mode"):
    folder = Path({str(tmp_path)!r}) / name
    os.environ["{VARIABLE}"] = str(folder)
    in_a_fork(first_step)
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
    assert steps(script) == [[2, []], [0, []]] * 3


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
    result = json.loads(python(FIRST_STEP + script, timeout=3500))
    assert result["killed"] >= count // 2
    assert len(result["numbers"]) == 1
    assert not result["warnings"]


# Full, gone.


@FORK
def test_a_full_disk(tmp_path):
    """Steps go on with the code in memory, all of them count, and one warning says why."""
    script = f"""
def two(limit=None):
    if limit is not None:
        cut_writes(limit)
    return [first_step(), first_step("Lion32bit")]

folder = {str(tmp_path)!r} + "/cache"
print(json.dumps([in_a_fork(two, n, {VARIABLE}=folder + str(n)) for n in (None, 0, 9_999)]))
"""
    elsewhere, *full = steps(script)
    for limit, (first, second) in zip((0, 9_999), full, strict=True):
        folder = tmp_path / f"cache{limit}"
        assert [first["numbers"], second["numbers"]] == [one["numbers"] for one in elsewhere]
        (warning,) = first["warnings"]
        assert f"compiled code cannot be kept in {folder}" in warning
        assert "File too large" in warning
        assert not second["warnings"]
        assert all(path.suffix == ".py" for path in folder.iterdir()), "nothing half-written"
        assert any(folder.iterdir()) == bool(limit)


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


# Which folder, and whom it is trusted to.


def test_the_default_folder(tmp_path):
    none = {VARIABLE: None}
    found = python(FOLDER, **none, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert Path(found) == tmp_path / "cache" / "lowbit_optim"
    for other in (None, "", "not/absolute"):
        found = python(FOLDER, **none, XDG_CACHE_HOME=other, HOME=str(tmp_path))
        assert Path(found) == tmp_path / ".cache" / "lowbit_optim"


def test_a_home_that_cannot_be_written(home, tmp_path, recwarn):
    """Then a private folder of the system's temporary directory, without a word."""
    (tmp_path / "home").write_text("")
    folder = home()
    assert folder.parent == tmp_path / "tmp"
    assert folder.stat().st_mode & 0o077 == 0
    assert home() == folder
    assert not recwarn


def test_neither_a_home_nor_a_temporary_folder(home, tmp_path, monkeypatch):
    """A user without a home, on a system that cannot be written: all in memory, and said so."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    def full():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.warns(RuntimeWarning, match="is not kept, and every process compiles its own"):
        assert home() is None
    assert home() is None


@MODES
def test_a_temporary_folder_that_others_can_write(home, tmp_path):
    (tmp_path / "home").write_text("")
    home().chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"other users can write to .*\(mode 777\)"):
        assert home() is None


def test_a_folder_that_was_asked_for_and_cannot_be_made(home, tmp_path, monkeypatch):
    """A warning names it and says what is used instead."""
    (tmp_path / "file").write_text("")
    asked = tmp_path / "file" / "below"
    monkeypatch.setenv(VARIABLE, str(asked))
    used = tmp_path / "home" / ".cache" / "lowbit_optim"
    with pytest.warns(RuntimeWarning, match=f"{VARIABLE}={asked} is not used .*kept in {used}"):
        assert home() == used


@MODES
@pytest.mark.parametrize("variable", [VARIABLE, "XDG_CACHE_HOME"])
@pytest.mark.parametrize("where", [".", ".."])
def test_a_folder_that_others_can_write_is_not_used(home, tmp_path, monkeypatch, variable, where):
    """Nor one below such a folder, whose owner it may not keep."""
    base = tmp_path / "shared" / "base"
    inside = base if variable == VARIABLE else base / "lowbit_optim"
    inside.mkdir(parents=True)
    (inside / where).resolve().chmod(0o777)
    monkeypatch.setenv(variable, str(base))
    with pytest.warns(RuntimeWarning, match="other users can write to") as caught:
        chosen = home()
    assert len(caught) == 1
    assert tmp_path / "shared" not in chosen.parents
    assert str(chosen) in str(caught[0].message)
    assert home() == chosen, "and no second warning"


@MODES
def test_modes_on_the_way(tmp_path, monkeypatch):
    below = tmp_path / "above" / "folder"
    below.mkdir(parents=True)
    for mode in (0o700, 0o755, 0o1777, 0o1775):
        below.parent.chmod(mode)
        assert private_folder.private_folder(below) == below
    for mode in (0o777, 0o770, 0o702):
        below.parent.chmod(mode)
        with pytest.raises(private_folder.NotPrivateError, match=f"{below.parent} .mode {mode:o}"):
            private_folder.private_folder(below)
    below.parent.chmod(0o700)
    below.chmod(0o1777)  # sticky: but others can add files to it
    with pytest.raises(private_folder.NotPrivateError, match="mode 1777"):
        private_folder.private_folder(below)
    below.chmod(0o770)
    monkeypatch.setattr(private_folder, "_is_own_group", lambda number: True)
    assert private_folder.private_folder(below) == below, "a group of this user alone"


@MODES
@pytest.mark.parametrize(
    ("uid", "number", "name", "members", "own"),
    [
        (1000, 1000, "ada", [], True),
        (1000, 1000, "ada", ["ada"], True),
        (1000, 1000, "ada", ["ada", "bob"], False),
        (1000, 1000, "users", [], False),
        (1000, 100, "ada", [], False),
        (0, 0, "root", [], False),
    ],
)
def test_a_group_of_one_user(monkeypatch, uid, number, name, members, own):
    import grp
    import pwd
    from types import SimpleNamespace as Entry

    user = Entry(pw_uid=uid, pw_gid=uid, pw_name="ada" if uid else "root")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: Entry(gr_name=name, gr_mem=members))
    assert private_folder._is_own_group(number) is own

    def nameless(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    assert private_folder._is_own_group(number) is False


@MODES
@pytest.mark.parametrize("kind", ["folder", "above", "link", "file"])
def test_what_belongs_to_somebody_else_is_not_used(tmp_path, monkeypatch, kind):
    """A link that somebody planted in the temporary folder is seen as the link that it is."""
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    given = {
        "folder": folder,
        "above": folder.parent,
        "link": tmp_path / "link",
        "file": folder / "file",
    }[kind]
    (tmp_path / "link").symlink_to(folder)
    private_folder.write_private(folder / "file", b"data")
    asked = tmp_path / "link" if kind == "link" else folder
    assert private_folder.private_folder(asked) == folder
    assert private_folder.read_private(folder / "file") == b"data"
    give_away(monkeypatch, given)
    if kind == "file":
        assert private_folder.read_private(given) is None
        return
    with pytest.raises(private_folder.NotPrivateError, match=f"{given} belongs to another user"):
        private_folder.private_folder(asked)


@FORK
@MODES
def test_planted_code_does_not_run(tmp_path):
    """Neither text nor pickles, under any of the names that are looked for."""
    marker, folder, home = tmp_path / "ran", tmp_path / "shared", tmp_path / "home"
    home.mkdir()
    script = f"""
import os, pickle
from lowbit_optim_kernels.module_cache import _digest
folder, marker = Path({str(folder)!r}), {str(marker)!r}

class Planted:
    def __reduce__(self):
        return os.mkdir, (marker,)

results = [in_a_fork(first_step)]
for path in list(folder.glob("*.code")):
    data = pickle.dumps(Planted())
    path.write_bytes(_digest(path.stem, data) + data)
for path in list(folder.glob("*.py")):
    path.write_text(f"import os; os.mkdir({str(marker)!r})")
folder.chmod(0o777)
results.append(in_a_fork(first_step))
folder.chmod(0o700)
assert not os.path.exists(marker)
for path in list(folder.glob("*.code")):
    path.unlink()
results.append(in_a_fork(first_step))
print(json.dumps(results))
"""
    settings = {VARIABLE: str(folder), "HOME": str(home), "XDG_CACHE_HOME": None}
    before, planted, after = steps(script, **settings)
    assert not marker.exists()
    assert before["numbers"] == planted["numbers"] == after["numbers"]
    (warning,) = planted["warnings"]
    assert f"{VARIABLE}={folder} is not used (other users can write to {folder}" in warning
    assert str(home / ".cache" / "lowbit_optim") in warning


@AS_ROOT
def test_users_of_a_container():
    """Root with another user's home; a user without a name or a home, whose cache root has made."""
    with tempfile.TemporaryDirectory() as reached_by_all:
        os.chmod(reached_by_all, 0o711)
        check_users_of_a_container(Path(reached_by_all))


def check_users_of_a_container(top):
    script = f"""
import os
top, made = Path({str(top)!r}), {str(top / "made")!r}
first = in_a_fork(first_step, {VARIABLE}=made)
for name in ("home", "tmp"):
    (top / name).mkdir()
os.chown(top / "home", 54321, 54321)
(top / "tmp").chmod(0o1777)
places = {{"HOME": str(top / "home"), "TMPDIR": str(top / "tmp")}}
mounted = in_a_fork(first_step, {VARIABLE}="", XDG_CACHE_HOME="", **places)

def as_a_number():
    os.setuid(65432)
    return first_step()

os.chmod(made, 0o755)
for path in Path(made).iterdir():
    path.chmod(0o644)
prebuilt = in_a_fork(as_a_number, {VARIABLE}=made)
alone = in_a_fork(as_a_number, {VARIABLE}="", XDG_CACHE_HOME="", **places)
print(json.dumps([first, mounted, prebuilt, alone]))
"""
    first, mounted, prebuilt, alone = steps(script)
    assert len({one["numbers"] for one in (first, mounted, prebuilt, alone)}) == 1
    (warning,) = mounted["warnings"]
    assert f"{top / 'home'} belongs to another user (number 54321)" in warning
    assert (top / "tmp" / "lowbit_optim_0").is_dir()
    assert not prebuilt["misses"]
    assert not prebuilt["warnings"]
    assert (top / "tmp" / "lowbit_optim_65432").is_dir()


def test_where_warnings_are_errors_the_second_step_runs(tmp_path):
    """The first one ends before it changes a parameter; none is counted that did not move."""
    (tmp_path / "file").write_text("")
    script = f"""{STEP}
try:
    optimizer.step()
except RuntimeWarning as error:
    print(error)
assert torch.equal(p, torch.ones(5000))
optimizer.step()
assert not torch.equal(p, torch.ones(5000))
assert float(optimizer.state[p]["step"]) == 1.0
"""
    message = python(script, LOWBIT_OPTIM_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert "file/below is not used" in message


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_without_any_folder(name, tmp_path):
    """Both compilers work from the text in memory, which tracebacks and inspect show too."""
    if name == "triton":
        pytest.importorskip("triton")
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "below")
    script = f"""
import inspect, os, sys, tempfile, warnings
{STEP}
tempfile.tempdir = os.environ["HOME"] = {nowhere!r}  # not before: torch wants a folder too
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with lowbit_optim.use_engine({name!r}):
        optimizer.step()
        optimizer.step()
assert len(caught) == 1, caught
assert float(optimizer.state[p]["step"]) == 2.0
generated = [m for n, m in sys.modules.items() if n.startswith("lowbit_optim_generated")]
assert generated
for module in generated:
    assert "def " in inspect.getsource(module)
q = torch.nn.Parameter(torch.ones(5000))
q.grad = torch.ones(5000)
reference = lowbit_optim.AdamW8bit([q], lr=0.1)
with lowbit_optim.use_engine("torch"):
    reference.step()
    reference.step()
torch.testing.assert_close(p, q)
print(caught[0].message)
"""
    message = python(script, TRITON_INTERPRET="1", **{VARIABLE: nowhere})
    assert nowhere in message
    assert "every process compiles its own" in message


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
    del sys.modules[module.__name__]
    assert module_cache.import_source("test", text, ()).answer() == 42
    assert path.read_text() == text
    del sys.modules[module.__name__]
