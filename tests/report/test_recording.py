"""Hostile and torn recordings, and full disks: the result is one sentence, or a page without foreign scripts."""

import copy
import json
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.programs import Words
from typer.testing import CliRunner

from llmppl import cli, smc_steer
from llmppl.report import Recorder, load
from llmppl.report.html_page import page

MARKER = '<img src=x onerror=alert(1)></script><script>"\'&<!--'
DEEP = "@deep@"                                         # written as lists in lists, too deep for json.dumps
VALUES = [
    None, True, False, 0, 1, -1, 7, 10**6, 10**30, 10**400, 0.5, 1e300, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), "a", MARKER, "\ud800", "\x00", [], [MARKER], [[]], {}, {MARKER: 1.0}, {"a": MARKER}, DEEP,
]  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with Recorder(path, "words") as recorder:
        smc_steer(Words(), 4, 2, seed=2, max_steps=4, on_step=recorder)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["check"]                               # so that lines can be changed
    fields = {key for line in lines[1:-1] for candidate in line["candidates"] for key in candidate}
    assert len(fields) == 8 and len(lines) == 6
    return lines


def spots(value, spot=()):
    """Yield the path to every value inside a JSON value."""
    if spot:
        yield spot
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(each, (*spot, key))


def changed(lines, number, way, value):
    lines = copy.deepcopy(lines)
    inside = lines[number]
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    return lines


def write(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text.replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000))


def check(path):
    """Return True if the file is read. Fail the test for another error, or a wrong page."""
    try:
        recording = load(path)
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError and message.startswith(str(path)) and len(message) < len(str(path)) + 400
        assert "\n" not in message
        return None
    text = page(recording)
    text.encode()
    assert "<img" not in text and text.count("<script") == 2 and text.count("</script") == 2 and "<!--" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    for step in json.loads(data)["steps"]:
        assert not any(isinstance(value, str) for key, value in step.items() if key != "candidates")
        for _, added, *figures in step["candidates"]:
            assert isinstance(added, str) and "[" in json.dumps(figures) and '"' not in json.dumps(figures)
    return recording


def test_any_field_with_any_value_is_refused_or_shown_escaped(lines, tmp_path):
    path, read, refused, seen = tmp_path / "run.jsonl", 0, 0, Counter()
    for number in (0, 1, 3, len(lines) - 1):
        for way in spots(lines[number]):
            kind = number, tuple(key for key in way if isinstance(key, str))
            seen[kind] += 1
            for value in VALUES if seen[kind] <= 2 else ():
                write(path, changed(lines, number, way, value))
                if check(path):
                    read += 1
                    continue
                refused += 1
                with pytest.raises(ValueError) as error:
                    load(path)
                if value != DEEP or number:             # what begins with no header is not a recording
                    line = re.match(r", line (\d+)|.* has the format ", str(error.value).removeprefix(str(path)))
                    assert line and int(line[1] or 1) in (number + 1, number + 2)      # in the next, a parent is gone
    assert read > 200 and refused > 1_000


@pytest.mark.parametrize("value", [MARKER, {MARKER: MARKER}, [MARKER]])
def test_a_marker_in_any_field_is_never_markup(lines, tmp_path, value):
    path = tmp_path / "run.jsonl"
    for number in range(len(lines)):
        for way in spots(lines[number]):
            write(path, changed(lines, number, way, value))
            check(path)


def test_a_missing_field_is_named(lines, tmp_path):
    path = tmp_path / "run.jsonl"
    for number, field in [(1, "ess"), (2, "ancestors"), (3, "text"), (1, "step")]:
        missing = copy.deepcopy(lines)
        del (missing[number]["candidates"][1] if field == "text" else missing[number])[field]
        write(path, missing)
        name = "candidates[1].text" if field == "text" else field
        with pytest.raises(ValueError, match=rf"run\.jsonl, line {number + 1}: {re.escape(name)} is missing$"):
            load(path)


