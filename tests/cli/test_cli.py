"""The command line: every command, what it prints, and its errors about bad input."""

import itertools
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import particles, run
from helpers.common import HANG, ROOT, repetitions
from helpers.tokenizers import chat_lm

from llmppl import CachedTransformer, Regex, __version__, cli, generate, load_results
from llmppl.cli import options
from llmppl.constraints import Grammar, Special
from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.native import kind
from llmppl.queries import Matches

TEMPLATE = "The dog was very[BLANK] because he had lost his[BLANK]."
PROMPTS = ["The little boy went to the park and", "The old king went to the sea and"]
SMALL = ["--particles", "3", "-K", "2", "--max-tokens", "6", "--seed", "1"]
COMMANDS = [
    ["generate", "Once upon a time"],
    ["generate", "The cat was", "--regex", " [0-9]{1,2} years old[.]"],
    ["infill", TEMPLATE],
    ["intersect", *PROMPTS, "--until-sentence"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]}-{command[-1][:14]}")
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8").splitlines()
DOCUMENTED = [shlex.split(line)[1:] for line in PAGE if line.startswith("    llmppl ")]


def test_no_command_has_more_than_fifteen_options():
    helps = [run(command.callback.__name__, "--help").stdout for command in cli.app.registered_commands]
    numbers = [len(re.findall(r"^  (?:-\w, )?--", text, re.MULTILINE)) for text in helps]
    assert len(numbers) == 11 and max(numbers) <= 16    # --help itself is one


@each_command
def test_a_command_prints_its_particles_heaviest_first_and_log_Z_hat(command):
    result = run(*command, *SMALL)
    assert result.exit_code == 0, result.output
    title, _, heading, *rows, _, total = result.stdout.splitlines()
    assert command[1] in title and heading == "weight  log weight  text"
    weights = [float(row.split()[0]) for row in rows]
    assert 1 <= len(rows) <= 3 and weights == sorted(weights, reverse=True)
    found = re.fullmatch(r"log Z-hat -?\d+\.\d\d, ess \d\.\d of (\d) particles", total)
    assert int(found[1]) == len(rows)
    assert result.stderr.startswith("seed 1: ") and "tokens run" in result.stderr
    small = ["-N", "3", "--factor", "2", *SMALL[4:]]
    assert run(*command, *small).stdout == result.stdout != run(*command, *small[:-1], "2").stdout


@each_command
def test_json_output_has_one_object_per_particle_with_normalised_weights(command):
    rows = particles(*command, *SMALL)
    assert 1 <= len(rows) <= 3 and all(list(row) == ["text", "log_weight", "weight", "cut"] for row in rows)
    assert sum(row["weight"] for row in rows) == pytest.approx(1.0)


def test_without_a_seed_the_command_prints_the_drawn_one():
    command = ["generate", "The cat", "--particles", "2", "--max-tokens", "5"]
    result = run(*command)
    seed = re.match(r"seed (\d+): ", result.stderr).group(1)
    assert run(*command, "--seed", seed).stdout == result.stdout


@pytest.mark.parametrize(
    "command", [command for command in DOCUMENTED if command[0] in ("generate", "infill", "intersect")], ids=" ".join
)
def test_a_documented_command_gives_texts_at_every_seed(command):
    for seed in range(repetitions(full=10, quick=2)):
        rows = particles(*command, "--seed", str(seed))
        pattern = (command + ["--regex", ".*"])[1 + command.index("--regex")] if "--regex" in command else r"(?s).*"
        assert rows and all(re.fullmatch(pattern, row["text"]) for row in rows)


def test_the_other_documented_commands_run():
    others = [command for command in DOCUMENTED if command[0] in ("check", "query")]
    assert len(others) == 2 and [run(*command).exit_code for command in others] == [1, 0]     # 1: no match, it says why


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write grammars and schemas into the folder of the process."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "words.lark": 'start: (" " WORD)+ "."\nWORD: /[a-z]+/', "list.lark": 'start: "[" /[0-9]+/ ("," /[0-9]+/)* "]"',
        "age.json": '{"properties": {"age": {"enum": [3, 4]}}, "required": ["age"], "additionalProperties": false, '
                    '"type": "object"}',
        "wrong.json": '{"type": "strng"}', "small.json": '{"type": "integer", "minimum": 1, "maximum": 30}',
        "late.json": '{"type": "string", "minLength": 60}',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)


