"""Reports: progress bars, tables, and recordings of runs with their pages."""

from llmppl.report.html_page import page as page
from llmppl.report.html_page import show as show
from llmppl.report.recording import Candidate as Candidate
from llmppl.report.recording import RecordedStep as RecordedStep
from llmppl.report.recording import Recorder as Recorder
from llmppl.report.recording import Recording as Recording
from llmppl.report.recording import load as load
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
