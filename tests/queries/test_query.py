"""Search, samples and probability, compared with an enumeration of every token sequence by plain forward passes.

The truth contains every string that `re.fullmatch` accepts, and every string within k edits of one, made by editing.
The transformer has a BOS. `test_best_first.py` has other vocabularies, rules, ends and orders.
"""

import functools
import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from helpers import tiny
from helpers.common import repetitions
from helpers.queries import check, ruled, truth
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from llmppl import CachedTransformer, Grammar, JsonSchema, Regex, smc_standard
from llmppl.constraints import DFA, Special, Vocabulary
from llmppl.queries import Edits, Query, Rule, any_case, explain, probability, search
from llmppl.queries.sampling import Sampled

V, LETTERS, LONGEST = 6, "abc ", 4
EOS = V - 1


@functools.cache
def language_model(seed: int = 0) -> CachedTransformer:
    return tiny.cold_lm_with_bos(V, seed)


@functools.cache
def strings(longest: int) -> list[str]:
    return ["".join(chars) for n in range(longest + 1) for chars in itertools.product(LETTERS, repeat=n)]


def edited(words: set[str], k: int) -> set[str]:
    """Return all strings over LETTERS within k edits of some word."""
    for _ in range(k):
        near = set(words)
        for word in words:
            for i in range(len(word) + 1):
                near.update(word[:i] + c + word[i:] for c in LETTERS)
                if i < len(word):
                    near.add(word[:i] + word[i + 1 :])
                    near.update(word[:i] + c + word[i + 1 :] for c in LETTERS)
        words = near
    return words


@st.composite
def patterns(draw, depth: int = 3) -> str:
    """Draw regular expressions of finite languages over LETTERS."""
    kind = draw(st.sampled_from(["char", "class", "cat", "alt", "optional", "repeat"] if depth else ["char", "class"]))
    if kind == "char":
        return draw(st.sampled_from(["a", "b", "c", " ", "ab"]))
    if kind == "class":
        return draw(st.sampled_from(["[ab]", "[^ac]", "[abc ]", "."])).replace(".", "[abc ]").replace("[^ac]", "[b ]")
    if kind in ("cat", "alt"):
        parts = draw(st.lists(patterns(depth - 1), min_size=2, max_size=3))
        return "(" + ("" if kind == "cat" else "|").join(parts) + ")"
    times = "?" if kind == "optional" else draw(st.sampled_from(["{1,2}", "{0,2}", "{2}"]))
    return f"({draw(patterns(depth - 1))}){times}"


def members(pattern: str, longest: int = LONGEST) -> set[str]:
    """Return the strings of a language, or assume() that none is longer."""
    found = {text for text in strings(longest) if re.fullmatch(pattern, text)}
    assume(found and len(list(itertools.islice(Regex(pattern).enumerate(), len(found) + 1))) == len(found))
    return found


# ---- the shortest path


@settings(max_examples=repetitions(100, 12))
@given(patterns(depth=2), st.integers(1, 2), st.booleans(), st.data())
def test_edits_and_ignored_strings(pattern, k, canonical, data):
    words, lm = members(pattern, 3), language_model()
    assume(max(map(len, words)) + k <= 5)
    cut = data.draw(st.integers(0, min(map(len, words))), label="prefix length")
    prefix = data.draw(st.sampled_from(sorted({word[:cut] for word in words})), label="prefix")
    ignore = data.draw(st.sampled_from([None, "a.*", "[abc]*"]), label="ignore")
    near = {prefix + rest for rest in edited({word[cut:] for word in words if word.startswith(prefix)}, k)}
    if ignore is not None:
        near = {word for word in near if not re.fullmatch(ignore, word[cut:])}
    edits = Edits(k, alphabet="[abc ]")
    options = {"prefix": prefix, "edits": edits, "ignore": ignore, "tokenization": "canonical" if canonical else "all"}
    if not near:
        with pytest.raises(ValueError, match="is left by ignore"):
            search(lm, pattern, **options)
        return
    of_strings, *_ = truth(lm, near, [prefix], canonical=canonical)
    matches = list(search(lm, pattern, **options))
    check(matches, of_strings)
    nearest = {word[cut:] for word in words if word.startswith(prefix)}
    for match in matches:
        text = str(match.text)[cut:]
        least = next(n for n in range(k + 1) if text in edited(nearest, n))
        assert len(match.edits) == least
        undone = list(text)
        for edit in reversed(match.edits):
            undone[edit.place : edit.place + len(edit.found)] = edit.wanted
        assert "".join(undone) in nearest


