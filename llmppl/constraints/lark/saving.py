"""Indices of grammars in files: what has been worked out, to go on from.

A file holds what was met so far: the lexer's partial tokens and what bytes made of them, the parser's stacks, the
states of the text with their masks and steps, and the vocabulary as it was read (the quotients of
`llmppl.constraints.lark.masks`). All of it is said in numbers of the grammar's own tables, so a file is read together with its
grammar; a digest tells another one. What is read joins what the grammar knows already, and everything goes on growing.

States of a tracker are numbered as they are met: a file has a text that leads to each instead.

A file is data, perhaps somebody else's: `Reader` checks every number and name before it uses one. A *shape* says what a
tree of JSON may be, and `mismatch` compares the two.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llmppl.constraints.automata.nfa import Ahead
from llmppl.constraints.constraint import State
from llmppl.constraints.lark.completion import Completability
from llmppl.constraints.lark.lalr import Layout, Stack
from llmppl.constraints.lark.lalr_tables import END as TEXT_END
from llmppl.constraints.lark.lexer import Ended, Keywords, Outcome, PartialToken, Residue
from llmppl.constraints.lark.masks import Crossing, Masks, Quotient, TokenClass
from llmppl.constraints.masks import END
from llmppl.constraints.masks import index_files as storage
from llmppl.support.arguments import mismatch
from llmppl.support.graphs import Numbering, reached

Tree = Any                                          # lists, dicts, numbers and strings, as JSON has them


def digest(completability: Completability, flags: int) -> str:
    """Equal for grammars whose lexer and parser have the same numbers for the same things."""
    parser, partials = completability.parser, completability.partials
    automata, indenter = partials.automata, parser.indenter
    lexer = [
        [(t.name, _described(t.pattern), t.words, t.keywords, sorted(t.embedded)) for t in partials.terminals.values()],
        [partials.lexers, sorted(partials.ignored), flags, automata.epsilon, automata.edges, automata.starts],
        sorted(automata.ends.items()),
        [(q, guard.positive, guard.entry if isinstance(guard, Ahead) else -1) for q, guard in automata.guards.items()],
    ]
    rows = [[sorted(shifts.items()) for shifts in parser.shifts], list(map(sorted, parser.tables.reductions))]
    layout = indenter and [
        [indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type, indenter.tab_len],
        [indenter.OPEN_PAREN_types, indenter.CLOSE_PAREN_types],
    ]
    text = repr([lexer, parser.tables.bits, rows, layout])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _described(pattern: str) -> tuple[str, list[str]]:
    """A terminal's pattern without the flags around it, and these: lark puts them there in the order of a set."""
    flags = []
    while found := re.match(r"\(\?([a-z]+):", pattern):
        flags.append(found[1])
        pattern = pattern[found.end() :]
    return pattern, sorted(flags)


