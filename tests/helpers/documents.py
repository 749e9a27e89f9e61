"""Python blocks of the README and of docs/."""

import re
from pathlib import Path
from typing import NamedTuple

from helpers.common import ROOT

DOCUMENTS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]

OPENING = re.compile(r"(?P<indent>[ \t]*)```[ ]*(?P<language>\w*)")
NOT_RUN = re.compile(r"\s*<!-- not run: .*\S.* -->\s*")
MODEL = re.compile(r"\s*<!-- model: (\S+) -->\s*")


class Block(NamedTuple):
    line: int                                       # of its first line of code, from 1
    code: str
    model: str | None = None                        # the name of the package's model that it wants


def python_blocks(path: Path, run: bool = True) -> list[Block]:
    """Return the ```python blocks of a file that run, or those that do not."""
    blocks, lines = [], path.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        if not (opening := OPENING.match(lines[i])):
            i += 1
            continue
        above = lines[i - 1] if i > 0 else ""
        model = MODEL.fullmatch(above)
        start = end = i + 1
        while end < len(lines) and lines[end].strip() != "```":
            end += 1
        assert end < len(lines), f"{path}:{i + 1}: this block is not closed"
        if opening["language"] in ("python", "py") and run != bool(NOT_RUN.fullmatch(above)):
            code = "\n".join(line.removeprefix(opening["indent"]) for line in lines[start:end])
            blocks.append(Block(start + 1, code, model and model[1]))
        i = end + 1
    return blocks
