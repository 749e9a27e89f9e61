"""Answers of `generate`: no fragment is a value, values stay apart, and data keep all of an answer."""

import dataclasses
import json
import math
import pickle
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from helpers.tiny import table_lm, tiny_lm
from pydantic import BaseModel, Field, field_validator

from llmppl import ConstrainedText, JsonSchema, Regex, enumerate_exact, generate, run_many
from llmppl.serving import Service
from llmppl.tasks.answers import loaded, parser_of

LM = tiny_lm(6)
TWO, THREE = {"N": 2, "K": 2}, {"N": 3}
SIZES: dict[str, Any] = {"beam": TWO, "best_of": THREE, "importance": THREE, "steer": TWO}
METHODS = "auto", "greedy", "sample", *SIZES


def letters(text='{}[]":,. abcxytruefls_0123456789wod'):
    """A model of the characters of records, which prefers some, and EOS."""
    tokens = [bytes([each]) for each in text.encode()]
    logits = np.array([*np.random.default_rng(0).normal(size=len(tokens)), -3.0])
    return table_lm(lambda ids: logits, tokens)


@dataclasses.dataclass
class Pair:
    a: bool
    b: Literal["x", "y"]


class Word(BaseModel):
    word: Literal["a", "b", "c"]


CLOSED = JsonSchema(Pair, whitespace=False)
CONSTRAINTS = [CLOSED, Pair, Word, int, Regex('"[abc]{3,9}"'), ["abcabc", "bcabca"], Literal["ab", "xyx"], list[bool]]


def is_whole(constraint, answer):
    """Check a complete answer by the parser of its constraint."""
    parse = parser_of(constraint)
    return answer.value == (parse(answer.text) if parse else answer.text)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_no_limit_makes_a_fragment_a_value(constraint):
    lm = letters()
    for method in METHODS:
        for limit in ({"budget": 1}, {"budget": 40}, {"timeout": 1e-9}):
            options = {**limit, **SIZES.get(method, {})}
            answer = generate(lm, "a", constraint, method=method, max_tokens=40, seed=1, **options)
            if answer.cut:
                assert answer.value is None and answer.ended in ("budget", "timeout") and not answer.fields
                assert answer.probability is None and answer.ended in repr(answer) and str(answer) == answer.text
            else:
                assert is_whole(constraint, answer) and answer.ended == "complete"


def test_greedy_decoding_ends_in_time_where_samples_do_not():
    lm = letters()
    greedy = generate(lm, "a", CLOSED, method="greedy", max_tokens=40)
    for method in ("auto", "best_of"):
        lm.clear()
        answer = generate(lm, "a", CLOSED, method=method, max_tokens=40, budget=greedy.tokens + 2, seed=0)
        assert answer.text == greedy.text and answer.value == greedy.value and answer.probability is None
    assert "the budget ended the samples" in repr(answer.fields) and not answer.alternatives


def test_a_limit_leaves_no_fragment_in_lists_and_services():
    lm, prompts = letters(), ["a", "b", "ab"]
    with Service(lm) as service:
        calls = [service.generate("b", CLOSED, method=method, budget=budget, max_tokens=40, **SIZES.get(method, {}))
                 for method in METHODS for budget in (2, 90)]  # fmt: skip
        answers = [call.result() for call in calls]
    for method in METHODS:
        options = {"budget": 30, "progress": False, **SIZES.get(method, {})}
        answers += generate(lm, prompts, CLOSED, method=method, max_tokens=40, seed=1, **options)
    assert {each.value is None for each in answers} == {True, False}
    assert all(isinstance(each.value, Pair) != each.cut and (each.value is None) == each.cut for each in answers)


def test_a_free_text_that_a_limit_cut_is_a_shorter_text():
    answer = generate(table_lm(lambda ids: [0.0, 0.0, -math.inf]), "a", budget=3, seed=0)
    assert answer.cut and answer.value == answer.text != "" and answer.ended == "budget"


class Liked(Word):
    @field_validator("word")
    @classmethod
    def not_the_first(cls, word: str) -> str:
        assert word != refused
        return word


refused = ""


def test_samples_follow_where_a_validator_refuses_the_greedy_text(monkeypatch):
    lm = letters()
    greedy = generate(lm, "a", Word, method="greedy").value.word
    monkeypatch.setattr(f"{__name__}.refused", greedy)
    answer = generate(lm, "a", Liked, seed=0)
    assert answer.value.word not in ("", greedy) and answer.method == "best_of" and answer.fields["word"]
    [listed] = generate(lm, ["a"], Liked, seed=0)
    assert listed.value.word != greedy and listed.method == "best_of"
    with pytest.raises(ValueError, match="by 'greedy': every text .* died .*'best_of' or 'steer' follows more"):
        generate(lm, "a", Liked, method="greedy")
    with pytest.raises(ValueError, match="by 'beam': .*; a larger N or K follows more"):
        generate(lm, "a", Liked, method="beam", N=1, K=1)


@pytest.mark.parametrize("method", ["exact", "greedy", "beam", "best_of", "importance", "steer"])
def test_labels_that_are_texts_of_others_stay_apart(method):
    swapped = {"ab": "b", "b": "c", "c": "ab"}
    for seed in range(5):
        found = generate(LM, "a", swapped, method=method, seed=seed)
        assert swapped[found.value] == found.text
        if method not in ("greedy", "beam"):
            truth = enumerate_exact(ConstrainedText(LM, "a", [*swapped.values()])).by_text()
            assert {*found.alternatives} <= {*swapped}
            if method == "exact":
                assert found.alternatives["ab"] == pytest.approx(truth["b"], abs=2e-3)


