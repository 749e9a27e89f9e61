"""Lower bounds of the bytes that complete a text of a grammar.

A parser's stack must complete one of the rules that its top state has begun, then one of those begun below, and so on.
The least bytes of the symbols that are left bound the rest of the text. Only the lexer can make it longer, where two
tokens may not touch. So the bound is mostly the distance itself, and guides the search for it.

Source: Knuth (1977), "A generalization of Dijkstra's algorithm", for the least bytes of a rule.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from typing import Any

from llmppl.constraints.automata.nfa import DEAD
from llmppl.constraints.lark.lexer import PartialTokens
from llmppl.constraints.lark.parser import Parser, Place, Rule, Stack, derived
from llmppl.constraints.lark.terminals import Automata
from llmppl.support.graphs import Memo, reachable


class Lengths:
    """Lower bounds of the bytes from stacks and partial tokens to the end of a text."""

    def __init__(self, parser: Parser, partials: PartialTokens) -> None:
        self._parser = parser
        self._partials = partials
        self._to_end = bytes_to_end(partials.automata)
        terminals = dict[Any, float]()
        for rule in parser.rules:
            for symbol in rule.expansion:
                if symbol.is_term:
                    terminals[symbol] = self._of_terminal(symbol.name)
        self._costs = derived(parser.rules, terminals)
        self._rests: Memo[Rule, list[float]] = Memo(self._find_rests)
        self._whole = min(self._rests[rule][0] for rule, _ in parser.begun[parser.bottom.state])
        self._exits = Memo(self._find_exits)
        self._ends: Memo[int, list[tuple[float, str]]] = Memo(self._find_ends)

    def _of_terminal(self, name: str) -> float:
        """Return the least bytes of a terminal; 0 of those that stand for the blocks of indented text."""
        start = self._partials.automata.starts.get(name)
        if start is None:
            return 0.0
        if start == DEAD:
            return math.inf
        return self._to_end[start]

    def _find_rests(self, rule: Rule) -> list[float]:
        """Return the least bytes of the symbols of a rule from each place on, and 0 for its end."""
        rests = [0.0]
        for symbol in reversed(rule.expansion):
            rests.append(rests[-1] + self._costs.get(symbol, math.inf))
        rests.reverse()
        return rests

    def of_stack(self, stack: Stack) -> float:
        """Return a lower bound of the bytes after the tokens that led to a stack."""
        if stack.below is None:
            return self._whole
        return self._of_place((stack.below, stack.state))

    def _of_place(self, place: Place) -> float:
        below, state = place
        if state not in below.lefts:
            self._find(place)
        return below.lefts[state]

    def _find(self, start: Place) -> None:
        """Find the bounds of a state on a stack, and of those that it depends on, which are lower."""
        todo = [start]
        while todo:
            below, state = todo[-1]
            left = math.inf
            missing = list[Place]()
            for size, name, cost in self._exits[below.state, state]:
                base = below.pop(size - 1)
                assert base is not None
                after = self._parser.shifts[base.state].get(name)
                if after is None:  # the whole text is complete
                    left = min(left, cost)
                elif after in base.lefts:
                    left = min(left, cost + base.lefts[after])
                else:
                    missing.append((base, after))
            todo += missing
            if not missing:
                todo.pop()
                below.lefts[state] = left

    def _find_exits(self, key: tuple[int, int]) -> list[tuple[int, str, float]]:
        """Return the rules that end below a state, or end the text, with the bytes of all that is complete before."""
        below, start = key
        order = itertools.count()
        todo = [(0.0, next(order), start)]
        seen = set[int]()
        found = dict[tuple[int, str], float]()
        while todo:
            cost, _, state = heapq.heappop(todo)
            if state in seen:
                continue
            seen.add(state)
            for rule, size in self._parser.begun[state]:
                name = rule.origin.name
                rest = self._rests[rule][size]
                after = None
                if size == 1:
                    after = self._parser.shifts[below].get(name)
                if after is not None:
                    heapq.heappush(todo, (cost + rest, next(order), after))
                else:
                    found[size, name] = min(cost + rest, found.get((size, name), math.inf))
        return [(size, name, cost) for (size, name), cost in found.items()]

    def of_token(self, stack: Stack, token: int) -> float:
        """Return a lower bound of the bytes after a partial token on a stack."""
        least = math.inf
        for bytes, name in self._ends[token]:
            if bytes >= least:
                break
            least = min(least, bytes + self._after(stack, name))
        return least

    def _after(self, stack: Stack, name: str) -> float:
        """Return a lower bound of the bytes after a terminal."""
        if name in self._partials.ignored:
            return self.of_stack(stack)
        if name != self._partials.newline:
            place = self._parser.shifted(stack, name)
            if place is None:
                return math.inf
            return self._of_place(place)
        columns = stack.layout.columns
        least = math.inf
        for column in (*columns, columns[-1] + 1):
            top = self._parser.feed(stack, (name, column))
            if top is not None:
                least = min(least, self.of_stack(top))
        return least

    def _find_ends(self, number: int) -> list[tuple[float, str]]:
        """Return the terminals that a partial token may become, with the least bytes to their ends, ascending."""
        token = self._partials.tokens[number]
        least = defaultdict[str, float](lambda: math.inf)
        for state in (*token.threads, *token.keyword_threads):
            name = self._partials.automata.names[state]
            least[name] = min(least[name], max(1.0, self._to_end[state]))
        return sorted((bytes, name) for name, bytes in least.items())


def bytes_to_end(automata: Automata) -> list[float]:
    """Return the least bytes from each state of terminals to an end, guards aside."""
    silent = defaultdict[int, list[int]](list)
    reading = defaultdict[int, list[int]](list)
    for state, targets in enumerate(automata.epsilon):
        for target in targets:
            silent[target].append(state)
        for _, _, target in automata.edges[state]:
            reading[target].append(state)
    found = [math.inf] * len(automata.epsilon)
    level = list(automata.ends)
    depth = 0.0
    while level:
        before = list[int]()
        for state in reachable(level, silent.__getitem__):
            if found[state] == math.inf:
                found[state] = depth
                before += reading[state]
        level = before
        depth += 1
    return found
