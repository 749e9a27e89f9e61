"""Every example opens with what it shows, and runs: `python examples/NAME.py --quick`.

One whose `--lm` has `default="smollm2"` is skipped where the package of that model is not installed, one that imports
`llmppl.ray` where Ray is not.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import wants_model, wants_ray

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)


@each_example
def test_an_example_opens_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path.name}: say first what it shows"


@each_example
def test_an_example_runs(path, tmp_path):
    code = path.read_text(encoding="utf-8")
    if model := re.search(r'"--lm",.*default="(\w+)"', code):
        wants_model(model[1])
    if re.search("^import llmppl.ray$", code, flags=re.M):
        wants_ray()
    command = [sys.executable, str(path), "--quick"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
