"""Lark's LALR(1) parser on stacks that all texts share.

A stack is a linked list whose nodes are unique: those of two texts that lead to equal stacks are one object, on which
is noted what has been found out about it. `Parser.lowest` is the least height of what was read of a stack since it was
last set: an answer holds for all stacks that are equal down to there.

Source: DeRemer & Pennello (1982) for LALR(1).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from lark.parsers.lalr_analysis import LALR_Analyzer, Shift
from lark.parsers.lalr_parser import LALR_Parser
from lark.parsers.lalr_parser import _Parser as _Loop

END = "$END"
K = TypeVar("K")
T = TypeVar("T")
Symbol = str | tuple[str, int]                      # a terminal; the one that ends a line has the next one's column


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


class KeepAnalysis(LALR_Parser):
    """Lark's parser that remembers whether a conflict was resolved, by shifting or by priority."""

    def __init__(self, parser_conf: Any, debug: bool = False, strict: bool = False):
        analysis = LALR_Analyzer(parser_conf, debug=debug, strict=strict)
        analysis.compute_lalr()  # type: ignore[no-untyped-call]
        self._parse_table = analysis.parse_table
        self.parser_conf = parser_conf
        self.parser = _Loop(analysis.parse_table, parser_conf.callbacks, debug)
        closures = dict.fromkeys(itemset.closure for itemset in analysis.lr0_itemsets)
        kernels = {itemset.closure: itemset.kernel for itemset in analysis.lr0_itemsets}
        self.kernels = [kernels[closure] for closure in closures]       # by number of the state
        self.conflicts = any(
            len(rules) > 1 or lookahead in itemset.transitions
            for itemset in analysis.lr0_itemsets
            for lookahead, rules in itemset.lookaheads.items()
        )


