"""Random automata and vocabularies, and masks by trying every token."""

import numpy as np
from hypothesis import strategies as st

from llmppl.constraints import END, Vocabulary
from llmppl.constraints.masks.distances import bytes_to_accept


class Machine:
    """A tabled recognizer that makes its rows on demand; every state can reach an accepting one."""

    def __init__(self, table, accepting, start=1):
        table, accepting = np.array(table, np.int32), np.array(accepting, bool)
        alive = accepting.copy()
        alive[0] = False
        for _ in table:
            alive |= alive[table].any(1)
            alive[0] = False
        self.full = np.where(alive[table] & alive[:, None], table, 0).astype(np.int32)
        self.accepting = accepting & alive
        self.start = start if alive[start] else 0
        self.table, self.ready = np.zeros_like(self.full), np.arange(len(table)) == 0

    def __repr__(self):
        return "Machine()"

    def step(self, state, byte):
        return int(self.full[state, byte]) or None

    def accepts(self, state):
        return bool(self.accepting[state])

    def row(self, state):
        if not self.ready[state]:
            self.table, self.ready = self.table.copy(), self.ready.copy()  # as if they had grown
            self.table[state], self.ready[state] = self.full[state], True
        return self.table[state]

    def explore(self):
        for state in range(len(self.full)):
            self.row(state)


def read(recognizer, text, state=None):
    """Return the state after a text or bytes, None as soon as nothing can follow."""
    state = recognizer.start if state is None else state
    for byte in text if isinstance(text, bytes) else text.encode():
        state = recognizer.step(state, byte)
        if state is None:
            return None
    return state


def accepts(recognizer, text):
    state = read(recognizer, text)
    return state is not None and recognizer.accepts(state)


def drawn(dfa, rng, most):
    """Return a text of the language of at most `most` bytes, by a random walk."""
    dfa.explore()
    left, state, text = bytes_to_accept(dfa.table, dfa.accepting), dfa.start, []
    while True:
        row = dfa.table[state]
        fits = np.flatnonzero((row > 0) & (left[row] < most - len(text)))
        byte = rng.choice([*fits, *[-1] * dfa.accepts(state)])
        if byte < 0:
            return bytes(text).decode()
        text.append(byte)
        state = row[byte]


def brute_force(recognizer, vocab, state):
    """Return the mask of `state` by trying every byte of every token."""
    out = np.zeros(len(vocab.tokens), bool)
    for id, data in enumerate(vocab.tokens):
        if id in vocab.eos_ids:
            out[id] = recognizer.accepts(state)
        elif data and id not in getattr(vocab, "special_ids", ()):
            out[id] = read(recognizer, data, state) is not None
    return out


ALPHABET = [0, ord("a"), ord("b"), 0xC3, 0xA9, 0xFF]
PIECES = st.lists(st.sampled_from(ALPHABET), max_size=5).map(bytes)


@st.composite
def machines(draw):
    """Draw a random automaton over a few bytes that accepts something."""
    size = draw(st.integers(2, 6))
    table = np.zeros((size, 256), np.int32)
    for state in range(1, size):
        table[state, ALPHABET] = draw(st.lists(st.integers(0, size - 1), min_size=6, max_size=6))
    accepting = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    accepting[draw(st.integers(1, size - 1))] = True
    machine = Machine(table, accepting)
    return machine if machine.start else Machine(table, [True] * size)


@st.composite
def vocabularies(draw):
    """Draw tokens with duplicates, empty ones, halves of characters, specials and eos; every used byte is a token."""
    tokens = [bytes([byte]) for byte in ALPHABET] + draw(st.lists(PIECES, max_size=30))
    tokens += draw(st.lists(st.sampled_from(tokens), max_size=5)) + [b"</s>", b"<pad>"]
    order = draw(st.permutations(range(len(tokens))))
    tokens = [tokens[i] for i in order]
    others = [i for i, token in enumerate(tokens) if len(token) != 1]
    eos = [tokens.index(b"</s>")] + draw(st.lists(st.sampled_from(others), max_size=1))
    return Vocabulary(tokens, eos, [tokens.index(b"<pad>")])


def explore(index, limit=50):
    """Return the states that tokens reach."""
    seen, todo = {index.start}, [index.start]
    while todo and len(seen) < limit:
        state = todo.pop()
        for id in index.allowed(state).tolist():
            target = index.advance(state, id)
            if target is not END and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen
