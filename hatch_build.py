"""Build hook: compile `llmppl/native/walk.c` where a C compiler is, and tag the wheel with its platform.

Without a compiler, or with LLMPPL_NATIVE=0, the wheel is pure Python. `python hatch_build.py` compiles in place.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "llmppl" / "native" / "walk.c"
LIBRARY = SOURCE.with_suffix(".dll" if sys.platform == "win32" else ".so")
COMPILERS = ("cc", "gcc", "clang", "cl")


def command(compiler: list[str], target: Path, options: list[str]) -> list[str]:
    """Return the command that compiles the library."""
    digest = zlib.crc32(SOURCE.read_bytes().replace(b"\r\n", b"\n"))
    define = f"WALK_DIGEST={digest}u"
    if Path(compiler[0]).stem.lower() in ("cl", "clang-cl"):
        return [*compiler, "/nologo", "/O2", "/LD", f"/D{define}", str(SOURCE), f"/Fe{target}", *options]
    flags = ["-O2", "-std=c99", "-shared", "-fPIC", "-fvisibility=hidden", f"-D{define}"]
    if sys.platform == "win32":
        flags = [flag for flag in flags if flag != "-fPIC"] + ["-static-libgcc"]
    arch = shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else []
    return [*compiler, *flags, *arch, str(SOURCE), "-o", str(target), *options]


def compiled(target: Path = LIBRARY, options: tuple[str, ...] = ()) -> bool:
    """Compile the library; return False if LLMPPL_NATIVE=0, or if no compiler can."""
    if os.environ.get("LLMPPL_NATIVE") == "0":
        return False
    given = os.environ.get("CC")
    compilers = [shlex.split(given)] if given else [[name] for name in COMPILERS]
    for compiler in compilers:
        if not compiler or shutil.which(compiler[0]) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / target.name
            run = subprocess.run(
                command(compiler, made, list(options)), cwd=folder, capture_output=True, text=True, check=False
            )
            if run.returncode == 0 and made.exists():
                beside = target.with_name(target.name + ".new")
                shutil.copyfile(made, beside)
                os.replace(beside, target)  # a process may have the old file open
                return True
        print(f"{' '.join(compiler)} cannot compile {SOURCE.name}:\n{run.stderr or run.stdout}", file=sys.stderr)
    return False


def platform_tag() -> str:
    """Return the tag of this platform in the names of wheels."""
    from packaging.tags import platform_tags

    tags = (tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
    found = next(tags)
    if sys.platform == "darwin":
        from hatchling.builders.macos import process_macos_plat_tag

        found = process_macos_plat_tag(found, compat=False)
    return found


class NativeHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and compiled():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"
            build_data["artifacts"].append(f"/{LIBRARY.relative_to(ROOT).as_posix()}")


if __name__ == "__main__":
    sys.exit(0 if compiled() else "no C compiler: numpy is used instead")
