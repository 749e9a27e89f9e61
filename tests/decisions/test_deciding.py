"""Decisions, compared with a sum over every tokenisation that is computed without the library."""

import enum
import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NotRequired, Required, TypedDict

import numpy as np
import pytest
from helpers.common import repetitions
from pydantic import BaseModel, Field

from llmppl import CachedTransformer, Vocabulary, load_results
from llmppl.decisions import asking, choice, decide, fit_calibration, predicate, score
from llmppl.decisions.prompts import conversation

LETTERS = "abc é"
QUESTIONS = {
    "urgent": "Is it urgent?",
    "queue": choice("Which queue?", {"billing": "charges", "sales": None}),
    "anger": score("How cross?", ["calm", "annoyed", "furious"]),
}


def random_lm(seed):
    """A model over all bytes and random longer tokens, whose next token depends on the last one."""
    rng = random.Random(seed)
    longer = set()
    while len(longer) < 30:
        longer.add("".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 4))).encode())
    tokens = [*(bytes([i]) for i in range(256)), *sorted(longer), b""]
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(len(tokens), len(tokens)))
    return CachedTransformer(lambda ids: logits[ids[-1]], Vocabulary(tokens, eos_ids=[len(tokens) - 1])), logits


def truth(lm, logits, last, texts):
    """Return the probability of each text after the token `last`: over all tokenisations, and left after its end."""
    table = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    tokens = [*lm.vocab.tokens]
    data = [text.encode() for text in texts]
    reached = {(b"", last): 1.0}
    totals = np.zeros(len(texts))
    while reached:
        (before, token), p = min(reached.items(), key=lambda item: len(item[0][0]))
        del reached[before, token]
        stays = 0.0
        for i, piece in enumerate(tokens):
            after = before + piece
            if piece and any(each.startswith(after) for each in data):
                stays += table[token, i]
                reached[after, i] = reached.get((after, i), 0.0) + p * table[token, i]
        if before in data:
            totals[data.index(before)] += p * (1 - stays)
    return totals


def option_sets(rng):
    """Options with shared beginnings, one that begins another, of 1 to 60 characters."""
    words = {"".join(rng.choice(LETTERS.replace(" ", "")) for _ in range(rng.randint(1, 4))) for _ in range(4)}
    words |= {word + rng.choice(LETTERS.replace(" ", "")) for word in [*words][:2]}
    words.add("".join(rng.choice(LETTERS) for _ in range(rng.randint(20, 58))).strip() + "a")
    return sorted(words)


@pytest.mark.parametrize("seed", range(repetitions(200, 12)))
def test_probabilities_are_those_of_an_enumeration(seed):
    lm, logits = random_lm(seed)
    options = option_sets(random.Random(seed))
    questions = {"q": choice("?", options)}
    exact = decide(lm, "ab", questions, exact=True)["q"]
    totals = truth(lm, logits, ord(":"), [" " + option for option in options])
    p = totals / totals.sum()
    np.testing.assert_allclose([*exact.probabilities.values()], p, atol=1e-9)
    assert exact.log_mass == pytest.approx(math.log(totals.sum()), abs=1e-6)
    early = decide(lm, "ab", questions)["q"]
    for value, q in zip(options, p, strict=True):
        low, high = early.bounds[value]
        assert low - 1e-9 <= q <= high + 1e-9


def test_the_order_of_the_options_changes_nothing():
    lm = CachedTransformer.from_pretrained()
    options = ["happy", "sad", "old"]
    found = []
    for order in itertools.permutations(options):
        found.append(decide(lm, "The cat was happy.", {"q": choice("How?", [*order])})["q"])
    for each in found:
        assert each.probabilities == found[0].probabilities
        assert [*each.probabilities] == [*each.question.values]


def test_orders_average_rotations_and_report_the_spread():
    lm = CachedTransformer.from_pretrained()
    questions = {"q": choice("How?", ["a", "b", "c"])}
    answer = decide(lm, "x", questions, orders=3)["q"]
    means, rows = np.zeros(3), []
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        prompt = "\n\n".join(turn["content"] for turn in conversation("x", questions["q"], order)) + "\n\nAnswer:"
        one = decide_from(lm, prompt, [" a", " b", " c"])
        rows.append(one)
        means += one / 3
    np.testing.assert_allclose([*answer.probabilities.values()], means, atol=1e-3)       # other tokenisations
    assert answer.spread == pytest.approx(np.ptp(rows, axis=0).max(), abs=1e-3)


