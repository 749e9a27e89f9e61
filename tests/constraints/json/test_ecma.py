"""ECMA-262 patterns as automata: by hand, and against the package regress, which is an engine of ECMA-262."""

import json
import random
import unicodedata

import pytest
from helpers.common import ROOT, repetitions

from llmppl.constraints.json.ecma import found

CORPUS = ROOT.parent / "shared" / "evaldata" / "jsonschemabench"

BY_HAND = [                                         # pattern, texts in which it is found, others
    ("", ["", "a"], []),
    ("a", ["a", "ba", "ab"], ["", "b"]),
    ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
    ("(^|,)a(,|$)", ["a", "x,a", "a,x", "x,a,x"], ["xa", "ax"]),
    ("(^a|b)c", ["acx", "xbc"], ["xac"]),
    ("^(?:a$|b)", ["a", "bx"], ["ax", "xb"]),
    ("^$", [""], ["\n", "a"]),
    ("$^", [""], ["a"]),
    ("a$", ["a", "ba"], ["a\n"]),
    (r"^\d$", ["7"], ["\u0663"]),
    (r"^\w$", ["a", "_"], ["é", "²"]),
    (r"^\W$", ["é", "-"], ["a"]),
    (r"^\s$", ["\ufeff", "\xa0", "\u2003", "\u2028", "\v"], ["\x85", "\x1c", "\u200b"]),
    (r"^\S$", ["\x85", "a"], ["\ufeff"]),
    ("^.$", ["a", "\x85", "😀"], ["\n", "\r", "\u2028", "\u2029"]),
    ("^[^]$", ["\n", "a"], [""]),
    ("[]", [], ["", "a"]),
    (r"^\cJ\0\x41\u0042\u{43}$", ["\n\0ABC"], ["cJ"]),
    (r"^\uD83D\uDE00$", ["😀"], ["😁"]),
    (r"^[\uD83D\uDE00-\uD83D\uDE4F]$", ["😀", "😎"], ["🚀"]),
    (r"\uD83D", [], ["😀", ""]),
    (r"^[\b]\/\-$", ["\b/-"], ["b/-"]),
    (r"^[\w-.]+$", ["a-b.c"], ["a+b"]),
    ("^{x}]$", ["{x}]"], ["x"]),
    (r"^\p{L}+$", ["aé"], ["a1"]),
    (r"^\p{digit}+$", ["3\u0663"], ["a"]),
    (r"^\p{Letter}\P{Lu}$", ["Aa", "A1"], ["AA", "1a"]),
    (r"^[\p{Nd}\P{L}]$", ["1", "-", "\u0663"], ["a"]),
    (r"^(?<year>\d{4})-(?<month>\d\d)$", ["2024-02"], ["2024-2"]),
    ("^a+?b??$", ["a", "aab"], ["abb"]),
    (r"\bfoo\b", ["foo", "a foo.", "éfoo"], ["foot", "_foo"]),
    (r"^\B$", [""], ["a"]),
    ("^(?=.*[A-Z])(?=.*[0-9]).{3,}$", ["aA1"], ["A1", "aa1"]),
    ("^(?!a$)[a-z]+$", ["b", "aa"], ["a", "b\n"]),
    (r"(?<=a|bc)d", ["ad", "bcd"], ["d", "cd"]),
    (r"(?<!a|bc)d", ["d", "cd"], ["ad", "bcd"]),
    ("(?i)^abc$", ["ABC"], ["ab"]),
]


@pytest.mark.parametrize("pattern, inside, outside", BY_HAND)
def test_patterns_are_found_where_ecma_finds_them(pattern, inside, outside):
    texts = found(pattern)
    assert [text for text in inside if text not in texts] == []
    assert [text for text in outside if text in texts] == []


