"""Language models: contexts, and the probabilities of the tokens that follow them."""

from llmppl.lm.context import ENDS as ENDS
from llmppl.lm.context import Context as Context
from llmppl.lm.context import End as End
from llmppl.lm.context import NextToken as NextToken
from llmppl.lm.context import StringDistribution as StringDistribution
from llmppl.lm.context import TokenDistribution as TokenDistribution
from llmppl.lm.engine import Batch as Batch
from llmppl.lm.engine import Engine as Engine
from llmppl.lm.engine import SlotEngine as SlotEngine
from llmppl.lm.processor import ConstraintLogitsProcessor as ConstraintLogitsProcessor
from llmppl.lm.transformer import CachedTransformer as CachedTransformer
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
