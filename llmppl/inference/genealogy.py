"""Diagnostics of a run: each step in figures, who descends from whom, and the variance of Z-hat.

The standard error rests on pairs. Z-hat^2 is a sum over all pairs of particles, and E[Z-hat^2] = Z^2 + Var(Z-hat),
where the variance comes from pairs that share chance. A second sum over pairs, with a coefficient C_ij for each pair,
is kept so that its expectation is Z^2; the difference estimates the variance. At first there is one starting state, and
C = 1. Then C changes where chance is shared:

- A candidate and itself share the draws of a step; two copies of one parent p do not. So the pairs of two different
  ones of K copies stand for all K^2:  C_jj = 0  and  C_jk = C_pp K / (K - 1). Other pairs stay as they are.
- A selection keeps j with probability pi_j and gives it the weight w_j / pi_j, whose square is too large on average by
  1 / pi_j:  C_jj *= pi_j. Two different particles are both kept a bit less often than if selected independently, since
  the number of survivors is fixed: C is scaled so that the sum over pairs stays what it was.

With multinomial selection the factor of the scaling has the mean N / (N - 1), as in Lee & Whiteley. For other schemes
the scaling is an approximation: it takes the pairs of which a scheme keeps one at most to be like the others.

C_ij says only where the pasts of i and j part, so it is never written out: particles stand in the order of their
genealogy, in which all that share a past are next to one another, and C is a sum of blocks, constant on those. There
are at most 3 n of them, empty ones included, and the sum over all pairs is a sum over blocks.

Sources: Lee & Whiteley (2018), "Variance estimation in the particle filter", Biometrika 105; Chan & Lai (2013), "A
general theory of particle filters in hidden Markov models and some applications", Annals of Statistics 41.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmppl.display.svg import chart
from llmppl.display.tables import frame, html_table, text_table
from llmppl.distributions import logsumexp

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_FAMILIES = 3.0                                      # independent families of particles at the end
FIGURES = "ess", "log_ml", "num_unique_ancestors", "num_finished", "num_dead"
HEADS = "step", "ess", "log Z-hat", "ancestors", "finished", "dead"


def _none() -> Any:
    return field(default_factory=lambda: np.empty(0), repr=False, compare=False)


@dataclass(frozen=True)
class StepRecord:
    """What is kept of a step: its figures, and the arrays on which the standard error rests. M candidates, n survivors.

    index : int, from 1
    ess : float, effective sample size of the candidates, before selection and with twists: what a resampler looks at
    log_ml : float, log of the unbiased estimate of Z_t that the survivors make, without twists
    num_unique_ancestors : int, how many particles of the step before (at step 1, initial ones) have a survivor
    num_finished : int, survivors that have finished
    num_dead : int, candidates that died in this step
    parents : (M,) int, the place of each candidate's parent among the particles of the step before (at step 1, among
        the initial ones: N, or one with expand="distinct")
    groups, log_starts, log_kept, copies : (M,), those of the `Extension` that each candidate is
    candidate_log_weights : (M,) float, after the step and before selection, twists included
    ancestors, log_chosen : (n,), what the selection returned
    log_survivors : (n,) float, log-weights without twists
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


class StepRecords(tuple[StepRecord, ...]):
    """The steps of a run in figures, a `StepRecord` each. The repr is a table; a notebook shows charts above it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join([self._header(), *(["", *text_table(HEADS, self._rows(), numbers=True)] if self else [])])

    def _repr_html_(self) -> str:
        return f"<p>{self._header()}</p>{self.charts()}{html_table(HEADS, self._rows(), numbers=True) if self else ''}"

    def charts(self) -> str:
        """The ess and log Z-hat of the steps as charts, of two steps or more."""
        if len(self) < 2:
            return ""
        drawn = {"ess": chart("ess", [step.ess for step in self], low=0.0),
                 "log Z-hat": chart("log Z-hat", [step.log_ml for step in self])}  # fmt: skip
        each = "".join(f"<div>{name} over {len(self)} steps<br>{svg}</div>" for name, svg in drawn.items())
        return f'<div style="display: flex; flex-wrap: wrap; gap: 4px 24px">{each}</div>'

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each step: its figures. ImportError, with what to install, without pandas."""
        return frame({name: [getattr(step, name) for step in self] for name in ("index", *FIGURES)})

    def _header(self) -> str:
        return f"{len(self)} step{'s' * (len(self) != 1)}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (str(step.index), f"{step.ess:.1f}", f"{step.log_ml:.2f}")
            + tuple(str(getattr(step, name)) for name in FIGURES[2:])
            for step in self
        ]


