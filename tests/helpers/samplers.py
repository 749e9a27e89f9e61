"""Sampling algorithms as test parameters, and the comparison with an exact posterior."""

import math

import numpy as np
import pytest

from helpers.common import repetitions
from helpers.tiny import add_up
from llmppl import importance_sampling, smc_standard, smc_steer

QUIET = {"progress": False}
SAMPLERS = {
    "distinct": lambda model, **how: smc_steer(model, 4, 2, **QUIET, **how),
    "merged": lambda model, **how: smc_steer(model, 4, 2, expand="merged", **QUIET, **how),
    "copies": lambda model, **how: smc_steer(model, 4, 2, expand="copies", **QUIET, **how),
    "standard": lambda model, **how: smc_standard(model, 5, **QUIET, **how),
    "importance": lambda model, **how: importance_sampling(model, 5, **QUIET, **how),
}
every_sampler = pytest.mark.parametrize("run", SAMPLERS.values(), ids=SAMPLERS)


def is_posterior(run, make, truth, *, full=1000, quick=150, **how):
    """Check that the mean weight of each text over many runs is its `truth`, within 4.5 standard errors."""
    texts, num = [*truth], repetitions(full=full, quick=quick)
    sums = np.zeros((num, len(texts)))
    for seed in range(num):
        for text, weight in weighed(run(make(), seed=seed, **how)).items():
            sums[seed, texts.index(text)] = weight
    error = sums.std(axis=0, ddof=1) / math.sqrt(num) + 1e-12
    z = (sums.mean(axis=0) - [*truth.values()]) / error
    assert np.abs(z).max() < 4.5, dict(zip(texts, z, strict=True))


def weighed(particles):
    """Return the summed weights of the particles of each text, not normalised."""
    return add_up((str(particle), particle.log_weight) for particle in particles)
