"""`llmppl many` and `llmppl results`, and what Ctrl-C leaves of a command."""

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.commands import run
from helpers.tiny import table_lm, tiny_lm

from llmppl import ConstrainedText, Infilling, Regex, generate, load_results, smc_steer
from llmppl.cli import options
from llmppl.cli.generate import Continuation

SMALL = ["-N", "3", "-K", "2", "--max-tokens", "4", "--seed", "1"]


@pytest.fixture
def tiny(monkeypatch):
    """The command line with the language model of tokens "a", "b", "c", " ", "ab"."""
    monkeypatch.setattr(options, "load", lambda name: tiny_lm())


@pytest.fixture
def files(tmp_path):
    """A file of prompts, and the path of one of results."""
    (tmp_path / "prompts.txt").write_text("a\nb c\nab\nc\n")
    return str(tmp_path / "prompts.txt"), str(tmp_path / "results.db")


def texts_of(path):
    """Return the prompt and the text of each result."""
    return [(each.task, each.answer and each.answer.text) for each in load_results(path)]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.txt", "one\n\ntwo\n", "p.txt has an empty line: write JSON lines"),
        ("p.txt", "", "p.txt has an empty line"),
        ("p.jsonl", '{"prompt": "one"}\n{"prompt"\n', 'on each line of a .jsonl file (JSONDecodeError'),
        ("p.jsonl", '{"q": "a"}\n', "of a .jsonl file (KeyError: 'prompt')"),
        ("p.jsonl", '["one"]', "of a .jsonl file (TypeError"),
    ],
)
def test_an_invalid_file_of_prompts_is_refused_before_loading(name, text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "load", None)
    (tmp_path / name).write_text(text)
    result = run("many", str(tmp_path / name), str(tmp_path / "out"))
    assert result.exit_code == 2 and result.stdout == "" and not (tmp_path / "out").exists()
    assert message in " ".join(result.stderr.split())


def test_each_prompt_draws_from_its_own_stream(tiny, files):
    """The same steering by hand, prompt by prompt."""
    result = run("many", *files, *SMALL)
    assert (result.exit_code, result.stdout) == (0, f"{files[1]}: 4 results, 0 failed\n"), result.output
    assert run("results", files[1]).stdout.startswith(f"{files[1]}: 4 results, 0 failed\n")
    for found, prompt in zip(load_results(files[1]), ["a", "b c", "ab", "c"], strict=True):
        rng = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(found.index,)))
        expected = smc_steer(ConstrainedText(tiny_lm(), prompt, max_tokens=4), 3, 2, rng=rng)
        assert (found.task, found.answer.method, found.answer.text in expected.texts) == (prompt, "steer", True)


def test_json_lines_are_prompts_like_plain_lines(tiny, files, tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt, "id": 1}) + "\n" for prompt in ["a", "b c", "ab", "c"]))
    assert run("many", *files, *SMALL).exit_code == 0
    assert run("many", str(lines), str(tmp_path / "other"), *SMALL).exit_code == 0
    assert texts_of(files[1]) == texts_of(tmp_path / "other")


@pytest.mark.parametrize("limit", [("--regex", "(a|bc)+"), ("--grammar", "g.lark")], ids=lambda limit: limit[0])
def test_a_constraint_holds_for_many_prompts_also_in_a_pickled_job(limit, tiny, files, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.lark").write_text('start: ("a" | "bc")+')
    assert run("many", *files, *SMALL, *limit).exit_code == 0
    found = texts_of(files[1])
    assert len(found) == 4 and all(re.fullmatch("(a|bc)+", text) for _, text in found)
    given = {name: option.default for name, option in options.OPTIONS.items()}
    given |= {"particles": 3, "factor": 2, "max_tokens": 4, limit[0][2:]: limit[1]}
    given["grammar"] = given["grammar"] and tmp_path / given["grammar"]
    job = pickle.loads(pickle.dumps(Continuation(options.Given(**given))))
    for index, (prompt, text) in enumerate(found):
        rng = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(index,)))
        assert job.answer(job.lm(), prompt, rng).text == text


