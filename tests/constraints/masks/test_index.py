"""TokenIndex: masks and steps compared with tokens read byte by byte, and with plain forms of the paper's."""

import contextlib
import copy
import itertools
import math
import pickle
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import regex
from helpers.common import ROOT, repetitions, slow
from helpers.in_c import ends_of
from helpers.machines import ALPHABET, PIECES, Machine, brute_force, explore, machines, read, vocabularies
from hypothesis import given
from hypothesis import strategies as st
from lark.indenter import Indenter

from llmppl import native
from llmppl.constraints import END, Grammar, JsonSchema, Regex, TabledRecognizer, TokenIndex, Vocabulary
from llmppl.constraints.machine import effects
from llmppl.constraints.masks import distances, mask_store
from llmppl.constraints.masks import index as index_module
from llmppl.constraints.vocabulary import trie_walk
from llmppl.constraints.vocabulary.trie import Trie, ranges

SHARED = ROOT.parent / "shared"


class Plain:
    """Recognizer of the same language with only start, step and accepts; its states are tuples."""

    def __init__(self, machine):
        self.machine = machine
        self.start = ("state", machine.start)

    def __repr__(self):
        return "Plain()"

    def step(self, state, byte):
        found = self.machine.step(state[1], byte)
        return None if found is None else ("state", found)

    def accepts(self, state):
        return self.machine.accepts(state[1])


class Nested:
    """Balanced parentheses around at most one x: a language with infinitely many states."""

    start = (0, False)

    def step(self, state, byte):
        depth, closing = state
        if byte == ord("(") and not closing:
            return depth + 1, False
        if byte == ord("x") and not closing:
            return depth, True
        return (depth - 1, True) if byte == ord(")") and depth else None

    def accepts(self, state):
        return state == (0, True)


def algorithm_4(recognizer, vocab):
    """Return {state: {token: next state}} for all states that tokens reach, by Willard & Louf's Algorithm 4."""
    sigma, todo = {}, [recognizer.start]
    while todo:
        state = todo.pop()
        if state in sigma:
            continue
        steps = {}
        for id, data in enumerate(vocab.tokens):
            target = read(recognizer, data, state) if data and id not in vocab.eos_ids else None
            if target is not None:
                steps[id] = target
        sigma[state] = steps
        todo += steps.values()
    return sigma


@pytest.fixture(params=["native", "numpy"])
def walk(request, monkeypatch):
    """Run the test with walks in C, and in numpy."""
    if request.param == "numpy":
        monkeypatch.setenv("LLMPPL_NATIVE", "0")
    elif native.library() is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("generic", [False, True])
def test_masks_and_steps_agree_with_trying_every_token(walk, generic):
    @given(machines(), vocabularies())
    def check(machine, vocab):
        recognizer = Plain(machine) if generic else machine
        index = TokenIndex(recognizer, vocab)
        for state in explore(index):
            mask = brute_force(recognizer, vocab, state)
            np.testing.assert_array_equal(index.mask(state), mask)
            np.testing.assert_array_equal(index.allowed(state), np.flatnonzero(mask))
            assert index.accepts(state) == recognizer.accepts(state)
            for id, data in enumerate(vocab.tokens):
                if not mask[id]:
                    with pytest.raises(ValueError, match="cannot follow"):
                        index.advance(state, id)
                elif id in vocab.eos_ids:
                    assert index.advance(state, id) is END
                else:
                    assert index.advance(state, id) == read(recognizer, data, state)

    check()


@pytest.mark.parametrize("generic", [False, True])
def test_the_whole_index_agrees_with_the_papers_algorithm(walk, generic):
    @given(machines(), vocabularies())
    def check(machine, vocab):
        recognizer = Plain(machine) if generic else machine
        expected = algorithm_4(recognizer, vocab)
        lazy, index = TokenIndex(recognizer, vocab), TokenIndex(recognizer, vocab)
        whole = index.build_all()
        assert len(whole) == len(expected)
        assert set(whole.states) == set(expected)
        assert whole.states[0] == recognizer.start
        for i, state in enumerate(whole.states):
            tokens, rows = whole.row(i)
            assert tokens.tolist() == sorted(expected[state])
            assert {t: whole.states[r] for t, r in zip(tokens.tolist(), rows.tolist(), strict=True)} == expected[state]
            assert whole.accepting[i] == recognizer.accepts(state)
            np.testing.assert_array_equal(index.mask(state), lazy.mask(state))

    check()


def test_all_walks_number_the_rows_the_same_way(monkeypatch):
    found = []
    for is_native, chunk in itertools.product("10", (1 << 20, 30)):
        monkeypatch.setenv("LLMPPL_NATIVE", is_native)
        monkeypatch.setattr(distances, "CHUNK", chunk)
        vocab = Vocabulary([bytes([i]) for i in range(97, 123)] + [b"ab", b"cd", b"abc"], ())
        whole = TokenIndex(Regex("(ab|[a-m]c|[c-z]*d){3}"), vocab).build_all()
        rows = [(t.tolist(), r.tolist()) for t, r in map(whole.row, range(len(whole)))]
        found.append((whole.accepting.tolist(), rows))
    assert all(each == found[0] for each in found)


class OnDemand:
    """Graph that computes entries on demand."""

    def __init__(self, full):
        self.full, self.table, self.ready = full, np.full_like(full, -1), np.ones(len(full), bool)
        self.has_exits = None

    def fill(self, number, bytes):
        self.table[number, bytes] = self.full[number, bytes]


@pytest.mark.parametrize("seed", range(5))
def test_walks_from_many_states_agree_with_tokens_read_one_by_one(walk, seed):
    rng = np.random.default_rng(seed)
    tokens = [bytes(rng.integers(97, 101, rng.integers(1, 6)).tolist()) for _ in range(200)]
    trie = Trie(tokens)
    full = rng.integers(0, 6, (6, 256)).astype(np.int32)
    full[0] = 0
    starts = rng.integers(1, 6, 20)
    found = trie_walk.walk(OnDemand(full), trie, starts)
    pairs = list(zip(found.ids.tolist(), found.states.tolist(), strict=True))
    for start, (a, b) in zip(starts.tolist(), itertools.pairwise(found.begin.tolist()), strict=True):
        ends = [(id, ends_of(full, start, tokens[id])) for id in trie.order.tolist()]
        assert pairs[a:b] == [(id, end) for id, end in ends if end]



def test_example_1_of_willard_and_louf(walk):
    vocab = Vocabulary([b"A", b".", b"42", b".2", b"1"])
    index = TokenIndex(Regex(r"([0-9]*)?\.?[0-9]*"), vocab)

    def words(state):
        return [vocab.tokens[id] for id in index.allowed(state)]

    assert words(index.start) == [b".", b"42", b".2", b"1"]
    assert words(index.advance(index.start, 3)) == [b"42", b"1"]
    assert words(index.advance(index.start, 4)) == [b".", b"42", b".2", b"1"]
    assert len(index.build_all()) <= 4


def test_eos_is_allowed_where_the_text_may_end():
    vocab = Vocabulary([b"a", b"", b"", b"b"], eos_ids=[1, 2])
    index = TokenIndex(Regex("a"), vocab)
    assert index.mask(index.start).tolist() == [True, False, False, False]
    done = index.advance(index.start, 0)
    assert index.accepts(done) and index.allowed(done).tolist() == [1, 2]
    assert index.advance(done, 1) is index.advance(done, 2) is index.end is END
    assert index.accepts(END) and not index.mask(END).any() and index.allowed(END).size == 0
    assert index.next_bytes(END) == b"" and index.tokens_to_accept(END) == 0
    with pytest.raises(ValueError, match=r"token 0 \(b'a'\) cannot follow: an eos has ended the text"):
        index.advance(END, 0)
    with pytest.raises(ValueError, match=r"token 1 \(eos\) cannot follow: an eos has ended the text"):
        index.advance(END, 1)


def test_any_object_with_tokens_and_eos_ids_is_a_vocabulary():
    vocab = SimpleNamespace(tokens=[b"a", b"<s>", b"</s>"], eos_ids=[2], special_ids={1})
    index = TokenIndex(Regex("(a|<s>|</s>)*"), vocab)
    assert index.mask(index.start).tolist() == [True, False, True]


def test_equal_vocabularies_share_one_trie():
    first, second = Vocabulary([b"a", b"b"], [1]), Vocabulary([b"a", b"b"], [1])
    assert TokenIndex(Regex("a"), first).trie is TokenIndex(Regex("b|a"), second).trie


def test_masks_are_read_only_and_shared_by_states_with_equal_sets():
    index = TokenIndex(Regex("[ab]{5}"), Vocabulary([b"a", b"b", b"c"]))
    state = index.advance(index.start, 0)
    assert index.mask(index.start) is index.mask(state)
    with pytest.raises(ValueError, match="read-only"):
        index.mask(state)[0] = 0


def test_dropped_masks_are_computed_again(monkeypatch):
    monkeypatch.setattr(mask_store, "MASK_BYTES", 200)
    vocab = Vocabulary([bytes([97 + i]) for i in range(26)] * 3)
    index = TokenIndex(Regex("[a-z][a-c][d-z]a[^a]"), vocab)
    states = sorted(explore(index, limit=1000))
    first = {state: index.mask(state).copy() for state in states}
    masks = [found.mask for found in index.store._by_key.values() if found.mask is not None]
    assert len(masks) <= 2 < len({mask.tobytes() for mask in first.values()})
    assert index.store.nbytes == sum(mask.nbytes for mask in masks) <= 200
    for state in states:
        np.testing.assert_array_equal(index.mask(state), first[state])


def kinds_of_index():
    vocab = Vocabulary([*(bytes([i]) for i in range(256)), b"aa", b"ab", b""], [258])
    schema = JsonSchema({"type": "array", "items": {"enum": [1, "a", True, None]}}, whitespace=False)
    indented = Grammar("start: (NAME _NL [_INDENT start _DEDENT])+\nNAME: /[ab]+/\n%declare _INDENT _DEDENT\n"
                       "_NL: /(\\n *)+/", postlex=Indented())
    return {
        "regex": Regex("[ab]{1,9}(c|d[ab]?)").index(vocab), "recognizer": TokenIndex(Nested(), vocab),
        "grammar": Grammar('start: "a" start "b" | "c"').index(vocab), "indented": indented.index(vocab),
        "schema": schema.index(vocab),
    }  # fmt: skip


class Indented(Indenter):
    NL_type, INDENT_type, DEDENT_type, tab_len = "_NL", "_INDENT", "_DEDENT", 8
    OPEN_PAREN_types, CLOSE_PAREN_types = (), ()


@pytest.mark.parametrize("kind", ["regex", "recognizer", "grammar", "indented", "schema"])
def test_a_mask_is_one_array_for_as_long_as_anyone_holds_it(kind, monkeypatch):
    monkeypatch.setattr(mask_store, "MASK_BYTES", 0)
    index = kinds_of_index()[kind]
    states = [*explore(index, limit=12), END]
    held = {state: index.mask(state) for state in states}
    for _ in range(3):
        for state in states:
            assert index.mask(state) is held[state]
            assert index.mask_within(state, math.inf).size == held[state].size
    assert len({id(mask) for mask in held.values()}) == len({mask.tobytes() for mask in held.values()})


def test_masks_in_use_stay_when_others_are_dropped(monkeypatch):
    monkeypatch.setattr(mask_store, "MASK_BYTES", 250)
    vocab = Vocabulary([bytes([97 + i]) for i in range(26)] * 3)          # 78 bytes a mask: room for three
    index = TokenIndex(Regex("(ab|bc|cd|de|ef|fg|gh|hi)*"), vocab)
    states = [index.after(text) for text in "abcdefgh"]
    for state in states:
        index.mask(index.start), index.mask(state)
    assert index._masks[index.start].mask is not None and index._masks[states[-1]].mask is not None
    assert index._masks[states[0]].mask is None


@given(machines(), vocabularies(), st.randoms(use_true_random=False))
def test_masks_of_a_text_are_the_masks_along_its_path(machine, vocab, rng):
    index = TokenIndex(machine, vocab)
    state, tokens, expected = index.start, [], []
    while index.mask(state).any() and len(tokens) < 10:
        expected.append(index.mask(state))
        tokens.append(rng.choice(index.allowed(state).tolist()))
        state = index.advance(state, tokens[-1])
    masks = index.masks(tokens)
    assert masks.shape == (len(tokens), len(vocab)) and masks.dtype == bool
    assert all(np.array_equal(a, b) for a, b in zip(masks, expected, strict=True))
    if tokens:
        with pytest.raises(ValueError, match=rf"^tokens\[{len(tokens)}\]: "):
            index.masks([*tokens, next(id for id in range(-1, len(vocab)) if id < 0 or not index.mask(state)[id])])


@given(machines(), PIECES)
def test_after_is_the_state_after_bytes(machine, data):
    index = TokenIndex(machine, Vocabulary([bytes([byte]) for byte in ALPHABET]))
    state = read(machine, data)
    if state is None:
        with pytest.raises(ValueError, match="leaves the language"):
            index.after(data)
    else:
        assert index.after(data) == state


def test_after_takes_text_and_names_the_byte_that_leaves_the_language():
    index = TokenIndex(Regex("é[0-9]+"), Vocabulary([bytes([i]) for i in range(256)]))
    assert index.after("é1") == index.after("é1".encode()) == index.after("é25")
    with pytest.raises(ValueError) as error:
        index.after("é1x")
    assert str(error.value) == (
        "Regex('é[0-9]+'): byte 3 of the text, b'x' after 'é1', leaves the language: "
        "the next byte must be one of b'0'..b'9', or the text must end"
    )


