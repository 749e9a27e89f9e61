"""Short texts of terminals, and what is under way after a text; guards are not looked at.

Guards only forbid, so what is found here is more than truly matches or is under way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from llmppl.grammar.terminals import Assumptions, Automata, Terminal
from llmppl.growing import reached
from llmppl.languages.nfa import DEAD

PREFERRED_BYTES = b"ax_z019 \t\n\"'"                # that texts are made of where a class leaves the choice
MAX_BEGINNINGS = 100                                # of a terminal from which a text is looked for
MAX_TEXTS = 12                                      # of a terminal
MAX_LENGTH = 1000                                   # of a text
MAX_KEPT_TEXT = 256                                 # bytes at whose beginnings it is kept what is under way


class TerminalTexts:
    """The texts of a grammar's terminals, of which those `begun` may begin a text."""

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
        edges = [edge for q in begun for edge in self.automata.edges[q] if edge[2] in self._ways]
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
        return {ends[q] for q in (states & ends.keys()) - self.automata.found}

    def left(self, text: bytes) -> set[int]:
        """The states under way after a text that may read on."""
        return set(filter(self.automata.edges.__getitem__, self.after(text)[1]))

    def names_left(self, text: bytes) -> set[str]:
        """The terminals that these are of."""
        return set(map(self.automata.names.__getitem__, self.left(text)))

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
