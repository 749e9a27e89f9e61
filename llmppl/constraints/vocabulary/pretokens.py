"""Pre-tokens: the parts into which a tokenizer cuts a text before it merges, read byte by byte.

Whether the text is cut at a border may depend on later characters. A state therefore holds every *guess* that is still
possible. At each border one guess says "cut" and another "no cut", and a guess is dropped once the text shows that the
pattern would have matched otherwise. A token may have no cut inside it, and two tokens that would merge need a cut
between them.

Terms: a *split* is one pattern; it cuts a text into its matches and the gaps between them. A *border* is the place
between two characters. The *threads* of a guess are the nodes of the pattern that a match may have reached, the
preferred first, as in Pike's machine. Its *rivals* are threads that the tokenizer would prefer to the guess; the guess
is right only if all of them fail. A *class* is a set of characters such as `\\p{L}`; the tokenizer's own engine decides
which characters belong to it.

Source for the threads: Cox (2009), "Regular Expression Matching: the Virtual Machine Approach".
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from llmppl.support.graphs import Memo, Numbering, reachable

Guess = tuple[tuple[int, ...] | None, frozenset[int]]  # threads, None in a gap; rivals

_parser: Any = import_module("re._parser")  # Python's own pattern parser, which has no types
op: Any = import_module("re._constants")

ANY = 0  # the class of every character, and of the end of the text
END = 1 << ANY  # the bits of the end

# Pairs of ASCII letters that equal one character if case is ignored: (?i:ss) also matches "ß".
FOLDED = ("ff", "fi", "fl", "ss", "st")

FIRST = 0x10000  # stands for the first class where Python's parser reads a pattern
PARTS = re.compile(
    r"(?P<syntax>\((?:\?(?:i?:|[=!]))?|[)|*+?]|\{(?=\d|,\d)\d*,?\d*\}(?![?+]))|(?P<class>"
    r"\\[pP]\{[^}]*\}|\\[sSdDwWhHrntfvae]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^\w\s]|[^\\\[\](){}*+?^$|]"
    r"|\[(?!\^?\])(?:\\.|[^\[\]\\]|\[(?:\\.|[^\[\]\\])*\])*\])|.",
    re.ASCII | re.DOTALL,
)


class UnsupportedTokenizer(ValueError):
    """Error of a tokenizer with an unsupported rule. `Canonical` catches it and keeps its message as `reason`.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models
    >>> words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    >>> Canonical(words, Vocabulary([b"a", b"?"])).reason
    'its model is WordLevel, or BPE that marks the parts of words'
    """


class Node(NamedTuple):
    """Node of a pattern: leads to `targets` if the next character belongs to a class (`holds`) or does not."""

    kind: str  # "accept", "read" the character, or only "look" at it
    class_: int
    holds: bool
    targets: tuple[int, ...]


class Split:
    """Guesses for one pattern, in the syntax of Oniguruma as `tokenizers` uses it.

    Supported are alternatives, groups, classes, greedy and lazy quantifiers, possessive quantifiers of a single class,
    (?i:...) around ASCII letters, and lookahead to a single class. Other syntax raises UnsupportedTokenizer, as does a
    pattern that matches the empty text. Python's own parser reads the pattern, in which one character stands for each
    class.

    `pattern` may also be a pre-tokenizer that isolates single characters; with `repeated`, a run of such characters is
    one pre-token.
    """

    def __init__(self, pattern: Any, repeated: bool = False) -> None:
        self.pattern = pattern
        self.classes: list[Any] = []  # from number 1 on: pre-tokenizers that isolate a class
        self.nodes = [Node("accept", ANY, True, ())]
        # character -> an int whose bit c is set if class c contains it
        self.bits = Memo(self._find_bits)
        self._always_matches = Memo(self._find_always_matches)
        if isinstance(pattern, str):
            self._names: list[str] = []  # of the classes as they stand in the pattern
            self._numbers = Numbering(["any"])  # name of a class -> its number
            self.first = self._enter(self._parse(pattern), False, 0)
        else:
            self.classes = [pattern]
            self.first = self._add("read", 1, 0)
            if repeated:
                again = self._add("look", ANY, self.first, 0)
                self.nodes[self.first] = Node("read", 1, True, (again,))

    def _refuse_if(self, holds: object, problem: str) -> None:
        if holds:
            raise UnsupportedTokenizer(f"the pattern {self.pattern!r} {problem}")

    def _parse(self, pattern: str) -> Any:
        """Return Python's syntax tree of a pattern, in which the characters from FIRST on stand for classes."""

        def replacement(match: re.Match[str]) -> str:
            if match["syntax"]:
                return match[0]
            place = f"{match[0]!r} at {match.start()}"
            self._refuse_if(not match["class"], f"has {place}, which is not supported")
            self._names.append(match[0])
            return chr(FIRST + len(self._names) - 1)

        try:
            tree = _parser.parse(PARTS.sub(replacement, pattern))
        except re.error as error:
            self._refuse_if(True, f"has something that is not supported: {error.msg}")
        lower = pattern.lower()
        folded = not pattern.isascii() or any(pair in lower for pair in FOLDED)
        self._refuse_if(
            "(?i:" in pattern and folded,
            "ignores the case of letters that one character may stand for",
        )
        self._refuse_if(not tree.getwidth()[0], "matches the empty text")
        return tree

    def _add(self, kind: str, class_: int, *targets: int, holds: bool = True) -> int:
        self.nodes.append(Node(kind, class_, holds, targets))
        return len(self.nodes) - 1

    def _enter(self, items: Any, fold: bool, then: int) -> int:
        """Add the nodes of parsed items, after which `then` follows; return the node that enters them."""
        for kind, value in reversed(list(items)):
            match kind:
                case op.LITERAL:
                    then = self._add("read", self._class(value, fold), then)
                case op.IN:  # alternatives of single classes
                    ways = [self._enter([each], fold, then) for each in value]
                    then = self._add("look", ANY, *ways)
                case op.BRANCH:
                    ways = [self._enter(each, fold, then) for each in value[1]]
                    then = self._add("look", ANY, *ways)
                case op.SUBPATTERN:
                    then = self._enter(value[3], fold or value[1] > 0, then)
                case op.ASSERT | op.ASSERT_NOT:
                    class_ = self._single(value[1], fold)
                    then = self._add("look", class_, then, holds=kind is op.ASSERT)
                case op.MAX_REPEAT | op.MIN_REPEAT | op.POSSESSIVE_REPEAT:
                    then = self._repeat(kind, value, fold, then)
                case _:
                    self._refuse_if(True, f"has something that is not supported: {kind}")
        return then

    def _repeat(self, kind: Any, value: Any, fold: bool, then: int) -> int:
        """Add the nodes of a quantified part."""
        low, high, body = value
        self._refuse_if(not body.getwidth()[0], "repeats the empty text")
        end = then
        order = -1 if kind is op.MIN_REPEAT else 1
        if kind is op.POSSESSIVE_REPEAT:
            end = self._add("look", self._single(body, fold), then, holds=False)
        if high is op.MAXREPEAT:
            then = self._add("look", ANY)
            ways = self._enter(body, fold, then), end
            self.nodes[then] = Node("look", ANY, True, ways[::order])
            high = low
        for _ in range(high - low):
            ways = self._enter(body, fold, then), end
            then = self._add("look", ANY, *ways[::order])
        for _ in range(low):
            then = self._enter(body, fold, then)
        return then

    def _single(self, items: Any, fold: bool) -> int:
        """Return the number of the class that is all of `items`."""
        kind, code = list(items)[0]
        is_single = len(items) == 1 and kind is op.LITERAL
        problem = "has a look-ahead or possessive quantifier of more than one class"
        self._refuse_if(not is_single, problem)
        return self._class(code, fold)

    def _class(self, code: int, fold: bool) -> int:
        """Return the number of the class that a character stands for."""
        name = self._names[code - FIRST]
        if fold:
            # a wide class may contain "ß", and then "ss" as well
            is_wide = "\\" in name or name.startswith("[^")
            self._refuse_if(is_wide, "ignores the case of a class")
            name = f"(?i:{name})"
        if name not in self._numbers:
            from tokenizers import Regex, pre_tokenizers

            self.classes.append(pre_tokenizers.Split(Regex(name), "isolated"))
        return self._numbers[name]

    def _find_bits(self, char: str) -> int:
        twice = char + char  # two pre-tokens if the class isolates the character
        bits = END
        for c, class_ in enumerate(self.classes, 1):
            if len(class_.pre_tokenize_str(twice)) == 2:
                bits |= 1 << c
        return bits

    def begin(self, bits: int) -> list[Guess]:
        """Return the guesses after the first character of a pre-token."""
        threads, _ = self._read((self.first,), bits)
        guesses: list[Guess] = []
        if threads:
            guesses.append((threads, frozenset()))
        if not self._must_match(threads):
            guesses.append((None, frozenset(threads)))
        return guesses

    def step(self, guess: Guess, bits: int) -> list[tuple[bool, Guess]]:
        """Return the guesses after the next character, each with True if there is a cut before that character."""
        threads, rivals = guess
        remaining, matched = self._read(rivals, bits)
        if matched or self._must_match(remaining):
            return []
        found: list[tuple[bool, Guess]] = []
        if threads is None:
            for new, more in self.begin(bits):
                found.append((new is not None, (new, more.union(remaining))))
            return found
        onward, matched = self._read(threads, bits)
        if onward:
            found.append((False, (onward, frozenset(remaining))))
        if matched and not self._must_match(onward):
            for new, more in self.begin(bits):
                found.append((True, (new, more.union(remaining, onward))))
        return found

    def ends(self, guess: Guess) -> bool:
        """Return True if the text may end after a guess."""
        threads, rivals = guess
        _, is_beaten = self._read(rivals, END)
        if threads is None or is_beaten:
            return not is_beaten
        return self._read(threads, END)[1]

    def _read(self, threads: Iterable[int], bits: int) -> tuple[tuple[int, ...], bool]:
        """Return the threads after the next character, and True if the match may end before it.

        Threads that are less preferred than such a match are dropped.
        """
        onward: dict[int, None] = {}
        seen = set()
        stack = list(threads)[::-1]
        while stack:
            number = stack.pop()
            kind, class_, holds, targets = self.nodes[number]
            if number in seen or (bits >> class_ & 1) != holds:
                continue
            seen.add(number)
            if kind == "accept":
                return tuple(onward), True
            if kind == "read":
                onward[targets[0]] = None
            else:
                stack += targets[::-1]
        return tuple(onward), False

    def _must_match(self, threads: Iterable[int]) -> bool:
        """Return True if one of `threads` matches whatever follows, so that it cannot fail."""
        return any(map(self._always_matches.__getitem__, threads))

    def _find_always_matches(self, number: int) -> bool:
        """Return True if a match may end at a node whatever follows."""

        def onward(number: int) -> tuple[int, ...]:
            kind, class_, _, targets = self.nodes[number]
            return targets if kind == "look" and class_ == ANY else ()

        return 0 in reachable([number], onward)


