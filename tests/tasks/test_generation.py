"""`generate`: its answers are those of the algorithms that it names, and its probabilities those of enumeration."""

import dataclasses
import enum
import json
import math
import pickle
import re
from typing import Literal

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import log_prob_by_hand, table_lm, tiny_lm
from pydantic import BaseModel, Field, model_validator

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    JsonSchema,
    Regex,
    Rule,
    Vocabulary,
    beam_search,
    enumerate_exact,
    generate,
    importance_sampling,
    smc_steer,
)
from llmppl.constraints import Pattern
from llmppl.queries import choose
from llmppl.tasks.answers import loaded

LM = tiny_lm(6)
WORDS = Regex("[abc]{1,3}")


def posterior(constraint=WORDS, **options):
    """Probability of each text, by enumeration."""
    return enumerate_exact(ConstrainedText(LM, "a", constraint, **options)).by_text()


@dataclasses.dataclass
class Pair:
    a: bool
    b: Literal["x", "y"]


class Colour(enum.Enum):
    RED, BLUE = "ab", "ba"


@pytest.mark.parametrize(
    "constraint, options, method",
    [
        (None, {}, "sample"), (WORDS, {}, "best_of"), (int, {}, "greedy"), (len, {}, "steer"),
        (int, {"N": 3}, "best_of"), (Pair, {"power": 2.0}, "best_of"),
        (lambda text: True, {"N": 3}, "steer"), (None, {"mask": lambda text: None}, "best_of"),
        (JsonSchema({"type": "null"}), {}, "greedy"), (list[int], {"timeout": 1.0}, "greedy"),
        (["a", "b"], {}, "exact"), ({1: "a", 2: "b"}, {"end": "eos"}, "exact"), (bool, {}, "exact"),
        (Literal["a", "b"], {}, "exact"), (Colour, {"rule": Rule(top_k=3)}, "exact"), (["a"], {"N": 3}, "best_of"),
        (["a"], {"timeout": 1.0}, "best_of"), (["a"], {"temperature": 0}, "greedy"),
        (None, {"rule": Rule(temperature=0)}, "greedy"),
    ],
)  # fmt: skip
def test_auto_chooses_the_method(constraint, options, method):
    from llmppl.tasks.generation import Plan

    assert Plan(LM, constraint, "auto", options, None, {}).method == method


@pytest.mark.parametrize("method", ["importance", "steer"])
def test_probabilities_of_values_are_those_of_an_enumeration(method):
    truth = posterior()
    found = generate(LM, "a", WORDS, method=method, N=2000, seed=0)
    assert found.value == max(truth, key=truth.get)
    for text, p in truth.items():
        assert found.alternatives.get(text, 0.0) == pytest.approx(p, abs=0.06 if method == "importance" else 1e-9)
    assert found.probability == found.alternatives[found.value] and found.probability_se < 0.1


def test_methods_return_the_result_of_their_algorithms():
    def program():
        return ConstrainedText(LM, "a", WORDS, max_tokens=3)

    options = {"constraint": WORDS, "max_tokens": 3, "seed": 5}
    drawn = importance_sampling(program(), 8, seed=5)
    expected = {
        "sample": str(importance_sampling(program(), 1, seed=5).best),
        "greedy": str(beam_search(program(), 1, 1).best),
        "beam": str(beam_search(program(), 3, 3).best),
        "best_of": max([*drawn, beam_search(program(), 1, 1).best], key=lambda particle: particle.log_joint).s,
        "importance": max(drawn.by_text(), key=drawn.by_text().get),
        "steer": [*smc_steer(program(), 3, 2, seed=5).by_text()][0],
    }
    sizes = {"beam": {"N": 3, "K": 3}, "best_of": {"N": 8}, "importance": {"N": 8}, "steer": {"N": 3, "K": 2}}
    made = {method: generate(LM, "a", method=method, **options, **sizes.get(method, {})) for method in expected}
    assert {method: each.text for method, each in made.items()} == expected
    for method, each in made.items():
        assert each.method == method and each.ended == "complete" and str(each) == each.value == each.text
        assert (each.probability is None) == (method not in ("importance", "steer", "best_of"))
    log_prob = {method: each.log_prob for method, each in made.items()}
    assert log_prob["best_of"] >= max(log_prob["importance"], log_prob["greedy"])
    assert log_prob["beam"] >= log_prob["greedy"]


