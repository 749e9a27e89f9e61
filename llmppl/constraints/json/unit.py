"""Units of JSON: the frames of a schema in a machine.

A frame's local states are numbered as they are met. Where an inner value begins, the frame is left by a *call*, and the
continuation brings the text back to the local state after the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.frames import Frame, Local
from llmppl.constraints.json.shapes import Lazy
from llmppl.constraints.machine.machine import (
    DONE,
    Continuation,
    Exit,
    Hypothesis,
    Item,
    Machine,
    Resume,
    State,
    Unit,
)
from llmppl.constraints.machine.units import NOTHING, StateUnit
from llmppl.support.graphs import Memo, Numbering

if TYPE_CHECKING:
    from llmppl.constraints.json.making import Frames

# the end of a name and the beginning of another one, which may be the same
TWO_NAMES = re.compile(rb'"[ \t\n\r]*:.*,[ \t\n\r]*"', re.DOTALL)


class FrameUnit(StateUnit):
    """Unit of a frame. Its table forgets which names an object has that its schema does not list; `step` does not."""

    def __init__(self, frame: Frame, frames: Frames) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.frame = frame
        self.frames = frames
        if frame.remembers:
            self.doubtful = TWO_NAMES

    def fill(self, number: int, bytes: Ints, /) -> None:
        local: Local = self.states[number]
        row = np.zeros(256, np.int32)
        for low, high, after in local.expanded[0]:
            row[low : high + 1] = self.number(after)
        self.table[number] = row

    def step(self, number: int, byte: int) -> int:
        if not self.frame.remembers:
            return super().step(number, byte)
        after = self.frame.step(self.states[number], byte)
        return 0 if after is None else self.number(after)

    def new_row(self, state: Local) -> int:
        if not self.frame.has_exits(state.key):
            self.has_exits[len(self.states)] = False
        return -1

    def num_plain(self, number: int) -> float | None:
        return self.frame.num_plain(self.states[number].key)

    def exits_at(self, number: int) -> tuple[Exit, ...]:
        local: Local = self.states[number]
        if not self.frame.has_exits(local.key):
            return NOTHING
        _, calls, is_done = local.expanded
        exits: list[Exit] = list(calls)
        if is_done:
            exits.append(DONE)
        return tuple(exits)

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        if label is DONE:
            return [after]
        call: Any = label
        return begin_value(self.frames, call[0], after.before(Resume, self, self.number(call[1])))

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        return self.frames.least_bytes(self.states[number], alone) + after.bytes_left(alone)


def table(machine: Machine, limit: int) -> tuple[npt.NDArray[np.int32], Bools, int]:
    """Return the states of a schema's machine as a table of next states, which of them accept, and the start.

    Raises ValueError if they are endless, and TooLarge if they are more than `limit`.
    """
    outer: Memo[Continuation, frozenset[Unit]] = Memo(lambda after: frozenset(_units_after(after)))
    numbers = Numbering[State | None]([None, machine.start])  # 0 is the dead state
    rows = [np.zeros(256, np.int32)]
    for state in islice(numbers.keys_in_order, 1, None):  # grows
        assert state is not None
        for unit, _, after in state.hypotheses:
            if unit.doubtful is not None:
                raise ValueError(
                    'an object may have names that it does not list; "additionalProperties": false '
                    "would work"
                )
            if unit in outer[after]:
                raise ValueError("it nests without end; a part that may be any JSON does, too")
        row = np.zeros(256, np.int32)
        for bytes, target in machine.moves_by_table(state):
            row[bytes] = numbers[target]
        rows.append(row)
        if len(rows) > limit:
            raise TooLarge(
                "the schema", f"more than {limit:,} states", "fewer or shorter parts would work"
            )
    accepting = [state is not None and state.accepts for state in numbers.keys_in_order]
    return np.stack(rows), np.array(accepting), 1


def _units_after(after: Continuation) -> Iterator[Unit]:
    """Yield the units to which a text returns."""
    while isinstance(after, Resume):
        yield after.unit
        after = after.rest


def begin_value(frames: Frames, part: Lazy, after: Continuation) -> list[Item]:
    """Return the items with which a value of a shape begins, before a continuation."""
    items = list[Item]()
    for local in frames.starts[part]:
        unit = unit_of(local.frame, frames)
        items.append(Hypothesis(unit, unit.number(local), after))
    return items


def unit_of(frame: Frame, frames: Frames) -> FrameUnit:
    """Return the unit of a frame. All schemas share those of strings and numbers, which call no other frame."""
    if frame.unit is None:
        frame.unit = FrameUnit(frame, frames)
    return frame.unit  # type: ignore[no-any-return]
