"""Decisions of a killed run continue from its file, pickle, and are those of workers."""

import copy
import os
import pickle
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers.common import repetitions, wants_ray

import llmppl.tasks.ray
from llmppl import CachedTransformer, load_results
from llmppl.decisions import Decision, choice, decide, score

NUM = repetitions(full=1000, quick=60)                  # states
QUESTIONS = {
    "late": "Is it late?",
    "who": choice("Who is it about?", {"a cat": "or its kitten", "a dog": None, "a bird": ""}),
    "mood": score("How happy is it?", ["sad", "calm", "happy"]),
}
STATES = [f"{i}. The {('cat', 'dog', 'bird')[i % 3]} was {('sad', 'happy')[i % 2]}." for i in range(NUM)]
RUN = """
import os, signal, sys
import test_deciding_files
from llmppl.decisions import asking
last = int(sys.argv[2])

def text_of_state(state, before=asking.text_of_state):
    global last
    last -= 1
    if last == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(state)

asking.text_of_state = text_of_state
print("ran:", len(test_deciding_files.run(sys.argv[1])))
"""


def run(path):
    """Decide on all states that a file does not have."""
    lm = CachedTransformer.from_pretrained()
    return decide(lm, STATES, QUESTIONS, to=path, resume=True, together=4, progress=False)


def numbers(decision):
    """Return all probabilities of a decision."""
    return np.array([p for answer in decision.values() for p in answer.probabilities.values()])


def test_a_run_killed_twice_loses_and_doubles_nothing(tmp_path):
    path, rng, written = tmp_path / "decisions.db", random.Random(0), 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    for kill in (True, True, False):
        last = rng.randrange(20, NUM // 2 - 5) if kill else 0
        command = [sys.executable, "-c", RUN, str(path), str(last)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        results = load_results(path)
        if kill:
            assert done.returncode == -signal.SIGKILL
            assert written < len(results) < written + last
        written = len(results)
    assert done.stdout == f"ran: {NUM}\n", done.stderr
    assert [each.index for each in results] == [*range(NUM)]
    assert [each.task for each in results] == STATES and not any(each.error for each in results)
    resumed = run(path)                                 # reads the file alone
    whole = decide(CachedTransformer.from_pretrained(), STATES, QUESTIONS, together=4, progress=False)
    for one, other in zip(resumed, whole, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), atol=1e-5)
        assert one.value == other.value and one.state == other.state


def test_a_file_keeps_the_joint_distribution(tmp_path):
    lm, path = CachedTransformer.from_pretrained(), tmp_path / "decisions.db"
    first = decide(lm, STATES[:3], QUESTIONS, joint=True, to=path, progress=False)
    resumed = decide(lm, STATES[:3], QUESTIONS, joint=True, to=path, resume=True, progress=False)
    for one, loaded, other in zip(resumed, load_results(path), first, strict=True):
        assert one.joint == other.joint == loaded.answer.joint and one.value == other.value == loaded.value
        known, expected = one.given(late=True), other.given(late=True)
        assert known.joint == expected.joint and repr(known["who"]) == repr(expected["who"])


@pytest.mark.parametrize("how", [{}, {"orders": 2}, {"joint": True}, {"think": 2, "max_think": 4, "seed": 1}])
@pytest.mark.parametrize("copied", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_decisions_pickle(how, copied):
    decision = decide(CachedTransformer.from_pretrained(), STATES[0], QUESTIONS, **how)
    again = copied(decision)
    assert isinstance(again, Decision) and repr(again) == repr(decision) and again.value == decision.value
    assert again.joint == decision.joint and again.as_dict() == decision.as_dict()
    assert (numbers(again) == numbers(decision)).all()


def test_a_list_of_decisions_pickles():
    decisions = decide(CachedTransformer.from_pretrained(), STATES[:3], QUESTIONS, progress=False)
    again = pickle.loads(pickle.dumps(decisions))
    assert repr(again) == repr(decisions) and again.to_csv() == decisions.to_csv()


def one(lm, state, rng):
    return decide(lm, state, QUESTIONS)


@pytest.mark.slow
def test_decisions_of_workers_are_those_of_one_process(tmp_path):
    wants_ray()
    import ray

    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}}
    ray.shutdown()
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, runtime_env=environment, include_dashboard=False,
             log_to_driver=False, logging_level="ERROR")  # fmt: skip
    try:
        path, make = tmp_path / "decisions.db", CachedTransformer.from_pretrained
        results = llmppl.tasks.ray.run_many(one, STATES[:12], make_lm=make, workers=2, to=path, progress=False)
        results = sorted(results, key=lambda each: each.index)
    finally:
        ray.shutdown()
    alone = decide(CachedTransformer.from_pretrained(), STATES[:12], QUESTIONS, progress=False)
    for result, loaded, decision in zip(results, load_results(path), alone, strict=True):
        assert result.error is None and result.answer.value == decision.value == loaded.value
        np.testing.assert_allclose(numbers(result.answer), numbers(decision), atol=1e-5)
