"""Texts of a JSON schema as a recognizer over bytes: frames on a stack.

A state is a `Config`: the local states that the text so far may have reached (`frames`), each with the configuration
that follows when its value is complete. There are several local states where alternatives begin alike. Equal local
states are merged, so a configuration is a graph of stacks and stays small.

Frames are made when a text first needs them. So a schema costs what its texts use of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.constraint import Bools
from llmppl.constraints.json.arrays import Items
from llmppl.constraints.json.frames import Automaton, Frame, Local, Whitespace, Words
from llmppl.constraints.json.objects import Members
from llmppl.constraints.json.scalars import numbers, quoted, spellings
from llmppl.constraints.json.shapes import Array, Choice, Constants, Lazy, Loop, Number, Object, Shape, String, unfolded
from llmppl.support.graphs import Memo, Numbering
from llmppl.support.locks import Lock, locked

MAX_KEPT = 200_000                                  # configurations that are kept
MAX_PATH = 2_000                                    # bytes and values of a way to an end
UNASSIGNED = b"\xf1\xf2\xf4"                        # first bytes of planes without characters
# bytes of JSON texts, but for planes of Unicode without characters, which tokenizers leave out
WRITTEN = sorted({*b"\t\n\r", *range(32, 192), *range(194, 245)} - {*UNASSIGNED})
Pair = tuple[Local, "Config"]


class Config:
    """State of `Texts`: pairs of a local state and the configuration after its value. `accepts`: the text may end.

    Equal configurations are one object, as long as it is kept.
    """

    __slots__ = ("accepts", "items")

    def __init__(self, items: tuple[Pair, ...], accepts: bool) -> None:
        self.items = items
        self.accepts = accepts

    def __deepcopy__(self, memo: object) -> Config:
        return self


END = Config((), True)                              # nothing may follow


class Texts:
    """Recognizer of the texts of a shape: `start`, `step` and `accepts`; `moves` has all bytes at once."""

    def __init__(self, blank: Whitespace, in_order: bool) -> None:
        self._blank = blank
        self._in_order = in_order
        self._frames: dict[int, tuple[Shape, Frame | None]] = {}
        self._open: set[int] = set()
        self._left: dict[Local, float] = {}
        self._least: dict[Lazy, float] = {}
        self.starts = Memo(self._find_starts)
        self._pushed = Memo[Pair, Config](self._push, MAX_KEPT)
        self._known = Memo[tuple[tuple[Pair, ...], bool], Config](lambda key: Config(*key), MAX_KEPT)
        self._lock = Lock()

    def begin(self, root: Lazy) -> None:
        """Begin with a shape that has instances."""
        self.root = root
        self.start = self.closed((local, END) for local in self.starts[root])

    # ---- frames

    def is_live(self, part: Lazy) -> bool:
        """Return whether some finite value has a shape (or cannot be refuted while the shape is read)."""
        try:
            shape = part.shape
        except Loop:
            return True
        return self._is_live(shape)

    def _is_live(self, shape: Shape) -> bool:
        if isinstance(shape, Choice):
            return any(map(self._is_live, shape.options))
        return isinstance(shape, Constants) or self._frame(shape) is not None

    def _frame(self, shape: Shape) -> Frame | None:
        """Return the frame of a shape; None if it has no instances."""
        key = id(shape)
        is_outermost = not self._open
        if key not in self._frames and key not in self._open:       # only an infinite value would need itself
            self._open.add(key)
            try:
                frame = self._new_frame(shape)
            finally:
                self._open.discard(key)
            if frame is not None or is_outermost or not isinstance(shape, Array | Object):
                self._frames[key] = shape, frame
        return self._frames.get(key, (shape, None))[1]

    # ---- bounds

    def _least_of(self, part: Lazy) -> float:
        found = self._least.get(part)
        if found is None:
            self._least[part] = math.inf            # meanwhile: only an infinite value would need itself
            lefts = (self.bytes_left(start) for start in self.starts[part])
            found = self._least[part] = next((left for left in lefts if left < math.inf), math.inf)
        return found

    def bytes_left(self, local: Local) -> float:
        """Return the bytes of one way to complete a value, inf if none is found: a bound of the tokens."""
        path = list[tuple[Local, float]]()
        while local not in self._left and len(path) < MAX_PATH:
            moves, calls, is_done = local.closing
            if is_done:
                self._left[local] = 0
                break
            if calls:
                path.append((local, self._least_of(calls[0][0])))
                local = calls[0][1]
            else:                                   # by the first byte that is no whitespace
                path.append((local, 1))
                local = next((after for lo, hi, after in moves if hi > 32 and lo not in UNASSIGNED), local)
        left = self._left.get(local, math.inf)
        for each, bytes in reversed(path):
            left += bytes
            if left < math.inf:
                self._left[each] = left
        return left

    def least_bytes(self, local: Local, alone: Bools) -> float:
        """Return the same bound; inf if some bytes of JSON texts are no tokens by themselves."""
        return self.bytes_left(local) if alone[WRITTEN].all() else math.inf

    def stack_left(self, stack: Any) -> float:
        """Return such a bound for a configuration, or a local state and the stack below."""
        if isinstance(stack, Config):
            return 0 if stack.accepts else min(map(self.stack_left, stack.items), default=math.inf)
        return self.bytes_left(stack[0]) + self.stack_left(stack[1])

    def config(self, stack: Any) -> Config:
        """Return the configuration of a stack."""
        return stack if isinstance(stack, Config) else self.closed([(stack[0], self.config(stack[1]))])

    # ---- frames of shapes

    def _new_frame(self, shape: Shape) -> Frame | None:
        match shape:
            case Constants():                       # strings, numbers and words
                return Words(text for value in shape.values for text in spellings(value))
            case Number():
                dfa = numbers(shape)
                return _automaton(dfa) if dfa.start else None
            case String():
                return quoted(shape)
            case Array():
                items = Items(shape, self._blank, self.is_live)
                return items if items.is_possible else None
        assert isinstance(shape, Object)
        members = Members(shape, self._blank, self.is_live, self._in_order)
        return members if members.is_possible else None

    def _find_starts(self, part: Lazy) -> tuple[Local, ...]:
        """Return the local states in which a value of a shape begins."""
        return tuple(frame.start for frame in map(self._frame, unfolded(part.shape)) if frame)

    # ---- configurations

    def _push(self, pair: Pair) -> Config:
        words, others, text = pair[0].content       # inside a text or name, there are moves only
        is_inside = text or others or (words and all(rest for rest, _ in words))
        return self._merged([pair], False) if is_inside else self.closed([pair])

    def closed(self, pairs: Iterable[Pair], is_closing: bool = False) -> Config:
        """Return the configuration of some pairs, of the values that are complete there, and of those that begin.

        With `is_closing`, there is none that only makes the text longer.
        """
        accepts = False
        todo = list(pairs)
        found = []
        seen = set()
        while todo:
            pair = todo.pop()
            local, below = pair
            moves, calls, done = local.closing if is_closing else local.expanded
            if calls or done:
                if pair in seen:
                    continue
                seen.add(pair)
                if done:
                    accepts |= below.accepts
                    todo += below.items
                for part, after in calls:
                    todo += [(start, self._pushed[after, below]) for start in self.starts[part]]
            if moves:
                found.append(pair)
        return self._merged(found, accepts)

    def _merged(self, pairs: Iterable[Pair], accepts: bool) -> Config:
        """Return the configuration of some pairs; the stacks below equal local states are one."""
        found: dict[Local, Config] = {}
        for local, below in pairs:
            known = found.get(local, below)
            if known is not below:
                below = self._merged([*known.items, *below.items], known.accepts or below.accepts)
            found[local] = below
        return self._known[tuple(sorted(found.items(), key=lambda pair: id(pair[0]))), accepts]

    def accepts(self, state: Config) -> bool:
        return state.accepts

    @locked
    def step(self, state: Config, byte: int) -> Config | None:
        """Return the state after one more byte, or None if no text continues so."""
        return self._after([
            (after, below) for local, below in state.items if (after := local.frame.step(local, byte))
        ])  # fmt: skip

    def _after(self, pairs: list[Pair], is_closing: bool = False) -> Config | None:
        if len(pairs) == 1 and not is_closing:
            return self._pushed[pairs[0]]
        return self.closed(pairs, is_closing) if pairs else None

    @locked
    def moves(self, state: Config, is_closing: bool = False) -> list[tuple[int, int, Config]]:
        """Return the states after all bytes: first and last byte, and the state, which may lack the used names."""
        edges = [
            (lo, hi, (after, below)) for local, below in state.items
            for lo, hi, after in (local.closing if is_closing else local.expanded)[0]
        ]  # fmt: skip
        parts = [(lo, hi, [pair]) for lo, hi, pair in edges]
        if len(state.items) > 1:
            cuts = sorted({lo for lo, _, _ in edges} | {hi + 1 for _, hi, _ in edges})
            parts = [(lo, end - 1, [pair for a, b, pair in edges if a <= lo <= b]) for lo, end in pairwise(cuts)]
        return [(lo, hi, after) for lo, hi, pairs in parts if (after := self._after(pairs, is_closing))]

    def table(self, limit: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], int]:
        """Return all configurations as a table of next states, which of them accept, and the start.

        Raises ValueError if they are endless, and TooLarge if they are more than `limit`.
        """
        inside = Memo[Config, set[Frame]](
            lambda config: {frame for local, below in config.items for frame in (local.frame, *inside[below])}
        )
        states = Numbering([Config((), False), self.start])         # the first stands for the dead state
        rows = [np.zeros(256, np.int32)]
        accepting = [False]
        for config in islice(states.keys_in_order, 1, None):            # grows
            for local, below in config.items:
                if local.frame.remembers:
                    raise ValueError('an object may have names that it does not list; "additionalProperties": false '
                                     "would work")      # fmt: skip
                if local.frame in inside[below]:
                    raise ValueError("it nests without end; a part that may be any JSON does, too")
            row = np.zeros(256, np.int32)
            for lo, hi, after in self.moves(config):
                row[lo : hi + 1] = states[after]
            rows.append(row)
            accepting.append(config.accepts)
            if len(rows) > limit:
                raise TooLarge("the schema", f"more than {limit:,} states", "fewer or shorter parts would work")
        return np.stack(rows), np.array(accepting), 1


_automaton = lru_cache(1_000)(Automaton)
