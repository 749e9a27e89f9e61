"""Tests of identities: equal programs are equal in every process, and a difference anywhere is named."""

import dataclasses
import enum
import functools
import json
import logging
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch

from llmppl import Bernoulli, Categorical, JsonSchema, Model, Regex, Vocabulary, smc_steer
from llmppl.constraints import DFA, Grammar, any_case, within
from llmppl.distributions import Distribution, Finite, Geometric, Uniform, mixture, product
from llmppl.inference.resuming.fingerprint import difference, identity
from llmppl.lm import Engine
from llmppl.lm.transformer import CachedTransformer
from llmppl.models.batched import batched

VOCAB = Vocabulary([*(bytes([i]) for i in range(256)), b""], [256])
WEIGHTS = [1.0]
LOG = logging.getLogger("identity")
LOCK = threading.Lock()


class Die(Distribution):
    support = (0, 1)

    def __init__(self, p):
        self._p = p

    def sample(self, rng):
        return int(rng.random() < self._p)

    def log_prob(self, value):
        return math.log(self._p if value else 1.0 - self._p)


class Loaded(Finite):
    def __init__(self, bias):
        super().__init__(["a", "b"], lambda: np.zeros(2))
        self._bias = bias


class Critic:
    def __init__(self, w):
        self._w = w
        self.lock, self.log, self.pattern = threading.Lock(), LOG, re.compile("a+")

    @functools.cached_property
    def table(self):
        return {"a": 1.0}

    def score(self, texts):
        return [self._w * text.count("1") for text in texts]

    def __call__(self, text):
        return self.score([text])[0]


class Slots:
    __slots__ = ("_w",)

    def __init__(self, w):
        self._w = w


class Node:
    def __init__(self, w):
        self.me, self._w = self, w


@dataclasses.dataclass
class Data:
    w: float
    more: list = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    w: float


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Words(list):
    def __init__(self, w):
        super().__init__("ab")
        self._w = w


