"""Recordings of others and torn recordings: one sentence, or a page without foreign scripts; full disks."""

import copy
import functools
import json
import operator
import re
from collections import Counter

import pytest
from helpers.programs import Words

from llmppl import smc_steer
from llmppl.report import Recorder, load
from llmppl.report.html_page import page

MARKER = '<img src=x onerror=alert(1)></script><script>"\'&<!--'
VALUES = [
    None, True, False, 0, 1, -1, 7, 10**30, 10**400, 0.5, 1e300, 1e308, float("nan"), float("inf"), "a", MARKER,
    "\ud800", "\x00", [], [MARKER], [[]], {}, {MARKER: 1.0}, {"a": MARKER}, {MARKER: MARKER},
]  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with Recorder(path, "words") as recorder:
        smc_steer(Words(), 4, 2, seed=2, max_steps=4, on_step=recorder)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({key for line in lines[1:-1] for candidate in line["candidates"] for key in candidate}) == 10
    return lines


def spots(value, spot=()):
    """Return the paths to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*spot, key) for key, _ in items] + [each for key, inner in items for each in spots(inner, (*spot, key))]


def changed(lines, number, way, value):
    lines = copy.deepcopy(lines)
    functools.reduce(operator.getitem, way[:-1], lines[number])[way[-1]] = value
    return lines


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reads(path):
    """Return True if the file is read. Fail the test for another error than one sentence, or an unsafe page."""
    try:
        recording = load(path)
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith(f"{path}") and len(str(error)) < len(str(path)) + 250
        return False
    text = page(recording)
    text.encode()
    assert "<img" not in text and text.count("<script") == 2 and text.count("</script") == 2 and "<!--" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    for step in json.loads(data)["steps"]:
        assert not any(isinstance(value, str) for key, value in step.items() if key != "candidates")
        assert not any('"' in json.dumps(figures) for _, _, *figures, _ in step["candidates"])
    return True


def test_any_field_with_any_value_is_refused_or_shown_escaped(lines, tmp_path):
    path, found = tmp_path / "run.jsonl", Counter()
    places = [(number, way) for number in (0, 1, 3, len(lines) - 1) for way in spots(lines[number])]
    kinds = {}                                          # two places for each kind of field
    for number, way in places:
        kinds.setdefault((number, tuple(key for key in way if isinstance(key, str))), []).append((number, way))
    for number, way in [place for each in kinds.values() for place in each[:2]]:
        for value in VALUES:
            write(path, changed(lines, number, way, value))
            found[reads(path)] += 1
    assert found[True] > 200 and found[False] > 500


@pytest.mark.parametrize(
    "way, value, message",
    [
        (["ess"], "a", "ValueError: could not convert string to float: 'a'"),
        (["step"], 7, "ValueError: step must be 2"),
        (["ancestors"], [0, 99], "ValueError: 99 is not below "),
        (["log_weights"], [0.0], "ValueError: zip() argument 2 is shorter"),
        (["candidates", 0, "parent"], -1, "ValueError: -1 is not below "),
    ],
)
def test_a_wrong_field_is_named_with_its_line(lines, tmp_path, way, value, message):
    path = tmp_path / "run.jsonl"
    write(path, changed(lines, 2, way, value))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3, is not as a Recorder writes it ({message}")):
        load(path)


def test_a_full_disk_ends_the_recording_with_one_warning():
    expected = smc_steer(Words(), 4, 2, seed=5, max_steps=4)
    with pytest.warns(UserWarning, match="/dev/full: the recording stops after step 0, .*: No space left on device"):
        particles = smc_steer(Words(), 4, 2, seed=5, max_steps=4, on_step=Recorder("/dev/full"))
    assert particles.texts == expected.texts and particles.log_ml == expected.log_ml
