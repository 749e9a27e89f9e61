"""Edits: automata and alignments against Levenshtein's table for every string of small languages."""

import itertools

import pytest
from helpers.common import repetitions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmppl.constraints import DFA, Regex
from llmppl.constraints.automata.rewrites import Edit, alignment, within

LETTERS = "aé😀"                                     # of one, two and four bytes
SHORT = ["".join(some) for n in range(5) for some in itertools.product(LETTERS, repeat=n)]     # 121 texts

many = settings(max_examples=repetitions(300, 40), suppress_health_check=list(HealthCheck))
LANGUAGES = st.lists(st.text(LETTERS + "b", max_size=4), min_size=1, max_size=5, unique=True)
COSTS = st.fixed_dictionaries({name: st.sampled_from([1, 1, 2, None]) for name in ("insert", "delete", "substitute")})


def table(member, text, alphabet, insert=1, delete=1, substitute=1):
    """Return the least cost of edits that make `text` of `member`, by Wagner & Fischer's table; inf if none do."""
    never = float("inf")
    insert, delete, substitute = (never if cost is None else cost for cost in (insert, delete, substitute))
    least = {(-1, -1): 0}
    for i, j in itertools.product(range(-1, len(member)), range(-1, len(text))):
        ways = [least.get((i, j), never)]
        if i >= 0:
            ways.append(least[i - 1, j] + delete)
        if j >= 0 and text[j] in alphabet:
            ways.append(least[i, j - 1] + insert)
        if i >= 0 and j >= 0 and (member[i] == text[j] or text[j] in alphabet):
            ways.append(least[i - 1, j - 1] + (substitute if member[i] != text[j] else 0))
        least[i, j] = min(ways)
    return least[len(member) - 1, len(text) - 1]


def undone(text, edits):
    """Return the member of the language that the edits were made to."""
    for _, place, wanted, found in reversed(edits):
        assert text[place : place + len(found)] == found
        text = text[:place] + wanted + text[place + len(found) :]
    return text


# ---- against the table


@many
@given(LANGUAGES, st.integers(0, 3), COSTS, st.sampled_from([LETTERS + "b", "a", "b😀"]))
def test_within_k_edits_agrees_with_an_edit_distance_table(words, k, costs, alphabet):
    language = DFA.from_strings(words)
    near = within(language, k, **costs, alphabet=alphabet if len(alphabet) == 1 else list(alphabet))
    for text in SHORT:
        least = min(table(word, text, alphabet, **costs) for word in words)
        assert (text in near) == (least <= k), text


@many
@given(LANGUAGES, st.text(LETTERS + "b", max_size=6), COSTS)
def test_an_alignment_makes_the_text_of_a_member_at_the_least_cost(words, text, costs):
    language, alphabet = DFA.from_strings(words), "aé"
    edits = alignment(language, text, **costs, alphabet="[aé]")
    least = min(table(word, text, alphabet, **costs) for word in words)
    assert (edits is None) == (least == float("inf"))
    if edits is not None:
        assert undone(text, edits) in words
        assert sum(costs[edit.kind] for edit in edits) == least
        assert [edit.place for edit in edits] == sorted(edit.place for edit in edits)
        assert alignment(language, text, least, **costs, alphabet="[aé]") == edits
        assert least == 0 or alignment(language, text, least - 1, **costs, alphabet="[aé]") is None


