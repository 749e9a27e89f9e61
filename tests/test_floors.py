"""Imports go down the floors: a file of llmppl imports only from files on lower floors (checked by `ast`)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "llmppl"

FLOORS = {
    13: ["cli", "__init__"],
    12: ["queries", "trace_page"],
    11: ["queries.mass", "trace"],
    10: ["queries.matches"],
    9: ["queries.sampling"],
    8: ["inference.smc", "inference.beam", "queries.best_first"],
    7: ["inference.expansion", "inference.exact", "queries.space"],
    6: ["models.programs", "inference.watch"],
    5: ["models.model", "models.lookahead", "queries.rules", "queries.language", "automata.grammar"],
    4: ["models.tokens", "automata.grammar_masks", "automata.lark_rules", "automata.edits",
        "automata.rewrites"],
    3: ["lm.transformer", "models.guards", "models.copies", "automata.json_schema", "automata.regex",
        "automata.completion"],
    2: ["models.distributions", "inference.statistics", "lm.hf", "automata.index", "automata.dfa",
        "automata.characters", "automata.canonical", "automata.lalr", "automata.lexing"],
    1: ["runtime", "compare", "trace_schema", "models.rejection", "inference.particles", "inference.progress",
        "inference.resampling", "lm.vocab", "lm.cache", "lm.embedded", "automata.nfa", "automata.trie",
        "automata.pretokens", "automata.tables", "automata.lalr_tables"],
    0: ["arguments", "exclusive", "inference.drawing", "automata.limits", "automata.json_checks"],
}  # fmt: skip
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
STRANGERS = {"inference": ["lm", "automata"], "automata": ["lm"]}       # folder: the folders it may not know


def module_name(path: Path, package: Path) -> str:
    """`lm.cache` for lm/cache.py, `lm.embedded` for lm/embedded/__init__.py, `__init__` for the package's own."""
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
    if name not in FLOOR:
        return "an __init__.py below the top one imports nothing from llmppl"
    if other in STRANGERS.get(folder, []):
        return f"{folder} does not know {other}"
    if target not in FLOOR:
        return "no such module in the table of tests/test_floors.py; import from the module that defines the name"
    if FLOOR[target] >= FLOOR[name]:
        return f"it is on floor {FLOOR[target]}, the importing file on floor {FLOOR[name]}"
    return None


def violations(package: Path) -> list[str]:
    """One line for every import that goes up, sideways or to a stranger, and for every file not in the table."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name, shown = module_name(path, package), path.relative_to(package.parent)
        if name not in FLOOR and path.name != "__init__.py":
            found.append(f"{shown} has no floor: give it one in the table of tests/test_floors.py")
            continue
        for line, target in imports(path, package):
            why = complaint(name, target)
            if why:
                found.append(f"{shown}:{line} imports {target}: {why}")
    return found


def test_imports_go_down_the_floors():
    assert not (found := violations(PACKAGE)), "\n".join(found)


def write_package(tmp_path: Path, files: dict[str, str]) -> Path:
    """A package `llmppl` with empty lm/vocab.py, lm/cache.py, models/tokens.py, and `files` on top."""
    empty = dict.fromkeys(["__init__.py", "lm/__init__.py", "lm/vocab.py", "lm/cache.py", "lm/transformer.py",
                           "models/__init__.py", "models/tokens.py", "runtime.py"], "")  # fmt: skip
    for name, text in (empty | files).items():
        path = tmp_path / "llmppl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "llmppl"


@pytest.mark.parametrize(
    "file, text",
    [
        ("models/tokens.py", "from llmppl.lm.vocab import Vocabulary"),
        ("models/tokens.py", "from ..lm import cache, vocab"),
        ("models/tokens.py", "import llmppl.lm.transformer"),
        ("lm/transformer.py", "from . import cache"),
        ("cli.py", "from llmppl.models import tokens\nimport torch"),
        ("__init__.py", "from .models.tokens import NextToken"),
    ],
)
def test_an_import_from_a_lower_floor_passes(tmp_path, file, text):
    assert violations(write_package(tmp_path, {file: text})) == []


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("lm/vocab.py", "from llmppl.models.tokens import Token", "vocab.py:1 imports models.tokens: it is on floor 4"),
        ("lm/vocab.py", "import llmppl.models.tokens as t", "vocab.py:1 imports models.tokens"),
        ("lm/vocab.py", "from . import cache", "vocab.py:1 imports lm.cache: it is on floor 1"),
        ("lm/vocab.py", "from .cache import Trie", "vocab.py:1 imports lm.cache"),
        ("lm/vocab.py", "from ..models import tokens", "vocab.py:1 imports models.tokens"),
        ("lm/vocab.py", "from .. import runtime", "vocab.py:1 imports runtime"),
        ("lm/vocab.py", "from llmppl import Model", "vocab.py:1 imports __init__"),
        ("lm/vocab.py", "def f():\n    from ..models.tokens import Token", "vocab.py:2 imports models.tokens"),
        ("lm/vocab.py", "if TYPE_CHECKING:\n    import llmppl.models.tokens", "vocab.py:2 imports models.tokens"),
        ("models/tokens.py", "from ..lm import Vocabulary", "tokens.py:1 imports lm: no such module"),
        ("inference/smc.py", "from ..lm.vocab import Vocabulary", "imports lm.vocab: inference does not know lm"),
        ("inference/exact.py", "from ..automata.dfa import DFA", "inference does not know automata"),
        ("automata/grammar.py", "from ..lm.vocab import Vocabulary", "automata does not know lm"),
        ("lm/__init__.py", "from .vocab import Vocabulary", "lm/__init__.py:1 imports lm.vocab: an __init__.py below"),
        ("lm/config.py", "", "lm/config.py has no floor: give it one in the table"),
    ],
)
def test_an_import_that_breaks_a_rule_is_named(tmp_path, file, text, message):
    (found,) = violations(write_package(tmp_path, {file: text}))
    assert message in found
