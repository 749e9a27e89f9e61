"""Copies of a model: shared parts, and attributes that are refused by name at the start of a run."""

import copy
import functools
import math
import warnings

import numpy as np
import pytest

from llmppl import Bernoulli, Categorical, Model, enumerate_exact, smc_standard, smc_steer
from llmppl.support.shared import Shared

P = {"x": 0.5, "y": 0.3, "z": 0.2}
BASE = Categorical(P)
Z = sum(P[a] * P[b] * P[c] for a in P for b in P for c in P if a != b != c)          # 0.4: no two alike in a row

RUNS = {
    "distinct": lambda model: smc_steer(model, 30, 3, seed=0, progress=False),
    "copies": lambda model: smc_steer(model, 30, 3, expand="copies", seed=0, progress=False),
    "standard": lambda model: smc_standard(model, 200, seed=0, progress=False),
    "exact": enumerate_exact,
}


class Apart(Model):
    """Program of three letters, no two equal in a row; an attribute holds `make(self)`, which decides that."""

    def __init__(self, make):
        super().__init__()
        self.kept = make(self)

    def ok(self, value, *, but=None):
        return not self.s.endswith(value)

    def fits(self, value):
        return self.kept(value)

    def step(self):
        value = self.sample(BASE)
        self.condition(self.fits(value))
        self.s += value
        if len(self.s) == 3:
            self.finish()


class ApartWhere(Apart):
    """The same program, by a proposal in an attribute."""

    def step(self):
        self.s += self.sample(self.kept)
        if len(self.s) == 3:
            self.finish()


class Owner:
    """Part of a model that refers back to the model."""

    def __init__(self, model):
        self.model = model

    def __call__(self, value):
        return not self.model.s.endswith(value)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "make",
    [
        lambda self: self.ok,
        lambda self: functools.partial(self.ok, but=1),
        lambda self: functools.partial(lambda model, value: not model.s.endswith(value), self),
        Owner,
        lambda self: Owner(self).__call__,
    ],
    ids=["method", "partial of a method", "partial of the model", "object", "method of an object"],
)
def test_references_that_a_deep_copy_rebinds_are_right(run, make):
    assert math.exp(RUNS[run](Apart(make)).log_ml) == pytest.approx(Z, abs=1e-9 if run == "exact" else 0.12)


# ---- shared, copied, refused


class Holds(Model):
    """Program of two coins, with something in an attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def step(self):
        self.s += "HT"[self.sample(Bernoulli(0.5))]
        if len(self.s) == 2:
            self.finish()


def frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "value",
    [np.sqrt, len, lambda: 0, Model],
    ids=["ufunc", "builtin", "function", "class"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_immutable_values_are_shared(value, nested):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for particle in smc_steer(Holds([value] if nested else value), 3, 2, seed=0, progress=False):
            assert (particle.value[0] if nested else particle.value) is value
            assert (particle.copy().value[0] if nested else particle.copy().value) is value


def test_a_read_only_view_of_a_writable_array_is_copied():
    base = np.zeros(4)
    view = frozen(base[:2])
    assert Holds(view).copy().value is not view


def test_a_Shared_class_is_shared_unless_it_defines_deepcopy():
    class Table(Shared):
        pass

    class Counter(Shared):
        def __init__(self, n):
            self.n = n

        def __deepcopy__(self, memo):
            return Counter(self.n + 1)

    class Holds(Model):
        def __init__(self):
            super().__init__()
            self.table, self.counter, self.among = Table(), Counter(0), [Table(), Counter(5)]

    model = Holds()
    twin = model.copy()
    again = twin.copy()
    assert twin.table is model.table and twin.among[0] is model.among[0] and twin.among is not model.among
    assert (twin.counter.n, twin.among[1].n, again.counter.n, model.counter.n) == (1, 6, 2, 0)


def test_shared_names_of_all_bases_are_collected_and_the_rest_is_copied():
    class Base(Model):
        shared = ("table",)

        def __init__(self):
            super().__init__()
            self.table, self.more, self.own = {"a": [1]}, [2], [3]

        def step(self):
            self.own.append(self.sample(Bernoulli(0.5)))
            if len(self.own) == 3:
                self.finish()

    class Mixin:
        shared = ("more",)

    class Derived(Mixin, Base):
        shared = ("missing",)

    model = Derived()
    for particle in smc_steer(model, 4, 2, seed=0, progress=False):
        assert particle.table is model.table and particle.more is model.more and particle.own is not model.own
        assert particle.copy().table is model.table
    assert model.own == [3]
    assert Base().copy().more is not None and model.copy().own == [3]


# --- copies are deep copies -------------------------------------------------------------------------------------------


class Ordinary(Model):
    def __init__(self):
        super().__init__()
        self.number, self.text, self.nothing, self.flag = 3, "x", None, True
        self.table = {"a": [1, 2], "b": (3, [4])}
        self.same, self.self_list = self.table["a"], [self]


class DeepCopied(Ordinary):
    def __deepcopy__(self, memo):
        new = DeepCopied()
        new.text = "deep"
        return new


@pytest.mark.parametrize("kind", [Ordinary, DeepCopied])
def test_a_copy_agrees_with_a_deep_copy(kind):
    model = kind()
    model.table["a"].append(5)
    model.text += "y"
    one, other = model.copy(), copy.deepcopy(model)
    for name in ("number", "text", "nothing", "flag", "table", "same"):
        assert getattr(one, name) == getattr(other, name)
    assert one is not model and one.table["a"] is one.same and one.table["a"] is not model.table["a"]
    assert one.self_list[0] is one
