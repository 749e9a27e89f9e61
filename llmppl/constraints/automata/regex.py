"""Regular expressions: Python's own syntax and meaning, as automata over bytes.

`Regex(pattern)` is the language of the texts that `re.fullmatch` accepts. Python's own parser reads the pattern, and
Python itself defines the classes, so `\\w`, `\\d`, `\\s` and the rules of letter case are those of the running version.
In addition, `\\p{L}`, `\\P{Letter}` and `\\p{Greek}` are properties of Unicode, as in the package regex.

All regular constructs are supported. Anchors, `\\b` and look-behind, here of any width, depend on the text before
(`Behind`). Lookahead, possessive quantifiers and atomic groups depend on the text to come (`Ahead`, both in
`automata/nfa.py`). Backreferences and conditional groups are not regular and raise an error.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

from llmppl.constraints.automata.budget import REMEDY, Budget, TooLarge
from llmppl.constraints.automata.characters import (
    category,
    characters,
    include_intersection,
    negated,
    property_ranges,
)
from llmppl.constraints.automata.determinise import Leftmost, Threads, unguarded
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import (
    ACCEPT,
    DEAD,
    FOUND,
    NFA,
    Ahead,
    Behind,
    Fragment,
    Ranges,
    merged,
    utf8,
)
from llmppl.constraints.automata.operations import automaton_of
from llmppl.support.arguments import shown

_compiler: Any = import_module("re._compiler")  # Python's own pattern parser, which has no types
_parser: Any = import_module("re._parser")
op: Any = import_module("re._constants")
regex: Any = import_module("regex")

NOTHING, NEWLINE = Ranges(), ((10, 10),)  # characters
MARK = 0xFF  # stands for `\b` until it is read away
MARK_READ: Fragment = (((MARK, MARK, -1),),)
# read as a list of strings, which is faster
WORDS = re.compile(r"(\((?:\?:)?)?([\w ]+(?:\|[\w ]+){7,})(?(1)\))")
ITEM_STEPS = 20  # that building a copy of an item costs
INTERSECTION_STEPS = 20_000  # that an intersection costs
MAX_AROUND = 40  # characters of a pattern shown on either side of an error


class Regex(DFA):
    """The texts that `re.fullmatch(pattern, text, flags)` accepts: a recognizer over bytes.

    Parameters
    ----------
    pattern : str
    flags : int
        Flags of `re`: I, M, S, X, A, U. They may also stand inside the pattern as `(?i)` or `(?i:...)`.

    Raises
    ------
    ValueError
        The pattern has an error or a construct that is not regular; a caret shows the place.
    TypeError
        The pattern is bytes. Recognizers read the bytes of text, and `.`, `\\w`, ... mean characters.

    Examples
    --------
    >>> Regex("[0-9]{4}-[0-9]{2}").accepts_text("2023-07")
    True
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern = pattern
        self.flags = int(flags)
        words = None
        if not flags and isinstance(pattern, str):
            words = WORDS.fullmatch(pattern)
        if words is not None:
            super().__init__(automaton_of(words[2].split("|")))
        else:
            super().__init__(parse(pattern, flags, to_end=True))

    def __repr__(self) -> str:
        if self.flags:
            return f"Regex({self.pattern!r}, {re.RegexFlag(self.flags)!r})"
        return f"Regex({self.pattern!r})"


def parse(pattern: str, flags: int = 0, *, to_end: bool = False) -> NFA:
    """Return the ordered automaton of a pattern, whose first choices are those that `re` tries first.

    With `to_end`, a match must reach the end of the text (`re.fullmatch`), which decides `$` and `\\Z` at the pattern's
    end. Errors as for `Regex`.
    """
    if not isinstance(pattern, str):
        raise TypeError(
            f"a regex is a str, not {type(pattern).__name__}: its classes are sets of characters"
        )
    marks = set[bool]()
    if to_end and r"\b" in pattern:
        marked = _Builder(pattern, int(flags), to_end, marks).nfa
        if len(marks) == 1 and unguarded(marked, Threads(marked).start[0]):
            with suppress(TooLarge):
                return _without_marks(marked, *marks)
    return _Builder(pattern, int(flags), to_end, None).nfa


