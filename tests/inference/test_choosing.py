"""Tests of the choice of candidates: every random decision is taken both ways, and compared with the threshold.

`Decided` replaces a generator. Its values compare like uniforms, and each comparison has a known probability. So the
expectation of a choice is a finite sum over the paths of decisions.
"""

import math

import numpy as np
import pytest
from helpers.common import repetitions
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppl.distributions import logsumexp
from llmppl.distributions.blocks import ArrayTable
from llmppl.inference.choosing import choose
from llmppl.inference.resampling import threshold


class Reader:
    """Reader of blocks of rows that counts them."""

    def __init__(self, rows):
        self.tables, self.sizes = [ArrayTable(row) for row in rows], []

    def __call__(self, rows, blocks):
        self.sizes.append(len(rows))
        return np.concatenate([self.tables[i].read(b[None]) for i, b in zip(rows, blocks, strict=True)])


def chosen(rng, rows, most, read=None):
    """Return the choice from whole rows as {(row, index): new log-weight}."""
    found = choose(rng, [ArrayTable(row).log_sums for row in rows], read or Reader(rows), most)
    *places, log_weights = map(np.ndarray.tolist, found)
    assert [*zip(*places, strict=True)] == sorted(set(zip(*places, strict=True)))
    return dict(zip(zip(*places, strict=True), log_weights, strict=True))


class Decided:
    """A generator with known decisions: `path` gives the first ones, and every further one takes its first way.

    `log_prob` is the log-probability of the decisions. In the end `path` has all of them, and `ways` their numbers.
    """

    def __init__(self, path):
        self.path, self.ways, self.log_prob = list(path), [], 0.0

    def decide(self, prob):
        """Return True with this probability."""
        if not 0.0 < prob < 1.0:
            return prob >= 1.0
        if len(self.ways) == len(self.path):
            self.path.append(0)
        happens = self.path[len(self.ways)] == 0
        self.ways.append(2)
        self.log_prob += math.log(prob if happens else 1.0 - prob)
        return happens

    def random(self, size):
        return np.full(size, Uniform(self), dtype=object)

    def standard_exponential(self, size):
        return np.full(size, Arrival(self), dtype=object)


class Uniform:
    def __init__(self, decided, most=1.0):
        self.decided, self.most = decided, most

    def __mul__(self, factor):
        return Uniform(self.decided, self.most * factor)

    def __lt__(self, bound):
        return self.decided.decide(bound / self.most if self.most else 0.0)


class Arrival:
    """The inverse of an exponential time: the first of some arrivals, and the sum of their rates.

    The index of the first arrival and its time are independent. The next one comes earlier by the ratio of the rates.
    """

    def __init__(self, decided, rate=0.0):
        self.decided, self.rate = decided, rate

    def __add__(self, tiny):
        return self

    def __rtruediv__(self, rate):
        return Arrival(self.decided, rate)

    def __gt__(self, first):
        both = self.rate + first.rate
        earlier = self.decided.decide(self.rate / both if both else 0.0)
        (self if earlier else first).rate = both
        return earlier


def outcomes(rows, most):
    """Yield (probability, choice) of every path of decisions."""
    path = []
    while True:
        rng = Decided(path)
        kept = chosen(rng, rows, most)
        yield math.exp(rng.log_prob), kept
        path = rng.path
        while path and path[-1] == rng.ways[len(path) - 1] - 1:
            path.pop()
        if not path:
            return
        path[-1] += 1


def sparse(size, weights):
    """Return (size,) log-weights with a few live ones, {index: weight}."""
    row = np.full(size, -np.inf)
    for index, weight in weights.items():
        row[index] = math.log(weight)
    return row


