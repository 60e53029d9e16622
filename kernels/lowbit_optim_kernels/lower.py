"""From a rule to source text: what the compiled engines share.

Numba's disk cache and Triton's compiler both want functions that live in files. So each engine
writes a module per rule (and dtypes) into a cache folder, named by a hash of its own text and of
everything that the text depends on: a second process finds the file and its compiled code, and a
changed rule, template or version gets another name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import stat
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from .rules import PRIMITIVES, Rule, RuleFunction

CACHE_VARIABLE = "LOWBIT_OPTIM_CACHE_DIR"


def reads(fn: RuleFunction) -> tuple[str, ...]:
    """Names that a rule function reads."""
    return tuple(inspect.signature(fn).parameters)


class _Plain(ast.NodeTransformer):
    """Drop docstrings, decorators and annotations; optionally wrap or rename things."""

    def __init__(self, literal: str | None, suffix: str, renamed: set[str]) -> None:
        self.literal, self.suffix, self.renamed = literal, suffix, renamed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.name += self.suffix
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.renamed:
            node.id += self.suffix
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if self.literal and isinstance(node.value, float):
            wrapped = ast.parse(f"{self.literal}({node.value!r})", mode="eval")
            return wrapped.body
        return node


def _globals_used(fn: RuleFunction) -> list[str]:
    names = [name for name in fn.__code__.co_names if name not in PRIMITIVES]
    return [name for name in names if name in fn.__globals__]


def functions_source(
    functions: Iterable[RuleFunction], decorator: str, literal: str | None = None, suffix: str = ""
) -> str:
    """Source of rule functions, and of the rule functions and numbers that they use.

    Args:
        functions: rule functions.
        decorator: text of the decorator, e.g. "@njit".
        literal: wrap float literals in a call of this name, so that they do not widen fp32.
        suffix: appended to the names, so that one module can hold two versions.
    """
    done: dict[str, str] = {}

    def add(fn: RuleFunction) -> None:
        if fn.__name__ in done:
            return
        used = {name: fn.__globals__[name] for name in _globals_used(fn)}
        for name, value in used.items():
            if callable(value):
                add(value)
            else:
                wrapped = f"{literal}({value!r})" if literal else repr(value)
                done[name] = f"{name}{suffix} = {wrapped}\n"
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
        plain = _Plain(literal, suffix, set(used))
        text = ast.unparse(ast.fix_missing_locations(plain.visit(tree)))
        done[fn.__name__] = f"{decorator}\n{text}\n"

    for fn in functions:
        add(fn)
    return "\n\n".join(done.values())


def scalar_functions(rule: Rule) -> tuple[RuleFunction, ...]:
    """The functions of a rule that run once per tensor."""
    return (rule.prepare, *(phase.combine for phase in rule.phases))


def element_functions(rule: Rule) -> tuple[RuleFunction, ...]:
    """The functions of a rule that run once per element."""
    return (rule.direction, *(phase.terms for phase in rule.phases))


def element_names(rule: Rule) -> set[str]:
    """Names that stand for one element, not for a per-tensor value."""
    return {"p", "g", "u", *(moment.key for moment in rule.moments)}


def element_scalars(rule: Rule, functions: Iterable[RuleFunction]) -> list[str]:
    """Per-tensor values and hyperparameters that element functions read, each once."""
    names: dict[str, None] = {}
    for fn in functions:
        names.update(dict.fromkeys(reads(fn)))
    return [name for name in names if name not in element_names(rule)]


def hyper_names(rule: Rule) -> list[str]:
    """Hyperparameters that any function of the rule reads, in order of first use."""
    given = {"step", "numel", *element_names(rule), *rule.scalars()}
    given |= {name for phase in rule.phases for name in phase.terms.gives}
    names: dict[str, None] = {}
    for fn in (*scalar_functions(rule), *element_functions(rule)):
        names.update(dict.fromkeys(name for name in reads(fn) if name not in given))
    return list(names)


def indent(lines: Iterable[str], spaces: int) -> str:
    """Lines of code, indented, as one text."""
    return "\n".join(" " * spaces + line for line in lines)


@functools.cache
def cache_folder() -> Path:
    """A folder of this user's that generated modules are kept in, made if need be.

    `LOWBIT_OPTIM_CACHE_DIR`, else `$XDG_CACHE_HOME/lowbit_optim` or `~/.cache/lowbit_optim`, else a
    folder in the system's temporary directory when neither can be written.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "lowbit_optim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _private_temporary_folder()


def _private_temporary_folder() -> Path:
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"lowbit_optim_{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.stat()
    # Code is imported from here: nobody else may have made it or be able to write to it.
    shared = info.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    if hasattr(os, "getuid") and (info.st_uid != owner or shared):
        raise RuntimeError(
            f"{folder} is not this user's alone; set {CACHE_VARIABLE} to a folder that is"
        )
    return folder


_import_lock = threading.Lock()


def import_source(label: str, source: str, depends: Iterable[str]) -> ModuleType:
    """Import `source` from a file in the cache folder.

    Args:
        label: start of the module's name, for a reader of the folder.
        source: the module's text.
        depends: further texts that compiled code depends on: versions, sources of helpers.
    """
    digest = hashlib.sha256("\0".join([source, sys.version, *depends]).encode()).hexdigest()[:24]
    name = f"lowbit_optim_generated_{label}_{digest}"
    with _import_lock:
        if name in sys.modules:
            return sys.modules[name]
        path = cache_folder() / f"{name}.py"
        # Another process may write the same text at the same time; a rename is atomic, and a file
        # that is there is left alone because compilers' caches look at its time stamp.
        if not path.exists():
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(source)
            os.replace(temporary, path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
