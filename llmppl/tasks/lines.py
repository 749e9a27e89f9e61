"""Lines of a file of results, and the reasons why some of them are wrong.

`llmppl.tasks.results` says what a line holds. A file begins with a header, the lines that follow belong to it until
the next header, and there is one line for each task.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llmppl.inference.deaths import DEATH
from llmppl.inference.resuming.fingerprint import SHAPE
from llmppl.support.arguments import mismatch, shown
from llmppl.support.files import unsealed
from llmppl.tasks import parquet

FORMAT = 2
_BEGINNINGS = b'{"index": ', b'{"llmppl_results": '
_ENDED = re.compile(rb', "check": "[0-9a-f]{16}"\}[^,]')   # which no torn line has
_RECORD = {"index": range(1 << 63), "digest": str, "run": str, "seconds": float}
_OUTCOMES: dict[str, Any] = {                           # by the field that only they have
    "texts": {"texts": [str], "log_weights": [float], "cut": [bool], "log_ml": float | None, "log_ml_se": float | None},
    "matches": {"matches": [{"text": str}]},
    "error": {"error": str},
}
_HEADER = {"run": str, "after": str | None, "seed": int | None, "version": str}


def lines_of(path: Path) -> Path:
    """Return the file of lines behind a file of results: the same, but beside a Parquet file."""
    return path.with_name(f"{path.name}.jsonl") if path.suffix == ".parquet" else path


def _wrong_header(record: dict[str, Any]) -> str:
    """Return the reason why a header is wrong; "" if it is right."""
    if record.get("llmppl_results") != FORMAT:
        found = f"of the format {shown(record['llmppl_results'])}" if "llmppl_results" in record else "no header"
        return f"is {found}, where a header of the format {FORMAT} should be"
    return mismatch(record, _HEADER if record.get("identity") is None else {**_HEADER, "identity": SHAPE}, "its header")


def _wrong_record(record: dict[str, Any]) -> str:
    kinds = _OUTCOMES.keys() & record.keys()
    if len(kinds) != 1:
        return f"has {len(kinds)} of {', '.join(_OUTCOMES)}, and not one"
    shape = {**_RECORD, **_OUTCOMES[kinds.pop()], **({"deaths": [DEATH]} if "deaths" in record else {})}
    if wrong := mismatch(record, shape):
        return f"has another form: {wrong}"
    lengths = {len(record[name]) for name in ("texts", "log_weights", "cut") if name in record}
    return "has texts, weights and marks of different numbers" if len(lengths) > 1 else ""


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the headers and records of a file, each record once, after the place in bytes where their line ends.

    A ValueError names a line that is wrong, but for a torn one at the end, which is left out with a warning.
    """
    end = 0
    lines, rows, runs = lines_of(path), set[int](), list[str]()
    if lines != path and path.exists():
        for number, record in enumerate(parquet.read(path)):
            if wrong := _wrong_record(record) if "index" in record else _wrong_header(record):
                raise ValueError(f"{path}, entry {number}, {wrong}; the file is left as it is")
            if "index" in record:
                rows.add(record["index"])
            else:
                runs.append(record["run"])
            yield 0, record
    for line in _right(lines) if lines == path or lines.exists() else ():
        if line.number == 1 and runs and line.record["run"] not in runs and line.record["after"] != runs[-1]:
            raise ValueError(f"{lines} is of another run than {path}, beside which it stands; neither is changed")
        end += len(line.raw)
        if line.record.get("index") not in rows:        # else the run was killed when it had become a row
            yield end, line.record


class Line(NamedTuple):
    """Line of a file, its record, and the reason why it is wrong."""

    number: int
    raw: bytes
    record: dict[str, Any]
    wrong: str

    @property
    def is_torn(self) -> bool:
        """True if a stopped process or machine may have left the line at the end of a file."""
        text = self.raw.rstrip(b"\0\r\n")
        begins = any(text.startswith(begin) or begin.startswith(text) for begin in _BEGINNINGS)
        cut = not self.raw.endswith(b"\n") or self.raw.rstrip(b"\n")[-1:] in (b"", b"\0")
        return self.number > 1 and begins and cut and not _ENDED.search(text)


def scan(path: Path) -> Iterator[Line]:
    """Yield all lines of a file of results, right or wrong."""
    run, seen = None, set[int]()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            record = unsealed(raw)
            if not record:
                wrong = "is no result of run_many, or is damaged"
            elif "index" not in record:
                wrong = _wrong_header(record)
                if not wrong and number > 1 and record["after"] != run:
                    wrong = "is the header of another file"
                run = record["run"] if not wrong else run
            else:
                wrong = _wrong_record(record)
                run = run or record.get("run")          # of a file whose header is damaged
                if not wrong and record["run"] != run:
                    wrong = f"is of another run, {shown(record['run'])}"
                elif not wrong and record["index"] in seen:
                    wrong = f"is a second result of task {record['index']}"
                elif not wrong:
                    seen.add(record["index"])
            yield Line(number, raw, record, wrong)


def _right(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, which must be right but for what a stop has left at its end."""
    torn: Line | None = None
    for line in scan(path):
        if line.number == 1 and "index" in line.record:
            line = line._replace(wrong="is a result, where the header should be")
        wrong = torn or (line if line.wrong else None)
        if wrong is not None and (torn or not wrong.is_torn):
            told = shown(wrong.raw.rstrip(b"\n").decode("utf-8", "replace"))
            raise ValueError(
                f"{path}, line {wrong.number}, {wrong.wrong}; the file is left as it is, and llmppl results --repair "
                f"keeps its right lines. The line: {told}"
            )
        if line.wrong:
            torn = line
        else:
            yield line
    if torn is not None:
        told = f"{path}, line {torn.number}, is torn and left out; resume=True runs its task again"
        warnings.warn(told, stacklevel=3)
