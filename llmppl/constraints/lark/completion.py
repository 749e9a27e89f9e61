"""Completability: which hypotheses some text completes, the question behind every step of a grammar's recognizer.

A *hypothesis* is a parser stack and a partial token. Most questions are answered by witness spellings
(`llmppl.constraints.lark.spellings`): where every terminal has a spelling that an ignored text separates from whatever comes
next, a stack that tokens complete is completed by a text. What is left is decided by the table of the parser's
reductions (`llmppl.constraints.lark.reductions`).

There are two ways to see that tokens complete a stack. A *plan* names for each state on top of a stack the terminal to
give next, or the rule to reduce; where one gets every stack to its end, all stacks can be completed. Without a plan,
the few shortest completions that the items on a stack ask for are tried.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.lark.lalr import Layout, Parser, Stack
from llmppl.constraints.lark.lalr_tables import END, IGNORED, shortest_yields, union, united
from llmppl.constraints.lark.lexer import Ended, PartialTokens
from llmppl.constraints.lark.reductions import TEXT_END, Lookahead, ReductionTable
from llmppl.constraints.lark.spellings import WitnessSpellings
from llmppl.constraints.lark.terminals import Terminal
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, reached, turned
from llmppl.support.locks import cached_property

MAX_EXPLORED = 1000                                 # partial tokens that are gone through to see how a token may end
MAX_SHORTEST = 16                                   # hypotheses that the shortest texts lead to, tried before all
MAX_TOKENS = 10_000                                 # of a completion that is tried
MAX_TRIED = 8                                       # completions of one stack
MAX_STEPS = 1000                                    # of a plan until it reduces what is below
SEARCH_REMEDY = "ignored text that may stand between all tokens, and fewer look-aheads and look-behinds, would work"

Ends = frozenset[Ended]
Plan = list["Step"]                                 # by state
Top = tuple[int, int]                               # a state on top of a stack, and the one below it


class Item(NamedTuple):
    """A rule that is under way: its symbols that are on the stack, those to come (and their yield), and its name."""

    size: int
    rest: tuple[str, ...]
    rule: str
    length: int
    head: str | None


class Step(NamedTuple):
    """What a plan does: give a terminal (size 0), or reduce a rule of some size, 0 if it is empty."""

    size: int
    symbol: str


class TokenCompletions:
    """The completions of a parser's stacks by tokens, without the terminals that are to be `avoided`.

    `always` says that every stack has one, but for those with a state of `unsure` on top: False says nothing. Unsure
    are the states in which a block would have to open or close after a line whose end has been read.
    """

    def __init__(self, parser: Parser, avoided: Set[str]) -> None:
        self.parser, self.tables, self.shifts = parser, parser.tables, parser.shifts
        self._shortest = shortest_yields(self.tables, avoided) if avoided else self.tables.shortest
        self._items = Memo(self._find_items)
        self._root = self.tables.rules[-1].origin
        before = turned(enumerate(map(dict[str, int].values, self.shifts)))
        self._before = [before[q] for q in range(len(self.shifts))]     # by state, those it is reached from
        plain = self._shortest.keys() >= self.tables.rule_names and not (avoided or self.tables.conflicts)
        certain = plain and not parser.indenter
        self._plan = None if certain else self._find_plan()
        self.always = certain or (self._plan is not None and parser.disciplined)
        self.unsure = self._find_unsure(self._plan) if self._plan and parser.indenter else frozenset[int]()
        self._avoided = avoided

    @cached_property
    def enough(self) -> frozenset[str]:
        """Terminals of which every stack has a completion if it always has one: few where there is a plan."""
        terminals = frozenset(self.tables.bits) - {END, *self._avoided}
        plan = self._plan or self._find_plan()
        return terminals if plan is None else terminals.intersection([step.symbol for step in plan])

    def exist(self, stack: Stack) -> bool:
        """Whether some tokens complete what led to `stack`, if that is easily seen: False says nothing."""
        if self.always and stack.state not in self.unsure:
            return True
        self.parser.lowest = 0
        if stack.finishable is None:
            tried = itertools.chain(self._planned(stack), itertools.islice(self._asked_for(stack), MAX_TRIED))
            stack.finishable = any(self._completes(stack, tokens) for tokens in tried)
        return stack.finishable

    def _planned(self, stack: Stack) -> Iterator[tuple[str, ...]]:
        """The terminals that the plan gives until the text's end, where there is one and it gets there."""
        tokens: list[str] = []
        below: Stack | None = stack
        above: list[int] = []                           # states on top of it
        for _ in range(MAX_TOKENS if self._plan else 0):
            assert below is not None and self._plan is not None
            state = above[-1] if above else below.state
            if state == self.tables.end_state:
                yield tuple(tokens)
                return
            size, symbol = self._plan[state]
            tokens += [symbol] * (symbol in self.tables.bits)
            below = below.pop(max(size - len(above), 0))
            del above[max(len(above) - size, 0) :]
            if below is not None:
                above.append(self.shifts[above[-1] if above else below.state][symbol])

    def _find_items(self, state: int) -> list[Item]:
        """The items of a state, without those that nothing finishes."""
        found = [(place, rule.expansion[place:], rule.origin) for rule, place in self.tables.kernels[state]]
        return [Item(*some, *self._yield(some[1])) for some in found if self._shortest.keys() >= set(some[1])]

    def _yield(self, symbols: Iterable[str]) -> tuple[int, str | None]:
        """How many terminals symbols consist of, at least, and the first of these."""
        yields = list(map(self._shortest.__getitem__, symbols))
        return sum(each.length for each in yields), next(filter(None, (each.head for each in yields)), None)

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
                    if reduced and len(tokens) + item.length <= MAX_TOKENS:
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
        above: list[Stack] = []                         # which these tokens complete as well
        top = stack
        for at in range(len(tokens)):
            after = self.parser.feed_one(top, tokens, at)
            if after is None:
                return False
            top = after
            if top.finishable:
                break
            above.append(top)
        if not (top.finishable or self.parser.complete(top)):
            return False
        for each in above:
            each.finishable = True
        return True

    def _find_plan(self) -> Plan | None:
        """A plan that completes every stack of a text that is not indented; None says nothing.

        The terminals that may follow a reduction are found from the plan itself (those planned for the states it may
        lead to), and the parser must reduce so before each of them. Followed from any state, the plan has to get to a
        reduction of what is below, and go round in no circles there.
        """
        left = self._fewest_left()
        steps = [self._steps(q, left) for q in range(len(self.shifts))]
        while all(steps):
            plan = [each[0] for each in steps]
            if not (wrong := self._wrong(plan)):
                return plan if self._ends(plan) else None
            for q in wrong:
                del steps[q][0]
        return None

    def _wrong(self, plan: Plan) -> list[int]:
        """The states in which the parser may not reduce as planned."""
        given, first = self._first(plan)
        reducing = [q for q in range(len(plan)) if not given[q]]
        wrong = [q for q in reducing if not self._reduces(q, plan[q], first[q])]
        return [q for q in wrong if not self._reduces(q, plan[q], self._given_after(q, plan, given))]

    def _first(self, plan: Plan) -> tuple[list[int], list[int]]:
        """By state, the terminal that a plan gives there, if it does, and those that it may give next."""
        given = [self.tables.bits.get(symbol, 0) for _, symbol in plan]
        given[self.tables.end_state] = self.tables.bits[END]
        edges = [() if given[q] else self._states_after(q, *step) for q, step in enumerate(plan)]
        return given, united(given, edges)

    def _find_unsure(self, plan: Plan) -> frozenset[int]:
        """The states behind a line's end, or behind the blocks there, after which a plan may open or close a block."""
        indenter, bits = self.parser.indenter, self.tables.bits
        names = indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type
        behind = {shifts[name] for shifts in self.shifts for name in names if name in shifts}
        blocks = union(bits.get(name, 0) for name in names[1:])
        first = self._first(plan)[1]
        return frozenset([q for q in behind if first[q] & blocks])

    def _reduces(self, state: int, step: Step, terminals: int) -> bool:
        return not terminals & ~union(bits for bits, action in self.tables.reductions[state] if action == step)

    def _given_after(self, state: int, plan: Plan, given: list[int]) -> int:
        """The terminals that a plan may give after the reductions at `state`, each state with the one below in view."""

        def onward(top: Top) -> list[Top]:
            return [] if given[top[0]] else self._after(top, *plan[top[0]])

        return union(given[q] for q, _ in reached([(state, below) for below in self._below(state)], onward))

    def _steps(self, state: int, left: dict[Top, float]) -> list[Step]:
        """What may be done next with a state on top, first what leaves the fewest terminals to the text's end."""

        def length(item: Item) -> float:
            """The fewest, at best, whatever is below."""
            after = [self._after((state, below), item.size, item.rule) for below in self._below(state)]
            return item.length + max(min((left.get(top, math.inf) for top in tops), default=0) for tops in after)

        found: dict[Step, None] = {}
        for item in sorted(self._items[state], key=lambda item: (length(item), *item)):
            if item.head in self.shifts[state]:
                found[Step(0, str(item.head))] = None
            elif item.rest:
                found[Step(0, self._first_empty(item.rest[0]))] = None
            elif item.size:
                found[Step(item.size, item.rule)] = None
        return list(found)

    def _first_empty(self, symbol: str) -> str:
        """The rule without symbols that a shortest yield begins with, if it does not begin with a terminal."""
        while expansion := self._shortest[symbol].expansion:
            symbol = expansion[0]
        return symbol

    def _fewest_left(self) -> dict[Top, float]:
        """The fewest terminals that a text may have behind each two topmost states, at best (Dijkstra 1959)."""
        sources: dict[Top, list[tuple[Top, int]]] = defaultdict(list)
        for q, below in enumerate(self._before):
            for item, top in itertools.product(self._items[q], [(q, each) for each in below]):
                for target in self._after(top, item.size, item.rule):
                    sources[target].append((top, item.length))
        fewest: dict[Top, float] = {}
        todo: list[tuple[int, Top]] = [(0, (self.tables.end_state, 0))]
        while todo:
            length, top = heapq.heappop(todo)
            if top not in fewest:
                fewest[top] = length
                for source, more in sources[top]:
                    heapq.heappush(todo, (length + more, source))
        return fewest

    def _bases(self, state: int, depth: int, name: str) -> list[int]:
        """The states that may be some places below one, on which a rule is pushed."""
        states = {state}
        for _ in range(depth):
            states = set(itertools.chain.from_iterable(map(self._before.__getitem__, states)))
        return [q for q in states if name in self.shifts[q]]

    def _after(self, top: Top, size: int, name: str) -> list[Top]:
        """What may be on top after a reduction."""
        state, below = top
        bases = self._bases(below, size - 1, name) if size else self._bases(state, 0, name)
        return [(self.shifts[q][name], q) for q in bases]

    def _states_after(self, state: int, size: int, name: str) -> set[int]:
        """The states that may be on top after a reduction with `state` on top."""
        return {self.shifts[q][name] for q in self._bases(state, size, name)}

    def _below(self, state: int) -> list[int]:
        """The states that may be below one; 0 below itself."""
        return self._before[state] or [0]

    def _ends(self, plan: Plan) -> bool:
        """Whether a plan, followed from any state, removes that state from the stack sooner or later."""
        exits = [self._exit(q, plan) for q in range(len(plan))]
        same = {q: self._states_after(q, 1, name) for q, (depth, name) in enumerate(exits) if depth == 1}
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


