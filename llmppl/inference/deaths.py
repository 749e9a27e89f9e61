"""Deaths: the reasons why particles got weight zero, counted by step and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmppl.report.tables import MAX_ROWS, html_table, one_line, text_table, without_middle

__all__ = ["Death", "Deaths", "deaths_of", "merge_deaths"]

MAX_END = 100               # characters kept of a dead particle's text
MAX_REASON = 200            # and of the reason
DEATH = {"step": int, "reason": str, "count": int, "text": str}        # the shape in a file
HEADS = "count", "steps", "reason"


@dataclass(frozen=True)
class Death:
    """Death of `count` particles at `step`. `reason` names the statement, `text` is the text of one of them.

    A long text is cut to "…" and its last hundred characters, a long reason to its beginning and end.
    """

    step: int
    reason: str
    count: int = 1
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_END:                    # bounds the memory of a run
            object.__setattr__(self, "text", "…" + self.text[1 - MAX_END :])
        object.__setattr__(self, "reason", without_middle(self.reason, MAX_REASON))

    def __str__(self) -> str:
        return f"{self.count} at step {self.step}: {self.reason}{self.example}"

    @property
    def example(self) -> str:
        """End of a sentence that shows the text."""
        return f", one with the text {one_line(self.text)!r}" if self.text else ""


class Deaths(tuple[Death, ...]):
    """The deaths of a run, one `Death` for each step and reason.

    They are sorted by step, then by count, the largest first. The repr adds up the steps of a reason.
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
        """Return the commonest reasons, and one row for all others."""
        rows = self.by_reason()
        common = rows[: MAX_ROWS - (len(rows) > MAX_ROWS)]
        if rest := rows[len(common) :]:
            common.append((sum(row[0] for row in rest), "", f"for {len(rest)} other reasons"))
        return [(str(count), steps, reason) for count, steps, reason in common]

    @property
    def number(self) -> int:
        """Number of particles that died."""
        return sum(death.count for death in self)

    def by_reason(self) -> list[tuple[int, str, str]]:
        """Return for each reason the count, the steps, and the reason with the text of its last death.

        The commonest reason comes first.
        """
        by_reason: dict[str, list[Death]] = {}
        for death in self:
            by_reason.setdefault(death.reason, []).append(death)
        rows = []
        for reason, deaths in sorted(by_reason.items(), key=lambda each: -each[1][-1].step):
            steps = list(dict.fromkeys([str(deaths[0].step), str(deaths[-1].step)]))
            rows.append((sum(death.count for death in deaths), "-".join(steps), reason + deaths[-1].example))
        return sorted(rows, key=lambda row: -row[0])


def deaths_of(step: int, particles: Iterable[Any]) -> list[Death]:
    """Return the deaths among particles: those of log-weight -inf, one `Death` for each reason."""
    deaths: dict[str, Death] = {}
    for particle in particles:
        if particle.log_weight == -np.inf:
            reason = particle.death or "weight zero"
            known = deaths.get(reason)
            deaths[reason] = replace(known, count=known.count + 1) if known else Death(step, reason, 1, str(particle))
    return list(deaths.values())


def merge_deaths(deaths: Iterable[Death]) -> Deaths:
    """Return one death for each step and reason, with the counts added."""
    merged: dict[tuple[int, str], Death] = {}
    for death in deaths:
        key = death.step, death.reason
        merged[key] = replace(merged[key], count=merged[key].count + death.count) if key in merged else death
    return Deaths(sorted(merged.values(), key=lambda death: (death.step, -death.count)))
