"""LALR(1) tables as lark makes them, for grammars of any size.

The tables equal lark's, state for state and action for action: a shift is preferred to a reduction, then the rule of
higher priority, and equal priorities are a collision. Only the cost differs: nothing here is recursive, and sets of
terminals are the bits of integers, which states share.

Words: an *item* is a rule with a place in it, as a number; a *transition* is a state and a rule that may begin there.

Source: DeRemer & Pennello (1982), "Efficient Computation of LALR(1) Look-Ahead Sets", as in lark 1.3.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from lark.exceptions import GrammarError

from llmppl.constraints.automata.budget import MAX_ITEMS, TooLarge
from llmppl.support.graphs import Numbering, reachable, reversed_edges

END = "$END"
IGNORED = 1                                         # the bit of ignored text, which the parser never sees
S = TypeVar("S", int, frozenset[Any])               # a set of bits, or of anything


class Rule(NamedTuple):
    """One alternative of a rule: its name, its symbols, and the rule's priority."""

    origin: str
    expansion: tuple[str, ...]
    priority: int = 0

    def __str__(self) -> str:
        return f"<{self.origin} : {' '.join(self.expansion)}>"


class Tables:
    """The tables of a grammar, states numbered from 0, where a text begins.

    Parameters
    ----------
    rules : the alternatives
    start : the name of the rule that a whole text must match
    whole : for each rule that is a part of another one, the name of that rule (a rule is a part of itself)

    Attributes
    ----------
    bits, terminal_of : the bit of every terminal, END included, from 2 on; and the terminal of each bit
    shifts : by state, the state after a symbol
    reductions : by state, pairs of terminals' bits and the (length, rule's name) that is reduced before these
    kernels : by state, (rule, place) of its items that do not begin a rule
    end_state : the state after a text
    conflicts : True if a shift or a priority decided between actions
    rule_names : names of all rules, with the one of the whole text
    shortest : by symbol, its shortest yield

    Raises GrammarError where two rules may be reduced before the same terminal, TooLarge at more than MAX_ITEMS items.
    """

    def __init__(self, rules: Sequence[Rule], start: str, whole: Mapping[str, str] = {}) -> None:
        self.rules = [*rules, Rule(f"$root_{start}", (start,))]
        self._whole = whole
        self._base: list[int] = []                      # the item at the beginning of each alternative
        self._begun: dict[str | None, list[int]] = defaultdict(list)    # these items by the rule's name
        self._next: list[str | None] = []               # the symbol after an item's place
        self._rule_of: list[int] = []
        for r, rule in enumerate(self.rules):
            self._base.append(len(self._next))
            self._begun[rule.origin].append(len(self._next))
            self._next += [*rule.expansion, None]
            self._rule_of += [r] * (len(rule.expansion) + 1)
        self.rule_names = dict.fromkeys(rule.origin for rule in self.rules).keys()
        symbols = dict.fromkeys(itertools.chain.from_iterable(rule.expansion for rule in self.rules))
        names = [symbol for symbol in symbols if symbol not in self.rule_names]
        self.bits = {name: 2 << i for i, name in enumerate([*names, END])}
        self.terminal_of = {bit: name for name, bit in self.bits.items()}
        self._first = {name: list(map(self._next.__getitem__, items)) for name, items in self._begun.items()}
        self.shifts: list[dict[str, int]] = []
        self._items: list[list[int]] = []               # by state, the kernel and the items that it leads to
        kernels = self._find_states(self._base[-1])
        self.kernels = [list(map(self._pointer, kernel)) for kernel in kernels]
        self.end_state = self.shifts[0][start]
        self.shift_bits = [sum(map(self.bits.__getitem__, shifts.keys() & self.bits)) for shifts in self.shifts]
        self.shortest = shortest_yields(self)
        self.conflicts = False
        self.reductions = self._find_reductions(self._find_lookaheads(start))

    def _pointer(self, item: int) -> tuple[Rule, int]:
        r = self._rule_of[item]
        return self.rules[r], item - self._base[r]

    def equals_written_out(self, name: str) -> bool:
        """Check that a rule in parts is parsed as it would be, written out in one. False proves nothing.

        Its first symbol must lead to the same state, wherever the rule begins. Then states that differ only in the
        part of the rule that was read have the same lookaheads. If the rule can begin within itself and contains
        other rules, lark's lookaheads are larger than they need be.
        """
        parts = {part for part, whole in self._whole.items() if whole == name}
        states = [q for q, shifts in enumerate(self.shifts) if name in shifts]
        firsts = filter(None, reachable(self._first.get(name, ()), self._first_of))
        if any(len({self.shifts[q][symbol] for q in states}) > 1 for symbol in firsts):
            return False
        inner = set(itertools.chain.from_iterable(rule.expansion for rule in self.rules if rule.origin in parts))
        under_way = {rule.origin for q in states for rule, _ in self.kernels[q]}
        return inner.isdisjoint(self.rule_names - parts) or under_way.isdisjoint(parts)

    def _first_of(self, symbol: str | None) -> Iterable[str | None]:
        return self._first.get(symbol, ())

    # ---- states

    def _find_states(self, first: int) -> list[tuple[int, ...]]:
        """Return the kernels of the states; the shifts and items of a state are kept as it is found."""
        kernels: Numbering[tuple[int, ...]] = Numbering([(first,)])
        size = 0
        for kernel in kernels.keys_in_order:                      # grows
            items = self._closed(kernel)
            size += len(items)
            if size > MAX_ITEMS:
                self._refuse(items)
            after: dict[str | None, list[int]] = defaultdict(list)
            for item in items:
                after[self._next[item]].append(item + 1)
            self.shifts.append({symbol: kernels[tuple(sorted(some))] for symbol, some in after.items() if symbol})
            self._items.append(items)
        return kernels.keys_in_order

    def _closed(self, kernel: Iterable[int]) -> list[int]:
        """Return items, with those that begin the rules that may come next."""
        symbols = reachable(map(self._next.__getitem__, kernel), self._first_of)
        return [*kernel, *itertools.chain.from_iterable(self._begun.get(symbol, ()) for symbol in symbols)]

    def _refuse(self, items: list[int]) -> None:
        (name, many), *_ = Counter(self.rules[self._rule_of[item]].origin for item in items).most_common(1)
        raise TooLarge(
            f"the parser of the grammar's {len(self.rules) - 1:,} alternatives",
            f"more than {MAX_ITEMS:,} items in its first {len(self._items):,} states, {many:,} of the "
            f"{len(items):,} in the last of rule {name}",
            "fewer alternatives that may stand at one place would work",
        )

    # ---- lookaheads

    def _find_lookaheads(self, start: str) -> dict[int, dict[int, int]]:
        """Return by state and rule the terminals before which the rule may be reduced there."""
        nullable = {name for name, shortest in self.shortest.items() if not shortest.length}
        transitions = [(q, name) for q, shifts in enumerate(self.shifts) for name in shifts if name in self.rule_names]
        number = dict(zip(transitions, itertools.count()))
        after = [self.shifts[q][symbol] for q, symbol in transitions]
        read = [self.shift_bits[q] for q in after]
        read[number[0, start]] |= self.bits[END]
        read = united(read, [[number[q, symbol] for symbol in self.shifts[q] if symbol in nullable] for q in after])
        tails = [self._nullable_tail(rule, nullable) for rule in self.rules]
        includes: list[list[int]] = [[] for _ in read]
        back: list[tuple[int, int, int]] = []           # state at a rule's end, the rule, the transition it makes
        for q, items in enumerate(self._items):
            for item in items:
                rule, place = self._pointer(item)
                this = number.get((q, rule.origin))     # lark includes items in the middle of a rule, too
                if this is None or (place and rule.origin in self._whole):
                    continue
                r, state = self._rule_of[item], q
                for at, symbol in enumerate(rule.expansion[place:], place):
                    if at >= tails[r]:
                        includes[number[state, symbol]].append(this)
                    state = self.shifts[state][symbol]
                if not place:
                    back.append((state, r, this))
        follow = united(read, includes)
        lookaheads: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for state, r, transition in back:
            lookaheads[state][r] |= follow[transition]
        return lookaheads

    def _nullable_tail(self, rule: Rule, nullable: set[str]) -> int:
        """Return the place from which on every symbol is a rule after which nothing more is needed."""
        at = len(rule.expansion)
        while at and rule.expansion[at - 1] in nullable:
            at -= 1
        return at - (at > 0 and rule.expansion[at - 1] in self.rule_names)

    # ---- actions

    def _find_reductions(self, lookaheads: dict[int, dict[int, int]]) -> list[list[tuple[int, tuple[int, str]]]]:
        collisions: list[str] = []
        reductions: list[list[tuple[int, tuple[int, str]]]] = []
        equal: dict[int, int] = {}                      # one object of each set
        for state, taken in enumerate(self.shift_bits):
            row: dict[tuple[int, str], int] = defaultdict(int)
            for r, bits in self._decided(lookaheads.get(state, {}), collisions).items():
                self.conflicts |= bool(bits & taken)
                row[len(self.rules[r].expansion), self.rules[r].origin] |= bits & ~taken
            reductions.append([(equal.setdefault(bits, bits), action) for action, bits in row.items() if bits])
        if collisions:
            raise GrammarError("\n\n".join(collisions))
        return reductions

    def _decided(self, found: dict[int, int], collisions: list[str]) -> dict[int, int]:
        """Return the bits of a state by rule, with each terminal only at the rule of the highest priority."""
        once = twice = 0
        for bits in found.values():
            twice |= once & bits
            once |= bits
        self.conflicts |= bool(twice)
        left = dict(found)
        for bit in bits_of(twice):
            first, second, *more = sorted((r for r in found if found[r] & bit), key=lambda r: -self.rules[r].priority)
            if self.rules[first].priority == self.rules[second].priority:
                lines = "".join(f"\n\t- {self.rules[r]}" for r in (first, second, *more))
                where = f"Terminal({self.terminal_of[bit]!r})"
                collisions.append(f"Reduce/Reduce collision in {where} between the following rules: {lines}")
            for r in (second, *more):
                left[r] &= ~bit
        return left


