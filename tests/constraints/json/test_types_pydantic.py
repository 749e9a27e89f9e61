"""Types as JSON: what pydantic writes is admitted, and what the masks admit is read, or `warnings` names the reason."""

import datetime as dt
import enum
import fractions
import ipaddress
import re
import uuid
import zoneinfo
from collections.abc import Hashable
from decimal import Decimal
from typing import Annotated, Literal

import annotated_types
import numpy as np
import pydantic
import pytest
from helpers.common import BYTES, repetitions
from helpers.random_types import Types
from pydantic import Discriminator, Field, Tag, TypeAdapter

from llmppl import JsonSchema


class Color(enum.Enum):
    RED, GREEN = "r", "g"


class Level(enum.Enum):
    LOW, HIGH = 1.0, 2.5


class Channel(enum.IntEnum):
    A, B = 123456789012345678, -(2**63)


class Access(enum.IntFlag):
    READ, WRITE, RUN = 1, 2, 8


def bounded(kind, **bounds):
    return Annotated[kind, Field(**bounds)]


CODED = pydantic.ConfigDict(val_json_bytes="base64", ser_json_bytes="base64")
SHORT_URL = Annotated[pydantic.AnyUrl, pydantic.UrlConstraints(max_length=20, allowed_schemes=["ws"])]
YEAR = {"ge": dt.date(2024, 1, 1), "le": dt.date(2024, 12, 31)}
VALUES = [
    (Decimal, [Decimal("1.50"), Decimal(-3), Decimal("1E+5")]),
    (bounded(Decimal, ge=0, le=100), [Decimal("99.99"), Decimal(0), Decimal(100)]),
    (bounded(Decimal, gt=0, lt=1), [Decimal("0.5")]), (bounded(Decimal, ge=0.1, multiple_of=0.1), [Decimal("0.1")]),
    (bounded(Decimal, max_digits=5, decimal_places=2), [Decimal("123.45"), Decimal("-1.5")]),
    (dt.timedelta, [dt.timedelta(days=1000, milliseconds=500), dt.timedelta(0), -dt.timedelta(seconds=5)]),
    (pydantic.UUID4, [uuid.UUID("6fa459ea-ee8a-4ca4-894e-db77e160355e")]),
    (pydantic.UUID7, [uuid.UUID("0198f0a2-1c3e-7b7a-8a3e-db77e160355e")]),
    (pydantic.HttpUrl, [pydantic.HttpUrl("https://example.com/a?b=c#d")]),
    (pydantic.HttpUrl, [pydantic.HttpUrl("https://user:pw@a.org:81/a|b?c=[1]#d")]),
    (pydantic.AnyUrl, [*map(pydantic.AnyUrl, ("postgres://u@localhost/db", "mailto:a@b.c", "urn:isbn:1"))]),
    (SHORT_URL, [pydantic.AnyUrl("ws://a.b/")]),
    (bounded(int | float, ge=0, lt=9), [0, 8.5]),
    (bounded(Annotated[int, pydantic.AfterValidator(abs)], gt=0, multiple_of=3), [3, 12]),
    (pydantic.FileUrl, [pydantic.FileUrl("file:///a/b.txt")]),
    (pydantic.PostgresDsn, [pydantic.PostgresDsn("postgresql+asyncpg://u:p@localhost:5432/db")]),
    (pydantic.IPvAnyAddress, [*map(ipaddress.ip_address, ("1.2.3.4", "::1"))]),
    (ipaddress.IPv4Network, [*map(ipaddress.IPv4Network, ("1.2.3.4/32", "10.0.0.0/8", "1.2.128.0/17"))]),
    (pydantic.IPvAnyNetwork, [*map(ipaddress.ip_network, ("10.0.0.0/8", "2001:db8::/32", "fe80::/128", "::/8"))]),
    (Access, [Access.READ | Access.RUN, Access(0)]),
    (pydantic.IPvAnyInterface, [*map(ipaddress.ip_interface, ("1.2.3.4/8", "fe80::1/64"))]),
    (zoneinfo.ZoneInfo, [zoneinfo.ZoneInfo("Europe/Vienna")]), (pydantic.Base64Bytes, []),
    (pydantic.create_model("Coded", data=(bytes, ...), __config__=CODED), []),
    (fractions.Fraction, [fractions.Fraction(-1, 3), fractions.Fraction(5)]),
    (pydantic.JsonValue, [{"a": [1, None]}]),
    (pydantic.MongoDsn, [pydantic.MongoDsn("mongodb://a:b@h1:1,h2:2/db")]),
    (pydantic.AwareDatetime, [dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)]),
    (pydantic.NaiveDatetime, [dt.datetime(2024, 2, 29, 12, 1, 2, 345)]),
    (bounded(dt.date, **YEAR), [dt.date(2024, 1, 1), dt.date(2024, 12, 31)]),
    (bounded(dt.date, gt=YEAR["ge"], lt=YEAR["le"]), [dt.date(2024, 1, 2), dt.date(2024, 12, 30)]),
    (bounded(dt.datetime, ge=dt.datetime(2024, 1, 1), lt=dt.datetime(2025, 1, 1)), [dt.datetime(2024, 1, 1)]),
    (bounded(dt.time, ge=dt.time(8), le=dt.time(17, 30)), [dt.time(8), dt.time(17, 30), dt.time(12, 1, 2)]),
    (dict[int, str], [{1: "a", -20: "b"}]),
    (dict[Color, int], [{Color.RED: 1}, {Color.RED: 1, Color.GREEN: 2}]),
    (dict[Literal["a", "b"], int], [{"b": 1}]),
    (dict[dt.date, int], [{dt.date(2024, 1, 1): 1}]), (dict[bounded(str, pattern="^[ab]+$"), int], [{"ab": 1}]),
    (set[int], [{1, 2}]), (float, [1.2345678901234567e-05, -9.8765432109876543e-06]),
    (Level, list(Level)), (Channel, list(Channel)),
    (complex, [1.5 - 2j, 3j, 1e20 + 0j]),
    (pydantic.PastDate, [dt.date(2024, 2, 29)]), (pydantic.FutureDatetime, [dt.datetime(9000, 1, 1, 12)]),
    (bounded(Decimal, max_digits=4, lt=Decimal("11.5")), [Decimal("10.39"), Decimal("-9999")]),
]  # fmt: skip


