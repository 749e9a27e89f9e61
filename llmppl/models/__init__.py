"""Probabilistic models: the base class of programs, ready-made programs, and their parts."""

from llmppl.models.batched import Batched as Batched
from llmppl.models.batched import batched as batched
from llmppl.models.choices import Choice as Choice
from llmppl.models.choices import replay as replay
from llmppl.models.lookahead import Lookahead as Lookahead
from llmppl.models.model import Model as Model
from llmppl.models.programs import ConstrainedText as ConstrainedText
from llmppl.models.programs import Infilling as Infilling
from llmppl.models.programs import Program as Program
from llmppl.models.programs import PromptIntersection as PromptIntersection
from llmppl.models.spans import Span as Span
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
