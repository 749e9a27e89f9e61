"""The command line: every command, what it prints, and what it says of bad input."""

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
from typer.testing import CliRunner

from llmppl import CachedTransformer, ConstrainedText, __version__, cli, smc_steer
from llmppl.cli import options, show
from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.engines import gguf

TEMPLATE = "The dog was very[BLANK] because he had lost his[BLANK]."
PROMPTS = ["The little boy went to the park and", "The old king went to the sea and"]
SMALL = ["--particles", "3", "--factor", "2", "--max-tokens", "6", "--seed", "1"]
COMMANDS = [
    ["generate", "Once upon a time", "--max-letters", "4"],
    ["generate", "Once upon a time"],
    ["infill", TEMPLATE],
    ["generate", "The cat was", "--regex", " [0-9]{1,2} years old[.]"],
    ["generate", "Tim was very", "--choices", " happy", " sad", " tired"],
    ["intersect", *PROMPTS, "--until-sentence"],
    ["intersect", *PROMPTS, "--proposal", "first"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]}-{command[-1][:14]}")


README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
IN_README = [shlex.split(line)[1:] for line in README if line.startswith("    llmppl ")]


@each_command
def test_a_command_prints_its_particles_heaviest_first_and_log_Z_hat(command):
    result = run(*command, *SMALL)
    assert result.exit_code == 0, result.output
    title, _, heading, *rows, _, total = result.stdout.splitlines()
    assert command[1] in title
    assert heading == "weight  log weight  text"
    weights = [float(row.split()[0]) for row in rows]
    assert 1 <= len(rows) <= 3 and weights == sorted(weights, reverse=True)
    found = re.fullmatch(r"log Z-hat -?\d+\.\d\d, ess \d\.\d of (\d) particles", total)
    assert int(found[1]) == len(rows) or ("--choices" in command and len(rows) < int(found[1]) <= 3)
    assert result.stderr.startswith("seed 1: ") and "tokens run" in result.stderr


@each_command
def test_json_output_has_one_object_per_particle_with_normalised_weights(command):
    rows = particles(*command, *SMALL)
    assert 1 <= len(rows) <= 3
    assert all(list(row) == ["text", "log_weight", "weight", "cut"] for row in rows)
    assert sum(row["weight"] for row in rows) == pytest.approx(1.0)


@each_command
def test_the_same_seed_gives_the_same_output_and_another_seed_another(command):
    assert run(*command, *SMALL).stdout == run(*command, *SMALL).stdout
    another = run(*command, *SMALL[:-1], "2").stdout
    assert another != run(*command, *SMALL).stdout or "--choices" in command        # of which all are found


def test_without_a_seed_the_command_prints_the_drawn_one():
    command = ["generate", "The cat", "--particles", "2", "--max-tokens", "5"]
    result = run(*command)
    seed = re.match(r"seed (\d+): ", result.stderr).group(1)
    assert run(*command, "--seed", seed).stdout == result.stdout


def test_generate_keeps_words_short_including_the_last_word_of_the_prompt():
    for row in particles("generate", "The bird", "--max-letters", "4", "--max-tokens", "20", "--seed", "3"):
        assert max(map(len, re.findall(r"[^\W\d_]+", "The bird" + row["text"]))) <= 4


def test_generate_keeps_to_a_regex():
    for row in particles("generate", "Tim was", "--regex", " [0-9]{1,2} years (old|young)[.]", "--seed", "1"):
        assert re.fullmatch(" [0-9]{1,2} years (old|young)[.]", row["text"]) and not row["cut"]


@pytest.mark.parametrize(
    "command", [command for command in IN_README if command[0] in ("generate", "infill", "intersect")], ids=" ".join
)
def test_a_command_of_the_README_gives_texts_at_every_seed(command):
    bounded = "--regex" in command                      # the others go on until --max-tokens, or fill their holes
    few = [] if bounded else ["--max-tokens", "8"]
    for seed in range(10) if bounded else range(repetitions(full=10, quick=1)):
        rows = particles(*command, *few, "--seed", str(seed))
        assert rows and all(row["text"] for row in rows)
        if bounded:
            pattern = command[command.index("--regex") + 1]
            assert all(re.fullmatch(pattern, row["text"]) and not row["cut"] for row in rows)


def test_the_other_commands_of_the_README_run():
    others = [command for command in IN_README if command[0] in ("check", "query")]
    assert len(others) == 2 and [run(*command).exit_code for command in others] == [1, 0]     # 1: no match, it says why


def test_generate_keeps_to_choices():
    rows = particles("generate", "Tim was very", "--choices", " happy", "--choices", " sad.", "--seed", "1")
    assert {row["text"] for row in rows} == {" happy", " sad."} and not any(row["cut"] for row in rows)


def test_choices_get_one_row_each_that_sums_their_spellings():
    choices, options = (" happy", " sad", " tired"), ("-N", "20", "--seed", "1")
    rows = particles("generate", "Tim was very", "--choices", *choices, *options)
    assert {row["text"] for row in rows} == {*choices} and sum(row["weight"] for row in rows) == pytest.approx(1.0)
    lm = CachedTransformer.from_pretrained()
    posterior = smc_steer(ConstrainedText(lm, "Tim was very", [*choices], max_tokens=40), 20, 3, seed=1)
    assert len(posterior) > 3
    for row in rows:
        logs = [particle.log_weight for particle in posterior if particle.s == row["text"]]
        assert row["log_weight"] == pytest.approx(np.logaddexp.reduce(logs), abs=1e-4)
    each_by_itself = [text for choice in choices for text in ("--choices", choice)]
    assert rows == particles("generate", "Tim was very", *options, *each_by_itself)
    swallowed = run("generate", "--choices", " happy", " sad", "Tim was very")
    assert swallowed.exit_code == 2 and "Give the PROMPT before --choices" in swallowed.stderr


def test_a_choice_that_would_extend_the_last_word_of_the_prompt_warns():
    result = run("generate", "Tim was very", "--choices", "happy", "sad", "--seed", "1", "-N", "2")
    assert result.exit_code == 0
    assert "llmppl: the texts of the list ['happy', 'sad'] go on inside the last word of the prompt" in result.stderr


def test_end_selects_the_tokens_that_may_follow_a_text():
    def found(end):
        rows = particles("generate", "The sky was", "--choices", " blue", " dark", "--seed", "1", "--end", end)
        return {row["text"]: row["log_weight"] for row in rows}

    assert found("boundary") == found("prefix") and found("eos")[" blue"] < found("prefix")[" blue"] - 5
    assert run("generate", "Hi", "--regex", "a", "--end", "never").exit_code == 2


def test_generate_keeps_to_a_grammar_and_ends_within_max_tokens(tmp_path):
    grammar = tmp_path / "sentence.lark"
    grammar.write_text('start: (" " WORD)+ "."\nWORD: /[a-z]+/')
    command = ["generate", "Tim was", "--grammar", str(grammar), "--max-tokens", "6", "--seed", "1"]
    rows = particles(*command, "--complete")
    assert rows and all(re.fullmatch("( [a-z]+)+[.]", row["text"]) and not row["cut"] for row in rows)
    assert rows == particles(*command)                  # a constraint is a promise
    assert any(row["cut"] for row in particles(*command, "--cut"))


def test_generate_keeps_to_a_json_schema(tmp_path):
    pytest.importorskip("referencing")
    schema = tmp_path / "age.json"
    schema.write_text('{"type": "object", "properties": {"age": {"enum": [3, 4]}}, "required": ["age"], '
                      '"additionalProperties": false}')
    rows = particles("generate", "Tim: ", "--json-schema", str(schema), "--max-tokens", "60", "--seed", "1")
    assert len(rows) == 8 and all(json.loads(row["text"])["age"] in (3, 4) and not row["cut"] for row in rows)


def test_infill_can_require_an_end_after_its_last_fragment():
    alone = ["infill", "The cat was[BLANK].", "--particles", "1", "--factor", "1", "--seed", "1"]
    (anything,), (ended,) = particles(*alone), particles(*alone, "--end", "eos")        # the same draws
    assert ended["text"] == anything["text"]
    assert ended["log_weight"] < anything["log_weight"] - 0.01


def test_infill_keeps_the_fragments_in_their_order():
    pattern = ".*".join(map(re.escape, TEMPLATE.split("[BLANK]")))
    assert all(re.fullmatch(pattern, row["text"], re.DOTALL) for row in particles("infill", TEMPLATE, *SMALL))


