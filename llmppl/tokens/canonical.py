"""Canonical encodings: of the token sequences that spell a text, the one that its tokenizer gives.

One idea: for byte-pair encoding (BPE) that is a matter of neighbours. A sequence is canonical iff every cut of its text
into pre-tokens is a border of two tokens, each token alone is what the merges make of its bytes, and each two tokens
side by side in one pre-token are what they make of theirs. (The merges inside two neighbours happen in the same order
in whatever text they stand, so the first merge of all that crosses a border would also happen to the two alone.) So a
state is the last token and a reading of the pre-tokens (`llmppl.tokens.pretokens`), and there are finitely many.

Words. A token is *stable* if the merges give it back from its bytes; two are *stable* side by side if they give back
both. The *spines* of a token are the parts that stood at its left and at its right edge while it was merged. A
tokenizer is *followed* if the rule above is all there is to it. One that is not normalises, say, or has another model
than BPE: a state then holds the tokens themselves, only what is certain is cut, and the tokenizer decides in the end.

Source for the rule of neighbours: "Language Models over Canonical Byte-Pair Encodings" (ICML 2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.exclusive import Turn, in_turn
from llmppl.masks.constraint import Bools, Ints, VocabularyLike
from llmppl.masks.trie import Numbered, trie_of, walk_state
from llmppl.tokens.pretokens import NotFollowed, PreTokens, Reading, Split

__all__ = ["Canonical", "CanonicalState", "Merges"]

NEVER = np.iinfo(np.int64).max                      # later than all merges
MASK_BYTES = 1 << 26                                # of masks kept, of rows, and of walks
READINGS = 1 << 16                                  # that are kept with their steps
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel itself
BLANK = "\u2581"                                    # how sentencepiece writes a blank
PREPEND = {"type": "Prepend", "prepend": BLANK}
REWRITE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}


class CanonicalState(NamedTuple):
    """A sequence of tokens, as far as what may follow depends on it."""

    reading: Reading
    last: int                                       # token; -1 where nothing can merge with the next one
    tokens: tuple[int, ...] | None                  # all of them; None if the tokenizer is followed


class Merges:
    """The merges of a BPE model: which tokens they leave as they are, alone and side by side.

    Parameters
    ----------
    sizes : sequence of V ints
        Of every token, characters.
    leaves : iterable of ids
        What merging starts from.
    merges : sequence of (left, right, product)
        Those with priority first.

    Attributes
    ----------
    stable : (V,) bool ndarray
    ascending : bool
        Whether each merge on the way to a token comes later in `merges` than those before it, as in all trained models.
        Where this is False, nothing else here holds.
    """

    def __init__(self, sizes: Sequence[int], leaves: Iterable[int], merges: Sequence[tuple[int, int, int]]) -> None:
        V = len(sizes)
        self._rank = {left * V + right: rank for rank, (left, right, _) in enumerate(merges)}
        self._time, self._left, self._right = [-1] * V, [-1] * V, [-1] * V  # of the last merge that makes a token
        self.ascending = True
        stable = [False] * V
        for leaf in leaves:
            stable[leaf] = True
        for rank in sorted(range(len(merges)), key=lambda rank: sizes[merges[rank][2]]):
            left, right, product = merges[rank]
            if stable[left] and stable[right] and self._first_crossing(left, right) == (left, right):
                self.ascending &= max(self._time[left], self._time[right]) < rank
                stable[product] = True
                self._time[product], self._left[product], self._right[product] = rank, left, right
        self.stable: Bools = np.array(stable)
        self._arrays: tuple[Ints, ...] | None = None

    def beside(self, left: int, right: int) -> bool:
        """Whether two tokens are stable side by side."""
        return bool(self.stable[left] and self.stable[right]) and next(self._crossings(left, right), None) is None

    def row(self, left: int) -> Bools:
        """(V,) bool ndarray: the tokens that are stable after `left`."""
        if not self.stable[left]:
            return np.zeros_like(self.stable)
        if self._arrays is None:
            self._arrays = self._spines()
        time, partner, rank, first, owner, end, begin = self._arrays
        out = self.stable.copy()
        part, gone = left, NEVER
        while part >= 0:                            # up the right spine of `left`, the latest first
            born = self._time[part]
            mine = slice(first[part], first[part + 1])
            sooner = rank[mine] < gone
            parts, ranks = partner[mine][sooner], rank[mine][sooner]
            together = time[parts] < gone
            parts, ranks = parts[together], ranks[together]
            number = begin[parts + 1] - begin[parts]
            total = np.cumsum(number)
            where = np.arange(total[-1] if total.size else 0) + np.repeat(begin[parts] - (total - number), number)
            out[owner[where[end[where] >= np.maximum(np.repeat(ranks, number), born)]]] = False
            part, gone = self._right[part], born
        return out

    def _crossings(self, left: int, right: int) -> Iterator[tuple[int, int]]:
        """The merges across the border of two stable tokens that come before those inside them, the latest first.

        Backwards in time, of the two parts at the border the one that was made later is taken apart. Of merges with
        equal priority the leftmost comes first: those in `left`, the one across the border, those in `right`.
        """
        V = len(self._time)
        gone_left = gone_right = NEVER              # when the parts at the border are merged away
        while True:
            rank = self._rank.get(left * V + right)
            if rank is not None and rank < gone_left and rank <= gone_right:
                yield left, right
            made_left, made_right = self._time[left], self._time[right]
            if made_left > made_right:
                left, gone_left = self._right[left], made_left
            elif made_right >= 0:
                right, gone_right = self._left[right], made_right
            else:
                return

    def _first_crossing(self, left: int, right: int) -> tuple[int, int] | None:
        found = None
        for found in self._crossings(left, right):  # noqa: B007
            pass
        return found

    def _spines(self) -> tuple[Ints, ...]:
        """All merges by their left part, and all left spines of stable tokens by their parts.

        Returns
        -------
        time : (V,) when a token is made
        partner, rank : right parts and ranks of the merges whose left part is p, at first[p] : first[p + 1]
        first : (V + 1,)
        owner, end : tokens on whose left spine p is, and until when it is there, at begin[p] : begin[p + 1]
        begin : (V + 1,)
        """
        V = len(self._time)
        time, left = np.array(self._time), np.array(self._left)
        keys = np.fromiter(self._rank.keys(), np.int64, len(self._rank))
        ranks = np.fromiter(self._rank.values(), np.int64, len(self._rank))
        by_left = np.argsort(keys)
        keys, ranks = keys[by_left], ranks[by_left]
        part = owner = np.flatnonzero(self.stable)
        end = np.full(part.size, NEVER)
        spines = []
        while part.size:
            spines.append((part, owner, end))
            above = left[part] >= 0
            part, owner, end = left[part[above]], owner[above], time[part[above]]
        parts, owners, ends = (np.concatenate(each) for each in zip(*spines, strict=True))
        by_part = np.argsort(parts, kind="stable")
        ids = np.arange(V + 1)
        first, begin = np.searchsorted(keys // V, ids), np.searchsorted(parts[by_part], ids)
        return time, keys % V, ranks, first, owners[by_part].astype(np.int32), ends[by_part], begin


class Canonical:
    """Which tokens may follow, so that the sequence can still become what a tokenizer gives for a text.

    A sequence of tokens is canonical if it is the encoding, without special tokens around it, of the text that it
    spells. None is that holds a special token, or whose bytes are not UTF-8. Ends of text have no part in this: a
    sequence may end where `accepts` says so. Beside a TokenIndex, both masks together say which tokens may follow.

    With `followed` there are finitely many states, nothing is encoded, and hardly a prefix passes that no canonical
    sequence has. Otherwise states hold their tokens, and `accepts` encodes their text. Copies are the object itself;
    later changes to the tokenizer are not seen.

    Parameters
    ----------
    tokenizer : a fast tokenizer of transformers, or a tokenizers.Tokenizer
    vocab : VocabularyLike
        The vocabulary of the same tokenizer.

    Attributes
    ----------
    start : CanonicalState
    followed : bool
    why : str
        Why the tokenizer is not followed; "" if it is.

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
            raise TypeError(
                f"Canonical needs a fast tokenizer of transformers or a tokenizers.Tokenizer, whose rules can be read, "
                f"not the {type(tokenizer).__name__}"
            )
        text = backend.to_str()
        self._tokenizer = type(backend).from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = backend.encode_special_tokens
        rules = json.loads(text)
        if rules["model"].get("dropout"):
            raise ValueError(
                f"the tokenizer leaves out merges at random (dropout={rules['model']['dropout']}), so that no encoding "
                "is canonical; set its model.dropout to None"
            )
        if backend.get_vocab_size() > len(vocab.tokens):
            raise ValueError(
                f"the vocabulary has {len(vocab.tokens)} tokens, but the tokenizer {backend.get_vocab_size()}: "
                "Canonical needs the vocabulary of the same tokenizer"
            )
        self.vocab = vocab
        never = {*vocab.eos_ids, *getattr(vocab, "special_ids", ())}
        self._spells = np.array([bool(data) and id not in never for id, data in enumerate(vocab.tokens)])
        added = {token["id"]: token for token in rules["added_tokens"]}
        self._added = np.array([id for id in added if self._spells[id]], int)  # they stand between two texts
        followed = _Followed([], None, frozenset(), b"", True, "")
        try:
            followed = _follow(rules, vocab, self._spells, added.keys())
        except NotFollowed as error:
            followed = followed._replace(why=str(error))
        self._merges = followed.merges
        matched = [token for token in added.values() if not (token["special"] and backend.encode_special_tokens)]
        certain = [
            token["content"].encode()
            for token in matched
            if not token["single_word"]
            and not (token["normalized"] and rules["normalizer"])
            and token["content"].lstrip(" ") == token["content"] != ""  # a decoder may strip a blank
        ]
        self.why = followed.why
        if self._added.size:
            self.why = self.why or "it has added tokens that are text"
        if len(certain) < len(matched):
            self.why = self.why or "it has added tokens that it finds in some texts only"
        if not all(self.is_canonical(self.encode(text)) for text in ("a a", "  a  ")):
            self.why = self.why or "its decoder does not give back its text"
        self._possible = self._spells.copy()
        self._possible[self._added] = False
        if self._merges is not None and not rules["model"]["ignore_merges"]:
            self._possible &= self._merges.stable
        self._pre = PreTokens(followed.splits, certain, followed.alphabet, followed.begin, followed.alone)
        self._trie = trie_of(vocab)
        self._graph = Numbered(self._pre)
        self._masks: dict[tuple[Reading, int], Bools] = {}
        self._rows: dict[int, Bools] = {}
        self._walks: dict[Reading, Bools] = {}
        self._turn = Turn()
        self.start = CanonicalState(self._pre.start, -1, () if self.why else None)

    def __repr__(self) -> str:
        return f"Canonical({len(self.vocab.tokens)} tokens, {'not followed' if self.why else 'followed'})"

    def __copy__(self) -> Canonical:
        return self

    def __deepcopy__(self, memo: object) -> Canonical:
        return self

    @property
    def followed(self) -> bool:
        """Whether the rule of neighbours is all there is to the tokenizer."""
        return not self.why

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in the tokenizer's own way, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def is_canonical(self, tokens: Iterable[int]) -> bool:
        """The definition: whether none of `tokens` is special, and encode(decode(tokens)) == tokens."""
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return all(self._spells[id] for id in ids) and self.encode(text) == ids

    def after(self, tokens: Iterable[int]) -> CanonicalState:
        """The state after tokens that are already there, such as those of a context.

        The sequence is then canonical with them before it, as one text; from `start`, by itself. What stands before
        the last special token (a BOS, an end of a turn) has no part in it.

        Raises
        ------
        ValueError
            If no canonical sequence begins with `tokens`; names the first place where that shows.
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
        """The state after `token`, or None if no canonical sequence begins so, as far as that can be told.

        Raises
        ------
        ValueError
            If `token` is not in the vocabulary.
        """
        reading, last, tokens = state
        if not 0 <= token < len(self._spells):
            raise ValueError(f"token {token} is not in this vocabulary, whose ids are 0 to {len(self._spells) - 1}")
        if tokens is not None:
            tokens = *tokens, int(token)
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
        """The tokens with which `advance` does not give None.

        Returns
        -------
        (V,) bool ndarray, read-only
            False at special tokens, those that end a text among them.
        """
        reading, last, _ = state
        mask = self._masks.get((reading, last))
        return mask if mask is not None else self._find(reading, last)

    @in_turn
    def _find(self, reading: Reading, last: int) -> Bools:
        row = self._rows.get(last)
        if row is None:
            row = self._possible if last < 0 or self._merges is None else self._merges.row(last)
            _keep(self._rows, last, row)
        mask = (self._walk(reading, True) & row) | self._walk(reading, False)
        mask[self._added] = self._pre.accepts(reading)
        _keep(self._masks, (reading, last), mask)
        return mask

    def _beside(self, last: int, token: int) -> bool:
        return last < 0 or self._merges is None or self._merges.beside(last, token)

    def _roomy(self) -> Numbered:
        if len(self._graph.states) > READINGS:
            self._graph = Numbered(self._pre)
        return self._graph

    @in_turn
    def _read(self, reading: Reading, data: bytes) -> tuple[Numbered, int]:
        """The number of what bytes make of a reading, 0 if they do not fit, and the graph that has numbered it."""
        graph = self._roomy()
        at = graph.number(reading)
        for byte in data:
            if at and graph.table.item(at, byte) < 0:
                graph.settle(np.array([at]), np.array([byte]))
            at = graph.table.item(at, byte) if at else 0
        return graph, at

    def _walk(self, reading: Reading, stable: bool) -> Bools:
        """(V,) bool: the tokens whose borders fit after `reading`, if they are `stable` after its last one."""
        opened = self._pre.open(reading, stable)
        if opened is None:
            return np.zeros_like(self._possible)
        mask = self._walks.get(opened)
        if mask is None:
            mask = np.zeros_like(self._possible)
            graph = self._roomy()
            mask[walk_state(graph, self._trie, graph.number(opened))[0]] = True
            mask &= self._possible
            _keep(self._walks, opened, mask)
        return mask


def _keep(memo: dict[Any, Bools], key: Any, mask: Bools) -> None:
    mask.flags.writeable = False
    if len(memo) * mask.size > MASK_BYTES:
        memo.clear()
    memo[key] = mask


class _Followed(NamedTuple):
    """What is certain about a tokenizer."""

    splits: list[Split]
    merges: Merges | None                           # None: any two tokens may stand side by side
    alphabet: frozenset[str]                        # characters that byte tokens do not spell
    begin: bytes                                    # of every text, b"" if anything
    alone: bool                                     # whether that may be all of it
    why: str                                        # this is not all


def _follow(rules: dict[str, Any], vocab: VocabularyLike, spells: Bools, added: Iterable[int]) -> _Followed:
    """Read the rules of a tokenizer, its JSON.

    Raises
    ------
    NotFollowed
        If nothing is certain.
    """
    model = rules["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise NotFollowed(f"its model is {model['type']}, or BPE that marks the parts of words")
    normalizers = _in_turn(rules["normalizer"], "normalizers")
    steps = _in_turn(rules["pre_tokenizer"], "pretokenizers")
    if REWRITE in normalizers[-1:]:                 # then there are no blanks left to split at
        steps = [step for step in steps if step.get("pattern") != {"String": " "}]
    splits = [split for step in steps for split in _splits(step)]
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    metaspace = any(step["type"] == "Metaspace" for step in steps)
    rewritten = metaspace or REWRITE in normalizers  # every blank is a BLANK when it comes to merging
    behind = any(step["type"] == "ByteLevel" for step in steps[:-1]) or (metaspace and len(steps) > 1)
    if behind or (rewritten and not metaspace and (splits or byte_level)):
        raise NotFollowed("its pre-tokenizers read what something else has written")
    pieces: dict[str, int] = model["vocab"]
    prepends = normalizers == [PREPEND, REWRITE]
    why = "" if prepends or normalizers in ([], [REWRITE]) else "it normalises its text"
    if rewritten and BLANK not in pieces:
        raise NotFollowed("it rewrites blanks as a character that it does not know")
    begin = b" " if prepends else b""
    if any(step.get("add_prefix_space") for step in steps):
        if len(steps) > 1:
            raise NotFollowed("it puts a blank before its pre-tokens")
        begin = b" "
    if metaspace and steps[0]["prepend_scheme"] != "never":
        why = why or "it puts a blank before some texts"

    letters = {piece: vocab.tokens[id] for piece, id in pieces.items() if len(piece) == 1}
    never = " " if rewritten else ""
    leaves = [pieces[c] for c, data in letters.items() if c != never and not (byte_level and len(data) > 1)]
    bytes_: list[int] = []                          # tokens for single bytes
    alphabet: frozenset[str] = frozenset()
    if model["byte_fallback"] and not byte_level:
        alphabet = frozenset(letter.replace(BLANK, " ") for letter in letters) | letters.keys()
        bytes_ = [id for piece, id in pieces.items() if re.fullmatch("<0x[0-9A-F]{2}>", piece)]
        leaves += [id for id in bytes_ if vocab.tokens[id].decode("utf-8", "replace") not in alphabet]
    if model["unk_token"] and len({*letters.values()} if byte_level else bytes_) < 256:
        why = why or "it has a token for unknown characters"
        leaves += [pieces[model["unk_token"]]] if model["unk_token"] in pieces else []
    apart = {*bytes_, *added, *np.flatnonzero(~spells).tolist()}
    for piece, id in pieces.items():
        if byte_level:
            spelled = b"".join(letters.get(char, b"?") for char in piece)
        else:
            spelled = (piece.replace(BLANK, " ") if rewritten else piece).encode()
        if id not in apart and vocab.tokens[id] != spelled:
            raise NotFollowed(f"its token {id}, {vocab.tokens[id]!r}, is not spelled like its piece {piece!r}")

    sizes = [0] * len(vocab.tokens)
    for piece, id in pieces.items():
        sizes[id] = len(piece)
    products = [(pieces[left], pieces[right], pieces[left + right]) for left, right in model["merges"]]
    merges = Merges(sizes, leaves, products)
    if not merges.ascending:
        raise NotFollowed("its merges are not in the order in which they can happen")
    if model["ignore_merges"] and any(not merges.stable[id] for id in pieces.values() if id not in apart):
        why = why or "it has tokens that no merges make"
    return _Followed(splits, merges, alphabet, begin, not prepends, why)


def _in_turn(rule: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """The rules that are applied one after the other."""
    found: list[dict[str, Any]] = [] if rule is None else rule[parts] if rule["type"] == "Sequence" else [rule]
    return found


def _splits(step: dict[str, Any]) -> list[Split]:
    """What one pre-tokenizer splits at."""
    from tokenizers import pre_tokenizers

    match step:
        case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}:
            return [Split(pattern)]
        case {"type": "Split", "behavior": "Isolated", "pattern": {"String": text}}:
            return [Split(re.sub(r"([^\w\s])", r"\\\1", text))]
        case {"type": "ByteLevel", "use_regex": use_regex}:
            return [Split(GPT2)] if use_regex else []
        case {"type": "Digits", "individual_digits": each}:
            return [Split(pre_tokenizers.Digits(individual_digits=True), repeated=not each)]
        case {"type": "Punctuation", "behavior": "Isolated"}:
            return [Split(pre_tokenizers.Punctuation("isolated"))]
        case {"type": "Metaspace", "replacement": replacement, "split": split} if replacement == BLANK:
            return [Split(" [^ ]*|[^ ]+")] if split else []
    raise NotFollowed(f"its pre-tokenizer {step['type']} is not followed: {json.dumps(step)}")
