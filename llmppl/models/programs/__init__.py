"""Ready-made programs: text under a constraint, text with holes, text after several prompts at once.

They are ordinary Models, written as a user would write them, and also serve as examples.
Sources: Lew et al. 2023, Sec. 2.2; Willard & Louf 2023 for the masks of `ConstrainedText`.
"""

from llmppl.models.programs.constrained import ConstrainedText as ConstrainedText
from llmppl.models.programs.constrained import short_words as short_words
from llmppl.models.programs.infilling import Infilling as Infilling
from llmppl.models.programs.intersection import PromptIntersection as PromptIntersection
from llmppl.models.programs.intersection import ends_sentence as ends_sentence
from llmppl.models.programs.program import Program as Program
