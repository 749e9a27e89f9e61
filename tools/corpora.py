"""Text files as the tools of the embedded model see them: documents, those held out, their tokens.

A mix item is PATH:MAIN_WEIGHT:DECAY_WEIGHT, a text file and its weights in the two parts of a training. A document is
a block of text between blank lines; one in fifty is held out: never trained on, only evaluated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

EOS = "<|endoftext|>"                               # id 0; closes every document, and is BOS, too
EOS_ID = 0
SHORTEST_DOCUMENT = 40                              # characters; shorter blocks are headings and page numbers
HELD_OUT = 50                                       # one document in so many


@dataclass
class HeldOut:
    """What is held out of one text file."""

    name: str
    documents: list[str]
    tokens: np.ndarray                              # (m,) uint16; every document is closed by EOS


@dataclass
class Corpus:
    """What is trained on of one text file, with its weight in each part of the training."""

    name: str
    main_weight: float
    decay_weight: float
    tokens: np.ndarray                              # (n,) uint16; every document is closed by EOS


def parse(item: str) -> tuple[Path, float, float]:
    """(path, main weight, decay weight) of a mix item; ValueError if it is not one."""
    path, *weights = item.rsplit(":", 2)
    try:
        main_weight, decay_weight = map(float, weights)
    except ValueError:
        raise ValueError(f"mix item {item!r} is not PATH:MAIN_WEIGHT:DECAY_WEIGHT, such as stories.txt:6:30") from None
    return Path(path), main_weight, decay_weight


def documents(path: Path) -> Iterator[str]:
    """The blocks of a text file that blank lines separate, stripped, without the very short ones."""
    for block in path.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n\n"):
        if len(block := block.strip()) > SHORTEST_DOCUMENT:
            yield block


def split(path: Path) -> tuple[list[str], list[str]]:
    """The documents of a file to train on, and those held out."""
    train: list[str] = []
    held_out: list[str] = []
    for k, document in enumerate(documents(path)):
        (held_out if k % HELD_OUT == 17 else train).append(document)
    return train, held_out


def token_ids(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """(n,) uint16: the tokens of the documents, one after the other, each closed by EOS."""
    ids = [np.zeros(0, np.uint16)]
    for start in range(0, len(texts), 4096):        # all at once would hold every encoding in memory
        encodings = tokenizer.encode_batch(texts[start : start + 4096])
        ids += [np.array([*encoding.ids, EOS_ID], np.uint16) for encoding in encodings]
    return np.concatenate(ids)


def read_training(mix: list[str], tokenizer: Tokenizer) -> list[Corpus]:
    """The documents of the mix to train on, tokenised."""
    parsed = [parse(item) for item in mix]
    return [Corpus(path.name, main, decay, token_ids(split(path)[0], tokenizer)) for path, main, decay in parsed]


def read_held_out(mix: list[str], tokenizer: Tokenizer) -> list[HeldOut]:
    """The documents of the mix that are held out, as text and tokenised."""
    found = [(path.name, split(path)[1]) for path, *_ in map(parse, mix)]
    return [HeldOut(name, documents, token_ids(documents, tokenizer)) for name, documents in found]
