"""Queries: which strings of a language a model would write, how probable they are, and why not others.

    for match in search(lm, "My phone number is ([0-9]{3}) ([0-9]{4})", prefix="My phone number is", top_k=40):
        print(match.log_prob, match.text)

Source: Kuchnik, Smith & Amvrosiadis 2023, "Validating Large Language Models with ReLM" (MLSys 2023).
"""

from __future__ import annotations

from llmppl.distributions import DecisionRule, Rule
from llmppl.languages import any_case, any_whitespace, homoglyphs, optional_punctuation, rewrite, synonyms
from llmppl.queries.compare import Comparison, Exact, compare
from llmppl.queries.explanation import Certificate, Conformity, Explanation, can_generate, conformity, explain
from llmppl.queries.language import Edits
from llmppl.queries.mass import Probability, probability
from llmppl.queries.matches import Matches, search
from llmppl.queries.space import Match

__all__ = [
    "search",
    "probability",
    "explain",
    "can_generate",
    "conformity",
    "Conformity",
    "compare",
    "Match",
    "Matches",
    "Probability",
    "Explanation",
    "Certificate",
    "Comparison",
    "Exact",
    "Rule",
    "DecisionRule",
    "Edits",
    "rewrite",
    "any_case",
    "any_whitespace",
    "homoglyphs",
    "optional_punctuation",
    "synonyms",
]