def walked(index, rng):
    """Draw a text byte by byte from the masks; None if it does not end within 300 bytes."""
    state, text = index.start, bytearray()
    while len(text) < 300:
        coming = [byte for byte in index.next_bytes(state) if byte < 127] or list(index.next_bytes(state))
        if index.accepts(state) and (not coming or len(text) > 50 or rng.random() < 0.4):
            return text.decode()
        closing = [byte for byte in coming if byte in b'"}],']
        byte = int(rng.choice(closing if closing and (len(text) > 50 or rng.random() < 0.3) else coming))
        text.append(byte)
        state = index.advance(state, byte)
    return None


@pytest.mark.parametrize("kind, values", VALUES, ids=[str(kind)[:60] for kind, _ in VALUES])
def test_written_values_are_admitted_and_admitted_texts_are_read(kind, values):
    constraint, rng = JsonSchema(kind, whitespace=False), np.random.default_rng(0)
    index, adapter = constraint.index(BYTES), TypeAdapter(kind)
    assert not any("no known format" in remark for remark in constraint.warnings)
    for text in (adapter.dump_json(value).decode() for value in values):
        assert index.accepts(index.after(text)), text
        assert adapter.dump_json(constraint.parse(text)).decode() == text
    for text in (walked(index, rng) for _ in range(repetitions(20, 8))):
        if text is not None and not constraint.unmasked:
            constraint.parse(text)


@pytest.mark.parametrize("seed", range(repetitions(300, 10)))
def test_random_types_admit_their_dumps_and_only_what_pydantic_reads(seed):
    rng = np.random.default_rng(seed)
    drawn = Types(rng).draw()
    constraint, adapter = JsonSchema(drawn.kind, whitespace=False), TypeAdapter(drawn.kind)
    index = constraint.index(BYTES)

    def dump():
        try:
            text = adapter.dump_json(adapter.validate_python(drawn.value()), by_alias=True, warnings=False)
            again = adapter.dump_json(adapter.validate_json(text), by_alias=True, warnings=False)
            return text if again == text else None
        except ValueError:                          # the drawn value is no instance
            return None

    for text in filter(None, (dump() for _ in range(6))):
        assert index.accepts(index.after(text)), text
        constraint.parse(text.decode())
    for text in filter(None, (walked(index, rng) for _ in range(6))):
        if not constraint.unmasked:
            constraint.parse(text)


