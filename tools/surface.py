"""The public surface: names, parameters and members of llmppl.

    python tools/surface.py > tests/promises/surface.txt

A change of this file is a change for users, and CHANGELOG.md names it.
"""

import importlib
import inspect
import re
from collections.abc import Iterator

FOLDERS = [
    "constraints", "decisions", "distributions", "inference", "lm", "models", "queries", "report", "serving", "tasks",
]  # fmt: skip
PACKAGES = ["llmppl", *(f"llmppl.{folder}" for folder in FOLDERS)]


def signature(name: str, found: object) -> str:
    """Return a name with its parameters and their defaults; the name alone of a constant."""
    try:
        parameters = inspect.signature(found).parameters.values()       # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    shown = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
    return re.sub(" at 0x[0-9a-f]+", "", f"{name}({shown})")            # of functions that are defaults


def members(name: str, found: type) -> Iterator[str]:
    """Yield the signatures of the public members of a class; names that only give a hint are none."""
    for each in dir(found):
        owner = next(base for base in found.__mro__ if each in vars(base))
        if not each.startswith("_") and owner.__module__.startswith("llmppl") and hasattr(found, each):
            yield signature(f"{name}.{each}", getattr(found, each))


def surface() -> list[str]:
    """Return a line for each public name, and for each member of the classes in `llmppl`."""
    lines = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            found = getattr(module, name)
            lines.append(signature(f"{package}.{name}", found))
            if package == "llmppl" and inspect.isclass(found):
                lines += members(f"{package}.{name}", found)
    return lines


if __name__ == "__main__":
    print("\n".join(surface()))
