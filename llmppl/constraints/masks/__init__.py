"""Masks: indices that map each state to the tokens that may follow."""

from llmppl.constraints.masks.distances import PrecomputedIndex as PrecomputedIndex
from llmppl.constraints.masks.index import END as END
from llmppl.constraints.masks.index import TokenIndex as TokenIndex
