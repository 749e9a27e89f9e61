"""Masks in threads and after interrupts: whatever happened to an index before, its answers are those of a fresh one."""

import threading
import traceback

import numpy as np
import pytest
from helpers.common import HANG, ROOT, repetitions
from helpers.fire import Interrupt, impatience, in_threads
from helpers.masks import CASES, walks

from llmppl.constraints.json import frames
from llmppl.constraints.lark import unit
from llmppl.constraints.machine import distances, effects, machine, pairs
from llmppl.constraints.machine import index as machine_index
from llmppl.constraints.masks import index, mask_store
from llmppl.constraints.vocabulary import canonical
from llmppl.constraints.vocabulary.trie_walk import MemoGraph
from llmppl.support import graphs

LONG = {"composed", "both", "canonical"}                # their walks take longest
FILES = {str(path) for room in ("constraints", "distributions") for path in (ROOT / "llmppl" / room).rglob("*.py")}


@pytest.fixture
def impatient():
    with impatience():
        yield


@pytest.fixture(params=["roomy", "tight"])
def room(request, monkeypatch):
    """Tight: so little is kept that all is forgotten again and again."""
    if request.param == "tight":
        for module, name, most in [
            (mask_store, "MASK_BYTES", 300), (index, "MAX_STEPS", 8), (MemoGraph, "room", 8),
            (canonical, "MASK_BYTES", 1500), (canonical, "MAX_STATES", 6), (graphs, "LEAST_ROOM", 6),
            (machine, "MAX_STEPS", 6),
            (machine_index, "MAX_MASKS", 6), (machine_index, "MAX_STEPS", 8), (effects, "MAX_EFFECTS", 6),
            (effects, "MAX_GROUPED", 4), (pairs, "MAX_KEPT", 200), (unit, "MAX_KEPT", 6), (frames, "MAX_LOCALS", 6),
            (distances, "MAX_KEPT", 6),
        ]:  # fmt: skip
            monkeypatch.setattr(module, name, most)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_threads_that_share_an_index_get_the_same_answers_as_alone(impatient, room, name):
    case, seeds = CASES[name], range(8 if name not in LONG else 3)
    right = walks(case, case.make(), seeds)
    for _ in range(repetitions(20, 1)):
        shared, together = case.make(), threading.Barrier(4)

        def work(k, shared=shared, together=together):
            together.wait(HANG)
            return walks(case, shared, [*seeds[k:], *seeds[:k]])

        for found in in_threads([lambda k=k: work(k) for k in range(4)]):
            assert found == right
        assert walks(case, shared, seeds) == right


# --- interrupts -------------------------------------------------------------------------------------------------------


def path(shared):
    """The states along one walk, which somebody holds."""
    rng, states = np.random.default_rng(5), [getattr(shared, "start", None)]
    for _ in range(4):
        if hasattr(shared, "mask") and (mask := shared.mask(states[-1])).any():
            states.append(shared.advance(states[-1], int(rng.choice(np.flatnonzero(mask)))))
    return states


def told(shared, states):
    return [shared.mask(state).tobytes() for state in states if hasattr(shared, "mask")]


@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_at_any_line_an_index_is_right(room, name):
    case, seeds = CASES[name], range(3)
    fresh = case.make()
    right, right_told = walks(case, fresh, seeds), told(fresh, path(fresh))
    shared = case.make()
    path(shared)
    with Interrupt(FILES) as watch:
        walks(case, shared, seeds)
    lines = [(place, nth) for place, times in watch.seen.items() for nth in sorted({1, times // 2 + 1})]
    np.random.default_rng(0).shuffle(lines)
    faults, reached = [], 0
    for i, (place, nth) in enumerate(lines[: repetitions(50, 4)]):
        shared = case.make()
        held = path(shared)
        with Interrupt(FILES, place, nth, (KeyboardInterrupt, MemoryError)[i % 2]) as interrupt:
            walks(case, shared, seeds)
        reached += interrupt.left == 0
        try:
            found = in_threads([lambda shared=shared: walks(case, shared, seeds)])[0]       # no lock is left
            if found != right or told(shared, held) != right_told:
                faults.append((place, nth, "wrong"))
        except Exception:
            faults.append((place, nth, traceback.format_exc()))
    assert faults == [] and reached >= repetitions(5, 3)