def naive_distances(recognizer, vocab):
    """Return the distances to acceptance from Algorithm 4's index, by rounds over all states."""
    sigma = algorithm_4(recognizer, vocab)
    distance = {state: 0 if recognizer.accepts(state) else math.inf for state in sigma}
    for _ in sigma:
        for state, steps in sigma.items():
            distance[state] = min([distance[state], *(1 + distance[target] for target in steps.values())])
    return sigma, distance


def test_a_long_chain_of_states_is_no_long_row_of_arrays(monkeypatch):
    asked = []
    monkeypatch.setattr(distances, "ranges", lambda *given: asked.append(given) or ranges(*given))
    table = np.zeros((3002, 256), np.int32)
    table[1:-1, 97] = np.arange(2, 3002)
    left = distances.bytes_to_accept(table, np.arange(3002) == 3001)
    assert left[1:].tolist() == list(range(3000, -1, -1)) and len(asked) < 10


@pytest.mark.parametrize("generic", [False, True])
def test_tokens_to_accept_is_the_shortest_way(walk, generic):
    @given(machines(), st.lists(PIECES, min_size=1, max_size=8), st.integers(0, 4))
    def check(machine, tokens, n):
        vocab = Vocabulary([*tokens, b"</s>"], [len(tokens)])  # with dead ends, as bytes may be missing
        recognizer = Plain(machine) if generic else machine
        sigma, distance = naive_distances(recognizer, vocab)
        try:
            index = TokenIndex(recognizer, vocab)
        except ValueError:
            assert distance[recognizer.start] == math.inf
            return
        assert distance[recognizer.start] < math.inf
        for state in sigma:
            assert index.tokens_to_accept(state) == distance[state]
            for left in (n, math.inf):
                expected = np.zeros(len(vocab), bool)
                expected[[id for id, target in sigma[state].items() if distance[target] < left]] = True
                expected[-1] = recognizer.accepts(state)
                np.testing.assert_array_equal(index.mask_within(state, left), expected)

    check()


def test_searches_for_an_end_walk_from_a_state_once(embedded, monkeypatch):
    index = Grammar('start: "f(" NAME ("," NAME)* "): " NAME\nNAME: /[a-z]{1,4}/').index(embedded.vocab)
    walked, find = [], effects.Effects._find
    monkeypatch.setattr(effects.Effects, "_find", lambda self, key: walked.append(key) or find(self, key))
    for text in ("", "f(", "f(a", "f(ab,c", "f(ab,cd): ", "f(abc"):
        index.mask_within(index.after(text), 4)
    assert len(walked) == len({*walked}) < 60


def test_distances_in_bytes_decide_where_they_can(monkeypatch):
    """Letters are tokens: a text of "b"s is one "x" from its end, and "xyz" takes one to three tokens."""
    monkeypatch.setattr(distances, "walks", None)
    vocab = Vocabulary([b"b", b"x", b"y", b"z", b"bb", b"xyz", b""], eos_ids=[6])
    index = TokenIndex(Regex("b{0,3000}x"), vocab)
    assert index.tokens_to_accept(index.start) == 1
    for n, fits in [(0, []), (1, [1]), (2, [0, 1, 4]), (3000, [0, 1, 4])]:
        assert np.flatnonzero(index.mask_within(index.start, n)).tolist() == fits
    longer = TokenIndex(Regex("b{0,3000}xyz"), vocab)
    assert np.flatnonzero(longer.mask_within(longer.start, 4)).tolist() == [0, 1, 4, 5]
    assert TokenIndex(Regex("b{3000}"), vocab).tokens_to_accept(1, 900) == math.inf     # tokens of at most three bytes
    with pytest.raises(TypeError):                      # two bytes are one token or two: now they are looked at
        longer.mask_within(longer.start, 2)


def test_a_vocabulary_of_another_type_is_a_TypeError():
    with pytest.raises(TypeError, match=r"masks are over a Vocabulary, such as lm\.vocab, not 'abc'"):
        Regex("a").index("abc")
    with pytest.raises(TypeError, match="masks are over a Vocabulary"):
        JsonSchema({"type": "string", "format": "uri"}).index("abc")


