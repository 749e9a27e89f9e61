"""Lark's LALR(1) parser on stacks that all texts share.

A stack is a linked list whose nodes are unique: those of two texts that lead to equal stacks are one object, on which
is noted what has been found out about it. `Parser.lowest` is the least height of what was read of a stack since it was
last set: an answer holds for all stacks that are equal down to there.

Source: DeRemer & Pennello (1982) for LALR(1).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from llmppl.grammar.lalr_tables import END, Rule, Tables, bits_of

MAX_PROMISED = 10_000                               # tokens of a completion that is tried
K = TypeVar("K")
T = TypeVar("T")
Symbol = str | tuple[str, int]                      # a terminal; the one that ends a line has the next one's column
Step = str | tuple[int, str]                        # a terminal to give, or a rule to reduce: its length and name
Item = tuple[int, tuple[str, ...], str | None]      # symbols on the stack, symbols to come, the rule (None: the text)
Yield = tuple[int, str | None, Rule]                # how many terminals, the first of them, the alternative they are of


class Stack:
    """A parser stack, shared by all texts that lead to it: a state, what lies below, and the layout (if indented)."""

    __slots__ = ("state", "below", "layout", "height", "pushed", "fed", "complete", "completable", "finishable")

    def __init__(self, state: int, below: Stack | None, layout: Layout | None):
        self.state, self.below, self.layout = state, below, layout
        self.height: int = below.height + 1 if below else 1
        self.pushed: dict[tuple[int, Layout | None], Stack] = {}
        self.fed: dict[Symbol, tuple[Stack | None, int]] = {}   # by the symbol; with the least height that was read
        self.complete: bool | None = None               # whether the text may end here
        self.completable: bool | None = None            # whether tokens are known that complete it
        self.finishable: dict[int, tuple[bool, int]] = {}       # scan -> whether some text completes the hypothesis

    def push(self, state: int, layout: Layout | None) -> Stack:
        stack = self.pushed.get((state, layout))
        if stack is None:
            stack = self.pushed[state, layout] = Stack(state, self, layout)
        return stack

    def pop(self, size: int) -> Stack | None:
        stack: Stack | None = self
        while size and stack is not None:
            stack, size = stack.below, size - 1
        return stack


class Layout(NamedTuple):
    """Of indented text: how many brackets are open, and the columns of the blocks that are."""

    brackets: int
    columns: tuple[int, ...]


class Parser:
    """Lark's LALR(1) automaton on shared stacks; with an indenter, what lark's `Indenter` makes of the tokens."""

    def __init__(self, tables: Tables, start: str, indenter: Any):
        self.tables, self.shifts, self.end_state = tables, tables.shifts, tables.end_state
        self.indenter = indenter
        self._start = start
        self.bottom = Stack(0, None, Layout(0, (0,)) if indenter else None)
        self.lowest = 0
        self._renamings: dict[tuple[int, int, str], int] = {}
        self.bits: dict[str | None, int] = {None: 1}
        self.bits.update(tables.bits)
        self._alike = self._find_alike()
        self._shift_bits = [sum(self.bits.get(name, 0) for name in shifts) for shifts in self.shifts]
        self._before: dict[int, set[int]] = {}          # state -> those from which it is reached
        for state, shifts in enumerate(self.shifts):
            for target in shifts.values():
                self._before.setdefault(target, set()).add(state)

    def _find_alike(self) -> dict[str, str]:
        """For every terminal, the first of those before which the same is reduced in every state."""
        groups = [sum(self.tables.bits.values())]
        for bits in {bits for row in self.tables.reductions for bits, _ in row}:
            groups = [part for group in groups for part in (group & bits, group & ~bits) if part]
        names = {bit: name for name, bit in self.tables.bits.items()}
        return {names[bit]: names[group & -group] for group in groups for bit in bits_of(group)}

    def reduction(self, state: int, symbol: str) -> tuple[int, str] | None:
        """The length and the name of the rule that is reduced in a state before a terminal, if one is."""
        bit = self.bits.get(symbol, 0)
        for bits, action in self.tables.reductions[state]:
            if bits & bit:
                return action
        return None

    def terminals(self) -> dict[int, int]:
        """The bits of the terminals that a state has an action for: of the first, and those behind a terminal."""
        states = {0} | {q for shifts in self.shifts for name, q in shifts.items() if name in self.bits}
        return {
            q: functools.reduce(int.__or__, [bits for bits, _ in self.tables.reductions[q]], self._shift_bits[q])
            for q in sorted(states)
        }

    def avoid(self, terminals: set[str]) -> None:
        """Count on no completion with these terminals; to be called before anything is asked about completions."""
        self._avoided = terminals
        self._items_of: dict[int, list[Item]] = {}
        self._shortest = _shortest_yields(self.tables, terminals)
        finished = all(rule.origin in self._shortest for rule in self.tables.rules)
        plain = finished and not (terminals or self.tables.conflicts)
        self.sure = not self.indenter and (plain or self._always_completable())

    def recall(self, memo: dict[K, tuple[T, int]], key: K, stack: Stack, find: Callable[[Stack, K], T]) -> T:
        """`find(stack, key)`, kept in a memo with the least height that it reads."""
        known = memo.get(key)
        if known is None:
            before, self.lowest = self.lowest, stack.height
            known = memo[key] = find(stack, key), self.lowest
            self.lowest = before
        found, lowest = known
        if lowest < self.lowest:
            self.lowest = lowest
        return found

    def recall_by_tops(self, tops: dict[int, Any], stack: Stack, find: Callable[[Stack], T]) -> T:
        """`find(stack)` (no dict), kept for all stacks whose topmost states are equal down to the lowest that it reads.

        Not for indented text, where a stack is not told by its states alone.
        """
        known: Any = tops
        top: Any = stack
        while type(known) is dict:
            known = known.get(top.state)
            top = top.below
        if known is None:
            before, self.lowest = self.lowest, stack.height
            known = find(stack)
            top = stack
            for _ in range(stack.height - max(self.lowest, 1)):
                tops, top = tops.setdefault(top.state, {}), top.below
            tops[top.state] = known
            self.lowest = min(self.lowest, before)
        elif (lowest := top.height + 1 if top else 0) < self.lowest:
            self.lowest = lowest
        return known  # type: ignore[no-any-return]

    def feed(self, stack: Stack, symbol: Symbol) -> Stack | None:
        """The stack after a token, or None if the parser refuses it."""
        if self.indenter:
            return self.recall(stack.fed, symbol, stack, self._indented)
        top = self._reduced(stack, symbol)
        state = self.shifts[top.state].get(symbol)  # type: ignore[arg-type]
        return None if state is None else top.push(state, None)

    def state_after(self, stack: Stack, symbol: Symbol) -> int | None:
        """The state on top of `feed(stack, symbol)`; not for indented text."""
        return self.shifts[self._reduced(stack, symbol).state].get(symbol)  # type: ignore[arg-type]

    def admitted(self, stack: Stack, among: int) -> int:
        """Those `among` the `bits` whose terminals may be fed to a stack, and that of None; not for indented text."""
        found = among & 1
        most = stack.height + len(self.shifts)
        todo = [(stack.below, stack.state, among)]
        while todo:
            below, state, among = todo.pop()
            found |= self._shift_bits[state] & among
            for bits, (size, name) in self.tables.reductions[state]:
                if bits & among:
                    if size:
                        base = below and below.pop(size - 1)
                    else:
                        base = below.push(state, None) if below else stack
                    assert base is not None
                    if base.height < self.lowest:
                        self.lowest = base.height
                    if base.height > most:
                        raise _endless(name, "a token")
                    todo.append((base, self.shifts[base.state][name], bits & among))
        return found

    def _reduced(self, stack: Stack, symbol: Symbol) -> Stack:
        alike = self._alike[symbol]  # type: ignore[index]
        known = stack.fed.get(alike)
        if known is None:
            self.recall(stack.fed, alike, stack, self._reduce)
            known = stack.fed[alike]
        top, lowest = known
        if lowest < self.lowest:
            self.lowest = lowest
        return top  # type: ignore[return-value]

    def complete(self, stack: Stack) -> bool:
        """Whether the text may end after the tokens that led to `stack`."""
        self.lowest = 0
        if stack.complete is None:
            top: Stack | None = stack
            for _ in range(len(stack.layout.columns) - 1 if stack.layout else 0):
                top = top and self._shift(top, self.indenter.DEDENT_type)
            stack.complete = top is not None and self._reduce(top, END) is None
        return stack.complete

    def lexers_after(self, lexer_of: dict[int, int]) -> dict[str, set[int]]:
        """Which lexers may be asked after a terminal: those of all states that it leads to."""
        found: dict[str, set[int]] = {}
        for shifts in self.shifts:
            for name, state in shifts.items():
                if name in self.bits:
                    found.setdefault(name, set()).add(lexer_of[state])
        return found

    def completable(self, stack: Stack) -> bool:
        """Whether some tokens complete what led to `stack`, if that is easily seen: False says nothing.

        It is so after every shift where no conflict was resolved and every rule can be finished, or where
        `_always_completable` finds a proof. Else the few shortest completions that the items on the stack promise are
        tried.
        """
        if self.sure:
            return True
        self.lowest = 0
        if stack.completable is None:
            stack.completable = any(
                self._completes(stack, tokens) for tokens in itertools.islice(self._promised(stack), 8)
            )
        return stack.completable

    def _promised(self, stack: Stack) -> Iterator[tuple[str, ...]]:
        """Terminals that finish the rules on the stack, shortest first, if no conflict was resolved against them."""
        order = itertools.count()
        todo: list[tuple[int, int, Stack, tuple[str, ...]]] = [(0, next(order), stack, ())]
        seen: set[Stack] = set()
        while todo:
            _, _, top, tokens = heapq.heappop(todo)
            if top.state == self.end_state:
                yield tokens
                continue
            if top in seen:
                continue
            seen.add(top)
            for index, rest, origin in self._items(top.state):
                base = top.pop(index)
                size = len(tokens) + self._length(rest)
                if base is not None and (base.below is None or origin is not None) and size <= MAX_PROMISED:
                    target = self.end_state if origin is None else self.shifts[base.state][origin]
                    after = *tokens, *self._spelled(rest)
                    heapq.heappush(todo, (len(after), next(order), base.push(target, top.layout), after))

    def _always_completable(self) -> bool:
        """Whether every stack can be completed: True is a proof of that, False says nothing.

        The proof is a plan: for each state on top of a stack, the terminal to give the parser next, or the rule that it
        will reduce. The terminals that may follow a reduction are found from the plan itself (those planned for the
        states it may lead to), and the parser must reduce so before each of them. Followed from any state, the plan has
        to get to a reduction of what is below, and go round in no circles there.
        """
        behind = self._fewest_behind()
        plans = {q: self._plans(q, behind) for q in range(len(self.shifts))}
        while all(plans.values()):
            plan = {q: each[0] for q, each in plans.items()}
            after = {q: self._after(q, *step) for q, step in plan.items() if not isinstance(step, str)}
            first = {q: self.bits[step] if isinstance(step, str) else 0 for q, step in plan.items()}
            first[self.end_state] = self.bits[END]
            changed = True
            while changed:
                changed = False
                for q, targets in after.items():
                    new = functools.reduce(int.__or__, [first[target] for target in targets], first[q])
                    changed = changed or new != first[q]
                    first[q] = new
            del after[self.end_state]
            wrong = [q for q in after if not self._reduces(q, plan[q], first[q])]
            wrong = [q for q in wrong if not self._reduces(q, plan[q], self._looks(q, plan))]
            if not wrong:
                exits = {q: self._exit(q, plan) for q in plan}
                same = {q: self._after(q, 1, name) for q, (depth, name) in exits.items() if depth == 1}
                return all(depth for depth, _ in exits.values()) and not _circular(same)
            for q in wrong:
                del plans[q][0]
        return False

    def _reduces(self, state: int, step: Step, looks: int) -> bool:
        return not looks & ~functools.reduce(
            int.__or__, [bits for bits, action in self.tables.reductions[state] if action == step], 0
        )

    def _looks(self, state: int, plan: dict[int, Step]) -> int:
        """The terminals that a plan may give after the reductions at `state`, each state with the one below in view."""
        looks = 0
        seen = {(state, below) for below in self._before[state]}
        todo = list(seen)
        while todo:
            q, below = todo.pop()
            step = plan[q]
            if q == self.end_state:
                looks |= self.bits[END]
            elif isinstance(step, str):
                looks |= self.bits[step]
            else:
                bases = {below}
                for _ in range(step[0] - 1):
                    bases = set[int]().union(*(self._before.get(base, ()) for base in bases))
                new = {(self.shifts[base][step[1]], base) for base in bases if step[1] in self.shifts[base]} - seen
                seen |= new
                todo += new
        return looks

    def _plans(self, state: int, behind: dict[str, float]) -> list[Step]:
        """What may be done next with a state on top: give a terminal, or reduce a rule (its length and name).

        First what asks for the fewest terminals until the end of the text, `behind` rules as they are.
        """
        found: dict[Step, None] = {}
        fewest = self._shortest
        items = [(index, rest, name or END) for index, rest, name in self._items(state)]
        order = [(self._length(rest) + behind[name], index, rest, name) for index, rest, name in items]
        for _, index, rest, name in sorted(order):
            head = next((first for s in rest if (first := fewest[s][1] if s in fewest else s)), None)
            if head is not None and head in self.shifts[state]:
                found[head] = None
            elif index and head is None:
                found[index, name] = None
        return list(found)

    def _fewest_behind(self) -> dict[str, float]:
        """The fewest terminals that a text has behind a rule (Dijkstra 1959)."""
        edges: dict[str, list[tuple[str, float]]] = {}
        for rule in self.tables.rules[:-1]:
            length: float = 0
            for symbol in reversed(rule.expansion):
                if symbol not in self.bits:
                    edges.setdefault(rule.origin, []).append((symbol, length))
                known = self._shortest.get(symbol)
                length += known[0] if known else 1 if symbol in self.bits and symbol not in self._avoided else math.inf
        fewest: dict[str, float] = {rule.origin: math.inf for rule in self.tables.rules} | {END: 0}
        todo: list[tuple[float, str]] = [(0, self._start)]
        while todo:
            length, name = heapq.heappop(todo)
            if length < fewest[name]:
                fewest[name] = length
                for symbol, more in edges.get(name, ()):
                    if length + more < fewest[symbol]:
                        heapq.heappush(todo, (length + more, symbol))
        return fewest

    def _after(self, state: int, size: int, name: str) -> set[int]:
        """The states that may be on top after a reduction with `state` on top."""
        bases = {state}
        for _ in range(size):
            bases = set[int]().union(*(self._before.get(q, ()) for q in bases))
        return {self.shifts[q][name] for q in bases if name in self.shifts[q]}

    def _exit(self, state: int, plan: dict[int, Step]) -> tuple[int, str]:
        """How many states from `state` down the plan's first reduction of them removes, and its rule; 0 if too late."""
        states = [state]
        for _ in range(1000):
            step = plan[states[-1]]
            if isinstance(step, str):
                states.append(self.shifts[states[-1]][step])
            elif step[0] >= len(states) or step[1] == END:
                return max(step[0] - len(states) + 1, 1), step[1]
            else:
                del states[len(states) - step[0] :]
                states.append(self.shifts[states[-1]][step[1]])
        return 0, END

    def _items(self, state: int) -> list[Item]:
        """Of a state's items: how many symbols are on the stack, those that are to come, its rule (None: the text).

        Without those that nothing finishes.
        """
        if state not in self._items_of:
            self._items_of[state] = [
                (place, rule.expansion[place:], None if rule is self.tables.rules[-1] else rule.origin)
                for rule, place in self.tables.kernels[state]
                if all(
                    symbol in self._shortest or symbol in self.bits and symbol not in self._avoided
                    for symbol in rule.expansion[place:]
                )
            ]
        return self._items_of[state]

    def _length(self, symbols: Iterable[str]) -> int:
        """How many terminals symbols consist of, at least."""
        return sum(self._shortest[symbol][0] if symbol in self._shortest else 1 for symbol in symbols)

    def _spelled(self, symbols: Iterable[str]) -> list[str]:
        """The fewest terminals that symbols may consist of."""
        found: list[str] = []
        todo = list(symbols)[::-1]
        while todo:
            symbol = todo.pop()
            if symbol in self.bits:
                found.append(symbol)
            else:
                todo += self._shortest[symbol][2].expansion[::-1]
        return found

    def _completes(self, stack: Stack, tokens: tuple[str, ...]) -> bool:
        top: Stack | None = stack
        indenter = self.indenter
        for i, token in enumerate(tokens):
            if top is None:
                return False
            symbol: Symbol = token
            if indenter and token == indenter.NL_type:
                assert top.layout is not None
                columns = top.layout.columns
                if tokens[i + 1 : i + 2] == (indenter.INDENT_type,):
                    symbol = token, columns[-1] + 1
                else:
                    closed = next((n for n, t in enumerate(tokens[i + 1 :]) if t != indenter.DEDENT_type), 0)
                    if closed >= len(columns):
                        return False
                    symbol = token, columns[len(columns) - 1 - closed]
            elif indenter and token in (indenter.INDENT_type, indenter.DEDENT_type):
                continue
            top = self.feed(top, symbol)
        return top is not None and self.complete(top)

    def _reduce(self, stack: Stack, symbol: Any) -> Stack | None:
        """The stack after all reductions before `symbol`; None if that completes the text ($END)."""
        most = stack.height + len(self.shifts)          # then some state has come back, and nothing was read
        while (reduction := self.reduction(stack.state, symbol)) is not None:
            size, name = reduction
            if stack.height > most:
                raise _endless(name, symbol)
            base = stack.pop(size)
            assert base is not None
            if base.height < self.lowest:
                self.lowest = base.height
            state = self._renamed(base.state, self.shifts[base.state][name], symbol)
            if symbol == END and state == self.end_state:
                return None
            stack = base.push(state, stack.layout)
        return stack

    def _renamed(self, base: int, state: int, symbol: str) -> int:
        """What becomes of a state on top of `base` by the rules of one symbol that are reduced before `symbol`."""
        key = base, state, symbol
        found = self._renamings.get(key)
        if found is None:
            found, seen = state, set[int]()
            while (reduction := self.reduction(found, symbol)) is not None and reduction[0] == 1:
                if symbol == END and found == self.end_state:
                    break
                if found in seen:
                    raise _endless(reduction[1], symbol)
                seen.add(found)
                found = self.shifts[base][reduction[1]]
            self._renamings[key] = found
        return found

    def _shift(self, stack: Stack, symbol: Any) -> Stack | None:
        top = self._reduce(stack, symbol)
        assert top is not None
        state = self.shifts[top.state].get(symbol)
        return None if state is None else top.push(state, top.layout)

    def _indented(self, stack: Stack, symbol: Symbol) -> Stack | None:
        assert stack.layout is not None
        (brackets, columns), indenter = stack.layout, self.indenter
        if not isinstance(symbol, tuple):
            top = self._shift(stack, symbol)
            if top is None or symbol not in (*indenter.OPEN_PAREN_types, *indenter.CLOSE_PAREN_types):
                return top
            brackets += (symbol in indenter.OPEN_PAREN_types) or -1
            return top.below and top.below.push(top.state, Layout(brackets, columns)) if brackets >= 0 else None
        name, column = symbol
        if brackets:
            return stack
        if column < 0:                                  # a line end without '\n', on which lark fails
            return None
        top = self._shift(stack, name)
        if column > columns[-1]:
            top = top and self._shift(top, indenter.INDENT_type)
            columns += (column,)
        else:
            while column < columns[-1]:
                top = top and self._shift(top, indenter.DEDENT_type)
                columns = columns[:-1]
            if column != columns[-1]:
                return None
        return top and top.below and top.below.push(top.state, Layout(0, columns))


