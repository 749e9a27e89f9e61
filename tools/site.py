"""Pages of the site that are not in docs/: a hook of mkdocs.

The notebooks of examples/ become pages, with their outputs, and some documents of other folders are copied. Links
between all of these change with their places. The page of errors lists the messages that the source contains. `Lists`
is an extension of griffe, which reads the docstrings for the reference.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
COPIED = {"benchmarks/README.md": "benchmarks.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
ERRORS = """---
hide: [toc]
---

# Errors

The errors of llmppl. The search of the site finds one by its words. "…" stands for a value,
and a message says what would have worked. For a run without particles, see [all particles died](all-died.md)."""
NOTEBOOK = re.compile(r"\]\((?:\.\./examples/)?(\w+)\.ipynb")
ATTRIBUTE = re.compile(r"^(\w+(?:, \w+)*) : (?=\S.*)", re.MULTILINE)
SECTION = re.compile(r"^\w[\w ]*\n-{3,}$", re.MULTILINE)


class Lists(griffe.Extension):
    """Attributes that a docstring lists before its sections, as "name : type, meaning", become a list."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            end = found.start() if (found := SECTION.search(text)) else len(text)
            obj.docstring.value = ATTRIBUTE.sub(r"- `\1` : ", text[:end]) + text[end:]


def one_line(html: str) -> str:
    """Return HTML without line breaks, since a blank line would end it in Markdown. Scripts and texts keep theirs."""
    return '<div style="overflow-x: auto">' + html.replace("\n", "&#10;") + "</div>"


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook and their outputs, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            html = "".join(data.get("text/html", ""))
            parts.append(one_line(html) if html else f"```\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def message(node: ast.expr) -> str:
    """Return the text of a literal, an f-string or a sum of these, with "…" for values; "" for other expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join(message(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def errors(path: Path) -> Iterator[str]:
    """Yield the errors and warnings of a file, each as a heading, which the search of the site finds."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args and (call is not node or ast.unparse(call.func) == "warnings.warn"):
            text, kind = message(call.args[0]), ast.unparse(call.func)
            if len(re.findall("[a-z]+", text)) > 3 and kind[0].isupper() | (call is node):
                yield f"#### ``{' '.join(text.split())}``\n\n{'warning' if call is node else kind}"


def error_page() -> str:
    """Return the messages of each folder of the package, as Markdown."""
    parts = [ERRORS]
    for folder in sorted((ROOT / "llmppl").iterdir()):
        if found := {each for path in folder.rglob("*.py") for each in errors(path)}:
            parts += [f"## `llmppl.{folder.name}`", "\n\n".join(sorted(found))]
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks, the documents of other folders, and the page of errors."""
    for path, page in COPIED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\((\.\./)?docs/", "](", text)))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        text = re.sub(r"\]\(\.\./docs/", "](", notebook_page(path))
        files.append(File.generated(config, f"{path.stem}.md", content=text))
    files.append(File.generated(config, "errors.md", content=error_page()))
    return files


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Lead links to copied documents and notebooks to their pages."""
    for path, name in COPIED.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(path)}", f"]({name}", markdown)
    return NOTEBOOK.sub(r"](\1.md", markdown)
