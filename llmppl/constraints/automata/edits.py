"""Edits: the strings within k edits of a language, and how a text differs from the nearest member.

A search state is a state of the language together with the cost spent on edits. An *insertion* reads a character and
stays in the state, a *deletion* follows a character without reading it, a *substitution* does both. So k + 1 copies of
the language accept all strings within k edits (Levenshtein). An edit concerns one whole character and is made to a
member of the language: a deletion removes a character that the text then lacks. Each kind of edit has a cost, a
positive integer (default 1); None forbids it.

`within` builds the automaton, which is determinised as it is read, so that it contains no string twice. `distance` and
`alignment` search for the cheapest path through the same states, and need only the states that they visit.

To allow edits in one region only, concatenate: `within(prefix, 0) + within(suffix, 2)`.

Sources: Levenshtein (1966), "Binary codes capable of correcting deletions, insertions and reversals"; Schulz & Mihov
(2002), "Fast string correction with Levenshtein automata", for the automaton; Wagner (1974), "Order-n correction for
regular languages", for the distance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import ACCEPT, ANY, DEAD, NFA, Fragment
from llmppl.constraints.automata.regex import Regex
from llmppl.support.arguments import count, shown
from llmppl.support.graphs import Memo, reachable
from llmppl.support.options import readable_tuple

SIZES = (1,) * 12 + (2, 2, 3, 4)                    # bytes of a character, by the first 4 bits of its first byte
STEPS_PER_STATE = 50                                # that the next characters of a state cost

__all__ = ["Edit", "alignment", "distance", "within"]


@readable_tuple
class Edit(NamedTuple):
    """One edit applied to a member of the language.

    Attributes
    ----------
    kind : "insert", "delete" or "substitute"
    place : int
        Index in the text of the inserted or substituted character, or of the character before which one is missing.
    wanted : str
        Character of the member that was deleted or replaced; "" for an insertion. If several would do, the one of the
        lowest code point.
    found : str
        Character of the text that was inserted or replaces another; "" for a deletion.
    """

    kind: Literal["insert", "delete", "substitute"]
    place: int
    wanted: str
    found: str


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
    """Return the strings that edits of total cost at most k make of members: `within(Regex("cat"), 1)`.

    Parameters
    ----------
    language : DFA
        All its states are computed; those of the result are computed on demand.
    k : int, at least 0
        With k = 0, the result is the language itself.
    insert, delete, substitute : int or None
        Cost of one such edit, at least 1; None forbids it.
    alphabet : str or iterable of str, optional
        Characters that may be inserted or substituted: a regex that matches single characters, such as "[ -~]", or
        the characters themselves. Any character if None.

    Raises
    ------
    ValueError
        k is negative, a cost is not positive, the alphabet is empty or has more than single characters, or the
        automaton would be too large.
    TypeError
        The language is not a DFA, or a number is not an integer.
    """
    costs = _checked(language, insert, delete, substitute)
    characters = _fragment(_alphabet(alphabet))
    k = count("k", k, least=0)
    what, remedy = f"k={k} edits of {shown(language)}", "a smaller k, or fewer states (language.minimise()), would work"
    nfa = NFA(Budget(f"the language of the strings within {what}", remedy=remedy))
    if language.is_empty():
        return DFA(nfa)
    nfa.reserve((k + 1) * language.explore().num_states)        # known before it is built
    rows = language.edges()

    def next_characters(state: int) -> dict[int, str]:
        nfa.budget.spend(steps=STEPS_PER_STATE)
        return _next_characters(language, state)

    nexts = Memo(next_characters)
    between = list(reachable([language.start], nexts.__getitem__))        # the states between characters
    layers: list[list[int]] = []                    # layers[left][state]: the NFA state with `left` to spend

    def layer_above(cost: float, states: Iterable[int]) -> list[int]:
        """Return the states of the layer with `cost` less to spend; empty if there is none."""
        return [layers[-int(cost)][state] for state in states] if cost <= len(layers) else []

    for _ in range(k + 1):
        exits = {}
        for state in between:
            edits = {costs.insert: [state]}         # cost of reading a character of the alphabet -> next states
            edits.setdefault(costs.substitute, []).extend(nexts[state])
            reads = [nfa.read(characters, nfa.split(layer_above(cost, states))) for cost, states in edits.items()]
            deletions = layer_above(costs.delete, nexts[state])
            exits[state] = nfa.split([*[ACCEPT] * language.accepts(state), *deletions, *reads])
        layers.append(nfa.graph(rows, {state: entry for state, entry in exits.items() if entry != DEAD})[1])
    nfa.start = layers[k][language.start]
    return DFA(nfa)


def distance(
    language: DFA,
    text: str,
    *,
    insert: int | None = 1,
    delete: int | None = 1,
    substitute: int | None = 1,
    alphabet: str | Iterable[str] | None = None,
) -> int | None:
    """Return the least k for which `text` is in `within(language, k)`, or None if there is none.

    There is none if the language is empty, if `text` has lone surrogates, or if the allowed edits do not suffice.
    Parameters and errors as for `within`.
    """
    costs = _checked(language, insert, delete, substitute)
    return _cheapest(language, text, math.inf, costs, _alphabet(alphabet))[0]


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

    Returns
    -------
    list of Edit, or None
        Empty if `text` is a member; None if no edits of total cost at most k suffice. The result is deterministic;
        other lists may cost as much. Parameters and errors as for `within`.
    """
    most = math.inf if k is None else count("k", k, least=0)
    return _cheapest(language, text, most, _checked(language, insert, delete, substitute), _alphabet(alphabet))[1]


