"""Canonical encodings: states, masks and acceptance compared with the tokenizer's own encode, the definition."""

import copy
import functools
import itertools
import json
import random

import pytest
from helpers.common import ROOT, repetitions, slow
from helpers.tokenizers import HEX, fast
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer

from llmppl.constraints import Canonical, TokenIndex, UnsupportedTokenizer, Vocabulary
from llmppl.constraints import Regex as Language
from llmppl.constraints.vocabulary.canonical import Merges
from llmppl.constraints.vocabulary.pretokens import FOLDED, PreTokens, Split
from llmppl.lm.embedded import PATH

SHARED = ROOT.parent / "shared"
REAL = ["vocab/gpt2", "vocab/cl100k_base", "vocab/o200k_base", "vocab/mistral_v3", "models/stories260K", "embedded"]

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++(?!\S)|\s*[\r\n]|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]

# What the small tokenizers are trained on, and what texts are made of.
CORPUS = [
    "the theory of the naïve é 日本 日本語 🙂🙂 it's the end, isn't it? we'll see!!  \n\n",
    "12345 6789 2024-10-11 x = 10;\n\tif (x == 100) {\n\t\treturn 'res';\n\t}\r\n\r\n   y/z // they're I'LL <a> ...",
    "aaaa bbbb abab ' 's 're ''' !'s \n \n  \n a  b   c    d ABC Abc aBC éé ①② ½ x²  \t \r\n <e <eos",
]
CHUNKS = [
    *"aeth'srl ABé日語🙂12½ \n\t\r!?.,/<=_", "  ", "   ", " \n", "\n\n", "'s", "'re", "'LL", "the", " the", "123",
    "4567", "\u0301", "<e>", "<eo", "ss", "ſ", "...", "//", "\r\n", " a", "\u3000", "\u00a0", "日本",
]  # fmt: skip


def byte_level(*patterns, size=400, use_regex=False, ignore_merges=False, digits=None, vocab=None, merges=None):
    """Return BPE over bytes, trained on CORPUS or with given merges, after splits."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    if digits is not None:
        steps.append(pre_tokenizers.Digits(individual_digits=digits))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if vocab is None:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(CORPUS, bpe_trainer(size, initial_alphabet=alphabet))
        if ignore_merges:
            rules = tokenizer.to_str()              # a word that no merges make, as some tokenizers have
            assert '"vocab":{' in rules
            V = tokenizer.get_vocab_size()
            tokenizer = Tokenizer.from_str(rules.replace('"vocab":{', f'"vocab":{{"Ġzebra":{V},"sah":{V + 1},', 1))
    else:
        tokenizer.model = models.BPE({piece: i for i, piece in enumerate(vocab)}, merges, ignore_merges=ignore_merges)
    return tokenizer


def bpe_trainer(size, **options):
    return trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)


def with_added():
    """Return a tokenizer like GPT-2's with a special token and two that are text, one a prefix of the other."""
    tokenizer = byte_level(GPT2)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<e>", normalized=False), AddedToken("<e>s", normalized=False), "then"])
    return tokenizer


def with_special():
    tokenizer = byte_level(CL100K)
    tokenizer.add_special_tokens(["<eos>", "<e>"])
    return tokenizer


def nfc():
    tokenizer = byte_level(GPT2)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def prefix_blank():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def llama():
    """Return a tokenizer like Llama 2's: a blank before a text, rewritten blanks, byte tokens as a fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = [text.replace("日", "") for text in CORPUS]
    tokenizer.train_from_iterator(texts, bpe_trainer(500, special_tokens=["<unk>", "<s>", *HEX]))
    rules = json.loads(tokenizer.to_str())          # byte tokens are tokens like others
    rules["added_tokens"] = rules["added_tokens"][:2]
    return Tokenizer.from_str(json.dumps(rules))


def characters(normalizer=None, step=None):
    """Return BPE over characters, with blanks that the normalizer or the step rewrites."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, step
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]) if step else decoders.Fuse()
    tokenizer.train_from_iterator([*CORPUS, "".join(CHUNKS)], bpe_trainer(200))
    return tokenizer


