"""Subset construction in C: the states and rows of random patterns equal those made in Python, up to their numbers."""

import copy
import pickle

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.fire import in_threads
from helpers.in_c import check_rows, random_pattern

from llmppl import native
from llmppl.constraints import Regex
from llmppl.constraints.automata import native_rows
from llmppl.constraints.automata.budget import TooLarge

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C compiler, or LLMPPL_NATIVE=0"
)


@pytest.mark.parametrize("seed", range(repetitions(400, 40)))
def test_rows_equal_those_made_in_python(monkeypatch, seed):
    monkeypatch.setattr(native_rows, "ROOM", 2 + seed % 5)
    check_rows(seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_pickle_has_the_same_states_and_makes_the_others_in_python(seed):
    rng = np.random.default_rng(seed)
    dfa = Regex(f"({random_pattern(rng)}){{3}}x")
    some = [dfa.after(dfa.start, text.encode()) for text in ("a", "ab", "abc", "b")]
    other = pickle.loads(pickle.dumps(dfa))
    assert copy.deepcopy(dfa) is dfa and other.num_states == dfa.num_states
    for state in filter(None, some):
        assert other.row(state).astype(bool).tolist() == dfa.row(state).astype(bool).tolist()
    assert other.explore().num_states == dfa.explore().num_states
    assert other.equivalent(dfa)


@pytest.mark.parametrize(
    ("limit", "count"), [("MAX_STATES", "40 states"), ("MAX_STEPS", "40 steps to make its states")]
)
def test_a_spent_budget_is_refused_as_in_python(monkeypatch, limit, count):
    in_c, plain = Regex("(a|b)*a(a|b){9}"), Regex("(a|b)*a(a|b){9}")
    monkeypatch.setattr(f"llmppl.constraints.automata.budget.{limit}", 40)
    assert in_c.native_rows() is not None
    monkeypatch.setenv("LLMPPL_NATIVE", "0")
    for dfa in (in_c, plain):
        for _ in range(2):
            with pytest.raises(TooLarge, match=f"^regex .* is too large: more than {count}"):
                dfa.explore()


def test_exploration_stops_at_a_limit():
    with pytest.raises(TooLarge, match="more than 20 states"):
        Regex("(a|b)*a(a|b){9}").explore(limit=20)
    assert Regex("(a|b)*a(a|b){4}").explore(limit=64).num_states == 32


@pytest.mark.parametrize("seed", range(10))
def test_threads_that_share_an_automaton_make_the_same_states(seed):
    rng = np.random.default_rng(seed)
    pattern = f"({random_pattern(rng)}|[ab]*a[ab]{{6}})c"
    shared, alone = Regex(pattern), Regex(pattern)
    texts = ["".join(rng.choice([*"abc"], 8).tolist()) for _ in range(200)]
    found = in_threads([lambda: [shared.accepts_text(text) for text in texts]] * 4)
    assert found == [[alone.accepts_text(text) for text in texts]] * 4


def test_rows_of_a_large_nfa_are_made_in_python(monkeypatch):
    monkeypatch.setattr(native_rows, "MOST", 10)
    large = Regex("[a-z]{20}b")
    assert large.native_rows() is None
    assert large.accepts_text("a" * 20 + "b") and not large.accepts_text("a" * 21)
