"""Tests of check_program: wrong programs of every family are refused, and right ones pass."""

import array
import collections
import ctypes
import datetime
import functools
import itertools
import math
import os
import queue
import random
import re
import secrets
import threading
import time
import uuid
import weakref
from time import time as now
from typing import ClassVar

import numpy as np
import pytest
from helpers.common import slow

from llmppl import (
    EOS,
    CachedTransformer,
    ConstrainedText,
    Infilling,
    Model,
    PromptIntersection,
    Regex,
    batched,
    smc_standard,
)
from llmppl.checking import _wrong_with, check_program
from llmppl.distributions import Bernoulli, Categorical, Distribution, Geometric, Uniform

AB, XYZ = Categorical({"a": 0.3, "b": 0.7}), Categorical({"x": 0.5, "y": 0.3, "z": 0.2})
CHOICES = "not what its choices make"
LEADS = "leads from a copy back to the first particle"
LM = CachedTransformer.from_pretrained(engine="numpy")
TALLY, CACHE, TEXT, NUMBER = collections.Counter(), {}, [""], 0


class Letters(Model):
    """Four letters. A table gives `start`, which prepares attributes, and `weigh`, which sees each letter."""

    start = staticmethod(lambda self: None)
    weigh = staticmethod(lambda self, letter: 0.0)

    def __init__(self):
        super().__init__()
        self.start(self)

    def step(self):
        letter = self.sample(AB)
        self.s += letter
        self.score(-0.1 * float(self.weigh(self, letter)))
        if len(self.s) == 4:
            self.finish()


def letters(weigh, start=Letters.start, **attributes):
    return type("Program", (Letters,), {"weigh": staticmethod(weigh), "start": staticmethod(start), **attributes})


def setting(name, make):
    return lambda self: setattr(self, name, make(self))


@functools.lru_cache
def count_of_text(length):
    return TEXT[0].count("a")


def next_number():
    global NUMBER
    NUMBER += 1
    return NUMBER


def remembered(cache, key, value):
    return cache.setdefault(key, value)


def cached_by_length(self, letter):
    TEXT[0] = str(self.s)
    return count_of_text(len(self.s))


def in_environment(self, letter):
    os.environ["LLMPPL_TEST"] = str(int(os.environ.get("LLMPPL_TEST", 0)) + 1)
    return int(os.environ["LLMPPL_TEST"])


def in_thread(self, letter):
    self.store.n = getattr(self.store, "n", 0) + 1
    return self.store.n


class Box:
    cache = {}

    def __init__(self):
        self.n = 0

    def __deepcopy__(self, memo):
        return self

    def add(self):
        self.n += 1
        return self.n


class Rows:
    """Object whose copy separates what it holds from other attributes."""

    def __init__(self, held):
        self.held = held

    def __deepcopy__(self, memo):
        return Rows(list(self.held))


def held_twice(self):
    self.kept = []
    self.rows = Rows(self.kept)


def called():
    called.number = getattr(called, "number", 0) + 1
    return called.number


called.cache = {}


def last_value():
    key = value = None

    def last(new_key, new_value):
        nonlocal key, value
        if new_key != key:
            key, value = new_key, new_value
        return value

    return last


def late(self):
    self.s += self.sample(AB)
    if len(self.s) == 9:
        self.score(-random.random())
        self.finish()


def listed(self):
    seen = []
    return lambda letter: (seen.append(letter), len(seen))[1]


def in_dict(self):
    box = {"model": self}
    return lambda: len(box["model"].s)


def by_attribute(weigh):
    return lambda self, letter: weigh(self.kept)


