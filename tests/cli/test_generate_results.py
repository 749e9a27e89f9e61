"""Tests of `llmppl results`: the summary of a file, and its exports."""

import json

import pytest
from helpers.tasks import everything, run_all
from typer.testing import CliRunner

from llmppl.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def path(tmp_path):
    run_all(tmp_path / "results.db", range(5), everything)
    return tmp_path / "results.db"


def test_results_shows_likeliest_texts_and_causes_of_failures(path):
    first, *rows = run("results", path).stdout.splitlines()
    assert first == f"{path}: 5 results, 1 failed"
    assert rows[2:4] == ["     0       -          -  KeyError: 'mine'", "     1       -          -  "]
    assert "no text is left; 2 at step 1: condition is false" in rows[4]
    assert [row.split()[:3] for row in rows[5:]] == [[index, "0.500", "0.00"] for index in "34"]


def test_results_exports_lines_of_JSON_and_a_table(path, tmp_path):
    pandas = pytest.importorskip("pandas")
    assert run("results", path, "--jsonl", tmp_path / "r.jsonl", "--csv", tmp_path / "r.csv").exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    frame = pandas.read_csv(tmp_path / "r.csv", keep_default_na=False)
    assert [line["index"] for line in lines] == sorted(set(frame["index"])) == [*range(5)]
    texts = [each["text"] for line in lines[3:] for each in line["particles"]]
    assert texts == frame["text"][frame["index"] > 2].tolist()


def test_results_shows_twenty_rows_and_counts_the_rest(tmp_path):
    run_all(tmp_path / "r.db", range(23))
    assert run("results", tmp_path / "r.db").stdout.endswith("\n... and 3 more: --jsonl and --csv write all\n")


def test_a_foreign_file_is_an_error(tmp_path):
    (tmp_path / "other").write_text("hello")
    assert run("results", tmp_path / "other").exit_code == 2
    assert run("results", tmp_path / "none").exit_code == 2
