"""Pre-tokens: where a tokenizer cuts a text before it merges, read byte by byte with the cuts guessed.

One idea: whether a cut falls at a border may depend on what comes later, so a state holds every guess that has not
failed yet: at each border one guess says "cut" and another "no cut", and a guess dies when the text shows that the
pattern would have matched otherwise. A token then asks of its borders: no cut inside it, and between two tokens that
would merge there must be one.

Words. The matches of a *split* (`llmppl.constraints.vocabulary.patterns`), and the gaps between them, are the pre-tokens. A *border* is
a place between two characters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmppl.constraints.vocabulary.patterns import Guess, Split
from llmppl.support.graphs import Memo

Guesses = frozenset[tuple[Guess, ...]]              # one of every split, together

INSIDE, CUT, OPEN = 1, 2, 3                         # a border: no cut, a cut, either
FALLBACK = 4                                        # added to a border: the character is spelled by byte tokens
BEGUN = 8 | INSIDE                                  # no border of tokens yet, only what every text begins with


class Reading(NamedTuple):
    """Where the reading of a text stands."""

    guesses: Guesses | None                         # a guess for each split; None where a pre-token has to begin
    literals: frozenset[bytes]                      # what would complete a forbidden literal
    pending: bytes                                  # of a character that is not complete
    border: int                                     # before the next character: INSIDE, CUT or OPEN; or with FALLBACK


class PreTokens:
    """The borders of a text at which the splits, each applied to the pre-tokens of those before it, may cut.

    A Recognizer of texts in UTF-8: its states are Readings, and a step never cuts unless `open` came before it.

    Parameters
    ----------
    splits : sequence of Split
    literals : strings that the text must not hold, as bytes
    alphabet : characters that byte tokens must not spell
    begin : bytes, at most one, that every text begins with that is not empty
    alone : whether that can be the whole text
    """

    def __init__(
        self, splits: Sequence[Split], literals: Iterable[bytes] = (), alphabet: Iterable[str] = (), begin: bytes = b"",
        alone: bool = True,
    ) -> None:  # fmt: skip
        self.splits = list(splits)
        self.alphabet, self.begin = frozenset(alphabet), begin
        self._begun = INSIDE if alone else BEGUN
        self.start = Reading(None, frozenset(), b"", OPEN)
        self._literals: dict[int, list[bytes]] = {}  # by their first byte, what follows it
        for literal in literals:
            self._literals.setdefault(literal[0], []).append(literal[1:])
        self._moved: Memo[tuple[Guesses | None, int, tuple[int, ...]], Guesses] = Memo(lambda key: self._move(*key))

    def open(self, state: Reading, stable: bool) -> Reading | None:
        """The state at the border of two tokens: with a cut, or without one if they are `stable` side by side."""
        if state.pending:
            return state._replace(border=state.border | FALLBACK) if stable else None
        if state.guesses is not None and not stable and not self.splits:
            return None
        return state._replace(border=OPEN if stable else CUT)

    def step(self, state: Reading, byte: int) -> Reading | None:
        """The state after a byte, or None if the text cannot go on so."""
        guesses, literals, pending, border = state
        ahead = {rest[1:] for rest in literals if rest[0] == byte}.union(self._literals.get(byte, ()))
        pending += bytes([byte])
        if b"" in ahead or (guesses is None and not pending.startswith(self.begin)):
            return None
        try:
            char = pending.decode()
        except UnicodeDecodeError as error:
            incomplete = error.reason == "unexpected end of data"
            return Reading(guesses, frozenset(ahead), pending, border) if incomplete else None
        if border & FALLBACK and char in self.alphabet:
            return None
        found = self._moved[guesses, border & 3, tuple([split.bits[char] for split in self.splits])]
        return Reading(found, frozenset(ahead), b"", INSIDE if guesses else self._begun) if found else None

    def accepts(self, state: Reading) -> bool:
        """Whether a text, or the part of it before a hard cut, may end here."""
        ends = not state.pending and state.border != BEGUN
        return ends and (state.guesses is None or any(self._end(guesses, 0) for guesses in state.guesses))

    def _end(self, guesses: tuple[Guess, ...], first: int) -> bool:
        return all(map(Split.ends, self.splits[first:], guesses[first:]))

    def _begin(self, bits: Sequence[int], first: int) -> list[tuple[Guess, ...]]:
        return list(itertools.product(*map(Split.begin, self.splits[first:], bits[first:])))

    def _move(self, guesses: Guesses | None, border: int, bits: Sequence[int]) -> Guesses:
        if guesses is None:
            return frozenset(self._begin(bits, 0))
        return frozenset(new for each in guesses for cut, new in self._moves(each, bits, 0) if border >> cut & 1)

    def _moves(self, guesses: tuple[Guess, ...], bits: Sequence[int], at: int) -> list[tuple[bool, tuple[Guess, ...]]]:
        """Whether any of the splits from `at` on cuts, and their guesses after it: below a cut, they begin anew."""
        if at == len(self.splits):
            return [(False, ())]
        found: list[tuple[bool, tuple[Guess, ...]]] = []
        for cut, guess in self.splits[at].step(guesses[at], bits[at]):
            if not cut:
                found += [(below, (guess, *rest)) for below, rest in self._moves(guesses, bits, at + 1)]
            elif self._end(guesses, at + 1):
                found += [(True, (guess, *rest)) for rest in self._begin(bits, at + 1)]
        return found