MISTAKES = {
    "random": (letters(lambda self, _: random.random()), CHOICES),
    "numpy.random": (letters(lambda self, _: np.random.rand()), CHOICES),                       # noqa: NPY002
    "a new generator": (letters(lambda self, _: np.random.default_rng().random()), CHOICES),
    "secrets": (letters(lambda self, _: secrets.randbelow(1000)), CHOICES),
    "the system's bytes": (letters(lambda self, _: os.urandom(1)[0]), CHOICES),
    "a clock": (letters(lambda self, _: time.perf_counter_ns() % 7), CHOICES),
    "minutes": (letters(lambda self, _: time.time() // 60), CHOICES),
    "a date": (letters(lambda self, _: datetime.datetime.now().microsecond), CHOICES),
    "an address": (letters(lambda self, _: id(self) % 9973), CHOICES),
    "a list of the class": (letters(lambda self, x: self.seen.append(x) or len(self.seen), seen=[]), CHOICES),
    "a long array of the class": (letters(
        lambda self, x: self.seen.put(3007, self.seen[3007] + 1) or self.seen[3007], seen=np.zeros(5000)), CHOICES),
    "an object of the class": (letters(lambda self, _: self.box.add(), box=Box()), CHOICES),
    "an iterator of the class": (letters(lambda self, _: next(self.ids), ids=itertools.count()), CHOICES),
    "a thread's data": (letters(in_thread, store=threading.local()), CHOICES),
    "a counter of the module": (letters(lambda self, x: TALLY.update(x) or TALLY[x]), CHOICES),
    "a number of the module": (letters(lambda self, _: next_number()), CHOICES),
    "the environment": (letters(in_environment), CHOICES),
    "a default": (letters(lambda self, x, seen=[]: seen.append(x) or len(seen)), CHOICES),      # noqa: B006
    "a cache of the module by length": (
        letters(lambda self, _: remembered(CACHE, len(self.s), self.s.count("a"))), CHOICES),
    "a cached function of too little": (letters(cached_by_length), CHOICES),
    "a shared list": (letters(by_attribute(lambda kept: kept.append(1) or len(kept)), setting("kept", lambda _: []),
                              shared=("kept",)), CHOICES),
    "a shared cache by length": (
        letters(lambda self, _: remembered(self.kept, len(self.s), self.s.count("a")), setting("kept", lambda _: {}),
                shared=("kept",)), CHOICES),
    "an object that refuses copies": (letters(by_attribute(Box.add), setting("kept", lambda _: Box())), CHOICES),
    "a list of a closure": (letters(lambda self, x: self.kept(x), setting("kept", listed)), CHOICES),
    "numpy's generator": (letters(by_attribute(lambda kept: kept.random()),
                                  setting("kept", lambda _: np.random.default_rng(0))), CHOICES),
    "numpy's old generator": (letters(by_attribute(lambda kept: kept.rand()),
                                      setting("kept", lambda _: np.random.RandomState(0))), CHOICES),  # noqa: NPY002
    "Python's generator": (letters(by_attribute(lambda kept: kept.random()),
                                   setting("kept", lambda _: random.Random(0))), CHOICES),
    "a stream of the particle's": (
        letters(lambda self, _: vars(self).setdefault("kept", self.rng.spawn(1)[0]).random()), CHOICES),
    "a clock imported by name": (letters(lambda self, _: now() // 3600), CHOICES),
    "an hour": (letters(lambda self, _: datetime.datetime.now().hour), CHOICES),
    "a day in words": (letters(lambda self, _: int(time.strftime("%d"))), CHOICES),
    "an attribute of a function": (letters(lambda self, _: called()), CHOICES),
    "a cache of a function by length": (
        letters(lambda self, _: remembered(called.cache, len(self.s), self.s.count("a"))), CHOICES),
    "a cache of another class by length": (
        letters(lambda self, _: remembered(Box.cache, len(self.s), self.s.count("a"))), CHOICES),
    "the last value of a closure by length": (
        letters(lambda self, _: self.last(len(self.s), self.s.count("a")), last=staticmethod(last_value())), CHOICES),
    "randomness in the ninth step": (
        type("Late", (Model,), {"step": late}), CHOICES),
    "a list of the class that is only written": (
        letters(lambda self, x: self.seen.append(x) or 0.0, seen=[]), "steps change what all particles share"),
    "a lambda": (letters(by_attribute(lambda kept: kept()), setting("kept", lambda self: lambda: len(self.s))), LEADS),
    "a lambda in a list": (letters(by_attribute(lambda kept: kept[0]()),
                                   setting("kept", lambda self: [lambda: len(self.s)])), LEADS),
    "a dict of a closure": (letters(by_attribute(lambda kept: kept()), setting("kept", in_dict)), LEADS),
    "a partial of a lambda": (letters(
        by_attribute(lambda kept: kept()), setting("kept", lambda self: functools.partial(lambda: len(self.s)))),
        LEADS),
    "a map of a lambda": (letters(
        by_attribute(next), setting("kept", lambda self: map(lambda n: n * len(self.s), range(9)))), LEADS),  # noqa: C417
    "a cached lambda": (letters(by_attribute(lambda kept: kept()),
                                setting("kept", lambda self: functools.lru_cache(lambda: len(self.s)))), LEADS),
    "a method of the particle in the class": (letters(
        lambda self, _: len(self.methods["str"]()), lambda self: self.methods.update(str=self.__str__), methods={}),
        LEADS),
    "a list under two names": (letters(
        lambda self, _: self.kept.append(1) or len(self.rows.held), held_twice), "self.rows.held was 'the same as"),
    "a weak reference": (letters(by_attribute(lambda kept: len(kept().s)), setting("kept", weakref.ref)), LEADS),
    "a weak proxy": (letters(by_attribute(lambda kept: len(kept.s)), setting("kept", weakref.proxy)), LEADS),
    "a predicate": (letters(by_attribute(lambda kept: 0),
                            setting("kept", lambda self: XYZ.where(lambda v: v not in self.s))), LEADS),
}  # fmt: skip


@pytest.mark.parametrize("program, said", MISTAKES.values(), ids=MISTAKES)
def test_a_breach_of_the_contract_is_refused(program, said):
    with pytest.raises(RuntimeError, match=said):
        check_program(program())


def memory(kind):
    if kind.startswith("torch "):
        torch = pytest.importorskip("torch")
        made = np.zeros(3, kind.removeprefix("torch "))
        return made, torch.from_numpy(made)
    makers = {
        "numpy": lambda: np.zeros(3), "array": lambda: array.array("i", [0, 0, 0]), "bytes": lambda: bytearray(12),
        "ctypes": lambda: (ctypes.c_int * 3)(),
    }  # fmt: skip
    made = makers[kind]()
    return made, made[:2] if kind == "numpy" else np.frombuffer(made, dtype="i4")


FIRST_COME = queue.SimpleQueue()
WAITING = queue.Queue()
for each in range(3):
    FIRST_COME.put(each)
    WAITING.put(each)


def first_come(self, letter):
    return 0.0 if FIRST_COME.empty() else FIRST_COME.get() + 1


def waits(self, letter):
    return 0.0 if WAITING.empty() else WAITING.get() + 1


def in_environment_once(self, letter):
    first = os.environ.setdefault("LLMPPL_FIRST", letter)
    return 3.0 * (letter == first)


def class_of_attribute(self):
    class Seen:
        letters: ClassVar[list[str]] = []

    self.seen = Seen


def in_class_of_attribute(self, letter):
    new = letter not in self.seen.letters
    if new:
        self.seen.letters.append(letter)
    return 2.0 * new


class Once(Letters):
    first: ClassVar[str] = ""

    def weigh(self, instance, letter):
        Once.first = Once.first or letter
        return 3.0 * (Once.first == letter)


@pytest.mark.parametrize("program", [
    letters(first_come), letters(waits), letters(in_environment_once),
    letters(in_class_of_attribute, class_of_attribute), Once,
], ids=["simple queue", "queue", "environment", "class", "ClassVar"])  # fmt: skip
def test_what_only_the_first_particles_meet_is_found(program):
    """Given a model, the check restores the outside, so that a rebuilt particle is the first again."""
    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(program())
    os.environ.pop("LLMPPL_FIRST", None)


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "bfloat16", "float32"])
def test_tensors_of_every_type_are_compared_and_restored(dtype):
    torch = pytest.importorskip("torch")
    made = torch.zeros(4, dtype=getattr(torch, dtype))
    view = made[1:]

    def once(self, letter):
        first = not view[0]
        view[0] = 1
        return 2.0 * first

    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(letters(once)())
    assert not made.any()


@pytest.mark.parametrize("kind", [
    "numpy", "torch float64", "torch uint8", "torch bool", "torch int16", "array", "bytes", "ctypes",
])  # fmt: skip
def test_two_attributes_over_one_memory_are_refused(kind):
    def start(self):
        self.board, self.view = memory(kind)

    with pytest.raises(RuntimeError, match=r"self.board and self.view share memory, and their copies do not"):
        check_program(letters(lambda self, _: 0.0, start)())


def test_a_copy_that_shares_a_list_is_refused():
    class Shallow(letters(lambda self, x: self.kept.append(x) or len(self.kept), setting("kept", lambda _: []))):
        def copy(self):
            new = object.__new__(type(self))
            vars(new).update({**vars(self), "_chooser_": None, "_stepping_": False})
            return new

    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(Shallow())


def drawn(**how):
    return type("Drawn", (Model,), {"step": how["step"]})


def test_randomness_between_choices_changes_the_next_distribution():
    def step(self):
        self.s += self.sample(AB) + "01"[self.sample(Bernoulli(0.2 + 0.6 * random.random()))]
        self.finish()

    with pytest.raises(RuntimeError, match="the distribution of choice or observation 2 was"):
        check_program(drawn(step=step)())


class Listed(Distribution):
    """Distribution of the letters of `p`, whose probabilities need not sum to 1. Draws are normalised."""

    def __init__(self, *p, support=("a", "b", "c")):
        self.p, self.support = p, support

    def log_prob(self, value):
        return math.log(self.p["abc".index(value)])

    def sample(self, rng):
        p = np.array(self.p)
        return "abc"[rng.choice(3, p=p / p.sum())]


class Unlisted(Listed):
    def __init__(self, *p):
        super().__init__(*p, support=None)


class Doubled(Listed):
    """Weighted proposal whose log_measure is twice the measure of its draws."""

    def propose(self, rng):
        return self.sample(rng), -math.log(2.0)


class Foreign(Listed):
    def sample(self, rng):
        return random.choice("abc")


class Normal(Distribution):
    """Standard normal draws, whose log-density may have another scale or constant."""

    def __init__(self, scale=1.0, constant=2.5066282746):
        self.scale, self.constant = scale, constant

    def log_prob(self, value):
        return -0.5 * (value / self.scale) ** 2 - math.log(self.scale * self.constant)

    def sample(self, rng):
        return float(rng.normal())


class Poisson(Distribution):
    """Counts of mean 4, whose probabilities sum to `total`."""

    def __init__(self, total=1.0):
        self.total = total

    def log_prob(self, value):
        return math.log(self.total) + value * math.log(4) - 4 - math.lgamma(value + 1)

    def sample(self, rng):
        return int(rng.poisson(4))


class Vector(Distribution):
    """Draws of a function of a random stream, with a log-density of their own."""

    def __init__(self, draw, log_density):
        self.draw, self.log_density = draw, log_density

    def sample(self, rng):
        return self.draw(rng)

    def log_prob(self, value):
        return self.log_density(value)


def two_modes(rng):
    return float(rng.normal(-100, 0.001) if rng.random() < 0.5 else rng.normal(100, 1))


def log_normal(x, mean=0.0, scale=1.0):
    return -0.5 * ((x - mean) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)


def log_two_modes(x):
    return log_normal(x, -100, 0.001) - math.log(2) if x < 0 else log_normal(x, 100) - math.log(2)


def log_box(x):
    return 0.0


def normals(constant, size=2):
    return Vector(
        lambda rng: tuple(rng.normal(size=size).tolist()), lambda x: sum(map(log_normal, x)) + constant
    )  # fmt: skip


def or_zero(rng):
    return 0.0 if rng.random() < 0.6 else float(rng.exponential())


def log_or_zero(x, log_mass=0.0):
    return math.log(0.6) if x == 0 else math.log(0.4) - x + log_mass


def labelled(rng):
    return {"label": "ab"[int(rng.random() < 0.3)], "n": int(rng.integers(3)), "x": [float(rng.normal())]}


def log_labelled(value):
    return math.log(0.3 if value["label"] == "b" else 0.7) - math.log(3) + log_normal(value["x"][0])


def on_a_sphere(rng):
    x = rng.normal(size=3)
    return tuple((x / np.linalg.norm(x)).tolist())


def scaled(draw, log_density, mass):
    return Vector(draw, lambda value: log_density(value) + math.log(mass))


DENSITIES = {
    "normal": (lambda rng: float(rng.normal()), log_normal),
    "two modes": (two_modes, log_two_modes),
    "exponential": (lambda rng: float(rng.exponential()), lambda x: -x),
    "uniform": (lambda rng: float(rng.uniform(2, 5)), lambda x: -math.log(3)),
    "cauchy": (lambda rng: float(rng.standard_cauchy()), lambda x: -math.log(math.pi * (1 + x * x))),
}


@pytest.mark.parametrize("name", DENSITIES)
@pytest.mark.parametrize("mass", [0.9, 1.0, 1.1])
def test_a_density_with_a_tenth_too_much_or_too_little_is_found(name, mass):
    assert bool(_wrong_with(scaled(*DENSITIES[name], mass))) == (mass != 1)


@pytest.mark.parametrize("draw, log_density, said", [
    (or_zero, log_or_zero, ""), (or_zero, lambda x: log_or_zero(x, 1.0), "mass of about 1.[45]"),
    (labelled, log_labelled, ""), (labelled, lambda value: log_labelled(value) + 0.5, "mass of about 1.[67]"),
    (on_a_sphere, lambda x: -math.log(4 * math.pi), ""),
    (lambda rng: int(rng.integers(10**7)) / 100, lambda x: -math.log(10**7), ""),
    (lambda rng: 2 * int(rng.integers(10**8)), lambda x: -math.log(10**8), ""),
    (lambda rng: 2 * int(rng.integers(10**8)), lambda x: -math.log(10**7), "mass of about"),
    (lambda rng: tuple(rng.permutation(8).tolist()), lambda x: -math.lgamma(9), ""),
    (lambda rng: float(rng.normal() * 1e18), lambda x: log_normal(x, scale=1e18), ""),
    (lambda rng: None if rng.random() < 0.5 else float(rng.normal()),
     lambda x: math.log(0.5) + (0.0 if x is None else log_normal(x)), ""),
    (lambda rng: {"k": {int(rng.integers(10**6))}}, lambda x: -math.log(10**6), ""),
], ids=[
    "zero", "zero, wrong", "label", "label, wrong", "sphere", "cents", "even", "even, wrong", "orders", "large", "none",
    "sets",
])  # fmt: skip
def test_densities_of_mixed_values_and_lattices_are_judged_by_their_mass(draw, log_density, said):
    found = _wrong_with(Vector(draw, log_density))
    assert re.search(said, found) and bool(found) == bool(said)


def on_a_line(rng):
    x = rng.random()
    return [x, 1 - x]                                   # a Beta distribution on the simplex of two


@pytest.mark.parametrize("dist, said", [
    (Normal(constant=1.0), "mass of about 2.[45]"), (Normal(scale=2.0), "mass of about 0.7"), (Normal(), None),
    (Poisson(0.96), "sum to 0.9[56]"), (Poisson(1.01), "sum to 1.0"), (Poisson(), None),
    (normals(0.5 * 2 * math.log(2 * math.pi)), "mass of about 6"), (normals(0.0), None),
    (normals(-1.0), "mass of about 0.3"), (normals(0.0, 3), None), (normals(2.0, 3), "mass of about 7"),
    (Vector(lambda rng: rng.random(3), log_box), None), (Vector(two_modes, log_two_modes), None),
    (Vector(two_modes, lambda x: log_two_modes(x) - 0.5), "mass of about 0.6"), (Vector(on_a_line, log_box), None),
    (Vector(lambda rng: float(rng.standard_cauchy()), lambda x: -math.log(math.pi * (1 + x * x))), None),
])  # fmt: skip
def test_a_distribution_without_a_list_of_values_must_be_normalised(dist, said):
    def weigh(self, letter):
        self.kept = self.sample(dist)
        return 0.0

    program = letters(weigh)()
    if said is None:
        check_program(program)
    else:
        with pytest.raises(RuntimeError, match=said):
            check_program(program)


class Left(Distribution):
    """Draws without replacement, from a list that it keeps."""

    def __init__(self):
        self.data = []

    def sample(self, rng):
        left = [i for i in range(3) if i not in self.data]
        return int(left[rng.integers(len(left))])

    def log_prob(self, value):
        return -math.log(3 - len(self.data)) if value not in self.data else -math.inf


THIRD = 1 / 3
DISTRIBUTIONS = {
    "a sum of 0.96": (Listed(0.33, 0.33, 0.30), "sum to 0.96"),
    "a sum of 1.01": (Listed(0.34, 0.34, 0.33), "sum to 1.01"),
    "logits": (Listed(math.e**2, math.e, 1.0), "sum to 11.1"),
    "other probabilities": (Unlisted(0.9, 0.05, 0.05), None),
    "wrong probabilities": (type("Wrong", (Unlisted,), {"sample": Listed(THIRD, THIRD, THIRD).sample})(0.9, 0.05, 0.05),
                            "its draws give .* and its log_measure"),
    "a wrong measure": (Doubled(0.5, 0.3, 0.2), "its draws give .* and its log_measure"),
    "a value twice": (Listed(0.5, 0.25, 0.25, support=("a", "b", "c", "c")), "sum to 1.25"),
    "a value outside": (Listed(0.5, 0.5, 0.25, support=("a", "b")), "sum to 1.25|other choices"),
    "another stream": (Foreign(THIRD, THIRD, THIRD), "other values from an equal random stream"),
}  # fmt: skip


def samples(self, dist):
    self.s += self.sample(dist)


def proposes(self, dist):
    self.s += self.sample(Uniform(["a", "b", "c"]), proposal=dist)


def observes(self, dist):
    self.s += self.sample(Uniform(["a", "b", "c"]))
    self.observe(dist, self.s[-1])


@pytest.mark.parametrize("use", [samples, proposes, observes])
@pytest.mark.parametrize("dist, said", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_distribution_must_be_what_it_says(dist, said, use):
    def step(self):
        use(self, dist)
        if len(self.s) == 3:
            self.finish()

    program = drawn(step=step)()
    if said is None:
        check_program(program)
    else:
        with pytest.raises((RuntimeError, ValueError), match=said):
            check_program(program)


def test_a_distribution_that_grows_is_refused():
    def weigh(self, letter):
        self.kept.data.append(self.sample(self.kept))
        return 0.0

    with pytest.raises((RuntimeError, ValueError), match="other choices|not what its choices make|high <= 0"):
        check_program(letters(weigh, setting("kept", lambda _: Left()))())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sample_in_another_thread_is_refused():
    def step(self):
        thread = threading.Thread(target=lambda: self.sample(AB))
        thread.start()
        thread.join()
        self.finish()

    with pytest.raises(RuntimeError, match="in another thread"):
        check_program(drawn(step=step)())


# ---- contexts


class Reader(Model):
    """Text of at most eight tokens after two contexts. A table gives `go`, which reads them and returns a token."""

    go = None

    def __init__(self):
        super().__init__()
        self.a, self.b, self.left = LM.context("The cat"), LM.context("The dog"), 8

    def step(self):
        token = self.go(self)
        self.left -= 1
        if self.left == 0 or token == EOS:
            self.finish()


def reader(go):
    return type("Reading", (Reader,), {"go": staticmethod(go)})()


def forgets(self, derive=lambda dist: dist):
    token = self.sample(derive(self.transformer(self.a)))
    self.s += token
    return token


def forgets_after_an_observation(self):
    token = LM.vocab[int(self.sample(Uniform(300, 400)))]
    self.observe(self.transformer(self.a), token)
    self.s += token


def extends_the_first_again(self):
    self.s += self.extend(self.a, max_tokens=3).text


def second_stands(self):
    token = forgets(self)
    self.observe(self.transformer(self.b), token)
    self.a += token
    return token


def first_stands(self):
    token = forgets(self)
    self.observe(self.transformer(self.b), token)
    self.b += token
    return token


def second_stands_without_text(self):
    token = self.sample(self.transformer(self.a))
    self.observe(self.transformer(self.b), token)
    self.a += str(token)
    return token


def twice(self):
    token = forgets(self)
    self.a = self.a + token + token
    return token


def second_twice(self):
    token = second_stands(self)
    self.b += str(token) + str(token)
    return token


def span_twice(self):
    span = self.extend(self.a, max_tokens=2)
    self.s += span.text
    self.a = self.a + span.text + span.text


@pytest.mark.parametrize("go", [
    forgets, lambda self: forgets(self, lambda dist: dist.top_k(5)), forgets_after_an_observation,
    extends_the_first_again, second_stands, *slow(first_stands, second_stands_without_text),
])  # fmt: skip
def test_a_context_that_does_not_grow_is_refused(go):
    with pytest.raises(RuntimeError, match=r"after the same context of 2 tokens: add the token"):
        check_program(reader(go))


@pytest.mark.parametrize("go", [twice, second_twice, span_twice])
def test_a_context_that_grows_twice_is_refused(go):
    with pytest.raises(RuntimeError, match=r"a context of \d+ tokens grew twice by .*: add each token once"):
        check_program(reader(go))


def votes(self):
    self.votes = [*getattr(self, "votes", []), int(self.sample(self.transformer(LM.context("The cat was"))))]


def votes_in_the_text(self):
    self.s += f"{self.sample(self.transformer(self.a))},"


def drafts(self):
    self.drafts = [*getattr(self, "drafts", []), self.extend(self.a, max_tokens=3).text]


def one_observation_a_step(self):
    self.s += self.sample(AB)
    self.observe(self.transformer(self.a), LM.vocab[300 if self.s[-1] == "a" else 400])


def goes_back(self):
    """Draw a token; every third step forgets the text and begins again."""
    if self.left % 3 == 0:
        self.a, self.s = LM.context("The cat"), type(self.s)("")
    token = forgets(self)
    self.a += token
    return token


def replaces_its_draft(self):
    self.s = type(self.s)(str(self.sample(self.transformer(self.a).top_k(2))))


def undoes_its_first_tokens(self):
    """Draw a token; once, go back to the first context and the empty text before it."""
    if self.left == 7 and self.sample(Bernoulli(0.5)):
        self.a, self.s = LM.context("The cat"), type(self.s)("")
    token = forgets(self)
    self.a += token
    return token


def observes_a_label_that_may_be_drawn(self):
    p = self.transformer(self.a)
    token = self.sample(p, proposal=p.masked(np.isin(np.arange(len(LM.vocab)), [300, 400])))
    self.s += token
    self.a += token
    self.observe(self.transformer(self.b), LM.vocab[300])
    return token


def grows_by_a_fixed_text(self):
    token = forgets(self)
    self.a = self.a + token + " and"
    return token


def grows_with_a_vote(self):
    token = forgets(self)
    self.a += token
    self.score(0.1 * (self.sample(self.transformer(self.b)) == token))
    return token


@pytest.mark.parametrize("go", [
    votes, goes_back, observes_a_label_that_may_be_drawn,
    *slow(drafts, votes_in_the_text, one_observation_a_step, grows_by_a_fixed_text, grows_with_a_vote,
          replaces_its_draft, undoes_its_first_tokens),
])  # fmt: skip
def test_a_program_that_reads_after_one_context_again_passes(go):
    report = check_program(reader(go))
    assert report.steps > 50 and report.notes == [] and report.ended


@pytest.mark.parametrize("length", [None, *slow(300)])
def test_a_program_without_an_end_in_sight_passes(length):
    def step(self):
        self.n = getattr(self, "n", 0) + 1
        self.score(0.1 * (self.sample(AB) == "a"))
        if self.n == length:
            self.finish()

    report = check_program(drawn(step=step)())
    assert report.notes == [] and not report.ended


# ---- rare states


def in_a_rare_state(self, letter):
    return random.random() if self.s == "aaaa" else 0.0


def after_a_rare_choice(self, letter):
    rare = self.sample(Categorical({"often": 0.999, "rare": 0.001}))
    return random.random() if rare == "rare" else 0.0


def late_in_a_long_run(self):
    self.n = getattr(self, "n", 0) + 1
    self.score(0.1 * (self.sample(AB) == "a") - (random.random() if self.n == 150 else 0.0))


@pytest.mark.parametrize("program", [
    letters(in_a_rare_state), letters(after_a_rare_choice), drawn(step=late_in_a_long_run),
], ids=["state", "choice", "step"])  # fmt: skip
def test_randomness_in_a_rare_state_is_found(program):
    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(program())


# ---- batched functions


CALLS = [0]


def drifting(texts):
    CALLS[0] += 1
    return [-0.01 * CALLS[0] for _ in texts]


KEPT: dict[int, int] = {}


def late_drift(texts):
    CALLS[0] += 1
    return [-0.1 * (CALLS[0] > 30) for _ in texts]


def first_of_its_length(texts):
    return [KEPT.setdefault(len(text), text.count("a")) for text in texts]


BATCHED = {
    "relative to the batch": lambda texts: [text.count("a") / len(texts) for text in texts],
    "ranks": lambda texts: [sorted(texts).index(text) for text in texts],
    "drifting": drifting,
    "drifting after many calls": late_drift,
    "kept of other texts": first_of_its_length,
    "random": lambda texts: [random.random() for _ in texts],
}
CRITICS = {name: batched(function) for name, function in BATCHED.items()}
RIGHT_CRITIC = batched(lambda texts: [text.count("a") for text in texts])


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("where", ["module", "attribute", "class"])
def test_a_batched_function_that_depends_on_its_batch_is_found(name, where):
    programs = {
        "module": letters(lambda self, _: CRITICS[name](str(self.s))),
        "attribute": letters(by_attribute_of_text, setting("kept", lambda _: batched(BATCHED[name]))),
        "class": letters(by_attribute_of_text, kept=batched(BATCHED[name])),
    }
    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(programs[where]())


def by_attribute_of_text(self, letter):
    return self.kept(str(self.s))


def test_a_batched_function_of_each_text_passes():
    assert check_program(letters(lambda self, _: RIGHT_CRITIC(str(self.s)))()).notes == []


@pytest.mark.parametrize("p", [0.7, 1.0])
def test_a_score_that_looks_like_a_probability_is_noted(p):
    def step(self):
        self.score({"a": 0.7, "b": p}[self.sample(AB)])
        self.finish()

    with pytest.warns(UserWarning, match=r"score \(test_checking.py, line \d+\) is always between 0 and 1"):
        assert len(check_program(drawn(step=step)()).notes) == 1


def test_a_copy_of_another_shape_is_refused():
    class Marked(Letters):
        def copy(self):
            new = super().copy()
            new.tag = "copied"
            return new

    with pytest.raises(RuntimeError, match="a copy of the model is not as the model: self.tag was None and then 'cop"):
        check_program(Marked())


def test_a_factory_shows_what_the_constructor_takes_from_outside():
    drawn = letters(lambda self, _: 0.0, setting("kept", lambda _: random.random()))
    check_program(drawn())
    with pytest.raises(RuntimeError, match=r"rebuilt alone, is not .* self.kept was"):
        check_program(drawn)


@pytest.mark.parametrize("make", [lambda: (i for i in "ab"), threading.Lock, lambda: memoryview(b"a")])
def test_an_attribute_that_cannot_be_copied_is_named(make):
    with pytest.raises(TypeError, match=r"Program.kept cannot be copied .*: keep its data, such as a list"):
        check_program(letters(lambda self, _: 0.0, setting("kept", lambda _: [make()]))())


# ---- right programs


def length_of(model):
    return len(model.s)


def inner(self, letter):
    found = smc_standard(letters(lambda self, x: x == "a")(), 3, rng=self.rng, progress=False)
    self.s += found[int(self.rng.integers(len(found)))].s[0]
    return found.log_ml


def board(self, letter):
    self.kept[0][1] += letter == "a"
    return self.kept[0][1]


@functools.lru_cache
def count_in(text):
    return text.count("a")


def grows(self, letter):
    token = self.sample(self.kept[0].next_token())
    self.observe(self.kept[1].next_token(), token)
    self.kept = [context + token for context in self.kept]
    return 0.0


RIGHT = {
    "a nested list": letters(board, setting("kept", lambda _: [[0, 0], [0, 0]])),
    "the particle's stream": letters(lambda self, _: self.rng.random()),
    "the particle's stream in an attribute": letters(
        by_attribute(lambda kept: kept.random()), setting("kept", lambda self: self.rng)),
    "nested inference": letters(inner),
    "a shared cache by text": letters(
        lambda self, _: remembered(self.kept, str(self.s), self.s.count("a")), setting("kept", lambda _: {}),
        shared=("kept",)),
    "a pure closure": letters(by_attribute(lambda kept: kept("a")), setting("kept", lambda _: lambda x: x == "a")),
    "a partial": letters(by_attribute(lambda kept: kept()),
                         setting("kept", lambda self: functools.partial(length_of, self))),
    "arrays": letters(by_attribute(lambda kept: kept[0].sum()),
                      setting("kept", lambda _: (np.zeros(3), array.array("i", [1]), bytearray(2)))),
    "an iterator": letters(by_attribute(next), setting("kept", lambda _: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))),
    "a time that is measured": letters(lambda self, _: time.perf_counter() < 0),
    "dates": letters(by_attribute(lambda kept: isinstance(kept, datetime.datetime)),
                     setting("kept", lambda _: datetime.datetime(2020, 1, 2))),
    "two contexts": letters(grows, setting("kept", lambda _: [LM.context("The cat"), LM.context("A dog")])),
    "a set of objects": letters(lambda self, _: self.kept.add(Rows([])) or len(self.kept),
                                setting("kept", lambda _: {Rows([1]), Rows([2]), Rows([3])})),
    "a cached function": letters(lambda self, _: count_in(str(self.s))),
    "an infinite support": letters(lambda self, _: self.sample(Geometric(0.5))),
    "its own distribution": letters(lambda self, _: self.sample(Listed(0.5, 0.3, 0.2)) == "a"),
    "a text": lambda: ConstrainedText(LM, "Once", Regex(r" [a-z]{2,6}( [a-z]{2,8}){1,2}\."), max_tokens=8),
    "holes": lambda: Infilling(LM, "The[BLANK] sat on the[BLANK]."),
    "two prompts": lambda: PromptIntersection(LM, ["The cat", "The dog"], max_tokens=6),
}  # fmt: skip


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_program_passes(make):
    report = check_program(make())
    assert report.steps > 50 and report.notes == []


def test_the_outside_is_as_before_after_a_check():
    state, before = random.getstate(), dict(CACHE)
    with pytest.raises(RuntimeError, match=CHOICES):
        check_program(MISTAKES["a cache of the module by length"][0]())
    assert random.getstate() == state and before == CACHE


def test_an_attribute_of_an_identifier_is_compared():
    program = letters(lambda self, _: setattr(self, "tag", uuid.uuid4()) or 0.0)
    with pytest.raises(RuntimeError, match="tag"):
        check_program(program())


def test_another_type_than_a_model_is_refused():
    with pytest.raises(TypeError, match="check_program wants a Model or a function that makes one"):
        check_program(lambda: 3)