class Parser:
    """Lark's LALR(1) automaton on shared stacks; with an indenter, what lark's `Indenter` makes of the tokens."""

    def __init__(self, lalr: KeepAnalysis, start: str, indenter: Any):
        table: Any = lalr._parse_table
        self.shifts: dict[int, dict[str, int]] = {}
        self.reductions: dict[int, dict[str, tuple[int, str]]] = {}     # state -> terminal -> (length, rule's name)
        for state, actions in table.states.items():
            self.shifts[state] = {str(name): arg for name, (action, arg) in actions.items() if action is Shift}
            self.reductions[state] = {
                str(name): (len(arg.expansion), str(arg.origin.name))
                for name, (action, arg) in actions.items()
                if action is not Shift
            }
        self.end_state: int = table.end_states[start]
        self.indenter = indenter
        self._start = start
        self.bottom = Stack(table.start_states[start], None, Layout(0, (0,)) if indenter else None)
        self.lowest = 0
        self._renamings: dict[tuple[int, int, str], int] = {}
        columns: dict[str, list[tuple[int, int, str]]] = {name: [] for q in self.shifts for name in self.shifts[q]}
        for state, reductions in self.reductions.items():
            for name, (size, origin) in reductions.items():
                if name != END:
                    columns.setdefault(name, []).append((state, size, origin))
        first: dict[tuple[tuple[int, int, str], ...], str] = {}
        self._alike = {name: first.setdefault(tuple(column), name) for name, column in columns.items()}
        self.bits: dict[str | None, int] = {name: 2 << i for i, name in enumerate(columns)} | {None: 1}
        self._shift_bits = {q: sum(self.bits[name] for name in self.shifts[q]) for q in self.shifts}
        self._reduce_bits: dict[int, dict[tuple[int, str], int]] = {q: {} for q in self.shifts}
        for name, column in columns.items():
            for state, size, origin in column:
                bits = self._reduce_bits[state]
                bits[size, origin] = bits.get((size, origin), 0) | self.bits[name]
        self._lalr = lalr
        self._before: dict[int, set[int]] = {}          # state -> those from which it is reached
        for state, shifts in self.shifts.items():
            for target in shifts.values():
                self._before.setdefault(target, set()).add(state)

    def avoid(self, terminals: set[str]) -> None:
        """Count on no completion with these terminals; to be called before anything is asked about completions."""
        self._avoided, rules = terminals, self._lalr.parser_conf.rules
        self._items_of: dict[int, list[tuple[int, tuple[str, ...], str | None]]] = {}
        self._shortest = _shortest_yields(rules, terminals)
        finished = all(str(rule.origin.name) in self._shortest for rule in rules)
        plain = finished and not (terminals or self._lalr.conflicts)
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
        todo = [(stack.below, stack.state, among)]
        while todo:
            below, state, among = todo.pop()
            found |= self._shift_bits[state] & among
            for (size, name), bits in self._reduce_bits[state].items():
                if bits & among:
                    if size:
                        base = below and below.pop(size - 1)
                    else:
                        base = below.push(state, None) if below else stack
                    assert base is not None
                    if base.height < self.lowest:
                        self.lowest = base.height
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
        for shifts in self.shifts.values():
            for name, state in shifts.items():
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
                if base is not None and (base.below is None or origin is not None):
                    target = self.end_state if origin is None else self.shifts[base.state][origin]
                    after = *tokens, *rest
                    heapq.heappush(todo, (len(after), next(order), base.push(target, top.layout), after))

    def _always_completable(self) -> bool:
        """Whether every stack can be completed: True is a proof of that, False says nothing.

        The proof is a plan: for each state on top of a stack, the terminal to give the parser next, or the rule that it
        will reduce. The terminals that may follow a reduction are found from the plan itself (those planned for the
        states it may lead to), and the parser must reduce so before each of them. Followed from any state, the plan has
        to get to a reduction of what is below, and go round in no circles there.
        """
        behind = self._fewest_behind()
        plans = {q: self._plans(q, behind) for q in self.shifts}
        while all(plans.values()):
            plan = {q: each[0] for q, each in plans.items()}
            after = {q: self._after(q, *step) for q, step in plan.items() if not isinstance(step, str)}
            first = {q: {step} if isinstance(step, str) else set[str]() for q, step in plan.items()}
            first[self.end_state] = {END}
            changed = True
            while changed:
                changed = False
                for q, targets in after.items():
                    new = set[str]().union(*(first[target] for target in targets)) - first[q]
                    first[q] |= new
                    changed = changed or bool(new)
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

    def _reduces(self, state: int, step: str | tuple[int, str], looks: set[str]) -> bool:
        return all(self.reductions[state].get(look) == step for look in looks)

    def _looks(self, state: int, plan: dict[int, str | tuple[int, str]]) -> set[str]:
        """The terminals that a plan may give after the reductions at `state`, each state with the one below in view."""
        looks: set[str] = set()
        seen = {(state, below) for below in self._before[state]}
        todo = list(seen)
        while todo:
            q, below = todo.pop()
            step = plan[q]
            if q == self.end_state:
                looks.add(END)
            elif isinstance(step, str):
                looks.add(step)
            else:
                bases = {below}
                for _ in range(step[0] - 1):
                    bases = set[int]().union(*(self._before.get(base, ()) for base in bases))
                new = {(self.shifts[base][step[1]], base) for base in bases if step[1] in self.shifts[base]} - seen
                seen |= new
                todo += new
        return looks

    def _plans(self, state: int, behind: dict[str, float]) -> list[str | tuple[int, str]]:
        """What may be done next with a state on top: give a terminal, or reduce a rule (its length and name).

        First what asks for the fewest terminals until the end of the text, `behind` rules as they are.
        """
        found: dict[str | tuple[int, str], None] = {}
        items = [(index, rest, name or END) for index, rest, name in self._items(state)]
        for _, index, rest, name in sorted((len(rest) + behind[name], i, rest, name) for i, rest, name in items):
            if rest and rest[0] in self.shifts[state]:
                found[rest[0]] = None
            elif index and not rest:
                found[index, name] = None
        return list(found)

    def _fewest_behind(self) -> dict[str, float]:
        """The fewest terminals that a text has behind a rule."""
        fewest = {str(rule.origin.name): math.inf for rule in self._lalr.parser_conf.rules}
        fewest |= {END: 0, self._start: 0}
        changed = True
        while changed:
            changed = False
            for rule in self._lalr.parser_conf.rules:
                length = fewest[str(rule.origin.name)]
                for symbol in reversed(rule.expansion):
                    name = str(symbol.name)
                    if not symbol.is_term and length < fewest[name]:
                        fewest[name], changed = length, True
                    tokens = self._yield(symbol)
                    length += math.inf if tokens is None else len(tokens)
        return fewest

    def _after(self, state: int, size: int, name: str) -> set[int]:
        """The states that may be on top after a reduction with `state` on top."""
        bases = {state}
        for _ in range(size):
            bases = set[int]().union(*(self._before.get(q, ()) for q in bases))
        return {self.shifts[q][name] for q in bases if name in self.shifts[q]}

    def _exit(self, state: int, plan: dict[int, str | tuple[int, str]]) -> tuple[int, str]:
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

    def _items(self, state: int) -> list[tuple[int, tuple[str, ...], str | None]]:
        """Of a state's items: symbols on the stack, the fewest terminals that finish it, its rule (None: the text)."""
        if state in self._items_of:
            return self._items_of[state]
        items: list[tuple[int, tuple[str, ...], str | None]] = []
        for pointer in self._lalr.kernels[state]:
            rest = [self._yield(symbol) for symbol in pointer.rule.expansion[pointer.index :]]
            origin = str(pointer.rule.origin.name)
            if None not in rest:
                tokens = tuple(token for part in rest if part for token in part)
                items.append((pointer.index, tokens, None if origin.startswith("$root_") else origin))
        self._items_of[state] = items
        return items

    def _yield(self, symbol: Any) -> tuple[str, ...] | None:
        name = str(symbol.name)
        return self._shortest.get(name) if not symbol.is_term else None if name in self._avoided else (name,)

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
        while (reduction := self.reductions[stack.state].get(symbol)) is not None:
            size, name = reduction
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
            found = state
            while (reduction := self.reductions[found].get(symbol)) is not None and reduction[0] == 1:
                if symbol == END and found == self.end_state:
                    break
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


def _circular(edges: dict[int, set[int]]) -> bool:
    """Whether some way along the edges comes back to where it began."""
    left = dict(edges)
    while ends := [q for q, targets in left.items() if left.keys().isdisjoint(targets)]:
        for q in ends:
            del left[q]
    return bool(left)


def _shortest_yields(rules: Iterable[Any], avoided: set[str]) -> dict[str, tuple[str, ...]]:
    """The fewest terminals that every rule may consist of; rules that nothing finishes are left out."""
    shortest: dict[str, tuple[str, ...]] = {}
    changed = True
    while changed:
        changed = False
        for rule in rules:
            tokens: tuple[str, ...] = ()
            for symbol in rule.expansion:
                name = str(symbol.name)
                if name in avoided or not symbol.is_term and name not in shortest:
                    break
                tokens += (name,) if symbol.is_term else shortest[name]
            else:
                name = str(rule.origin.name)
                if name not in shortest or len(tokens) < len(shortest[name]):
                    shortest[name], changed = tokens, True
    return shortest
