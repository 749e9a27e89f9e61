"""Many tasks at once: in one process or on many machines, with results in files."""

from llmppl.support import lazy
from llmppl.tasks.many import lanes as lanes
from llmppl.tasks.many import recorded as recorded
from llmppl.tasks.many import run_many as run_many
from llmppl.tasks.results import Result as Result
from llmppl.tasks.results import ResultFile as ResultFile
from llmppl.tasks.results import Results as Results
from llmppl.tasks.results import load_results as load_results

__dir__ = lazy.public_names(__name__)
