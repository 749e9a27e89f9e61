"""Calibration of the closed fields of records, from labelled prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import to_jsonable_python

from llmppl.constraints.json.closed import Path as FieldPath
from llmppl.constraints.values import constraint_of
from llmppl.decisions.calibration import (
    Calibration,
    Reading,
    calibration_of,
    setting_of_records,
    sketch,
)
from llmppl.inference.particles import NO_VALUE
from llmppl.lm import CachedTransformer
from llmppl.report.probabilities import key_of
from llmppl.support.arguments import is_type, shown
from llmppl.tasks.answers import value_at
from llmppl.tasks.generation import generate


def fit_record_calibration(
    lm: CachedTransformer, labelled: Iterable[tuple[Any, Any]], constraint: Any, **how: Any
) -> Calibration:
    """Fit a map for each closed field of records, and choose its kind by cross-validation.

    `generate(..., calibration=)` then has calibrated `conditionals()`, at no further pass.

    Parameters
    ----------
    lm, constraint, **how : as in `generate`
        A type or a JSON schema of records.
    labelled : list of (prompt, right record)
        A record is an object of the type, or a dict of some of its fields. 50 or more are wanted, and 20 are needed.

    Returns
    -------
    Calibration

    Examples
    --------
    >>> from typing import Literal, TypedDict
    >>> Pet = TypedDict("Pet", {"kind": Literal["cat", "dog"]})
    >>> labelled = [("It barked. ", {"kind": "dog"}), ("It purred. ", {"kind": "cat"})] * 10
    >>> calibration = fit_record_calibration(lm, labelled, Pet, progress=False)
    >>> generate(lm, "It barked. ", Pet, calibration=calibration).conditionals()["kind"].best
    'dog'
    """
    items = [*labelled]
    records = []
    for each in items:
        if not isinstance(each, tuple | list) or len(each) != 2:
            wanted = "must be a list of (prompt, right record)"
            raise TypeError(f"labelled {wanted}, with no {shown(each)}")
        records.append(to_jsonable_python(each[1]))
        if not isinstance(records[-1], dict):
            wanted = "must be a dict or an object of the type"
            raise TypeError(f"a right record {wanted}, not {shown(each[1])}")
    answers = generate(lm, [prompt for prompt, _ in items], constraint, **how)
    readings = dict[str, list[Reading]]()
    paths = dict[str, FieldPath]()  # of all closed fields
    for answer, record in zip(answers, records, strict=True):
        if answer.error:
            raise ValueError(f"there is no record after {shown(answer.prompt)}: {answer.error}")
        for field in answer.closed_fields():
            paths[field.name] = field.path
            label = value_at(record, field.path, NO_VALUE)
            if label is NO_VALUE:
                continue
            keys = [key_of(value) for value in field.values]
            if key_of(label) not in keys:
                has = f"which has {shown(field.values)}"
                raise ValueError(f"{shown(label)} is no value of {field.name!r}, {has}")
            place = keys.index(key_of(label))
            reading = Reading(field.probabilities, sketch(field.before.log_probs()), place)
            readings.setdefault(field.name, []).append(reading)
    if not readings:
        names = ", ".join(paths) or "none"
        raise ValueError(
            f"labelled has no label of a closed field; those of its records are: {names}"
        )
    fitted = [paths[name] for name in readings]
    kind: Any = constraint
    if is_type(constraint):
        kind = constraint_of(constraint)
    setting = setting_of_records(lm, kind.schema, fitted)
    return calibration_of({**setting, "paths": fitted}, readings)