def decide_from(lm, prompt, texts):
    """Return the probabilities of texts of one token each by plain log-probabilities."""
    context = lm.context(prompt, special=False)
    ends = []
    for text in texts:
        [token] = (context + text).tokens[len(context) :]
        after = np.exp((context + text).log_probs())
        others = [t for t in range(len(lm.vocab)) if lm.vocab.tokens[t] and any(
            each.startswith(text + lm.vocab.tokens[t].decode("utf-8", "replace")) for each in texts)]
        ends.append(math.exp(context.log_probs()[token]) * (1 - after[others].sum()))
    return np.array(ends) / sum(ends)


class Queue(enum.Enum):
    BILLING = "billing"
    SALES = "sales"


class Ticket(BaseModel):
    urgent: bool = Field(description="Is it urgent?")
    queue: Queue
    stars: int = Field(ge=1, le=5)
    language: Literal["en", "de"] | None


@dataclass
class Small:
    queue: Queue
    stars: Annotated[int, Field(ge=0, le=2)]


@pytest.mark.parametrize(
    "record, kinds", [(Ticket, ["predicate", "choice", "score", "choice"]), (Small, ["choice", "score"])]
)
def test_a_type_asks_a_question_for_each_field(record, kinds):
    decision = decide(CachedTransformer.from_pretrained(), "My card was charged twice.", record)
    assert [answer.question.kind for answer in decision.values()] == kinds
    assert isinstance(decision.value, record) and isinstance(decision.value.queue, Queue)
    assert decision.value.queue is decision["queue"].best
    places = decision["stars"].question.values
    expected = sum(value * p for value, p in decision["stars"].probabilities.items())
    assert decision["stars"].expected == pytest.approx(expected) and places == (*range(places[0], places[-1] + 1),)


class Level(enum.IntEnum):
    LOW = 1
    SMALL = 1                                           # another name of LOW
    HIGH = 2


class Form(BaseModel):
    queue: Literal["a", "b"] = Field(alias="theQueue", description="Which queue?")
    even: int = Field(gt=-1, lt=5, multiple_of=2)
    level: Level
    late: bool | None = None


class Note(TypedDict, total=False):
    late: Required[bool]
    level: NotRequired[Annotated[int, Field(ge=1, le=3)]]
    mood: Literal["sad", "happy"]


@pytest.mark.parametrize(
    "record, values",
    [
        (Form, {"queue": ("a", "b"), "even": (0, 2, 4), "level": (*Level,), "late": (True, False, None)}),
        (Note, {"late": (True, False), "level": (1, 2, 3), "mood": ("sad", "happy")}),
    ],
)
def test_fields_have_aliases_steps_and_optional_values(record, values):
    decision = decide(CachedTransformer.from_pretrained(), "The cat was late.", record)
    assert {name: answer.question.values for name, answer in decision.items()} == values
    best = {name: answer.best for name, answer in decision.items()}
    found = decision.value
    assert (found.model_dump() if record is Form else found) == best
    assert record is not Form or isinstance(found, Form) and isinstance(found.level, Level)


def test_an_answer_has_the_definitions_of_its_docstring():
    decision = decide(CachedTransformer.from_pretrained(), {"order": 12}, QUESTIONS)
    urgent, queue, anger = decision.values()
    p = queue.probabilities
    assert queue.confidence == pytest.approx(2 * max(p.values()) - 1) and queue.expected is None
    assert urgent.expected == urgent[True] and [*urgent.probabilities] == [True, False]
    levels = [*anger.probabilities.values()]
    assert anger.expected == pytest.approx(levels[1] + 2 * levels[2])
    likeliest = int(np.argmax(levels))
    distance = sum(q * abs(i - likeliest) for i, q in enumerate(levels))
    assert anger.confidence == pytest.approx(max(0.0, 1 - distance / (2 / 3)))
    assert all(math.isclose(sum(each.probabilities.values()), 1) for each in decision.values())
    assert "queue" in repr(decision) and "<svg" in decision._repr_html_()


def test_answers_below_a_confidence_are_none():
    lm = CachedTransformer.from_pretrained()
    decision = decide(lm, "x", QUESTIONS, abstain=1.0)
    assert decision.value == {"urgent": None, "queue": None, "anger": None} and decision.abstains == [*QUESTIONS]
    sure = decide(lm, "x", QUESTIONS)
    assert sure.value == {name: answer.best for name, answer in sure.items()} and not sure.abstains


