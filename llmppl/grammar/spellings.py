"""Witness spellings: a short way to see that a text can be completed where ignored text may stand between tokens.

A terminal T is given a *spelling* w and a *separator* s such that w s is read as T and ignored text in *every* lexer
that has T, whatever follows, and leaves nothing forbidden that a spelling begins with (the residue is *clean*). Then a
text whose parser stack is completed by tokens that have spellings is completed by those. Another terminal is harmless
if it does not match within w s and is not under way at its end; if it comes after T, and after all terminals that T is
split off, in lark's order; or if T is split off it. This is decided without regard to guards, which only forbid; where
that or guards of T leave a doubt, w s is read in every lexer instead.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from llmppl.grammar.lexer import Ended, PartialTokens
from llmppl.grammar.terminal_texts import TerminalTexts
from llmppl.grammar.terminals import Terminal
from llmppl.growing import Memo, reached

MAX_READ = 2_000_000                                # states of terminals looked at for spellings
MAX_READ_IN_LEXERS = 24                             # pairs of a spelling and a separator that are read in every lexer


class WitnessSpellings:
    """The spellings of a grammar's terminals, found once.

    Attributes
    ----------
    missing : names of terminals without a spelling
    spellable_after : (lexer, residue) -> bool
        Whether any tokens that the parser takes next, but those missing, can be spelled there.
    shortest_ends : (partial token, whether along keywords only) -> tuple of Ended
        Some ways in which it may end: along the shortest text of each terminal that it may still be.
    """

    def __init__(
        self, partials: PartialTokens, terminals: Sequence[Terminal], lexers_after: dict[str, set[int]]
    ) -> None:
        self.partials, self.automata = partials, partials.automata
        lexed = set(itertools.chain.from_iterable(partials.lexers))
        ranked = [terminal for terminal in terminals if terminal.name in lexed]
        self.texts = TerminalTexts(self.automata, ranked)
        self.spellable_after = Memo(self._is_spellable_after)
        self.shortest_ends = Memo(self._find_shortest_ends)
        self._firsts = Memo(self._find_firsts)
        self._guarded = set(map(self.automata.names.__getitem__, self.automata.guards))
        self._rank = {terminal.name: rank for rank, terminal in enumerate(ranked)}
        self._keywords = {terminal.name: terminal.keywords for terminal in ranked}
        self._hosts: dict[str, list[str]] = defaultdict(list)   # of a keyword
        for host, names in self._keywords.items():
            for name in names:
                self._hosts[name].append(host)
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, residue)
        self.words: dict[str, bytes] = {}
        self.ignored = partials.ignored
        ignored = [terminal for terminal in ranked if terminal.name in self.ignored]
        candidates = {s: t.name for t in ignored for s in self.texts.texts(t) if self._separates(s, t.name)}
        separators = [*sorted(candidates, key=len), b""]
        found = {t.name: self._find_spelling(t, separators) for t in ranked if t.name not in self.ignored}
        self.words = {name: pair[0] for name, pair in found.items() if pair}
        self.missing = found.keys() - self.words
        self.separators = list(dict.fromkeys(pair[1] for pair in found.values() if pair and pair[1]))
        self.usable = (
            all(self._leaves_none_begun(s, candidates[s]) for s in self.separators)
            and all(self._leaves_none_begun_after(name) for name, pair in found.items() if pair and not pair[1])
            and all(self._clean(*place) for place in self._to_be_clean)
        )

    # ---- what is asked

    def _is_spellable_after(self, place: tuple[int, int]) -> bool:
        lexer, _ = place
        return self.usable and any(self._clean(lexer, residue) for residue in self._residues(*place))

    def _residues(self, lexer: int, residue: int) -> Iterator[int]:
        """What is left after a residue, and after it and a separator."""
        yield residue
        for separator in self.separators:
            yield from self._ignored(lexer, residue, separator)

    def _find_shortest_ends(self, key: tuple[int, bool]) -> tuple[Ended, ...]:
        token, keywords = key
        current = self.partials.tokens[token]
        first: dict[str, int] = {}
        for q in current.keyword_threads if keywords else current.threads:
            first.setdefault(self.automata.names[q], q)
        ends = itertools.chain.from_iterable(self.read((token,), self.texts.tail(q)) for q in first.values())
        return tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

    def read(self, tokens: tuple[int, ...], text: bytes) -> list[tuple[Ended, ...]]:
        """The ways in which a token that is under way may end after each byte of a text."""
        ends: list[tuple[Ended, ...]] = [()]
        for byte in text:
            tokens, ended = self.partials.step_all(tokens, byte)
            ends.append(ended)
        return ends

    # ---- what is clean

    def _find_firsts(self, lexer: int) -> set[int]:
        """The first bytes of the spellings that a lexer may meet."""
        return {self.words[name][0] for name in self.words.keys() & set(self.partials.lexers[lexer])}

    def _clean(self, lexer: int, residue: int) -> bool:
        forbidden, required, _ = self.partials.residues[residue]
        return not required and not self._reads(forbidden, lexer)

    def _reads(self, states: Collection[int], lexer: int) -> bool:
        """Whether one of `states` goes on with the first byte of some spelling that a lexer may meet."""
        edges = {edge[:2] for q in states for edge in self.automata.edges[q]}
        return any(lo <= byte <= hi for lo, hi in edges for byte in self._firsts[lexer])

    def _leaves_none_begun(self, separator: bytes, name: str) -> bool:
        """Whether no spelling goes on with what is under way of an ignored terminal after a separator."""
        left = {q for q in self.texts.left(separator) if self.automata.names[q] == name}
        return not any(self._reads(left, lexer) for lexer in range(len(self.partials.lexers)))

    def _leaves_none_begun_after(self, name: str) -> bool:
        """The same of all that is under way after a spelling without a separator."""
        left = self.texts.left(self.words[name])
        return not any(self._reads(left, lexer) for lexer in self._lexers_after[name])

    def _ignored(self, lexer: int, residue: int, text: bytes) -> list[int]:
        """What is left after an ignored token, if `text` may be one after `residue`."""
        ends = self.read(self.partials.starts[lexer, residue], text)[-1]
        return [end.residue for end in ends if end.symbol is None]

    # ---- how they are found

    def _separates(self, text: bytes, name: str) -> bool:
        """Whether an ignored text is read as that in every lexer, and as a whole; it may leave itself under way."""
        if name in self._guarded or self._hosts[name] or self.texts.matches(name, text) != [len(text)]:
            return False
        matched, _ = self.texts.after(text)
        return all(self._rank[rival] >= self._rank[name] for rival in matched | self.texts.names_left(text))

    def _find_spelling(self, terminal: Terminal, separators: list[bytes]) -> tuple[bytes, bytes] | None:
        """The spelling of a terminal and the separator behind it (b"": none is needed)."""
        pairs = [(w, s) for s, w in itertools.product(separators, self.texts.texts(terminal))]
        found = next((pair for pair in pairs if self._spells(terminal, *pair)), None)
        read = pairs[:MAX_READ_IN_LEXERS]
        return found or next((pair for pair in read if self._spells_in_lexers(terminal.name, *pair)), None)

    def _spells(self, terminal: Terminal, w: bytes, s: bytes) -> bool:
        """Whether w s is read as `terminal` and ignored text in every lexer that has it."""
        hosts = self._hosts[terminal.name]
        own = {terminal.name, *hosts}
        odd = own & (self.ignored | self._guarded) - {terminal.name}
        if self.texts.num_read > MAX_READ or odd or terminal.name in self._guarded:
            return False
        last = max(map(self._rank.__getitem__, own))
        matched, _ = self.texts.after(w + s)
        begun = self.texts.names_left(w + s) if s else set[str]()
        if any(self._rank[name] <= last for name in begun.union(matched - own)):
            return False
        rivals = set(itertools.chain(*map(self._keywords.__getitem__, hosts))) & self._rank.keys() - {terminal.name}
        if any(self.texts.matches(rival, w)[-1:] == [len(w)] for rival in rivals & self.texts.after(w)[0]):
            return False
        return all(self.texts.preferred_match(name, w + s) == len(w) for name in own)

    def _spells_in_lexers(self, name: str, w: bytes, s: bytes) -> bool:
        """The same by reading w s in every lexer that has the terminal, whatever came before."""
        found: list[tuple[int, int]] = []
        if not s:
            return False
        lexers = [lexer for lexer, names in enumerate(self.partials.lexers) if name in names]
        for lexer, trackers in itertools.product(lexers, self._contexts):
            begun = self.partials.begin_behind(lexer, trackers)
            ends = [end for end in self.read(begun, w)[-1] if end.terminal == name]
            for after in self._lexers_after[name]:
                left = [(after, residue) for end in ends for residue in self._ignored(after, end.residue, s)]
                if len(left) != 1:                  # none where the token does not end
                    return False
                found += left
        self._to_be_clean += found
        return True

    @cached_property
    def _contexts(self) -> list[tuple[int, ...]]:
        """All states that the look-behind trackers can be in together, behind whole characters."""
        begun = self.partials.residues[self.partials.first].trackers
        return list(reached([begun], lambda states: [self.automata.track(states, byte) for byte in range(256)]))
