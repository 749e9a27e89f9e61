"""The choice among texts, compared with an enumeration of every token sequence by plain forward passes."""

import enum
import functools
import math
import re
import time
import warnings
from typing import Literal

import numpy as np
import pytest
from helpers import tiny
from helpers.queries import probs, truth

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    Grammar,
    JsonSchema,
    Rule,
    Vocabulary,
    choose,
    generate,
    run_many,
    search,
)  # fmt: skip
from llmppl.constraints import Special
from llmppl.queries import Query, explain, extraction

LM = tiny.cold_lm_with_bos(6, 0)


@pytest.mark.parametrize("end", ["boundary", "eos", "prefix"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.9}])
@pytest.mark.parametrize("prefix", ["a", "b c"])
def test_probabilities_are_those_of_an_enumeration(end, rule, prefix):
    texts = ["ab", "ba", "c c", "bb c"] + ["abc"] * (end != "prefix")
    words = {prefix + each for each in texts}
    expected, of_tokens, _ = truth(LM, words, [prefix], end=end, rule=rule, order="conditional")
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
    for most in (0, 1, 3):
        try:
            early = choose(LM, prefix, texts, end=end, rule=Rule(**rule), tolerance=0.0, max_expansions=most)
        except ValueError as error:                     # the rule excludes the tokenizer's own tokens
            assert "no option was completed" in str(error)
            continue
        shares = [early.share(text) for text in texts]
        assert all(share.lower - 1e-9 <= q <= share.upper + 1e-9 for share, q in zip(shares, p, strict=True))
        assert early.log_mass - 1e-9 <= math.log(totals.sum()) <= early.log_mass_upper + 1e-9
    own = {text: value for (_, word, ids), value in of_tokens.items() for text in texts
           if word == prefix + text and ids == tuple((LM.context(prefix) + text).tokens[len(LM.context(prefix)) :])}
    if own:
        canonical = choose(LM, prefix, texts, end=end, rule=Rule(**rule), tokenization="canonical")
        total = sum(own.values())
        assert {text: canonical[text] for text in own} == pytest.approx({text: p / total for text, p in own.items()})
        assert canonical.log_mass == canonical.log_mass_upper == pytest.approx(math.log(total))


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


def spelled(lm, prefix: str, text: str) -> float:
    """Return the sum of the probabilities of all token sequences that spell `text`, without an end, by hand."""
    pieces = lm.vocab.tokens

    def total(ids: tuple[int, ...], rest: bytes) -> float:
        if not rest:
            return 1.0
        p = probs(lm, ids)
        fits = [i for i, piece in enumerate(pieces) if piece and rest.startswith(piece)]
        return sum(p[i] * total((*ids, i), rest[len(pieces[i]) :]) for i in fits)

    return total(tuple(map(int, lm.context(prefix).tokens)), text.encode())


@pytest.mark.parametrize("most", [0, 2, 5, 1000])
@pytest.mark.parametrize(
    "texts", [("ab" * 5, "c"), ("abc" * 4, "abcb", "ba"), ("c a" * 5 + "ab", "c a" * 5 + "b", "ab")]
)
def test_options_of_any_length_have_the_sum_of_all_tokenisations(texts, most):
    totals = np.array([spelled(LM, "a", text) for text in texts])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = choose(LM, "a", texts, end="prefix", max_expansions=most)
    for text, total, p in zip(texts, totals, totals / totals.sum(), strict=True):
        share = found.share(text)
        assert share.lower - 1e-12 <= p <= share.upper + 1e-12 and share.lower <= share.probability <= share.upper
        assert share.probability > 0.0 and abs(share.probability - p) <= max(1e-3, share.upper - share.lower), total
    wide = max(share.upper - share.lower for share in found.shares) > 1e-3
    assert any("are known to within" in str(each.message) for each in caught) == wide
    assert most < 1000 or (not wide and found.log_mass_upper - found.log_mass <= 1e-3)


def test_a_long_option_keeps_its_probability_beside_a_short_one(embedded):
    start = embedded.context("Once")
    long = " upon a time there was a little girl named Lily. She loved to play with her toys in the park. One day"
    own = np.exp([(start + text).log_prob_since(start) for text in (long, " a cat.")])
    found = choose(embedded, start, [long, " a cat."])
    assert found.best == long and found[long] == pytest.approx(own[0] / own.sum(), abs=1e-3)
    assert generate(embedded, start, [long, " a cat."]).value == long
    several = " and the dog" * 200
    assert found.share(long).upper - found.share(long).lower <= 1e-3
    with pytest.warns(UserWarning, match='max_expansions narrows the bounds, and tokenization="canonical"'):
        found = choose(embedded, start, [several, several + "s"], max_expansions=1)
    own = [(start + text).log_prob_since(start) for text in (several, several + "s")]
    assert found.log_mass >= np.logaddexp(*own) - 1e-9 and -math.inf < own[0]


def test_options_of_which_none_is_completed_are_an_error():
    [joined] = LM.vocab.ids_by_bytes[b"ab"]             # the tokenizer's own token, which the rule excludes
    rule = functools.partial(lambda mask, dist: dist.masked(mask), np.arange(len(LM.vocab)) != joined)
    with pytest.raises(ValueError, match="no option was completed .* larger max_expansions than 0 continues"):
        choose(LM, "c", ["ab", "abc"], rule=rule, max_expansions=0)
    assert choose(LM, "c", ["ab", "abc"], rule=rule, tokenization="all").log_mass > -math.inf
    with pytest.raises(ValueError, match="no option has a positive probability"):
        choose(LM, "c", ["ab", "abc"], rule=rule, tokenization="canonical")


