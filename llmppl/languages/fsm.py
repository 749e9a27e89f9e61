"""Automata of the package `interegular`, read over bytes."""

from __future__ import annotations

from typing import Any

from llmppl.languages.classes import negated, points
from llmppl.languages.limits import Budget
from llmppl.languages.nfa import ACCEPT, NFA, merged, utf8

__all__ = ["nfa_of"]


def nfa_of(fsm: Any) -> NFA:
    """The language of an `interegular.FSM` over characters; some states may lead nowhere."""
    from interegular.fsm import anything_else

    named = set(fsm.alphabet) - {anything_else}
    groups: dict[int, list[tuple[int, int]]] = {}
    for char, symbol in fsm.alphabet.items():
        chars = negated(points(named)) if char is anything_else else points(char)
        groups.setdefault(symbol, []).extend(chars)
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
