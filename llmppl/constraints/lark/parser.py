"""Lark's LALR(1) parser on stacks that all texts share.

A stack is a linked list of unique nodes: texts that lead to equal stacks share one object, which also stores the
answers found for it. `Parser.lowest` is the least height read of a stack since it was last set: an answer holds for
all stacks that are equal down to that height.

A set of terminals is an int with one bit for each. The bit IGNORED stands for ignored text.

Source: the parser of lark 1.3, whose analysis makes the tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from lark import grammar as lark_grammar
from lark.common import ParserConf
from lark.exceptions import GrammarError
from lark.grammar import NonTerminal
from lark.parsers.grammar_analysis import RulePtr
from lark.parsers.lalr_analysis import LALR_Analyzer, Shift
from lark.utils import classify

from llmppl.support.graphs import reversed_edges

_untyped: Any = import_module("lark.parsers.lalr_analysis")
END = "$END"
IGNORED = 1                                         # the bit of ignored text
MAX_ITEMS = 300_000                                 # of lark's parser; a rule after a state is two, a lookahead 1/5
MAX_CHAIN = 500                                     # reductions before a token, by the parser's states and symbols

K = TypeVar("K")
T = TypeVar("T")
Symbol = str | tuple[str, int]                      # a terminal; one that ends a line with the next line's column


def union(sets: Iterable[int]) -> int:
    """Return all bits of some sets."""
    return functools.reduce(int.__or__, sets, 0)


def bits_of(bits: int) -> Iterator[int]:
    """Yield the single bits of a set."""
    while bits:
        yield bits & -bits
        bits &= bits - 1


class Rule(lark_grammar.Rule):
    """An alternative of a rule. It is only equal to itself, because lark hashes all symbols of a rule at each use."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def derived(rules: Sequence[Rule], given: Iterable[Any]) -> set[Any]:
    """Return the given symbols, and those of which some rule has only such symbols: every rule without any, too."""
    todo = list(given)
    uses: dict[Any, list[Rule]] = {}
    missing = {}
    for rule in rules:
        symbols = set(rule.expansion)
        missing[rule] = len(symbols)
        for symbol in symbols:
            uses.setdefault(symbol, []).append(rule)
        if not symbols:
            todo.append(rule.origin)
    found = set()
    while todo:
        symbol = todo.pop()
        if symbol in found:
            continue
        found.add(symbol)
        for rule in uses.get(symbol, ()):
            missing[rule] -= 1
            if not missing[rule]:
                todo.append(rule.origin)
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
        self.NULLABLE = derived(rules, ())

    def expand_rule(self, source_rule: Any, rules_by_origin: Any = None) -> Any:
        if source_rule not in self._expanded:
            self._expanded[source_rule] = frozenset(super().expand_rule(source_rule, rules_by_origin))
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
        pointers = {state: classify(state.closure, lambda each: each.rule.origin) for state in self.lr0_itemsets}
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

    __slots__ = ("state", "below", "layout", "height", "pushed", "fed", "complete", "admits")

    def __init__(self, state: int, below: Stack | None, layout: Layout | None):
        self.state = state
        self.below = below
        self.layout: Any = layout                       # a Layout, or None
        self.height: int = below.height + 1 if below else 1
        self.pushed: dict[tuple[int, Layout | None], Stack] = {}
        self.fed: dict[Symbol, tuple[Stack | None, int]] = {}   # by the symbol; with the least height that was read
        self.complete: bool | None = None               # whether the text may end here
        self.admits: dict[int, tuple[int, int]] = {}    # bits -> those that may be fed

    def push(self, state: int, layout: Layout | None) -> Stack:
        stack = self.pushed.get((state, layout))
        if stack is None:
            stack = self.pushed[state, layout] = Stack(state, self, layout)
        return stack

    def pop(self, size: int) -> Stack | None:
        stack: Stack | None = self
        while size and stack is not None:
            stack = stack.below
            size = size - 1
        return stack


