"""A run written down as it goes, and shown."""

from llmppl.trace.html_page import page as page
from llmppl.trace.recorder import Recorder as Recorder
from llmppl.trace.recording import Candidate as Candidate
from llmppl.trace.recording import RecordedStep as RecordedStep
from llmppl.trace.recording import Recording as Recording
from llmppl.trace.recording import load as load
from llmppl.trace.showing import show as show
