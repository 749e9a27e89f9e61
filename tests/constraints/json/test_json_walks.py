"""Texts drawn byte by byte from the masks, and mutants of them, compared with two validators of JSON Schema.

The schemas are those of JSONSchemaBench and of the official suite. A text that masks and `parse` admit is valid. A
mutant that both validators call valid is admitted, unless it has a spelling that the documentation excludes.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from helpers.common import repetitions
from helpers.json_suite import DRAFTS, bench_schemas, cases, remotes
from helpers.json_texts import Reader, Validators, compact, mutant, reason, walk

TEXTS, MUTANTS = repetitions(8000, 100), repetitions(25_000, 225)
SPELLINGS = {                                           # of refused valid texts; docs/constraints.md states each
    "order", "format", "number's spelling", "repeated names", "escaped name", "string's escapes", "whitespace",
}  # fmt: skip


@dataclass
class Found:
    """Numbers of texts and mutants, and disagreements by category."""

    schemas: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    mutants: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)              # admitted, and no validator calls it valid
    disputed: list[str] = field(default_factory=list)           # admitted, and one validator of two calls it invalid
    unexplained: list[str] = field(default_factory=list)        # valid by both and refused, by no documented reason

    def __str__(self) -> str:
        lines = [f"schemas {dict(self.schemas)}", f"texts {dict(self.texts)}", f"mutants {dict(self.mutants)}"]
        lines += [f"{name}: {each}" for name in ("wrong", "disputed", "unexplained") for each in getattr(self, name)]
        return "\n".join(lines)


def schemas():
    """Return name, schema and valid values of all schemas, in a random order that is always the same."""
    rows = [(name, schema, values, {}) for name, schema, values in bench_schemas()]
    for draft in DRAFTS:
        for case in cases(draft):
            values = [test["data"] for test in case.tests if test["valid"]]
            rows.append((f"{draft}/{case.file}", case.schema, values, remotes()))
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[i] for i in order]


def compare(found, kind, name, reader, validators, text, options):
    """Compare the admission of a text with its validity."""
    python, rust = validators.verdicts(text)
    refusal = reader.refusal(text)
    shown = f"{name}: {compact(reader.schema)[:300]}  {text[:120]!r}"
    if not refusal:
        verdict = "valid" if python and rust else "no verdict" if python is None or rust is None else "WRONG"
        if verdict == "WRONG" and (python or rust):
            verdict = f"disputed by {'jsonschema-rs' if python else 'jsonschema'}"
            found.disputed.append(f"{verdict}: {shown}")
        elif verdict == "WRONG" or (verdict == "no verdict" and False in (python, rust)):
            found.wrong.append(shown)
        kind[f"admitted, {verdict}"] += 1
    elif python and rust:
        why = reason(reader, text, **options)
        kind[f"valid, refused: {why}"] += 1
        if not set(why.split(" and ")) <= SPELLINGS:
            found.unexplained.append(f"{why}: {shown} by {refusal}")
    else:
        kind["refused, not valid"] += 1


@cache
def found():
    """Walk and mutate until the numbers of texts and of mutants are reached."""
    found, rng, rows = Found(), np.random.default_rng(1), schemas()
    each = max(3, -(-TEXTS // len(rows)) + 2)
    for name, schema, values, resources in rows:
        if sum(found.texts.values()) >= TEXTS and sum(found.mutants.values()) >= MUTANTS:
            break
        options = {"resources": resources}
        try:
            reader = Reader(schema, **options)
        except ValueError:
            found.schemas["refused"] += 1
            continue
        try:
            validators = Validators(schema, resources)
        except Exception:
            found.schemas["unread by a validator"] += 1
            continue
        found.schemas["compared"] += 1
        texts = [text for _ in range(each) if (text := walk(reader, rng)) is not None]
        for text in texts:
            compare(found, found.texts, name, reader, validators, text, options)
        for text in [*texts, *map(compact, values[:3])] * 3:
            compare(found, found.mutants, name, reader, validators, mutant(text, rng), options)
    print(f"\n{found}")
    return found


def test_admitted_texts_are_valid():
    assert found().wrong == []
    assert found().texts["admitted, valid"] > 0.8 * sum(found().texts.values())


def test_validators_disagree_on_few_admitted_texts():
    num = sum(found().texts.values()) + sum(found().mutants.values())
    assert len(found().disputed) <= 0.005 * num, found().disputed


def test_valid_mutants_are_refused_for_documented_reasons_only():
    assert found().unexplained == []