@pytest.mark.parametrize(
    "way, value, message",
    [
        (["ess"], "a", "ess must be a number, not 'a'"),
        (["ess"], float("nan"), "ess must be a number, not nan"),
        (["ess"], True, "ess must be a number, not True"),
        (["log_ml"], float("inf"), "log_ml must be from -1e+300 to 1e+300, not inf"),
        (["num_finished"], MARKER, f"num_finished must be an integer, not {MARKER!r}"),
        (["num_dead"], 1.0, "num_dead must be an integer, not 1.0"),
        (["num_dead"], -1, "num_dead must be at least 0, not -1"),
        (["step"], 7, "step must be 2, not 7"),
        (["ancestors"], [0, 99], "ancestors[1] must be below "),
        (["ancestors"], 0, "ancestors must be a list, not 0"),
        (["log_weights"], [0.0], "log_weights has 1 numbers for 4 ancestors"),
        (["candidates", 0, "parent"], 9, "candidates[0].parent must be below "),
        (["candidates", 0, "parent"], -1, "candidates[0].parent must be at least 0, not -1"),
        (["candidates", 0, "keep"], 99, "candidates[0].keep must be below "),
        (["candidates", 0, "text"], 5, "candidates[0].text must be a text, not 5"),
        (["candidates", 0, "finished"], 1, "candidates[0].finished must be True or False, not 1"),
        (["candidates", 0, "death"], 5, "candidates[0].death must be a text, not 5"),
        (["candidates", 0, "attribution"], [1], "candidates[0].attribution must be an object, not [1]"),
        (["candidates", 0, "attribution"], {"a": "b"}, "candidates[0].attribution['a'] must be a number, not 'b'"),
        (["candidates", 0], 3, "candidates[0] must be an object, not 3"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_line(lines, tmp_path, way, value, message):
    path = tmp_path / "run.jsonl"
    write(path, changed(lines, 2, way, value))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: {message}")):
        load(path)
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "line 3: " in result.stderr
    assert not (tmp_path / "run.html").exists()


def test_lines_that_are_no_json_or_nested_too_deep_are_named(lines, tmp_path):
    path = tmp_path / "run.jsonl"
    whole = [json.dumps(line) for line in lines]
    for wrong in ['{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 900, "nan", '{"step": 1} {}', "{\x00}", "1" * 5_000]:
        path.write_text("\n".join([whole[0], wrong, *whole[1:], ""]))
        with pytest.raises(ValueError, match=r"run\.jsonl, line 2 is not a step as a Recorder writes it: ") as error:
            load(path)
        assert len(str(error.value)) < 400
    for depth in range(100, 1_200, 100):                # where reading it, or writing it in the error, is too deep
        path.write_text("\n".join([whole[0], '{"step": ' + "[" * depth + "]" * depth + "}", ""]))
        with pytest.raises(ValueError, match=r"run\.jsonl, line 2"):
            load(path)


def test_a_file_with_random_changes_is_refused_or_shown(lines, tmp_path):
    path, rng, read = tmp_path / "run.jsonl", np.random.default_rng(0), 0
    write(path, lines)
    whole = path.read_bytes()
    for _ in range(repetitions(5_000, 400)):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data)))
            piece = [bytes(rng.integers(256, size=2, dtype=np.uint8)), b"\x00", b"\n", b"", b"-", b"9", b"<img>"]
            data[at : at + int(rng.integers(3))] = piece[rng.integers(len(piece))]
        path.write_bytes(bytes(data[: len(data) if rng.random() < 0.8 else int(rng.integers(len(data)))]))
        read += check(path) is not None
    assert read > 10


def test_a_lone_surrogate_is_shown_as_a_replacement(lines, tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, changed(changed(lines, 0, ["title"], "\udc80"), 1, ["candidates", 0, "text"], "\udc80"))
    assert load(path).title == load(path).steps[0].candidates[0].text == "\N{REPLACEMENT CHARACTER}"


# ---- a disk that is full


class Full:
    """File on a disk that is full from the byte `room` on."""

    def __init__(self, path, room):
        self.path, self.room, self.open_as_ever = path, room, Path.open

    def __call__(self, path, *args, **options):
        if path != self.path:
            return self.open_as_ever(path, *args, **options)
        left, file = self.room - path.stat().st_size, self.open_as_ever(path, *args, **options)

        def write(text):
            type(file).write(file, text[:left])
            if len(text) > left:
                raise OSError(28, "No space left on device")

        file.write = write
        return file


@pytest.mark.parametrize("room", [0, 30, 700, 2_500])
def test_a_full_disk_ends_the_recording_with_one_warning(tmp_path, monkeypatch, room):
    path = tmp_path / "run.jsonl"
    expected = smc_steer(Words(), 4, 2, seed=5, max_steps=9)
    recorder = Recorder(path)
    full = Full(path, room)
    monkeypatch.setattr(Path, "open", lambda *args, **options: full(*args, **options))
    with warnings.catch_warnings(record=True) as caught, recorder:
        warnings.simplefilter("always")
        particles = smc_steer(Words(), 4, 2, seed=5, max_steps=9, on_step=recorder)
    assert [str(p) for p in particles] == [str(p) for p in expected] and particles.log_ml == expected.log_ml
    (warning,) = caught
    told = re.fullmatch(
        r"(.*): the recording stops after step (\d+), and the run goes on: No space left on device",
        str(warning.message),
    )
    assert told[1] == str(path)
    if int(told[2]):
        assert [step.index for step in load(path).steps] == list(range(1, int(told[2]) + 1))
    else:
        with pytest.raises(ValueError, match="is empty|holds no whole step|is not a recording"):
            load(path)


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@FULL
def test_a_recording_to_dev_full_keeps_the_posterior():
    with pytest.warns(UserWarning, match="/dev/full: the recording stops after step 0, .*: No space left on device"):
        particles = smc_steer(Words(), 4, 2, seed=5, max_steps=4, on_step=Recorder("/dev/full"))
    assert len(particles)


@FULL
def test_the_command_continues_when_the_disk_is_full():
    command = ["generate", "Once upon a time", "--particles", "2", "--factor", "2", "--max-tokens", "3", "--seed", "1"]
    plain = CliRunner().invoke(cli.app, command)
    result = CliRunner().invoke(cli.app, [*command, "--trace", "/dev/full"])
    assert result.exit_code == 0 and result.stdout == plain.stdout
    assert "/dev/full: the recording stops after step 0" in result.stderr


def test_a_missing_folder_is_reported_before_the_run(tmp_path):
    path = tmp_path / "no" / "run.jsonl"
    with pytest.raises(FileNotFoundError, match="there is no folder '.*no'; make it first: '.*run.jsonl'"):
        Recorder(path)
    result = CliRunner().invoke(cli.app, ["generate", "Once", "--trace", str(path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"cannot write {path}: there is no folder '{path.parent}'; make it first" in result.stderr


def test_the_arguments_of_a_recorder_are_checked(tmp_path):
    with pytest.raises(TypeError, match="path must be a path, a str or a pathlib.Path, not 5"):
        Recorder(5)
    with pytest.raises(TypeError, match="title must be a str, not 5"):
        Recorder(tmp_path / "run.jsonl", title=5)
