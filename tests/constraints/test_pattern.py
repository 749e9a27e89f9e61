"""Pattern: prefixes, masks and texts compared with brute force; weights are in tests/promises/test_exactness.py."""

import contextlib
import itertools
import math
import random
from collections import Counter

import pytest
import regex
from helpers.common import repetitions
from helpers.tiny import log_prob_by_hand, spelled, tiny_lm

from llmppl import CachedTransformer, ConstrainedText, Rule, Vocabulary
from llmppl.constraints import Index, Pattern, index_of
from llmppl.constraints.pattern import _Prefixes
from llmppl.distributions import NO_RULE
from llmppl.inference import beam_search, enumerate_exact

TEXTS = ["".join(letters) for n in range(7) for letters in itertools.product("ab ", repeat=n)]
ATOMS = ["a", "b", " ", "[ab]", ".", r"\w", r"\b", r"\B", "$", "^", r"\Z", "(a)", r"\1", "[^a]"]
PARTS = ["{}{}", "(?:{}|{})", "({})", "(?:{})*", "(?:{})+?", "(?:{})++", "(?:{}){{1,2}}", "(?={})", "(?!{})",
         "(?<={})", "(?<!{})", "(?>{})", "({})?(?(1){}|{})", r"({})\1"]  # fmt: skip


def random_pattern(rng, depth):
    if not depth:
        return rng.choice(ATOMS)
    part = rng.choice(PARTS[:1] * 4 + PARTS)
    return part.format(*(random_pattern(rng, depth - 1) for _ in range(part.replace("{{", "").count("{}"))))


def random_patterns(seed, num):
    rng = random.Random(seed)
    for _ in range(num):
        pattern = random_pattern(rng, 4)
        with contextlib.suppress(regex.error):      # a backreference without its group
            regex.compile(pattern)
            yield pattern


def test_every_prefix_of_a_match_may_begin_a_match():
    for text in random_patterns(1, repetitions(5000, 550)):     # regex itself fails at the 5,450th
        pattern, exact = Pattern(text), regex.compile(text)
        matches = [each for each in TEXTS if exact.fullmatch(each)]
        assert [each for each in TEXTS if each in pattern] == matches
        prefixes = {each[:i] for each in matches for i in range(len(each) + 1)}
        assert [each for each in sorted(prefixes) if not pattern.matches(each, partial=True)] == [], text


@pytest.mark.parametrize("pattern, text, more", [
    (r"(\w+) and \1", "dogs and d", "ogs"), (r"\((?:[^()]|(?R))*\)", "((a)", ")"), (r"(a)?(?(1)b|c)", "a", "b"),
    (r"(?i)(é|日).\1", "É-", "é"), (r"(?:cat){e<=1}", "ca", "r"), (r"(?!foo$)foo.*", "foo", "t"),
    (r"(?>a\b|ab)(?<=b)", "a", "b"), (r"(?:\({200}){500}(?:(?:ab?){0,5000}c){0,5000}", "(" * 100_000, "aabc"),
])  # fmt: skip
def test_a_prefix_that_has_a_match_passes_and_another_does_not(pattern, text, more):
    pattern = Pattern(pattern)
    assert pattern.matches(text, partial=True) and text + more in pattern
    assert not pattern.matches("\n\n", partial=True)


def test_a_mask_allows_the_tokens_after_which_some_text_matches():
    halves = [b"\xc3", b"\xa9", b"\xaa", b"\xe6\x97", b"\xa5", b"\xf0", b"\xff"]
    vocab = Vocabulary([b"a", b"aa", b"b", b"ab", *halves, "é".encode(), b"", b"<s>"], eos_ids=[12], special_ids=[13])
    index = index_of(Pattern(r"(a|é|日)\1b?"), vocab)
    whole = {"aa", "aab", "éé", "ééb", "日日", "日日b"}
    prefixes = {text.encode()[:i] for text in whole for i in range(len(text.encode()) + 1)}
    todo = [b""]
    for state in todo:                              # grows
        allowed = {id for id, data in enumerate(vocab.tokens) if data and state + data in prefixes}
        allowed |= {12} if state.decode(errors="replace") in whole else set()
        assert allowed <= set(index.allowed(state).tolist()) <= allowed | {4, 7, 9}     # halves of characters
        assert [index.fits(state, id) for id in range(len(vocab))] == index.mask(state).tolist()
        todo += [index.advance(state, id) for id in allowed - {12}]
    assert index.advance("éé".encode(), 12) is None and not index.mask(None).any()
    with pytest.raises(ValueError, match="token 2 may not follow"):
        index.advance(b"a", 2)


