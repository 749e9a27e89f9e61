"""Imports go down: a file imports from its own folder and from those before it in `FOLDERS`, and no files of a folder
import one another in a circle. What importing a folder *loads* is looked at in a fresh process.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import llmppl

PACKAGE = Path(__file__).parent.parent / "llmppl"

FOLDERS = [
    "arguments", "exclusive", "growing", "shared", "runtime", "display", "masks", "languages", "grammar", "tokens",
    "distributions", "lm", "models", "inference", "testing", "queries", "trace", "ray", "cli", "__main__", "__init__",
]  # fmt: skip
STRANGERS = {"inference": ["languages", "masks", "grammar", "tokens", "lm"]}       # folder: what it does not know
HEAVY = ["accelerate", "llguidance", "ray", "rich", "torch", "transformers", "typer"]
LIGHT = ["languages", "masks", "grammar", "tokens", "distributions", "lm", "models", "inference", "queries", "trace",
         "ray"]  # fmt: skip


def module_name(path: Path, package: Path) -> str:
    """`lm.cache` for lm/cache.py, `lm` for lm/__init__.py, `__init__` for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path, package: Path) -> list[tuple[int, str]]:
    """(line, module) of every import from the package in a file, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, package.parent / alias.name.replace(".", "/")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if node.level else package.parent
            origin = start / (node.module or "").replace(".", "/")
            for alias in node.names:                # `from origin import name`: a submodule, or a name in origin
                target = origin / alias.name
                is_module = target.with_suffix(".py").exists() or target.is_dir()
                found.append((node.lineno, target if is_module else origin))
    inside = [(line, target) for line, target in found if target.is_relative_to(package)]
    return [(line, ".".join(target.relative_to(package).parts) or "__init__") for line, target in inside]


def complaint(name: str, target: str) -> str | None:
    """Why the module `name` may not import `target`, or None if it may."""
    folder, other = name.split(".")[0], target.split(".")[0]
    if other in STRANGERS.get(folder, []):
        return f"{folder} does not know {other}"
    if other not in FOLDERS:
        return "no such folder in the list of tests/test_floors.py"
    if folder == other:
        return "a file imports from the files of its own folder" if target == folder and name != folder else None
    if FOLDERS.index(other) >= FOLDERS.index(folder):
        return f"{other} comes after {folder}"
    return None


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """Modules that import one another in a circle, the first of them again at the end, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        done.add(name)
        return next((found for other in sorted(edges.get(name, ())) if (found := visit(other, [*path, name]))), None)

    return next((found for name in sorted(edges) if (found := visit(name, []))), None)


def violations(package: Path) -> list[str]:
    """One line for every import that goes up or to a stranger, for a folder without a place, and for a circle."""
    found, edges = [], {}
    for path in sorted(package.rglob("*.py")):
        name, shown = module_name(path, package), path.relative_to(package.parent)
        if name.split(".")[0] not in FOLDERS:
            found.append(f"{shown} is in no folder that tests/test_floors.py lists: give it a place in FOLDERS")
            continue
        targets = imports(path, package)
        edges[name] = {target for _, target in targets if target.split(".")[0] == name.split(".")[0]}
        for line, target in targets:
            why = complaint(name, target)
            if why:
                found.append(f"{shown}:{line} imports {target}: {why}")
    if around := circle(edges):
        found.append("a circle: " + " imports ".join(around))
    return found


def test_imports_go_down_the_floors():
    assert not (found := violations(PACKAGE)), "\n".join(found)


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))


def test_the_names_of_the_package_are_the_same_for_type_checkers():
    typed = {
        (alias.name, node.module.removeprefix("llmppl."))
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("llmppl.")
        for alias in node.names
    }
    assert typed == set(llmppl._FOLDER.items())
    assert all(getattr(llmppl, name) for name in llmppl.__all__)


@pytest.mark.parametrize("folder", LIGHT)
def test_importing_a_folder_loads_nothing_heavy(folder):
    assert loaded(f"import llmppl.{folder}").isdisjoint(HEAVY)


def test_a_program_and_inference_load_nothing_heavy():
    assert loaded("from llmppl import Model, smc_steer, Bernoulli").isdisjoint(HEAVY)
    assert loaded("from llmppl import *").isdisjoint(HEAVY)


def write_package(tmp_path: Path, files: dict[str, str]) -> Path:
    """A package `llmppl` with a few empty files, and `files` on top."""
    empty = dict.fromkeys(["__init__.py", "tokens/__init__.py", "tokens/vocabulary.py", "lm/__init__.py", "lm/cache.py",
                           "lm/transformer.py", "models/__init__.py", "models/model.py", "runtime.py"], "")  # fmt: skip
    for name, text in (empty | files).items():
        path = tmp_path / "llmppl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "llmppl"


@pytest.mark.parametrize(
    "file, text",
    [
        ("models/model.py", "from llmppl.tokens.vocabulary import Vocabulary"),
        ("models/model.py", "from ..lm import cache, transformer"),
        ("models/model.py", "import llmppl.lm.transformer"),
        ("lm/transformer.py", "from . import cache"),
        ("lm/transformer.py", "from llmppl.tokens import Vocabulary"),
        ("tokens/__init__.py", "from llmppl.tokens.vocabulary import Vocabulary"),
        ("cli/main.py", "from llmppl.models import model\nimport torch"),
        ("__init__.py", "from .models.model import Model"),
    ],
)
def test_an_import_from_above_in_the_list_or_from_the_own_folder_passes(tmp_path, file, text):
    assert violations(write_package(tmp_path, {file: text})) == []


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("tokens/vocabulary.py", "from llmppl.models.model import Model", "imports models.model: models comes"),
        ("tokens/vocabulary.py", "import llmppl.models.model as m", "vocabulary.py:1 imports models.model"),
        ("tokens/vocabulary.py", "from ..lm import cache", "vocabulary.py:1 imports lm.cache: lm comes after tokens"),
        ("runtime.py", "from . import lm", "runtime.py:1 imports lm: lm comes after runtime"),
        ("lm/cache.py", "from llmppl import Model", "cache.py:1 imports __init__"),
        ("lm/cache.py", "from llmppl.lm import Trie", "imports lm: a file imports from the files of its own"),
        ("lm/cache.py", "def f():\n    from ..models.model import Model", "cache.py:2 imports models.model"),
        ("lm/cache.py", "if TYPE_CHECKING:\n    import llmppl.models.model", "cache.py:2 imports models.model"),
        ("inference/smc.py", "from ..tokens.vocabulary import Vocabulary", "inference does not know tokens"),
        ("grammar/masks.py", "from ..tokens.vocabulary import Vocabulary", "tokens comes after grammar"),
        ("settings/config.py", "", "settings/config.py is in no folder that tests/test_floors.py lists"),
    ],
)  # fmt: skip
def test_an_import_that_breaks_a_rule_is_named(tmp_path, file, text, message):
    (found,) = violations(write_package(tmp_path, {file: text}))
    assert message in found


def test_a_circle_within_a_folder_is_named(tmp_path):
    files = {"lm/cache.py": "from .hf import load", "lm/hf.py": "def f():\n    from .cache import Trie"}
    assert violations(write_package(tmp_path, files)) == ["a circle: lm.cache imports lm.hf imports lm.cache"]