def metaspace(split):
    return characters(step=pre_tokenizers.Metaspace(prepend_scheme="never", split=split))


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram():
    pieces = [("<unk>", 0.0), ("▁", -3.0), *((char, -5.0) for char in "abcehnst"), ("ab", -1.5), ("bc", -2.0)]
    pieces += [("the", -2.0), *((piece, -9.0) for piece in HEX)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


FAMILIES = {
    "no splits": byte_level,
    "gpt2": lambda: byte_level(GPT2),
    "gpt2, 1000": lambda: byte_level(GPT2, size=1000),
    "ByteLevel": lambda: byte_level(use_regex=True),
    "cl100k": lambda: byte_level(CL100K, size=600),
    "possessive": lambda: byte_level(POSSESSIVE, size=600),
    "o200k": lambda: byte_level(O200K),
    "deepseek": lambda: byte_level(*DEEPSEEK),
    "digits": lambda: byte_level(digits=True, use_regex=True),
    "runs of digits": lambda: byte_level(digits=False),
    "gaps": lambda: byte_level(r"th|\d{2}(?=e)|\s+?[a-c]|\\.?x"),
    "special": with_special,
    "characters": characters,
    "metaspace": lambda: metaspace(split=True),
    "metaspace, no splits": lambda: metaspace(split=False),
    "prefix blank": prefix_blank,
    "llama": llama,
    "gemma": lambda: characters(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "ignore_merges": lambda: byte_level(CL100K, ignore_merges=True),
    "added": with_added,
    "nfc": nfc,
    "wordpiece": wordpiece,
    "unigram": unigram,
}
SUPPORTED = [*list(FAMILIES)[:18], *REAL]


def canonical_of(tokenizer):
    return Canonical(tokenizer, Vocabulary.from_tokenizer(fast(tokenizer)))


@functools.cache
def made(name):
    """Return a tokenizer of a family, or a real one, and its Canonical, created once."""
    if name in FAMILIES:
        return (tokenizer := FAMILIES[name]()), canonical_of(tokenizer)
    if not ((path := PATH if name == "embedded" else SHARED / name).is_dir()):
        pytest.skip(f"needs the tokenizer in shared/{name}, which is not here")
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer.backend_tokenizer, Canonical(tokenizer, Vocabulary.from_tokenizer(tokenizer))


def truth(tokenizer, ids):
    """Return True if encode(decode(ids)) == ids."""
    return tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False).ids == list(ids)


def walk(canonical, ids):
    """Return the states along `ids`, until there is none."""
    states = [canonical.start]
    for id in ids:
        state = canonical.advance(states[-1], id)
        if state is None:
            break
        states.append(state)
    return states


def judged(canonical, ids):
    """Return True if a sequence passes `advance` and then `accepts`."""
    states = walk(canonical, ids)
    return len(states) == len(ids) + 1 and canonical.accepts(states[-1])


def sequences(tokenizer, canonical, num, rng):
    """Yield random sequences: encodings of random texts, half of them with tokens cut, joined or exchanged."""
    tokens = canonical.vocab.tokens
    ordinary = [id for id, data in enumerate(tokens) if data]
    by_bytes = {data: id for id, data in enumerate(tokens)}
    for _ in range(num):
        if rng.random() < 0.2:
            yield rng.choices(ordinary, k=rng.randrange(1, 6))
            continue
        text = "".join(rng.choices(CHUNKS, k=rng.randrange(1, 12)))
        ids = [id for id in tokenizer.encode(text, add_special_tokens=False).ids if tokens[id]]
        for _ in range(rng.choice([0, 1, 1, 2]) if ids else 0):
            at = rng.randrange(len(ids))
            data = tokens[ids[at]]
            cut = rng.randrange(len(data) + 1)
            if rng.random() < 0.2:
                ids[at] = rng.choice(ordinary)
            elif data[:cut] in by_bytes and data[cut:] in by_bytes and 0 < cut < len(data):
                ids[at : at + 1] = [by_bytes[data[:cut]], by_bytes[data[cut:]]]
            elif at + 1 < len(ids) and data + tokens[ids[at + 1]] in by_bytes:
                ids[at : at + 2] = [by_bytes[data + tokens[ids[at + 1]]]]
        yield ids


def check(tokenizer, canonical, num, seed):
    """Compare `num` random sequences with the truth; return the numbers of sequences not canonical, and cut."""
    wrong = cut = 0
    for ids in sequences(tokenizer, canonical, num, random.Random(seed)):
        expected = truth(tokenizer, ids)
        states = walk(canonical, ids)
        shown = f"{ids}, {[canonical.vocab.tokens[id] for id in ids]}"
        assert (len(states) == len(ids) + 1 and canonical.accepts(states[-1])) == expected, shown
        assert canonical.is_canonical(ids) == expected, shown
        wrong += not expected
        cut += len(states) <= len(ids)
    return wrong, cut


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *slow(*REAL)])
def test_an_accepted_sequence_equals_the_encoding_of_the_tokenizer(name):
    tokenizer, canonical = made(name)
    assert canonical.supported == (name in SUPPORTED), canonical.reason
    wrong, cut = check(tokenizer, canonical, repetitions(10_000, 800), seed=1)
    assert wrong > 30 and cut >= 0.8 * wrong * canonical.supported


