"""Draw docs/architecture.svg: the folders of the package in their order, and the imports between them.

    python tools/picture.py

A box is a folder; its text is the first sentence of the folder's docstring. A folder imports only from folders
above it. A dot in column j of row i means that folder i imports from folder j.
"""

from __future__ import annotations

import ast
import html
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmppl"
FOLDERS = [
    "support", "report", "constraints/vocabulary", "constraints/masks", "constraints/automata", "constraints/json",
    "constraints/lark", "distributions", "lm", "lm/engines", "models", "inference",
    "inference/resuming", "queries", "tasks", "decisions", "cli",
]  # fmt: skip
ROW, LEFT, COLUMN, WIDTH = 30, 200, 18, 1130            # pixels
COLOURS = {"constraints": "#dbeafe", "lm": "#dcfce7", "models": "#fef3c7", "inference": "#fce7f3"}


def folder_of(file: Path) -> str | None:
    """Return the folder of the picture that holds a file of the package."""
    inside = file.relative_to(PACKAGE).as_posix()
    return next((each for each in reversed(FOLDERS) if inside.startswith(each + "/") or inside == each), None)


def imported(folder: str) -> set[str]:
    """Return the other folders that the files of `folder` import from."""
    found = set()
    for path in (PACKAGE / folder).rglob("*.py"):
        if folder_of(path) != folder:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmppl."):
                found.add(folder_of(PACKAGE / node.module.removeprefix("llmppl.").replace(".", "/")))
    return {each for each in found if each and each != folder}


def sentence(folder: str) -> str:
    """Return the first sentence of a folder's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def picture() -> str:
    """Return the drawing as SVG."""
    grid = len(FOLDERS) * COLUMN
    lines = []
    for row, folder in enumerate(FOLDERS):
        y = 10 + row * ROW
        colour = COLOURS.get(folder.split("/")[0], "#f3f4f6")
        box = f'width="{LEFT - 15}" height="{ROW - 5}" rx="4" fill="{colour}" stroke="#9ca3af"'
        lines.append(f'<rect x="5" y="{y}" {box}/>')
        lines.append(f'<text x="13" y="{y + 17}" font-family="monospace">{folder}/</text>')
        lines.append(f'<text x="{LEFT + grid + 12}" y="{y + 17}">{html.escape(sentence(folder))}</text>')
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + row * COLUMN}" y1="{y + 12}" y2="{y + 12}" stroke="#e5e7eb"/>')
        used = imported(folder)
        for column, other in enumerate(FOLDERS[:row]):
            if other in used:
                lines.append(f'<circle cx="{LEFT + column * COLUMN + 9}" cy="{y + 12}" r="4" fill="#374151"/>')
        lines.append(f'<circle cx="{LEFT + row * COLUMN + 9}" cy="{y + 12}" r="5" fill="none" stroke="#9ca3af"/>')
    height = 15 + len(FOLDERS) * ROW
    font = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>'
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *lines, "</svg>\n"])


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(picture(), encoding="utf-8")
