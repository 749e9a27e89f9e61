"""`llmppl generate --prompts` and `llmppl results`: what is read, what is written, what is said, and what goes on."""

import functools
import itertools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.common import wants_ray
from helpers.tiny import table_lm, tiny_lm
from typer.testing import CliRunner

from llmppl import ConstrainedText, Infilling, Rule, load_results, smc_steer
from llmppl.cli import app, options, prompts
from llmppl.cli.job import GenerateJob
from llmppl.cli.options import Limits, Writing
from llmppl.support.files import sealed
from llmppl.tasks.many import lanes

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
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = sorted((line for line in lines if "index" in line), key=lambda line: line["index"])
    return [{name: line[name] for name in line if name not in ("seconds", "run", "check")} for line in records]


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
def test_an_invalid_prompt_is_named_by_its_line_before_loading(
    name, data, field, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(options, "load", None)
    (tmp_path / name).write_bytes(data)
    named = [] if field is None else ["--field", field]
    result = run("generate", "--prompts", tmp_path / name, "--out", tmp_path / "out", *named)
    assert result.exit_code == 2 and result.stdout == "" and not (tmp_path / "out").exists()
    assert re.search(message, result.stderr) and result.stderr.count("\n") == 1
    assert result.stderr.startswith("llmppl: ") and name in result.stderr


def test_standard_input_may_hold_plain_lines_or_JSON_lines(tiny, tmp_path):
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
        (["--prompts", "p.txt", "--out", "-"], "--out FILE is one that --resume can go on with, not standard output"),
        (["Hi", "--workers", "2"], "--workers goes with --prompts FILE"),
        (["Hi", "--out", "o"], "--out goes with --prompts FILE"),
        (["Hi", "--field", "q"], "--field goes with --prompts FILE"),
        (["Hi", "--resume"], "--resume goes with --prompts FILE"),
        (["--prompts", "p.txt", "--out", "o", "--json"], "--json goes with a single PROMPT"),
        (["--prompts", "p.txt", "--out", "o", "--trace", "t"], "--trace goes with a single PROMPT"),
        (["--prompts", "p.txt", "--out", "o"], "llmppl: cannot read p.txt: No such file or directory"),
        (["--prompts", ".", "--out", "o"], "llmppl: cannot read .: Is a directory"),
    ],
)
def test_incompatible_options_are_named_before_loading(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "load", None)
    result = run("generate", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and not [*tmp_path.iterdir()]
    assert message in " ".join(result.stderr.split())


# ---- results


def test_each_prompt_draws_from_its_own_stream(tiny, files):
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


LIMITS = {
    ("--max-letters", "2"): lambda prompt, text: max(map(len, re.findall("[a-z]+", prompt + text))) <= 2,
    ("--regex", "(a|bc)+"): lambda prompt, text: re.fullmatch("(a|bc)+", text),
    ("--choices", "abc", "b"): lambda prompt, text: text in ("abc", "b"),
    ("--grammar", "g.lark"): lambda prompt, text: re.fullmatch("c+a", text),
}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit[0])
def test_every_constraint_holds_for_many_prompts(limit, tiny, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    Path("g.lark").write_text('start: "c"+ "a"')
    result = generate(files, *limit, "--complete")
    assert result.exit_code == 0, result.output
    found = [(files[0].read_text().splitlines()[each.index], each.particles) for each in load_results(files[1])]
    assert len(found) == 4 and sum(map(len, (particles for _, particles in found))) > 4
    assert all(LIMITS[limit](prompt, text) for prompt, particles in found for text in particles.texts)


def test_a_json_schema_holds_for_many_prompts_also_in_a_pickled_job(files):
    """The embedded model, whose vocabulary has quotes."""
    pytest.importorskip("llguidance")
    schema = files[0].parent / "size.json"
    schema.write_text('{"enum": ["small", "big"]}')
    files[0].write_text("The dog is \nThe house is \n")
    result = generate(files, "--json-schema", schema, "--max-tokens", "8")
    assert result.exit_code == 0, result.output
    found = load_results(files[1])
    assert len(found) == 2 and {json.loads(text) for one in found for text in one.particles.texts} == {"small", "big"}
    constraint = options.constraint("json-schema", schema)
    job = GenerateJob(Limits(), constraint, Writing(), options.Steering(N=3, K=2, max_tokens=8), Rule())
    there = pickle.loads(pickle.dumps(job))
    for one in found:
        rng = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(one.index,)))
        assert there.steer(there.load(), one.task, rng).texts == one.particles.texts
    schema.write_text('{"enum": ["small", "huge"]}')
    other = generate(files, "--json-schema", schema, "--max-tokens", "8", "--resume")
    assert other.exit_code == 2 and "results of another run: constraint was" in other.stderr


