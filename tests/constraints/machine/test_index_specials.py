"""MachineIndex: special tokens as symbols, ends, errors, states that threads and copies share."""

import copy
import itertools
import pickle
import warnings

import numpy as np
import pytest

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    ConstraintLogitsProcessor,
    Grammar,
    JsonSchema,
    Model,
    Regex,
    Rule,
    Vocabulary,
    enumerate_exact,
    smc_steer,
)
from llmppl.constraints import END, Special, index_of

EOS_ID, TOOL, STOP = 0, 1, 2
TOKENS = [b"", b"", b"", b"a", b"b", b"1", b"<tool>", b"<", b"tool", b">", b"ab", b"[", b"]", b"a<"]
VOCAB = Vocabulary(
    TOKENS, [EOS_ID], special_texts={TOOL: "<tool>", STOP: "<stop>", EOS_ID: "<end>"}
)
NUMBERS = JsonSchema({"type": "array", "items": {"const": 1}, "maxItems": 1}, whitespace=False)


def symbols(token):
    """Return what a token adds to a text of symbols: its bytes, or the special token itself."""
    return tuple(TOKENS[token]) or (f"special {token}",)


def texts_of(*parts):
    """Return the texts of symbols of a row of strings and special ids."""
    found = set()
    for row in itertools.product(*parts):
        symbols = []
        for part in row:
            symbols += part.encode() if isinstance(part, str) else [f"special {part}"]
        found.add(tuple(symbols))
    return found


@pytest.mark.parametrize("part, texts", [
    ("a" + Special("<tool>") + "b", texts_of(["a"], [TOOL], ["b"])),
    (Regex("a?") + Special(TOOL) + NUMBERS + Special("<stop>"),
     texts_of(["", "a"], [TOOL], ["[]", "[1]"], [STOP])),
    ((Special(TOOL) + "a" | "<tool>b").times(1, 2),
     texts_of([TOOL], ["a"]) | texts_of(["<tool>b"])
     | {x + y for x in texts_of([TOOL], ["a"]) | texts_of(["<tool>b"])
        for y in texts_of([TOOL], ["a"]) | texts_of(["<tool>b"])}),
    ("a" + Special("<end>") + "b" + Special("<end>"), texts_of(["a"], [EOS_ID], ["b"], [EOS_ID])),
    (Special(STOP).optional() + Grammar('start: "a" "b"?'),
     texts_of([STOP], ["a", "ab"]) | texts_of(["a", "ab"])),
    (Special(STOP) + "a" | Special(STOP) + "b", texts_of([STOP], ["a", "b"])),
    (("a" + Special(TOOL) + "b") & (Regex("a|b") + Special(TOOL) + Regex("b|1")),
     texts_of(["a"], [TOOL], ["b"])),
])  # fmt: skip
def test_special_tokens_are_symbols_of_their_own(part, texts):
    index = part.index(VOCAB)
    todo = [((), index.start)]
    ended = set()
    for prefix, state in todo:
        rests = {text[len(prefix) :] for text in texts if text[: len(prefix)] == prefix}
        assert index.accepts(state) == (() in rests)
        fits = {
            token
            for token in range(len(TOKENS))
            if any(rest[: len(symbols(token))] == symbols(token) for rest in rests)
        }
        if index.accepts(state):
            assert not fits & {EOS_ID}  # these texts end where no end token goes on
            assert index.advance(state, EOS_ID) is END
            ended.add(prefix)
            fits |= {EOS_ID}
        assert set(index.allowed(state).tolist()) == fits
        for n in range(1, 7):
            near = {EOS_ID} if () in rests else set()
            for token in fits:
                size = len(symbols(token))
                lefts = [least(rest[size:]) for rest in rests if rest[:size] == symbols(token)]
                near |= {token for left in lefts if left <= n - 1}
            assert set(np.flatnonzero(index.mask_within(state, n)).tolist()) == near, (prefix, n)
        for token in fits - ({EOS_ID} if index.accepts(state) else set()):
            todo.append((prefix + symbols(token), index.advance(state, token)))
    assert ended == texts


