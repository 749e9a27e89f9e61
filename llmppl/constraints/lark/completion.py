"""Completability: decide whether some text completes a hypothesis, as every step of a grammar's recognizer asks.

A *hypothesis* is a parser stack and a partial token. Witness spellings (`spellings.py`) answer most
questions: if every terminal has a spelling that ignored text separates from the next token, then any tokens that
complete a stack can be written as a text. The table of the parser's reductions (`reductions.py`) decides
the rest.

Tokens complete a stack in two ways. A *plan* names for each state on top of a stack the next terminal, or the rule to
reduce. If the plan brings every stack to its end, all stacks can be completed. Without such a plan, the few shortest
completions of the items on a stack are tried.
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
from llmppl.support.graphs import Memo, reachable, reversed_edges
from llmppl.support.locks import cached_property

MAX_EXPLORED = 1000                                 # partial tokens explored to find how a token may end
MAX_SHORTEST = 16                                   # hypotheses tried along the shortest texts, before a search
MAX_TOKENS = 10_000                                 # of a completion that is tried
MAX_TRIED = 8                                       # completions of one stack
MAX_STEPS = 1000                                    # of a plan until it reduces the state below
SEARCH_REMEDY = "ignored text that may stand between all tokens, and fewer look-aheads and look-behinds, would work"

Ends = frozenset[Ended]
Plan = list["Step"]                                 # by state
Top = tuple[int, int]                               # a state on top of a stack, and the one below it


class Item(NamedTuple):
    """A rule in progress: its symbols on the stack, those to come with the length and head of their yield, its name."""

    size: int
    rest: tuple[str, ...]
    rule: str
    length: int
    head: str | None


class Step(NamedTuple):
    """A step of a plan: give a terminal (size 0), or reduce a rule of some size, which is 0 for an empty rule."""

    size: int
    symbol: str


class TokenCompletions:
    """The completions of a parser's stacks by tokens, without the terminals that are to be `avoided`.

    Attributes
    ----------
    always_completable : True if every stack has one, except perhaps those with a doubtful state on top
    doubtful_states : states after a line's end in which a block may still have to open or close
    """

    def __init__(self, parser: Parser, avoided: Set[str]) -> None:
        self.parser, self.tables, self.shifts = parser, parser.tables, parser.shifts
        self._avoided = avoided
        self._shortest = shortest_yields(self.tables, avoided) if avoided else self.tables.shortest
        self._items = Memo(self._find_items)
        self._root = self.tables.rules[-1].origin
        before = reversed_edges(enumerate(map(dict[str, int].values, self.shifts)))
        self._before = [before[q] for q in range(len(self.shifts))]     # by state, those it is reached from
        certain = not (avoided or self.tables.conflicts or parser.indenter)
        certain = certain and self._shortest.keys() >= self.tables.rule_names
        self._plan = None if certain else self._find_plan()
        self.always_completable = certain or (self._plan is not None and parser.columns_are_irrelevant)
        self.doubtful_states = self._find_doubtful(self._plan) if self._plan and parser.indenter else frozenset[int]()

    @cached_property
    def sufficient_terminals(self) -> frozenset[str]:
        """Terminals that suffice to complete every stack if all stacks can be completed; few if there is a plan."""
        terminals = frozenset(self.tables.bits) - {END, *self._avoided}
        plan = self._plan or self._find_plan()
        return terminals if plan is None else terminals.intersection([step.symbol for step in plan])

    def can_complete(self, stack: Stack) -> bool:
        """Check whether some tokens complete `stack`. False means that none were found."""
        if self.always_completable and stack.state not in self.doubtful_states:
            return True
        self.parser.lowest = 0
        if stack.completable_by_tokens is None:
            few = itertools.islice(self._shortest_completions(stack), MAX_TRIED)
            tried = itertools.chain(self._planned(stack), few)
            stack.completable_by_tokens = any(self._completes(stack, tokens) for tokens in tried)
        return stack.completable_by_tokens

    # ---- completions of one stack

    def _planned(self, stack: Stack) -> Iterator[tuple[str, ...]]:
        """Yield the terminals that the plan gives until the text's end, if it gets there."""
        tokens: list[str] = []
        for _ in range(MAX_TOKENS if self._plan else 0):
            assert self._plan is not None
            if stack.state == self.tables.end_state:
                yield tuple(tokens)
                return
            size, symbol = self._plan[stack.state]
            tokens += [symbol] * (symbol in self.tables.bits)
            base = stack.pop(size)
            assert base is not None
            stack = base.push(self.shifts[base.state][symbol], base.layout)

    def _shortest_completions(self, stack: Stack) -> Iterator[tuple[str, ...]]:
        """Yield terminals that finish the rules on the stack, shortest first; resolved conflicts are not heeded."""
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
                        after = *tokens, *self._shortest_yield(item.rest)
                        heapq.heappush(todo, (len(after), next(order), reduced, after))

    def _reduced(self, stack: Stack, item: Item) -> Stack | None:
        """Return the stack after the rule of an item on its top is finished."""
        base = stack.pop(item.size)
        if base is None or (item.rule == self._root and base.below is not None):
            return None
        return base.push(self.shifts[base.state].get(item.rule, self.tables.end_state), stack.layout)

    def _find_items(self, state: int) -> list[Item]:
        """Return the items of a state, without those that nothing finishes."""
        found = []
        for rule, place in self.tables.kernels[state]:
            rest = rule.expansion[place:]
            if self._shortest.keys() >= set(rest):
                yields = list(map(self._shortest.__getitem__, rest))
                head = next(filter(None, [each.head for each in yields]), None)
                found.append(Item(place, rest, rule.origin, sum(each.length for each in yields), head))
        return found

    def _shortest_yield(self, symbols: Iterable[str]) -> list[str]:
        """Return the fewest terminals that symbols may consist of."""
        found: list[str] = []
        todo = list(symbols)[::-1]
        while todo:
            symbol = todo.pop()
            if symbol in self.tables.bits:
                found.append(symbol)
            todo += self._shortest[symbol].expansion[::-1]
        return found

    def _completes(self, stack: Stack, tokens: tuple[str, ...]) -> bool:
        """Check whether tokens complete a stack; each stack on the way is marked."""
        above: list[Stack] = []
        top = stack
        for at in range(len(tokens)):
            after = self.parser.feed_one(top, tokens, at)
            if after is None:
                return False
            top = after
            if top.completable_by_tokens:
                break
            above.append(top)
        if not (top.completable_by_tokens or self.parser.complete(top)):
            return False
        for each in above:
            each.completable_by_tokens = True
        return True

    # ---- a plan for all stacks

    def _find_plan(self) -> Plan | None:
        """Return a plan that completes every stack of a text without indentation; None proves nothing.

        A plan may only reduce where the parser does so before each terminal that may follow. These terminals are found
        from the plan itself: it gives them in the states that the reduction may lead to. From any state, the plan must
        come to a reduction of the state below, without going round in circles there.
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
        """Return the states in which the parser may not reduce as planned."""
        given, first = self._first(plan)
        reducing = [q for q in range(len(plan)) if not given[q]]
        wrong = [q for q in reducing if not self._reduces(q, plan[q], first[q])]
        return [q for q in wrong if not self._reduces(q, plan[q], self._given_after(q, plan, given))]

    def _first(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Return by state the terminal that a plan gives there, if any, and a superset of those it may give next."""
        given = [self.tables.bits.get(symbol, 0) for _, symbol in plan]
        given[self.tables.end_state] = self.tables.bits[END]
        edges = [() if given[q] else self._states_after(q, *step) for q, step in enumerate(plan)]
        return given, united(given, edges)

    def _find_doubtful(self, plan: Plan) -> frozenset[int]:
        """Return the states after a line's end, or after the blocks there, where a plan may open or close a block."""
        indenter, bits = self.parser.indenter, self.tables.bits
        names = indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type
        after_lines = {shifts[name] for shifts in self.shifts for name in names if name in shifts}
        blocks = union(bits.get(name, 0) for name in names[1:])
        first = self._first(plan)[1]
        return frozenset([q for q in after_lines if first[q] & blocks])

    def _reduces(self, state: int, step: Step, terminals: int) -> bool:
        return not terminals & ~union(bits for bits, action in self.tables.reductions[state] if action == step)

    def _given_after(self, state: int, plan: Plan, given: list[int]) -> int:
        """Return the terminals that a plan may give after the reductions at `state`, by pairs of topmost states."""

        def onward(top: Top) -> list[Top]:
            return [] if given[top[0]] else self._after(top, *plan[top[0]])

        return union(given[q] for q, _ in reachable(self._tops(state), onward))

    def _steps(self, state: int, left: dict[Top, float]) -> list[Step]:
        """Return the possible steps with a state on top, first those with the fewest terminals to the text's end."""

        def length(item: Item) -> float:
            """Return the fewest terminals, at best, for the worst state below."""
            after = [self._after(top, item.size, item.rule) for top in self._tops(state)]
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
        """Return the empty rule that a shortest yield begins with, if it does not begin with a terminal."""
        while expansion := self._shortest[symbol].expansion:
            symbol = expansion[0]
        return symbol

    def _fewest_left(self) -> dict[Top, float]:
        """Return the fewest terminals that may follow each two topmost states, at best (Dijkstra 1959)."""
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
        """Return the states that may be `depth` places below one, and on which a rule can be pushed."""
        states = {state}
        for _ in range(depth):
            states = set(itertools.chain.from_iterable(map(self._before.__getitem__, states)))
        return [q for q in states if name in self.shifts[q]]

    def _after(self, top: Top, size: int, name: str) -> list[Top]:
        """Return the pairs that may be on top after a reduction."""
        state, below = top
        bases = self._bases(below, size - 1, name) if size else self._bases(state, 0, name)
        return [(self.shifts[q][name], q) for q in bases]

    def _states_after(self, state: int, size: int, name: str) -> set[int]:
        """Return the states that may be on top after a reduction with `state` on top."""
        return {self.shifts[q][name] for q in self._bases(state, size, name)}

    def _tops(self, state: int) -> list[Top]:
        """Return the pairs of a state and one that may be below it; 0 is below itself."""
        return [(state, below) for below in self._before[state] or [0]]

    def _ends(self, plan: Plan) -> bool:
        """Check whether a plan, followed from any state, removes that state from the stack sooner or later."""
        exits = [self._exit(q, plan) for q in range(len(plan))]
        same = {q: self._states_after(q, 1, name) for q, (depth, name) in enumerate(exits) if depth == 1}
        try:
            graphlib.TopologicalSorter(same).prepare()
        except graphlib.CycleError:
            return False
        return all(depth for depth, _ in exits)

    def _exit(self, state: int, plan: Plan) -> Step:
        """Return how many states the plan's first reduction of `state` removes (0 if too late), and its rule."""
        states = [state]
        for _ in range(MAX_STEPS):
            size, symbol = plan[states[-1]]
            if size >= len(states) or symbol == self._root:
                return Step(max(size - len(states) + 1, 1), symbol)
            del states[len(states) - size :]
            states.append(self.shifts[states[-1]][symbol])
        return Step(0, self._root)


