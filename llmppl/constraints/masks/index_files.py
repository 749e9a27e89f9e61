"""Files of indices: saves a `TokenIndex` of a tabled recognizer, and loads it without the recognizer.

A file is untrusted data. It is an npz file with a digest of its arrays. The reader checks the sizes that the file
claims before it unpacks anything, and every number before it is used. An index of more than `MAX_BYTES` is neither
saved nor loaded, because a file of a few MB can unpack to any size.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, TabledRecognizer, VocabularyLike
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.masks.precomputed import PrecomputedIndex
from llmppl.constraints.vocabulary.trie import Trie, fingerprint, trie_of
from llmppl.support.graphs import reachable
from llmppl.support.locks import let_through

__all__ = [
    "StoredRecognizer", "check", "check_sets", "check_vocabulary", "parts", "read", "read_arrays", "reading", "write",
    "write_arrays",
]  # fmt: skip

FORMAT = 2                                          # version of the file format
MAX_BYTES = 1 << 30                                 # memory of a saved index at most
TREE = 32                                           # memory of one byte of JSON at most, in bytes
ANY = 2**63 - 1                                     # the largest int64
HEADER = re.compile(                                # header of an array in numpy's format
    rb"\x93NUMPY\x01\x00..{'descr': '([<>](?:i4|i8|u2|U\d{1,8})|\|[bu]1)', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,18},? ?){0,2})\), } *\n",
    re.DOTALL,
)
BROKEN = (                                          # raised by zipfile for damaged files, and by the checks here
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError, ValueError,
)  # fmt: skip


class StoredRecognizer:
    """Tabled recognizer that was loaded from a file."""

    def __init__(self, name: str, start: int, table: npt.NDArray[np.int32], accepting: Bools) -> None:
        self.name, self.start, self.table, self.accepting = name, start, table, accepting
        self.ready = np.ones(len(table), bool)

    def __repr__(self) -> str:
        return self.name

    def step(self, state: int, byte: int) -> int | None:
        return self.table.item(state, byte) or None

    def accepts(self, state: int) -> bool:
        return self.accepting.item(state)

    def row(self, state: int) -> npt.NDArray[np.int32]:
        return self.table[state, :]

    def explore(self) -> None:
        pass


def write(path: str | Path, precomputed: PrecomputedIndex) -> None:
    """Save an index over a tabled recognizer, with the states of the recognizer that its start reaches."""
    recognizer: TabledRecognizer = precomputed.index.recognizer
    seen = np.zeros(len(recognizer.table), bool)
    new = np.array([recognizer.start])
    while new.size:
        seen[new] = True
        targets = np.unique(recognizer.table[new])
        new = targets[~seen[targets] & (targets > 0)]
    size = int(np.flatnonzero(seen)[-1]) + 1
    distinct = {found.key: i for i, found in enumerate(dict.fromkeys(precomputed.masks))}
    write_arrays(
        path,
        precomputed.index,
        start=np.int64(recognizer.start),
        table=np.where(seen[:size, None], recognizer.table[:size], 0),
        accepting=recognizer.accepting[:size] & seen[:size],
        states=np.array(precomputed.states, np.int32),
        which=np.array([distinct[found.key] for found in precomputed.masks], np.int32),
        sets=np.frombuffer(b"".join(distinct), np.uint8),
        sets_sizes=np.array([len(key) for key in distinct], np.int64),
        begin=precomputed.begin,
        next=precomputed.next,
    )


def write_arrays(path: str | Path, index: Any, **arrays: Any) -> None:
    """Save some arrays of an index, with its name, its vocabulary and a digest of all."""
    arrays |= {"format": np.int64(FORMAT), "name": index.name, "vocabulary": fingerprint(index.vocab)}
    data = {name: np.asarray(each, order="C") for name, each in arrays.items()}
    _check_room({name: each.nbytes + 256 for name, each in data.items()})       # with room for headers
    save: Any = np.savez_compressed
    with open(path, "wb") as file:
        save(file, **data, digest=_digest(data))


def _digest(data: dict[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, each in sorted(data.items()):
        digest.update(f"{name} {each.dtype.str} {each.shape}".encode())
        digest.update(each.data)
    return digest.hexdigest()


def _check_room(sizes: dict[str, int]) -> None:
    """Raise a ValueError if arrays of these sizes in bytes take too much memory."""
    room = sum(sizes.values()) + sizes.get("tree", 0) * TREE
    if room > MAX_BYTES:
        raise ValueError(f"the index takes {room:,} bytes, more than the {MAX_BYTES:,} of one in a file")


def read(
    path: str | Path, vocab: VocabularyLike, recognizer: TabledRecognizer | None
) -> tuple[StoredRecognizer, tuple[Any, ...]]:
    """Return the recognizer, and all fields of the PrecomputedIndex but the first; errors as in `TokenIndex.load`."""
    data = read_arrays(path, "start")
    with reading(path):
        _check_table(data)
    name = data["name"]
    stored = StoredRecognizer(name, int(data["start"]), data["table"], data["accepting"])
    if recognizer is not None and not _same_language(stored, recognizer):
        raise ValueError(f"{path} is the index of {name}, which is not the language of {recognizer!r}")
    check_vocabulary(path, data, vocab)
    with reading(path):
        distinct = [PackedMask(part.tobytes()) for part in parts(data, "sets")]
        sizes = check_sets([found.key for found in distinct], trie_of(vocab))[data["which"]]
        if not np.array_equal(np.append(0, np.cumsum(sizes)), data["begin"]):
            raise ValueError("its steps are not those of its masks")
    masks = [distinct[i] for i in data["which"].tolist()]
    accepting = data["accepting"][data["states"]]
    return stored, (data["states"].tolist(), accepting, masks, data["begin"], data["next"])


def _check_table(data: dict[str, Any]) -> None:
    """Raise a ValueError if the arrays are not those of an index over a table; the sets of masks are not checked."""
    S, R, D, N = (data[name].size if name in data else 0 for name in ("accepting", "states", "sets_sizes", "next"))
    check(
        data,
        start=("i8", (), 1, S),
        table=("i4", (S, 256), 0, S),
        accepting=("b1", None, 0, 2),
        states=("i4", None, 1, S),
        which=("i4", (R,), 0, D),
        sets=("u1", None, 0, 256),
        sets_sizes=("i8", None, 0, ANY),
        begin=("i8", (R + 1,), 0, N + 1),
        next=("u2 i4", None, 0, R),
    )
    states = data["states"].tolist()
    if states[:1] != [data["start"]] or len({*states}) < R:
        raise ValueError("its first state is not the start, or a state is there twice")


def check(data: dict[str, Any], **arrays: tuple[str, tuple[int, ...] | None, int, int]) -> None:
    """Raise a ValueError if `data` does not have exactly these arrays.

    Each is given as (dtypes, shape, least, end): its numbers must be in range(least, end), and the shape None stands
    for a list of any length.
    """
    if {name for name, each in data.items() if not isinstance(each, str)} != {"format", *arrays}:
        raise ValueError("it has not the arrays that it should have")
    for name, (types, shape, least, end) in arrays.items():
        each = data[name]
        if each.dtype not in map(np.dtype, types.split()) or each.shape != ((each.size,) if shape is None else shape):
            raise ValueError(f"its {name} has dtype {each.dtype} and shape {each.shape}")
        if each.size and not (least <= each.min() and each.max() < end):
            raise ValueError(f"its {name} has numbers that are not from {least} to {end - 1}")


def parts(data: dict[str, Any], name: str) -> list[npt.NDArray[Any]]:
    """Cut an array, which has been checked, into parts of the saved sizes."""
    ends = list(itertools.accumulate(data[f"{name}_sizes"].tolist(), initial=0))
    if ends[-1] != data[name].size:
        raise ValueError(f"its {name} has not the size of its parts")
    return [data[name][a:b] for a, b in itertools.pairwise(ends)]


def check_sets(keys: Iterable[bytes], trie: Trie) -> npt.NDArray[np.int64]:
    """Return the number of tokens, without eos, that the mask of each key allows; a ValueError if one is no mask."""
    V, sizes = len(trie.tokens), []
    spelled = np.zeros(V, bool)
    spelled[trie.order] = True
    for key in keys:
        few = len(key) * 8 < V                      # as in MaskStore.as_ids
        some: npt.NDArray[Any] = np.frombuffer(key, np.int32 if few else np.uint8)
        if (np.diff(some, prepend=-1, append=V) <= 0).any() if few else some.size != (V + 7) // 8:
            raise ValueError("it has a set that is none of tokens")
        found = spelled[some] if few else spelled & np.unpackbits(some, count=V).view(bool)
        sizes.append(np.count_nonzero(found))
    return np.array(sizes, np.int64)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn errors of a damaged file into a ValueError that names the file."""
    try:
        yield
    except BROKEN as error:
        let_through(error)
        if isinstance(error, OSError) and error.errno != errno.EINVAL:      # which seeking before the file raises
            raise
        raise ValueError(f"{path} holds no saved TokenIndex ({str(error)[:300]})") from None


