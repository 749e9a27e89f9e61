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


def is_posterior(run, make, truth, *, full=1000, quick=80, least=0.0, **how):
    """Check that the mean weight of each text over many runs is its `truth`, and that of all, Z.

    The error is at most 4.5 standard errors. Texts with less than `least` of Z are tested in Z only.
    """
    Z, num = sum(truth.values()), repetitions(full=full, quick=quick)
    tested = {text: weight for text, weight in truth.items() if weight >= least * Z}
    runs = [weighed(run(make(), seed=seed, **how)) for seed in range(num)]
    assert set().union(*runs) <= truth.keys()
    found = np.array([[sum(each.values()), *(each.get(text, 0.0) for text in tested)] for each in runs])
    error = found.std(axis=0, ddof=1) / math.sqrt(num) + 1e-12
    z = (found.mean(axis=0) - [Z, *tested.values()]) / error
    assert np.abs(z).max() < 4.5, dict(zip(["Z", *tested], z, strict=True))


def weighed(particles):
    """Return the summed weights of the particles of each text, not normalised."""
    return add_up((str(particle), particle.log_weight) for particle in particles)