def test_edits_of_the_prefix_by_region():
    lm, near = language_model(), edited({"ab"}, 1)
    matches = list(search(lm, "abc", prefix="ab", end="eos", edits={"prefix": Edits(1, alphabet="[abc ]")}))
    of_strings, *_ = truth(lm, {word + "c" for word in near}, near, end="eos")
    check(matches, {key: value for key, value in of_strings.items() if key[1] == key[0] + "c"})


def test_two_prefixes_that_edits_join_share_their_string_once():
    lm = language_model()
    options = {"prefix": ["a", "b"], "edits": {"prefix": Edits(1, insert=None, delete=None, alphabet="[ab]")}}
    matches = list(search(lm, "ac|bd|b ", **options))
    assert sorted((m.prefix, str(m.text)) for m in matches) == [(p, p + c) for p in "ab" for c in " c"]


def test_a_deferred_difference_gives_the_same_result(monkeypatch):
    lm, options = language_model(), {"ignore": "a[abc]*"}
    at_once = [(str(m), m.log_prob) for m in search(lm, "[abc]{1,3}", **options)]
    monkeypatch.setattr("llmppl.queries.compile.MAX_DIFFERENCE_STATES", 1)
    later = Query(lm, "[abc]{1,3}", **options)
    assert later.compiled.ignored is not None
    assert [(str(m), m.log_prob) for m in later.best()] == at_once


def test_rewrites_apply_to_the_pattern():
    vocab = Vocabulary([b"a", b"A", b"b", b"B", b""], eos_ids=[4])
    lm = CachedTransformer(lambda ids: [1.0, 0.5, 0.2, 0.1, 0.3], vocab)
    texts = {(m.prefix, str(m)) for m in search(lm, "ab", prefix="a", rewrite=[any_case])}
    assert texts == {("a", "ab"), ("a", "aB")}
    texts = {(m.prefix, str(m)) for m in search(lm, "ab", prefix=any_case(Regex("a")), rewrite=[any_case])}
    assert texts == {("a", "ab"), ("a", "aB"), ("A", "Ab"), ("A", "AB")}
    only_long = search(lm, "a|aab", prefix="a", rewrite=[lambda language: language & Regex("a|aa.")])
    assert [str(m) for m in only_long] == ["a", "aab"]


def test_a_prefix_is_a_text_unless_it_is_a_regex():
    lm = language_model()
    texts = {prefix: {(m.prefix, str(m)) for m in search(lm, r"a?b|[.]b", prefix=prefix)} for prefix in (".", "a")}
    assert texts == {".": {(".", ".b")}, "a": {("a", "ab")}}
    assert {m.prefix for m in search(lm, "a?b|[.]b", prefix=Regex("a?"))} == {"", "a"}
    assert {m.prefix for m in search(lm, "a?b|[.]b", prefix=["a", "."])} == {"a", "."}


def test_a_prefix_with_too_many_strings_is_refused(monkeypatch):
    monkeypatch.setattr("llmppl.queries.compile.MAX_PREFIXES", 3)
    for options in ({"prefix": Regex("[ab]*")}, {"prefix": "ab", "edits": {"prefix": 1}}):
        with pytest.raises(ValueError, match="has more than 3 strings, with its edits: give one with fewer"):
            search(language_model(), "[ab]*c", **options)


def test_an_infinite_language_is_searched_lazily():
    lm = language_model()
    deep = {text for text in strings(6) if re.fullmatch("[ab]*c?", text)}
    best = sorted(truth(lm, deep, [""], end="eos")[0].values(), reverse=True)[:20]
    found = search(lm, "[ab]*c?", end="eos").take(20)
    np.testing.assert_allclose([match.log_prob for match in found], np.log(best), atol=1e-7)


