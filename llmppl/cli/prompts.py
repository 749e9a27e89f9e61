"""Prompts of a file: one per line, per object of JSON lines, or per row of a CSV file.

The position of a prompt in the file, from 0, is the index of its task. So the readers skip nothing and raise an error
for any line that has no prompt.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmppl.cli import show
from llmppl.support.arguments import shown
from llmppl.support.arguments import text as text_of

FIELD = "prompt"                                        # default field of JSON lines, and column of CSV
JSON_LINES = ".jsonl", ".ndjson", ".json"


def read(file: Path, field: str | None = None) -> list[str]:
    """Return the prompts of a file; `-` stands for standard input.

    `field` names the column of a .csv file, or the field of a .jsonl file or of JSON lines from standard input. Any
    other file has a prompt on each line. A ValueError names the line that is wrong.
    """
    kind, name = file.suffix.lower(), str(file)
    piped = name == "-"
    if piped:
        kind, name = "" if field is None else ".jsonl", "standard input"
    elif field is not None and kind not in (".csv", *JSON_LINES):
        raise ValueError(f"--field is for .csv and .jsonl files and for JSON lines from -; {name} has a prompt a line")
    with show.file_errors("read", name):
        data = sys.stdin.buffer.read() if piped else file.read_bytes()
    try:
        text = data.decode("utf-8-sig")                 # without the byte order mark of some editors
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}, is not UTF-8: convert it first, as by iconv -t utf-8") from None
    reader = _rows if kind == ".csv" else _objects if kind in JSON_LINES else _plain
    prompts = list(reader(name, text, field or FIELD))
    if not prompts:
        raise ValueError(f"{name} has no prompts: write one on each line{' below the header' * (kind == '.csv')}")
    return prompts


def _lines(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line, without empty lines at the end of the file."""
    lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]       # splitlines has other ends, too
    while lines and not lines[-1].strip():
        lines.pop()
    return ((f"{name}, line {number},", line) for number, line in enumerate(lines, 1))


def _plain(name: str, text: str, field: str) -> Iterator[str]:
    for where, line in _lines(name, text):
        if not line.strip():
            raise ValueError(f"{where} is empty: take it out, or write JSON lines, in which a prompt may be empty")
        yield line


def _objects(name: str, text: str, field: str) -> Iterator[str]:
    for where, line in _lines(name, text):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{where} is not JSON ({error}): write {{"{field}": "..."}} on each line') from None
        if not isinstance(record, dict):
            raise ValueError(f'{where} is no object: write {{"{field}": "..."}} on each line, not {shown(record)}')
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}: {_others('fields', record)}")
        if not isinstance(record[field], str):
            raise ValueError(f"{where} has a field {field!r} that is no text: {shown(record[field])}")
        yield text_of(f"{where} field {field!r},", record[field])


def _rows(name: str, text: str, field: str) -> Iterator[str]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = list(rows.fieldnames or ())
        if columns and field not in columns:
            raise ValueError(f"{name} has no column {field!r}: {_others('columns', columns)}")
        for row in rows:
            if row[field] is None:
                raise ValueError(f"{name}, line {rows.line_num}, ends before the column {field!r}")
            yield row[field]
    except csv.Error as error:
        raise ValueError(f"{name}, line {rows.reader.line_num}, is not CSV: {error}") from None


def _others(kind: str, names: Iterable[str]) -> str:
    return f"name one of its {kind} by --field: {', '.join([shown(name, 60) for name in names])[:600]}"