class Parser:
    """Lark's LALR(1) automaton on shared stacks.

    Attributes
    ----------
    bits : by terminal, its bit; None is ignored text
    shifts : by state, the state after a symbol
    shift_bits : by state, the terminals among these symbols
    reductions : by state, pairs of terminals and the (length, rule's name) that is reduced before these
    reduced : by state, the same by the name of a terminal

    Raises lark's GrammarError where two rules may be reduced before the same terminal.
    """

    indenter: Any = None
    layout: Layout | None = None                        # where a text begins

    def __init__(self, rules: Sequence[Rule], start: str) -> None:
        analyzer: Any = _Analyzer(rules, start)
        analyzer.compute_lalr()
        table = analyzer.parse_table
        names = {rule.origin.name for rule in rules}
        terminals = dict.fromkeys(name for row in table.states.values() for name in row if name not in names)
        terminals.pop(END, None)
        self.bits: dict[str | None, int] = {name: 1 << i for i, name in enumerate([None, *terminals, END])}
        self._start_state = table.start_states[start]
        self.end_state = table.end_states[start]
        self.bottom = Stack(self._start_state, None, self.layout)
        self.lowest = 0
        self.shifts: list[dict[str, int]] = []
        self.reductions: list[list[tuple[int, tuple[int, str]]]] = []
        self.reduced: list[dict[str, tuple[int, str]]] = []
        for _, row in sorted(table.states.items()):
            self.shifts.append({name: to for name, (action, to) in row.items() if action is Shift})
            before = {name: rule for name, (action, rule) in row.items() if action is not Shift}
            self.reduced.append({name: (len(rule.expansion), rule.origin.name) for name, rule in before.items()})
            lookaheads = reversed_edges((name, [rule]) for name, rule in self.reduced[-1].items())
            self.reductions.append([(union(map(self.bits.__getitem__, some)), to) for to, some in lookaheads.items()])
        self.shift_bits = [union(self.bits.get(name, 0) for name in shifts) for shifts in self.shifts]

    def terminals(self) -> dict[int, int]:
        """Return the bits of the terminals that have an action, for the first state and those after a terminal."""
        after = {q for shifts in self.shifts for name, q in shifts.items() if name in self.bits}
        states = sorted(after | {self._start_state})
        return {q: self.shift_bits[q] | union(bits for bits, _ in self.reductions[q]) for q in states}

    # ---- answers that hold for many stacks

    def recall(self, memo: dict[K, tuple[T, int]], key: K, stack: Stack, find: Callable[[Stack, K], T]) -> T:
        """Return `find(stack, key)`, kept in a memo with the least height that it reads."""
        known = memo.get(key)
        if known is None:
            before = self.lowest
            self.lowest = stack.height
            known = memo[key] = find(stack, key), self.lowest
            self.lowest = before
        found, lowest = known
        if lowest < self.lowest:
            self.lowest = lowest
        return found

    def recall_by_tops(self, tops: dict[Any, Any], stack: Stack, find: Callable[[Stack], T]) -> T:
        """Return `find(stack)`, which is no dict, kept for all stacks with equal states down to the lowest read.

        An answer that reads the whole stack is kept for this stack alone.
        """
        known: Any = tops.get(stack)
        top: Any = None
        if known is None:
            known = tops
            top = stack
        while type(known) is dict:
            known = known.get(top.state)
            top = top.below
        if known is None:
            before = self.lowest
            self.lowest = stack.height
            known = find(stack)
            top = stack
            for _ in range(stack.height - self.lowest if self.lowest else 0):
                tops = tops.setdefault(top.state, {})
                top = top.below
            tops[top.state if self.lowest else stack] = known
            self.lowest = min(self.lowest, before)
        elif (lowest := top.height + 1 if top else 0) < self.lowest:
            self.lowest = lowest
        return known  # type: ignore[no-any-return]

    # ---- tokens

    def feed(self, stack: Stack, symbol: Symbol | None) -> Stack | None:
        """Return the stack after a token (None: an ignored one), or None if the parser refuses it."""
        if symbol is None:
            return stack
        top = self.recall(stack.fed, symbol, stack, self._reduce)
        assert top is not None
        state = self.shifts[top.state].get(symbol)  # type: ignore[arg-type]
        return None if state is None else top.push(state, None)

    def after(self, stack: Stack, ends: Iterable[tuple[Symbol | None, int]]) -> Iterator[tuple[Stack, int]]:
        """Yield the stack after each way in which a token may end, and its obligation, unless the parser refuses."""
        for symbol, obligation in ends:
            top = self.feed(stack, symbol)
            if top is not None:
                yield top, obligation

    def admitted(self, stack: Stack, among: int) -> int:
        """Return those `among` some bits whose terminals may be fed to a stack, and that of ignored text."""
        return self.recall(stack.admits, among, stack, self._admitted)

    def _admitted(self, stack: Stack, among: int) -> int:
        found = among & IGNORED
        lowest = self.lowest
        most = stack.height + len(self.shifts)
        shift_bits = self.shift_bits
        reductions = self.reductions
        todo = [(stack.below, stack.state, among)]
        empty = set()
        while todo:
            below, state, among = todo.pop()
            found |= shift_bits[state] & among
            for bits, (size, name) in reductions[state]:
                if not bits & among:
                    continue
                if size:
                    base = below and below.pop(size - 1)
                else:
                    base = below.push(state, None) if below else stack
                assert base is not None
                if base.height > most or (not size and (base, bits & among) in empty):
                    raise _endless(name, "a token")
                if not size:
                    empty.add((base, bits & among))
                lowest = min(lowest, base.height)
                todo.append((base, self.shifts[base.state][name], bits & among))
        self.lowest = lowest
        return found

    def line_fits(self, stack: Stack, least: int) -> bool:
        """Check whether a line may end on `stack`; only an IndentedParser has terminals that end a line."""
        raise NotImplementedError

    def complete(self, stack: Stack) -> bool:
        """Check whether the text may end after the tokens that led to `stack`."""
        self.lowest = 0
        if stack.complete is None:
            top = self._outdented(stack)
            stack.complete = top is not None and self._reduce(top, END) is None
        return stack.complete

    def _outdented(self, stack: Stack) -> Stack | None:
        """Return the stack after all open blocks are closed."""
        return stack

    def _reduce(self, stack: Stack, symbol: Any) -> Stack | None:
        """Return the stack after all reductions before `symbol`; None if that completes the text ($END)."""
        most = stack.height + len(self.shifts)          # above: some state is back, and nothing read
        seen = set[Stack]()
        while (reduction := self.reduced[stack.state].get(symbol)) is not None:
            size, name = reduction
            if stack.height > most or stack in seen or len(seen) > MAX_CHAIN * most:
                raise _endless(name, symbol)
            seen.add(stack)
            base = stack.pop(size)
            assert base is not None
            self.lowest = min(self.lowest, base.height)
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

    A layout counts as part of a stack's bottom: an answer that reads it sets `lowest` to 0 and is for that stack alone.
    """

    layout = Layout(0, (0,))

    def __init__(self, rules: Sequence[Rule], start: str, indenter: Any) -> None:
        super().__init__(rules, start)
        self.indenter = indenter
        self._opened = dict.fromkeys(indenter.CLOSE_PAREN_types, -1) | dict.fromkeys(indenter.OPEN_PAREN_types, 1)
        self._nested = all(map(self._nests, rules))
        blocks = [self.bits.get(name, 0) for name in (indenter.INDENT_type, indenter.DEDENT_type, END)]
        self._in_lines = union(self.bits.values()) & ~union([IGNORED, *blocks])

    def _nests(self, rule: Rule) -> bool:
        """Check that the brackets of a rule are closed in it, none of them before it is opened."""
        open = list(itertools.accumulate((self._opened.get(symbol.name, 0) for symbol in rule.expansion), initial=0))
        return min(open) == open[-1] == 0

    def feed(self, stack: Stack, symbol: Symbol | None) -> Stack | None:
        return stack if symbol is None else self.recall(stack.fed, symbol, stack, self._feed)

    def admitted(self, stack: Stack, among: int) -> int:
        """Return the same, and the terminal that ends a line; `line_fits` decides where it may stand."""
        found = super().admitted(stack, among) | (among & self.bits[self.indenter.NL_type])
        if self._nested or stack.layout.brackets:
            return found
        self.lowest = 0
        return found & ~union(self.bits.get(name, 0) for name in self.indenter.CLOSE_PAREN_types)

    def line_fits(self, stack: Stack, least: int) -> bool:
        """Check whether a line may end on `stack`, with the next one at column `least` or to the right of it."""
        self.lowest = 0
        columns = *stack.layout.columns, max(stack.layout.columns[-1] + 1, least)
        return any(self.feed(stack, (self.indenter.NL_type, c)) is not None for c in columns if c >= least)

    def _feed(self, stack: Stack, symbol: Symbol) -> Stack | None:
        layout = stack.layout
        if isinstance(symbol, tuple):
            self.lowest = 0
            return stack if layout.brackets else self._feed_line_end(stack, layout.columns, *symbol)
        brackets = layout.brackets + self._opened.get(symbol, 0)
        if not self._nested and symbol in self._opened:
            self.lowest = 0
        top = self._shift(stack, symbol)
        return _on_top(top, Layout(brackets, layout.columns)) if brackets >= 0 else None

    def _feed_line_end(self, stack: Stack, columns: tuple[int, ...], name: str, column: int) -> Stack | None:
        """Return the stack after a line's end and its blocks, or None if no line may follow there."""
        if column > columns[-1]:
            top = _on_top(self._shift(stack, name, self.indenter.INDENT_type), Layout(0, (*columns, column)))
        elif column in columns:                         # else -1, too: a line end without '\n', on which lark fails
            left = columns[: columns.index(column) + 1]
            closed = [self.indenter.DEDENT_type] * (len(columns) - len(left))
            top = _on_top(self._shift(stack, name, *closed), Layout(0, left))
        else:
            return None
        return top if top and (super().admitted(top, self._in_lines) or self.complete(top)) else None

    def _outdented(self, stack: Stack) -> Stack | None:
        return self._shift(stack, *[self.indenter.DEDENT_type] * (len(stack.layout.columns) - 1))

    def _shift(self, stack: Stack, *symbols: str) -> Stack | None:
        """Return the stack after some tokens, with its layout as before."""
        for symbol in symbols:
            top = self._reduce(stack, symbol)
            assert top is not None
            state = self.shifts[top.state].get(symbol)
            if state is None:
                return None
            stack = top.push(state, top.layout)
        return stack


def _on_top(stack: Stack | None, layout: Layout) -> Stack | None:
    """Return the stack with another layout on top."""
    return stack and stack.below and stack.below.push(stack.state, layout)


def _endless(name: str, symbol: str) -> ValueError:
    return ValueError(
        f"grammar: lark's parser never ends before {symbol}, or takes thousands of steps, where rule {name} is found "
        "without reading anything, again and again; a rule that may be empty is repeated too often, or stands before "
        "itself, and a priority prefers it"
    )
