"""The package as an installer and an importer see it."""

import ast
import compileall
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

import lowbit_optim
from protocol import FORK

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "lowbit_optim": ROOT / "lowbit_optim",
    "lowbit_optim_cli": ROOT / "lowbit_optim_cli",
    "lowbit_optim_kernels": ROOT / "kernels" / "lowbit_optim_kernels",
}
CODE = sorted(
    path
    for folder in ("lowbit_optim", "lowbit_optim_cli", "kernels", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
TEXT = [
    *CODE,
    *(path for path in ROOT.glob("*") if path.suffix in {".md", ".toml", ".txt", ".yml"}),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
]
MAX_LINES = 400
MAX_IMPORT_SECONDS = 0.3

# A path of somebody's machine, an address of a package index, a mark of unfinished work.
FORBIDDEN = re.compile(
    r"(?<![\w.])/(?:home|root|Users|work)/\w|(?:file|index-url)[:=]\S*/simple|\b(?:TO[D]O|FI[X]ME)\b"
)


def name_of(path):
    return str(path.relative_to(ROOT))


def python(script, *places):
    """Run a script in a fresh interpreter, outside the checkout, and return what it prints.

    The packages come from these places, or else from the checkout.
    """
    path = os.pathsep.join(map(str, places or (folder.parent for folder in PACKAGES.values())))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT.anchor,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def exports():
    """The names that lowbit_optim/__init__.py imports, as (name, name it is given)."""
    tree = ast.parse((PACKAGES["lowbit_optim"] / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [(alias.name, alias.asname) for node in imports for alias in node.names]


def test_kernels_is_no_package():
    # `kernels` is another distribution, which other libraries import at run time.
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", PACKAGES)
def test_is_typed(name):
    assert (PACKAGES[name] / "py.typed").exists()


def test_installed_version_agrees():
    try:
        installed = importlib.metadata.version("lowbit_optim")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the checkout, not installed")
    assert installed == lowbit_optim.__version__


def test_citation_has_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lowbit_optim.__version__}\n" in citation


def test_all_that_make_installs_is_pinned():
    """What the project itself names; what that requires in turn, the lists of installers show."""
    tomllib = pytest.importorskip("tomllib", reason="Python's own is from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = sum(project["optional-dependencies"].values(), project["dependencies"])
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in named} - {"lowbit_optim"}
    assert names <= set(re.findall(r"^([\w-]+)==", pins, re.MULTILINE))


@pytest.mark.parametrize(("name", "given"), exports())
def test_export(name, given):
    assert given == name, f"write `{name} as {name}`, which marks a re-export for type checkers"
    assert not name.startswith("_")
    exported = getattr(lowbit_optim, name)
    if callable(exported):
        assert exported.__doc__


def test_import_loads_no_compiler():
    loaded = python(
        "import sys, lowbit_optim; print([m for m in ('numba', 'triton') if m in sys.modules])"
    )
    assert loaded == "[]"


@FORK
def test_import_is_quick(tmp_path):
    # From bytecode, as installed, which the first writes where Python is told not to. In its
    # processor's time, the quickest of up to five: a busy machine makes an import slower, never
    # faster.
    script = f"""
import os, sys, time, torch
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
for _ in range(5):
    if not os.fork():
        start = time.process_time()
        import lowbit_optim
        os._exit(time.process_time() - start >= {MAX_IMPORT_SECONDS})
    if not os.wait()[1]:
        break
else:
    raise SystemExit("slow")
"""
    python(script)


def test_works_without_triton():
    script = """
import sys
sys.modules["triton"] = None
import torch
import lowbit_optim
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
lowbit_optim.use_engine("torch")
lowbit_optim.AdamW8bit([p]).step()
assert (p < 1).all()
lowbit_optim.use_engine("triton")
try:
    lowbit_optim.engine_for(p)
except RuntimeError as error:
    print(error)
"""
    assert "triton is not installed" in python(script)


STEPS = """
import torch
import lowbit_optim
print(lowbit_optim.__file__)
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
lowbit_optim.AdamW8bit([p]).step()
assert (p < 1).all()
print(lowbit_optim.engine_for(p))
"""


@pytest.fixture
def copied(tmp_path):
    """A folder with the packages as an installer would lay them out."""
    for name, folder in PACKAGES.items():
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, tmp_path / "packages" / name, ignore=unwanted)
    return tmp_path / "packages"


def test_runs_from_a_zip_file(copied, tmp_path):
    packed = shutil.make_archive(str(tmp_path / "packages"), "zip", copied)
    where, engine = python(STEPS, packed).splitlines()
    assert where.startswith(packed)
    assert engine == str(lowbit_optim.engine_for(torch.zeros(1)))


def test_without_sources_the_torch_engine_steps_in(copied):
    """As in a program that was frozen with bytecode alone."""
    compileall.compile_dir(copied, quiet=1, legacy=True)
    for source in copied.rglob("*.py"):
        source.unlink()
    filtered = "import warnings\nwith warnings.catch_warnings(record=True) as told:\n"
    script = (
        filtered + textwrap.indent(STEPS, "    ") + "print(*(str(one.message) for one in told))"
    )
    where, engine, told = python(script, copied).splitlines()
    assert where.startswith(str(copied))
    assert engine.startswith("EngineChoice(name='torch'")
    assert "generated from the source files of lowbit_optim_kernels, which are missing" in told


@pytest.mark.slow
def test_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("lowbit_optim", "lowbit_optim_cli", "kernels", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", tmp_path, source],
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"lowbit_optim-{lowbit_optim.__version__}-py3-none-any.whl"
    files = zipfile.ZipFile(wheel).namelist()
    for name, folder in PACKAGES.items():
        sources = {f"{name}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
        packed = {file for file in files if file.startswith(f"{name}/")}
        assert packed == sources | {f"{name}/py.typed"}
    allowed = (*PACKAGES, f"lowbit_optim-{lowbit_optim.__version__}.dist-info")
    assert {file.split("/")[0] for file in files} == set(allowed)


# A program starts its workers itself.
PROGRAMS = [
    name_of(path).removesuffix(".py").replace(os.sep, ".").removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8") and not path.stem.endswith("worker")
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_in_the_readme_of_benchmarks(name):
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert f"`python -m {name}`" in readme


def test_programs_say_what_they_take():
    """As `python -m` runs them, one after the other in one process."""
    pytest.importorskip("typer")
    script = f"""
import contextlib, io, runpy, sys
sys.argv[1:] = ["--help"]
for name in {PROGRAMS!r}:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, name
    assert "usage:" in said.getvalue().lower(), name
    sys.modules.pop(name, None)
"""
    python(script)


def test_only_programs_are_named_as_commands():
    text = "".join(path.read_text(encoding="utf-8") for path in TEXT)
    assert set(re.findall(r"-m (benchmarks[.\w]*\w)", text)) == set(PROGRAMS)


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_file_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", TEXT, ids=name_of)
def test_file_names_no_machine(path):
    found = FORBIDDEN.findall(path.read_text(encoding="utf-8"))
    assert not found
