"""Every ```python block of README.md and docs/*.md runs: the blocks of a file in order, in one namespace.

A block right below a line `<!-- not run: reason -->` is skipped.
"""

import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]

OPENING = re.compile(r"(?P<indent>[ \t]*)```[ ]*(?P<language>\w*)")
NOT_RUN = re.compile(r"\s*<!-- not run: .*\S.* -->\s*")


class Block(NamedTuple):
    line: int                                       # of its first line of code, from 1
    code: str


def python_blocks(path: Path) -> list[Block]:
    """The ```python blocks of a file that are to be run."""
    blocks, lines = [], path.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        if not (opening := OPENING.match(lines[i])):
            i += 1
            continue
        skipped = i > 0 and NOT_RUN.fullmatch(lines[i - 1])
        start = end = i + 1
        while end < len(lines) and lines[end].strip() != "```":
            end += 1
        assert end < len(lines), f"{path}:{i + 1}: this block is not closed"
        if opening["language"] in ("python", "py") and not skipped:
            code = "\n".join(line.removeprefix(opening["indent"]) for line in lines[start:end])
            blocks.append(Block(start + 1, code))
        i = end + 1
    return blocks


def run_document(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks; the first that raises fails the test, with the file, the line and the traceback below it."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)        # so that its classes have a module
    for block in python_blocks(path):
        try:
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = frames[0].lineno if frames else getattr(error, "lineno", block.line)     # none: it did not compile
            pytest.fail(f"{path}:{line}: {''.join(traceback.format_exception(error))}", pytrace=False)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_blocks_of_a_document_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_document(path, monkeypatch)


def write_document(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "document.md"
    path.write_text("\n".join(lines))
    return path


def test_blocks_share_a_namespace_in_order_and_other_languages_are_left_alone(tmp_path, monkeypatch):
    path = write_document(
        tmp_path, "```python", "x = 1", "```", "```bash", "exit 1", "```", "```python", "assert x == 1", "```"
    )
    assert [block.line for block in python_blocks(path)] == [2, 8]
    run_document(path, monkeypatch)


def test_a_block_marked_not_run_is_skipped_if_a_reason_is_given(tmp_path):
    block = ["```python", "1 / 0", "```"]
    assert python_blocks(write_document(tmp_path, "<!-- not run: needs a network -->", *block)) == []
    assert len(python_blocks(write_document(tmp_path, "<!-- not run: -->", *block))) == 1


def test_an_indented_block_runs(tmp_path, monkeypatch):
    path = write_document(tmp_path, "1. so:", "", "   ```python", "   if True:", "       x = 1", "   ```")
    assert python_blocks(path) == [Block(4, "if True:\n    x = 1")]
    run_document(path, monkeypatch)


@pytest.mark.parametrize("wrong, error", [("1 / 0", "ZeroDivisionError"), ("x = = 1", "SyntaxError")])
def test_a_failing_block_is_named_by_file_and_line(tmp_path, monkeypatch, wrong, error):
    path = write_document(tmp_path, "# Title", "", "```python", "x = 1", wrong, "```")
    with pytest.raises(pytest.fail.Exception, match=rf"document\.md:5: (?s:.*){error}"):
        run_document(path, monkeypatch)
