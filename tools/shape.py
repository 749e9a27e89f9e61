"""Size, width and prose of a package, folder by folder.

    python tools/shape.py [--files] [FOLDER ...]

prints one line for each folder of a package (by default this one), or with `--files` for each file. Size is counted in
*code tokens*: the tokens of Python's tokenizer, without comments, docstrings, line ends and indentation. A *code line*
is neither blank, nor in a docstring, nor a comment alone. The columns are:

- files, lines, code lines, code tokens;
- code tokens in one code line (tokens/line);
- branches in one code line: each `if`, `for`, `while`, `try`, `with`, `except`, `and`/`or`, conditional expression, and
  each `for` of a comprehension;
- conditional expressions (`a if x else b`) and comprehensions in 1,000 code lines;
- code lines above 100 characters (wide);
- docstrings that begin with a question word, and relative "what" in 1,000 words of docstrings.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
WIDE = 100                                              # characters in a line
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.BoolOp, ast.IfExp, ast.comprehension, ast.ExceptHandler, ast.With)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
QUESTIONS = ("What", "Whether", "Which", "How", "If", "When", "Where", "Who")
RELATIVE = re.compile(
    r"\bwhat (is|are|was|were|a|an|the|it|they|has|have|comes?|may|can|must|no|ends?|nests?|follows?|leads?|others?)\b"
)
HEADER = "files  lines   code  tokens  tokens/line  branches/line  conditional  comprehensions  wide  questions  what"


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node, text


def count_tokens(text: str, omitted: set[int]) -> int:
    """Count the code tokens of a source, except for those on the lines in `omitted` (numbers from 1)."""
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in omitted:
            count += 1
    return count


def shape(text: str) -> Counter[str]:
    """Return the counts of one file, from its source."""
    found: Counter[str] = Counter(files=1)
    tree = ast.parse(text)
    documented: set[int] = set()
    for node, words in docstrings(tree):
        first = node.body[0]                            # type: ignore[attr-defined]
        documented.update(range(first.lineno, first.end_lineno + 1))
        found["docstrings"] += 1
        found["questions"] += words.split()[0].strip('`"(') in QUESTIONS
        found["words"] += len(words.split())
        found["whats"] += len(RELATIVE.findall(words))
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        found["lines"] += 1
        if stripped and not stripped.startswith("#") and number not in documented:
            found["code"] += 1
            found["wide"] += len(line) > WIDE
    found["tokens"] = count_tokens(text, documented)
    for node in ast.walk(tree):
        found["branches"] += isinstance(node, BRANCHES)
        found["conditionals"] += isinstance(node, ast.IfExp)
        found["comprehensions"] += isinstance(node, COMPREHENSIONS)
    return found


def shapes(package: Path, depth: int = 1) -> dict[str, Counter[str]]:
    """Sum the counts of the files in each folder, to a depth of `depth` folders; "" is the whole package."""
    found: dict[str, Counter[str]] = {"": Counter()}
    for path, counts in file_shapes(package).items():
        folder = "/".join(path.parts[:-1][:depth]) or "."
        found.setdefault(folder, Counter()).update(counts)
        found[""].update(counts)
    return found


@functools.cache
def file_shapes(package: Path) -> dict[Path, Counter[str]]:
    """Return the counts of each file of a package, by its path inside it."""
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package): shape(path.read_text(encoding="utf-8")) for path in paths}


def width(counts: Counter[str]) -> dict[str, float]:
    """Return the measures of width: tokens and branches in a code line, and idioms in 1,000 code lines."""
    code = max(counts["code"], 1)
    return {
        "tokens/line": counts["tokens"] / code,
        "branches/line": counts["branches"] / code,
        "conditionals": 1000 * counts["conditionals"] / code,
        "comprehensions": 1000 * counts["comprehensions"] / code,
    }


def row(counts: Counter[str]) -> str:
    wide = width(counts)
    questions = 100 * counts["questions"] / max(counts["docstrings"], 1)
    whats = 1000 * counts["whats"] / max(counts["words"], 1)
    return (
        f"{counts['files']:5} {counts['lines']:6,} {counts['code']:6,} {counts['tokens']:7,} "
        f"{wide['tokens/line']:12.2f} {wide['branches/line']:14.3f} {wide['conditionals']:12.1f} "
        f"{wide['comprehensions']:15.1f} {counts['wide']:5} {questions:9.0f}% {whats:5.1f}"
    )


def main(arguments: list[str]) -> None:
    packages = [each for each in arguments if each != "--files"]
    if not packages:
        packages = [str(Path(__file__).resolve().parent.parent / "llmppl")]
    for package in packages:
        if "--files" in arguments:
            found = {str(path): counts for path, counts in file_shapes(Path(package)).items()}
        else:
            found = {folder or "all": counts for folder, counts in shapes(Path(package), 2).items()}
        print(f"{package}\n{'':44} {HEADER}")
        for name, counts in sorted(found.items(), key=lambda item: item[1]["tokens"]):
            print(f"{name:44} {row(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
