"""Bytes of tokens, compared with hand-written tables, the tokenizers' own decode, and round trips of arbitrary text."""

import copy
import functools
import itertools
import operator
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.common import ROOT, slow
from helpers.tokenizers import HEX, byte_level, fast, llama, unigram
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer

from llmppl.constraints import EOS, Text, Token, Vocabulary, encode_fragment

SHARED = ROOT.parent / "shared"
REAL = ["vocab/gpt2", "vocab/mistral_v3", "models/stories260K", "embedded/tiny",
        *slow("vocab/cl100k_base", "vocab/o200k_base")]  # fmt: skip
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def abc(**options):
    """Return a vocabulary of five tokens; 3 is eos, and 4 is special."""
    return Vocabulary([b"a", b"b", b"\xc3", b"x", b"y"], eos_ids=[3], special_ids=[4], **options)


def joined(vocab, ids):
    return b"".join(vocab.tokens[i] for i in ids)


# --- tokenizers small enough to write down ----------------------------------------------------------------------------


def wordpiece():
    words = ["[PAD]", "[UNK]", "play", "##ing", "##s", "a", "##a", ",", "n't", "é", "##é"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    return fast(tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def word_level(decoder=None, words=("<eos>", "red", "blue", "é"), **special):
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return fast(tokenizer, **({"eos_token": "<eos>"} | special))


def end_of_word():
    """Return BPE whose pieces mark the end of a word."""
    words = ["un", "a", "do</w>", "it</w>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return fast(tokenizer)


FAMILIES = {
    "byte-level": byte_level,
    "unigram": unigram,
    "llama": llama,
    "wordpiece": wordpiece,
    "word-level": word_level,
    "word-level, fused": lambda: word_level(decoders.Fuse()),
    "end of word": end_of_word,
    "slow": ByT5Tokenizer,
}


@functools.cache
def made(name):
    """Return a tokenizer of a family and its vocabulary, created once."""
    tokenizer = FAMILIES[name]()
    return tokenizer, Vocabulary.from_tokenizer(tokenizer)


def real(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs the tokenizer in shared/{name}, which is not here")
    return AutoTokenizer.from_pretrained(SHARED / name)


# --- EOS --------------------------------------------------------------------------------------------------------------


def test_EOS_equals_only_the_eos_tokens_of_any_vocabulary():
    vocab = Vocabulary([b"a", b"", b""], eos_ids=[1, 2])
    assert vocab[1] == EOS and EOS == vocab[2] and EOS == EOS and not vocab[1] != EOS
    assert vocab[0] != EOS and EOS != vocab[0]
    assert EOS != 1 and EOS != "" and EOS != np.int64(1) and EOS is not None
    assert (repr(EOS), str(EOS), f"{EOS}") == ("EOS", "", "")


def test_EOS_is_one_object_however_it_is_copied():
    assert copy.copy(EOS) is copy.deepcopy([EOS])[0] is pickle.loads(pickle.dumps(EOS)) is type(EOS)() is EOS


def test_EOS_has_no_hash_and_says_why():
    with pytest.raises(TypeError, match="equals every eos token"):
        hash(EOS)


# --- Text -------------------------------------------------------------------------------------------------------------


@given(UNICODE, st.lists(st.integers(0, 80)))
def test_a_text_cut_into_bytes_anywhere_comes_out_whole(text, cuts):
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole = functools.reduce(operator.add, [Text(data[a:b]) for a, b in itertools.pairwise(places)])
    assert whole == text and whole.bytes == data and hash(whole) == hash(text)


def test_text_token_str_and_EOS_add_up_in_any_order():
    vocab = Vocabulary([b"\xc3", b"\xa9", b"b", b""], eos_ids=[3])
    sums = [Text() + vocab[0] + vocab[1], "" + vocab[0] + vocab[1], Text(b"\xc3") + Text(b"\xa9"), "" + Text("é"),
            Text("é") + vocab[3], Text("é") + EOS, "é" + EOS]  # fmt: skip
    assert [(type(s), s, s.bytes) for s in sums] == [(Text, "é", "é".encode())] * len(sums)
    s = "a"
    s += vocab[2]
    assert s == "ab" and type(s) is Text
    assert Text(b"\xc3") == "\ufffd"


def test_a_text_keeps_its_bytes_when_copied_or_pickled():
    half = Text(b"a\xc3")
    assert copy.deepcopy(half) is half and copy.copy(half) is half
    assert pickle.loads(pickle.dumps(half)).bytes == Text(half).bytes == b"a\xc3"


def test_a_value_without_bytes_is_refused():
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        Text("\ud800")
    with pytest.raises(TypeError, match="made of str or bytes, not of the int 3"):
        Text(3)
    with pytest.raises(TypeError):
        Text("a") + 3
    with pytest.raises(TypeError):
        3 + Text("a")


# --- Token ------------------------------------------------------------------------------------------------------------


def test_a_token_is_an_int_that_knows_its_text():
    vocab = abc()
    token = vocab[1]
    assert token == 1 and hash(token) == hash(1) and [10, 20][token] == 20 and np.arange(3)[token] == 1
    assert (str(token), f"{token}", token.bytes, token.vocab) == ("b", "b", b"b", vocab)
    assert token + 1 == 2 and 1 + token == 2 and type(1 + token) is int and sum([token, token]) == 2
    assert not token.is_eos and vocab[3].is_eos


def test_comparing_a_token_with_a_text_raises_a_helpful_error():
    vocab = Vocabulary([b".", b"a", b"", b""], eos_ids=[2], special_ids=[3])
    dot, a, eos, pad = vocab
    for ask in (
        lambda: dot == ".", lambda: "." == dot, lambda: dot != ".", lambda: "a" != dot, lambda: dot in (".", "!"),
        lambda: "." in [a, dot], lambda: dot == Text("."), lambda: [dot] == ["."], lambda: [a, dot].index("."),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"Token\(\d, '[.a]'\) is an id, which no \w+ equals: compare str\(tok"):
            ask()
    with pytest.raises(TypeError, match=r"which no bytes equals: compare .* token\.bytes"):
        dot == b"."                                     # noqa: B015
    for special in (eos, pad):                          # their text is "", whatever the tokenizer calls them
        with pytest.raises(TypeError, match=r"compare str\(token\) .* or token == EOS for the end of the text"):
            special == "</s>"                           # noqa: B015


def test_a_token_equals_its_id_and_EOS_if_it_is_an_eos():
    vocab = abc()
    a, b, end = vocab[0], vocab[1], vocab[3]
    assert a == 0 and 0 == a and a != 1 and a == vocab[0] and a != b and not a == b and not a != 0
    assert a in (0, 7) and a in {0} and {a: "x"}[0] == "x" and {0: "x"}[a] == "x" and [a, b] == [0, 1] == [a, b]
    assert a == 0.0 and a != None and a != [0] and (np.arange(3) == a).tolist() == [True, False, False]    # noqa: E711
    assert end == EOS and EOS == end and a != EOS and EOS != a and a not in (EOS, end) and end in (EOS,)
    assert a not in {"a", "."}                          # a set looks for the id, and never compares


def test_the_repr_of_a_token_shows_its_text_or_its_kind():
    vocab = Vocabulary([b" the", b"\xc3", b"", b"", b""], eos_ids=[2], special_ids=[3], unknown_ids=[4])
    assert [repr(token) for token in vocab] == [
        "Token(0, ' the')", "Token(1, b'\\xc3')", "Token(2, EOS)", "Token(3, special)", "Token(4, unknown)"
    ]  # fmt: skip


def test_a_token_is_made_once_and_is_its_own_copy():
    vocab = abc()
    assert vocab[1] is vocab[1] is vocab[np.int32(1)] is vocab.token(1) is copy.deepcopy({"a": vocab[1]})["a"]
    again = pickle.loads(pickle.dumps([vocab[1], vocab]))
    assert again[0] == vocab[1] and again[0] is again[1][1] and again[0].bytes == b"b"


# --- Vocabulary -------------------------------------------------------------------------------------------------------


def test_a_vocabulary_holds_bytes_and_says_which_ids_have_none():
    vocab = abc(unknown_ids=[1])
    assert vocab.tokens == [b"a", b"", b"\xc3", b"", b""] and len(vocab) == 5
    assert (vocab.eos_ids, vocab.special_ids) == ((3,), frozenset({1, 3, 4}))
    assert vocab.known.tolist() == [True, False, True, True, True] and vocab.known.dtype == bool
    with pytest.raises(ValueError, match="read-only"):
        vocab.known[0] = False
    assert [type(token) for token in vocab[1:3]] == [Token, Token] and vocab[1:3] == [1, 2]


def test_the_repr_of_a_vocabulary_counts_its_tokens():
    reprs = [repr(Vocabulary([b"a", b"b"], eos_ids=eos)) for eos in ([], [1], [1, 0])]
    assert reprs == [f"Vocabulary(2 tokens, eos={eos})" for eos in ("None", "1", "0, 1")]


def test_vocabularies_are_equal_if_their_contents_are():
    vocab = abc()
    assert vocab == abc() and hash(vocab) == hash(abc()) and vocab == pickle.loads(pickle.dumps(vocab))
    assert copy.deepcopy(vocab) is vocab and copy.copy(vocab) is vocab
    others = [
        Vocabulary([b"a", b"b", b"\xc3", b"", b""], [4], [3]),
        Vocabulary([b"a", b"b", b"\xc3", b"", b"y"], [3]),
        Vocabulary([b"ab", b"", b"\xc3", b"", b""], [3], [4]),
        Vocabulary([b"a", b"b", b"\xc3", b"", b""], [3], [], [4]),
        Vocabulary([b"a", b"b", b"\xc3", b""], [3]),
    ]
    assert all(vocab != other for other in others) and len({vocab, abc(), *others}) == 6
    assert vocab != vocab.tokens


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([],), ValueError, "at least one token"),
        ((["a"],), TypeError, "tokens[0] is the str 'a'"),
        (("abc",), TypeError, "tokens[0] is the str 'a'"),
        (([b"a"], [1]), ValueError, "eos_ids: id 1 is not in this vocabulary, whose ids are 0 to 0"),
        (([b"a"], (), [-1]), ValueError, "special_ids: id -1 is not"),
        (([b"a"], (), (), [7]), ValueError, "unknown_ids: id 7 is not"),
        (([b"a"], ["a"]), TypeError, "eos_ids: a token id is an int, not the str 'a'"),
    ],
)
def test_a_bad_vocabulary_is_refused_by_name(arguments, error, message):
    with pytest.raises(error) as raised:
        Vocabulary(*arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (5, ValueError, "id 5 is not in this vocabulary, whose ids are 0 to 4"),
        (-1, ValueError, "id -1 is not in this vocabulary"),
        ("a", TypeError, "an int, not the str 'a'"),
        (b"a", TypeError, "an int, not the bytes b'a'"),
        (True, TypeError, "an int, not the bool True"),
        (np.True_, TypeError, "an int, not the bool"),
        (1.0, TypeError, "an int, not the float 1.0"),
        (None, TypeError, "an int, not the NoneType None"),
        (EOS, TypeError, "an int, not the EndOfText EOS"),
    ],
)
def test_an_invalid_token_of_a_vocabulary_is_refused_by_name(value, error, message):
    for ask, raises in ((abc().token, error), (abc().__getitem__, IndexError if error is ValueError else error)):
        with pytest.raises(raises) as raised:
            ask(value)
        assert message in str(raised.value)