def test_results_do_not_depend_on_other_requests():
    lm = CachedTransformer.from_pretrained()
    states = ["good", "The cat was sad. " * 9, {"a": [1, 2]}, "Tim was happy."]
    alone = []
    for state in states:
        for name, question in QUESTIONS.items():
            alone.append(decide(CachedTransformer.from_pretrained(), state, {name: question}))
    together = decide(lm, states, QUESTIONS, progress=False)
    numbers = [[*answer.probabilities.values()] for each in together for answer in each.values()]
    for one, numbers_together in zip(alone, numbers, strict=True):
        [answer] = one.values()
        np.testing.assert_allclose([*answer.probabilities.values()], numbers_together, atol=1e-4)


def distinct_tokens(lm, states, questions, examples=()):
    """Return the number of distinct prefixes of prompts and answers, without the last token of each answer."""
    found = set()
    for state, (name, question) in itertools.product(states, questions.items()):
        places = sorted(range(len(question.names)), key=lambda i: question.kind == "choice" and question.names[i])
        shown = [(text, question.names[question.index(labels[name])]) for text, labels in examples]
        turns = conversation(state, question, places, shown)
        said = [turn["content"] if turn["role"] == "user" else f"Answer: {turn['content']}" for turn in turns]
        prompt = lm.context("\n\n".join([*said, "Answer:"]), special=False)
        for option in question.names:
            ids = [*prompt.tokens, *lm.tokenizer.encode(f" {option}")]
            found |= {(*map(int, ids[:n]),) for n in range(1, len(ids))}
    return len(found)


@pytest.mark.parametrize("shots", [False, True])
@pytest.mark.parametrize("num_states, num_questions", [
    (1, 5), pytest.param(1, 20, marks=pytest.mark.slow), (30, 1), (4, 6),
])  # fmt: skip
def test_each_distinct_token_runs_once(num_states, num_questions, shots, monkeypatch):
    lm = CachedTransformer.from_pretrained()
    kinds = [predicate("Is it late?"), choice("Which?", QUESTIONS["queue"].names), QUESTIONS["anger"],
             choice("How many?", [f"{i} of the small animals" for i in range(30)])]  # fmt: skip
    questions = {}
    for i in range(num_questions):
        kind = kinds[i % len(kinds)]
        questions[f"q{i}"] = replace(kind, text=f"{i}. {kind.text}")
    labels = {name: question.values[0] for name, question in questions.items()}
    examples = [("Tim ran home.", labels), ("It was late.", labels)] if shots else []
    states = [f"The cat met {i} dogs." for i in range(num_states)]
    wanted = distinct_tokens(lm, states, questions, examples)
    counts = []
    for tolerance_and_most in (asking.QUICK, (math.inf, 0)):        # with few other tokenisations, and with none
        monkeypatch.setattr(asking, "QUICK", tolerance_and_most)
        lm.clear()
        before = lm.stats.tokens
        decide(lm, states, questions, examples=examples, progress=False)
        counts.append(lm.stats.tokens - before)
    assert wanted <= counts[0] <= 1.3 * wanted and counts[1] == wanted


def test_a_list_of_messages_is_one_state():
    lm = CachedTransformer.from_pretrained()
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    found, expected = decide(lm, talk, QUESTIONS), decide(lm, "user: Hi\n\nassistant: Hello", QUESTIONS)
    assert found["queue"].probabilities == expected["queue"].probabilities
    assert len(decide(lm, [[1, 2]], QUESTIONS, progress=False)) == 1


def test_examples_are_turns_before_the_state():
    lm = CachedTransformer.from_pretrained()
    examples = [("It is late!", {"urgent": True}), ("No hurry.", {"urgent": False})]
    found = decide(lm, "Soon.", {"urgent": "Is it urgent?"}, examples=examples)["urgent"]
    prompt = (
        "Is it urgent?\nAnswer yes or no.\n\nText: It is late!\n\nAnswer: yes\n\nText: No hurry.\n\nAnswer: no\n\n"
        "Text: Soon.\n\nAnswer:"
    )
    np.testing.assert_allclose([*found.probabilities.values()], decide_from(lm, prompt, [" yes", " no"]), atol=1e-3)
    with pytest.raises(ValueError, match="'perhaps' is no answer to 'Is it urgent\\?', which has \\[True, False\\]"):
        decide(lm, "Soon.", {"urgent": "Is it urgent?"}, examples=[("x", {"urgent": "perhaps"})])


