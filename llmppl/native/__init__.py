"""Native part: one C file of functions over arrays, used where it is compiled. Results are the same without it.

`walk.c` is compiled when a wheel is built (`hatch_build.py`) or by `make native`. `LLMPPL_NATIVE=0` ignores it. A call
takes microseconds. Other threads wait meanwhile (`ctypes.PyDLL`), so no array changes during a call.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

SOURCE = Path(__file__).with_name("walk.c")
LIBRARY = SOURCE.with_suffix(".dll" if sys.platform == "win32" else ".so")

# results of the functions: done, or the name of something that the caller must provide
DONE, ROW, EXITS, FULL, STATES, MEMBERS, STATES_SPENT, STEPS_SPENT, BROKEN = range(9)


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array. TypeError if its entries have gaps between them."""
    if not array.flags.c_contiguous:
        raise TypeError("C reads contiguous arrays")
    try:  # five times faster than `array.ctypes`
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or empty
        return int(array.ctypes.data)


class Arrays(ctypes.Structure):
    """Structure in C whose pointers lead to arrays of numpy."""

    def put(self, **arrays: npt.NDArray[Any] | None) -> None:
        """Let pointers lead to arrays, which live as long as the structure."""
        for name, array in arrays.items():
            setattr(self, name, None if array is None else address(array))
        self.__dict__.update(arrays)

    def held(self, name: str) -> Any:
        """Return the array that a pointer leads to."""
        return self.__dict__[name]


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Trie(Arrays):
    _fields_ = _fields((_INT, "num_nodes num_tokens"), (_POINTER, "byte depth skip first order"))


class Subsets(Arrays):
    _fields_ = _fields(
        (_INT, "num_states num_edges"),
        (_POINTER, "edge_begin edge_to edge_low edge_high epsilon_begin epsilon_to"),
        (_LONG, "states_left steps_left num_members max_members num_slots"),
        (_POINTER, "begin members slots state_of seen stack found targets"),
        (ctypes.c_uint32, "closure"),
    )


class Automaton(Arrays):
    num_states: int
    _fields_ = _fields((_INT, "num_states max_states"), (_POINTER, "table ready exits subsets"))


class Walk(Arrays):
    num_ids: int
    num_exits: int
    _fields_ = _fields(
        (_POINTER, "roots"),
        (_INT, "num_roots start"),
        (_POINTER, "stack"),
        (_INT, "max_depth"),
        (_POINTER, "jump mask ids ends exit_nodes exit_states"),
        (_LONG, "max_ids max_exits num_ids num_exits"),
        (_INT, "root node state"),
    )


_SIGNATURES: dict[str, Iterable[Any]] = {
    "walk": (_POINTER, _POINTER, _POINTER),
    "row": (_POINTER, _INT),
    "rows": (_POINTER, _POINTER, _INT),
    "begin": (_POINTER, _INT, _POINTER),
    "rehash": (_POINTER,),
    "slice_of": (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "class_of": (_POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER),
    "after": (_POINTER, _POINTER, ctypes.c_char_p, _INT, _POINTER),
}


@cache
def load() -> Any:
    """Return the compiled functions; None without a library, or if it was made of another source."""
    try:
        found = ctypes.PyDLL(os.fspath(LIBRARY))
        found.digest.restype = ctypes.c_uint32
        if found.digest() != digest(SOURCE.read_bytes()):
            return None
        for name, kinds in _SIGNATURES.items():
            getattr(found, name).argtypes = list(kinds)
    except (OSError, AttributeError):
        return None
    return found


def digest(source: bytes) -> int:
    """Return the number by which a library knows its source, whatever the ends of its lines."""
    return zlib.crc32(source.replace(b"\r\n", b"\n"))


def library() -> Any:
    """Return the compiled functions, None where numpy is used instead."""
    return None if os.environ.get("LLMPPL_NATIVE") == "0" else load()


def kind() -> str:
    """Return "native" or "numpy"."""
    return "numpy" if library() is None else "native"
