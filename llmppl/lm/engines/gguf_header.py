"""Reader of GGUF headers. It checks the fields against the tensors and the size of the file.

Other libraries read the file after that. llama.cpp aborts the process at some contradictions, and other readers
allocate as much memory as a damaged number claims.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}    # of `struct`, by the types of the format
STRING, ARRAY = 8, 9
MAX_LAYERS = 512                                        # llama.cpp aborts above
MAX_COUNT = (1 << 31) - 1                               # llama.cpp counts in 32 bits


def fields_of(file: Path) -> dict[str, Any]:
    """Return the fields of a GGUF file: numbers, arrays, bytes, lists of bytes. ValueError if it is damaged."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header, fields = _Header(data), dict[str, Any]()
        version, num_tensors, num_fields = header.number("4xI"), header.number("Q"), header.number("Q")
        for _ in range(num_fields):
            fields |= {header.name(): header.value(header.number("I"))}
        layers, alignment = _checked(fields), fields.get("general.alignment", 32)
        if version not in (2, 3) or not isinstance(alignment, int) or not 0 < alignment <= MAX_COUNT:
            raise ValueError(f"its version is {version}, its alignment {alignment!r:.40}")
        blocks = _read_tensors(header, num_tensors, alignment)
    if layers > blocks and fields.get("split.count", 0) in (0, 1):      # else other files hold some
        raise ValueError(f"it claims {layers} layers and holds tensors of {blocks}")
    return fields


class _Header:
    """Bytes of a file, read from the front. A length beyond the end raises a ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"at byte {self.at:,} it claims {size:,} bytes more, and it ends at {len(self.data):,}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def name(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.take(self.number("Q"))
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        item, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (kind, 0)
        if item in FORMATS:
            form = np.dtype(FORMATS[item]).newbyteorder("<")
            return np.frombuffer(self.take(count * form.itemsize), form)
        if item != STRING or count > (len(self.data) - self.at) // 8:
            raise ValueError(f"at byte {self.at:,} it claims {count:,} values of type {item}")
        return [self.take(self.number("Q")) for _ in range(count)]


def _checked(fields: dict[str, Any]) -> int:
    """Return the number of layers; ValueError if a number is out of its range or a token appears twice."""
    own = fields.get("general.architecture", b"").decode("utf-8", "replace")
    width = fields.get(f"{own}.embedding_length", MAX_COUNT)
    ranges = dict.fromkeys(("context_length", "embedding_length", "vocab_size"), (1, MAX_COUNT))
    ranges |= dict.fromkeys(("attention.head_count", "attention.head_count_kv"), (0, width))
    for name, (least, most) in {**ranges, "block_count": (1, MAX_LAYERS)}.items():
        numbers = np.atleast_1d(fields.get(f"{own}.{name}", least))
        if numbers.dtype.kind not in "iu" or not numbers.size or not least <= numbers.min() <= numbers.max() <= most:
            raise ValueError(f"{own}.{name} must be from {least} to {most!r:.40}, not {fields[f'{own}.{name}']!r:.40}")
    for name, value in fields.items():
        if isinstance(value, float) and (math.isnan(value) or (name.endswith("epsilon") and not 0 <= value < 1)):
            raise ValueError(f"{name} is {value}")
    tokens = fields.get("tokenizer.ggml.tokens", [])
    for token, count in Counter(tokens).items():
        if count > 1 and token:                         # llama.cpp renames empty ones
            raise ValueError(f"it holds the token {token!r:.80} twice")
    for name in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if name in fields and np.size(fields[name]) != len(tokens):
            raise ValueError(f"{name} has {np.size(fields[name]):,} values for {len(tokens):,} tokens")
    return int(fields.get(f"{own}.block_count", 1))


def _read_tensors(header: _Header, num_tensors: int, alignment: int) -> int:
    """Return the number of layers that have tensors; ValueError if a tensor is impossible."""
    from gguf import GGML_QUANT_SIZES

    end, names, blocks = 0, set[str](), 0
    for _ in range(num_tensors):
        name, shape = header.name(), [header.number("Q") for _ in range(min(header.number("I"), 5))]
        block, size = GGML_QUANT_SIZES.get(header.number("I"), (1, 0))
        offset = header.number("Q")
        if len(shape) > 4 or not 0 < math.prod(shape) < 1 << 63 or offset % alignment or name in names:
            raise ValueError(f"the tensor {name!r:.80} is there twice, or cannot be {shape} at {offset}")
        end = max(end, offset + math.prod(shape) // block * size)
        names.add(name)
        if block_of := re.search(r"(?:^|\.)blk\.([0-9]+)\.", name):
            blocks = max(blocks, int(block_of[1]) + 1)
    header.at += -header.at % alignment                 # where the weights begin
    if header.at + end > len(header.data):
        raise ValueError(f"its tensors end at byte {header.at + end:,}, and it ends at {len(header.data):,}")
    return blocks
