"""What a run tells of itself: each step in figures, who descends from whom, and how accurate the estimate of Z is.

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

Sources: Lee & Whiteley (2018), "Variance estimation in the particle filter", Biometrika 105; Chan & Lai (2013), "A
general theory of particle filters in hidden Markov models and some applications", Annals of Statistics 41.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.inference.particles import StepSummary
from llmppl.inference.resampling import logsumexp

M = TypeVar("M")
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MOST = 3_000                                            # candidates of a step, whose pairs are a matrix
FEWEST = 3.0                                            # independent families of particles at the end


@dataclass(frozen=True)
class Expansion(Generic[M]):
    """The candidates of a step, and what chance has done to make them.

    candidates : list of M
    parents : (M,) int, whose copy each is
    groups : (M,) int, the same for those that ran the step independently from the same start
    log_starts : (M,) float, log-weights before the step, without twists
    log_kept : (M,) float, log of the probability with which it was kept when first choices were selected, else 0
    copies : (M,) int, how many independent runs of the step it stands for; 0 if the step was not run or drew nothing
        more than a first choice that was selected; -1 if it drew more after that and is the only one of its group
    """

    candidates: list[M]
    parents: Indices
    groups: Indices
    log_starts: Floats
    log_kept: Floats
    copies: Indices


@dataclass(frozen=True)
class _Change:
    """What is kept of a step: its `Expansion` but for the candidates, the selection, and the survivors' weights."""

    parents: Indices
    groups: Indices
    log_starts: Floats
    log_kept: Floats
    copies: Indices
    log_weights: Floats
    ancestors: Indices
    log_chosen: Floats
    log_survivors: Floats                               # without twists