def test_a_token_of_another_vocabulary_is_refused_unless_the_two_are_equal():
    vocab, other = abc(), Vocabulary([b"a", b" the"])
    assert vocab.token(abc()[1]) is vocab[1]
    with pytest.raises(ValueError) as raised:
        vocab.token(other[1])
    assert str(raised.value) == (
        "token Token(1, ' the') belongs to another vocabulary (2 tokens), not to this one (5 tokens)"
    )


def test_importing_the_module_loads_no_tokenizer_library():
    code = "import sys, llmppl.constraints; print(sorted({'transformers', 'tokenizers', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- spelling ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=0, max_size=3).map(lambda b: bytes(x % 2 + 97 for x in b)), min_size=1, max_size=6),
       st.lists(st.sampled_from([97, 98]), max_size=6).map(bytes))  # fmt: skip
def test_spell_finds_the_fewest_tokens_with_the_lowest_ids(tokens, data):
    vocab = Vocabulary([*tokens, data], special_ids=[len(tokens)])
    ways = [ids for n in range(len(data) + 1) for ids in itertools.product(range(len(tokens)), repeat=n)
            if n <= 4 and joined(vocab, ids) == data]  # fmt: skip
    if ways:
        assert vocab.spell(data) == list(min(ways, key=lambda ids: (len(ids), ids)))
    else:
        try:
            assert joined(vocab, vocab.spell(data)) == data
        except ValueError as error:
            assert "no tokens of this vocabulary spell" in str(error)


