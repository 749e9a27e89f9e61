"""Distributions and proposals, over tokens and over other values."""

# isort: off
from llmppl.distributions.blocks import (
    BLOCK,
    ArrayTable,
    Floats,
    Ints,
    Mask,
    PutTable,
    Table,
    logsumexp,
    read_blocks,
    values_at,
)
from llmppl.distributions.finite import (
    NO_RULE,
    DecisionRule,
    Distribution,
    Finite,
    Impossible,
    Proposal,
    RejectionProposal,
    Rule,
    is_greedy,
)
from llmppl.distributions.standard import (
    Bernoulli,
    Categorical,
    Delta,
    Geometric,
    Uniform,
    mixture,
    product,
)
from llmppl.support import lazy

__all__ = [
    "ArrayTable",
    "Bernoulli",
    "BLOCK",
    "Categorical",
    "DecisionRule",
    "Delta",
    "Distribution",
    "Finite",
    "Floats",
    "Geometric",
    "Impossible",
    "Ints",
    "is_greedy",
    "logsumexp",
    "Mask",
    "mixture",
    "NO_RULE",
    "product",
    "Proposal",
    "PutTable",
    "read_blocks",
    "RejectionProposal",
    "Rule",
    "Table",
    "Uniform",
    "values_at",
]
__dir__ = lazy.public_names(__name__)
