"""Recognizers that threads share, and random walks through their masks."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from lark.indenter import Indenter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.grammars import JSON
from llmppl import Categorical, Grammar, JsonSchema, Regex, TokenIndex, Vocabulary
from llmppl.constraints import Canonical
from llmppl.constraints.automata.determinise import Leftmost
from llmppl.constraints.automata.regex import parse

PIECES = [b"ab", b"ba", b"aab", b"abc", b'"a', b'":', b'",', b"1,", b"[1", b"]]", b"}}", b"x1", b"  ", b"\n ", b"x\n",
          b"12", b"if", b"fi", b"; ", b"e1"]  # fmt: skip
VOCAB = Vocabulary([*(b"%c" % byte for byte in range(9, 127)), *PIECES, b""], eos_ids=[118 + len(PIECES)])


class Brackets:
    """A recognizer without a table: brackets of two kinds, at most five deep, with a count of letters modulo 7."""

    start = ("", 0)

    def step(self, state, byte):
        open, letters = state
        if byte in b"([" and len(open) < 5:
            return open + chr(byte), letters
        if byte in b")]":
            return (open[:-1], letters) if open and open[-1] == {41: "(", 93: "["}[byte] else None
        return (open, (letters + 1) % 7) if byte in b"ab" else None

    def accepts(self, state):
        return not state[0]


class Blocks(Indenter):
    NL_type, INDENT_type, DEDENT_type, tab_len = "_NL", "_INDENT", "_DEDENT", 4
    OPEN_PAREN_types, CLOSE_PAREN_types = ["LPAR"], ["RPAR"]


INDENTED = r"""
start: (line | block)+
line: NAME [LPAR NAME RPAR] _NL
block: "if" NAME ":" _NL _INDENT (line | block)+ _DEDENT
NAME: /[a-z]+/
LPAR: "("
RPAR: ")"
_NL: /(\r?\n[\t ]*)+/
%ignore /[\t \f]+/
%declare _INDENT _DEDENT
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["a", "ab"]}}},
    "required": ["a"],
    "additionalProperties": False,
}


def tokenizer():
    letters = pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(letters), "ab", "aab", "ba", "12", "Ġa", "Ġab"]
    merges = [("a", "b"), ("a", "ab"), ("b", "a"), ("1", "2"), ("Ġ", "a"), ("Ġ", "ab")]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


TOKENIZER = tokenizer()
ITS_VOCAB = Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZER))


class Case(NamedTuple):
    """`make()` returns the shared object; `walk(shared, rng)` returns all its answers along a random walk."""

    make: Callable[[], Any]
    walk: Callable[[Any, np.random.Generator], list[Any]]


def along(shared, rng, length=10):
    """Return masks, acceptance and wanted bytes along a random walk, and the state at its end."""
    state, seen = shared.start, []
    for _ in range(length):
        mask = shared.mask(state)
        seen += [mask.tobytes(), shared.accepts(state), shared.allowed(state).tolist(), shared.next_bytes(state)]
        if not mask.any():
            break
        state = shared.advance(state, int(rng.choice(np.flatnonzero(mask))))
    return seen


def far(shared, rng, length=4):
    """Return distances and limited masks too, from a state that no tokens need to spell."""
    seen = along(shared, rng, length)
    state = shared.after(b"ab" if rng.random() < 0.5 else b"")
    for n in (2, 3):
        seen += [shared.tokens_to_accept(state), shared.mask_within(state, n).tobytes()]
        if len(allowed := shared.allowed(state)):
            state = shared.advance(state, int(rng.choice(allowed)))
    return seen


def whole(shared, rng):
    built = shared.build_all()
    seen = [len(built), built.accepting.sum()]
    for row in rng.integers(0, len(built), 2).tolist():     # rows are numbered as the states are met
        tokens, targets = built.row(row)
        after = [shared.advance(built.states[row], token) for token in tokens.tolist()]
        seen.append(after == [built.states[target] for target in targets.tolist()])
    return seen + along(shared, rng)


def canonically(shared, rng, length=8):
    state, seen = shared.start, []
    for _ in range(length):
        mask = shared.mask(state)
        seen += [mask.tobytes(), shared.accepts(state)]
        token = int(rng.choice(np.flatnonzero(mask)))
        other = int(rng.integers(len(mask)))
        seen.append(shared.advance(state, other) is None)
        state = shared.advance(state, token)
    return [*seen, state]


def counted(shared, rng):
    n = int(rng.integers(3, 9))
    texts = list(itertools.islice(shared.enumerate(), n))
    return [shared.count(n), shared.count(n + 2), texts, texts[-1] in shared]


def matched(shared, rng):
    text, state, seen = bytes(rng.choice(list(b"abc"), 12).tolist()), shared.start, []
    for byte in text:
        state = shared.step(state, byte)
        if not state:
            break
        seen += [shared.matched(state), shared.at_end(state)]
    return seen


def dists():
    dist = Categorical({value: (value + 1) / 210 for value in range(20)})
    return [dist.tempered(2.0), dist.top_k(7).tempered(0.5), dist.top_p(0.5)]


def weighed(shared, rng):
    i = int(rng.integers(3))
    return [shared[i].log_total(), shared[i].log_probs().tobytes(), shared[i].sample(rng), shared[i].log_prob(19)]


CASES = {
    "regex": Case(lambda: Regex("(a|b)*a[ab]{5}(abc|x1)*").index(VOCAB), far),
    "whole": Case(lambda: Regex("[ab]*a[ab]{4}").index(VOCAB), whole),
    "brackets": Case(lambda: TokenIndex(Brackets(), VOCAB), far),
    "json": Case(lambda: Grammar(JSON).index(VOCAB), along),
    "indented": Case(lambda: Grammar(INDENTED, postlex=Blocks()).index(VOCAB), along),
    "composed": Case(
        lambda: (Regex("[ab]*") + JsonSchema(SCHEMA) + Grammar(JSON)).star().index(VOCAB), far
    ),
    "both": Case(lambda: (Grammar('start: "a" start "b" |') & Regex(".{2,9}")).index(VOCAB), along),
    "schema": Case(lambda: JsonSchema(SCHEMA).index(VOCAB), along),
    "canonical": Case(lambda: Canonical(TOKENIZER, ITS_VOCAB), canonically),
    "counts": Case(lambda: Regex("(a|ba*b|é)*"), counted),
    "leftmost": Case(lambda: Leftmost(parse("(ab|a(?=bc)|b*?c)+")), matched),
    "distributions": Case(dists, weighed),
}


def walks(case, shared, seeds):
    return {seed: case.walk(shared, np.random.default_rng(seed)) for seed in seeds}
