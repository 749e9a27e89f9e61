"""Witness spellings: a fast proof that a text can be completed, for grammars whose tokens ignored text may separate.

A terminal T gets a *spelling* w and a *separator* s. In *every* lexer that has T, w s is read as T and ignored text,
whatever follows, and leaves a *clean* obligation: nothing is required, and nothing forbidden begins like a spelling.
Then any tokens that have spellings and complete a parser stack can be written as a text.

Another terminal does no harm in three cases. It neither matches within w s nor may continue at its end. Or it comes
after T, and after the terminals that have T as a keyword, in lark's order. Or T is its keyword. These checks ignore
guards, which only forbid. If they or guards of T leave a doubt, every lexer reads w s instead, after each separator and
each spelling that needs no separator. After other texts, a separator comes first.

If few terminals suffice to complete every stack, an obligation may also be *idle*: it may continue with the bytes of
their spellings and separators, but never matches within these.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from llmppl.constraints.automata.nfa import ANY, DEAD
from llmppl.constraints.lark.lexer import Ended, Obligation, PartialTokens
from llmppl.constraints.lark.terminals import Assumptions, Automata, Terminal
from llmppl.support.graphs import Memo, reachable, reversed_edges

MAX_READ = 2_000_000                                # states of terminals looked at for spellings
MAX_READ_IN_LEXERS = 24                             # pairs of a spelling and a separator read in every lexer
PREFERRED_BYTES = b"ax_z019 \t\n\"'"                # for texts, where a class of bytes leaves a choice
MAX_BEGINNINGS = 100                                # of a terminal from which a text is looked for
MAX_TEXTS = 12                                      # of a terminal
MAX_LENGTH = 1000                                   # of a text
MAX_KEPT_TEXT = 256                                 # bytes up to which the states of a text's beginnings are kept


class TerminalTexts:
    """Short texts of terminals, and the states that may be active after a text if the terminals `begun` begin there.

    Guards are ignored. They only forbid, so the results contain all true matches and active states.
    """

    def __init__(self, automata: Automata, begun: Iterable[Terminal]) -> None:
        self.automata = automata
        self.num_read = 0                           # states looked at so far
        self._ways = self._find_ways()
        starts = [automata.starts[terminal.name] for terminal in begun]
        self._known: dict[bytes, tuple[frozenset[str], set[int]]] = {b"": (frozenset(), self._closure(starts))}

    def _find_ways(self) -> dict[int, tuple[int, bytes, int]]:
        """Return by state the length of the shortest text to its terminal's end, its first byte, and the next state.

        The byte is b"" for an epsilon edge.
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
        """Return the shortest text from a state to the end of its terminal."""
        text = bytearray()
        while state in self._ways:
            _, head, state = self._ways[state]
            text += head
        return bytes(text)

    def texts(self, terminal: Terminal) -> list[bytes]:
        """Return a few short spellings of a terminal, shortest first."""
        if len(terminal.words) == 1:
            return [terminal.words[0].encode()]
        begun = self._closure([self.automata.starts[terminal.name]])
        edges = [edge for edge in self.automata.edges_of(begun) if edge[2] in self._ways]
        edges.sort(key=lambda edge: self._ways[edge[2]][0])
        found: set[bytes] = set()
        for lo, hi, target in edges[:MAX_BEGINNINGS]:
            if self._ways[target][0] < MAX_LENGTH:
                heads = filter(range(lo, hi + 1).__contains__, {*PREFERRED_BYTES, lo})
                found.update(bytes([byte]) + self.tail(target) for byte in heads)
        order = sorted(found, key=lambda text: (len(text), PREFERRED_BYTES.find(text[:1]) % 256, text))
        return order[:MAX_TEXTS]

    def _closure(self, states: Iterable[int]) -> set[int]:
        """Return the states reached without reading, with the look-aheads on the way."""
        return set(reachable([q for q in states if q != DEAD], self.automata.unguarded))

    def after(self, text: bytes) -> tuple[frozenset[str], set[int]]:
        """Return the terminals that match within a text, and the states active at its end."""
        known = next(n for n in range(len(text), -1, -1) if text[:n] in self._known)
        names, states = self._known[text[:known]]
        for n in range(known, len(text)):
            states = self._closure(self.automata.read(states, text[n]))
            names |= self._matched(states)
            self.num_read += len(states) + 1
            if n < MAX_KEPT_TEXT:
                self._known[text[: n + 1]] = names, states
        return names, states

    def _matched(self, states: set[int]) -> set[str]:
        """Return the terminals of which one of the states ends a match."""
        ends = self.automata.ends
        return set(map(ends.__getitem__, (states & ends.keys()) - self.automata.lookahead_ends))

    def matches_of_all(self, text: bytes) -> set[str]:
        """Return the terminals that match the whole of a text."""
        return self._matched(self.after(text)[1])

    def left(self, text: bytes) -> set[int]:
        """Return the states active after a text that may read on."""
        return set(filter(self.automata.edges.__getitem__, self.after(text)[1]))

    def names_left(self, text: bytes) -> set[str]:
        """Return the terminals of these states."""
        return self.automata.names_of(self.left(text))

    def preferred_match(self, name: str, text: bytes) -> int | None:
        """Return the end of the match that a terminal without guards prefers at the beginning of a text."""
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
        self.partials, self.automata, self.ignored = partials, partials.automata, partials.ignored
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
        self._hosts = reversed_edges(self._keywords.items())    # of a keyword
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, obligation)
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
        self._pairs = {name: pair for name, pair in found.items() if pair}
        self.missing = found.keys() - self._pairs
        self.separators = list(filter(None, dict.fromkeys(separator for _, separator in self._pairs.values())))
        clean = all(itertools.starmap(self._clean, self._to_be_clean))
        self.usable = clean and not any(itertools.starmap(self._reads, self._left_over(candidates)))

    # ---- use

    def is_spellable_after(self, lexer: int, obligation: int, names: frozenset[str] | None) -> bool:
        """Check whether any next tokens, of the terminals `names` only (None: any), can be spelled after an obligation.

        A separator may come first. The obligation must be clean then, or idle, and its trackers must be in states in
        which the spellings were read.
        """
        separated = itertools.chain.from_iterable(self._ignored(lexer, obligation, s) for s in self.separators)
        places = filter(self._fits, [obligation, *separated]) if self.usable else []
        return any(self._clean(lexer, left) or (names is not None and self._idle[left, names]) for left in places)

    def _fits(self, obligation: int) -> bool:
        return not self._to_be_clean or self.partials.obligations[obligation].trackers in self._contexts

    def _find_shortest_ends(self, key: tuple[int, bool]) -> tuple[Ended, ...]:
        token, keywords = key
        current = self.partials.tokens[token]
        first: dict[str, int] = {}
        for q in current.keyword_threads if keywords else current.threads:
            first.setdefault(self.automata.names[q], q)
        ends = itertools.chain.from_iterable(self.read((token,), self.texts.tail(q)) for q in first.values())
        return tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

    def read(self, tokens: tuple[int, ...], text: bytes) -> list[tuple[Ended, ...]]:
        """Return the ways in which one of some partial tokens may end after each byte of a text."""
        ends: list[tuple[Ended, ...]] = [()]
        for byte in text:
            tokens, ended = self.partials.step_all(tokens, byte)
            ends.append(ended)
        return ends

    # ---- clean and idle obligations

    def _find_firsts(self, lexer: int) -> set[int]:
        """Return the first bytes of the spellings that a lexer may meet."""
        return {self._pairs[name][0][0] for name in self._pairs.keys() & set(self.partials.lexers[lexer])}

    def _clean(self, lexer: int, obligation: int) -> bool:
        forbidden, required, _ = self.partials.obligations[obligation]
        return not (required or self._reads(forbidden, lexer))

    def _is_idle(self, key: tuple[int, frozenset[str]]) -> bool:
        obligation, names = key
        forbidden, required, _ = self.partials.obligations[obligation]
        bytes = self._bytes_of[names]

        def onward(state: int) -> Iterator[int]:
            yield from self.automata.unguarded(state)
            for lo, hi, target in self.automata.edges[state]:
                if bisect_left(bytes, lo) < bisect_right(bytes, hi):
                    yield target

        return not required and self.automata.ends.keys().isdisjoint(reachable(forbidden, onward))

    def _find_bytes(self, names: frozenset[str]) -> list[int]:
        """Return the bytes in the spellings of terminals and in their separators."""
        spelled = names & self._pairs.keys()            # the others are never read
        return sorted(set().union(*itertools.chain.from_iterable(self._pairs[name] for name in spelled)))

    def _reads(self, states: Collection[int], lexer: int) -> bool:
        """Check whether one of `states` reads the first byte of some spelling that a lexer may meet."""
        ranges = {edge[:2] for edge in self.automata.edges_of(states)}
        return any(lo <= byte <= hi for (lo, hi), byte in itertools.product(ranges, self._firsts[lexer]))

    def _left_over(self, ignored: dict[bytes, str]) -> Iterator[tuple[set[int], int]]:
        """Yield the states that separators, or spellings without one, leave active, with each possible next lexer."""
        for separator in self.separators:
            left = {q for q in self.texts.left(separator) if self.automata.names[q] == ignored[separator]}
            yield from itertools.product([left], range(len(self.partials.lexers)))
        for name, (word, separator) in self._pairs.items():
            if not separator:
                yield from itertools.product([self.texts.left(word)], self._lexers_after[name])

    def _ignored(self, lexer: int, obligation: int, text: bytes) -> list[int]:
        """Return the obligations after an ignored token, if `text` may be one after `obligation`."""
        ends = self.read(self.partials.starts[lexer, obligation], text)[-1]
        return [end.obligation for end in ends if end.symbol is None]

    # ---- search for spellings

    def _separates(self, text: bytes, name: str) -> bool:
        """Check that every lexer reads an ignored text as such and as a whole; its own terminal may read on."""
        if name in self._guarded or name in self._hosts or name in self.texts.after(text[:-1])[0]:
            return False                            # every text of a terminal matches as a whole
        rivals = self.texts.after(text)[0] | self.texts.names_left(text)
        return all(self._rank[rival] >= self._rank[name] for rival in rivals)

    def _num_read_on(self, text: bytes, heads: set[int]) -> int:
        """Return how many of some bytes the states active after a text read."""
        ranges = [edge[:2] for edge in self.automata.edges_of(self.texts.left(text))]
        return sum(any(lo <= byte <= hi for lo, hi in ranges) for byte in heads)

    def _spells(self, terminal: Terminal, w: bytes, s: bytes) -> bool:
        """Check, without reading, that w s is `terminal` and ignored text in every lexer that has the terminal."""
        hosts = self._hosts.get(terminal.name, [])
        own = {terminal.name, *hosts}
        if self.texts.num_read > MAX_READ or own & self._guarded or self.ignored.intersection(hosts):
            return False
        last = max(map(self._rank.__getitem__, own))
        rivals = self.texts.after(w + s)[0] - own | (self.texts.names_left(w + s) if s else set())
        split_off = set(itertools.chain.from_iterable(map(self._keywords.__getitem__, hosts))) - {terminal.name}
        return (
            all(self._rank[rival] > last for rival in rivals)
            and not split_off & self.texts.matches_of_all(w)
            and all(self.texts.preferred_match(name, w + s) == len(w) for name in own)
        )

    def _spells_in_lexers(self, name: str, w: bytes, s: bytes) -> bool:
        """Check the same by reading w s in every lexer that has the terminal, after each text that may come before."""
        found: list[tuple[int, int]] = []
        lexers = [lexer for lexer, names in enumerate(self.partials.lexers) if name in names]
        for lexer, trackers in itertools.product(lexers, self._contexts):
            begun = self.partials.obligation_number[Obligation(frozenset(), frozenset(), trackers)]
            ends = self.read(self.partials.starts[lexer, begun], w)[-1]
            ends = tuple([end for end in ends if end.terminal == name])
            for after in self._lexers_after[name]:
                left = [(after, each) for end in ends for each in self._ignored(after, end.obligation, s)]
                if len(left) != 1:                  # none where the token does not end
                    return False
                found += left
        self._to_be_clean += found
        return True

    def _find_contexts(self, texts: Sequence[bytes]) -> set[tuple[int, ...]]:
        """Return all combinations of the trackers' states after one of some texts."""

        def onward(place: tuple[tuple[int, ...], int]) -> Iterator[tuple[tuple[int, ...], int]]:
            states, node = place                    # of the graph of whole characters
            for lo, hi, target in ANY[node]:
                for byte in range(lo, hi + 1):
                    yield self.automata.track(states, byte), max(target, 0)

        begun = self.partials.obligations[self.partials.first].trackers
        before = {states for states, node in reachable([(begun, 0)], onward) if not node}
        return {functools.reduce(self.automata.track, text, states) for states in before for text in texts}
