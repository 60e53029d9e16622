"""Griffe extension: `documented` classes get the docstring that they have once imported.

The pages are made from the source, where a description that classes share stands once.
"""

from __future__ import annotations

import importlib
from typing import Any

from griffe import Class, Extension


class CompletedDocstrings(Extension):
    """Takes docstrings of decorated classes from the imported module."""

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        """Griffe has read a class."""
        decorators = [str(decorator.value) for decorator in cls.decorators]
        if cls.docstring and "documented" in decorators:
            module = importlib.import_module(cls.module.path)
            cls.docstring.value = getattr(module, cls.name).__doc__