@pytest.mark.parametrize("name", FAMILIES)
def test_every_prefix_of_an_encoding_passes_and_its_masks_allow_it(name):
    tokenizer, canonical = made(name)
    rng = random.Random(3)
    for _ in range(repetitions(3000, 200)):
        ids = tokenizer.encode("".join(rng.choices(CHUNKS, k=rng.randrange(30))), add_special_tokens=False).ids
        ids = [id for id in ids if canonical.vocab.tokens[id]]
        if not truth(tokenizer, ids):               # a text with unknown characters, or not a normal one
            continue
        states = walk(canonical, ids)
        assert len(states) == len(ids) + 1 and canonical.accepts(states[-1])
        assert all(canonical.mask(state)[id] for state, id in zip(states, ids, strict=False))


@pytest.mark.parametrize("name", [*FAMILIES, *slow(*REAL)])
def test_a_mask_is_advance_for_every_token(name):
    tokenizer, canonical = made(name)
    rng = random.Random(4)
    for ids in sequences(tokenizer, canonical, repetitions(*((10, 1) if name in REAL else (150, 15))), rng):
        state = rng.choice(walk(canonical, ids))
        mask = canonical.mask(state)
        expected = [canonical.advance(state, id) is not None for id in range(len(canonical.vocab))]
        assert mask.tolist() == expected and mask.dtype == bool and not mask.flags.writeable


@pytest.mark.parametrize("name", ["gpt2", "o200k", "nfc", "llama", "wordpiece"])
def test_with_a_token_index_each_string_has_one_encoding(name):
    tokenizer, canonical = made(name)
    index = TokenIndex(Language(" ?(the|a)( theory| end)?(n't|!!|  )?[01]{0,2}"), canonical.vocab)
    found, todo = [], [((), index.start, canonical.start)]
    while todo:
        ids, at, state = todo.pop()
        if index.accepts(at) and canonical.accepts(state):
            found.append(ids)
        mask = index.mask(at) & canonical.mask(state)
        todo += [((*ids, id), index.advance(at, id), canonical.advance(state, id)) for id in mask.nonzero()[0].tolist()]
    texts = [a + b + c + d + e for a in ("", " ") for b in ("the", "a") for c in ("", " theory", " end")
             for d in ("", "n't", "!!", "  ") for e in ("", *"01", "00", "01", "10", "11")]  # fmt: skip
    encodings = {tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts}
    texts_left = {tokenizer.decode(ids, skip_special_tokens=False) for ids in found}
    assert len(found) == len(set(found)) and set(found) <= encodings
    assert len(texts_left) == len(found)
    if name != "wordpiece":                         # which gives back no blanks; llama's texts all begin with one
        assert len(found) == len(texts) / (2 if name == "llama" else 1)


# A tokenizer in which all that is hard about GPT-2's splits can be said with ten tokens.
TINY = ["a", "s", "'", "Ġ", "Ċ", "ĠĠ", "ĊĊ", "'s", "Ġa", "sa"]
TINY_MERGES = [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("'", "s"), ("Ġ", "a"), ("s", "a")]
LETTERS = ["a", "b", "aa", "ab", "ba", "aab", "bab", "abab"]
LETTER_MERGES = [("a", "b"), ("a", "a"), ("b", "a"), ("a", "ab"), ("b", "ab"), ("ab", "ab")]
HALVES = ["a", "Ã", "©", "Ġ", "aÃ", "Ã©", "©a", "ĠÃ"]
HALF_MERGES = [("Ã", "©"), ("a", "Ã"), ("©", "a"), ("Ġ", "Ã")]