class Completability:
    """Whether some text completes a hypothesis.

    `certificates[ends]` are the bits of which one, if `Parser.admitted`, proves that a text can be completed where a
    token may end so; and whether nothing else can prove it.
    """

    def __init__(
        self, parser: Parser, partials: PartialTokens, lexer_of: dict[int, int], terminals: Sequence[Terminal]
    ) -> None:
        self.parser, self.partials, self.lexer_of = parser, partials, lexer_of
        after = parser.lexers_after(lexer_of)
        self.spellings = WitnessSpellings(partials, terminals, after)
        self.tokens = TokenCompletions(parser, self.spellings.missing)
        self._spellable_after = Memo(self._is_spellable_after)
        self.reductions = ReductionTable(parser, partials, lexer_of, self._always_completable)
        self.certificates = Memo(self._find_certificates)
        self._lexers_after: dict[str | None, set[int]] = {None: set(lexer_of.values())} | after

    def completable(self, stack: Stack, token: int) -> bool:
        """Whether some text completes a hypothesis."""
        if self.tokens.always:
            ends, are_all = self.possible_ends(token)
            certificates, exhaustive = self.certificates[ends]
            if self.proofs(stack, self.parser.admitted(stack, certificates)):
                return True
            if exhaustive and are_all:
                return False
        return self.parser.recall(stack.completable, token, stack, self._is_completable)

    def proofs(self, stack: Stack, admitted: int) -> int:
        """The certificates among what is admitted to a stack; what is ignored completes only what tokens complete."""
        doubtful = stack.state in self.tokens.unsure and admitted & IGNORED and not self.tokens.exist(stack)
        return admitted & ~IGNORED if doubtful else admitted

    def may_follow(self, stack: Stack, residue: int) -> bool:
        """Whether some text, or none, completes what led to a stack after a token that left a residue."""
        starts = self.starts(stack, residue)
        return self._ends_well(stack, residue) or any(self.completable(stack, token) for token in starts)

    def starts(self, stack: Stack, residue: int) -> tuple[int, ...]:
        """The partial tokens that begin after a token that led to a stack and left a residue."""
        return self.partials.starts[self.lexer_of[stack.state], residue]

    def possible_ends(self, token: int) -> tuple[Ends, bool]:
        """Ways in which a token may end, and whether these are all of them: not if it may be long under way."""
        ends = self.reductions.ends_if_few(token, MAX_EXPLORED)
        return (frozenset(self.spellings.shortest_ends[token, False]), False) if ends is None else (ends, True)

    def _find_certificates(self, ends: Ends) -> tuple[int, bool]:
        certain = [end for end in ends if self.tokens.always and self._always_spellable_after(end)]
        found = sum({self.parser.bits[end.terminal] for end in certain})
        return found, len(certain) == len(ends) and not (found & IGNORED and self.tokens.unsure)

    def _always_spellable_after(self, end: Ended) -> bool:
        """Whether a text follows in any case; not behind a line's end, whose column may not fit."""
        lexers = self._lexers_after[end.terminal]
        return isinstance(end.symbol, str | None) and all(self._spellable_after[q, end.residue] for q in lexers)

    def _is_spellable_after(self, place: tuple[int, int]) -> bool:
        spellable, certain = self.spellings.is_spellable_after, self.tokens.always and not self.tokens.unsure
        return spellable(*place, None) or (certain and spellable(*place, self.tokens.enough))

    def _always_completable(self, lexer: int, residue: int) -> bool:
        """Whether all stacks that read on in a lexer are completed after a residue, if that is easily seen."""
        return self.tokens.always and self._spellable_after[lexer, residue]

    def surely_completable(self, stack: Stack, residue: int) -> bool:
        """Whether it is easily seen that a text can be completed after a token that led to a stack."""
        return self._spellable_after[self.lexer_of[stack.state], residue] and self.tokens.exist(stack)

    def _surely_after(self, stack: Stack, ends: Iterable[Ended]) -> bool:
        """The same after a token that may end so."""
        return any(self.surely_completable(*place) for place in self.parser.after(stack, ends))

    def may_end(self, stack: Stack, residue: int) -> bool:
        """Whether the text may be over after a token that led to a stack and left a residue."""
        return not self.partials.residues[residue].required and self.parser.complete(stack)

    def _ends_well(self, stack: Stack, residue: int) -> bool:
        return self.surely_completable(stack, residue) or self.may_end(stack, residue)

    def _is_completable(self, stack: Stack, token: int) -> bool:
        """Whether some text completes a hypothesis: the shortest texts of the next terminals may show it at once."""

        def ended(hypothesis: tuple[Stack, int]) -> Iterator[tuple[Stack, int]]:
            """Where the token of a hypothesis may have ended: stacks and residues."""
            below, token = hypothesis
            return self.parser.after(below, self.spellings.shortest_ends[token, False])

        def onward(hypothesis: tuple[Stack, int]) -> list[tuple[Stack, int]]:
            return [(top, start) for top, residue in ended(hypothesis) for start in self.starts(top, residue)]

        tried = itertools.islice(reached([(stack, token)], onward), MAX_SHORTEST)
        if any(self._ends_well(*place) for hypothesis in tried for place in ended(hypothesis)):
            return True
        return self._search_indented(stack, token, stack.layout) if stack.layout else self._search(stack, token)

    def _search(self, stack: Stack, token: int) -> bool:
        """The same, if it is not easily seen: one more token may make it so; in the end the parser's runs decide."""
        lookaheads: set[Lookahead] = set()
        for end in self.reductions.ends(token):
            top = self.parser.feed(stack, end.symbol)
            if top is None:
                continue
            after = self.reductions.lookaheads[self.lexer_of[top.state], end.residue]
            then = itertools.starmap(Ended, after - {TEXT_END})
            if self.surely_completable(top, end.residue) or self._surely_after(top, then):
                return True
            if TEXT_END in after and self.parser.complete(top):
                return True
            lookaheads |= after if end.symbol is None else {(str(end.symbol), end.residue)}
        try:
            return self.reductions.possible(stack, lookaheads)
        except TooLarge as error:
            begun = self.partials.automata.names[self.partials.tokens[token].threads[0]]
            name = min(self.spellings.missing, default=begun)
            what = f"{error.what} behind terminal {name} {shown(self.partials.terminals[name].pattern)}"
            raise TooLarge(what, error.count, SEARCH_REMEDY) from None

    def _search_indented(self, stack: Stack, token: int, layout: Layout) -> bool:
        """The same for indented text, whose blocks are without number: a line end and any column that fits is tried."""
        self.parser.lowest = 0
        if self._surely_after(stack, {*self.spellings.shortest_ends[token, True], *self.possible_ends(token)[0]}):
            return True
        current = self.partials.tokens[token]
        if self.partials.automata.names_of(current.threads).isdisjoint({self.partials.newline, *self.partials.ignored}):
            return False
        columns = [*layout.columns, layout.columns[-1] + 1]
        lines = [b"\n" + b" " * column for column in columns]
        lines += [b" " * (column - max(current.column, 0)) for column in columns]
        tails = sorted(set(map(self.spellings.texts.tail, current.threads)))
        texts = [*lines, *map(b"".join, itertools.product(tails, lines))]
        return any(self._surely_after(stack, self.spellings.read((token,), text)[-1]) for text in texts)
