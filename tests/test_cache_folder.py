"""Which folder keeps compiled code, and whom it is trusted to."""

import os
import tempfile
from pathlib import Path

import pytest

from cache_scripts import MODES, STEP, VARIABLE, steps
from lowbit_optim_kernels.codegen import module_cache, private_folder
from protocol import FORK, python

pytest.importorskip("numba")

AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away"
)
FOLDER = "from lowbit_optim_kernels.codegen import module_cache; print(module_cache.cache_folder())"


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


def test_a_tilde_is_the_home(home, tmp_path, monkeypatch):
    """Which no shell has put in its place where quotes or a configuration hold it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "~/kept")
    assert home() == tmp_path / "home" / "kept"
    assert not (tmp_path / "~").exists()


def test_nobodys_home_is_not_used(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "~no_such_user_anywhere/kept")
    with pytest.warns(RuntimeWarning, match=f"{VARIABLE}=~no_such_user_anywhere/kept is not used"):
        assert home() == tmp_path / "home" / ".cache" / "lowbit_optim"


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


@pytest.mark.slow
@FORK
@MODES
def test_planted_code_does_not_run(tmp_path):
    """Neither text nor pickles, under any of the names that are looked for."""
    marker, folder, home = tmp_path / "ran", tmp_path / "shared", tmp_path / "home"
    home.mkdir()
    script = f"""
import os, pickle
from lowbit_optim_kernels.codegen.module_cache import _digest
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    text = inspect.getsource(module)
    assert ("def " in text) != text.endswith("sweep import sweep")
q = torch.nn.Parameter(torch.ones(5000))
q.grad = torch.ones(5000)
reference = lowbit_optim.AdamW8bit([q], lr=0.1)
with lowbit_optim.use_engine("torch"):
    reference.step()
    reference.step()
torch.testing.assert_close(p, q)
print(caught[0].message)
"""
    settings = {VARIABLE: nowhere, "XDG_CACHE_HOME": None, "TRITON_INTERPRET": "1"}
    message = python(script, **settings)
    assert nowhere in message
    assert "every process compiles its own" in message


def test_a_file_that_is_not_written_to_its_end_leaves_nothing(tmp_path, monkeypatch):
    """Whatever ends it; what was there before stays."""
    private_folder.write_private(tmp_path / "kept", b"before")
    for error in (OSError, KeyboardInterrupt):

        def fail(*paths, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(error):
                private_folder.write_private(tmp_path / "kept", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert private_folder.read_private(tmp_path / "kept") == b"before"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            private_folder.private_folder(path)