Guesses = frozenset[tuple[Guess, ...]]  # alternatives, each with one guess per split

# at a border: no cut, a cut, or either
INSIDE = 1
CUT = 2
OPEN = 3
FALLBACK = 4  # added to a border: byte tokens spell the character
BEGUN = 8 | INSIDE  # only the bytes that begin every text were read, no token yet


class PreTokenState(NamedTuple):
    """State of the pre-tokeniser after a part of a text."""

    guesses: Guesses | None  # None where a pre-token must begin
    literals: frozenset[bytes]  # rests that would complete a forbidden literal
    pending: bytes  # bytes of an incomplete character
    border: int  # before the next character: INSIDE, CUT or OPEN; or with FALLBACK


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
        self,
        splits: Sequence[Split],
        literals: Iterable[bytes] = (),
        alphabet: Iterable[str] = (),
        begin: bytes = b"",
        alone: bool = True,
    ) -> None:
        self.splits = list(splits)
        self.alphabet = frozenset(alphabet)
        self.begin = begin
        self._begun = INSIDE if alone else BEGUN
        self.start = PreTokenState(None, frozenset(), b"", OPEN)
        # first byte -> the bytes after it
        self._literals = defaultdict[int, set[bytes]](set)
        for literal in literals:
            self._literals[literal[0]].add(literal[1:])
        self._moved = Memo(self._move)

    def open(self, state: PreTokenState, stable: bool) -> PreTokenState | None:
        """Return the state at the border of two tokens: cut, or either cut or not if they are a `stable` pair."""
        if state.pending:
            if not stable:
                return None
            return state._replace(border=state.border | FALLBACK)
        if state.guesses is not None and not stable and not self.splits:
            return None
        return state._replace(border=OPEN if stable else CUT)

    def step(self, state: PreTokenState, byte: int) -> PreTokenState | None:
        """Return the state after a byte, or None if no text continues so."""
        guesses, literals, pending, border = state
        ahead = frozenset(rest[1:] for rest in literals if rest[0] == byte)
        ahead |= self._literals[byte]
        pending += bytes([byte])
        if b"" in ahead or (guesses is None and not pending.startswith(self.begin)):
            return None
        try:
            char = pending.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
            return PreTokenState(guesses, ahead, pending, border)
        if border & FALLBACK and char in self.alphabet:
            return None
        bits = tuple([split.bits[char] for split in self.splits])
        found = self._moved[guesses, border & OPEN, bits]
        if not found:
            return None
        return PreTokenState(found, ahead, b"", INSIDE if guesses else self._begun)

    def accepts(self, state: PreTokenState) -> bool:
        """Return True if the text, or the part of it before a separating token, may end here."""
        if state.pending or state.border == BEGUN:
            return False
        if state.guesses is None:
            return True
        return any(self._end(guesses, 0) for guesses in state.guesses)

    def _end(self, guesses: tuple[Guess, ...], first: int) -> bool:
        splits = self.splits[first:]
        return all(map(Split.ends, splits, guesses[first:]))

    def _begin(self, bits: Sequence[int], first: int) -> list[tuple[Guess, ...]]:
        splits = self.splits[first:]
        begun = map(Split.begin, splits, bits[first:])
        return list(itertools.product(*begun))

    def _move(self, key: tuple[Guesses | None, int, tuple[int, ...]]) -> Guesses:
        guesses, border, bits = key
        if guesses is None:
            return frozenset(self._begin(bits, 0))
        found = set()
        for each in guesses:
            for cut, new in self._moves(each, bits, 0):
                if border & (CUT if cut else INSIDE):
                    found.add(new)
        return frozenset(found)

    def _moves(
        self, guesses: tuple[Guess, ...], bits: Sequence[int], at: int
    ) -> list[tuple[bool, tuple[Guess, ...]]]:
        """Return pairs: True if a split from `at` on cuts before the next character, and the guesses of these splits.

        Where a split cuts, all later splits begin anew.
        """
        if at == len(self.splits):
            return [(False, ())]
        found = []
        for cut, guess in self.splits[at].step(guesses[at], bits[at]):
            if not cut:
                for later_cut, rest in self._moves(guesses, bits, at + 1):
                    found.append((later_cut, (guess, *rest)))
            elif self._end(guesses, at + 1):
                for rest in self._begin(bits, at + 1):
                    found.append((True, (guess, *rest)))
        return found
