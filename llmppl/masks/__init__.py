"""Masks: which tokens may follow."""

from llmppl.masks.index import TokenIndex as TokenIndex
from llmppl.masks.index import WholeIndex as WholeIndex
from llmppl.masks.json_schema import JsonSchema as JsonSchema
