"""llmppl: probabilistic programming with language models.

A Model is a program; each step draws and weighs; inference advances many copies of it; the runtime turns what they ask
into one batch; the lm answers from a trie of cached keys and values. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmppl.distributions import Bernoulli as Bernoulli
    from llmppl.distributions import Categorical as Categorical
    from llmppl.distributions import Delta as Delta
    from llmppl.distributions import Geometric as Geometric
    from llmppl.distributions import Rule as Rule
    from llmppl.distributions import Uniform as Uniform
    from llmppl.distributions import mixture as mixture
    from llmppl.distributions import product as product
    from llmppl.grammar import Grammar as Grammar
    from llmppl.inference import SMC as SMC
    from llmppl.inference import Particles as Particles
    from llmppl.inference import beam_search as beam_search
    from llmppl.inference import enumerate_exact as enumerate_exact
    from llmppl.inference import importance_sampling as importance_sampling
    from llmppl.inference import repeat as repeat
    from llmppl.inference import smc_standard as smc_standard
    from llmppl.inference import smc_steer as smc_steer
    from llmppl.languages import Regex as Regex
    from llmppl.lm.transformer import CachedTransformer as CachedTransformer
    from llmppl.masks import JsonSchema as JsonSchema
    from llmppl.masks import TokenIndex as TokenIndex
    from llmppl.models.model import Model as Model
    from llmppl.models.programs import ConstrainedText as ConstrainedText
    from llmppl.models.programs import Infilling as Infilling
    from llmppl.models.programs import PromptIntersection as PromptIntersection
    from llmppl.queries import Query as Query
    from llmppl.queries import search as search
    from llmppl.tokens import EOS as EOS
    from llmppl.tokens import Vocabulary as Vocabulary

_HOME = {
    "Model": "models.model",
    "EOS": "tokens",
    "CachedTransformer": "lm.transformer",
    "Vocabulary": "tokens",
    "Bernoulli": "distributions",
    "Categorical": "distributions",
    "Geometric": "distributions",
    "Uniform": "distributions",
    "Delta": "distributions",
    "product": "distributions",
    "mixture": "distributions",
    "Rule": "distributions",
    "smc_steer": "inference",
    "smc_standard": "inference",
    "importance_sampling": "inference",
    "repeat": "inference",
    "enumerate_exact": "inference",
    "beam_search": "inference",
    "SMC": "inference",
    "Particles": "inference",
    "ConstrainedText": "models.programs",
    "Infilling": "models.programs",
    "PromptIntersection": "models.programs",
    "Regex": "languages",
    "Grammar": "grammar",
    "JsonSchema": "masks",
    "TokenIndex": "masks",
    "search": "queries",
    "Query": "queries",
}

__all__ = list(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"llmppl has no {name!r}; it has {', '.join(_HOME)}")
    value = getattr(importlib.import_module(f"llmppl.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
