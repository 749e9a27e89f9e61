"""Effects of tokens on one frame: which of them end in it, and where the others leave it.

The effect on a frame does not depend on the stack, and all schemas share the frames of strings and numbers. So the
tokens of a string or number are read once per vocabulary. Then only the rests of tokens that leave it follow the stack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.frames import Automaton, Local
from llmppl.constraints.json.scalars import Quoted
from llmppl.constraints.json.shapes import Lazy
from llmppl.constraints.json.texts import Config
from llmppl.constraints.masks.self_loops import Loops
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import TableGraph, walk_state
from llmppl.support.graphs import Memo
from llmppl.support.locks import Lock, cached_property, locked

__all__ = ["Effects", "effects_of"]

MAX_KEPT = 1 << 15                                  # effects that are kept
MAX_MASKS = 100                                     # of strings, of V bytes each
AFTER_NUMBER = frozenset(b",]} \t\n\r")
INSIDE = re.compile(rb'[^\x00-\x1f"\\]*')          # a string, without its quotes and escapes
BEGINNING = re.compile(rb'([^\x00-\x1f"\\]*)["\\]')
WITH_NAMES = re.compile(rb'"[ \t\n\r]*:.*,[ \t\n\r]*"(?:[^"\\]|\\.)*"', re.DOTALL)       # a name's end, and a name
IN_NUMBER = b"+-.0123456789eE"

Stack = Any                                         # a Config, or a local state and the stack below it
Own = dict[Any, Any]
Leaving = tuple[int, int, int, "Node"]              # a state of a text, characters, a quote or backslash, its node
Reading = tuple[Local, Stack, "Node", bool]         # a state at the top of a stack, and the tokens to read


class Node:
    """Places of a trie that are read together: `ids` of the tokens that end there, and the nodes after each byte."""

    def __init__(self, trie: Trie, places: list[int]) -> None:
        self.trie, self.places = trie, places
        self.ids = self._under(False)

    def _under(self, is_deep: bool) -> list[int]:
        trie, found = self.trie, list[int]()
        for place in self.places if self.places != [len(self.trie)] else ():
            node = trie.nodes.item(place)
            end = trie.skip.item(node) if is_deep else node + 1
            found += trie.order[trie.first.item(node) : trie.first.item(end)].tolist()
        return found

    def below(self) -> list[int]:
        """Return the ids of the tokens that end here or below."""
        return self._under(True)

    @cached_property
    def kids(self) -> dict[int, Node]:
        found = dict[int, list[int]]()
        bytes, first, sizes, _ = self.trie.views
        for place in self.places:
            for at in range(first[place], first[place] + sizes[place]):
                found.setdefault(bytes[at], []).append(at)
        return {byte: Node(self.trie, places) for byte, places in found.items()}

    def along(self, word: bytes) -> list[Node]:
        """Return the nodes after each byte of a word, as far as there are any."""
        node, found = self, list[Node]()
        for byte in word:
            if byte not in node.kids:
                break
            node = node.kids[byte]
            found.append(node)
        return found


class Effect(NamedTuple):
    """Ids (and a mask) of the tokens that end in a frame, the node where its value is complete, and its calls."""

    ids: list[int]
    end: Node | None
    calls: list[tuple[Lazy, Local, Node]]
    mask: Bools | None = None


class Effects:
    """Effects on frames, for one vocabulary. Those on strings and numbers are kept for all schemas."""

    def __init__(self, trie: Trie) -> None:
        self.root = Node(trie, [len(trie)])
        self._trie, self._lock = trie, Lock()
        self._kept: dict[Any, Effect] = {}
        self._numbers = Memo[Node, _Numbers](_Numbers, MAX_MASKS)
        self._texts = Memo[Local, Effect](lambda local: self._read([(local, self.root)]), MAX_MASKS)
        self.with_names = [i for i, token in enumerate(trie.tokens) if WITH_NAMES.search(token)]
        # of strings: tokens that stay there, and of the others the pieces before a quote or backslash
        self._stay = np.array([INSIDE.fullmatch(token) is not None for token in trie.tokens])
        self._sizes = np.array([_num_characters(token) for token in trie.tokens])
        found = {match.group(1) for token in trie.tokens if (match := BEGINNING.match(token))}
        self._pieces = [b"", *sorted(found - {b""})]
        self._ends = Trie(self._pieces)
        self._nodes = [self.root, *(self.root.along(piece)[-1] for piece in self._pieces[1:])]
        self._loops = Memo[DFA, Loops](lambda dfa: Loops(TableGraph(dfa), trie), MAX_MASKS)
        self._masks = Memo[tuple[DFA, int], Bools](self._find_mask, MAX_MASKS)
        self._below = Memo(self._find_below, MAX_KEPT)
        self._leaving = Memo[tuple[DFA, int, float], list[Leaving]](self._leave, MAX_MASKS)

    def of(self, local: Local, node: Node, is_closed: bool, own: Own) -> Effect:
        """Return an effect. With `is_closed`, calls and ends at `node` itself are left out."""
        if node is self.root and local.text:
            return self._texts[local]
        kept = self._kept if isinstance(local.frame, Automaton | Quoted) else own
        key = local, node, is_closed
        found = kept.get(key)
        if found is None:
            if len(kept) > MAX_KEPT:
                kept.clear()
            found = kept[key] = self._find(local, node, is_closed)
        return found

    def _find(self, local: Local, node: Node, is_closed: bool) -> Effect:
        if isinstance(local.frame, Automaton):
            ids, ends = self._numbers[node].read(local.frame.dfa, local.key)
            return Effect(ids, _joined([*ends, *[node] * (local.expanded[2] and not is_closed)]), [])
        return self._read([(local, node)], (local, node) if is_closed else None)

    def _read(self, todo: list[tuple[Local, Node]], closed: tuple[Local, Node] | None = None) -> Effect:
        """Return the effect of the tokens below some nodes. There are no calls and ends at `closed`."""
        ids, ends, calls, listed = list[int](), list[Node](), list[tuple[Lazy, Local, Node]](), set[Node]()
        mask = None
        while todo:
            at, here = todo.pop()
            if not here.kids:
                continue
            is_open = (at, here) != closed
            if at.words is not None:
                todo += _read_words(at, here, ids, ends if is_open else [], listed)
                if at.others is None:
                    continue
                at = at.others
            if at.text:
                stay, some, left = self._read_text(at, here)
                mask = mask if stay is None else stay
                left = [(target, kid) for target, kid in left if kid not in listed]
                ids += some + [id for _, kid in left for id in kid.ids]
                todo += left
                continue
            moves, called, is_done = at.expanded
            if is_open:
                ends += [here] * is_done
                calls += [(part, after, here) for part, after in called]
            kids = here.kids
            for lo, hi, target in moves:
                for byte in (lo,) if lo == hi else kids:
                    if lo <= byte <= hi and byte in kids:
                        ids += kids[byte].ids
                        todo.append((target, kids[byte]))
        return Effect(ids, _joined(ends), calls, mask)

    @locked
    def mask(self, state: Config, starts: Mapping[Lazy, Iterable[Local]], own: Own) -> Bools:
        """Return the mask of a configuration, (V,) bool.

        `starts[part]` are the local states in which a shape begins. `own` keeps the effects on the frames of a schema.
        """
        return self._mask([(local, below, self.root, True) for local, below in state.items], starts, own)

    def _mask(self, todo: list[Reading], starts: Mapping[Lazy, Iterable[Local]], own: Own) -> Bools:
        mask, ids = np.zeros(len(self._trie.tokens), bool), list[int]()
        while todo:
            local, below, node, is_closed = todo.pop()
            if node is self.root and local.others is not None:
                mask |= self._named(local, below, starts, own)
                continue
            effect = self.of(local, node, is_closed, own)
            ids += effect.ids
            if effect.mask is not None:
                mask |= effect.mask
            if effect.end is not None and isinstance(below, Config):
                todo += [(*item, effect.end, True) for item in below.items]
            elif effect.end is not None:
                todo.append((*below, effect.end, False))
            for part, after, at in effect.calls:
                if at.kids:
                    todo += [(start, (after, below), at, False) for start in starts[part]]
        mask[ids] = True
        return mask

    def _named(self, local: Local, below: Stack, starts: Mapping[Lazy, Iterable[Local]], own: Own) -> Bools:
        """Return the mask inside a name that may be listed or not: that of others, but for tokens with a listed end."""
        assert local.others is not None and local.words is not None
        key = local.others, below
        if key not in own:
            own[key] = self._mask([(*key, self.root, False)], starts, own)
        mask: Bools = own[key].copy()
        ends = [(passed[-1], i) for word, i in local.words if len(passed := self.root.along(word)) == len(word)]
        then = [(local.after_word(i), below, end, False) for end, i in ends]
        for _, _, end, _ in then:
            mask[end.below()] = False
        todo: list[Any] = [each for each in then if each[0] is not None]
        for _, _, end, _ in todo:
            mask[end.ids] = True
        return mask | self._mask(todo, starts, own)

    def _find_mask(self, key: tuple[DFA, int]) -> Bools:
        """Return the tokens that stay in the strings of an automaton, from a state on."""
        dfa, state = key
        mask = self._loops[dfa].mask(state, lambda other: self._masks[dfa, other])
        if mask is None:
            mask = np.zeros(len(self._trie.tokens), bool)
            mask[walk_state(TableGraph(dfa), self._trie, state)[0]] = True
        mask &= self._stay
        return mask

    def _leave(self, key: tuple[DFA, int, float]) -> list[Leaving]:
        """Return the states after pieces, their characters up to a number, a quote or backslash, and the node there."""
        dfa, state, most = key
        ids, ends = walk_state(TableGraph(dfa), self._ends, state)
        found = dict[tuple[int, int, int], list[Node]]()
        for i, end in [(0, state), *zip(ids.tolist(), ends.tolist(), strict=True)]:
            for byte in self._nodes[i].kids.keys() & {*b'"\\'}:
                number = int(min(most, _num_characters(self._pieces[i])))
                found.setdefault((end, number, byte), []).append(self._nodes[i].kids[byte])
        return [(*each, Node(self._trie, [place for node in nodes for place in node.places]))
                for each, nodes in found.items()]       # fmt: skip

    def _find_below(self, key: tuple[Node, DFA, int]) -> tuple[list[tuple[int, list[int]]], list[Leaving]]:
        """Return the tokens below a node that stay, with their characters, and the others as `_leave` does."""
        node, dfa, state = key
        stay, leave, todo = list[tuple[int, list[int]]](), list[Leaving](), [(node, state, 0)]
        while todo:
            here, at, number = todo.pop()
            for byte, kid in here.kids.items():
                if byte in b'"\\':
                    leave.append((at, number, byte, kid))
                elif byte >= 32 and (to := dfa.step(at, byte)):
                    todo.append((kid, to, number + (not 0x80 <= byte < 0xC0)))
                    stay.append((todo[-1][2], kid.ids))
        return stay, leave

    def _read_text(self, local: Local, node: Node) -> tuple[Bools | None, list[int], list[tuple[Local, Node]]]:
        """Return the tokens that stay, at the root as a mask, and the states and nodes after a quote or backslash."""
        assert local.text
        dfa, state, need, room = local.text
        mask, ids, frame = None, list[int](), local.frame
        if node is self.root:
            mask = self._masks[dfa, state]
            leave = self._leaving[dfa, state, need if room == math.inf else math.inf]
            if room < math.inf:
                mask = mask & (self._sizes <= room)
        else:
            stay, leave = self._below[node, dfa, state]
            ids = [id for number, some in stay if number <= room for id in some]
        return mask, ids, [
            (target, node) for end, number, byte, node in leave
            if (key := frame.after_text(local.key, end, number)) and (target := frame.step(frame.local(key), byte))
        ]  # fmt: skip


def _joined(nodes: Iterable[Node | None]) -> Node | None:
    """Return the node of several, None if nothing follows them."""
    some = [node for node in nodes if node and node.kids]
    if len(some) < 2:
        return some[0] if some else None
    return Node(some[0].trie, [place for node in some for place in node.places])


def _read_words(
    local: Local, node: Node, ids: list[int], ends: list[Node], listed: set[Node]
) -> list[tuple[Local, Node]]:
    """Add the tokens in listed words, and the nodes where a value or name ends; return the states after names."""
    found = list[tuple[Local, Node]]()
    for word, number in local.words or ():
        passed = node.along(word)
        if not word:
            ends.append(node)
        elif len(passed) == len(word):
            listed.add(passed[-1])
            after = local.after_word(number)
            if after is not None:
                found.append((after, passed[-1]))
            else:
                passed.pop()
        ids += [id for each in passed for id in each.ids]
    return found


def _num_characters(text: bytes) -> int:
    """Return the characters that begin in a text."""
    return len(text.translate(None, bytes(range(0x80, 0xC0))))


class _Numbers:
    """Tokens below a node that begin with a part of a number: as nodes, each with the one before its last byte."""

    def __init__(self, node: Node) -> None:
        nodes, self._levels, begin = [node], list[tuple[Ints, Ints]](), 0
        while begin < len(nodes):
            found = [
                (i, byte, kid) for i in range(begin, len(nodes)) for byte, kid in nodes[i].kids.items()
                if byte in IN_NUMBER
            ]  # fmt: skip
            begin = len(nodes)
            nodes += [kid for *_, kid in found]
            self._levels.append((np.array([i for i, *_ in found], int), np.array([each[1] for each in found], int)))
        pairs = [(id, i) for i, each in enumerate(nodes) if i for id in each.ids]
        self._ids, self._at = np.array(pairs, int).reshape(-1, 2).T
        exits = [i for i, each in enumerate(nodes) if i and not AFTER_NUMBER.isdisjoint(each.kids)]
        self._exits, self._nodes = np.array(exits, int), nodes

    def read(self, dfa: DFA, state: int) -> tuple[list[int], list[Node]]:
        """Return the ids of the tokens that stay in a number, and the nodes where others leave it."""
        table, states = dfa.explore().table, np.array([state])
        for above, bytes in self._levels:
            states = np.concatenate([states, table[states[above], bytes]])
        ids: list[int] = self._ids[states[self._at] > 0].tolist()
        return ids, [self._nodes[i] for i in self._exits[dfa.accepting[states[self._exits]]].tolist()]


def effects_of(trie: Trie) -> Effects:
    """Return the effects of a vocabulary."""
    found: Effects = trie.loops.get("json") or trie.loops.setdefault("json", Effects(trie))
    return found
