"""Probabilistic models: the base class of programs, ready-made programs, and their parts."""

from llmppl.models.batched import Batched, batched
from llmppl.models.choices import Choice, replay
from llmppl.models.lookahead import Lookahead
from llmppl.models.model import Model
from llmppl.models.programs import ConstrainedText, Infilling, Program, PromptIntersection
from llmppl.models.spans import Span
from llmppl.support import lazy

__all__ = [
    "Batched",
    "batched",
    "Choice",
    "ConstrainedText",
    "Infilling",
    "Lookahead",
    "Model",
    "Program",
    "PromptIntersection",
    "replay",
    "Span",
]
__dir__ = lazy.public_names(__name__)
