"""Masks in threads and after interrupts: whatever happened to an index before, its answers are those of a fresh one."""

import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.common import HANG, ROOT, repetitions
from helpers.fire import Interrupt, impatience, in_threads
from lark.indenter import Indenter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmppl import Categorical, Grammar, JsonSchema, Regex, TokenIndex, Vocabulary
from llmppl.constraints import Canonical
from llmppl.constraints.automata.lazy_dfa import Leftmost
from llmppl.constraints.automata.regex import parse
from llmppl.constraints.json import schema as json_schema
from llmppl.constraints.lark import grammar
from llmppl.constraints.masks import index, mask_store
from llmppl.constraints.vocabulary import canonical
from llmppl.constraints.vocabulary.trie_walk import MemoGraph

PIECES = [b"ab", b"ba", b"aab", b"abc", b'"a', b'":', b'",', b"1,", b"[1", b"]]", b"}}", b"x1", b"  ", b"\n ", b"x\n",
          b"12", b"if", b"fi", b"; ", b"e1"]  # fmt: skip
VOCAB = Vocabulary([*(b"%c" % byte for byte in range(9, 127)), *PIECES, b""], eos_ids=[118 + len(PIECES)])
FILES = {str(path) for room in ("constraints", "distributions") for path in (ROOT / "llmppl" / room).rglob("*.py")}


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


JSON = r"""
start: value
value: "{" [member ("," member)*] "}" | "[" [value ("," value)*] "]" | STRING | NUMBER
member: STRING ":" value
STRING: /"[a-z]*"/
NUMBER: /-?[0-9]+(\.[0-9]+)?(e[0-9]+)?/
%ignore " "
"""
BARE = r"""
start: item+
item: "if" NAME body | NAME "=" NUMBER ";"
body: "{" item* "}"
NAME: /(?!if)[a-z]+(?![a-z])/
NUMBER: /[0-9]+(?!\.)|[0-9]+\.[0-9]+/
%ignore " "
"""
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
    """`make()` gives what is shared, `walk(shared, rng)` all that it says along a random walk."""

    make: Callable[[], Any]
    walk: Callable[[Any, np.random.Generator], list[Any]]


def along(shared, rng, length=10):
    """Masks, acceptance and wanted bytes along a random walk, and the state at its end."""
    state, seen = shared.start, []
    for _ in range(length):
        mask = shared.mask(state)
        seen += [mask.tobytes(), shared.accepts(state), shared.allowed(state).tolist(), shared.next_bytes(state)]
        if not mask.any():
            break
        state = shared.advance(state, int(rng.choice(np.flatnonzero(mask))))
    return seen


def far(shared, rng, length=4):
    """Distances and limited masks too, from where a text leads that no tokens need to spell."""
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
    text = shared.sample(np.random.default_rng(n), n + 3)
    return [shared.count(n), shared.count(n + 2), text, text in shared, shared.sample(rng, n)]


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
    "guards": Case(lambda: Regex(r"(a|b|\bx1\b|  )*").index(VOCAB), far),
    "whole": Case(lambda: Regex("[ab]*a[ab]{4}").index(VOCAB), whole),
    "brackets": Case(lambda: TokenIndex(Brackets(), VOCAB), far),
    "json": Case(lambda: Grammar(JSON).index(VOCAB), along),
    "bare": Case(lambda: Grammar(BARE).index(VOCAB), along),
    "indented": Case(lambda: Grammar(INDENTED, postlex=Blocks()).index(VOCAB), along),
    "schema": Case(lambda: JsonSchema(SCHEMA).index(VOCAB), along),
    "canonical": Case(lambda: Canonical(TOKENIZER, ITS_VOCAB), canonically),
    "counts": Case(lambda: Regex("(a|ba*b|é)*"), counted),
    "leftmost": Case(lambda: Leftmost(parse("(ab|a(?=bc)|b*?c)+")), matched),
    "distributions": Case(dists, weighed),
}


def walks(case, shared, seeds):
    return {seed: case.walk(shared, np.random.default_rng(seed)) for seed in seeds}


@pytest.fixture
def impatient():
    with impatience():
        yield


@pytest.fixture(params=["roomy", "tight"])
def room(request, monkeypatch):
    """Tight: so little is kept that all is forgotten again and again."""
    if request.param == "tight":
        for module, name, most in [
            (mask_store, "MASK_BYTES", 300), (index, "MAX_STEPS", 8), (MemoGraph, "room", 8),
            (canonical, "MASK_BYTES", 1500), (canonical, "MAX_STATES", 6), (grammar, "MAX_STATES", 6),
            (grammar, "MAX_MASKS", 6), (json_schema, "MATCHERS", 3),
        ]:  # fmt: skip
            monkeypatch.setattr(module, name, most)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_threads_that_share_an_index_are_told_what_each_would_be_told_alone(impatient, room, name):
    case, seeds = CASES[name], range(8)
    right = walks(case, case.make(), seeds)
    for _ in range(repetitions(40, 2)):
        shared, together = case.make(), threading.Barrier(4)

        def work(k, shared=shared, together=together):
            together.wait(HANG)
            return walks(case, shared, [*seeds[k:], *seeds[:k]])

        for found in in_threads([lambda k=k: work(k) for k in range(4)]):
            assert found == right
        assert walks(case, shared, seeds) == right


# --- interrupts -------------------------------------------------------------------------------------------------------


def path(shared):
    """The states along one walk, which somebody holds."""
    rng, states = np.random.default_rng(5), [getattr(shared, "start", None)]
    for _ in range(4):
        if hasattr(shared, "mask") and (mask := shared.mask(states[-1])).any():
            states.append(shared.advance(states[-1], int(rng.choice(np.flatnonzero(mask)))))
    return states


def told(shared, states):
    return [shared.mask(state).tobytes() for state in states if hasattr(shared, "mask")]


@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_at_any_line_an_index_says_what_a_fresh_one_says(room, name):
    case, seeds = CASES[name], range(3)
    fresh = case.make()
    right, right_told = walks(case, fresh, seeds), told(fresh, path(fresh))
    shared = case.make()
    path(shared)
    with Interrupt(FILES) as watch:
        walks(case, shared, seeds)
    lines = [(place, nth) for place, times in watch.seen.items() for nth in sorted({1, times // 2 + 1, times})]
    np.random.default_rng(0).shuffle(lines)
    faults, reached = [], 0
    for i, (place, nth) in enumerate(lines[: repetitions(200, 6)]):
        shared = case.make()
        held = path(shared)
        with Interrupt(FILES, place, nth, (KeyboardInterrupt, MemoryError)[i % 2]) as interrupt:
            walks(case, shared, seeds)
        reached += interrupt.left == 0
        try:
            found = in_threads([lambda shared=shared: walks(case, shared, seeds)])[0]       # no lock is left
            if found != right or told(shared, held) != right_told:
                faults.append((place, nth, "wrong"))
        except Exception:
            faults.append((place, nth, traceback.format_exc()))
    assert faults == [] and reached >= 5
