"""Language models: contexts, and the probabilities of the tokens that follow them."""

from llmppl.lm.context import ENDS, Context, End, NextToken, StringDistribution, TokenDistribution
from llmppl.lm.engine import Batch, Engine, SlotEngine
from llmppl.lm.processor import ConstraintLogitsProcessor
from llmppl.lm.transformer import CachedTransformer
from llmppl.support import lazy

__all__ = [
    "Batch",
    "CachedTransformer",
    "ConstraintLogitsProcessor",
    "Context",
    "End",
    "ENDS",
    "Engine",
    "NextToken",
    "SlotEngine",
    "StringDistribution",
    "TokenDistribution",
]
__dir__ = lazy.public_names(__name__)
