"""Indices of compositions with slow parts: a test of a token reads that token alone."""

import string

from llmppl.constraints import Vocabulary, index_of, part_of


def test_a_refused_token_is_read_without_the_rest_of_the_vocabulary():
    texts = []

    def only_a(text):
        texts.append(text)
        return set(text) <= {"a"}

    letters = [letter.encode() for letter in string.ascii_lowercase]
    index = index_of(part_of(only_a) + "x", Vocabulary([*letters, b""], eos_ids=[26]))
    texts.clear()
    assert [index.fits(index.start, token) for token in (0, 5, 26)] == [True, False, False]
    assert set(texts) <= {"", "a", "f"}
