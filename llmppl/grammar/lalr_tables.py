"""LALR(1) tables as lark makes them, for grammars of any size.

The tables are lark's, state for state and action for action: a shift is preferred to a reduction, of two reductions the
rule of higher priority, and equal ones are a collision. What differs is what it costs: nothing here calls itself, and
sets of terminals are the bits of integers, which states share.

Words: an *item* is a rule with a place in it, as a number; a *transition* is a state and a rule that may begin there.

Source: DeRemer & Pennello (1982), "Efficient Computation of LALR(1) Look-Ahead Sets", as in lark 1.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lark.exceptions import GrammarError

from llmppl.languages.limits import MAX_ITEMS, TooLarge

END = "$END"


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
    start : the name of the rule that a text is
    whole : of the rules that are parts of another (itself among them), which that is

    Attributes
    ----------
    bits : the bit of every terminal, from 2 on, that of END among them
    shifts : by state, the state after a symbol
    reductions : by state, (bits, (length, rule's name)): what is reduced before which terminals
    kernels : by state, (rule, place) of its items that do not begin a rule
    end_state : the state after a text
    conflicts : whether a shift, or a priority, decided between actions

    Raises
    ------
    GrammarError
        Two rules may be reduced before the same terminal.
    TooLarge
        There are more than MAX_ITEMS items.
    """

    def __init__(self, rules: Sequence[Rule], start: str, whole: Mapping[str, str] = {}) -> None:
        root = Rule(f"$root_{start}", (start,))
        self.rules = [*rules, root]
        self._whole = whole
        self._of: dict[str, list[int]] = {}             # name -> its alternatives
        for r, rule in enumerate(self.rules):
            self._of.setdefault(rule.origin, []).append(r)
        symbols = dict.fromkeys(symbol for rule in self.rules for symbol in rule.expansion)
        names = [symbol for symbol in symbols if symbol not in self._of]
        self.bits = {name: 2 << i for i, name in enumerate([*names, END])}
        self._base: list[int] = []                      # the item at the beginning of each alternative
        self._next: list[str | None] = []               # the symbol behind an item's place
        self._rule_of: list[int] = []
        for r, rule in enumerate(self.rules):
            self._base.append(len(self._next))
            self._next += [*rule.expansion, None]
            self._rule_of += [r] * (len(rule.expansion) + 1)
        self.shifts: list[dict[str, int]] = []
        self._items: list[list[int]] = []               # kernel and what it leads to without reading
        self._kernel_sizes: list[int] = []
        self._find_states(self._base[-1])
        self.end_state = self.shifts[0][start]
        self.kernels = [
            [self._pointer(item) for item in items[:size]]
            for items, size in zip(self._items, self._kernel_sizes, strict=True)
        ]
        self.conflicts = False
        self.reductions = self._find_reductions(self._find_looks(start))

    def _pointer(self, item: int) -> tuple[Rule, int]:
        r = self._rule_of[item]
        return self.rules[r], item - self._base[r]

    def equals_written_out(self, name: str) -> bool:
        """Whether a rule of which others are parts is parsed as it would be, written out in one: False says nothing.

        Its first symbol must lead to the same state, wherever the rule begins. Then states that only differ in what has
        been read of it have the same terminals to come. Where it can begin in the middle of itself, lark takes more to
        come than can, if it has rules in it.
        """
        parts = [part for part, owner in self._whole.items() if owner == name]
        symbols = {self._next[item] for item in self._closed(self._base[r] for r in self._of.get(name, ()))} - {None}
        states = [q for q, shifts in enumerate(self.shifts) if name in shifts]
        if any(len({self.shifts[q][symbol] for q in states}) > 1 for symbol in symbols if symbol is not None):
            return False
        inner = {symbol for part in parts for r in self._of.get(part, ()) for symbol in self.rules[r].expansion}
        if inner.isdisjoint(self._of.keys() - set(parts)):
            return True
        middle = {self._rule_of[item] for q in states for item in self._items[q][: self._kernel_sizes[q]]}
        return all(self.rules[r].origin not in parts for r in middle)

    # ---- states

    def _find_states(self, first: int) -> None:
        numbers: dict[tuple[int, ...], int] = {(first,): 0}
        kernels: list[tuple[int, ...]] = [(first,)]
        size = 0
        for kernel in kernels:                          # grows
            items = self._closed(kernel)
            size += len(items)
            if size > MAX_ITEMS:
                (name, many), *_ = Counter(self.rules[self._rule_of[i]].origin for i in items).most_common(1)
                raise TooLarge(
                    f"the parser of the grammar's {len(self.rules) - 1:,} alternatives",
                    f"more than {MAX_ITEMS:,} items in its first {len(self._items):,} states, {many:,} of the "
                    f"{len(items):,} in the last of rule {name}",
                    "fewer alternatives that may stand at one place would work",
                )
            after: dict[str, list[int]] = {}
            for item in items:
                symbol = self._next[item]
                if symbol is not None:
                    after.setdefault(symbol, []).append(item + 1)
            shifts = {}
            for symbol, some in after.items():
                key = tuple(sorted(some))
                number = numbers.setdefault(key, len(kernels))
                if number == len(kernels):
                    kernels.append(key)
                shifts[symbol] = number
            self.shifts.append(shifts)
            self._items.append(items)
            self._kernel_sizes.append(len(kernel))

    def _closed(self, kernel: Iterable[int]) -> list[int]:
        """Items, and those that begin the rules that may come next."""
        items, seen = list(kernel), set[str]()
        for item in items:                              # grows
            symbol = self._next[item]
            if symbol in self._of and symbol not in seen:
                seen.add(symbol)
                items += [self._base[r] for r in self._of[symbol]]
        return items

    # ---- what may come after a rule

    def _nullable(self) -> set[str]:
        """The names of the rules that may be empty."""
        users: dict[str, list[int]] = {}
        missing = []
        for r, rule in enumerate(self.rules):
            missing.append(len(rule.expansion))
            for symbol in rule.expansion:
                users.setdefault(symbol, []).append(r)
        todo = [rule.origin for rule in self.rules if not rule.expansion]
        found = set(todo)
        while todo:
            for r in users.get(todo.pop(), ()):
                missing[r] -= 1
                origin = self.rules[r].origin
                if not missing[r] and origin not in found:
                    found.add(origin)
                    todo.append(origin)
        return found

    def _find_looks(self, start: str) -> dict[tuple[int, int], int]:
        """(state, rule) -> the terminals before which the rule may be reduced there."""
        nullable = self._nullable()
        transitions = [(q, s) for q, shifts in enumerate(self.shifts) for s in shifts if s in self._of]
        number = {transition: i for i, transition in enumerate(transitions)}
        read, reads = [], []
        for q, symbol in transitions:
            after = self.shifts[q][symbol]
            bits = self.bits[END] if (q, symbol) == (0, start) else 0
            for s in self.shifts[after]:
                if s not in self._of:
                    bits |= self.bits[s]
            read.append(bits)
            reads.append([number[after, s] for s in self.shifts[after] if s in nullable])
        read = _united(read, reads)
        includes: list[list[int]] = [[] for _ in read]
        back: list[tuple[int, int, int]] = []           # state at a rule's end, the rule, the transition it makes
        for q, items in enumerate(self._items):
            for item in items:
                rule, place = self._pointer(item)
                this = number.get((q, rule.origin))     # lark asks so of items in the middle of a rule, too
                if this is None or place and rule.origin in self._whole:
                    continue
                state = q
                last: list[int] = []            # of the rule's symbols, those that are a rule with nothing needed after
                for symbol in rule.expansion[place:]:
                    if (state, symbol) in number:
                        if symbol not in nullable:
                            last.clear()
                        last.append(number[state, symbol])
                    else:
                        last.clear()
                    state = self.shifts[state][symbol]
                for transition in last:
                    includes[transition].append(this)
                if not place:
                    back.append((state, self._rule_of[item], this))
        follow = _united(read, includes)
        looks: dict[tuple[int, int], int] = {}
        for state, r, transition in back:
            looks[state, r] = looks.get((state, r), 0) | follow[transition]
        return looks

    # ---- actions

    def _find_reductions(self, looks: dict[tuple[int, int], int]) -> list[list[tuple[int, tuple[int, str]]]]:
        by_state: dict[int, list[tuple[int, int]]] = {}
        for (state, r), bits in looks.items():
            by_state.setdefault(state, []).append((r, bits))
        collisions: list[str] = []
        reductions: list[list[tuple[int, tuple[int, str]]]] = []
        equal: dict[int, int] = {}                      # one object of each set
        for state, shifts in enumerate(self.shifts):
            taken = sum(self.bits[symbol] for symbol in shifts if symbol not in self._of)
            row: dict[tuple[int, str], int] = {}
            for r, bits in self._decided(by_state.get(state, []), collisions):
                self.conflicts |= bool(bits & taken)
                action = len(self.rules[r].expansion), self.rules[r].origin
                row[action] = row.get(action, 0) | bits & ~taken
            reductions.append([(equal.setdefault(bits, bits), action) for action, bits in row.items() if bits])
        if collisions:
            raise GrammarError("\n\n".join(collisions))
        return reductions

    def _decided(self, found: list[tuple[int, int]], collisions: list[str]) -> list[tuple[int, int]]:
        """(rule, bits) of a state with every terminal in one of them only: that of the highest priority."""
        once = twice = 0
        for _, bits in found:
            twice |= once & bits
            once |= bits
        if not twice:
            return found
        self.conflicts = True
        left = dict(found)
        for name, bit in self.bits.items():
            if bit & twice:
                rules = sorted((r for r, bits in found if bits & bit), key=lambda r: -self.rules[r].priority)
                if self.rules[rules[0]].priority == self.rules[rules[1]].priority:
                    lines = "".join(f"\n\t- {self.rules[r]}" for r in rules)
                    collisions.append(
                        f"Reduce/Reduce collision in Terminal({name!r}) between the following rules: {lines}"
                    )
                for r in rules[1:]:
                    left[r] &= ~bit
        return list(left.items())