CASES = {
    "light blocks": ([sparse(600, {3: 0.1, 300: 0.2, 301: 0.1, 555: 0.3}), sparse(600, {0: 0.2, 400: 0.1, 9: 0.3})], 2),
    "two in a block": ([sparse(300, {0: 0.5, 1: 0.5, 2: 0.5, 299: 0.1}), sparse(256, {7: 0.3})], 3),
    "one for certain": ([sparse(513, {0: 4.0, 1: 0.5, 255: 0.6, 256: 0.3, 512: 0.9}), sparse(2, {0: 0.3, 1: 0.4})], 3),
    "equal weights": ([sparse(5, dict.fromkeys(range(5), 1.0)), sparse(5, {2: 1.0})], 4),
    "one block": ([sparse(7, {0: 0.3, 1: 0.9, 4: 0.5, 5: 0.2, 6: 0.1})], 2),
    "far apart": ([sparse(700, {0: 1.0, 300: 1e-200, 301: 3e-200, 600: 2e-200}), sparse(4, {3: 1e-200})], 3),
    "a dead row": ([sparse(300, {}), sparse(300, {0: 0.3, 1: 0.2, 290: 0.4})], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_each_candidate_keeps_its_expected_weight(name):
    rows, most = CASES[name]
    everything = np.concatenate(rows)
    log_c, _ = threshold(everything, most)
    starts = np.cumsum([0] + [len(row) for row in rows])
    total, probs, weights = 0.0, np.zeros(len(everything)), np.zeros(len(everything))
    for prob, kept in outcomes(rows, most):
        assert len(kept) == most
        assert logsumexp(list(kept.values())) == pytest.approx(logsumexp(everything), abs=1e-12)
        total += prob
        for (i, index), log_weight in kept.items():
            probs[starts[i] + index] += prob
            weights[starts[i] + index] += prob * math.exp(log_weight)
    assert total == pytest.approx(1.0, abs=1e-12)
    assert probs == pytest.approx(np.minimum(np.exp(everything + log_c), 1.0), abs=1e-12)
    assert weights == pytest.approx(np.exp(everything), rel=1e-12, abs=0.0)


def check(rng, rows, most):
    """Check one choice against the properties of every choice."""
    read = Reader(rows)
    kept = chosen(rng, rows, most, read)
    everything = np.concatenate(rows)
    alive = {(i, index) for i, row in enumerate(rows) for index in np.flatnonzero(row > -np.inf).tolist()}
    assert len(read.sizes) <= 2 and all(0 < size <= most for size in read.sizes)
    if len(alive) <= most:
        assert kept == {(i, index): rows[i][index] for i, index in alive}
        return
    log_c, _ = threshold(everything, most)
    assert len(kept) == most and kept.keys() <= alive
    assert logsumexp(list(kept.values())) == pytest.approx(logsumexp(everything), abs=1e-11)
    for (i, index), log_weight in kept.items():
        assert log_weight == pytest.approx(max(rows[i][index], -log_c), abs=1e-11)
    certain = {(i, index) for i, index in alive if rows[i][index] + log_c > 1e-11}
    assert certain <= kept.keys()


LEVELS = st.lists(st.sampled_from([0.0, 0.0, -1.0, -3.0, -40.0, -800.0, -2000.0, -math.inf]), min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=repetitions(3000, 120))
@given(data=st.data())
def test_the_selection_of_candidates_has_the_right_size_and_weights(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.sampled_from([1, 2, 3, 255, 256, 257, 512, 700, 1500]))
        row = rng.choice(data.draw(LEVELS), size=size)      # many ties, and what is e^-2000 of the others
        if data.draw(st.booleans()):
            row = row + rng.normal(size=size) * data.draw(st.sampled_from([0.1, 1.0, 4.0]))
        rows.append(row + data.draw(st.sampled_from([0.0, 0.0, 2.5, -2000.0])))
    check(rng, rows, data.draw(st.sampled_from([1, 2, 3, 5, 12, 30, 96])))


def test_candidates_lighter_by_2000_nats_keep_their_own_proportions():
    light = np.random.default_rng(0).normal(size=5000)
    rows = [np.concatenate([[0.0, -1.0], light - 2000.0]), light - 2000.0, light - 4000.0]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        check(rng, rows, 12)
        kept = chosen(rng, rows, 12)
        assert {(0, 0), (0, 1)} <= kept.keys() and not any(i == 2 for i, _ in kept)


@pytest.mark.parametrize("rows", [[], [np.full(300, -np.inf)] * 2, [sparse(300, {4: 0.5, 299: 0.25}), sparse(3, {})]])
def test_few_candidates_are_all_kept_unchanged(rows):
    alive = {(i, index): row[index] for i, row in enumerate(rows) for index in range(len(row)) if row[index] > -np.inf}
    assert chosen(None, rows, 2) == alive


def test_rounding_hardly_ever_changes_a_choice():
    rng, changed = np.random.default_rng(0), 0
    rows = [rng.normal(size=4096) * 3 + rng.normal() for _ in range(8)]
    for seed in range(repetitions(300, 100)):                                 # a chance of about 1e-5 each
        near = [row + rng.normal(size=4096) * 1e-8 + rng.normal() * 1e-8 for row in rows]
        before, after = (chosen(np.random.default_rng(seed), each, 24) for each in (rows, near))
        changed += before.keys() != after.keys()
    assert changed <= 1


def test_a_candidate_that_rounding_moves_across_the_threshold_changes_no_choice():
    rows = [sparse(3, {0: 4, 1: 2}), sparse(2, {0: 1, 1: 1})]
    for seed in range(100):
        near = [[row * (1 + shift) for row in rows] for shift in (-1e-15, 0.0, 1e-15)]
        assert len({frozenset(chosen(np.random.default_rng(seed), each, 3)) for each in near}) == 1


def test_frequencies_of_selection_are_the_shares():
    rng, runs, most = np.random.default_rng(0), repetitions(40_000, 800), 12
    rows = [np.log(rng.dirichlet(np.full(700, spread)) * mass + 1e-300) for spread, mass in ((0.05, 1.0), (0.3, 0.5))]
    everything, counts = np.concatenate(rows), np.zeros(1400)
    for _ in range(runs):
        for i, index in chosen(rng, rows, most):
            counts[700 * i + index] += 1
    shares = np.minimum(np.exp(everything + threshold(everything, most)[0]), 1.0)
    assert (counts[shares == 1.0] == runs).all()
    open_ = (runs * shares > 10) & (shares < 1.0)
    z = (counts - runs * shares)[open_] / np.sqrt(runs * shares * (1 - shares))[open_]
    assert abs(z).max() < 4.5                               # of up to 600, each of standard deviation 1
    assert (z**2).mean() < 1.0 + 5.0 * math.sqrt(2.0 / len(z))
