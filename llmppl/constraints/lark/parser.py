"""Lark's LALR(1) parser on stacks that all texts share.

A stack is a linked list of unique nodes: texts that lead to equal stacks share one object, which also stores the
answers found for it. A stack is dropped when nothing else holds it.

A set of terminals is an int with one bit for each. The bit IGNORED stands for ignored text.

Source: the parser of lark 1.3, whose analysis makes the tables.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from lark import grammar as lark_grammar
from lark.common import ParserConf
from lark.exceptions import GrammarError
from lark.grammar import NonTerminal
from lark.parsers.grammar_analysis import RulePtr
from lark.parsers.lalr_analysis import LALR_Analyzer, Shift
from lark.utils import classify

from llmppl.support.graphs import Interned

_untyped: Any = import_module("lark.parsers.lalr_analysis")
END = "$END"
NOWHERE = -1  # no state of the parser
IGNORED = 1  # the bit of ignored text
MAX_ITEMS = 300_000  # of lark's parser; a rule after a state is two, a lookahead 1/5
MAX_CHAIN = 500  # reductions before a token, by the parser's states and symbols


Symbol = str | tuple[str, int]  # a terminal; one that ends a line with the next line's column


class Rule(lark_grammar.Rule):
    """An alternative of a rule. It is only equal to itself, because lark hashes all symbols of a rule at each use."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def derived(rules: Iterable[Rule], given: Mapping[Any, float]) -> dict[Any, float]:
    """Return the least costs of symbols, from those of the given ones; only of symbols that some rules make of these.

    The cost of a rule is the sum of those of its symbols.
    """
    order = itertools.count()
    todo = [(cost, next(order), symbol) for symbol, cost in given.items()]
    uses: dict[Any, list[Rule]] = {}
    missing = {}
    for rule in rules:
        symbols = set(rule.expansion)
        missing[rule] = len(symbols)
        for symbol in symbols:
            uses.setdefault(symbol, []).append(rule)
        if not symbols:
            todo.append((0, next(order), rule.origin))
    heapq.heapify(todo)
    found = dict[Any, float]()
    while todo:
        cost, _, symbol = heapq.heappop(todo)
        if symbol in found:
            continue
        found[symbol] = cost
        for rule in uses.get(symbol, ()):
            missing[rule] -= 1
            if not missing[rule]:
                total = sum(found[each] for each in rule.expansion)
                heapq.heappush(todo, (total, next(order), rule.origin))
    return found


