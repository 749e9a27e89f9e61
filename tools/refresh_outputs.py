"""Refreshed outputs: run the python blocks of README.md and docs/*.md, and write their outputs below them.

    python tools/refresh_outputs.py [FILE ...]

An output block is the fenced block after a line `<!-- output -->`. It belongs to the python block before it. A block
under `<!-- not run: reason -->` is skipped. A block under `<!-- model: smollm2 -->` is skipped if that model is not
installed; the tool then prints a line. `git diff` shows the changes.
"""

import contextlib
import io
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

    return PARTS.sub(part, text)


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
