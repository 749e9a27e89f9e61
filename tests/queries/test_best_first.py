"""Queries over random models, vocabularies and patterns, compared with an enumeration of all tokens.

The vocabularies have tokens of several characters, characters in two tokens, tokens that begin in one character and end
in another, tokens with the same bytes, and one or two eos ids.
"""

import functools
import itertools
import math
import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.queries import check, truth
from helpers.tiny import table_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppl import CachedTransformer, Regex, Vocabulary, run_many, smc_standard
from llmppl.queries import MatchList, Query, Rule, probability
from llmppl.queries.best_first import Search, Space
from llmppl.queries.compile import compile_query
from llmppl.queries.sampling import Remainder

LETTERS = "abé"
BYTES = [b"a", b"b", b"\xc3", b"\xa9"]
PIECES = ["é".encode(), b"ab", b"ba", b"aa", b"a\xc3", b"\xa9b", "éa".encode(), b"bb", b"aba", b"a"]
MANY = ["".join(chars).encode() for n in (1, 2, 3) for chars in itertools.product(LETTERS, repeat=n)]
RULES = [{}, {}, {}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.6}]


@dataclass
class Problem:
    """Query, with the words that enumerate it."""

    lm: CachedTransformer
    pattern: str
    words: set[str]
    prefixes: list[str]
    options: dict
    rule: dict

    def query(self) -> Query:
        return Query(self.lm, self.pattern, prefix=self.prefixes, rule=Rule(**self.rule), **self.options)

    def truth(self, order: str = "joint") -> tuple[dict, dict, float]:
        options = {name: value for name, value in self.options.items() if name != "tokenization"}
        canonical = self.options["tokenization"] == "canonical"
        return truth(self.lm, self.words, self.prefixes, canonical=canonical, rule=self.rule, order=order, **options)


def random_pattern(rng: np.random.Generator, depth: int = 3) -> str:
    kind = rng.integers(5) if depth else 0
    if kind == 0:
        return str(rng.choice(["a", "b", "é", "[ab]", "[aé]"]))
    parts = [random_pattern(rng, depth - 1) for _ in range(2)]
    if kind < 3:
        return f"({parts[0]}{'' if kind == 1 else '|'}{parts[1]})"
    return f"({parts[0]})" + ("?" if kind == 3 else "{1,2}")


def random_problem(seed: int, longest: int = 4, many: bool = False) -> Problem:
    """Return a random query; with `many` tokens, more of them may come next than a search pushes at once."""
    rng = np.random.default_rng((9, seed))
    words: set[str] = set()
    while not words:
        pattern = str(rng.choice(["a", "b", "é"])) + ("[abé]{0,3}" if many else random_pattern(rng))
        texts = ("".join(chars) for n in range(longest + 1) for chars in itertools.product(LETTERS, repeat=n))
        words = {text for text in texts if re.fullmatch(pattern, text)}
        if len(list(itertools.islice(Regex(pattern).enumerate(), len(words) + 1))) > len(words):
            words = set()                               # some are longer
    tokens = [*BYTES, *(MANY if many else rng.choice(np.array(PIECES, object), 5, replace=False))]
    rng.shuffle(tokens)
    V = len(tokens) + int(rng.integers(1, 3))
    vocab = Vocabulary([*tokens, *[b""] * (V - len(tokens))], eos_ids=list(range(len(tokens), V)))
    scale = 0.5 if many else 1.5

    @functools.cache
    def row(last: tuple[int, ...]) -> np.ndarray:
        return scale * np.random.default_rng((seed, *last)).standard_normal(V)

    def logits(ids):
        return row(tuple(map(int, ids[-2:])))

    cut = int(rng.integers(1, 1 + min(map(len, words))))
    options = {
        "end": str(rng.choice(["eos", "prefix", "boundary"])),
        "max_tokens": [None, None, 1, 2, 3][rng.integers(5)],
        "tokenization": "canonical" if rng.integers(3) == 0 and not many else "all",
    }
    rule = {} if many else RULES[rng.integers(len(RULES))]
    return Problem(CachedTransformer(logits, vocab), pattern, words, sorted({w[:cut] for w in words}), options, rule)


