"""Pre-tokens: where a tokenizer cuts a text before it merges, read byte by byte with the cuts guessed.

One idea: whether a cut falls at a border may depend on what comes later, so a state holds every guess that has not
failed yet: at each border one guess says "cut" and another "no cut", and a guess dies when the text shows that the
pattern would have matched otherwise. A token then asks of its borders: no cut inside it, and between two tokens that
would merge there must be one.

Words. A *split* is one pattern whose matches, and the gaps between them, are the pre-tokens. Its *threads* are where
its match may stand in the pattern, the preferred first, as in Pike's machine; *doomed* are threads that would be
preferred to what was guessed, and so have to fail. A *border* is a place between two characters.

Which characters belong to a class such as `\\p{L}` is asked of the tokenizer's own engine, one character at a time.
Source for the threads: Cox (2009), "Regular Expression Matching: the Virtual Machine Approach".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["CUT", "INSIDE", "OPEN", "PreTokens", "Reading", "Split", "NotFollowed"]

Guess = tuple[tuple[int, ...] | None, frozenset[int]]  # threads, None in a gap; doomed
Guesses = frozenset[tuple[Guess, ...]]              # one of every split, together
Emit = Callable[[int], int]                         # the node that follows -> the node to enter by

INSIDE, CUT, OPEN = 0, 1, 2                         # a border: no cut, a cut, either
FALLBACK = 4                                        # added to a border: the character is spelled by byte tokens
BEGUN = 8                                           # no border of tokens yet, only what every text begins with

# What a character can fold to that is several ASCII letters: (?i:ss) also matches "ß".
FOLDED = ("ff", "fi", "fl", "ss", "st")


class NotFollowed(ValueError):
    """Rules of a tokenizer that are not followed here; the message says which."""


class Split:
    """The guesses for one pattern, which is in the syntax of Oniguruma as `tokenizers` uses it.

    Followed are alternatives, groups, classes, greedy and lazy quantifiers, possessive ones of a single class, (?i:...)
    around ASCII letters, and looking ahead to a single class.

    Parameters
    ----------
    pattern : str or a pre-tokenizer that isolates single characters
    repeated : bool
        Of such a pre-tokenizer: whether the characters of a run are one pre-token.

    Raises
    ------
    NotFollowed
        If `pattern` holds anything else, or matches the empty text.
    """

    def __init__(self, pattern: Any, repeated: bool = False) -> None:
        self.classes: list[Any] = []                # pre-tokenizers that isolate the characters of a class
        self.nodes: list[tuple[str, int, tuple[int, ...]]] = [("accept", 0, ())]
        self._bits: dict[str, int] = {}
        if isinstance(pattern, str):
            self.first = _Parser(pattern, self).first
        else:
            self.classes = [pattern]
            self.first = self.add("read", 0, 0)
            if repeated:
                fork = self.add("fork", 0, self.first, 0)
                self.nodes[self.first] = ("read", 0, (fork,))
        self._sure = [self._accepts_any(node) for node in range(len(self.nodes))]

    def add(self, kind: str, class_: int, *targets: int) -> int:
        """A new node: read a class, look whether it is next ("look") or not ("not"), or fork."""
        self.nodes.append((kind, class_, targets))
        return len(self.nodes) - 1

    def bits(self, char: str) -> int:
        """Bit c is set if the class c holds `char`."""
        found = self._bits.get(char)
        if found is None:                           # two pieces if each is isolated, one if neither is
            holds = [len(class_.pre_tokenize_str(char + char)) == 2 for class_ in self.classes]
            found = self._bits[char] = sum(1 << c for c, hold in enumerate(holds) if hold)
        return found

    def begin(self, bits: int) -> list[Guess]:
        """The guesses after the first character of a pre-token."""
        threads, _ = self._read((self.first,), bits)
        guesses: list[Guess] = [(threads, frozenset())] if threads else []
        return guesses if self._hopeless(threads) else [*guesses, (None, frozenset(threads))]

    def step(self, guess: Guess, bits: int) -> list[tuple[bool, Guess]]:
        """What may become of a guess: whether there is a cut before the next character, and the guess after it."""
        threads, doomed = guess
        still, matched = self._read(doomed, bits)
        if matched or self._hopeless(still):
            return []
        if threads is None:
            return [(new is not None, (new, more.union(still))) for new, more in self.begin(bits)]
        onward, matched = self._read(threads, bits)
        found: list[tuple[bool, Guess]] = [(False, (onward, frozenset(still)))] if onward else []
        if matched and not self._hopeless(onward):
            found += [(True, (new, more.union(still, onward))) for new, more in self.begin(bits)]
        return found

    def ends(self, guess: Guess) -> bool:
        """Whether the text may end after a guess."""
        threads, doomed = guess
        return not self._read(doomed, 0)[1] and (threads is None or self._read(threads, 0)[1])

    def _read(self, threads: Iterable[int], bits: int) -> tuple[tuple[int, ...], bool]:
        """Where threads go with the next character (bits 0: with the end), and whether the match may end before it.

        Threads that are less preferred than that match are left out.
        """
        onward: dict[int, None] = {}
        seen = set()
        stack = list(threads)[::-1]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            kind, class_, targets = self.nodes[node]
            if kind == "accept":
                return tuple(onward), True
            if kind == "fork":
                stack += targets[::-1]
            elif (bits >> class_ & 1) == (kind != "not"):
                if kind == "read":
                    onward[targets[0]] = None
                else:
                    stack += targets
        return tuple(onward), False

    def _hopeless(self, doomed: Iterable[int]) -> bool:
        """Whether one of `doomed` cannot fail any more."""
        return any(self._sure[node] for node in doomed)

    def _accepts_any(self, node: int) -> bool:
        """Whether a match may end at `node` whatever comes next."""
        seen, todo = {node}, [node]
        for node in todo:                           # grows
            kind, _, targets = self.nodes[node]
            if kind == "accept":
                return True
            if kind == "fork":
                todo += [target for target in targets if target not in seen]
                seen.update(targets)
        return False


class _Parser:
    """Reads a pattern into the nodes of a split. `first` is where it begins."""

    def __init__(self, pattern: str, split: Split) -> None:
        self.pattern, self.split, self.at, self.fold = pattern, split, 0, False
        self.names: dict[str, int] = {}
        emit, least = self._alternatives()
        if self.at < len(pattern) or not least:
            raise self._unknown("matches the empty text" if not least else "has a ')' too many")
        self.first = emit(0)

    def _unknown(self, what: str) -> NotFollowed:
        return NotFollowed(f"the pattern {self.pattern!r} {what}, at {self.at}")

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _alternatives(self) -> tuple[Emit, int]:
        """Up to a ')' or the end: what it emits, and the fewest characters it reads."""
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        emits = [emit for emit, _ in found]
        least = min(least for _, least in found)
        return (lambda then: self.split.add("fork", 0, *[emit(then) for emit in emits])), least

    def _sequence(self) -> tuple[Emit, int]:
        found = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            found.append(self._item())

        def emit(then: int) -> int:
            for each, _ in reversed(found):
                then = each(then)
            return then

        return emit, sum(least for _, least in found)

    def _item(self) -> tuple[Emit, int]:
        """One class, look or group, with its quantifier."""
        kind = "look" if self._take("(?=") else "not" if self._take("(?!") else ""
        if kind:
            ahead = self._class()
            if not self._take(")"):
                raise self._unknown("looks ahead to more than one class")
            return (lambda then: self.split.add(kind, ahead, then)), 0
        if self._take("("):
            outer, begin = self.fold, self.at
            if self._take("?i:"):
                self.fold = True
            elif not self._take("?:") and self.pattern[self.at : self.at + 1] == "?":
                raise self._unknown("has an unknown group")
            one, least = self._alternatives()
            inside = self.pattern[begin : self.at].lower()
            if self.fold and (not inside.isascii() or any(fold in inside for fold in FOLDED)):
                raise self._unknown("ignores the case of letters that one character may stand for")
            self.fold = outer
            if not self._take(")"):
                raise self._unknown("lacks a ')'")
            return self._quantified(one, least, None)
        class_ = self._class()
        return self._quantified(lambda then: self.split.add("read", class_, then), 1, class_)

    def _quantified(self, one: Emit, least: int, class_: int | None) -> tuple[Emit, int]:
        match = re.compile(r"[*+?][+?]?|\{(\d*)(,?)(\d*)\}").match(self.pattern, self.at)
        if match is None:
            return one, least
        self.at = match.end()
        quantifier = match[0]
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(quantifier[0], (0, None))
        if quantifier[0] == "{":
            low = int(match[1] or 0)
            high = int(match[3]) if match[3] else None if match[2] else low
        lazy, possessive = quantifier[1:] == "?", quantifier[1:] == "+"
        again = self.pattern[self.at : self.at + 1] in {"*", "+", "?", "{"}
        literal = quantifier[0] == "{" and not (match[1] or match[3])
        if again or literal or not least or (possessive and class_ is None) or (high is not None and high < low):
            raise self._unknown("has a quantifier that is not followed")

        def emit(then: int) -> int:
            end = self.split.add("not", class_ or 0, then) if possessive else then
            if high is None:
                then = self.split.add("fork", 0)
                body = one(then)
                self.split.nodes[then] = ("fork", 0, (end, body) if lazy else (body, end))
            for _ in range((high or low) - low):
                body = one(then)
                then = self.split.add("fork", 0, *((end, body) if lazy else (body, end)))
            for _ in range(low):
                then = one(then)
            return then

        return emit, low * least

    def _class(self) -> int:
        """The number of a class of characters, which stands in the pattern as one of these."""
        simple = (
            r"\\[pP]\{[^}]*\}|\\[sSdDwWhHrntfvae]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^\w\s]|[^\\\[\](){}*+?^$|]"
        )
        match = re.compile(simple, re.ASCII | re.DOTALL).match(self.pattern, self.at)
        begin = self.at
        if match:
            self.at = match.end()
        elif self._take("[") and not self.pattern.startswith(("]", "^]"), self.at):
            depth = 1
            while depth and self.at < len(self.pattern):
                char = self.pattern[self.at]
                depth += (char == "[") - (char == "]")
                self.at += 2 if char == "\\" else 1
        else:
            raise self._unknown("has something that is not followed")
        name = self.pattern[begin : self.at]
        if self.fold:
            if "\\" in name or name.startswith("[^"):  # where such a class holds "ß", it would also hold "ss"
                raise self._unknown("ignores the case of a class")
            name = f"(?i:{name})"
        if name not in self.names:
            from tokenizers import Regex, pre_tokenizers

            self.names[name] = len(self.split.classes)
            self.split.classes.append(pre_tokenizers.Split(Regex(name), "isolated"))
        return self.names[name]


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
    literals : iterable of bytes
        Strings that the text must not hold.
    alphabet : container of str
        Characters that byte tokens must not spell.
    begin : bytes, at most one
        What every text begins with that is not empty.
    alone : bool
        Whether that can be the whole text.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        literals: Iterable[bytes] = (),
        alphabet: Iterable[str] = (),
        begin: bytes = b"",
        alone: bool = True,
    ) -> None:
        self.splits = list(splits)
        self.alphabet, self.begin = frozenset(alphabet), begin
        self._begun = INSIDE if alone else BEGUN
        self.start = Reading(None, frozenset(), b"", OPEN)
        self._literals: dict[int, list[bytes]] = {}  # by their first byte, what follows it
        for literal in literals:
            self._literals.setdefault(literal[0], []).append(literal[1:])
        self._memo: dict[tuple[Guesses | None, int, tuple[int, ...]], Guesses] = {}

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
        ahead = {rest[1:] for rest in literals if rest[0] == byte}
        ahead.update(self._literals.get(byte, ()))
        if b"" in ahead:
            return None
        pending += bytes([byte])
        if guesses is None and not pending.startswith(self.begin):
            return None
        try:
            char = pending.decode()
        except UnicodeDecodeError as error:
            incomplete = error.reason == "unexpected end of data"
            return Reading(guesses, frozenset(ahead), pending, border) if incomplete else None
        if border & FALLBACK and char in self.alphabet:
            return None
        key = guesses, border & 3, tuple(split.bits(char) for split in self.splits)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._move(*key)
        return Reading(found, frozenset(ahead), b"", INSIDE if guesses else self._begun) if found else None

    def accepts(self, state: Reading) -> bool:
        """Whether a text, or the part of it before a hard cut, may end here."""
        if state.guesses is None:
            return not state.pending
        whole = not state.pending and state.border != BEGUN
        return whole and any(self._end(guesses, 0) for guesses in state.guesses)

    def _end(self, guesses: tuple[Guess, ...], first: int) -> bool:
        return all(split.ends(guess) for split, guess in zip(self.splits[first:], guesses[first:], strict=True))

    def _begin(self, bits: Sequence[int], first: int) -> list[tuple[Guess, ...]]:
        splits = zip(self.splits[first:], bits[first:], strict=True)
        return list(itertools.product(*[split.begin(each) for split, each in splits]))

    def _move(self, guesses: Guesses | None, border: int, bits: Sequence[int]) -> Guesses:
        if guesses is None:
            return frozenset(self._begin(bits, 0))
        moves = (move for each in guesses for move in self._moves(each, bits, 0))
        return frozenset(new for cut, new in moves if border == OPEN or cut == (border == CUT))

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
