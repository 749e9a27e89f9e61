"""Rules of a tokenizer, read from its JSON: its splits, its merges, and any doubt about other rules.

Supported is byte-pair encoding (BPE) of bytes, or of characters with a fallback to bytes. Some rules, such as a blank
before some texts, do not move the borders between tokens. They leave a *doubt*: the rules that were read are certain,
but they do not describe the tokenizer completely.
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

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the pattern of ByteLevel
BLANK = "\u2581"                                    # a blank as sentencepiece writes it
PREPEND = {"type": "Prepend", "prepend": BLANK}
REWRITE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}


class Rules(NamedTuple):
    """Certain facts about a tokenizer; the defaults state none."""

    splits: Sequence[Split] = ()
    merges: Merges | None = None                    # None: any two tokens may be neighbours
    alphabet: frozenset[str] = frozenset()          # characters that byte tokens do not spell
    begin: bytes = b""                              # of every text; b"" if texts may begin with anything
    alone: bool = True                              # True if `begin` can be a whole text
    doubt: str = ""                                 # a rule that these facts leave out; "" if there is none


def read_rules(rules: dict[str, Any], vocab: VocabularyLike, has_text: Bools, added: Iterable[int]) -> Rules:
    """Return the rules of a tokenizer from its JSON; raise UnsupportedTokenizer if nothing is certain.

    `has_text` is a (V,) bool ndarray: True at tokens that add bytes to a text. `added` lists the ids of added tokens.
    """
    model = rules["model"]
    marked = model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    _refuse_if_any({f"its model is {model['type']}, or BPE that marks the parts of words": marked})
    normalizers = _sequence(rules["normalizer"], "normalizers")
    steps = _sequence(rules["pre_tokenizer"], "pretokenizers")
    if REWRITE in normalizers[-1:]:                 # no blanks are left to split at
        steps = [step for step in steps if step.get("pattern") != {"String": " "}]
    splits = [split for step in steps for split in _splits(step)]
    types = [step["type"] for step in steps]
    pieces: dict[str, int] = model["vocab"]
    blank, begin = _read_blanks(normalizers, steps, bool(splits), pieces)

    letters = {piece: vocab.tokens[id] for piece, id in pieces.items() if len(piece) == 1}
    alphabet, byte_ids = frozenset[str](), list[int]()
    longest, num_bytes = 4, 0                       # bytes of a letter at most; bytes that have a token
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
    unchecked = {*byte_ids, *added, *np.flatnonzero(~has_text).tolist()}
    checked = {piece: id for piece, id in pieces.items() if id not in unchecked}
    _check_pieces(checked, vocab, letters if "ByteLevel" in types else None, blank)

    sizes = [0] * len(vocab.tokens)
    for piece, id in pieces.items():
        sizes[id] = len(piece)
    products = [(pieces[left], pieces[right], pieces[left + right]) for left, right in model["merges"]]
    merges = Merges(sizes, leaves, products)
    _refuse_if_any({"its merges are not in the order in which they can happen": not merges.ascending})
    doubt = first_reason({
        "it normalises its text": normalizers not in ([], [REWRITE], [PREPEND, REWRITE]),
        "it puts a blank before some texts": "Metaspace" in types and steps[0]["prepend_scheme"] != "never",
        "it has a token for unknown characters": unknown,
        "it has tokens that no merges make": model["ignore_merges"] and not merges.stable[list(checked.values())].all(),
    })
    return Rules(splits, merges, alphabet, begin, normalizers != [PREPEND, REWRITE], doubt)


def first_reason(reasons: dict[str, Any]) -> str:
    """Return the first reason that holds; "" if none does."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def _refuse_if_any(reasons: dict[str, Any]) -> None:
    if reason := first_reason(reasons):
        raise UnsupportedTokenizer(reason)


def _read_blanks(
    normalizers: list[dict[str, Any]], steps: list[dict[str, Any]], splits: bool, pieces: dict[str, int]
) -> tuple[str, bytes]:
    """Return the form of a blank when tokens are merged, BLANK or " ", and the bytes that begin every text."""
    types = [step["type"] for step in steps]
    metaspace, replaced, several = "Metaspace" in types, REWRITE in normalizers, len(steps) > 1
    rewritten, added = metaspace or replaced, any(step.get("add_prefix_space") for step in steps)
    reread = "ByteLevel" in types[:-1] or (metaspace and several)
    _refuse_if_any({
        "its pre-tokenizers read what something else has written":
            reread or (replaced and not metaspace and (splits or "ByteLevel" in types)),
        "it puts a blank before its pre-tokens": added and several,
        "it rewrites blanks as a character that it does not know": rewritten and BLANK not in pieces,
    })
    begins = added or normalizers == [PREPEND, REWRITE]
    return BLANK if rewritten else " ", b" " if begins else b""


def _check_pieces(pieces: dict[str, int], vocab: VocabularyLike, letters: dict[str, bytes] | None, blank: str) -> None:
    """Raise UnsupportedTokenizer if the bytes of a token differ from its piece, read by `letters` or as UTF-8."""
    for piece, id in pieces.items():
        spelled = piece.replace(blank, " ").encode()
        if letters is not None:
            spelled = b"".join([letters.get(char, b"?") for char in piece])
        if vocab.tokens[id] != spelled:
            raise UnsupportedTokenizer(f"its token {id}, {vocab.tokens[id]!r}, is not spelled like its piece {piece!r}")


def _sequence(rule: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """Return the rules that are applied one after the other."""
    return [] if rule is None else rule.get(parts, [rule])


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
    raise UnsupportedTokenizer(f"its pre-tokenizer {step['type']} is not supported: {json.dumps(step)}")