@pytest.mark.parametrize(
    "patterns, vocab, merges, most, slack",
    [
        ([], LETTERS, LETTER_MERGES, 5, 0),
        ([GPT2], TINY, TINY_MERGES, 4, 0),
        ([CL100K], TINY, TINY_MERGES, 4, 0),
        ([O200K], TINY, TINY_MERGES, 4, 0),
        ([GPT2], HALVES, HALF_MERGES, 4, 12),       # "aÃ": no token completes it that would not have merged
        (["a+b|b"], LETTERS, LETTER_MERGES, 4, 2),  # "a", "a": wants a cut, and a "b" for it; but "ab" is one
        (["aab?a", "b"], LETTERS, LETTER_MERGES, 4, 1),
    ],
)
def test_all_short_sequences_and_their_continuations_are_judged_correctly(patterns, vocab, merges, most, slack):
    tokenizer = byte_level(*patterns, vocab=vocab, merges=merges)
    canonical = canonical_of(tokenizer)
    assert canonical.supported
    alive, hopeless = {()}, 0                       # prefixes of a canonical sequence of at most `most` tokens
    everything = [ids for n in range(most + 1) for ids in itertools.product(range(len(vocab)), repeat=n)]
    for ids in reversed(everything):
        if ids in alive or truth(tokenizer, ids):
            alive.update(ids[:n] for n in range(len(ids) + 1))
        assert judged(canonical, ids) == truth(tokenizer, ids), [vocab[id] for id in ids]
    for ids in everything:
        passes = len(walk(canonical, ids)) == len(ids) + 1
        assert passes or ids not in alive, [vocab[id] for id in ids]
        hopeless += passes and ids not in alive and len(ids) <= most - 2  # two more tokens settle what can be settled
    assert hopeless == slack, hopeless


# --- counter-examples: to pairs that are judged by themselves, and to prefixes that are -------------------------------


def spelled(canonical, *texts):
    """Return the ids of the tokens with these texts or bytes."""
    wanted = [text.encode() if isinstance(text, str) else text for text in texts]
    return [canonical.vocab.tokens.index(data) for data in wanted]


def by_hand(*patterns, vocab, merges, **options):
    tokenizer = byte_level(*patterns, vocab=vocab, merges=merges, **options)
    return tokenizer, canonical_of(tokenizer)


def verdicts(tokenizer, canonical, ids):
    """Return the verdict of the states, and that of the tokenizer."""
    return judged(canonical, ids), truth(tokenizer, ids)


def test_text_equal_to_an_added_token_is_that_token():
    tokenizer = byte_level(vocab=["<", "e", ">", "a"], merges=[])
    tokenizer.add_special_tokens(["<e>"])
    canonical = canonical_of(tokenizer)
    assert canonical.supported
    less, e, more, a = range(4)
    assert walk(canonical, [less, e, more])[3:] == [] and judged(canonical, [less, e, a, more])
    assert verdicts(tokenizer, canonical, [less, e]) == (True, True)
    assert canonical.advance(canonical.start, 4) is None and not canonical.is_canonical([4])  # special: no text
    tokenizer.encode_special_tokens = True
    assert verdicts(tokenizer, canonical_of(tokenizer), [less, e, more]) == (True, True)


def test_an_added_token_that_is_text_stands_between_two_texts():
    tokenizer = byte_level(GPT2, vocab=["a", "b", "ab", "Ġ", "ĠĠ"], merges=[("a", "b"), ("Ġ", "Ġ")])
    tokenizer.add_tokens([AddedToken("ba", normalized=False), AddedToken("é", normalized=False)])
    canonical = canonical_of(tokenizer)
    assert "added tokens" in canonical.reason
    a, b, ab, _, blanks, ba, _ = range(7)
    for ids in ([a, ba, b], [blanks, ba], [ab, ba], [a, b], [b, a], [ba, a, blanks, ba]):
        assert judged(canonical, ids) == truth(tokenizer, ids), ids


def test_ignore_merges_takes_a_word_whole_that_no_merges_build():
    made = _, canonical = by_hand(GPT2, vocab=["a", "b", "c", "d", "abc", "Ġ"], merges=[], ignore_merges=True)
    assert "no merges make" in canonical.reason
    assert verdicts(*made, spelled(canonical, "a", "b", "c")) == (False, False)
    assert verdicts(*made, spelled(canonical, "a", "b", "c", "d")) == (True, True)
    assert verdicts(*made, spelled(canonical, "abc")) == (True, True)
    assert verdicts(*made, spelled(canonical, "abc", "d")) == (False, False)


