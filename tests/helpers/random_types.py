"""Random types that pydantic reads, with random constraints, and random values of them."""

import dataclasses
import enum
import ipaddress
import string
import typing
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
import pydantic
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NaiveDatetime
from typing_extensions import TypedDict

ALPHABET = string.ascii_letters + string.digits + " _-.é²\u0663\u3000\n\"\\😀"
PATTERNS = {                                        # with characters of their texts
    r"^[a-c]{1,3}$": "abc",
    r"^\w+$": "aZ9_éß\u0663", r"^\d{2,4}$": "09\u0663", r"^[^\W]*$": "ab", r"^[\w.-]+@x$": "a.-@x",
    r"^.+$": "ab \"é\r", r"^\S+ ?\S*$": "ab é", r"a|b": "abc", r"^(?P<n>a)b?$": "ab", r"^\p{Lu}\D$": "AÉ b",
    r"\bx\b": "x ", r"(?i)^ab$": "aAbB", r"^\x61\u0062\.?$": "ab.", r"^[^\d\s]*$": "ab-", r"^\[\{\}\]$": "[{}]",
}  # fmt: skip


class Random(NamedTuple):
    """A type and a function that draws a value of it."""

    kind: Any
    value: Callable[[], Any]
    is_key: bool = False                            # hashable, and a string as JSON


class Colour(enum.Enum):
    RED, BLUE, ODD = "red", "dark blue", 'a "b"'


class Level(enum.IntEnum):
    LOW, HIGH = 1, 10


class Mixed(enum.Enum):
    ONE, TEXT, NONE, PAIR, HALF = 1, "x", None, (1, 2), 0.5


class Tree(BaseModel):
    label: str = Field(max_length=3)
    children: "list[Tree]" = []


def even(value: int) -> int:
    """Return an even number. Raises ValueError for an odd one."""
    if value % 2:
        raise ValueError("odd")
    return value