def _endless(name: str, symbol: str) -> ValueError:
    return ValueError(
        f"grammar: lark's parser never ends before {symbol}, where rule {name} is found without reading anything, "
        "again and again; a rule that may be empty stands before itself, and a priority prefers it"
    )


def _circular(edges: dict[int, set[int]]) -> bool:
    """Whether some way along the edges comes back to where it began."""
    left = dict(edges)
    while ends := [q for q, targets in left.items() if left.keys().isdisjoint(targets)]:
        for q in ends:
            del left[q]
    return bool(left)


def _shortest_yields(tables: Tables, avoided: set[str]) -> dict[str, Yield]:
    """The fewest terminals that every rule may consist of; rules that nothing finishes are left out.

    Knuth (1977), "A generalization of Dijkstra's algorithm".
    """
    users: dict[str, list[int]] = {}
    missing, lengths = [], []                           # of every alternative: rules not known yet, terminals so far
    for r, rule in enumerate(tables.rules):
        inner = [symbol for symbol in rule.expansion if symbol not in tables.bits]
        for symbol in inner:
            users.setdefault(symbol, []).append(r)
        missing.append(len(inner) if avoided.isdisjoint(rule.expansion) else -1)
        lengths.append(len(rule.expansion) - len(inner))
    todo = [(lengths[r], r) for r, number in enumerate(missing) if not number]
    heapq.heapify(todo)
    shortest: dict[str, Yield] = {}
    while todo:
        length, r = heapq.heappop(todo)
        rule = tables.rules[r]
        if rule.origin in shortest:
            continue
        heads = (shortest[s][1] if s in shortest else s for s in rule.expansion)
        shortest[rule.origin] = length, next((head for head in heads if head), None), rule
        for user in users.get(rule.origin, ()):
            missing[user] -= 1
            lengths[user] += length
            if not missing[user]:
                heapq.heappush(todo, (lengths[user], user))
    return shortest
