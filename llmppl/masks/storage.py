"""Whole indices in files: what a `TokenIndex` of a tabled recognizer writes, and reads without the recognizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.exclusive import let_through
from llmppl.masks.constraint import Bools, TabledRecognizer, VocabularyLike
from llmppl.masks.packed import PackedMask
from llmppl.masks.trie import fingerprint
from llmppl.masks.whole import WholeIndex

__all__ = ["StoredRecognizer", "check_vocabulary", "read", "read_arrays", "write", "write_arrays"]

FORMAT = 1                                          # of saved files


class StoredRecognizer:
    """A tabled recognizer that was read from a file."""

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


def write(path: str | Path, whole: WholeIndex) -> None:
    """Save an index over a tabled recognizer, and of the recognizer what its start reaches."""
    recognizer: TabledRecognizer = whole.index.recognizer
    seen = np.zeros(len(recognizer.table), bool)
    new = np.array([recognizer.start])
    while new.size:
        seen[new] = True
        targets = np.unique(recognizer.table[new])
        new = targets[~seen[targets] & (targets > 0)]
    size = int(np.flatnonzero(seen)[-1]) + 1
    distinct = {found.key: i for i, found in enumerate(dict.fromkeys(whole.masks))}
    write_arrays(
        path,
        whole.index,
        start=recognizer.start,
        table=np.where(seen[:size, None], recognizer.table[:size], 0),
        accepting=recognizer.accepting[:size] & seen[:size],
        states=np.array(whole.states, np.int32),
        which=np.array([distinct[found.key] for found in whole.masks], np.int32),
        sets=np.frombuffer(b"".join(distinct), np.uint8),
        set_sizes=np.array([len(key) for key in distinct], np.int64),
        begin=whole.begin,
        next=whole.next,
    )


def write_arrays(path: str | Path, index: Any, **arrays: Any) -> None:
    """Save some arrays of an index, with its name and vocabulary."""
    with open(path, "wb") as file:
        np.savez_compressed(file, format=FORMAT, name=index.name, vocabulary=fingerprint(index.vocab), **arrays)


def read(
    path: str | Path, vocab: VocabularyLike, recognizer: TabledRecognizer | None
) -> tuple[StoredRecognizer, tuple[Any, ...]]:
    """The recognizer, and the fields of the WholeIndex but the first. Errors as of `TokenIndex.load`."""
    data = read_arrays(path, "start")
    name = str(data["name"])
    stored = StoredRecognizer(name, int(data["start"]), data["table"], data["accepting"])
    if recognizer is not None and not _same_language(stored, recognizer):
        raise ValueError(f"{path} is the index of {name}, which is not the language of {recognizer!r}")
    check_vocabulary(path, data, vocab)
    keys, ends = data["sets"].tobytes(), np.cumsum(data["set_sizes"]).tolist()
    distinct = [PackedMask(keys[a:b]) for a, b in itertools.pairwise([0, *ends])]
    masks = [distinct[i] for i in data["which"].tolist()]
    accepting = data["accepting"][data["states"]]
    return stored, (data["states"].tolist(), accepting, masks, data["begin"], data["next"])


def read_arrays(path: str | Path, kind: str) -> dict[str, Any]:
    """What `write_arrays` saved, of the kind that has an array of this name: "start" or "grammar"."""
    with open(path, "rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                data = {key: file[key] for key in file.files}
            name, written = str(data["name"]), int(data["format"])
        except Exception as error:                  # of many types: zipfile raises what a byte makes of it
            let_through(error)
            raise ValueError(f"{path} holds no saved TokenIndex ({error})") from None
    if written != FORMAT:
        raise ValueError(f"{path} is of format {written}, and this version reads {FORMAT}: save the index again")
    if kind not in data:
        needs = "needs it as well: load(path, vocab, grammar)" if "grammar" in data else "is loaded without a grammar"
        raise ValueError(f"{path} is the index of {name}, which {needs}")
    return data


def check_vocabulary(path: str | Path, data: dict[str, Any], vocab: VocabularyLike) -> None:
    """Raise a ValueError if what was read is of another vocabulary."""
    if fingerprint(vocab) != str(data["vocabulary"]):
        raise ValueError(
            f"{path} is the index of {data['name']} over another vocabulary than this one of {len(vocab.tokens)} tokens"
        )


def _same_language(a: TabledRecognizer, b: TabledRecognizer) -> bool:
    """Whether no text tells two recognizers apart (Hopcroft & Karp 1971, without their merging)."""
    pairs = [(a.start, b.start)]
    seen = set(pairs)
    for i, j in pairs:                              # grows
        if bool(i) != bool(j) or (i and a.accepts(i) != b.accepts(j)):
            return False
        if i:
            both = np.unique(a.row(i).astype(np.int64) << 32 | b.row(j)).tolist()
            new = {(pair >> 32, pair & 0xFFFFFFFF) for pair in both} - seen
            seen |= new
            pairs += new
    return True