class History:
    """The genealogy of a run that began with `n` particles.

    Attributes
    ----------
    steps : list of StepSummary
    roots : (n,) int, for each particle the initial one it descends from
    """

    def __init__(self, n: int) -> None:
        self.steps: list[StepSummary] = []
        self.roots: Indices = np.arange(n)
        self._n = n
        self._changes: list[_Change] = []

    def add(
        self,
        expansion: Expansion[Any],
        log_weights: Floats,
        ancestors: Indices,
        log_chosen: Floats,
        survivors: Sequence[Any],
    ) -> StepSummary:
        """Write down a step.

        Parameters
        ----------
        expansion : Expansion, with M candidates
        log_weights : (M,) float, after the step and before selection, twists included
        ancestors, log_chosen : (n,) int and float, what the selection returned
        survivors : the n particles
        """
        parents = expansion.parents
        log_survivors = np.array([p.log_weight - p.log_twist for p in survivors], dtype=np.float64)
        log_total = logsumexp(log_weights)
        self.roots = self.roots[parents[ancestors]]
        step = StepSummary(
            index=len(self.steps) + 1,
            ess=float(np.exp(-logsumexp(2.0 * (log_weights - log_total)))) if log_total > -np.inf else 0.0,
            log_ml=logsumexp(log_survivors),
            num_unique_ancestors=len(np.unique(parents[ancestors])),
            num_finished=sum(p.finished for p in survivors),
            num_dead=int(np.sum(log_weights == -np.inf)),
        )
        self.steps.append(step)
        self._changes.append(
            _Change(
                parents,
                expansion.groups,
                expansion.log_starts,
                expansion.log_kept,
                expansion.copies,
                log_weights,
                ancestors,
                log_chosen,
                log_survivors,
            )
        )
        return step

    def accuracy(self) -> tuple[float | None, str]:
        """The standard error of log Z-hat, the root of Var(Z-hat) / Z-hat^2 to first order, or None and the reason."""
        if not self._changes or self._changes[-1].log_survivors.size == 0:
            return None, "all particles died" if self._changes else "the program was finished before its first step"
        if any((change.copies < 0).any() for change in self._changes):
            return None, 'a step drew more than its first choice; with expand="distinct" nothing shows what that varies'
        if self._independent():
            variance, families = self._of_independent_runs()
        elif max(change.parents.size for change in self._changes) > MOST:
            return None, f"a step had more than {MOST:,} candidates, too many for a table of their pairs"
        else:
            variance, families = self._of_pairs()
        if families < FEWEST:
            return None, f"the particles left descend from fewer than {FEWEST:.0f} independent draws of one step"
        if variance < -1e-9:
            return None, "the estimate of the variance is negative"
        return float(np.sqrt(max(variance, 0.0))), ""

    def _independent(self) -> bool:
        """Whether every particle has gone its own way from the start, one copy at a time."""
        return self._n > 1 and all(
            np.unique(change.parents).size == change.parents.size
            and np.unique(change.ancestors).size == change.ancestors.size
            and np.array_equal(change.log_weights[change.ancestors], change.log_chosen)
            for change in self._changes
        )

    def _of_independent_runs(self) -> tuple[float, float]:
        """(n sum_i W_i^2 - 1) / (n - 1), dead particles counted, and the ess: `_of_pairs` without a table."""
        weights = _normalised(self._changes[-1].log_survivors)
        squares = float(np.sum(weights**2))
        return (self._n * squares - 1) / (self._n - 1), 1 / squares

    def _of_pairs(self) -> tuple[float, float]:
        """Var(Z-hat) / Z-hat^2, and the effective number of families of particles that share no chance.

        Two particles share chance by the draws and the uncertain selections of their common past; `apart` is C without
        its scaling.
        """
        C = apart = np.ones((1, 1))                     # (n, n), of the particles before the step
        log_weights = np.zeros(1)                       # (n,) theirs
        for t, change in enumerate(self._changes):
            parents = np.zeros_like(change.parents) if t == 0 else change.parents      # all start at one state
            starts = _kept(C, parents, change.groups, change.log_kept)
            starts = _rescaled(starts, change.log_starts, _mass(C, log_weights))
            moved = _moved(_scaled_up(starts, change.groups, change.copies), change.copies)
            each = np.arange(change.ancestors.size)
            log_kept = np.minimum(change.log_weights[change.ancestors] - change.log_chosen, 0.0)
            C = _kept(moved, change.ancestors, each, log_kept)
            C = _rescaled(C, change.log_chosen, _mass(moved, change.log_weights))
            apart = _moved(_kept(apart, parents, change.groups, change.log_kept), change.copies)
            apart = _kept(apart, change.ancestors, each, log_kept)
            log_weights = change.log_survivors
        return 1 - _mass(C, log_weights), 1 / max(1 - _mass(apart, log_weights), 1e-12)


def _kept(C: Floats, ancestors: Indices, groups: Indices, log_kept: Floats) -> Floats:
    """C after a selection kept each group of `ancestors` with probability exp(log_kept)."""
    kept = C[np.ix_(ancestors, ancestors)]
    return np.where(groups[:, None] == groups, kept * np.exp(log_kept), kept)


def _rescaled(C: Floats, log_weights: Floats, mass: float) -> Floats:
    """C with the sum over pairs that it had before the selection."""
    now = _mass(C, log_weights)
    return C * (mass / now) if now > 0 else C


def _scaled_up(C: Floats, groups: Indices, copies: Indices) -> Floats:
    """C of candidates about to draw, `copies` each (M,): pairs in a group stand for those of each with itself, too."""
    drew = copies > 0
    number = np.bincount(groups, np.maximum(copies, 0))[groups]     # (M,) copies in the same group
    siblings = (groups[:, None] == groups) & drew[:, None] & drew
    return np.where(siblings, C * (number / np.maximum(number - 1, 1))[:, None], C)


def _moved(C: Floats, copies: Indices) -> Floats:
    """C after candidates have drawn, `copies` each (M,)."""
    C = C.copy()
    np.fill_diagonal(C, np.diagonal(C) * np.where(copies > 0, 1 - 1 / np.maximum(copies, 1), 1.0))
    return C


def _mass(C: Floats, log_weights: Floats) -> float:
    """The sum over pairs, W' C W of the normalised weights."""
    weights = _normalised(log_weights)
    return float(weights @ C @ weights)


def _normalised(log_weights: Floats) -> Floats:
    return np.exp(log_weights - logsumexp(log_weights))
