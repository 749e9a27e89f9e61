"""Formats of JSON Schema against the official suite, the classes of Python and limits counted by hand."""

import ipaddress
import re
from datetime import date, datetime, timedelta

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.json_suite import DRAFTS, cases

from llmppl.constraints.automata.formats import date_range, datetime_range
from llmppl.constraints.automata.json_formats import format_language

LEFT_OUT = {"regex": 2, "hostname": 15, "idn-email": 1, "idn-hostname": 20}        # valid texts, see the module
KNOWN = [
    "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer", "regex",
]  # fmt: skip


def texts_of_formats():
    found = {}
    for case in (case for draft in DRAFTS for case in cases(draft) if case.file.startswith("optional/format/")):
        name = case.schema.get("format", "")
        if format_language(name):
            found.setdefault(name, {}).update({t["data"]: t["valid"] for t in case.tests if isinstance(t["data"], str)})
    return found


def test_the_suite_has_no_invalid_text_in_a_format():
    refused = {}
    for name, texts in texts_of_formats().items():
        language = format_language(name)
        assert [text for text, valid in texts.items() if text in language and not valid] == []
        refused[name] = sum(valid and text not in language for text, valid in texts.items())
    assert {name: count for name, count in refused.items() if count} == LEFT_OUT


def test_formats_have_names_and_few_states():
    for name in KNOWN:
        assert format_language(name) is format_language(name)
        assert 0 < format_language(name).num_states < 2200
    assert format_language("int32") is None


def edited(rng, text, alphabet):
    chars = list(text)
    for _ in range(rng.integers(3)):
        at = rng.integers(len(chars) + 1)
        chars[at : at + rng.integers(2)] = [alphabet[rng.integers(len(alphabet))]] * rng.integers(2)
    return "".join(chars)


def test_ipv6_holds_the_addresses_that_python_reads():
    rng, language, answers = np.random.default_rng(0), format_language("ipv6"), []
    members = "1:2:3:4:5:6:7:8 :: 1:: ::8 1:2:3:4:5:6:1.2.3.4 ffff::255.0.99.1 1:2:3:4:5:6:7:: a::b:c".split()
    for i in range(repetitions(20_000, 3000)):
        text = edited(rng, members[i % len(members)], "0123456789afF:::.g%")
        try:
            valid = bool(ipaddress.IPv6Address(text)) or True
        except ValueError:
            valid = False
        valid = valid and "%" not in text
        answers.append(valid)
        assert (text in language) == valid, text
    assert 200 < sum(answers) < len(answers) - 200


def test_a_leap_second_is_the_last_of_a_day_in_utc():
    rng, times, moments = np.random.default_rng(0), format_language("time"), format_language("date-time")
    for _ in range(repetitions(3000, 300)):
        hour, minute, offset = rng.integers(24), rng.choice([0, 29, 30, 59]), 30 * rng.integers(-47, 48)
        sign, away = "-" if offset < 0 else "+", abs(offset)
        text = f"{hour:02}:{minute:02}:60{sign}{away // 60:02}:{away % 60:02}"
        last = (60 * hour + minute - offset) % 1440 == 1439
        assert (text in times) == last
        day = date(2016, 12, 31) + timedelta(int(rng.integers(-1, 2)))
        local = datetime(day.year, day.month, day.day, hour, minute) - timedelta(minutes=int(offset))
        if f"{day}T{text}" in moments:
            assert local == datetime(2016, 12, 31, 23, 59)


def test_host_names_and_emails_keep_their_limits():
    hosts, emails, rng = format_language("hostname"), format_language("email"), np.random.default_rng(0)
    assert "a" * 63 + ".com" in hosts
    assert "a" * 64 + ".com" not in hosts
    assert ".".join(["a" * 31] * 7) in hosts
    assert ".".join(["a" * 63] * 3 + ["b" * 31]) in hosts
    assert "a" * 64 + "@b.de" in emails
    assert "a" * 65 + "@b.de" not in emails
    assert "a@" + "b" * 64 not in emails
    label = re.compile("[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
    for length in range(1, 230, 2):
        text = hosts.sample(rng, length)
        assert all(label.fullmatch(each) and len(each) < 64 and each[2:4] != "--" for each in text.split("."))
    assert not any(hosts.count(length) for length in range(254, 300))


def test_international_names_are_valid_by_idna():
    idna = pytest.importorskip("idna")
    rng, language = np.random.default_rng(0), format_language("idn-hostname")
    for length in range(1, 80):
        for _ in range(repetitions(20, 2)):
            assert idna.encode(language.sample(rng, length))


@pytest.mark.parametrize("low, high", [("2023-12-30", "2024-03-02"), ("1999-02-28", "2001-01-01"), ("0001-01-01", None),
                                       (None, "0004-03-01"), ("2024-02-29", "2024-02-29")])  # fmt: skip
def test_a_range_of_dates_has_exactly_its_days(low, high):
    first, last = (None if text is None else date.fromisoformat(text) for text in (low, high))
    day = max(date.min, (first or date(1, 1, 1)) - timedelta(400 if first and first.year > 2 else 0))
    closed, open_ = date_range(first, last), date_range(first, last, False, False)
    for _ in range(2000):
        inside = (first is None or first <= day) and (last is None or day <= last)
        assert (day.isoformat() in closed) == inside
        assert (day.isoformat() in open_) == (inside and day not in (first, last))
        day += timedelta(1)
    assert "2023-02-29" not in closed


def test_a_range_of_moments_has_every_spelling_of_its_bounds():
    rng = np.random.default_rng(0)
    fields = [[2023, 2024], [1, 2], [1, 29], [0, 10], [0, 59], [0, 30], [0, 500_000, 1]]

    def moment():
        year, month, day, *rest = (int(rng.choice(some)) for some in fields)
        return datetime(year, month, 28 if month == 2 and day > 28 else day, *rest)

    for _ in range(repetitions(100, 20)):
        low, high, low_in, high_in = moment(), moment(), *map(bool, rng.integers(2, size=2))
        language = datetime_range(low, high, low_in, high_in)
        for value in [low, high, *(moment() for _ in range(30))]:
            inside = (low < value or (low_in and low == value)) and (value < high or (high_in and value == high))
            for form in ("minutes", "seconds", "milliseconds", "microseconds"):
                text = value.isoformat(timespec=form)
                assert (text in language) == inside or datetime.fromisoformat(text) != value
    with pytest.raises(ValueError, match="no zone"):
        datetime_range(datetime.fromisoformat("2024-01-01T00:00Z"))