def test_infinitely_many_states_are_explored_only_as_far_as_used():
    vocab = Vocabulary([b"(", b"((", b"x", b")", b"x))", b"()", b""], eos_ids=[6])
    index = TokenIndex(Nested(), vocab)
    state = index.start
    for token in [0, 1, 4, 3]:
        np.testing.assert_array_equal(index.mask(state), brute_force(index.recognizer, vocab, state))
        state = index.advance(state, token)
    assert index.allowed(state).tolist() == [6]
    assert [index.tokens_to_accept((depth, False)) for depth in range(6)] == [1, 1, 1, 2, 3, 4]
    assert index.mask_within((3, False), 2).tolist() == [False, False, False, False, True, False, False]
    with pytest.raises(ValueError, match="more than 100 states are reached"):
        index.build_all(max_states=100)


def test_copies_of_an_index_and_of_END_are_the_object_itself():
    index = TokenIndex(Regex("a"), Vocabulary([b"a"]))
    assert copy.copy(index) is copy.deepcopy(index) is copy.deepcopy([index])[0] is index
    assert copy.deepcopy(END) is copy.copy(END) is pickle.loads(pickle.dumps(END)) is END
    assert repr(index) == "TokenIndex(Regex('a'), 1 tokens, 0 masks)" and repr(END) == "END"
    assert repr(index.build_all()) == "PrecomputedIndex(2 states, 1 steps)"


@pytest.mark.parametrize("pattern, tokens", [("[0-9]{3}", [b"a", b"1x"]), ("[0-9]{3}", [b"22"]), ("a*b", [b"a"])])
def test_a_constraint_that_no_tokens_can_meet_is_refused(pattern, tokens):
    with pytest.raises(ValueError, match="no sequence of tokens of this vocabulary spells a string"):
        TokenIndex(Regex(pattern), Vocabulary(tokens))


GAPS = Vocabulary([*(b"%c" % byte for byte in range(256) if byte not in b"\4\6\xf1\xf2"), b"ab", b'{"', b""], [254])


@pytest.mark.parametrize(
    "constraint",
    [Regex("[a-z ]{1,40}"), Regex("\4*a"), JsonSchema({"type": "object"}), JsonSchema({"const": "a" * 300}),
     JsonSchema({"type": "object", "properties": {"a": {"type": "object"}}, "required": ["a"]}),
     Grammar('start: "(" start ")" | NAME\nNAME: /[a-z]+/')],
)  # fmt: skip
def test_no_token_is_read_to_learn_that_tokens_of_one_byte_suffice(constraint, monkeypatch):
    monkeypatch.setattr(TokenIndex, "walk", None)
    monkeypatch.setattr(effects.Effects, "of", None)
    constraint.index(GAPS)


def test_a_text_that_needs_a_missing_byte_is_refused():
    missing = "no sequence of tokens of this vocabulary spells .* next byte must be one of b'\\\\x04'"
    with pytest.raises(ValueError, match=missing):
        Regex("a\4b").index(GAPS)
    with pytest.raises(ValueError, match="no sequence of tokens of this vocabulary spells"):
        JsonSchema({"type": "string", "pattern": "^\U00050000$"}).index(GAPS)
    assert Regex("a\4b").index(Vocabulary([b"a", b"\4b", b""], [2])).mask(1).tolist() == [True, False, False]


def test_a_constraint_without_any_text_is_refused():
    with pytest.raises(ValueError, match="accepts no string at all"):
        TokenIndex(Machine(np.zeros((2, 256)), [False, False]), Vocabulary([b"a"]))
    with pytest.raises(ValueError, match=r"Regex\('a'\) & Regex\('b'\)\) accepts no string at all: .* drop one"):
        TokenIndex(Regex("a") & Regex("b"), Vocabulary([b"a"]))


def test_a_forbidden_token_is_refused_with_the_allowed_bytes():
    vocab = Vocabulary([b"1", b"a1", b"12x", b"", b"2", b"3"], eos_ids=[3])
    index = TokenIndex(Regex("[0-9]{3}"), vocab)
    state = index.advance(index.start, 0)
    for _ in range(2):                              # before and after the mask is known
        with pytest.raises(ValueError) as error:
            index.advance(state, 2)
        assert str(error.value) == (
            f"Regex('[0-9]{{3}}'): token 2 (b'12x') cannot follow state {state}: after b'12' the text must end, "
            "not b'x'. Tokens that can: 0 (b'1'), 4 (b'2'), 5 (b'3')"
        )
        index.mask(state)
    with pytest.raises(ValueError, match=r"token 1 \(b'a1'\) cannot follow .*: the next byte must be one of b'0'"):
        index.advance(state, 1)
    with pytest.raises(ValueError, match=r"token 3 \(eos\) cannot follow"):
        index.advance(state, 3)
    for token in (-1, 6):
        with pytest.raises(ValueError, match=f"token {token} is not in this vocabulary, whose ids are 0 to 5"):
            index.advance(state, token)


