"""Diagnostics of a run: figures of each step, the descent of the particles, and the variance of Z-hat.

Chance enters a run by three kinds of event: `expand` keeps first choices, a step draws, `select` keeps candidates. A
*unit* of an event is a first choice, a run of a step, or a survivor. The variance of Z-hat is a sum over the units of
all events, each of which adds  c u (F - E)^2.  All weights here are shares of the sum of all weights.

- F is the influence of the unit: its share when the event ends, plus all later changes by draws and selections among
  its descendants. It is computed from the end:  F = w + sum (F' - w').  Here w is the share before a selection. F' and
  w' are those of each survivor after it. For a draw, F is the sum of the F' of its runs.
- E is the value of F without the event. Several runs from one start share their mean. All other units of an event share
  one factor r:  E = r w'. The squares are scaled by n / (n - 1), since r is estimated from n units. A single unit is
  compared with all particles: r = 1.
- u is the uncertainty of the unit: 1 - pi for a unit kept with probability pi, 1 / m for a run that represents m equal
  runs, and 1 for any other run.
- c is the product of 1 - u over the units of earlier events from which it descends.

The variance is computed twice: to the end of the run, and for each event up to the first later event at which fewer
than `MIN_FAMILIES` of its families are left. The larger one counts. No variance shows families that no particle has
seen, or that a selection has lost: `UNSEEN` allows for them. If one step gives the weight to fewer than `MIN_KNOWN`
units that chance kept, the run cannot know its error. docs/proofs.md, "The error of one run", derives and measures
this.

Sources: Chan & Lai (2013), Annals of Statistics 41; Lee & Whiteley (2018), Biometrika 105; Olsson & Douc (2019),
Bernoulli 25, for the shorter horizon; Hajek (1964), Annals of Mathematical Statistics 35, for selections; Satterthwaite
(1946), Biometrics 2.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import logsumexp
from llmppl.report.tables import TableView, chart
from llmppl.support.arguments import plural

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_FAMILIES = 3.0  # 1 / sum of squared shares: fewer do not show a variance
MIN_KNOWN = 2.0  # the same, of one step: fewer show no error
UNSEEN = 3.0  # weight of an unseen family over that of a seen one
ROUNDING = 1e-20  # of a relative variance
FIGURES = "index", "ess", "log_ml", "num_unique_ancestors", "num_finished", "num_dead"
HEADS = "step", "ess", "log Z-hat", "ancestors", "finished", "dead"
figures_of = operator.attrgetter(*FIGURES)


def _none() -> Any:
    return field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)


@dataclass(frozen=True)
class StepRecord:
    """Record of a step with M candidates and n survivors: figures, and the arrays for the standard error.

    index : int, from 1
    ess : float, effective sample size of the candidates, before selection and with twists, as a resampler uses it
    log_ml : float, log of the unbiased estimate of Z_t from the survivors, without twists
    num_unique_ancestors : int, number of particles of the step before (at step 1, initial ones) that have a survivor
    num_finished, num_dead : int, numbers of survivors that have finished, and of candidates that died in this step
    parents : (M,) int, index of each candidate's parent among the particles of the step before (at step 1, among the
        initial ones: N, or one with expand="distinct")
    groups, log_starts, log_kept, copies : (M,), the attributes of each candidate's `Extension`
    candidate_log_weights : (M,) float, after the step and before selection, twists included
    ancestors, log_chosen : (n,) int and float, results of the selection: candidates[ancestors[i]] is survivor i
    log_survivors : (n,) float, log-weights without twists

    Examples
    --------
    >>> posterior = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, seed=0)
    >>> [(step.index, round(step.ess, 2), step.num_finished) for step in posterior.steps]
    [(1, 3.24, 2), (2, 1.91, 4)]
    """

    index: int
    ess: float
    log_ml: float
    num_unique_ancestors: int
    num_finished: int
    num_dead: int
    parents: Indices = _none()
    groups: Indices = _none()
    log_starts: Floats = _none()
    log_kept: Floats = _none()
    copies: Indices = _none()
    candidate_log_weights: Floats = _none()
    ancestors: Indices = _none()
    log_chosen: Floats = _none()
    log_survivors: Floats = _none()


class StepRecords(TableView, tuple[StepRecord, ...]):
    """Records of the steps of a run. The repr is a table of figures; a notebook shows charts above it.

    Examples
    --------
    >>> posterior = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, seed=0)
    >>> len(posterior.steps), posterior.steps.lineages.tolist()
    (2, [4, 4])
    """

    __slots__ = ()
    numbers = True

    def _repr_html_(self) -> str:
        return self.charts() + super()._repr_html_()

    @property
    def lineages(self) -> Indices:
        """(T,) int: for each step, the number of its particles from which the last ones descend.

        A small number at early steps means that the particles share their beginnings, whatever the ess is.
        """
        counts = []
        alive = np.flatnonzero(self[-1].log_survivors > -np.inf) if self else np.empty(0, int)
        for step in reversed(self):
            counts.append(alive.size)
            alive = np.unique(step.parents[step.ancestors[alive]])
        return np.array(counts[::-1], dtype=np.int64)

    def charts(self) -> str:
        """Return charts of ess, lineages and log Z-hat as HTML, empty for fewer than two steps."""
        if len(self) < 2:
            return ""
        over = f"over {len(self)} steps<br>"
        ess = chart("ess", [step.ess for step in self], low=0.0)
        log_ml = chart("log Z-hat", [step.log_ml for step in self])
        charts = f"<div>ess {over}{ess}</div><div>log Z-hat {over}{log_ml}</div>"
        if self[-1].ancestors.size:  # else the record has figures alone
            lineages = chart("lineages", self.lineages.tolist(), low=0.0)
            charts += f"<div>lineages {over}{lineages}</div>"
        return f'<div style="display: flex; flex-wrap: wrap; gap: 4px 24px">{charts}</div>'

    def records(self) -> list[dict[str, Any]]:
        """Return a dict of figures for each step."""
        return [dict(zip(FIGURES, figures_of(step), strict=True)) for step in self]

    def _header(self) -> str:
        return plural(len(self), "step")

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = []
        for step in self:
            index, ess, log_ml, *counts = figures_of(step)
            rows.append((str(index), f"{ess:.1f}", f"{log_ml:z.2f}", *map(str, counts)))
        return HEADS, rows


def record_step(
    index: int, candidates: Any, ancestors: Indices, log_chosen: Floats, survivors: Any
) -> StepRecord:
    """Return the record of a step from the columns of its M candidates, and the population of its n survivors."""
    log_weights = candidates.log_weights
    log_survivors = survivors.log_weights
    log_total = logsumexp(log_weights)
    ess = 0.0
    if log_total > -np.inf:
        ess = float(np.exp(-logsumexp(2.0 * (log_weights - log_total))))
    return StepRecord(
        index=index,
        ess=ess,
        log_ml=logsumexp(log_survivors),
        num_unique_ancestors=len({*candidates.parents[ancestors].tolist()}),
        num_finished=int(np.sum(survivors.finished)),
        num_dead=int(np.sum(log_weights == -np.inf)),
        parents=candidates.parents,
        groups=candidates.groups,
        log_starts=candidates.log_starts,
        log_kept=candidates.log_kept,
        copies=candidates.copies,
        candidate_log_weights=log_weights,
        ancestors=ancestors,
        log_chosen=log_chosen,
        log_survivors=log_survivors,
    )


def log_ml_error(records: Sequence[StepRecord]) -> tuple[float | None, str]:
    """Return the standard error of log Z-hat, or None and the reason.

    se^2 = v + (v / 2)^2 + (UNSEEN / (m + 2))^2  with  v = V (1 + 4 / n), for the estimate V of Var(Z-hat) / Z-hat^2,
    its n units, and the smallest effective number m of families that an expansion or an earlier selection has left.
    """
    if not records:
        return None, "the program was finished before its first step"
    if records[-1].log_survivors.size == 0:
        return None, "all particles died"
    drawn = any((record.copies > 0).any() or (record.log_kept < 0).any() for record in records)
    if drawn and all(record.parents.size == 1 for record in records):
        return None, "there was one candidate at every step, and nothing to compare it with"
    share, index = max((_kept_by_chance(record), record.index) for record in records)
    if share > 1 / MIN_KNOWN:
        return (
            None,
            f"chance chose nearly all of the weight at step {index}: `repeat` shows the error",
        )
    to_end, units_to_end, families = relative_variance(records, 1.0)
    variance, units, _ = relative_variance(records, MIN_FAMILIES)
    variance = max(variance, to_end)
    v = variance * (1 + 4 / min(units, units_to_end)) if variance > ROUNDING else 0.0
    return math.sqrt(v + v * v / 4 + (UNSEEN / (families + 2)) ** 2), ""


def _kept_by_chance(step: StepRecord) -> float:
    """Return the sum of the squared shares of a step's weight that belong to first choices which chance kept."""
    _, first, groups = np.unique(step.groups, return_index=True, return_inverse=True)
    shares = _sums(groups, _shares(step.candidate_log_weights), first.size)
    return float(np.sum(_unsure(step.log_kept[first]) * shares**2))


