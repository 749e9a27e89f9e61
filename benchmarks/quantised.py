"""Effect of quantised weights, and of keys and values in F16, on next-token distributions under llama.cpp.

The matrices of a GGUF file are written in other formats, from their values in float32. With four-bit formats, the
embedding, which is also the last layer, stays Q8_0. The float32 model writes the contexts after a few beginnings. The
table has total variations from the distributions with float32 weights and cache. "apart" is the total variation between
a context alone and in a batch with all the others: the effect of the order of sums.

    python benchmarks/quantised.py                      # smollm2; writes 1 GB into a temporary folder
    python benchmarks/quantised.py --folder .           # keeps the files, for example for engines.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")           # before llama.cpp is loaded

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format
from numpy.typing import NDArray
from tables import machine, table

from llmppl.lm.engines.llamacpp import LlamaCpp
from llmppl.lm.engines.loading import gguf_tokenizer, packaged

STARTS = [
    "The lighthouse was built in", "Water boils at", "To sort a list of numbers,", "Dear Sir or Madam,",
    "Once upon a time", "def mean(values):", "The president said that", "Stir the onions until",
]  # fmt: skip
FORMATS = ["F32", "F16", "Q8_0", "Q4_1", "Q4_0"]


def rewrite(source: Path, target: Path, kind: str) -> None:
    """Write a copy of `source` with its matrices as `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    own = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(own):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        matrix = "Q8_0" if tensor.name == "token_embd.weight" and kind[:2] in ("Q4", "Q5") else kind
        form = Format.F32 if values.ndim == 1 else Format[matrix]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def written(engine: LlamaCpp, starts: list[list[int]], length: int) -> list[list[int]]:
    """Draw a text from the model after each of `starts`."""
    rng, texts = np.random.default_rng(0), starts
    for _ in range(length):
        rows = probabilities(engine.forward(texts, [(i, len(ids)) for i, ids in enumerate(texts)]))
        texts = [[*ids, int(rng.choice(len(row), p=row))] for ids, row in zip(texts, rows, strict=True)]
    return texts


def distributions(engine: LlamaCpp, texts: list[list[int]], length: int) -> NDArray[np.float64]:
    """Compute the distributions at the last `length` positions of each text in one batch, (texts x length, V)."""
    asked = [(i, n) for i, ids in enumerate(texts) for n in range(len(ids) - length + 1, len(ids) + 1)]
    return probabilities(engine.forward(texts, asked))


def apart(engine: LlamaCpp, texts: list[list[int]]) -> float:
    """Return the largest total variation between the last position of a text alone and in the batch."""
    together = probabilities(engine.forward(texts, [(i, len(ids)) for i, ids in enumerate(texts)]))
    alone = []
    for ids in texts:
        engine.clear()
        alone.append(probabilities(engine.forward([ids], [(0, len(ids))]))[0])
    return float(np.abs(together - alone).sum(axis=1).max() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; by default that of smollm2")
    parser.add_argument("--folder", type=Path, help="folder in which the written files are kept")
    parser.add_argument("--length", type=int, default=40, help="number of contexts after each of eight beginnings")
    options = parser.parse_args()
    source = options.file or packaged("smollm2")
    with tempfile.TemporaryDirectory() as passing:
        folder = options.folder or Path(passing)
        files = {kind: folder / f"{source.stem.split('.')[0]}-{kind}.gguf" for kind in FORMATS}
        for kind, file in files.items():
            if not file.exists():
                rewrite(source, file, kind)
        encode = gguf_tokenizer(source).encode
        first = LlamaCpp(files["F32"])
        texts = written(first, [encode(start) for start in STARTS], options.length)
        truth = distributions(first, texts, options.length)
        first.close()
        rows = []
        for kind, file in files.items():
            for cache_type in "f32", "f16":
                engine = LlamaCpp(file, cache_type=cache_type)
                found = distributions(engine, texts, options.length)
                total = np.abs(found - truth).sum(axis=1) / 2
                agree = np.mean(found.argmax(axis=1) == truth.argmax(axis=1))
                rows.append([
                    kind, cache_type.upper(), f"{file.stat().st_size / 1e6:.0f}",
                    *(f"{each:.2g}" for each in (total.mean(), np.quantile(total, 0.9), total.max())),
                    f"{agree:.0%}", f"{apart(engine, texts):.2g}",
                ])  # fmt: skip
                engine.close()
    print(machine("llmppl", "xllamacpp"))
    columns = ["weights", "cache", "MB", "mean TV", "90 %", "largest", "same likeliest", "apart"]
    table(f"{source.stem}, {len(truth)} contexts: total variation from float32 weights and cache", columns, rows)


if __name__ == "__main__":
    main()
