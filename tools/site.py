"""Pages of the site that are not in docs/: a hook of mkdocs.

The notebooks of examples/ become pages, with their outputs, its programs one page, and some documents of other folders
are copied. Links between all of these change with their places, and the name of a program becomes a link. `Lists` is an
extension of griffe, which reads the docstrings for the reference.
"""

import ast
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
COPIED = {"benchmarks/README.md": "benchmarks.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
EXAMPLE = re.compile(r"`examples/(\w+)\.py( [^`]*)?`")
NOTEBOOK = re.compile(r"\]\((?:\.\./examples/)?(\w+)\.ipynb")
ATTRIBUTE = re.compile(r"^(\w+(?:, \w+)*) : (?=\S.*)", re.MULTILINE)
SECTION = re.compile(r"^\w[\w ]*\n-{3,}$", re.MULTILINE)


class Lists(griffe.Extension):
    """Attributes that a docstring lists before its sections, as "name : type, meaning", become a list.

    A function has one signature: the overloads, which are for type checkers, are left out.
    """

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.is_function:
            obj.overloads = None
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


def examples_page() -> str:
    """Return the programs of examples/ as Markdown, each with its description above its code."""
    parts = ["# Examples", "Complete programs: `python examples/NAME.py --quick` runs one in seconds."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        description = ast.get_docstring(ast.parse(source)) or ""
        code = source.split('"""', 2)[2].strip()
        parts += [f"## {path.stem}", description, f"```python\n{code}\n```"]
    return "\n\n".join(parts) + "\n"


def on_config(config: Any) -> Any:
    """Show the version of the package beside its name."""
    config.site_name = f"llmppl {version('llmppl-smc')}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks, the programs and the documents of other folders."""
    files.append(File.generated(config, "examples.md", content=examples_page()))
    for path, page in COPIED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\((\.\./)?docs/", "](", text)))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        text = re.sub(r"\]\(\.\./docs/", "](", notebook_page(path))
        files.append(File.generated(config, f"{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Lead links to copied documents and notebooks to their pages."""
    for path, name in COPIED.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(path)}", f"]({name}", markdown)
    markdown = EXAMPLE.sub(r"[\g<0>](examples.md#\1)", markdown)
    return NOTEBOOK.sub(r"](\1.md", markdown)


def on_page_content(html: str, **page: Any) -> str:
    """Leave the default of a parameter empty if the signature has none: options of a TypedDict are not required."""
    return html.replace("<em>required</em>", "")