def test_intersect_stops_after_a_sentence_or_marks_a_cut_text():
    rows = particles("intersect", *PROMPTS, "--until-sentence", "--max-tokens", "8", "--seed", "1")
    assert any(not row["cut"] for row in rows)
    assert all(row["cut"] or re.search(r"[.!?][\"']?$", row["text"]) for row in rows)
    assert all(row["cut"] for row in particles("intersect", *PROMPTS, "--max-tokens", "2", "--seed", "1"))


def test_a_text_ends_at_a_stop_string_which_is_left_out():
    rows = particles("generate", "The bird", "--stop", ".", "--stop", "!", "--max-tokens", "60", "--seed", "1")
    assert not any(row["cut"] or set(".!") & set(row["text"]) for row in rows)
    with_letters = ["--max-letters", "4", "--stop", ".", "--max-tokens", "60"]
    for row in particles("generate", "The bird", *with_letters, "--seed", "2"):
        assert max(map(len, re.findall(r"[^\W\d_]+", row["text"])), default=0) <= 4 and "." not in row["text"]


def test_chat_uses_the_template_of_the_model(monkeypatch):
    lm = chat_lm()
    monkeypatch.setattr(options, "load", lambda name: lm)
    seen, chat = [], lm.chat
    monkeypatch.setattr(type(lm), "chat", lambda self, *given, **named: seen.append(chat(*given, **named)) or seen[-1])
    result = run("generate", "Hi", "--chat", "--system", "Be kind.", "--max-tokens", "2", "--max-letters", "3")
    assert result.exit_code == 0 and "'Hi' is answered, with no word of more than 3 letters" in result.stdout
    assert run("generate", "Hi", "--chat", "--max-tokens", "2").exit_code == 0
    assert [each.text for each in seen] == ["system: Be kind.\nuser: Hi\nassistant:", "user: Hi\nassistant:"]


def test_a_model_without_chat_template_names_one_that_has_it():
    result = run("generate", "Hi", "--chat")
    assert result.exit_code == 2 and "--chat wants a model that was trained to chat" in result.stderr


