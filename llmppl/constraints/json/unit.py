"""Units of JSON: the frames of a schema in a machine.

A frame's local states are numbered as they are met. Where an inner value begins, the frame is left by a *call*, and the
continuation brings the text back to the local state after the value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.frames import Frame, Local
from llmppl.constraints.json.shapes import Lazy
from llmppl.constraints.machine.machine import DONE, Continuation, Exit, Hypothesis, Item, Resume
from llmppl.constraints.machine.units import StateUnit

if TYPE_CHECKING:
    from llmppl.constraints.json.texts import Texts

# the end of a name and the beginning of another one, which may be the same
TWO_NAMES = re.compile(rb'"[ \t\n\r]*:.*,[ \t\n\r]*"', re.DOTALL)


class FrameUnit(StateUnit):
    """Unit of a frame. Its table forgets which names an object has that its schema does not list; `step` does not."""

    def __init__(self, frame: Frame, texts: Texts) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.frame = frame
        self.texts = texts
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

    def _find_exits(self, number: int) -> tuple[Exit, ...]:
        _, calls, is_done = self.states[number].expanded
        exits: list[Exit] = list(calls)
        if is_done:
            exits.append(DONE)
        return tuple(exits)

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        if label is DONE:
            return [after]
        call: Any = label
        return begin_value(self.texts, call[0], after.before(Resume, self, self.number(call[1])))

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        return self.texts.least_bytes(self.states[number], alone) + after.bytes_left(alone)


def begin_value(texts: Texts, part: Lazy, after: Continuation) -> list[Item]:
    """Return the items with which a value of a shape begins, before a continuation."""
    items = list[Item]()
    for local in texts.starts[part]:
        unit = unit_of(local.frame, texts)
        items.append(Hypothesis(unit, unit.number(local), after))
    return items


def unit_of(frame: Frame, texts: Texts) -> FrameUnit:
    """Return the unit of a frame. All schemas share those of strings and numbers, which call no other frame."""
    if frame.unit is None:
        frame.unit = FrameUnit(frame, texts)
    return frame.unit  # type: ignore[no-any-return]
