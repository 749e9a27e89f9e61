"""Ready-made languages against their validators, on texts one or two edits away; the algebra against sets of texts."""

import email.errors
import email.headerregistry
import ipaddress
import itertools
import math
import re
import uuid
from datetime import date, datetime, time
from fractions import Fraction
from urllib.parse import urlsplit

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.machines import drawn
from pydantic import HttpUrl, TypeAdapter

from llmppl import constraints as languages
from llmppl.constraints import DFA, Regex, number_range

LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def holds(read, *errors):
    """Return a validator that tells whether `read` accepts a text."""

    def validator(text):
        try:
            return read(text) is not False
        except (ValueError, *errors):
            return False

    return validator


def is_domain(text):
    *labels, top = text.split(".")
    return bool(labels and all(map(LABEL.fullmatch, [*labels, top]))) and top[0].isalpha()


def is_email(text):
    local, _, domain = text.rpartition("@")
    found = email.headerregistry.Address(addr_spec=text)
    return (found.username, found.domain) == (local, domain) and text.isascii() and '"' not in local \
        and len(local) <= 64 and is_domain(domain) and not set(text) & set(" \t\r\n()")  # fmt: skip


def is_url(text):
    shape = re.fullmatch(r"(https?)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?(#.*)?", text, re.ASCII)
    if not shape or not all(" " < char <= "~" for char in text) or re.search(r"%(?![0-9A-Fa-f]{2})", text):
        return False
    host, colon, port = shape[2].partition(":")
    if colon and not (port.isdigit() and port[0] != "0" and int(port) < 65536):
        return False
    rest = "".join(filter(None, shape.groups()[2:]))
    if set(rest) & set('"<>\\^`{|}[]') or "#" in (shape[5] or "#")[1:]:
        return False
    coded = any(label.lower().startswith("xn--") for label in host.split("."))
    known = host == "localhost" or is_ipv4(host) or is_domain(host) and not coded
    return known and urlsplit(text).hostname is not None


def is_phone(text):
    digits = re.sub("[ -]", "", text[1:])
    apart = not re.search("[ -]{2}", text) and text[-1:].isdigit() and text[1:2] not in (" ", "-")
    return apart and text[:1] == "+" and bool(re.fullmatch("[1-9][0-9]{6,14}", digits))


def like(pattern, read):
    return holds(lambda text: bool(re.fullmatch(pattern, text, re.ASCII)) and bool(read(text) or True))


