"""Copies of a model: shared parts, and attributes that are refused by name at the start of a run."""

import copy
import functools
import math
import threading
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.tiny import tiny_model, tiny_tokenizer

from llmppl import Bernoulli, Categorical, Model, beam_search, enumerate_exact, smc_standard, smc_steer
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


class Nested(Apart):
    def fits(self, value):
        return self.kept["rules"][0].ok(value)


@dataclass
class Rule:
    ok: Any


class Slotted:
    __slots__ = ("ok",)

    def __init__(self, ok):
        self.ok = ok


class Owner:
    """Part of a model that refers back to the model."""

    def __init__(self, model):
        self.model = model

    def __call__(self, value):
        return not self.model.s.endswith(value)


def by_default(self):
    def ok(value, model=self):
        return not model.s.endswith(value)

    return ok


def by_keyword(self):
    def ok(value, *, model=self):
        return not model.s.endswith(value)

    return ok


def by_outer(self):
    def last():
        return self.s[-1:]

    return lambda value: value != last()


def by_attribute(self):
    def ok(value):
        return not ok.model.s.endswith(value)

    ok.model = self
    return ok


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("program", "make", "path"),
    [
        (Apart, lambda self: lambda value: not self.s.endswith(value), "kept uses self"),
        (Apart, by_default, "kept has a default"),
        (Apart, by_keyword, "kept has a default"),
        (Apart, by_outer, "kept uses last uses self"),
        (Apart, by_attribute, "kept.model"),
        (Apart, lambda self: functools.partial(lambda model, value: self.ok(value), 1), "kept.func uses self"),
        (Apart, lambda self: functools.lru_cache(self.ok), "kept.__wrapped__.__self__"),
        (Apart, lambda self: functools.partial(map, (lambda value: self.ok(value),)), "kept.args.* uses self"),
        (Nested, lambda self: {"rules": [Rule(lambda value: self.ok(value))]}, "kept.*rules.*ok uses self"),
        (Nested, lambda self: {"rules": (Slotted(lambda value: self.ok(value)),)}, "kept.*rules.*ok uses self"),
        (ApartWhere, lambda self: BASE.where(self.ok), "kept..predicate...__self__"),
        (ApartWhere, lambda self: BASE.where(lambda value: self.ok(value)), "kept..predicate.. uses self"),
        (ApartWhere, lambda self: BASE.where(Owner(self)), "kept..predicate...model"),
    ],
)
def test_a_reference_to_the_first_particle_is_refused_by_name(run, program, make, path):
    who = f"the attribute kept of {program.__name__} refers to the model itself"
    with pytest.raises(TypeError, match=rf"{who} \({path}\).*make it anew in every step\(\)"):
        RUNS[run](program(make))


class Asked(Model):
    def step(self):
        self.condition(self.ok())
        self.finish()


def test_a_function_that_uses_the_model_as_a_global_is_refused():
    scope = {"model": Asked()}
    for kept in ("lambda: model.s == ''", "lambda: (lambda: model.s == '')()"):
        scope["model"].ok = eval(kept, scope)
        with pytest.raises(TypeError, match=r"the attribute ok of Asked refers to the model itself \(ok uses model\)"):
            RUNS["distinct"](scope["model"])
    scope["model"].ok = eval("lambda: __import__('types').SimpleNamespace(model=True).model", scope)
    assert len(RUNS["distinct"](scope["model"])) == 1


class Coin(Model):
    def step(self):
        self.s = "HT"[self.sample(Bernoulli(0.5))]


class Outer(Model):
    """Program whose choices another program makes."""

    def __init__(self, rng=None):
        super().__init__()
        self.inner = Coin()
        if rng is not None:
            self.inner.rng = rng

    def step(self):
        self.inner.step()
        self.s += self.inner.s
        if len(self.s) == 2:
            self.finish()


class Lends(Outer):
    def step(self):
        self.inner.rng = self.rng
        super().step()


def test_an_inner_model_draws_only_from_a_stream_lent_to_it():
    for run in RUNS.values():
        with pytest.raises(RuntimeError, match="this Coin is none of the particles .*self.inner.rng = self.rng"):
            run(Outer())
        with pytest.raises(TypeError, match="attribute inner of Outer holds a random stream"):
            run(Outer(np.random.default_rng(0)))
    for run in ("distinct", "copies", "standard"):
        posterior = RUNS[run](Lends())
        assert {str(particle) for particle in posterior} == {"HH", "HT", "TH", "TT"}
        assert [str(particle) for particle in RUNS[run](Lends())] == [str(particle) for particle in posterior]
    with pytest.raises(TypeError, match="enumerate_exact cannot enumerate self.rng"):
        enumerate_exact(Lends())


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


@pytest.mark.parametrize("run", RUNS)
def test_a_predicate_made_in_step_is_right(run):
    class Made(ApartWhere):
        def step(self):
            self.kept = BASE.where(self.ok)             # kept for a look, and made anew in every step
            super().step()

    assert math.exp(RUNS[run](Made(lambda self: None)).log_ml) == pytest.approx(Z, abs=1e-9 if run == "exact" else 0.15)


def test_a_kept_predicate_that_does_not_ask_the_model_is_right():
    limit = [2]
    model = ApartWhere(lambda self: BASE.where(lambda value: len(value) < limit[0] and value != "z"))
    assert enumerate_exact(model).log_ml == pytest.approx(3 * math.log(0.8))
    assert RUNS["distinct"](model).log_ml == pytest.approx(3 * math.log(0.8), abs=0.3)


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
    [math, tiny_model(), tiny_tokenizer(), np.sqrt, len, lambda: 0, Model, frozen(np.zeros(1 << 18))],
    ids=["module", "network", "tokenizer", "ufunc", "builtin", "function", "class", "read-only array"],
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


