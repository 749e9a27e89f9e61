"""Canonical encodings: of the token sequences that spell a text, the one that its tokenizer gives.

One idea: for byte-pair encoding (BPE) that is a matter of neighbours. A sequence is canonical iff every cut of its text
into pre-tokens is a border of two tokens, each token alone is what the merges make of its bytes, and each two tokens
side by side in one pre-token are what they make of theirs (`llmppl.constraints.vocabulary.merges`). So a state is the last token and a
reading of the pre-tokens (`llmppl.constraints.vocabulary.pretokens`), and there are finitely many.

A tokenizer is *supported* if the rule above is all there is to it. One that is not normalises, say: a state then holds
the tokens themselves, only what is certain is cut, and the tokenizer decides in the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llmppl.constraints.constraint import Bools, VocabularyLike
from llmppl.constraints.vocabulary.patterns import UnsupportedTokenizer
from llmppl.constraints.vocabulary.pretokens import PreTokens, Reading
from llmppl.constraints.vocabulary.tokenizer_rules import Rules, first_of, read_rules
from llmppl.constraints.vocabulary.trie import trie_of
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.support.locks import Turn, in_turn
from llmppl.support.shared import Shared

K = TypeVar("K", bound=Hashable)
MASK_BYTES = 1 << 26                                # of masks kept, of rows, and of walks
SAMPLES = "a a", "  a  "                            # texts that a decoder must give back
MAX_READINGS = 1 << 16                              # that are kept with their steps


class CanonicalState(NamedTuple):
    """A sequence of tokens, as far as what may follow depends on it."""

    reading: Reading
    last: int                                       # token; -1 where nothing can merge with the next one
    tokens: tuple[int, ...] | None                  # all of them; None if the tokenizer is supported


class Canonical(Shared):
    """Which tokens may follow, so that the sequence can still become what a tokenizer gives for a text.

    A sequence of tokens is canonical if it is the encoding, without special tokens around it, of the text that it
    spells. None is that holds a special token, or whose bytes are not UTF-8. Ends of text have no part in this: a
    sequence may end where `accepts` says so. Beside a TokenIndex, both masks together say which tokens may follow.

    With `supported` there are finitely many states, nothing is encoded, and hardly a prefix passes that no canonical
    sequence has. Otherwise states hold their tokens, and `accepts` encodes their text. Later changes to the tokenizer
    are not seen.

    Parameters
    ----------
    tokenizer : a fast tokenizer of transformers, or a tokenizers.Tokenizer
    vocab : VocabularyLike, of the same tokenizer

    Attributes
    ----------
    start : CanonicalState
    reason : str
        Why the tokenizer is not supported; "" if it is.

    Raises
    ------
    TypeError
        If `tokenizer` is neither of the two.
    ValueError
        If it leaves out merges at random, so that a text has no one encoding; if it has more tokens than `vocab`.
    """

    def __init__(self, tokenizer: Any, vocab: VocabularyLike) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str"):
            needed = "a fast tokenizer of transformers or a tokenizers.Tokenizer, whose rules can be read"
            raise TypeError(f"Canonical needs {needed}, not the {type(tokenizer).__name__}")
        text = backend.to_str()
        self._tokenizer = type(backend).from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = backend.encode_special_tokens
        written = json.loads(text)
        if written["model"].get("dropout"):
            raise ValueError(
                f"the tokenizer leaves out merges at random (dropout={written['model']['dropout']}), so that no "
                "encoding is canonical; set its model.dropout to None"
            )
        if backend.get_vocab_size() > len(vocab.tokens):
            raise ValueError(
                f"the vocabulary has {len(vocab.tokens)} tokens, but the tokenizer {backend.get_vocab_size()}: "
                "Canonical needs the vocabulary of the same tokenizer"
            )
        self.vocab = vocab
        never = [*vocab.eos_ids, *getattr(vocab, "special_ids", ())]
        self._spells = np.array(list(map(bool, vocab.tokens))) & ~np.isin(np.arange(len(vocab.tokens)), never)
        added = np.array([token["id"] for token in written["added_tokens"]], int)
        self._added = added[self._spells[added]]    # they stand between two texts
        try:
            rules = read_rules(written, vocab, self._spells, added.tolist())
        except UnsupportedTokenizer as error:
            rules = Rules(doubt=str(error))
        found = [each for each in written["added_tokens"] if not (each["special"] and backend.encode_special_tokens)]
        literals = [_literal(token, written["normalizer"]) for token in found]
        self.reason = first_of({
            rules.doubt: rules.doubt,
            "it has added tokens that are text": self._added.size,
            "it has added tokens that it finds in some texts only": None in literals,
            "its decoder does not give back its text": not all(map(self.is_canonical, map(self.encode, SAMPLES))),
        })
        self._merges = rules.merges
        self._possible = self._spells.copy()
        self._possible[self._added] = False
        if self._merges is not None and not written["model"]["ignore_merges"]:
            self._possible &= self._merges.stable
        self._pre = PreTokens(rules.splits, filter(None, literals), rules.alphabet, rules.begin, rules.alone)
        self._trie = trie_of(vocab)
        self._graph = MemoGraph(self._pre)
        self._masks = _Masks(self._find_mask)       # (reading, last) -> what may follow
        self._rows = _Masks(self._find_row)         # last -> what is stable after it
        self._walks = _Masks(self._find_walk)       # reading -> what has its borders where it says
        self._turn = Turn()
        self.start = CanonicalState(self._pre.start, -1, () if self.reason else None)

    def __repr__(self) -> str:
        return f"Canonical({len(self.vocab.tokens)} tokens, {'supported' if self.supported else 'not supported'})"

    @property
    def supported(self) -> bool:
        """Whether the rule of neighbours is all there is to the tokenizer."""
        return not self.reason

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in the tokenizer's own way, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def is_canonical(self, tokens: Iterable[int]) -> bool:
        """The definition: whether none of `tokens` is special, and encode(decode(tokens)) == tokens."""
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return bool(self._spells[ids].all()) and self.encode(text) == ids

    def after(self, tokens: Iterable[int]) -> CanonicalState:
        """The state after tokens that are already there, such as those of a context.

        The sequence is then canonical with them before it, as one text; from `start`, by itself. What stands before
        the last special token (a BOS, an end of a turn) has no part in it. If no canonical sequence begins with
        `tokens`, a ValueError names the first place where that shows.
        """
        ids = [int(token) for token in tokens]
        begin = max((at + 1 for at, id in enumerate(ids) if not self._spells[id]), default=0)
        state = self.start
        for at, id in enumerate(ids[begin:], begin):
            found = self.advance(state, id)
            if found is None:
                raise ValueError(
                    f"tokens[{at}]: {id}, {self.vocab.tokens[id]!r}, does not continue a canonical sequence after "
                    f"{b''.join(self.vocab.tokens[i] for i in ids[begin:at])[-24:]!r}"
                )
            state = found
        return state

    def accepts(self, state: CanonicalState) -> bool:
        """Whether the sequence is canonical as it stands."""
        return self._pre.accepts(state.reading) if state.tokens is None else self.is_canonical(state.tokens)

    def advance(self, state: CanonicalState, token: int) -> CanonicalState | None:
        """The state after a token of the vocabulary, or None if no canonical sequence is known to begin so."""
        reading, last, tokens = state
        if not 0 <= token < len(self._spells):
            raise ValueError(f"token {token} is not in this vocabulary, whose ids are 0 to {len(self._spells) - 1}")
        tokens = None if tokens is None else (*tokens, int(token))
        if not self._possible[token]:
            apart = token in self._added and self._pre.accepts(reading)
            return CanonicalState(self._pre.start, -1, tokens) if apart else None
        opened = self._pre.open(reading, self._beside(last, token))
        if opened is None:
            return None
        graph = self._graph                         # which grows, but keeps its numbers
        at, table = graph.ids.get(opened, -1), graph.table
        for byte in self.vocab.tokens[token]:
            if at <= 0:
                break
            at = table.item(at, byte)
        if at < 0:
            graph, at = self._read(opened, self.vocab.tokens[token])
        return CanonicalState(graph.state(at), int(token), tokens) if at else None

    def mask(self, state: CanonicalState) -> Bools:
        """(V,) bool, read-only: where `advance` does not give None; not at special tokens, ends of text among them."""
        return self._masks[state.reading, state.last]

    @in_turn
    def _find_mask(self, key: tuple[Reading, int]) -> Bools:
        reading, last = key
        mask = np.zeros_like(self._possible)
        for stable, row in (True, self._rows[last]), (False, np.True_):
            opened = self._pre.open(reading, stable)
            if opened is not None:
                mask |= self._walks[opened] & row
        mask[self._added] = self._pre.accepts(reading)
        return mask

    def _find_row(self, last: int) -> Bools:
        return self._possible if last < 0 or self._merges is None else self._merges.row(last)

    def _find_walk(self, opened: Reading) -> Bools:
        mask = np.zeros_like(self._possible)
        graph = self._roomy()
        mask[walk_state(graph, self._trie, graph.number(opened))[0]] = True
        return mask & self._possible

    def _beside(self, last: int, token: int) -> bool:
        return last < 0 or self._merges is None or self._merges.beside(last, token)

    def _roomy(self) -> MemoGraph:
        self._graph = self._graph.renewed(MAX_READINGS)
        return self._graph

    @in_turn
    def _read(self, reading: Reading, data: bytes) -> tuple[MemoGraph, int]:
        """The number of what bytes make of a reading, 0 if they do not fit, and the graph that has numbered it."""
        graph = self._roomy()
        at = graph.number(reading)
        for byte in data:
            if not at:
                break
            if graph.table.item(at, byte) < 0:
                graph.fill(at, np.array([byte]))
            at = graph.table.item(at, byte)
        return graph, at


def _literal(token: dict[str, Any], normalizer: Any) -> bytes | None:
    """The text of an added token, if the tokenizer finds that token wherever the text stands; None if it may not."""
    content: str = token["content"]
    changed = token["normalized"] and normalizer
    if token["single_word"] or changed or content[:1] in ("", " "):    # a decoder may strip a blank
        return None
    return content.encode()


class _Masks(dict[K, Bools]):
    """Masks that are made when first asked for, and all forgotten when they are many."""

    def __init__(self, find: Callable[[K], Bools]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: K) -> Bools:
        mask = self._find(key)
        mask.flags.writeable = False
        if len(self) * mask.size > MASK_BYTES:
            self.clear()
        self[key] = mask
        return mask