def test_byte_tokens_do_not_spell_a_character_that_has_a_token():
    tokenizer, canonical = made("llama")
    assert tokenizer.token_to_id("é") is not None and tokenizer.token_to_id("日") is None
    blank = tokenizer.token_to_id("▁")
    e_acute, a, sun = ([blank, *(tokenizer.token_to_id(f"<0x{b:02X}>") for b in c.encode())] for c in "éa日")
    assert len(walk(canonical, e_acute)) == 3 and len(walk(canonical, a)) == 2  # cut at the byte that completes it
    assert verdicts(tokenizer, canonical, sun) == (True, True)


# --- contexts, copies, errors -----------------------------------------------------------------------------------------


def test_after_a_context_the_whole_text_is_canonical():
    tokenizer, canonical = made("special")
    whole = tokenizer.encode("the theory")
    ids = [id for id in whole.ids if canonical.vocab.tokens[id]]
    for n in range(len(ids)):
        state = canonical.after(ids[:n])
        for id in ids[n:]:
            state = canonical.advance(state, id)
        assert canonical.accepts(state)
    eos = tokenizer.token_to_id("<eos>")
    assert canonical.after([*ids, eos]) == canonical.start == canonical.after([eos]) == canonical.after([])
    space_a, a = spelled(canonical, " ", "a")
    assert judged(canonical, [a]) and canonical.advance(canonical.after([space_a]), a) is None  # " a" is one token


def test_a_context_that_no_encoding_begins_with_is_refused_with_its_place():
    _, canonical = made("gpt2")
    ids = spelled(canonical, "a", "h", "e")
    with pytest.raises(ValueError, match=r"tokens\[2\]: \d+, b'e', does not continue a canonical sequence after b'ah'"):
        canonical.after(ids)


def test_states_of_a_supported_tokenizer_are_finitely_many_in_a_loop():
    _, canonical = made("cl100k")
    loop = canonical.encode(" the 123  \n é")
    seen, state = set(), canonical.start
    for _ in range(50):
        for id in loop:
            state = canonical.advance(state, id)
            seen.add(state)
    assert len(seen) <= 2 * len(loop)


def test_a_canonical_is_its_own_copy_and_has_a_repr():
    _, canonical = made("gpt2")
    assert copy.deepcopy([canonical])[0] is copy.copy(canonical) is canonical
    assert repr(canonical) == "Canonical(391 tokens, supported)" and canonical.reason == ""
    assert "not supported" in repr(made("wordpiece")[1])


def test_later_changes_to_the_tokenizer_are_not_seen():
    tokenizer = byte_level(GPT2)
    canonical = canonical_of(tokenizer)
    before = canonical.encode("the end")
    tokenizer.enable_truncation(1)
    assert canonical.encode("the end") == before == canonical_of(tokenizer).encode("the end") and len(before) > 1


def test_an_unsuitable_tokenizer_or_vocabulary_is_refused():
    tokenizer, canonical = made("gpt2")
    with pytest.raises(TypeError, match="needs a fast tokenizer .* not the ByT5Tokenizer"):
        Canonical(ByT5Tokenizer(), canonical.vocab)
    with pytest.raises(ValueError, match="has 1 tokens, but the tokenizer 391"):
        Canonical(tokenizer, Vocabulary([b"a"]))
    with pytest.raises(ValueError, match="token 391 is not in this vocabulary, whose ids are 0 to 390"):
        canonical.advance(canonical.start, 391)
    with pytest.raises(ValueError, match="token -1 is not"):
        canonical.advance(canonical.start, -1)
    tokenizer = Tokenizer(models.BPE({"a": 0}, [], dropout=0.1))
    with pytest.raises(ValueError, match=r"leaves out merges at random \(dropout=0.1"):
        Canonical(tokenizer, Vocabulary([b"a"]))


def test_a_vocabulary_that_spells_otherwise_than_the_pieces_is_not_supported():
    tokenizer, canonical = made("gpt2")
    tokens = [data.replace(b"the", b"The") for data in canonical.vocab.tokens]
    assert "b'The', is not spelled like its piece 'the'" in Canonical(tokenizer, Vocabulary(tokens)).reason


