"""Typed questions in, probabilities out: `decide`, and the calibration of its probabilities."""

from llmppl.decisions.answers import Answer, Decision, Decisions
from llmppl.decisions.calibration import Calibration
from llmppl.decisions.deciding import decide, fit_calibration
from llmppl.decisions.measures import CalibrationReport, calibration_report
from llmppl.decisions.questions import Question, choice, predicate, score
from llmppl.decisions.records import fit_record_calibration
from llmppl.support import lazy

__all__ = [
    "Answer",
    "Calibration",
    "calibration_report",
    "CalibrationReport",
    "choice",
    "decide",
    "Decision",
    "Decisions",
    "fit_calibration",
    "fit_record_calibration",
    "predicate",
    "Question",
    "score",
]
__dir__ = lazy.public_names(__name__)
