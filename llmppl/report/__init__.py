"""Reports: progress bars, tables, and recordings of runs with their pages."""

from llmppl.report.html_page import page, show
from llmppl.report.recording import Candidate, RecordedStep, Recorder, Recording, load
from llmppl.support import lazy

__all__ = [
    "Candidate",
    "load",
    "page",
    "RecordedStep",
    "Recorder",
    "Recording",
    "show",
]
__dir__ = lazy.public_names(__name__)
