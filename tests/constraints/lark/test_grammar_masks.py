"""Masks of grammars along random texts: digests of those that an earlier, independent implementation found."""

import hashlib
import random

import numpy as np
import pytest
from helpers.common import ROOT
from helpers.grammars import GRAMMARS
from helpers.masks import INDENTED, Blocks
from transformers import AutoTokenizer

from llmppl.constraints import Grammar, Vocabulary

SHARED = ROOT.parent / "shared" / "vocab"
WRITTEN = {name: (text, None) for name, (text, _, _) in GRAMMARS.items()}
WRITTEN["indented"] = INDENTED, Blocks()
WRITTEN["query"] = (ROOT / "benchmarks" / "grammars" / "sql.lark").read_text(), None
FOUND = {  # of all masks, and of those that end within the least number of tokens, and one more
    ("embedded", "json"): "f431b1ca3b3afdf9 e3b0c44298fc1c14",
    ("embedded", "arithmetic"): "9e13e28ce0cd8ff5 ecf2a3ef82f62318",
    ("embedded", "sql"): "a03c3e53811f95c2 72f86c1bc4153497",
    ("embedded", "python"): "b14f8176a9a2c7bb f4ecba260c36cbec",
    ("embedded", "indented"): "bd04365025b02ac8 bbb079b024e09ead",
    ("embedded", "query"): "64e52e2a7edd94ac 29907236d6ed9837",
    ("gpt2", "json"): "1236ab4e8a74e25a e3b0c44298fc1c14",
    ("gpt2", "arithmetic"): "35c981c9c053613e e3b0c44298fc1c14",
    ("gpt2", "sql"): "85baa02453c56036 168321abaa9a6cbb",
    ("gpt2", "python"): "62f2b677d4811f72 dd1e0c1e47c85033",
    ("gpt2", "indented"): "3b4e88526f352ed2 d83dda474437e58e",
    ("gpt2", "query"): "fd8fc8d8a7b31912 874b636abdc0380e",  # the earlier search gave up, at 9 tokens instead of 5
}


@pytest.fixture(scope="module")
def vocabularies(embedded):
    found = {"embedded": embedded.vocab}
    if (SHARED / "gpt2").is_dir():
        found["gpt2"] = Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(SHARED / "gpt2"))
    return found


QUICK = [each for each in FOUND if each[0] == "embedded" or each[1] == "sql"]
ALL = [each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in FOUND]


@pytest.mark.parametrize("vocabulary, name", ALL)
def test_masks_along_random_texts_are_those_found_before(vocabulary, name, vocabularies):
    if vocabulary not in vocabularies:
        pytest.skip(f"no vocabulary {vocabulary} in {SHARED}")
    vocab = vocabularies[vocabulary]
    text, postlex = WRITTEN[name]
    index = Grammar(text, postlex=postlex).index(vocab)
    rng = random.Random(0)
    masks = hashlib.sha256()
    ends = hashlib.sha256()
    for _ in range(3):
        state = index.start
        for step in range(16):
            mask = index.mask(state)
            masks.update(np.packbits(mask).tobytes())
            least = index.tokens_to_accept(state) if step % 8 == 4 else np.inf
            for n in [least, least + 1] if 0 < least < np.inf else []:
                ends.update(np.packbits(index.mask_within(state, n)).tobytes())
            fits = [token for token in np.flatnonzero(mask).tolist() if token not in vocab.eos_ids]
            if not fits:
                break
            some = rng.sample(fits, min(4, len(fits)))
            state = index.advance(state, min(some, key=lambda token: len(vocab.tokens[token])))
    assert f"{masks.hexdigest()[:16]} {ends.hexdigest()[:16]}" == FOUND[vocabulary, name]