class Writer:
    """What has been met, as numbers; each kind of thing by its place in the list that it is written to."""

    def __init__(self, completability: Completability, masks: Masks) -> None:
        self.partials, self.parser, self.masks = completability.partials, completability.parser, masks
        self.stacks: Numbering[Stack] = Numbering([self.parser.bottom])
        self.nodes: Numbering[bytes] = Numbering()
        self.outcomes: Numbering[Outcome] = Numbering()
        self.keywords: Numbering[Keywords] = Numbering()
        self.ids: list[Any] = []
        self.bits: list[Any] = []

    def lexer(self) -> Tree:
        """The partial tokens, their residues, and what bytes make of them."""
        partials = self.partials
        met = Numbering(partials.residues)          # then those of tokens under way
        tokens = [
            [self.keywords[t.keywords], t.threads, sorted(t.keyword_threads), met[t.residue], t.column]
            for t in partials.tokens
        ]
        residues = [[sorted(each.forbidden), sorted(map(sorted, each.required)), each.trackers] for each in met.met]
        rows = [[number, self._row(known)] for number, known in partials.rows.items()]
        starts = [[*place, tokens] for place, tokens in partials.starts.items()]
        trackers = partials.automata.trackers
        texts = [_texts_to(trackers[i], {each.trackers[i] for each in met.met}) for i in range(len(trackers))]
        found = {"residues": residues, "left": len(partials.residues), "tokens": tokens, "keywords": self.keywords.met}
        return {**found, "rows": rows, "starts": starts, "trackers": texts}

    def _row(self, known: Iterable[Outcome | None]) -> list[int]:
        return [-1 if outcome is None else self.outcomes[outcome] for outcome in known]

    def states(self, index: Any) -> Tree:
        """The states that have a mask or a step, and these."""
        numbers: Numbering[State] = Numbering([index.start])
        keys: Numbering[bytes] = Numbering()
        masks = [[numbers[state], keys[found.key]] for state, found in index.known_masks() if state is not END]
        steps = [
            [numbers[state], token, -1 if after is END else numbers[after]]
            for (state, token), after in index.known_steps()
        ]
        states = [
            [[[self._stack(stack), token] for stack, token in state.hypotheses], state.accepting]
            for state in numbers.met
        ]
        return {"states": states, "masks": masks, "steps": steps, "keys": [key.hex() for key in keys.met]}

    def _stack(self, stack: Stack) -> int:
        above = []
        while stack not in self.stacks:
            above.append(stack)
            assert stack.below is not None
            stack = stack.below
        for each in reversed(above):
            self.stacks[each]
        return self.stacks[above[0] if above else stack]

    def stack_list(self) -> Tree:
        """All stacks but the empty one, each after the one that lies below."""
        return [[each.state, self.stacks[each.below], each.layout] for each in self.stacks.met[1:] if each.below]

    def quotients(self) -> Tree:
        """The quotients, their classes and crossings."""
        return [
            [
                [self.nodes[nodes], tokens, f"{quotient.bits:x}"],
                [[f"{c.certificates:x}", c.ends, c.going_on, self._place(c.ids)] for c in quotient.classes],
                [[c.end, self.nodes[c.nodes]] for c in quotient.crossings],
            ]
            for (nodes, tokens), quotient in self.masks.quotients.items()
        ]

    def _place(self, ids: Any) -> int:
        """Return the place of an array of ids among those written, or a negative place for an array of bits."""
        arrays = self.bits if ids.itemsize == 1 else self.ids
        arrays.append(ids)
        return len(arrays) - 1 if arrays is self.ids else -len(arrays)


def write(path: str | Path, index: Any, digest: str, completability: Completability, masks: Masks) -> None:
    """Save what an index of a grammar, and its grammar, have worked out."""
    writer = Writer(completability, masks)
    tree = {**writer.states(index), "quotients": writer.quotients(), **writer.lexer()}
    tree |= {"stacks": writer.stack_list(), "outcomes": writer.outcomes.met}
    arrays = {"ids": writer.ids, "bits": writer.bits, "nodes": [np.frombuffer(n, np.int32) for n in writer.nodes.met]}
    storage.write_arrays(
        path,
        index,
        grammar=digest,
        tree=np.frombuffer(json.dumps(tree, separators=(",", ":")).encode(), np.uint8),
        **{f"{name}_sizes": np.array([each.size for each in some], np.int64) for name, some in arrays.items()},
        **{name: np.concatenate([np.zeros(0, _DTYPES[name]), *some]) for name, some in arrays.items()},
    )


_DTYPES: dict[str, Any] = {"ids": np.int32, "bits": np.uint8, "nodes": np.int32}


