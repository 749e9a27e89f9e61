"""Results as a Parquet file, through pyarrow: the records of `llmppl.tasks.results` as rows.

Each row ends with a checksum of its record. The metadata hold the headers, and the number of rows, as sealed lines.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmppl.support.arguments import shown
from llmppl.support.files import Owned, checksum, sealed, unsealed

_ROWS = 1_000                                           # of a group, and in memory
_AS_JSON = "task", "deaths", "matches"
_KEY = b"llmppl"                                        # of the metadata


def pyarrow(module: str = "pyarrow") -> Any:
    """The module; an ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("results are written to Parquet by pyarrow: pip install 'llmppl[parquet]'") from error


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the headers of a file and its records. A ValueError names a file that is damaged or foreign."""
    arrow, number = pyarrow(), 0
    try:
        file = pyarrow("pyarrow.parquet").ParquetFile(path)
        found = file.schema_arrow
        *headers, last = map(unsealed, (found.metadata or {}).get(_KEY, b"").splitlines(keepends=True) or [b""])
        if not found.equals(_schema()) or not all(headers) or not isinstance(last.get("rows"), int):
            raise ValueError(f"it has {', '.join(found.names)}, or its header is damaged")
        yield from headers
        for batch in file.iter_batches(_ROWS):
            for row in batch.to_pylist():
                yield _record(row, number)
                number += 1
        if number != last["rows"]:
            raise ValueError(f"it has {number} rows of {last['rows']}")
    except (ValueError, OSError, RecursionError, MemoryError, arrow.ArrowException) as error:
        if isinstance(error, OSError) and error.filename:
            raise                                       # it cannot be read at all
        raise ValueError(
            f"{path} is no Parquet file of run_many, or damaged, and is left as it is: {shown(str(error))}"
        ) from error


def write_rows(path: Path, headers: Iterable[dict[str, Any]], records: Iterable[dict[str, Any]], num: int) -> None:
    """Write a file of these records, `num` of them, in the place of `path`, whole or not at all."""
    arrow, told = pyarrow(), b"".join(map(sealed, (*headers, {"rows": num})))
    schema, rows = _schema().with_metadata({_KEY: told}), map(_row, records)
    with Owned(path) as owned, owned.replacing() as file, pyarrow("pyarrow.parquet").ParquetWriter(file, schema) as out:
        while some := list(itertools.islice(rows, _ROWS)):
            out.write_table(arrow.Table.from_pylist(some, schema))


def _record(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the record of a row without its null fields."""
    record = {name: value for name, value in row.items() if value is not None}
    if "texts" in record:                               # None is a value there
        record |= {name: row[name] for name in ("log_ml", "log_ml_se")}
    record |= {name: json.loads(record[name]) for name in _AS_JSON if name in record}
    if record.pop("check", None) != _check(record):
        raise ValueError(f"row {number} does not match its checksum")
    return record


def _row(record: dict[str, Any]) -> dict[str, Any]:
    told = {name: value if isinstance(value, (int, float)) else _written(value) for name, value in record.items()}
    told |= {name: record[name] for name in _AS_JSON if name in record}
    row = told | {name: json.dumps(told[name]) for name in _AS_JSON if name in told}
    return {**row, "check": _check(told)}


def _check(record: dict[str, Any]) -> str:
    return checksum(json.dumps(record, sort_keys=True).encode())


def _written(value: Any) -> Any:
    """Texts as UTF-8 can write them: half of a UTF-16 pair becomes its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_written(each) for each in value] if isinstance(value, list) else value


def _schema() -> Any:
    arrow = pyarrow()
    text, number = arrow.string(), arrow.float64()
    kinds = {
        "index": arrow.int64(), "digest": text, "task": text, "run": text, "seconds": number,
        "log_ml": number, "log_ml_se": number, "texts": arrow.list_(text), "log_weights": arrow.list_(number),
        "cut": arrow.list_(arrow.bool_()), "deaths": text, "matches": text, "error": text, "check": text,
    }  # fmt: skip
    return arrow.schema(list(kinds.items()))
