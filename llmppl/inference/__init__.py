"""Many copies of a program, advanced and weighed together: Sequential Monte Carlo, enumeration, beams."""

from llmppl.inference.algorithms import (
    Repeats,
    Tuning,
    importance_sampling,
    repeat,
    smc_standard,
    smc_steer,
    tune,
)
from llmppl.inference.detached import SavedParticle
from llmppl.inference.exact import Beam, Beams, beam_search, enumerate_exact
from llmppl.inference.expansion import Copies, Distinct, Extension
from llmppl.inference.genealogy import StepRecord, StepRecords
from llmppl.inference.particles import Death, Deaths, Particles
from llmppl.inference.resampling import (
    DownSample,
    ResampleBelow,
    multinomial,
    optimal,
    stratified,
    systematic,
)
from llmppl.inference.smc import SMC, Step
from llmppl.support import lazy

__all__ = [
    "Beam",
    "beam_search",
    "Beams",
    "Copies",
    "Death",
    "Deaths",
    "Distinct",
    "DownSample",
    "enumerate_exact",
    "Extension",
    "importance_sampling",
    "multinomial",
    "optimal",
    "Particles",
    "repeat",
    "Repeats",
    "ResampleBelow",
    "SavedParticle",
    "SMC",
    "smc_standard",
    "smc_steer",
    "Step",
    "StepRecord",
    "StepRecords",
    "stratified",
    "systematic",
    "tune",
    "Tuning",
]
__dir__ = lazy.public_names(__name__)
