"""Work: a run costs its prompts and one token for each distinct context asked for, and nothing is run twice."""

import numpy as np
import pytest
from helpers.families import V, at, check_books, family_lm, together
from helpers.tiny import cold_lm, cold_lm_with_bos, log_probs_by_hand

from llmppl import EOS
from llmppl.inference import smc_standard, smc_steer
from llmppl.lm import Batch, NextToken
from llmppl.models.model import Model

FAMILIES = ["gpt2", "mistral-sliding", "opt"]


class Seen(set):
    """The contexts asked for, by their token ids; one set for all copies of a program."""

    def __deepcopy__(self, memo):
        return self

    def dist(self, context):
        self.add(tuple(int(i) for i in context.tokens))
        return NextToken(context)

    def prefixes(self):
        """Every token that has to be run, as the path that ends in it."""
        return {ids[:n] for ids in self for n in range(1, len(ids) + 1)}


class Chat(Model):
    """Text after several prompts at once: drawn under the first with some tokens masked, observed under the others."""

    def __init__(self, lm, prompts, seen):
        super().__init__()
        self.seen = seen
        self.contexts = [at(lm, ids) for ids in prompts]
        self.mask = np.arange(V) % 3 != 1

    def step(self):
        first, *others = [self.seen.dist(context) for context in self.contexts]
        token = self.sample(first, proposal=first.masked(self.mask))
        for other in others:
            self.observe(other, token)
        if token.is_eos:
            return self.finish()
        self.s += token
        self.contexts = [context + token for context in self.contexts]


PROMPTS = {
    "one prompt": [list(range(3, 15))],
    "two prompts": [list(range(3, 15)), list(range(20, 25))],
    "prompts that share a prefix": [[*range(3, 15), 7], [*range(3, 15), 8, 9], [*range(3, 15)]],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", ["steer", "standard"])
def test_tokens_run_are_prompt_tokens_and_distinct_contexts(how, name, prompts):
    lm, seen = family_lm(name), Seen()
    options = {"seed": 1, "max_steps": 12}
    program = Chat(lm, prompts, seen)
    particles = smc_steer(program, 6, 3, **options) if how == "steer" else smc_standard(program, 10, **options)
    assert len(particles) > 0 and len(seen) > 9
    prompt_tokens = len({tuple(ids[:n]) for ids in prompts for n in range(1, len(ids) + 1)})
    further = {ids for ids in seen if list(ids) not in prompts}
    assert lm.stats.tokens == len(seen.prefixes()) == prompt_tokens + len(further)
    assert particles.stats.tokens == lm.stats.tokens
    assert lm.stats.rows == len(seen)
    assert lm.stats.rounds <= 12                        # prompts and particles of a step are answered together
    check_books(lm)


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_second_run_on_the_same_prompts_runs_no_token_again(prompts):
    lm, seen = family_lm("llama"), Seen()
    first = smc_steer(Chat(lm, prompts, seen), 5, 2, seed=3, max_steps=10)
    tokens, rounds = lm.stats.tokens, lm.stats.rounds
    again = smc_steer(Chat(lm, prompts, seen), 5, 2, seed=3, max_steps=10)
    assert (lm.stats.tokens, lm.stats.rounds) == (tokens, rounds)
    assert again.stats.tokens == 0 and again.stats.hits > 0
    assert [str(p) for p in first] == [str(p) for p in again]
    other = smc_steer(Chat(lm, prompts, seen), 5, 2, seed=4, max_steps=10)      # its own continuations, no prompt
    assert lm.stats.tokens == len(seen.prefixes())
    assert other.stats.tokens == lm.stats.tokens - tokens


@pytest.mark.parametrize("lengths, tokens, rows", [([10] * 20, 10, 1), ([4, 12, 8], 12, 3)])
def test_contexts_of_one_round_that_are_or_extend_each_other_run_once(lengths, tokens, rows):
    lm = family_lm("llama")
    for hits in (len(lengths) - rows, 2 * len(lengths) - rows):
        together([at(lm, range(3, 3 + n)).log_probs for n in lengths])
        stats = lm.stats
        assert (stats.tokens, stats.rows, stats.rounds, stats.hits) == (tokens, rows, 1, hits)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_a_string_of_T_tokens_runs_one_round_and_T_tokens(T, known):
    lm, string = family_lm("llama"), [3 + i for i in range(T)]
    dist = NextToken(at(lm, range(3, 13)))
    if known:
        dist.log_probs()
    before = lm.stats.rounds
    log_prob = dist.string().log_prob(string)
    assert lm.stats.tokens == 10 + T - 1                # the last is not read
    assert lm.stats.rounds - before <= 1
    assert dist.string().log_prob(string) == log_prob and lm.stats.tokens == 10 + T - 1


def test_padding_is_not_counted_as_work():
    lm, read = family_lm("llama"), []
    run = lm.engine.run

    def counted(batch: Batch):
        read.append((batch.tokens.size, int(batch.lengths.sum())))
        return run(batch)

    lm.engine.run = counted
    together([at(lm, [i, *range(10, 10 + n)]).log_probs for i, n in ((3, 9), (4, 6), (5, 7))])
    assert read == [(30, 25)]
    assert lm.stats.tokens == 25


def test_a_dropped_distribution_costs_one_token():
    lm = family_lm("llama")
    context = at(lm, range(3, 13))
    dist = context.log_probs()
    lm.store.fit_rows(lm.store.budget)
    assert np.allclose(context.log_probs(), dist, atol=1e-5)
    assert lm.stats.tokens == 11


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_small_batches_run_no_token_twice(batch):
    lm, seen = family_lm("llama", max_batch_tokens=batch), Seen()
    smc_standard(Chat(lm, PROMPTS["two prompts"], seen), 6, seed=1, max_steps=6)
    assert lm.stats.tokens == len(seen.prefixes())


def test_questions_to_a_distribution_cost_nothing_and_move_no_context():
    lm = cold_lm()
    context = lm.context("ab c")
    dist = NextToken(context)
    before, nodes = dist.log_probs().copy(), len(lm.trie)
    cost = lm.stats.rows, lm.stats.tokens, lm.stats.rounds
    for value in [*lm.vocab, EOS]:
        for each in (dist, dist.masked(np.ones(6, bool)), dist.tempered(0.5)):
            each.log_prob(value)
    dist.string().log_prob([])
    dist.sample(np.random.default_rng(0))
    assert (context.text, len(context), len(lm.trie)) == ("ab c", 3, nodes)
    np.testing.assert_array_equal(dist.log_probs(), before)
    assert cost == (lm.stats.rows, lm.stats.tokens, lm.stats.rounds)


def test_prompts_that_share_BOS_run_it_once():
    lm = cold_lm_with_bos()
    first, second = lm.context("abc"), lm.context("cb")
    assert first.tokens[0] == second.tokens[0] == 6         # BOS
    dist = NextToken(first).log_probs()
    np.testing.assert_allclose(dist, log_probs_by_hand(lm, first.tokens), atol=1e-6)
    start = lm.stats.tokens
    NextToken(second).log_probs()
    assert lm.stats.tokens - start == len(second) - 1
    np.testing.assert_array_equal(NextToken(lm.context("abc")).log_probs(), dist)
    assert lm.stats.tokens - start == len(second) - 1       # of the first, nothing runs again
    NextToken(first + 2).log_probs()
    assert lm.stats.tokens - start == len(second)