def test_a_limit_ends_a_choice_among_many_texts(embedded):
    options = [f"o{i}" for i in range(2000)]
    for limit in ({"timeout": 0.05}, {"budget": 30}):
        name, start = next(iter(limit)), time.process_time()
        embedded.clear()
        with pytest.raises(TimeoutError, match=f"{name} was reached before .* each of 2,000 options"):
            choose(embedded, "x", options, **limit)
        assert time.process_time() - start < 2.0
    results = [*run_many(lambda task, rng: choose(embedded, task, options), ["x"], timeout=0.05, progress=False)]
    assert "TimeoutError: the timeout was reached before" in results[0].error
    embedded.clear()
    with pytest.warns(UserWarning, match="A larger budget narrows"):
        found = choose(embedded, "Tim saw", [" a zyx", " a xyz"], budget=5)
    assert found.log_mass > -math.inf


def test_a_choice_runs_few_rows(embedded):
    """Seven options of 3 tokens had 157 rows when each sum had a search of its own."""
    nouns = ["big dog", "red ball", "little cat", "nice day", "new toy", "old man", "long nap"]
    embedded.clear()
    before = embedded.evaluator.done()
    found = choose(embedded, "Tim saw", [f" a {noun}" for noun in nouns])
    work = embedded.evaluator.done() - before
    assert work.rows <= 60 and max(share.upper - share.lower for share in found.shares) <= 1e-3


def test_a_choice_is_a_table_with_bars_and_bounds():
    found = choose(LM, "a", ["ab", "ba", "abc"], max_expansions=0)
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
     (["a", 1], "each of options must be a str"), (dict, "a type with few"), (3, "a list of str, as"),
     ("a" + Special("<x>"), "options are texts, and .* has the special token '<x>': enumerate_exact"),
     (["a", Special(2)], r"options are texts, and Special\(2\) has the special token 2")],
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


def said_by(ask) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ask()
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    "prompt, text, remedy",
    [("Lily was", "happy", "blank"), ("Lily was", "sad", "blank"), ("Her name was", "Lily", "blank"),
     ("The sky was", "blue", "blank"), ("Tom saw the do", "g", "prefix"), ("He is un", "happy", "prefix"),
     ("He was very ha", "ppy", "prefix"), ("Tom saw a", "n owl", "prefix"), ("They play foot", "ball", ""),
     ("I like straw", "berries", ""), ('He said "', "Yes", ""), ("Lily was", " happy", ""), ("20", "23", ""),
     ("Lily was", "big", "blank")],
)  # fmt: skip
def test_a_forgotten_blank_has_another_remedy_than_a_split_word(prompt, text, remedy, embedded):
    for ask in (lambda: choose(embedded, prompt, [text, text + "s"]),
                lambda: extraction(embedded, prompt, text, edits=0)):  # fmt: skip
        said = [each for each in said_by(ask) if "known to within" not in each]
        wanted = {"blank": "begin the texts with their blank", "prefix": "take the prefix", "": ""}[remedy]
        assert len(said) == bool(remedy) and all(wanted in each for each in said), said
    if remedy == "blank":                               # the remedy is right: the model writes it so
        start = embedded.context(prompt)
        apart, together = (math.exp((start + each).log_prob_since(start)) for each in (f" {text}", text))
        assert apart > 100 * together


def test_a_pattern_without_its_blank_is_told_of_it(embedded):
    [said] = said_by(lambda: search(embedded, "Lily washappy", prefix="Lily was"))
    assert "begin the texts with their blank" in said
    assert "take the prefix 'He is'" in said_by(lambda: search(embedded, "He is unhappy", prefix="He is un"))[0]


@pytest.mark.parametrize("tolerance", [-1.0, -1e-9, 1.5])
def test_a_tolerance_is_a_share(embedded, tolerance):
    query = Query(embedded, "He was (happy|sad)", prefix="He was")
    for ask in (
        lambda: choose(embedded, "He was", [" happy", " sad"], tolerance=tolerance),
        lambda: [*query.best(tolerance=tolerance)], lambda: query.probability(tolerance=tolerance, runs=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"tolerance must be in \[0, 1\], not "):
            ask()


def test_a_mass_below_the_smallest_float_is_shown_by_its_log(embedded):
    [line, *_] = str(choose(embedded, "Once", [" zip quartz" * 60], tokenization="canonical")).splitlines()
    assert re.search(r"with probability exp\(-\d{3,}\) only", line)


def test_options_may_be_a_composition_with_few_texts(embedded):
    part = " " + (JsonSchema({"enum": [1, 2]}) | ["a"]) + " cat"
    choice = choose(embedded, "I have", part)
    assert set(choice) == {" 1 cat", " 2 cat", " a cat"}
    assert dict(choice) == pytest.approx(dict(choose(embedded, "I have", [*choice])))
    with pytest.raises(TypeError, match="a constraint with few texts, not"):
        choose(embedded, "I have", part.star())
    with pytest.raises(TypeError, match="a constraint with few texts, not"):
        choose(embedded, "I have", Grammar('start: "a"'))
