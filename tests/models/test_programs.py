"""ConstrainedText with every kind of constraint, against `re`, lark, `json` and sums by hand."""

import enum
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
from helpers.grammars import JSON
from helpers.programs import EvenLength, nested
from helpers.samplers import weighed
from helpers.tiny import (
    log_prob_by_hand,
    spelled,
    table_lm,
    texts_of,
    tiny_lm,
    tiny_vocab,
)

from llmppl import (
    Categorical,
    ConstrainedText,
    Grammar,
    Infilling,
    JsonSchema,
    PromptIntersection,
    Regex,
    Rule,
    Uniform,
    enumerate_exact,
    smc_steer,
)
from llmppl.constraints import DFA

V = 6
A, B, C, SPACE, AB, END = range(6)
PATTERN = r"(ab|c)+d?| a?"                              # "d" is in no token
NESTED = 'start: "a" start "b" | "c"'
ENDS = {"end": "eos", "max_tokens": 4}


CONSTRAINTS = {
    "regex": (lambda: Regex(PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    "words": (lambda: DFA.from_strings(["a", "abc", "cab"]), {"a", "abc", "cab"}.__contains__),
    "grammar": (lambda: Grammar(NESTED), nested),
    "index": (lambda: Regex(PATTERN).index(tiny_vocab(V)), lambda text: re.fullmatch(PATTERN, text) is not None),
    "recognizer": (EvenLength, lambda text: len(text) % 2 == 0 and "b" not in text),
}
each_constraint = pytest.mark.parametrize("name", CONSTRAINTS)


def by_hand(lm, fits, most, prompt=(A,)):
    """Return the probability of every allowed text of at most `most` tokens, summed over its tokenisations."""
    sums = {}
    for ids in texts_of(V, most + 1):
        text = spelled(ids)
        if ids[-1] == END and fits(text):
            sums[text] = sums.get(text, 0.0) + math.exp(log_prob_by_hand(lm, prompt, ids))
    return sums


@each_constraint
def test_a_complete_text_sums_its_spellings_that_end_in_time(name):
    make, fits = CONSTRAINTS[name]
    truth = by_hand(tiny_lm(V), fits, 4)
    posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", make(), **ENDS))
    assert weighed(posterior) == pytest.approx(truth, rel=1e-6)
    assert posterior.log_ml == pytest.approx(math.log(sum(truth.values())), rel=1e-9)
    assert not any(particle.cut for particle in posterior)


def test_complete_works_without_a_constraint_and_with_a_function():
    for fits in (lambda text: True, lambda text: "c" not in text, lambda text: text != ""):
        constraint = None if fits("") and fits("c") else fits
        posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", constraint, complete=True, max_tokens=3))
        assert weighed(posterior) == pytest.approx(by_hand(tiny_lm(V), fits, 3), rel=1e-6)


def test_the_last_token_may_meet_the_bound_exactly():
    lm = tiny_lm(V)
    posterior = enumerate_exact(ConstrainedText(lm, "a", Regex("cc|aaaa"), max_tokens=2))
    assert {particle.s for particle in posterior} == {"cc"}
    one = enumerate_exact(ConstrainedText(lm, "a", Regex("ab"), max_tokens=1))
    assert [particle.s for particle in one] == ["ab"]


def test_an_unreachable_end_is_refused_with_the_shortest_length():
    lm = tiny_lm(V)
    with pytest.raises(ValueError, match=r"^Regex\('cccc'\): no text ends within max_tokens=3, the shortest takes 4"):
        ConstrainedText(lm, "a", Regex("cccc"), max_tokens=3)
    with pytest.raises(ValueError, match="^Grammar.*: no text .* the shortest takes 5 tokens"):
        ConstrainedText(lm, "a", Grammar('start: "a" "a" "a" "a" "c"'), max_tokens=4)


def test_a_complete_text_requires_a_bound():
    with pytest.raises(ValueError, match="complete=True wants max_tokens"):
        ConstrainedText(table_lm(lambda ids: [0.0] * 3), "a", Regex("a"), complete=True)


def test_an_invalid_constraint_is_refused():
    for wrong in ("[ab]+", 3, {"a"}, re.compile("a")):
        with pytest.raises(TypeError, match="a constraint is a Regex, a Grammar, a JsonSchema"):
            ConstrainedText(tiny_lm(V), "a", wrong)
    with pytest.raises(TypeError, match="mask must be a function"):
        ConstrainedText(tiny_lm(V), "a", mask=np.ones(V, bool))


@dataclass
class Pet:
    name: str


class Color(enum.StrEnum):
    red = "red"


class Named(TypedDict):
    name: str


TYPES = [Pet, Color, Named, bool, int, str, dict, EvenLength, list[int], Literal["a", "b"], int | None, Any]
WITHOUT_TEXT = [EvenLength, Regex, Callable[[str], bool]]


@pytest.mark.parametrize("wrong", TYPES, ids=str)
def test_a_type_is_never_mistaken_for_a_function_of_the_text(wrong):
    with pytest.raises(TypeError, match="mask must be a function, as short_words"):
        ConstrainedText(tiny_lm(V), "a", mask=wrong)
    with pytest.raises(TypeError, match="until must be a function, as ends_sentence is"):
        PromptIntersection(tiny_lm(V), ["a", "b"], until=wrong)


@pytest.mark.parametrize("wrong", WITHOUT_TEXT, ids=str)
def test_a_type_without_a_written_form_is_refused(wrong):
    with pytest.raises(TypeError, match=r"cannot be the type .* A pydantic model, .* for other texts Regex\(...\)"):
        ConstrainedText(tiny_lm(V), "a", wrong)


class Says:
    """Function of the text with a constant result."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, text):
        return self.answer

    def __repr__(self):
        return "Says()"


@pytest.mark.parametrize("answer", [None, 1, 0.0, "yes", [], np.array([True])])
def test_a_function_of_the_text_must_return_a_bool(answer):
    for program, name in [
        (ConstrainedText(tiny_lm(V), "a", Says(answer)), "constraint"),
        (PromptIntersection(tiny_lm(V), ["a", "b"], until=Says(answer)), "until"),
    ]:
        said = f"{name} Says() returned {answer!r} for '"
        with pytest.raises(TypeError, match=f"{re.escape(said)}[abc ]+'; it must return True or False"):
            smc_steer(program, 4, 2, seed=0, max_steps=1, progress=False)


def test_a_function_may_return_a_numpy_bool_but_not_a_length():
    for truth in (True, np.True_):
        assert smc_steer(ConstrainedText(tiny_lm(V), "a", Says(truth), max_tokens=2), 2, 2, seed=0, progress=False)
    with pytest.raises(TypeError, match="constraint len returned [12] for '"):
        smc_steer(ConstrainedText(tiny_lm(V), "a", len), 2, 2, seed=0, progress=False)


@pytest.mark.parametrize(
    "make, meant",
    [
        (lambda lm: ConstrainedText(lm, "a", max_tokns=3), "ConstrainedText takes no max_tokns: did you mean max_tok"),
        (lambda lm: ConstrainedText(lm, "a", completed=True), "did you mean complete"),
        (lambda lm: Infilling(lm, "a[BLANK]b", lenghts=None), "Infilling takes no lenghts: did you mean lengths"),
        (lambda lm: PromptIntersection(lm, ["a"], rules=Rule()), "did you mean rule"),
        (lambda lm: ConstrainedText(lm, "a", wobble=1), "takes no wobble: it takes complete, constraint, end, lm"),
    ],
)
def test_a_mistyped_option_is_named_with_the_similar_one(make, meant):
    with pytest.raises(TypeError, match=meant):
        make(tiny_lm(V))


def test_programs_refuse_invalid_texts_by_name():
    lm = tiny_lm(V)
    for make, error, message in [
        (lambda: ConstrainedText(lm, 5), TypeError, "prompt must be a str or a Context, not 5"),
        (lambda: ConstrainedText(lm, "a\ud800"), ValueError, "surrogates not allowed"),
        (lambda: PromptIntersection(lm, ["a", 5]), TypeError, "prompt must be a str or a Context, not 5"),
        (lambda: Infilling(lm, ["a", 5]), TypeError, "each of the fragments must be a str, not 5"),
        (lambda: Infilling(lm, "a[BLANK]\ud800"), ValueError, "surrogates not allowed"),
        (lambda: Infilling(lm, "a[BLANK]", lengths=3), TypeError, "lengths must be a Distribution over 0, 1, 2"),
        (lambda: Infilling(lm, "a[BLANK]", end="boundary"), ValueError, "end must be one of 'prefix', 'eos', not 'bo"),
        (lambda: Infilling(lm, "a[BLANK]", end=True), TypeError, "end must be one of 'prefix', 'eos', not True"),
        (lambda: ConstrainedText(lm, "a", rule=40), TypeError, r"rule must be a function, as Rule\(top_k=40\) is"),
        (lambda: PromptIntersection(lm, ["a"], proposal=1), TypeError, "proposal must be one of 'product', 'first'"),
        (lambda: ConstrainedText(lm, "a", min_tokens=3, max_tokens=2), ValueError, "min_tokens must be at most max_t"),
    ]:
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("lengths", [Uniform(-2, -1), Categorical({0.5: 1.0}), Categorical({"a": 1.0})])
def test_invalid_lengths_are_refused_when_drawn(lengths):
    with pytest.raises(ValueError, match="lengths must be a Distribution over 0, 1, 2, ..., but .* drew"):
        smc_steer(Infilling(tiny_lm(V), "a[BLANK]b", lengths=lengths), 2, 2, seed=0, progress=False)


def test_only_an_index_over_an_equal_vocabulary_is_accepted():
    for V_other in (4, 5, 7):
        with pytest.raises(ValueError, match="another vocabulary"):
            ConstrainedText(tiny_lm(V), "a", Regex("[abc]+").index(tiny_vocab(V_other)))
    equal = Regex("[abc]+").index(tiny_vocab(V))
    assert equal.vocab is not tiny_lm(V).vocab
    assert ConstrainedText(tiny_lm(V), "a", equal).index is equal


def test_an_impossible_constraint_is_refused_with_the_missing_bytes():
    lm = tiny_lm(V)
    with pytest.raises(ValueError, match=r"\[xyz\].*the next byte must be one of b'x'..b'z'"):
        ConstrainedText(lm, "a", Regex("[xyz]+"))
    with pytest.raises(ValueError, match="b'd'"):
        ConstrainedText(lm, "a", Regex("abd"))
    with pytest.raises(ValueError, match="accepts no string"):
        ConstrainedText(lm, "a", Regex("a(?!b)b"))


def test_particles_share_one_index():
    posterior = smc_steer(ConstrainedText(tiny_lm(V), "a", Regex(PATTERN), max_tokens=5), 8, 3, seed=0)
    assert len({id(particle.index) for particle in posterior}) == 1
    index = Grammar(NESTED).index(tiny_vocab(V))
    program = ConstrainedText(tiny_lm(V), "a", index, max_tokens=5)
    assert all(particle.index is index for particle in smc_steer(program, 8, 3, seed=0))
    assert program.copy().index is index


def test_the_target_equals_rejection_of_the_texts_that_do_not_match():
    """Check it also with a tempered and truncated distribution."""
    options = {"rule": Rule(temperature=1.5, top_k=4), "complete": True, **ENDS}
    free = weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", **options)))
    held = weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex(PATTERN), **options)))
    assert held == pytest.approx({text: w for text, w in free.items() if re.fullmatch(PATTERN, text)}, rel=1e-9)


# ---- on real tokens


NAMES = Grammar('start: " " NAME ("," " " NAME)* [" and " NAME] "."\nNAME: /[A-Z][a-z]+/\n')
SCHEMA = JsonSchema({"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 1, "maxItems": 3})


def is_list(text):
    return 1 <= len(found := json.loads(text)) <= 3 and {*found} <= {1, "two", None}


@pytest.mark.parametrize(
    ("prompt", "constraint", "fits"),
    [
        *[("Tim was", Regex(pattern), re.compile(pattern).fullmatch) for pattern in (
            r" [0-9]{1,3} years old\.", r"( [a-z]+){2,4}[.!]", r"(?i) (yes|no)", r" [^\W\d]\w{0,6}", " é+ 日本?"
        )],
        ("They met", NAMES, NAMES.lark.parse),
        ("List: ", Grammar(JSON), lambda text: [json.loads(text)]),
        pytest.param(
            'The list was [1,"two",null]. The list was ', SCHEMA, is_list,
            marks=pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs jsonschema"),
        ),
    ],
)  # fmt: skip
def test_texts_of_the_embedded_model_fit_by_another_reader(embedded, prompt, constraint, fits):
    posterior = smc_steer(ConstrainedText(embedded, prompt, constraint, max_tokens=14), 4, 2, seed=0)
    assert len(posterior) and all(map(fits, posterior.texts))


# ---- temperature 0


def likeliest(rows, num_tokens):
    """Return the token of the largest product of these distributions, of the first `num_tokens`."""
    return int(np.argmax(np.sum(rows, axis=0)[:num_tokens]))


@pytest.mark.parametrize("seed", range(6))
def test_greedy_holes_take_the_likeliest_tokens_beside_eos(seed):
    """The models' own first choices include EOS, and not the fragments."""
    lm = tiny_lm(V, seed=seed)
    hole = lm.context("a")
    for _ in range(2):
        hole += lm.vocab[likeliest([hole.log_probs()], END)]
    program = Infilling(lm, ["a", "ca"], lengths=Uniform([2]), rule=Rule(temperature=0))
    for found in (enumerate_exact(program), smc_steer(program, 3, 2, seed=0)):
        assert {*found.texts} == {hole.text + "ca"}
        assert found.log_ml == pytest.approx((hole + "ca").log_prob_since(hole), rel=1e-6)


@pytest.mark.parametrize("proposal", ["product", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_after_two_prompts_follows_their_product(seed, proposal):
    lm = tiny_lm(V, seed=seed)
    contexts, text = [lm.context("a"), lm.context("cb")], ""
    for place in range(4):
        token = likeliest([context.log_probs() for context in contexts], END + (place >= 2))
        if token == END:
            break
        contexts, text = [context + lm.vocab[token] for context in contexts], text + spelled([token])
    options = {"min_tokens": 2, "max_tokens": 4, "proposal": proposal, "rule": Rule(temperature=0)}
    program = PromptIntersection(lm, ["a", "cb"], **options)
    for found in (enumerate_exact(program), smc_steer(program, 3, 2, seed=0)):
        assert {*found.texts} == {text} and found.log_ml == pytest.approx(0.0)
