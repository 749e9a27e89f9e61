"""The reference: every public name is in it, and has an example that runs."""

import doctest
import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import surface
from helpers.common import ROOT

import llmppl

NAMES = [(each, name) for each in surface.PACKAGES for name in importlib.import_module(each).__all__]


def is_defined_here(package, name):
    """Return False for numbers, tuples and aliases of types, which have no docstring of their own."""
    return getattr(getattr(importlib.import_module(package), name), "__module__", "").startswith("llmppl")


@pytest.fixture(scope="module")
def lm():
    return llmppl.CachedTransformer.from_pretrained(engine="numpy")


@pytest.mark.parametrize("package, name", [each for each in NAMES if is_defined_here(*each)])
def test_every_public_name_has_an_example_that_runs(package, name, lm, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch") if name == "ConstraintLogitsProcessor" else None
    monkeypatch.chdir(tmp_path)
    lm.clear()
    known = {"lm": lm, "math": math, "np": np, "torch": torch}
    exec(f"from llmppl import *\nfrom {package} import *", known)
    found = known[name]
    owner = found if callable(found) else type(found)                           # EOS is a constant
    [test] = doctest.DocTestFinder(recurse=False).find(owner, name, globs=known)
    failures = list[str]()
    doctest.DocTestRunner().run(test, out=failures.append)
    assert test.examples and failures == []


def test_the_public_surface_is_the_committed_one():
    assert surface.surface() == Path(__file__).with_name("surface.txt").read_text(encoding="utf-8").splitlines()


def test_the_reference_names_every_public_name():
    pages = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("reference.md", "reference-more.md")]
    names = {line.rpartition(".")[2] for line in "".join(pages).splitlines() if line.startswith("::: ")}
    assert names == set().union(*(importlib.import_module(each).__all__ for each in surface.PACKAGES))
