"""Compositions of constraints, compared with sets of texts: masks, distances, acceptance, values.

A part is beside the set of its texts, written down by hand. The operators on sets give the texts of
a composition. A token may follow if some text continues so. The least number of tokens to an end is
that of a search over the texts.
"""

import itertools
import math
import operator
from functools import reduce
from typing import Literal

import numpy as np
import pytest
from helpers.common import repetitions
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppl import (
    ConstrainedText,
    Grammar,
    JsonSchema,
    Regex,
    TokenIndex,
    Vocabulary,
    enumerate_exact,
)
from llmppl.constraints import Pattern, part_of
from llmppl.constraints.machine.distances import Distances

EOS_ID = 0


class OnlyAb:
    """Recognizer of the text "ab"."""

    start = "ab"

    def step(self, rest, byte):
        return rest[1:] if rest[:1] == chr(byte) else None

    def accepts(self, rest):
        return not rest


def begins_ab(text):
    return text in ("", "a", "ab")


# by kind: the part, and its texts
KINDS = {
    "regex": (Regex("ab?|b"), {"a", "ab", "b"}),
    "empty regex": (Regex("(a|1)?"), {"", "a", "1"}),
    "list": (["a", "ba"], {"a", "ba"}),
    "text": ("a", {"a"}),
    "type": (Literal["a", "b1"], {"a", "b1"}),
    "schema": (
        JsonSchema({"type": "array", "items": {"enum": [1, 11]}, "maxItems": 1}, whitespace=False),
        {"[]", "[1]", "[11]"},
    ),
    "scalar": (JsonSchema({"enum": ["a", 1, "b"]}), {'"a"', "1", '"b"'}),
    "grammar": (Grammar('start: A | "[" A "]"\nA: "a" | "1"'), {"a", "1", "[a]", "[1]"}),
    "pattern": (Pattern(r"(a|b)\1"), {"aa", "bb"}),
    "recognizer": (OnlyAb(), {"ab"}),
    "function": (begins_ab, {"", "a", "ab"}),
}  # fmt: skip
BYTES = [bytes([byte]) for byte in sorted(set(b'ab1[]"'))]
LONG = [
    b"ab",
    b"ba",
    b"a1",
    b"1a",
    b"]a",
    b"[1",
    b'"a',
    b'"a"',
    b'a"b',
    b"1]",
    b"a[",
    b"aab",
    b"]]",
    b"1[1]",
]
VOCABULARIES = {
    "bytes": Vocabulary([b"", *BYTES], [EOS_ID]),
    "long": Vocabulary([b"", *BYTES, *LONG], [EOS_ID]),
    "gaps": Vocabulary(
        [b"", *[byte for byte in BYTES if byte != b"]"], *LONG, b"ab", b"[]"], [EOS_ID]
    ),
}


def joined(texts, others):
    return {text + other for text in texts for other in others}


SIGNS = {
    "+": (operator.add, joined),
    "|": (operator.or_, operator.or_),
    "&": (operator.and_, operator.and_),
}


def is_part(value):
    return not isinstance(value, str | list) and hasattr(value, "named")


def composed(sign, first, second):
    """Return a composition of two kinds; one of both is a part, as in a program."""
    if not is_part(first) and not is_part(second):
        first = part_of(first)
    return part_of(SIGNS[sign][0](first, second))


def least_tokens(rest, vocab, memo):
    """Return the fewest tokens that spell some bytes."""
    if not rest:
        return 0
    if rest not in memo:
        fits = [token for token in vocab.tokens if token and rest.startswith(token)]
        memo[rest] = min(
            (1 + least_tokens(rest[len(token) :], vocab, memo) for token in fits), default=math.inf
        )
    return memo[rest]


