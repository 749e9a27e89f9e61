"""Files that keep the index of a grammar, so that a later process continues from it.

A file holds the states of the text with their masks and steps, the quotients of the vocabulary, and the outcomes of the
lexer, with the stacks and partial tokens that these refer to. Everything is written as numbers of the grammar's own
tables, so a file is read together with its grammar, which a digest identifies. The contents join those the grammar
already has.

A look-behind tracker numbers its states in order of use, so a file stores for each state a text that leads to it.

A file may come from somebody else. `_Reader` looks up or checks every number and name before it uses one.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llmppl.constraints.automata.nfa import Ahead
from llmppl.constraints.constraint import State
from llmppl.constraints.lark.completion import Completability
from llmppl.constraints.lark.lalr import Layout, Stack
from llmppl.constraints.lark.lalr_tables import END as TEXT_END
from llmppl.constraints.lark.lalr_tables import union
from llmppl.constraints.lark.lexer import Ended, Obligation, Outcome, PartialToken, PartialTokens
from llmppl.constraints.lark.masks import Crossing, Masks, Quotient, TokenClass
from llmppl.constraints.masks import END
from llmppl.constraints.masks import index_files as storage
from llmppl.support.arguments import mismatch
from llmppl.support.graphs import Numbering, reachable
from llmppl.support.locks import let_through

Tree = Any                                          # lists, dicts, numbers and strings, as in JSON
NATURAL, COLUMN = range(sys.maxsize), range(-1, sys.maxsize)


def digest(completability: Completability, flags: int) -> str:
    """Return a text that is equal for grammars whose lexers and parsers have the same numbers for the same things."""
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


def _described(pattern: str) -> str:
    """Return a pattern with the flags around it in order: lark writes them in the order of a set."""
    return re.sub(r"^(\(\?[a-z]+:)+", lambda found: "".join(sorted(re.findall(r"\(\?[a-z]+:", found[0]))), pattern)


def write(path: str | Path, index: Any, digest: str, completability: Completability, masks: Masks) -> None:
    """Save the known part of an index of a grammar."""
    writer = _Writer(completability.partials)
    tree = {"quotients": writer.quotients(masks), **writer.states(index), **writer.parts()}
    blobs = writer.blobs.keys_in_order
    storage.write_arrays(
        path,
        index,
        grammar=digest,
        tree=np.frombuffer(json.dumps(tree, separators=(",", ":")).encode(), np.uint8),
        blobs=np.frombuffer(b"".join(blobs), np.uint8),
        blobs_sizes=np.array(list(map(len, blobs)), np.int64),
    )


class _Writer:
    """Objects of a grammar as numbers: each object is numbered by its place in a list of the file."""

    def __init__(self, partials: PartialTokens) -> None:
        self.partials = partials
        self.stacks: Numbering[Stack] = Numbering()
        self.blobs: Numbering[bytes] = Numbering()      # masks, and arrays of tokens and nodes
        self.tokens: Numbering[int] = Numbering()
        self.obligations: Numbering[Obligation] = Numbering()
        self.outcomes: Numbering[Outcome] = Numbering()

    def quotients(self, masks: Masks) -> Tree:
        return [
            [
                [self.blobs[nodes], self._some(tokens)],
                [
                    [f"{proofs:x}", self._ends(ends), self._some(going_on), ids.itemsize, self.blobs[ids.tobytes()]]
                    for proofs, ends, going_on, ids in quotient.classes
                ],
                [[*self._ends([c.end]), self.blobs[c.nodes]] for c in quotient.crossings],
            ]
            for (nodes, tokens), quotient in masks.quotients.items()
        ]

    def _some(self, tokens: Iterable[int]) -> list[int]:
        return [self.tokens[token] for token in tokens]

    def _ends(self, ends: Iterable[Ended]) -> Tree:
        return [[symbol, self.obligations[self.partials.obligations[number]]] for symbol, number in ends]

    def states(self, index: Any) -> dict[str, Tree]:
        """Return the states that have a mask or a step, and these."""
        numbers: Numbering[State] = Numbering([index.start])
        known_masks, known_steps = index.known()
        masks = [[numbers[state], self.blobs[key]] for state, key in known_masks]
        steps = [[numbers[a], token, -1 if b is END else numbers[b]] for (a, token), b in known_steps]
        states = [
            [[[self._stack(stack), self.tokens[token]] for stack, token in state.hypotheses], state.accepting]
            for state in numbers.keys_in_order
        ]
        return {"states": states, "masks": masks, "steps": steps}

    def _stack(self, stack: Stack) -> int:
        """Return the number of a stack; the stacks below it have smaller ones."""
        above = [stack]
        while above[-1] not in self.stacks and above[-1].below:
            above.append(above[-1].below)
        return [self.stacks[each] for each in reversed(above)][-1]

    def parts(self) -> dict[str, Tree]:
        """Return the known outcomes, and the objects that the others refer to."""
        rows = [
            [self.tokens[token], [-1 if outcome is None else self.outcomes[outcome] for outcome in row]]
            for token, row in self.partials.rows.items()
        ]
        outcomes = [[self._some(tokens), self._ends(ends)] for tokens, ends in self.outcomes.keys_in_order]
        tokens = [
            [t.keywords, t.threads, sorted(t.keyword_threads), self.obligations[t.obligation], t.column]
            for t in map(self.partials.tokens.__getitem__, self.tokens.keys_in_order)
        ]
        every = self.stacks.keys_in_order
        stacks = [[each.state, self.stacks[each.below], each.layout] for each in every if each.below]
        met, trackers = self.obligations.keys_in_order, self.partials.automata.trackers
        return {
            "rows": rows,
            "outcomes": outcomes,
            "tokens": tokens,
            "obligations": [[sorted(each.forbidden), [*map(sorted, each.required)], each.trackers] for each in met],
            "trackers": [_texts_to(each, {o.trackers[i] for o in met}) for i, each in enumerate(trackers)],
            "stacks": stacks,
        }


def read(data: dict[str, Any], index: Any, completability: Completability, masks: Masks, state: Any) -> None:
    """Join the contents of a file to an index and its grammar; `state` makes a state.

    Raises a ValueError if `write` cannot have written the file for this grammar.
    """
    try:
        reader = _Reader(completability, masks, data)
        reader.read_rows()
        reader.read_quotients()
        index.join(*reader.states(state))
    except (AttributeError, LookupError, TypeError) as error:
        let_through(error)
        raise ValueError("its numbers and names are not such as this grammar has") from error


class _Reader:
    """The contents of a file as objects of a grammar, in lists.

    Its errors are those of `read`: most are raised by the lookup of a number or a name that does not exist.
    """

    def __init__(self, completability: Completability, masks: Masks, data: dict[str, Any]) -> None:
        self.partials, self.parser, self.masks = completability.partials, completability.parser, masks
        self.lexer_of, byte = completability.lexer_of, ("u1", None, 0, 256)
        storage.check(data, tree=byte, blobs=byte, blobs_sizes=("i8", None, 0, storage.ANY))
        self.blobs = [part.tobytes() for part in storage.parts(data, "blobs")]
        self.tree: Tree = json.loads(data["tree"].tobytes())
        trackers = [
            {int(state): tracker.after(tracker.start, text.encode("latin-1")) for state, text in texts.items()}
            for tracker, texts in zip(self.partials.automata.trackers, self.tree["trackers"], strict=True)
        ]
        self.obligations = [
            Obligation(
                frozenset(self._threads(forbidden)),
                frozenset([frozenset(self._threads(each)) for each in required]),
                tuple([known.get(state, 0) for known, state in zip(trackers, states, strict=True)]),
            )
            for forbidden, required, states in self.tree["obligations"]
        ]
        self.tokens = [self.partials.token_number[self._token(*fields)] for fields in self.tree["tokens"]]

    def _token(
        self, keywords: Tree, threads: Tree, keyword_threads: Tree, obligation: int, column: int
    ) -> PartialToken:
        def name(name: str) -> str:
            return self.partials.terminals[name].name

        return PartialToken(
            tuple([(name(host), tuple(map(name, names))) for host, names in keywords]),
            self._threads(threads),
            frozenset(self._threads(keyword_threads)),
            self.obligations[obligation],
            _checked(column, COLUMN),
        )

    def _threads(self, states: Tree) -> tuple[int, ...]:
        return tuple(_checked(states, [range(len(self.partials.automata.epsilon))]))

    def _some(self, tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple([self.tokens[number] for number in tokens])

    def _ends(self, ends: Tree) -> tuple[Ended, ...]:
        return tuple([self._end(*end) for end in ends])

    def _end(self, symbol: Any, obligation: int) -> Ended:
        if isinstance(symbol, list):
            symbol = tuple(_checked(symbol, (frozenset([self.partials.newline]), COLUMN)))
        elif symbol == TEXT_END or symbol not in self.parser.bits:
            raise ValueError("it has a terminal that this grammar has not")
        return Ended(symbol, self.partials.obligation_number[self.obligations[obligation]])

    def read_rows(self) -> None:
        partials = self.partials
        outcomes = [partials.intern((self._some(tokens), self._ends(ends))) for tokens, ends in self.tree["outcomes"]]
        for number, row in self.tree["rows"]:
            token = self.tokens[number]
            if len(row) != len(partials.classes[token]):
                raise ValueError("its rows are not such as this grammar has")
            partials.rows.setdefault(token, [None if each == -1 else outcomes[each] for each in row])

    def read_quotients(self) -> None:
        for (place, tokens), classes, crossings in self.tree["quotients"]:
            nodes = self.blobs[place]
            ends = [(self._end(*end), self.blobs[below]) for end, below in crossings]
            if any(self._depth(below) <= self._depth(nodes) for _, below in ends):
                raise ValueError("it has crossings that are not below their quotient")
            within = [Crossing(self.parser.bits[end.terminal], end, below, {}) for end, below in ends]
            read = [
                TokenClass(int(proofs, 16), self._ends(ended), self._some(going_on), self._ids(size, ids))
                for proofs, ended, going_on, size, ids in classes
            ]
            bits = union([each[0] for each in (*read, *within)])
            self.masks.quotients.setdefault((nodes, self._some(tokens)), Quotient(bits, read, within, {}))

    def _depth(self, nodes: bytes) -> int:
        """Return the least depth of some nodes of the trie; -1 for b"", which stands for the root."""
        depth = self.masks.trie.depth
        found = _in_range(np.frombuffer(nodes, np.int32), len(depth))
        return int(depth[found].min()) if found.size else -1

    def _ids(self, size: int, place: int) -> Any:
        """Return the tokens of a class: ids (4 bytes each), or the bits of the vocabulary."""
        num_tokens = len(self.masks.trie.tokens)
        if size != 1:
            return _in_range(np.frombuffer(self.blobs[place], np.int32), num_tokens)
        bits = np.frombuffer(self.blobs[place], np.uint8)
        if bits.size != (num_tokens + 7) // 8:
            raise ValueError("its bits are not those of the vocabulary")
        return bits

    def states(self, make_state: Callable[[frozenset[tuple[Stack, int]], bool], State]) -> tuple[list[Any], list[Any]]:
        """Return the states with the keys of their masks, and the steps with the states after them."""
        tree, tokens = self.tree, range(len(self.masks.trie.tokens))
        stacks = self._stacks()
        states = []
        for hypotheses, accepting in tree["states"]:
            alive = [(stacks[stack], self.tokens[token]) for stack, token in hypotheses]
            if any(stack.state not in self.lexer_of for stack, _ in alive):
                raise ValueError("it has a state within a reduction of the parser")
            states.append(make_state(frozenset(alive), bool(accepting)))
        masks = [(states[number], self.blobs[key]) for number, key in tree["masks"]]
        storage.check_sets([key for _, key in masks], self.masks.trie)
        steps = [((states[a], tokens[token]), END if b == -1 else states[b]) for a, token, b in tree["steps"]]
        return masks, steps

    def _stacks(self) -> list[Stack]:
        stacks = [self.parser.bottom]
        shape = (NATURAL, [NATURAL]) if self.parser.indenter else type(None)
        for number, place, layout in self.tree["stacks"]:
            below = stacks[place]
            if number not in self.parser.shifts[below.state].values() or (layout and not layout[1]):
                raise ValueError("it has a stack that no text leads to")
            _checked([number, layout], (NATURAL, shape))
            stacks.append(below.push(number, layout and Layout(layout[0], tuple(layout[1]))))
        return stacks


def _checked(value: Tree, shape: Any) -> Any:
    """Return a value; ValueError unless it has a shape as of `mismatch`."""
    if found := mismatch(value, shape):
        raise ValueError(found)
    return value


def _in_range(numbers: Any, end: int) -> Any:
    """Return an array; ValueError unless its numbers are from 0 to below `end`."""
    if not ((numbers >= 0) & (numbers < end)).all():
        raise ValueError(f"it has a number that is not from 0 to {end - 1}")
    return numbers


def _texts_to(tracker: Any, states: set[int]) -> dict[str, str]:
    """Return for each state of a tracker, except 0, a text that leads to it."""
    texts: dict[int, bytes] = {int(tracker.start): b""}

    def onward(state: int) -> Iterable[int]:
        targets, first = np.unique(tracker.row(state), return_index=True)
        for target, byte in zip(targets.tolist(), first.tolist(), strict=True):
            texts.setdefault(target, texts[state] + bytes([byte]))
        return map(int, targets)

    wanted = states - {0}
    for _ in reachable([int(tracker.start)], onward):
        if wanted <= texts.keys():
            break
    return {str(state): texts[state].decode("latin-1") for state in wanted}