@pytest.mark.parametrize(
    "value", [open("/dev/null"), threading.Lock(), (i for i in range(3)), {"deep": [threading.Lock()]}],  # noqa: SIM115
    ids=["file", "lock", "generator", "nested"],
)  # fmt: skip
@pytest.mark.parametrize("run", [*RUNS.values(), lambda model: beam_search(model, 2, 2)])
def test_an_attribute_that_cannot_be_copied_is_named_with_a_remedy(run, value):
    what = r'override copy\(\), or list it in shared = \("value",\)'
    with pytest.raises(TypeError, match=rf"the attribute value of Holds cannot be copied \(.*{what}"):
        run(Holds(value))

    class Shares(Holds):
        shared = ("value",)

    assert all(particle.value is value for particle in RUNS["distinct"](Shares(value)))


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


@pytest.mark.parametrize("listed", ["table", ("table", 1), {"table"}])
def test_shared_that_lists_no_names_is_refused_when_the_class_is_made(listed):
    with pytest.raises(TypeError, match=r'Wrong.shared lists attributes by name: shared = \("table",\), not'):
        type("Wrong", (Model,), {"shared": listed})


def test_a_large_attribute_that_is_copied_is_named_in_a_warning():
    large = (np.zeros(1 << 18), [bytearray(1 << 21)], {"a": {"b": Rule(np.zeros((600, 600)))}}, list(range(1 << 18)))
    for value in large:
        with pytest.warns(UserWarning, match=r'value of Holds takes \d MB in every copy.*shared = \("value",\)'):
            smc_steer(Holds(value), 2, 2, seed=0, progress=False)

        class Shares(Holds):
            shared = ("value",)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            smc_steer(Shares(value), 2, 2, seed=0, progress=False)
            smc_steer(Holds(np.zeros(1 << 15)), 2, 2, seed=0, progress=False)


def asks(model):
    return lambda: model.s


def test_a_custom_copy_may_call_the_base_or_not():
    class Extends(Holds):
        def copy(self):
            new = super().copy()
            new.value = self.value
            return new

    class Replaces(Holds):
        def copy(self):
            return copy.copy(self)

    for program in (Extends, Replaces):
        table = [1]
        assert all(particle.value is table for particle in RUNS["distinct"](program(table)))
        model = program(None)
        model.value = asks(model)
        with pytest.raises(TypeError, match="the attribute value of .* refers to the model itself"):
            RUNS["distinct"](model)


def test_a_long_attribute_is_searched_only_to_a_limit():
    looked = []

    class Counts(list):
        def __iter__(self):
            for value in super().__iter__():
                looked.append(value)
                yield value

    from llmppl.models.copies import inspect_attributes

    inspect_attributes(Holds(Counts([object() for _ in range(100_000)])))
    assert len(looked) < 20_000


def test_the_attributes_are_searched_once_a_run(monkeypatch):
    from llmppl.models import copies, model

    calls = []
    monkeypatch.setattr(model, "inspect_attributes", lambda of: calls.append(of) or copies.inspect_attributes(of))
    smc_steer(Holds(1), 8, 3, seed=0, progress=False)
    assert len(calls) == 1


def test_a_failure_of_a_copy_is_named_whatever_its_source():
    class Fails:
        def __deepcopy__(self, memo):
            raise OSError("gone")

    with pytest.raises(TypeError, match=r"the attribute value of Holds cannot be copied \(gone\)") as caught:
        RUNS["distinct"](Holds(types.SimpleNamespace(deep=Fails())))
    assert isinstance(caught.value.__cause__, OSError)


# --- copies are deep copies -------------------------------------------------------------------------------------------


class Ordinary(Model):
    def __init__(self):
        super().__init__()
        self.number, self.text, self.nothing, self.flag = 3, "x", None, True
        self.table = {"a": [1, 2], "b": (3, [4])}
        self.same, self.self_list = self.table["a"], [self]


class WithSlots(Ordinary):
    __slots__ = ("slot",)

    def __init__(self):
        super().__init__()
        self.slot = [1]


class Stateful(Ordinary):
    def __getstate__(self):
        return {**vars(self), "number": self.number + 1}


class SetsState(Ordinary):
    def __setstate__(self, state):
        vars(self).update(state, text="set")


class Reduced(Ordinary):
    def __reduce_ex__(self, protocol):
        return Reduced, ()


class DeepCopied(Ordinary):
    def __deepcopy__(self, memo):
        new = DeepCopied()
        new.text = "deep"
        return new


@pytest.mark.parametrize("kind", [Ordinary, WithSlots, Stateful, SetsState, Reduced, DeepCopied])
def test_a_copy_agrees_with_a_deep_copy(kind):
    model = kind()
    model.table["a"].append(5)
    model.text += "y"
    one, other = model.copy(), copy.deepcopy(model)
    for name in ("number", "text", "nothing", "flag", "table", "same"):
        assert getattr(one, name) == getattr(other, name)
    assert getattr(one, "slot", None) == getattr(other, "slot", None)
    assert one is not model and one.table["a"] is one.same and one.table["a"] is not model.table["a"]
    assert one.self_list[0] is one and (kind is not WithSlots or one.slot is not model.slot)
