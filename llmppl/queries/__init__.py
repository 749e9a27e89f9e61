"""Queries: the strings of a language that a model would write, their probabilities, and reasons against others.

    for match in search(lm, "My phone number is ([0-9]{3}) ([0-9]{4})", prefix="My phone number is"):
        print(match.log_prob, match.text)

Source: Kuchnik, Smith & Amvrosiadis 2023, "Validating Large Language Models with ReLM" (MLSys 2023).
"""

from llmppl.constraints import any_case as any_case
from llmppl.constraints import any_whitespace as any_whitespace
from llmppl.constraints import homoglyphs as homoglyphs
from llmppl.constraints import optional_punctuation as optional_punctuation
from llmppl.constraints import rewrite as rewrite
from llmppl.constraints import synonyms as synonyms
from llmppl.distributions import DecisionRule as DecisionRule
from llmppl.distributions import Rule as Rule
from llmppl.queries.comparison import ChiSquare as ChiSquare
from llmppl.queries.comparison import Comparison as Comparison
from llmppl.queries.comparison import Exact as Exact
from llmppl.queries.comparison import chi_square_tail as chi_square_tail
from llmppl.queries.comparison import compare as compare
from llmppl.queries.compile import Edits as Edits
from llmppl.queries.matches import Match as Match
from llmppl.queries.matches import Matches as Matches
from llmppl.queries.matches import MatchList as MatchList
from llmppl.queries.query import Certificate as Certificate
from llmppl.queries.query import Explanation as Explanation
from llmppl.queries.query import Query as Query
from llmppl.queries.query import QueryOptions as QueryOptions
from llmppl.queries.query import can_generate as can_generate
from llmppl.queries.query import explain as explain
from llmppl.queries.query import probability as probability
from llmppl.queries.query import search as search
from llmppl.queries.sampling import Probability as Probability
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
