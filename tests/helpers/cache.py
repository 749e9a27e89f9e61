"""Random operations on the prefix cache, and a language model that remembers its rows."""

import numpy as np
from hypothesis import strategies as st

from helpers.families import V, at, check_books, error_of, family_lm, together, truth
from llmppl.lm.cache import ROW_OVERHEAD, SLOT_OVERHEAD
from llmppl.lm.engine import SlotEngine

MOST = 40                                               # tokens of a context, far beyond every sliding window
LIMIT = 1e-4


class Session:
    """A user of several lms at once, who checks every answer.

    A plain forward pass gives the truth of every context and string. `error` is the largest difference. The books are
    checked after every operation.
    """

    def __init__(self, *lms):
        self.lms = lms
        self.contexts = [[at(lm, [3])] for lm in lms]
        self.error = 0.0

    def do(self, kind, n, ids):
        which = n % len(self.lms)
        lm, contexts = self.lms[which], self.contexts[which]
        n //= len(self.lms)
        old, start = contexts[n % len(contexts)], None
        if kind == "context":
            contexts.append(at(lm, ids * (1 + n % 5)))
        elif kind == "token" and len(old) < MOST:
            contexts.append(old + lm.vocab[ids[0]])
        elif kind == "text" and len(old) + len(ids) <= MOST:
            text = b"".join(lm.vocab.tokens[i] for i in ids).decode(errors="ignore")
            contexts.append(old + text)
            assert contexts[-1].text == old.text + text
        elif kind == "drop" and len(contexts) > 1:
            contexts.remove(old)
        elif kind == "ask":
            self.error = max(self.error, error_of(lm, old))
        elif kind == "string":
            start = at(lm, [int(i) for i in old.tokens[: 1 + n % len(old)]])
            self.error = max(self.error, self.string_error(start, old))
        elif kind == "together":
            self.together(n)
        old = start = None
        for lm, contexts in zip(self.lms, self.contexts, strict=True):
            check_books(lm, contexts)

    @staticmethod
    def string_error(start, end):
        ids = [int(i) for i in end.tokens]
        right = sum(float(truth(end.lm, ids[:i])[ids[i]]) for i in range(len(start), len(ids)))
        return abs(end.log_prob_since(start) - right) / max(1, len(ids) - len(start))

    def together(self, n):
        """Request a row of each context of each lm in one run; then fork some contexts and score strings of others."""

        def asker(lm, context, k):
            def run():
                errors.append(error_of(lm, context))
                if k % 3 == 0 and len(context) < MOST:
                    errors.append(error_of(lm, context + lm.vocab[3 + k % 4]))
                if k % 3 == 1:
                    errors.append(self.string_error(at(lm, [int(context.tokens[0])]), context))

            return run

        errors = []
        pairs = [(lm, context) for lm, contexts in zip(self.lms, self.contexts, strict=True) for context in contexts]
        together([asker(lm, context, n + k) for k, (lm, context) in enumerate(pairs)])
        self.error = max(self.error, *errors)


def operations(low, high):
    kinds = st.sampled_from(["context", "token", "token", "text", "drop", "ask", "ask", "string", "together"])
    ids = st.lists(st.integers(low, high), min_size=1, max_size=8)
    return st.lists(st.tuples(kinds, st.integers(0, 999), ids), min_size=1, max_size=14)


# slots and rows that fit; a row takes 4 V bytes
BUDGETS = st.sampled_from([(0, 0), (0, 1), (3, 0), (7, 1), (12, 2), (30, 5), (100_000, 1000)])
BATCHES = st.sampled_from([1, 3, 16, 1 << 16])


def slot_bytes(name):
    """Return the bytes of a slot of a family, 0 if it has no slots."""
    engine = family_lm(name).engine
    return engine.slot_bytes if isinstance(engine, SlotEngine) else 0


def limits(slot_bytes, budget, batch, size=V):
    slots, rows = budget
    slot, row = (slot_bytes or 100) + SLOT_OVERHEAD, 4 * size + ROW_OVERHEAD
    return {"cache_bytes": slots * slot + rows * row, "max_batch_tokens": batch}


class Remembering(SlotEngine):
    """Engine whose slots hold token ids; its logits are a hash of the context that it reads back from them."""

    slot_bytes = 64

    def __init__(self):
        self.memory = np.full(0, -1)

    def reserve(self, slots):
        self.memory = np.concatenate([self.memory, np.full(max(0, slots - len(self.memory)), -1)])

    def forward(self, contexts, asked):
        return np.stack([logits_of(contexts[i][:n]) for i, n in asked])

    def run(self, batch):
        for i, n in enumerate(batch.lengths):
            places = batch.slots[i, batch.starts[i] : batch.starts[i] + n]
            self.memory[places] = batch.tokens[i, :n]
        read = [batch.slots[i, : batch.starts[i] + j + 1] for i, j in batch.asked]
        return np.stack([logits_of(self.memory[slots]) for slots in read])


def logits_of(ids):
    return np.random.default_rng([int(i) + 1 for i in ids]).normal(size=9)
