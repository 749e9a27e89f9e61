"""Readers of other people's files, on files that are damaged: a ValueError that names the file, or a value.

`READERS` has an entry for each reader: the name of a file, a valid content, and the function that reads it. The kinds
of damage are one bit, an early end, more bytes, zeros at the end as after a power loss, and for JSON another value.
"""

import json
import random
import re
from functools import reduce

import pytest
from helpers.common import repetitions

from llmppl import Grammar
from llmppl.cli.generate import _prompts
from llmppl.cli.options import Given, constraint
from llmppl.support.arguments import shown

GRAMMAR = 'start: sum\nsum: item ("+" item)*\nitem: NAME | NUMBER | "(" sum ")"\nNAME: /[abc]+/\nNUMBER: /[01]+(?!a)/\n'
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1]}, "c": {"$ref": "#/$defs/d"}},
    "required": ["a"], "additionalProperties": False,
    "$defs": {"d": {"type": "string", "pattern": "[a-c]*", "maxLength": 3}},
})  # fmt: skip
READERS = {
    "p.jsonl": ('{"prompt": "One, two", "id": 7}\n{"prompt": "caf\\u00e9 \\"x\\""}\n', _prompts),
    "p.txt": ("One, two\nthree café\n", _prompts),
    "g.lark": (GRAMMAR, Grammar.from_file),
    "s.json": (SCHEMA, lambda path: constraint(Given(regex=None, grammar=None, json_schema=str(path)))),
}
ODD = [b"null", b"true", b"-1", b"256", b"1e999", b"NaN", b'""', b'"ff"', b"[]", b"{}", b'{"a": 1}', b"9" * 30]


def flip(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def insert(data, rng):
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice([1, 2, 40])) + data[at:]


def nul(data, rng):
    return data[: rng.choice([len(data), rng.randrange(len(data))])] + bytes(rng.choice([1, 8, 4096]))


def replace(data, rng):
    """Return the data with another JSON value in the place of a string or a word."""
    found = rng.choice([*re.finditer(rb'"[^"]*"|\w+', data)])
    return data[: found.start()] + rng.choice(ODD) + data[found.end() :]


def fault(read, path, data):
    """Return the fault of reading damaged data; None if it is read, or refused in a sentence with the file's name."""
    path.write_bytes(data)
    try:
        read(path)
    except ValueError as error:
        return None if path.name in str(error) and len(str(error)) < 2000 else repr(error)
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("damage", [flip, cut, insert, nul, replace])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_name(name, damage, tmp_path):
    text, read = READERS[name]
    assert fault(read, tmp_path / name, text.encode()) is None
    damaged = [damage(text.encode(), random.Random(i)) for i in range(repetitions(300, 10))]
    assert [(data, found) for data in damaged if (found := fault(read, tmp_path / name, data))] == []


def test_unbounded_nesting_is_refused_by_name(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(ValueError, match="p.jsonl"):
        _prompts(tmp_path / "p.jsonl")


def test_lone_surrogates_are_named_with_their_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".* surrogates not allowed"):
        _prompts(path)


def test_a_value_nested_without_bound_is_shown_by_its_type():
    assert shown(reduce(lambda inner, _: [inner], range(100_000), [])) == "a list"
