"""Readers of files, on files that are damaged, forged or hostile: the contents as they were, or a ValueError.

`READERS` has an entry for each reader. Its cases run in a process of their own (`python test_fuzz_readers.py NAME ...`)
with little memory and a limit of time for each, so that a reader that hangs or eats memory fails by its name.

Kinds of cases. flip: one bit. cut: the file ends early. insert: some bytes more. nul: zeros at the end, as after a
power loss. forge: other contents in an intact container (a zip file with its CRCs). reseal: the same, and the digest of
the contents computed anew; such a file may be read, since only its sense is wrong. bomb: a small file that asks for
gigabytes.
"""

import faulthandler
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.common import HANG, repetitions

from llmppl import Grammar
from llmppl.support.files import checksum

QUICK = {"flip": 10, "cut": 10, "insert": 5, "nul": 5, "forge": 5, "reseal": 10, "bomb": 2}
FULL = {"flip": 1000, "cut": 1000, "insert": 200, "nul": 100, "forge": 300, "reseal": 400, "bomb": 2}
ROOM = 3 << 29  # bytes of memory beside what is there at the beginning
ODD = [
    None, True, -1, 0, 1, 2, 3, 255, 256, 2**31, 2**63, 10**30, 0.5, float("nan"), "", "a", "ff", [], [[]], [0], {},
    {"a": 1},
]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A reader, and how its files are forged.

    write : makes a small valid file at a path
    read : reads it, and returns contents that can be compared
    checked : whether the file has a checksum, so that what is read of a damaged one is what was written
    same : whether `found` is what may be read of a file that is cut off, if that is not all or nothing
    forge, reseal : from (data of the file, rng) to those of a forged one
    bomb : from 0 or 1 to the data of a file that asks for gigabytes
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    checked: bool = True
    same: Callable[[Any, Any], bool] = lambda found, original: found == original
    forge: Callable[[bytes, random.Random], bytes] | None = None
    reseal: Callable[[bytes, random.Random], bytes] | None = None
    bomb: Callable[[int], bytes] | None = None


# ---- mutations


def spots(value, spot=()):
    """The way to every value inside a JSON value."""
    yield spot
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(each, (*spot, key))


def changed(value, rng):
    """A JSON value in which something is replaced, removed or doubled."""
    *way, last = rng.choice([spot for spot in spots(value) if spot])
    inside = value
    for key in way:
        inside = inside[key]
    what = rng.randrange(4)
    if what == 0:
        del inside[last]
    elif what == 1 and isinstance(inside, list):
        inside.insert(last, inside[last])
    elif what == 2 and type(inside[last]) is int:
        inside[last] += rng.choice([-3, -1, 1, 7, 1000, -(10**6)])
    else:
        inside[last] = rng.choice(ODD)
    return value


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


# ---- grammars


GRAMMAR = 'start: sum\nsum: item ("+" item)*\nitem: NAME | NUMBER | "(" sum ")"\nNAME: /[abc]+/\nNUMBER: /[01]+(?!a)/\n'


# ---- results, checkpoints


def resealed(record):
    """A line with its checksum, whatever it holds."""
    body = json.dumps(record)[:-1].encode()
    return b'%s, "check": "%s"}\n' % (body, checksum(body).encode())


def write_results(path):
    from helpers.tasks import everything

    from llmppl import run_many

    assert len(list(run_many(everything, range(6), seed=3, to=path))) == 6


def read_results(path):
    from llmppl import load_results

    warnings.simplefilter("ignore", UserWarning)        # a torn line is left out
    return [
        repr((r.index, r.task, r.particles, r.particles and r.particles.log_weights, r.matches, r.error, r.seconds))
        for r in load_results(path)
    ]


def forge_results(data, rng, seal=None):
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    record = json.loads(lines[at])
    check = record.pop("check")
    record = changed(record, rng)
    lines[at] = seal(record) if seal else json.dumps({**record, "check": check}).encode() + b"\n"
    return b"".join(lines)


def reseal_results(data, rng):
    return forge_results(data, rng, resealed)


def checkpointed(path, max_steps):
    from helpers.programs import Steps

    from llmppl import smc_steer
    from llmppl.report import Recorder

    recorder = Recorder(os.devnull)
    found = smc_steer(Steps(), 3, 2, seed=1, max_steps=max_steps, checkpoint=path, every=1, on_step=recorder)
    return repr((found.texts, found.log_weights, found.log_ml, found.log_ml_se, found.deaths, found.steps))


