"""Context-free grammars in Lark's syntax, read byte by byte.

A text is in the language iff `lark.Lark(grammar, parser="lalr", lexer="contextual")` parses it. The tables and the
terminals of each parser state equal lark's. Only the loop differs: it takes one byte at a time and never goes back.

The one idea: assume where a token ends instead of waiting to see it. A *hypothesis* assumes an end of every token so
far. It is a parser stack (`parser.py`) and the current partial token (`lexer.py`). Exactly one hypothesis survives the
whole text, so no byte is read twice. For example, `1e+x` is read as `1 e + x` under the hypothesis that `1` ends there,
which forbids an exponent. A hypothesis is dropped unless the parser takes a next terminal (`completion.py`). `step`
returns None only if no continuation of the text is accepted.

Sources: the lexer and parser of lark 1.3; Willard & Louf (2023), section 4, for parsers as recognizers.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from lark import Lark
from lark.indenter import Indenter

from llmppl.constraints.constraint import Bools, Ints, State, VocabularyLike, bytes_of
from llmppl.constraints.lark.completion import Completion
from llmppl.constraints.lark.lexer import PartialTokens
from llmppl.constraints.lark.loader import Parts, read
from llmppl.constraints.lark.masks import Masks
from llmppl.constraints.lark.parser import Stack, bits_of
from llmppl.constraints.lark.unit import LarkUnit
from llmppl.constraints.machine.machine import Continuation, Item
from llmppl.constraints.machine.parts import Part
from llmppl.constraints.masks import TokenIndex, distances
from llmppl.constraints.masks.distances import SearchDistances, bounded
from llmppl.constraints.masks.index import MOST
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph
from llmppl.support.arguments import is_file_name, shown, text
from llmppl.support.graphs import Memo, Numbering
from llmppl.support.locks import Lock, cached_property, locked
from llmppl.support.shared import Shared

MAX_STATES = 1 << 16                                # that are kept
MAX_VISITED = 3_000                                 # by a search for an end
MAX_MASKS = 1 << 14                                 # that are made before all are forgotten
Hypothesis = tuple[Stack, int]                      # a parser stack, and a partial token


class _State(Shared):
    """A state of the recognizer: its hypotheses, and whether the text may end. Equal states are one object."""

    __slots__ = ("hypotheses", "accepting", "next")

    def __init__(self, hypotheses: tuple[Hypothesis, ...], accepting: bool):
        self.hypotheses = hypotheses
        self.accepting = accepting
        self.next: dict[int, _State | None] = {}        # by byte


class Grammar(Part):
    """Recognizer of the texts that `lark.Lark(grammar, parser="lalr", lexer="contextual", start=start)` parses.

    `step(state, byte)` is None only if no text that continues so is accepted; it may be a state that no text completes.
    States are immutable, hashable and shared: equal ones are one object, up to MAX_STATES states.

    Parameters
    ----------
    grammar : str, in Lark's syntax
    start : name of the rule that a whole text must match
    import_paths : folders in which lark looks for imported grammars, before its own
    g_regex_flags : flags of `re`, for all terminals
    postlex : a lark.indenter.Indenter, for indented text
    source_path : file of the grammar, for relative imports

    Raises
    ------
    ValueError
        If the grammar has a syntax error (shown with a caret), a conflict (lark's report), no rule `start`, or no text
        that it parses; if a terminal (named) is not regular or matches the empty text; if postlex is no plain Indenter.

    Examples
    --------
    >>> grammar = Grammar('start: " (" /[ab]/ ("," /[ab]/)* ")"')
    >>> smc_steer(ConstrainedText(lm, "f =", grammar, max_tokens=8), N=4, K=3, seed=0).best.s
    ' (a)'
    """

    def __init__(
        self,
        grammar: str,
        start: str = "start",
        *,
        import_paths: Sequence[Any] = (),
        g_regex_flags: int = 0,
        postlex: Any = None,
        source_path: str | None = None,
    ):
        self.text = text("grammar", grammar)
        if is_file_name(grammar):
            raise ValueError(f"grammar: {grammar!r} is the name of a file: Grammar.from_file({grammar!r}) reads it")
        self._options: dict[str, Any] = {"start": start, "import_paths": list(import_paths), "postlex": postlex}
        self._options |= {"g_regex_flags": g_regex_flags, "source_path": source_path}
        methods = "process", "_process", "handle_NL"
        plain = all(getattr(type(postlex), name, None) is getattr(Indenter, name) for name in methods)
        if postlex is not None and not plain:
            raise ValueError(f"postlex: a lark.indenter.Indenter that only names its terminals, not {postlex!r}")
        found = read(grammar, start, import_paths, g_regex_flags, postlex, source_path)
        parser = found.parser
        lexers, lexer_of = _lexers(found)
        self._parser = parser
        self.partials = PartialTokens(found.terminals, found.ignored, lexers, postlex)
        self._completion = Completion(parser, self.partials, lexer_of)
        self._states: Memo[Any, _State] = Memo(lambda key: _State(tuple(key[0]), key[1]))
        self._masks: Masks | None = None
        self._lock = Lock()
        begun = self._state([(parser.bottom, self.partials.first)], [])
        stuck = self._completion.taking_all() if begun else set()
        if begun is None or stuck is not None:
            takers = [f"{name} {shown(self.partials.terminals[name].pattern)}" for name in sorted(stuck or ())]
            why = f": no text goes on after terminal {' and '.join(takers)}" * bool(takers)
            raise ValueError(f"lark parses no text at all with this grammar (start rule {start!r}){why}")
        self.start = begun

    @cached_property
    def lark(self) -> Lark:
        """Lark itself with this grammar, for parse trees; made on first use."""
        return Lark(self.text, parser="lalr", lexer="contextual", maybe_placeholders=False, **self._options)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], start: str = "start", *, import_paths: Sequence[Any] = (),
        g_regex_flags: int = 0, postlex: Any = None,
    ) -> Grammar:  # fmt: skip
        """Read a grammar from a file. Relative imports are found beside it, and errors begin with its path."""
        options = {"import_paths": import_paths, "g_regex_flags": g_regex_flags, "postlex": postlex}
        try:
            with open(path, encoding="utf-8") as file:
                return cls(file.read(), start, source_path=os.fspath(path), **options)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def index(self, vocab: VocabularyLike) -> TokenIndex:
        """Return the index of the tokens of a vocabulary that may follow each state."""
        return GrammarIndex(self, vocab)

    @cached_property
    def _unit(self) -> LarkUnit:
        return LarkUnit(self._completion)

    def begin(self, after: Continuation) -> list[Item]:
        return self._unit.begin_token(self._parser.bottom, self.partials.first, after)

    def least_bytes(self, alone: Bools) -> float:
        return self._unit.least_after(self._parser.bottom, self.partials.first, alone)

    def forget(self) -> None:
        self._unit.forget()

    def __reduce__(self) -> tuple[Any, ...]:            # a pickle is compiled anew
        return partial(Grammar, **self._options), (self.text,)

    def step(self, state: _State, byte: int) -> _State | None:
        """Return the state after one more byte, or None if the text cannot continue so."""
        try:
            return state.next[byte]
        except KeyError:
            found = state.next[byte] = self.token_step(state, bytes([byte]))
            return found

    @locked
    def token_step(self, state: _State, data: bytes) -> _State | None:
        """Return the state after one or more bytes, without the states in between."""
        step = self.partials.step
        starts = self._completion.starts
        after = self._parser.after
        alive = list(state.hypotheses)
        ended: list[Hypothesis] = []                    # a stack and a obligation each
        for byte in data:
            alive += [(stack, token) for stack, obligation in ended for token in starts(stack, obligation)]
            outcomes = [(stack, *step(token, byte)) for stack, token in alive]
            alive = [(stack, token) for stack, going_on, _ in outcomes for token in going_on]
            ended = [place for stack, _, ends in outcomes for place in after(stack, ends)]
        return self._state(ended, alive)

    @locked
    def token_mask(self, state: _State, trie: Trie) -> bytes:
        """Return the tokens that may follow a state, as bits."""
        if self._masks is None or self._masks.trie is not trie:
            self._masks = Masks(self._completion, trie)
        if self._masks.made > MAX_MASKS:
            self._forget()
        return self._masks.bits(state.hypotheses)

    def parse(self, text: str) -> str:
        """Return the text itself. ValueError if lark does not parse it; `lark` makes a tree of it."""
        state: _State | None = self.start
        for byte in bytes_of(text):
            state = state and self.step(state, byte)
        if state is None or not state.accepting:
            raise ValueError(f"{shown(text)} is no text of the grammar")
        return str(text)

    def accepts(self, state: _State) -> bool:
        """Check whether lark parses the text that led to `state`."""
        return state.accepting

    def _state(self, ended: list[Hypothesis], going_on: list[Hypothesis]) -> _State | None:
        """Return the state of the hypotheses that may go on, with tokens `ended` or `going_on`."""
        completion = self._completion
        accepting = any(completion.may_end(*place) for place in ended)
        alive = [hypothesis for hypothesis in going_on if completion.completable(*hypothesis)]
        for stack, obligation in ended:
            if completion.may_go_on(stack, obligation):
                alive += [(stack, token) for token in completion.starts(stack, obligation)]
        if not alive and not accepting:
            return None
        if len(self._states) > MAX_STATES:
            self._forget()
        return self._states[frozenset(alive), accepting]

    def _forget(self) -> None:
        """Drop all states and stacks; those that a caller holds stay valid."""
        self._states.clear()
        bottom = self._parser.bottom
        for memo in (self.start.next, bottom.pushed, bottom.fed, bottom.admits):
            memo.clear()
        if self._masks is not None:
            self._masks.forget()


class _StateGraph(MemoGraph):
    """Graph of a grammar's states, which reads one byte for each class of bytes that the partial tokens tell apart."""

    def fill(self, number: int, bytes: Ints, /) -> None:
        state = self.states[number]
        classes = self.recognizer.partials.classes
        cuts = [*sorted({0}.union(*[classes[token] for _, token in state.hypotheses])), 256]
        for i in {bisect_right(cuts, byte) for byte in bytes.tolist()}:
            known = self.number(self.recognizer.step(state, cuts[i - 1]))       # which may replace the table
            self.table[number, cuts[i - 1] : cuts[i]] = known


class _Ends(SearchDistances):
    """Distances for masks: paths to an end over low stacks, which bound them, and searches near the limit.

    Answers depend on the state alone, so that they are equal whatever was asked before. Each search visits at most
    MAX_VISITED states. If it finds no end, the state counts as too far.
    """

    def __init__(self, turn: Lock) -> None:
        super().__init__(turn)
        self._paths = dict[State, float]()
        self._byte_ends = dict[State, bool]()

    @locked
    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        self.work = 0
        targets, where = np.unique(ends, return_inverse=True)
        states = [index.graph.state(target) for target in targets.tolist()]     # before a search renews the graph
        near = [each.accepting or self._path(index, each) <= n or self._length(index, each, n) <= n for each in states]
        return np.array(near, bool)[where]

    def _path(self, index: Any, state: State) -> float:
        if state not in self._paths:
            bounded(self._paths)[state] = self._length(index, state, math.inf)
        return self._paths[state]

    def _length(self, index: Any, start: State, n: float) -> float:
        """Return the length of a path to an end of at most n tokens; inf if none is found, n if that is MOST."""
        seen = {start}
        todo = {(0, 0): [start]}
        while todo and min(todo)[1] < n:
            if len(seen) > MAX_VISITED:
                return n if n == MOST else math.inf
            key = min(todo)                             # depth + height, and depth: equal ones are read together
            level = todo.pop(key)
            depth = key[1] + 1
            if self._end_follows(index, level):
                return depth
            after = {each for state in level for each in self.after(index, state)} - seen
            seen |= after
            for state in after:                         # low stacks first, unless n bounds the search
                height = min(stack.height for stack, _ in state.hypotheses) if n == math.inf else 0
                todo.setdefault((height + depth, depth), []).append(state)
        return math.inf

    def _end_follows(self, index: Any, level: list[State]) -> bool:
        """Check whether a token leads from some states to an end. Single bytes come first, since they cost least."""
        if index.trie.complete and any(self._byte_ends_at(index, state) for state in level):
            return True
        return any(each.accepting for state in level for each in self.after(index, state))

    def _byte_ends_at(self, index: Any, state: State) -> bool:
        if state not in self._byte_ends:
            self._check(index)
            number = index.graph.number(state)
            index.graph.fill(number, np.arange(256))
            ends = {*index.graph.table[number].tolist()} - {0}
            self.work += 1000
            bounded(self._byte_ends)[state] = any(index.graph.state(end).accepting for end in ends)
        return self._byte_ends[state]

    def after(self, index: Any, state: State) -> tuple[State, ...]:
        self._check(index)
        return super().after(index, state)

    def _check(self, index: Any) -> None:
        """Raise a ValueError after much work in a call, since another answer would depend on the calls before."""
        if self.work > distances.MAX_WORK * (2 + len(index.recognizer.partials.terminals) // 10):
            found = f"{index.name}: no end found in {self.work:,} steps"
            raise ValueError(f"{found}; complete=False lets max_tokens cut such a text")


class GrammarIndex(TokenIndex):
    """Index of a grammar. The parser decides once for all tokens that no stack tells apart."""

    def _begin(self) -> None:
        super()._begin()
        self.graph = _StateGraph(self.recognizer)
        self._distances = _Ends(self._lock)

    def build_all(self, max_states: int = 1_000_000) -> Any:
        raise TypeError(f"build_all wants finitely many states, those of a Regex or a DFA, not {self!r}")

    def _work_out(self, state: State, accepts: bool) -> PackedMask:
        return self.store.of_bits(self.recognizer.token_mask(state, self.trie), accepts)

    def _read_token(self, state: State, data: bytes) -> State | None:
        return self.recognizer.token_step(state, data)


def _lexers(found: Parts) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """Return lark's contextual lexers, as names of terminals in order; and the lexer of each state of the parser."""
    rank = {terminal.name: i for i, terminal in enumerate(found.terminals)}
    always = {rank[name] for name in found.ignored.union(found.always)}
    ranks = {bit: rank[name] for name, bit in found.parser.bits.items() if name in rank}
    terminals = found.parser.terminals()
    numbers = Numbering(terminals.values())
    selected = [always.union(ranks[bit] for bit in bits_of(bits) if bit in ranks) for bits in numbers.keys_in_order]
    lexers = [tuple([found.terminals[i].name for i in sorted(some)]) for some in selected]
    return lexers, {state: numbers[bits] for state, bits in terminals.items()}
