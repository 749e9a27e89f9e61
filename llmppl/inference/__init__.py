"""Many copies of a program, advanced and weighed together: Sequential Monte Carlo, enumeration, beams."""

from typing import TYPE_CHECKING

from llmppl.inference.beam import Beam as Beam
from llmppl.inference.beam import Beams as Beams
from llmppl.inference.beam import beam_search as beam_search
from llmppl.inference.deaths import Death as Death
from llmppl.inference.deaths import Deaths as Deaths
from llmppl.inference.detached import SavedParticle as SavedParticle
from llmppl.inference.exact import enumerate_exact as enumerate_exact
from llmppl.inference.expansion import Copies as Copies
from llmppl.inference.expansion import Distinct as Distinct
from llmppl.inference.expansion import Extension as Extension
from llmppl.inference.genealogy import Genealogy as Genealogy
from llmppl.inference.genealogy import StepRecord as StepRecord
from llmppl.inference.genealogy import StepRecords as StepRecords
from llmppl.inference.particles import Particles as Particles
from llmppl.inference.repeats import Repeats as Repeats
from llmppl.inference.repeats import repeat as repeat
from llmppl.inference.resampling import DownSample as DownSample
from llmppl.inference.resampling import ResampleBelow as ResampleBelow
from llmppl.inference.resampling import multinomial as multinomial
from llmppl.inference.resampling import optimal as optimal
from llmppl.inference.resampling import residual as residual
from llmppl.inference.resampling import stratified as stratified
from llmppl.inference.resampling import systematic as systematic
from llmppl.inference.smc import SMC as SMC
from llmppl.inference.smc import Step as Step
from llmppl.inference.smc import importance_sampling as importance_sampling
from llmppl.inference.smc import smc_standard as smc_standard
from llmppl.inference.smc import smc_steer as smc_steer
from llmppl.support.lazy import lazy_names

if TYPE_CHECKING:                                       # many tasks at once: a folder that imports this one
    from llmppl.tasks import Result as Result
    from llmppl.tasks import ResultFile as ResultFile
    from llmppl.tasks import lanes as lanes
    from llmppl.tasks import load_results as load_results
    from llmppl.tasks import read_results as read_results
    from llmppl.tasks import recorded as recorded
    from llmppl.tasks import run_many as run_many
else:
    __getattr__, __dir__, _ = lazy_names(
        __name__,
        {
            "llmppl.tasks": [
                "Result", "ResultFile", "lanes", "load_results", "read_results", "recorded", "run_many",
            ],
        },
    )  # fmt: skip
