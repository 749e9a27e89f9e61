"""Masks: indices that map each state to the tokens that may follow."""

from llmppl.constraints.masks.index import END as END
from llmppl.constraints.masks.index import TokenIndex as TokenIndex
from llmppl.constraints.masks.precomputed import PrecomputedIndex as PrecomputedIndex
