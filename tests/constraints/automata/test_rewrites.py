"""Rewrites: automata against strings rewritten one by one in plain Python."""

import itertools
import re
import string
import unicodedata

import pytest
from helpers.common import repetitions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmppl.constraints import DFA, Regex
from llmppl.constraints.automata import nfa
from llmppl.constraints.automata.rewrites import (
    any_case,
    any_whitespace,
    optional_punctuation,
    rewrite,
    synonyms,
)

LETTERS = "abé"
SHORT = ["".join(some) for n in range(5) for some in itertools.product(LETTERS, repeat=n)]     # 121 texts

many = settings(max_examples=repetitions(300, 60), suppress_health_check=list(HealthCheck))
TEXTS = st.text(LETTERS, max_size=4)
LANGUAGES = st.lists(TEXTS, min_size=1, max_size=4)
TABLES = st.dictionaries(st.text(LETTERS, min_size=1, max_size=3), st.lists(TEXTS, max_size=3), max_size=3)
PATTERNS = st.sampled_from(["a+", "ab|é", "[ab]", "é(ab)*", "a|ab|abé", r"[^\s\S]", "b{2}"])


def spellings(text, alternatives):
    """Return all strings that result from replacing occurrences in `text` by `alternatives(substring)`."""
    if not text:
        return {""}
    found = {text[0] + rest for rest in spellings(text[1:], alternatives)}
    for end in range(1, len(text) + 1):
        found |= {by + rest for by in alternatives(text[:end]) for rest in spellings(text[end:], alternatives)}
    return found


def members(dfa):
    return set(dfa.enumerate())


# ---- against plain Python


@many
@given(LANGUAGES, TABLES)
def test_synonyms_replace_occurrences_that_do_not_overlap(words, table):
    truth = set().union(*(spellings(word, lambda key: table.get(key, ())) for word in words))
    for language in (DFA.from_strings(words), DFA.from_strings(words).minimise()):
        listed = list(synonyms(table)(language).enumerate())
        assert set(listed) == truth and len(listed) == len(truth)


@many
@given(LANGUAGES, st.lists(st.tuples(PATTERNS, PATTERNS), max_size=2))
def test_rules_replace_strings_of_one_language_by_strings_of_another(words, patterns):
    rules = [(Regex(what), Regex(by)) for what, by in patterns]
    rewritten = rewrite(DFA.from_strings(words).minimise(), rules)
    short = [{text for text in SHORT if text in by} for _, by in rules]

    def alternatives(key):
        return {text for (what, _), some in zip(rules, short, strict=True) if key in what for text in some}

    truth = set().union(*(spellings(word, alternatives) for word in words))
    assert {text for text in SHORT if text in rewritten} == truth & set(SHORT)


@many
@given(LANGUAGES, LANGUAGES, TABLES)
def test_rewrites_keep_members_and_go_through_unions(some, others, table):
    a, b, function = DFA.from_strings(some), DFA.from_strings(others), synonyms(table)
    assert (a - function(a)).is_empty()
    assert function(a | b).equivalent(function(a) | function(b))


@pytest.mark.parametrize("pattern", ["(a|b)*", "(?:ab|é)*b", "a*éa*", "(?:bé)+"])
def test_languages_with_cycles_are_rewritten_as_their_members_are(pattern):
    table = {"ab": ["é", ""], "b": ["éa"], "éa": ["b"]}
    function = synonyms(table)
    inside = Regex(pattern) & Regex("[abé]{0,6}")
    truth = set().union(*(spellings(word, lambda key: table.get(key, ())) for word in inside.enumerate()))
    assert members(function(inside)) == truth
    texts = {text for text in SHORT if len(text) < 4}      # longer members give none that shorter ones do not
    assert {text for text in texts if text in function(Regex(pattern) & Regex("[abé]{0,9}"))} == truth & texts


def test_an_occurrence_is_a_substring_and_replacements_are_not_replaced_again():
    assert members(synonyms({"cat": ["dog"]})(Regex("cats|concat"))) == {"cats", "dogs", "concat", "condog"}
    assert members(synonyms({"a": ["b"], "b": ["c"]})(Regex("a"))) == {"a", "b"}
    assert members(synonyms({"a": ["b"], "b": ["a"]})(Regex("ab"))) == {"ab", "bb", "aa", "ba"}
    assert members(synonyms({"a": ["x"], "b": ["y"]})(Regex("[abc]"))) == {"a", "b", "c", "x", "y"}
    assert members(synonyms({"aa": ["b"]})(Regex("aaa"))) == {"aaa", "ba", "ab"}          # at 0 or at 1, not both
    assert members(synonyms({"é": ["e\u0301", "e"]})(Regex("thé"))) == {"thé", "the\u0301", "the"}
    assert members(rewrite(Regex("call 55"), [(Regex("[0-9]+"), Regex("#"))])) == {
        "call #", "call ##", "call #5", "call 5#", "call 55",
    }  # fmt: skip