def check(part, texts, vocab, most_states=150):
    """Compare the index of a part with its texts, in at most `most_states` states."""
    data = {text.encode() for text in texts}
    index = part.index(vocab)
    memo = {}
    todo = [(b"", index.start)]
    seen = {b""}
    for prefix, state in todo:
        rests = [text[len(prefix) :] for text in data if text.startswith(prefix)]
        assert index.accepts(state) == (prefix in data), prefix
        expected = {token: [rest for rest in rests if rest.startswith(data)]
                    for token, data in enumerate(vocab.tokens) if data}  # fmt: skip
        allowed = {token for token, some in expected.items() if some}
        ends = {EOS_ID} if prefix in data else set()
        assert set(index.allowed(state).tolist()) == allowed | ends, prefix
        for n in () if part.is_opaque else (1, 2, 3):
            near = set(ends)
            for token in allowed:
                size = len(vocab.tokens[token])
                lefts = [least_tokens(rest[size:], vocab, memo) for rest in expected[token]]
                near |= {token for left in lefts if left <= n - 1}
            assert set(np.flatnonzero(index.mask_within(state, n)).tolist()) == near, (prefix, n)
        lefts = [least_tokens(rest, vocab, memo) for rest in rests]
        least = 0 if part.is_opaque else min(lefts)
        assert index.tokens_to_accept(state) == least or min(lefts) == math.inf
        for token in allowed:
            after = prefix + vocab.tokens[token]
            if after not in seen and len(seen) < most_states:
                seen.add(after)
                todo.append((after, index.advance(state, token)))
        for token in set(expected) - allowed:
            with pytest.raises(ValueError, match="cannot follow|may not follow"):
                index.advance(state, token)


PAIRS = [*itertools.product(KINDS, KINDS)]
OPAQUE = {"pattern", "function"}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("sign", SIGNS)
def test_compositions_of_all_pairs_equal_sets_of_texts(sign, vocabulary):
    """`make test` tries each pair with one of the signs, over one of the vocabularies."""
    turn = [*itertools.product(SIGNS, VOCABULARIES)].index((sign, vocabulary))
    for at, (one, other) in enumerate(PAIRS):
        if at % repetitions(1, 9) != turn % repetitions(1, 9):
            continue
        if sign == "&" and OPAQUE & {one, other}:
            continue
        texts = SIGNS[sign][1](KINDS[one][1], KINDS[other][1])
        part = composed(sign, KINDS[one][0], KINDS[other][0])
        if texts:
            check(part, texts, VOCABULARIES[vocabulary])
            assert all(text in part for text in texts) and "zz" not in part
        else:
            with pytest.raises(ValueError, match="accepts no string at all"):
                part.index(VOCABULARIES[vocabulary])


@pytest.mark.parametrize("one, other", [pair for pair in PAIRS if OPAQUE & {*pair}])
def test_intersections_with_code_test_whole_texts(one, other):
    """Their masks may begin texts without an end, and `warnings` says so."""
    texts = KINDS[one][1] & KINDS[other][1]
    part = composed("&", KINDS[one][0], KINDS[other][0])
    index = part.index(VOCABULARIES["bytes"])
    assert "may turn out to have none, and die" in part.warnings[-1] and index.fits
    for text in KINDS[one][1] | KINDS[other][1]:
        assert (text in part) == (text in texts)
        state, at = index.read(index.start, text.encode())
        assert (at == len(text) and index.accepts(state)) == (text in texts)


# ---- random compositions


def times(texts, least, most):
    found = set()
    row = {""}
    for n in range(most + 1):
        if n >= least:
            found |= row
        row = joined(row, texts)
    return found


PARTS = {
    name: (part_of(part), texts) for name, (part, texts) in KINDS.items() if name not in OPAQUE
}
LEAVES = st.sampled_from([*PARTS.values()])


def extended(inner):
    """Return compositions of compositions, each with its texts, 60 at most."""
    two = st.tuples(st.sampled_from([*SIGNS]), inner, inner)
    pairs = two.map(
        lambda drawn: tuple(SIGNS[drawn[0]][i](drawn[1][i], drawn[2][i]) for i in range(2))
    )
    repeated = st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
        lambda drawn: (
            drawn[0][0].times(drawn[1], drawn[2]),
            times(drawn[0][1], drawn[1], drawn[2]),
        )
    )
    return st.one_of(
        pairs, repeated, inner.map(lambda drawn: (drawn[0].optional(), drawn[1] | {""}))
    )


COMPOSITIONS = extended(st.recursive(LEAVES, extended, max_leaves=4)).filter(
    lambda drawn: 0 < len(drawn[1]) <= 60
)


@settings(deadline=None, max_examples=repetitions(500, 48))
@given(COMPOSITIONS, st.sampled_from([*VOCABULARIES.values()]))
def test_random_compositions_equal_sets_of_texts(drawn, vocab):
    part, texts = drawn
    check(part, texts, vocab, most_states=25)
    assert all(text in part for text in texts)
    for text in texts:
        assert (text + "a" in part) == (text + "a" in texts) and (text[1:] in part) == (
            text[1:] in texts
        )