def read_arrays(path: str | Path, kind: str) -> dict[str, Any]:
    """Return the arrays of `write_arrays`; `kind` is an array that the file must have, "start" or "grammar"."""
    with open(path, "rb") as opened, reading(path):
        arrays = _unpacked(opened)
        digest = str(arrays.pop("digest", ""))
        data = {name: str(each) if each.dtype.kind == "U" else each for name, each in arrays.items()}
        written = data.get("format", np.zeros(1))
        if np.shape(written) or not all(isinstance(data.get(name), str) for name in ("name", "vocabulary")):
            raise ValueError("it does not say of what")
    if written != FORMAT:
        raise ValueError(f"{path} is of format {written}, and this version reads {FORMAT}: save the index again")
    if kind not in data:
        needs = "needs it as well: load(path, vocab, grammar)" if "grammar" in data else "is loaded without a grammar"
        raise ValueError(f"{path} is the index of {data['name']}, which {needs}")
    if digest != _digest(arrays):
        raise ValueError(f"{path} holds no saved TokenIndex (it is damaged: its digest is another)")
    return data


def _unpacked(opened: BinaryIO) -> dict[str, Any]:
    """Return the arrays of an npz file."""
    with zipfile.ZipFile(opened) as archive:
        members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
        if any(each.compress_type != zipfile.ZIP_DEFLATED for each in members.values()):
            raise ValueError("it is packed in another way")         # other methods may take much memory
        _check_room({name: each.file_size for name, each in members.items()})
        return {name: _array(archive, each) for name, each in members.items()}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    with archive.open(member) as file:
        start = file.read(10)
        start += file.read(int.from_bytes(start[8:], "little"))
        found = HEADER.fullmatch(start)
        if found is None:
            raise ValueError(f"{member.filename} is no array")
        data = file.read(max(member.file_size - len(start), 0))     # zipfile unpacks no more than claimed
    return np.frombuffer(data, found[1].decode()).reshape([int(size) for size in re.findall(rb"\d+", found[2])])


def check_vocabulary(path: str | Path, data: dict[str, Any], vocab: VocabularyLike) -> None:
    """Raise a ValueError if the data belong to another vocabulary."""
    if fingerprint(vocab) != data["vocabulary"]:
        raise ValueError(
            f"{path} is the index of {data['name']} over another vocabulary than this one of {len(vocab.tokens)} tokens"
        )


def _same_language(a: TabledRecognizer, b: TabledRecognizer) -> bool:
    """Return True if two recognizers accept the same texts (Hopcroft & Karp 1971, without their merging)."""

    def agree(pair: tuple[int, int]) -> bool:
        i, j = pair
        return a.accepts(i) == b.accepts(j) if i and j else i == j

    def edges(pair: tuple[int, int]) -> list[tuple[int, int]]:
        i, j = pair                                 # both are 0, the dead state, or neither is
        both = np.unique(a.row(i).astype(np.int64) << 32 | b.row(j)).tolist() if i else []
        return [(each >> 32, each & 0xFFFFFFFF) for each in both]

    return all(map(agree, reachable([(a.start, b.start)], edges)))