def test_rewrites_can_be_composed():
    spelled = any_case(synonyms({"colour": ["color"]})(Regex("colour")))
    assert "COLOR" in spelled and "cOLour" in spelled and spelled.count(5) == 2**5 and spelled.count(6) == 2**6


# ---- ready-made ones


def test_any_case_changes_letters_within_their_pairs():
    assert members(any_case(Regex("aé1"))) == {"aé1", "Aé1", "aÉ1", "AÉ1"}
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    upper = {c: c.lower() for c in everything if len(c.lower()) == 1 and c.lower() != c and c.lower().upper() == c}
    lower = {other: c for c, other in upper.items()}
    assert len(upper) == len(lower) > 1300 and not upper.keys() & lower.keys()
    for c in ("Z", "z", "Ω", "ω", "Д", "𐐀", "𐐨", "Ǆ"):
        assert members(any_case(DFA.from_strings([c]))) == {c, upper.get(c) or lower[c]}
    for c in ("ß", "ẞ", "ı", "İ", "ς", "ſ", "\u212a", "ǅ", "ŉ", "1", "中"):
        assert c not in upper and c not in lower and members(any_case(DFA.from_strings([c]))) == {c}
    assert any_case(DFA.from_strings(["".join(upper)[:99]])).count(99) == 2**99
    assert any_case(DFA.from_strings(upper)).equivalent(DFA.from_strings([*upper, *lower]))


@pytest.mark.parametrize("pattern", ["[a-zÀ-ö ]+é?", "Hello (World|)", ".*", "[^A]b"])
def test_ready_made_rewrites_are_idempotent(pattern):
    for function in (any_case, any_whitespace, optional_punctuation):
        once = function(Regex(pattern))
        assert (Regex(pattern) - once).is_empty() and function(once).equivalent(once)


def test_any_whitespace_makes_any_run_of_any_other():
    assert any_whitespace(Regex("a b")).equivalent(Regex(r"a[ \t\n]+b"))
    assert any_whitespace(Regex(r"a\n\t  b|c")).equivalent(Regex(r"a[ \t\n]+b|c"))
    assert any_whitespace(Regex("(a )*")).equivalent(Regex(r"(a[ \t\n]+)*"))


def test_optional_punctuation_leaves_out_any_of_it():
    assert members(optional_punctuation(Regex(r"¿Hi, 5\$\?"))) == {
        a + "Hi" + b + " 5$" + c for a in ("¿", "") for b in (",", "") for c in ("?", "")
    }
    symbols = "".join(c for c in string.punctuation if unicodedata.category(c)[0] != "P")
    assert symbols == "$+<=>^`|~"
    assert members(optional_punctuation(DFA.from_strings([symbols]))) == {symbols}
    assert optional_punctuation(Regex(r"\p{P}*")).equivalent(Regex(r"\p{P}*"))


# ---- edges


def test_empty_languages_and_rules_change_nothing():
    nothing = Regex(r"[^\s\S]")
    assert any_case(nothing).is_empty() and synonyms({"a": ["b"]})(nothing).is_empty()
    assert synonyms({})(Regex("ab")).equivalent(Regex("ab")) and synonyms({"a": []})(Regex("a")).equivalent(Regex("a"))
    for rule in [(nothing, Regex("x")), (Regex("a"), nothing)]:
        assert rewrite(Regex("ab"), [rule]).equivalent(Regex("ab"))
    assert rewrite(Regex(""), [(Regex("a"), Regex("b"))]).equivalent(Regex(""))
    assert rewrite(Regex("a*"), [(Regex("a"), Regex(""))]).equivalent(Regex("a*"))


def test_errors_name_the_fault_and_a_remedy(monkeypatch):
    with pytest.raises(ValueError, match="the key '' occurs everywhere; only other strings can be replaced"):
        synonyms({"": ["a"]})
    message = re.escape("the alternatives of 'cat' are the str 'dog'; a list is ['dog']")
    with pytest.raises(TypeError, match=message):
        synonyms({"cat": "dog"})
    with pytest.raises(ValueError, match=r"Regex\('a\*'\) has the empty string, which occurs everywhere"):
        rewrite(Regex("ab"), [(Regex("a*"), Regex("b"))])
    monkeypatch.setattr(nfa, "MAX_PARTS", 50_000)
    with pytest.raises(ValueError, match=r"rewrites of Regex\('.*'\) is too large: more than 50,000 states; fewer"):
        rewrite(Regex("a{200}"), [(Regex("a"), Regex("b{300}"))])
