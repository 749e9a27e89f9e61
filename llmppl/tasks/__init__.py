"""Many tasks at once: in one process or on many machines, with results in files."""

from llmppl.support import lazy
from llmppl.tasks.answers import Generation, Generations
from llmppl.tasks.generation import generate
from llmppl.tasks.many import lanes, recorded, run_many
from llmppl.tasks.results import Result, ResultFile, Results, load_results

__all__ = [
    "generate",
    "Generation",
    "Generations",
    "lanes",
    "load_results",
    "recorded",
    "Result",
    "ResultFile",
    "Results",
    "run_many",
]
__dir__ = lazy.public_names(__name__)