@pytest.mark.parametrize("state, fits", [("é ", False), ("é and", False), ("é and ", True), ("", True)])
def test_half_a_character_fits_where_some_character_beyond_ascii_may_follow(state, fits):
    index = index_of(Pattern(r"(\w+) and \1"), Vocabulary([b"\xc3", b"\xe6\x97", b""], eos_ids=[2]))
    assert [index.fits(state.encode(), id) for id in (0, 1)] == [fits, fits]


def test_at_the_boundary_a_text_ends_where_nothing_continues_it():
    pattern = r"(a|b)(c|\1)?"
    lm, ids, words = tiny_lm(), range(5), {"a", "ac", "aa", "b", "bc", "bb"}    # all texts
    expected, found = Counter(), Counter()
    for text in [(i,) for i in ids] + [*itertools.product(ids, repeat=2)]:
        if spelled(text) in words:
            more = [i for i in ids if spelled((*text, i)) in words]
            leaves = 1 - sum(math.exp(log_prob_by_hand(lm, [0, *text], [i])) for i in more)
            expected[spelled(text)] += math.exp(log_prob_by_hand(lm, [0], text)) * leaves
    for particle in enumerate_exact(ConstrainedText(lm, "a", Pattern(pattern), max_tokens=3)):
        found[str(particle)] += math.exp(particle.log_weight)
    assert found == pytest.approx(expected)


def test_a_beam_tests_the_most_probable_tokens_alone(monkeypatch):
    class Masked(Index):                            # the same texts by whole masks
        vocab, start = CachedTransformer.from_pretrained().vocab, b""

        def __init__(self, pattern):
            inner = pattern.index(self.vocab)
            self.mask, self.advance, self.accepts = inner.mask, inner.advance, inner.accepts

    def counted(index, data, end):
        texts.append(data)
        return begins(index, data, end)

    texts, begins = list[bytes](), _Prefixes.begins
    monkeypatch.setattr(_Prefixes, "begins", counted)
    lm, pattern = CachedTransformer.from_pretrained(), Pattern(r" (\w+) and \1\.")
    for rule, search in itertools.product((NO_RULE, Rule(temperature=0)), ((1, 1), (3, 2))):
        found, counts = [], []
        for constraint in (pattern, Masked(pattern)):
            texts.clear()
            program = ConstrainedText(lm, "Tim saw", constraint, max_tokens=8, rule=rule)
            found.append([(str(beam), beam.log_joint) for beam in beam_search(program, *search, max_steps=3)])
            counts.append(len(texts))
        assert found[0] == found[1] and counts[0] < counts[1] / 2


@pytest.mark.parametrize("pattern, message", [
    ("(", "error in pattern '\\('"), (b"a", "a str"), (5, "pattern 5"), ("(?r)ab", "from the left"),
    (r"(?x)(?:(?:a(?#)\)) {600,900}(?#()[(] ) {600}", "200,000 copies of items from position 17 on")])  # fmt: skip
def test_a_bad_pattern_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        Pattern(pattern)


def test_a_pattern_that_backtracks_for_ever_is_an_error(monkeypatch):
    for pattern, text in (r"(?=(a+))(a|aa)+\1b(?<=c)", "a" * 60), (r"(?:(?=(?:([^a])?(?(1)a|a))*))+?", "baba"):
        with pytest.raises(ValueError, match="takes more than 1 s .*, or too much memory"):
            Pattern(pattern).matches(text)
    monkeypatch.setattr("llmppl.constraints.pattern.MAX_SECONDS", 0.2)      # of 400 texts that take 20 ms each
    with pytest.raises(ValueError, match=r"takes more than 1 s \(0.2 s for all texts of a mask\)"):
        index_of(Pattern(r"a*b|(?=(a+))(a|aa)+\1bz?q"), Vocabulary([b"bz"] * 400, eos_ids=[])).mask(b"a" * 18)