@pytest.mark.parametrize("pattern, reason", [
    (r"(a)\1", "no "), (r"\k<a>", "no "), (r"\Z", "no "), (r"\i", "no "),
    ("a{,3}", "{0,n}"), ("a**", "repeat"), ("*a", "repeat"), ("a++", "no ++"), ("^*", "repeat"), ("(a", "missing )"),
    ("a)", "without a ("), ("[a", "no "), ("[z-a]", "range"), (r"\p{Lettre}", "property"), (r"\pL", "no "),
    ("(?P<a>b)", "no "), ("(?<1>b)", "no "), ("(?>a)", "no "), ("a\\", "no "),
    (r"\u{110000}", "Unicode"), ("(" * 500 + ")" * 500, "deep"), ("(?:a{1000}){1000}", "large"),
])  # fmt: skip
def test_refusals_name_the_pattern_and_the_reason(pattern, reason):
    with pytest.raises(ValueError) as error:
        found(pattern)
    assert reason in str(error.value) and repr(pattern)[:20] in str(error.value)


ATOMS = r"""a b ab \d \w \W \s \S \D . [ab] [^a] [^] [] [a-c_-] [\d\s] [^\W\d] \p{L} \P{Lu} [\p{Nd}x] \u0061 \x62
    \u{1F600} \uD83D\uDE00 [\uD83D\uDE00-\uD83D\uDE4F] \n \0 \cJ \/ \. ^ $ \b \B é 😀 [\b] - [\s\S] \u2028
    [^\S\n]""".split()
CHARACTERS = ["", *"ab_-05 \n\r\u2028\ufeffé😀\u0661\0\b/.\xa0\x85Z"]


def random_pattern(rng, depth):
    def inner():
        return random_pattern(rng, depth - 1)

    kind = rng.random() if depth else 0
    if kind < 0.45:
        return rng.choice(ATOMS)
    if kind < 0.65:
        return inner() + inner()
    if kind < 0.75:
        return f"{inner()}|{inner()}"
    if kind < 0.85:
        return f"{rng.choice(['(', '(?:'])}{inner()})"
    if kind < 0.93:
        return f"{rng.choice(['(?=', '(?!'])}{inner()})"
    return f"(?:{inner()}){rng.choice(['*', '+', '?', '{2}', '{1,}', '{0,2}', '*?', '+?', '??'])}"


@pytest.mark.parametrize("seed", range(repetitions(20, 2)))
def test_random_patterns_agree_with_an_ecma_engine(seed):
    regress = pytest.importorskip("regress")
    rng = random.Random(seed)
    for _ in range(150):
        pattern = random_pattern(rng, 4)
        ours, engine = found(pattern), regress.Regex(pattern, "u")
        for _ in range(10):
            text = "".join(rng.choices(CHARACTERS, k=4))
            assert (text in ours) == (engine.find(text) is not None), (pattern, text)


def test_nested_repeats_take_linear_time():
    texts = found("^(a+)+$")
    assert "a" * 36 + "!" not in texts and "a" * 36 in texts
    assert texts.num_states < 10


def test_states_are_made_only_where_texts_lead():
    texts = found("(a|b)*a(a|b){30}$")                      # of 2^30 states
    assert "a" + "b" * 30 in texts and "b" * 31 not in texts
    assert texts.num_states < 500


def test_a_general_category_is_that_of_unicodedata():
    texts = found(r"^\p{Lu}$")
    for char in map(chr, range(0x600)):
        assert (char in texts) == (unicodedata.category(char) == "Lu")


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus of schemas is not here")
def test_all_patterns_of_real_schemas_are_read():
    todo = [json.loads(line)["schema"] for file in CORPUS.glob("*.jsonl") for line in file.read_text().splitlines()]
    patterns = set()
    for value in todo:                              # grows
        if isinstance(value, dict):
            names = value.get("patternProperties", {})
            patterns |= {each for each in [value.get("pattern"), *names] if isinstance(each, str)}
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    assert len(patterns) > 50
    for pattern in patterns:
        found(pattern)