class _Builder:
    """Translation of Python's syntax tree into an NFA, from its end to its start.

    Each method takes the state that follows, and returns the state that matches an item and becomes that state. Unless
    `marks` is None, `\\b` reads the byte MARK, which no text has, and adds to `marks` if it is of ASCII.
    """

    def __init__(self, pattern: str, flags: int, to_end: bool, marks: set[bool] | None) -> None:
        self.pattern = pattern
        self.to_end = to_end
        self.marks = marks
        budget = Budget(
            f"regex {shown(pattern)}", f"{REMEDY}, or a Pattern, which has no automaton"
        )
        self.nfa = NFA(budget)
        self.intersection_budget = Budget("an intersection", whole=budget)  # intersections may fail
        self.complete = to_end  # True if `follow` is finished, up to the end of the text
        self.made: dict[tuple[Any, ...], Any] = {}  # what the copies of an item in repeats share
        self.leading = set[int]()  # ids of the conditions at the start of the text
        text, self.properties = _without_properties(pattern)
        if flags & op.SRE_FLAG_LOCALE:
            raise ValueError("the flag re.LOCALE is for patterns of bytes")
        try:
            tree = _parser.parse(text, flags & ~op.SRE_FLAG_DEBUG)
            for kind, value in tree.data:
                if kind not in (op.AT, op.ASSERT, op.ASSERT_NOT):
                    break
                self.leading.add(id(value))
            self.nfa.start = self.sequence(tree, tree.state.flags, ACCEPT)
        except (re.error, OverflowError) as error:
            at = None if self.properties else getattr(error, "pos", None)
            what = getattr(error, "msg", error)
            raise ValueError(_pointed(pattern, f"error in regex: {what}", at)) from None
        except RecursionError:
            what = "error in regex: groups are nested too deeply; some hundred would work"
            raise ValueError(_pointed(pattern, what, None)) from None

    def sequence(self, items: Any, flags: int, follow: int) -> int:
        """Return the state that matches the items in order and becomes `follow`."""
        # the list in a SubPattern, whose own indexing is slow
        items = getattr(items, "data", items)
        end = len(items)
        while end and follow != DEAD:
            begin = end
            while self.complete and begin and _looks_ahead(items[begin - 1]):
                begin -= 1
            found = None
            if begin < end:
                found = self.intersection(items[begin:end], flags, follow)
            if found is None:
                begin = end - 1
                found = self.item(items[begin], flags, follow)
            follow, end = found, begin
        return follow

    def item(self, item: tuple[Any, Any], flags: int, follow: int) -> int:
        """Return the state that matches one item and becomes `follow`."""
        kind, value = item
        self.nfa.budget.spend(steps=ITEM_STEPS)
        match kind:
            case op.LITERAL | op.NOT_LITERAL | op.IN | op.ANY:
                ranges = self.shared((kind, id(value), flags), self.characters, kind, value, flags)
                return self.nfa.read(utf8(ranges), follow)
            case op.BRANCH:
                _, choices = value
                return self.nfa.split([self.sequence(choice, flags, follow) for choice in choices])
            case op.SUBPATTERN:
                _, added, removed, inner = value
                flags = _compiler._combine_flags(flags, added, removed)
                return self.sequence(inner, flags, follow)
            case op.MAX_REPEAT | op.MIN_REPEAT:
                return self.repeat(value, kind is op.MAX_REPEAT, flags, follow)
            case op.AT:
                return self.at(value, flags, follow)
            case op.ASSERT | op.ASSERT_NOT:
                _, inner = value
                look = self.ahead if _looks_ahead(item) else self.behind
                return look(inner, flags, kind is op.ASSERT, follow)
            case op.ATOMIC_GROUP:
                return self.atomic(value, flags, follow)
            case op.POSSESSIVE_REPEAT:
                return self.atomic([(op.MAX_REPEAT, value)], flags, follow)
        if kind is op.GROUPREF:
            raise self.refusal("a backreference")
        raise self.refusal("a conditional group")

    def repeat(self, value: Any, greedy: bool, flags: int, follow: int) -> int:
        least, most, body = value
        if not body.getwidth()[1]:  # what reads nothing is the same however often it is repeated
            least = min(least, 1)
            most = min(most, 1)

        def once(after: int) -> int:
            return self.sequence(body, flags, after)

        def perhaps(after: int) -> int:
            return self.nfa.optional(once(after), follow, greedy)

        state = follow
        if most is op.MAXREPEAT:
            build = self.nfa.plus if least else self.nfa.star
            with self.incomplete():
                state = build(once, follow, greedy)
            least = max(least - 1, 0)
            most = least
        state = self.copies(perhaps, most - least, state)
        return self.copies(once, least, state)

    def copies(self, body: Callable[[int], int], number: int, follow: int) -> int:
        """Return the state that matches a number of copies of `body` and becomes `follow`."""
        before = len(self.nfa)
        state = follow
        for i in range(number):
            last = state
            state = body(last)
            if state == last:  # an iteration reads nothing
                break
            if i == 0:  # the size is known before the copies are built
                self.nfa.reserve((len(self.nfa) - before) * (number - 1))
        return state

    def at(self, place: Any, flags: int, follow: int) -> int:
        """Translate anchors and word boundaries to conditions on the text before and after."""
        if place in (op.AT_END, op.AT_END_STRING):
            if follow == ACCEPT and self.to_end:
                return follow
            rest = r"[^\n]|\n(?s:.)"  # no `$` stands before these texts
            if place is op.AT_END_STRING:
                rest = "(?s:.)"
            elif flags & op.SRE_FLAG_MULTILINE:
                rest = r"[^\n]"
            return self.ahead(_tree(rest), 0, False, follow)
        if place in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            before = ""
            if place is op.AT_BEGINNING and flags & op.SRE_FLAG_MULTILINE:
                before = r"(?s:.*\n)?"
            return self.nfa.guard(Behind(_texts(before), True), follow)
        ascii_only = flags & op.SRE_FLAG_ASCII
        boundary = place is op.AT_BOUNDARY
        if boundary and self.marks is not None:
            self.marks.add(bool(ascii_only))
            return self.nfa.read(MARK_READ, follow)
        word = _tree(r"\w")
        after_word = self.ahead(word, ascii_only, not boundary, follow)
        after_other = self.ahead(word, ascii_only, boundary, follow)
        if not boundary and sys.version_info < (
            3,
            14,
        ):  # before 3.14, \B does not match in an empty text
            not_empty = self.ahead(_tree("(?s:.)"), 0, True, after_other)
            after_other = self.after(_texts(""), not_empty, after_other)
        return self.after(_texts(r"(?s:.*)\w", ascii_only), after_word, after_other)

    def shared(self, key: tuple[Any, ...], build: Callable[..., Any], *arguments: Any) -> Any:
        """Return `build(*arguments)`, made once for all copies of the item that `key` names."""
        if key not in self.made:
            self.made[key] = build(*arguments)
        return self.made[key]

    def after(self, tracker: DFA, follow: int, other: int) -> int:
        """Return a state that becomes `follow` where `tracker` accepts the text before, and `other` elsewhere."""
        holds = self.nfa.guard(Behind(tracker, True), follow)
        fails = self.nfa.guard(Behind(tracker, False), other)
        return self.nfa.split([holds, fails])

    def intersection(self, looks: Sequence[Any], flags: int, follow: int) -> int | None:
        """Return a state for `follow` intersected with all lookaheads `looks`, or None where guards are needed.

        Lookaheads see the text that `follow` reads, so one intersection covers them all. It cannot express conditions
        on the text before, unless the lookaheads stand at the start of the text.
        """
        leading = id(looks[0][1]) in self.leading
        budget = self.intersection_budget
        view = copy.copy(self.nfa)
        view.start = follow
        view.budget = budget
        factors = [(view, True)]
        try:
            budget.spend(steps=INTERSECTION_STEPS)
            for kind, (_, inner) in looks:
                with self.apart(budget) as nfa:
                    nfa.start = self.sequence(inner, flags, nfa.anything(ACCEPT))
                factors.append((nfa, kind is op.ASSERT))
            if self.marks:
                return None
            for nfa, _ in factors:
                if not leading and any(isinstance(guard, Behind) for guard in nfa.guards.values()):
                    return None
            dfas = [(DFA(nfa).explore(), sign) for nfa, sign in factors]
            return include_intersection(self.nfa, dfas, budget)
        except TooLarge:
            return None

    @contextmanager
    def apart(self, budget: Budget) -> Iterator[NFA]:
        """Build the content of the `with` block into an NFA of its own."""
        outer = self.nfa
        self.nfa = NFA(budget)
        try:
            yield self.nfa
        finally:
            self.nfa = outer

    @contextmanager
    def incomplete(self) -> Iterator[None]:
        """Mark that in the `with` block the next state is unfinished or not the end of the text."""
        outer = self.complete
        self.complete = False
        yield
        self.complete = outer

    def ahead(self, inner: Any, flags: int, positive: bool, follow: int) -> int:
        with self.incomplete():
            entry = self.shared((self.nfa, id(inner), flags), self.sequence, inner, flags, FOUND)
        return self.nfa.guard(Ahead(entry, positive), follow)

    def behind(self, inner: Any, flags: int, positive: bool, follow: int) -> int:
        tracker = self.shared((id(inner), flags), self.before, inner, flags)
        return self.nfa.guard(Behind(tracker, positive), follow)

    def before(self, inner: Any, flags: int) -> DFA:
        """Return the texts that end with a match of `inner`."""
        with self.apart(self.nfa.budget) as nfa, self.incomplete():
            end = nfa.add((ACCEPT,))  # not ACCEPT itself, which `$` takes for the end of the text
            nfa.start = nfa.anything(self.sequence(inner, flags, end))
        tracker = DFA(nfa)
        if tracker.needs_lookahead:
            raise self.refusal("a look-behind that ends in a look-ahead, $ or \\b")
        return tracker

    def atomic(self, inner: Any, flags: int, follow: int) -> int:
        """Match the first match of `inner`, and no other one.

        The leftmost-first automaton of `inner` is included twice: once to be read, and once as a lookahead from the end
        of a match, which excludes that a preferred (here: longer) match follows.
        """
        to_end = self.to_end
        self.to_end = False  # the order of choices matters inside
        with self.apart(self.nfa.budget) as nfa, self.incomplete():
            nfa.start = self.sequence(inner, flags, ACCEPT)
        self.to_end = to_end
        if nfa.guards:
            raise self.refusal(
                "look-around, an anchor, \\b or atomic group inside an atomic or possessive group"
            )
        machine = Leftmost(nfa).explore()
        rows = machine.edges()
        ends = [state for state in range(len(rows)) if machine.matched(state) is not None]
        first, _ = self.nfa.graph(rows, dict.fromkeys(ends, FOUND))
        exits = {}
        for end in ends:
            longer = first + end if rows[end] else DEAD
            exits[end] = self.nfa.guard(Ahead(longer, False), follow)
        _, entries = self.nfa.graph(rows, exits)
        return entries[machine.start]

    def characters(self, kind: Any, value: Any, flags: int) -> Ranges:
        """Return the characters that one item matches."""
        if kind is op.ANY:
            return negated(NOTHING if flags & op.SRE_FLAG_DOTALL else NEWLINE)
        items = value if kind is op.IN else [(op.LITERAL, value)]
        negate = kind is op.NOT_LITERAL
        inside: list[tuple[int, int]] = []
        rest = []
        for item in items:
            if item[0] is op.NEGATE:
                negate = True
            elif item in self.properties:
                inside += property_ranges(
                    *self.properties[item], bool(flags & op.SRE_FLAG_IGNORECASE)
                )
            else:
                rest.append(item)
        inside += characters(tuple(rest), flags & (op.SRE_FLAG_IGNORECASE | op.SRE_FLAG_ASCII))
        return negated(merged(inside), negate)

    def refusal(self, construct: str) -> ValueError:
        """Return the error for an unsupported construct."""
        return ValueError(
            _pointed(self.pattern, f"regex not supported: {construct}; a Pattern takes it", None)
        )