class Yield(NamedTuple):
    """The fewest terminals that a symbol may consist of: their number, the first one, and the rule's alternative."""

    length: int
    head: str | None
    expansion: tuple[str, ...]


def shortest_yields(tables: Tables, avoided: Set[str] = frozenset()) -> dict[str, Yield]:
    """Return the shortest yield of every symbol, except those that cannot end without the `avoided` terminals.

    Knuth (1977), "A generalization of Dijkstra's algorithm".
    """
    shortest = {name: Yield(1, name, ()) for name in tables.bits.keys() - avoided}
    unknown = [list(itertools.filterfalse(shortest.__contains__, rule.expansion)) for rule in tables.rules]
    users = reversed_edges(enumerate(unknown))
    missing = list(map(len, unknown))                   # of every alternative: symbols not known yet
    lengths = [len(rule.expansion) - number for rule, number in zip(tables.rules, missing, strict=True)]   # terminals
    todo = [(lengths[r], r) for r, number in enumerate(missing) if not number]
    heapq.heapify(todo)
    while todo:
        length, r = heapq.heappop(todo)
        rule = tables.rules[r]
        if rule.origin in shortest:
            continue
        heads = (shortest[symbol].head for symbol in rule.expansion)
        shortest[rule.origin] = Yield(length, next(filter(None, heads), None), rule.expansion)
        for user in users[rule.origin]:
            missing[user] -= 1
            lengths[user] += length
            if not missing[user]:
                heapq.heappush(todo, (lengths[user], user))
    return shortest


