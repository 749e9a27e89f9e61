"""Many copies of a program, advanced and weighed together: Sequential Monte Carlo, enumeration, beams."""

from llmppl.inference.algorithms import Repeats as Repeats
from llmppl.inference.algorithms import importance_sampling as importance_sampling
from llmppl.inference.algorithms import repeat as repeat
from llmppl.inference.algorithms import smc_standard as smc_standard
from llmppl.inference.algorithms import smc_steer as smc_steer
from llmppl.inference.detached import SavedParticle as SavedParticle
from llmppl.inference.exact import Beam as Beam
from llmppl.inference.exact import Beams as Beams
from llmppl.inference.exact import beam_search as beam_search
from llmppl.inference.exact import enumerate_exact as enumerate_exact
from llmppl.inference.expansion import Copies as Copies
from llmppl.inference.expansion import Distinct as Distinct
from llmppl.inference.expansion import Extension as Extension
from llmppl.inference.genealogy import StepRecord as StepRecord
from llmppl.inference.genealogy import StepRecords as StepRecords
from llmppl.inference.particles import Death as Death
from llmppl.inference.particles import Deaths as Deaths
from llmppl.inference.particles import Particles as Particles
from llmppl.inference.resampling import DownSample as DownSample
from llmppl.inference.resampling import ResampleBelow as ResampleBelow
from llmppl.inference.resampling import multinomial as multinomial
from llmppl.inference.resampling import optimal as optimal
from llmppl.inference.resampling import stratified as stratified
from llmppl.inference.resampling import systematic as systematic
from llmppl.inference.smc import SMC as SMC
from llmppl.inference.smc import Step as Step
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
