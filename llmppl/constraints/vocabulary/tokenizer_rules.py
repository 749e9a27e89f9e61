"""The rules of a tokenizer, read from its JSON: what it splits at, what it merges, and what is in doubt.

Supported is byte-pair encoding (BPE), of bytes or of characters with bytes as a fallback. A rule that leaves the
borders between tokens as they are, such as a blank before some texts, leaves a *doubt*: what is read here is then
certain, but not all there is to the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.constraint import Bools, VocabularyLike
from llmppl.constraints.vocabulary.decoding import BYTE_PIECES
from llmppl.constraints.vocabulary.merges import Merges
from llmppl.constraints.vocabulary.patterns import Split, UnsupportedTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel itself
BLANK = "\u2581"                                    # how sentencepiece writes a blank
PREPEND = {"type": "Prepend", "prepend": BLANK}
REWRITE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}


class Rules(NamedTuple):
    """What is certain about a tokenizer; the defaults say nothing."""

    splits: Sequence[Split] = ()
    merges: Merges | None = None                    # None: any two tokens may stand side by side
    alphabet: frozenset[str] = frozenset()          # characters that byte tokens do not spell
    begin: bytes = b""                              # of every text, b"" if anything
    alone: bool = True                              # whether that may be all of it
    doubt: str = ""                                 # what else there is to the tokenizer, "" if nothing


def read_rules(rules: dict[str, Any], vocab: VocabularyLike, spells: Bools, added: Iterable[int]) -> Rules:
    """The rules of a tokenizer from its JSON; UnsupportedTokenizer if nothing is certain.

    `spells`, (V,) bool ndarray, are the tokens that add something to a text, `added` the ids of its added tokens.
    """
    model = rules["model"]
    marked = model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    _refuse({f"its model is {model['type']}, or BPE that marks the parts of words": marked})
    normalizers = _in_turn(rules["normalizer"], "normalizers")
    steps = _in_turn(rules["pre_tokenizer"], "pretokenizers")
    if REWRITE in normalizers[-1:]:                 # then there are no blanks left to split at
        steps = [step for step in steps if step.get("pattern") != {"String": " "}]
    splits = [split for step in steps for split in _splits(step)]
    types = [step["type"] for step in steps]
    pieces: dict[str, int] = model["vocab"]
    blank, begin = _read_blanks(normalizers, steps, bool(splits), pieces)

    letters = {piece: vocab.tokens[id] for piece, id in pieces.items() if len(piece) == 1}
    alphabet, byte_ids = frozenset[str](), list[int]()
    longest, num_bytes = 4, 0                       # bytes that a letter may stand for; that tokens are known for
    if "ByteLevel" in types:
        longest, num_bytes = 1, len(set(letters.values()))
    elif model["byte_fallback"]:
        alphabet = frozenset("".join(letters).replace(BLANK, " ")) | letters.keys()
        byte_ids = [pieces[piece] for piece in BYTE_PIECES & pieces.keys()]
        num_bytes = len(byte_ids)
    never = {" "} - {blank}
    leaves = [pieces[char] for char in letters.keys() - never if len(letters[char]) <= longest]
    leaves += [id for id in byte_ids if vocab.tokens[id].decode("utf-8", "replace") not in alphabet]
    unknown = model["unk_token"] if num_bytes < 256 else None
    if unknown in pieces:
        leaves.append(pieces[unknown])
    unchecked = {*byte_ids, *added, *np.flatnonzero(~spells).tolist()}
    checked = {piece: id for piece, id in pieces.items() if id not in unchecked}
    _check_pieces(checked, vocab, letters if "ByteLevel" in types else None, blank)

    sizes = [0] * len(vocab.tokens)
    for piece, id in pieces.items():
        sizes[id] = len(piece)
    products = [(pieces[left], pieces[right], pieces[left + right]) for left, right in model["merges"]]
    merges = Merges(sizes, leaves, products)
    _refuse({"its merges are not in the order in which they can happen": not merges.ascending})
    doubt = first_of({
        "it normalises its text": normalizers not in ([], [REWRITE], [PREPEND, REWRITE]),
        "it puts a blank before some texts": "Metaspace" in types and steps[0]["prepend_scheme"] != "never",
        "it has a token for unknown characters": unknown,
        "it has tokens that no merges make": model["ignore_merges"] and not merges.stable[list(checked.values())].all(),
    })
    return Rules(splits, merges, alphabet, begin, normalizers != [PREPEND, REWRITE], doubt)


def first_of(reasons: dict[str, Any]) -> str:
    """The first reason that holds, "" if none does."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def _refuse(reasons: dict[str, Any]) -> None:
    if reason := first_of(reasons):
        raise UnsupportedTokenizer(reason)


def _read_blanks(
    normalizers: list[dict[str, Any]], steps: list[dict[str, Any]], splits: bool, pieces: dict[str, int]
) -> tuple[str, bytes]:
    """What a blank is when it comes to merging, BLANK or " ", and what every text begins with."""
    types = [step["type"] for step in steps]
    metaspace, replaced, several = "Metaspace" in types, REWRITE in normalizers, len(steps) > 1
    rewritten, added = metaspace or replaced, any(step.get("add_prefix_space") for step in steps)
    read_again = "ByteLevel" in types[:-1] or (metaspace and several)
    _refuse({
        "its pre-tokenizers read what something else has written":
            read_again or (replaced and not metaspace and (splits or "ByteLevel" in types)),
        "it puts a blank before its pre-tokens": added and several,
        "it rewrites blanks as a character that it does not know": rewritten and BLANK not in pieces,
    })
    begins = added or normalizers == [PREPEND, REWRITE]
    return BLANK if rewritten else " ", b" " if begins else b""


def _check_pieces(pieces: dict[str, int], vocab: VocabularyLike, letters: dict[str, bytes] | None, blank: str) -> None:
    """Raise unless the bytes of tokens are what their pieces say: by their `letters`, or in UTF-8."""
    for piece, id in pieces.items():
        spelled = piece.replace(blank, " ").encode()
        if letters is not None:
            spelled = b"".join([letters.get(char, b"?") for char in piece])
        if vocab.tokens[id] != spelled:
            raise UnsupportedTokenizer(f"its token {id}, {vocab.tokens[id]!r}, is not spelled like its piece {piece!r}")


def _in_turn(rule: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """The rules that are applied one after the other."""
    return [] if rule is None else rule.get(parts, [rule])


def _splits(step: dict[str, Any]) -> list[Split]:
    """What one pre-tokenizer splits at."""
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
    raise UnsupportedTokenizer(f"its pre-tokenizer {step['type']} is not supported: {json.dumps(step)}")