def _pointed(pattern: str, message: str, position: int | None) -> str:
    """Return the message, the line of the pattern around `position`, and a caret under the character there."""
    if position is None:
        return f"{message}\n    {shown(pattern)}"
    first = max(pattern.rfind("\n", 0, position) + 1, position - MAX_AROUND)
    line = pattern[first : position + MAX_AROUND].partition("\n")[0]
    return f"{message} at position {position}\n    {line}\n    {' ' * (position - first)}^"


Properties = dict[tuple[Any, int], tuple[str, bool]]  # item of the tree -> property, negated


def _looks_ahead(item: Any) -> bool:
    kind, value = item
    return kind in (op.ASSERT, op.ASSERT_NOT) and value[0] > 0


def _without_marks(marked: NFA, ascii_only: bool) -> NFA:
    """Return the texts of a language whose marks stand at boundaries of words, without their marks."""
    dfa = DFA(marked).intersected_with(_boundaries(ascii_only))
    nfa = NFA(marked.budget)
    rows = dfa.edges()
    for row in rows:
        if row and row[-1][0] == MARK:
            row.pop()
    exits = {state: nfa.add(()) for state in range(1, len(rows))}
    _, entries = nfa.graph(rows, exits)
    for state, exit in exits.items():
        if dfa.accepts(state):
            nfa.epsilon[exit] += (ACCEPT,)
        after = dfa.step(state, MARK)
        if after:
            nfa.epsilon[exit] += (entries[after],)
    nfa.start = entries[dfa.start]
    return nfa