class Genealogy:
    """The genealogy of a run that began with `n` particles.

    Attributes
    ----------
    records : list of StepRecord
    roots : (n,) int, for each particle the initial one it descends from
    """

    def __init__(self, n: int) -> None:
        self.records: list[StepRecord] = []
        self.roots: Indices = np.arange(n)

    def add(
        self,
        extensions: Sequence[Any],
        candidate_log_weights: Floats,
        ancestors: Indices,
        log_chosen: Floats,
        survivors: Sequence[Any],
    ) -> StepRecord:
        """Write down a step.

        Parameters
        ----------
        extensions : the M of type Extension
        candidate_log_weights : (M,) float, after the step and before selection, twists included
        ancestors, log_chosen : (n,) int and float, what the selection returned
        survivors : the n particles
        """
        def column(name: str, kind: type) -> Any:
            return np.array([getattr(each, name) for each in extensions], dtype=kind)

        parents = column("parent", np.int64)
        log_survivors = np.array([p.log_weight - p.log_twist for p in survivors], dtype=np.float64)
        log_total = logsumexp(candidate_log_weights)
        log_shares = 2.0 * (candidate_log_weights - log_total) if log_total > -np.inf else np.array([np.inf])
        self.roots = self.roots[parents[ancestors]]
        record = StepRecord(
            index=len(self.records) + 1,
            ess=float(np.exp(-logsumexp(log_shares))),
            log_ml=logsumexp(log_survivors),
            num_unique_ancestors=len(np.unique(parents[ancestors])),
            num_finished=sum(p.finished for p in survivors),
            num_dead=int(np.sum(candidate_log_weights == -np.inf)),
            parents=parents,
            groups=column("group", np.int64),
            log_starts=column("log_start", np.float64),
            log_kept=column("log_kept", np.float64),
            copies=column("copies", np.int64),
            candidate_log_weights=candidate_log_weights,
            ancestors=ancestors,
            log_chosen=log_chosen,
            log_survivors=log_survivors,
        )
        self.records.append(record)
        return record


def log_ml_error(records: Sequence[StepRecord]) -> tuple[float | None, str]:
    """The standard error of log Z-hat, the root of Var(Z-hat) / Z-hat^2 to first order, or None and the reason."""
    if not records or records[-1].log_survivors.size == 0:
        return None, "all particles died" if records else "the program was finished before its first step"
    if any((record.copies < 0).any() for record in records):
        return None, 'a step drew more than its first choice; with expand="distinct" nothing shows what that varies'
    variance, families = variance_and_families(records)
    if families < MIN_FAMILIES:
        return None, f"the particles left descend from fewer than {MIN_FAMILIES:.0f} independent draws of one step"
    if variance < -1e-9:
        return None, "the estimate of the variance is negative"
    return float(np.sqrt(max(variance, 0.0))), ""