def forge_checkpoint(data, rng, reseal=False):
    from llmppl.inference.resuming.checkpoint import _digest, _ending

    *lines, last = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), rng)).encode() + b"\n"
    return b"".join([*lines, _ending(_digest(b"".join(lines))) if reseal else last])


def reseal_checkpoint(data, rng):
    return forge_checkpoint(data, rng, reseal=True)


# ---- texts


def writes(text):
    return lambda path: path.write_text(text, encoding="utf-8")


def prompts(name, text):
    """A reader of a file of prompts, which keeps the end of its name."""
    from llmppl.cli.generate import _prompts as read

    def read_as(path):
        named = path.with_name(name)
        named.write_bytes(path.read_bytes())
        return read(named)

    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    bomb = (lambda _: deep) if name.endswith("l") else None
    return Reader(writes(text), read_as, checked=False, bomb=bomb)


def forge_json(data, rng):
    return json.dumps(changed(json.loads(data), rng)).encode()


def read_schema(path):
    from llmppl.cli.options import constraint

    named = path.with_suffix(".json")
    named.write_bytes(path.read_bytes())
    return constraint(None, named).schema


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1]}, "c": {"$ref": "#/$defs/d"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "string", "pattern": "[a-c]*", "maxLength": 3}},
}

READERS = {
    "results": Reader(
        write_results, read_results, same=lambda found, original: {*found} <= {*original},
        forge=forge_results, reseal=reseal_results,
    ),
    "checkpoint": Reader(
        lambda path: checkpointed(path, 3), lambda path: checkpointed(path, 5),
        forge=forge_checkpoint, reseal=reseal_checkpoint,
    ),
    "prompts of JSON lines": prompts("p.jsonl", '{"prompt": "One, two", "id": 7}\n{"prompt": "caf\\u00e9 \\"x\\""}\n'),
    "prompts of text": prompts("p.txt", "One, two\nthree café\n"),
    "grammar": Reader(writes(GRAMMAR), lambda path: Grammar.from_file(path).text, checked=False),
    "schema": Reader(writes(json.dumps(SCHEMA)), read_schema, checked=False, reseal=forge_json),
}  # fmt: skip


# ---- the cases of a reader, in a process of their own


def cases(reader, data, counts):
    mutations = {"flip": flip, "cut": cut, "insert": insert, "nul": nul, "forge": reader.forge, "reseal": reader.reseal}
    for kind, number in counts.items():
        for i in range(number):
            if kind == "bomb" and reader.bomb:
                yield kind, i, reader.bomb(i)
            elif mutations.get(kind):
                yield kind, i, mutations[kind](data, random.Random(f"{kind} {i}"))


def wrong(reader, path, original, kind, mutated):
    """What is wrong with how a mutated file is read; "" if nothing is."""
    path.write_bytes(mutated)
    try:
        found = reader.read(path)
    except ValueError as error:
        named = str(path.parent) in str(error) and len(str(error)) < 2000
        return "" if named else f"an error without the file: {error!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if kind == "bomb":
        return "it was read"
    other = reader.checked and kind != "reseal" and not reader.same(found, original)
    return f"read with other contents: {found!r}"[:500] if other else ""


def main(name, counts, folder):
    import resource

    reader, path, failures, tried = READERS[name], Path(folder) / "file", [], 0
    reader.write(path)
    data, original = path.read_bytes(), reader.read(path)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + ROOM, resource.RLIM_INFINITY))
    for kind, i, mutated in cases(reader, data, json.loads(counts)):
        faulthandler.dump_traceback_later(HANG / 3, exit=True)
        tried += 1
        if told := wrong(reader, path, original, kind, mutated):
            failures.append(f"{kind} {i}: {told}")
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"tried": tried, "failures": failures}))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited by Linux")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_or_forged_file_is_refused_or_read_unchanged(name, tmp_path):
    counts = {kind: repetitions(full=FULL[kind], quick=QUICK[kind]) for kind in QUICK}
    script = [sys.executable, "-X", "faulthandler", __file__, name, json.dumps(counts), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=2 * HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == [] and found["tried"] >= counts["flip"] + counts["cut"]


def test_lone_surrogates_and_unbounded_nesting_are_named_with_their_line(tmp_path):
    from llmppl.cli.generate import _prompts as read
    from llmppl.support.arguments import shown

    path, deep = tmp_path / "p.jsonl", []
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".* prompt has a lone surrogate"):
        read(path)
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list nested too deep to be written"


def test_an_empty_checksum_of_the_embedded_weights_is_refused(tmp_path):
    from llmppl.lm.embedded import verify

    for name in ("model.safetensors", "model.safetensors.sha256"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="the weights of the embedded model are damaged"):
        verify(tmp_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