def probability_error(records: Sequence[StepRecord], holds: NDArray[np.bool_]) -> float:
    """Return the standard error of the posterior probability of an event that holds for some survivors, (n,) bool.

    se^2 = V + 1 / (m + 2)^2, with the variance V of the estimated probability. The smallest effective number m of
    families that depend on one event stands for values that no particle has seen.
    """
    variance, _, families = relative_variance(records, holds=holds)
    return math.sqrt(variance + (families + 2) ** -2)


def relative_variance(
    records: Sequence[StepRecord], min_families: float = 1.0, holds: NDArray[np.bool_] | None = None
) -> tuple[float, float, float]:
    """Estimate Var(Z-hat) / Z-hat^2, the number of units on which the estimate rests, and that of the families.

    The number of units is Satterthwaite's, (sum of the terms)^2 / sum of their squares. With `holds`, the variance is
    that of the posterior probability of an event; F is then the share of the descendants for which it holds, less their
    share times its probability. Draws and the last selection leave families only then: for Z-hat, their weights are all
    there. Takes O(M log M) time and O(M) memory for a step of M candidates.
    """
    later = _Influence(_shares(records[-1].log_survivors), holds)
    seen = 0.0
    squares = 0.0
    families = math.inf
    for t, step in reversed([*enumerate(records)]):
        # selection: candidates from survivors
        chosen = _shares(step.log_chosen)
        log_weights = step.candidate_log_weights
        unsure = _unsure(log_weights[step.ancestors] - step.log_chosen)
        deviations = _deviations(unsure, later.influence, chosen)
        if t < len(records) - 1 or holds is not None:
            families = _fewer(families, np.sum(unsure * later.share**2))
        later.go_back(unsure, deviations, chosen, step.ancestors, _shares(log_weights))
        # draws: starts from candidates
        _, first, groups = np.unique(step.groups, return_index=True, return_inverse=True)
        starts = _shares(step.log_starts)
        parents = step.parents[first] if t else np.zeros(first.size, np.int64)
        unsure = 1 / np.maximum(step.copies, 1) * (step.copies > 0)
        unsure_first = _unsure(step.log_kept[first])
        kept = np.sum(unsure_first * _sums(groups, later.share, first.size) ** 2)
        inverse_families = kept + np.sum((unsure * (1 - unsure_first)[groups]) * later.share**2)
        families = _fewer(families, kept if holds is None else inverse_families)
        if inverse_families * min_families > 1 + 1e-9 and t < len(records) - 1:
            seen += np.sum(later.seen)
            squares += np.sum(later.squares)
            later = _Influence(_shares(log_weights))
        deviations = _deviations_of_runs(unsure, later.influence, starts, groups, step.copies)
        of_start = _sums(groups, starts, first.size)
        later.go_back(unsure, deviations, starts, groups, of_start)
        # first choices: particles from starts
        deviations = _deviations(unsure_first, later.influence, of_start)
        before = _shares(records[t - 1].log_survivors) if t else np.ones(1)
        later.go_back(unsure_first, deviations, of_start, parents, before)
    variance = float(seen + np.sum(later.seen))
    total = float(squares + np.sum(later.squares))
    return variance, variance**2 / total if variance > ROUNDING else 1.0, families


