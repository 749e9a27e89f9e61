"""Masks: which tokens may follow."""

from llmppl.masks.constraint import Constraint as Constraint
from llmppl.masks.constraint import Index as Index
from llmppl.masks.constraint import Recognizer as Recognizer
from llmppl.masks.constraint import TabledRecognizer as TabledRecognizer
from llmppl.masks.constraint import VocabularyLike as VocabularyLike
from llmppl.masks.index import END as END
from llmppl.masks.index import TokenIndex as TokenIndex
from llmppl.masks.whole import WholeIndex as WholeIndex