@pytest.mark.parametrize("state", [0, -3, 10_000, ("state", 1), None, "a"])
@pytest.mark.parametrize("ask", ["mask", "allowed", "accepts", "next_bytes", "tokens_to_accept", "advance"])
def test_a_state_of_another_index_is_refused_where_detectable(ask, state):
    index = TokenIndex(Regex("ab"), Vocabulary([b"a", b"b"]))
    with pytest.raises(ValueError, match="is not a state of this index"):
        getattr(index, ask)(state, *[0] * (ask == "advance"))
    plain = TokenIndex(Nested(), Vocabulary([b"x"]))
    with pytest.raises(TypeError) as error:
        plain.mask(3)
    assert "is it one of TokenIndex(" in error.value.__notes__[0]


def test_tries_hold_every_token_once_in_the_order_of_their_bytes():
    @given(st.lists(st.binary(max_size=20) | PIECES | st.binary(max_size=3).map(lambda b: b"\0" * 9 + b), max_size=40))
    def check(tokens):
        trie = Trie(tokens)
        assert trie.order.tolist() == sorted((i for i, t in enumerate(tokens) if t), key=tokens.__getitem__)
        spelled = []
        path = bytearray()
        for node in range(len(trie)):
            del path[trie.depth[node] :]
            path.append(trie.byte[node])
            below = [n for n in range(node + 1, len(trie)) if trie.depth[n] <= trie.depth[node]]
            assert trie.skip[node] == (below[0] if below else len(trie))
            spelled += [bytes(path)] * int(trie.first[node + 1] - trie.first[node])
        assert spelled == [tokens[i] for i in trie.order]

    check()


def test_our_automata_have_tables_and_custom_ones_need_none():
    assert isinstance(Regex("a"), TabledRecognizer)
    assert not isinstance(Nested(), TabledRecognizer)


# ---- real vocabularies

REAL = ["gpt2", "mistral_v3", *slow("cl100k_base", "o200k_base")]
PATTERNS = [
    r"([0-9]*)?\.?[0-9]*",
    r"[^\W\d]\w*",
    r"\s*([Yy]es|[Nn]o|[Nn]ever|[Aa]lways)",
    r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
    r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    r".{0,200}",
    r'\{"name": "([^"\\\x00-\x1f]|\\["\\/bfnrt])*", "age": [0-9]+\}',
    r"(é|日本|🙂)+",
]
# of these, with no class of Unicode: the package `regex` knows them, too, and characters they do not name are all alike
KNOWN_TO_REGEX = [pattern for pattern in PATTERNS if not re.search(r"\\[wWdDs]", pattern)]


@pytest.fixture(scope="module", params=REAL)
def real(request):
    folder = SHARED / "vocab" / request.param
    if not folder.exists():
        pytest.skip(f"the vocabulary {request.param} is not at {folder}")
    from transformers import AutoTokenizer

    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(folder))


def can_go_on(pattern, data):
    """Return True if some text that `pattern` matches begins with these bytes, by partial matches of `regex`."""
    try:
        return pattern.fullmatch(data.decode(), partial=True) is not None
    except UnicodeDecodeError as error:
        head, tail = data[: error.start], data[error.start :]
    whole = {c for c in pattern.pattern if c.encode().startswith(tail)}
    for number in range(1, 4):                      # and any character that goes on so
        for more in itertools.product((0x80, 0x90, 0xA0), repeat=number):
            with contextlib.suppress(UnicodeDecodeError):
                whole.add((tail + bytes(more)).decode())
    return any(pattern.fullmatch(head.decode() + text, partial=True) for text in whole)


def matched_in_part(pattern, vocab, text):
    """Return the mask after some bytes, by `regex` alone, without an automaton of ours."""
    compiled = regex.compile(pattern)
    out = np.array([bool(data) and can_go_on(compiled, text + data) for data in vocab.tokens])
    out[list(vocab.special_ids)] = False
    try:
        out[list(vocab.eos_ids)] = compiled.fullmatch(text.decode()) is not None
    except UnicodeDecodeError:                      # nothing ends inside a character
        out[list(vocab.eos_ids)] = False
    return out