class Reader:
    """Contents of a file as objects of a grammar, in lists. Raises a ValueError for a bad file."""

    def __init__(self, completability: Completability, masks: Masks, data: dict[str, Any]) -> None:
        self.partials, self.parser, self.masks = completability.partials, completability.parser, masks
        trie, byte = masks.trie, ("u1", None, 0, 256)
        known = {"ids": ("i4", None, 0, len(trie.tokens)), "bits": byte, "nodes": ("i4", None, 0, len(trie.byte))}
        sizes = {f"{name}_sizes": ("i8", None, 0, storage.ANY) for name in known}
        storage.check(data, tree=byte, **known, **sizes)
        ids, bits, self.nodes = (storage.parts(data, name) for name in known)
        self.sets, self.places = ids + bits[::-1], range(-len(bits), len(ids))
        if any(part.size != (len(trie.tokens) + 7) // 8 for part in bits):
            raise ValueError("its bits are not those of the vocabulary")
        self.depth = [int(trie.depth[part].min()) if part.size else -1 for part in self.nodes]
        try:
            self.tree: Tree = json.loads(data["tree"].tobytes())
        except RecursionError:
            raise ValueError("its tree is nested too deep") from None
        self._check(completability.lexer_of)
        storage.check_sets(map(bytes.fromhex, self.tree["keys"]), trie)
        self.residues: list[int] = []
        self.tokens: list[int] = []

    def _check(self, lexer_of: dict[int, int]) -> None:
        """Raise a ValueError unless the tree is such as `Writer` makes of this grammar."""
        tree, depth, parser, partials = self.tree, self.depth, self.parser, self.partials
        if not isinstance(tree, dict):
            raise ValueError("its tree is no object")
        size = defaultdict(int, {name: len(each) for name, each in tree.items() if isinstance(each, list)})
        left, natural, column = range(size["residues"] + 1), range(sys.maxsize), range(-1, sys.maxsize)
        residue = range(tree["left"] if not mismatch(tree.get("left"), left) else 0)
        threads, trackers = [range(len(partials.automata.epsilon))], len(partials.automata.trackers)
        names, symbols = frozenset(partials.terminals), frozenset(parser.bits) - {None, TEXT_END}
        line_end = (frozenset([parser.indenter.NL_type]), column) if parser.indenter else symbols
        layout = (natural, lambda each: each and not mismatch(each, [natural])) if parser.indenter else type(None)
        end = (lambda each: each is None or not mismatch(each, symbols) or not mismatch(each, line_end)), residue
        token, node, state = range(size["tokens"]), range(len(self.nodes)), range(size["states"])
        shapes = {
            "left": left,
            "trackers": (lambda each: isinstance(each, dict) and not mismatch([*each.values()], [str]),) * trackers,
            "residues": [(threads, [threads], (natural,) * trackers)],
            "keywords": [[(names, [names])]],
            "tokens": [(range(size["keywords"]), threads, threads, range(size["residues"]), column)],
            "outcomes": [([token], [end])],
            "rows": [(token, [range(-1, size["outcomes"])])],
            "starts": [(range(len(partials.lexers)), residue, [token])],
            "stacks": [(range(len(parser.shifts)), range(size["stacks"]), layout)],
            "states": [([(range(size["stacks"] + 1), token)], bool)],
            "keys": [str],
            "masks": [(state, range(size["keys"]))],
            "steps": [(state, range(len(self.masks.trie.tokens)), range(-1, len(state)))],
            "quotients": [
                ((node, [token], _is_hex), [(_is_hex, [end], [token], self.places)], [(end, node)]),
            ],
        }  # fmt: skip
        for name, shape in shapes.items():
            if mismatch(tree.get(name), shape):
                raise ValueError(f"its {name} are not such as this grammar has")
        states = [parser.bottom.state, *[number for number, _, _ in tree["stacks"]]]
        pushed = (
            below <= i and number in parser.shifts[states[below]].values()
            for i, (number, below, _) in enumerate(tree["stacks"])
        )
        placed = (states[stack] in lexer_of for hypotheses, _ in tree["states"] for stack, _ in hypotheses)
        deeper = (depth[node] > depth[head[0]] for head, _, crossings in tree["quotients"] for _, node in crossings)
        if not (all(pushed) and all(placed) and all(deeper)):
            raise ValueError("its stacks or quotients are not such as this grammar has")

    def lexer(self) -> None:
        partials, tree = self.partials, self.tree
        trackers = partials.automata.trackers
        states = [
            {int(state): _after(tracker, text.encode("latin-1")) for state, text in texts.items()}
            for tracker, texts in zip(trackers, tree["trackers"], strict=True)
        ]
        residues = [
            Residue(
                frozenset(forbidden),
                frozenset(map(frozenset, required)),
                tuple([states[i].get(state, 0) for i, state in enumerate(met)]),
            )
            for forbidden, required, met in tree["residues"]
        ]
        self.residues = list(map(partials.residue_number.__getitem__, residues[: tree["left"]]))
        keywords = [tuple([(host, tuple(names)) for host, names in pairs]) for pairs in tree["keywords"]]
        for pairs, threads, keyword_threads, residue, column in tree["tokens"]:
            token = PartialToken(
                keywords[pairs], tuple(threads), frozenset(keyword_threads), residues[residue], column
            )
            self.tokens.append(partials.token_number[token])
        outcomes = [partials.one((self._some(tokens), self._ends(ends))) for tokens, ends in tree["outcomes"]]
        for number, row in tree["rows"]:
            token, known = self.tokens[number], [None if each < 0 else outcomes[each] for each in row]
            if len(known) != len(partials.classes[token]):
                raise ValueError("its rows are not such as this grammar has")
            partials.rows.setdefault(token, known)
        for lexer, left, tokens in tree["starts"]:
            partials.starts.setdefault((lexer, self.residues[left]), self._some(tokens))

    def _some(self, tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple([self.tokens[number] for number in tokens])

    def _ends(self, ends: Iterable[tuple[Any, int]]) -> tuple[Ended, ...]:
        return tuple([self._end(*end) for end in ends])

    def _end(self, symbol: Any, residue: int) -> Ended:
        return Ended(tuple(symbol) if isinstance(symbol, list) else symbol, self.residues[residue])

    def states(self, state: Callable[[frozenset[tuple[Stack, int]], bool], State], index: Any) -> None:
        """Give an index the states with their masks and steps; `state` makes one."""
        tree = self.tree
        stacks = [self.parser.bottom]
        for number, below, layout in tree["stacks"]:
            stacks.append(stacks[below].push(number, layout and Layout(layout[0], tuple(layout[1]))))
        states = [
            state(frozenset([(stacks[stack], self.tokens[token]) for stack, token in hypotheses]), accepting)
            for hypotheses, accepting in tree["states"]
        ]
        keys = [bytes.fromhex(key) for key in tree["keys"]]
        masks = ((states[number], keys[key]) for number, key in tree["masks"])
        steps = (((states[a], token), END if b < 0 else states[b]) for a, token, b in tree["steps"])
        index.join(masks, steps)

    def quotients(self) -> None:
        for (nodes, tokens, bits), classes, crossings in self.tree["quotients"]:
            read = [
                TokenClass(int(certificates, 16), self._ends(ends), self._some(going_on), self.sets[place])
                for certificates, ends, going_on, place in classes
            ]
            within = [
                Crossing(self.parser.bits[end.terminal], end, self.nodes[place].tobytes(), {})
                for end, place in ((self._end(*end), place) for end, place in crossings)
            ]
            key = self.nodes[nodes].tobytes(), self._some(tokens)
            self.masks.quotients.setdefault(key, Quotient(int(bits, 16), read, within, {}))


def read(data: dict[str, Any], index: Any, completability: Completability, masks: Masks, state: Any) -> None:
    """Take over what a file holds; a ValueError if that is nothing that `write` has written."""
    reader = Reader(completability, masks, data)
    reader.lexer()
    reader.quotients()
    reader.states(state, index)


def _is_hex(value: Tree) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]+", value) is not None


def _texts_to(tracker: Any, states: set[int]) -> dict[str, str]:
    """A text that leads to each of a tracker's states, but 0."""
    texts: dict[int, bytes] = {int(tracker.start): b""}

    def onward(state: int) -> list[int]:
        row = tracker.row(state)
        new = {target: int(np.flatnonzero(row == target)[0]) for target in np.unique(row).tolist() if target}
        for target, byte in new.items():
            texts.setdefault(target, texts[state] + bytes([byte]))
        return list(new)

    wanted = states - {0}
    for _ in reached([int(tracker.start)], onward):
        if wanted <= texts.keys():
            break
    return {str(state): texts[state].decode("latin-1") for state in wanted}


def _after(tracker: Any, text: bytes) -> int:
    state = int(tracker.start)
    for byte in text:
        state = int(tracker.step(state, byte) or 0)
    return state
