"""Whole indices in files: what a `TokenIndex` of a tabled recognizer writes, and reads without the recognizer."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.masks.constraint import Bools, TabledRecognizer, VocabularyLike
from llmppl.masks.packed import PackedMask
from llmppl.masks.trie import fingerprint
from llmppl.masks.whole import WholeIndex

__all__ = ["StoredRecognizer", "read", "write"]

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
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            format=FORMAT,
            name=whole.index.name,
            vocabulary=fingerprint(whole.index.vocab),
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


def read(
    path: str | Path, vocab: VocabularyLike, recognizer: TabledRecognizer | None
) -> tuple[StoredRecognizer, tuple[Any, ...]]:
    """The recognizer, and the fields of the WholeIndex but the first. Errors as of `TokenIndex.load`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {key: file[key] for key in file.files}
        name, start, written = str(data["name"]), int(data["start"]), int(data["format"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no saved TokenIndex ({error})") from None
    if written != FORMAT:
        raise ValueError(f"{path} is of format {written}, and this version reads {FORMAT}: save the index again")
    stored = StoredRecognizer(name, start, data["table"], data["accepting"])
    if recognizer is not None and not _same_language(stored, recognizer):
        raise ValueError(f"{path} is the index of {name}, which is not the language of {recognizer!r}")
    if fingerprint(vocab) != str(data["vocabulary"]):
        raise ValueError(
            f"{path} is the index of {name} over another vocabulary than this one of {len(vocab.tokens)} tokens"
        )
    keys, ends = data["sets"].tobytes(), np.cumsum(data["set_sizes"]).tolist()
    distinct = [PackedMask(keys[a:b]) for a, b in itertools.pairwise([0, *ends])]
    masks = [distinct[i] for i in data["which"].tolist()]
    accepting = data["accepting"][data["states"]]
    return stored, (data["states"].tolist(), accepting, masks, data["begin"], data["next"])


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
