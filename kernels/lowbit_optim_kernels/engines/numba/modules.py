"""The modules that the Numba engine generates, and functions of them, compiled."""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import cache
from types import ModuleType

import llvmlite
import numba
import numpy as np

from ... import batch, dither, rules, weights
from ...codegen.module_cache import import_source
from ...formats import Format
from ...rules import Rule
from . import source
from .cache import CFunction, c_function

HELPERS = ("cache", "dither", "element", "inner", "job", "memory", "scalar", "sweep", "vector")


@cache
def depends(format: Format | None = None) -> tuple[str, ...]:
    """Sources that compiled code depends on beside its own text."""
    modules = [importlib.import_module(f"{__package__}.{name}") for name in HELPERS]
    modules += [batch, dither, rules, weights, importlib.import_module(source.WEIGHTS)]
    code = None if format is None else source.code_of(format)
    if code is not None:
        modules += [sys.modules[type(format).__module__], code, *getattr(code, "DEPENDS", ())]
    versions = (numba.__version__, llvmlite.__version__, np.__version__)
    return (*versions, *map(inspect.getsource, modules))


@cache
def scalars(rule: Rule) -> ModuleType:
    """A rule's arithmetic for each tensor."""
    text = source.scalar_module(rule)
    return import_source(f"{rule.name}_scalar", text, depends())


@cache
def elements(
    rule: Rule, p_kind: str, g_kind: str, format: Format, stored: weights.Weights, shifted: bool
) -> ModuleType:
    """A rule's passes over elements; see `source.element_module`."""
    text = source.element_module(rule, p_kind, g_kind, format, stored, shifted)
    return import_source(f"{rule.name}_{p_kind}_{g_kind}_{format.name}", text, depends(format))


@cache
def codec(format: Format) -> ModuleType:
    """A format's functions for whole tensors."""
    return import_source(f"codec_{format.name}", source.codec_module(format), depends(format))


@cache
def sweep() -> CFunction:
    """All passes of a step."""
    text = f"from {__package__}.sweep import sweep"
    return c_function(import_source("sweep", text, depends()), "sweep")
