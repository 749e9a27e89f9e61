"""Which parser stacks some tokens complete, as far as that is easily seen.

There are two ways to see it. A *plan* names for each state on top of a stack the terminal to give next, or the rule to
reduce; where one gets every stack to its end, all stacks can be completed. Without a plan, the few shortest completions
that the items on a stack ask for are tried.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from llmppl.grammar.lalr import Parser, Stack
from llmppl.grammar.lalr_tables import END, first_head, shortest_yields, union, united
from llmppl.growing import Memo, reached, turned

MAX_TOKENS = 10_000                                 # of a completion that is tried
MAX_TRIED = 8                                       # completions of one stack
MAX_STEPS = 1000                                    # of a plan until it reduces what is below


class Item(NamedTuple):
    """A rule that is under way: its symbols that are on the stack, those to come, and its name."""

    size: int
    rest: tuple[str, ...]
    rule: str


class Step(NamedTuple):
    """What a plan does: give a terminal (size 0), or reduce a rule of some size."""

    size: int
    symbol: str


Plan = list[Step]                                   # by state


class TokenCompletions:
    """The completions of a parser's stacks by tokens, without the terminals that are to be `avoided`.

    `always` says that every stack has one: False says nothing.
    """

    def __init__(self, parser: Parser, avoided: Set[str]) -> None:
        self.parser, self.tables, self.shifts = parser, parser.tables, parser.shifts
        self._shortest = shortest_yields(self.tables, avoided) if avoided else self.tables.shortest
        self._items = Memo(self._find_items)
        self._root = self.tables.rules[-1].origin
        self._before = turned(enumerate(map(dict[str, int].values, self.shifts)))   # state -> those it is reached from
        plain = self._shortest.keys() >= self.tables.rule_names and not (avoided or self.tables.conflicts)
        self.always = not parser.indenter and (plain or self._has_plan())

    def exist(self, stack: Stack) -> bool:
        """Whether some tokens complete what led to `stack`, if that is easily seen: False says nothing."""
        if self.always:
            return True
        self.parser.lowest = 0
        if stack.finishable is None:
            tried = itertools.islice(self._asked_for(stack), MAX_TRIED)
            stack.finishable = any(self._completes(stack, tokens) for tokens in tried)
        return stack.finishable

    def _find_items(self, state: int) -> list[Item]:
        """The items of a state, without those that nothing finishes."""
        items = [Item(place, rule.expansion[place:], rule.origin) for rule, place in self.tables.kernels[state]]
        return [item for item in items if self._shortest.keys() >= set(item.rest)]

    def _length(self, symbols: Iterable[str]) -> int:
        """How many terminals symbols consist of, at least."""
        return sum(self._shortest[symbol].length for symbol in symbols)

    # ---- of one stack

    def _asked_for(self, stack: Stack) -> Iterator[tuple[str, ...]]:
        """Terminals that finish the rules on the stack, shortest first, if no conflict was resolved against them."""
        order = itertools.count()
        todo: list[tuple[int, int, Stack, tuple[str, ...]]] = [(0, next(order), stack, ())]
        seen: set[Stack] = set()
        while todo:
            _, _, top, tokens = heapq.heappop(todo)
            if top.state == self.tables.end_state:
                yield tokens
            elif top not in seen:
                seen.add(top)
                for item in self._items[top.state]:
                    reduced = self._reduced(top, item)
                    if reduced and len(tokens) + self._length(item.rest) <= MAX_TOKENS:
                        after = *tokens, *self._spelled(item.rest)
                        heapq.heappush(todo, (len(after), next(order), reduced, after))

    def _reduced(self, stack: Stack, item: Item) -> Stack | None:
        """The stack when the rule of an item on its top is finished."""
        base = stack.pop(item.size)
        if base is None or (item.rule == self._root and base.below is not None):
            return None
        return base.push(self.shifts[base.state].get(item.rule, self.tables.end_state), stack.layout)

    def _spelled(self, symbols: Iterable[str]) -> list[str]:
        """The fewest terminals that symbols may consist of."""
        found: list[str] = []
        todo = list(symbols)[::-1]
        while todo:
            symbol = todo.pop()
            if symbol in self.tables.bits:
                found.append(symbol)
            todo += self._shortest[symbol].expansion[::-1]
        return found

    def _completes(self, stack: Stack, tokens: tuple[str, ...]) -> bool:
        top: Stack | None = stack
        for at in range(len(tokens)):
            top = top and self.parser.feed_one(top, tokens, at)
        return top is not None and self.parser.complete(top)

    # ---- of all stacks

    def _has_plan(self) -> bool:
        """Whether a plan completes every stack: True is a proof of that, False says nothing.

        The terminals that may follow a reduction are found from the plan itself (those planned for the states it may
        lead to), and the parser must reduce so before each of them. Followed from any state, the plan has to get to a
        reduction of what is below, and go round in no circles there.
        """
        behind = self._fewest_behind()
        steps = [self._steps(q, behind) for q in range(len(self.shifts))]
        while all(steps):
            plan = [each[0] for each in steps]
            if not (wrong := self._wrong(plan)):
                return self._ends(plan)
            for q in wrong:
                del steps[q][0]
        return False

    def _wrong(self, plan: Plan) -> list[int]:
        """The states in which the parser may not reduce as planned."""
        given = [self.tables.bits.get(symbol, 0) for _, symbol in plan]
        given[self.tables.end_state] = self.tables.bits[END]
        first = united(given, [self._after(q, *step) if step.size else () for q, step in enumerate(plan)])
        reducing = [q for q, step in enumerate(plan) if step.size and q != self.tables.end_state]
        wrong = [q for q in reducing if not self._reduces(q, plan[q], first[q])]
        return [q for q in wrong if not self._reduces(q, plan[q], self._given_after(q, plan, given))]

    def _reduces(self, state: int, step: Step, terminals: int) -> bool:
        return not terminals & ~union(bits for bits, action in self.tables.reductions[state] if action == step)

    def _given_after(self, state: int, plan: Plan, given: list[int]) -> int:
        """The terminals that a plan may give after the reductions at `state`, each state with the one below in view."""

        def onward(pair: tuple[int, int]) -> set[tuple[int, int]]:
            q, below = pair
            size, name = plan[q]
            if not size or q == self.tables.end_state:
                return set()
            return {(self.shifts[base][name], base) for base in self._bases(below, size - 1, name)}

        return union(given[q] for q, _ in reached([(state, below) for below in self._before[state]], onward))

    def _steps(self, state: int, behind: dict[str, float]) -> list[Step]:
        """What may be done next with a state on top.

        First what asks for the fewest terminals until the end of the text, `behind` rules as they are.
        """
        found: dict[Step, None] = {}
        for item in sorted(self._items[state], key=lambda item: (self._length(item.rest) + behind[item.rule], *item)):
            head = first_head(self._shortest, item.rest)
            if head in self.shifts[state]:
                found[Step(0, str(head))] = None
            elif item.size and head is None:
                found[Step(item.size, item.rule)] = None
        return list(found)

    def _fewest_behind(self) -> dict[str, float]:
        """The fewest terminals that a text has behind a rule (Dijkstra 1959)."""
        edges: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for rule in self.tables.rules:
            length: float = 0
            for symbol in reversed(rule.expansion):
                if symbol in self.tables.rule_names:
                    edges[rule.origin].append((symbol, length))
                length += self._shortest[symbol].length if symbol in self._shortest else math.inf
        fewest: dict[str, float] = dict.fromkeys(self.tables.rule_names, math.inf)
        todo: list[tuple[float, str]] = [(0, self._root)]
        while todo:
            length, name = heapq.heappop(todo)
            if length < fewest[name]:
                fewest[name] = length
                for symbol, more in edges[name]:
                    heapq.heappush(todo, (length + more, symbol))
        return fewest

    def _bases(self, state: int, depth: int, name: str) -> list[int]:
        """The states that may be some places below one, on which a rule is pushed."""
        states = {state}
        for _ in range(depth):
            states = set(itertools.chain.from_iterable(map(self._before.__getitem__, states)))
        return [q for q in states if name in self.shifts[q]]

    def _after(self, state: int, size: int, name: str) -> set[int]:
        """The states that may be on top after a reduction with `state` on top."""
        return {self.shifts[q][name] for q in self._bases(state, size, name)}

    def _ends(self, plan: Plan) -> bool:
        """Whether a plan, followed from any state, removes that state from the stack sooner or later."""
        exits = [self._exit(q, plan) for q in range(len(plan))]
        same = {q: self._after(q, 1, name) for q, (depth, name) in enumerate(exits) if depth == 1}
        try:
            graphlib.TopologicalSorter(same).prepare()
        except graphlib.CycleError:
            return False
        return all(depth for depth, _ in exits)

    def _exit(self, state: int, plan: Plan) -> Step:
        """How many states from `state` down the plan's first reduction of them removes, and its rule; 0 if too late."""
        states = [state]
        for _ in range(MAX_STEPS):
            size, symbol = plan[states[-1]]
            if size >= len(states) or symbol == self._root:
                return Step(max(size - len(states) + 1, 1), symbol)
            del states[len(states) - size :]
            states.append(self.shifts[states[-1]][symbol])
        return Step(0, self._root)
