"""Shared parts of the benchmarks: the line that names the machine, tables and plots."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PRINTED = list[dict[str, Any]]()                    # the tables of this process, which `save` writes


def machine(*packages: str, note: str = "") -> str:
    """Return the line above every table: the machine and the versions of the packages."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    parts = [cpu, f"{os.cpu_count()} cores", platform.system(), f"Python {platform.python_version()}"]
    return ", ".join([*parts, *map(release, packages), *([note] if note else [])])


def release(package: str) -> str:
    """Return the name and version of an installed package, or only its name if the version is unknown."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> None:
    """Print a table; numbers must be formatted already, as strings."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    PRINTED.append({"title": title, "columns": cells[0], "rows": cells[1:], "note": note})
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        first, *rest = row
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    if note:
        print(note)
    sys.stdout.flush()


def save(path: Path | None, *packages: str) -> None:
    """Write the tables printed so far to a file as JSON, with the command, the machine and the day."""
    if path is None:
        return
    found = {
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(*packages),
        "date": datetime.date.today().isoformat(),
        "tables": PRINTED,
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def median_of(values: Sequence[float], form: str = ".3g") -> str:
    """Return the median and the middle half, as text."""
    low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{mid:{form}} ({low:{form}} to {high:{form}})"


def plot(options: argparse.Namespace, name: str, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Draw a plot into the folder of `--plots`."""
    if options.plots is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'llmppl-smc[plots]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    options.plots.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.plots / f"{name}.png", dpi=110)
    pyplot.close(figure)
    print(f"drawn: {options.plots / name}.png")
