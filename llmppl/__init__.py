"""llmppl: probabilistic programming with language models.

A Model is a program, and each of its steps draws and weighs. Inference advances many copies of it. The runtime collects
their questions into one batch, and the lm answers from a trie of cached keys and values. A folder is imported when one
of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# isort: off
from llmppl.support.lazy import lazy_names

__version__ = "0.3.0"

if TYPE_CHECKING:  # the same names again, for type checkers
    from llmppl.constraints import EOS, Grammar, JsonSchema, Regex, TokenIndex, Values, Vocabulary
    from llmppl.distributions import (
        Bernoulli,
        Categorical,
        Delta,
        Geometric,
        Rule,
        Uniform,
        mixture,
        product,
    )
    from llmppl.inference import (
        SMC,
        Particles,
        beam_search,
        enumerate_exact,
        importance_sampling,
        repeat,
        smc_standard,
        smc_steer,
    )
    from llmppl.lm import CachedTransformer, ConstraintLogitsProcessor
    from llmppl.models import ConstrainedText, Infilling, Model, PromptIntersection
    from llmppl.models.batched import batched
    from llmppl.queries import Query, choose, search
    from llmppl.tasks import Result, generate, load_results, run_many

    __all__ = [
        "batched",
        "beam_search",
        "Bernoulli",
        "CachedTransformer",
        "Categorical",
        "choose",
        "ConstrainedText",
        "ConstraintLogitsProcessor",
        "Delta",
        "enumerate_exact",
        "EOS",
        "generate",
        "Geometric",
        "Grammar",
        "importance_sampling",
        "Infilling",
        "JsonSchema",
        "load_results",
        "mixture",
        "Model",
        "Particles",
        "product",
        "PromptIntersection",
        "Query",
        "Regex",
        "repeat",
        "Result",
        "Rule",
        "run_many",
        "search",
        "SMC",
        "smc_standard",
        "smc_steer",
        "TokenIndex",
        "Uniform",
        "Values",
        "Vocabulary",
    ]
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "llmppl.models": [
                "Model",
                "ConstrainedText",
                "Infilling",
                "PromptIntersection",
                "batched",
            ],
            "llmppl.distributions": [
                "Bernoulli",
                "Categorical",
                "Geometric",
                "Uniform",
                "Delta",
                "product",
                "mixture",
                "Rule",
            ],
            "llmppl.inference": [
                "SMC",
                "smc_steer",
                "smc_standard",
                "importance_sampling",
                "repeat",
                "enumerate_exact",
                "beam_search",
                "Particles",
            ],
            "llmppl.tasks": ["run_many", "Result", "load_results", "generate"],
            "llmppl.lm": ["CachedTransformer", "ConstraintLogitsProcessor"],
            "llmppl.constraints": [
                "EOS",
                "Vocabulary",
                "JsonSchema",
                "Regex",
                "Values",
                "Grammar",
                "TokenIndex",
            ],
            "llmppl.queries": ["Query", "search", "choose"],
        },
    )
