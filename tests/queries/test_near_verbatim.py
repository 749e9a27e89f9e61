"""Extraction, compared with an enumeration of every token sequence of every text within k edits."""

import math

import numpy as np
import pytest
import regex
from helpers import tiny
from helpers.queries import truth

from llmppl import CachedTransformer, Regex, Rule, Vocabulary
from llmppl.queries import Edits, Extraction, extraction

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer joins")

LM = tiny.cold_lm_with_bos(6, 0)


def near(text: str, k: int) -> list[str]:
    """Return all strings of a, b, c and blanks within k edits, by the package regex."""
    wide = Regex(f"[abc ]{{{max(len(text) - k, 0)},{len(text) + k}}}").enumerate()
    return [each for each in wide if regex.fullmatch(f"(?:{text}){{e<={k}}}", each)]


def bounds(found: Extraction) -> np.ndarray:
    """Return the lower and the upper bounds, each (verbatim, near)."""
    return np.transpose([(each.lower, each.upper) for each in (found.verbatim, found.near)])


@pytest.mark.parametrize("rule", [{}, {"top_k": 3}, {"temperature": 0.5}])
@pytest.mark.parametrize("prefix, suffix, k", [("a", "bab", 1), ("b c", " ab", 2), ("c", "a", 1), ("", "cab", 1)])
def test_both_bounds_are_the_enumeration_or_contain_it(prefix, suffix, k, rule):
    texts = [[prefix + suffix], [prefix + each for each in near(suffix, k)]]
    expected = [truth(LM, each, [prefix], end="prefix", rule=rule)[2] for each in texts]
    found = extraction(LM, prefix, suffix, edits=k, rule=Rule(**rule), tolerance=0.0, max_expansions=10**6)
    np.testing.assert_allclose(bounds(found), [expected, expected], rtol=1e-6)
    for limit in (1, 5, 20):
        early = extraction(LM, LM.context(prefix), suffix, edits=Edits(k), rule=Rule(**rule), max_expansions=limit)
        lower, upper = bounds(early)
        assert np.all([lower <= np.add(expected, 1e-9), np.add(expected, -1e-9) <= upper])
        assert np.all(np.diff(bounds(early)) >= 0.0)


def test_tries_reach_the_chance_and_one_fewer_does_not():
    p = (found := extraction(LM, "a", "bab", tolerance=1e-9)).verbatim.lower
    _, most = found.verbatim.tries(0.5)
    assert 1 - (1 - p) ** most >= 0.5 > 1 - (1 - p) ** (most - 1)
    with pytest.raises(ValueError, match="chance is 1; it is between 0 and 1"):
        found.near.tries(1)


def test_tries_of_certain_and_impossible_texts():
    logits = [0.0, -math.inf, -math.inf, -math.inf]
    lm = CachedTransformer(lambda ids: logits, Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3]))
    assert extraction(lm, "c", "aa").verbatim.tries(0.99) == (1, 1)
    assert "inf  within 1 edit" in repr(extraction(lm, "c", "bbb"))


def test_an_extraction_is_a_table_of_both_probabilities():
    found = extraction(LM, "a", "bab", edits=2)
    lines = repr(found).splitlines()
    assert lines[0] == "Extraction of 'bab'"
    assert [line.split("  ")[-1] for line in lines[3:]] == ["verbatim", "within 2 edits"]
    assert found._repr_html_().count("<tr>") == 3
    assert " to inf" in repr(extraction(LM, "a", "bab", rule=Rule(), max_expansions=1))


def test_a_prefix_that_splits_a_token_of_the_text_is_a_warning(embedded):
    with pytest.warns(UserWarning, match="take the prefix 'Once upon a'"):
        extraction(embedded, "Once upon a ", "time", edits=0)
