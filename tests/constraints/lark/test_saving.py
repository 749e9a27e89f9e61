"""Indices of grammars in files: known results are there again, nothing is computed twice, and new texts work."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import lark
import numpy as np
import pytest
from lark.indenter import PythonIndenter

from llmppl import Grammar, Regex, TokenIndex, Vocabulary
from llmppl.constraints import END
from llmppl.constraints.masks import index_files as storage

PYTHON = Path(lark.__file__).parent / "grammars" / "python.lark"
GRAMMARS = {
    "keywords": 'start: s+\ns: "if" NAME s | NAME "=" (NAME | NUMBER) ";"\n'
    'NAME: /[a-z]+/\nNUMBER: /[0-9]+(\\.[0-9]+)?/\n%ignore " "',
    "guards": 'start: (WORD | STRING | "-" | "->")+\n'
    'WORD: /\\b[ab]+\\b(?!-)/\nSTRING: /".*?(?<!x)(xx)*"/\n%ignore /[ \\n]+/',
}
ALPHABET = {"keywords": b"ifab=;09. ", "guards": b'abx-> "\n', "python": b"ifx:=()\n 1"}


def made(name):
    if name == "python":
        return Grammar.from_file(PYTHON, "file_input", postlex=PythonIndenter())
    return Grammar(GRAMMARS[name])


def vocabulary(name):
    letters = [bytes([byte]) for byte in ALPHABET[name]]
    tokens = [*letters, *(a + b for a in letters for b in letters), b"if x:\n ", b"=1\n", b""]
    return Vocabulary(tokens, eos_ids=[len(tokens) - 1])


def walks(index, seed, number=4, length=8):
    """Some texts of an index: the states on the way, with their masks."""
    rng = random.Random(seed)
    for _ in range(number):
        state = index.start
        for _ in range(length):
            mask = index.mask(state)
            yield state, mask
            if not mask.any():                      # the vocabulary has not all letters
                break
            state = index.advance(state, rng.choice(np.flatnonzero(mask).tolist()))
            if state is END:
                break


def masks(index, seed):
    return [mask.tobytes() for _, mask in walks(index, seed)]


def counts(grammar):
    """Return the counts that grow when a mask is computed."""
    read = grammar._masks
    return len(grammar._tokens.tokens), read and (len(read.quotients), read.made), len(grammar._states)


@pytest.mark.parametrize("name", [*GRAMMARS, "python"])
def test_a_loaded_index_equals_the_saved_one_and_can_be_extended(tmp_path, name):
    vocab, path = vocabulary(name), tmp_path / "index.npz"
    index = made(name).index(vocab)
    known = masks(index, 0)
    index.save(path)
    grammar = made(name)
    loaded = TokenIndex.load(path, vocab, grammar)
    before = counts(grammar)
    assert masks(loaded, 0) == known and counts(grammar) == before
    assert masks(loaded, 1) == masks(made(name).index(vocab), 1)    # texts that the file knows nothing of
    used = made(name)
    masks(used.index(vocab), 2)                     # which has its own numbers by now
    joined = TokenIndex.load(path, vocab, used)
    assert masks(joined, 0) == known and masks(joined, 1) == masks(loaded, 1)
    joined.save(path)                               # what was loaded is saved again
    assert masks(TokenIndex.load(path, vocab, made(name)), 2) == masks(used.index(vocab), 2)


def test_the_result_of_build_all_is_saved(tmp_path):
    vocab, path = vocabulary("keywords"), tmp_path / "index.npz"
    index = made("keywords").index(vocab)
    whole = index.build_all()
    index.save(path)
    grammar = made("keywords")
    loaded = TokenIndex.load(path, vocab, grammar)
    assert grammar._masks.nbytes == whole.nbytes and len(grammar._masks) == len(whole)
    assert masks(loaded, 3) == masks(index, 3)
    assert len(grammar._masks) == len(whole)


def test_a_file_of_another_grammar_vocabulary_or_kind_is_refused(tmp_path):
    vocab, path = vocabulary("keywords"), tmp_path / "index.npz"
    grammar = made("keywords")
    grammar.index(vocab).save(path)
    text = GRAMMARS["keywords"]
    for other in (text.replace("[a-z]+", "[a-y]+"), text.replace(";", ","), text.replace("[0-9]+(", "[0-9](")):
        with pytest.raises(ValueError, match="is the index of another grammar"):
            TokenIndex.load(path, vocab, Grammar(other))
    with pytest.raises(ValueError, match="is the index of another grammar"):
        TokenIndex.load(path, vocab, Grammar(text, g_regex_flags=2))
    with pytest.raises(ValueError, match="Grammar over another vocabulary than this one of 3 tokens"):
        TokenIndex.load(path, Vocabulary([b"a", b"=", b""], [2]), grammar)
    with pytest.raises(ValueError, match=r"needs it as well: load\(path, vocab, grammar\)"):
        TokenIndex.load(path, vocab)
    Regex("[ab]*").index(vocab).save(path)
    with pytest.raises(ValueError, match="is loaded without a grammar"):
        TokenIndex.load(path, vocab, grammar)
    with pytest.raises(FileNotFoundError):
        TokenIndex.load(tmp_path / "none.npz", vocab, grammar)


def test_indented_grammars_differ_by_their_indenters(tmp_path):
    class Wide(PythonIndenter):
        tab_len = 4

    vocab, path = vocabulary("python"), tmp_path / "index.npz"
    made("python").index(vocab).save(path)
    with pytest.raises(ValueError, match="postlex"):
        TokenIndex.load(path, vocab, Grammar.from_file(PYTHON, "file_input", postlex=Wide()))


def test_a_truncated_or_changed_file_is_refused(tmp_path, monkeypatch):
    vocab, path = vocabulary("guards"), tmp_path / "index.npz"
    grammar = made("guards")
    index = grammar.index(vocab)
    known = masks(index, 0)
    index.save(path)
    data = path.read_bytes()
    for size in range(0, len(data), len(data) // 8):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="holds no saved TokenIndex"):
            TokenIndex.load(path, vocab, grammar)
    rng = random.Random(0)
    for _ in range(15):                             # a zip file has checksums: what passes is as it was
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            loaded = TokenIndex.load(path, vocab, made("guards"))
        except ValueError:
            continue
        assert masks(loaded, 0) == known
    path.write_bytes(data)
    monkeypatch.setattr(storage, "FORMAT", 99)
    with pytest.raises(ValueError, match="and this version reads 99: save the index again"):
        TokenIndex.load(path, vocab, grammar)


def test_a_file_is_read_in_another_process(tmp_path):
    """Strings have other hashes there, so nothing may depend on the order of a set."""
    for name in ("guards", "python"):
        script = (
            f"from test_saving import *\nindex = made({name!r}).index(vocabulary({name!r}))\n"
            f"masks(index, 0); index.save({str(tmp_path / name)!r})"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "7"}
        subprocess.run([sys.executable, "-c", script], check=True, env=environment)
        grammar = made(name)
        loaded = TokenIndex.load(tmp_path / name, vocabulary(name), grammar)
        before = counts(grammar)
        assert masks(loaded, 0) == masks(made(name).index(vocabulary(name)), 0)
        assert counts(grammar) == before


@pytest.mark.parametrize("name", ["guards", "python"])
def test_threads_load_save_and_read_at_once(tmp_path, name):
    vocab = vocabulary(name)
    lone = made(name).index(vocab)
    known = [masks(lone, seed) for seed in range(4)]
    lone.save(tmp_path / "0")
    grammar, wrong = made(name), []

    def work(number):
        try:
            for turn in range(3):
                index = TokenIndex.load(tmp_path / "0", vocab, grammar)
                for seed in range(4):
                    assert masks(index, seed) == known[seed]
                index.save(tmp_path / f"{number} {turn}")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert masks(TokenIndex.load(tmp_path / "4 2", vocab, made(name)), 3) == known[3]