def test_the_call_of_a_generation_is_the_call_that_it_stands_for():
    found = generate(LM, "a", WORDS, method="steer", N=4, K=2, seed=3, power=2.0)
    names = {"lm": LM, "prompt": "a", "Regex": Regex, "ConstrainedText": ConstrainedText, "smc_steer": smc_steer}
    assert eval(found.call, names).by_text() == found.posterior.by_text()
    best = generate(LM, "a", WORDS, method="best_of", seed=3)
    names |= {"beam_search": beam_search, "importance_sampling": importance_sampling}
    particles, beams = eval(best.call, names)
    assert particles.by_text() == best.posterior.by_text() and best.log_prob >= beams[0].log_joint
    exact = generate(LM, "a", ["a", "b"])
    assert eval(exact.call, {"choose": choose, **names}).best == exact.value


def test_the_log_prob_is_that_of_the_tokens_and_the_end():
    found = generate(LM, "a", max_tokens=6, seed=1, end="eos")
    tokens = [int(token) for token in found.posterior[0].context.tokens][1:]
    expected = log_prob_by_hand(LM, [0], tokens + [5] * (found.ended == "eos"))
    assert found.log_prob == pytest.approx(expected, abs=1e-9)


def test_an_exact_choice_has_the_value_of_its_label():
    found = generate(LM, "a", {True: "ab", False: "ba"})
    totals = posterior(["ab", "ba"])
    assert found.method == "exact" and found.text in totals
    assert found.value is (found.text == "ab") and found.ended == "complete"
    assert found.probability == pytest.approx(totals[found.text], abs=2e-3)
    assert generate(LM, "a", Colour).value is Colour(found.text)
    sampled = generate(LM, "a", {True: "ab", False: "ba"}, method="steer", N=50, seed=0)
    assert sampled.value is found.value and sampled.probability == pytest.approx(totals[found.text])


def letters():
    """A model of the characters of records, which prefers some, and EOS."""
    tokens = [bytes([each]) for each in b'{}[]":, abxytruefls0123456789']
    logits = np.array([*np.random.default_rng(0).normal(size=len(tokens)), -3.0])
    return table_lm(lambda ids: logits, tokens)


def test_fields_have_their_marginal_probabilities():
    lm = letters()
    schema = JsonSchema(Pair, whitespace=False)
    truth = enumerate_exact(ConstrainedText(lm, "a", schema, max_tokens=30))
    found = generate(lm, "a", schema, method="steer", max_tokens=30, N=500, seed=0)
    assert isinstance(found.value, Pair) and [*found.fields] == ["a", "b"]
    for name in ("a", "b"):
        for value, p in truth.field(name).items():
            assert found.fields[name][value] == pytest.approx(p, abs=1e-6)
    assert f"'{found.value.b}'" in repr(found.fields) and "<table>" in found._repr_html_()


class Ticket(BaseModel):
    words: str = Field(max_length=2)
    colour: Colour
    open: bool
    level: int = Field(ge=1, le=3)
    pet: Literal["x", "y"] | None = None

    @model_validator(mode="after")
    def only_open_ones_have_level_three(self):
        assert self.open or self.level < 3
        return self


TOKENS = [bytes([each]) for each in b'{}[]":, abxywordsclurpenvtifah0123456789']


def logits_after(ids):
    """Return logits that depend on the last 40 characters."""
    return np.array([*np.random.default_rng([7, *ids[-40:]]).normal(size=len(TOKENS)), -3.0])


def log_prob_of(text, before):
    """Return the log-probability of the characters of a text, by hand."""
    ids = [TOKENS.index(bytes([char])) for char in before.encode()]
    total = 0.0
    for char in text.encode():
        logits = logits_after(ids)
        ids.append(TOKENS.index(bytes([char])))
        total += logits[ids[-1]] - np.log(np.exp(logits).sum())
    return total


def is_ticket(text):
    try:
        return bool(Ticket.model_validate_json(text))
    except ValueError:
        return False