def test_spell_names_the_first_byte_that_no_token_reaches():
    vocab = Vocabulary([b"ab", b"abc", b"q"], special_ids=[2])
    assert vocab.spell(b"abcab") == [1, 0] and vocab.spell(b"") == []
    with pytest.raises(ValueError, match="no tokens of this vocabulary spell b'ababcqab': none continues at byte 5"):
        vocab.spell(b"ababcqab")


# --- vocabularies of tokenizers ---------------------------------------------------------------------------------------


def test_byte_level_bytes_agree_with_the_pre_tokenizer():
    tokenizer = byte_level()
    vocab = Vocabulary.from_tokenizer(tokenizer)
    byte_of = {}  # the alphabet as the library itself writes it: all bytes that UTF-8 has
    codes = [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x10000, 64), *range(0x10000, 0x110000, 4096)]
    for char in map(chr, codes):
        ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)
        byte_of.update(zip(piece, char.encode(), strict=True))
    assert len(byte_of) == 256 - 13
    for piece, i in tokenizer.get_vocab().items():
        if set(piece) <= byte_of.keys() and i not in vocab.special_ids:
            assert vocab.tokens[i] == bytes(byte_of[char] for char in piece)
    assert {data[0] for data in vocab.tokens if len(data) == 1} == set(range(256))
    assert vocab.eos_ids == (0,) and vocab.special_ids == {0} and vocab.known.all()


