"""Patterns at which a tokenizer splits a text, matched a character at a time, with the matches guessed.

Words. A *split* is one pattern whose matches, and the gaps between them, are the pieces that a text is cut into. Its
*threads* are where its match may stand in the pattern, the preferred first, as in Pike's machine; *doomed* are threads
that would be preferred to what was guessed, and so have to fail. A *class* is a set of characters such as `\\p{L}`:
which belong to it is asked of the tokenizer's own engine, one character at a time.

Source for the threads: Cox (2009), "Regular Expression Matching: the Virtual Machine Approach".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from llmppl.support.graphs import Memo, Numbering, reached

Guess = tuple[tuple[int, ...] | None, frozenset[int]]  # threads, None in a gap; doomed
Enter = Callable[[int], int]                        # the node that follows -> the node to enter by

ANY = 0                                             # the class of every character, and of the end of the text
END = 1 << ANY                                      # the bits of the end

# What a character can fold to that is several ASCII letters: (?i:ss) also matches "ß".
FOLDED = ("ff", "fi", "fl", "ss", "st")

CLASS = re.compile(
    r"\\[pP]\{[^}]*\}|\\[sSdDwWhHrntfvae]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^\w\s]|[^\\\[\](){}*+?^$|]",
    re.ASCII | re.DOTALL,
)
QUANTIFIER = re.compile(r"(?P<sign>[*+?])(?P<style>[+?]?)|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\}")
SIGNS = {"*": ("0", ",", ""), "+": ("1", ",", ""), "?": ("0", ",", "1")}    # as {0,}, {1,} and {0,1}


class UnsupportedTokenizer(ValueError):
    """Rules of a tokenizer that are not supported; the message says which."""


class Node(NamedTuple):
    """A place in a pattern: where it leads if the next character is in a class, or is not (`holds`)."""

    kind: str                                       # "accept", "read" the character, or only "look" at it
    class_: int
    holds: bool
    targets: tuple[int, ...]


class Split:
    """The guesses for one pattern, which is in the syntax of Oniguruma as `tokenizers` uses it.

    Supported are alternatives, groups, classes, greedy and lazy quantifiers, possessive ones of a single class,
    (?i:...) around ASCII letters, and looking ahead to a single class.

    Instead of a pattern there may be a pre-tokenizer that isolates single characters; `repeated` says that the
    characters of a run are one piece. UnsupportedTokenizer is raised at anything else, and if the empty text matches.
    """

    def __init__(self, pattern: Any, repeated: bool = False) -> None:
        self.classes: list[Any] = []                # from 1 on: pre-tokenizers that isolate the characters of a class
        self.nodes = [Node("accept", ANY, True, ())]
        self.bits = Memo(self._find_bits)           # character -> bit c is set if the class c holds it
        self._certain = Memo(self._accepts_any)
        if isinstance(pattern, str):
            self.first = _Parser(pattern, self).first
        else:
            self.classes = [pattern]
            self.first = self.read(1, 0)
            if repeated:
                self.nodes[self.first] = Node("read", 1, True, (self.fork(self.first, 0),))

    def _add(self, *node: Any) -> int:
        self.nodes.append(Node(*node))
        return len(self.nodes) - 1

    def read(self, class_: int, target: int) -> int:
        """A new node that reads a character of a class."""
        return self._add("read", class_, True, (target,))

    def look(self, class_: int, target: int, holds: bool = True) -> int:
        """A new node that looks whether a character of a class is next, or whether none is."""
        return self._add("look", class_, holds, (target,))

    def fork(self, *targets: int) -> int:
        """A new node that leads to several, the preferred first."""
        return self._add("look", ANY, True, targets)

    def _find_bits(self, char: str) -> int:
        twice = char + char                         # two pieces if isolated
        return END | sum((len(class_.pre_tokenize_str(twice)) == 2) << c for c, class_ in enumerate(self.classes, 1))

    def begin(self, bits: int) -> list[Guess]:
        """The guesses after the first character of a piece."""
        threads, _ = self._read((self.first,), bits)
        guesses: list[Guess] = [(threads, frozenset()), (None, frozenset(threads))]
        return guesses[not threads : 1 if self._hopeless(threads) else 2]

    def step(self, guess: Guess, bits: int) -> list[tuple[bool, Guess]]:
        """What may become of a guess: whether there is a cut before the next character, and the guess after it."""
        threads, doomed = guess
        still, matched = self._read(doomed, bits)
        if matched or self._hopeless(still):
            return []
        if threads is None:
            return [(new is not None, (new, more.union(still))) for new, more in self.begin(bits)]
        onward, matched = self._read(threads, bits)
        begun = self.begin(bits) if matched and not self._hopeless(onward) else []
        found: list[tuple[bool, Guess]] = [(True, (new, more.union(still, onward))) for new, more in begun]
        return [(False, (onward, frozenset(still))), *found] if onward else found

    def ends(self, guess: Guess) -> bool:
        """Whether the text may end after a guess."""
        threads, doomed = guess
        return not self._read(doomed, END)[1] and (threads is None or self._read(threads, END)[1])

    def _read(self, threads: Iterable[int], bits: int) -> tuple[tuple[int, ...], bool]:
        """Where threads go with the next character, and whether the match may end before it.

        Threads that are less preferred than that match are left out.
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

    def _hopeless(self, doomed: Iterable[int]) -> bool:
        """Whether one of `doomed` cannot fail any more."""
        return any(map(self._certain.__getitem__, doomed))

    def _accepts_any(self, number: int) -> bool:
        """Whether a match may end at a node whatever comes next."""

        def onward(number: int) -> tuple[int, ...]:
            node = self.nodes[number]
            return node.targets if (node.kind, node.class_) == ("look", ANY) else ()

        return 0 in reached([number], onward)


