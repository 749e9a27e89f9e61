"""Automata of the package `interegular`, read over bytes."""

from __future__ import annotations

import itertools
from typing import Any

from llmppl.languages.limits import Budget
from llmppl.languages.nfa import ACCEPT, MAX_CODE_POINT, NFA, merged, utf8

__all__ = ["nfa_of"]


def nfa_of(fsm: Any) -> NFA:
    """The language of an `interegular.FSM` over characters; some states may lead nowhere."""
    from interegular.fsm import anything_else

    named = sorted(ord(c) for c in fsm.alphabet if c is not anything_else)
    groups: dict[int, list[tuple[int, int]]] = {}
    for code in named:
        groups.setdefault(fsm.alphabet[chr(code)], []).append((code, code))
    if anything_else in fsm.alphabet:
        others = [(a + 1, b - 1) for a, b in itertools.pairwise([-1, *named, MAX_CODE_POINT + 1]) if b - a > 1]
        groups.setdefault(fsm.alphabet[anything_else], []).extend(others)
    fragments = {symbol: utf8(merged(ranges)) for symbol, ranges in groups.items()}
    nfa = NFA(Budget(f"the interegular automaton of {len(fsm.states):,} states"))
    entry = {state: nfa.add(()) for state in fsm.states}
    for state, moves in fsm.map.items():
        known = moves.keys() & fragments.keys()
        targets = [(fragments[symbol], entry[moves[symbol]]) for symbol in sorted(known) if moves[symbol] in entry]
        ends = [ACCEPT] * (state in fsm.finals)
        nfa.epsilon[entry[state]] = (*ends, *(nfa.read(*target) for target in targets))
    nfa.start = entry[fsm.initial]
    return nfa