def union(sets: Iterable[int]) -> int:
    """Return all bits of some sets."""
    return functools.reduce(int.__or__, sets, 0)


def bits_of(bits: int) -> Iterator[int]:
    """Yield the single bits of a set."""
    while bits:
        yield bits & -bits
        bits &= bits - 1


def united(sets: Iterable[S], edges: Sequence[Collection[int]]) -> list[S]:
    """Return each set joined with those of all nodes reached from it (Tarjan 1972, on a stack of its own)."""
    found = list(sets)
    done = len(found) + 1
    low = [0] * len(found)                              # place on the path of the first that is reached; `done`
    path: list[int] = []
    todo = list(range(len(found)))                      # nodes to enter, and ~node to leave
    while todo:
        x = todo.pop()
        if x < 0:
            x = ~x
            place = low[x]
            for y in edges[x]:
                low[x] = min(low[x], low[y])
                found[x] |= found[y]
            if low[x] == place:                         # nothing before x is reached
                for y in path[place - 1 :]:
                    low[y], found[y] = done, found[x]
                del path[place - 1 :]
        elif not low[x]:
            path.append(x)
            low[x] = len(path)
            todo.append(~x)
            todo += edges[x]
    return found


def columns_are_irrelevant(tables: Tables, indenter: Any) -> bool:
    """Check that any tokens that complete a stack can be laid out by lark's indenter, which then only chooses columns.

    True if each rule nests its brackets and blocks and has no line end within brackets. A block must begin right after
    a line's end, and end right after a line's or another block's end.
    """
    bits, rules, shortest = tables.bits, tables.rules, tables.shortest
    if not shortest.keys() >= tables.rule_names:
        return False
    line_end, indent, dedent = names = indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type
    nesting = dict.fromkeys(indenter.OPEN_PAREN_types, 1) | dict.fromkeys(indenter.CLOSE_PAREN_types, -1)
    users = reversed_edges((rule.origin, rule.expansion) for rule in rules)
    of_lines = set(reachable(names, lambda symbol: users.get(symbol, ())))
    before_blocks = bits.get(line_end, 0), bits.get(line_end, 0) | bits.get(dedent, 0)
    last = _last_terminals(tables)
    for rule in rules:
        brackets, blocks, before = 0, 0, -1             # before a rule, anything
        for symbol in rule.expansion:
            brackets += nesting.get(symbol, 0)
            blocks += (symbol == indent) - (symbol == dedent)
            after_line = symbol not in (indent, dedent) or not before & ~before_blocks[symbol == dedent]
            if brackets < 0 or blocks < 0 or (brackets and symbol in of_lines) or not after_line:
                return False
            before = last[symbol] | (0 if shortest[symbol].length else before)
        if brackets or blocks:
            return False
    return True


def _last_terminals(tables: Tables) -> dict[str, int]:
    """Return by symbol the bits of the terminals that its texts may end with."""
    number = {symbol: i for i, symbol in enumerate([*tables.rule_names, *tables.bits])}
    edges: list[set[int]] = [set() for _ in number]
    for rule in tables.rules:
        for symbol in reversed(rule.expansion):
            edges[number[rule.origin]].add(number[symbol])
            if tables.shortest[symbol].length:
                break
    return dict(zip(number, united([tables.bits.get(symbol, 0) for symbol in number], edges), strict=True))
