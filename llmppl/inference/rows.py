"""Rows: the population of a `ConstrainedText`, whose particles step together.

A step computes the tables of the next token of all rows, then chooses among all tokens of all tables (`Distinct`) or
draws from each (`Copies`), in a few calls of numpy. Programs, and their choices, are made of rows when somebody looks.
`llmppl.models.rows` has the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Floats, Ints
from llmppl.distributions.blocks import draw_many
from llmppl.inference.choosing import choose_from
from llmppl.inference.expansion import Copies, Distinct
from llmppl.inference.particles import Death, deaths_of
from llmppl.inference.population import Columns, Models, Population
from llmppl.models.choices import State, stream_of
from llmppl.models.programs import ConstrainedText
from llmppl.models.rows import (
    Maker,
    Row,
    Rules,
    Site,
    after,
    is_row,
    row_of,
    set_contexts,
    sites_of,
)
from llmppl.support.graphs import Memo

LAST_CHILD = 2**32 - 1  # of a SeedSequence


def population_of(
    particles: list[Any], expand: Any, family: State, step: int, rules: Rules | None = None
) -> Population:
    """Return the population of some particles: `Rows` if all are texts under one constraint and equal rules.

    The random streams of rows are children of `family`. `rules` are those of earlier rows, if there are any.
    """
    if type(expand) not in (Copies, Distinct) or not particles or not all(map(is_row, particles)):
        return Models(particles)
    if rules is None:
        rules = Rules(particles[0])
    if not all(map(rules.are_of, particles)):
        return Models(particles)
    log_weights = np.array([each.log_weight for each in particles], np.float64)
    return Rows([*map(Row.of, particles)], log_weights, rules, family, step)


class Rows:
    """Population of rows. See `llmppl.inference.population.Population`."""

    def __init__(
        self, rows: list[Row], log_weights: Floats, rules: Rules, family: State, step: int
    ) -> None:
        self.rows = rows
        self.log_weights = log_weights
        self.finished: NDArray[np.bool_] = np.array([row.finished for row in rows], bool)
        self._rules = rules
        self._family = family
        self._step = step
        self._models: list[ConstrainedText] | None = None

    def models(self) -> list[Any]:
        if self._models is None:
            self._models = programs_of(self.rows, self.log_weights, self._family, self._step)
        return self._models

    def texts(self) -> list[str]:
        return [row.data.decode("utf-8", "replace") for row in self.rows]

    def begin(self, expand: Any) -> Population:
        if self._models is None and type(expand) in (Copies, Distinct):
            return self
        again = population_of(self.models(), expand, self._family, self._step, self._rules)
        return again if isinstance(again, Rows) else again.begin(expand)

    def restore(self) -> None:
        """Do nothing: rows never change."""

    def expand(self, run: Any) -> RowCandidates:
        found = []
        run.runtime.run([lambda: found.append(self._expanded(run))], [f"step {run.t}"])
        return found[0]

    def _expanded(self, run: Any) -> RowCandidates:
        going = [row for row in dict.fromkeys(self.rows) if not row.finished]
        sites, ended = sites_of(going, self._rules)
        rows = [ended.get(row, row) for row in self.rows]
        if isinstance(run.expand, Distinct):
            makers, columns = self._distinct(run, rows, sites)
        else:
            makers, columns = self._copies(run, rows, sites)
        return RowCandidates(makers, columns, self._rules, self._family, run.t)

    def _distinct(
        self, run: Any, rows: list[Row], sites: dict[Row, Site]
    ) -> tuple[list[Maker], Columns]:
        """Return the candidates of `Distinct`, and their columns."""
        numbers = [i for i, row in enumerate(rows) if row in sites]
        going = [sites[rows[i]] for i in numbers]
        starts = self.log_weights[numbers] - [site.proposal.log_total for site in going]
        places, indices, log_starts, log_kept = choose_from(
            run.rng, starts, [site.proposal for site in going], run.expand.N * run.expand.K
        )
        chosen = [
            after(going[j], index)
            for j, index in zip(places.tolist(), indices.tolist(), strict=True)
        ]
        still = [i for i, row in enumerate(rows) if row not in sites]
        kept_weights = np.array(
            [-math.inf if rows[i].death else self.log_weights[i] for i in still], np.float64
        )
        parents = np.array(numbers, np.int64)[places]
        log_weights = log_starts + np.array([gain for _, gain in chosen], np.float64)
        makers = [maker for maker, _ in chosen]
        if still:
            makers += [rows[i] for i in still]
            parents = np.concatenate([parents, np.array(still, np.int64)])
            order = np.argsort(parents, kind="stable")
            makers = [makers[i] for i in order.tolist()]
            parents = parents[order]
            log_starts = np.concatenate([log_starts, kept_weights])[order]
            log_kept = np.concatenate([log_kept, np.zeros(len(still))])[order]
            log_weights = np.concatenate([log_weights, kept_weights])[order]
        num = len(makers)
        return makers, Columns(
            parents, np.arange(num), log_starts, log_kept, np.zeros(num, np.int64), log_weights
        )

    def _uniforms(self, step: int, num: int) -> Floats:
        """Return (num, 2) uniforms of a step. Those of a candidate depend on its place, not on the number of others."""
        stream = self._family._replace(spawn_key=(*self._family.spawn_key, step, LAST_CHILD))
        uniforms: Floats = stream_of(stream).random((num, 2))
        return uniforms

    def _copies(
        self, run: Any, rows: list[Row], sites: dict[Row, Site]
    ) -> tuple[list[Maker], Columns]:
        """Return the candidates of `Copies`, and their columns."""
        K = run.expand.K
        parents = np.repeat(np.arange(len(rows)), np.where(self.finished, 1, K))
        moving = ~self.finished[parents]
        log_starts = self.log_weights[parents] - np.where(moving, math.log(K), 0.0)
        makers: list[Maker] = [rows[i] for i in parents.tolist()]
        gains = [-math.inf if row.death else 0.0 for row in makers]
        number_of: dict[Maker, int] = {row: j for j, row in enumerate(sites)}
        draws = [at for at, row in enumerate(makers) if row in number_of]
        if draws:
            going = [*sites.values()]
            places = np.array([number_of[makers[at]] for at in draws], np.int64)
            uniforms = self._uniforms(run.t, len(makers))[draws]
            drawn = draw_many(uniforms, [site.proposal for site in going], places)
            steps = Memo[tuple[int, int], tuple[Maker, float]](
                lambda key: after(going[key[0]], key[1])
            )
            for at, key in zip(
                draws, zip(places.tolist(), drawn.tolist(), strict=True), strict=True
            ):
                makers[at], gains[at] = steps[key]
        groups = parents
        if run.t == 1:  # all particles start in one state
            groups = np.zeros_like(parents)
        columns = Columns(
            parents,
            groups,
            log_starts,
            np.zeros(len(parents)),
            moving.astype(np.int64),
            log_starts + gains,
        )
        if run.expand.merge:
            return merged(makers, columns)
        return makers, columns


class RowCandidates:
    """Candidates that are rows. See `llmppl.inference.population.Candidates`."""

    def __init__(
        self, makers: list[Maker], columns: Columns, rules: Rules, family: State, step: int
    ) -> None:
        self.columns = columns
        self._makers = makers
        self._rules = rules
        self._family = family
        self._step = step
        self._survivors: Rows | None = None
        self._ancestors: Ints = np.empty(0, np.int64)

    @property
    def finished(self) -> NDArray[np.bool_]:
        return np.array([each.finished for each in self._makers], bool)

    @property
    def active(self) -> bool:
        return any(not each.finished for each in self._makers)

    def models(self) -> list[Any]:
        """Return the candidates as programs. The first survivor of each is the program of the population."""
        found: list[Any] = [None] * len(self._makers)
        if self._survivors is not None:
            for at, model in zip(self._ancestors.tolist(), self._survivors.models(), strict=True):
                found[at] = found[at] or model
        others = [at for at, model in enumerate(found) if model is None]
        family = self._family._replace(spawn_key=(*self._family.spawn_key, 0))
        rows = [row_of(self._makers[at]) for at in others]
        models = programs_of(rows, self.columns.log_weights[others], family, self._step)
        for at, model in zip(others, models, strict=True):
            found[at] = model
        return found

    def _model(self, at: int) -> ConstrainedText:
        return row_of(self._makers[at]).program(float(self.columns.log_weights[at]), self._family)

    def heaviest(self) -> Any:
        return self._model(int(np.argmax(self.columns.log_weights)))

    def limits(self) -> list[str]:
        return [each.limit for each in self._makers if each.limit]

    def deaths(self, step: int) -> Sequence[Death]:
        dead = np.flatnonzero(self.columns.log_weights == -np.inf)
        return deaths_of(step, [self._model(at) for at in dead.tolist()])

    def take(self, ancestors: Ints, log_weights: Floats, streams: Iterator[State]) -> Rows:
        rows = [row_of(self._makers[at]) for at in ancestors.tolist()]
        self._ancestors = ancestors
        self._survivors = Rows(rows, log_weights, self._rules, self._family, self._step)
        return self._survivors


def programs_of(
    rows: Sequence[Row], log_weights: Floats, family: State, step: int
) -> list[ConstrainedText]:
    """Return the programs of rows. The random stream of each is a child of `family`, by the step and its place."""
    set_contexts(rows)
    return [
        row.program(log_weight, family._replace(spawn_key=(*family.spawn_key, step, i)))
        for i, (row, log_weight) in enumerate(zip(rows, log_weights.tolist(), strict=True))
    ]


def merged(makers: list[Maker], columns: Columns) -> tuple[list[Maker], Columns]:
    """Merge the candidates of one parent that drew the same token: their weights are added."""
    first = dict[tuple[int, int], int]()
    kept = list[int]()
    log_starts = columns.log_starts.copy()
    log_weights = columns.log_weights.copy()
    copies = columns.copies.copy()
    for at, (maker, parent) in enumerate(zip(makers, columns.parents.tolist(), strict=True)):
        earlier = at
        if copies[at] and not maker.death and not maker.limit:
            earlier = first.setdefault((parent, id(maker)), at)
        if earlier == at:
            kept.append(at)
            continue
        log_starts[earlier] = np.logaddexp(log_starts[earlier], log_starts[at])
        log_weights[earlier] = np.logaddexp(log_weights[earlier], log_weights[at])
        copies[earlier] += copies[at]
    columns = Columns(
        columns.parents[kept],
        columns.groups[kept],
        log_starts[kept],
        columns.log_kept[kept],
        copies[kept],
        log_weights[kept],
    )
    return [makers[at] for at in kept], columns