def test_added_tokens_of_a_byte_level_tokenizer_are_plain_text():
    tokenizer = byte_level()
    added, start = ["<tool>", "  two spaces", "éü", "日", " the"], len(tokenizer)
    tokenizer.add_tokens(added)
    vocab = Vocabulary.from_tokenizer(tokenizer)
    text = "a<tool>  two spaces éü日 the"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert joined(vocab, ids) == text.encode() and set(ids) >= set(range(start, start + 5))
    assert vocab.tokens[start:] == [text.encode() for text in added]
    assert "\ufffd" in tokenizer.decode([start + 2])  # the decoder reads "éü" as the bytes E9 FC
    assert vocab.tokens.count(b" the") == 2  # two ids for the same bytes stay two


def test_unigram_and_llama_pieces_are_spaces_words_and_bytes():
    for tokenizer in (unigram(), llama()):
        vocab, id = Vocabulary.from_tokenizer(tokenizer), tokenizer.get_vocab()
        assert [vocab.tokens[id[piece]] for piece in HEX] == [bytes([byte]) for byte in range(256)]
        assert [vocab.tokens[id[piece]] for piece in ("▁", "▁the", "the")] == [b" ", b" the", b"the"]
        assert [vocab.tokens[id[piece]] for piece in ("<unk>", "</s>")] == [b"", b""]
        assert vocab.eos_ids == (id["</s>"],)


@pytest.mark.parametrize("name", ["unigram", "llama"])
@given(text=UNICODE)
def test_a_sentencepiece_encoding_prepends_one_space_to_the_text(name, text):
    tokenizer, vocab = made(name)
    written = text.replace("▁", " ")  # these tokenizers write one for the other
    assert joined(vocab, tokenizer.encode(text, add_special_tokens=False)) in (
        written.encode(), (" " + written).encode()
    )  # fmt: skip


def test_only_pieces_inside_a_word_add_no_space():
    tokens = Vocabulary.from_tokenizer(wordpiece()).tokens
    assert tokens == [b"", b"", b" play", b"ing", b"s", b" a", b"a", b",", b"n't", " é".encode(), "é".encode()]


