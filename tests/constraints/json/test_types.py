"""Types as JSON: random types and values, against pydantic's own writer and reader."""

import warnings

import numpy as np
import pydantic
import pytest
from helpers.common import repetitions
from helpers.random_types import Types

from llmppl.constraints.json.schema import JsonSchema
from llmppl.constraints.masks import explain

CLOSERS = b'"}],'
MAX_BYTES = 400


def dumped(kind, draw, repeats):
    """Return texts that pydantic writes of values of a type, and reads as equal ones."""
    adapter, found = pydantic.TypeAdapter(kind), []
    for _ in range(repeats):
        try:
            value = adapter.validate_python(draw())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                text = adapter.dump_json(value, by_alias=True, round_trip=True).decode()
            if adapter.validate_json(text) == value:
                found.append(text)
        except (ValueError, TypeError, UserWarning):
            continue
    return found


def walked(index, rng):
    """Return a random text under the masks; None if it grows too long."""
    state, text = index.start, b""
    while len(text) < MAX_BYTES:
        coming = index.next_bytes(state)
        if index.accepts(state) and (not coming or rng.random() < 0.3):
            return text.decode()
        near_end = [byte for byte in coming if byte in CLOSERS]
        byte = int(rng.choice(near_end if near_end and rng.random() < 0.4 else list(coming)))
        state, text = index.advance(state, byte), text + bytes([byte])
    return None


@pytest.mark.parametrize("seed", range(repetitions(300, 40)))
def test_masks_hold_written_values_and_readable_texts(seed):
    rng = np.random.default_rng(seed)
    drawn = Types(rng).draw()
    try:
        constraint = JsonSchema(drawn.kind, whitespace=False)
    except TypeError as error:
        assert "cannot be" in str(error)
        return
    index = constraint.index(explain.BYTES)
    for text in dumped(drawn.kind, drawn.value, 6):
        assert index.accepts(index.after(text)), text
    for _ in range(6):
        text = walked(index, rng)
        if text is not None:
            try:
                constraint.parse(text)
            except ValueError as error:
                assert constraint.warnings, (text, error)