DECIMALS = {                                        # the most digits after the point, by bounds
    2: [{"ge": 0, "le": 1000, "decimal_places": 2}, {"decimal_places": 2}, {"multiple_of": Decimal(".01")},
        {"max_digits": 2, "ge": 0}, {"multiple_of": Decimal(".25"), "ge": 0}, {"gt": -1, "lt": 1, "decimal_places": 2}],
    0: [{"decimal_places": 0, "ge": 0}, {"multiple_of": 5, "lt": 100}, {"max_digits": 3, "decimal_places": 0}],
    4: [{"ge": 0}, {"le": Decimal("999.9")}, {"max_digits": 9}],
    6: [{"ge": 0, "decimal_places": 6}],
}  # fmt: skip


@pytest.mark.parametrize("places, bounds", [(places, each) for places, some in DECIMALS.items() for each in some])
def test_a_decimal_has_at_most_the_stated_decimal_places(places, bounds):
    class Priced(pydantic.BaseModel):
        prices: list[bounded(Decimal, **bounds)]

    index = JsonSchema(Priced).index(BYTES)
    state = index.after('{"prices":["0')
    for digit in "." * (places > 0) + "0" * places:
        state = index.advance(state, ord(digit))
    assert not set(b"0.").intersection(index.next_bytes(state))
    assert ord('"') in index.next_bytes(state)


def test_bounds_of_a_decimal_that_masks_do_not_hold_are_listed():
    listed = {"": {"multiple_of": 0.01}, "max_digits": {"max_digits": 2, "decimal_places": 2}, "multiple_of": {"gt": 5}}
    listed["multiple_of"]["multiple_of"] = 5
    for named, bounds in listed.items():
        unmasked = JsonSchema(list[bounded(Decimal, **bounds)]).unmasked
        assert [named in line for line in unmasked] == [True] * bool(named)


class Checked(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, value):
        if value % 2:
            raise ValueError("odd")
        return value


@pytest.mark.parametrize(
    "kind, named",
    [
        (Checked, "the validator .*is_even"),
        (bounded(dt.datetime, ge=dt.datetime(2024, 1, 1, tzinfo=dt.UTC)), "the bound of a date or time"),
        (bounded(Decimal, multiple_of=Decimal("0.25")), "'multiple_of' 0.25"),
        (bounded(dt.timedelta, le=dt.timedelta(hours=1)), "the bound of a timedelta"),
        (bounded(bytes, min_length=3), "the number of bytes"),
        (pydantic.ByteSize, "the validator .ByteSize"),
        (pydantic.FilePath, "the validator .PathType"),
        (pydantic.ImportString, "the validator .import_string"),
        (Annotated[int, annotated_types.Predicate(bool)], "the validator .apply_known_metadata"),
        (Annotated[Annotated[int, Tag("a")] | Annotated[str, Tag("b")], Discriminator(repr)], "pydantic's 'tagged-"),
        (Hashable, "pydantic's 'chain' schema"),
    ],
)
def test_constraints_that_no_mask_holds_are_warnings(kind, named):
    (warning,) = JsonSchema(kind).unmasked
    assert re.match(f"{named}.* is checked on the finished text", warning)


def test_sampled_texts_of_json_in_a_string_are_json():
    constraint, rng = JsonSchema(pydantic.Json), np.random.default_rng(0)
    texts = [text for text in (walked(constraint.index(BYTES), rng) for _ in range(30)) if text is not None]
    assert len([constraint.parse(text) for text in texts]) > 20


def test_an_enum_without_a_value_that_json_can_hold_is_refused():
    class Pair(enum.Enum):
        A = (1, 2)

    with pytest.raises(TypeError, match="no value of it can be read from JSON"):
        JsonSchema(Pair)
    with pytest.raises(TypeError, match="a class has no JSON"):
        JsonSchema(type[int])
