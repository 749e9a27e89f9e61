"""Lark's terminals in the order in which its lexers try them, or the reason why there are none.

Words: a *word* is a terminal that is one string; a *keyword* is a word that a regular expression matches as a whole.
Words that stand in the same places of all rules, and next to each other in the lexer's order, are read as one terminal,
since neither lexer nor parser tells them apart.

Source: the lexer of lark 1.3.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lark.lexer import PatternStr, TerminalDef

from llmppl.grammar.lalr_tables import Rule
from llmppl.grammar.terminals import Terminal
from llmppl.growing import Numbering, turned
from llmppl.languages.limits import MAX_NFA_STATES, TooLarge
from llmppl.languages.machine import Leftmost
from llmppl.languages.nfa import NFA
from llmppl.languages.regex import parse

MIN_JOINED = 8                                      # words in a row from which on they are read as one terminal
MAX_COMPARED = 50                                   # symbols of an alternative in which words may stand for each other


def split_keywords(terminals: Sequence[TerminalDef], flags: int) -> list[Terminal]:
    """The terminals in the order in which lark's lexers try them, with lark's rule of keywords.

    A keyword is split off the regular expression that matches it: that text is the keyword then. Where both may stand,
    the keyword is no alternative of its own.
    """
    for terminal in terminals:
        _check(terminal, flags)
    _check_together(terminals, flags)
    ranked = sorted(terminals, key=lambda t: (-t.priority, -t.pattern.max_width, -len(t.pattern.value), t.name))
    nfas = {t.name: _nfa(t, flags) for t in ranked}
    if sum(map(len, nfas.values())) > MAX_NFA_STATES:
        worst = max(nfas, key=lambda name: len(nfas[name]))
        raise TooLarge(
            f"terminal {worst}, beside the others,",
            f"{len(nfas[worst]):,} states, and more than {MAX_NFA_STATES:,} together",
            "fewer or smaller counted repeats would work",
        )
    words = [t for t in ranked if isinstance(t.pattern, PatternStr)]
    embedded: dict[str, set[str]] = defaultdict(set)
    keywords: dict[str, tuple[str, ...]] = {t.name: () for t in words}
    for t in [t for t in ranked if t.name not in keywords]:
        matches = _whole_matches(nfas[t.name], [word for word in words if word.priority == t.priority])
        keywords[t.name] = tuple(word.name for word in matches)
        for word in matches:
            embedded[word.name].update([t.name][: set(word.pattern.flags) <= set(t.pattern.flags)])
    plain = {t.name: (t.pattern.value,) for t in words if not (t.pattern.flags or flags)}
    return [
        Terminal(
            t.name,
            t.pattern.to_regexp(),
            nfas[t.name],
            plain.get(t.name, ()),
            keywords[t.name],
            frozenset(embedded[t.name]),
        )
        for t in ranked
    ]


def _check(terminal: TerminalDef, flags: int) -> None:
    pattern = terminal.pattern.to_regexp()
    try:
        re.compile(pattern, flags)
    except re.error as error:
        where = "" if error.pos is None else f"\n    {pattern}\n    {' ' * error.pos}^"
        raise ValueError(f"terminal {terminal.name}: {error}{where}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"terminal {terminal.name}: {error or 'too deeply nested'}") from None
    if terminal.pattern.min_width == 0:
        raise ValueError(f"terminal {terminal.name}: {pattern!r} matches the empty text, which lark's lexers refuse")


def _check_together(terminals: Sequence[TerminalDef], flags: int) -> None:
    """Raise a ValueError if lark cannot have the terminals as alternatives of one regular expression."""
    patterns = {t.name: t.pattern.to_regexp() for t in terminals}
    named = [name for name, pattern in patterns.items() if re.search(r"\(\?(P<|[aiLmsux]+\))", pattern)]
    try:
        re.compile("|".join(f"(?P<{name}>{patterns[name]})" for name in named), flags)
    except re.error as error:
        raise ValueError(
            f"lark cannot put terminals into one regular expression ({', '.join(named)}): {error}"
        ) from error


def _nfa(terminal: TerminalDef, flags: int) -> NFA:
    try:
        return parse(terminal.pattern.to_regexp(), flags)
    except ValueError as error:
        raise ValueError(f"terminal {terminal.name}: {error}") from error


def _whole_matches(nfa: NFA, words: list[TerminalDef]) -> list[TerminalDef]:
    """The words that are all of the match that `re` finds at their beginning."""
    machine = Leftmost(nfa) if words else None
    return [word for word in words if machine and _matches_whole(machine, word.pattern.value.encode())]


def _matches_whole(machine: Leftmost, data: bytes) -> bool:
    state: int | None = machine.start
    matched = None
    for at, byte in enumerate(data, 1):
        state = machine.step(state, byte) if state else None
        if state is None:
            return False
        since = machine.matched(state)
        matched = matched if since is None else at - since
    since = machine.at_end(state or 0)
    return (matched if since is None else len(data) - since) == len(data)


def join_words(
    terminals: Sequence[Terminal], ignored: frozenset[str], rules: Iterable[Rule]
) -> tuple[list[Terminal], list[Rule]]:
    """The same with words in a row as one terminal, where no rule and no regular expression tells them apart."""
    places: dict[str, set[int]] = {terminal.name: set() for terminal in terminals if terminal.words}
    numbers: Numbering[Any] = Numbering()
    for rule in rules:
        for at, name in enumerate(rule.expansion):
            if name in places:
                hole: Any = (*rule.expansion[:at], None, *rule.expansion[at + 1 :])
                shared = len(rule.expansion) < MAX_COMPARED
                places[name].add(numbers[rule.origin, rule.priority, hole if shared else object()])
    hosts = turned((terminal.name, terminal.keywords) for terminal in terminals)

    def alike(terminal: Terminal) -> Any:
        """What words must have in common to be read as one."""
        if not terminal.words or terminal.name in ignored:
            return terminal.name
        return frozenset(places[terminal.name]), tuple(hosts[terminal.name]), terminal.embedded

    runs = [list(run) for _, run in itertools.groupby(terminals, alike)]
    first = {terminal.name: run[0].name for run in runs if len(run) >= MIN_JOINED for terminal in run}

    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple([first.get(name, name) for name in names])

    found: list[Terminal] = []
    for run in runs:
        if run[0].name in first:
            strings = tuple(dict.fromkeys(itertools.chain.from_iterable(terminal.words for terminal in run)))
            pattern = "|".join(map(re.escape, strings))
            found.append(replace(run[0], pattern=pattern, nfa=parse(pattern, to_end=True), words=strings))
        else:
            found += [replace(t, keywords=tuple(dict.fromkeys(renamed(t.keywords)))) for t in run]
    return found, list(dict.fromkeys(rule._replace(expansion=renamed(rule.expansion)) for rule in rules))
