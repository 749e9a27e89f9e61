"""llmppl: probabilistic programming with language models.

A Model is a program; each step draws and weighs; inference advances many copies of it; the runtime turns what they ask
into one batch; the lm answers from a trie of cached keys and values. A folder is imported when a name of it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:                                       # the same names again, for type checkers
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
    from llmppl.inference import Result as Result
    from llmppl.inference import beam_search as beam_search
    from llmppl.inference import enumerate_exact as enumerate_exact
    from llmppl.inference import importance_sampling as importance_sampling
    from llmppl.inference import load_results as load_results
    from llmppl.inference import repeat as repeat
    from llmppl.inference import run_many as run_many
    from llmppl.inference import smc_standard as smc_standard
    from llmppl.inference import smc_steer as smc_steer
    from llmppl.languages import JsonSchema as JsonSchema
    from llmppl.languages import Regex as Regex
    from llmppl.languages import Values as Values
    from llmppl.lm import CachedTransformer as CachedTransformer
    from llmppl.lm import ConstraintLogitsProcessor as ConstraintLogitsProcessor
    from llmppl.masks import TokenIndex as TokenIndex
    from llmppl.models import ConstrainedText as ConstrainedText
    from llmppl.models import Infilling as Infilling
    from llmppl.models import Model as Model
    from llmppl.models import PromptIntersection as PromptIntersection
    from llmppl.models import batched as batched
    from llmppl.queries import Query as Query
    from llmppl.queries import search as search
    from llmppl.tokens import EOS as EOS
    from llmppl.tokens import Vocabulary as Vocabulary

__version__ = "0.1.0"

_FOLDERS = {
    "models": ["Model", "ConstrainedText", "Infilling", "PromptIntersection", "batched"],
    "distributions": ["Bernoulli", "Categorical", "Geometric", "Uniform", "Delta", "product", "mixture", "Rule"],
    "inference": ["SMC", "smc_steer", "smc_standard", "importance_sampling", "repeat", "enumerate_exact", "beam_search",
                  "Particles", "run_many", "Result", "load_results"],
    "lm": ["CachedTransformer", "ConstraintLogitsProcessor"],
    "tokens": ["EOS", "Vocabulary"],
    "languages": ["JsonSchema", "Regex", "Values"],
    "grammar": ["Grammar"],
    "masks": ["TokenIndex"],
    "queries": ["Query", "search"],
}  # fmt: skip
_FOLDER = {name: folder for folder, names in _FOLDERS.items() for name in names}
if not TYPE_CHECKING:                                   # which tells checkers nothing: they have the imports above
    __all__ = list(_FOLDER)


def __getattr__(name: str) -> Any:
    if name not in _FOLDER:
        raise AttributeError(f"llmppl has no {name!r}; it has {', '.join(_FOLDER)}")
    value = globals()[name] = getattr(importlib.import_module(f"llmppl.{_FOLDER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOLDER})
