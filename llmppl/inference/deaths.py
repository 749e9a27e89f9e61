"""Deaths: what the particles died of that are not there any more, counted by step and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmppl.report.tables import MAX_ROWS, html_table, one_line, text_table, without_middle

__all__ = ["Death", "Deaths", "died", "together"]

MAX_END = 100               # characters kept of a dead particle's text,
MAX_REASON = 200            # and of what it died of
DEATH = {"step": int, "reason": str, "count": int, "text": str}        # in a file
HEADS = "count", "steps", "reason"


@dataclass(frozen=True)
class Death:
    """`count` particles died at `step`, by `reason`, which names the statement; `text` is the text of one of them.

    Of a long text the last hundred characters are kept, after "…"; of a long reason the beginning and the end.
    """

    step: int
    reason: str
    count: int = 1
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_END:                    # else a run would keep all texts of all its dead
            object.__setattr__(self, "text", "…" + self.text[1 - MAX_END :])
        object.__setattr__(self, "reason", without_middle(self.reason, MAX_REASON))

    def __str__(self) -> str:
        return f"{self.count} at step {self.step}: {self.reason}{self.example}"

    @property
    def example(self) -> str:
        """What is told of the text."""
        return f", one with the text {one_line(self.text)!r}" if self.text else ""


class Deaths(tuple[Death, ...]):
    """What the particles died of that are not there: one `Death` for each step and reason.

    In order of step, then of count, the largest first. The repr adds up the steps.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        table = ["", *text_table(HEADS, self._rows())] if self else []
        return "\n".join([self._header(), *table])

    def _repr_html_(self) -> str:
        table = html_table(HEADS, self._rows()) if self else ""
        return f"<p>{self._header()}</p>{table}"

    def _header(self) -> str:
        return f"Deaths({self.number} particles)"

    def _rows(self) -> list[tuple[str, str, str]]:
        """The commonest, and the others in one row."""
        rows = self.by_reason()
        told = rows[: MAX_ROWS - (len(rows) > MAX_ROWS)]
        if others := rows[len(told) :]:
            told.append((sum(row[0] for row in others), "", f"for {len(others)} other reasons"))
        return [(str(count), steps, reason) for count, steps, reason in told]

    @property
    def number(self) -> int:
        """How many particles died."""
        return sum(death.count for death in self)

    def by_reason(self) -> list[tuple[int, str, str]]:
        """Of each reason how many, at which steps, and the reason with the text of the last; the commonest first."""
        by_reason: dict[str, list[Death]] = {}
        for death in self:
            by_reason.setdefault(death.reason, []).append(death)
        rows = []
        for reason, deaths in sorted(by_reason.items(), key=lambda each: -each[1][-1].step):
            steps = list(dict.fromkeys([str(deaths[0].step), str(deaths[-1].step)]))
            rows.append((sum(death.count for death in deaths), "-".join(steps), reason + deaths[-1].example))
        return sorted(rows, key=lambda row: -row[0])


def died(step: int, particles: Iterable[Any]) -> list[Death]:
    """The deaths of those of log weight -inf, one for each reason."""
    deaths: dict[str, Death] = {}
    for particle in particles:
        if particle.log_weight == -np.inf:
            reason = particle.death or "weight zero"
            known = deaths.get(reason)
            deaths[reason] = replace(known, count=known.count + 1) if known else Death(step, reason, 1, str(particle))
    return list(deaths.values())


def together(deaths: Iterable[Death]) -> Deaths:
    """One death for each step and reason, with their counts added."""
    added: dict[tuple[int, str], Death] = {}
    for death in deaths:
        key = death.step, death.reason
        added[key] = replace(added[key], count=added[key].count + death.count) if key in added else death
    return Deaths(sorted(added.values(), key=lambda death: (death.step, -death.count)))
