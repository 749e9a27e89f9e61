"""Language models: what a text may be followed by, and with what probability."""

from llmppl.lm.backend import Backend as Backend
from llmppl.lm.backend import Batch as Batch
from llmppl.lm.context import Context as Context
from llmppl.lm.context import NextToken as NextToken
from llmppl.lm.context import StringDistribution as StringDistribution
from llmppl.lm.token_distribution import TokenDistribution as TokenDistribution
from llmppl.lm.transformer import CachedTransformer as CachedTransformer
