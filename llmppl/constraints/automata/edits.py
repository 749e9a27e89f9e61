"""Edits: the strings within k edits of a language, and how a text differs from the nearest member.

The one idea: a state of the language together with what has been spent on edits. To *insert* reads a character and
stays, to *delete* goes on by a character without reading it, to *substitute* does both; k + 1 copies of the language
hold all that is within k (Levenshtein). An edit is one of a whole character, made to a member of the language: a text
lacks what was deleted. Each kind has its cost, a positive integer, 1 unless told; None forbids it.

`within` makes the automaton, determinised as it is read, so that no string is in it twice. `distance` and `alignment`
look for the cheapest way through the same states, and for that need only those of the language that they pass.

A cap that differs by region is a concatenation: `within(prefix, 0) + within(suffix, 2)`.

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
from llmppl.support.graphs import Memo, reached

SIZES = (1,) * 12 + (2, 2, 3, 4)                    # of a character, in bytes, by the first 4 bits of its first
ONWARD = 50                                         # steps that one state's next characters are worth

__all__ = ["Edit", "alignment", "distance", "within"]


class Edit(NamedTuple):
    """One edit that a member of the language has undergone.

    Attributes
    ----------
    kind : "insert", "delete" or "substitute"
    place : int
        The index in the text of the character that was put in, or before which one is missing.
    wanted : str
        The character of the member that was deleted or replaced; "" for an insertion. Where several would do, the one
        of the lowest code point.
    found : str
        The character of the text that was inserted or put in its place; "" for a deletion.
    """

    kind: Literal["insert", "delete", "substitute"]
    place: int
    wanted: str
    found: str


class _Costs(NamedTuple):
    """What an edit of each kind costs, infinite where there are none."""

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
    """The strings that edits of total cost k or less make of a member of the language: `within(Regex("cat"), 1)`.

    Parameters
    ----------
    language : DFA
        All its states are worked out; those of the result are when they are asked for.
    k : int, at least 0
        With k = 0, the language itself.
    insert, delete, substitute : int or None
        What one such edit costs, at least 1; None: there are none.
    alphabet : str or iterable of str, optional
        The characters that may be inserted or put in place of others: a regex that matches single characters, such as
        "[ -~]", or the characters themselves. Any character if None.

    Raises
    ------
    ValueError
        k is negative, a cost is not positive, the alphabet has no or more than single characters, or the automaton
        would be too large.
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

    def onward(state: int) -> dict[int, str]:
        nfa.budget.spend(steps=ONWARD)
        return _onward(language, state)

    nexts = Memo(onward)
    between = list(reached([language.start], nexts.__getitem__))        # the states between characters
    layers: list[list[int]] = []                    # layers[left][state]: the NFA state with `left` to spend

    def spent(cost: float, states: Iterable[int]) -> list[int]:
        """The states of the layer above, for these with so much less to spend."""
        return [layers[-int(cost)][state] for state in states] if cost <= len(layers) else []

    for _ in range(k + 1):
        exits = {}
        for state in between:
            reading = {costs.insert: [state]}       # what a character of the alphabet costs -> where it leads
            reading.setdefault(costs.substitute, []).extend(nexts[state])
            reads = [nfa.read(characters, nfa.split(spent(cost, states))) for cost, states in reading.items()]
            exits[state] = nfa.split([*[ACCEPT] * language.accepts(state), *spent(costs.delete, nexts[state]), *reads])
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
    """The least k for which `text` is in `within(language, k)`, or None if there is none.

    There is none if the language is empty, if `text` has lone surrogates, or if the edits allowed do not suffice.
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
    """One cheapest way to make `text` of a member of the language, in the order of the text.

    Returns
    -------
    list of Edit, empty if `text` is a member; or None if no edits, or none of total cost k or less, make it of one.
        The same each time; other ways may cost as much. Parameters and errors as for `within`.
    """
    most = math.inf if k is None else count("k", k, least=0)
    return _cheapest(language, text, most, _checked(language, insert, delete, substitute), _alphabet(alphabet))[1]


Node = tuple[int, int]                              # characters of the text read, state of the language


def _cheapest(
    language: DFA, text: str, k: float, costs: _Costs, alphabet: DFA | None
) -> tuple[int, list[Edit]] | tuple[None, None]:
    """Dijkstra's search over (characters read, state): the cost and the edits."""
    try:
        encoded = list(map(str.encode, text))
    except UnicodeEncodeError:                      # a lone surrogate is in no language
        return None, None
    may_come = [alphabet is None or char in alphabet for char in text] + [False]
    members_change = min(costs.delete, costs.substitute) < math.inf
    onward: Memo[int, dict[int, str]] = Memo(lambda state: _onward(language, state) if members_change else {})
    start = (0, language.start)
    least: dict[Node, float] = {start: 0}
    came: dict[Node, tuple[Node, Edit | None]] = {}
    order = itertools.count()                       # decides between equal costs, whatever the states' numbers
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
        for target, char in onward[state].items():
            reach((place, target), cost + costs.delete, node, Edit("delete", place, char, ""))
            if may_come[place]:
                edit = Edit("substitute", place, char, text[place])
                reach((place + 1, target), cost + costs.substitute, node, edit)
    return None, None


def _onward(language: DFA, state: int) -> dict[int, str]:
    """The states one character after `state`, and the lowest character that leads to each, in its order."""
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
    if not isinstance(language, DFA):
        raise TypeError(f"edits are made to a DFA, such as Regex({str(language)!r}), not a {type(language).__name__}")
    costs = {"insert": insert, "delete": delete, "substitute": substitute}
    return _Costs(**{name: math.inf if cost is None else count(name, cost) for name, cost in costs.items()})


def _alphabet(alphabet: str | Iterable[str] | None) -> DFA | None:
    """The language of the single characters of an alphabet, None if they are all."""
    if alphabet is None:
        return None
    return _characters(alphabet if isinstance(alphabet, str) else tuple(alphabet))


@lru_cache(64)
def _characters(alphabet: str | tuple[str, ...]) -> DFA:
    if not all(isinstance(char, str) for char in alphabet):
        raise TypeError(f"the alphabet {alphabet!r} holds what is no str; ['a', 'b'] or '[ab]' would work")
    chars: DFA = Regex(alphabet) if isinstance(alphabet, str) else DFA.from_strings(alphabet)
    if chars.is_empty():
        raise ValueError(f"the alphabet {alphabet!r} has no character; '[ -~]' or ['a', 'b'] has some, None has all")
    longer = (chars - Regex("(?s).")).shortest()
    if longer is not None:
        raise ValueError(
            f"the alphabet {alphabet!r} holds {longer!r}; it holds single characters only, as '[ab]' or ['a', 'b'] does"
        )
    return chars.minimise()


def _fragment(alphabet: DFA | None) -> Fragment:
    """One character of the alphabet, as a graph over bytes."""
    if alphabet is None:
        return ANY
    node = np.where(alphabet.accepting, -1, np.arange(-1, alphabet.num_states)).tolist()
    return tuple(tuple((lo, hi, node[target]) for lo, hi, target in row) for row in alphabet.edges()[1:])