def test_the_file_has_the_prompts_and_its_header_the_options(tiny, files):
    assert generate(files, "--regex", "(a|b)+").exit_code == 0
    assert [result.task for result in load_results(files[1])] == ["a", "b c", "ab", "c"]
    told = json.loads(files[1].read_bytes().splitlines()[0])["identity"]["options"]
    given = {name: value[0] for name, value in told.items() if value[0] not in ("None", "False", "()")}
    assert [given[name] for name in ("constraint", "N", "K", "max_tokens", "end")] == ["'(a|b)+'", *"324", "'boundary'"]


def test_a_failed_task_stops_no_other_and_sets_the_exit_code(tiny, files):
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
        (["--regex", "abcabcabcabc"], "ends within max_tokens=4, the shortest takes 8 tokens: give room, or --cut"),
        (["--regex", "ab(c"], "error in regex: missing )"),
    ],
)
def test_an_unsatisfiable_constraint_is_refused_before_the_first_prompt(arguments, message, tiny, files):
    result = generate(files, *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert not files[1].exists() or not told(files[1])
    assert generate(files).exit_code == 0 and len(told(files[1])) == 4


def test_the_same_command_resumes_a_file(tiny, files):
    assert generate(files).exit_code == 0
    before, whole = files[1].read_bytes(), told(files[1])
    for arguments, message in [
        ([], f"{files[1]}: the file is there; --resume goes on with its results"),
        (["--resume", "--seed", "2"], f"{files[1]} holds results of another run: its seed is 1, and this is 2"),
        (["--resume", "-N", "4"], "of another run: N was 3, and is 4. Go on with what they were made with, write to"),
        (["--resume", "--regex", "a+"], "constraint was None, and is 'a+'"),
        (["--resume", "--top-k", "3"], "top_k was None, and is 3"),
        (["--resume", "--lm", "other"], "is 'other'. Go on with what they were made with, write to another file, or "
                                        "keep them as they are with --force"),
    ]:
        result = generate(files, *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
        assert result.stdout == "" and result.stderr.count("\n") == 1 and files[1].read_bytes() == before
    texts = files[0].read_text()
    for other, message in [("a\nb c\n", "tasks are now 2"), (texts.replace("ab", "abb"), "another task 2 than")]:
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
        ("prompts.txt", "line 1, is no result of run_many, or is damaged; the file is left as it is, .*: 'a'"),
        ("/proc/o.jsonl", "/proc/o.jsonl: "),
        ("/dev/full", "results are written to a file of their own, and this is none"),
    ],
)
def test_an_unwritable_path_is_reported_before_loading(out, message, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    monkeypatch.setattr(options, "load", None)
    result = generate((files[0], out), "--resume")
    assert result.exit_code == 2 and result.stdout == ""
    assert re.match(f"llmppl: .*{message}", result.stderr) and result.stderr.count("\n") == 1, result.stderr
    assert files[0].read_text().startswith("a\n")


def test_a_full_disk_is_reported_and_the_run_resumes_when_space_returns(tiny, files, tmp_path, monkeypatch):
    import resource

    generate((files[0], tmp_path / "whole"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        header = (tmp_path / "whole").read_bytes().index(b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (header + 700, before[1]))
        result = generate(files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert result.exit_code == 2
    assert re.search(r"llmppl: .*: File too large: the results before .* are whole; --resume goes on", result.stderr)
    assert 0 < len(told(files[1])) < 4
    assert generate(files, "--resume").exit_code == 0 and told(files[1]) == told(tmp_path / "whole")


def test_a_finished_job_loads_no_model(tiny, files, monkeypatch):
    generate(files)
    monkeypatch.setattr(options, "load", None)
    assert generate(files, "--resume").stdout == f"{files[1]}: 4 results, 0 failed\n"


# ---- interrupted


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


def test_a_killed_run_resumes_and_gives_the_same_results(whole, tmp_path):
    command = ["generate", "--prompts", whole[0], "--out", tmp_path / "out", *SMALL, "--resume"]
    for num_lines in (2, 21, 41):        # of 120, so that a busy machine kills it in time
        process = start(*command)
        wait_for(tmp_path / "out", num_lines, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert num_lines <= (tmp_path / "out").read_bytes().count(b"\n") < 120
    process = start(*command)
    stdout, stderr = process.communicate()
    assert process.returncode == 0 and stdout == f"{tmp_path / 'out'}: 120 results, 0 failed\n"
    assert int(re.search(r"120 prompts, (\d+) of them done before", stderr).group(1)) >= 40
    assert told(tmp_path / "out") == told(whole[1])


def test_ctrl_c_keeps_the_results_and_prints_the_command_that_resumes(whole, tmp_path):
    command = ["generate", "--prompts", whole[0], "--out", tmp_path / "out", *SMALL]
    process = start(*command)
    wait_for(tmp_path / "out", 21, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130 and stdout == ""
    said = r"^llmppl: interrupted: (\d+) of 120 results are in .*/out; the same command with --resume goes on$"
    (num_results,) = re.findall(said, stderr, re.MULTILINE)
    assert 19 <= int(num_results) <= len(told(tmp_path / "out")) <= int(num_results) + 1     # one may be on its way
    assert "Traceback" not in stderr
    assert start(*command, "--resume").wait() == 0
    assert told(tmp_path / "out") == told(whole[1])


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


@pytest.mark.parametrize(
    "command",
    [["generate", "a"], ["generate", "a", "--regex", "b(a|b)*", "--cut"], ["intersect", "a", "b"]],
    ids=" ".join,
)
def test_ctrl_c_prints_the_particles_of_the_last_whole_step(command, monkeypatch):
    """Those of a run of so many steps; a step reads contexts that are longer by one token."""
    for length in (2, 3, 5):
        interrupted_at(length, monkeypatch)
        stopped = run(*command, "--seed", "1", "-N", "3", "--max-tokens", "9")
        monkeypatch.setattr(options, "load", lambda name: table_lm(logits))
        whole = run(*command, "--seed", "1", "-N", "3", "--max-tokens", length - 1)
        assert whole.exit_code == 0 and stopped.exit_code == 130
        assert stopped.stdout == whole.stdout and "[cut]" in stopped.stdout
        said = f"llmppl: interrupted after step {length - 1}: texts that had not ended are cut\n"
        assert stopped.stderr.startswith("seed 1: ") and stopped.stderr.endswith(said)


def test_ctrl_c_before_the_first_step_or_match_prints_no_texts(monkeypatch):
    interrupted_at(1, monkeypatch)
    for command in (["generate", "a"], ["infill", "a[BLANK]b"]):
        result = run(*command)
        assert (result.exit_code, result.stdout, result.stderr) == (130, "", "llmppl: interrupted\n")


def test_ctrl_c_in_infill_prints_the_holes_filled_so_far(monkeypatch):
    """A step fills a hole; the second is begun with a context of as many tokens as the first has filled, and more."""
    for length in (9, 12):
        interrupted_at(length, monkeypatch)
        result = run("infill", "a[BLANK]b[BLANK]a", "--seed", "3", "-N", "2", "--max-tokens", "20", "--json")
        assert result.exit_code == 130
        assert "interrupted after step 1: texts" in result.stderr
        program = Infilling(table_lm(logits), "a[BLANK]b[BLANK]a", max_tokens=20)
        expected = smc_steer(program, 2, 10, seed=3, max_steps=1)
        rows = sorted(map(json.loads, result.stdout.splitlines()), key=lambda row: -row["weight"])
        assert {row["text"] for row in rows} == set(expected.texts) and all(row["cut"] for row in rows)


# ---- workers


def test_workers_write_the_same_file(files, tmp_path):
    """The embedded model, whose rounding may tip a choice; an automaton writes to its arrays as it meets new states."""
    wants_ray()
    import ray

    environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, runtime_env=environment, **quiet)
    files[0].write_text("The cat\nThe dog\n" + "word " * 2000 + "\nThe king\n")
    command = ["--regex", " [a-z]+ [a-z]+[.]", "--max-tokens", "6"]
    try:
        result = generate(files, *command, "--workers", "2")
    finally:
        ray.shutdown()
    assert (result.exit_code, result.stdout) == (1, f"{files[1]}: 4 results, 1 failed\n"), result.stderr
    assert generate((files[0], tmp_path / "alone"), *command).exit_code == 1
    pairs = zip(told(files[1]), told(tmp_path / "alone"), strict=True)
    assert sum(one.get("texts") == other.get("texts") for one, other in pairs) >= 3
    assert generate(files, *command, "--resume").stdout == result.stdout         # in this process: all is done


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit[0])
def test_a_pickled_job_gives_the_same_texts(limit, tiny, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    Path("g.lark").write_text('start: "c"+ "a"')
    steer, found = GenerateJob.steer, []

    def there(job, loaded, task, rng):
        other = pickle.loads(pickle.dumps(job))
        here = steer(job, loaded, task, np.random.default_rng(1))
        found.append((here.texts, steer(other, other.load(), task, np.random.default_rng(1)).texts))
        return here

    monkeypatch.setattr(GenerateJob, "steer", there)
    assert generate(files, *limit, "--complete").exit_code == 0
    assert len(found) == 4 and all(here == other for here, other in found)


def test_when_no_worker_is_left_earlier_results_stay(tiny, files, monkeypatch):
    import llmppl.tasks.ray

    def dying(run, make_lm, workers, resources, together):
        def run_all(numbered, seed):
            yield from itertools.islice(lanes(functools.partial(run, make_lm()), numbered, seed=seed, together=1), 2)
            raise RuntimeError("no worker is left:\nso many died")

        return run_all

    monkeypatch.setattr(llmppl.tasks.ray, "on_workers", dying)
    result = generate(files, "--workers", "2")
    assert result.exit_code == 2 and result.stdout == ""
    how = f"2 of 4 results are in {files[1]}; the same command with --resume goes on"
    assert result.stderr.splitlines()[-1] == f"llmppl: no worker is left: so many died: {how}"
    assert generate(files, "--resume").stdout == f"{files[1]}: 4 results, 0 failed\n"


def test_workers_without_Ray_print_how_to_install_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = generate(files, "--workers", "2")
    assert result.exit_code == 2 and result.stderr == "llmppl: llmppl.tasks.ray needs Ray: pip install 'llmppl[ray]'\n"


# ---- llmppl results


def test_results_prints_counts_failures_log_Z_and_the_likeliest_texts(tmp_path):
    """Written by hand: two tasks agree on " x", one fails, one has lost its particles, and the fifth is not there."""
    prompt = {"task": "The ox"}
    header = {"llmppl_results": 2, "run": "0", "after": None, "seed": 1, "version": "0", "identity": None}
    common = {"digest": "0", "run": "0", "seconds": 1.0}
    three = {"log_ml_se": 0.5, "cut": [False, True, False]}
    failed = 'Traceback (most recent call last):\n  File "a", line 1, in f\n    f(\n    ^^\nValueError: x: two\n more\n'
    deaths = [{"step": i, "reason": why, "count": i, "text": ""} for i, why in ((1, "rare"), (2, "often"))]
    records = [
        {"index": 5, **prompt, "log_ml": math.log(4), "texts": [" x", "y", " x"], "log_weights": [0, math.log(2), 0]},
        {"index": 0, "task": "a\n" + 40 * "b", "log_ml": math.log(8), "texts": [" x", "y\n", "z"]},
        {"index": 1, "error": failed + "in particle 3\n"},
        {"index": 2, "log_ml": None, "log_ml_se": None, "texts": [], "log_weights": [], "cut": [], "deaths": deaths},
        {"index": 3, "task": ["ö", 1], "matches": [{"text": "m", "log_prob": -1.0}, {"text": "n", "log_prob": -2.0}]},
    ]
    path = tmp_path / "results.jsonl"
    for record in records[:2]:
        record |= {"log_weights": [math.log(6), 0, 0], **three} | record
    lines = [sealed({"index": record["index"], **common, **record}) for record in records]
    path.write_bytes(b"".join([sealed(header), *lines, lines[0][:50]]))     # a line is being written
    result = run("results", path)
    assert result.exit_code == 0 and result.stderr.endswith("line 7, is torn and left out; resume=True runs its task "
                                                            "again\n")  # fmt: skip
    assert result.stdout.splitlines() == [
        f"{path}: 5 results, 2 failed, 1 before the last missing",
        "",
        " tasks   first  its error",
        "     1       1  ValueError: x: two",
        "     1       2  no particle is left: most died by often",
        "",
        "log Z-hat of a task: median 1.73, from 1.39 to 2.08",
        "",
        " tasks  likeliest text",
        "     2   x",
        "",
        " index  weight   log Z-hat  task                            likeliest text",
        "     0   0.750        2.08  ..." + 27 * "b" + "   x",
        "     3       -           -  [\"ö\", 1]                        m",
        "     5   0.500        1.39  The ox                           x",
    ]
    rows = [json.loads(line) for line in run("results", path, "--json").stdout.splitlines()]
    empty = {"task": None, "text": None, "weight": None, "log_ml": None, "log_ml_se": None, "error": None}
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 5]
    assert rows[1] == {**empty, "index": 1, "error": "ValueError: x: two"}
    assert rows[3] == {**empty, "index": 3, "task": ["ö", 1], "text": "m"}
    likeliest = {"index": 5, **prompt, "text": " x", "weight": pytest.approx(0.5)}
    assert rows[4] == {**likeliest, "log_ml": pytest.approx(math.log(4)), "log_ml_se": 0.5, "error": None}


def test_results_shows_ten_rows_and_counts_the_rest(tiny, files):
    files[0].write_text("a\n" * 12)
    generate(files)
    *_, last_row, more = run("results", files[1]).stdout.splitlines()
    assert last_row.split()[0] == "9" and more == "... and 2 more: --json has all"
    assert len(run("results", files[1], "--json").stdout.splitlines()) == 12


def test_results_reports_an_empty_file_and_a_foreign_file(tmp_path):
    (tmp_path / "empty").touch()
    assert run("results", tmp_path / "empty").stdout == f"{tmp_path / 'empty'}: 0 results, 0 failed\n"
    (tmp_path / "other").write_text("hello\n")
    result = run("results", tmp_path / "other")
    assert result.exit_code == 2 and "line 1, is no result of run_many" in result.stderr
    assert run("results", tmp_path / "none").exit_code == 2


def test_results_loads_neither_torch_nor_transformers(files, tiny):
    generate(files)
    program = (
        f"import sys\nfrom llmppl.cli import app\ntry: app(['results', {str(files[1])!r}])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "4 results, 0 failed" in result.stdout and result.stdout.endswith("[]\n"), result.stderr


# ---- how far


@pytest.mark.skipif(sys.platform == "win32", reason="has no pty")
def test_a_terminal_shows_a_bar_and_stdout_holds_only_the_last_line(files):
    import pty

    files[0].write_text("a\n" * 40)
    parent, child = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "generate", "--prompts", files[0], "--out", files[1], *SMALL]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=child, text=True, env=env)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:                                     # Linux says so that the other end is closed
        pass
    os.close(parent)
    assert process.communicate()[0] == f"{files[1]}: 40 results, 0 failed\n" and process.returncode == 0
    assert re.search(r"prompt \d+ of 40.* 0 failed", shown.decode()) and b"\x1b[2K" in shown
