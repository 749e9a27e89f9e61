"""`llmppl generate --prompts` and `llmppl results`: what is read, what is written, what is said, and what goes on."""

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_lm
from typer.testing import CliRunner

from llmppl import ConstrainedText, load_results, smc_steer
from llmppl.cli import app, options, prompts

SMALL = ["-N", "3", "-K", "2", "--max-tokens", "4", "--seed", "1"]


def run(*arguments, **given):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **given)


@pytest.fixture
def tiny(monkeypatch):
    """The command line with the language model of tokens "a", "b", "c", " ", "ab"."""
    monkeypatch.setattr(options, "load", lambda name: tiny_lm())


@pytest.fixture
def files(tmp_path):
    """A file of prompts, and the path of one of results."""
    (tmp_path / "prompts.txt").write_text("a\nb c\nab\nc\n")
    return tmp_path / "prompts.txt", tmp_path / "results.jsonl"


def generate(files, *arguments):
    return run("generate", "--prompts", files[0], "--out", files[1], *SMALL, *arguments)


def told(path):
    """What was written, but for the order and what depends on the clock."""
    lines = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["index"])
    return [{name: line[name] for name in line if name != "seconds"} for line in lines]


# ---- prompts


@pytest.mark.parametrize(
    "name, text, field, expected",
    [
        ("p.txt", "one\ntwo \n\n \n", None, ["one", "two "]),
        ("p", "\ufeffone\r\ntwo\u2028too", None, ["one", "two\u2028too"]),
        ("p.jsonl", '{"prompt": "one\\ntwo"}\n{"prompt": "", "id": 3}\n\n', None, ["one\ntwo", ""]),
        ("p.ndjson", '{"prompt": "no", "q": "one"}', "q", ["one"]),
        ("p.CSV", 'id,prompt\n1,"one, ""two""\nthree"\n2,four\n', None, ['one, "two"\nthree', "four"]),
        ("p.csv", "q\none\n\ntwo", "q", ["one", "two"]),
    ],
)
def test_prompts_are_lines_objects_or_rows(name, text, field, expected, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert prompts.read(tmp_path / name, field) == expected


@pytest.mark.parametrize(
    "name, data, field, message",
    [
        ("p.txt", b"", None, "has no prompts: write one on each line"),
        ("p.txt", b" \n\n", None, "has no prompts: write one on each line"),
        ("p.csv", b"prompt\n", None, "has no prompts: write one on each line below the header"),
        ("p.txt", b"one\n\ntwo\n", None, "line 2, is empty: take it out, or write JSON lines"),
        ("p.txt", b"one\ntw\xff\n", None, "line 2, is not UTF-8: convert it first"),
        ("p.txt", b"one\n", "text", r"--field is for \.csv and \.jsonl files"),
        ("p.jsonl", b'{"prompt": "one"}\n{"prompt"\n', None, 'line 2, is not JSON .*: write {"prompt": "..."} on each'),
        ("p.jsonl", b'{"q": "a"}\n\n{"q": "a"}', "q", 'line 2, is not JSON .*: write {"q": "..."} on each line'),
        ("p.jsonl", b'["one"]', None, r"line 1, is no object: .* on each line, not \['one'\]"),
        ("p.jsonl", b'{"text": "one", "id": 1}', None, "has no field 'prompt': name one of its .* 'text', 'id'"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 3}', None, "line 2, has a field 'prompt' that is no text: 3"),
        ("p.csv", b"id,text\n1,one\n", None, "has no column 'prompt': name one of its .* by --field: 'id', 'text'"),
        ("p.csv", b"id,prompt\n1,one\n2\n", None, "line 3, ends before the column 'prompt'"),
        ("p.csv", b'prompt\n"one', None, "line 2, is not CSV: unexpected end of data"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_named_by_its_line_before_anything_is_loaded(
    name, data, field, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(options, "load", None)
    (tmp_path / name).write_bytes(data)
    named = [] if field is None else ["--field", field]
    result = run("generate", "--prompts", tmp_path / name, "--out", tmp_path / "out", *named)
    assert result.exit_code == 2 and result.stdout == "" and not (tmp_path / "out").exists()
    assert re.search(message, result.stderr) and result.stderr.count("\n") == 1
    assert result.stderr.startswith("llmppl: ") and name in result.stderr


def test_standard_input_has_a_prompt_a_line_or_JSON_lines_with_a_field(tiny, tmp_path):
    for n, (given, more) in enumerate([("a\nb c\n", []), ('{"q": "a"}\n{"q": "b c"}\n', ["--field", "q"])]):
        result = run("generate", "--prompts", "-", "--out", tmp_path / f"{n}.jsonl", *more, *SMALL, input=given)
        assert result.exit_code == 0, result.stderr
    assert told(tmp_path / "0.jsonl") == told(tmp_path / "1.jsonl") and len(told(tmp_path / "0.jsonl")) == 2
    result = run("generate", "--prompts", "-", "--out", tmp_path / "2", input="")
    assert result.exit_code == 2 and "standard input has no prompts" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "Give a PROMPT, or a file of them: --prompts FILE --out FILE"),
        (["Hi", "--prompts", "p.txt", "--out", "o"], "Give a PROMPT, or a file of them"),
        (["--prompts", "p.txt"], "--prompts FILE wants --out FILE"),
        (["Hi", "--out", "o"], "--out goes with --prompts FILE"),
        (["Hi", "--field", "q"], "--field goes with --prompts FILE"),
        (["Hi", "--resume"], "--resume goes with --prompts FILE"),
        (["--prompts", "p.txt", "--out", "o", "--json"], "--json goes with a single PROMPT"),
        (["--prompts", "p.txt", "--out", "o", "--trace", "t"], "--trace goes with a single PROMPT"),
        (["--prompts", "p.txt", "--out", "o"], "llmppl: cannot read p.txt: No such file or directory"),
        (["--prompts", ".", "--out", "o"], "llmppl: cannot read .: Is a directory"),
    ],
)
def test_options_that_do_not_go_together_are_named_before_anything_is_loaded(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "load", None)
    result = run("generate", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and not [*tmp_path.iterdir()]
    assert message in " ".join(result.stderr.split())


# ---- results


def test_each_prompt_gets_the_particles_of_its_own_stream(tiny, files):
    """The same steering by hand, prompt by prompt."""
    result = generate(files)
    assert (result.exit_code, result.stdout) == (0, f"{files[1]}: 4 results, 0 failed\n")
    assert f"4 prompts, 0 of them done before; the results go to {files[1]}" in result.stderr
    for found, prompt in zip(load_results(files[1]), ["a", "b c", "ab", "c"], strict=True):
        rng = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(found.index,)))
        expected = smc_steer(ConstrainedText(tiny_lm(), prompt), 3, 2, rng=rng, max_steps=4)
        assert found.particles.texts == expected.texts
        assert found.particles.log_ml == pytest.approx(expected.log_ml)
        assert [p.cut for p in found.particles] == [p.cut for p in expected]


@pytest.mark.parametrize(
    "limit, holds",
    [
        (["--max-letters", "2"], lambda prompt, text: max(map(len, re.findall("[a-z]+", prompt + text))) <= 2),
        (["--regex", "(a|bc)+"], lambda prompt, text: re.fullmatch("(a|bc)+", text)),
        (["--choices", "abc", "--choices", "b"], lambda prompt, text: text in ("abc", "b")),
        (["--grammar", "g.lark"], lambda prompt, text: re.fullmatch("c+a", text)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_constraint_holds_for_many_prompts(limit, holds, tiny, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    Path("g.lark").write_text('start: "c"+ "a"')
    result = generate(files, *limit, "--complete")
    assert result.exit_code == 0, result.output
    found = [(files[0].read_text().splitlines()[each.index], each.particles) for each in load_results(files[1])]
    assert len(found) == 4 and sum(map(len, (particles for _, particles in found))) > 4
    assert all(holds(prompt, text) for prompt, particles in found for text in particles.texts)


def test_a_task_that_fails_is_in_the_file_and_in_the_exit_code_and_stops_no_other(tiny, files):
    """The model reads 32 tokens; nothing of a single token but "b" matches b."""
    files[0].write_text("a\n" + "b " * 20 + "\nc\n")
    result = generate(files)
    assert result.exit_code == 1 and result.stdout == f"{files[1]}: 3 results, 1 failed\n"
    assert result.stderr.endswith(f"llmppl: 1 of 3 tasks failed; llmppl results {files[1]} says of what\n")
    assert [each.error is None for each in load_results(files[1])] == [True, False, True]
    again = generate(files, "--resume")
    assert (again.exit_code, again.stdout) == (result.exit_code, result.stdout)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--regex", "a(?!a)a"], "accepts no string at all"),
        (["--regex", "abcabcabcabc", "--complete"], "no text ends within max_tokens=4, the shortest takes 8 tokens"),
        (["--regex", "ab(c"], "error in regex: missing )"),
    ],
)
def test_what_no_prompt_can_meet_is_refused_before_the_first(arguments, message, tiny, files):
    result = generate(files, *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert not files[1].exists() or not files[1].read_bytes()
    assert generate(files).exit_code == 0


def test_a_file_is_gone_on_with_by_the_same_command_alone(tiny, files):
    assert generate(files).exit_code == 0
    before, whole = files[1].read_bytes(), told(files[1])
    for arguments, message in [
        ([], f"{files[1]}: the file is there; --resume goes on with its results"),
        (["--resume", "--seed", "2"], f"{files[1]} holds results of seed=1, not of seed=2: go on with the same seed"),
        (["--resume", "-N", "4"], "another task 0 than ('N 4, K 2, max_tokens 4"),
        (["--resume", "--regex", "a+"], "another task 0 than ('constraint a+, N 3"),
        (["--resume", "--top-k", "3"], "top_k=3"),
        (["--resume", "--lm", "other"], "another task 0 than ('lm other, N 3"),
    ]:
        result = generate(files, *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
        assert result.stdout == "" and result.stderr.count("\n") == 1 and files[1].read_bytes() == before
    texts = files[0].read_text()
    for other, message in [("a\nb c\n", "there are only 2 tasks"), (texts.replace("ab", "abb"), "another task 2 than")]:
        files[0].write_text(other)
        result = generate(files, "--resume")
        assert result.exit_code == 2 and message in result.stderr and files[1].read_bytes() == before
    files[0].write_text(texts + "a\n")
    assert generate(files, "--resume").exit_code == 0 and told(files[1])[:4] == whole and len(told(files[1])) == 5
    grammar, out = files[0].parent / "g.lark", files[1].with_suffix(".2")
    for text, code in [('start: "a"+', 0), ('start: "a"+', 0), ('start: "b"+', 2)]:    # what it holds, not its name
        grammar.write_text(text)
        assert generate((files[0], out), "--resume", "--grammar", grammar).exit_code == code


@pytest.mark.parametrize(
    "out, message",
    [
        ("no/such/o.jsonl", "there is no folder"),
        (".", "results are written to a file of their own, and this is none"),
        ("prompts.txt", "line 1, is no result of run_many, and the file is left as it is: 'a'"),
        ("/proc/o.jsonl", "/proc/o.jsonl: "),
        ("/dev/full", "results are written to a file of their own, and this is none"),
    ],
)
def test_a_path_that_cannot_be_written_is_said_before_anything_is_loaded(out, message, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    monkeypatch.setattr(options, "load", None)
    result = generate((files[0], out), "--resume")
    assert result.exit_code == 2 and result.stdout == ""
    assert re.match(f"llmppl: .*{message}", result.stderr) and result.stderr.count("\n") == 1, result.stderr
    assert files[0].read_text().startswith("a\n")


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(tiny, files, tmp_path, monkeypatch):
    import resource

    generate((files[0], tmp_path / "whole"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
        result = generate(files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert result.exit_code == 2
    assert re.search(r"llmppl: .*: File too large: the results before .* are whole; --resume goes on", result.stderr)
    assert 0 < len(told(files[1])) < 4
    assert generate(files, "--resume").exit_code == 0 and told(files[1]) == told(tmp_path / "whole")


def test_where_all_is_done_no_model_is_loaded(tiny, files, monkeypatch):
    generate(files)
    monkeypatch.setattr(options, "load", None)
    assert generate(files, "--resume").stdout == f"{files[1]}: 4 results, 0 failed\n"


# ---- interrupted


PROGRAM = """
from llmppl import CachedTransformer
from llmppl.cli import app, options
from llmppl.tokens import Vocabulary

vocab = Vocabulary([b"a", b"b", b"c", b" ", b"ab", b""], eos_ids=[5])
logits = lambda ids: [(7 * len(ids) + sum(ids) * (v + 2)) % 11 / 4 for v in range(6)]
lm = CachedTransformer(logits, vocab)
options.load = lambda name: lm
app()
"""


def start(*arguments):
    """The command line in another process, with a function as language model: any batch gives the same logits."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, num_lines, process):
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """120 prompts, and what a run that is not interrupted writes."""
    folder = tmp_path_factory.mktemp("whole")
    texts = ["".join(letters) for letters in itertools.product("abc ", repeat=5) if letters[0] != " "][:120]
    (folder / "prompts.txt").write_text("\n".join(texts))
    process = start("generate", "--prompts", folder / "prompts.txt", "--out", folder / "out", *SMALL)
    stdout, stderr = process.communicate()
    assert stdout == f"{folder / 'out'}: 120 results, 0 failed\n", stderr
    return folder / "prompts.txt", folder / "out"


def test_what_was_killed_goes_on_and_ends_with_the_same_results(whole, tmp_path):
    command = ["generate", "--prompts", whole[0], "--out", tmp_path / "out", *SMALL, "--resume"]
    for num_lines in (1, 30, 60):
        process = start(*command)
        wait_for(tmp_path / "out", num_lines, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert num_lines <= (tmp_path / "out").read_bytes().count(b"\n") < 120
    process = start(*command)
    stdout, stderr = process.communicate()
    assert process.returncode == 0 and stdout == f"{tmp_path / 'out'}: 120 results, 0 failed\n"
    assert int(re.search(r"120 prompts, (\d+) of them done before", stderr).group(1)) >= 60
    assert told(tmp_path / "out") == told(whole[1])


def test_ctrl_c_keeps_what_is_written_says_how_to_go_on_and_exits_130(whole, tmp_path):
    command = ["generate", "--prompts", whole[0], "--out", tmp_path / "out", *SMALL]
    process = start(*command)
    wait_for(tmp_path / "out", 20, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130 and stdout == ""
    said = r"^llmppl: interrupted: (\d+) of 120 results are in .*/out; the same command with --resume goes on$"
    (num_results,) = re.findall(said, stderr, re.MULTILINE)
    assert 19 <= int(num_results) <= len(told(tmp_path / "out")) <= int(num_results) + 1     # one may be on its way
    assert "Traceback" not in stderr
    assert start(*command, "--resume").wait() == 0
    assert told(tmp_path / "out") == told(whole[1])
