"""`llmppl decide`: the answers of `decide`, from files and pipes, and errors that say what would have worked."""

import json

import pytest
from helpers.commands import CliRunner, run

from llmppl import CachedTransformer, cli
from llmppl.decisions import choice, decide, fit_calibration
from llmppl.decisions.questions import questions_of_schema

STATE = "My card was charged twice. Refund me now!"
SCHEMA = {
    "$defs": {"Queue": {"enum": ["billing", "sales"]}},
    "properties": {
        "urgent": {"type": "boolean", "description": "Is it urgent?"},
        "queue": {"$ref": "#/$defs/Queue"},
        "stars": {"type": "integer", "minimum": 1, "maximum": 3},
        "topic": {"oneOf": [{"const": "card"}, {"type": "null"}]},
    },
}


@pytest.fixture
def mail(tmp_path):
    file = tmp_path / "mail.txt"
    file.write_text(f"{STATE}\n", encoding="utf-8")
    return str(file)


def rows(*arguments, text=None):
    """Return the JSON objects that the command prints."""
    result = CliRunner().invoke(cli.app, ["decide", *arguments, "--json"], input=text)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_answers_are_those_of_decide(mail):
    lm = CachedTransformer.from_pretrained()
    [row] = rows("Is it urgent?", "--state", mail)
    wanted = decide(lm, STATE, {"q": "Is it urgent?"})["q"]
    assert row["question"] == "Is it urgent?" and row["answer"] is wanted.best
    assert row["probabilities"] == pytest.approx({"true": wanted[True], "false": wanted[False]}, abs=1e-4)
    assert [row] == rows("Is it urgent?", text=STATE)
    [row] = rows("Which queue?", "--options", "billing, sales", "--state", mail)
    wanted = decide(lm, STATE, {"q": choice("Which queue?", ["billing", "sales"])})["q"]
    assert row["probabilities"] == pytest.approx(wanted.probabilities, abs=1e-4) and row["answer"] == wanted.best


def test_a_schema_asks_a_question_for_each_property(mail, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    found = rows("--schema", str(file), "--state", mail)
    assert [row["question"] for row in found] == [*SCHEMA["properties"]]
    keys = [["true", "false"], ["billing", "sales"], ["1", "2", "3"], ["card", "null"]]
    assert [[*row["probabilities"]] for row in found] == keys
    assert found == rows("--schema", json.dumps(SCHEMA), "--state", mail)
    asked = questions_of_schema(SCHEMA)
    assert [question.kind for question in asked.values()] == ["predicate", "choice", "score", "choice"]
    assert asked["urgent"].text == "Is it urgent?" and asked["queue"].text == "queue"
    wanted = decide(CachedTransformer.from_pretrained(), STATE, asked)
    assert found[2]["expected"] == pytest.approx(wanted["stars"].expected, abs=1e-4)


def test_examples_and_a_calibration_are_those_of_the_files(mail, tmp_path):
    lm = CachedTransformer.from_pretrained()
    pairs = [("The server is down!", True), ("See you next week.", False)]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps({"state": state, "label": label}) + "\n" for state, label in pairs))
    examples = [(state, {"Is it urgent?": label}) for state, label in pairs]
    questions = {"Is it urgent?": "Is it urgent?"}
    [row] = rows("Is it urgent?", "--state", mail, "--examples", str(file))
    wanted = decide(lm, STATE, questions, examples=examples)["Is it urgent?"]
    assert row["expected"] == pytest.approx(wanted[True], abs=1e-4)
    labelled = [(f"{state} {i}", labels) for i in range(10) for state, labels in examples]
    calibration = fit_calibration(lm, labelled, questions, examples=examples, progress=False)
    calibration.save(tmp_path / "c.json")
    [row] = rows("Is it urgent?", "--state", mail, "--examples", str(file), "--calibration", str(tmp_path / "c.json"))
    wanted = decide(lm, STATE, questions, examples=examples, calibration=calibration)["Is it urgent?"]
    assert row["expected"] == pytest.approx(wanted[True], abs=1e-4)


def test_a_table_goes_to_stdout_and_its_cost_to_stderr(mail):
    result = run("decide", "Is it urgent?", "--state", mail)
    assert result.exit_code == 0 and "Is it urgent?" in result.stdout and "confidence" in result.stdout
    assert "tokens" in result.stderr and "tokens" not in result.stdout


@pytest.mark.parametrize("arguments, said", [
    ([], "Give either a question or --schema"),
    (["Is it?", "--schema", "{}"], "Give either a question or --schema"),
    (["--schema", '{"properties": {}}', "--options", "a,b"], "--options are the answers to a question"),
    (["--schema", "{}"], 'a schema must have properties, as {"properties": {"urgent": {"type": "boolean"}}}, not {}'),
    (["--schema", '{"properties": {}}'], "a schema must have properties"),
    (["--schema", "{"], "Expecting property name"),
    (["--schema", '{"properties": {"a": true}}'], "the field 'a' of the schema must be an object"),
    (["--schema", '{"properties": {"a": {"type": "string"}}}'], "the field 'a' of the schema has no short list"),
    (["--schema", '{"properties": {"a": {"$ref": "#/x/y"}}}'], "'$ref': '#/x/y' leads nowhere"),
    (["--schema", '{"properties": {"a": {"$ref": "#/$defs/b/c"}}, "$defs": {"b": [1]}}'], "JSON schema: a $schema"),
    (["--schema", '{"properties": {"a": {"anyOf": [true]}}}'], "the field 'a' of the schema has no short list"),
    (["--schema", '{"properties": {"a": {"anyOf": 3}}}'], "anyOf"),
    (["--schema", '{"properties": {"a": {"enum": "abc"}}}'], "enum"),
    (["--schema", '{"properties": {"a": {"$ref": 3}}}'], "$ref"),
    (["--schema", '{"properties": {"a": {"type": "integer", "minimum": "1", "maximum": 3}}}'], "minimum"),
    (["--schema", '{"properties": {"a": {"type": "integer", "minimum": 0.5}}}'], "short list"),
    (["--schema", "no.json"], "no.json: No such file"),
    (["Is it?", "--options", "a,a"], "options must differ"),
    (["Is it?", "--options", "a,,b"], "an option must be a text with letters"),
    (["Is it?", "--state", "no.txt"], "'no.txt' does not exist"),
    (["Is it?", "--examples", "MAIL"], 'write {"state": ..., "label": ...} on each line'),
    (["Is it?", "--calibration", "MAIL"], "is no calibration that this version reads"),
])  # fmt: skip
def test_errors_say_what_would_have_worked(arguments, said, mail):
    arguments = [mail if each == "MAIL" else each for each in arguments]
    result = CliRunner().invoke(cli.app, ["decide", *arguments], input=STATE)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in " ".join(result.stderr.split())


def test_an_empty_text_is_an_error():
    result = CliRunner().invoke(cli.app, ["decide", "Is it urgent?"], input=" \n")
    assert result.exit_code == 2 and "give --state FILE" in result.stderr