class _Influence:
    """Influence of the units of one event on the state at a later time.

    influence, share : (n,) float, F, and the share of the descendants of the unit at that time
    seen, squares : (n,) float, sums over the units of later events below it of  c u (F - E)^2,  with c = 1 for the unit
        itself, and of its square
    """

    def __init__(self, shares: Floats, holds: NDArray[np.bool_] | None = None) -> None:
        self.changes = holds is None  # True if changes by later events count
        self.influence = self.share = shares
        if holds is not None:
            self.influence = shares * (holds - np.sum(shares[holds]))
        self.seen: Floats = np.zeros_like(shares)
        self.squares: Floats = np.zeros_like(shares)

    def go_back(
        self, unsure: Floats, deviations: Floats, after: Floats, owners: Indices, before: Floats
    ) -> None:
        """Go back over an event: from its units (n,), of shares `after`, to their owners (m,), of shares `before`."""
        n = before.size
        term = unsure * deviations
        sure = 1 - unsure
        self.influence = (
            _sums(owners, self.influence - self.changes * after, n) + self.changes * before
        )
        self.share = _sums(owners, self.share, n)
        self.seen = _sums(owners, term + sure * self.seen, n)
        self.squares = _sums(owners, term**2 + sure**2 * self.squares, n)


def _deviations(unsure: Floats, influence: Floats, shares: Floats) -> Floats:
    """Return (F - r w)^2 n / (n - 1) for units (n,) of one event; 0 where nothing is uncertain."""
    weights = unsure * shares
    total = np.sum(weights)
    if total <= 0:
        return np.zeros_like(influence)
    left = 1 - np.sum((weights / total) ** 2)  # 1 - 1 / n
    if left < 1e-9:  # one unit
        return np.square(influence - shares)
    return np.square(influence - shares * np.sum(unsure * influence) / total) / left