def bits_of(bits: int) -> Iterator[int]:
    """The single bits of a set."""
    while bits:
        yield bits & -bits
        bits &= bits - 1


def _united(sets: Iterable[int], edges: Sequence[Sequence[int]]) -> list[int]:
    """Each set joined with those of all that is reached from it (Tarjan 1972, on a stack of its own)."""
    found = list(sets)
    order = [0] * len(found)                            # of discovery, from 1 on; -1 when done
    low = [0] * len(found)
    path: list[int] = []
    count = 0
    for root in range(len(found)):
        if order[root]:
            continue
        calls = [(root, iter(edges[root]))]
        count += 1
        order[root] = low[root] = count
        path.append(root)
        while calls:
            x, targets = calls[-1]
            for y in targets:
                if not order[y]:
                    count += 1
                    order[y] = low[y] = count
                    path.append(y)
                    calls.append((y, iter(edges[y])))
                    break
                if order[y] > 0:
                    low[x] = min(low[x], order[y])
                found[x] |= found[y]
            else:
                calls.pop()
                if calls:
                    above = calls[-1][0]
                    low[above] = min(low[above], low[x])
                if low[x] == order[x]:
                    while True:
                        z = path.pop()
                        order[z] = -1
                        found[z] = found[x]
                        if z == x:
                            break
                if calls:
                    found[calls[-1][0]] |= found[x]
    return found
