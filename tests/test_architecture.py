"""The house is as docs/architecture.md and CONTRIBUTING.md say: what they name exists, and no room is too large."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from test_floors import FOLDERS

import llmppl

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llmppl"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(PACKAGE.rglob("*.py"))


def defined(tree: ast.Module) -> set[str]:
    """Names that a file defines: `f`, `C`, `C.method`, `C.attribute`; those that it imports are not among them."""

    def names(body: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                inner = node.body if isinstance(node, ast.ClassDef) else []
                found |= names(inner, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return names(tree.body, "")


def places(text: str) -> list[tuple[str, str]]:
    """(file, name) of each code span `folder/file.py: name, other`, and (file, "") of each `folder/file.py`."""
    found = []
    for span in re.findall(r"`(\w+(?:/\w+)*\.py(?:: [^`]+)?)`", text):
        file, _, names = span.partition(": ")
        found += [(file, name) for name in names.split(", ")] if names else [(file, "")]
    return found


def test_what_the_document_names_exists():
    missing, named = [], places(DOCUMENT)
    for file, name in named:
        base = ROOT if file.startswith(("tests/", "tools/", "benchmarks/", "examples/")) else PACKAGE
        if not (base / file).is_file():
            missing.append(file)
        elif name and name not in defined(ast.parse((base / file).read_text(encoding="utf-8"))):
            missing.append(f"{file}: {name}")
    assert missing == []
    assert len(named) > 60


def test_a_place_that_does_not_exist_would_be_found(tmp_path):
    assert places("see `lm/cache.py: Trie, Node.text` and `runtime.py`") == [
        ("lm/cache.py", "Trie"), ("lm/cache.py", "Node.text"), ("runtime.py", ""),
    ]  # fmt: skip
    code = "import os\nX: int = 1\nclass A:\n    y = 2\n    def f(self):\n        def g(): pass\n"
    assert defined(ast.parse(code)) == {"X", "A", "A.y", "A.f"}


def test_the_document_lists_the_folders_in_their_order():
    table = re.findall(r"^\| `([a-z]+)/`", DOCUMENT, flags=re.M)
    assert table == [folder for folder in FOLDERS if (PACKAGE / folder).is_dir()]
    assert sorted(table) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_no_room_is_too_large(path):
    text = path.read_text(encoding="utf-8")
    large = [f"{text.count(chr(10))} lines"] if text.count("\n") > 450 else []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 300:
            large.append(f"class {node.name}, {node.end_lineno - node.lineno + 1} lines")
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            own = [each for each in arguments if each.arg not in ("self", "cls")]
            if len(own) > 8:
                large.append(f"{node.name} of {len(own)} parameters")
    assert large == []


def test_the_citation_and_the_package_name_the_same_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)
    assert cited == project["version"] == llmppl.__version__


def test_every_python_that_the_package_supports_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [each.rsplit(" ", 1)[1] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", workflow, flags=re.M)
    assert re.findall(r'"([\d.]+)"', matrix) == named
    assert "make PYTHON=python test" in workflow