def crowded_problem(seed: int) -> Problem:
    """Return a query over 18 letters, and strings over "abé" in several spellings, each less probable than a letter.

    More tokens may come first than a search pushes at once, and the spellings of one string are among the rest.
    """
    rng = np.random.default_rng((10, seed))
    letters = list("cdfghijklmnopqrtuv")
    strings = [text for n in (1, 2, 3) for text in map("".join, itertools.product(LETTERS, repeat=n))]
    words = [*letters, *rng.choice(strings[3:], 6, replace=False)]
    tokens = [b"s", *BYTES, *(text.encode() for text in [*letters, "é", *words[len(letters) :], "ab", "bé", "éa"])]
    V = len(tokens) + 1
    likely = [i for i, token in enumerate(tokens) if set(token) <= set("abé".encode())]

    @functools.cache
    def row(last: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng((11, seed, *last)).standard_normal(V)
        logits = 0.1 * noise
        if len(last) == 1:
            logits[likely] -= 0.2
        else:                                           # one of a few is nearly sure
            logits[likely] = 3.0 + 3.0 * noise[likely]
        return logits

    lm = CachedTransformer(lambda ids: row(tuple(map(int, ids[-3:]))), Vocabulary([*tokens, b""], eos_ids=[V - 1]))
    options = {"end": "prefix", "max_tokens": None, "tokenization": "all"}
    return Problem(lm, f"s({'|'.join(words)})", {f"s{word}" for word in words}, ["s"], options, {})


SEEDS = st.integers(0, 10**6)
FEW = SEEDS.map(random_problem)                         # tokens
PROBLEMS = st.one_of(FEW, FEW, FEW, SEEDS.map(functools.partial(random_problem, many=True)), SEEDS.map(crowded_problem))


# ---- search


@settings(max_examples=repetitions(250, 24))
@given(PROBLEMS, st.sampled_from(["strings", "tokens"]), st.sampled_from(["joint", "conditional"]), st.integers(1, 5))
def test_a_search_agrees_with_the_enumeration_and_its_order(problem, results, order, batch):
    expected = problem.truth(order)[results == "tokens"]
    try:
        found = list(problem.query().best(results=results, order=order, batch=batch))
    except ValueError as error:
        assert "own encoding" in str(error) and not expected
    else:
        check(found, expected, order)


@pytest.mark.parametrize(("num_letters", "x", "y"), [(16, 0.035, 0.9), (15, 0.0395, 0.9), (15, 0.0405, 0.5)])
def test_unpushed_tokens_may_spell_the_best_string_together(num_letters, x, y):
    """Sixteen tokens are pushed at once: letters at 0.04, or "x" too. "xy" has 0.03 + x y, each part below a letter."""
    letters = [bytes([97 + i]) for i in range(num_letters)]
    vocab = Vocabulary([*letters, b"x", b"xy", b"y", b"z", b""], eos_ids=[num_letters + 4])
    first = np.array([0.04] * num_letters + [x, 0.03, 1e-4, 1e-4, 0.2])
    after_x = np.array([1e-9] * (num_letters + 2) + [y, 1e-9, 1.0 - y])
    lm = CachedTransformer(lambda ids: np.log(first if int(ids[-1]) == 0 else after_x), vocab)
    p = first / first.sum()
    best = next(Query(lm, "a([a-p]|xy|z)", prefix="a", end="prefix").best(batch=1))
    assert str(best) == "axy" and math.exp(best.log_prob) == pytest.approx(p[-4] + y * p[-5])


@settings(max_examples=repetitions(200, 16))
@given(FEW)
def test_bounds_of_a_truncated_sum_contain_the_truth(problem):
    problem.options["tokenization"] = "all"             # a canonical string has one spelling
    of_strings, _, _ = problem.truth()
    matches = list(problem.query().best(tolerance=0.4, batch=1, max_expansions=10**6))
    p = np.array([of_strings[match.prefix, str(match)] for match in matches])
    lower = np.exp([match.log_joint for match in matches])
    upper = lower * np.exp([match.log_prob_upper - match.log_prob for match in matches])
    assert (lower <= p * (1 + 1e-9)).all() and (p <= upper * (1 + 1e-9)).all()
    assert (upper <= 1.4 * lower * (1 + 1e-9)).all()


def test_tokens_of_equal_probability_are_all_pushed_once():
    vocab = Vocabulary([*(bytes([i]) for i in range(40, 100)), b""], eos_ids=[60])
    lm = CachedTransformer(lambda ids: np.zeros(61), vocab)
    found = [str(match) for match in Query(lm, "A[(-c]", prefix="A", end="prefix").best(results="tokens", batch=1)]
    assert found == [f"A{chr(i)}" for i in range(40, 100)]


@pytest.mark.parametrize("rest", [{b"x": 0.035, b"xy": 0.002}, {bytes([65 + i]): 0.02 for i in range(12)}])
def test_unpushed_tokens_stay_unpushed_if_they_cannot_be_better(rest):
    """Of the first, all together are below the letters' 0.04; of the second, the two of one string, which are one."""
    letters = [bytes([97 + i]) for i in range(16)]
    vocab = Vocabulary([*letters, *rest, b""], eos_ids=[16 + len(rest)])
    p = np.array([0.041] + [0.04] * 15 + [*rest.values()])
    lm = CachedTransformer(lambda ids: np.log([*p, 1.0 - p.sum()]), vocab)
    found = Query(lm, "a[a-pA-Lxy]{1,2}", prefix="a", end="prefix", max_tokens=1).best(batch=1)
    assert [str(match) for match in itertools.islice(found, 3)] == ["aa", "ab", "ac"] and found.expansions == 1


# ---- probability


def test_a_token_that_spans_a_match_counts_at_its_end():
    """After "a": "a" with 0.2, "b" with 0.1, and "ab" with 0.6, whose first byte alone would be a match as well."""
    lm = table_lm(lambda ids: np.log([0.2, 0.1, 0.6, 0.1]), (b"a", b"b", b"ab"))
    found = probability(lm, "a[ab]+", prefix="a", end="prefix", max_tokens=2, seed=0)
    assert (found.lower, found.upper) == (pytest.approx(0.9), pytest.approx(0.9)) and found.shortest


@settings(max_examples=repetitions(300, 24))
@given(PROBLEMS, st.integers(0, 6))
def test_bounds_contain_the_truth_and_converge_to_it(problem, max_expansions):
    _, _, p = problem.truth()
    early = problem.query().probability(max_expansions=max_expansions, batch=1, runs=0)
    assert early.lower - 1e-9 <= p <= early.upper + 1e-9
    closed = problem.query().probability(tolerance=0.0, max_expansions=10**6, runs=0)
    assert closed.lower == pytest.approx(p, abs=1e-9) == closed.upper
    assert math.isnan(closed.estimate) and "not estimated" in repr(closed)


@pytest.mark.parametrize("least", [1.0, 1e-3])
def test_the_bounds_tighten_to_a_share_of_the_upper_one(least):
    """After n letters the text has ended with probability 1 - 2 ** -n; the upper bound is 1, or a thousandth of it."""
    first = np.log([1e-9 + least, 1e-9, 1e-9 + 1.0 - least])
    lm = table_lm(lambda ids: np.log([0.5, 1e-9, 0.5]) if len(ids) > 1 else first)
    found = Query(lm, "aa+", prefix="a").probability(tolerance=0.251, batch=1, runs=0)
    assert found.expansions == 3
    assert (found.upper, found.lower) == pytest.approx((least, 0.75 * least), rel=1e-6)


def divergence(a: float, b: float) -> float:
    """Return KL(a || b) of two coins. A mean of n values in [0, 1] around b reaches a with probability e^(-n KL)."""
    a, b = np.clip([a, b], 1e-12, 1.0 - 1e-12)
    return float(a * math.log(a / b) + (1.0 - a) * math.log((1.0 - a) / (1.0 - b)))


def test_estimates_are_within_the_bounds_and_near_the_truth():
    """Each estimate is as near as bounded runs allow, which may miss a rare branch. Together they are right.

    A run gives a share of the unsearched mass, in [0, 1], so Hoeffding's bound needs no variance. The square
    of the standard error is unbiased for the variance: summed over the problems it stands for the squared errors, the
    rare branches that were found for those that were not.
    """
    runs, errors, squares = repetitions(100, 40), [], []
    few, many = range(repetitions(40, 30)), range(10**6, 10**6 + repetitions(10, 6))
    problems = [*map(random_problem, few), *(random_problem(i, many=True) for i in many), *map(crowded_problem, many)]
    for i, problem in enumerate(problems):
        found = problem.query().probability(
            max_expansions=i % 4, batch=1, particles=4, runs=runs, rng=np.random.default_rng((2, i))
        )
        left, p = max(found.upper - found.lower, 1e-12), problem.truth()[2]
        assert found.lower <= found.estimate <= found.upper
        assert found.estimate_se <= 0.52 * left / math.sqrt(runs) + 1e-12
        share, true_share = (found.estimate - found.lower) / left, (p - found.lower) / left
        if left > 1e-9:
            assert runs * divergence(share, true_share) < 12.0, i       # with probability 2e-5, where it is right
            errors.append(share - true_share)
            squares.append((found.estimate_se / left) ** 2)
        assert left > 1e-9 or found.estimate == pytest.approx(p, abs=1e-9), i
    assert np.count_nonzero(squares) > 15 and abs(sum(errors)) < 4.0 * math.sqrt(sum(squares))
    assert 0.2 < np.square(errors).sum() / sum(squares) < 2.5          # else the errors are told wrong by half


def test_an_estimate_without_a_hit_is_reported_as_such():
    lm = table_lm(lambda ids: np.log([0.98, 1e-9, 0.02]))
    query = Query(lm, "a+b", prefix="a", end="prefix", max_tokens=8)
    found = query.probability(max_expansions=2, batch=1, particles=4, seed=0)
    assert found.estimate == found.lower < found.upper and found.estimate_se == 0.0
    assert repr(found).endswith("no particle met a further match)")
    assert "estimate 0.98 +- 0" in repr(probability(lm, "aa", prefix="a", end="prefix", seed=0))


def test_reaching_max_tokens_does_not_count_as_leaving_the_language():
    """After "a" comes "a" with 0.7: after one or two tokens, the text leaves the language with 0.3."""
    lm = table_lm(lambda ids: np.log([0.7, 0.1, 0.2]))
    query = Query(lm, "a+", prefix="a", end="boundary", max_tokens=1)
    found = query.probability(tolerance=0.0, seed=0)
    assert found.lower == found.upper == found.estimate == pytest.approx(0.3 + 0.7 * 0.3)
    np.testing.assert_allclose([m.log_prob for m in query.best()], np.log([0.3, 0.21]))


ENDLESS = {"prefix": "Tim was", "end": "prefix", "max_tokens": 6}


def test_runs_of_an_estimate_share_batches(embedded):
    """One after another, the 16 runs take more than 60 rounds."""
    def work(runs: int):
        embedded.clear()
        before = embedded.evaluator.done()
        found = probability(
            embedded, "Tim was [a-z]+ years old", **ENDLESS, max_expansions=10, particles=8, runs=runs, seed=3
        )
        return found, embedded.evaluator.done() - before

    (bounds, of_search), (found, of_all) = work(0), work(16)
    rounds, rows = of_all.rounds - of_search.rounds, of_all.rows - of_search.rows
    assert rounds <= 12 and rows > 10 * rounds and found.lower == bounds.lower
    streams = np.random.default_rng(3).spawn(16)        # each run, by itself
    search = Search(Space(embedded, compile_query("Tim was [a-z]+ years old", "Tim was"), end="prefix", max_tokens=6),
                    "joint", 32, 10)  # fmt: skip
    search.add_all()
    while not search.given_up():
        search.expand()
    alone = [smc_standard(Remainder(search), 8, rng=rng, progress=False) for rng in streams]
    shares = [sum(math.exp(particle.log_weight) for particle in each) for each in alone]
    base = math.exp(search.space.starts()[0].log_prob)
    left, lower = search.open_mass() / base, search.found_mass / base
    assert found.estimate == pytest.approx(lower + left * np.mean(shares), rel=1e-3)
    assert found.estimate_se == pytest.approx(left * np.std(shares, ddof=1) / 4, rel=1e-3)


@pytest.mark.parametrize("limit", [{"timeout": 0.3}, {"budget": 150}])
def test_a_limit_of_a_probability_leaves_its_bounds(limit, embedded):
    embedded.clear()
    before, start = embedded.evaluator.done(), time.process_time()
    found = probability(embedded, "Tim was [a-z ]+ years old", **ENDLESS, max_expansions=10**6, seed=0, **limit)
    assert found.limit == next(iter(limit)) and found.lower < found.upper and found.expansions < 2000
    assert time.process_time() - start < 3.0
    assert (embedded.evaluator.done() - before).tokens < 1000 or limit == {"timeout": 0.3}
    assert not math.isnan(found.estimate) or f"not estimated ({found.limit})" in repr(found)
    whole = probability(embedded, "Tim was [a-z ]+ years old", **ENDLESS, max_expansions=300, seed=0, runs=0)
    assert max(found.lower, whole.lower) <= min(found.upper, whole.upper) and whole.limit == ""


def test_a_limit_of_a_task_leaves_no_estimate_of_cut_runs(embedded):
    def ask(pattern, rng):
        found = probability(embedded, pattern, **ENDLESS, max_expansions=5, particles=16, runs=8, rng=rng)
        assert found.limit == "timeout" and math.isnan(found.estimate), found
        return MatchList()

    [result] = run_many(ask, ["Tim was [a-z ]+ years old"], timeout=0.01, progress=False)
    assert result.error is None


def test_progress_of_a_probability_shows_its_runs(embedded, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")              # as on a terminal
    probability(embedded, "Tim was [a-z]+ old", **ENDLESS, max_expansions=64, runs=2, seed=0, progress=True)
    printed = capsys.readouterr().err
    assert "expansion " in printed and "run 2 of 2" in printed