def test_a_failed_task_stops_no_other_and_sets_the_exit_code(tiny, files):
    """The model reads 32 tokens."""
    with open(files[0], "w") as file:
        file.write("a\n" + "b " * 20 + "\nc\n")
    result = run("many", *files, *SMALL)
    assert result.exit_code == 1 and result.stdout == f"{files[1]}: 3 results, 1 failed\n"
    assert result.stderr.endswith(f"llmppl: 1 of 3 tasks failed; llmppl results {files[1]} says of what\n")
    assert [text is not None for _, text in texts_of(files[1])] == [True, False, True]
    assert run("many", *files, *SMALL, "--resume").stdout == result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the file is there"),
        (["--resume", "--seed", "2"], "its seed was 1, and is 2"),
        (["--resume", "-N", "4"], "particles was 3, and is 4"),
        (["--resume", "--regex", "a+"], "regex was None, and is 'a+'"),
    ],
)
def test_a_file_of_another_run_is_refused(arguments, message, tiny, files):
    assert run("many", *files, *SMALL).exit_code == 0
    before = texts_of(files[1])
    result = run("many", *files, *SMALL, *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert texts_of(files[1]) == before
    assert run("many", *files, *SMALL, "--resume").exit_code == 0


# ---- Ctrl-C


PROGRAM = """
from llmppl import CachedTransformer
from llmppl.cli import app, options
from llmppl.constraints import Vocabulary

vocab = Vocabulary([b"a", b"b", b"c", b" ", b"ab", b""], eos_ids=[5])
logits = lambda ids: [(7 * len(ids) + sum(ids) * (v + 2)) % 11 / 4 for v in range(6)]
lm = CachedTransformer(logits, vocab)
options.load = lambda source: lm
app()
"""


def test_ctrl_c_keeps_the_results_and_prints_the_command_that_resumes(files, tmp_path):
    prompts = ["".join(letters) for letters in itertools.product("abc", repeat=5)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    command = [sys.executable, "-c", PROGRAM, "many", *files, *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not os.path.exists(files[1]) or os.path.getsize(files[1]) < 20_000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130 and stdout == "" and "Traceback" not in stderr
    (num_results,) = re.findall(r"^llmppl: interrupted: (\d+) of 243 results are in .*; --resume", stderr, re.M)
    assert 0 < int(num_results) <= len(texts_of(files[1]))
    assert subprocess.run([*command, "--resume"]).returncode == 0
    assert [prompt for prompt, _ in texts_of(files[1])] == prompts


def logits(ids):
    return [0.5, 0.0, -2.0]


def interrupted_at(length, monkeypatch):
    """Ctrl-C is pressed while the model reads a context of this length."""

    def function(ids):
        if len(ids) == length:
            raise KeyboardInterrupt
        return logits(ids)

    lm = table_lm(function)
    monkeypatch.setattr(options, "load", lambda name: lm)


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("command", [["generate", "a"], ["intersect", "a", "b"]], ids=" ".join)
def test_ctrl_c_prints_the_particles_of_the_last_whole_step(command, length, monkeypatch):
    """Those of a run of so many steps; a step reads contexts that are longer by one token."""
    interrupted_at(length, monkeypatch)
    stopped = run(*command, "--seed", "1", "-N", "3", "--max-tokens", "9")
    monkeypatch.setattr(options, "load", lambda name: table_lm(logits))
    whole = run(*command, "--seed", "1", "-N", "3", "--max-tokens", str(length - 1))
    assert whole.exit_code == 0 and stopped.exit_code == 130
    assert stopped.stdout == whole.stdout and "[cut]" in stopped.stdout
    said = f"llmppl: interrupted after step {length - 1}: texts that had not ended are cut\n"
    assert stopped.stderr.startswith("seed 1: ") and stopped.stderr.endswith(said)


@pytest.mark.parametrize("command", [["generate", "a"], ["infill", "a[BLANK]b"]], ids=" ".join)
def test_ctrl_c_before_the_first_step_prints_no_texts(command, monkeypatch):
    interrupted_at(1, monkeypatch)
    result = run(*command)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "llmppl: interrupted\n")


def test_ctrl_c_in_infill_prints_the_holes_filled_so_far(monkeypatch):
    interrupted_at(9, monkeypatch)
    result = run("infill", "a[BLANK]b[BLANK]a", "--seed", "3", "-N", "2", "--max-tokens", "20", "--json")
    assert result.exit_code == 130 and "interrupted after step 1: texts" in result.stderr
    program = Infilling(table_lm(logits), "a[BLANK]b[BLANK]a", max_tokens=20)
    expected = smc_steer(program, 2, 10, seed=3, max_steps=1)
    assert {json.loads(line)["text"] for line in result.stdout.splitlines()} == set(expected.texts)


# ---- terminal


@pytest.mark.skipif(sys.platform == "win32", reason="has no pty")
def test_a_terminal_shows_a_bar_and_stdout_holds_only_the_last_line(files):
    import pty

    parent, child = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "many", *files, *SMALL]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, text=True, env=env)
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):                  # Linux says so that the other end is closed
        while chunk := os.read(parent, 4096):
            shown += chunk
    os.close(parent)
    assert process.communicate()[0] == f"{files[1]}: 4 results, 0 failed\n" and process.returncode == 0
    assert re.search(r"task \d+ of 4.* 0 failed", shown.decode())


# ---- methods


def test_methods_are_those_of_generate(tiny, files):
    for method in ("greedy", "best_of", "auto"):
        result = run("generate", "a", "--regex", "[abc]{3}", "--method", method, "--json", "--seed", "2")
        made = generate(tiny_lm(), "a", Regex("[abc]{3}"), method=method, rng=np.random.default_rng(2))
        assert json.loads(result.stdout)["text"] == made.text, result.output
        assert json.loads(result.stdout)["method"] == made.method
    assert run("many", *files, "--regex", "[abc]{3}", "--method", "greedy").exit_code == 0
    greedy = generate(tiny_lm(), ["a", "b c", "ab", "c"], Regex("[abc]{3}"), method="greedy", progress=False)
    assert [text for _, text in texts_of(files[1])] == [each.text for each in greedy]
    assert "takes no K" in run("generate", "a", "--method", "best_of", "-K", "3").stderr
    assert "--method steer" in " ".join(run("generate", "a", "--method", "greedy", "--trace", "t.jsonl").stderr.split())