class Types:
    """Drawer of types, deep at most `depth`."""

    def __init__(self, rng: np.random.Generator, depth: int = 2) -> None:
        self.rng, self.depth, self.count = rng, depth, 0

    def draw(self) -> Random:
        """Return a random type."""
        return self._any(self.depth)

    def _pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def _coin(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def _text(self, least: int = 0, most: int = 6, alphabet: str = ALPHABET) -> str:
        return "".join(self._pick(*alphabet) for _ in range(self.rng.integers(least, most + 1)))

    def _any(self, depth: int) -> Random:
        scalars = [self.whole, self.number, self.decimal, self.text, self.choice, self.moment, self.duration]
        scalars.append(self.other)
        nested = [self.array, self.set, self.mapping, self.union, self.record, self.tuple, self.tree]
        return self._pick(*scalars)() if depth == 0 or self._coin(0.35) else self._pick(*nested)(depth - 1)

    def _bounds(self, low: Any, high: Any) -> dict[str, Any]:
        """Return none, one or both of two bounds, which are included if they are equal."""
        names = ("ge", "le") if low == high else (self._pick("ge", "gt"), self._pick("le", "lt"))
        return {name: bound for name, bound in zip(names, (low, high), strict=True) if self._coin()}

    # ---- scalars

    def whole(self) -> Random:
        low = int(self.rng.integers(-150, 50))
        high, step = low + int(self.rng.integers(0, 300)), int(self._pick(1, 1, 2, 5, 7))
        bounds = self._bounds(low, high)
        if self._coin(0.3):
            bounds["multiple_of"] = step
        if self._coin(0.1):
            return Random(Annotated[int, pydantic.AfterValidator(even)], lambda: 2 * int(self.rng.integers(-9, 9)))
        kind = Annotated[int, Field(**bounds, strict=self._pick(None, True))]
        return Random(kind, lambda: int(self._pick(low, high, step, 0, 10**20, self.rng.integers(-200, 400))), True)

    def number(self) -> Random:
        low, width = self._pick(0, -2.5, 0.1, 99.9, -1e-3, 1e10), self._pick(0, 1.25, 100, 1e-3)
        bounds = self._bounds(low, low + width)
        if self._coin(0.2):
            bounds["multiple_of"] = self._pick(0.5, 0.1, 2, 0.25)
        if self._coin(0.2):
            bounds["allow_inf_nan"] = False
        free = (0.0, 123456789.125, -3.3, 5.0, *(() if "multiple_of" in bounds else (1e300, 1e-7, 1e16)))
        draw = lambda: float(self._pick(low, low + width, *free, low + width * self.rng.random()))  # noqa: E731
        return Random(Annotated[float, Field(**bounds)], draw)

    def decimal(self) -> Random:
        low, width = (Decimal(self._pick(*numbers)) for numbers in (("0", "-2.5", "10", "0.05"), ("0", "1.5", "1000")))
        bounds = self._bounds(low, low + width)
        if self._coin():
            bounds["decimal_places"] = self._pick(0, 2, 3)
        if self._coin(0.3):
            bounds["max_digits"] = self._pick(3, 4, 8)

        def draw() -> Decimal:
            found = Decimal(int(self.rng.integers(-20000, 20000))).scaleb(int(self.rng.integers(-4, 1)))
            if bounds:                              # without zeros at the end, which are digits after the point, too
                return Decimal(format(self._pick(low, low + width, found).normalize(), "f"))
            return self._pick(found, Decimal("1E+20"), Decimal("0E-9"))

        return Random(Annotated[Decimal, Field(**bounds)], draw)

    def text(self) -> Random:
        least = int(self.rng.integers(0, 4))
        sizes = {"min_length": least, "max_length": least + int(self.rng.integers(0, 5))}
        sizes = {key: size for key, size in sizes.items() if self._coin()}
        options = {key: True for key in ("strip_whitespace", "to_lower", "to_upper") if self._coin(0.2)}
        if self._coin():
            pattern = self._pick(*PATTERNS)
            sizes, alphabet = {"pattern": pattern}, PATTERNS[pattern]
        else:
            alphabet = ALPHABET
        kind = Annotated[str, pydantic.StringConstraints(**sizes, **options)]
        return Random(kind, lambda: self._text(0, 7, alphabet), True)

    def choice(self) -> Random:
        members = list(dict.fromkeys(self._pick("a", "b", "c d", 'q"', 1, 2, None) for _ in range(3)))
        kind = self._pick(bool, Colour, Level, Mixed, Literal[tuple(members)])
        values = [True, False] if kind is bool else list(kind) if isinstance(kind, enum.EnumMeta) else members
        return Random(kind, lambda: self._pick(*values), kind in (bool, Colour, Level))

    def moment(self) -> Random:
        kind = self._pick(date, time, datetime, AwareDatetime, NaiveDatetime)

        def naive() -> datetime:
            year, month = self._pick(1, 1999, 2000, 2023, 2024, 9999), int(self.rng.integers(1, 13))
            seconds = [self._pick(0, 59, int(self.rng.integers(60))) for _ in range(2)]
            hour, part = int(self.rng.integers(24)), self._pick(0, 0, 500000, 123456, 10)
            return datetime(year, month, int(self.rng.integers(1, 29)), hour, *seconds, part)

        def convert(value: datetime) -> date | time:
            return value.date() if kind is date else value.timetz() if kind is time else value

        def zone() -> timezone | None:
            some = timezone(timedelta(minutes=int(self.rng.integers(-1439, 1440))))
            return {AwareDatetime: some, NaiveDatetime: None}.get(kind, self._pick(None, UTC, some))

        bound = convert(naive().replace(tzinfo=self._pick(None, None, UTC) if kind is datetime else None))
        bounds = {self._pick("ge", "gt", "le", "lt"): bound} if self._coin() else {}
        if kind in (AwareDatetime, NaiveDatetime):
            bounds = {}
        values = [bound] * (kind in (date, time, datetime))
        draw = lambda: self._pick(*values, convert(naive().replace(tzinfo=zone())))     # noqa: E731
        return Random(Annotated[kind, Field(**bounds)], draw, True)

    def duration(self) -> Random:
        bounds = self._pick({}, {}, {"ge": timedelta(0)}, {"le": timedelta(hours=1)}, {"gt": timedelta(0)})

        def draw() -> timedelta:
            days = self._pick(0, 0, 1, -1, 400, int(self.rng.integers(-999999999, 999999999)))
            seconds, parts = self._pick(0, 5, 60, int(self.rng.integers(86400))), self._pick(0, 0, 500000, 1)
            found = timedelta(days=days, seconds=seconds, microseconds=parts)
            return self._pick(timedelta.max, timedelta.min, *[found] * 9)

        return Random(Annotated[timedelta, Field(**bounds)], draw, True)

    def other(self) -> Random:
        bits = lambda most: int(self.rng.integers(most, dtype=np.uint64))           # noqa: E731
        url = lambda: f"http://{self._text(1, 4, 'abc')}.org:{bits(65536)}/{self._text(0, 4, 'ab/?=')}"    # noqa: E731
        address = lambda: ipaddress.IPv4Address(bits(2**32))        # noqa: E731
        long_address = lambda: ipaddress.IPv6Address(bits(2**64) << self._pick(0, 16, 64))   # noqa: E731
        return self._pick(
            Random(uuid.UUID, lambda: uuid.UUID(bytes=self.rng.bytes(16)), True),
            Random(pydantic.UUID4, lambda: uuid.UUID(bytes=self.rng.bytes(16), version=4), True),
            Random(ipaddress.IPv4Address, address, True),
            Random(ipaddress.IPv4Interface, lambda: ipaddress.IPv4Interface((address(), bits(33)))),
            Random(ipaddress.IPv6Address, long_address, True),
            Random(pydantic.HttpUrl, lambda: pydantic.HttpUrl(url())),
            Random(bytes, lambda: self._text().encode()),
            Random(complex, lambda: complex(self.rng.normal(), self._pick(0, -1.5, 1e20))),
            Random(Any, lambda: self._pick(None, 1, "a", [1], {"a": [True]}, 0.5)),
            Random(type(None), lambda: None),
            Random(pydantic.ByteSize, lambda: bits(10**6)),
            Random(pydantic.Json[int], lambda: bits(100)),
        )

    # ---- nested

    def _sizes(self) -> tuple[dict[str, int], int]:
        least = int(self.rng.integers(0, 3))
        sizes = {"min_length": least, "max_length": least + int(self.rng.integers(0, 3))}
        return {key: size for key, size in sizes.items() if self._coin()}, least

    def array(self, depth: int) -> Random:
        inner, (sizes, least) = self._any(depth), self._sizes()
        return Random(Annotated[list[inner.kind], Field(**sizes)], lambda: [inner.value() for _ in range(least)])

    def set(self, depth: int) -> Random:
        inner = self._pick(self.whole, self.text, self.choice, self.moment, self.number)()
        (sizes, least), outer = self._sizes(), self._pick(set, frozenset)
        kind = Annotated[outer[inner.kind], Field(**sizes)]
        return Random(kind, lambda: outer(inner.value() for _ in range(least)))

    def tuple(self, depth: int) -> Random:
        parts = [self._any(depth) for _ in range(int(self.rng.integers(1, 4)))]
        kinds = tuple(part.kind for part in parts)
        if self._coin(0.3):
            return Random(tuple[kinds[0], ...], lambda: (parts[0].value(),) * int(self.rng.integers(3)))
        if self._coin(0.3):
            self.count += 1
            kind = NamedTuple(f"Pair{self.count}", [(f"f{i}", each) for i, each in enumerate(kinds)])
            return Random(kind, lambda: kind(*(part.value() for part in parts)))
        return Random(tuple[kinds], lambda: tuple(part.value() for part in parts))

    def mapping(self, depth: int) -> Random:
        key, (sizes, least), inner = Random(str, self._text, True), self._sizes(), self._any(depth)
        for _ in range(5):
            found = self._pick(self.text, self.whole, self.choice, self.moment, self.other)()
            key = found if found.is_key else key
        kind = Annotated[dict[key.kind, inner.kind], Field(**sizes)]
        return Random(kind, lambda: {key.value(): inner.value() for _ in range(least)})

    def union(self, depth: int) -> Random:
        parts = [self._any(depth) for _ in range(2)]
        if self._coin():
            return Random(parts[0].kind | None, lambda: self._pick(None, parts[0].value()))
        return Random(typing.Union[parts[0].kind, parts[1].kind], lambda: self._pick(*parts).value())   # noqa: UP007

    def tree(self, depth: int) -> Random:
        def draw(left: int = 2) -> Tree:
            count = int(self.rng.integers(left + 1))
            return Tree(label=self._text(0, 3), children=[draw(left - 1) for _ in range(count)])

        return Random(Tree, draw)

    def record(self, depth: int) -> Random:
        """Return a model, a dataclass, a TypedDict or a union of two models by a tag."""
        self.count += 1
        parts = {self._pick(f"f{i}", f"näme{i}"): self._any(depth) for i in range(int(self.rng.integers(1, 4)))}
        hints = {name: part.kind for name, part in parts.items()}
        optional = {name for name in parts if self._coin(0.3)}
        name = f"Record{self.count}"
        given = lambda: {key: part.value() for key, part in parts.items() if key not in optional or self._coin()}  # noqa: E731
        form = self._pick("model", "model", "dataclass", "typed", "tagged")
        if form == "typed":
            fields = {key: NotRequired[hint] if key in optional else hint for key, hint in hints.items()}
            return Random(TypedDict(name, fields), given)               # type: ignore[operator]
        if form == "dataclass":
            made = dataclasses.make_dataclass(name, list(hints.items()))
            return Random(made, lambda: made(**{key: part.value() for key, part in parts.items()}))
        options = {"extra": self._pick("ignore", "forbid", "allow"), "str_strip_whitespace": self._coin(0.2)}
        options |= {"ser_json_timedelta": self._pick("iso8601", "float"), "val_json_bytes": "utf8"}
        config = ConfigDict(**options)
        if form == "tagged":
            tags = [Literal["cat"], Literal["dog", "wolf"]]
            kinds = [pydantic.create_model(f"{name}{i}", __config__=config, tag=(tags[i], ...), **{
                key: (hint, ...) for key, hint in hints.items()}) for i in range(2)]    # fmt: skip
            def one() -> Any:
                at = int(self.rng.integers(2))
                values = {key: part.value() for key, part in parts.items()}
                return kinds[at](tag=("cat", "wolf")[at], **values)

            return Random(Annotated[typing.Union[tuple(kinds)], Field(discriminator="tag")], one)       # noqa: UP007
        fields = {}
        for key, hint in hints.items():
            alias = {"alias": self._pick("A b", 'q"') + key} if self._coin(0.2) else {}
            fields[key] = (hint, Field(parts[key].value() if key in optional else ..., **alias))
        made = pydantic.create_model(name, __config__=config | {"validate_by_name": True}, **fields)
        return Random(made, lambda: made(**given()))