def test_words_are_joined_as_the_tokenizer_joins_them():
    assert word_level().decode([1, 2]) == "red blue" and word_level(decoders.Fuse()).decode([1, 2]) == "redblue"
    assert Vocabulary.from_tokenizer(word_level()).tokens == [b"", b" red", b" blue", " é".encode()]
    assert Vocabulary.from_tokenizer(word_level(decoders.Fuse())).tokens == [b"", b"red", b"blue", "é".encode()]
    assert Vocabulary.from_tokenizer(end_of_word()).tokens == [b"un", b"a", b"do ", b"it "]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_a_text_are_its_tokens_bytes_joined(name):
    tokenizer, vocab = made(name)
    byte_pieces = set(HEX) if name == "unigram" else set()  # which its decoder leaves as they are
    vocabulary = tokenizer.get_vocab().items()
    ordinary = sorted(i for piece, i in vocabulary if vocab.tokens[i] and piece not in byte_pieces)
    first = next(i for i in ordinary if vocab.tokens[i].strip().isalpha())
    rng, compared = np.random.default_rng(0), 0
    for _ in range(300):
        ids = rng.choice(ordinary, 2).tolist()
        try:
            text = joined(vocab, ids).decode()
        except UnicodeDecodeError:
            continue
        whole = tokenizer.decode([first, *ids, first], clean_up_tokenization_spaces=False)
        assert whole.strip() == (str(vocab[first]) + text + str(vocab[first])).strip()
        compared += 1
    assert compared > 20


def test_an_AddedToken_alone_can_mark_a_token_special():
    tokenizer = word_level(words=["<eos>", "red"])
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("[INST]", special=True)])
    tokenizer.backend_tokenizer.add_tokens([AddedToken("green", special=False)])
    vocab = Vocabulary.from_tokenizer(tokenizer)
    assert tokenizer.all_special_ids == [0]
    assert vocab.tokens == [b"", b" red", b"", b" green"] and vocab.special_ids == {0, 2}


def test_ids_without_an_entry_are_unknown():
    model = models.WordLevel({"a": 0, "b": 3, "[UNK]": 5}, unk_token="[UNK]")
    vocab = Vocabulary.from_tokenizer(fast(Tokenizer(model), unk_token="[UNK]"))
    assert vocab.known.tolist() == [True, False, False, True, False, True]
    assert vocab.tokens == [b" a", b"", b"", b" b", b"", b""] and vocab.special_ids == {1, 2, 4, 5}
    assert vocab.eos_ids == ()  # this tokenizer has none


def test_extra_eos_ids_join_those_of_the_tokenizer():
    tokenizer = word_level()
    vocab = Vocabulary.from_tokenizer(tokenizer, eos_ids=[2, 0])
    assert vocab.eos_ids == (0, 2) and vocab.tokens[2] == b"" and vocab[2] == EOS
    with pytest.raises(ValueError, match="eos_ids: id 9 is not in this vocabulary"):
        Vocabulary.from_tokenizer(tokenizer, eos_ids=[9])


@given(UNICODE)
def test_a_slow_tokenizer_is_measured(text):
    tokenizer, vocab = made("slow")
    assert not hasattr(tokenizer, "backend_tokenizer")
    assert vocab.tokens[3:259] == [bytes([byte]) for byte in range(256)] and vocab.eos_ids == (1,)
    assert joined(vocab, encode_fragment(tokenizer, vocab, text + "</s>")) == (text + "</s>").encode()


def test_pieces_before_a_byte_level_decoder_are_read_by_its_alphabet():
    words = ["_a", "Ã", "©", "ĠÃ"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", "Ġ"), decoders.ByteLevel()])
    assert Vocabulary.from_tokenizer(fast(tokenizer)).tokens == [b" a", b"\xc3", b"\xa9", b" \xc3"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC("<pad>"),  # drops repetitions
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("l+"), "l")]),  # reads across tokens
    ],
)
def test_a_decoder_that_does_not_work_token_by_token_is_refused(decoder):
    with pytest.raises(ValueError, match="does not decode token by token"):
        Vocabulary.from_tokenizer(word_level(decoder, words=["<eos>", "a", "al", "lo"]))


# --- fragments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "unigram", "llama"])
@given(text=UNICODE)
def test_a_fragment_has_the_bytes_of_its_text(name, text):
    tokenizer, vocab = made(name)
    assert joined(vocab, encode_fragment(tokenizer, vocab, text)) == text.encode()


