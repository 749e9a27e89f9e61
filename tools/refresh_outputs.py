"""Refreshed outputs: run the python blocks of README.md and docs/*.md, and write their outputs and tables.

    python tools/refresh_outputs.py [FILE ...]

An output block is the fenced block after a line `<!-- output -->`. It belongs to the python block before it. A block
under `<!-- not run: reason -->` is skipped. A block under `<!-- model: smollm2 -->` is skipped if that model is not
installed; the tool then prints a line. `git diff` shows the changes.

`<!-- table: FILE NUMBER COLUMN ... -->` and `<!-- end -->` enclose a table of a file of benchmarks/results, with the
columns of these numbers, or all of them. `<!-- source: FILE -->` encloses its day, command and packages.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from llmppl.lm.engines.loading import packaged

ROOT = Path(__file__).resolve().parent.parent
PARTS = re.compile(
    r"(?:(?P<not_run><!-- not run: [^\n]*-->\n)|<!-- model: (?P<model>[\w-]+) -->\n)?"
    r"```(?P<language>python|py)\n(?P<code>.*?)^```$"
    r"|(?P<head><!-- output -->\n```\w*\n)(?P<output>.*?)(?P<tail>^```$)",
    re.DOTALL | re.MULTILINE,
)

TABLE = re.compile(r"<!-- table: (?P<file>\S+) (?P<number>\d+)(?P<columns>[ \d]*) -->\n.*?<!-- end -->", re.DOTALL)

SOURCE = re.compile(r"<!-- source: (?P<file>\S+) -->\n.*?<!-- end -->", re.DOTALL)


def table(match: re.Match[str]) -> str:
    """Return a table of a file of results as Markdown, with the lines that enclose it."""
    found = json.loads((ROOT / "benchmarks" / "results" / match["file"]).read_text(encoding="utf-8"))
    chosen = found["tables"][int(match["number"])]
    numbers = [int(each) for each in match["columns"].split()] or range(len(chosen["columns"]))
    lines = []
    for row in [chosen["columns"], *chosen["rows"]]:
        cells = [str(row[number]).replace("+-", "±") for number in numbers]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|---" * len(numbers) + "|")
    head = match[0].split("\n", 1)[0]
    return "\n".join([head, *lines, "<!-- end -->"])


def source(match: re.Match[str]) -> str:
    """Return the source of the tables of a file: its day, its command without folders of data, and its packages."""
    found = json.loads((ROOT / "benchmarks" / "results" / match["file"]).read_text(encoding="utf-8"))
    command = re.sub(r" --out \S+|\S*\.\./(\S+/)?(?=\w)", "", found["command"])
    packages = found["machine"].partition(", Python ")[2]
    text = f"`results/{match['file']}`, {found['date']}: `{command}`; Python {packages}."
    return "\n".join([match[0].split("\n", 1)[0], text, "<!-- end -->"])


def with_tables(text: str) -> str:
    """Return a document with the tables of results and their sources."""
    return SOURCE.sub(source, TABLE.sub(table, text))


def refreshed(text: str, path: Path) -> str:
    """Return `text`, the content of `path`, with new outputs for its own blocks."""
    module = ModuleType("document")
    sys.modules["document"] = module                    # gives the classes of the blocks a module
    printed: list[str | None] = []                      # by each block so far; None for a skipped block

    def part(match: re.Match[str]) -> str:
        line = text.count("\n", 0, match.start())
        if match["head"]:
            if not printed:
                raise SystemExit(f"{path}: an output block stands before any python block")
            if printed[-1] is None:
                return match[0]
            return match["head"] + printed[-1].rstrip("\n") + "\n" + match["tail"]
        printed.append(None)
        if match["not_run"] is not None:
            return match[0]
        if match["model"] is not None:
            try:
                packaged(match["model"])
            except ImportError as error:
                print(f"{path}:{line + 1}: left alone: {error}")
                return match[0]
        line = text.count("\n", 0, match.start("code"))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + match["code"], str(path), "exec"), module.__dict__)
        printed[-1] = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        return match[0]

    return with_tables(PARTS.sub(part, text))


def main() -> None:
    everything = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in [Path(name).resolve() for name in sys.argv[1:]] or everything:
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            new = refreshed(text, path)
            os.chdir(ROOT)
        if new != text:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'changed' if new != text else 'as it was'}", flush=True)


if __name__ == "__main__":
    main()
