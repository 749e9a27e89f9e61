"""Witness spellings: a short way to see that a text can be completed where ignored text may stand between tokens.

A terminal T is given a *spelling* w and a *separator* s such that w s is read as T and ignored text in *every* lexer
that has T, whatever follows, and leaves nothing forbidden that a spelling begins with (the residue is *clean*). Then a
text whose parser stack is completed by tokens that have spellings is completed by those. Another terminal is harmless
if it does not match within w s and is not under way at its end; if it comes after T, and after all terminals that T is
split off, in lark's order; or if T is split off it. This is decided without regard to guards, which only forbid; where
that or guards of T leave a doubt, w s is read in every lexer instead, behind separators and spellings that have none:
behind anything else, a separator comes first.

Where only some terminals are needed to complete a stack, a residue may also be *idle*: it goes on with the bytes of
their spellings and separators, but never matches within them.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from llmppl.constraints.automata.nfa import ANY, DEAD
from llmppl.constraints.lark.lexer import Ended, PartialTokens
from llmppl.constraints.lark.terminals import Assumptions, Automata, Terminal
from llmppl.support.graphs import Memo, reached, turned

MAX_READ = 2_000_000                                # states of terminals looked at for spellings
MAX_READ_IN_LEXERS = 24                             # pairs of a spelling and a separator that are read in every lexer
PREFERRED_BYTES = b"ax_z019 \t\n\"'"                # that texts are made of where a class leaves the choice
MAX_BEGINNINGS = 100                                # of a terminal from which a text is looked for
MAX_TEXTS = 12                                      # of a terminal
MAX_LENGTH = 1000                                   # of a text
MAX_KEPT_TEXT = 256                                 # bytes at whose beginnings it is kept what is under way


class TerminalTexts:
    """Short texts of a grammar's terminals, and what is under way after a text that those `begun` may begin.

    Guards are not looked at: since they only forbid, what is found is more than truly matches or is under way.
    """

    def __init__(self, automata: Automata, begun: Iterable[Terminal]) -> None:
        self.automata = automata
        self.num_read = 0                           # states looked at so far
        self._ways = self._find_ways()
        starts = [automata.starts[terminal.name] for terminal in begun]
        self._read_so_far: dict[bytes, tuple[frozenset[str], set[int]]] = {b"": (frozenset(), self._under_way(starts))}

    def _find_ways(self) -> dict[int, tuple[int, bytes, int]]:
        """From every state the length of the shortest text to its terminal's end, its first byte, and what comes next.

        The byte is b"" where nothing is read.
        """
        sources: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for q, edges in enumerate(self.automata.edges):
            for lo, hi, target in edges:
                preferred = next((byte for byte in PREFERRED_BYTES if lo <= byte <= hi), lo)
                sources[target].append((q, bytes([preferred])))
            for target in self.automata.epsilon[q]:
                sources[target].append((q, b""))
        ways: dict[int, tuple[int, bytes, int]] = {}
        todo = deque((0, q, b"", DEAD) for q in self.automata.ends)
        while todo:
            length, q, head, target = todo.popleft()
            if q not in ways:
                ways[q] = length, head, target
                for source, byte in sources[q]:
                    (todo.append if byte else todo.appendleft)((length + len(byte), source, byte, q))
        return ways

    def tail(self, state: int) -> bytes:
        """The shortest text from a state to the end of its terminal."""
        text = bytearray()
        while state in self._ways:
            _, head, state = self._ways[state]
            text += head
        return bytes(text)

    def texts(self, terminal: Terminal) -> list[bytes]:
        """A few short spellings of a terminal, shortest first."""
        if len(terminal.words) == 1:
            return [terminal.words[0].encode()]
        begun = self._under_way([self.automata.starts[terminal.name]])
        edges = [edge for edge in self.automata.edges_of(begun) if edge[2] in self._ways]
        edges.sort(key=lambda edge: self._ways[edge[2]][0])
        found: set[bytes] = set()
        for lo, hi, target in edges[:MAX_BEGINNINGS]:
            heads = filter(range(lo, hi + 1).__contains__, {*PREFERRED_BYTES, lo})
            tails = [self.tail(target)][: self._ways[target][0] < MAX_LENGTH]
            found.update(bytes([byte]) + tail for tail in tails for byte in heads)
        order = sorted(found, key=lambda text: (len(text), PREFERRED_BYTES.find(text[:1]) % 256, text))
        return order[:MAX_TEXTS]

    def _under_way(self, states: Iterable[int]) -> set[int]:
        """What states become without reading, with the look-aheads that are met."""
        return set(reached([q for q in states if q != DEAD], self.automata.unguarded))

    def after(self, text: bytes) -> tuple[frozenset[str], set[int]]:
        """The terminals that match within a text, and the states under way at its end."""
        known = next(n for n in range(len(text), -1, -1) if text[:n] in self._read_so_far)
        names, states = self._read_so_far[text[:known]]
        for n in range(known, len(text)):
            states = self._under_way(self.automata.read(states, text[n]))
            names |= self._ended(states)
            self.num_read += len(states) + 1
            if n < MAX_KEPT_TEXT:
                self._read_so_far[text[: n + 1]] = names, states
        return names, states

    def _ended(self, states: set[int]) -> set[str]:
        """The terminals whose matches end with one of the states."""
        ends = self.automata.ends
        return set(map(ends.__getitem__, (states & ends.keys()) - self.automata.found))

    def left(self, text: bytes) -> set[int]:
        """The states under way after a text that may read on."""
        return set(filter(self.automata.edges.__getitem__, self.after(text)[1]))

    def names_left(self, text: bytes) -> set[str]:
        """The terminals that these are of."""
        return self.automata.names_of(self.left(text))

    def matches(self, name: str, text: bytes) -> list[int]:
        """Where a terminal matches within a text."""
        states, found = self._under_way([self.automata.starts[name]]), []
        for at, byte in enumerate(text, 1):
            states = self._under_way(self.automata.read(states, byte))
            found += [at] * (name in self._ended(states))
        return found

    def preferred_match(self, name: str, text: bytes) -> int | None:
        """Where the match ends that a terminal without guards prefers at the beginning of a text."""
        threads, found = self.automata.closure([self.automata.starts[name]], (), Assumptions()), None
        for at, byte in enumerate(text, 1):
            threads = self.automata.closure(self.automata.read(threads, byte), (), Assumptions())
            end = next((i for i, q in enumerate(threads) if q in self.automata.ends), None)
            if end is not None:
                found, threads = at, threads[:end]
        return found


class WitnessSpellings:
    """The spellings of a grammar's terminals, found once.

    Attributes
    ----------
    missing : names of terminals without a spelling
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
        self.shortest_ends = Memo(self._find_shortest_ends)
        self._firsts = Memo(self._find_firsts)
        self._idle = Memo(self._is_idle)
        self._bytes_of = Memo(self._find_bytes)
        self._guarded = self.automata.names_of(self.automata.guards)
        self._rank = {terminal.name: rank for rank, terminal in enumerate(ranked)}
        self._keywords = {terminal.name: terminal.keywords for terminal in ranked}
        self._hosts = turned(self._keywords.items())    # of a keyword
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, residue)
        self.ignored = partials.ignored
        ignored = [terminal for terminal in ranked if terminal.name in self.ignored]
        candidates = {s: t.name for t in ignored for s in self.texts.texts(t) if self._separates(s, t.name)}
        texts = {terminal: self.texts.texts(terminal) for terminal in ranked if terminal.name not in self.ignored}
        heads = {text[0] for each in texts.values() for text in each}
        separators = [*sorted(candidates, key=lambda s: (self._num_read_on(s, heads), len(s))), b""]
        tried = {t: [(w, s) for s, w in itertools.product(separators, each)] for t, each in texts.items()}
        found = {t.name: next((pair for pair in each if self._spells(t, *pair)), None) for t, each in tried.items()}
        unseparated = [pair[0] for pair in found.values() if pair and not pair[1]]
        missing = [t for t in tried if not found[t.name]]
        self._contexts = self._find_contexts([*candidates, *unseparated]) if missing else set()
        for t in missing:
            read = list(filter(all, tried[t]))[:MAX_READ_IN_LEXERS]     # those with a separator
            found[t.name] = next((pair for pair in read if self._spells_in_lexers(t.name, *pair)), None)
        pairs = self._pairs = {name: pair for name, pair in found.items() if pair}
        self.words = {name: word for name, (word, _) in pairs.items()}
        self.missing = found.keys() - self.words
        self.separators = list(filter(None, dict.fromkeys(separator for _, separator in pairs.values())))
        clean = all(itertools.starmap(self._clean, self._to_be_clean))
        self.usable = clean and not any(itertools.starmap(self._reads, self._left_behind(candidates)))

    # ---- what is asked

    def is_spellable_after(self, lexer: int, residue: int, names: frozenset[str] | None) -> bool:
        """Whether any tokens that the parser takes next, of the terminals `names` only (None: any), can be spelled.

        A separator may come first. The residue must be clean then, or idle; and before it must be what some spellings
        were read behind.
        """
        separated = itertools.chain.from_iterable(self._ignored(lexer, residue, s) for s in self.separators)
        places = filter(self._fits, [residue, *separated]) if self.usable else []
        return any(self._clean(lexer, left) or (names is not None and self._idle[left, names]) for left in places)

    def _fits(self, residue: int) -> bool:
        return not self._to_be_clean or self.partials.residues[residue].trackers in self._contexts

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
        return not (required or self._reads(forbidden, lexer))

    def _is_idle(self, key: tuple[int, frozenset[str]]) -> bool:
        """Whether nothing is required, and nothing forbidden matches within bytes that spellings are made of."""
        residue, names = key
        forbidden, required, _ = self.partials.residues[residue]
        bytes = self._bytes_of[names]

        def onward(state: int) -> Iterator[int]:
            yield from self.automata.unguarded(state)
            for lo, hi, target in self.automata.edges[state]:
                if bisect_left(bytes, lo) < bisect_right(bytes, hi):
                    yield target

        return not required and self.automata.ends.keys().isdisjoint(reached(forbidden, onward))

    def _find_bytes(self, names: frozenset[str]) -> list[int]:
        """The bytes of which the spellings of terminals are made, and what separates these."""
        spelled = names & self._pairs.keys()            # the others are never read
        return sorted(set().union(*itertools.chain.from_iterable(self._pairs[name] for name in spelled)))

    def _reads(self, states: Collection[int], lexer: int) -> bool:
        """Whether one of `states` goes on with the first byte of some spelling that a lexer may meet."""
        ranges = {edge[:2] for edge in self.automata.edges_of(states)}
        return any(lo <= byte <= hi for (lo, hi), byte in itertools.product(ranges, self._firsts[lexer]))

    def _left_behind(self, ignored: dict[bytes, str]) -> Iterator[tuple[set[int], int]]:
        """What separators leave under way of their terminals, and spellings without one of all; each with a lexer."""
        for separator in self.separators:
            left = {q for q in self.texts.left(separator) if self.automata.names[q] == ignored[separator]}
            yield from itertools.product([left], range(len(self.partials.lexers)))
        for name, (word, separator) in self._pairs.items():
            behind = () if separator else self._lexers_after[name]
            yield from itertools.product([self.texts.left(word)], behind)

    def _ignored(self, lexer: int, residue: int, text: bytes) -> list[int]:
        """What is left after an ignored token, if `text` may be one after `residue`."""
        ends = self.read(self.partials.starts[lexer, residue], text)[-1]
        return [end.residue for end in ends if end.symbol is None]

    # ---- how they are found

    def _separates(self, text: bytes, name: str) -> bool:
        """Whether an ignored text is read as that in every lexer, and as a whole; it may leave itself under way."""
        if name in self._guarded or name in self._hosts or self.texts.matches(name, text) != [len(text)]:
            return False
        matched, _ = self.texts.after(text)
        return all(self._rank[rival] >= self._rank[name] for rival in matched | self.texts.names_left(text))

    def _num_read_on(self, text: bytes, heads: set[int]) -> int:
        """With how many of some bytes what a text leaves under way goes on."""
        ranges = [edge[:2] for edge in self.automata.edges_of(self.texts.left(text))]
        return sum(any(lo <= byte <= hi for lo, hi in ranges) for byte in heads)

    def _spells(self, terminal: Terminal, w: bytes, s: bytes) -> bool:
        """Whether w s is read as `terminal` and ignored text in every lexer that has it."""
        hosts = self._hosts.get(terminal.name, [])
        own = {terminal.name, *hosts}
        if self.texts.num_read > MAX_READ or own & self._guarded or self.ignored.intersection(hosts):
            return False
        last = max(map(self._rank.__getitem__, own))
        matched, _ = self.texts.after(w + s)
        begun = self.texts.names_left(w + s) if s else set[str]()
        split_off = set(itertools.chain.from_iterable(map(self._keywords.__getitem__, hosts))) - {terminal.name}
        return (
            all(self._rank[name] > last for name in begun.union(matched - own))
            and not any(self.texts.matches(rival, w)[-1:] == [len(w)] for rival in split_off & self.texts.after(w)[0])
            and all(self.texts.preferred_match(name, w + s) == len(w) for name in own)
        )

    def _spells_in_lexers(self, name: str, w: bytes, s: bytes) -> bool:
        """The same by reading w s in every lexer that has the terminal, behind all that is before spellings."""
        found: list[tuple[int, int]] = []
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

    def _find_contexts(self, texts: Sequence[bytes]) -> set[tuple[int, ...]]:
        """All states that the look-behind trackers can be in together behind one of some texts."""

        def onward(place: tuple[tuple[int, ...], int]) -> Iterator[tuple[tuple[int, ...], int]]:
            states, node = place                    # of the graph of whole characters
            for lo, hi, target in ANY[node]:
                for byte in range(lo, hi + 1):
                    yield self.automata.track(states, byte), max(target, 0)

        begun = self.partials.residues[self.partials.first].trackers
        before = {states for states, node in reached([(begun, 0)], onward) if not node}
        return {functools.reduce(self.automata.track, text, states) for states in before for text in texts}
