"""Names of packages: import a module when one of its names is first used, and list public names only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names on first use (PEP 562).

    `modules` has the full name of each module, with the names that the package takes from it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(module_of)}")
        value = namespace[name] = getattr(importlib.import_module(module_of[name]), name)
        return value

    return (
        get,
        lambda: sorted({*module_of, *(name for name in namespace if name[:2] == "__")}),
        [*module_of],
    )


def found(module: str, name: str) -> Any:
    """Return what a module of a later folder defines, for a method that only passes its arguments on."""
    return getattr(importlib.import_module(module), name)


def public_names(package: str) -> Callable[[], list[str]]:
    """Return `__dir__` of a package, which lists its names without its modules."""
    namespace = vars(sys.modules[package])
    return lambda: sorted(
        n for n, value in namespace.items() if n[:2] == "__" or not isinstance(value, ModuleType)
    )