def check_random_walks(vocab, monkeypatch, states, seed=0):
    """Check masks of states on random walks with many short tokens, which end inside characters."""
    rng = random.Random(seed)
    for pattern in PATTERNS:
        ways = {is_native: TokenIndex(Regex(pattern), vocab) for is_native in "10"}
        index = ways["1"]
        checked, paths = set(), 0
        while len(checked) < states and paths < 2 * states:
            state, text, paths = index.start, b"", paths + 1
            for _ in range(12):
                if state not in checked:
                    checked.add(state)
                    expected = brute_force(index.recognizer, vocab, state)
                    if pattern in KNOWN_TO_REGEX and len(checked) % 2 == 0:     # it is slow
                        np.testing.assert_array_equal(expected, matched_in_part(pattern, vocab, text))
                    for is_native, each in ways.items():
                        monkeypatch.setenv("LLMPPL_NATIVE", is_native)
                        np.testing.assert_array_equal(each.mask(each.after(text)), expected)
                ids = index.allowed(state).tolist()
                short = [id for id in ids if len(vocab.tokens[id]) == 1]
                if not ids or len(checked) >= states:
                    break
                token = rng.choice(short if short and rng.random() < 0.5 else ids)
                state, text = index.advance(state, token), text + vocab.tokens[token]
                if state is END:
                    break
    monkeypatch.undo()


@pytest.mark.slow
def test_masks_of_real_vocabularies_are_exact_on_random_walks(real, monkeypatch):
    check_random_walks(real, monkeypatch, states=repetitions(5, 2))


def test_masks_of_the_embedded_vocabulary_are_exact_on_random_walks(embedded, monkeypatch):
    check_random_walks(embedded.vocab, monkeypatch, states=repetitions(100, 10))


@pytest.mark.parametrize("wrong, kind", [("a+", "str"), (["a", "b"], "list"), (JsonSchema({"const": 1}), "JsonSchema")])
def test_an_object_that_is_no_recognizer_raises_a_helpful_type_error(wrong, kind):
    with pytest.raises(TypeError, match=rf"not .* of type {kind}; .* make their own index: \.index\(vocab\)"):
        TokenIndex(wrong, Vocabulary([b"a", b""], eos_ids=[1]))


# ---- what is kept


def spread(V, allowed, eos):
    """Return a vocabulary of V tokens, and the language whose texts are the allowed tokens."""
    tokens = [b"%c" % (64 + i) if i < 40 else b"x%c" % (64 + i) for i in range(V)]
    for id in eos:
        tokens[id] = b""
    return Vocabulary(tokens, eos), Regex("|".join(re.escape(tokens[id].decode()) for id in allowed))


@pytest.mark.parametrize("V", [63, 64, 65])
def test_a_mask_set_may_be_kept_as_ids_or_as_bits(V, monkeypatch):
    """Two ids take as much memory as 64 bits."""
    monkeypatch.setattr(mask_store, "MASK_BYTES", 0)
    for allowed in ([50], [3, 50], [3, 7, 50], [50, 7]):
        vocab, words = spread(V, allowed, eos=[0])
        index = TokenIndex(words | Regex(""), vocab)
        for _ in range(2):                          # the second time from what is kept
            np.testing.assert_array_equal(index.mask(index.start), brute_force(index.recognizer, vocab, index.start))
            end = index.advance(index.start, 50)
            assert index.allowed(end).tolist() == [0] and np.flatnonzero(index.mask(end)).tolist() == [0]
        assert index.allowed(index.start).tolist() == sorted([0, *allowed])


def test_an_unbounded_recognizer_forgets_old_sets_and_steps(monkeypatch):
    monkeypatch.setattr(trie_walk.MemoGraph, "room", 20)
    monkeypatch.setattr(index_module, "MAX_STEPS", 20)
    vocab = Vocabulary([b"(", b")", b"x", b"((", b"))", b""], eos_ids=[5])
    index = TokenIndex(Nested(), vocab)
    state = index.start
    for depth in range(200):
        np.testing.assert_array_equal(index.mask(state), brute_force(index.recognizer, vocab, state))
        state = index.advance(state, 0)
        assert state == (depth + 1, False)
    assert max(len(index._masks), len(index._steps), len(index.graph.states)) <= 30


def test_states_that_are_false_are_states_where_there_is_no_table():
    class Parity:
        start = 0

        def step(self, state, byte):
            return 1 - state if byte == ord("a") else None

        def accepts(self, state):
            return state == 0

    index = TokenIndex(Parity(), Vocabulary([b"a", b"aa", b"aaa", b"b", b""], eos_ids=[4]))
    assert [index.after("a" * n) for n in range(4)] == [0, 1, 0, 1] and index.next_bytes(0) == b"a"
    assert [index.advance(state, token) for state in (0, 1) for token in (0, 1, 2)] == [1, 0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="cannot follow"):
        index.advance(0, 3)