class _Parser:
    """Reads a pattern into the nodes of a split. `first` is where it begins."""

    def __init__(self, pattern: str, split: Split) -> None:
        self.pattern, self.split, self.at, self.fold = pattern, split, 0, False
        self.numbers = Numbering(["any"])           # of the classes
        enter, least = self._alternatives()
        self._refuse(self.at < len(pattern), "has a ')' too many")
        self._refuse(not least, "matches the empty text")
        self.first = enter(0)

    def _refuse(self, holds: object, what: str) -> None:
        if holds:
            raise UnsupportedTokenizer(f"the pattern {self.pattern!r} {what}, at {self.at}")

    def _take(self, *texts: str) -> str:
        """The first of `texts` that stands here, read; "" if none does."""
        found = next(filter(lambda text: self.pattern.startswith(text, self.at), texts), "")
        self.at += len(found)
        return found

    def _alternatives(self) -> tuple[Enter, int]:
        """Up to a ')' or the end: how to enter it, and the fewest characters it reads."""
        enters: list[Enter] = []
        sizes: list[int] = []
        while not enters or self._take("|"):
            enter, least = self._sequence()
            enters.append(enter)
            sizes.append(least)
        return (lambda then: self.split.fork(*[enter(then) for enter in enters])), min(sizes)

    def _sequence(self) -> tuple[Enter, int]:
        enters: list[Enter] = []
        size = 0
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            enter, least = self._item()
            enters.insert(0, enter)
            size += least
        return (lambda then: functools.reduce(lambda node, enter: enter(node), enters, then)), size

    def _item(self) -> tuple[Enter, int]:
        """One class, look or group, with its quantifier."""
        if look := self._take("(?=", "(?!"):
            ahead = self._class()
            self._refuse(not self._take(")"), "looks ahead to more than one class")
            return (lambda then: self.split.look(ahead, then, look == "(?=")), 0
        if group := self._take("(?i:", "(?:", "(?", "("):
            return self._quantified(*self._group(group), ANY)
        class_ = self._class()
        return self._quantified(lambda then: self.split.read(class_, then), 1, class_)

    def _group(self, kind: str) -> tuple[Enter, int]:
        """What stands in brackets, behind the first one."""
        self._refuse(kind == "(?", "has an unknown group")
        outer, begin = self.fold, self.at
        self.fold = outer or kind == "(?i:"
        found = self._alternatives()
        inside = self.pattern[begin : self.at].lower()
        odd = self.fold and (not inside.isascii() or any(map(inside.count, FOLDED)))
        self._refuse(odd, "ignores the case of letters that one character may stand for")
        self.fold = outer
        self._refuse(not self._take(")"), "lacks a ')'")
        return found

    def _quantified(self, one: Enter, least: int, class_: int) -> tuple[Enter, int]:
        """What `one` enters, with the quantifier behind it; `class_` is ANY if it is not a single class."""
        match = QUANTIFIER.match(self.pattern, self.at)
        if match is None:
            return one, least
        self.at = match.end()
        possessive = match["style"] == "+"
        fewest, comma, most = SIGNS.get(match["sign"], match.group("low", "comma", "high"))
        endless, low = comma and not most, int(fewest or 0)
        high = int(most or low)
        again = self.pattern.startswith(("*", "+", "?", "{"), self.at)
        odd = again, match[0] in ("{}", "{,}"), possessive and class_ == ANY, not least, high < low
        self._refuse(any(odd), "has a quantifier that is not supported")
        order: Callable[[tuple[int, int]], Iterable[int]] = reversed if match["style"] == "?" else tuple

        def enter(then: int) -> int:
            end = self.split.look(class_, then, holds=False) if possessive else then
            if endless:
                then = self.split.fork()
                self.split.nodes[then] = self.split.nodes[then]._replace(targets=tuple(order((one(then), end))))
            for _ in range(high - low):
                then = self.split.fork(*order((one(then), end)))
            for _ in range(low):
                then = one(then)
            return then

        return enter, low * least

    def _class(self) -> int:
        """The number of a class of characters."""
        begin, match = self.at, CLASS.match(self.pattern, self.at)
        if match:
            self.at = match.end()
        else:
            odd = not self._take("[") or self.pattern.startswith(("]", "^]"), self.at)
            self._refuse(odd, "has something that is not supported")
            self._skip_brackets()
        name = self.pattern[begin : self.at]
        if self.fold:
            wide = "\\" in name or name.startswith("[^")     # where such a class holds "ß", it would also hold "ss"
            self._refuse(wide, "ignores the case of a class")
            name = f"(?i:{name})"
        if name not in self.numbers:
            from tokenizers import Regex, pre_tokenizers

            self.split.classes.append(pre_tokenizers.Split(Regex(name), "isolated"))
        return self.numbers[name]

    def _skip_brackets(self) -> None:
        depth = 1
        while depth and self.at < len(self.pattern):
            char = self.pattern[self.at]
            depth += (char == "[") - (char == "]")
            self.at += 1 + (char == "\\")
