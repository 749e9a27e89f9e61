"""What a caller gives is checked before anything runs: every count, share, seed and temperature of the public API."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from llmppl import arguments


@pytest.mark.parametrize(
    "check, good",
    [
        (arguments.count, [(1, 1), (np.int64(7), 7)]),
        (arguments.number, [(-1, -1.0), (math.inf, math.inf), (np.float32(0.5), 0.5), (Fraction(1, 4), 0.25)]),
        (arguments.positive, [(1, 1.0), (1e-300, 1e-300)]),
        (arguments.probability, [(0, 0.0), (1, 1.0), (np.float64(0.5), 0.5)]),
        (arguments.share, [(0, 0.0), (0.999, 0.999)]),
        (arguments.flag, [(True, True), (np.False_, False)]),
        (arguments.text, [("", ""), ("né🙂", "né🙂")]),
        (arguments.path, [("a/b", Path("a/b")), (Path("a"), Path("a"))]),
    ],
)
def test_what_a_check_admits_comes_back_in_its_plain_python_type(check, good):
    for given, wanted in good:
        back = check("name", given)
        assert back == wanted and type(back) is type(wanted)


@pytest.mark.parametrize(
    "check, value, error, message",
    [
        (arguments.count, 2.0, TypeError, "must be an integer, not 2.0"),
        (arguments.count, True, TypeError, "must be an integer, not True"),
        (arguments.count, "3", TypeError, "must be an integer, not '3'"),
        (arguments.count, None, TypeError, "must be an integer, not None"),
        (arguments.count, 0, ValueError, "must be at least 1, not 0"),
        (arguments.count, 10**30, ValueError, f"must be at most {2**63 - 1}, not 1000"),
        pytest.param(arguments.count, 10**9999, ValueError, ".*not an int too long to be written", id="10**9999"),
        (arguments.number, True, TypeError, "must be a number, not True"),
        (arguments.number, "hot", TypeError, "must be a number, not 'hot'"),
        (arguments.number, math.nan, ValueError, "must be a number, not nan"),
        (arguments.number, 10**400, ValueError, "must be at most 1.8e"),
        (arguments.positive, 0, ValueError, "must be positive and finite, not 0"),
        (arguments.positive, math.inf, ValueError, "must be positive and finite, not inf"),
        (arguments.probability, 1.01, ValueError, r"must be in \[0, 1\], not 1.01"),
        (arguments.share, 1, ValueError, r"is a share in \[0, 1\), not 1"),
        (arguments.flag, 1, TypeError, "must be True or False, not 1"),
        (arguments.text, b"a", TypeError, "must be a str, not b'a'"),
        (arguments.text, "ab\ud83d\ude42", ValueError, r"has a lone surrogate, '\\ud83d', at character 2"),
        (arguments.path, 3, TypeError, "must be a path"),
    ],
)
def test_what_a_check_refuses_is_told_by_its_name(check, value, error, message):
    with pytest.raises(error, match=f"^name {message}"):
        check("name", value)


def test_a_probability_may_be_asked_to_be_above_0():
    assert arguments.probability("p", 1e-9, above_0=True) == 1e-9
    with pytest.raises(ValueError, match=r"p must be in \(0, 1\], not 0"):
        arguments.probability("p", 0, above_0=True)


def test_one_of_lists_what_there_is():
    assert arguments.one_of("end", "eos", ["eos", "prefix"]) == "eos"
    with pytest.raises(ValueError, match="^end must be one of 'eos', 'prefix', not 'middle'"):
        arguments.one_of("end", "middle", ["eos", "prefix"])
    with pytest.raises(TypeError, match="^end must be one of 'eos', 'prefix', not 3"):
        arguments.one_of("end", 3, ["eos", "prefix"])


def test_a_class_is_no_function_and_an_answer_is_a_bool():
    assert arguments.function("mask", len, "f") is len
    for wrong in (int, 3, "f"):
        with pytest.raises(TypeError, match="^mask must be a function, as short_words"):
            arguments.function("mask", wrong, "short_words(vocab, 5)")
    assert arguments.truth(np.True_, len, "ab") is True
    with pytest.raises(TypeError, match="^len returned 2 for 'ab'; it must return True or False"):
        arguments.truth(len("ab"), len, "ab")


def test_a_seed_is_an_integer_of_any_size():
    assert arguments.generator(10**30).random() == np.random.default_rng(10**30).random()
    with pytest.raises(TypeError, match="^seed must be an integer, not 2.5"):
        arguments.generator(2.5)
    with pytest.raises(ValueError, match="^seed must be at least 0, not -1"):
        arguments.generator(-1)
