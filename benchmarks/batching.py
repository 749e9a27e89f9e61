"""Effect of the other contexts in a pass on a model whose activations are quantised by the batch.

torch quantises the linear layers of a model to int8, and all inputs of a pass share one scale. The benchmark computes
the next-token distributions of the beginnings of a few texts in four ways. The first runs each context alone, as
`CachedTransformer` does. The second runs all contexts of one length together. The others run token by token through
cached keys and values, one text alone or all texts together. It prints the mean and largest total variation from the
first way, the mean distance from the float32 model, and the CPU milliseconds per token of each context.

    python benchmarks/batching.py [--lm smollm2]
"""

import argparse
import copy
import time
import warnings

import numpy as np
import torch
from transformers import DynamicCache

from llmppl import CachedTransformer
from llmppl.lm.engines.hf import CACHE

TEXTS = (
    "Once upon a time, there was a little girl who liked to play in the garden with her dog.",
    "My favorite writer is a man who has written many books about the sea and",
    "The capital of France is a city on a river, and the people there",
    "One day the cat and the bird went to the forest to look for a tree",
)


def log_probs(model, ids, cache=None):
    """Return the log probabilities after each position of (B, n) ids, (B, n, V)."""
    options = {"use_cache": False} if cache is None else {CACHE: cache}
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor(ids), **options).logits.double(), -1).numpy()


def kept(model, ids):
    """Return the same, computed token by token with cached keys and values."""
    cache = DynamicCache(config=model.config)
    return np.concatenate([log_probs(model, [row[j : j + 1] for row in ids], cache) for j in range(len(ids[0]))], 1)


def main(name):
    plain = CachedTransformer.from_pretrained(name, engine="transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain.model), {torch.nn.Linear}, dtype=torch.qint8)
    ids = [list(map(int, plain.context(text).tokens)) for text in TEXTS]
    n = min(map(len, ids))
    ids = [row[:n] for row in ids]
    ends = range(1, n + 1)
    ways = {
        "each context by itself": lambda: [[log_probs(model, [row[:j]])[0, -1] for j in ends] for row in ids],
        "those of one length together": lambda: np.stack(
            [log_probs(model, [row[:j] for row in ids])[:, -1] for j in ends], 1),
        "token by token, each text by itself": lambda: [kept(model, [row])[0] for row in ids],
        "token by token, all texts together": lambda: kept(model, ids),
    }  # fmt: skip
    float32, alone = np.exp(log_probs(plain.model, ids)), None
    print(f"{'':36} TV from the first: mean, max; from float32: mean; CPU ms")
    for way, run in ways.items():
        run()
        start = time.process_time()
        found = np.exp(np.array(run()))
        spent = 1000 * (time.process_time() - start) / (len(ids) * n)
        alone = found if alone is None else alone
        apart, off = (np.abs(found - other).sum(-1) / 2 for other in (alone, float32))
        print(f"{way:36} {apart.mean():18.3f} {apart.max():6.3f} {off.mean():15.3f} {spent:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lm", default=None, help="a model name for from_pretrained")
    torch.set_num_threads(1)
    main(parser.parse_args().lm)
