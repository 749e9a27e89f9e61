"""Queries: the strings of a language that a model would write, their probabilities, and reasons against others.

    for match in search(lm, "My phone number is ([0-9]{3}) ([0-9]{4})", prefix="My phone number is"):
        print(match.log_prob, match.text)

Source: Kuchnik, Smith & Amvrosiadis 2023, "Validating Large Language Models with ReLM" (MLSys 2023).
"""

# isort: off
from llmppl.constraints import any_case, any_whitespace, optional_punctuation, rewrite, synonyms
from llmppl.distributions import DecisionRule, Rule
from llmppl.queries.choice import Choice, Choices, choose
from llmppl.queries.comparison import Comparison, Exact, PairedComparison, compare
from llmppl.queries.compile import Edits
from llmppl.queries.matches import Match, Matches, MatchList
from llmppl.queries.near_verbatim import Extraction, extraction
from llmppl.queries.query import (
    Certificate,
    Explanation,
    Query,
    QueryOptions,
    explain,
    probability,
    search,
)
from llmppl.queries.sampling import Probability
from llmppl.support import lazy

__all__ = [
    "any_case",
    "any_whitespace",
    "Certificate",
    "Choice",
    "Choices",
    "choose",
    "compare",
    "Comparison",
    "DecisionRule",
    "Edits",
    "Exact",
    "explain",
    "Explanation",
    "extraction",
    "Extraction",
    "Match",
    "Matches",
    "MatchList",
    "optional_punctuation",
    "PairedComparison",
    "probability",
    "Probability",
    "Query",
    "QueryOptions",
    "rewrite",
    "Rule",
    "search",
    "synonyms",
]
__dir__ = lazy.public_names(__name__)
