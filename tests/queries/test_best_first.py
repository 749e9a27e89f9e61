"""Queries over random models, vocabularies and patterns, compared with an enumeration of all tokens.

The vocabularies have tokens of several characters, characters in two tokens, tokens that begin in one character and end
in another, tokens with the same bytes, and one or two eos ids. The truth takes the tokens one by one, in plain numpy.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.common import repetitions

from llmppl import CachedTransformer, Regex, Vocabulary
from llmppl.queries import Query, Rule, can_generate, explain, probability

LETTERS = "abé"
BYTES = [b"a", b"b", b"\xc3", b"\xa9"]
PIECES = ["é".encode(), b"ab", b"ba", b"aa", b"a\xc3", b"\xa9b", "éa".encode(), b"bb", b"aba", b"a"]
MANY = ["".join(chars).encode() for n in (1, 2, 3) for chars in itertools.product(LETTERS, repeat=n)]
RULES = [{}, {}, {}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.6}]


@dataclass
class Problem:
    """Query, with the tables that enumerate it."""

    lm: CachedTransformer
    pattern: str
    words: set[str]
    prefixes: list[str]
    options: dict
    rule: dict

    @property
    def prefix(self) -> str:
        return "|".join(self.prefixes)

    def query(self) -> Query:
        return Query(self.lm, self.pattern, prefix=self.prefix, rule=Rule(**self.rule), **self.options)

    def dist(self, ids: tuple[int, ...]) -> np.ndarray:
        """Return the probabilities of the next token under the rule: (V,)."""
        p = np.exp(self.lm.model(list(ids)))
        return ruled(p / p.sum(), **self.rule)


def ruled(p: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> np.ndarray:
    p = p ** (1.0 / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k is not None:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    if top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0.0
    return p / p.sum()


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


def truth(problem: Problem, order: str = "joint"):
    """Return the probability of each (prefix, string) and (prefix, string, tokens), and that of `probability`."""
    lm, options = problem.lm, problem.options
    eos, pieces = list(lm.vocab.eos_ids), [lm.vocab.tokens[i] for i in range(len(lm.vocab))]
    of_strings, of_tokens, events, given = {}, {}, {}, {}

    def walk(prefix, before, ids, p, over):
        data = b"".join(pieces[i] for i in ids)
        whole = prefix.encode() + data
        dist = problem.dist((*before, *ids)) if before or ids else np.ones(len(pieces))
        inside = [
            i for i, piece in enumerate(pieces)
            if piece and any(word.encode().startswith(whole + piece) for word in problem.words)
        ]  # fmt: skip
        found = whole in {word.encode() for word in problem.words}
        if found and options["tokenization"] == "canonical":
            found = tuple(map(int, lm.context(whole.decode()).tokens)) == (*before, *ids)
        if found:
            ending = {"eos": dist[eos].sum(), "prefix": 1.0, "boundary": np.delete(dist, inside).sum()}[options["end"]]
            if p * ending > 0.0:
                of_tokens[prefix, whole.decode(), ids] = p * ending
                key = prefix, whole.decode()
                of_strings[key] = of_strings.get(key, 0.0) + p * ending
                if not over or options["end"] != "prefix":
                    events[prefix] = events.get(prefix, 0.0) + p * ending
            over = True
        if len(ids) != options["max_tokens"]:
            for i in inside:
                if p * dist[i] > 0.0:
                    walk(prefix, before, (*ids, i), p * dist[i], over)

    for prefix in problem.prefixes:
        before = tuple(map(int, lm.context(prefix).tokens))
        given[prefix] = 1.0
        for i in range(1, len(before)):
            q = np.exp(lm.model(list(before[:i])))
            given[prefix] *= q[before[i]] / q.sum()
        walk(prefix, before, (), given[prefix] if order == "joint" else 1.0, False)
    return of_strings, of_tokens, sum(events.values()) / sum(given.values())


def problems(count: int, many: int = 0):
    """Yield problems with few tokens, and of both kinds with many, by their seeds."""
    for seed in range(count):
        yield seed, random_problem(seed)
    for seed in range(many):
        yield -1 - seed, random_problem(10**6 + seed, many=True)
        yield 10**6 + seed, crowded_problem(seed)


# ---- search


@pytest.mark.parametrize("results", ["strings", "tokens"])
def test_a_search_agrees_with_the_enumeration_and_its_order(results):
    for seed, problem in problems(repetitions(200, 30), many=repetitions(20, 3)):
        of_strings, of_tokens, _ = truth(problem)
        expected = of_strings if results == "strings" else of_tokens
        matches = problem.query().best(results=results, batch=1 + seed % 5)
        try:
            found = list(matches)
        except ValueError as error:
            assert "own encoding" in str(error) and not expected, seed
            continue
        keys = [(m.prefix, str(m), *([] if results == "strings" else [tuple(map(int, m.tokens))])) for m in found]
        assert len(set(keys)) == len(keys) and set(keys) == set(expected), (seed, problem)
        values = [math.exp(m.log_joint) for m in found]
        np.testing.assert_allclose(values, [expected[key] for key in keys], rtol=1e-6, err_msg=str(seed))
        np.testing.assert_allclose(values, sorted(expected.values(), reverse=True), rtol=1e-6, err_msg=str(seed))


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


def test_bounds_of_a_truncated_sum_contain_the_truth():
    cut = 0
    for seed, problem in problems(repetitions(200, 30)):
        problem.options["tokenization"] = "all"         # a canonical string has one spelling
        of_strings, _, _ = truth(problem)
        for match in problem.query().best(tolerance=0.4, batch=1, max_expansions=10**6):
            p = of_strings[match.prefix, str(match)]
            given = match.log_joint - match.log_prob
            upper = math.exp(given + match.log_prob_upper)
            assert math.exp(match.log_joint) <= p * (1 + 1e-9) and p <= upper * (1 + 1e-9), seed
            assert upper <= 1.4 * math.exp(match.log_joint) * (1 + 1e-9)
            cut += upper > math.exp(match.log_joint) * (1 + 1e-6)
    assert cut > 0


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


def test_the_canonical_spelling_is_explained_by_the_distribution():
    """Its log_prob is that of the spelling, and it is true iff the rule excludes no token."""
    for seed, problem in problems(repetitions(300, 40)):
        lm, text = problem.lm, sorted(problem.words)[-1]
        prefix = problem.prefixes[-1]
        before = tuple(map(int, lm.context(prefix).tokens))
        ids = list(map(int, (lm.context(prefix) + text[len(prefix) :]).tokens))[len(before) :] if text != prefix else []
        by_rule, plain = 1.0, 0.0
        for i, id in enumerate(ids):
            logits = lm.model([*before, *ids[:i]])
            plain += logits[id] - np.logaddexp.reduce(logits)
            by_rule *= problem.dist((*before, *ids[:i]))[id]
        last = problem.dist((*before, *ids))[list(lm.vocab.eos_ids)].sum()
        rule, rest = Rule(**problem.rule), text[len(prefix) :]
        assert explain(lm, rest, prefix=prefix).log_prob == pytest.approx(plain)
        assert can_generate(lm, rest, rule, prefix=prefix) == (by_rule > 0.0), seed
        assert can_generate(lm, rest, rule, prefix=prefix, end="eos") == (by_rule * last > 0.0), seed


# ---- probability


def test_a_token_that_spans_a_match_counts_at_its_end():
    """After "a": "a" with 0.2, "b" with 0.1, and "ab" with 0.6, whose first byte alone would be a match as well."""
    vocab = Vocabulary([b"a", b"b", b"ab", b""], eos_ids=[3])
    lm = CachedTransformer(lambda ids: np.log([0.2, 0.1, 0.6, 0.1]), vocab)
    found = probability(lm, "a[ab]+", prefix="a", end="prefix", max_tokens=2, seed=0)
    assert (found.lower, found.upper) == (pytest.approx(0.9), pytest.approx(0.9)) and found.shortest


def test_bounds_contain_the_truth_and_converge_to_it():
    for seed, problem in problems(repetitions(300, 40), many=repetitions(20, 3)):
        _, _, p = truth(problem)
        early = problem.query().probability(max_expansions=seed % 7, batch=1, runs=0)
        assert early.lower - 1e-9 <= p <= early.upper + 1e-9, (seed, problem)
        closed = problem.query().probability(tolerance=0.0, max_expansions=10**6, runs=0)
        assert closed.lower == pytest.approx(p, abs=1e-9) == closed.upper, (seed, problem)
        assert math.isnan(closed.estimate) and "not estimated" in repr(closed)


def test_the_bounds_tighten_to_a_share_of_the_upper_one():
    """After n letters the text has ended with probability 1 - 2 ** -n; the upper bound is 1, or a thousandth of it."""
    for least in (1.0, 1e-3):
        first = np.log([1e-9 + least, 1e-9, 1e-9 + 1.0 - least])
        lm = CachedTransformer(
            lambda ids, first=first: np.log([0.5, 1e-9, 0.5]) if len(ids) > 1 else first,
            Vocabulary([b"a", b"b", b""], eos_ids=[2]),
        )
        found = Query(lm, "aa+", prefix="a").probability(tolerance=0.251, batch=1, runs=0)
        assert found.expansions == 3 and found.upper == pytest.approx(least, rel=1e-6)
        assert found.lower == pytest.approx(0.75 * least, rel=1e-6)


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
    for i, (seed, problem) in enumerate(problems(repetitions(40, 30), many=repetitions(10, 6))):
        _, _, p = truth(problem)
        found = problem.query().probability(
            max_expansions=abs(seed) % 4, batch=1, particles=4, runs=runs, rng=np.random.default_rng((2, i))
        )
        left = found.upper - found.lower
        assert found.lower <= found.estimate <= found.upper
        assert found.estimate_se <= 0.52 * left / math.sqrt(runs) + 1e-12
        if left > 1e-9:
            share, true_share = (found.estimate - found.lower) / left, (p - found.lower) / left
            assert runs * divergence(share, true_share) < 12.0, seed    # with probability 2e-5, where it is right
            errors.append(share - true_share)
            squares.append((found.estimate_se / left) ** 2)
        else:
            assert found.estimate == pytest.approx(p, abs=1e-9), seed
    assert np.count_nonzero(squares) > 15 and abs(sum(errors)) < 4.0 * math.sqrt(sum(squares))
    assert 0.2 < np.square(errors).sum() / sum(squares) < 2.5          # else the errors are told wrong by half


def test_an_estimate_without_a_hit_is_reported_as_such():
    lm = CachedTransformer(lambda ids: np.log([0.98, 1e-9, 0.02]), Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    query = Query(lm, "a+b", prefix="a", end="prefix", max_tokens=8)
    found = query.probability(max_expansions=2, batch=1, particles=4, seed=0)
    assert found.estimate == found.lower < found.upper and found.estimate_se == 0.0
    assert repr(found).endswith("no particle met a further match)")
    assert "estimate 0.98 +- 0" in repr(probability(lm, "aa", prefix="a", end="prefix", seed=0))


def test_reaching_max_tokens_does_not_count_as_leaving_the_language():
    """After "a" comes "a" with 0.7: after one or two tokens, the text leaves the language with 0.3."""
    lm = CachedTransformer(lambda ids: np.log([0.7, 0.1, 0.2]), Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    query = Query(lm, "a+", prefix="a", end="boundary", max_tokens=1)
    found = query.probability(tolerance=0.0, seed=0)
    assert found.lower == found.upper == found.estimate == pytest.approx(0.3 + 0.7 * 0.3)
    np.testing.assert_allclose([m.log_prob for m in query.best()], np.log([0.3, 0.21]))
