"""Lines of a file of results: their form, and a reader that names the wrong ones.

A file begins with a header. The lines that follow belong to it until the next header, and each task has one line.
`llmppl.tasks.results` describes the fields.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llmppl.inference.deaths import DEATH
from llmppl.inference.resuming.fingerprint import SHAPE
from llmppl.support.arguments import mismatch, shown
from llmppl.support.arguments import path as path_of
from llmppl.support.files import unsealed

FORMAT = 2
_BEGINNINGS = b'{"index": ', b'{"llmppl_results": '
_ENDED = re.compile(rb', "check": "[0-9a-f]{16}"\}[^,]')   # no torn line has this
_RECORD = {"index": range(1 << 63), "digest": str, "run": str, "seconds": float}
_OUTCOMES: dict[str, Any] = {                           # by the field that only this outcome has
    "texts": {"texts": [str], "log_weights": [float], "cut": [bool], "log_ml": float | None, "log_ml_se": float | None},
    "matches": {"matches": [{"text": str}]},
    "error": {"error": str},
}
_HEADER = {"run": str, "after": str | None, "seed": int | None, "version": str}


def results_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a file of results. Raise a ValueError for a Parquet file, with the way to make one."""
    checked = path_of(name, path)
    if checked.suffix == ".parquet":
        lines = checked.with_suffix(".jsonl").name
        raise ValueError(
            f"{name} must name a file of JSON lines such as {lines!r}, not {str(path)!r}. pandas makes Parquet of one: "
            f"pandas.read_json({lines!r}, lines=True, precise_float=True).dropna(subset='index')"
            f".to_parquet({checked.name!r})"
        )
    return checked


def _header_error(record: dict[str, Any]) -> str:
    """Return the reason why a header is wrong; "" if it is right."""
    if record.get("llmppl_results") != FORMAT:
        found = f"of the format {shown(record['llmppl_results'])}" if "llmppl_results" in record else "no header"
        return f"is {found}, where a header of the format {FORMAT} should be"
    return mismatch(record, _HEADER if record.get("identity") is None else {**_HEADER, "identity": SHAPE}, "its header")


def _record_error(record: dict[str, Any]) -> str:
    """Return the reason why a record is wrong; "" if it is right."""
    kinds = _OUTCOMES.keys() & record.keys()
    if len(kinds) != 1:
        return f"has {len(kinds)} of {', '.join(_OUTCOMES)}, and not one"
    shape = {**_RECORD, **_OUTCOMES[kinds.pop()], **({"deaths": [DEATH]} if "deaths" in record else {})}
    if wrong := mismatch(record, shape):
        return f"has another form: {wrong}"
    lengths = {len(record[name]) for name in ("texts", "log_weights", "cut") if name in record}
    return "has texts, weights and marks of different numbers" if len(lengths) > 1 else ""


def _context_error(record: dict[str, Any], run: str | None, seen: set[int]) -> str:
    """Return the reason why a right record may not follow the lines before it; "" if it may."""
    if record["run"] != run:
        return f"is of another run, {shown(record['run'])}"
    return f"is a second result of task {record['index']}" if record["index"] in seen else ""


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
        ends_early = not self.raw.endswith(b"\n") or self.raw.rstrip(b"\n")[-1:] in (b"", b"\0")
        return self.number > 1 and begins and ends_early and not _ENDED.search(text)


def scan(path: Path) -> Iterator[Line]:
    """Yield all lines of a file of results, right or wrong."""
    run, seen = None, set[int]()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            record = unsealed(raw)
            if not record:
                wrong = "is no result of run_many, or is damaged"
            elif "index" in record:
                run = run or record.get("run")          # the header may be damaged
                wrong = _record_error(record) or _context_error(record, run, seen)
                seen |= set() if wrong else {record["index"]}
            else:
                wrong = _header_error(record)
                if not wrong and number > 1 and record["after"] != run:
                    wrong = "is the header of another file"
                run = run if wrong else record["run"]
            yield Line(number, raw, record, wrong)


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the headers and records of a file, each after the byte at which its line ends.

    Raises
    ------
    ValueError
        If a line is wrong. A torn line at the end of the file is left out with a warning.
    """
    end, torn = 0, None
    for line in scan(path):
        if line.number == 1 and "index" in line.record:
            line = line._replace(wrong="is a result, where the header should be")
        wrong = torn or (line if line.wrong else None)
        if wrong is not None and (torn or not wrong.is_torn):
            text = shown(wrong.raw.rstrip(b"\n").decode("utf-8", "replace"))
            raise ValueError(
                f"{path}, line {wrong.number}, {wrong.wrong}; the file is left as it is, and llmppl results --repair "
                f"keeps its right lines. The line: {text}"
            )
        torn = wrong
        if torn is None:
            end += len(line.raw)
            yield end, line.record
    if torn is not None:
        said = f"{path}, line {torn.number}, is torn and left out; resume=True runs its task again"
        warnings.warn(said, stacklevel=3)