def blanks(normalizer, decoder, *more, step=None):
    """Return BPE over a few characters with a blank in several spellings."""
    pieces = ["a", "b", " ", "▁", "▁a", " a", "▁▁", *more]
    merges = [("▁", "a"), (" ", "a"), ("▁", "▁")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=bool(more))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder
    if step is not None:
        tokenizer.pre_tokenizer = step
    return tokenizer


LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BACK, FUSE, BYTES = decoders.Replace("▁", " "), decoders.Fuse(), decoders.ByteFallback()


@pytest.mark.parametrize(
    "tokenizer, supported",
    [
        (blanks(None, FUSE), True),
        (blanks(None, decoders.Sequence([BACK, FUSE])), False),
        (blanks(normalizers.Replace(" ", "▁"), FUSE), False),
        (blanks(normalizers.Replace(" ", "▁"), decoders.Sequence([BACK, FUSE])), True),
        (blanks(LLAMA, decoders.Sequence([BACK, FUSE])), False),
        (blanks(LLAMA, decoders.Sequence([BACK, FUSE, decoders.Strip(" ", 1, 0)])), True),
        (blanks(LLAMA, decoders.Sequence([BACK, FUSE, decoders.Strip(" ", 9, 0)])), False),
        (blanks(LLAMA, decoders.Sequence([BACK, BYTES, FUSE, decoders.Strip(" ", 1, 0)]), *HEX[0x80:]), True),
        (blanks(normalizers.Lowercase(), FUSE), False),
        (blanks(None, FUSE, step=pre_tokenizers.Split(" ", "isolated")), True),
        (blanks(None, FUSE, step=pre_tokenizers.Split("a", "isolated", invert=True)), True),
        (blanks(LLAMA, FUSE, step=pre_tokenizers.Split(Regex(" "), "isolated")), False),
        (blanks(None, decoders.Sequence([BACK, FUSE]), step=pre_tokenizers.Metaspace(prepend_scheme="never")), True),
        (blanks(None, decoders.Metaspace(), step=pre_tokenizers.Metaspace(prepend_scheme="always")), False),
        (blanks(None, decoders.Metaspace(), step=pre_tokenizers.Metaspace(prepend_scheme="first")), False),
    ],
)
def test_blanks_however_they_are_written(tokenizer, supported):
    canonical = canonical_of(tokenizer)
    assert canonical.supported == supported, canonical.reason
    bytes_of_blank = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]
    ids = [*range(7), *(id for id in bytes_of_blank if id is not None)]
    for n in range(5):
        for each in itertools.product(ids, repeat=n):
            assert judged(canonical, each) == truth(tokenizer, each), [canonical.vocab.tokens[id] for id in each]


@pytest.mark.parametrize(
    "step, why",
    [
        (pre_tokenizers.Split("a", "removed"), "pre-tokenizer Split is not supported"),
        (pre_tokenizers.Whitespace(), "pre-tokenizer Whitespace is not supported"),
        (pre_tokenizers.Split(Regex(r"a\b"), "isolated"), r"has '\\' at 1, which is not supported"),
        (pre_tokenizers.Split(Regex("(?<=a)b"), "isolated"), "has something that is not supported: unknown extension"),
        (pre_tokenizers.Split(Regex("(?!ab)a"), "isolated"), "of more than one class"),
        (pre_tokenizers.Split(Regex("a*"), "isolated"), "matches the empty text"),
        (pre_tokenizers.Split(Regex("(?i:stop)"), "isolated"), "ignores the case"),
        (pre_tokenizers.Split(Regex("(a|b)++"), "isolated"), "of more than one class"),
        (pre_tokenizers.Split(Regex("a{2,1}"), "isolated"), "min repeat greater than max repeat"),
        (pre_tokenizers.Split(Regex(r"(?i:\p{L})b"), "isolated"), "ignores the case of a class"),
        (pre_tokenizers.Split(Regex("a{1,2}+"), "isolated"), "has '{' at 1, which is not supported"),
        (pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.Digits()]), "read what something else"),
    ],
)
def test_an_unsupported_step_has_a_reason_and_uses_the_tokenizer(step, why):
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(LETTERS)}, LETTER_MERGES))
    tokenizer.pre_tokenizer, tokenizer.decoder = step, decoders.Fuse()
    canonical = canonical_of(tokenizer)
    assert why in canonical.reason
    for ids in itertools.product(range(len(LETTERS)), repeat=3):
        assert judged(canonical, ids) == truth(tokenizer, ids)


