"""Which hypotheses some text completes: the question behind every step of a grammar's recognizer.

A *hypothesis* is a parser stack and a scan. `Judge` decides it. Most questions are answered by `Spellings`: where every
terminal has a spelling that an ignored text separates from whatever comes next, a stack that tokens complete is
completed by a text. What is left is decided by `Completion`: the stack, read from its top, is a pushdown automaton over
the finitely many pairs (terminal, what is forbidden and required after it), and its reachable reductions are tabulated.

Source: Reps, Horwitz & Sagiv (1995) for the tabulation.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from llmppl.grammar.lalr import Layout, Parser, Stack
from llmppl.grammar.lalr_tables import END
from llmppl.grammar.lexing import Ended, Rest, Scans, Terminal
from llmppl.languages.limits import MAX_SCANS
from llmppl.languages.nfa import DEAD, Ahead

K = TypeVar("K")
Look = tuple[str, int]                              # a symbol that the parser looks at, and the rest; $END has -1
Entry = tuple[int, str, int]                        # a parser state on top of a stack, and a Look
Exit = tuple[int, str, str, int]                    # states still to pop, the rule then pushed, and a Look


class Completion:
    """Which hypotheses some text completes: a tabulation of the parser's runs over (state, symbol, rest).

    An *entry* is a state on top of the stack and what the parser looks at. Its *exits* are the reductions that remove
    it, with how many more states they pop and what is looked at then. Both are finitely many. What is below the
    stack's top is read only when an exit gets there.
    """

    def __init__(self, parser: Parser, scans: Scans, lexer_of: dict[int, int]):
        self.parser, self.scans, self.lexer_of = parser, scans, lexer_of
        self.exits: dict[Entry, dict[Exit, None]] = {}
        self.accepting: set[Entry] = set()
        self._users: dict[Entry, dict[Entry, None]] = {}
        self._tabulated = True                          # whether nothing of these three is missing
        self._looks: dict[tuple[int, int], frozenset[Look]] = {}
        self._outs: dict[int, frozenset[Ended]] = {}
        self._many: dict[int, int] = {}                 # scan -> how many are not enough to know its ends

    def ends(self, scan: int) -> frozenset[Ended]:
        """All the ways in which the token of a scan may end, sooner or later."""
        found = self.ends_if_few(scan, MAX_SCANS)
        assert found is not None
        return found

    def ends_if_few(self, scan: int, most: int) -> frozenset[Ended] | None:
        """The same, or None if the token may go through more than `most` scans before that."""
        if scan not in self._outs:
            if self._many.get(scan, 0) >= most:
                return None
            seen, todo = {scan: frozenset[Ended]()}, [scan]
            sources: dict[int, list[int]] = {scan: []}
            while todo:
                if len(seen) > most:
                    self._many.update(dict.fromkeys(seen, most))     # or each of them would be gone through as far
                    return None
                number = todo.pop()
                for byte in self.scans.classes(number):
                    going_on, ended = self.scans.step(number, byte)
                    seen[number] = seen[number].union(ended)
                    for target in going_on:
                        if target not in seen:
                            seen[target] = self._outs.get(target, frozenset())
                            sources[target] = []
                            if target not in self._outs:
                                todo.append(target)
                        sources[target].append(number)
            todo = list(seen)
            while todo:
                number = todo.pop()
                for source in sources[number]:
                    if not seen[number] <= seen[source]:
                        seen[source] |= seen[number]
                        todo.append(source)
            self._outs.update(seen)
        return self._outs[scan]

    def looks(self, lexer: int, rest: int) -> frozenset[Look]:
        """What the parser may be given after `rest`: symbols behind any ignored text, and the end."""
        key = lexer, rest
        if key not in self._looks:
            seen, todo, looks = {rest}, [rest], set[Look]()
            while todo:
                number = todo.pop()
                if not self.scans.rests[number].required:
                    looks.add((END, -1))
                for scan in self.scans.start(lexer, number):
                    for symbol, behind in self.ends(scan):
                        if symbol is None:
                            if behind not in seen:
                                seen.add(behind)
                                todo.append(behind)
                        else:
                            looks.add((str(symbol), behind))
            self._looks[key] = frozenset(looks)
        return self._looks[key]

    def _tabulate(self, entry: Entry) -> None:
        """Find the exits of an entry and of all that it leads to."""
        if not self._tabulated:                         # an interrupt has left them so
            self.exits, self.accepting, self._users, self._tabulated = {}, set(), {}, True
        if entry in self.exits:
            return
        self._tabulated = False
        self.exits[entry] = {}
        self._users[entry] = {}
        todo: list[tuple[Entry, Exit | None]] = [(entry, None)]

        def call(user: Entry, called: Entry) -> None:
            if called not in self.exits:
                self.exits[called] = {}
                self._users[called] = {}
                todo.append((called, None))
            if user not in self._users[called]:
                self._users[called][user] = None
                todo.extend((user, found) for found in self.exits[called])
                if called in self.accepting:
                    accept(user)

        def leave(entry: Entry, found: Exit) -> None:
            if found not in self.exits[entry]:
                self.exits[entry][found] = None
                todo.extend((user, found) for user in self._users[entry])

        def accept(entry: Entry) -> None:
            marked = [entry]
            while marked:
                entry = marked.pop()
                if entry not in self.accepting:
                    self.accepting.add(entry)
                    marked.extend(self._users[entry])

        while todo:
            (state, symbol, rest), arrived = entry, found = todo.pop()
            if found is None:
                target = self.parser.shifts[state].get(symbol)
                reduction = self.parser.reduction(state, symbol)
                if target is not None:
                    for look in self.looks(self.lexer_of[target], rest):
                        call(entry, (target, *look))
                    continue
                if reduction is None:
                    continue
                size, name = reduction
                found = (size - 1, name, symbol, rest)
                if size:
                    leave(entry, found)
                    continue
            elif found[0]:
                leave(entry, (found[0] - 1, *found[1:]))
                continue
            _, name, symbol, rest = found               # pops nothing more: the rule is pushed on this entry's state
            target = self.parser.shifts[state][name]
            if target == self.parser.end_state and symbol == END:
                accept(entry)
            else:
                call(entry, (target, symbol, rest))
        self._tabulated = True

    def possible(self, stack: Stack, looks: set[Look]) -> bool:
        """Whether some text is accepted that goes on with one of `looks`."""
        if looks:
            self.parser.lowest = 0
        todo: list[tuple[Stack | None, Entry]] = [(stack.below, (stack.state, *look)) for look in looks]
        seen = set(todo)
        while todo:
            below, entry = todo.pop()
            self._tabulate(entry)
            if entry in self.accepting:
                return True
            for size, name, symbol, rest in self.exits[entry]:
                base = below and below.pop(size)
                assert base is not None
                target = self.parser.shifts[base.state][name]
                if target == self.parser.end_state and symbol == END:
                    return True
                item = base, (target, symbol, rest)
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
        return False


FEW = 1000                                          # scans that are gone through to see how a token may end
SOON = 16                                           # hypotheses that the shortest texts lead to, tried before all
MAX_TEXTS = 100                                     # ways to begin a terminal of which a spelling is looked for
MAX_LENGTH = 1000                                   # of a spelling
MAX_KEPT_TEXT = 256                                 # bytes at whose beginnings it is kept what is under way
MAX_READ = 2_000_000                                # states of terminals looked at for spellings
TASTE = b"ax_z019 \t\n\"'"                           # bytes that spellings are made of where a class leaves the choice


class Spellings:
    """A short way to see that a text can be completed, for grammars with ignored text between their tokens.

    A terminal T is given a spelling w and a separator s such that w s is read as T and ignored text in *every* lexer
    that has T, whatever follows, and leaves nothing forbidden that a spelling begins with (the rest is *clean*). Then
    a text whose parser stack is completed by tokens that have spellings is completed by those. Another terminal is
    harmless if it does not match within w s and is not under way at its end; if it comes after T, and after all
    terminals that T is carved from, in lark's order; or if T is carved from it. This is decided without regard to
    guards, which only forbid; where that or guards of T leave a doubt, w s is read in every lexer instead.
    """

    def __init__(self, scans: Scans, terminals: Sequence[Terminal], lexers_after: dict[str, set[int]]):
        self.scans, self.automata = scans, scans.automata
        self._settled: dict[tuple[int, int], bool] = {}
        self._soon: dict[tuple[int, bool], tuple[Ended, ...]] = {}
        self._firsts: dict[int, set[int]] = {}
        self._ways = self._find_ways()
        self._guarded = {self.automata.names[q] for q in self.automata.guards}
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, rest)
        self.separators: list[bytes] = []
        self.words: dict[str, bytes] = {}
        self.missing: set[str] = set()                  # terminals without a spelling
        lexed = {name for lexer in scans.lexers for name in lexer}
        ignored = self.ignored = scans.ignored
        self._ranked = [terminal for terminal in terminals if terminal.name in lexed]
        self._rank = {terminal.name: rank for rank, terminal in enumerate(self._ranked)}
        self._hosts: dict[str, list[Terminal]] = {terminal.name: [] for terminal in terminals}
        for terminal in self._ranked:
            for name in terminal.carved:
                self._hosts[name].append(terminal)
        begun = self._under_way([self.automata.starts[terminal.name] for terminal in self._ranked])
        self._read_size = 0
        self._read_so_far: dict[bytes, tuple[frozenset[str], set[int]]] = {b"": (frozenset(), begun)}
        candidates = {s: t for t in self._ranked if t.name in ignored for s in self._texts(t) if self._separates(s, t)}
        unseparated = []
        for terminal in self._ranked:
            if terminal.name not in ignored:
                pairs = [(w, s) for s in [*sorted(candidates, key=len), b""] for w in self._texts(terminal)]
                found = next((pair for pair in pairs if self._spells(terminal, *pair)), None)
                found = found or next((pair for pair in pairs[:24] if self._really_spells(terminal.name, *pair)), None)
                if found is None:
                    self.missing.add(terminal.name)
                    continue
                self.words[terminal.name], separator = found
                if not separator:
                    unseparated.append(terminal.name)
                elif separator not in self.separators:
                    self.separators.append(separator)
        every = set(range(len(scans.lexers)))
        left = [(self._left(s, candidates[s].name), every) for s in self.separators]
        left += [(self._left(self.words[name]), lexers_after[name]) for name in unseparated]
        self.usable = not any(self._reads(states, lexer) for states, lexers in left for lexer in lexers) and all(
            self._clean(lexer, rest) for lexer, rest in self._to_be_clean
        )

    def settled(self, lexer: int, rest: int) -> bool:
        """Whether any tokens that the parser takes next, but those missing, can be spelled after `rest`."""
        if not self.usable:
            return False
        key = lexer, rest
        if key not in self._settled:
            self._settled[key] = self._clean(lexer, rest) or any(
                self._clean(lexer, after) for s in self.separators for after in self._ignored(lexer, rest, s)
            )
        return self._settled[key]

    def soon(self, scan: int, keywords: bool = False) -> tuple[Ended, ...]:
        """Some ways in which the token of a scan may end: along the shortest text of all terminals (keywords)."""
        if (scan, keywords) not in self._soon:
            first: dict[str, int] = {}
            current = self.scans.scans[scan]
            for q in current.keywords if keywords else current.threads:
                first.setdefault(self.automata.names[q], q)
            found: dict[Ended, None] = {}
            for q in first.values():
                for ended in self.read((scan,), self.tail(q)):
                    found.update(dict.fromkeys(ended))
            self._soon[scan, keywords] = tuple(found)
        return self._soon[scan, keywords]

    def read(self, scans: Iterable[int], text: bytes) -> list[tuple[Ended, ...]]:
        """The ways in which a token that is under way may end after each byte of a text."""
        ends: list[tuple[Ended, ...]] = [()]
        for byte in text:
            outcomes = [self.scans.step(scan, byte) for scan in scans]
            scans = dict.fromkeys(scan for going_on, _ in outcomes for scan in going_on)
            ends.append(tuple(end for _, ended in outcomes for end in ended))
        return ends

    def _clean(self, lexer: int, rest: int) -> bool:
        forbidden, required, _ = self.scans.rests[rest]
        return not required and not self._reads(forbidden, lexer)

    def _reads(self, states: Iterable[int], lexer: int) -> bool:
        """Whether one of `states` goes on with the first byte of some spelling that a lexer may meet."""
        if lexer not in self._firsts:
            self._firsts[lexer] = {self.words[name][0] for name in self.scans.lexers[lexer] if name in self.words}
        firsts, edges = self._firsts[lexer], self.automata.edges
        return any(lo <= byte <= hi for q in states for lo, hi, _ in edges[q] for byte in firsts)

    def _left(self, text: bytes, name: str | None = None) -> set[int]:
        """All that may be under way after a text; or what is of one terminal."""
        edges, names = self.automata.edges, self.automata.names
        return {q for q in self._after(text)[1] if edges[q] and name in (None, names[q])}

    def _find_ways(self) -> dict[int, tuple[int, bytes, int]]:
        """From every state the length of the shortest text to its terminal's end, its first byte, and what comes next.

        The byte is b"" where nothing is read. Guards are not looked at.
        """
        sources: dict[int, list[tuple[int, bytes]]] = {}
        for q, edges in enumerate(self.automata.edges):
            for lo, hi, target in edges:
                byte = next((byte for byte in TASTE if lo <= byte <= hi), lo)
                sources.setdefault(target, []).append((q, bytes([byte])))
            for target in self.automata.epsilon[q]:
                sources.setdefault(target, []).append((q, b""))
        ways: dict[int, tuple[int, bytes, int]] = {}
        todo = deque((0, q, b"", DEAD) for q in self.automata.ends)
        while todo:
            length, q, head, target = todo.popleft()
            if q not in ways:
                ways[q] = length, head, target
                for source, before in sources.get(q, ()):
                    if before:
                        todo.append((length + 1, source, before, q))
                    else:
                        todo.appendleft((length, source, before, q))
        return ways

    def tail(self, state: int) -> bytes:
        """The shortest text from a state to the end of its terminal; guards are not looked at."""
        text = bytearray()
        while state in self._ways:
            _, head, state = self._ways[state]
            text += head
        return bytes(text)

    def _texts(self, terminal: Terminal) -> list[bytes]:
        """A few short spellings of a terminal, shortest first; guards are not looked at."""
        if len(terminal.words) == 1:
            return [terminal.words[0].encode()]
        begun = self._under_way([self.automata.starts[terminal.name]])
        edges = [edge for q in begun for edge in self.automata.edges[q] if edge[2] in self._ways]
        found: set[bytes] = set()
        for lo, hi, target in sorted(edges, key=lambda edge: self._ways[edge[2]][0])[:MAX_TEXTS]:
            if self._ways[target][0] < MAX_LENGTH:
                found.update(bytes([byte]) + self.tail(target) for byte in {*TASTE, lo} if lo <= byte <= hi)
        return sorted(found, key=lambda text: (len(text), TASTE.find(text[:1]) % 256, text))[:12]

    def _under_way(self, states: Iterable[int]) -> set[int]:
        """What states become without reading, whatever their guards say, with the look-aheads that are met."""
        automata, seen, todo = self.automata, set[int](), [q for q in states if q != DEAD]
        while todo:
            q = todo.pop()
            if q not in seen:
                seen.add(q)
                todo += automata.epsilon[q]
                if isinstance(guard := automata.guards.get(q), Ahead):
                    todo.append(guard.entry)
        return seen

    def _after(self, text: bytes) -> tuple[frozenset[str], set[int]]:
        """The terminals that may match within a text, and the states under way at its end; more than truly so."""
        known = next(n for n in range(len(text), -1, -1) if text[:n] in self._read_so_far)
        names, states = self._read_so_far[text[:known]]
        ends, ahead = self.automata.ends, self.automata.found
        for n in range(known, len(text)):
            states = self._under_way(self.automata.read(states, text[n]))
            names |= {ends[q] for q in states if q in ends and q not in ahead}
            self._read_size += len(states) + 1
            if n < MAX_KEPT_TEXT:
                self._read_so_far[text[: n + 1]] = names, states
        return names, states

    def _matches(self, name: str, text: bytes) -> list[int]:
        """Where a terminal may match within a text; more often than truly so."""
        states, found = self._under_way([self.automata.starts[name]]), []
        for i, byte in enumerate(text, 1):
            states = self._under_way(self.automata.read(states, byte))
            if any(self.automata.ends.get(q) == name and q not in self.automata.found for q in states):
                found.append(i)
        return found

    def _separates(self, text: bytes, terminal: Terminal) -> bool:
        """Whether an ignored text is read as that in every lexer, and as a whole; it may leave itself under way."""
        guarded = terminal.name in self._guarded
        if guarded or self._hosts[terminal.name] or self._matches(terminal.name, text) != [len(text)]:
            return False
        rank, names = self._rank[terminal.name], self.automata.names
        matched, states = self._after(text)
        earlier = {*matched, *(names[q] for q in states if self.automata.edges[q])}
        return all(self._rank[name] >= rank for name in earlier)

    def _spells(self, terminal: Terminal, w: bytes, s: bytes) -> bool:
        """Whether w s is read as `terminal` and ignored text in every lexer that has it."""
        if self._read_size > MAX_READ:
            return False
        hosts = self._hosts[terminal.name]
        own = {terminal.name, *(host.name for host in hosts)}
        if own & (self.ignored | self._guarded) - {terminal.name} or terminal.name in self._guarded:
            return False
        last, names = max(self._rank[name] for name in own), self.automata.names
        matched, states = self._after(w + s)
        if any(self._rank[name] <= last for name in matched - own):
            return False
        if s and any(self._rank[names[q]] <= last for q in states if self.automata.edges[q]):
            return False
        rivals = {name for host in hosts for name in host.carved if name in self._rank} - {terminal.name}
        if any(self._matches(rival, w)[-1:] == [len(w)] for rival in rivals & self._after(w)[0]):
            return False
        return all(self._reads_first(self.automata.starts[name], w + s) == len(w) for name in own)

    def _reads_first(self, start: int, text: bytes) -> int | None:
        """Where the match ends that a terminal without guards prefers at the beginning of a text."""
        threads, found = self.automata.closure([start], (), {}), None
        for at, byte in enumerate(text, 1):
            threads = self.automata.closure(self.automata.read(threads, byte), (), {})
            end = next((i for i, q in enumerate(threads) if q in self.automata.ends), None)
            if end is not None:
                found, threads = at, threads[:end]
        return found

    def _really_spells(self, name: str, w: bytes, s: bytes) -> bool:
        """The same by reading w s in every lexer that has the terminal, whatever came before."""
        if not s:
            return False
        found = []
        for lexer, conf in enumerate(self.scans.lexers):
            if name not in conf:
                continue
            for trackers in self._contexts:
                begin = self.scans.start(lexer, self.scans.rest_number(Rest(frozenset(), frozenset(), trackers)))
                ends = [end for end in self.read(begin, w)[-1] if name in (end.symbol, end.symbol and end.symbol[0])]
                for after in self._lexers_after[name] if ends else ():
                    rests = [rest for end in ends for rest in self._ignored(after, end.rest, s)]
                    if len(rests) != 1:
                        return False
                    found.append((after, rests[0]))
                if not ends:
                    return False
        self._to_be_clean += found
        return True

    def _ignored(self, lexer: int, rest: int, text: bytes) -> list[int]:
        """What is left after an ignored token, if `text` may be one after `rest`."""
        return [end.rest for end in self.read(self.scans.start(lexer, rest), text)[-1] if end.symbol is None]

    @cached_property
    def _contexts(self) -> list[tuple[int, ...]]:
        """All states that the look-behind trackers can be in together, behind whole characters."""
        trackers = self.automata.trackers
        seen = {tuple(int(tracker.start) for tracker in trackers): b""}
        todo = list(seen)
        for states in todo:
            for byte in range(256):
                after = tuple(int(t.step(q, byte) or 0) if q else 0 for t, q in zip(trackers, states, strict=True))
                if after not in seen:
                    seen[after] = seen[states] + bytes([byte])
                    todo.append(after)
        return list(seen)


class Judge:
    """Whether some text completes a hypothesis."""

    def __init__(
        self,
        parser: Parser,
        scans: Scans,
        lexer_of: dict[int, int],
        terminals: Sequence[Terminal],
    ):
        self.parser, self.scans, self.lexer_of = parser, scans, lexer_of
        self.completion = Completion(parser, scans, lexer_of)
        after = parser.lexers_after(lexer_of)
        self.spellings = Spellings(scans, terminals, after)
        self._lexers_after: dict[Any, set[int]] = {None: set(lexer_of.values())} | after
        parser.avoid(self.spellings.missing)
        self._promises: dict[frozenset[Ended], tuple[int, bool]] = {}

    def finishable(self, stack: Stack, scan: int) -> bool:
        """Whether some text completes a hypothesis."""
        if self.parser.sure:
            ends, whole = self.outlook(scan)
            promised, plain = self.promises(ends)
            if self.parser.admitted(stack, promised):
                return True
            if plain and whole:
                return False
        return self.parser.recall(stack.finishable, scan, stack, self._finishable)

    def outlook(self, scan: int) -> tuple[frozenset[Ended], bool]:
        """Ways in which the token of a scan may end, and whether these are all of them: not if it is long under way."""
        ends = self.completion.ends_if_few(scan, FEW)
        return (frozenset(self.spellings.soon(scan)), False) if ends is None else (ends, True)

    def may_follow(self, stack: Stack, rest: int) -> bool:
        """Whether some text, or none, completes what led to a stack after a token that left a rest."""
        if self.sure(stack, Ended(None, rest)):
            return True
        if not self.scans.rests[rest].required and self.parser.complete(stack):
            return True
        starts = self.scans.start(self.lexer_of[stack.state], rest)
        return any(self.finishable(stack, scan) for scan in starts)

    def promises(self, ends: frozenset[Ended]) -> tuple[int, bool]:
        """Bits of which one, if `Parser.admitted`, says that a text can be completed where a token may end so.

        And whether that cannot be but so.
        """
        if ends not in self._promises:
            sure = {end: self.parser.sure and self._always_settled(end) for end in ends}
            bits = {self.parser.bits[end.symbol] for end in ends if sure[end]}  # type: ignore[index]
            self._promises[ends] = sum(bits), all(sure.values())
        return self._promises[ends]

    def _always_settled(self, end: Ended) -> bool:
        return all(self.spellings.settled(q, end.rest) for q in self._lexers_after[end.symbol])

    def _finishable(self, stack: Stack, scan: int) -> bool:
        """Whether some text completes a hypothesis: the shortest texts of the next terminals may show it at once."""
        tried = {(stack, scan): None}
        for stack_then, scan_then in itertools.islice(_growing(tried), SOON):
            for end in self.spellings.soon(scan_then):
                top = stack_then if end.symbol is None else self.parser.feed(stack_then, end.symbol)
                if top is None:
                    continue
                if self.sure(stack_then, end) or self._completes(top, end.rest):
                    return True
                starts = self.scans.start(self.lexer_of[top.state], end.rest)
                tried.update(((top, start), None) for start in starts)
        return self._search(stack, scan)

    def _completes(self, top: Stack, rest: int) -> bool:
        """Whether the text may be over after a token that led to a stack, and left a rest."""
        return not self.scans.rests[rest].required and self.parser.complete(top)

    def _search(self, stack: Stack, scan: int) -> bool:
        """The same, if it is not easily seen: one more token may make it so; in the end the parser's runs decide."""
        if stack.layout is not None:
            return self._search_indented(stack, scan, stack.layout)
        looks: set[Look] = set()
        for end in self.completion.ends(scan):
            top = stack if end.symbol is None else self.parser.feed(stack, end.symbol)
            if top is None:
                continue
            if self.sure(stack, end):
                return True
            after = self.completion.looks(self.lexer_of[top.state], end.rest)
            if any(symbol != END and self.sure(top, Ended(symbol, rest)) for symbol, rest in after):
                return True
            if (END, -1) in after and self.parser.complete(top):
                return True
            looks |= after if end.symbol is None else {(str(end.symbol), end.rest)}
        return self.completion.possible(stack, looks)

    def _search_indented(self, stack: Stack, scan: int, layout: Layout) -> bool:
        """The same for indented text, whose blocks are without number: a line end and any column that fits is tried."""
        if any(self.sure(stack, end) for end in self.spellings.soon(scan, keywords=True)):
            return True
        current, spellings = self.scans.scans[scan], self.spellings
        names = {self.scans.automata.names[q] for q in current.threads}
        if names.isdisjoint({self.scans.newline, *spellings.ignored}):
            return False
        columns = [*layout.columns, layout.columns[-1] + 1]
        lines = [b"\n" + b" " * column for column in columns]
        lines += [b" " * max(column - max(current.column, 0), 0) for column in columns]
        tails = {spellings.tail(q) for q in current.threads}
        texts = [*lines, *(tail + line for tail in sorted(tails) for line in lines)]
        return any(self.sure(stack, end) for text in texts for end in spellings.read((scan,), text)[-1])

    def sure(self, stack: Stack, end: Ended) -> bool:
        """Whether it is easily seen that a text can be completed if a token ends so."""
        if self.parser.sure:
            state = stack.state if end.symbol is None else self.parser.state_after(stack, end.symbol)
            return state is not None and self.spellings.settled(self.lexer_of[state], end.rest)
        top = stack if end.symbol is None else self.parser.feed(stack, end.symbol)
        return (
            top is not None
            and self.spellings.settled(self.lexer_of[top.state], end.rest)
            and self.parser.completable(top)
        )


def _growing(keys: dict[K, None]) -> Iterator[K]:
    """The keys of a dict that may grow meanwhile."""
    done = 0
    while done < len(keys):
        for key in list(itertools.islice(keys, done, None)):
            done += 1
            yield key