@pytest.mark.parametrize("pattern", ["(aé)*", "a*😀", "[^a]+", "é{2,}|a(é😀)*", "(?s).*a", "(a|é😀)*é"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_languages_with_cycles_agree_with_their_members_up_to_a_length(pattern, k):
    language = Regex(pattern)
    near, alphabet = within(language, k), LETTERS + "x"
    inside = language & Regex("[aé😀x]{0,5}")        # members further from a short text than this do not matter
    for text in (text for text in SHORT if len(text) <= repetitions(3, 2)):
        least = min(table(word, text, alphabet) for word in inside.enumerate())
        assert (text in near) == (least <= k)
        assert len(alignment(language, text)) == least


def test_k_edits_are_k_times_one_edit():
    for pattern in ("(?:ab|é)*", "héllo|😀", r"\d{2}-\d"):
        language, step = Regex(pattern), Regex(pattern)
        for k in range(3):
            assert within(language, k).equivalent(step), (pattern, k)
            step = within(step, 1)


# ---- counts by hand


def test_zero_edits_leave_the_language_unchanged():
    for pattern in ("", "a+", "é|😀*", r"[^\s\S]"):
        assert within(Regex(pattern), 0).equivalent(Regex(pattern))


def test_deleting_may_leave_nothing():
    assert list(within(Regex("é😀"), 2, insert=None, substitute=None).enumerate()) == ["", "é", "😀", "é😀"]
    assert list(within(Regex("cat|dog"), 1, insert=None, substitute=None).enumerate()) == [
        "at", "ca", "ct", "dg", "do", "og", "cat", "dog",
    ]  # fmt: skip


def test_an_edit_is_of_a_whole_character():
    near = within(Regex("é"), 1)
    assert all(text in near for text in ("", "è", "😀", "é\n", "xé")) and "èx" not in near
    for broken in (b"\xa9", b"\xc3", b"\xc3\xc3\xa9"):                   # half of é, put in, taken out
        state = near.start
        for byte in broken:
            state = near.step(state, byte) if state else None
        assert not state or not near.accepts(state)
    assert "\ud800" not in near and alignment(Regex("é"), "\ud800") is None


def test_an_alphabet_is_a_class_or_its_characters():
    word = Regex("héllo")
    classes = [within(word, 2, alphabet=alphabet) for alphabet in ("[a-cé]", list("abcé"), {"a", "b", "c", "é"})]
    assert all(near.equivalent(classes[0]) for near in classes)
    assert "hllo" in classes[0] and "heéllo" not in classes[0] and "bcllo" in classes[0]
    assert within(word, 1, alphabet=r"\p{L}").equivalent(within(word, 1) & Regex(r"\p{L}*"))


def test_regions_may_have_their_own_limits():
    url = within(Regex("https://"), 0) + within(Regex("example"), 1)
    assert "https://exmple" in url and "htps://example" not in url and "https://exmpl" not in url


# ---- alignments by hand


def test_an_alignment_names_kind_place_and_characters():
    language = Regex("cat|dog")
    assert alignment(language, "cat") == []
    assert alignment(language, "cxat") == [Edit("insert", 1, "", "x")]
    assert alignment(language, "dg") == [Edit("delete", 1, "o", "")]
    assert alignment(language, "dég") == [Edit("substitute", 1, "o", "é")]
    assert alignment(language, "ca") == [Edit("delete", 2, "t", "")]
    assert alignment(language, "", 2) is None and len(alignment(language, "")) == 3
    assert alignment(Regex("[a-z]{3}"), "a-c") == [Edit("substitute", 1, "a", "-")]       # the lowest that would do
    assert alignment(Regex("[é-ü]x"), "x") == [Edit("delete", 0, "é", "")]
    assert alignment(Regex("[😀aé]x"), "x") == [Edit("delete", 0, "a", "")]
    assert alignment(Regex(r"[^\s\S]"), "a") is None


def test_an_alignment_is_the_same_however_much_of_the_language_is_known():
    pattern, text = r"(?:\w+ ){3}\w+é?", "zwölf  boxkämpfer-jagen viktor"
    language = Regex(pattern)
    first = alignment(language, text)
    assert first and alignment(language.explore(), text) == alignment(Regex(pattern).minimise(), text) == first
    for pattern, text, met in [("abx|dey", "zzz", "dey"), ("(?:x|q)bm|qan", "qzz", "xbm")]:
        language = Regex(pattern)
        assert met in language                      # which numbers its states first
        assert alignment(language, text) == alignment(Regex(pattern), text)


# ---- errors


@pytest.mark.parametrize("wrong, error, message", [
    ({"k": -1}, ValueError, "k must be at least 0, not -1"),
    ({"k": 1, "insert": 0}, ValueError, "insert must be at least 1, not 0"),
    ({"k": 1, "alphabet": "abc"}, ValueError, "the alphabet 'abc' holds 'abc'; single characters such as"),
    ({"k": 1, "alphabet": ["a", ""]}, ValueError, r"the alphabet \('a', ''\) holds ''; single characters such as"),
    ({"k": 1, "alphabet": "[a"}, ValueError, "unterminated character set"),
    ({"k": 200_000}, ValueError, "k=200000 edits of Regex.* is too large: more than 1,000,000 states; a smaller k"),
    ({"k": 1.5}, TypeError, "k must be an integer, not 1.5"),
    ({"k": 1, "alphabet": [97]}, TypeError, "each of the strings"),
    ({"k": 1, "delete": False}, TypeError, "delete must be an integer, not False"),
    ({"k": 1, "language": "ab"}, TypeError, r"edits are made to a DFA, such as Regex\('ab'\), not a str"),
])  # fmt: skip
def test_errors_name_the_fault_and_a_remedy(wrong, error, message):
    with pytest.raises(error, match=message):
        within(**{"language": Regex("ab"), **wrong})
