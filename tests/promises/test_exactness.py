"""Exactness: for every program and every algorithm, Z-hat and the weighted sums are right on average.

The truth of each program is a sum over all its texts, whose probabilities come from plain forward passes of the torch
model. `enumerate_exact` must give it exactly. For an algorithm, the mean weight of each outcome over many runs, and Z,
must be right within 4.5 of their own standard errors. An outcome that few runs reach has a skewed weight and no usable
standard error. It is tested in sums over texts of one length or end; other runs select these outcomes.
"""

import itertools
import math

import numpy as np
import pytest
from helpers.common import repetitions, slow
from helpers.exactness import ALGORITHMS, CASES, Criticised, check, truth_of
from helpers.programs import ThreeCoins
from helpers.tiny import add_up

from llmppl import enumerate_exact, smc_standard
from llmppl.inference.resampling import multinomial, stratified

FAMILIES = ["predicate", "infilling", "intersection, product", "where, second choice", "soft", "twist by log mass",
            "spans, one a step", "branching"]  # fmt: skip
FEW = list(ALGORITHMS)[2:5]
RUNS = [*FEW, *slow(*(name for name in ALGORITHMS if name not in FEW))]
SCHEMES = {
    f"standard N=4, {scheme.__name__}": lambda model, rng, scheme=scheme: smc_standard(
        model, 4, ess_threshold=0.9, resample=scheme, rng=rng
    )
    for scheme in (multinomial, stratified)
}


@pytest.mark.parametrize("name", CASES)
def test_enumerate_exact_agrees_with_Z_and_posterior_by_hand(name):
    case, truth = CASES[name], truth_of(name)
    Z = sum(truth.values())
    particles = enumerate_exact(case.model())
    found = add_up((case.key(particle), particle.log_weight) for particle in particles)
    assert particles.log_ml == pytest.approx(math.log(Z), abs=1e-9)
    assert found == pytest.approx(truth, rel=1e-9)


def pairs():
    """Return all programs with all algorithms. `make test` tries each family with two of the three in `FEW`."""
    found = []
    for name, algorithm in itertools.product(CASES, ALGORITHMS):
        is_quick = name in FAMILIES and algorithm in FEW
        if is_quick:
            is_quick = (FAMILIES.index(name) + FEW.index(algorithm)) % 3 != 0
        found += [(name, algorithm)] if is_quick else [pytest.param(name, algorithm, marks=pytest.mark.slow)]
    return found


@pytest.mark.parametrize("name, algorithm", pairs())
def test_Z_hat_and_the_weighted_histogram_are_right_on_average(name, algorithm):
    check(name, ALGORITHMS[algorithm], seed=len(name) * 100 + len(algorithm))


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_randomised_rollout_as_twist_keeps_the_target(algorithm):
    drawn = Criticised("drawn")
    check("twist by a rollout", lambda model, rng: ALGORITHMS[algorithm](drawn, rng=rng), seed=len(algorithm))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["predicate", "soft", "twist by log mass"])
def test_every_resampling_scheme_is_right_on_average(name, scheme):
    check(name, SCHEMES[scheme], seed=len(name) * 100 + len(scheme))


@pytest.mark.parametrize("algorithm", RUNS)
def test_Z_hat_of_three_coins_that_must_show_heads_is_p_cubed(algorithm):
    """The mean would be 0.271 if the dead came back."""
    runs = np.random.default_rng(0).spawn(repetitions(1_000, 400))
    Zs = [math.exp(ALGORITHMS[algorithm](ThreeCoins(), rng=rng).log_ml) for rng in runs]
    error = np.std(Zs, ddof=1) / math.sqrt(len(Zs))
    assert abs(np.mean(Zs) - 0.027) <= 4.5 * error + 1e-12 and error < 0.006


def test_a_biased_algorithm_is_detected():
    """Weights that a resampling forgets to divide among the copies are off by far more than 4.5 sigma."""

    def forgetful(rng, log_weights, N):
        ancestors, _ = multinomial(rng, log_weights, N)
        return ancestors, log_weights[ancestors]

    with pytest.raises(AssertionError, match="'Z': "):
        check("soft", lambda model, rng: smc_standard(model, 4, ess_threshold=1.0, resample=forgetful, rng=rng), seed=1)