# ---- languages without end, against automata


A, B = Regex("a(b|1)*"), Regex("[ab]{0,3}1?")
NESTED = JsonSchema({"type": "array", "items": {"enum": [1, 11]}}, whitespace=False)
GRAMMAR = Grammar('start: "a" ("b" | "1")*')
LIKE_NESTED = Regex(r"\[((1|11)(,(1|11))*)?\]")


@pytest.mark.parametrize("part, same", [
    (NESTED + A, LIKE_NESTED + A),
    ("b" + NESTED | A, "b" + LIKE_NESTED | A),
    ((NESTED + B).star(), (LIKE_NESTED + B).star()),
    ((GRAMMAR | NESTED).times(1, 3), (A | LIKE_NESTED).times(1, 3)),
    (GRAMMAR + GRAMMAR, A + A),
    (B + GRAMMAR.optional() + NESTED, B + A.optional() + LIKE_NESTED),
    (GRAMMAR & Regex(".{2,5}"), A & Regex(".{2,5}")),
    ((GRAMMAR + NESTED) & Regex("a.*1[^1]*"), (A + LIKE_NESTED) & Regex("a.*1[^1]*")),
    (GRAMMAR - Regex("ab*"), A - Regex("ab*")),
    (NESTED.named("x").star() + GRAMMAR.star(), LIKE_NESTED.star() + A.star()),
])  # fmt: skip
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_compositions_without_end_equal_automata(part, same, vocabulary):
    vocab = VOCABULARIES[vocabulary]
    index = part.index(vocab)
    exact = TokenIndex(reduce(operator.or_, [same]), vocab)
    todo = [(index.start, exact.start)]
    seen = {*todo}
    for state, truth in todo:
        assert index.accepts(state) == exact.accepts(truth)
        assert index.allowed(state).tolist() == exact.allowed(truth).tolist()
        least = exact.tokens_to_accept(truth)
        if least < math.inf:  # vocabularies with gaps may have dead ends
            for n in (least, least + 1, least + 2):
                assert (
                    index.mask_within(state, n).tolist() == exact.mask_within(truth, n).tolist()
                ), n
        for token in index.allowed(state).tolist():
            if vocab.tokens[token]:
                pair = index.advance(state, token), exact.advance(truth, token)
                if pair not in seen and len(seen) < 200:
                    seen.add(pair)
                    todo.append(pair)
    assert len(seen) > 5


# ---- posteriors


@pytest.mark.parametrize("end", ["eos", "boundary", "prefix"])
@pytest.mark.parametrize("part, texts", [
    (" a" + JsonSchema({"enum": [1, "a"]}), {" a1", ' a"a"'}),
    (Regex(" a?") + Grammar('start: "b" | "(" start2 ")"\nstart2: "b"'),
     {" b", " ab", " (b)", " a(b)"}),
    (([" a", " b"] | JsonSchema({"enum": [" a", 2]})).times(1, 2),
     times({" a", " b", '" a"', "2"}, 1, 2)),
    (Grammar('start: " " "a"*') & Regex(" a{0,2}"), {" ", " a", " aa"}),
])  # fmt: skip
def test_posteriors_of_compositions_are_exact(part, texts, end, embedded):
    program, truth = (
        ConstrainedText(embedded, "He had", constraint, end=end, max_tokens=6)
        for constraint in (part, sorted(texts))
    )
    found, exact = enumerate_exact(program), enumerate_exact(truth)
    assert found.log_ml == pytest.approx(exact.log_ml, abs=1e-9)
    shares, expected = found.by_text(), exact.by_text()
    assert set(shares) == set(expected) and len(shares) > 1
    assert all(shares[text] == pytest.approx(expected[text], abs=1e-9) for text in shares)


def test_compositions_with_code_plan_no_end(monkeypatch):
    """A search would read the whole vocabulary in each of its states."""
    part = " " + Pattern(r"(\w+) and \1") + JsonSchema({"enum": [1]})
    index = part.index(VOCABULARIES["bytes"])
    monkeypatch.setattr(Distances, "_search", None)
    assert index.mask_within(index.start, 5).tolist() == index.mask(index.start).tolist()
    assert index.tokens_to_accept(index.start) == 0
