"""Text files for the tools of the embedded model: documents, held-out documents, and their tokens.

A mix item is PATH:MAIN_WEIGHT:DECAY_WEIGHT, a text file and its weights in the two parts of a training. A document is
a block of text between blank lines. One document in fifty is held out: it is evaluated, but never trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

EOS = "<|endoftext|>"                               # id 0; ends every document, and is also BOS
EOS_ID = 0
SHORTEST_DOCUMENT = 40                              # characters; shorter blocks are headings and page numbers
HELD_OUT = 50                                       # one document in this many


@dataclass
class HeldOut:
    """Held-out part of one text file."""

    name: str
    documents: list[str]
    tokens: np.ndarray                              # (m,) uint16; every document ends with EOS


@dataclass
class Corpus:
    """Training part of one text file, with its weight in each part of the training."""

    name: str
    main_weight: float
    decay_weight: float
    tokens: np.ndarray                              # (n,) uint16; every document ends with EOS


def parse(item: str) -> tuple[Path, float, float]:
    """Return the path, main weight and decay weight of a mix item; raise a ValueError for any other string."""
    path, *weights = item.rsplit(":", 2)
    try:
        main_weight, decay_weight = map(float, weights)
    except ValueError:
        raise ValueError(f"mix item {item!r} is not PATH:MAIN_WEIGHT:DECAY_WEIGHT, such as stories.txt:6:30") from None
    return Path(path), main_weight, decay_weight


def documents(path: Path) -> Iterator[str]:
    """Yield the blocks between blank lines of a text file, stripped, without the very short ones."""
    for block in path.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n\n"):
        if len(block := block.strip()) > SHORTEST_DOCUMENT:
            yield block


def split(path: Path) -> tuple[list[str], list[str]]:
    """Return the training documents and the held-out documents of a file."""
    train: list[str] = []
    held_out: list[str] = []
    for k, document in enumerate(documents(path)):
        (held_out if k % HELD_OUT == 17 else train).append(document)
    return train, held_out


def token_ids(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of the documents in order, (n,) uint16, each document followed by EOS."""
    ids = [np.zeros(0, np.uint16)]
    for start in range(0, len(texts), 4096):        # all at once would hold every encoding in memory
        encodings = tokenizer.encode_batch(texts[start : start + 4096])
        ids += [np.array([*encoding.ids, EOS_ID], np.uint16) for encoding in encodings]
    return np.concatenate(ids)


def read_training(mix: list[str], tokenizer: Tokenizer) -> list[Corpus]:
    """Read and tokenise the training documents of the mix."""
    parsed = [parse(item) for item in mix]
    return [Corpus(path.name, main, decay, token_ids(split(path)[0], tokenizer)) for path, main, decay in parsed]


def read_held_out(mix: list[str], tokenizer: Tokenizer) -> list[HeldOut]:
    """Read the held-out documents of the mix, as text and as tokens."""
    found = [(path.name, split(path)[1]) for path, *_ in map(parse, mix)]
    return [HeldOut(name, documents, token_ids(documents, tokenizer)) for name, documents in found]
