"""llmppl: probabilistic programming with language models.

A Model is a program, and each of its steps draws and weighs. Inference advances many copies of it. The runtime collects
their questions into one batch, and the lm answers from a trie of cached keys and values. A folder is imported when one
of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmppl.support.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:                                       # the same names again, for type checkers
    from llmppl.constraints import EOS as EOS
    from llmppl.constraints import Grammar as Grammar
    from llmppl.constraints import JsonSchema as JsonSchema
    from llmppl.constraints import Regex as Regex
    from llmppl.constraints import TokenIndex as TokenIndex
    from llmppl.constraints import Values as Values
    from llmppl.constraints import Vocabulary as Vocabulary
    from llmppl.distributions import Bernoulli as Bernoulli
    from llmppl.distributions import Categorical as Categorical
    from llmppl.distributions import Delta as Delta
    from llmppl.distributions import Geometric as Geometric
    from llmppl.distributions import Rule as Rule
    from llmppl.distributions import Uniform as Uniform
    from llmppl.distributions import mixture as mixture
    from llmppl.distributions import product as product
    from llmppl.inference import SMC as SMC
    from llmppl.inference import Particles as Particles
    from llmppl.inference import beam_search as beam_search
    from llmppl.inference import enumerate_exact as enumerate_exact
    from llmppl.inference import importance_sampling as importance_sampling
    from llmppl.inference import repeat as repeat
    from llmppl.inference import smc_standard as smc_standard
    from llmppl.inference import smc_steer as smc_steer
    from llmppl.lm import CachedTransformer as CachedTransformer
    from llmppl.lm import ConstraintLogitsProcessor as ConstraintLogitsProcessor
    from llmppl.models import ConstrainedText as ConstrainedText
    from llmppl.models import Infilling as Infilling
    from llmppl.models import Model as Model
    from llmppl.models import PromptIntersection as PromptIntersection
    from llmppl.models import batched as batched
    from llmppl.queries import Query as Query
    from llmppl.queries import search as search
    from llmppl.tasks import Result as Result
    from llmppl.tasks import load_results as load_results
    from llmppl.tasks import run_many as run_many
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "llmppl.models": ["Model", "ConstrainedText", "Infilling", "PromptIntersection", "batched"],
            "llmppl.distributions": ["Bernoulli", "Categorical", "Geometric", "Uniform", "Delta", "product", "mixture",
                                     "Rule"],
            "llmppl.inference": ["SMC", "smc_steer", "smc_standard", "importance_sampling", "repeat", "enumerate_exact",
                                 "beam_search", "Particles"],
            "llmppl.tasks": ["run_many", "Result", "load_results"],
            "llmppl.lm": ["CachedTransformer", "ConstraintLogitsProcessor"],
            "llmppl.constraints": ["EOS", "Vocabulary", "JsonSchema", "Regex", "Values", "Grammar", "TokenIndex"],
            "llmppl.queries": ["Query", "search"],
        },
    )  # fmt: skip