@pytest.mark.parametrize(
    ("command", "given", "same"),
    [
        (["generate", "-", *SMALL], "Once upon\na time\n", ["generate", "Once upon\na time", *SMALL]),
        (["infill", "-", *SMALL], "The[BLANK] dog.", ["infill", "The[BLANK] dog.", *SMALL]),
        (["check", "a+\n", "-"], "aa\n\n", ["check", "a+\n", "aa\n"]),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else None,
)
def test_a_dash_is_standard_input(command, given, same):
    result = CliRunner().invoke(cli.app, command, input=given)
    assert result.exit_code == 0 and result.stdout == run(*same).stdout


def test_more_particles_are_advised_only_if_they_could_help(tmp_path):
    impossible = run("generate", "Girl", "--max-letters", "1", "--top-k", "1")
    assert impossible.exit_code == 1 and "more --particles or a larger --factor help" in impossible.stderr
    schema = tmp_path / "any.json"
    schema.write_text('{"type": "string", "minLength": 60}')
    late = run("generate", "Tim: ", "--json-schema", str(schema), "--complete", "--max-tokens", "4")
    assert late.exit_code in (1, 2) and "max_tokens=4" in late.stderr and "more --particles" not in late.stderr


def test_top_k_and_temperature_change_the_distribution():
    greedy = ["generate", "Once upon a time", "--top-k", "1", "--max-tokens", "5"]
    assert len({row["text"] for row in particles(*greedy)}) == 1
    cold = ["generate", "Once upon a time", "--temperature", "0.001", "--max-tokens", "5"]
    likely = [row for row in particles(*cold) if row["weight"] > 1e-6]      # of different texts, one has all the weight
    assert {row["text"] for row in likely} == {row["text"] for row in particles(*greedy)}
    for narrow in (["--top-p", "0.000001"], ["--min-p", "1"]):
        rows = particles("generate", "Once upon a time", *narrow, "--max-tokens", "5")
        assert {row["text"] for row in rows} == {row["text"] for row in particles(*greedy)}


def test_N_and_K_are_particles_and_factor():
    long, short = ["--particles", "3", "--factor", "2"], ["-N", "3", "-K", "2"]
    command = ["generate", "Once upon a time", "--max-tokens", "4", "--seed", "5"]
    assert run(*command, *short).stdout == run(*command, *long).stdout


def test_demo_shows_three_programs():
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("weight  log weight  text") == result.stdout.count("log Z-hat") == 3
    assert "no word of more than 5 letters" in result.stdout


def test_a_requested_model_is_named_in_the_title_and_in_the_recording(tmp_path):
    for command in (["generate", "The cat"], ["infill", "A[BLANK] cat."], ["intersect", "The", "A"]):
        result = run(*command, *SMALL, "--lm", str(EMBEDDED), "--trace", str(tmp_path / "run.jsonl"))
        title = result.stdout.splitlines()[0]
        assert title.endswith(f", by {EMBEDDED}")
        assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["title"] == title


def test_the_command_line_reports_a_converted_model_that_cannot_be_saved(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "any.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(gguf, "_can_read", lambda: True)
    monkeypatch.setattr(gguf, "checked", lambda file: {})
    result = run("generate", "Hi", "--lm", str(tmp_path / "any.gguf"), "--engine", "transformers")
    assert result.exit_code == 2 and f"llmppl: cannot convert {tmp_path / 'any.gguf'}" in result.stderr


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setattr(show, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    result = run("infill", "[red] or[BLANK] blue.", *SMALL)
    assert "───" in result.stdout and "log Z-hat" in result.stdout
    assert "[red] or" in result.stdout                  # not taken for markup
    assert max(map(len, result.stdout.splitlines())) <= 60


def test_unprintable_characters_are_escaped_and_a_cut_is_marked():
    assert show.line(show.Row("a\nb\x1b[1m é", -1.0, 1.0, True)) == "a\\nb\\x1b[1m é [cut]"


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["infill", "no hole in it"], 2, r"put \[BLANK\] where a hole is"),
        (["generate", "Hi", "--lm", "no-such-model-anywhere"], 2, "no language model 'no-such-model-anywhere'"),
        (["generate", "Hi", "--lm", "."], 2, "no language model '.'"),
        (["generate", "word " * 2000], 2, "the model reads at most 1024"),
        (["generate", "Hi", "--regex", "a(?!a)a"], 2, "accepts no string at all"),
        (["generate", "Hi", "--regex", "zebra quartz", "--max-tokens", "2"], 2, "within max_tokens=2"),
        (["check", "--grammar", ".", "a"], 2, "cannot read .: "),
        (["check", "a(?!a)a", "a"], 2, "accepts no string at all"),
        (["generate", "Girl", "--max-letters", "1", "--top-k", "1"], 1, "no particle is left: all died by step"),
    ],
)
def test_an_error_of_the_library_is_one_line_on_stderr(arguments, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                         # an empty folder
    for json_option in [[], ["--json"]][: 1 if arguments[0] == "check" else 2]:
        result = run(*arguments, *json_option)
        assert result.exit_code == code
        assert result.stdout == ""
        *loading, said = result.stderr.splitlines()
        assert loading == ([f"loading {arguments[-1]} ..."] if "--lm" in arguments else [])
        assert re.match("llmppl: .*" + message, said)


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["generate", "Hi", "--particles", "0"], "--particles"),
        (["infill", TEMPLATE, "--factor", "0"], "--factor"),
        (["generate", "Hi", "--temperature", "-1"], "--temperature"),
        (["generate", "Hi", "--temperature", "0"], "--top-k 1"),
        (["generate", "Hi", "--top-p", "1.5"], "--top-p"),
        (["infill", TEMPLATE, "--min-p", "0"], "--min-p"),
        (["query", "Hi", "--strategy", "best"], "--strategy"),
        (["generate", "Hi", "-N", "0"], "-N"),
        (["generate", "Hi", "-K", "0"], "-K"),
        (["generate", "Hi", "--top-k", "0"], "--top-k"),
        (["generate", "Hi", "--max-letters", "0"], "--max-letters"),
        (["intersect", *PROMPTS, "--max-tokens", "0"], "--max-tokens"),
        (["intersect", *PROMPTS, "--proposal", "third"], "--proposal"),
        (["intersect"], "PROMPT"),
        (["generate", "Hi", "--regex", "a", "--choices", "b"], "--regex and --choices exclude each other"),
        (["generate", "Hi", "--max-letters", "3", "--regex", "a"], "--max-letters and --regex exclude each other"),
        (["generate", "Hi", "--grammar", "no-such-file.lark"], "--grammar"),
        (["generate", "Hi", "--json-schema", "no-such-file.json"], "--json-schema"),
        (["check", "--grammar", "--json-schema", "a", "b"], "exclude each other"),
        (["generate", "Hi", "--regex", "a", "--stop", "b"], "--regex and --stop exclude each other"),
        (["generate", "Hi", "--system", "b"], "give --chat, too"),
        (["generate", "Hi", "--max-new-tokens", "3"], "--max-tokens"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_is_loaded(arguments, name, monkeypatch):
    monkeypatch.setattr(options, "load", None)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and name in result.stderr and "Traceback" not in result.stderr


def test_a_faulty_pattern_is_shown_with_a_caret_before_loading(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "load", None)
    for command in (["generate", "Hi", "--regex", "ab(c"], ["check", "ab(c", "x"]):
        result = run(*command)
        assert result.exit_code == 2 and result.stdout == ""
        message, pattern, caret = result.stderr.splitlines()
        assert message.startswith("llmppl: error in regex: missing )")
        assert pattern[caret.index("^")] == "(" and pattern.strip() == "ab(c"
    wrong = tmp_path / "wrong.lark"
    wrong.write_text('start: "a" |\n  = "b"\n')
    assert "line 2" in run("generate", "Hi", "--grammar", str(wrong)).stderr


@pytest.mark.parametrize(
    "pattern, text, code, lines",
    [
        ("[0-9]{4}-[01]", "2023/07", 1, ["2023/07", "    ^", "no match: here may come '-', not '/'"]),
        ("[0-9]{4}", "20", 1, ["20", "  ^", "only the beginning of a match: here may come '0' to '9'"]),
        ("a+b?", "aa", 0, ["aa", "complete: it matches; it ends here, or goes on with 'a', 'b'"]),
        ("a", "ab", 1, ["ab", " ^", "no match: it ends here, not 'b'"]),
        ("", "", 0, ["", "complete: it matches; it ends here"]),
        ("日(本|é|x)", "日木", 1, ["日木", "  ^", "no match: here may come 'x', 'é', '本', not '木'"]),
        (".b", "\n", 1, ["\\n", "^", None]),
    ],
)
def test_check_points_at_the_character_where_a_text_leaves_the_language(pattern, text, code, lines):
    result = run("check", pattern, text)
    assert result.exit_code == code and result.stderr == ""
    shown = result.stdout.removesuffix("\n").split("\n")
    assert len(shown) == len(lines)
    assert all(line is None or line == each for line, each in zip(lines, shown, strict=True))


def test_check_agrees_with_re_on_every_short_text():
    for pattern in ("(ab|a)*c?", "a(?=b)[bc]+", "(?!c)[abc]{1,3}"):
        for text in ("".join(letters) for n in range(4) for letters in itertools.product("abc", repeat=n)):
            assert (run("check", pattern, text).exit_code == 0) == bool(re.fullmatch(pattern, text))


def test_check_shows_the_part_of_a_long_text_around_the_place():
    line, caret, _ = run("check", "a*", "a" * 500 + "b" + "a" * 500).stdout.splitlines()
    assert line[caret.index("^")] == "b" and len(line) < 90 and line.startswith("...a") and line.endswith("a...")


def test_check_reads_grammars_and_schemas(tmp_path):
    grammar = tmp_path / "list.lark"
    grammar.write_text('start: "[" [NUMBER ("," NUMBER)*] "]"\nNUMBER: /[0-9]+/')
    assert run("check", "--grammar", str(grammar), "[1,22]").exit_code == 0
    result = run("check", "--grammar", str(grammar), "[1;2]")
    assert result.exit_code == 1 and "here may come ',', '0' to '9', ']', not ';'" in result.stdout
    pytest.importorskip("referencing")
    schema = tmp_path / "small.json"
    schema.write_text('{"type": "integer", "minimum": 1, "maximum": 30}')
    assert run("check", "--json-schema", str(schema), "30").exit_code == 0
    assert run("check", "--json-schema", str(schema), "31").stdout.splitlines()[1] == " ^"


def test_check_loads_no_language_model():
    program = (
        "import sys\nfrom llmppl.cli.main import app\ntry: app(['check', 'a', 'a'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.endswith("[]\n"), result.stderr


def test_an_unexpected_error_propagates(monkeypatch):
    def broken(name):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(options, "load", broken)
    assert isinstance(run("generate", "Hi").exception, ZeroDivisionError)


def test_version():
    assert run("--version").stdout == f"llmppl {__version__}\n"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "llmppl", "--version"], capture_output=True, text=True, timeout=HANG)
    assert done.stdout == f"llmppl {__version__}\n"
    assert done.returncode == 0


