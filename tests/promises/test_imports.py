"""Imports follow the order of folders: a file imports from its own folder and from those before it in `FOLDERS`.

The files of a folder do not import one another in a circle. A fresh process shows the modules that a folder loads.
"""

import ast
import graphlib
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.common import ROOT
from helpers.folders import FOLDERS

PACKAGE = ROOT / "llmppl"

FORBIDDEN = {"inference": ["constraints", "lm"]}        # besides the order; `inference.resuming` is excepted
HEAVY = ["accelerate", "llguidance", "ray", "rich", "torch", "transformers", "typer"]
LIGHT = ["support", "report", "constraints", "distributions", "lm", "models", "inference", "queries", "tasks",
         "tasks.ray", "decisions"]  # fmt: skip


def folder_of(module: str) -> str | None:
    """Return the longest entry of `FOLDERS` that contains a module."""
    return max((each for each in FOLDERS if f"{module}.".startswith(f"{each}.")), key=len, default=None)


def module_name(path: Path, package: Path) -> str:
    """Return `lm.cache` for lm/cache.py, `lm` for lm/__init__.py, `__init__` for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path, package: Path) -> list[tuple[int, str]]:
    """Return (line, module) of every import from the package in a file, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, package.parent / alias.name.replace(".", "/")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if node.level else package.parent
            origin = start / (node.module or "").replace(".", "/")
            targets = [origin / alias.name for alias in node.names]         # a submodule, or a name in origin
            found += [(node.lineno, each if each.with_suffix(".py").exists() or each.is_dir() else origin)
                      for each in targets]  # fmt: skip
    inside = [(line, target.relative_to(package)) for line, target in found if target.is_relative_to(package)]
    return [(line, ".".join(target.parts) or "__init__") for line, target in inside]


def complaint(name: str, target: str) -> str | None:
    """Return why the module `name` may not import `target`, or None if it may."""
    folder, other = folder_of(name), folder_of(target)
    if other is None:
        return "no such folder in FOLDERS"
    if other.split(".")[0] in FORBIDDEN.get(folder, []) and not name.startswith("inference.resuming"):
        return f"{folder} does not know {other}"
    if folder == other:
        return "a file imports from the files of its own folder" if target == folder and name != folder else None
    return f"{other} comes after {folder}" if FOLDERS.index(other) >= FOLDERS.index(folder) else None


def violations(package: Path) -> list[str]:
    """Return a line for every import that goes up or to a stranger, and for a circle within a folder."""
    found, edges = [], {}
    for path in sorted(package.rglob("*.py")):
        name, targets = module_name(path, package), imports(path, package)
        edges[name] = {target for _, target in targets if folder_of(target) == folder_of(name)}
        whys = [(line, target, complaint(name, target)) for line, target in targets if folder_of(name)]
        found += [f"{path.relative_to(package)} is in no folder of FOLDERS"] * (folder_of(name) is None)
        found += [f"{path.relative_to(package)}:{line} imports {target}: {why}" for line, target, why in whys if why]
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        found.append("a circle: " + " imports ".join(error.args[1][::-1]))
    return found


def test_imports_follow_the_order_of_folders():
    assert violations(PACKAGE) == []


def heavy_after(lines: list[str]) -> dict[str, list[str]]:
    """Return the modules of `HEAVY` that a new interpreter has loaded after each line, where there are any."""
    code = f"import json, sys\nfound = {{}}\nfor line in {lines}:\n    exec(line)\n    "
    code += f"found[line] = [name for name in {HEAVY} if name in sys.modules]\nprint(json.dumps(found))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return {line: names for line, names in json.loads(printed).items() if names}


def test_lazy_names_are_the_same_for_type_checkers():
    module = importlib.import_module("llmppl")
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {(alias.name, node.module) for node in imported for alias in node.names}
    lazy = ast.literal_eval(block.orelse[0].value.args[1])
    assert {name for name, _ in typed} == {name for names in lazy.values() for name in names} <= set(dir(module))
    for name, origin in typed:
        assert getattr(module, name) is getattr(importlib.import_module(origin), name)