def test_a_file_keeps_decisions_and_goes_on_with_them(tmp_path):
    lm, path = CachedTransformer.from_pretrained(), tmp_path / "decisions.db"
    first = decide(lm, ["a", "b"], QUESTIONS, to=path, progress=False)
    again = decide(lm, ["a", "b", "c"], QUESTIONS, to=path, resume=True, progress=False)
    assert [each["queue"].probabilities for each in again[:2]] == [each["queue"].probabilities for each in first]
    assert again[0].value == first[0].value and again[0].tokens == first[0].tokens
    loaded = load_results(path)[2]
    assert loaded.value == again[2].value and loaded.fields["anger"].best == again[2]["anger"].best
    with pytest.raises(ValueError, match="holds results of another run"):
        decide(lm, ["a", "b"], QUESTIONS, orders=2, to=path, resume=True, progress=False)


def test_a_limit_is_an_error_of_its_state_alone():
    lm = CachedTransformer.from_pretrained()
    questions = {f"q{i}": choice("Which?", [f"{word} {i}" for word in ("one", "two", "three")]) for i in range(20)}
    with pytest.raises(TimeoutError, match="the budget was reached before"):
        decide(lm, "x", questions, budget=1)
    first, second = decide(lm, ["x", "y"], questions, budget=1, progress=False)
    assert "budget was reached" in first.error and "budget was reached" in second.error
    with pytest.raises(ValueError, match="budget was reached"):
        _ = first.value


@pytest.mark.parametrize("how, budget", [({"think": 8, "seed": 0}, 150), ({"joint": True}, 30)])
def test_a_budget_is_of_all_drafts_and_questions_of_a_state(how, budget):
    lm = CachedTransformer.from_pretrained()
    questions = {"kind": choice("Which?", ["one", "two", "three"]), "how": choice("How?", ["well", "so so", "badly"])}
    tokens = decide(lm, "He ran.", questions, **how).tokens
    assert tokens > budget
    lm.clear()
    before = lm.stats.tokens
    with pytest.raises(TimeoutError, match="the budget was reached before"):
        decide(lm, "He ran.", questions, budget=budget, **how)
    assert lm.stats.tokens - before < tokens


class Positive(BaseModel):
    level: int = Field(ge=1)                        # without a largest value


@pytest.mark.parametrize(
    "state, questions, message",
    [
        ("x", {}, "questions must be a dict of names"),
        ("x", {"q": []}, "options must be 1 to 1000, not 0"),
        ("x", {"q": ["a", "a"]}, "options must differ"),
        ("x", {"q": ["a", " "]}, "an option must be a text with letters"),
        ("x", {"q": int}, "the type has no short list of answers"),
        ("x", Positive, "the field 'level' of .* has no short list of answers"),
        ("x", {"q": Annotated[int, Field(ge=0, le=200)]}, "an int with ge= and le= and at most 100 values has one"),
        ("x", int, "questions must be a type with fields"),
        ({1, 2}, {"q": "Is it?"}, "a state must be a text, messages or JSON"),
        ("x", {"q": enum.Enum("Pair", {"A": (1, 2), "B": (3, 4)})}, "an option must be a text with letters"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(state, questions, message):
    with pytest.raises((TypeError, ValueError), match=message):
        decide(CachedTransformer.from_pretrained(), state, questions)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"examples": "abc"}, "examples must be a list of .*, with no 'a'"),
        ({"examples": [("x", "yes")]}, "examples must be a list of .*, with no \\('x', 'yes'\\)"),
        ({"examples": [{"state": "x"}]}, "examples must be a list of"),
        ({"calibration": "good.json"}, "calibration must be a Calibration"),
        ({"to": "decisions.db"}, "to= is a file of a list of states"),
    ],
)
def test_options_of_another_form_are_refused(how, message):
    lm = CachedTransformer.from_pretrained()
    with pytest.raises(TypeError, match=message):
        decide(lm, "x", {"q": "Is it?"}, **how)
    if "examples" in how:
        with pytest.raises(TypeError, match=message.replace("examples", "labelled")):
            fit_calibration(lm, how["examples"], {"q": "Is it?"})


@pytest.mark.parametrize("levels", [[1, 2], Literal[1, 2], Level, Annotated[int, Field(ge=1, le=2)], {1: "", 2: None}])
def test_levels_are_a_list_or_a_type(levels):
    question = score("How high?", levels)
    assert question.kind == "score" and question.values == (1, 2) and question.names == ("1", "2")


def test_bools_and_texts_of_the_same_letters_are_two_options():
    question = choice("Which?", ["true", True])
    assert question.names == ('"true"', "true") and question.index("true") == 0 and question.index(True) == 1
    assert predicate("Is it?", yes="it is so").descriptions == ("it is so", "")
