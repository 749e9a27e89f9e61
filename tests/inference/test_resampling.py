"""Tests of resampling by exact integrals over the uniforms, and by a threshold found by bisection.

The result of a scheme is piecewise constant in its uniforms. So its expectation is a finite sum over the cells between
the breakpoints: a scripted rng gives the middle of each cell, and the cell's volume is its probability.
"""

import warnings
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from itertools import accumulate, product
from math import log, prod

import numpy as np
import pytest
from helpers.common import repetitions
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppl.distributions import logsumexp
from llmppl.inference.resampling import multinomial, optimal, stratified, systematic, threshold

EXACT = settings(derandomize=True, deadline=None, max_examples=repetitions(1000, 80))


class Scripted:
    """Generator that returns given uniforms, and counts them."""

    def __init__(self, uniforms: Iterable[float] = ()) -> None:
        self.uniforms = list(uniforms)

    def random(self, size=None):
        if size is None:
            return self.uniforms.pop(0)
        drawn, self.uniforms = self.uniforms[:size], self.uniforms[size:]
        assert len(drawn) == size
        return np.array(drawn)


class Constant:
    """Generator whose uniforms all have one value."""

    def __init__(self, u: float) -> None:
        self.random = partial(np.full, fill_value=u)


class Branches:
    """Generator whose uniforms U decide  U x < y  as `path` says, then as is likelier, and note each probability."""

    def __init__(self, path: list[bool]) -> None:
        self.path, self.ahead, self.odds = [], list(path), []

    def random(self, size):
        return self

    def __mul__(self, x):
        self.x = x
        return self

    def __lt__(self, y):
        odds = np.clip(np.divide(y, self.x, out=np.zeros_like(y), where=self.x > 0), 0, 1).ravel().tolist()
        made = [self.ahead.pop(0) if self.ahead else p > 0.5 for p in odds]
        self.path, self.odds = self.path + made, self.odds + odds
        return np.reshape(made, y.shape)


class Forbidden:
    """Generator that fails when it is used."""

    def random(self, size=None):
        raise AssertionError("drew a random number")


def logs(weights) -> np.ndarray:
    return np.array([log(w) if w else -np.inf for w in weights])


def bisected_threshold(weights: list[Fraction], N: int) -> Fraction:
    """Return c with sum min(c w, 1) = N to 1e-18, relative, by bisection, for more than N positive weights."""
    low, high = Fraction(0), 1 / min(w for w in weights if w)
    while high - low > high / 10**18:
        middle = (low + high) / 2
        if sum(min(middle * w, 1) for w in weights) < N:
            low = middle
        else:
            high = middle
    return high


# Every scheme is put to all checks below. Beside it stands, as a function of the shares N w / sum(w) and of N, how many
# uniforms it draws and where in (0, 1) its result may change as any of them moves. `optimal` makes a tree of decisions.
SCHEMES = {
    multinomial: lambda shares, N: (N, [cum / N for cum in accumulate(shares)]),
    stratified: lambda shares, N: (N, [cum % 1 for cum in accumulate(shares)]),
    systematic: lambda shares, N: (1, [cum % 1 for cum in accumulate(shares)]),
    optimal: None,
}
COPYING = [scheme for scheme in SCHEMES if scheme is not optimal]           # those that may return a particle twice


def cells(scheme, weights: list[Fraction], N: int):
    """Yield every (probability, ancestors, new weights) that the scheme may return."""
    todo = [[]] if scheme is optimal else []
    while todo:
        rng = Branches(path := todo.pop())
        ancestors, log_weights = optimal(rng, logs(weights), N)
        chances = [p if made else 1 - p for p, made in zip(rng.odds, rng.path, strict=True)]
        yield prod(chances), ancestors, np.exp(log_weights)
        undecided = [i for i in range(len(path), len(rng.path)) if 0 < rng.odds[i] < 1]
        todo += [[*rng.path[:i], not rng.path[i]] for i in undecided]
    if scheme is optimal:
        return
    num_uniforms, breaks = SCHEMES[scheme]([N * w / sum(weights) for w in weights], N)
    ends = sorted({Fraction(0), Fraction(1), *breaks})
    ends = [end for i, end in enumerate(ends) if i == 0 or end - ends[i - 1] > Fraction(1, 10**12)]
    sides = [((low + high) / 2, high - low) for low, high in zip(ends, ends[1:], strict=False)]
    for cell in product(sides, repeat=num_uniforms):
        rng = Scripted(float(middle) for middle, _ in cell)
        ancestors, log_weights = scheme(rng, logs(weights), N)
        assert not rng.uniforms
        yield float(prod(length for _, length in cell)), ancestors, np.exp(log_weights)