@pytest.mark.parametrize("results", ["strings", "tokens"])
def test_probabilities_below_the_least_float_keep_their_order(results):
    lm = tiny.table_lm(lambda ids: [-800.0, -900.0, 0.0])
    query = Query(lm, "a(bb|ab|aa)", prefix="a")
    matches = list(query.best(results=results))
    assert [str(m) for m in matches] == ["aaa", "aab", "abb"]
    np.testing.assert_allclose([m.log_prob for m in matches], [-1600.0, -1700.0, -1800.0])


def test_memory_does_not_grow_with_the_vocabulary():
    vocab = Vocabulary([*(bytes([65 + i // 26, 97 + i % 26]) for i in range(600)), b""], eos_ids=[600])
    lm = CachedTransformer(lambda ids: np.linspace(0.0, 3.0, 601), vocab)
    found = Query(lm, "Aa.*", prefix="Aa").best(results="tokens", batch=1)
    found.take(30)
    assert found.expansions > 100 and len(found._search.heap) <= 25 * found.expansions


def test_the_has_four_encodings(embedded):
    ids = embedded.vocab.ids_by_bytes
    assert all(piece in ids for piece in (b"T", b"h", b"e", b"Th", b"he", b"The"))
    assert len(list(search(embedded, "The", results="tokens", end="prefix"))) == 4
    (match,) = search(embedded, "The", end="prefix")
    total = np.logaddexp.reduce([m.log_prob for m in search(embedded, "The", results="tokens", end="prefix")])
    assert match.log_prob == pytest.approx(total, abs=1e-7)


def test_canonical_texts_without_a_prefix_begin_after_the_bos(embedded):
    own = [int(token) for token in embedded.context("The boy").tokens]       # no BOS: the tokenizer puts none there
    query = Query(embedded, "The boy|b?", prefix="", end="prefix", tokenization="canonical")
    found = {str(match): match for match in query.best()}
    assert [int(token) for token in found["The boy"].tokens] == own
    begin = embedded.context("")
    spelled = begin + own[0] + own[1]
    assert found["The boy"].log_prob == pytest.approx(spelled.log_prob_since(begin))
    assert found.keys() == {"The boy", "b", ""} and found[""].log_prob == 0.0


# ---- samples


def chi_square_ok(counts: Counter, expected: dict, n: int) -> None:
    assert set(counts) <= set(expected)
    assert chisquare([counts[key] for key in expected], [n * p for p in expected.values()]).pvalue > 1e-4


def test_prefixes_are_drawn_uniformly_as_strings():
    lm, n = language_model(), repetitions(4000, 500)
    query = Query(lm, "(a|b|bb|bbb)c", prefix=["a", "b", "bb", "bbb"])
    drawn = query.samples(local=True, prefixes="uniform", particles=1, seed=0)
    counts = Counter(match.prefix for match in itertools.islice(drawn, n))
    chi_square_ok(counts, dict.fromkeys(["a", "b", "bb", "bbb"], 0.25), n)


def test_local_samples_follow_the_distribution_that_renormalises_each_token():
    """Kuchnik et al. 2023, random search: computed here by walking every token sequence."""
    lm, n = language_model(), repetitions(4000, 500)
    words = {text for text in strings(3) if re.fullmatch("a(b|c)?|ba", text)}
    dist: dict[str, float] = {}

    def walk(ids: tuple[int, ...], text: str, p: float) -> None:
        weights = np.exp(tiny.log_probs_by_hand(lm, [V, *ids]))
        nexts = [i for i in range(V - 1) if any(w.startswith(text + tiny.TOKENS[i].decode()) for w in words)]
        total = weights[nexts].sum() + (weights[EOS] if text in words else 0.0)
        if text in words:
            dist[text] = dist.get(text, 0.0) + p * weights[EOS] / total
        for i in nexts:
            walk((*ids, i), text + tiny.TOKENS[i].decode(), p * weights[i] / total)

    walk((), "", 1.0)
    drawn = [*itertools.islice(Query(lm, "a(b|c)?|ba", end="eos").samples(local=True, seed=1), n)]
    assert {match.log_weight for match in drawn} == {0.0}
    chi_square_ok(Counter(map(str, drawn)), dist, n)


SAMPLED = ["a[ab]{0,3}c|ba", "(ab){1,3}", "a(b|c)?|b", "[ab]{2}|c", " ?(a|b)c?", "(a|bc){1,2}", "b?a{0,2}"]


@pytest.mark.parametrize("pattern", SAMPLED[: repetitions(7, 2)])
@pytest.mark.parametrize("end", ["eos", "prefix", "boundary"])
def test_weighted_samples_follow_the_model_given_the_language(pattern, end):
    """Block by block, the weights of each string add up to an unbiased estimate of its probability (4.5 errors)."""
    lm, runs = language_model(), repetitions(1000, 60)
    words = {text for text in strings(6) if re.fullmatch(pattern, text)}
    expected, *_ = truth(lm, words, [""], end=end)
    names = sorted(word for _, word in expected)
    space = Query(lm, pattern, end=end).space
    program = Sampled(space, space.starts())
    sums = np.zeros((runs, len(names)))
    for i in range(runs):
        for particle in smc_standard(program, 6, seed=i, progress=False):
            sums[i, names.index(str(particle.match(0.0)))] += math.exp(particle.log_weight)
    target = np.array([expected["", name] for name in names])
    often = target > 0.02 * target.sum()                # rarer ones are met too seldom for an error to be known
    sums = np.column_stack([sums[:, often], sums.sum(axis=1)])
    error = sums.std(axis=0, ddof=1) / math.sqrt(runs)
    assert np.all(np.abs(sums.mean(axis=0) - [*target[often], target.sum()]) <= 4.5 * error + 1e-12)


def given_language(lm, pattern: str) -> dict[str, float]:
    """Return the probabilities of the strings of a language, given the language."""
    of_strings, _, Z = truth(lm, {text for text in strings(4) if re.fullmatch(pattern, text)}, [""])
    return {word: p / Z for (_, word), p in of_strings.items()}


def shares(matches) -> dict[str, float]:
    """Return the share of each string in the weights of some matches."""
    sums = tiny.add_up((str(match), match.log_weight) for match in matches)
    return {text: weight / sum(sums.values()) for text, weight in sums.items()}


def test_the_stream_of_samples_carries_these_weights():
    lm, pattern = language_model(), "a(b|c)?|b"
    drawn = Query(lm, pattern).samples(particles=8, seed=2).take(repetitions(8000, 2000))
    assert shares(drawn) == pytest.approx(given_language(lm, pattern), abs=0.06)


def test_the_error_of_weighted_samples_falls_with_their_number():
    lm, pattern, seeds = language_model(), "a[ab]{0,2}c|ba", range(repetitions(300, 30))
    exact = given_language(lm, pattern)

    def error(N: int) -> float:
        """Return the mean total variation over runs of N particles."""
        found = [shares(Query(lm, pattern).samples(particles=N, seed=seed).take(N)) for seed in seeds]
        return float(np.mean([sum(abs(each.get(word, 0.0) - p) for word, p in exact.items()) / 2 for each in found]))

    assert 2.0 < error(4) / error(64) < 8.0             # 4 by the rate N^-1/2


def test_distinct_samples_are_drawn_without_replacement_from_the_model():
    lm, n = language_model(), repetitions(3000, 300)
    p = given_language(lm, "a(b|c)?|ba")
    query = Query(lm, "a(b|c)?|ba")
    drawn = [[str(match) for match in query.distinct(seed=seed)] for seed in range(n)]
    assert {tuple(sorted(each)) for each in drawn} == {tuple(sorted(p))}
    exact = {(x, y): p[x] * p[y] / (1.0 - p[x]) for x, y in itertools.permutations(p, 2)}
    chi_square_ok(Counter((first, second) for first, second, *_ in drawn), exact, n)


def test_matches_begin_each_other_only_after_the_prefix():
    """In the whole pattern "" begins "c", which does not matter after "a"."""
    lm = language_model()
    assert [str(m) for m in Query(lm, "c?|ab", prefix="a", end="prefix").distinct(seed=0)] == ["ab"]
    with pytest.raises(ValueError, match="a match here can begin another"):
        Query(lm, "ab?", prefix="a", end="prefix").distinct()


# ---- rules and certificates

RULES = [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.4, "top_k": 4, "top_p": 0.9}]


@settings(max_examples=repetitions(100, 12))
@given(st.text(LETTERS, min_size=1, max_size=4), st.sampled_from(RULES), st.booleans())
def test_certificates_agree_with_the_distribution(text, rule, end):
    lm = language_model()
    found = explain(lm, text, Rule(**rule), prefix="a", end="eos" if end else "prefix")
    before = [int(t) for t in lm.context("a").tokens]
    ids = [int(c.token) for c in found]
    assert b"".join(lm.vocab.tokens[i] for i in ids).decode() == text and (ids[-1] == EOS) == end
    dists = [tiny.log_probs_by_hand(lm, before + ids[:i]) for i in range(len(ids))]
    possible = [ruled(np.exp(dist), **rule)[i] > 0.0 for dist, i in zip(dists, ids, strict=True)]
    plain = [dist[i] for dist, i in zip(dists, ids, strict=True)]
    assert [c.log_prob for c in found] == pytest.approx(plain, abs=1e-9) and found.log_prob == pytest.approx(sum(plain))
    assert [c.rank for c in found] == [1 + sum(dist > dist[i]) for dist, i in zip(dists, ids, strict=True)]
    assert [c.excluded_by is None for c in found] == possible
    assert bool(found) == all(possible)


@pytest.mark.parametrize(
    ("rule", "part"), [(Rule(top_k=1), "top_k=1"), (Rule(top_p=0.4), "top_p=0.4"), (Rule(min_p=0.9), "min_p=0.9")]
)
def test_an_excluded_token_names_the_part_of_the_rule(rule, part):
    lm = tiny.table_lm(lambda ids: np.log([0.5, 0.3, 0.2]))
    assert explain(lm, "b", rule, prefix="a")[0].excluded_by == part
    assert f"excluded by {part}" in str(explain(lm, "b", rule, prefix="a"))


def test_short_forms_take_the_options_of_both_parts():
    lm, rng = language_model(), {"seed": 3}
    query = Query(lm, "ab*", prefix="a", end="prefix")
    options = {"tolerance": 0.3, "max_expansions": 3, "batch": 2}
    assert probability(lm, "ab*", prefix="a", end="prefix", particles=2, runs=4, **options, **rng) == (
        query.probability(particles=2, runs=4, **options, **rng)
    )
    found = search(lm, "ab*", prefix="a", end="prefix", order="conditional", results="tokens", **options)
    assert list(found) == list(query.best(order="conditional", results="tokens", **options))
    for call, option in ((search, "seed"), (search, "max_result"), (probability, "order")):
        with pytest.raises(TypeError, match=f"^{call.__name__} takes no {option}: (did you mean|it takes) "):
            call(lm, "ab*", **{option: 1})


def test_a_query_repeats_its_answers_for_a_seed_or_stream():
    query = Query(language_model(), "a(b|c)?|ba", rule=Rule(top_k=4))

    def answers(**stream):
        """Return a few matches of each kind, and a probability."""
        several = [query.best(), query.distinct(**stream), query.samples(**stream)]
        return [*(matches.take(5) for matches in several), query.probability(max_expansions=1, **stream)]

    assert answers(seed=3) == answers(seed=3) == answers(rng=None, seed=3)
    assert list(query.distinct(rng=np.random.default_rng(3))) == list(query.distinct(seed=3))


def test_search_and_probability_are_shortcuts_of_a_query():
    lm, options = language_model(), {"prefix": "a", "end": "prefix", "rule": Rule(top_k=4), "max_tokens": 2}
    query = Query(lm, "a[bc]{1,2}", **options)
    assert list(search(lm, "a[bc]{1,2}", results="tokens", **options)) == list(query.best(results="tokens"))
    assert probability(lm, "a[bc]{1,2}", seed=0, **options) == query.probability(seed=0)


# ---- errors, and what can be stopped


def asked(lm, pattern="ab?", **options):
    return search(lm, pattern, **options)


def answered(lm, answer, **options):
    return getattr(Query(lm, "ab?"), answer)(**options)


def explained(lm, **options):
    return explain(**{"lm": lm, "text": "b", "prefix": "a"} | options)


@pytest.mark.parametrize(
    ("ask", "options", "error", "said"),
    [
        (asked, {"tokenization": "some"}, ValueError, "tokenization must be one of"),
        (asked, {"end": "never"}, ValueError, "end must be one of 'eos', 'prefix', 'boundary', not 'never'"),
        (asked, {"results": "all"}, ValueError, "results must be one of"),
        (asked, {"max_tokens": -1}, ValueError, "max_tokens must be at least 0, not -1"),
        (asked, {"max_chars": -1}, ValueError, "max_chars must be at least 0, not -1"),
        (asked, {"max_expansions": 0}, ValueError, "max_expansions"),
        (asked, {"edits": -1}, ValueError, "edits must be at least 0, not -1"),
        (asked, {"edits": {"middle": 1}}, ValueError, "edits by region"),
        (asked, {"ignore": "(a"}, ValueError, r"\^"),
        (asked, {"ignore": ".*"}, ValueError, "is left by ignore"),
        (asked, {"prefix": "b"}, ValueError, "no text of it begins with 'b'"),
        (asked, {"prefix": Regex("a{0,2}")}, ValueError, "no text of it begins with 'aa'"),
        (asked, {"pattern": "a?(b|c)", "prefix": "a?"}, ValueError, r"includes the prefix, as in re.escape\(prefix"),
        (asked, {"pattern": "a(b"}, ValueError, r"\n.*\^"),
        (asked, {"pattern": Regex("a") & Regex("b")}, ValueError, "matches no text"),
        (asked, {"pattern": "(a)\\1"}, ValueError, "backreference"),
        (asked, {"edit": 2}, TypeError, "edit"),
        (asked, {"max_tokens": 2.5}, TypeError, "max_tokens must be an integer, not 2.5"),
        (asked, {"max_expansions": 1e4}, TypeError, "max_expansions must be an integer, not 10000.0"),
        (asked, {"edits": "x"}, TypeError, "edits must be an integer, not 'x'"),
        (asked, {"ignore": 3}, TypeError, "ignore must be a regular expression"),
        (asked, {"prefix": b"a"}, TypeError, "prefix must be a str, a DFA"),
        (asked, {"rewrite": any_case}, TypeError, r"rewrite must be a list of functions .* such as \[any_case\]"),
        (asked, {"rewrite": ["any_case"]}, TypeError, "each of rewrite must be a function, as any_case is, not 'any"),
        (asked, {"rewrite": [lambda language: None]}, TypeError, "must return a DFA"),
        (asked, {"rule": "top_k"}, TypeError, r"rule must be a function, as Rule\(top_k=40\) is"),
        (asked, {"lm": "gpt2"}, TypeError, "a query wants a CachedTransformer first, not 'gpt2'"),
        (answered, {"answer": "best", "order": "random"}, ValueError, "order must be one of"),
        (answered, {"answer": "distinct", "results": "all"}, ValueError, "results must be one of"),
        (answered, {"answer": "distinct", "seed": 1, "rng": np.random.default_rng()}, ValueError, "not both"),
        (answered, {"answer": "samples", "prefixes": "some"}, ValueError, "prefixes must be one of 'model', 'uniform'"),
        (answered, {"answer": "samples", "particles": 0}, ValueError, "particles must be at least 1, not 0"),
        (answered, {"answer": "samples", "seed": 0.5}, TypeError, "seed must be an integer, not 0.5"),
        (answered, {"answer": "probability", "batch": 0}, ValueError, "batch must be at least 1, not 0"),
        (answered, {"answer": "probability", "max_expansions": -1}, ValueError, "max_expansions must be at least 0"),
        (answered, {"answer": "probability", "runs": -1}, ValueError, "runs must be at least 0, not -1"),
        (explained, {"text": 3}, TypeError, "text must be a str, not 3"),
        (explained, {"end": True}, TypeError, "end must be one of 'prefix', 'eos', not True"),
        (explained, {"rule": 40}, TypeError, "explain names the part of a Rule"),
    ],
)
def test_bad_arguments_are_named(ask, options, error, said):
    with pytest.raises(error, match=said):
        ask(**{"lm": language_model()} | options)


@pytest.mark.parametrize("options", [{"max_cost": -1}, {"max_cost": 1, "insert": 0}])
def test_costs_of_edits_are_counts(options):
    with pytest.raises(ValueError, match="must be at least"):
        Edits(**options)


def test_a_language_without_a_canonical_path_is_named():
    """The tokenizer writes "ab" as one token, and the prefix "a" is one already."""
    with pytest.raises(ValueError, match="own encoding"):
        list(search(language_model(), "ab", prefix="a", tokenization="canonical"))


def test_samples_that_never_finish_are_an_error(monkeypatch):
    with pytest.raises(ValueError, match="samples finished"):
        next(Query(language_model(), "a{4}", max_tokens=2).samples())
    monkeypatch.setattr("llmppl.queries.sampling.MAX_BARREN_STEPS", 60)
    only_a = tiny.table_lm(lambda ids: [0.0, -math.inf, 0.0])
    for local in (False, True):
        with pytest.raises(ValueError, match="no sample finished in 60 steps of samples; the last ones have 6 tokens"):
            next(Query(only_a, "a*b", prefix="a").samples(local=local, particles=10))


def test_a_search_without_a_match_ends_with_the_remaining_probability(monkeypatch):
    """After each "a" comes another with 0.5, or the end; "b" never comes. The bound is 0.5 ** 40."""
    monkeypatch.setattr("llmppl.queries.best_first.MAX_BARREN_EXPANSIONS", 40)
    only_a = tiny.table_lm(lambda ids: [0.0, -math.inf, 0.0])
    said = "further matches have probability 9.1e-13 at most, all together"
    for results in ("strings", "tokens"):
        with pytest.raises(ValueError, match=f"^no match in 40 expansions; {said}.*give a larger max_expansions"):
            next(Query(only_a, "a*b", prefix="a").best(batch=1, results=results))
        longer = Query(only_a, "a*b", prefix="a").best(batch=1, results=results, max_expansions=99)
        assert next(longer, None) is None and longer.expansions == 99 and not longer.complete
    with pytest.raises(ValueError, match="no match in 40 expansions; .* all together. To search on"):
        next(Query(only_a, "a*b", prefix="a").distinct(batch=1))


def test_the_patience_restarts_after_every_match(monkeypatch):
    """The matches are 30 expansions apart; then there are no more."""
    monkeypatch.setattr("llmppl.queries.best_first.MAX_BARREN_EXPANSIONS", 40)
    only_a = tiny.table_lm(lambda ids: [0.0, -math.inf, 0.0])
    for results in ("strings", "tokens"):
        found = Query(only_a, "(a{30}){1,3}|a*b", prefix="a").best(batch=1, results=results)
        assert [len(str(match)) for match in itertools.islice(found, 3)] == [30, 60, 90]
        with pytest.raises(ValueError, match="no further match in 40 expansions"):
            next(found)


def test_progress_is_shown_on_stderr(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")              # as on a terminal
    lm = language_model()
    shown = search(lm, "[ab]c", progress=True)
    assert [str(m) for m in shown] == [str(m) for m in search(lm, "[ab]c")]
    printed = capsys.readouterr().err
    assert "match 2 " in printed and f"{shown.expansions} expansions" in printed


def test_a_search_can_be_bounded_and_says_whether_it_was_complete():
    lm = language_model()
    cut = Query(lm, "[ab]*c").best(max_expansions=20, batch=4)
    found = [str(m) for m in cut]
    assert not cut.complete and 20 <= cut.expansions < 24
    assert found == [str(m) for m in itertools.islice(search(lm, "[ab]*c"), len(found))]
    whole = search(lm, "a|b", max_expansions=50)
    assert len(list(whole)) == 2 and whole.complete


def test_no_match_is_told_from_a_limit():
    """After "a" the next "a" has 0.5, so 0.25 is left after two expansions; "b" has 0."""
    only_a = tiny.table_lm(lambda ids: [0.0, -math.inf, 0.0])
    assert repr(search(only_a, "ab", prefix="a").take(3)) == "0 matches: there are no others"
    cut = Query(only_a, "a*b", prefix="a").best(batch=1, max_expansions=2).take(3)
    assert repr(cut) == "0 matches: max_expansions was reached; others have probability 0.25 at most"


def test_a_text_longer_than_the_model_reads_is_no_match():
    lm = language_model()                               # reads 32 tokens
    texts = [str(m) for m in search(lm, "c{30}|c{31}|c{32}", end="prefix")]
    assert texts == ["c" * 30, "c" * 31]                # behind a BOS


def test_the_estimate_of_an_endless_language_drops_long_particles(monkeypatch):
    lm = language_model()
    monkeypatch.setattr("llmppl.queries.sampling.MAX_STEPS", 7)
    found = probability(lm, "[ab]*c", max_expansions=0, seed=1)
    bounded = Query(lm, "[ab]*c", max_tokens=6).probability(tolerance=1e-6, runs=0)
    assert abs(found.estimate - bounded.lower) <= 4.5 * found.estimate_se
    assert math.isnan(probability(lm, "[ab]*c", runs=0).estimate)
    assert [view._repr_html_().count("<path") for view in (found, bounded)] == [1, 0]


def test_an_endless_query_can_be_stopped_and_keeps_its_matches():
    lm = language_model()
    found = Query(lm, "[abc ]*").samples(seed=0)
    first = next(found)
    assert found.num_matches == 1 and str(first) in strings(len(str(first)))
    assert "1 so far" in repr(found) and found.stats.rows > 0


def test_the_plan_names_the_sizes():
    lm = language_model()
    plan = Query(lm, "a(b|c)+", prefix="a").plan()
    assert "infinite language" in plan and "of 7 tokens may come first" in plan
    assert "a finite language" in Query(lm, "a(b|c)", prefix="a").plan()


def test_a_match_shows_text_log_prob_and_length():
    (match,) = search(tiny.table_lm(lambda ids: [0.0, 0.0, 0.0]), "ab", prefix="a", end="prefix")
    assert repr(match) == "Match('ab', log_prob=-1.099, 1 tokens)"
    assert match.as_dict()["text"] == str(match) == "ab" and match.as_dict()["tokens"] == [1]


def test_a_dfa_may_be_a_pattern():
    lm = language_model()
    assert {str(m) for m in search(lm, DFA.from_strings(["ab", "c"]))} == {"ab", "c"}


def test_five_hundred_words_within_one_edit_have_few_states():
    words = [f"{a}{b}{c}{d}" for a in "abcdefgh" for b in "aeiou" for c in "lmnrst" for d in "aeiou"][:500]
    (num_states,) = re.findall(r"([0-9]+) states", Query(language_model(), "|".join(words), edits=1).plan())
    assert int(num_states) < 10_000


def test_a_search_takes_regular_compositions_and_refuses_others():
    lm = CachedTransformer.from_pretrained(engine="numpy")
    part = (Regex("a") + JsonSchema({"enum": ["b", "c"]})).named("text")
    with pytest.raises(ValueError, match="cannot be searched: it has no automaton"):
        next(search(lm, Grammar('start: "a"')))
    with pytest.raises(ValueError, match="it has the special token '<x>': enumerate_exact"):
        Query(lm, "a" + Special("<x>"))
    with pytest.raises(TypeError, match="pattern must be a regular expression"):
        next(search(lm, 5))
    assert Query(lm, part).plan() is not None
    found = Query(lm, Regex("a").named("x") + "b").probability()
    assert found.estimate == pytest.approx(Query(lm, "ab").probability().estimate)
