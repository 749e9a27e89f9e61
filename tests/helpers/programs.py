"""Small programs that several test files run."""

import re

from helpers.tiny import tiny_lm
from llmppl import Bernoulli, Categorical, ConstrainedText, Geometric, Model, PromptIntersection, Regex, Uniform


class Coins(Model):
    def step(self):
        if self.sample(Bernoulli(0.3)):
            self.s += "xy"[self.sample(Bernoulli(0.6))]
            self.observe(Bernoulli(0.2 + 0.1 * len(self.s)), True)
        self.condition(len(self.s) < 4)
        if self.sample(Bernoulli(0.25)):
            self.finish()


class Rejects(Model):
    """Weighted draws, with and without a target of their own."""

    def step(self):
        p = Categorical([0.4, 0.3, 0.2, 0.1], "abcd")
        if len(self.s) % 2:
            self.s += self.sample(p, proposal=p.where(lambda letter: letter != "a"))
        else:
            self.s += self.sample(p.where(lambda letter: letter in "bd"))
        if len(self.s) == 5:
            self.finish()


class Twists(Model):
    def step(self):
        value = self.sample(Uniform(1, 6), proposal=Categorical([0.1, 0.1, 0.1, 0.2, 0.2, 0.3], range(1, 7)))
        self.s += str(value)
        self.twist(-0.2 * value)
        if value == 6 or len(self.s) == 4:
            self.finish()


class Streams(Model):
    """Direct draws from the stream before, between and after samples, and in steps without samples."""

    def step(self):
        rng = self.rng
        self.s += f"{rng.integers(10)}{self.sample(Geometric(0.4))}{rng.integers(10)}"
        if len(self.s) > 6:
            self.s += f"{self.sample(Uniform(0, 9))}{self.rng.integers(10)}"
        if len(self.s) > 15:
            self.finish()


class Lends(Model):
    def __init__(self):
        super().__init__()
        self.inner = Coins()

    def step(self):
        self.inner.rng = self.rng
        if not self.inner.finished:
            self.inner.step()
        self.s = self.inner.s + "ab"[self.sample(Bernoulli(0.5))]
        if self.inner.finished:
            self.finish()


class Pauses(Model):
    """A program that samples in every other step only."""

    steps = 0

    def step(self):
        self.steps += 1
        if self.steps % 2:
            self.score(-0.5)
        else:
            self.s += str(self.sample(Uniform(0, 9)))
        if self.steps == 7:
            self.finish()


def constrained():
    return ConstrainedText(tiny_lm(6), "a", Regex("(a|bc)*"), max_tokens=5)


def intersection():
    lm = tiny_lm(6)
    return PromptIntersection(lm, ["ab", "ca"], max_tokens=4)


PROGRAMS = {
    each.__name__: each for each in (Coins, Rejects, Twists, Streams, Lends, Pauses, constrained, intersection)
}


def what_the_program_made(particle):
    """Return all that the program set: attributes, contexts, and the weight of each statement."""
    own = {"finished", "inner", "calls"}
    attributes = {name: value for name, value in vars(particle).items() if not (name.endswith("_") or name in own)}
    return attributes | {"s": particle.s, "death": particle.death, "limit": particle._limit_}


class Words(Model):
    """Words that are finished, taken back, twisted, killed and weighed, so that every field occurs."""

    def step(self):
        self.s = self.s[:-1] + self.sample(Categorical({"ab": 0.6, "c": 0.3, "": 0.1}))
        self.score(-0.5)
        self.condition(len(self.s) != 4)
        if self.sample(Bernoulli(0.2)):
            return self.finish()
        self.twist(0.25 * len(self.s))


class EvenLength:
    """A custom recognizer of texts of an even number of bytes without b."""

    start = 0

    def step(self, state, byte):
        return None if byte == ord("b") else 1 - state

    def accepts(self, state):
        return state == 0


def nested(text):
    return re.fullmatch("(a*)c(b*)", text) is not None and text.count("a") == text.count("b")


class ThreeCoins(Model):
    """Three coins that show heads with probability 0.3; all must, so that Z = 0.027."""

    def step(self):
        heads = self.sample(Bernoulli(0.3))
        self.s += "H" if heads else "T"
        self.condition(heads)
        if len(self.s) == 3:
            self.finish()