def totals(ancestors: np.ndarray, weights: np.ndarray, M: int) -> np.ndarray:
    """Return the new weight of each old particle."""
    return np.bincount(ancestors, weights, minlength=M)


CASES = [
    ([6, 2, 1, 1], 2),
    ([6, 2, 1, 1], 3),
    ([1, 1, 1, 1], 3),
    ([0, 5, 0, 3, 2, 1], 3),
    ([7, 7, 7, 1], 3),
    ([2, 1, 1], 2),
    ([3, 0, 1, 4, 4], 1),
    ([1, 1000, 3, 0, 500, 500], 3),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("counts, N", CASES)
def test_the_expected_new_weight_of_every_particle_is_its_old_weight(scheme, counts, N):
    weights = [Fraction(count, 7) for count in counts]
    mean, probability = np.zeros(len(weights)), 0.0
    for p, ancestors, new in cells(scheme, weights, N):
        mean += p * totals(ancestors, new, len(weights))
        probability += p
    assert probability == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(mean, [float(w) for w in weights], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", COPYING)
def test_pairs_of_copies_vary_as_the_scheme_says(scheme):
    """Pairs of copies separate independent from dependent draws: P(both of 2 are the first of two equal particles)."""
    rng = np.random.default_rng(2)
    both = np.mean([np.all(scheme(rng, [0.0, 0.0], 2)[0] == 0) for _ in range(2000)])
    if scheme is multinomial:
        assert abs(both - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 2000)
    else:
        assert both == 0


@pytest.mark.parametrize("counts, N", [case for case in CASES if case[1] < np.count_nonzero(case[0])])
def test_optimal_changes_the_weights_least_of_all_schemes(counts, N):
    weights = [Fraction(count, 7) for count in counts]

    def squared_change(scheme):
        old = np.array([float(w) for w in weights])
        return sum(p * np.sum((totals(a, new, len(old)) - old) ** 2) for p, a, new in cells(scheme, weights, N))

    least = squared_change(optimal)
    assert all(least <= squared_change(scheme) + 1e-9 for scheme in COPYING)


def test_the_threshold_of_weights_6_2_1_1_is_5_halves():
    log_c, certain = threshold(np.log([0.6, 0.2, 0.1, 0.1]), 2)
    assert np.exp(log_c) == pytest.approx(2.5, rel=1e-14)
    assert certain.tolist() == [0]


@pytest.mark.parametrize(
    "counts, N",
    [*CASES, ([1] * 9, 4), ([2, 2, 1, 1, 0, 2, 1, 1], 3), ([10**12, 1, 3, 10**12, 10**9, 2], 3), ([9, 8, 7, 6, 5], 1)],
)
def test_optimal_keeps_w_with_probability_c_w_and_as_1_over_c(counts, N):
    weights = [Fraction(count, 7) for count in counts]
    old, c = np.array(weights, dtype=float), float(bisected_threshold(weights, N))
    chances = np.zeros(len(old))
    for p, ancestors, new in cells(optimal, weights, N):
        chances[ancestors] += p
        assert new == pytest.approx(np.maximum(old[ancestors], 1 / c), rel=1e-12)
    assert chances == pytest.approx(np.minimum(c * old, 1.0), rel=1e-9)


def test_one_of_two_equal_neighbours_is_kept_independently_of_other_pairs():
    """Every second particle in order would be the same child of all parents."""
    chances = dict.fromkeys(product([0, 1], [2, 3], [4, 5]), 0.0)
    for p, ancestors, _ in cells(optimal, [Fraction(1)] * 6, 3):
        if p > 1e-9:                                    # else a rounding
            chances[tuple(ancestors.tolist())] += p
    assert [*chances.values()] == pytest.approx([1 / 8] * 8)


integer_weights = st.lists(st.sampled_from([0, 0, 1, 1, 1, 2, 2, 3, 5, 8, 100, 12345]), min_size=1, max_size=12)


def test_a_weight_that_rounding_moves_across_the_threshold_changes_no_choice():
    for seed in range(100):
        near = [logs([4, 2, 1, 1]) * (1 + shift) for shift in (-1e-15, 0.0, 1e-15)]
        assert len({tuple(optimal(np.random.default_rng(seed), each, 3)[0].tolist()) for each in near}) == 1


@EXACT
@given(integer_weights, st.data())
def test_the_threshold_is_the_one_that_bisection_finds(counts, data):
    num_alive = np.count_nonzero(counts)
    if num_alive < 2:
        return
    N = data.draw(st.integers(1, num_alive - 1))
    c = bisected_threshold([Fraction(count) for count in counts], N)
    log_c, certain = threshold(logs(counts), N)
    assert np.exp(log_c) == pytest.approx(float(c), rel=1e-12)
    assert set(certain.tolist()) >= {i for i, count in enumerate(counts) if c * count > 1 + Fraction(1, 10**12)}
    assert all(c * counts[i] >= 1 - Fraction(1, 10**12) for i in certain.tolist())


log_weight = st.one_of(
    st.just(-np.inf),
    st.sampled_from([0.0, 0.0, -1.0, log(2), log(3)]),
    st.floats(-800, 800),
    st.floats(-1e5, -1e5 + 3),
)
nearly_one = st.sampled_from([0.0, 1e-300, 0.5, 1 / 3, 1 - 2**-53])


@EXACT
@given(st.lists(log_weight, max_size=30), st.integers(1, 20), st.one_of(nearly_one, st.floats(0, 1, exclude_max=True)))
def test_every_scheme_returns_valid_arrays_and_keeps_the_total_weight(log_weights, N, u):
    num_alive = np.count_nonzero(np.isfinite(log_weights))
    for scheme in SCHEMES:
        ancestors, new = scheme(Constant(u) if scheme is optimal else Scripted([u] * N), log_weights, N)
        assert ancestors.dtype == np.int64 and new.dtype == np.float64
        assert ancestors.shape == new.shape
        assert np.all(np.isfinite(np.asarray(log_weights)[ancestors]))
        assert np.all(np.isfinite(new))
        assert np.all(np.diff(ancestors) >= 0)
        if scheme is optimal:
            assert len(ancestors) == min(N, num_alive)
            assert np.all(np.diff(ancestors) > 0)
        else:
            assert len(ancestors) == (N if num_alive else 0)
        if num_alive:
            assert logsumexp(new) == pytest.approx(logsumexp(log_weights), rel=1e-12, abs=1e-12)


TIES = {
    "equal": np.zeros(1000),
    "thirds": np.full(1000, log(1 / 3)),
    "equal, far from 1": np.full(1000, -1e5),
    "geometric over 300 orders of magnitude": -np.arange(1000) * log(10) * 0.3,
    "geometric over 100,000 orders of magnitude": -np.arange(1000) * log(10) * 100.0,
    "two levels": np.repeat([0.0, -700.0], 500),
    "heavy last": np.append(np.full(999, -40.0), 0.0),
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", TIES)
def test_optimal_keeps_exactly_N_distinct_ones_despite_rounding(name, order):
    log_weights = TIES[name][::order]
    for N in [1, 2, 3, 499, 500, 501, 997, 998, 999]:
        for u in [0.0, 1e-17, 0.5, 0.999, 1 - 2**-53]:
            ancestors, new = optimal(Constant(u), log_weights, N)
            assert len(set(ancestors.tolist())) == len(ancestors) == N
            assert logsumexp(new) == pytest.approx(logsumexp(log_weights), rel=1e-12, abs=1e-12)


def test_a_uniform_draw_of_zero_selects_no_particle_of_weight_zero():
    log_weights = [-900.0, 0.0, 0.0]                            # the share of the first is 0 in floating point
    for scheme in COPYING:
        assert 0 not in scheme(Scripted([0.0] * 2), log_weights, 2)[0]


def test_optimal_keeps_at_most_N_alive_particles_unchanged():
    ancestors, log_weights = optimal(Forbidden(), [-np.inf, 0.1, -1e5, -np.inf, 800.0], 3)
    assert ancestors.tolist() == [1, 2, 4]
    assert log_weights.tolist() == [0.1, -1e5, 800.0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("log_weights", [[], [-np.inf], [-np.inf] * 3])
def test_dead_weights_give_two_empty_arrays_without_a_warning(scheme, log_weights):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ancestors, new = scheme(Forbidden(), log_weights, 3)
    assert ancestors.shape == new.shape == (0,)
    assert ancestors.dtype == np.int64 and new.dtype == np.float64


@pytest.mark.parametrize("scheme", [stratified, systematic])
@pytest.mark.parametrize("N", [3, 10, 49, 103, 1000])
def test_equal_weights_are_copied_once_each(scheme, N):
    for u in [1e-9, 0.5, 1 - 1e-9]:                              # at 0 and 1 themselves rounding decides
        ancestors, log_weights = scheme(Scripted([u] * N), np.full(N, log(1 / 3)), N)
        assert ancestors.tolist() == list(range(N))
        np.testing.assert_allclose(log_weights, log(1 / 3), rtol=1e-12)


@EXACT
@given(integer_weights, st.integers(1, 20), st.integers(0, 1000))
def test_systematic_copies_each_particle_its_share_rounded_down_or_up(counts, N, seed):
    if not any(counts):
        return
    copies = np.bincount(systematic(np.random.default_rng(seed), logs(counts), N)[0], minlength=len(counts))
    for have, count in zip(copies, counts, strict=True):
        assert N * count // sum(counts) <= have <= -(-N * count // sum(counts))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shift", [-1e5, -800.0, 800.0])
def test_a_common_factor_of_the_weights_does_not_change_the_ancestors(scheme, shift):
    log_weights = np.array([0.0, -1.5, -np.inf, -0.25, -3.0, -0.25])
    ancestors, new = scheme(np.random.default_rng(3), log_weights, 3)
    shifted_ancestors, shifted = scheme(np.random.default_rng(3), log_weights + shift, 3)
    assert shifted_ancestors.tolist() == ancestors.tolist()
    np.testing.assert_allclose(shifted - shift, new, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "log_weights, message",
    [
        ([0.0, np.nan, np.inf], r"log_weights\[1\] is nan; a log weight is finite, or -inf if dead"),
        ([0.0, 0.0, np.inf], r"log_weights\[2\] is inf; a log weight is finite"),
        ([[0.0, 0.0]], r"one dimension; got shape \(1, 2\)"),
    ],
)
def test_invalid_log_weights_are_errors_with_their_place(scheme, log_weights, message):
    with pytest.raises(ValueError, match=message):
        scheme(np.random.default_rng(0), log_weights, 1)


def test_logsumexp_of_nothing_is_minus_infinity_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert logsumexp([]) == logsumexp([-np.inf]) == logsumexp([-np.inf] * 4) == -np.inf
        assert logsumexp([800.0, 800.0, -np.inf]) == pytest.approx(800 + log(2))
        assert logsumexp([-1e5] * 3) == pytest.approx(-1e5 + log(3), abs=1e-9)
    assert isinstance(logsumexp([0.0]), float)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("log_weights", [[0.0, -1.0, -np.inf, -2.0], [0.0, -1.0, -2.0]])
@pytest.mark.parametrize("N", [2, 9])
def test_the_given_weights_are_neither_changed_nor_returned(scheme, log_weights, N):
    given = np.array(log_weights)
    given.flags.writeable = False
    _, new = scheme(np.random.default_rng(0), given, N)
    assert not np.shares_memory(given, new)
