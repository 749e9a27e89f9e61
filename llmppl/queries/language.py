"""From the arguments of a query to languages: which strings come first, and what may follow each of them.

The one idea: a query is a list of *parts*. A part pairs a language of prefix strings with the language of what may
follow any of them, and no string is a prefix in two parts. What follows a prefix depends only on the state that the
pattern's automaton is in behind it, so there are as many parts as such states; most queries have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any

import numpy as np

from llmppl.arguments import count, function, optional_count
from llmppl.languages import DFA, Edit, Regex, alignment, within

MAX_PRODUCT = 100_000                                   # states of a static difference; beyond it is deferred
MAX_STATES = 200_000                                    # of a language that is cut to `max_chars`
FEW = 1000                                              # prefix strings that are listed

Language = str | DFA
Rewrite = Callable[[DFA], DFA]


@dataclass(frozen=True)
class Edits:
    """Edits of total cost `most` or less: which kinds there are, and of which characters.

    insert, delete, substitute : int or None
        What one such edit costs; None: there are none.
    alphabet : str or iterable of str, optional
        What may be inserted or put in place of others: a regex of single characters, such as "[a-z ]", or the
        characters. Any character if left out.
    """

    most: int
    insert: int | None = 1
    delete: int | None = 1
    substitute: int | None = 1
    alphabet: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        count("most", self.most, least=0)
        for name in ("insert", "delete", "substitute"):
            optional_count(name, getattr(self, name))

    def __call__(self, language: DFA) -> DFA:
        """What such edits make of the strings of a language."""
        return within(language, self.most, **self._kinds())

    def alignment(self, language: DFA, text: str) -> list[Edit]:
        """The edits that make `text` of the nearest string of a language."""
        return alignment(language, text, self.most, **self._kinds()) or []

    def _kinds(self) -> dict[str, Any]:
        return {"insert": self.insert, "delete": self.delete, "substitute": self.substitute, "alphabet": self.alphabet}


@dataclass(frozen=True)
class Part:
    """Prefix strings, and what may follow them.

    prefixes : DFA
    follow : DFA
        What follows, from its state `start` on.
    unedited : DFA
        What followed before the edits, from its own start on; of use only where there are edits.
    """

    prefixes: DFA
    follow: DFA
    start: int
    unedited: DFA

    def continues(self) -> bool:
        """Whether some string that may follow begins another."""
        follow = _from_state(self.follow, self.start).explore()
        return bool(follow.table[follow.accepting].any())


@dataclass(frozen=True)
class Query:
    """What a pattern, a prefix and what is done to them come to.

    parts : tuple of Part
    ignored : DFA or None
        Of what follows, strings not to return that are still in `follow`, because to take them out there would have
        made it too large.
    edits : Edits or None
        That were made to what follows.
    """

    parts: tuple[Part, ...]
    ignored: DFA | None
    edits: Edits | None

    def prefixes(self) -> list[tuple[str, Part]] | None:
        """All prefix strings with their parts; None if there are more than FEW."""
        found: list[tuple[str, Part]] = []
        for part in self.parts:
            found += [(text, part) for text in islice(part.prefixes.enumerate(), FEW + 1 - len(found))]
            if len(found) > FEW:
                return None
        return found


def compile_query(
    pattern: Language,
    prefix: Language = "",
    *,
    rewrite: Iterable[Rewrite] = (),
    edits: int | Edits | Mapping[str, int | Edits] = 0,
    ignore: Language | None = None,
    max_chars: int | None = None,
) -> Query:
    """The parts of a query; the arguments are those of `search`.

    Raises
    ------
    ValueError
        A regular expression that is none (with a caret), an empty language, a prefix string with which no string of the
        pattern begins (the shortest is shown), edits that make the automaton too large (its size is named).
    """
    language, prefixes = _language(pattern, "pattern"), _language(prefix, "prefix")
    if not isinstance(rewrite, Iterable) or isinstance(rewrite, str):
        raise TypeError(f"rewrite must be a list of functions from DFA to DFA, such as [any_case], not {rewrite!r}")
    for each in rewrite:
        change = function("each of rewrite", each, "any_case")
        language, prefixes = _rewritten(change, language), _rewritten(change, prefixes)
    if language.is_empty():
        raise ValueError(f"{pattern!r} matches no text at all")
    if prefixes.is_empty():
        raise ValueError(f"the prefix {prefix!r} matches no text at all")
    before, after = _edits(edits)
    unwanted = None if ignore is None else _language(ignore, "ignore")
    optional_count("max_chars", max_chars, least=0)

    deferred = False
    parts: list[Part] = []
    for start, strings in _split(language, prefixes, prefix):
        follow = unedited = language
        if after is not None or max_chars is not None or unwanted is not None:
            follow, start = _from_state(language, start), -1
            unedited = follow
        if after is not None:
            follow = after(follow)
        if max_chars is not None:
            try:
                follow = follow.explore(MAX_STATES) & Regex(f"(?s:.{{0,{max_chars}}})")
            except ValueError as error:
                raise ValueError(f"max_chars: {error}, too many to count characters in: use max_tokens") from error
        if unwanted is not None:
            try:
                limit = MAX_PRODUCT // unwanted.explore(MAX_PRODUCT).num_states
                follow = follow.explore(limit) - unwanted
            except ValueError:                          # too large
                deferred = True
        if before is not None:
            strings = before(strings)
        if not follow.is_empty():
            parts.append(Part(strings, follow, follow.start if start < 0 else start, unedited))
    if not parts:
        limits = {f"ignore={ignore!r}": ignore, f"max_chars={max_chars}": max_chars}
        named = " and ".join(name for name, given in limits.items() if given is not None)
        raise ValueError(f"no text of {pattern!r} is left by {named}")
    return Query(tuple(_disjoint(parts)), unwanted if deferred else None, after)


def _language(language: Language, name: str) -> DFA:
    if isinstance(language, DFA):
        return language
    if not isinstance(language, str):
        raise TypeError(f"{name} must be a regular expression (str) or a DFA, not {language!r}")
    return Regex(language)


def _rewritten(change: Rewrite, language: DFA) -> DFA:
    found = change(language)
    if not isinstance(found, DFA):
        raise TypeError(f"rewrite: {change!r} returned {found!r}; it must return a DFA")
    return found


def _edits(edits: int | Edits | Mapping[str, int | Edits]) -> tuple[Edits | None, Edits | None]:
    """The edits of the prefix and of what follows; None if there are none."""
    if isinstance(edits, Mapping):
        if not set(edits) <= {"prefix", "suffix"}:
            raise ValueError(f'edits by region are {{"prefix": ..., "suffix": ...}}, not {dict(edits)!r}')
        regions = [edits.get("prefix", 0), edits.get("suffix", 0)]
    else:
        regions = [0, edits]
    found: list[Edits | None] = []
    for each in regions:
        made = each if isinstance(each, Edits) else Edits(count("edits", each, least=0))
        found.append(made if made.most else None)
    return found[0], found[1]


def _from_state(language: DFA, state: int) -> DFA:
    """What may follow a state."""
    if state == language.start:
        return language
    whole = language.explore()
    return DFA.from_table(whole.table, whole.accepting, state)


def _split(language: DFA, prefixes: DFA, shown: Language) -> Iterator[tuple[int, DFA]]:
    """The states of `language` that prefix strings lead to, with these strings; an error if one leads nowhere."""
    few = list(islice(prefixes.enumerate(), FEW + 1))
    if len(few) <= FEW:
        groups: dict[int, list[str]] = {}
        for text in few:
            state: int | None = language.start
            for byte in text.encode():
                state = None if state is None else language.step(state, byte)
            if state is None:
                raise _no_prefix(text, shown)
            groups.setdefault(state, []).append(text)
        for state, texts in groups.items():
            yield state, DFA.from_strings(texts)
        return
    whole, strings = language.explore(), prefixes.explore()
    alive = np.ones(len(whole.table), bool)
    alive[0] = False
    stray = strings - DFA.from_table(whole.table, alive, whole.start)
    if not stray.is_empty():
        raise _no_prefix(stray.shortest() or "", shown)
    ends = {(strings.start, whole.start)}               # pairs of states that the same text leads to
    todo = list(ends)
    for a, b in todo:
        pairs = np.unique(np.stack([strings.table[a], whole.table[b]]), axis=1).T.tolist()
        fresh = [(x, y) for x, y in pairs if x and (x, y) not in ends]
        ends.update(fresh)
        todo += fresh
    for state in sorted({b for a, b in ends if strings.accepts(a)}):
        wanted = np.zeros(len(whole.table), bool)
        wanted[state] = True
        yield state, strings & DFA.from_table(whole.table, wanted, whole.start)


def _no_prefix(text: str, shown: Language) -> ValueError:
    return ValueError(
        f"the prefix {shown!r} is no prefix of the pattern: no text of it begins with {text!r}. The pattern includes "
        f"the prefix, so begin it with the same text"
    )


def _disjoint(parts: list[Part]) -> Iterator[Part]:
    """The same with every prefix string in one part only: edits may have brought two prefixes to one string."""
    atoms: list[tuple[DFA, list[Part]]] = []
    for part in parts:
        left, split = part.prefixes, list[tuple[DFA, list[Part]]]()
        for strings, owners in atoms:
            both = strings & left if len(parts) > 1 else left
            if len(parts) == 1 or both.is_empty():
                split.append((strings, owners))
                continue
            split.append((both, [*owners, part]))
            if not (rest := strings - left).is_empty():
                split.append((rest, owners))
            left -= both
        if not left.is_empty():
            split.append((left, [part]))
        atoms = split
    for strings, owners in atoms:
        if len(owners) == 1:
            yield Part(strings, owners[0].follow, owners[0].start, owners[0].unedited)
        else:
            follow = reduce(or_, [_from_state(owner.follow, owner.start) for owner in owners])
            unedited = reduce(or_, [owner.unedited for owner in owners])
            yield Part(strings, follow, follow.start, unedited)