Node = tuple[int, int]                              # characters of the text read, state of the language


def _cheapest(
    language: DFA, text: str, k: float, costs: _Costs, alphabet: DFA | None
) -> tuple[int, list[Edit]] | tuple[None, None]:
    """Run Dijkstra's search over (characters read, state), and return the cost and the edits."""
    try:
        encoded = list(map(str.encode, text))
    except UnicodeEncodeError:                      # a lone surrogate is in no language
        return None, None
    may_come = [alphabet is None or char in alphabet for char in text] + [False]
    members_change = min(costs.delete, costs.substitute) < math.inf
    nexts: Memo[int, dict[int, str]] = Memo(lambda state: _next_characters(language, state) if members_change else {})
    start = (0, language.start)
    least: dict[Node, float] = {start: 0}
    came: dict[Node, tuple[Node, Edit | None]] = {}
    order = itertools.count()                       # breaks ties, independently of the states' numbers
    todo: list[tuple[float, int, Node]] = [(0, next(order), start)]

    def reach(node: Node, cost: float, before: Node, edit: Edit | None) -> None:
        if node[1] and cost <= k and cost < least.get(node, math.inf):
            least[node] = cost
            came[node] = before, edit
            heappush(todo, (cost, next(order), node))

    while todo:
        cost, _, node = heappop(todo)
        place, state = node
        if cost > least[node]:
            continue
        if place == len(text) and language.accepts(state):
            edits = []
            while node in came:
                node, edit = came[node]
                edits.append(edit)
            return int(cost), list(filter(None, reversed(edits)))
        if place < len(text):
            reach((place + 1, language.after(state, encoded[place])), cost, node, None)
        if may_come[place]:
            reach((place + 1, state), cost + costs.insert, node, Edit("insert", place, "", text[place]))
        for target, char in nexts[state].items():
            reach((place, target), cost + costs.delete, node, Edit("delete", place, char, ""))
            if may_come[place]:
                edit = Edit("substitute", place, char, text[place])
                reach((place + 1, target), cost + costs.substitute, node, edit)
    return None, None


def _next_characters(language: DFA, state: int) -> dict[int, str]:
    """Return the states one character after `state` -> the lowest character that leads there, ordered by it."""
    found: dict[int, bytes] = {}
    todo = [(state, b"")]
    for at, read in todo:                           # grows
        targets, first = np.unique(language.row(at), return_index=True)
        for target, byte in zip(targets.tolist(), first.tolist(), strict=True):
            text = read + bytes((byte,))
            if target and len(text) < SIZES[text[0] >> 4]:
                todo.append((target, text))
            elif target:
                found[target] = min(found.get(target, text), text)
    return {target: text.decode() for target, text in sorted(found.items(), key=lambda pair: pair[1])}


def _checked(language: DFA, insert: int | None, delete: int | None, substitute: int | None) -> _Costs:
    """Check the language and the costs, and return the costs."""
    if not isinstance(language, DFA):
        raise TypeError(f"edits are made to a DFA, such as Regex({str(language)!r}), not a {type(language).__name__}")
    costs = {"insert": insert, "delete": delete, "substitute": substitute}
    return _Costs(**{name: math.inf if cost is None else count(name, cost) for name, cost in costs.items()})


def _alphabet(alphabet: str | Iterable[str] | None) -> DFA | None:
    """Return the language of the single characters of an alphabet, None if all are allowed."""
    if alphabet is None:
        return None
    return _characters(alphabet if isinstance(alphabet, str) else tuple(alphabet))


@lru_cache(64)
def _characters(alphabet: str | tuple[str, ...]) -> DFA:
    if not all(isinstance(char, str) for char in alphabet):
        raise TypeError(f"the alphabet {alphabet!r} has an element that is no str; ['a', 'b'] or '[ab]' would work")
    chars: DFA = Regex(alphabet) if isinstance(alphabet, str) else DFA.from_strings(alphabet)
    if chars.is_empty():
        raise ValueError(f"the alphabet {alphabet!r} has no character; '[ -~]' or ['a', 'b'] has some, None has all")
    longer = (chars - Regex("(?s).")).shortest()
    if longer is not None:
        raise ValueError(
            f"the alphabet {alphabet!r} holds {longer!r}; single characters such as '[ab]' or ['a', 'b'] would work"
        )
    return chars.minimise()


def _fragment(alphabet: DFA | None) -> Fragment:
    """Return one character of the alphabet as a graph over bytes."""
    if alphabet is None:
        return ANY
    node = np.where(alphabet.accepting, -1, np.arange(-1, alphabet.num_states)).tolist()
    return tuple(tuple((lo, hi, node[target]) for lo, hi, target in row) for row in alphabet.edges()[1:])