def test_a_table_with_zero_for_dead_states_gives_the_same_masks():
    class Zero(Machine):
        def step(self, state, byte):
            return super().step(state, byte) or 0

    table = np.zeros((3, 256), np.int32)
    table[1, ord("a")] = table[2, ord("b")] = 2
    vocab = Vocabulary([b"a", b"b", b"ab", b""], eos_ids=[3])
    index = TokenIndex(Zero(table, [False, False, True]), vocab)
    assert index.next_bytes(index.start) == b"a" and index.after("ab") == 2
    for text in ("b", "aa"):
        with pytest.raises(ValueError, match="leaves the language"):
            index.after(text)
    with pytest.raises(ValueError, match="cannot follow"):
        index.advance(index.start, 1)


def test_distances_do_not_depend_on_the_first_state():
    language = Regex("a{3}|b{5}|c(d|ee){2}").explore()
    vocab = Vocabulary([*(b"%c" % byte for byte in b"abcde"), b"aa", b"bbb", b""], eos_ids=[7])
    whole = TokenIndex(language, vocab)
    expected = {state: whole.tokens_to_accept(state) for state in sorted(explore(whole))}
    assert expected[whole.start] == 2 and expected[whole.after("c")] == 2 and expected[whole.after("ce")] == 2
    for first in expected:
        index = TokenIndex(language, vocab)
        index.tokens_to_accept(first)
        assert {state: index.tokens_to_accept(state) for state in expected} == expected


def test_searches_without_a_table_stop_where_no_end_is_near(monkeypatch):
    class Counted(Nested):
        steps = 0

        def step(self, state, byte):
            self.steps += 1
            assert self.steps < 20_000
            return super().step(state, byte)

    index = TokenIndex(Counted(), Vocabulary([b"(", b""], eos_ids=[1]))     # nothing closes
    monkeypatch.setattr(distances, "MAX_WORK", 50_100)
    with pytest.raises(ValueError, match="no end found within 49 tokens and 50 states; complete=False"):
        index.tokens_to_accept(index.start)


def test_the_searches_of_one_call_share_a_limit_and_fail_once(monkeypatch):
    class Words:
        start, steps, accepts = b"", 0, staticmethod(lambda state: len(state) == 10)

        def step(self, state, byte):
            self.steps += 1
            text = state + bytes([byte])
            return re.fullmatch(b"[a-e]x{0,9}", text) and text

    index = TokenIndex(Words(), Vocabulary([b"a", b"b", b"c", b"d", b"e", b"x", b""], eos_ids=[6]))
    monkeypatch.setattr(distances, "MAX_WORK", 50_000)                      # one search takes 9 x 2,200
    steps = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no end found within 4 tokens"):   # of the third search
            index.mask_within(index.start, 20)
        steps.append(index.recognizer.steps)
    assert steps[0] == steps[1]
    failed = index.after("c")
    assert index.tokens_to_accept(failed, 4) == np.inf and index.tokens_to_accept(index.after("cxx")) == 7
    with pytest.raises(ValueError, match="no end found within 4 tokens"):
        index.tokens_to_accept(failed, 5)


def test_searches_in_a_table_read_few_states_and_stop_at_a_limit(embedded, monkeypatch):
    index, again = (TokenIndex(Regex(r"(?:(?:.){50}?\d){0,40}?"), embedded.vocab) for _ in range(2))   # 16,881 states
    monkeypatch.setattr(distances, "MAX_WALKED", 600_000)
    assert index.mask_within(index.start, 8).sum() > 4000
    assert TokenIndex(Regex(r"(?:\w+ ){30}x"), embedded.vocab).tokens_to_accept(1) == 32    # "a", 29 x " a", " ", "x"
    monkeypatch.setattr(distances, "MAX_WALKED", 50_000)
    for _ in range(2):
        with pytest.raises(ValueError, match="no end found in [0-9]{1,3} states; shorter counted repeats"):
            again.mask_within(again.start, 8)


@pytest.mark.slow
def test_rows_of_a_whole_index_count_beyond_sixteen_bits():
    whole = TokenIndex(Regex("a{66000}"), Vocabulary([b"a", b""], eos_ids=[1])).build_all()
    assert len(whole) == 66_001
    for i in (0, 65_534, 65_535, 65_536, 65_999):
        assert whole.row(i)[1].tolist() == [i + 1]


def test_an_index_is_precomputed_once_and_can_be_pickled():
    index = TokenIndex(Regex("a|bc"), Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3]))
    assert index.build_all() is index.build_all()
    again = pickle.loads(pickle.dumps(index))
    masks = [again.mask(state).tolist() for state in index.build_all().states]
    assert masks == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
