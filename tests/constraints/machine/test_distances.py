"""Distances in machines, compared with texts that are counted by hand."""

import math

import pytest

from llmppl import JsonSchema, Vocabulary
from llmppl.constraints.machine import distances

BYTES = [b"%c" % byte for byte in range(256)]


def vocabulary(*tokens):
    return Vocabulary([*BYTES, *tokens, b""], eos_ids=[256 + len(tokens)])


def test_a_long_text_of_long_tokens_is_counted():
    index = JsonSchema({"type": "array", "items": {"const": 11}, "minItems": 60}).index(vocabulary(b"11,", b"11]"))
    assert index.tokens_to_accept(index.start) == 1 + 59 + 1  # [ 11, ... 11]
    assert index.allowed(index.start).tolist() == [ord("[")]
    assert index.mask_within(index.start, 61).nonzero()[0].tolist() == [ord("[")]
    assert not index.mask_within(index.start, 60).any()


def test_a_search_that_gives_up_goes_on_by_descents(monkeypatch):
    text = {"type": "string", "maxLength": 500}
    schema = {
        "type": "object",
        "properties": {"first": text, "second": text},
        "required": ["first", "second"],
        "additionalProperties": False,
    }
    vocab = vocabulary(*(b"a" * length for length in range(2, 60)), b'"second"')
    monkeypatch.setattr(distances, "MAX_MET", 200)
    index = JsonSchema(schema).index(vocab)
    state = index.after('{"first":"b')
    rest = ['"', ",", '"second"', ":", '"second"', "}"]
    assert index.tokens_to_accept(state) == len(rest)
    near = index.mask_within(state, len(rest))
    assert near[ord('"')] and near.sum() == 1
    assert index.mask_within(state, len(rest) + 1)[ord("x")]


@pytest.mark.parametrize("most", [20, math.inf])
def test_a_search_among_many_different_items_meets_few_hypotheses(most):
    items = {"type": "array", "items": {"enum": [*range(60)]}, "uniqueItems": True, "minItems": 30}
    index = JsonSchema(items).index(vocabulary())
    assert index.mask_within(index.start, most).any() == (most == math.inf)
    met = {each for after in index._distances._next.values() for each in after}
    assert sum(len(each.hypotheses) for each in met) < 2 * distances.MAX_MET