def test_dir_shows_public_names_only():
    """The names of __all__, where a package has it, and Python's own; no module that somebody imported."""
    module = importlib.import_module("llmppl")
    assert {name for name in dir(module) if not name.startswith("__")} == {*module.__all__}
    for package in ("constraints", "distributions", "inference", "lm", "models", "queries", "report", "tasks",
                    "decisions"):
        module = importlib.import_module(f"llmppl.{package}")
        names = {name for name in dir(module) if not name.startswith("__")}
        assert len(names) > 3 and not [name for name in names if name[0] == "_" or inspect.ismodule(vars(module)[name])]


def test_no_property_holds_a_lock_while_it_computes():
    """functools.cached_property of Python 3.11 has a lock for each class, which a forked child can inherit held."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "@functools.cached_property" not in text, path
        assert not re.search(r"from functools import .*\bcached_property", text), path


def test_constraints_load_neither_a_model_nor_inference():
    code = "import llmppl.constraints, sys; print([name for name in sys.modules if name.startswith('llmppl.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    folders = {name.split(".")[1] for name in ast.literal_eval(done.stdout)}
    assert folders == {"constraints", "native", "support"}


def test_imports_of_folders_and_public_names_load_nothing_heavy():
    lines = [f"import llmppl.{folder}" for folder in LIGHT]
    assert heavy_after([*lines, "from llmppl import Model, smc_steer, Bernoulli", "from llmppl import *"]) == {}
    assert heavy_after(["import llmppl", "import rich"]) == {"import rich": ["rich"]}


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Write a package `llmppl` with a few empty files, and `files` on top."""
    empty = ["__init__.py", "constraints/vocabulary/__init__.py", "lm/__init__.py", "lm/cache.py", "models/__init__.py",
             "models/model.py"]  # fmt: skip
    for name, text in (dict.fromkeys(empty, "") | files).items():
        path = folder / "llmppl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "llmppl"


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("constraints/vocabulary/v.py", "from ...lm import cache", "lm.cache: lm comes after constraints.vocabulary"),
        ("constraints/vocabulary/v.py", "from ..lark.masks import f", "constraints.lark comes after constraints.vocab"),
        ("support/runtime.py", "from .. import lm", "support/runtime.py:1 imports lm: lm comes after support"),
        ("lm/cache.py", "from llmppl import Model", "cache.py:1 imports __init__"),
        ("lm/cache.py", "from llmppl.lm import Trie", "imports lm: a file imports from the files of its own"),
        ("lm/cache.py", "def f():\n    from ..models.model import Model", "cache.py:2 imports models.model: models"),
        ("lm/cache.py", "if TYPE_CHECKING:\n    import llmppl.models.model", "cache.py:2 imports models.model"),
        ("inference/smc.py", "from ..constraints.vocabulary import V", "inference does not know constraints"),
        ("settings/config.py", "", "settings/config.py is in no folder of FOLDERS"),
    ],
)  # fmt: skip
def test_an_import_that_breaks_a_rule_is_named(tmp_path, file, text, message):
    (found,) = violations(write_package(tmp_path, {file: text}))
    assert message in found


def test_a_cycle_within_a_folder_is_named(tmp_path):
    inner = "def f():\n    from ..cache import Trie"
    files = {"lm/cache.py": "from .engines.hf import load", "lm/engines/hf.py": inner}
    assert violations(write_package(tmp_path, files)) == ["a circle: lm.cache imports lm.engines.hf imports lm.cache"]


PROGRAMS = list[Path]()
for folder in ("benchmarks", "tools", "examples"):
    PROGRAMS += sorted((ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_programs_import_names_that_exist(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("llmppl"):
            continue
        try:
            module = importlib.import_module(node.module)
        except ImportError:                             # a package of an extra is not installed
            continue
        for alias in node.names:
            found = hasattr(module, alias.name)
            if not found and hasattr(module, "__path__"):
                found = importlib.util.find_spec(f"{node.module}.{alias.name}")
            assert found, f"{path.name}:{node.lineno}: {alias.name}"