class Completability:
    """Decide whether some text completes a hypothesis.

    `proofs[ends]` is about tokens that may end in these ways: bits of terminals, one of which, if admitted by
    `Parser.admitted`, proves that a text completes the token; and whether nothing else can prove it.
    """

    def __init__(
        self, parser: Parser, partials: PartialTokens, lexer_of: dict[int, int], terminals: Sequence[Terminal]
    ) -> None:
        self.parser, self.partials, self.lexer_of = parser, partials, lexer_of
        after = parser.lexers_after(lexer_of)
        self.spellings = WitnessSpellings(partials, terminals, after)
        self.tokens = TokenCompletions(parser, self.spellings.missing)
        self._spellable_after = Memo(self._is_spellable_after)
        self.reductions = ReductionTable(parser, partials, lexer_of, self._all_completable)
        self.proofs = Memo(self._find_proofs)
        self._lexers_after: dict[str | None, set[int]] = {None: set(lexer_of.values())} | after

    def completable(self, stack: Stack, token: int) -> bool:
        """Check whether some text completes a hypothesis."""
        if self.tokens.always_completable:
            ends, are_all = self.possible_ends(token)
            proofs, exhaustive = self.proofs[ends]
            if self.valid_proofs(stack, self.parser.admitted(stack, proofs)):
                return True
            if exhaustive and are_all:
                return False
        return self.parser.recall(stack.completable, token, stack, self._is_completable)

    def valid_proofs(self, stack: Stack, admitted: int) -> int:
        """Return the bits of admitted proofs that hold; one of ignored text needs tokens that complete the stack."""
        tokens = self.tokens
        doubtful = stack.state in tokens.doubtful_states and admitted & IGNORED and not tokens.can_complete(stack)
        return admitted & ~IGNORED if doubtful else admitted

    def may_follow(self, stack: Stack, obligation: int) -> bool:
        """Check whether some text, perhaps empty, completes a stack after a token that left an obligation."""
        starts = self.starts(stack, obligation)
        return self._ends_well(stack, obligation) or any(self.completable(stack, token) for token in starts)

    def starts(self, stack: Stack, obligation: int) -> tuple[int, ...]:
        """Return the partial tokens that begin after a token that led to a stack and left an obligation."""
        return self.partials.starts[self.lexer_of[stack.state], obligation]

    def possible_ends(self, token: int) -> tuple[Ends, bool]:
        """Return ways in which a token may end, and whether these are all: not if it may go on through many others."""
        ends = self.reductions.ends_if_few(token, MAX_EXPLORED)
        return (frozenset(self.spellings.shortest_ends[token, False]), False) if ends is None else (ends, True)

    def _find_proofs(self, ends: Ends) -> tuple[int, bool]:
        certain = [end for end in ends if self.tokens.always_completable and self._always_spellable_after(end)]
        found = sum({self.parser.bits[end.terminal] for end in certain})
        return found, len(certain) == len(ends) and not (found & IGNORED and self.tokens.doubtful_states)

    def _always_spellable_after(self, end: Ended) -> bool:
        """Check whether a text follows in any case. It may not after a line's end, whose column may not fit."""
        lexers = self._lexers_after[end.terminal]
        return isinstance(end.symbol, str | None) and all(self._spellable_after[q, end.obligation] for q in lexers)

    def _is_spellable_after(self, place: tuple[int, int]) -> bool:
        tokens, spellable = self.tokens, self.spellings.is_spellable_after
        certain = tokens.always_completable and not tokens.doubtful_states
        return spellable(*place, None) or (certain and spellable(*place, tokens.sufficient_terminals))

    def _all_completable(self, lexer: int, obligation: int) -> bool:
        """Check whether all stacks that read on with a lexer are known to be completable after an obligation."""
        return self.tokens.always_completable and self._spellable_after[lexer, obligation]

    def surely_completable(self, stack: Stack, obligation: int) -> bool:
        """Check, without a search, whether a text completes a stack after an obligation. False proves nothing."""
        return self._spellable_after[self.lexer_of[stack.state], obligation] and self.tokens.can_complete(stack)

    def _surely_after(self, stack: Stack, ends: Iterable[Ended]) -> bool:
        """Check the same after a token that may end in these ways."""
        return any(self.surely_completable(*place) for place in self.parser.after(stack, ends))

    def may_end(self, stack: Stack, obligation: int) -> bool:
        """Check whether the text may be over after a token that led to a stack and left an obligation."""
        return not self.partials.obligations[obligation].required and self.parser.complete(stack)

    def _ends_well(self, stack: Stack, obligation: int) -> bool:
        return self.surely_completable(stack, obligation) or self.may_end(stack, obligation)

    def _is_completable(self, stack: Stack, token: int) -> bool:
        """Try the shortest texts of the next few terminals, then search."""

        def ended(hypothesis: tuple[Stack, int]) -> Iterator[tuple[Stack, int]]:
            """Return the stacks and obligations where the token of a hypothesis may have ended."""
            below, token = hypothesis
            return self.parser.after(below, self.spellings.shortest_ends[token, False])

        def onward(hypothesis: tuple[Stack, int]) -> list[tuple[Stack, int]]:
            return [(top, start) for top, obligation in ended(hypothesis) for start in self.starts(top, obligation)]

        tried = itertools.islice(reachable([(stack, token)], onward), MAX_SHORTEST)
        if any(self._ends_well(*place) for hypothesis in tried for place in ended(hypothesis)):
            return True
        return self._search_indented(stack, token, stack.layout) if stack.layout else self._search(stack, token)

    def _search(self, stack: Stack, token: int) -> bool:
        """Decide by one more token, if that is easy, and otherwise by the parser's reductions."""
        lookaheads: set[Lookahead] = set()
        for end in self.reductions.ends(token):
            top = self.parser.feed(stack, end.symbol)
            if top is None:
                continue
            after = self.reductions.lookaheads[self.lexer_of[top.state], end.obligation]
            then = itertools.starmap(Ended, after - {TEXT_END})
            if self.surely_completable(top, end.obligation) or self._surely_after(top, then):
                return True
            if TEXT_END in after and self.parser.complete(top):
                return True
            lookaheads |= after if end.symbol is None else {(str(end.symbol), end.obligation)}
        try:
            return self.reductions.possible(stack, lookaheads)
        except TooLarge as error:
            begun = self.partials.automata.names[self.partials.tokens[token].threads[0]]
            name = min(self.spellings.missing, default=begun)
            what = f"{error.what} after terminal {name} {shown(self.partials.terminals[name].pattern)}"
            raise TooLarge(what, error.count, SEARCH_REMEDY) from None

    def _search_indented(self, stack: Stack, token: int, layout: Layout) -> bool:
        """Decide for indented text, whose blocks have no bound, by a line end and each column that fits."""
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
