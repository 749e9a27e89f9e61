"""Rewrites: languages that also hold other spellings of their strings.

A *rewrite* is any function from a DFA to a DFA. All rewrites here work alike: where a string of one language leads from
state q to state r, they add paths from q to r that read the strings of another. The result holds every string that
comes from a member by replacing chosen occurrences that do not overlap. No occurrence need be chosen, so every member
stays. Replacements are not rewritten again, and the rewrites of a union are the union of the rewrites. `rewrite` takes
pairs of languages and `synonyms` a table of strings; the others use these.

Source: Kaplan & Kay (1994), "Regular models of phonological rule systems", for optional rewriting as a relation between
languages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import MAX_EDGES, Budget, TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import ACCEPT, NFA
from llmppl.constraints.automata.operations import trie_of
from llmppl.constraints.automata.regex import Regex
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo

__all__ = ["any_case", "any_whitespace", "homoglyphs", "optional_punctuation", "rewrite", "synonyms"]

STEPS_PER_PAIR = 5                                  # that a pair (state, state of the keys) costs
By = DFA | tuple[str, ...]                          # replacements of an occurrence
Rows = list[dict[int, int]]                         # state -> byte -> next state

# Latin letters with the Cyrillic and Greek letters of the same shape, as \u escapes because they look alike.
SHAPES = (
    "A\u0410\u0391 B\u0412\u0392 C\u0421 E\u0415\u0395 H\u041d\u0397 I\u0406\u0399 J\u0408 K\u041a\u039a M\u041c\u039c "
    "N\u039d O\u041e\u039f P\u0420\u03a1 S\u0405 T\u0422\u03a4 X\u0425\u03a7 Y\u04ae\u03a5 Z\u0396 a\u0430 "
    "c\u0441 d\u0501 e\u0435 h\u04bb i\u0456 j\u0458 o\u043e\u03bf p\u0440 q\u051b s\u0455 w\u051d x\u0445 y\u0443"
)


class _Keys(NamedTuple):
    """Automaton of the strings that may be replaced, with their replacements."""

    rows: Rows
    start: int
    by: dict[int, By]                               # accepting state -> replacements of a string that leads there


def rewrite(language: DFA, rules: Iterable[tuple[DFA, DFA]]) -> DFA:
    """Return the strings of a language with some occurrences of a string of `what` replaced by any string of `by`.

    `rewrite(Regex("call 55"), [(Regex("[0-9]+"), Regex("#"))])` is the language of "call #", "call ##", "call #5",
    "call 5#" and "call 55".

    Parameters
    ----------
    language : DFA
        All its states are computed; those of the result are computed on demand.
    rules : iterable of (what, by)
        Where several rules fit, any of them may be applied.

    Raises
    ------
    ValueError
        `what` has the empty string, which occurs everywhere, or the automaton would be too large.
    """
    keys = []
    for what, by in rules:
        if "" in what:
            raise ValueError(f"{what!r} has the empty string, which occurs everywhere; only others can be replaced")
        if not by.is_empty():
            rows = _rows(what)
            keys.append(_Keys(rows, what.start, dict.fromkeys(np.flatnonzero(what.accepting).tolist(), by)))
    return _rewritten(language, keys)


def synonyms(table: Mapping[str, Sequence[str]]) -> Callable[[DFA], DFA]:
    """Return the rewrite that may replace each occurrence of a key by one of its alternatives; "" deletes it.

    `synonyms({"cat": ["dog", "mouse"]})(Regex("cats?"))` is the language of "cat", "cats", "dog", "dogs", "mouse" and
    "mouses". Occurrences are of characters, not of words; the key " cat " has blanks around.

    Raises
    ------
    ValueError
        A key is empty.
    TypeError
        The alternatives are one string and not a sequence of them.
    """
    keys = _trie(table)
    return lambda language: _rewritten(language, [keys])


def any_case(language: DFA) -> DFA:
    """Allow every letter in upper or lower case: `any_case(Regex("aß"))` is the language of "aß" and "Aß".

    Letters change within the pairs (u, l) of single characters with `u.lower() == l` and `l.upper() == u`, so that a
    second application adds nothing. "ß", "ı", "ς" and titlecase letters such as "ǅ" belong to no pair.
    """
    return _rewritten(language, [_case_pairs()])


def any_whitespace(language: DFA) -> DFA:
    """Allow every run of blanks, tabs and newlines as any other: `any_whitespace(Regex("a b"))` is `a[ \\t\\n]+b`."""
    blanks = Regex(r"[ \t\n]+")
    return rewrite(language, [(blanks, blanks)])


def optional_punctuation(language: DFA) -> DFA:
    """Allow every punctuation character to be absent: `optional_punctuation(Regex("Hi!"))` has "Hi!" and "Hi".

    Punctuation is the general category P of Unicode. Symbols such as $, +, <, =, >, ^, `, | and ~ do not belong to it.
    """
    return rewrite(language, [(Regex(r"\p{P}"), Regex(""))])


def homoglyphs(language: DFA) -> DFA:
    """Allow every letter as one of the same shape: `homoglyphs(Regex("no"))` has the o of any of three scripts.

    `SHAPES` lists Latin letters and the Cyrillic and Greek letters that look like them in most fonts.
    """
    return _rewritten(language, [_same_shape()])


# ---- construction


def _rewritten(language: DFA, keys: Sequence[_Keys]) -> DFA:
    """Return the language with paths added beside those that read a key; each reads a replacement of the key."""
    remedy = "fewer states (language.minimise()) or fewer and shorter replacements would work"
    nfa = NFA(Budget(f"the language of the rewrites of {shown(language)}", remedy=remedy))
    if language.is_empty():
        return DFA(nfa)
    arcs, spelled = language.edges(), Memo(_spelled)
    jumps: dict[int, dict[int, list[By]]] = {}      # state -> state after a key -> replacements
    for state in range(1, len(arcs)):
        found: dict[int, list[By]] = {}
        for target, by in itertools.chain(*(_occurrences(language, state, some, nfa.budget) for some in keys)):
            found.setdefault(target, []).append(by)
        if found or language.accepts(state):
            jumps[state] = found
    exits = {state: nfa.add(()) for state in jumps}
    _, entries = nfa.graph(arcs, exits)
    for state, found in jumps.items():
        choices = [ACCEPT] * language.accepts(state)
        for target, some in found.items():
            words = frozenset(itertools.chain(*(by for by in some if isinstance(by, tuple))))
            replacements = [by for by in some if isinstance(by, DFA)] + [spelled[words]] * bool(words)
            choices += [nfa.include(by, entries[target]) for by in replacements]
        nfa.epsilon[exits[state]] = tuple(choices)
    nfa.start = entries[language.start]
    return DFA(nfa)


def _spelled(words: frozenset[str]) -> DFA:
    return DFA.from_strings(words).minimise()


def _occurrences(language: DFA, state: int, keys: _Keys, budget: Budget) -> list[tuple[int, By]]:
    """Return (state after the key, replacements) for the keys that can be read from `state`."""
    table = language.table
    found = [(state, keys.start)]
    seen = set(found)
    for at, key in found:                           # grows
        row = keys.rows[key]
        for pair in zip(table[at, list(row)].tolist(), row.values(), strict=True):
            if pair[0] and pair not in seen:
                seen.add(pair)
                found.append(pair)
    budget.spend(steps=STEPS_PER_PAIR * len(found))
    return [(after, keys.by[key]) for after, key in found if key in keys.by]


def _rows(dfa: DFA) -> Rows:
    if np.count_nonzero(dfa.explore().table) > MAX_EDGES:
        raise TooLarge(shown(dfa), f"more than {MAX_EDGES:,} edges to replace", "fewer states would work")
    return [{byte: t for lo, hi, t in row for byte in range(lo, hi + 1)} for row in dfa.edges()]


def _trie(table: Mapping[str, Sequence[str]]) -> _Keys:
    for key, alternatives in table.items():
        if not key:
            raise ValueError("the key '' occurs everywhere; only other strings can be replaced")
        if isinstance(alternatives, str):
            raise TypeError(f"the alternatives of {key!r} are the str {alternatives!r}; a list is [{alternatives!r}]")
    rows, ends = trie_of(map(str.encode, table))
    by: dict[int, By] = {node: tuple(some) for node, some in zip(ends, table.values(), strict=True) if some}
    return _Keys(rows, 1, by)


@lru_cache(1)
def _case_pairs() -> _Keys:
    letters = map(chr, range(0x20000))              # planes 2 and above have no letters with case
    upper = [c for c in letters if len(c.lower()) == 1 and c.lower() != c == c.lower().upper()]
    lower = list(map(str.lower, upper))
    return _trie({c: [other] for c, other in zip(upper + lower, lower + upper, strict=True)})


@lru_cache(1)
def _same_shape() -> _Keys:
    return _trie({c: list(group.replace(c, "")) for group in SHAPES.split() for c in group})
