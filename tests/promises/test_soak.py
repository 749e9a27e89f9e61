"""Long runs: what is kept stays under its budget, what is dropped is freed, and the answers stay right.

Memory is counted in blocks that Python has allocated, of which one object is one to five: a count, and the same on
every machine. What numpy and torch allocate beside them shows in resident memory, whose margin is 8 MB.
"""

import gc
import math
import sys
import warnings

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.families import VOCAB, V, at, check_books, error_of, family_lm, together

from llmppl.inference import smc_standard, smc_steer
from llmppl.lm.cache import ROW_OVERHEAD, SLOT_OVERHEAD
from llmppl.lm.transformer import CachedTransformer
from llmppl.models.model import Model

pytestmark = pytest.mark.slow
SLOT, ROW = 256 + SLOT_OVERHEAD, 4 * V + ROW_OVERHEAD                   # bytes, of "llama"
MARGIN = 8 << 20                                        # what allocators keep for themselves
TOKENS = range(3, V)                                    # those that are not special


def toy_lm(**limits):
    """A function as a model, in which the next token does not depend on what was read."""
    return CachedTransformer(lambda ids: [0.0] * V, VOCAB, **limits)


def resident():
    """Bytes of memory that this process has, freed blocks of Python's left out as far as may be."""
    gc.collect()
    try:
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * 4096
    except OSError:
        pytest.skip("resident memory is read from /proc")


def ask_round(lm, rng, kept):
    """One round: a new prompt, two of its continuations, a continuation of an older prompt; one answer is checked."""
    prompt = at(lm, rng.choice(TOKENS, int(rng.integers(2, 25))).tolist())
    contexts = [prompt, prompt + lm.vocab[int(rng.choice(TOKENS))], prompt + lm.vocab[int(rng.choice(TOKENS))]]
    contexts.append(kept[int(rng.integers(len(kept)))] + lm.vocab[int(rng.choice(TOKENS))])
    together([context.log_probs for context in contexts])
    kept[int(rng.integers(len(kept)))] = prompt
    return contexts[int(rng.integers(4))]


def test_thousands_of_rounds_over_changing_prompts_keep_memory_constant():
    rounds = repetitions(5000, 250)
    lm, rng = family_lm("llama", cache_bytes=200 * (SLOT + ROW)), np.random.default_rng(0)
    kept = [at(lm, [3, 4]) for _ in range(8)]
    seen = []
    for n in range(rounds):
        context = ask_round(lm, rng, kept)
        if n % 50 == 0:
            assert error_of(lm, context) <= 1e-4
        if n % (rounds // 10) == 0:
            check_books(lm)
            del context
            seen.append((resident(), sys.getallocatedblocks()))
    check_books(lm)
    assert lm.store.evictions > 10 * rounds             # slots were given up in every round
    assert lm.stats.tokens > 15 * rounds
    bytes_after, blocks_after = (max(each) for each in zip(*seen[6:], strict=True))
    bytes_before, blocks_before = (max(each) for each in zip(*seen[1:4], strict=True))
    assert bytes_after - bytes_before < MARGIN
    assert blocks_after - blocks_before < 2_000         # less than one a round


class Weighed(Model):
    """Tokens of equal probability, each with the weight exp(0.3 (token mod 3)): log Z is t times that of one step."""

    def __init__(self, lm):
        super().__init__()
        self.context = at(lm, [3])

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.score(0.3 * (int(token) % 3))
        self.context = self.context + token


@pytest.mark.parametrize("how, N, t", [("standard", (500, 100), (500, 100)), ("steer", (150, 20), (500, 100))])
def test_memory_does_not_grow_with_the_steps_of_many_particles(how, N, t):
    N, t = repetitions(*N), repetitions(*t)
    lm = toy_lm(cache_bytes=1 << 20)
    seen = []

    def watch(step):
        if step.index % (t // 10) == 0:
            seen.append((resident(), sys.getallocatedblocks()))
            check_books(lm)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "standard":
            particles = smc_standard(Weighed(lm), N, seed=0, max_steps=t, on_step=watch, progress=False)
        else:
            particles = smc_steer(Weighed(lm), N, 2, seed=0, max_steps=t, on_step=watch, progress=False)
    weights = np.exp(0.3 * (np.arange(V) % 3))
    variance = t * np.var(weights) / np.mean(weights) ** 2 / N          # of log Z-hat, if resampled at every step
    assert abs(particles.log_ml - t * math.log(np.mean(weights))) <= 4.5 * math.sqrt(1.5 * variance)
    bytes_at, blocks_at = (np.array(each) for each in zip(*seen, strict=True))
    first, last = blocks_at[4] - blocks_at[1], blocks_at[9] - blocks_at[6]      # of three tenths each
    assert last <= 1.25 * max(first, 0) + 1_000         # what particles share of their past, and a record a step
    assert last <= 5 * N * (3 * t // 10)                # a context of each particle at each step would be more
    assert bytes_at[9] - bytes_at[6] <= 1_000 * N * (3 * t // 10) + MARGIN
