"""Effects of tokens on one frame: which of them end in it, and where the others leave it.

The effect on a frame does not depend on the stack, and all schemas share the frames of strings and numbers. So the
tokens of a string or number are read once per vocabulary. Then only the rests of tokens that leave it follow the stack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.frames import Automaton, Local
from llmppl.constraints.json.scalars import Quoted, bytes_left
from llmppl.constraints.json.shapes import Lazy
from llmppl.constraints.masks.self_loops import Loops
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import TableGraph, walk_state
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

MAX_KEPT = 1 << 15                                  # effects that are kept
FEW = 80                                            # words that one more letter always makes another one
MAX_MASKS = 100                                     # of strings, of V bytes each
AFTER_NUMBER = frozenset(b",]} \t\n\r")
INSIDE = re.compile(rb'[^\x00-\x1f"\\]*')          # a string, without its quotes and escapes
BEGINNING = re.compile(rb'([^\x00-\x1f"\\]*)["\\]')
WITH_NAMES = re.compile(rb'"[ \t\n\r]*:.*,[ \t\n\r]*"', re.DOTALL)        # a name's end, and the beginning of another
IN_NUMBER = b"+-.0123456789eE"

Leaving = tuple[int, int, int, "Node"]              # a state of a text, characters, a quote or backslash, its node


class Node:
    """Places of a trie that are read together: `ids` of the tokens that end there, and the nodes after each byte."""

    def __init__(self, trie: Trie, places: list[int]) -> None:
        self.trie = trie
        self.places = places
        self.ids = self.below(False)

    def below(self, is_deep: bool = True) -> list[int]:
        """Return the ids of the tokens that end here, and of those below if `is_deep`."""
        trie = self.trie
        found = []
        for place in self.places if self.places != [len(self.trie)] else ():
            node = trie.nodes.item(place)
            end = trie.skip.item(node) if is_deep else node + 1
            found += trie.order[trie.first.item(node) : trie.first.item(end)].tolist()
        return found

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
        node = self
        found = []
        for byte in word:
            if byte not in node.kids:
                break
            node = node.kids[byte]
            found.append(node)
        return found


class Group(NamedTuple):
    """Tokens that lead to one local state: from `local`, by the bytes `read` of a listed word.

    At most `more` bytes lead from there to `after`, if it is not None: the rest of the word; or, if the word may not
    stand there, the rest of a character and a letter that makes it another one.
    """

    ids: Sequence[int]
    local: Local
    read: bytes = b""
    more: int = 0
    after: Local | None = None

    def left(self, bytes_left: Callable[[Local], float]) -> float:
        """Return a bound of the bytes that complete the value."""
        return self.more + bytes_left(self.after) if self.after else bytes_left(self.end)

    @property
    def end(self) -> Local:
        found: Local | None = self.local
        for byte in self.read:
            assert found is not None
            found = found.frame.step(found, byte)
        assert found is not None
        return found


class Effect:
    """Effect on a frame of the tokens below a node.

    Tokens that end in the frame are in `groups`, or in `ids` and `mask`. `Effects.groups_of` groups the latter, too,
    from `texts`: states in texts and numbers, and their nodes. A value is complete at the node `end`. `listed` has the
    tokens along listed words.
    """

    def __init__(self) -> None:
        self.groups = list[Group]()
        self.ids = list[int]()
        self.texts = list[tuple[Local, Node]]()
        self.split: list[Group] | None = None
        self.left: float | None = None
        self.mask: Bools | None = None
        self.end: Node | None = None
        self.calls: list[tuple[Lazy, Local, Node]] = []
        self.listed = set[int]()

    def most(self, left: Callable[[Local], float]) -> float:
        """Return a bound of the bytes that complete the value, after any of the tokens."""
        if self.left is None:
            lefts = [group.left(left) for group in self.groups]
            for at, _ in self.texts:
                dfa = at.frame.dfa if isinstance(at.frame, Automaton) else at.content.text and at.content.text[0]
                inside = bytes_left(dfa)
                lefts.append(left(at) + float(inside[inside < math.inf].max()))
            self.left = max(lefts, default=0)
        return self.left


class Kept:
    """Effects that are kept: those on strings, of V bytes each, and others."""

    def __init__(self, read: Callable[[Local], Effect]) -> None:
        self.texts = Memo[Local, Effect](read, MAX_MASKS)
        self.others = dict[Any, Any]()


class Effects:
    """Effects on frames, for one vocabulary. Those on strings and numbers are kept for all schemas."""

    def __init__(self, trie: Trie) -> None:
        self.root = Node(trie, [len(trie)])
        self._trie = trie
        self._kept = self.new_kept()
        self._numbers = Memo[Node, _Numbers](_Numbers, MAX_MASKS)
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
        self._walks = Memo[tuple[DFA, int], tuple[Ints, Ints]](self._walk, MAX_MASKS)
        self._below = Memo(self._find_below, MAX_KEPT)
        self._leaving = Memo[tuple[DFA, int, float], list[Leaving]](self._leave, MAX_MASKS)

    def new_kept(self) -> Kept:
        """Return a place for effects, with none yet."""
        return Kept(lambda local: self._read(local, self.root, False))

    def of(self, local: Local, node: Node, is_closed: bool, own: Kept) -> Effect:
        """Return an effect. With `is_closed`, calls and ends at `node` itself are left out. `own` are of one schema."""
        found_in = self._kept if isinstance(local.frame, Automaton | Quoted) else own
        if node is self.root and local.content.text:
            return found_in.texts[local]
        kept = found_in.others
        key = local, node, is_closed
        found: Effect | None = kept.get(key)
        if found is None:
            if len(kept) > MAX_KEPT:
                kept.clear()
            found = kept[key] = self._read(local, node, is_closed)
        return found

    def _read(self, local: Local, node: Node, is_closed: bool) -> Effect:
        found = Effect()
        ends = list[Node]()
        listed = set[Node]()
        todo = [(local, node)]
        if isinstance(local.frame, Automaton):
            found.ids, ends = self._numbers[node].read(local.frame.dfa, local.key)
            found.texts = [todo.pop()]
            found.end = _joined([*ends, *[node] * (local.expanded[2] and not is_closed)])
        while todo:
            at, here = todo.pop()
            if not here.kids:
                continue
            is_open = not is_closed or at is not local or here is not node
            words, others, _ = at.content
            if words is not None:
                groups, after = read_words(at, here)
                ends += [here] * (is_open and any(not word for word, _ in words))
                listed.update(end for _, end in after)
                found.groups += groups
                found.listed.update(id for group in groups for id in group.ids)
                todo += [(local, end) for local, end in after if local]
                if others is None:
                    continue
                at = others
            if at.content.text:
                stay, some, left = self._read_text(at, here)
                found.mask = found.mask if stay is None else stay
                found.texts.append((at, here))
                found.ids += some
                left = [(target, kid) for target, kid in left if kid not in listed]
                found.groups += [Group(kid.ids, target) for target, kid in left if kid.ids]
                todo += left
                continue
            moves, called, is_done = at.expanded
            if is_open:
                ends += [here] * is_done
                found.calls += [(part, after, here) for part, after in called]
            kids = here.kids
            for lo, hi, target in moves:
                for byte in (lo,) if lo == hi else kids:
                    if lo <= byte <= hi and byte in kids:
                        if kids[byte].ids:
                            found.groups.append(Group(kids[byte].ids, target))
                        todo.append((target, kids[byte]))
        found.end = found.end or _joined(ends)
        return found

    def groups_of(self, effect: Effect) -> list[Group]:
        """Return the groups of all tokens of an effect."""
        if effect.split is None:
            groups = effect.groups + [group for each in effect.texts for group in self._groups_in(*each)]
            if effect.listed:                       # their states remember the word
                groups = [
                    group if group.read else group._replace(ids=[id for id in group.ids if id not in effect.listed])
                    for group in groups
                ]
            effect.split = groups
        return effect.split

    def _groups_in(self, local: Local, node: Node) -> list[Group]:
        """Return the groups of the tokens below a node that stay in a text or number."""
        frame = local.frame
        if isinstance(frame, Automaton):
            found = self._numbers[node].groups(frame.dfa, local.key)
            return [Group(ids, frame.local(state)) for state, ids in found]
        assert local.content.text
        dfa, state, need, room = local.content.text
        if node is self.root:
            ids, ends = self._walks[dfa, state]
            sizes = self._sizes[ids]
            ids, ends, sizes = (each[sizes <= room] for each in (ids, ends, np.minimum(sizes, need)))
            keys, where = np.unique(ends * (need + 1) + sizes, return_inverse=True)
            stay = [(key % (need + 1), key // (need + 1), ids[where == i]) for i, key in enumerate(keys.tolist())]
        else:
            stay = [each for each in self._below[node, dfa, state][0] if each[0] <= room]
        keyed = [(frame.after_text(local.key, end, number), ids) for number, end, ids in stay if len(ids)]
        return [Group(ids, frame.local(key)) for key, ids in keyed if key]

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

    def _walk(self, key: tuple[DFA, int]) -> tuple[Ints, Ints]:
        """Return the tokens that stay in the strings of an automaton, and the states that they lead to."""
        ids, ends = walk_state(TableGraph(key[0]), self._trie, key[1])
        stay = self._stay[ids]
        return ids[stay], ends[stay]

    def _find_below(self, key: tuple[Node, DFA, int]) -> tuple[list[tuple[int, int, list[int]]], list[Leaving]]:
        """Return the tokens below a node that stay, with characters and state, and the others as `_leave` does."""
        node, dfa, state = key
        stay = []
        leave = []
        todo = [(node, state, 0)]
        while todo:
            here, at, number = todo.pop()
            for byte, kid in here.kids.items():
                if byte in b'"\\':
                    leave.append((at, number, byte, kid))
                elif byte >= 32 and (to := dfa.step(at, byte)):
                    todo.append((kid, to, number + (not 0x80 <= byte < 0xC0)))
                    stay.append((todo[-1][2], to, kid.ids))
        return stay, leave

    def _read_text(self, local: Local, node: Node) -> tuple[Bools | None, list[int], list[tuple[Local, Node]]]:
        """Return the tokens that stay, at the root as a mask, and the states and nodes after a quote or backslash."""
        assert local.content.text
        dfa, state, need, room = local.content.text
        mask = None
        ids = []
        frame = local.frame
        if node is self.root:
            mask = self._masks[dfa, state]
            leave = self._leaving[dfa, state, need if room == math.inf else math.inf]
            if room < math.inf:
                mask = mask & (self._sizes <= room)
        else:
            stay, leave = self._below[node, dfa, state]
            ids = [id for number, _, some in stay if number <= room for id in some]
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


def read_words(local: Local, node: Node) -> tuple[list[Group], list[tuple[Local | None, Node]]]:
    """Return the groups along listed words, and the nodes where words end, with the states after those that may."""
    groups = []
    ends = []
    words, others, _ = local.content
    for word, number in words or ():
        passed = node.along(word)
        if not passed:
            continue
        after = local.after_word(number)
        more = len(word)
        if len(passed) == len(word):
            ends.append((after, passed[-1]))
            if after is None:
                passed.pop()
        if after is None and others and others.content.text and others.content.text[0] is anything():
            after, more = (others, more + 4) if len(words or ()) < FEW else (None, 0)
        groups += [Group(each.ids, local, word[:i], more - i, after) for i, each in enumerate(passed, 1) if each.ids]
    return groups, ends


def _num_characters(text: bytes) -> int:
    """Return the characters that begin in a text."""
    return len(text.translate(None, bytes(range(0x80, 0xC0))))


class _Numbers:
    """Tokens below a node that begin with a part of a number: as nodes, each with the one before its last byte."""

    def __init__(self, node: Node) -> None:
        nodes = [node]
        self._levels = list[tuple[Ints, Ints]]()
        begin = 0
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
        self._exits = np.array(exits, int)
        self._nodes = nodes

    def _states(self, dfa: DFA, state: int) -> Ints:
        """Return the state at each node."""
        table = dfa.explore().table
        states = np.array([state])
        for above, bytes in self._levels:
            states = np.concatenate([states, table[states[above], bytes]])
        return states

    def read(self, dfa: DFA, state: int) -> tuple[list[int], list[Node]]:
        """Return the ids of the tokens that stay in a number, and the nodes where others leave it."""
        states = self._states(dfa, state)
        ids = self._ids[states[self._at] > 0].tolist()
        return ids, [self._nodes[i] for i in self._exits[dfa.accepting[states[self._exits]]].tolist()]

    def groups(self, dfa: DFA, state: int) -> list[tuple[int, list[int]]]:
        """Return the states that tokens lead to inside a number, each with the ids of these tokens."""
        found = self._states(dfa, state)[self._at]
        return [(end, self._ids[found == end].tolist()) for end in np.unique(found).tolist() if end]


def effects_of(trie: Trie) -> Effects:
    """Return the effects of a vocabulary."""
    found: Effects = trie.loops.get("json") or trie.loops.setdefault("json", Effects(trie))
    return found