def variance_and_families(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Var(Z-hat) / Z-hat^2, and the effective number of families of particles that share no chance.

    Two particles share chance by the draws and the uncertain selections of their common past; `apart` is C without its
    scaling. Both take O(M log M) time and O(M) memory for a step of M candidates.
    """
    C, apart = _Pairs(), _Pairs()                       # of the particles before the step
    log_weights = np.zeros(1)                           # (n,) theirs
    for t, step in enumerate(records):
        parents = np.zeros_like(step.parents) if t == 0 else step.parents       # all start at one state
        each = np.arange(step.ancestors.size)
        log_kept = np.minimum(step.candidate_log_weights[step.ancestors] - step.log_chosen, 0.0)
        mass = C.mass(log_weights)
        C.keep(parents, step.groups, step.log_kept)
        C.rescale(step.log_starts, mass)
        C.scale_up(step.groups, step.copies)
        C.move(step.copies)
        mass = C.mass(step.candidate_log_weights)
        C.keep(step.ancestors, each, log_kept)
        C.rescale(step.log_chosen, mass)
        apart.keep(parents, step.groups, step.log_kept)
        apart.move(step.copies)
        apart.keep(step.ancestors, each, log_kept)
        log_weights = step.log_survivors
    return 1 - C.mass(log_weights), 1 / max(1 - apart.mass(log_weights), 1e-12)


class _Pairs:
    """The coefficients C_ij of all pairs of n particles: at first of one, C = 1.

    order : (n,) int, the particles in the order of their genealogy
    own : (n,) float, C_jj of each particle
    low, high, value : (B,), the blocks: C_ij is the sum of the `value` of those that hold the places of i and j in
        `order`, from `low` to before `high`. Two blocks are disjoint, or one lies within the other.
    """

    def __init__(self) -> None:
        self.order = self.low = np.zeros(1, np.int64)
        self.high = np.ones(1, np.int64)
        self.own = self.value = np.ones(1)

    def mass(self, log_weights: Floats) -> float:
        """The sum over pairs, W' C W of the normalised weights."""
        below = np.append(0.0, np.cumsum(np.exp(log_weights - np.max(log_weights))[self.order]))
        below /= below[-1]                              # (n + 1,) so that the sum of all is 1 without rounding
        each = self.value * (below[self.high] - below[self.low]) ** 2
        return float(_above_rounding(np.sum(each), np.sum(np.abs(each))))

    def rescale(self, log_weights: Floats, mass: float) -> None:
        """Give the sum over pairs the value that it had before the selection."""
        now = self.mass(log_weights)
        if now > 0:
            self.own = self.own * (mass / now)
            self.value = self.value * (mass / now)

    def keep(self, ancestors: Indices, groups: Indices, log_kept: Floats) -> None:
        """Go on to descendants (M,) of which each group, of one ancestor, was kept with probability exp(log_kept)."""
        rank = np.empty_like(self.order)
        rank[self.order] = np.arange(self.order.size)
        rank = rank[ancestors]                          # (M,) the place of each one's ancestor
        self.order = np.lexsort((groups, rank))
        low, high = np.searchsorted(rank[self.order], [self.low, self.high])
        self.own = self.own[ancestors]
        self._change(low, high, self.value, groups, np.exp(log_kept))

    def scale_up(self, groups: Indices, copies: Indices) -> None:
        """About to draw, `copies` each (M,): pairs in a group stand for those of each with itself, too."""
        number = np.bincount(groups, np.maximum(copies, 0))[groups]     # (M,) copies in the same group
        factor = np.where(copies > 0, number / np.maximum(number - 1, 1), 1.0)
        self._change(self.low, self.high, self.value, groups, factor)

    def move(self, copies: Indices) -> None:
        """Having drawn, `copies` each (M,): a particle shares its draws with itself."""
        factor = np.where(copies > 0, 1 - 1 / np.maximum(copies, 1), 1.0)
        self._change(self.low, self.high, self.value, np.arange(copies.size), factor)

    def _change(self, low: Indices, high: Indices, value: Floats, groups: Indices, factor: Floats) -> None:
        """Take these blocks, and multiply the pairs within each group, all of one C and one `factor` (M,), by it."""
        starts = np.flatnonzero(np.diff(groups[self.order], prepend=-1))
        first = self.order[starts]
        low, high = np.append(low, starts), np.append(high, np.append(starts[1:], self.order.size))
        value = np.append(value, self.own[first] * (factor[first] - 1))
        self.own = self.own * factor
        size = self.order.size + 1
        at, which = np.unique(low * size + high, return_inverse=True)       # one block may be there twice
        self.low, self.high = np.divmod(at, size)
        self.value = _above_rounding(np.bincount(which, value), np.bincount(which, np.abs(value)))


def _above_rounding(total: Any, absolute: Any) -> Any:
    """A sum, or 0 where it is nothing beside the sum of the absolute terms: what is 0 must not be scaled up."""
    return np.where(np.abs(total) > 1e-12 * absolute, total, 0.0)
