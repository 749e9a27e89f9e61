"""The native part: it is used where its library is that of its source, and numpy otherwise. Wheels have it or not."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers.common import ROOT

from llmppl import native

sys.path.insert(0, str(ROOT))
hatch_build = pytest.importorskip("hatch_build")

COMPILER = next(filter(None, map(shutil.which, hatch_build.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture
def loaded():
    """Forget the library before and after."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_numpy_is_used_where_the_variable_says_so(monkeypatch):
    monkeypatch.setenv("LLMPPL_NATIVE", "0")
    assert native.library() is None and native.kind() == "numpy"


@needs_compiler
def test_a_library_is_used_until_its_source_changes(loaded, monkeypatch, tmp_path):
    library, source = tmp_path / native.LIBRARY.name, tmp_path / "walk.c"
    monkeypatch.setattr(native, "LIBRARY", library)
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setenv("LLMPPL_NATIVE", "1")
    source.write_bytes(hatch_build.SOURCE.read_bytes())
    assert native.kind() == "numpy"  # no library yet
    native.load.cache_clear()
    assert hatch_build.compiled(library)
    assert native.kind() == "native"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    native.load.cache_clear()
    assert native.kind() == "native"  # a checkout on Windows
    source.write_bytes(source.read_bytes() + b"/* changed */")
    native.load.cache_clear()
    assert native.kind() == "numpy"


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF\x02\x01\x01" + bytes(100)])
def test_a_file_that_is_no_library_is_ignored(loaded, monkeypatch, tmp_path, content):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "walk.so")
    (tmp_path / "walk.so").write_bytes(content)
    assert native.library() is None


@needs_compiler
def test_a_library_of_other_functions_is_ignored(loaded, monkeypatch, tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "other.c", "-o", "walk.so"], cwd=tmp_path, check=True
    )
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "walk.so")
    assert native.library() is None


@needs_compiler
def test_structures_in_python_have_the_fields_of_those_in_c(tmp_path):
    """A program in C prints the size of each structure and the places of its fields."""
    source = hatch_build.SOURCE.read_text(encoding="utf-8")
    lines, expected = [], []
    for name in ("Trie", "Subsets", "Automaton", "Walk"):
        body = re.search(rf"typedef struct \{{((?:(?!typedef).)*?)\}} {name};", source, re.DOTALL)[
            1
        ]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        fields = [
            re.search(r"\w+$", part.strip())[0] for part in re.split("[,;]", body) if part.strip()
        ]
        structure = getattr(native, name)
        assert fields == [field for field, _ in structure._fields_]
        expected += [
            ctypes.sizeof(structure),
            *(getattr(structure, field).offset for field in fields),
        ]
        lines.append(f'printf("%d\\n", (int)sizeof({name}));')
        lines += [f'printf("%d\\n", (int)offsetof({name}, {field}));' for field in fields]
    program = [
        "#include <stdio.h>",
        "#include <stddef.h>",
        "#define WALK_DIGEST 0",
        f'#include "{hatch_build.SOURCE}"',
    ]
    (tmp_path / "layout.c").write_text(
        "\n".join([*program, "int main(void) {", *lines, "return 0; }"])
    )
    subprocess.run([COMPILER, "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    printed = subprocess.run(
        [tmp_path / "layout"], capture_output=True, text=True, check=True
    ).stdout
    assert list(map(int, printed.split())) == expected


def test_nothing_is_compiled_without_a_compiler(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("LLMPPL_NATIVE", "1")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not hatch_build.compiled(tmp_path / "walk.so")
    monkeypatch.setenv("CC", sys.executable)  # cannot compile
    assert (
        not hatch_build.compiled(tmp_path / "walk.so")
        and "cannot compile walk.c" in capfd.readouterr().err
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["native", "numpy"])
def test_a_wheel_has_the_library_of_its_platform_or_is_pure(tmp_path, wanted):
    pytest.importorskip("hatchling")
    environment = os.environ | {"LLMPPL_NATIVE": str(int(wanted == "native"))}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        file.extractall(tmp_path / "wheel")
    assert ("none-any" in wheel.name) == (wanted == "numpy")
    assert (f"llmppl/native/{native.LIBRARY.name}" in names) == (wanted == "native")
    assert "llmppl/native/walk.c" in names
    program = "from llmppl import native; print(native.kind())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "wheel"), "LLMPPL_NATIVE": "1"}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"{wanted}\n"


@needs_compiler
@pytest.mark.slow
def test_random_automata_and_tries_pass_the_sanitizers(tmp_path):
    """Addresses and undefined behaviour are checked in 10,000 random cases of each kind (helpers/in_c.py)."""
    library = tmp_path / "walk.so"
    runtime = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    options = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    if not os.path.isabs(runtime.stdout.strip()) or not hatch_build.compiled(library, options):
        pytest.skip("the compiler has no sanitizers")
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "LLMPPL_NATIVE": "1",
    }
    command = [sys.executable, "-m", "helpers.in_c", str(library), "10000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "10000 checked\n", done.stderr[-5000:]
