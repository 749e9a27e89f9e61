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
        symbols = {symbol for rule in parser.rules for symbol in rule.expansion if symbol.is_term}
        costs = derived(parser.rules, {symbol: self._of_terminal(symbol.name) for symbol in symbols})
        self._rests: Memo[Rule, list[float]] = Memo(
            lambda rule: suffix_sums([costs.get(symbol, math.inf) for symbol in rule.expansion])
        )
        self._whole = min(self._rests[rule][0] for rule, _ in parser.begun[parser.bottom.state])
        self._exits = Memo(self._find_exits)
        self._ends: Memo[int, list[tuple[float, str]]] = Memo(self._find_ends)

    def _of_terminal(self, name: str) -> float:
        """Return the least bytes of a terminal; 0 of those that stand for the blocks of indented text."""
        start = self._partials.automata.starts.get(name)
        if start is None:
            return 0.0
        return math.inf if start == DEAD else self._to_end[start]

    def of_stack(self, stack: Stack) -> float:
        """Return a lower bound of the bytes after the tokens that led to a stack."""
        return self._whole if stack.below is None else self._of_place((stack.below, stack.state))

    def _of_place(self, place: Place) -> float:
        lefts = place[0].lefts
        if place[1] not in lefts:
            self._find(place)
        return lefts[place[1]]

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
                after = self._parser.shifts[below].get(name) if size == 1 else None
                if after is not None:
                    heapq.heappush(todo, (cost + rest, next(order), after))
                else:
                    found[size, name] = min(cost + rest, found.get((size, name), math.inf))
        return [(*rule, cost) for rule, cost in found.items()]

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
            return math.inf if place is None else self._of_place(place)
        columns = stack.layout.columns
        tops = [self._parser.feed(stack, (name, column)) for column in (*columns, columns[-1] + 1)]
        return min((self.of_stack(top) for top in tops if top is not None), default=math.inf)

    def _find_ends(self, number: int) -> list[tuple[float, str]]:
        """Return the terminals that a partial token may become, with the least bytes to their ends, ascending."""
        token = self._partials.tokens[number]
        least = defaultdict[str, float](lambda: math.inf)
        for state in (*token.threads, *token.keyword_threads):
            name = self._partials.automata.names[state]
            least[name] = min(least[name], max(1.0, self._to_end[state]))
        return sorted((bytes, name) for name, bytes in least.items())


def suffix_sums(numbers: list[float]) -> list[float]:
    """Return the sum of the numbers from each place on, and 0 for the end."""
    return [*itertools.accumulate(reversed(numbers), initial=0.0)][::-1]


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
        new = [state for state in reachable(level, silent.__getitem__) if found[state] == math.inf]
        for state in new:
            found[state] = depth
        level = [before for state in new for before in reading[state]]
        depth += 1
    return found