@pytest.mark.parametrize("method", ["auto", "best_of"])
def test_conditionals_are_the_probabilities_of_a_closed_field_given_the_rest(method):
    values = {"colour": Colour, "open": [True, False], "level": [1, 2, 3], "pet": ["x", "y", None]}
    num_refused = 0
    for seed in range(repetitions(6, 3)):
        before = "a" + "b" * seed
        answer = generate(table_lm(logits_after, TOKENS), before, Ticket, method=method, seed=seed)
        given = json.loads(answer.text)
        conditionals = answer.conditionals()
        assert [*conditionals] == [name for name in given if name != "words"]
        for name, found in conditionals.items():
            texts = {}
            for value in values[name]:
                shown = json.dumps(getattr(value, "value", value))
                text = re.sub(rf'("{name}" ?: ?)[^ ,}}]+', rf"\g<1>{shown}", answer.text)
                if is_ticket(text):
                    texts[value] = log_prob_of(text, before)
            num_refused += len(values[name]) - len(texts)
            weights = np.exp([*texts.values()])
            assert len(found) == len(texts)
            assert [found[value] for value in texts] == pytest.approx(weights / weights.sum())
    assert num_refused                              # by the check at the end


class Inner(BaseModel):
    open: bool
    level: Literal["a", "b"]


class Outer(BaseModel):
    pet: Literal["x", "y"]
    words: Inner | None


def test_conditionals_of_fields_in_fields_are_those_by_hand():
    values = {"pet": ["x", "y"], "words.open": [True, False], "words.level": ["a", "b"]}
    for seed in range(4):
        before = "a" + "b" * seed
        lm = table_lm(logits_after, TOKENS)
        answer = generate(lm, before, Outer, method="best_of", N=8, seed=seed)
        found = answer.conditionals()
        names = [name for name in values if "." not in name or answer.value.words]
        assert [*found] == names
        for name in names:
            logs = []
            for value in values[name]:
                field = rf'("{name.rpartition(".")[2]}" ?: ?)[^ ,}}]+'
                text = re.sub(field, rf"\g<1>{json.dumps(value)}", answer.text)
                logs.append(log_prob_of(text, before))
            weights = np.exp(logs)
            shares = [found[name][value] for value in values[name]]
            assert shares == pytest.approx(weights / weights.sum())
        assert ("words.open" in repr(found)) == bool(answer.value.words)


def test_conditionals_of_equal_paths_stay_apart():
    inner = {"type": "object", "properties": {"b": {"enum": ["x"]}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a.b": {"enum": ["x", "y"]}, "a": inner | {"additionalProperties": False}},
        "required": ["a.b", "a"],
        "additionalProperties": False,
    }
    characters = [bytes([each]) for each in range(32, 127)]
    lm = table_lm(lambda ids: np.zeros(len(characters) + 1), characters)
    found = generate(lm, "a", JsonSchema(schema), max_tokens=60).conditionals()
    assert {name: {*of} for name, of in found.items()} == {'["a.b"]': {"x", "y"}, "a.b": {"x"}}


def test_conditionals_of_a_schema_that_contains_itself_are_those_of_the_text():
    """A walk over all paths of the schema would not end: an object has twelve fields of its own kind."""
    fields = {f"n{i}": {"anyOf": [{"$ref": "#"}, {"type": "null"}]} for i in range(12)}
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, **fields}, "required": ["a"]}
    schema["additionalProperties"] = False
    characters = [bytes([each]) for each in range(32, 127)]
    lm = table_lm(lambda ids: np.where(np.arange(len(characters) + 1) == 93, 9.0, 0.0), characters)
    found = generate(lm, "a", JsonSchema(schema), max_tokens=80).conditionals()
    assert {*found["a"]} == {"x", "y"}


class Aliased(BaseModel):
    pet: Literal["x", "y"] = Field(alias="a")


def record_of(**properties):
    return JsonSchema({
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"i/t": {"$anchor": "it", "enum": ["x", "y"]}},
    })


