"""Programs, functions and tasks of many kinds, whose runs are killed and resumed in a new process.

`python -m helpers.survivors FOLDER kill|resume STRIDE [SEED]` runs each of `PROGRAMS` and `RUNS`. A killed run ends by
`os._exit` in a forked child. The others print a line for each: its name, and the outcome.
"""

import abc
import collections
import dataclasses
import datetime
import enum
import functools
import math
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pydantic

from llmppl import (
    EOS,
    Categorical,
    ConstrainedText,
    Model,
    batched,
    importance_sampling,
    load_results,
    run_many,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import Distribution

LENGTH = 12                                             # steps of a program
TASKS = 30
D3 = Categorical({"x": 0.5, "y": 0.3, "z": 0.2})


class Plain(Model):
    coin = D3

    def weight(self):
        return 0.1 * len(set(str(self.s)))

    def step(self):
        self.s += str(self.sample(self.coin))
        self.score(self.weight())
        if len(self.s) == LENGTH:
            self.finish()


@functools.lru_cache(None)
def cached(text):
    return 0.1 * text.count("x")


class Cached(Plain):
    def weight(self):
        return cached(str(self.s))


class Coin(Distribution):
    support = ("x", "y")

    def sample(self, rng):
        return self.support[rng.integers(2)]

    def log_prob(self, value):
        return math.log(0.5)


class OwnDistribution(Plain):
    coin = Coin()


class Weights:
    def of(self, text):
        return 0.1 * text.count("x")


class NoRepr(Plain):
    shared = ("lock",)

    def __init__(self):
        super().__init__()
        self.weights, self.lock, self.called = Weights(), threading.Lock(), lambda text: 0.1

    def weight(self):
        with self.lock:
            return self.weights.of(str(self.s)) + self.called(self.s)


class Pet(pydantic.BaseModel):
    name: str = "x"


class Colour(enum.Enum):
    RED = "x"
    BLUE = "y"


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self):
        """Return a number."""


class Square(Shape):
    def area(self):
        return 0.2


FUNCTIONS = {"x": lambda text: 0.1, "y": lambda text: 0.2, "z": lambda text: 0.3}
LOCK, COUNTS, HALF = threading.Lock(), collections.defaultdict(lambda: 0), functools.partial(pow, 0.5)
WORDS = {"one", "two", "three", "four"}


class Globals(Plain):
    def weight(self):
        with LOCK:
            COUNTS[self.s] += 1
        kinds = Pet(), Colour(str(self.s[-1])) if self.s[-1] != "z" else Colour.RED, Square()
        return FUNCTIONS[str(self.s[-1])](self.s) + kinds[2].area() + HALF(3) + 0.1 * (self.s in WORDS)


class Held(Plain):
    """Program with an Enum, a pydantic model, an ABC, arrays, a set and a date in attributes."""

    def __init__(self):
        super().__init__()
        self.colour, self.pet, self.shape, self.array = Colour.RED, Pet(), Square(), np.arange(3.0)
        self.words, self.born, self.functions = WORDS, datetime.date(2020, 2, 29), FUNCTIONS

    def weight(self):
        return self.functions[str(self.s[-1])](self.s) + self.array[1] + self.shape.area()


class Tensors(Plain):
    def __init__(self):
        super().__init__()
        import torch

        self.tensor = torch.tensor([0.1, 0.2, 0.3])

    def weight(self):
        return float(self.tensor["xyz".index(self.s[-1])])


class Cell:
    def __init__(self):
        self.neighbours = []


class Board(Plain):
    def __init__(self, n=6):
        super().__init__()
        self.cells = [[Cell() for _ in range(n)] for _ in range(n)]
        for i, j in np.ndindex(n, n):
            for a, b in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
                if 0 <= a < n and 0 <= b < n:
                    self.cells[i][j].neighbours.append(self.cells[a][b])


critic = batched(lambda texts: [0.1 * text.count("x") for text in texts])


class Critic(Plain):
    def weight(self):
        return critic(str(self.s))


class Streams(Plain):
    def weight(self):
        return 0.1 * self.rng.random()


def letters(ids):
    """Logits that depend on every token, computed in float64."""
    return np.random.default_rng([len(ids), *ids]).normal(size=5)


@functools.lru_cache(None)
def the_lm():
    from llmppl import CachedTransformer, Vocabulary

    return CachedTransformer(letters, Vocabulary([b"a", b"b", b"c", b" ", b""], eos_ids=[4]))


