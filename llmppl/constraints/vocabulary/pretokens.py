"""Pre-tokens: the parts into which a tokenizer cuts a text before it merges, read byte by byte.

Whether the text is cut at a border may depend on later characters. A state therefore holds every *guess* that is still
possible. At each border one guess says "cut" and another "no cut", and a guess is dropped once the text shows that the
pattern would have matched otherwise. A token may have no cut inside it, and two tokens that would merge need a cut
between them.

Terms: pre-tokens are the matches of a *split* (`llmppl.constraints.vocabulary.patterns`) and the gaps between them. A
*border* is the place between two characters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmppl.constraints.vocabulary.patterns import Guess, Split
from llmppl.support.graphs import Memo

Guesses = frozenset[tuple[Guess, ...]]              # alternatives, each with one guess per split

INSIDE, CUT, OPEN = 1, 2, 3                         # at a border: no cut, a cut, or either
FALLBACK = 4                                        # added to a border: byte tokens spell the character
BEGUN = 8 | INSIDE                                  # only the bytes that begin every text were read, no token yet


class PreTokenState(NamedTuple):
    """State of the pre-tokeniser after a part of a text."""

    guesses: Guesses | None                         # None where a pre-token must begin
    literals: frozenset[bytes]                      # rests that would complete a forbidden literal
    pending: bytes                                  # bytes of an incomplete character
    border: int                                     # before the next character: INSIDE, CUT or OPEN; or with FALLBACK


class PreTokens:
    """Borders of a text at which the splits may cut; each split applies to the pre-tokens of those before it.

    A Recognizer of UTF-8 texts. Its states are PreTokenStates; a step cuts only if `open` was called before it.

    Parameters
    ----------
    splits : sequence of Split
    literals : strings that the text must not contain, as bytes
    alphabet : characters that byte tokens must not spell
    begin : at most one byte, with which every text begins that is not empty
    alone : bool
        True if `begin` alone can be the whole text.
    """

    def __init__(
        self, splits: Sequence[Split], literals: Iterable[bytes] = (), alphabet: Iterable[str] = (), begin: bytes = b"",
        alone: bool = True,
    ) -> None:  # fmt: skip
        self.splits = list(splits)
        self.alphabet, self.begin = frozenset(alphabet), begin
        self._begun = INSIDE if alone else BEGUN
        self.start = PreTokenState(None, frozenset(), b"", OPEN)
        self._literals: dict[int, list[bytes]] = {}  # first byte -> the bytes after it
        for literal in literals:
            self._literals.setdefault(literal[0], []).append(literal[1:])
        self._moved: Memo[tuple[Guesses | None, int, tuple[int, ...]], Guesses] = Memo(lambda key: self._move(*key))

    def open(self, state: PreTokenState, stable: bool) -> PreTokenState | None:
        """Return the state at the border of two tokens: cut, or either cut or not if they are a `stable` pair."""
        if state.pending:
            return state._replace(border=state.border | FALLBACK) if stable else None
        if state.guesses is not None and not stable and not self.splits:
            return None
        return state._replace(border=OPEN if stable else CUT)

    def step(self, state: PreTokenState, byte: int) -> PreTokenState | None:
        """Return the state after a byte, or None if no text continues so."""
        guesses, literals, pending, border = state
        ahead = {rest[1:] for rest in literals if rest[0] == byte}.union(self._literals.get(byte, ()))
        pending += bytes([byte])
        if b"" in ahead or (guesses is None and not pending.startswith(self.begin)):
            return None
        try:
            char = pending.decode()
        except UnicodeDecodeError as error:
            incomplete = error.reason == "unexpected end of data"
            return PreTokenState(guesses, frozenset(ahead), pending, border) if incomplete else None
        if border & FALLBACK and char in self.alphabet:
            return None
        found = self._moved[guesses, border & 3, tuple([split.bits[char] for split in self.splits])]
        return PreTokenState(found, frozenset(ahead), b"", INSIDE if guesses else self._begun) if found else None

    def accepts(self, state: PreTokenState) -> bool:
        """Return True if the text, or the part of it before a separating token, may end here."""
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
        """Return pairs: True if a split from `at` on cuts before the next character, and the guesses of these splits.

        Where a split cuts, all later splits begin anew.
        """
        if at == len(self.splits):
            return [(False, ())]
        found: list[tuple[bool, tuple[Guess, ...]]] = []
        for cut, guess in self.splits[at].step(guesses[at], bits[at]):
            if not cut:
                found += [(later_cut, (guess, *rest)) for later_cut, rest in self._moves(guesses, bits, at + 1)]
            elif self._end(guesses, at + 1):
                found += [(True, (guess, *rest)) for rest in self._begin(bits, at + 1)]
        return found
