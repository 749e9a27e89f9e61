"""Determinism: the same seed gives the same particles, whatever is cached and however it is batched, anywhere."""

import functools
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers.common import slow
from helpers.families import V, at, family_lm

from llmppl.inference import importance_sampling, smc_standard, smc_steer
from llmppl.models.model import Model


class Rhyme(Model):
    """Two prompts, a masked proposal, soft scores and a condition: everything that could notice a difference."""

    def __init__(self, lm):
        super().__init__()
        self.contexts = [at(lm, range(3, 13)), at(lm, [*range(3, 10), 20])]
        self.mask = np.arange(V) % 4 != 3

    def step(self):
        first, second = [self.transformer(context) for context in self.contexts]
        token = self.sample(first, proposal=first.masked(self.mask).tempered(1.5))
        self.observe(second, token)
        if token.is_eos:
            return self.finish()
        self.s += token
        self.condition(token % 7 != 1)
        self.twist(0.1 * (token % 3))
        self.contexts = [context + token for context in self.contexts]


RUNS = {
    "steer": functools.partial(smc_steer, N=6, K=3),
    "standard": functools.partial(smc_standard, N=12),
    "importance": functools.partial(importance_sampling, N=12),
}


def run(how, lm, seed=5):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # a budget too small for a context
        particles = RUNS[how](Rhyme(lm), seed=seed, max_steps=10)
    return [str(p) for p in particles], particles.log_weights.tolist(), particles.log_ml


def same(found, right):
    texts, log_weights, log_ml = right
    assert found[0] == texts and len(texts) > 0
    assert np.allclose(found[1], log_weights, atol=1e-9, rtol=0)         # batches of other shapes round differently
    assert abs(found[2] - log_ml) < 1e-9


@pytest.mark.parametrize("how", ["steer", "standard", "importance"])
def test_a_warm_cache_changes_nothing(how):
    lm = family_lm("llama", torch.float64)
    first = run(how, lm)
    assert run(how, lm) == first                        # to the last bit: everything was answered before
    run(how, lm, seed=6)
    assert run(how, lm) == first
    lm.store.fit_rows(lm.store.budget)
    same(run(how, lm), first)


@pytest.mark.parametrize("how", ["steer", "standard", "importance"])
def test_two_cold_caches_agree_to_the_last_bit(how):
    assert run(how, family_lm("llama", torch.float64)) == run(how, family_lm("llama", torch.float64))


@pytest.mark.parametrize("how", ["steer", *slow("standard", "importance")])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "mamba"])
@pytest.mark.parametrize("limits", [
    {"max_batch_tokens": 1}, {"max_batch_tokens": 7}, {"cache_bytes": 0}, {"cache_bytes": 12_000},
    {"cache_bytes": 30_000, "max_batch_tokens": 30},
], ids=str)  # fmt: skip
def test_batch_and_cache_sizes_change_nothing(how, name, limits):
    same(run(how, family_lm(name, torch.float64, **limits)), run(how, family_lm(name, torch.float64)))


def test_other_seeds_give_other_particles():
    lm = family_lm("llama", torch.float64)
    assert len({tuple(run("steer", lm, seed)[0]) for seed in range(5)}) == 5


def elsewhere(code):
    """Return the values that code prints in a new process, which hashes texts in another way."""
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


ALONE = """
import json
from llmppl import CachedTransformer, ConstrainedText, Regex, smc_standard, smc_steer
lm = CachedTransformer.from_pretrained(engine="numpy")
program = ConstrainedText(lm, "Once upon a time", Regex("( [a-z]{1,6}){2,4}"), max_tokens=8)
runs = smc_steer(program, 4, 2, seed=1), smc_standard(program, 6, seed=1)
found = [(particles.texts, particles.log_weights.tolist(), particles.log_ml) for particles in runs]
print(json.dumps(found))
"""


def test_another_process_gives_the_same_particles():
    here = {}
    exec(ALONE, here)
    for found, right in zip(elsewhere(ALONE), here["found"], strict=True):
        same(found, right)


@pytest.mark.slow
def test_another_process_with_torch_gives_the_same_particles():
    code = (
        "import json, torch; torch.set_num_threads(1);"
        "from helpers.families import family_lm; from test_determinism import run;"
        "print(json.dumps([run(how, family_lm('llama', torch.float64)) for how in ('steer', 'standard')]))"
    )
    for found, how in zip(elsewhere(code), ("steer", "standard"), strict=True):
        same(found, run(how, family_lm("llama", torch.float64)))
