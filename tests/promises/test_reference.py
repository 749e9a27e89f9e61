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


@pytest.mark.parametrize("name", llmppl.__all__)
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch") if name == "ConstraintLogitsProcessor" else None
    monkeypatch.chdir(tmp_path)
    known = {"lm": llmppl.CachedTransformer.from_pretrained(engine="numpy"), "math": math, "np": np, "torch": torch}
    exec("from llmppl import *", known)
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
