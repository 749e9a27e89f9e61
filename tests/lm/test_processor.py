"""ConstraintLogitsProcessor: its masks equal those of the texts so far."""

import itertools
import re

import numpy as np
import pytest
import torch
from helpers.tiny import TOKENS, tiny_model, tiny_vocab

from llmppl import CachedTransformer, ConstraintLogitsProcessor, Regex, Vocabulary

V = 6                                                   # a, b, c, " ", ab, EOS
PATTERN = "(ab|c)+b?"
WORDS = (word for n in range(1, 10) for word in map("".join, itertools.product("abc", repeat=n)))
BEGINNINGS = {word[:n] for word in WORDS if re.fullmatch(PATTERN, word) for n in range(len(word) + 1)}


def allowed(text):
    """Return the tokens that may follow a text of at most six characters."""
    ids = {i for i, token in enumerate(TOKENS[: V - 1]) if text + token.decode() in BEGINNINGS}
    return ids | ({V - 1} if re.fullmatch(PATTERN, text) else set())


def asked(processor, rows, width=V, scores=None):
    """Return the tokens that each row may continue with."""
    scores = torch.zeros(len(rows), width) if scores is None else scores
    found = processor(torch.tensor(rows), scores)
    assert torch.equal(found[found > -torch.inf], scores[found > -torch.inf])
    return [{*torch.isfinite(row).nonzero().flatten().tolist()} for row in found]


def test_reordered_rows_get_the_masks_of_their_own_texts():
    """All texts of up to four tokens after two prompts, whose tokens would fit, too, in a new order at each call."""
    rng, processor = np.random.default_rng(0), ConstraintLogitsProcessor(Regex(PATTERN), tiny_vocab(V))
    prompts = [[3, 0, 1], [5, 5, 2]]
    rows = [(prompt, []) for prompt in prompts]
    for _ in range(4):
        rng.shuffle(rows)
        found = asked(processor, [prompt + ids for prompt, ids in rows])
        for (_, ids), fits in zip(rows, found, strict=True):
            ended = V - 1 in ids
            text = b"".join(TOKENS[i] for i in ids if i < V - 1).decode()
            assert fits == ({V - 1} if ended else allowed(text)), text
        rows = [(prompt, [*ids, i]) for (prompt, ids), fits in zip(rows, found, strict=True) for i in sorted(fits)]
    assert len(rows) > 30


def test_an_unknown_row_is_a_prompt():
    """A row of another length, or whose last token cannot have been drawn."""
    processor = ConstraintLogitsProcessor(Regex("ab"), tiny_vocab(V))
    start = {0, 4}
    assert asked(processor, [[2]]) == [start]
    assert asked(processor, [[2, 0]]) == [{1}]
    assert asked(processor, [[2, 0]]) == [start]        # the same row again is a prompt
    assert asked(processor, [[2, 0, 2]]) == [start]     # no "c" was drawn
    assert asked(processor, [[2, 0, 2, 4], [0, 0, 0, 0]]) == [{V - 1}, start]
    assert asked(processor, [[2, 0, 2, 4, V - 1]]) == [{V - 1}]
    assert asked(processor, [[2, 0, 2, 4, V - 1, 3]]) == [{V - 1}]         # padding of a decoder


@pytest.mark.parametrize("width", [V + 3, V, 5])
def test_heads_may_be_wider_or_narrower_than_the_vocabulary(width):
    processor = ConstraintLogitsProcessor(Regex(PATTERN), tiny_vocab(V))
    assert asked(processor, [[0]], width) == [{i for i in allowed("") if i < width}]
    assert asked(processor, [[0, 2]], width) == [{i for i in allowed("c") if i < width}]


OTHERS = [(4096, 49_152), (49_152, 4096), (4096, 4300), (300, 50_257), (6, 200)]
PADDED = [(50_295, 51_200), (151_665, 151_936), (100_015, 102_400), (300, 256)]


@pytest.mark.parametrize(("num_tokens", "width"), OTHERS)
def test_the_logits_of_another_tokenizer_are_refused(num_tokens, width):
    vocab = Vocabulary([b"a", b"b", *[b"%d" % i for i in range(num_tokens - 3)], b""], eos_ids=[num_tokens - 1])
    said = f"the model scores {width:,} tokens, and the tokenizer of this processor has {num_tokens:,}: give the tok"
    with pytest.raises(ValueError, match=said):
        asked(ConstraintLogitsProcessor(Regex("ab"), vocab), [[0]], width)
    with pytest.raises(ValueError, match=said):
        ConstraintLogitsProcessor(Regex("ab"), vocab).of_request()([], torch.zeros(width))


@pytest.mark.parametrize(("num_tokens", "width"), PADDED)
def test_padded_heads_of_known_models_are_taken(num_tokens, width):
    vocab = Vocabulary([b"a", b"b", *[b"%d" % i for i in range(num_tokens - 3)], b""], eos_ids=[num_tokens - 1])
    assert asked(ConstraintLogitsProcessor(["b"], vocab), [[0]], width) == [{1}]


