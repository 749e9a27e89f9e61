"""Unit of a grammar: its partial tokens in a machine.

A state of the unit is a set of partial tokens, with the tokens that have just ended. The parser's stack is a
continuation. Where a token ends, the parser reads it, and the next token begins on another stack. A special token is an
exit: a `TokenUnit` reads it, and the text resumes in the state after it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.lark.completion import Completion
from llmppl.constraints.lark.lengths import Lengths
from llmppl.constraints.lark.lexer import Ended, Outcome
from llmppl.constraints.lark.parser import Stack
from llmppl.constraints.lark.terminals import FIRST_SPECIAL
from llmppl.constraints.machine.machine import Continuation, Exit, Hypothesis, Item, Resume
from llmppl.constraints.machine.units import StateUnit, TokenUnit
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

MAX_READ = 150  # partial tokens on stacks that a search for an end reads
MAX_KEPT = 1 << 14  # results of searches that are kept
NOTHING: Outcome = (), ()
Place = tuple[Stack, int]  # a partial token on a stack


class OnStack(Continuation):
    """Rest of a text of a grammar, whose tokens so far led to a parser stack."""

    def __init__(self, after: Continuation, stack: Stack) -> None:
        super().__init__(after)
        self.rest = after
        self.stack = stack

    def begin(self) -> Iterable[Item]:
        raise NotImplementedError  # a token's end is needed: `LarkUnit.follow`

    def find_left(self, alone: Bools) -> float:
        return math.inf


class LarkUnit(StateUnit):
    """Unit of a grammar."""

    is_always_viable = False

    def __init__(self, completion: Completion, specials: Sequence[str | int]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._special_units = [TokenUnit(special) for special in specials]
        self._completion = completion
        self._partials = completion.partials
        self._parser = completion.parser
        self._left = Memo(self._search, MAX_KEPT)
        self._outcomes = Memo(self._find_outcomes)

    @cached_property
    def _lengths(self) -> Lengths:
        return Lengths(self._parser, self._partials)

    def begin_token(self, stack: Stack, obligation: int, after: Continuation) -> list[Item]:
        """Return the items after a token that led to a stack and left an obligation: other tokens, or the end."""
        items = list[Item]()
        if self._completion.may_go_on(stack, obligation):
            tokens = self._completion.starts(stack, obligation)
            if tokens:
                number = self.number((tokens, ()))
                items.append(Hypothesis(self, number, after.before(OnStack, stack)))
        if self._completion.may_end(stack, obligation):
            items.append(after)
        return items

    def fill(self, number: int, bytes: Ints, /) -> None:
        tokens = self.states[number][0]
        row = np.zeros(256, np.int32)
        for low, high, outcome in self._moves(tokens):
            if outcome != NOTHING:
                row[low:high] = self.number(outcome)
        self.table[number] = row

    def _moves(self, tokens: tuple[int, ...]) -> list[tuple[int, int, Outcome]]:
        """Return the outcomes of all symbols for some partial tokens: (first, last + 1, outcome)."""
        if not tokens:
            return []
        cuts = {0, self._partials.specials.stop}
        for token in tokens:
            cuts.update(self._partials.classes[token])
        moves = list[tuple[int, int, Outcome]]()
        for low, high in itertools.pairwise(sorted(cuts)):
            moves.append((low, high, self._partials.step_all(tokens, low)))
        return moves

    def exits_at(self, number: int) -> tuple[Exit, ...]:
        tokens, ends = self.states[number]
        exits: list[Exit] = [*ends]
        for symbol, unit in zip(self._partials.specials, self._special_units, strict=True):
            after = self._partials.step_all(tokens, symbol)
            if after != NOTHING:
                exits.append((unit, self.number(after)))
        return tuple(exits)

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        assert isinstance(after, OnStack)
        items = list[Item]()
        if not isinstance(label, Ended):
            special: Any = label
            unit, number = special
            if self.is_viable(number, after):
                items.append(Hypothesis(unit, unit.begin, after.before(Resume, self, number)))
            return items
        for stack, obligation in self._parser.after(after.stack, [label]):
            items += self.begin_token(stack, obligation, after.rest)
        return items

    def settled(self, number: int, after: Continuation) -> int:
        assert isinstance(after, OnStack)
        tokens, _ = self.states[number]
        left = tuple(token for token in tokens if self._completion.completable(after.stack, token))
        if not left:
            return 0
        return self.number((left, ()))

    def is_viable(self, number: int, after: Continuation) -> bool:
        assert isinstance(after, OnStack)
        tokens, ends = self.states[number]
        for token in tokens:
            if self._completion.completable(after.stack, token):
                return True
        places = self._parser.after(after.stack, ends)
        return any(self._completion.may_follow(*place) for place in places)

    # ---- distances

    def _find_outcomes(self, key: tuple[int, bytes]) -> list[Outcome]:
        """Return the different outcomes of a partial token after special tokens, and bytes that are tokens."""
        token, alone = key
        found = dict[Outcome, None]()
        for low, high, outcome in self._moves((token,)):
            if low >= FIRST_SPECIAL or any(alone[low:high]):
                found[outcome] = None
        return list(found)

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        assert isinstance(after, OnStack)
        tokens, ends = self.states[number]
        least = math.inf
        for token in tokens:
            least = min(least, self._bytes_of(after.stack, token, alone))
        for stack, obligation in self._parser.after(after.stack, ends):
            least = min(least, self.least_after(stack, obligation, alone))
        return least + after.rest.bytes_left(alone)

    def is_far(self, number: int, after: Continuation, most: float) -> bool:
        assert isinstance(after, OnStack)
        tokens, ends = self.states[number]
        return not ends and all(
            self._lengths.of_token(after.stack, token) > most for token in tokens
        )

    def least_after(self, stack: Stack, obligation: int, alone: Bools) -> float:
        """Return a bound of the bytes after a token that led to a stack and left an obligation."""
        if self._completion.may_end(stack, obligation):
            return 0.0
        if not self._completion.may_go_on(stack, obligation):
            return math.inf
        least = math.inf
        for token in self._completion.starts(stack, obligation):
            least = min(least, self._bytes_of(stack, token, alone))
        return least

    def _bytes_of(self, stack: Stack, token: int, alone: Bools) -> float:
        return self._left[(stack, token), alone.tobytes()]

    def _search(self, key: tuple[Place, bytes]) -> float:
        """Return the least bytes to an end; inf if a search finds none."""
        start, alone = key
        order = itertools.count()
        todo = [(0.0, 0, next(order), start)]  # bound of the bytes in all, less those so far, order
        seen = {start}
        num_read = 0
        while todo and num_read < MAX_READ:
            bound, depth, _, place = heapq.heappop(todo)
            whole = self._lengths.of_token(*place) - depth
            if whole > bound:
                if whole < math.inf:
                    heapq.heappush(todo, (whole, depth, next(order), place))
                continue
            num_read += 1
            for after in self._places_after(place, alone):
                if after is None:
                    return 1 - depth
                if after not in seen:
                    seen.add(after)
                    heapq.heappush(todo, (whole, depth - 1, next(order), after))
        return math.inf

    def _places_after(self, place: Place, alone: bytes) -> Iterator[Place | None]:
        """Yield the stacks and partial tokens after one more byte, and None if the text may end after it."""
        stack, token = place
        completion = self._completion
        for tokens, ends in self._outcomes[token, alone]:
            for next_stack, obligation in self._parser.after(stack, ends):
                if completion.may_end(next_stack, obligation):
                    yield None
                if completion.may_go_on(next_stack, obligation):
                    for each in completion.starts(next_stack, obligation):
                        yield next_stack, each
            for each in tokens:
                if completion.completable(stack, each):
                    yield stack, each
