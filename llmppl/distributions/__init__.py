"""Distributions and proposals, over tokens and over other values."""

from llmppl.distributions.distribution import Bernoulli as Bernoulli
from llmppl.distributions.distribution import Categorical as Categorical
from llmppl.distributions.distribution import Delta as Delta
from llmppl.distributions.distribution import Distribution as Distribution
from llmppl.distributions.distribution import Finite as Finite
from llmppl.distributions.distribution import Geometric as Geometric
from llmppl.distributions.distribution import Impossible as Impossible
from llmppl.distributions.distribution import Proposal as Proposal
from llmppl.distributions.distribution import Uniform as Uniform
from llmppl.distributions.distribution import Where as Where
from llmppl.distributions.distribution import mixture as mixture
from llmppl.distributions.distribution import product as product
from llmppl.distributions.rules import NO_RULE as NO_RULE
from llmppl.distributions.rules import DecisionRule as DecisionRule
from llmppl.distributions.rules import Rule as Rule