def test_generate_keeps_to_a_grammar_and_ends_within_max_tokens(files):
    rows = particles("generate", "Tim was", "--grammar", "words.lark", "--max-tokens", "6", "--seed", "1")
    assert rows and all(re.fullmatch("( [a-z]+)+[.]", row["text"]) and not row["cut"] for row in rows)


def test_generate_keeps_to_a_json_schema(files):
    pytest.importorskip("jsonschema")
    rows = particles("generate", "Tim: ", "--json-schema", "age.json", "--max-tokens", "60", "--seed", "1", "-N", "8")
    assert len(rows) == 8 and all(json.loads(row["text"])["age"] in (3, 4) and not row["cut"] for row in rows)


def test_stop_ends_a_text_before_a_string():
    rows = particles("generate", "Once upon a time", "--stop", ".", "--stop", ",", "--seed", "1")
    assert rows and not any("." in row["text"] or "," in row["text"] for row in rows)


def test_chat_reads_the_prompt_as_a_message(monkeypatch):
    lm = chat_lm()
    monkeypatch.setattr(options, "load", lambda name: lm)
    seen, context = [], lm.context
    monkeypatch.setattr(type(lm), "chat", lambda self, message: seen.append(message) or context("a"))
    result = run("generate", "hello", "--chat", *SMALL)
    assert result.exit_code == 0 and "'hello' is answered" in result.stdout and seen == ["hello"]


def test_temperature_changes_the_distribution():
    cold = particles("generate", "Once upon a time", "--temperature", "0.001", "--max-tokens", "5", "-N", "8")
    assert len([row for row in cold if row["weight"] > 1e-6]) == 1      # of different texts, one has all the weight


