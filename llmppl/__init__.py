"""llmppl: probabilistic programming with language models.

A Model is a program; each step draws and weighs; inference advances many copies of it; the runtime turns what they ask
into one batch; the lm answers from a trie of cached keys and values. What is heavy, torch and transformers, is imported
where a language model is loaded.
"""

from llmppl.distributions import Bernoulli, Categorical, Delta, Geometric, Rule, Uniform, mixture, product
from llmppl.grammar import Grammar
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
from llmppl.languages import Regex
from llmppl.lm import CachedTransformer
from llmppl.masks import JsonSchema, TokenIndex
from llmppl.models import ConstrainedText, Infilling, Model, PromptIntersection
from llmppl.queries import Query, search
from llmppl.tokens import EOS, Vocabulary

__version__ = "0.1.0"
__all__ = [
    "EOS", "SMC", "Bernoulli", "CachedTransformer", "Categorical", "ConstrainedText", "Delta", "Geometric", "Grammar",
    "Infilling", "JsonSchema", "Model", "Particles", "PromptIntersection", "Query", "Regex", "Rule", "TokenIndex",
    "Uniform", "Vocabulary", "beam_search", "enumerate_exact", "importance_sampling", "mixture", "product", "repeat",
    "search", "smc_standard", "smc_steer",
]  # fmt: skip