class Reward(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self._w = w


class Chosen:
    """Object whose `__reduce__` leaves out its connection."""

    def __init__(self, w):
        self.w, self.connection = w, sqlite3.connect(":memory:")

    def __reduce__(self):
        return Chosen, (self.w,)


def in_a_list(w):
    weights = [w]
    return lambda text: weights[0]


def in_a_default(w):
    def score(text, *, weights=(w, {"a": w})):
        return weights

    return score


@functools.lru_cache(None)
def cached(text):
    return WEIGHTS[0]


class M(Model):
    def __init__(self, it):
        super().__init__()
        self.it = it

    def step(self):
        self.s += str(int(self.sample(Bernoulli(0.5))))
        if len(self.s) == 3:
            self.finish()


class Reads(M):
    def step(self):
        self.score(WEIGHTS[0])
        self.finish()


class Rolls(Model):
    def __init__(self, die):
        super().__init__()
        self.die = die

    def step(self):
        self.s += str(self.sample(self.die))
        if len(self.s) == 3:
            self.finish()


MAKERS = {
    "a distribution": (Die, r"the attribute it\._p was 1\.0, and is -3\.0"),
    "a finite one": (Loaded, r"the attribute it\._bias was 1\.0, and is -3\.0"),
    "a list of them": (lambda w: [Die(w)], r"the attribute it\._p was 1\.0"),
    "a private attribute": (Critic, r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a bound critic": (lambda w: batched(Critic(w).score), r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a partial": (lambda w: functools.partial(in_a_list, Critic(w)), r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a slot": (Slots, r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a circle": (Node, r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a dataclass": (Data, r"the attribute it\.w was 1\.0, and is -3\.0"),
    "a named tuple": (Pair, r"the attribute it was Pair\(w=1\.0\), and is Pair\(w=-3\.0\)"),
    "a list of one's own": (Words, r"the attribute it\._w was 1\.0, and is -3\.0"),
    "a network": (Reward, r"the attribute it\._w was 1\.0, and is -3\.0"),
    "what pickles": (Chosen, "the attribute it is another <.*Chosen object>"),
    "a closure": (in_a_list, r"the variable weights of <lambda> was \[1\.0\], and is \[-3\.0\]"),
    "an object in a closure": (
        lambda w: (lambda critic: lambda text: critic(text))(Critic(w)),
        r"the variable critic of <lambda>\._w was 1\.0",
    ),
    "a default": (in_a_default, r"the default weights of score was \(1\.0, \{'a': 1\.0\}\), and is \(-3\.0"),
    "an array in a dict": (
        lambda w: {"a": np.array([w])},
        r"the attribute it was \{'a': array\(\[1\.\]\)\}, and is \{'a': array\(\[-3\.\]",
    ),
    "a tensor": (lambda w: torch.tensor([w]), r"the attribute it was tensor\(\[1\.\]\), and is tensor\(\[-3\.\]\)"),
    "a tensor of half precision": (
        lambda w: torch.tensor([w], dtype=torch.bfloat16),
        r"the attribute it was tensor\(\[1\.\], dtype=torch.bfloat16",
    ),
    "a method of a builtin": (lambda w: [w].__contains__, "the attribute it "),
    "an array of weights": (lambda w: Finite(["a", "b"], [0.0, w]), "the attribute it "),
    "a product": (lambda w: product(Bernoulli(0.5), Bernoulli(0.1), powers=[1.0, w]), "the attribute it "),
    "where": (lambda w: Uniform(1, 6).where(in_a_list(w)), r"the variable weights of <lambda> was \[1\.0\]"),
}  # fmt: skip


def told(program):
    return {**json.loads(json.dumps(identity(program)[0])), "options": {}, "stream": []}


@pytest.mark.parametrize("made, named", MAKERS.values(), ids=MAKERS)
def test_a_difference_inside_an_attribute_is_named_by_its_path(made, named):
    assert difference(told(M(made(1.0))), told(M(made(1.0)))) is None
    assert re.match(named, difference(told(M(made(1.0))), told(M(made(-3.0)))))


def test_a_global_that_a_step_reads_is_compared_and_named(monkeypatch):
    before, cache = told(Reads(None)), told(M(cached))
    cached("a")
    assert cache == told(M(cached)) and before == told(Reads(None))
    monkeypatch.setitem(globals(), "WEIGHTS", [2.0])
    for other, now in (before, Reads(None)), (cache, M(cached)):
        assert difference(other, told(now)) == "the global WEIGHTS was [1.0], and is [2.0]"
    assert told(M(None)) == told(M(None)) and difference(told(M(None)), before) is not None


def test_changed_code_of_a_held_class_is_named():
    def kind(**methods):
        return type("Kind", (Critic,), {"__qualname__": "Kind", **methods})

    one, other = kind(score=lambda self, texts: [0.0]), kind(score=lambda self, texts: [1.0])
    assert difference(told(M(one(1.0))), told(M(one(1.0)))) is None
    assert "the code of " in difference(told(M(one(1.0))), told(M(other(1.0))))


def test_a_finished_run_of_another_die_is_refused_by_its_private_attribute(tmp_path):
    path = tmp_path / "run.ckpt"
    smc_steer(Rolls(Die(0.5)), 4, 2, seed=0, checkpoint=path)
    with pytest.raises(ValueError, match=r"run.ckpt is .*: the attribute die\._p was 0\.5, and is 0\.99\. It is left"):
        smc_steer(Rolls(Die(0.99)), 4, 2, seed=0, checkpoint=path)
    assert smc_steer(Rolls(Die(0.5)), 4, 2, seed=0, checkpoint=path).stats.rows == 0


@pytest.mark.parametrize("made", [lambda: (i for i in range(3)), lambda: sqlite3.connect(":memory:")])
def test_a_value_without_identity_is_a_TypeError_before_the_run(made, tmp_path):
    with pytest.raises(TypeError, match=r"the attribute it\.held holds <.*>, which no other process can compare"):
        program = M(Critic(1.0))
        program.it.held = made()
        identity(program)
    with pytest.raises(TypeError, match="the attribute it holds more than"):
        identity(M([[i] for i in range(1_000_001)]))


def test_caches_are_not_part_of_an_identity():
    schema = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    index, critic, dist = Regex("(a|b)*c").index(VOCAB), Critic(1.0), Categorical({"a": 0.5, "b": 0.5})
    batch, mixed = batched(critic.score), mixture([dist, dist.tempered(2.0)], [0.5, 0.5])
    program = M([index, schema.index(VOCAB), critic, dist, batch, mixed, Grammar('start: "a"+'), Geometric(0.5)])
    before = told(program)
    index.mask(index.start), critic.table, dist.log_probs(), dist.top_k(1).log_probs(), mixed.log_probs()
    batch("a1"), program.it[1].mask(program.it[1].start), dist.where(bool).propose(np.random.default_rng(0))
    assert told(program) == before


LAZY = {
    "edits": lambda word: within(DFA.from_strings([word]), 1),
    "a concatenation": lambda word: DFA.from_strings([word]) + Regex("[0-9]+"),
    "a look-ahead": lambda word: Regex("a*") + Regex(f"(?={word}).+"),
    "no look-ahead": lambda word: Regex("a*") + Regex(f"(?!{word}).+"),
    "any case": lambda word: any_case(DFA.from_strings([word])),
    "an index": lambda word: within(DFA.from_strings([word]), 1).index(VOCAB),
}


@pytest.mark.parametrize("made", LAZY.values(), ids=LAZY)
def test_automata_are_compared_by_their_language(made):
    used = made("hello")
    for text in ("hallo", "zebra", "HELLO", "aahello7"):
        (used if isinstance(used, DFA) else used.recognizer).accepts_text(text)
    assert difference(told(M(used)), told(M(made("hello")))) is None
    assert "the attribute it " in difference(told(M(used)), told(M(made("hella"))))


def test_an_engine_keeps_its_identity_after_a_run():
    class Mine(Engine):
        scale = 1.0

        def forward(self, contexts, asked):
            self.tokens += len(asked)
            self._cache = contexts
            return np.stack([np.arange(257) * self.scale for _ in asked])

    lm = CachedTransformer(Mine(), VOCAB)
    before = told(M(lm))
    lm.context("a").log_probs()
    assert told(M(lm)) == before
    Mine.scale = 2.0
    assert "of other weights" in difference(before, told(M(lm)))


PROGRAM = """
import datetime, json, pathlib, sys
from fractions import Fraction

sys.path[:0] = json.loads(sys.argv[1])
from test_fingerprint import *

names = {"x" + str(i) for i in range(50)}
pairs = {(name, i) for i, name in enumerate(sorted(names))}
held = [names, pairs, sorted(pairs), frozenset(names), {name: {name} for name in names}, Colour.RED]
objects = [*(made(1.0) for made, _ in MAKERS.values()), Colour, LOCK, LOG, sys.stdout, re.compile("b"), np.float32, len]
objects += [threading.Event(), np.random.default_rng(0), datetime.date(2020, 1, 1), pathlib.Path("a"), Fraction(1, 2)]
grammars = [Grammar('start: "a"+ | "b"'), Regex("[ab]+") & Regex("a+b*"), JsonSchema({"type": "integer"})]
program = M(None)
for i, it in enumerate([*held, *objects, *grammars, *(grammar.index(VOCAB) for grammar in grammars)]):
    setattr(program, f"it{i}", it)
print(json.dumps(identity(program)[0]["parts"]))
"""


def test_an_identity_does_not_depend_on_the_hash_seed():
    parts = []
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
        ran = subprocess.run(arguments, capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr
        parts.append({name: digest for name, (_, digest) in json.loads(ran.stdout).items()})
    assert parts[0] == parts[1] == parts[2] and len(parts[0]) > 100


def test_the_order_of_a_set_of_objects_does_not_matter():
    def held():
        return {Critic(w) for w in range(20)}

    whole = [told(M(held())) for _ in range(5)]
    assert not any(difference(whole[0], other) for other in whole)
