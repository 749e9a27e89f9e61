"""Prompts from a file: a line of text each, an object of JSON lines each, or a row of a CSV file each.

A prompt's place among them, from 0, is the index of its task. So nothing is skipped: what is no prompt is an error.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmppl.support.arguments import shown
from llmppl.support.arguments import text as text_of

FIELD = "prompt"                                        # of CSV and JSON lines, if no other is named
JSON_LINES = ".jsonl", ".ndjson", ".json"


def read(file: Path, field: str | None = None) -> list[str]:
    """The prompts of a file, `-` for standard input.

    `field` names the column of a .csv file, or the field of a .jsonl file or of JSON lines from standard input; all
    else has a prompt on each line. A ValueError says which line is wrong.
    """
    kind, name = file.suffix.lower(), str(file)
    if name == "-":
        kind, name = "" if field is None else ".jsonl", "standard input"
    elif field is not None and kind not in (".csv", *JSON_LINES):
        raise ValueError(f"--field is for .csv and .jsonl files and for JSON lines from -; {name} has a prompt a line")
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = data.decode("utf-8-sig")                 # the mark that some editors begin a file with is no text
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}, is not UTF-8: convert it first, as by iconv -t utf-8") from None
    reader = _rows if kind == ".csv" else _objects if kind in JSON_LINES else _plain
    prompts = list(reader(name, text, field or FIELD))
    if not prompts:
        raise ValueError(f"{name} has no prompts: write one on each line{' below the header' * (kind == '.csv')}")
    return prompts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines; empty ones at the end are none."""
    lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]       # splitlines knows other ends
    while lines and not lines[-1].strip():
        lines.pop()
    return enumerate(lines, 1)


def _plain(name: str, text: str, field: str) -> Iterator[str]:
    for number, line in _lines(text):
        if not line.strip():
            raise ValueError(
                f"{name}, line {number}, is empty: take it out, or write JSON lines, in which a prompt may be empty"
            )
        yield line


def _objects(name: str, text: str, field: str) -> Iterator[str]:
    for number, line in _lines(text):
        where = f"{name}, line {number},"
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


def _others(what: str, names: Iterable[str]) -> str:
    return f"name one of its {what} by --field: {', '.join([shown(name, 60) for name in names])[:600]}"