def _deviations_of_runs(
    unsure: Floats, influence: Floats, shares: Floats, groups: Indices, copies: Indices
) -> Floats:
    """Return the same for runs (n,) of a step. Runs of one group share their mean; single runs share one factor."""
    runs = np.bincount(groups, np.maximum(copies, 0))[groups]
    mean = np.bincount(groups, influence)[groups] / np.maximum(runs, 1)
    several = (influence - mean * copies) ** 2 * runs / np.maximum(runs - 1, 1)
    return np.where(runs > 1, several, _deviations(unsure * (runs == 1), influence, shares))


def tail_shape(log_weights: Floats) -> float:
    """Return k-hat, the shape of a generalised Pareto distribution of the largest weights; NaN for fewer than 25.

    Above 0.7, averages over the weights are dominated by values that are too rare to have been drawn. Sources: Vehtari,
    Simpson, Gelman, Yao & Gabry (2024), "Pareto smoothed importance sampling"; Zhang & Stephens (2009).
    """
    n = log_weights.size
    size = int(min(n / 5, 3 * math.sqrt(n)))
    if size < 5:
        return math.nan
    weights = np.sort(np.exp(log_weights - np.max(log_weights)))
    tail = weights[n - size :] - weights[n - size - 1]
    if not tail[size // 4] > 1e-12 * tail[-1]:  # equal weights
        return math.nan
    grid = 30 + int(math.sqrt(size))
    b = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    b = b / (3 * tail[size // 4]) + 1 / tail[-1]
    k = np.mean(np.log1p(-b[:, None] * tail), axis=1)
    log_likelihood = size * (np.log(-b / k) - k - 1)
    b_hat = np.sum(b * _shares(log_likelihood))
    shape = np.mean(np.log1p(-b_hat * tail))
    return float((size * shape + 5) / (size + 10))  # with ten observations of 0.5


def _fewer(families: float, squares: float) -> float:
    """Return the smaller number of families, for the sum of the squares of their shares."""
    return min(families, 1 / squares) if squares > ROUNDING else families


def _sums(owners: Indices, values: Floats, n: int) -> Floats:
    """Return (n,) the sum of the values of each owner."""
    return np.asarray(np.bincount(owners, values, n), dtype=np.float64)


def _shares(log_weights: Floats) -> Floats:
    weights: Floats = np.exp(log_weights - np.max(log_weights))
    return weights / np.sum(weights)


def _unsure(log_kept: Floats) -> Floats:
    """Return 1 - pi; 0 where it is rounding."""
    unsure = -np.expm1(np.minimum(log_kept, 0.0))
    return np.where(unsure > 1e-12, unsure, 0.0)
