"""What the benchmarks share: the line that names the machine, tables and plots."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np


def machine(*packages: str, note: str = "") -> str:
    """The machine, and the versions of what is measured: one line that stands above every table."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    parts = [cpu, f"{os.cpu_count()} cores", platform.system(), f"Python {platform.python_version()}"]
    return ", ".join([*parts, *map(release, packages), *([note] if note else [])])


def release(package: str) -> str:
    """Name and version of an installed package; its name alone if it does not say."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> None:
    """Print a table; numbers are given as they are to be read."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        first, *rest = row
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    if note:
        print(note)
    sys.stdout.flush()


def median_of(values: Sequence[float], form: str = ".3g") -> str:
    """The median, and the middle half."""
    low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{mid:{form}} ({low:{form}} to {high:{form}})"


def plot(options: argparse.Namespace, name: str, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Draw a picture into the folder of `--plots`."""
    if options.plots is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'llmppl[plots]')")
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
