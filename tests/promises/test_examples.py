"""Every example opens with what it shows, and runs: `python examples/NAME.py --quick`; so does every notebook.

One whose `--lm` has `default="smollm2"` is skipped where the package of that model is not installed, one that imports
`llmppl.tasks.ray` where Ray is not.
"""

import ast
import json
import re
import subprocess
import sys

import pytest
from helpers.common import HANG, ROOT, wants_model, wants_ray

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)


@each_example
def test_an_example_opens_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path.name}: say first what it shows"


@each_example
def test_an_example_runs(path, tmp_path):
    code = path.read_text(encoding="utf-8")
    if model := re.search(r'"--lm",.*default="(\w+)"', code):
        wants_model(model[1])
    if re.search("^import llmppl.tasks.ray$", code, flags=re.M):
        wants_ray()
    command = [sys.executable, str(path), "--quick"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# outside of a notebook show() writes a file and opens it in the browser
QUIET = "import tempfile, webbrowser; webbrowser.open, tempfile.tempdir = print, '.'\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_contains_its_outputs(path, tmp_path):
    pytest.importorskip("pandas", reason="pandas is not installed")
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert len(kinds) == len(cells) and {*kinds} == {"execute_result", "display_data"}, f"{path.name}: run it again"
    code = QUIET + "\n".join("".join(cell["source"]) for cell in cells)
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, result.stderr
