"""Distributions and proposals, over tokens and over other values."""

from llmppl.distributions.blocks import BLOCK as BLOCK
from llmppl.distributions.blocks import ArrayTable as ArrayTable
from llmppl.distributions.blocks import Floats as Floats
from llmppl.distributions.blocks import Ints as Ints
from llmppl.distributions.blocks import Mask as Mask
from llmppl.distributions.blocks import PutTable as PutTable
from llmppl.distributions.blocks import Table as Table
from llmppl.distributions.blocks import logsumexp as logsumexp
from llmppl.distributions.blocks import read_blocks as read_blocks
from llmppl.distributions.blocks import values_at as values_at
from llmppl.distributions.finite import NO_RULE as NO_RULE
from llmppl.distributions.finite import DecisionRule as DecisionRule
from llmppl.distributions.finite import Distribution as Distribution
from llmppl.distributions.finite import Finite as Finite
from llmppl.distributions.finite import Impossible as Impossible
from llmppl.distributions.finite import Proposal as Proposal
from llmppl.distributions.finite import RejectionProposal as RejectionProposal
from llmppl.distributions.finite import Rule as Rule
from llmppl.distributions.standard import Bernoulli as Bernoulli
from llmppl.distributions.standard import Categorical as Categorical
from llmppl.distributions.standard import Delta as Delta
from llmppl.distributions.standard import Geometric as Geometric
from llmppl.distributions.standard import Uniform as Uniform
from llmppl.distributions.standard import mixture as mixture
from llmppl.distributions.standard import product as product
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
