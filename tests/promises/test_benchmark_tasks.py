"""The quality benchmark judges rightly: answers by hand, and its ways to propose tokens have one target."""

import importlib
import math
import sys

import numpy as np
import pytest
from helpers.common import ROOT
from helpers.samplers import weighed
from helpers.tiny import add_up, log_probs_by_hand, tiny_lm

from llmppl import Regex, Rule, enumerate_exact
from llmppl.constraints import index_of

pytestmark = pytest.mark.slow
BENCHMARKS = ROOT / "benchmarks"
A, B, C, SPACE, AB, END = range(6)


@pytest.fixture(scope="module")
def parts():
    """The files of the benchmark."""
    sys.path.append(str(BENCHMARKS))
    try:
        return {name: importlib.import_module(name) for name in ("tasks", "task_instances", "task_report")}
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def made(parts, embedded):
    given = parts["task_instances"]
    words = given.keywords(given.Fluency(embedded), given.concept_sets(None))
    return {task.name: task for task in (given.extraction(), given.pattern(), words, given.text_to_sql())}


def judged(task, number, text):
    found = task.judge(task.instances[number], [text], [0.0])
    return None if found["answers"] == [None] else found["right"][0]


def colder(lm, before, temperature):
    """(V,) log-probabilities of the token after `before`."""
    logits = log_probs_by_hand(lm, before) / temperature
    return logits - np.logaddexp.reduce(logits)


def test_each_task_has_fifty_different_instances(made):
    for task in made.values():
        asked = {instance.messages[-1]["content"] for instance in task.instances}
        assert len(asked) == len(task.instances) >= 50


def test_right_answers_are_in_the_language(made, embedded):
    for instance in made["pattern"].instances:
        index = index_of(instance.language, embedded.vocab)
        assert index.accepts(index.after(instance.right))
    for number, instance in enumerate(made["extraction"].instances):
        name, age, job, city = instance.right
        text = f'{{"name": "{name.title()}", "age": {age}, "job": "{job}", "city": "{city.title()}"}}'
        index = instance.language.index(embedded.vocab)
        assert index.accepts(index.after(text))
        assert judged(made["extraction"], number, text) is True


@pytest.mark.parametrize(
    "task, number, text, right",
    [
        ("extraction", 0, '{"name":"maria lopez", "age": 34, "job": "Nurse", "city": "Denver"}', True),
        ("extraction", 0, 'Here: { "name": "Maria Lopez", "age": "34", "job": "nurse", "city": "Denver"}.', True),
        ("extraction", 0, '{"name": "Maria Lopez", "age": 43, "job": "nurse", "city": "Denver"}', False),
        ("extraction", 0, '{"name": "Maria Lopez", "age": 34, "job": "nurse"}', None),
        ("extraction", 0, "Maria Lopez, 34", None),
        ("pattern", 0, "1987-03-03 Tue", True),
        ("pattern", 0, "1987-03-04 Wed", False),
        ("pattern", 13, "417-280-2", True),             # 4 + 1 + 7 + 2 + 8 + 0 = 22
        ("keywords", 0, "The dogs ran after the ball in the park.", True),
        ("keywords", 0, "The dog ran after the dog and the ball in the park.", False),
        ("keywords", 0, "Dog ball the the park xylophone quorum.", False),
        ("keywords", 0, "The dog ran in the park.", None),
        ("keywords", 0, "The dog ran after the ball in the park", None),
        ("sql", 0, "SELECT name FROM people WHERE city = 'Bonn'", True),
        ("sql", 0, "SELECT name FROM people WHERE age = 45 OR age = 31 ORDER BY age", True),
        ("sql", 0, "SELECT name FROM people", False),
        ("sql", 0, "SELECT name FROM people WHERE city = 'Bern'", None),
        ("sql", 0, "SELECT title FROM people", None),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_its_content(made, task, number, text, right):
    assert judged(made[task], number, text) is right


LINE = {
    "set": "masked", "answers": ["x", "y", "y", None, "x", "x"], "right": [False, True, True, False, False, False],
    "log_probs": [-9.0, -3.0, -4.0, -1.0, -5.0, -6.0], "log_weights": [math.log(w) for w in (5, 2, 2, 9, 1, 1)],
}  # fmt: skip
NONE = {"set": "masked", "answers": [None], "right": [False], "log_probs": [0.0], "log_weights": [0.0]}


@pytest.mark.parametrize("method, line, n, share", [
    ("one", LINE, 6, 2 / 6), ("vote", LINE, 1, 0), ("vote", LINE, 3, 1), ("vote", LINE, 6, 0), ("best", LINE, 1, 0),
    ("best", LINE, 6, 1),                                               # not the likeliest of all: it is no answer
    ("heaviest", LINE, 3, 0), ("heaviest", LINE | {"log_weights": [0.0, 1.0, 1.0, 5.0, 0.0, 0.0]}, 6, 1),
    ("log_ml", LINE, 6, math.log(11)), ("log_ml", LINE, 3, math.log(9 * 6 / 3)),    # weights are divided by N already
    ("vote", NONE, 1, 0), ("best", NONE, 1, 0), ("heaviest", NONE, 1, 0), ("log_ml", NONE, 1, -math.inf),
])  # fmt: skip
def test_methods_choose_from_a_set(parts, method, line, n, share):
    assert getattr(parts["task_report"], method)(line, n) == pytest.approx(share)


@pytest.mark.parametrize("how", ["steered", "tested"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_text_is_weighed_by_its_probability_and_its_end(parts, how, temperature):
    lm, spellings = tiny_lm(), {(B,): "b", (A, B): "ab", (AB,): "ab", (C,): "c"}
    truth = add_up((text, sum(colder(lm, [A, *ids][: n + 1], temperature)[i] for n, i in enumerate([*ids, END])))
                   for ids, text in spellings.items())  # fmt: skip
    task = parts["task_instances"].Task("", [], 3, lambda _, text: text, lambda text: text != "cc")
    index = Regex("a?b|cc?").index(lm.vocab)
    exact = enumerate_exact(parts["tasks"].Writer(lm.context("a"), task, index, how, Rule(temperature=temperature)))
    assert weighed(exact) == pytest.approx(truth, rel=1e-8)