NAMES = "b.c", "a b", "", "a[0]"


def test_fields_of_any_name_have_their_probabilities():
    fields = {name: {"enum": ["x", "y"]} for name in NAMES}
    schema = {"type": "object", "properties": fields, "required": [*NAMES], "additionalProperties": False}
    lm = letters('{}[]":,. abcxyls0')
    constraint = JsonSchema(schema, whitespace=False)
    truth = enumerate_exact(ConstrainedText(lm, "a", constraint, max_tokens=90))
    answer = generate(lm, "a", constraint, method="steer", N=64, max_tokens=75, seed=0)
    assert [*answer.fields] == [*NAMES]
    for name in NAMES:
        total = sum(w for p, w in zip(truth, truth.weights, strict=True) if json.loads(str(p))[name] == "x")
        assert answer.fields[name]["x"] == pytest.approx(total, abs=1e-6)


def same(one, other):
    """Check that two answers have the same contents."""
    names = "value", "text", "ended", "cut", "log_prob", "probability", "probability_se", "method", "call", "tokens"
    assert all(getattr(one, name) == getattr(other, name) for name in names)
    assert [*one.fields] == [*other.fields]
    for name in one.fields:
        assert one.fields[name].shares == other.fields[name].shares
    if one.method not in ("greedy", "beam"):
        assert [*one.alternatives.items()] == [*other.alternatives.items()]
    assert str(one) == str(other) and repr(one).splitlines()[0] == repr(other).splitlines()[0]


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, {True: "ab", 2: "b"}, {"ab": "b", "b": "ab"}, None], ids=str)
@pytest.mark.parametrize("limit", [{}, {"budget": 9}])
def test_data_and_pickles_have_all_of_an_answer(constraint, limit):
    for method in METHODS:
        options = {**limit, **SIZES.get(method, {})}
        if method == "auto" and limit:
            continue
        answer = generate(letters(), "a", constraint, method=method, max_tokens=40, seed=3, **options)
        data = json.loads(json.dumps(answer.as_dict()))
        same(answer, loaded(data, "a", parser_of(constraint)))
        same(answer, pickle.loads(pickle.dumps(answer)))
        assert json.loads(json.dumps(answer.fields.as_dict())).keys() == answer.fields.keys()


def test_an_answer_of_a_type_with_bounds_has_a_pickle():
    lm = table_lm(lambda ids: [0.0, 0.0, 5.0], (b"1", b"2"))
    answer = generate(lm, "", Annotated[int, Field(ge=0, le=20)], method="importance", N=3, seed=0)
    same(answer, pickle.loads(pickle.dumps(answer)))


def test_an_answer_says_where_its_fields_are():
    answer = generate(letters(), "a", Pair, method="best_of", max_tokens=60, N=3, seed=0)
    listed = generate(letters(), ["a"], Pair, max_tokens=60)
    missing: list[tuple[Any, str]] = [
        (lambda: answer.b, "a field of a record is answer.value.b"),
        (lambda: answer.fields.b, r"fields\['b'\] has the probabilities, and answer.value.b is the value"),
        (lambda: answer.parsed, "the answer is value, its confidence is probability"),
        (lambda: listed.value, r"a list of answers, as in answers\[0\].value"),
    ]
    for wrong, said in missing:
        with pytest.raises(AttributeError, match=said):
            wrong()
    with pytest.raises(KeyError, match="no fields: 'greedy' estimates none, method='best_of' does"):
        listed[0].fields["b"]
    with pytest.raises(TypeError, match="answer.value.b is a field of its record"):
        answer["b"]
    with pytest.raises(TypeError, match=r"answer.value\['b'\] is a field"):
        generate(letters(), "a", JsonSchema(CLOSED.schema, whitespace=False), max_tokens=60)["b"]
    assert not hasattr(answer, "other") and answer.value.b in "xy"


@pytest.mark.parametrize(
    "name, said",
    [("max_retries", "nothing is retried"), ("response_model", "the third argument is the type"),
     ("n", "N is the number of samples"), ("stream", ".*Service streams"), ("max_token", "did you mean max_tokens?")],
)  # fmt: skip
def test_options_of_other_libraries_are_explained(name, said):
    with pytest.raises(TypeError, match=f"generate takes no {name}: {said}"):
        generate(LM, "a", **{name: 3})


def test_a_random_stream_stands_for_a_seed():
    options = {"method": "importance", "N": 4}
    for prompt in ("a", ["a", "b"]):
        rng = np.random.default_rng
        found = [generate(LM, prompt, Regex("[abc]{4}"), rng=rng(seed), **options) for seed in (1, 1, 2)]
        texts = [[each.posterior.texts for each in (one if isinstance(prompt, list) else [one])] for one in found]
        assert texts[0] == texts[1] != texts[2]
    answer = generate(LM, "a", Regex("[abc]{4}"), rng=np.random.default_rng(1), **options)
    assert answer.text == generate(LM, "a", Regex("[abc]{4}"), seed=1, **options).text


def test_run_many_takes_functions_that_return_an_answer():
    def run(prompt, rng):
        return generate(LM, prompt, Regex("[abc]{2}"), method="importance", N=5, rng=rng)

    found = {each.index: each.answer.text for each in run_many(run, ["a", "b", "c"], seed=4, progress=False)}
    listed = generate(LM, ["a", "b", "c"], Regex("[abc]{2}"), method="importance", N=5, seed=4, progress=False)
    assert [found[index] for index in range(3)] == [each.text for each in listed]
