"""Compilation of a query into languages: its prefix strings, and the texts that may follow each of them.

A query becomes a list of *parts*. A part pairs a language of prefix strings with the language that may follow each of
them, and no prefix string belongs to two parts. The language after a prefix depends only on the state of the pattern's
automaton after the prefix. There are as many parts as such states; most queries have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from llmppl.constraints import DFA, Edit, Regex, TooLarge, alignment, within
from llmppl.constraints.json import JsonSchema
from llmppl.constraints.values import constraint_of
from llmppl.support.arguments import count, function, is_type, optional_count
from llmppl.support.graphs import Memo, reachable

MAX_DIFFERENCE_STATES = 100_000                         # pattern x ignored strings; above: deferred
MAX_COUNTED_STATES = 200_000                            # states of a language that `max_chars` cuts
MAX_LISTED_PREFIXES = 1000
MAX_PLANNED_STATES = 20_000                             # states that `plan` counts at most

Language = str | DFA | JsonSchema | Sequence[str] | Any     # | Any: types such as int | None
Rewrite = Callable[[DFA], DFA]
T = TypeVar("T")


@dataclass(frozen=True)
class Edits:
    """Edits of total cost at most `max_cost`.

    insert, delete, substitute : int or None
        Cost of one such edit; None forbids it.
    alphabet : str or tuple of str, optional
        Characters to insert or substitute, also as a regex, such as "[a-z ]". Any character if left out.
    """

    max_cost: int
    insert: int | None = 1
    delete: int | None = 1
    substitute: int | None = 1
    alphabet: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        count("max_cost", self.max_cost, least=0)
        for name in ("insert", "delete", "substitute"):
            optional_count(name, getattr(self, name))

    def __call__(self, language: DFA) -> DFA:
        """Return the strings that such edits make of the strings of a language."""
        return within(language, self.max_cost, **self._kinds()) if self.max_cost else language

    def alignment(self, language: DFA, text: str) -> list[Edit]:
        """Return the edits that make `text` from the nearest string of a language."""
        return alignment(language, text, self.max_cost, **self._kinds()) or []

    def _kinds(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "max_cost"}


EditsLike = int | Edits | Mapping[str, int | Edits]     # {"prefix": 1, "suffix": 2} edits both


@dataclass(frozen=True, eq=False)
class Part:
    """Prefix strings, and the language that may follow them."""

    prefixes: DFA
    follow: DFA                                         # read from its state `start`
    start: int
    unedited: DFA                                       # the same without edits, from its own start

    def size(self) -> str:
        """Describe the prefix strings, and the size of the language after them."""
        strings = list(islice(self.prefixes.enumerate(), 3))
        shown = " | ".join(map(repr, strings[:2])) + " | ..." * (len(strings) > 2)
        try:
            follow = self.follow.explore(MAX_PLANNED_STATES)
        except ValueError:
            return f"after {shown}: a language of more than {MAX_PLANNED_STATES:,} states, computed during the search"
        kind = "a finite" if follow.is_finite() else "an infinite"
        return f"after {shown}: {kind} language, {follow.num_states} states"


@dataclass(frozen=True)
class Compiled:
    """Compiled query: pattern and prefix after rewriting, edits, `ignore` and `max_chars`."""

    parts: list[Part]
    ignored: DFA | None                                 # strings to skip that could not be removed from `follow`
    edits: Edits                                        # of the part after the prefix

    @cached_property
    def alignments(self) -> Memo[tuple[Part, bytes], tuple[Edit, ...]]:
        """Edits that make a text after the prefix from the nearest string of the pattern, by part and text."""
        return Memo(lambda key: tuple(self.edits.alignment(key[0].unedited, key[1].decode())))

    def prefixes(self) -> list[tuple[str, Part]] | None:
        """Return all prefix strings with their parts; None if there are more than MAX_LISTED_PREFIXES."""
        return _listed((text, part) for part in self.parts for text in part.prefixes.enumerate())

    def continues(self) -> bool:
        """Return True if some match begins another."""
        follows = (_from_state(part.follow, part.start).explore() for part in self.parts)
        return any(follow.table[follow.accepting].any() for follow in follows)


def compile_query(
    pattern: Language,
    prefix: Language = "",
    *,
    rewrite: Iterable[Rewrite] = (),
    edits: EditsLike = 0,
    ignore: Language | None = None,
    max_chars: int | None = None,
) -> Compiled:
    """Compile a query into parts; the arguments and errors are those of `Query`."""
    language, prefixes = _language(pattern, "pattern"), _language(prefix, "prefix")
    if not isinstance(rewrite, Iterable) or isinstance(rewrite, str):
        raise TypeError(f"rewrite must be a list of functions from DFA to DFA, such as [any_case], not {rewrite!r}")
    for change in rewrite:
        language, prefixes = map(function("each of rewrite", change, "any_case"), (language, prefixes))
        if not (isinstance(language, DFA) and isinstance(prefixes, DFA)):
            raise TypeError(f"rewrite: {change!r} must return a DFA")
    for name, given in (f"{pattern!r}", language), (f"the prefix {prefix!r}", prefixes):
        if given.is_empty():
            raise ValueError(f"{name} matches no text at all")
    regions = dict(edits) if isinstance(edits, Mapping) else {"suffix": edits}
    before, after = (_edits(regions.pop(region, 0)) for region in ("prefix", "suffix"))
    if regions:
        raise ValueError(f'edits by region are {{"prefix": ..., "suffix": ...}}, not {edits!r}')
    unwanted = None if ignore is None else _language(ignore, "ignore")
    optional_count("max_chars", max_chars, least=0)

    parts, deferred = list[Part](), None
    for start, strings in _split(language, prefixes, prefix):
        follow = unedited = language
        if after.max_cost or max_chars is not None or unwanted is not None:
            unedited = _from_state(language, start)
            follow = after(unedited)
            if max_chars is not None:
                follow = follow.explore(MAX_COUNTED_STATES) & Regex(f"(?s:.{{0,{max_chars}}})")
            try:
                follow = follow if unwanted is None else _difference(follow, unwanted)
            except TooLarge:
                deferred = unwanted
            start = follow.start
        if not follow.is_empty():
            parts.append(Part(before(strings), follow, start, unedited))
    if not parts:
        limits = {"ignore": ignore, "max_chars": max_chars}
        named = " and ".join(f"{name}={limit!r}" for name, limit in limits.items() if limit is not None)
        raise ValueError(f"no text of {pattern!r} is left by {named}")
    return Compiled(_disjoint(parts), deferred, after)


def _language(language: Language, name: str) -> DFA:
    """Return a pattern as an automaton. ValueError if a JSON schema has no DFA that accepts exactly its texts."""
    if is_type(language):
        language = constraint_of(language)
    if isinstance(language, str):
        return Regex(language)
    if isinstance(language, DFA):
        return language
    if isinstance(language, list | tuple):
        return DFA.from_strings(language)
    if not isinstance(language, JsonSchema):
        kinds = "a regular expression (str), a DFA, a type, a JsonSchema or a list of strings"
        raise TypeError(f"{name} must be {kinds}, not {language!r}")
    if language.automaton is None or language.unmasked:
        why = [*language.unmasked, language.fallback_reason][0]
        raise ValueError(f"{name} {language!r} cannot be searched: {why}")
    return language.automaton


def _edits(edits: int | Edits) -> Edits:
    return edits if isinstance(edits, Edits) else Edits(count("edits", edits, least=0))


def _listed(found: Iterable[T]) -> list[T] | None:
    """Return the items as a list; None if there are more than MAX_LISTED_PREFIXES."""
    some = list(islice(found, MAX_LISTED_PREFIXES + 1))
    return some if len(some) <= MAX_LISTED_PREFIXES else None


def _difference(language: DFA, unwanted: DFA) -> DFA:
    """Return `language` without `unwanted`; TooLarge if the result would be."""
    limit = MAX_DIFFERENCE_STATES // unwanted.explore(MAX_DIFFERENCE_STATES).num_states
    return language.explore(limit) - unwanted


def _from_state(language: DFA, state: int) -> DFA:
    """Return the language that may follow a state."""
    if state == language.start:
        return language
    whole = language.explore()
    return DFA.from_table(whole.table, whole.accepting, state)


def _split(language: DFA, prefixes: DFA, shown: Language) -> list[tuple[int, DFA]]:
    """Return the states of `language` after prefix strings, with these strings; raise an error if one does not fit."""
    texts = _listed(prefixes.enumerate())
    if texts is None:
        return _split_endless(language.explore(), prefixes.explore(), shown)
    groups: dict[int, list[str]] = {}
    for text in texts:
        groups.setdefault(language.after(language.start, text.encode()), []).append(text)
    for text in groups.get(0, ()):
        raise _no_prefix(text, shown)
    return [(state, DFA.from_strings(group)) for state, group in groups.items()]


def _split_endless(language: DFA, prefixes: DFA, shown: Language) -> list[tuple[int, DFA]]:
    """Do the same for prefixes that are too many to list."""
    states = np.arange(len(language.table))
    stray = (prefixes - DFA.from_table(language.table, states > 0, language.start)).shortest()
    if stray is not None:
        raise _no_prefix(stray, shown)

    def following(pair: tuple[int, int]) -> Iterable[tuple[int, int]]:
        """Return the pairs of states after one more byte."""
        pairs = np.unique(np.stack([prefixes.table[pair[0]], language.table[pair[1]]]), axis=1).T
        return map(tuple, pairs[pairs[:, 0] > 0].tolist())

    pairs = reachable([(prefixes.start, language.start)], following)
    after = sorted({b for a, b in pairs if prefixes.accepts(a)})
    return [(each, prefixes & DFA.from_table(language.table, states == each, language.start)) for each in after]


def _no_prefix(text: str, shown: Language) -> ValueError:
    return ValueError(
        f"the prefix {shown!r} is no prefix of the pattern: no text of it begins with {text!r}. The pattern includes "
        "the prefix, so begin it with the same text"
    )


def _disjoint(parts: list[Part]) -> list[Part]:
    """Return parts in which no prefix string occurs twice: edits may turn two prefixes into one string."""
    done = list[Part]()
    for part in parts:
        split = list[Part]()
        for each in done:
            both = each.prefixes & part.prefixes
            if not both.is_empty():
                follow = _from_state(each.follow, each.start) | _from_state(part.follow, part.start)
                split.append(Part(both, follow, follow.start, each.unedited | part.unedited))
                each, part = (replace(one, prefixes=one.prefixes - both) for one in (each, part))
            split.append(each)
        done = [each for each in (*split, part) if not each.prefixes.is_empty()]
    return done
