"""Languages that also hold other spellings of their strings: strings within k edits, and rewrites.

An *insertion* reads a character and stays in a state of the language, a *deletion* follows a character without reading
it, a *substitution* does both. An edit concerns one whole character and is made to a member of the language: a deletion
removes a character that the text then lacks. `within` builds the automaton of k + 1 copies of the language, by the cost
that is left. `alignment` searches for the cheapest path through the same states.

A *rewrite* is any function from a DFA to a DFA. Where a string of one language leads from state q to state r, it adds
paths from q to r that read the strings of another. The result holds every string that comes from a member by replacing
chosen occurrences that do not overlap; every member stays. Replacements are not rewritten again.

Sources: Schulz & Mihov (2002), "Fast string correction with Levenshtein automata"; Wagner (1974), "Order-n correction
for regular languages", for the distance; Kaplan & Kay (1994), "Regular models of phonological rule systems".
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, NFA, Fragment
from llmppl.constraints.automata.operations import trie_of
from llmppl.constraints.automata.regex import Regex
from llmppl.support.arguments import count, shown
from llmppl.support.graphs import Memo, reachable

SIZES = (1,) * 12 + (2, 2, 3, 4)  # bytes of a character, by the first 4 bits of its first byte
STEPS_PER_STATE = 50  # that the next characters of a state cost


class Edit(NamedTuple):
    """One edit of a member: `wanted` ("" if inserted) became `found` ("" if deleted) at character `place` of the text.

    Examples
    --------
    >>> [edit] = alignment(Regex("colou?r"), "colr")
    >>> edit.kind, edit.place, edit.wanted, edit.found
    ('delete', 3, 'o', '')
    """

    kind: Literal["insert", "delete", "substitute"]
    place: int  # in the text, of `found` or of the character that a deletion lacks
    wanted: str  # character of the member, the lowest that would do; "" if inserted
    found: str  # character of the text; "" if deleted


class _Costs(NamedTuple):
    """Cost of each kind of edit; infinite if the kind is forbidden."""

    insert: float
    delete: float
    substitute: float


def within(
    language: DFA,
    k: int,
    *,
    insert: int | None = 1,
    delete: int | None = 1,
    substitute: int | None = 1,
    alphabet: str | Iterable[str] | None = None,
) -> DFA:
    """Return the strings that edits of total cost at most k make of members of a language.

    For edits in one region only, concatenate: `within(prefix, 0) + within(suffix, 2)`. Raises TooLarge if the
    automaton would pass its limits.

    Parameters
    ----------
    insert, delete, substitute : int or None
        Cost of one such edit, at least 1; None forbids it.
    alphabet : str or iterable of str, optional
        Characters that may be inserted or substituted: a regex that matches single characters, such as "[ -~]", or
        the characters themselves. Any character if None.

    Examples
    --------
    >>> near = within(Regex("cat|dog"), 1, alphabet="[a-z]")
    >>> "dig" in near, "cats" in near, "pig" in near
    (True, True, False)
    """
    costs = _checked(language, insert, delete, substitute)
    characters = _fragment(_alphabet(alphabet))
    k = count("k", k, least=0)
    what = f"the language of the strings within k={k} edits of {shown(language)}"
    nfa = NFA(Budget(what, "a smaller k, or fewer states (language.minimise()), would work"))
    if language.is_empty():
        return DFA(nfa)
    nfa.reserve((k + 1) * language.explore().num_states)  # known before it is built
    rows = language.edges()
    nexts = _next_characters(language)
    between = []  # the states between characters
    for state in reachable([language.start], nexts.__getitem__):
        nfa.budget.spend(steps=STEPS_PER_STATE)
        between.append(state)
    layers: list[list[int]] = []  # layers[left][state]: the NFA state with `left` to spend

    def after(cost: float, states: Iterable[int]) -> list[int]:
        """Return the states of the layer with `cost` less to spend; empty if there is none."""
        if cost > len(layers):
            return []
        layer = layers[-int(cost)]
        return [layer[state] for state in states]

    for _ in range(k + 1):
        exits = {}
        for state in between:
            ways = []
            if language.accepts(state):
                ways.append(ACCEPT)
            ways += after(costs.delete, nexts[state])
            edits = {
                costs.insert: [state]
            }  # cost of reading a character of the alphabet -> next states
            edits.setdefault(costs.substitute, []).extend(nexts[state])
            for cost, states in edits.items():
                ways.append(nfa.read(characters, nfa.split(after(cost, states))))
            entry = nfa.split(ways)
            if entry != DEAD:
                exits[state] = entry
        _, entries = nfa.graph(rows, exits)
        layers.append(entries)
    nfa.start = layers[k][language.start]
    return DFA(nfa)


def alignment(
    language: DFA,
    text: str,
    k: int | None = None,
    *,
    insert: int | None = 1,
    delete: int | None = 1,
    substitute: int | None = 1,
    alphabet: str | Iterable[str] | None = None,
) -> list[Edit] | None:
    """Return one cheapest list of edits that makes `text` of a member of the language, in the order of the text.

    It is empty if `text` is a member, and None if no edits of total cost at most k suffice. Parameters as for `within`.

    Examples
    --------
    >>> alignment(DFA.from_strings(["definitely", "defiantly"]), "definately")
    [Edit(kind='substitute', place=5, wanted='i', found='a')]
    """
    most = math.inf if k is None else count("k", k, least=0)
    costs = _checked(language, insert, delete, substitute)
    characters = _alphabet(alphabet)
    try:
        encoded = [char.encode() for char in text]
    except UnicodeEncodeError:  # a lone surrogate is in no language
        return None
    nexts = _next_characters(language)
    least: dict[tuple[int, int], float] = {}
    order = itertools.count()  # breaks ties, independently of the states' numbers
    todo: list[tuple[float, int, int, int, list[Edit]]] = []

    def reach(place: int, state: int, cost: float, edits: list[Edit]) -> None:
        if state and cost <= most and cost < least.get((place, state), math.inf):
            least[place, state] = cost
            heappush(todo, (cost, next(order), place, state, edits))

    reach(0, language.start, 0, [])
    while todo:  # Dijkstra's search over (characters read, state)
        cost, _, place, state, edits = heappop(todo)
        if cost > least[place, state]:
            continue
        char = text[place : place + 1]  # "" at the end
        if not char and language.accepts(state):
            return edits
        may_come = char in characters and char != ""
        if char:
            reach(place + 1, language.after(state, encoded[place]), cost, edits)
        if may_come:
            insertion = Edit("insert", place, "", char)
            reach(place + 1, state, cost + costs.insert, [*edits, insertion])
        for target, wanted in nexts[state].items():
            deletion = Edit("delete", place, wanted, "")
            reach(place, target, cost + costs.delete, [*edits, deletion])
            if may_come:
                substitution = Edit("substitute", place, wanted, char)
                reach(place + 1, target, cost + costs.substitute, [*edits, substitution])
    return None


def _next_characters(language: DFA) -> Memo[int, dict[int, str]]:
    """Return state -> states one character later -> the lowest character that leads there, ordered by it."""

    def find(state: int) -> dict[int, str]:
        found: dict[int, bytes] = {}
        todo = [(state, b"")]
        for at, read in todo:  # grows
            targets, first = np.unique(language.row(at), return_index=True)
            for target, byte in zip(targets.tolist(), first.tolist(), strict=True):
                text = read + bytes((byte,))
                if not target:
                    continue
                if len(text) < SIZES[text[0] >> 4]:
                    todo.append((target, text))
                else:
                    found[target] = min(found.get(target, text), text)
        lowest = sorted((text, target) for target, text in found.items())
        return {target: text.decode() for text, target in lowest}

    return Memo(find)


def _checked(
    language: DFA, insert: int | None, delete: int | None, substitute: int | None
) -> _Costs:
    """Check the language and the costs, and return the costs."""
    if not isinstance(language, DFA):
        raise TypeError(
            f"edits are made to a DFA, such as Regex({str(language)!r}), not a {type(language).__name__}"
        )
    costs = []
    for name, cost in zip(_Costs._fields, (insert, delete, substitute), strict=True):
        costs.append(math.inf if cost is None else count(name, cost))
    return _Costs(*costs)


def _alphabet(alphabet: str | Iterable[str] | None) -> DFA:
    """Return the language of the single characters of an alphabet; None is all characters."""
    if alphabet is None:
        alphabet = "(?s)."
    elif not isinstance(alphabet, str):
        alphabet = tuple(alphabet)
    return _characters(alphabet)


@lru_cache(64)
def _characters(alphabet: str | tuple[str, ...]) -> DFA:
    chars = Regex(alphabet) if isinstance(alphabet, str) else DFA.from_strings(alphabet)
    longer = chars.without(Regex("(?s).")).shortest()
    if longer is not None:
        raise ValueError(
            f"the alphabet {alphabet!r} holds {longer!r}; single characters such as '[ab]' or ['a', 'b'] would work"
        )
    return chars.minimise()


def _fragment(alphabet: DFA) -> Fragment:
    """Return one character of the alphabet as a graph over bytes."""
    nodes = []
    for row in alphabet.edges()[1:]:
        edges = []
        for lo, hi, target in row:
            edges.append((lo, hi, -1 if alphabet.accepts(target) else target - 1))
        nodes.append(tuple(edges))
    return tuple(nodes)


STEPS_PER_PAIR = 5  # that a pair (state, state of the keys) costs
By = DFA | tuple[str, ...]  # replacements of an occurrence
Row = dict[int, int]  # byte -> next state


class _Keys(NamedTuple):
    """Automaton of the strings that may be replaced, with their replacements."""

    rows: Sequence[Row] | Memo[int, Row]
    start: int
    by: dict[int, By]  # accepting state -> replacements of a string that leads there


def rewrite(language: DFA, rules: Iterable[tuple[DFA, DFA]]) -> DFA:
    """Return the strings of a language with some occurrences of a string of `what` replaced by any string of `by`.

    `rules` are pairs (what, by); where several fit, any of them may be applied. Raises a ValueError if a `what` has the
    empty string, and TooLarge if the automaton would pass its limits.

    Examples
    --------
    >>> list(rewrite(Regex("call 55"), [(Regex("[0-9]+"), Regex("#"))]).enumerate())
    ['call #', 'call ##', 'call #5', 'call 5#', 'call 55']
    """
    keys = []
    for what, by in rules:
        if "" in what:
            raise ValueError(
                f"{what!r} has the empty string, which occurs everywhere; only others can be replaced"
            )
        if not by.is_empty():
            rows = _rows(what)
            ends = np.flatnonzero(what.explore().accepting).tolist()
            keys.append(_Keys(rows, what.start, dict.fromkeys(ends, by)))
    return _rewritten(language, keys)


def synonyms(table: Mapping[str, Sequence[str]]) -> Callable[[DFA], DFA]:
    """Return the rewrite that may replace each occurrence of a key by one of its alternatives; "" deletes it.

    Occurrences are of characters, not of words; the key " cat " has blanks around. Raises a ValueError if a key is
    empty, and a TypeError if the alternatives of a key are one str.

    Examples
    --------
    >>> list(synonyms({"cat": ["dog", "mouse"]})(Regex("cats?")).enumerate())
    ['cat', 'dog', 'cats', 'dogs', 'mouse', 'mouses']
    """
    keys = _trie(table)
    return lambda language: _rewritten(language, [keys])


def any_case(language: DFA) -> DFA:
    """Allow every letter in upper or lower case: `any_case(Regex("aß"))` is the language of "aß" and "Aß".

    Letters change within the pairs (u, l) of single characters with `u.lower() == l` and `l.upper() == u`, so that a
    second application adds nothing. "ß", "ı", "ς" and titlecase letters such as "ǅ" belong to no pair.

    Examples
    --------
    >>> list(any_case(Regex("ok")).enumerate())
    ['OK', 'Ok', 'oK', 'ok']
    """
    return _rewritten(language, [_case_pairs()])


def any_whitespace(language: DFA) -> DFA:
    """Allow every run of blanks, tabs and newlines as any other: `any_whitespace(Regex("a b"))` is `a[ \\t\\n]+b`.

    Examples
    --------
    >>> "a \\n b" in any_whitespace(Regex("a b")), "ab" in any_whitespace(Regex("a b"))
    (True, False)
    """
    blanks = Regex(r"[ \t\n]+")
    return rewrite(language, [(blanks, blanks)])


def optional_punctuation(language: DFA) -> DFA:
    """Allow every punctuation character to be absent: `optional_punctuation(Regex("Hi!"))` has "Hi!" and "Hi".

    Punctuation is the general category P of Unicode. Symbols such as $, +, <, =, >, ^, `, | and ~ do not belong to it.

    Examples
    --------
    >>> "Its 5 oclock" in optional_punctuation(Regex("It's 5 o'clock!"))
    True
    """
    return rewrite(language, [(Regex(r"\p{P}"), Regex(""))])


# ---- construction


def _rewritten(language: DFA, keys: Sequence[_Keys]) -> DFA:
    """Return the language with paths added beside those that read a key; each reads a replacement of the key."""
    remedy = "fewer states (language.minimise()) or fewer and shorter replacements would work"
    nfa = NFA(Budget(f"the language of the rewrites of {shown(language)}", remedy))
    if language.is_empty():
        return DFA(nfa)
    arcs = language.edges()
    jumps = {}  # state -> state after a key -> replacements
    for state in range(1, len(arcs)):
        found = _occurrences(language, state, keys, nfa.budget)
        if found or language.accepts(state):
            jumps[state] = found
    exits = {state: nfa.add(()) for state in jumps}
    _, entries = nfa.graph(arcs, exits)
    spelled = Memo[frozenset[str], DFA](lambda words: DFA.from_strings(words).minimise())
    for state, found in jumps.items():
        choices = []
        if language.accepts(state):
            choices.append(ACCEPT)
        for target, some in found.items():
            words: set[str] = set()
            for by in some:
                if isinstance(by, DFA):
                    choices.append(nfa.include(by, entries[target]))
                else:
                    words.update(by)
            if words:
                choices.append(nfa.include(spelled[frozenset(words)], entries[target]))
        nfa.epsilon[exits[state]] = tuple(choices)
    nfa.start = entries[language.start]
    return DFA(nfa)


def _occurrences(
    language: DFA, state: int, several: Sequence[_Keys], budget: Budget
) -> dict[int, list[By]]:
    """Return the states after the keys that can be read from `state`, each with the replacements."""
    found: dict[int, list[By]] = {}
    table = language.table
    for keys in several:
        pairs = [(state, keys.start)]
        seen = set(pairs)
        for at, key in pairs:  # grows
            row = keys.rows[key]
            for pair in zip(table[at, list(row)].tolist(), row.values(), strict=True):
                if pair[0] and pair not in seen:
                    seen.add(pair)
                    pairs.append(pair)
        budget.spend(steps=STEPS_PER_PAIR * len(pairs))
        for after, key in pairs:
            if key in keys.by:
                found.setdefault(after, []).append(keys.by[key])
    return found


def _rows(dfa: DFA) -> Memo[int, Row]:
    def find(state: int) -> Row:
        row = dfa.row(state)
        return {byte: row.item(byte) for byte in np.flatnonzero(row).tolist()}

    return Memo(find)


def _trie(table: Mapping[str, Sequence[str]]) -> _Keys:
    for key, alternatives in table.items():
        if not key:
            raise ValueError("the key '' occurs everywhere; only other strings can be replaced")
        if isinstance(alternatives, str):
            raise TypeError(
                f"the alternatives of {key!r} are the str {alternatives!r}; a list is [{alternatives!r}]"
            )
    rows, ends = trie_of(map(str.encode, table))
    by: dict[int, By] = {}
    for node, alternatives in zip(ends, table.values(), strict=True):
        if alternatives:
            by[node] = tuple(alternatives)
    return _Keys(rows, 1, by)


@cache
def _case_pairs() -> _Keys:
    table = {}
    for upper in map(chr, range(0x20000)):  # planes 2 and above have no letters with case
        lower = upper.lower()
        if len(lower) == 1 and lower != upper == lower.upper():
            table[upper] = [lower]
            table[lower] = [upper]
    return _trie(table)
