"""Size, density and prose of a package, folder by folder.

    python tools/shape.py [FOLDER ...]

prints one line for each folder of a package (by default this one). The columns are files, lines, code lines, branches
per code line, the share of docstrings that begin with a question word, and relative "what" per 1,000 docstring words.
Examples of docstrings are not counted. A *code line* is neither blank, nor in a docstring, nor a comment alone. A
*branch* is an `if`, `for`, `while`, `try`, `with`, `except`, `and`/`or`, conditional expression, or the `for` of a
comprehension.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.BoolOp, ast.IfExp, ast.comprehension, ast.ExceptHandler, ast.With)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
QUESTIONS = ("What", "Whether", "Which", "How", "If", "When", "Where", "Who")
EXAMPLES = re.compile(r"\n\n *Examples\n")
RELATIVE = re.compile(
    r"\bwhat (is|are|was|were|a|an|the|it|they|has|have|comes?|may|can|must|no|ends?|nests?|follows?|leads?|others?)\b"
)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node, clean=False)):
            yield node, text


def shape(text: str) -> Counter[str]:
    """Count the lines, code lines, branches, docstrings and words of one file."""
    tree, lines = ast.parse(text), text.split("\n")
    omitted = {i for i, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    found: Counter[str] = Counter(files=1, lines=text.count("\n"))
    for node, words in docstrings(tree):
        omitted.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))     # type: ignore[attr-defined]
        found["docstrings"] += 1
        above, examples = (EXAMPLES.split(words, 1) + [""])[:2]
        found["lines"] -= examples.count("\n") + 2 + ("\n" not in above) if examples else 0
        found["questions"] += words.split()[0].strip('`"(') in QUESTIONS
        found["words"] += len(words.split())
        found["whats"] += len(RELATIVE.findall(words))
    found["code"] = len(lines) - len(omitted)
    found["branches"] = sum(isinstance(node, BRANCHES) for node in ast.walk(tree))
    return found


def shapes(package: Path, depth: int = 1) -> dict[str, Counter[str]]:
    """Sum the counts of the files in each folder, to a depth of `depth` folders; "" is the whole package."""
    found: dict[str, Counter[str]] = {"": Counter()}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts[:-1]
        counts = shape(path.read_text(encoding="utf-8"))
        found.setdefault("/".join(parts[:depth]) or ".", Counter()).update(counts)
        found[""].update(counts)
    return found


def main(packages: list[str]) -> None:
    for package in packages or [str(Path(__file__).resolve().parent.parent / "llmppl")]:
        print(f"{package}\n{'folder':24} files  lines   code  branches/code  questions  what/1,000 words")
        for folder, each in sorted(shapes(Path(package), 2).items(), key=lambda item: item[1]["lines"]):
            density = each["branches"] / max(each["code"], 1)
            questions = 100 * each["questions"] / max(each["docstrings"], 1)
            whats = 1000 * each["whats"] / max(each["words"], 1)
            sizes = f"{each['files']:5} {each['lines']:6,} {each['code']:6,}"
            row = f"{sizes} {density:14.3f} {questions:9.0f}% {whats:17.1f}"
            print(f"{folder or 'all':24} {row}")


if __name__ == "__main__":
    main(sys.argv[1:])