@cache
def _boundaries(ascii_only: bool) -> DFA:
    """Return the texts that may have marks where a word begins or ends."""
    nfa = NFA()
    after_word = nfa.add(())
    after_other = nfa.add(())
    inside = category("w", ascii_only)
    word = nfa.read(utf8(inside), after_word)
    other = nfa.read(utf8(negated(inside)), after_other)

    def mark(follow: int) -> int:
        return nfa.read(MARK_READ, follow)

    for state, ways in ((after_word, [ACCEPT, other]), (after_other, [word])):
        nfa.epsilon[state] = ACCEPT, word, other, nfa.plus(mark, nfa.split(ways))
    nfa.start = after_other
    return DFA(nfa)


_tree = cache(_parser.parse)  # of the patterns that stand for anchors and word boundaries
_texts = cache(Regex)


def _without_properties(pattern: str) -> tuple[str, Properties]:
    """Replace each `\\p{...}` by one lone surrogate, which no text has, so that `re` can parse the pattern.

    Returns the pattern, and the property of each surrogate.
    """
    free = (code for code in range(0xD800, 0xE000) if chr(code) not in pattern)
    names: Properties = {}

    def replacement(match: re.Match[str]) -> str:
        letter, long, short = match.groups()
        if not letter:
            return match[0]
        name = long or short or ""
        try:
            property_ranges(name, False, False)
        except regex.error as error:
            message = f"error in regex: {match[0]} is not a property of Unicode such as \\p{{Lu}}: {error.msg}"
            raise ValueError(_pointed(pattern, message, match.start())) from None
        code = next(free)
        names[op.LITERAL, code] = name, letter == "P"
        return chr(code)

    return re.sub(r"(?s)\\(?:([pP])(?:\{([^}]*)\}|([A-Z]))?|.)", replacement, pattern), names
