"""The benchmark for GPUs runs whole on a CPU, with tiny shapes, and its file has every cell and exact answers."""

import importlib
import json
import math
import sys

import pytest
from helpers.common import ROOT

NUM_CELLS = 2 * 2 * (3 + 2)                             # N, prompts; the methods without a schema and with one


@pytest.fixture(scope="module")
def gpu():
    sys.path.append(str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("gpu")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def file(gpu, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    gpu.main(["--dry-run", "--out", str(path)])
    return path


def test_a_dry_run_measures_every_cell(file):
    results = json.loads(file.read_text())
    assert results["left_out"] == [] and len(results["cells"]) == NUM_CELLS
    for cell in results["cells"]:
        assert math.isfinite(cell["first_ms"]) and cell["step_ms"] > 0
        if cell["method"] != "generate":
            assert 0 <= cell["python_share"] <= 1 and 0 < cell["rows_a_step"] <= 9
    exact = results["exactness"]
    assert abs(exact["mean_z_hat_over_z"] - 1) < 5 * exact["standard_error"]


def test_the_tables_of_a_file_have_a_row_for_each_cell(gpu, file, capsys):
    gpu.main(["--table", str(file)])
    assert capsys.readouterr().out.count("\ntiny ") == NUM_CELLS


def test_cells_that_the_time_does_not_reach_are_listed(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "exactness", lambda device, runs: {"mean_z_hat_over_z": 1.0, "standard_error": 0.0})
    gpu.main(["--dry-run", "--minutes", "0", "--out", str(tmp_path / "gpu.json")])
    assert len(json.loads((tmp_path / "gpu.json").read_text())["left_out"]) == NUM_CELLS


def test_without_a_file_the_command_says_what_works(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "give --out FILE" in capsys.readouterr().err