def test_a_prompt_may_come_from_standard_input():
    piped = subprocess.run(
        [sys.executable, "-m", "llmppl", "generate", "-", "--json", *SMALL],
        input="The cat\n", capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    texts = [json.loads(line)["text"] for line in piped.stdout.splitlines()]
    assert texts == [row["text"] for row in particles("generate", "The cat", *SMALL)]


def test_demo_shows_three_programs():
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("weight  log weight  text") == result.stdout.count("log Z-hat") == 3


@each_command
def test_a_requested_model_is_named_in_the_title_and_in_the_recording(command, tmp_path):
    result = run(*command, *SMALL, "--lm", str(EMBEDDED), "--trace", str(tmp_path / "run.jsonl"))
    title = result.stdout.splitlines()[0]
    assert title.endswith(f", by {EMBEDDED}")
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["title"] == title


def test_options_after_the_name_of_a_model_go_to_the_loader(monkeypatch):
    seen, lm = [], CachedTransformer.from_pretrained()
    monkeypatch.setattr(CachedTransformer, "from_pretrained", lambda *names, **given: seen.append((names, given)) or lm)
    options.load.cache_clear()
    assert run("generate", "Once", *SMALL, "--lm", ",engine=transformers,cache_bytes=1000000").exit_code == 0
    assert seen == [((None,), {"engine": "transformers", "cache_bytes": 1_000_000})]
    options.load.cache_clear()
    wrong = run("generate", "Once", "--lm", "gpt2,cuda")
    assert wrong.exit_code == 2 and "give options as NAME,device=cuda" in wrong.stderr


def test_unprintable_characters_are_escaped():
    result = run("infill", "a\nb\x1b[1m[BLANK] blue.", *SMALL)
    assert "a\\nb\\x1b[1m" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["infill", "no hole in it"], 2, r"put \[BLANK\] where a hole is"),
        (["generate", "Hi", "--lm", "no-such-model-anywhere"], 2, "We couldn't connect to"),
        (["generate", "word " * 2000], 2, "the model reads at most 1024"),
        (["generate", "Hi", "--regex", "a(?!a)a"], 2, "accepts no string at all"),
        (["generate", "Hi", "--regex", "zebra quartz", "--max-tokens", "2"], 2, "within max_tokens=2"),
        (["generate", "Hi", "--chat"], 2, ".*chat template"),
        (["generate", "Hi", "--temperature", "-1"], 2, "temperature must be positive and finite"),
        (["generate", "Hi", "--trace", "no/such/folder"], 2, "no/such/folder: No such file or directory"),
        (["generate", "Tim: ", "--json-schema", "wrong.json"], 2, "wrong.json: JSON schema at #, 'type'"),
        (["generate", "Tim: ", "--json-schema", "late.json", "--max-tokens", "4"], 2, ".*within max_tokens=4"),
        (["check", "a", "--regex", "a(?!a)a"], 2, "accepts no string at all"),
        (["check", "a", "--json-schema", "no-such-file.json"], 2, "no-such-file.json: No such file"),
        (["check", "a", "--json-schema", '{"type": "x"}'], 2, "--json-schema: JSON schema at #"),
        (["query", "The cat", "--prefix", "A"], 2, "no prefix of the pattern"),
        (["query", "The zzzz", "--prefix", "The", "--top-k", "1"], 1, "no match: --top-k leaves none"),
    ],
)
def test_an_error_of_the_library_is_one_line_on_stderr(files, arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code and result.stdout in ("", "log prob  text\n")
    assert re.match("llmppl: .*" + message, result.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["generate", "Hi", "--particles", "0"], "--particles"),
        (["infill", TEMPLATE, "--factor", "0"], "--factor"),
        (["query", "Hi", "--strategy", "best"], "--strategy"),
        (["query", "Hi", "--top-k", "0"], "--top-k"),
        (["intersect", *PROMPTS, "--max-tokens", "0"], "--max-tokens"),
        (["intersect"], "PROMPT"),
        (["generate", "Hi", "--regex", "a", "--grammar", str(ROOT / "README.md")], "exclude each other"),
        (["generate", "Hi", "--grammar", "no-such-file.lark"], "--grammar"),
        (["generate", "Hi", "--json-schema", "{}", "--regex", "a"], "exclude each other"),
        (["generate", "Hi", "--regex", "a", "--stop", "b"], "--stop excludes --regex"),
        (["generate", "Hi", "--max-new-tokens", "3"], "--max-tokens"),
        (["check", "text"], "Give --regex R, --grammar FILE or"),
        (["many", "p.txt", "r.db", "--method", "exact"], "--method"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_is_loaded(arguments, name, monkeypatch):
    monkeypatch.setattr(options, "load", None)
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and name in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_faulty_pattern_is_shown_with_a_caret_before_loading(command, monkeypatch):
    monkeypatch.setattr(options, "load", None)
    result = run(command, "Hi", "--regex", "ab(c")
    message, pattern, caret = result.stderr.splitlines()
    assert result.exit_code == 2 and message.startswith("llmppl: error in regex: missing )")
    assert pattern[caret.index("^")] == "(" and pattern.strip() == "ab(c"


def test_an_unexpected_error_propagates(monkeypatch):
    monkeypatch.setattr(options, "load", lambda name: 1 / 0)
    assert isinstance(run("generate", "Hi").exception, ZeroDivisionError)


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"llmppl {__version__} {kind()}\n"


def test_the_version_says_that_numpy_computes_masks(monkeypatch):
    monkeypatch.setenv("LLMPPL_NATIVE", "0")
    assert run("--version").stdout == f"llmppl {__version__} numpy\n"


def test_help_and_check_load_neither_torch_nor_transformers():
    program = (
        "import sys\nfrom llmppl.cli import app\nfor command in (['--help'], ['check', 'a', '--regex', 'a']):\n"
        "    try: app(command)\n    except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert result.stdout.endswith("[]\n") and "complete: it matches" in result.stdout, result.stderr
    assert all(name in result.stdout for name in ("demo", "generate", "many", "check", "infill", "intersect", "trace"))


# ---- check


@pytest.mark.parametrize(
    "pattern, text, code, lines",
    [
        ("[0-9]{4}-[01]", "2023/07", 1, ["2023/07", "    ^", "no match: the next byte must be one of b'-', not '/'"]),
        ("[0-9]{4}", "20", 1, ["20", "only the beginning of a match: the next byte must be one of b'0'..b'9'"]),
        ("ab*", "a", 0, ["a", "complete: it matches; the next byte must be one of b'b', or the text must end"]),
        ("a", "ab", 1, ["ab", " ^", "no match: the text must end, not 'b'"]),
        ("a*", "a" * 70 + "b" + "a" * 50, 1, [f"...{'a' * 60}b{'a' * 19}...", " " * 63 + "^", None]),
    ],
)
def test_check_points_at_the_character_where_a_text_leaves_the_language(pattern, text, code, lines):
    result = run("check", text, "--regex", pattern)
    assert result.exit_code == code and result.stderr == ""
    shown = result.stdout.removesuffix("\n").split("\n")
    assert [line and each for line, each in zip(lines, shown, strict=True)] == lines


@pytest.mark.parametrize("pattern", ["(ab|a)*c?", "a(?=b)[bc]+", "(?!c)[abc]{1,3}"])
def test_check_agrees_with_re_on_every_short_text(pattern):
    texts = ["".join(letters) for n in range(4) for letters in itertools.product("abc", repeat=n)]
    matched = [run("check", text, "--regex", pattern).exit_code == 0 for text in texts]
    assert matched == [bool(re.fullmatch(pattern, text)) for text in texts]


@pytest.mark.parametrize("text, file, code, shown", [
    ("[1,22]", "list.lark", 0, "complete: "),
    ("[1;2]", "list.lark", 1, "the next byte must be one of b',', b'0'..b'9', b']', not ';'"),
    ("30", "small.json", 0, "complete: "), ("31", "small.json", 1, "31\n ^\n"),
    ("3", '{"enum": [3]}', 0, "complete: "), ("4", ' {"enum": [3]}', 1, "not '4'"),
])  # fmt: skip
def test_check_reads_grammars_and_schemas(files, text, file, code, shown):
    pytest.importorskip("jsonschema")
    result = run("check", text, "--grammar" if file.endswith(".lark") else "--json-schema", file)
    assert result.exit_code == code and shown in result.stdout


@pytest.mark.parametrize("arguments, code, shown", [
    (["Hi<end>"], 0, "complete: it matches; the text must end"),
    (["Hi"], 1, "only the beginning of a match: the next byte must be one of b'a'..b'z', or the special token '<end>'"),
    (["Hi<end>", "--no-special"], 1, "Hi<end>\n  ^\nno match: "),
    (["Hi<end><end>"], 1, "Hi<end><end>\n       ^\nno match: the text must end"),
])  # fmt: skip
def test_check_reads_the_names_of_special_tokens_as_tokens(monkeypatch, arguments, code, shown):
    monkeypatch.setattr(options, "constraint", lambda given: Regex("H[a-z]+") + Special("<end>"))
    result = run("check", *arguments)
    assert result.exit_code == code and shown in result.stdout, result.stdout


def test_check_reads_special_tokens_in_grammars(monkeypatch):
    grammar = Grammar('start: NAME X\nNAME: /[A-Z][a-z]+/\n%declare X', specials={"X": "<end>"})
    monkeypatch.setattr(options, "constraint", lambda given: grammar)
    for text, code, shown in [
        ("Hi<end>", 0, "complete: it matches; the text must end"),
        ("Hi", 1, "only the beginning of a match: .*the special token '<end>'"),
        ("hi<end>", 1, "no match"),
    ]:
        result = run("check", text)
        assert result.exit_code == code and re.search(shown, result.stdout), result.stdout


@pytest.mark.parametrize("command", ["generate", "many"])
def test_a_prompt_may_be_read_without_special_tokens(embedded, tmp_path, command):
    prompt = "Tim<|endoftext|>"
    for special in (True, False):
        context = embedded.context(prompt, special=special)
        wanted = generate(embedded, context, method="sample", max_tokens=6, rng=np.random.default_rng(3)).text
        given = ["--method", "sample", "--max-tokens", "6", "--seed", "3", *["--no-special"] * (not special)]
        if command == "generate":
            found = json.loads(run("generate", prompt, "--json", *given).stdout)["text"]
            assert found == wanted
        else:
            (tmp_path / "prompts.txt").write_text(prompt)
            out = tmp_path / f"{special}.db"
            assert run("many", str(tmp_path / "prompts.txt"), str(out), *given).exit_code == 0
            assert len([*load_results(out)]) == 1


# ---- query


def test_a_prefix_may_be_read_without_special_tokens(embedded):
    from llmppl import search

    prefix = "Tim<|endoftext|>"
    pattern = r"Tim<\|endoftext\|> (The|Tim)"
    for special in (True, False):
        [first, _] = search(embedded, pattern, prefix=prefix, end="prefix", special=special)
        context = embedded.context(prefix, special=special)
        wanted = max((context + text).log_prob_since(context) for text in (" The", " Tim"))
        assert first.log_prob == pytest.approx(wanted, abs=0.01)
        given = ["--prefix", prefix, "--end", "prefix", "--json", *["--no-special"] * (not special)]
        found = json.loads(run("query", pattern, *given).stdout.splitlines()[0])
        assert found["log_prob"] == pytest.approx(first.log_prob, abs=1e-5)


def test_query_prints_the_matches_of_search_in_their_order(embedded):
    from llmppl import search

    arguments = ["The ((cat)|(dog)) (was|ran)", "--prefix", "The", "--end", "prefix"]
    expected = list(search(embedded, "The ((cat)|(dog)) (was|ran)", prefix="The", end="prefix"))
    rows = [json.loads(line) for line in run("query", *arguments, "--json").stdout.splitlines()]
    assert [row["text"] for row in rows] == [str(match) for match in expected]
    assert [row["log_prob"] for row in rows] == pytest.approx([match.log_prob for match in expected], abs=1e-5)
    heading, *lines = run("query", *arguments).stdout.splitlines()
    assert heading == "log prob  text"
    assert [line.split(maxsplit=1)[1] for line in lines] == [row["text"] for row in rows]


@pytest.mark.parametrize("strategy", ["shortest_path", "sample", "local", "distinct"])
def test_query_stops_after_n_matches_and_reports_its_work(strategy):
    arguments = ["--prefix", "The", "--strategy", strategy, "-n", "2", "--seed", "1"]
    result = run("query", "The (cat|dog|man)", *arguments)
    assert len(result.stdout.splitlines()) == 3 and "expansions" in result.stderr
    assert ("log weight" in result.stdout) == (strategy == "sample")


def test_query_shows_edits():
    edited = run("query", "The (cat|dog)", "--prefix", "The", "--edits", "1", "-n", "3")
    assert re.search("(substitute|insert|delete) at", edited.stdout)


def test_query_plan_loads_no_model(monkeypatch):
    monkeypatch.setattr(options, "load", None)
    result = run("query", "The (cat|dog)", "--prefix", "The", "--plan", "--lm", "gpt2")
    assert (result.exit_code, result.stdout) == (0, "after 'The': a finite language, 10 states\n")


def test_an_interrupted_query_has_printed_its_matches_and_exits_130(monkeypatch):
    found = Matches.__next__

    def next_match(matches):
        if matches.num_matches == 2:
            raise KeyboardInterrupt
        return found(matches)

    monkeypatch.setattr(Matches, "__next__", next_match)
    result = run("query", "The (cat|dog|bird) sat", "--json")
    assert result.exit_code == 130 and len(result.stdout.splitlines()) == 2
    assert result.stderr.splitlines()[-1] == "llmppl: interrupted after 2 matches"


def test_serve_says_what_it_loads_and_where_it_listens():
    command = [sys.executable, "-m", "llmppl", "serve", "--port", "0", "--key", "secret"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = list(itertools.takewhile(lambda line: "running on" not in line, server.stderr))
        finally:
            server.terminate()
    assert re.fullmatch(r"\d\d:\d\d:\d\d loading the model in the package\n", lines[0])
    assert re.fullmatch(r"loaded in \d+\.\d s\n", lines[1])
