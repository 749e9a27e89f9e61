"""What tests run in a process that is killed, or has a full disk. It loads no torch, so that it begins at once."""

import itertools

import numpy as np

from llmppl import Bernoulli, CachedTransformer, Model, PromptIntersection, Vocabulary, importance_sampling, smc_steer

PROMPTS = ["".join(each) for each in itertools.product("abc", repeat=3)]


class Coin(Model):
    def step(self):
        self.s += "x" * self.sample(Bernoulli(0.5))
        self.finish()


def coin(task, rng):
    return importance_sampling(Coin(), 2, rng=rng)


VOCAB = Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3])


def hashed(ids):
    """Logits that depend on every token."""
    return 2.0 * np.random.default_rng(ids).random(4)


def fresh():
    """A run on a language model that has computed nothing yet."""
    lm = CachedTransformer(hashed, VOCAB)
    return lambda task, rng: smc_steer(PromptIntersection(lm, [task, "a"], max_tokens=5), 3, 2, rng=rng)
