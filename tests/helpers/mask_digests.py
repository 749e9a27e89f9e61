"""Digests of masks along random walks, to compare them with those of another version."""

import hashlib
import random

import numpy as np

WALKS = 2
STEPS = 30


def digest(index) -> str:
    """Return the digest of the masks along some walks, and of whether the text may end there."""
    found = hashlib.sha256()
    for seed in range(WALKS):
        rng = random.Random(seed)
        state = index.start
        for _ in range(STEPS):
            mask = index.mask(state)
            found.update(np.packbits(mask).tobytes() + bytes([index.accepts(state)]))
            allowed = [
                token for token in np.flatnonzero(mask).tolist() if index.vocab.tokens[token]
            ]
            if not allowed:
                break
            state = index.advance(state, rng.choice(allowed))
    return found.hexdigest()[:16]
