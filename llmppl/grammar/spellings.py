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
from collections.abc import Iterable, Sequence
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
        self._guarded = {self.automata.names[q] for q in self.automata.guards}
        self._rank = {terminal.name: rank for rank, terminal in enumerate(ranked)}
        self._hosts: dict[str, list[Terminal]] = defaultdict(list)
        for terminal in ranked:
            for name in terminal.keywords:
                self._hosts[name].append(terminal)
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, residue)
        self.words: dict[str, bytes] = {}
        self.ignored = partials.ignored
        ignored = {s: t.name for t in ranked if t.name in self.ignored for s in self.texts.texts(t)}
        candidates = {s: name for s, name in ignored.items() if self._separates(s, name)}
        separators = [*sorted(candidates, key=len), b""]
        spelled = [terminal for terminal in ranked if terminal.name not in self.ignored]
        found = {terminal.name: self._find_spelling(terminal, separators) for terminal in spelled}
        self.missing = {name for name, pair in found.items() if pair is None}
        pairs = {name: pair for name, pair in found.items() if pair}
        self.words = {name: word for name, (word, _) in pairs.items()}
        self.separators = list(dict.fromkeys(separator for _, separator in pairs.values() if separator))
        self.usable = (
            all(self._leaves_none_begun(s, candidates[s]) for s in self.separators)
            and all(self._leaves_none_begun_after(name) for name, (_, separator) in pairs.items() if not separator)
            and all(self._clean(*place) for place in self._to_be_clean)
        )

    # ---- what is asked

    def _is_spellable_after(self, place: tuple[int, int]) -> bool:
        lexer, _ = place
        after = (residue for s in self.separators for residue in self._ignored(*place, s))
        return self.usable and (self._clean(*place) or any(self._clean(lexer, residue) for residue in after))

    def _find_shortest_ends(self, key: tuple[int, bool]) -> tuple[Ended, ...]:
        token, keywords = key
        current = self.partials.tokens[token]
        first: dict[str, int] = {}
        for q in current.keyword_threads if keywords else current.threads:
            first.setdefault(self.automata.names[q], q)
        ended = [ended for q in first.values() for ended in self.read((token,), self.texts.tail(q))]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(ended)))

    def read(self, tokens: Iterable[int], text: bytes) -> list[tuple[Ended, ...]]:
        """The ways in which a token that is under way may end after each byte of a text."""
        ends: list[tuple[Ended, ...]] = [()]
        for byte in text:
            outcomes = [self.partials.step(token, byte) for token in tokens]
            tokens = dict.fromkeys(itertools.chain.from_iterable(going_on for going_on, _ in outcomes))
            ends.append(tuple(itertools.chain.from_iterable(ended for _, ended in outcomes)))
        return ends

    # ---- what is clean

    def _find_firsts(self, lexer: int) -> set[int]:
        """The first bytes of the spellings that a lexer may meet."""
        return {self.words[name][0] for name in self.words.keys() & set(self.partials.lexers[lexer])}

    def _clean(self, lexer: int, residue: int) -> bool:
        forbidden, required, _ = self.partials.residues[residue]
        return not required and not self._reads(forbidden, lexer)

    def _reads(self, states: Iterable[int], lexer: int) -> bool:
        """Whether one of `states` goes on with the first byte of some spelling that a lexer may meet."""
        edges = {(lo, hi) for q in states for lo, hi, _ in self.automata.edges[q]}
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
        rivals = {*matched, *(self.automata.names[q] for q in self.texts.left(text))}
        return all(self._rank[rival] >= self._rank[name] for rival in rivals)

    def _find_spelling(self, terminal: Terminal, separators: list[bytes]) -> tuple[bytes, bytes] | None:
        """The spelling of a terminal and the separator behind it (b"": none is needed)."""
        pairs = [(w, s) for s, w in itertools.product(separators, self.texts.texts(terminal))]
        found = next((pair for pair in pairs if self._spells(terminal, *pair)), None)
        read = pairs[:MAX_READ_IN_LEXERS]
        return found or next((pair for pair in read if self._spells_in_lexers(terminal.name, *pair)), None)

    def _spells(self, terminal: Terminal, w: bytes, s: bytes) -> bool:
        """Whether w s is read as `terminal` and ignored text in every lexer that has it."""
        hosts = self._hosts[terminal.name]
        own = {terminal.name, *(host.name for host in hosts)}
        odd = own & (self.ignored | self._guarded) - {terminal.name}
        if self.texts.num_read > MAX_READ or odd or terminal.name in self._guarded:
            return False
        last, names = max(map(self._rank.__getitem__, own)), self.automata.names
        matched, _ = self.texts.after(w + s)
        begun = {names[q] for q in self.texts.left(w + s)} if s else set[str]()
        if any(self._rank[name] <= last for name in begun.union(matched - own)):
            return False
        rivals = {name for host in hosts for name in host.keywords} & self._rank.keys() - {terminal.name}
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
        trackers = self.automata.trackers

        def after(states: tuple[int, ...], byte: int) -> tuple[int, ...]:
            pairs = zip(trackers, states, strict=True)
            return tuple([int(tracker.step(state, byte) or 0) if state else 0 for tracker, state in pairs])

        begun = tuple([int(tracker.start) for tracker in trackers])
        return list(reached([begun], lambda states: [after(states, byte) for byte in range(256)]))