# --- merges and splits by themselves ----------------------------------------------------------------------------------


def merged(ids, ranks):
    """Return the tokens of BPE by its definition: apply the leftmost merge of highest priority until none is left."""
    ids = list(ids)
    while found := [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(ids)) if pair in ranks]:
        (_, product), at = min(found)
        ids[at : at + 2] = [product]
    return ids


def test_adjacent_merges_agree_with_the_definition():
    rng = random.Random(5)
    ascending = 0
    for _ in range(repetitions(2000, 150)):
        leaves = {piece: i for i, piece in enumerate("abc"[: rng.randrange(1, 4)])}
        pieces, merges = dict(leaves), []
        for _ in range(rng.randrange(1, 14)):
            pair = rng.choice(list(pieces)), rng.choice(list(pieces))
            if pair not in merges:
                merges.append(pair)                 # a product may be made in several ways
                pieces.setdefault("".join(pair), len(pieces))
        if rng.random() < 0.3:
            rng.shuffle(merges)
        numbers = [(pieces[left], pieces[right], pieces[left + right]) for left, right in merges]
        table = Merges([len(piece) for piece in pieces], leaves.values(), numbers)
        if not table.ascending:
            continue
        ascending += 1
        ranks = {(left, right): (rank, product) for rank, (left, right, product) in enumerate(numbers)}
        alone = [merged([leaves[char] for char in piece], ranks) == [id] for piece, id in pieces.items()]
        assert table.stable.tolist() == alone
        for left, a in pieces.items():
            expected = [merged([leaves[char] for char in left + right], ranks) == [a, b] for right, b in pieces.items()]
            assert table.stable_after(a).tolist() == expected == [table.is_stable_pair(a, b) for b in pieces.values()]
    assert ascending > repetitions(1000, 80)


def cuts(splits, text):
    """Return the lists of cuts that are still possible at the end of a text."""
    pre, found = PreTokens(splits), [((), None)]
    for at, char in enumerate(text):
        bits = tuple(split.bits[char] for split in splits)
        found = [
            (before + (at,) * cut, guess)
            for before, guesses in found
            for cut, guess in (pre._moves(guesses, bits, 0) if at else [(False, g) for g in pre._begin(bits, 0)])
        ]
    return [before for before, guesses in found if guesses is None or pre._end(guesses, 0)]


def random_pattern(rng, depth=0):
    def item():
        char = rng.choice(["a", "b", "[ab]", "[^a]", r"\s", " ", "A", ".", r"\p{L}", r"[^\s\p{L}]", "[a-c&&[^b]]"])
        if rng.random() < 0.1:
            return f"{rng.choice(['(?!', '(?='])}{char})"
        if rng.random() < 0.2 and depth < 3:
            group = rng.choice(["(?:", "(", "(?i:"]) + random_pattern(rng, depth + 1) + ")"
            return group + rng.choice(["", "?", "*", "+", "{2}", "{1,2}", "??", "+?", "{,2}", "{2,}"])
        return char + rng.choice(["", "", "?", "*", "+", "??", "*?", "+?", "?+", "*+", "++", "{2}", "{1,2}"])

    return "|".join("".join(item() for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4)))


def test_one_guess_remains_and_it_is_the_splits_own():
    rng, supported = random.Random(6), 0
    for _ in range(repetitions(4000, 300)):
        patterns = [random_pattern(rng) for _ in range(rng.randrange(1, 3))]
        try:
            splits = [Split(pattern) for pattern in patterns]
        except UnsupportedTokenizer:
            continue
        supported += 1
        real = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
        for _ in range(10):
            text = "".join(rng.choices("abcA \n1", k=rng.randrange(1, 9)))
            expected = [tuple(begin for _, (begin, _) in real.pre_tokenize_str(text))[1:]]
            assert cuts(splits, text) == expected, (patterns, text)
    assert supported > repetitions(500, 40)


def test_FOLDED_holds_every_ascii_string_that_a_character_folds_to():
    folded = {char.casefold() for char in map(chr, range(0x110000)) if len(char.casefold()) > 1}
    assert all(any(fold in text for fold in FOLDED) for text in folded if text.isascii())