def test_help_loads_neither_torch_nor_transformers_and_names_the_commands():
    program = (
        "import sys\nfrom llmppl.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("demo", "generate", "check", "infill", "intersect"):
        assert name in result.stdout
    assert result.stdout.endswith("[]\n")


# ---- query


def matches(*arguments):
    """The JSON objects that `query` prints."""
    result = run("query", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_query_prints_the_matches_of_search_in_their_order(embedded):
    from llmppl import search

    arguments = ["The ((cat)|(dog)) (was|ran)", "--prefix", "The", "--end", "prefix"]
    expected = list(search(embedded, "The ((cat)|(dog)) (was|ran)", prefix="The", end="prefix"))
    rows = matches(*arguments)
    assert [row["text"] for row in rows] == [str(match) for match in expected]
    assert [row["log_prob"] for row in rows] == pytest.approx([match.log_prob for match in expected], abs=1e-5)
    heading, *lines = run("query", *arguments).stdout.splitlines()
    assert heading == "log prob  text"
    assert [line.split(maxsplit=1)[1] for line in lines] == [row["text"] for row in rows]


def test_query_stops_after_n_matches_and_reports_its_work():
    result = run("query", "[a-z ]*", "--prefix", "[a]", "--end", "prefix", "-n", "3", "--results", "tokens")
    assert len(result.stdout.splitlines()) == 4 and "expansions" in result.stderr


def test_query_shows_weights_of_samples_and_edits():
    result = run("query", "The (cat|dog)", "--prefix", "The", "--strategy", "sample", "-n", "4", "--seed", "1")
    assert result.stdout.startswith("log prob  log weight  text\n") and len(result.stdout.splitlines()) == 5
    edited = run("query", "The (cat|dog)", "--prefix", "The", "--edits", "1", "-n", "3")
    assert "substitute at" in edited.stdout or "insert at" in edited.stdout or "delete at" in edited.stdout


def test_query_plan_loads_no_model(monkeypatch):
    monkeypatch.setattr(options, "load", None)
    result = run("query", "The (cat|dog)", "--prefix", "The", "--plan", "--lm", "gpt2")
    assert (result.exit_code, result.stdout) == (0, "after 'The': a finite language, 10 states\n")
    edited = run("query", "The cat", "--prefix", "The", "--edits", "1", "--plan")
    assert "after 'The': a finite language," in edited.stdout
    assert run("query", "The cat", "--prefix", "A", "--plan").exit_code == 2


def test_query_shows_the_place_of_an_error_in_a_pattern():
    result = run("query", "The (cat")
    assert result.exit_code == 2 and re.search(r"\n *\^", result.stderr)
    result = run("query", "The cat", "--prefix", "A")
    assert result.exit_code == 2 and "no prefix of the pattern" in result.stderr


def test_query_without_a_match_reports_it():
    result = run("query", "The zzzz", "--prefix", "The", "--top-k", "1")
    assert result.exit_code == 1 and "no match: --top-k, --top-p or --min-p leaves none" in result.stderr


def test_engine_device_and_type_go_to_the_loader_and_into_the_title(monkeypatch):
    from llmppl import CachedTransformer

    seen, lm = [], CachedTransformer.from_pretrained()
    monkeypatch.setattr(CachedTransformer, "from_pretrained", lambda *names, **given: seen.append((names, given)) or lm)
    options.load.cache_clear()
    how = ["--engine", "transformers", "--device", "cpu", "--dtype", "float32"]
    result = run("generate", "Once", "--max-tokens", "2", "-N", "1", "-K", "1", "--seed", "0", *how)
    assert ", by the model in the package (engine transformers, device cpu, dtype float32)" in result.stdout
    assert seen == [((None,), {"engine": "transformers", "device": "cpu", "dtype": "float32"})]
    options.load.cache_clear()
    result = run("generate", "Once", "--engine", "llamacpp")
    engines = "'transformers', 'numpy', 'llama.cpp', 'vllm'"
    assert result.exit_code == 2 and f"'llamacpp' is not one of {engines}" in result.stderr