CLOCK = r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
is_ipv4 = holds(lambda text: text.isascii() and ipaddress.IPv4Address(text))
FORMATS = {
    "iso_date": (like(r"\d{4}-\d\d-\d\d", date.fromisoformat), "0123456789-"),
    "iso_time": (like(CLOCK, time.fromisoformat), "0123456789:."),
    "iso_datetime": (like(rf".{{10}}T{CLOCK}(Z|[+-]\d\d:[0-5]\d)?", datetime.fromisoformat), "0123456789:.-+TZ"),
    "uuid": (holds(lambda text: str(uuid.UUID(text)) == text.lower()), "0123456789abcdefABCDEFg-{}"),
    "ipv4": (is_ipv4, "0123456789."),
    "email": (holds(is_email, email.errors.HeaderParseError, IndexError), "abZ09.-@_+! \"'(,é"),
    "url": (holds(is_url), "abXxnN0129.-:/?#%@~ é["),
    "phone": (is_phone, "0123456789+- ("),
}
MEMBERS = {
    "iso_date": ["2024-02-29", "1900-02-28", "0001-01-01"],
    "iso_time": ["23:59", "00:00:00", "12:30:59.5"],
    "iso_datetime": ["2024-02-29T10:00:00Z", "1999-12-31T23:59:59.123456+14:00", "2000-02-29T00:00"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "ipv4": ["192.168.0.1", "255.255.255.255", "0.0.0.0"],
    "email": ["ada.lovelace@example.co.uk", "a+b_c@x-y.org", "o'hara@a1.b2.de"],
    "url": ["https://example.org/a/b?q=1&r=%20#top", "http://localhost:8080", "https://10.0.0.1/", "http://ab--c.de/x.xn--a"],
    "phone": ["+44 20 7946 0958", "+15550123", "+49-30-1234567"],
}


def edited(rng, text, alphabet):
    """Return the text after none to two insertions, deletions or substitutions."""
    chars = list(text)
    for _ in range(rng.integers(3)):
        at, char = rng.integers(len(chars) + 1), alphabet[rng.integers(len(alphabet))]
        chars[at : at + rng.integers(2)] = [char] * rng.integers(2) or [char]
    return "".join(chars)


@pytest.mark.parametrize("name", FORMATS)
def test_a_ready_made_language_agrees_with_its_validator(name):
    language, (is_valid, alphabet), rng = getattr(languages, name)(), FORMATS[name], np.random.default_rng(0)
    assert all(member in language and is_valid(member) for member in MEMBERS[name])
    texts = [drawn(language, rng, max(map(len, MEMBERS[name]))) for _ in range(20)] + MEMBERS[name]
    answers = {}
    for i in range(repetitions(20_000, 1500)):
        text = edited(rng, texts[i % len(texts)], alphabet)
        answers[text] = is_valid(text)
        assert (text in language) == answers[text], text
    assert sum(answers.values()) > 100 and len(answers) - sum(answers.values()) > 100


def test_every_day_of_the_calendar_is_a_date_and_no_other():
    days = languages.iso_date()
    is_date = FORMATS["iso_date"][0]
    for year in ("1900", "2000", "2023", "2024"):
        for month, day in itertools.product(range(14), range(33)):
            text = f"{year}-{month:02}-{day:02}"
            assert (text in days) == is_date(text), text
    leap = [year for year in range(10_000) if f"{year:04}-02-29" in days]
    assert leap == [year for year in range(1, 10_000) if is_date(f"{year:04}-02-29")] and len(leap) == 2424


def test_pydantic_takes_every_url():
    rng, adapter = np.random.default_rng(1), TypeAdapter(HttpUrl)
    for length in range(12, 60, 2):
        adapter.validate_python(drawn(languages.url(), rng, length))


RANGES = [(1, 12, 0), (-7, 13, 0), (None, 9, 0), (95, None, 0), (0, 0, 0), (0, 1, 2), (-1.5, 2.25, 2), (-20, -3.05, 1),
          (0.1, 0.1, 1), (Fraction(1, 3), 1, 2)]  # fmt: skip


@pytest.mark.parametrize("low, high, decimals", RANGES)
def test_a_range_holds_the_numbers_between_its_bounds(low, high, decimals):
    language = number_range(low, high, decimals)
    shape = "-?(0|[1-9][0-9]*)" + rf"(\.[0-9]{{1,{decimals}}})?" * bool(decimals)
    least, most = (None if bound is None else Fraction(str(bound)) for bound in (low, high))
    found = 0
    for length in range(6 if decimals else 5):
        for text in map("".join, itertools.product("-.01235", repeat=length)):
            fits = bool(re.fullmatch(shape, text)) and not (text[0] == "-" and not Fraction(text))
            fits = fits and (least is None or Fraction(text) >= least) and (most is None or Fraction(text) <= most)
            assert (text in language) == fits, text
            found += fits
    assert found > 0


def test_a_range_without_a_bound_has_18_digits():
    numbers = number_range()
    assert "9" * 18 in numbers and "-" + "9" * 18 in numbers and "9" * 19 not in numbers and "-0" not in numbers


@pytest.mark.parametrize(
    "bounds, error, message",
    [
        ((3, 1), ValueError, "no number of 0 decimals is at least 3 and at most 1"),
        ((0.2, 0.3), ValueError, "no number of 0 decimals is at least 0.2 and at most 0.3"),
        ((0, math.inf), ValueError, "high must be finite, or None for no bound, not inf"),
        ((0, 1, -1), ValueError, "decimals must be at least 0"),
        (("a",), TypeError, "low must be a number, not 'a'"),
    ],
)
def test_an_invalid_range_is_refused(bounds, error, message):
    with pytest.raises(error, match=message):
        number_range(*bounds)


# ---- the algebra


def texts(language, most=6):
    found = (map("".join, itertools.product("ab", repeat=n)) for n in range(most + 1))
    return {text for text in itertools.chain(*found) if text in language}


@pytest.mark.parametrize("words", [["a"], ["ab", "b"], ["", "aa"], []], ids=str)
@pytest.mark.parametrize("bounds", [(0,), (2,), (0, 2), (1, 3), (2, 2), (0, math.inf), (2, math.inf)], ids=str)
def test_times_counts_the_texts_in_a_row(words, bounds):
    least, most = bounds if len(bounds) == 2 else bounds * 2
    rows = (row for n in range(least, min(most, 8) + 1) for row in itertools.product(words, repeat=n))
    expected = {text for text in map("".join, rows) if len(text) <= 6}
    assert texts(DFA.from_strings(words).times(*bounds)) == expected


@pytest.mark.parametrize("bounds, error, message", [
    ((-1,), ValueError, "least must be at least 0"), ((3, 2), ValueError, "at least 3"),
    ((1, 2.5), TypeError, "most must be an integer"),
])  # fmt: skip
def test_times_refuses_invalid_counts(bounds, error, message):
    with pytest.raises(error, match=message):
        Regex("a").times(*bounds)


def test_but_not_takes_texts_as_they_are_and_languages():
    words = Regex("[ab.]{1,2}")
    assert set(words.but_not("a.", Regex("b.?"), "zz").enumerate()) == {"a", ".", "aa", "ab", ".a", ".b", ".."}
    assert words.but_not().equivalent(words)
    with pytest.raises(TypeError, match="a part of a constraint is .*, not 5"):
        words.but_not(5)
