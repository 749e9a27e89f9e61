"""Results as a Parquet file, through pyarrow: the records of `llmppl.inference.results` as rows."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmppl.arguments import shown
from llmppl.inference.files import replacing

_ROWS = 1_000                                           # of a group, and in memory
_AS_JSON = "task", "seed", "deaths", "matches"          # a seed may have more than 64 bits


def pyarrow(module: str = "pyarrow") -> Any:
    """The module; an ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("results are written to Parquet by pyarrow: pip install 'llmppl[parquet]'") from error


def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records in a file; what a record does not have is left out. A ValueError for a file of anything else."""
    try:
        file = pyarrow("pyarrow.parquet").ParquetFile(path)
        foreign = "" if file.schema_arrow.equals(_schema()) else f"it has {', '.join(file.schema_arrow.names)}"
    except ValueError as error:
        foreign = str(error)
    if foreign:
        raise ValueError(f"{path} is no Parquet file of run_many, and is left as it is: {shown(foreign)}")
    for batch in file.iter_batches(_ROWS, columns=columns):
        for row in batch.to_pylist():
            record = {name: value for name, value in row.items() if value is not None}
            if "texts" in record:                       # None is a value there
                record |= {name: row[name] for name in ("log_ml", "log_ml_se")}
            yield record | {name: json.loads(record[name]) for name in _AS_JSON if name in record}


def write_rows(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a file of these records in the place of `path`, whole or not at all."""
    arrow, schema = pyarrow(), _schema()
    rows = map(_row, records)
    with replacing(path) as file, pyarrow("pyarrow.parquet").ParquetWriter(file, schema) as writer:
        while some := list(itertools.islice(rows, _ROWS)):
            writer.write_table(arrow.Table.from_pylist(some, schema))


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {name: value if isinstance(value, (int, float)) else _written(value) for name, value in record.items()}
    return row | {name: json.dumps(record[name]) for name in _AS_JSON if name in record}


def _written(value: Any) -> Any:
    """Texts as UTF-8 can write them: half of a UTF-16 pair becomes its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_written(each) for each in value] if isinstance(value, list) else value


def _schema() -> Any:
    arrow = pyarrow()
    text, number = arrow.string(), arrow.float64()
    kinds = {
        "index": arrow.int64(), "digest": text, "task": text, "seed": text, "version": text, "seconds": number,
        "log_ml": number, "log_ml_se": number, "texts": arrow.list_(text), "log_weights": arrow.list_(number),
        "cut": arrow.list_(arrow.bool_()), "deaths": text, "matches": text, "error": text,
    }  # fmt: skip
    return arrow.schema(list(kinds.items()))
