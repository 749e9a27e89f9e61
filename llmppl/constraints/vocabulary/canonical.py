"""Canonical encodings: the token sequence that a tokenizer itself produces for a text.

For byte-pair encoding (BPE), a sequence is canonical iff three conditions hold. Every cut of its text into pre-tokens
lies between two tokens; the merges rebuild each token from its own bytes; and they rebuild both of two neighbours
inside one pre-token (`Merges`). A state is therefore the last token together with the
state of the pre-tokeniser (`llmppl.constraints.vocabulary.pretokens`), and there are finitely many states.

A tokenizer is *supported* if these conditions describe it completely. Otherwise, for example if it normalises text,
states hold the tokens. Masks then exclude only tokens that are certainly wrong, and the tokenizer decides at the end.

The rules are read from the tokenizer's JSON. Some of them, such as a blank before some texts, do not move the borders
between tokens. They leave a *doubt*: the rules that were read are certain, but incomplete.

Source: "Language Models over Canonical Byte-Pair Encodings" (ICML 2025).
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.constraint import Bools, Ints, VocabularyLike, without_bytes
from llmppl.constraints.vocabulary.pretokens import (
    PreTokens,
    PreTokenState,
    Split,
    UnsupportedTokenizer,
)
from llmppl.constraints.vocabulary.trie import ranges, trie_of
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.constraints.vocabulary.vocabulary import BYTE_PIECES
from llmppl.support.graphs import Memo
from llmppl.support.locks import Lock, cached_property, locked
from llmppl.support.shared import Shared

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the pattern of ByteLevel
BLANK = "\u2581"  # a blank as sentencepiece writes it
PREPEND = {"type": "Prepend", "prepend": BLANK}
REWRITE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
NEVER = np.iinfo(np.int64).max  # later than all merges


class Merges:
    """Merges of a BPE model, with the tokens and pairs that are stable under them: that they rebuild from their bytes.

    The *left spine* of a token lists the parts at its left edge while it was merged; the *right spine* those at its
    right edge. Merges inside two neighbours happen in the same order in every text, so the first merge across a border
    also happens to the pair alone. It is therefore enough to check neighbours.

    Parameters
    ----------
    sizes : V ints, the number of characters of every token
    leaves : ids that merging starts from
    merges : sequence of (left, right, product), highest priority first

    Attributes
    ----------
    stable : (V,) bool ndarray
    ascending : bool
        True if every token is built by merges in the order of `merges`, as in all trained models. If False, the other
        results are invalid.
    """

    def __init__(
        self, sizes: Sequence[int], leaves: Iterable[int], merges: Sequence[tuple[int, int, int]]
    ) -> None:
        V = len(sizes)
        self._rank = {left * V + right: rank for rank, (left, right, _) in enumerate(merges)}
        # last merge of each token
        self._time = [-1] * V
        self._left = [-1] * V
        self._right = [-1] * V
        self.ascending = True
        stable = [False] * V
        for leaf in leaves:
            stable[leaf] = True
        by_size = sorted(range(len(merges)), key=lambda rank: sizes[merges[rank][2]])
        for rank in by_size:
            left, right, product = merges[rank]
            if not (stable[left] and stable[right]):
                continue
            crossings = list(self._crossings(left, right))
            if crossings[-1:] == [(left, right)]:
                self.ascending &= max(self._time[left], self._time[right]) < rank
                stable[product] = True
                self._time[product] = rank
                self._left[product] = left
                self._right[product] = right
        self.stable: Bools = np.array(stable)

    def is_stable_pair(self, left: int, right: int) -> bool:
        """Return True if the merges rebuild both tokens from their joined bytes."""
        if not (self.stable[left] and self.stable[right]):
            return False
        return not any(self._crossings(left, right))

    def stable_after(self, left: int) -> Bools:
        """Return the tokens that form a stable pair with `left` before them: (V,) bool ndarray."""
        if not self.stable[left]:
            return np.zeros_like(self.stable)
        time, partner, rank, first, owner, end, begin = self._arrays
        out = self.stable.copy()
        part = left
        merged = NEVER
        while part >= 0:  # along the right spine of `left`, the latest part first
            made = self._time[part]
            mine = slice(first[part], first[part + 1])
            sooner = rank[mine] < merged
            parts = partner[mine][sooner]
            ranks = rank[mine][sooner]
            together = time[parts] < merged
            parts = parts[together]
            ranks = ranks[together]
            number = begin[parts + 1] - begin[parts]
            where = ranges(begin[parts], number)
            since = np.maximum(np.repeat(ranks, number), made)
            out[owner[where[end[where] >= since]]] = False
            part = self._right[part]
            merged = made
        return out

    def _crossings(self, left: int, right: int) -> Iterator[tuple[int, int]]:
        """Yield the merges that would cross the border of two stable tokens before merges inside them, latest first.

        The loop goes back in time: it takes apart the later one of the two parts at the border. Among merges of equal
        priority the leftmost comes first: one inside `left`, then one across the border, then one inside `right`.
        """
        V = len(self._time)
        # the times at which the parts at the border are merged
        merged_left = NEVER
        merged_right = NEVER
        while True:
            rank = self._rank.get(left * V + right)
            if rank is not None and rank < merged_left and rank <= merged_right:
                yield left, right
            made_left = self._time[left]
            made_right = self._time[right]
            if made_left > made_right:
                left = self._right[left]
                merged_left = made_left
            elif made_right >= 0:
                right = self._left[right]
                merged_right = made_right
            else:
                return

    @cached_property
    def _arrays(self) -> tuple[Ints, ...]:
        """The merges sorted by their left part, and the left spines of stable tokens sorted by their parts.

        Returns
        -------
        time : (V,), the rank of the merge that makes each token
        partner, rank : right parts and ranks of the merges with left part p, at first[p] : first[p + 1]
        first : (V + 1,)
        owner, end : tokens with p on their left spine, and the rank at which it is merged, at begin[p] : begin[p + 1]
        begin : (V + 1,)
        """
        V = len(self._time)
        time = np.array(self._time)
        left = np.array(self._left)
        size = len(self._rank)
        keys = np.fromiter(self._rank.keys(), np.int64, size)
        ranks = np.fromiter(self._rank.values(), np.int64, size)
        by_left = np.argsort(keys)
        keys = keys[by_left]
        ranks = ranks[by_left]
        part = np.flatnonzero(self.stable)
        owner = part
        end = np.full(part.size, NEVER)
        spines = []
        while part.size:
            spines.append((part, owner, end))
            above = left[part] >= 0
            owner = owner[above]
            end = time[part[above]]
            part = left[part[above]]
        columns = zip(*spines, strict=True)
        parts, owners, ends = map(np.concatenate, columns)
        by_part = np.argsort(parts, kind="stable")
        owners = owners[by_part].astype(np.int32)
        ids = np.arange(V + 1)
        lefts = keys // V
        first = np.searchsorted(lefts, ids)
        begin = np.searchsorted(parts[by_part], ids)
        return time, keys % V, ranks, first, owners, ends[by_part], begin


class Rules(NamedTuple):
    """Certain facts about a tokenizer; the defaults state none."""

    splits: Sequence[Split] = ()
    merges: Merges | None = None  # None: any two tokens may be neighbours
    alphabet: frozenset[str] = frozenset()  # characters that byte tokens do not spell
    begin: bytes = b""  # of every text; b"" if texts may begin with anything
    alone: bool = True  # True if `begin` can be a whole text
    doubts: Sequence[str] = ()  # rules that these facts leave out


def read_rules(
    rules: dict[str, Any], vocab: VocabularyLike, has_text: Bools, added: Iterable[int]
) -> Rules:
    """Return the rules of a tokenizer from its JSON; raise UnsupportedTokenizer if nothing is certain.

    `has_text` is a (V,) bool ndarray: True at tokens that add bytes to a text. `added` lists the ids of added tokens.
    """
    model = rules["model"]
    kind = model["type"]
    if kind != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise UnsupportedTokenizer(f"its model is {kind}, or BPE that marks the parts of words")
    normalizers = _sequence(rules["normalizer"], "normalizers")
    steps = _sequence(rules["pre_tokenizer"], "pretokenizers")
    if REWRITE in normalizers[-1:]:  # no blanks are left to split at
        steps = [step for step in steps if step.get("pattern") != {"String": " "}]
    splits = list[Split]()
    for step in steps:
        splits += _splits(step)
    types = [step["type"] for step in steps]
    pieces = model["vocab"]
    blank, begin = _read_blanks(normalizers, steps, bool(splits), pieces)

    letters = {piece: vocab.tokens[id] for piece, id in pieces.items() if len(piece) == 1}
    alphabet = frozenset[str]()
    byte_ids = []
    longest = 4  # bytes of a letter, at most
    num_bytes = 0  # that have a token
    if "ByteLevel" in types:
        longest = 1
        num_bytes = len(set(letters.values()))
    elif model["byte_fallback"]:
        spelled = "".join(letters).replace(BLANK, " ")
        alphabet = frozenset(spelled) | letters.keys()
        byte_ids = [pieces[piece] for piece in BYTE_PIECES & pieces.keys()]
        num_bytes = len(byte_ids)
    never = {" "} - {blank}
    leaves = []
    for char in letters.keys() - never:
        if len(letters[char]) <= longest:
            leaves.append(pieces[char])
    for id in byte_ids:
        if vocab.tokens[id].decode("utf-8", "replace") not in alphabet:
            leaves.append(id)
    unknown = model["unk_token"] if num_bytes < 256 else None
    if unknown in pieces:
        leaves.append(pieces[unknown])
    unchecked = {*byte_ids, *added, *np.flatnonzero(~has_text).tolist()}
    checked = {piece: id for piece, id in pieces.items() if id not in unchecked}
    _check_pieces(checked, vocab, letters if "ByteLevel" in types else None, blank)

    sizes = [0] * len(vocab.tokens)
    for piece, id in pieces.items():
        sizes[id] = len(piece)
    products = []
    for left, right in model["merges"]:
        products.append((pieces[left], pieces[right], pieces[left + right]))
    merges = Merges(sizes, leaves, products)
    if not merges.ascending:
        raise UnsupportedTokenizer("its merges are not in the order in which they can happen")
    doubts = list[str]()
    if normalizers not in ([], [REWRITE], [PREPEND, REWRITE]):
        doubts.append("it normalises its text")
    if "Metaspace" in types and steps[0]["prepend_scheme"] != "never":
        doubts.append("it puts a blank before some texts")
    if unknown:
        doubts.append("it has a token for unknown characters")
    if model["ignore_merges"] and not merges.stable[list(checked.values())].all():
        doubts.append("it has tokens that no merges make")
    return Rules(splits, merges, alphabet, begin, normalizers != [PREPEND, REWRITE], doubts)


def _read_blanks(
    normalizers: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    splits: bool,
    pieces: dict[str, int],
) -> tuple[str, bytes]:
    """Return the form of a blank when tokens are merged, BLANK or " ", and the bytes that begin every text."""
    types = [step["type"] for step in steps]
    metaspace = "Metaspace" in types
    replaced = REWRITE in normalizers
    several = len(steps) > 1
    rewritten = metaspace or replaced
    added = any(step.get("add_prefix_space") for step in steps)
    reread = "ByteLevel" in types[:-1] or (metaspace and several)
    if replaced and not metaspace:
        reread |= splits or "ByteLevel" in types
    if reread:
        raise UnsupportedTokenizer("its pre-tokenizers read what something else has written")
    if added and several:
        raise UnsupportedTokenizer("it puts a blank before its pre-tokens")
    if rewritten and BLANK not in pieces:
        raise UnsupportedTokenizer("it rewrites blanks as a character that it does not know")
    begins = added or normalizers == [PREPEND, REWRITE]
    return BLANK if rewritten else " ", b" " if begins else b""


def _check_pieces(
    pieces: dict[str, int], vocab: VocabularyLike, letters: dict[str, bytes] | None, blank: str
) -> None:
    """Raise UnsupportedTokenizer if the bytes of a token differ from its piece, read by `letters` or as UTF-8."""
    for piece, id in pieces.items():
        spelled = piece.replace(blank, " ").encode()
        if letters is not None:
            spelled = b"".join([letters.get(char, b"?") for char in piece])
        if vocab.tokens[id] != spelled:
            token = f"its token {id}, {vocab.tokens[id]!r},"
            raise UnsupportedTokenizer(f"{token} is not spelled like its piece {piece!r}")


def _sequence(rule: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """Return the rules that are applied one after the other."""
    if rule is None:
        return []
    found: list[dict[str, Any]] = rule.get(parts, [rule])
    return found


def _splits(step: dict[str, Any]) -> list[Split]:
    """Return the splits of one pre-tokenizer."""
    from tokenizers import pre_tokenizers

    match step:
        case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}:
            return [Split(pattern)]
        case {"type": "Split", "behavior": "Isolated", "pattern": {"String": text}}:
            return [Split(re.sub(r"([^\w\s])", r"\\\1", text))]
        case {"type": "ByteLevel", "use_regex": True}:
            return [Split(GPT2)]
        case {"type": "Digits", "individual_digits": each}:
            return [Split(pre_tokenizers.Digits(individual_digits=True), repeated=not each)]
        case {"type": "Punctuation", "behavior": "Isolated"}:
            return [Split(pre_tokenizers.Punctuation("isolated"))]
        case {"type": "Metaspace", "replacement": "\u2581", "split": True}:
            return [Split(" [^ ]*|[^ ]+")]
        case {"type": "ByteLevel"} | {"type": "Metaspace", "replacement": "\u2581"}:
            return []
    raise UnsupportedTokenizer(
        f"its pre-tokenizer {step['type']} is not supported: {json.dumps(step)}"
    )


MASK_BYTES = 1 << 26  # memory for each of the three tables of masks
SAMPLES = "a a", "  a  "  # texts that a decoder must reproduce
MAX_STATES = 1 << 16  # states of the pre-tokeniser whose steps are kept


class CanonicalState(NamedTuple):
    """State after a sequence of tokens: everything that determines which tokens may follow.

    Examples
    --------
    >>> canonical = Canonical(lm.tokenizer, lm.vocab)
    >>> state = canonical.after(canonical.encode(" together"))
    >>> lm.vocab[state.last], canonical.accepts(state)
    (Token(799, ' together'), True)
    """

    pretokens: PreTokenState
    last: int  # the last token; -1 if it cannot merge with the next one
    tokens: tuple[int, ...] | None  # the whole sequence; None if the tokenizer is supported


class Canonical(Shared):
    """Masks of the tokens that keep a sequence canonical.

    A sequence of tokens is canonical if it is the tokenizer's encoding, without special tokens around it, of the text
    that it spells. A sequence with a special token, or whose bytes are not UTF-8, is not canonical. Ends of text are
    not covered: a sequence may end where `accepts` returns True. Combine the mask with that of a TokenIndex.

    If the tokenizer is supported, the states are finitely many, nothing is encoded, and few prefixes pass that no
    canonical sequence has. Otherwise states hold their tokens, and `accepts` encodes their text; `reason` says why. The
    object copies the tokenizer and does not see later changes to it.

    Parameters
    ----------
    tokenizer : a fast tokenizer of transformers, or a tokenizers.Tokenizer; else a TypeError
    vocab : VocabularyLike, of the same tokenizer

    Raises
    ------
    ValueError
        If the tokenizer drops merges at random, so that a text has several encodings; if it has more tokens than
        `vocab`.

    Examples
    --------
    >>> canonical = Canonical(lm.tokenizer, lm.vocab)
    >>> to, gether = lm.vocab.spell(b" to") + lm.vocab.spell(b"gether")
    >>> canonical.is_canonical([to, gether]), canonical.encode(" together")
    (False, [799])
    >>> canonical.advance(canonical.after([to]), gether) is None
    True
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
        config = json.loads(text)
        if config["model"].get("dropout"):
            raise ValueError(
                f"the tokenizer leaves out merges at random (dropout={config['model']['dropout']}), so that no "
                "encoding is canonical; set its model.dropout to None"
            )
        if backend.get_vocab_size() > len(vocab.tokens):
            raise ValueError(
                f"the vocabulary has {len(vocab.tokens)} tokens, but the tokenizer {backend.get_vocab_size()}: "
                "Canonical needs the vocabulary of the same tokenizer"
            )
        self.vocab = vocab
        self._has_text: Bools = np.array(list(map(bool, vocab.tokens)))
        self._has_text[list(without_bytes(vocab))] = False
        added = np.array([token["id"] for token in config["added_tokens"]], int)
        self._added = added[self._has_text[added]]  # each separates the texts before and after it
        try:
            rules = read_rules(config, vocab, self._has_text, added.tolist())
        except UnsupportedTokenizer as error:
            rules = Rules(doubts=[str(error)])
        literals = []
        for token in config["added_tokens"]:
            if not (token["special"] and backend.encode_special_tokens):
                literals.append(_literal(token, config["normalizer"]))
        reasons = list(rules.doubts)
        if self._added.size:
            reasons.append("it has added tokens that are text")
        if None in literals:
            reasons.append("it has added tokens that it finds in some texts only")
        if not all(map(self.is_canonical, map(self.encode, SAMPLES))):
            reasons.append("its decoder does not give back its text")
        self.reason = next(iter(reasons), "")
        self._merges = rules.merges
        self._possible = self._has_text.copy()
        self._possible[self._added] = False
        if self._merges is not None and not config["model"]["ignore_merges"]:
            self._possible &= self._merges.stable
        self._pre = PreTokens(
            rules.splits, filter(None, literals), rules.alphabet, rules.begin, rules.alone
        )
        self._trie = trie_of(vocab)
        self._graph = MemoGraph(self._pre)
        most = MASK_BYTES // len(vocab.tokens)
        # (state of the pre-tokeniser, last token) -> mask
        self._masks = Memo(self._find_mask, most)
        # last token -> tokens that are stable after it
        self._stable_masks = Memo(self._find_stable, most)
        # state of the pre-tokeniser -> tokens without a cut inside
        self._uncut_masks = Memo(self._find_uncut, most)
        self._lock = Lock()
        tokens = () if self.reason else None
        self.start = CanonicalState(self._pre.start, -1, tokens)

    def __repr__(self) -> str:
        return f"Canonical({len(self.vocab.tokens)} tokens, {'supported' if self.supported else 'not supported'})"

    @property
    def supported(self) -> bool:
        """True if the three conditions describe the tokenizer completely."""
        return not self.reason

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's own encoding of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def is_canonical(self, tokens: Iterable[int]) -> bool:
        """Check the definition: none of `tokens` is special, and encode(decode(tokens)) == tokens."""
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if not self._has_text[ids].all():
            return False
        return self.encode(text) == ids

    def after(self, tokens: Iterable[int]) -> CanonicalState:
        """Return the state after tokens that are already there, such as those of a context.

        The sequence is then canonical together with `tokens`, as one text; from `start`, by itself. Tokens up to the
        last special one (a BOS, an end of a turn) are ignored. If no canonical sequence begins with `tokens`, a
        ValueError names the first place where that shows.
        """
        ids = [int(token) for token in tokens]
        begin = 0
        for at, id in enumerate(ids):
            if not self._has_text[id]:
                begin = at + 1
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
        """Return True if the sequence is canonical when it ends in `state`."""
        if state.tokens is None:
            return self._pre.accepts(state.pretokens)
        return self.is_canonical(state.tokens)

    def advance(self, state: CanonicalState, token: int) -> CanonicalState | None:
        """Return the state after a token of the vocabulary, or None if no canonical sequence is known to begin so."""
        pretokens, last, tokens = state
        if not 0 <= token < len(self._has_text):
            raise ValueError(
                f"token {token} is not in this vocabulary, whose ids are 0 to {len(self._has_text) - 1}"
            )
        tokens = None if tokens is None else (*tokens, int(token))
        if not self._possible[token]:
            if token in self._added and self._pre.accepts(pretokens):
                return CanonicalState(self._pre.start, -1, tokens)
            return None
        stable = last < 0 or self._merges is None or self._merges.is_stable_pair(last, token)
        after = self._pre.open(pretokens, stable)
        for byte in self.vocab.tokens[token]:
            if after is None:
                return None
            after = self._pre.step(after, byte)
        return after and CanonicalState(after, int(token), tokens)

    def mask(self, state: CanonicalState) -> Bools:
        """Return the tokens for which `advance` does not return None.

        (V,) bool ndarray, read-only; False at special tokens, ends of text included.
        """
        return self._masks[state.pretokens, state.last]

    @locked
    def _find_mask(self, key: tuple[PreTokenState, int]) -> Bools:
        pretokens, last = key
        mask = np.zeros_like(self._possible)
        cut = self._pre.open(pretokens, False)
        if cut is not None:
            mask |= self._uncut_masks[cut]
        opened = self._pre.open(pretokens, True)
        if opened is not None:
            mask |= self._uncut_masks[opened] & self._stable_masks[last]
        mask[self._added] = self._pre.accepts(pretokens)
        mask.flags.writeable = False
        return mask

    def _find_stable(self, last: int) -> Bools:
        if last < 0 or self._merges is None:
            return self._possible
        return self._merges.stable_after(last)

    def _find_uncut(self, opened: PreTokenState) -> Bools:
        mask = np.zeros_like(self._possible)
        self._graph = self._graph.renewed(MAX_STATES)
        number = self._graph.number(opened)
        ids, _ = walk_state(self._graph, self._trie, number)
        mask[ids] = True
        return mask & self._possible


def _literal(token: dict[str, Any], normalizer: Any) -> bytes | None:
    """Return the text of an added token if the tokenizer finds the token in every text that contains it, else None."""
    content: str = token["content"]
    changed = token["normalized"] and normalizer
    if (
        token["single_word"] or changed or content[:1] in ("", " ")
    ):  # a decoder may strip a leading blank
        return None
    return content.encode()