def least(rest):
    """Return the fewest tokens that spell a row of symbols."""
    if not rest:
        return 0
    fits = [
        symbols(token)
        for token in range(len(TOKENS))
        if rest[: len(symbols(token))] == symbols(token)
    ]
    return 1 + min(least(rest[len(some) :]) for some in fits)


@pytest.mark.parametrize("token", ["<other>", 3, 99])
def test_an_unknown_special_token_is_refused_by_name(token):
    with pytest.raises(
        ValueError,
        match=r"is no special token of .*; its first ones are 0 \('<end>'\), 1 \('<tool>'\)",
    ):
        ("a" + Special(token)).index(VOCAB)


def test_the_error_of_a_misspelt_special_token_names_the_nearest_one():
    with pytest.raises(ValueError, match=r"Special\('<tools>'\) is no .*: did you mean '<tool>'\?"):
        ("a" + Special("<tools>")).index(VOCAB)


def test_a_token_is_an_id():
    assert repr(Special(VOCAB[TOOL])) == "Special(1)"


@pytest.mark.parametrize("part", [
    Regex(" [a-z]+") + "<|endoftext|>",                           # an automaton
    " a" + JsonSchema({"const": 1}) + "<|endoftext|>.",
])  # fmt: skip
def test_a_literal_name_of_a_special_token_is_a_warning(embedded, part):
    with pytest.warns(UserWarning, match=r"'<\|endoftext\|>' is spelled .*: Special\('<\|endoft"):
        ConstrainedText(embedded, "Once", part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConstrainedText(embedded, "Once", " a <b>" + Special("<|endoftext|>"))


def test_errors_show_a_long_composition_and_not_its_class(embedded):
    part = "." + (Special("<|endoftext|>") | Regex(" [A-Z][a-z]{1,9} [a-z]{1,9}")) + Special(0)
    with pytest.raises(ValueError, match=r"write both alike"):
        part.index(embedded.vocab)
    part = "Q" + (Special("<|endoftext|>") | Regex(" [A-Z][a-z]{1,9} [a-z]{1,9}")) + "~"
    program = ConstrainedText(embedded, "Once", part, rule=Rule(top_k=1))
    with pytest.raises(
        ValueError, match=r"no token allowed by 'Q' \+ \(Special\('<\|endof.*\.\.\."
    ):
        assert smc_steer(program, N=2, K=1, seed=0).best


def test_a_text_ends_at_an_eos_where_it_may_end():
    index = (Regex("a") + (Special("<end>") + "b").optional()).index(VOCAB)
    state = index.after("a")
    assert (
        index.accepts(state) and index.advance(state, EOS_ID) is END and not index.mask(END).any()
    )


def test_errors_name_the_composition_and_what_may_follow():
    index = ("a" + NUMBERS).index(VOCAB)
    with pytest.raises(
        ValueError,
        match=r"'a' \+ JsonSchema.*: token 4 \(b'b'\) cannot follow state .*next byte must be",
    ):
        index.advance(index.start, 4)
    with pytest.raises(
        ValueError, match=r"byte 1 of the text, b'b' after 'a', leaves the language: .* b'\['"
    ):
        index.after("ab")
    with pytest.raises(ValueError, match="token 1 .*special.* cannot follow"):
        index.advance(index.start, TOOL)
    with pytest.raises(ValueError, match="an eos has ended the text"):
        index.advance(END, 3)
    with pytest.raises(ValueError, match="no sequence of tokens of this vocabulary spells .*: no token fits where"):
        ("z" + NUMBERS).index(VOCAB)
    assert (
        repr(index).startswith("MachineIndex('a' + JsonSchema(")
        and index.next_bytes(index.start) == b"a"
    )
    assert index.tokens_to_accept(index.start) == 3 and index.tokens_to_accept(END) == 0


def test_states_and_indices_are_shared_by_copies_and_pickles():
    part = "a" + NUMBERS
    index = part.index(VOCAB)
    state = index.after("a")
    assert (
        copy.deepcopy(state) is state and copy.deepcopy(index) is index and copy.copy(part) is part
    )
    again = pickle.loads(pickle.dumps(index))
    assert again.allowed(again.after("a")).tolist() == index.allowed(state).tolist()
    assert index_of(part, VOCAB).allowed(index_of(part, VOCAB).start).tolist() == [3]


def test_equal_texts_reach_one_state():
    index = ((Regex("a*") + NUMBERS).star() + "b").index(VOCAB)
    states = {index.after(text) for text in ("a", "aa", "a[]a", "[1][]aaa")}
    assert len(states) == 1 and len({index.after(text) for text in ("", "[]")}) == 2


# ---- in programs


def test_a_posterior_with_special_tokens_is_that_of_the_program_by_hand(embedded):
    """The probability of an end token inside a text counts, as that of each other token."""
    eos = embedded.vocab.eos_ids[0]

    class ByHand(Model):
        def __init__(self):
            super().__init__()
            self.context = embedded.context("The")
            self.tokens = []

        def step(self):
            words = [" cat", " dog"], [" big", " small"]
            word = self.rows(
                [embedded.tokenizer.encode(word, add_special_tokens=False) for word in words[0]]
            )
            self.rows([[eos]])
            second = self.rows(
                [embedded.tokenizer.encode(word, add_special_tokens=False) for word in words[1]]
            )
            self.s += f"{words[0][word]}{words[1][second]}"
            self.finish()

        def rows(self, rows):
            from llmppl import Categorical

            scores = []
            contexts = []
            for row in rows:
                context, total = self.context, 0.0
                for token in row:
                    total += self.transformer(context).log_prob(embedded.vocab[token])
                    context = context + token
                scores.append(total)
                contexts.append(context)
            weights = np.exp(np.array(scores) - max(scores))
            chosen = self.sample(Categorical(dict(enumerate(weights / weights.sum()))))
            self.score(float(np.log(np.sum(np.exp(scores)))))
            self.context = contexts[chosen]
            return chosen

    part = Regex(" (cat|dog)") + Special(eos) + Regex(" (big|small)")
    found = enumerate_exact(ConstrainedText(embedded, "The", part, end="prefix"))
    expected = enumerate_exact(ByHand())
    assert (
        set(found.by_text())
        == set(expected.by_text())
        == {" cat big", " cat small", " dog big", " dog small"}
    )
    # other tokenisations of the words have little of the mass
    assert (
        found.log_ml == pytest.approx(expected.log_ml, abs=0.05) and found.log_ml >= expected.log_ml
    )
    for text, share in expected.by_text().items():
        assert found.by_text()[text] == pytest.approx(share, abs=0.01)


def test_a_span_with_special_tokens_goes_on_after_an_eos(embedded):
    eos = embedded.vocab.eos_ids[0]

    class Two(Model):
        def step(self):
            span = self.extend(
                embedded.context("The"), constraint=" dog" + Special(eos) + Regex(" [a-z]{2,5}")
            )
            self.s = span.text
            self.tokens = span.context.tokens
            self.finish()

    for particle in smc_steer(Two(), N=3, K=2, seed=0):
        assert eos in particle.tokens[-6:] and particle.s.startswith(" dog ")


def test_a_logits_processor_takes_compositions():
    torch = pytest.importorskip("torch")
    lm = CachedTransformer.from_pretrained()
    part = " dog" + JsonSchema({"enum": [1, 2]}) + Special(lm.vocab.eos_ids[0]) + "!"
    processor = ConstraintLogitsProcessor(part, lm.vocab)
    row = [5]
    for _ in range(12):
        scores = processor(torch.tensor([row]), torch.zeros(1, len(lm.vocab)))
        row.append(int(scores[0].isfinite().nonzero()[0, 0]))
    data = b"".join(lm.vocab.tokens[token] for token in row[1:])
    assert data in (b" dog1!", b" dog2!") and row[-1] in lm.vocab.eos_ids