def test_a_fragment_is_encoded_as_in_the_middle_of_a_text():
    for tokenizer in (unigram(), llama()):
        vocab, id = Vocabulary.from_tokenizer(tokenizer), tokenizer.get_vocab()
        assert encode_fragment(tokenizer, vocab, "the the") == [id["the"], id["▁the"]]
        assert encode_fragment(tokenizer, vocab, " the") == [id["▁the"]]
        assert encode_fragment(tokenizer, vocab, "\n") == [id["<0x0A>"]]
        assert encode_fragment(tokenizer, vocab, "") == []
    tokenizer = byte_level(add_prefix_space=True)
    vocab = Vocabulary.from_tokenizer(tokenizer)
    fragment = encode_fragment(tokenizer, vocab, "the the")
    assert [vocab.tokens[i] for i in fragment] == [b"the", b" the"]


def test_a_fragment_of_wordpieces_may_begin_inside_a_word():
    tokenizer = wordpiece()
    vocab = Vocabulary.from_tokenizer(tokenizer)
    for text, tokens in ((" playing, a", [b" play", b"ing", b",", b" a"]), ("s a", [b"s", b" a"])):
        assert [vocab.tokens[i] for i in encode_fragment(tokenizer, vocab, text)] == tokens
    with pytest.raises(ValueError, match="none continues at byte 0"):
        encode_fragment(tokenizer, vocab, "Z")


@pytest.mark.parametrize("name", ["byte-level", "llama"])
def test_a_special_token_in_the_text_of_a_user_is_spelled(name):
    tokenizer, vocab = made(name)
    for text in ("a" + tokenizer.eos_token, tokenizer.eos_token, f" {tokenizer.eos_token} the"):
        ids = encode_fragment(tokenizer, vocab, text)
        assert joined(vocab, ids) == text.encode() and not vocab.special_ids & set(ids)
    assert tokenizer.eos_token_id in tokenizer.encode("a" + tokenizer.eos_token)  # as before


def test_a_text_that_a_normalizer_would_change_uses_the_fewest_tokens():
    tokenizer = byte_level(normalizer=normalizers.NFC())
    vocab = Vocabulary.from_tokenizer(tokenizer)
    text = "the e\u0301"
    assert joined(vocab, tokenizer.encode(text)) == "the é".encode()
    fragment = encode_fragment(tokenizer, vocab, text)
    assert fragment == vocab.spell(text.encode()) and joined(vocab, fragment) == text.encode()


class Marks:
    """Tokenizer that always puts a special token, id 2, before every character."""

    def encode(self, text, **options):
        return [id for char in text for id in (2, {"a": 0, "b": 1}.get(char, 3))]


def test_a_special_token_inside_a_fragment_is_not_part_of_its_text():
    vocab = Vocabulary([b"a", b"b", b"", b"."], special_ids=[2])
    assert encode_fragment(Marks(), vocab, "ab") == [0, 1]          # [0, 2, 1] has the same bytes
    assert encode_fragment(Marks(), vocab, "a") == [0]


def test_half_a_character_can_be_a_fragment():
    tokenizer, vocab = made("byte-level")
    assert joined(vocab, encode_fragment(tokenizer, vocab, Text(b"the \xc3"))) == b"the \xc3"


# --- real tokenizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_real_tokenizer_round_trips_stories_and_unicode(name):
    tokenizer = real(name)
    vocab = Vocabulary.from_tokenizer(tokenizer)
    rng = np.random.default_rng(0)
    texts = ["naïve 日本語 🙂🙂 \t\r\n  x=  2\n\n\n", "<|endoftext|></s>[INST] {'a': 1}", "don't", "\x00\u0301"]
    corpus = SHARED / "corpus" / "grimm_tales.txt"
    if corpus.exists():
        stories = corpus.read_text(encoding="utf-8")
        texts += [stories[at : at + 100] for at in rng.integers(0, len(stories) - 100, 50)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        space = b" " if tokenizer.backend_tokenizer.normalizer is not None else b""
        assert joined(vocab, ids) == space + text.encode()
        fragment = encode_fragment(tokenizer, vocab, text)
        assert joined(vocab, fragment) == text.encode()
        assert len(vocab.spell(text.encode())) <= len(fragment)
