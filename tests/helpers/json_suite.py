"""The official suite of JSON Schema: its schemas, its remote schemas, and counts of right and refused texts.

The suite lies beside the checkout, in ../shared/evaldata/json_schema_suite; tests that need it are skipped without it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.common import ROOT
from helpers.json_texts import Reader, compact, reason

EVALDATA = ROOT.parent / "shared" / "evaldata"
DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
BASE = "http://localhost:1234/"


class Case(NamedTuple):
    """One schema of the suite with its texts."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]                         # "data", "valid" and "description"


def wants(folder: str) -> Path:
    """Return a folder of evaluation data; skip the test where it is absent."""
    if not (EVALDATA / folder).is_dir():
        pytest.skip(f"{EVALDATA / folder} is absent")
    return EVALDATA / folder


@cache
def remotes() -> dict[str, Any]:
    """Return the remote schemas of the suite by their URIs."""
    folder = wants("json_schema_suite") / "remotes"
    return {BASE + path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in folder.rglob("*.json")}


def cases(draft: str) -> Iterator[Case]:
    """Yield the cases of a draft; schemas without `$schema` get that of the draft."""
    folder = wants("json_schema_suite") / "tests" / draft
    for path in sorted(folder.rglob("*.json")):
        for found in json.loads(path.read_text()):
            schema = found["schema"]
            if isinstance(schema, dict) and "$schema" not in schema:
                schema = {"$schema": DRAFTS[draft], **schema}
            yield Case(path.relative_to(folder).as_posix(), found["description"], schema, found["tests"])


def bench_schemas() -> list[tuple[str, Any, list[Any]]]:
    """Return name, schema and valid instances of the schemas of JSONSchemaBench."""
    found = []
    for path in sorted(wants("jsonschemabench").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            valid = [test["data"] for test in row.get("tests", []) if test["valid"]]
            found.append((row["id"], row["schema"], valid))
    return found


@dataclass
class Counts:
    """Counts over cases of the suite, and the texts that a count alone does not excuse."""

    schemas: int = 0
    empty: int = 0                                                      # refused schemas without a valid text
    refused: Counter[str] = field(default_factory=Counter)              # the other refused schemas, by the error
    valid: Counter[str] = field(default_factory=Counter)                # valid texts, "admitted" or by the reason
    invalid: Counter[str] = field(default_factory=Counter)              # invalid texts, by the part that refuses them
    wrong: list[tuple[str, str]] = field(default_factory=list)          # file and text: invalid, admitted
    unexplained: list[str] = field(default_factory=list)                # valid texts that are refused

    def __str__(self) -> str:
        lines = [
            f"{self.schemas} schemas, {self.refused.total()} refused, {self.empty} without an instance refused too",
            f"valid texts {dict(self.valid)}",
            f"invalid texts {dict(self.invalid)}",
        ]
        lines += [f"{number:4}  refused: {message}" for message, number in self.refused.most_common()]
        lines += [f"      admitted, invalid: {file}, {each}" for file, each in self.wrong]
        lines += [f"      refused, valid: {each}" for each in self.unexplained]
        return "\n".join(lines)


def count(some: Iterable[Case]) -> Counts:
    """Read each text of the cases over bytes, and count."""
    counts = Counts()
    for case in some:
        counts.schemas += 1
        try:
            reader = Reader(case.schema, resources=remotes())
        except ValueError as error:
            if any(test["valid"] for test in case.tests):
                counts.refused[f"{case.file}: {str(error)[:150]}"] += 1
            else:
                counts.empty += 1
            continue
        for test in case.tests:
            _count_text(counts, case, reader, compact(test["data"]), test["valid"])
    return counts


def _count_text(counts: Counts, case: Case, reader: Reader, text: str, valid: bool) -> None:
    refusal, shown = reader.refusal(text), f"{case.description}: {compact(case.schema)[:300]}  {text[:80]!r}"
    if not valid:
        counts.invalid[refusal or "ADMITTED"] += 1
        counts.wrong += [(case.file, shown)] * (not refusal)
        return
    why = reason(reader, text, resources=remotes()) if refusal else "admitted"
    counts.valid[f"{why}, by {refusal}" if refusal else why] += 1
    counts.unexplained += [f"{case.file}, {shown} by {refusal}"] * why.startswith("unexplained")