class LateModel(Model):
    """Program that loads its language model in its first step, and samples tokens in tuples."""

    tokens = ()

    def step(self):
        after = the_lm().context("a")
        for token in self.tokens:
            after += token
        token = self.sample(self.transformer(after))
        self.tokens = (*self.tokens, token)
        self.s += "" if token == EOS else token
        if len(self.tokens) == LENGTH:
            self.finish()


def closed():
    """Return a program that is local to a function."""
    weights = {letter: 0.1 * i for i, letter in enumerate("xyz")}

    class Local(Plain):
        def weight(self):
            return weights[str(self.s[-1])]

    return Local()


def unsourced():
    """Return a program whose source is not known."""
    names = {"Plain": Plain, "__name__": "__main__"}
    exec("class Shell(Plain):\n  def weight(self): return 0.2 * (self.s[-1] in {'x', 'y'})", names)
    return names["Shell"]()


@dataclasses.dataclass
class Task:
    name: str
    numbers: np.ndarray
    words: frozenset


PROGRAMS = {
    each.__name__: each
    for each in (Plain, Cached, OwnDistribution, NoRepr, Globals, Held, Tensors, Board, Critic, Streams, LateModel,
                 closed, unsourced)
}  # fmt: skip
PROGRAMS["ready"] = lambda: ConstrainedText(the_lm(), "a", ["abcabcabc", "abc abc abc", "aaaaaaa"], end="eos")
STEER = functools.partial(smc_steer, N=4, K=2, progress=False)
STANDARD = functools.partial(smc_standard, N=6, progress=False)


def of(program, task, rng):
    return importance_sampling(program(), 3, rng=rng, max_steps=4)


def fails(task, rng):
    if random.random() < 0.2:                           # another time, it does not
        raise KeyError("mine")
    return of(Plain, task, rng)


RUNS = {name: functools.partial(of, program) for name, program in PROGRAMS.items()}
KINDS = {
    "texts": [f"task {i}" for i in range(TASKS)],
    "sets": [{"one", "two", f"task {i}"} for i in range(TASKS)],
    "dicts": [dict.fromkeys({"one", "two"}, [i, (i, None)]) for i in range(TASKS)],
    "records": [Task(str(i), np.arange(i), frozenset(WORDS)) for i in range(TASKS)],
    "pets": [Pet(name=str(i)) for i in range(TASKS)],
    "enums": [(Colour.RED, datetime.date(2020, 1, 1 + i), i) for i in range(TASKS)],
}


def outcome(particles):
    return particles.texts, particles.log_weights.round(9).tolist(), round(particles.log_ml, 9)


def checkpointed(name, folder, kill=0):
    def stop(step):
        if kill and step.index == kill:
            os._exit(9)

    algorithm = STANDARD if name in ("Plain", "Streams", "ready") else STEER
    return outcome(algorithm(PROGRAMS[name](), seed=1, checkpoint=folder / f"{name}.ckpt", every=1, on_step=stop))


def tasks(name, folder, kill=0, kind="texts"):
    path = folder / f"{name}.{kind}.db"
    for number, _ in enumerate(run_many(RUNS[name], KINDS[kind], seed=1, to=path, resume=True, together=4), 1):
        if number == kill:
            os._exit(9)
    found = load_results(path)
    assert [each.index for each in found] == [*range(TASKS)]
    return [outcome(each.particles) for each in found]


def every(stride=1):
    """Return the names and calls of all kinds, or of some."""
    found = [(f"checkpoint {name}", functools.partial(checkpointed, name)) for name in PROGRAMS]
    found += [(f"tasks {name}", functools.partial(tasks, name)) for name in RUNS]
    found += [(kind, functools.partial(tasks, "Plain", kind=kind)) for kind in KINDS]
    return found[::stride]


def main(folder, how, stride, seed=0):
    rng, folder = random.Random(seed), Path(folder)
    for name, call in every(stride):
        if how == "kill":
            if os.fork() == 0:
                try:
                    call(folder, kill=rng.randrange(1, LENGTH))
                except BaseException as error:
                    print(name, "raised", repr(error), flush=True)
                os._exit(0)
            os.wait()
            rng.random()
        else:
            try:
                print(name, call(folder), flush=True)
            except Exception as error:
                print(name, "raised", repr(error), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