@pytest.mark.parametrize("most", range(1, 5))
def test_texts_are_complete_within_max_tokens(most):
    """All token sequences that the masks allow are those of texts of at most `most` tokens, found by enumeration."""
    words = itertools.chain.from_iterable(itertools.product(range(V - 1), repeat=n) for n in range(1, most + 1))
    texts = {word for word in words if re.fullmatch(PATTERN, b"".join(TOKENS[i] for i in word).decode())}
    processor = ConstraintLogitsProcessor(Regex(PATTERN), tiny_vocab(V), max_tokens=most)
    found, rows = set(), [()]
    while rows:
        fits = [processor.of_request()(row, torch.zeros(V)).isfinite().nonzero()[:, 0].tolist() for row in rows]
        found |= {row for row, ids in zip(rows, fits, strict=True) if V - 1 in ids}
        rows = [(*row, i) for row, ids in zip(rows, fits, strict=True) for i in ids if i != V - 1]
    assert found == texts
    assert asked(processor, [[3]]) == [{ids[0] for ids in texts}]
    assert asked(processor, [[3, 2]]) == [{ids[1] for ids in texts if ids[0] == 2 and ids[1:]} | {V - 1}]


def test_a_bound_without_texts_is_refused():
    with pytest.raises(ValueError, match="no text ends within max_tokens=2"):
        ConstraintLogitsProcessor(Regex("[ab]{6}"), tiny_vocab(V), max_tokens=2)


def test_an_impossible_continuation_names_row_and_constraint():
    processor = ConstraintLogitsProcessor(Regex("ab"), tiny_vocab(V))
    scores = torch.zeros(2, V)
    scores[1, [0, 4]] = -torch.inf
    with pytest.raises(ValueError, match=r"row 1: no token that TokenIndex\(Regex\('ab'\).* allows has a probability"):
        asked(processor, [[2], [2]], scores=scores)


@pytest.mark.parametrize(
    ("constraint", "tokenizer", "error", "said"),
    [
        (str.isalpha, tiny_vocab(V), TypeError, r"must give masks of tokens, as Regex\(\.\.\.\) does, and not be"),
        (None, tiny_vocab(V), TypeError, "must give masks of tokens, .* and not be None"),
        (Regex("a"), "gpt2", TypeError, "tokenizer must be a transformers tokenizer or a Vocabulary, not 'gpt2'"),
        (Regex("x"), tiny_vocab(V), ValueError, "the next byte must be one of b'x'"),
        (Regex("a").index(tiny_vocab(7)), tiny_vocab(V), ValueError, "vocabulary"),
    ],
    ids=["function", "none", "name", "impossible", "other"],
)
def test_a_constraint_without_masks_is_refused(constraint, tokenizer, error, said):
    with pytest.raises(error, match=said):
        ConstraintLogitsProcessor(constraint, tokenizer)


# ---- model.generate


def test_greedy_decoding_takes_the_likeliest_allowed_token(embedded):
    pattern = Regex(r" [0-9]{1,2} years old and (very )*(happy|sad)[.]")
    processor = ConstraintLogitsProcessor(pattern, embedded.tokenizer)
    for prompt in ("Tim was", "Tim was"):               # the same processor again
        ids = torch.tensor([[*map(int, embedded.context(prompt).tokens)]])
        out = embedded.model.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], do_sample=False, max_new_tokens=30,
            pad_token_id=0,
        )  # fmt: skip
        context, index = embedded.context(prompt), pattern.index(embedded.vocab)
        state, expected = index.start, []
        while not expected or expected[-1] not in embedded.vocab.eos_ids:
            expected.append(int(np.where(index.mask(state), context.log_probs(), -np.inf).argmax()))
            if expected[-1] not in embedded.vocab.eos_ids:
                state, context = index.advance(state, expected[-1]), context + embedded.vocab[expected[-1]]
        assert out[0, ids.shape[1] :].tolist() == expected


@pytest.mark.parametrize(
    "how", [{"do_sample": True}, {"num_beams": 4, "num_return_sequences": 3}], ids=["rows", "beams"]
)
def test_padded_prompts_in_a_batch_and_beams_keep_to_the_language(how, embedded):
    tokenizer = embedded.tokenizer
    batch = [tokenizer.encode(prompt) for prompt in ("Tim was", "One day, the old king was", "She")]
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
    pattern = r" [0-9]{1,2} years old and (happy|sad)[.]"
    torch.manual_seed(0)
    out = embedded.model.generate(
        ids, attention_mask=mask, logits_processor=[ConstraintLogitsProcessor(Regex(pattern), tokenizer, eos_ids=0)],
        max_new_tokens=25, pad_token_id=0, **how,
    )  # fmt: skip
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    assert len(texts) == (9 if "num_beams" in how else 3) and all(re.fullmatch(pattern, text) for text in texts)


def test_the_processor_masks_locally():
    """Two texts differ in their first token: 300 samples have the shares p(a) and p(b) / (p(a) + p(b))."""
    model, vocab = tiny_model(V), Vocabulary([*TOKENS[: V - 1], b""], eos_ids=[V - 1])
    lm = CachedTransformer(model, vocab)
    processor = ConstraintLogitsProcessor(["ac", "ba"], vocab)
    torch.manual_seed(0)
    ids = torch.zeros((300, 1), dtype=torch.int64)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], do_sample=True, max_new_tokens=3,
        eos_token_id=V - 1, pad_token_id=V - 1,
    )  # fmt: skip
    log_probs = lm.at([0]).log_probs()
    p = np.exp(log_probs[0] - np.logaddexp(log_probs[0], log_probs[1]))
    assert {tuple(row) for row in out[:, 1:].tolist()} <= {(0, 2, V - 1), (1, 0, V - 1)}
    share = (out[:, 1] == 0).double().mean().item()
    assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / 300)