class _Analyzer(LALR_Analyzer):
    """Lark's analysis, which expands each rule once here, and stops where its states would have too many items.

    Of the sets of symbols that lark computes in cubic time, it needs only the rules that may be empty.
    """

    def __init__(self, rules: Sequence[Rule], start: str) -> None:
        super().__init__(ParserConf([], {}, []))
        self._expanded: dict[Any, frozenset[Any]] = {}
        self._num_items = 0
        root = Rule(NonTerminal(f"$root_{start}"), [NonTerminal(start)])
        self.lr0_rules_by_origin = classify([*rules, root], lambda rule: rule.origin)
        closure = self.expand_rule(root.origin, self.lr0_rules_by_origin)
        self.lr0_start_states = {start: _untyped.LR0ItemSet([RulePtr(root, 0)], closure)}
        self.NULLABLE = set(derived(rules, {}))

    def expand_rule(self, source_rule: Any, rules_by_origin: Any = None) -> Any:
        if source_rule not in self._expanded:
            self._expanded[source_rule] = frozenset(
                super().expand_rule(source_rule, rules_by_origin)
            )
        self._count(len(self._expanded[source_rule]))
        return self._expanded[source_rule]

    def _count(self, number: int) -> None:
        self._num_items += number
        if self._num_items > MAX_ITEMS:
            raise GrammarError(
                f"lark's parser has more than {MAX_ITEMS:,} items; fewer alternatives, or one terminal for many words, "
                'WORD: "a" | "b", would do'
            )

    def compute_includes_lookback(self) -> None:
        """Compute two relations as lark does, from the pointers of a state by their rule's name."""
        self._count(2 * len(self.nonterminal_transitions))
        pointers = dict[Any, dict[Any, Any]]()
        for state in self.lr0_itemsets:
            pointers[state] = classify(state.closure, lambda each: each.rule.origin)
        for transition in self.nonterminal_transitions:
            state, name = transition
            for pointer in pointers[state].get(name, ()):
                symbols = pointer.rule.expansion
                at = state
                for i in range(pointer.index, len(symbols)):
                    before = at, symbols[i]
                    if before in self.reads and self.NULLABLE.issuperset(symbols[i + 1 :]):
                        self.includes[before].add(transition)
                    at = at.transitions[symbols[i]]
                if pointer.index == 0:
                    self.lookback[transition].add((at, pointer.rule))

    def compute_lookaheads(self) -> None:
        reads = _untyped.digraph(self.nonterminal_transitions, self.reads, self.directly_reads)
        follows = _untyped.digraph(self.nonterminal_transitions, self.includes, reads)
        found: dict[Any, set[Any]] = {}
        for transition, places in self.lookback.items():
            for place in places:
                found.setdefault(place, set()).update(follows[transition])
        self._count(sum(map(len, found.values())) // 5)
        for (state, rule), symbols in found.items():
            for symbol in symbols:
                state.lookaheads[symbol].add(rule)


class Layout(NamedTuple):
    """The layout of indented text: the number of open brackets, and the columns of the open blocks."""

    brackets: int
    columns: tuple[int, ...]


class Stack:
    """A parser stack, shared by all texts that lead to it: a state, the stack below, and the layout (if indented)."""

    __slots__ = (
        "state",
        "below",
        "layout",
        "height",
        "all",
        "shifted",
        "lines",
        "complete",
        "admits",
        "lefts",
        "__weakref__",
    )

    def __init__(self, state: int, below: Stack | None, layout: Layout | None):
        self.state = state
        self.below = below
        self.layout: Any = layout  # a Layout, or None
        self.height = 1
        if below is None:
            self.all = Interned(Stack)
        else:
            self.height = below.height + 1
            self.all = below.all
        self.shifted = dict[
            str, tuple[Stack | None, int]
        ]()  # by terminal; None stands for the stack itself
        self.lines = dict[Symbol, Stack | None]()  # by the terminal that ends a line
        self.complete: bool | None = None  # whether the text may end here
        self.admits = dict[int, int]()  # bits -> those that may be fed
        self.lefts = dict[int, float]()  # by a state on top, bytes to the end (`lengths.py`)

    def push(self, state: int, layout: Layout | None) -> Stack:
        return self.all.of(state, self, layout)

    def pop(self, size: int) -> Stack | None:
        stack: Stack | None = self
        while size and stack is not None:
            stack = stack.below
            size -= 1
        return stack


Place = tuple[Stack, int]  # a stack, and a state on top of it


class Parser:
    """Lark's LALR(1) automaton on shared stacks.

    Attributes
    ----------
    bits : by terminal, its bit; None is ignored text
    shifts : by state, the state after a symbol
    shift_bits : by state, the terminals among these symbols
    reductions : by state, pairs of terminals and the (length, rule's name) that is reduced before these
    reduced : by state, the same by the name of a terminal
    begun : by state, the rules that are begun there, with the number of symbols so far
    rules : those of the grammar

    Raises lark's GrammarError where two rules may be reduced before the same terminal.
    """

    indenter: Any = None
    layout: Layout | None = None  # where a text begins

    def __init__(self, rules: Sequence[Rule], start: str) -> None:
        analyzer: Any = _Analyzer(rules, start)
        analyzer.compute_lalr()
        table = analyzer.parse_table
        self.rules = rules
        self.begun = list[list[tuple[Rule, int]]]()
        for itemset in analyzer.lr0_itemsets:
            self.begun.append([(each.rule, each.index) for each in itemset.kernel])
        self.bits: dict[str | None, int] = {None: IGNORED}
        self._start_state = table.start_states[start]
        self.end_state = table.end_states[start]
        self.bottom = Stack(self._start_state, None, self.layout)
        self.shifts = list[dict[str, int]]()
        self.shift_bits = list[int]()
        self.reductions = list[list[tuple[int, tuple[int, str]]]]()
        self.reduced = list[dict[str, tuple[int, str]]]()
        names = {rule.origin.name for rule in rules}
        for _, row in sorted(table.states.items()):
            shifts = dict[str, int]()
            shift_bits = 0
            reduced = dict[str, tuple[int, str]]()
            bits_before = defaultdict[tuple[int, str], int](int)
            for name, (action, to) in row.items():
                bit = 0
                if name not in names:
                    bit = self.bits.setdefault(name, 1 << len(self.bits))
                if action is Shift:
                    shifts[name] = to
                    shift_bits |= bit
                else:
                    reduced[name] = len(to.expansion), to.origin.name
                    bits_before[reduced[name]] |= bit
            self.shifts.append(shifts)
            self.shift_bits.append(shift_bits)
            self.reduced.append(reduced)
            self.reductions.append([(bits, rule) for rule, bits in bits_before.items()])
        self.bits.setdefault(END, 1 << len(self.bits))

    def terminals(self) -> dict[int, int]:
        """Return the bits of the terminals that have an action, for the first state and those after a terminal."""
        states = {self._start_state}
        for shifts in self.shifts:
            states.update(state for name, state in shifts.items() if name in self.bits)
        found = dict[int, int]()
        for state in sorted(states):
            found[state] = self.shift_bits[state]
            for bits, _ in self.reductions[state]:
                found[state] |= bits
        return found

    # ---- tokens

    def feed(self, stack: Stack, symbol: Symbol | None) -> Stack | None:
        """Return the stack after a token (None: an ignored one), or None if the parser refuses it."""
        if symbol is None:
            return stack
        place = self.shifted(stack, symbol)
        if place is None:
            return None
        below, state = place
        return below.push(state, None)

    def shifted(self, stack: Stack, symbol: Any) -> Place | None:
        """Return the state after a terminal, and the stack below it; None if the parser refuses the terminal."""
        found = stack.shifted.get(symbol)
        if found is None:
            base = self._reduce(stack, symbol)
            assert base is not None
            state = self.shifts[base.state].get(symbol, NOWHERE)
            if base is stack:
                found = None, state
            else:
                found = base, state
            stack.shifted[symbol] = found
        below, state = found
        if state == NOWHERE:
            return None
        return below or stack, state

    def after(
        self, stack: Stack, ends: Iterable[tuple[Symbol | None, int]]
    ) -> Iterator[tuple[Stack, int]]:
        """Yield the stack after each way in which a token may end, and its obligation, unless the parser refuses."""
        for symbol, obligation in ends:
            top = self.feed(stack, symbol)
            if top is not None:
                yield top, obligation

    def admitted(self, stack: Stack, among: int) -> int:
        """Return those `among` some bits whose terminals may be fed to a stack, and that of ignored text."""
        if among not in stack.admits:
            stack.admits[among] = self._admitted(stack, among)
        return stack.admits[among]

    def _admitted(self, stack: Stack, among: int) -> int:
        found = among & IGNORED
        most = stack.height + len(self.shifts)
        shift_bits = self.shift_bits
        reductions = self.reductions
        todo = [(stack.below, stack.state, among)]
        empty = set[tuple[Stack, int]]()
        while todo:
            below, state, among = todo.pop()
            found |= shift_bits[state] & among
            for bits, (size, name) in reductions[state]:
                left = bits & among
                if not left:
                    continue
                if size:
                    base = below and below.pop(size - 1)
                elif below:
                    base = below.push(state, None)
                else:
                    base = stack
                assert base is not None
                if base.height > most or (not size and (base, left) in empty):
                    raise _endless(name, "a token")
                if not size:
                    empty.add((base, left))
                todo.append((base, self.shifts[base.state][name], left))
        return found

    def line_fits(self, stack: Stack, least: int) -> bool:
        """Check whether a line may end on `stack`; only an IndentedParser has terminals that end a line."""
        raise NotImplementedError

    def complete(self, stack: Stack) -> bool:
        """Check whether the text may end after the tokens that led to `stack`."""
        if stack.complete is None:
            top = self._outdented(stack)
            stack.complete = top is not None and self._reduce(top, END) is None
        return stack.complete

    def _outdented(self, stack: Stack) -> Stack | None:
        """Return the stack after all open blocks are closed."""
        return stack

    def _reduce(self, stack: Stack, symbol: Any) -> Stack | None:
        """Return the stack after all reductions before `symbol`; None if that completes the text ($END)."""
        most = stack.height + len(self.shifts)  # above: some state is back, and nothing read
        seen = set[Stack]()
        while symbol in self.reduced[stack.state]:
            size, name = self.reduced[stack.state][symbol]
            if stack.height > most or stack in seen or len(seen) > MAX_CHAIN * most:
                raise _endless(name, symbol)
            seen.add(stack)
            base = stack.pop(size)
            assert base is not None
            state = self.shifts[base.state][name]
            if symbol == END and state == self.end_state:
                return None
            stack = base.push(state, stack.layout)
        return stack


class IndentedParser(Parser):
    """A parser after lark's Indenter, whose stacks have a layout.

    The lexer gives the token that ends a line with the column at which the next line begins: (name, column). The
    parser receives this token, then an INDENT, or a DEDENT for each block that the column closes. Within brackets it
    receives nothing.
    """

    layout = Layout(0, (0,))

    def __init__(self, rules: Sequence[Rule], start: str, indenter: Any) -> None:
        super().__init__(rules, start)
        self.indenter = indenter
        self._opened = dict.fromkeys(indenter.CLOSE_PAREN_types, -1) | dict.fromkeys(
            indenter.OPEN_PAREN_types, 1
        )
        self._nested = all(map(self._nests, rules))
        self._in_lines = 0
        for name, bit in self.bits.items():
            if name not in (None, indenter.INDENT_type, indenter.DEDENT_type, END):
                self._in_lines |= bit
        self._closing = 0
        for name in indenter.CLOSE_PAREN_types:
            self._closing |= self.bits.get(name, 0)

    def _nests(self, rule: Rule) -> bool:
        """Check that the brackets of a rule are closed in it, none of them before it is opened."""
        num_open = 0
        for symbol in rule.expansion:
            num_open += self._opened.get(symbol.name, 0)
            if num_open < 0:
                return False
        return num_open == 0

    def admitted(self, stack: Stack, among: int) -> int:
        """Return the same, and the terminal that ends a line; `line_fits` decides where it may stand."""
        found = super().admitted(stack, among) | (among & self.bits[self.indenter.NL_type])
        if self._nested or stack.layout.brackets:
            return found
        return found & ~self._closing

    def line_fits(self, stack: Stack, least: int) -> bool:
        """Check whether a line may end on `stack`, with the next one at column `least` or to the right of it."""
        columns = stack.layout.columns
        for column in (*columns, max(columns[-1] + 1, least)):
            if column >= least and self.feed(stack, (self.indenter.NL_type, column)) is not None:
                return True
        return False

    def feed(self, stack: Stack, symbol: Symbol | None) -> Stack | None:
        layout = stack.layout
        if symbol is None or (isinstance(symbol, tuple) and layout.brackets):
            return stack
        if isinstance(symbol, tuple):
            if symbol not in stack.lines:
                stack.lines[symbol] = self._feed_line_end(stack, layout.columns, *symbol)
            return stack.lines[symbol]
        brackets = layout.brackets + self._opened.get(symbol, 0)
        place = self.shifted(stack, symbol)
        if place is None or brackets < 0:
            return None
        below, state = place
        return below.push(state, Layout(brackets, layout.columns))

    def _feed_line_end(
        self, stack: Stack, columns: tuple[int, ...], name: str, column: int
    ) -> Stack | None:
        """Return the stack after a line's end and its blocks, or None if no line may follow there."""
        if column > columns[-1]:
            blocks = [self.indenter.INDENT_type]
            columns = *columns, column
        elif column in columns:  # else -1, too: a line end without '\n', on which lark fails
            num_left = columns.index(column) + 1
            blocks = [self.indenter.DEDENT_type] * (len(columns) - num_left)
            columns = columns[:num_left]
        else:
            return None
        after = self._shift(stack, name, *blocks)
        if after is None or after.below is None:
            return None
        top = after.below.push(after.state, Layout(0, columns))
        if super().admitted(top, self._in_lines) or self.complete(top):
            return top
        return None

    def _shift(self, stack: Stack, *symbols: str) -> Stack | None:
        """Return the stack after some tokens, with its layout as before."""
        for symbol in symbols:
            place = self.shifted(stack, symbol)
            if place is None:
                return None
            below, state = place
            stack = below.push(state, below.layout)
        return stack

    def _outdented(self, stack: Stack) -> Stack | None:
        num_open = len(stack.layout.columns) - 1
        return self._shift(stack, *[self.indenter.DEDENT_type] * num_open)


def _endless(name: str, symbol: str) -> ValueError:
    return ValueError(
        f"grammar: lark's parser never ends before {symbol}, or takes thousands of steps, where rule {name} is found "
        "without reading anything, again and again; a rule that may be empty is repeated too often, or stands before "
        "itself, and a priority prefers it"
    )