@pytest.mark.parametrize("constraint, values", [
    (record_of(a={"enum": ["x", 1, "y"], "type": "string"}), "xy"),
    (record_of(a={"type": "integer", "minimum": 1, "maximum": 4, "not": {"const": 3}}), [1, 2, 4]),
    (record_of(a={"$ref": "#/$defs/i~1t", "enum": ["x"]}), "x"),
    (record_of(a={"$ref": "#it"}), "xy"),
    (record_of(a={"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3}), [1, 2]),
    (record_of(a={"enum": ["x", "y"]}, b={"$ref": "#/properties/a"}), "xy"),
    (Aliased, "xy"),
    (record_of(b={"anyOf": [{"enum": ["x"]}, {"type": "null"}]}, a={"$ref": "#/properties/b/anyOf/0"}), "x"),
    (record_of(a={"enum": [0.5, 2.0]}), [0.5, 2.0]),
    (record_of(a={"type": "integer", "minimum": 1}), ()),
    (record_of(a={"enum": ["x"]}, b=True), "x"),
])  # fmt: skip
def test_conditionals_have_the_values_that_the_constraint_admits(constraint, values):
    characters = [bytes([each]) for each in range(32, 127)]
    lm = table_lm(lambda ids: np.zeros(len(characters) + 1), characters)
    found = generate(lm, "a", constraint, max_tokens=60).conditionals()
    assert {*found.get("a", ())} == {*values}
    assert (" a  " in repr(found)) == bool(values)


def test_what_has_no_closed_fields_has_no_conditionals():
    assert not generate(letters(), "a", ["ab", "ba"]).conditionals()
    assert not generate(letters(), "a", WORDS).conditionals()
    assert not generate(letters(), "a", JsonSchema(Pair), max_tokens=40, budget=3).conditionals()
    with pytest.raises(AttributeError, match="loaded answer"):
        pickle.loads(pickle.dumps(generate(letters(), "a", Pair))).conditionals()


def test_fields_of_an_answer_that_no_sample_has_are_shown():
    runs = [generate(letters(), "a", JsonSchema(Pair, whitespace=False), N=3, seed=seed) for seed in (0, 86, 97, 124)]
    apart = [each for each in runs if each.value not in each.alternatives]
    assert apart and all("none of the 3 samples" in repr(each) and each.probability is None for each in apart)
    for each in apart:
        assert "none of the 3 samples" in repr(each.fields)
        assert each.fields["a"].shares == each.posterior.field("a").shares
        assert ("not sampled" in repr(each.fields).splitlines()[-1]) == (each.value.b not in each.fields["b"])
    assert "no fields: 'greedy'" in repr(generate(letters(), "a", Pair, method="greedy").fields)


@pytest.mark.parametrize(
    "options, ended",
    [({"max_tokens": 2}, "max_tokens"), ({"max_tokens": 200, "timeout": 1e-9}, "timeout"),
     ({"max_tokens": 200, "budget": 1}, "budget"), ({"stop": "b", "max_tokens": 31}, "stop 'b'")],
)  # fmt: skip
def test_the_reason_of_the_end_is_named(options, ended):
    lm = table_lm(lambda ids: [0.0, 5.0 * (len(ids) > 8), -20.0])
    found = generate(lm, "a", **options, seed=0)
    assert found.ended == ended and (found.ended == "stop 'b'") != found.posterior[0].cut
    assert found.value == found.text and ended in repr(found)


def test_a_text_without_a_bound_ends_at_a_stated_number_of_tokens():
    found = generate(table_lm(lambda ids: [0.0, 0.0, -9.0]), "a", Regex("[ab]*"), N=2, seed=0)
    assert found.ended == "complete" and 0 < len(found.text) <= 160
    free = generate(table_lm(lambda ids: [0.0, 0.0, -math.inf]), "a", seed=0)
    assert (free.ended, len(free.text)) == ("max_tokens", 160)


def test_an_answer_that_has_ended_is_preferred_to_one_that_was_cut():
    lm = table_lm(lambda ids: [3.0, 0.0, -9.0] if len(ids) < 3 else [0.0, -9.0, 0.0])
    found = generate(lm, "a", max_tokens=3, method="importance", N=50, seed=0)
    assert [p.cut for p in found.posterior].count(True) > 10 and found.ended == "eos"


def test_a_list_of_prompts_gives_the_answers_of_each_in_order():
    prompts = ["a", "b", LM.context("c")]
    found = generate(LM, prompts, WORDS, method="steer", N=4, K=2, seed=7)
    for i, (prompt, each) in enumerate(zip(prompts, found, strict=True)):
        rng = np.random.default_rng(np.random.SeedSequence(7, spawn_key=(i,)))
        program = ConstrainedText(LM, prompt, WORDS)
        assert each.posterior.texts == smc_steer(program, 4, 2, rng=rng).texts
    exact = generate(LM, ["a", "b"], ["ab", "c"])
    assert [each.value for each in exact] == [generate(LM, each, ["ab", "c"]).value for each in ("a", "b")]
    assert len(found.to_pandas()) == 3 and "3 answers" in repr(found)
    assert len(generate(LM, [], WORDS)) == len(generate(LM, [], ["a"])) == 0


def test_an_answer_that_is_missing_says_why():
    with pytest.raises(ValueError, match="generate found no text: all died by step 1: .* is false of the text"):
        generate(LM, "a", lambda text: False, min_tokens=1)
    found = generate(LM, ["a", "b"], lambda text: False, min_tokens=1)
    assert "2 answers, 2 of them missing" in repr(found) and "is false of the text" in found[0].error
    with pytest.raises(ValueError, match="generate found no text"):
        found[0].value  # noqa: B018
    assert found.to_pandas()["value"].isna().all()


@pytest.mark.parametrize(
    "options, message",
    [({"max_token": 3}, "generate takes no max_token: did you mean max_tokens"),
     ({"method": "greedy", "N": 3}, "takes no N"), ({"method": "exact", "timeout": 3}, "no timeout: leave out one"),
     ({"method": "greedy", "power": 2.0}, "takes no power"), ({"method": "importance", "K": 3}, "takes no K"),
     ({"method": "best"}, "method must be one of"), ({"max_tokens": 0}, "max_tokens must be at least 1"),
     ({"temperature": 1.0, "rule": Rule()}, "takes temperature or rule"),
     ({"top_p": 0.9}, r"in rule=Rule\(top_p=")],
)  # fmt: skip
def test_options_that_a_method_does_not_take_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(LM, "a", WORDS, **options)


def test_an_exact_answer_of_a_regex_is_that_of_its_texts():
    words = Regex("[bc]b?c?")
    found = generate(LM, "a", words, method="exact")
    assert found.value == generate(LM, "a", [*words.enumerate()]).value
    for other in (Regex("a+"), JsonSchema({"enum": ["a", "b"]})):
        with pytest.raises(TypeError, match="options must be"):
            generate(LM, "a", other, method="exact")


def test_a_language_model_is_called_with_a_prompt_and_a_type():
    assert LM("a", ["ab", "c"]).value == LM.generate("a", ["ab", "c"]).value == generate(LM, "a", ["ab", "c"]).value
    with pytest.raises(TypeError, match="lm must be a CachedTransformer"):
        generate("a", LM)


@pytest.mark.parametrize("constraint", [Regex("[bc]b?c?"), ["ab", "c"]])
def test_each_answer_of_a_list_is_reported_when_it_ends(constraint):
    seen = []
    answers = generate(LM, ["a", "b", "c"], constraint, seed=0, together=1, on_answer=seen.append)
    assert [*map(id, seen)] == [*map(id, answers)] and [each.prompt for each in seen] == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):              # after the first one
        generate(LM, ["a", "b"], constraint, seed=0, on_answer=lambda answer: 1 / 0)


def test_greedy_decoding_answers_where_all_samples_are_refused():
    pydantic = pytest.importorskip("pydantic")

    class Word(pydantic.BaseModel):
        word: Literal["a", "b", "c"]

        @pydantic.field_validator("word")
        @classmethod
        def refuse(cls, word):
            assert liked in ("", word)
            return word

    liked = ""
    lm, options = CachedTransformer.from_pretrained(), {"N": 1, "temperature": 6.0, "max_tokens": 16}
    liked = lm("The", Word, method="greedy", max_tokens=16).value.word
    answers = (lm("The", Word, seed=s, **options) for s in range(99))
    alone = next(each for each in answers if each.posterior[0]._refused_)
    lists = (lm(["The"], Word, seed=s, **options) for s in range(99))
    listed = next(each for [each] in lists if each.posterior[0]._refused_)
    for answer in (alone, listed):
        assert answer.value.word == liked and answer.probability is None and liked in repr(answer)
        assert repr(answer.alternatives.best) == "(no answer)" and "none of the 1 samples" in repr(answer)
        assert repr(loaded(answer.as_dict(), "The").alternatives.best) == "(no answer)"


def test_texts_that_a_check_refuses_stay_in_the_denominator():
    """The probability of each record lies within 4.5 standard errors of its share of all masked texts."""
    pydantic = pytest.importorskip("pydantic")

    class Checked(Pair):
        @pydantic.field_validator("a")
        @classmethod
        def refuse(cls, a):
            assert not a
            return a

    lm, N = letters(), repetitions(500, 250)
    masked = enumerate_exact(ConstrainedText(lm, "a", JsonSchema(Pair, whitespace=False), max_tokens=30))
    found = generate(lm, "a", JsonSchema(Checked, whitespace=False), method="importance", max_tokens=30, N=N, seed=0)
    refused = sum(p for value, p in masked.answers().items() if value.a)
    for value, p in [(None, refused), *masked.answers().items()]:
        if value is not None and value.a:
            continue
        shares = [each for each in found.alternatives.shares
                  if getattr(each.value, "b", None) == getattr(value, "b", None)]
        estimate = shares[0].probability if shares else 0.0
        se = shares[0].se if shares else math.sqrt(p / N)
        assert abs(estimate - p) < 4.5 * se + 1e-9, value
    assert 0.5 < refused < 0.95 and not found.value.a
    assert "(no answer) has 0." in repr(found) and "its texts fail a check at their end" in repr(found)


def test_eight_samples_that_agree_are_enough():
    sure = table_lm(lambda ids: [0.0, -50.0, -50.0] if len(ids) < 3 else [-50.0, -50.0, 0.0])
    found = generate(sure, "a", Regex("[ab]{2}"), seed=0)
    assert len(found.posterior) == 8 and found.probability == pytest.approx(1) and "8, seed=0" in found.call
    split = generate(LM, "a", Regex("[abc]{2}"), seed=0)
    assert len(split.posterior) == 20 and "20, seed=0" in split.call
    assert len(generate(sure, "a", Regex("[ab]{2}"), N=20, seed=0).posterior) == 20


def test_best_of_compares_with_greedy_decoding_under_a_power():
    answer = generate(LM, "a", Regex("[bc]{3}"), power=3.0, N=1, seed=0)
    greedy = generate(LM, "a", Regex("[bc]{3}"), method="greedy")
    assert answer.log_prob >= greedy.log_prob and "beam_search" in answer.call


@pytest.mark.parametrize("end", ["boundary", "eos"])
@pytest.mark.parametrize("kind", [Regex, Pattern])
def test_temperature_0_takes_the_most_probable_allowed_token(kind, end):
    """The rule comes after the mask: it would leave no token of the constraint otherwise."""
    constraint = kind("[bc]b?c?")
    program = ConstrainedText(LM, "a", constraint, rule=Rule(temperature=0), end=end, max_tokens=4)
    greedy = beam_search(ConstrainedText(LM, "a", constraint, end=end, max_tokens=4), 1, 1).best
    assert int(np.argmax(LM.context("a").log_probs())) == 0         # "a", which the constraint excludes
    for found in (smc_steer(program, 4, 2, seed=0), importance_sampling(program, 3, seed=1), enumerate_exact(program)):
        assert {*found.texts} == {str(greedy)} and found.log_ml == pytest.approx(0.0)


def test_pipelines_contexts_and_parts_of_messages_are_taken_as_they_are():
    class Pipeline:
        model, tokenizer = LM.model, Vocabulary([b"a", b"b", b"c", b" ", b"ab", b""], eos_ids=[5])

    lm = CachedTransformer(Pipeline())
    assert lm.context(lm.context("a")) == lm.context("a")
    from llmppl.lm.transformer import _conversation

    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    assert _conversation([{"role": "user", "content": parts}], None)[0]["content"] == "Hi you"
    with pytest.raises(TypeError, match="use it as it is"):
        CachedTransformer(LM, LM.vocab)
