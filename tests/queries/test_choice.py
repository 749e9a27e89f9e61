"""The choice among texts, compared with an enumeration of every token sequence by plain forward passes."""

import enum
import math
import warnings
from typing import Literal

import numpy as np
import pytest
from helpers import tiny
from helpers.queries import truth

from llmppl import CachedTransformer, ConstrainedText, Rule, Vocabulary, choose, generate, search
from llmppl.queries import Query, explain

LM = tiny.cold_lm_with_bos(6, 0)


@pytest.mark.parametrize("end", ["boundary", "eos", "prefix"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.9}])
@pytest.mark.parametrize("prefix", ["a", "b c"])
def test_probabilities_are_those_of_an_enumeration(end, rule, prefix):
    texts = ["ab", "ba", "c c", "bb c"] + ["abc"] * (end != "prefix")
    words = {prefix + each for each in texts}
    expected, _, _ = truth(LM, words, [prefix], end=end, rule=rule, order="conditional")
    if not expected:
        with pytest.raises(ValueError, match="no option has a positive probability"):
            choose(LM, prefix, texts, end=end, rule=Rule(**rule))
        return
    totals = np.array([expected.get((prefix, prefix + each), 0.0) for each in texts])
    p = totals / totals.sum()
    found = choose(LM, prefix, texts, end=end, rule=Rule(**rule), tolerance=0.0, max_expansions=10**6)
    np.testing.assert_allclose([found[each] for each in texts], p, atol=1e-7)
    assert math.exp(found.log_mass) == pytest.approx(totals.sum(), rel=1e-6)
    assert found.best == texts[int(np.argmax(p))]
    early = choose(LM, prefix, texts, end=end, rule=Rule(**rule), max_expansions=2)
    of_each = {share.value: share for share in early.shares}
    assert all(of_each[text].lower - 1e-9 <= q <= of_each[text].upper + 1e-9 for text, q in zip(texts, p, strict=True))


class Answer(enum.Enum):
    YES, NO = "ab", "c"


@pytest.mark.parametrize(
    "options, labels",
    [(["ab", "c"], ["ab", "c"]), (("ab", "c"), ["ab", "c"]), ({1: "ab", 2: "c"}, [1, 2]),
     (Literal["ab", "c"], ["ab", "c"]), (Answer, [Answer.YES, Answer.NO])],
)  # fmt: skip
def test_options_are_texts_labels_or_values_of_a_type(options, labels):
    expected = choose(LM, "a", ["ab", "c"])
    found = choose(LM, "a", options)
    assert dict(found) == dict(zip(labels, [expected["ab"], expected["c"]], strict=True))
    assert found.texts[found.best] == expected.best and found.log_mass == expected.log_mass


def test_a_list_of_prompts_gives_the_choices_after_each():
    prompts = ["a", LM.context("b"), "c a"]
    found = choose(LM, prompts, ["ab", "c"])
    assert [dict(each) for each in found] == [pytest.approx(dict(choose(LM, each, ["ab", "c"]))) for each in prompts]
    assert choose(LM, [], ["ab", "c"]) == []
    lines = [line.split() for line in repr(found).splitlines()]
    assert lines[:3] == [["3", "choices"], [], ["ab", "c", "prompt"]]
    assert lines[5] == [f"{found[2]['ab']:.3f}", f"{found[2]['c']:.3f}", "c", "a"]
    assert found._repr_html_().count("<tr>") == 4


def test_a_choice_is_a_table_with_bars_and_bounds():
    found = choose(LM, "a", ["ab", "ba", "abc"], max_expansions=2, tolerance=0.0)
    assert [*found] == [share.value for share in found.shares] and sum(found.values()) == pytest.approx(1.0)
    assert repr(found).splitlines()[0] == "Choice(3 options)" and " to " in repr(found)
    assert found._repr_html_().count("<rect") == 3
    frame = found.to_pandas()
    assert (frame["lower"] <= frame["probability"]).all() and (frame["probability"] <= frame["upper"]).all()
    with pytest.raises(KeyError, match=r"' ab' is not among the values: '(ab|ba|abc)', "):
        found[" ab"]


def test_texts_that_a_model_seldom_writes_are_noted():
    lm = CachedTransformer(lambda ids: [9.0, 0.0, 0.0, 0.0], Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3]))
    assert "the model writes one of these with probability" in repr(choose(lm, "a", ["b", "c"]))


@pytest.mark.parametrize(
    "options, message",
    [("ab", "a list of str, as"), ([], "at least one text"), (["ab", "ab"], "must differ"), (int, "a type with few"),
     (["a", 1], "each of options must be a str"), (dict, "a type with few"), (3, "a list of str, as")],
)  # fmt: skip
def test_options_that_are_none_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        choose(LM, "a", options)


def test_options_of_which_one_begins_another_need_an_end():
    with pytest.raises(ValueError, match="no option may begin another"):
        choose(LM, "a", ["a", "ab"], end="prefix")


@pytest.mark.parametrize(
    "prompt, options, better",
    [("Tom saw a", [" dog", " cat"], None), ("Tom saw a", [" dog", "n owl"], "Tom saw"),
     ("Tom saw ", ["a dog", "a cat"], "Tom saw"), ("Tom saw the do", ["g", "or"], "Tom saw the"),
     ("Tom said:", [" yes", " no"], None)],
)  # fmt: skip
def test_a_token_across_the_end_of_the_prompt_is_a_warning(embedded, prompt, options, better):
    pattern = "|".join(prompt + option for option in options)
    for ask in (lambda: choose(embedded, prompt, options), lambda: search(embedded, pattern, prefix=prompt)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ask()
        said = [str(each.message) for each in found]
        assert [f"take the prefix {better!r}" in each for each in said] == [True] * (better is not None), said


def test_the_warning_is_at_the_line_of_the_caller(embedded):
    for ask in (lambda: search(embedded, "Tim was happy", prefix="Tim was "),
                lambda: Query(embedded, "Tim was happy", prefix="Tim was "),
                lambda: choose(embedded, "Tim was ", ["happy", "sad"]),
                lambda: generate(embedded, "Tim was ", ["happy", "sad"]),
                lambda: ConstrainedText(embedded, "Tim", ["othy", "mie"])):  # fmt: skip
        with pytest.warns(UserWarning) as caught:
            ask()
        assert {each.filename for each in caught} == {__file__}


def test_the_warning_names_the_prefix_after_which_the_order_is_right(embedded):
    """The probabilities of "happy" and "sad" by the tokenizer's own tokens; the blank in the prefix changes them."""
    whole = [explain(embedded, f" {word}", prefix="Tim was").log_prob for word in ("happy", "sad")]
    found = choose(embedded, "Tim was", [" happy", " sad"], end="prefix")
    assert found[" happy"] == pytest.approx(1 / (1 + math.exp(whole[1] - whole[0])), rel=1e-3)
    with pytest.warns(UserWarning, match="take the prefix 'Tim was'"):
        wrong = choose(embedded, "Tim was ", ["happy", "sad"], end="prefix")
    assert math.exp(wrong.log_mass) < 1e-3 * math.exp(found.log_mass)
