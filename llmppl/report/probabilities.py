"""Probabilities of values: a mapping that is displayed as a table, in a notebook with bars.

Values are one value if they have one type and are equal, and so are their parts. So True, 1, 1.0 and "1" are four
values, as are [1], (1,) and "[1]". A Text is a str with its bytes, and a NumPy scalar is the Python number. The order
of a dict does not count. NaN is one value, and 0.0 is -0.0.
"""

import enum
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmppl.report.tables import TableView, one_line
from llmppl.support.arguments import is_hashable
from llmppl.support.options import no_attribute

CERTAIN = 5e-4  # half the last digit that is shown
UNSURE = 0.25  # a larger standard error says nothing about a probability


class Share(NamedTuple):
    """Probability of one value.

    `lower` and `upper` are certain bounds of a computed probability, or 0 and 1 of an estimate whose error is unknown.
    `se` is the standard error of another estimate, None if the particles are no random sample.
    """

    value: Any
    probability: float
    lower: float | None = None
    upper: float | None = None
    se: float | None = None

    @property
    def interval(self) -> tuple[float, ...]:
        """Certain bounds, or one standard error to each side within 0 and 1; empty without either."""
        if self.se is not None:
            return max(self.probability - self.se, 0.0), min(self.probability + self.se, 1.0)
        return tuple(bound for bound in (self.lower, self.upper) if bound is not None)

    def __str__(self) -> str:
        """Return the probability with its standard error or bounds, where they show.

        An error that goes beyond 0 or 1 is shown as the interval of one standard error within them, and one above
        `UNSURE` without the probability.
        """
        p = self.probability
        text = f"{p:.3f}"
        if 0 < p < CERTAIN:
            text = f"{p:.1e}"
        low, high = self.interval or (p, p)
        if self.se is None:
            if (low, high) == (0.0, 1.0):
                return f"{text} (error unknown)"
            if high - low > CERTAIN:
                return f"{text} ({low:.3f} to {high:.3f})"
            return text
        if self.se > UNSURE:
            return f"unknown ({low:.2f} to {high:.2f})"
        if self.se > min(p, 1 - p):
            digits = max(2, 1 - math.floor(math.log10(self.se)))
            return f"{text} ({low:.{digits}f} to {high:.{digits}f})"
        return f"{text} +- {self.se:.2g}"


class Probabilities(TableView, Mapping[Any, float]):
    """Probabilities of values, the most probable first: `answers["blue"]`, `answers.best`, `answers.items()`.

    Values that cannot be hashed, such as lists, are keys as well: `answers[["red", "blue"]]`. A value that is not there
    stands for the only one that equals it, as 1 for True. `shares` is a tuple of `Share`, in the same order, and
    `header` the first line of the table.
    """

    if not TYPE_CHECKING:
        __getattr__ = no_attribute("take best, answers[value] or shares")

    def __init__(self, shares: Iterable[Share], header: str) -> None:
        self.shares = tuple(sorted(shares, key=lambda share: -share.probability))
        self.header = header
        self._by_key = {key_of(share.value): share for share in self.shares}

    def __getitem__(self, value: Any) -> float:
        return self.share(value).probability

    def share(self, value: Any) -> Share:
        """Return the probability of a value with its standard error or bounds. KeyError if it was not found."""
        key = key_of(value)
        if key in self._by_key:
            return self._by_key[key]
        equal = []
        if is_hashable(value):
            equal = [
                share for share in self.shares if is_hashable(share.value) and share.value == value
            ]
        if len(equal) != 1:
            raise KeyError(
                f"{value!r} is not among the values: {one_line(', '.join(map(repr, self)))}"
            )
        return equal[0]

    def __iter__(self) -> Iterator[Any]:
        return (share.value for share in self.shares)

    def __len__(self) -> int:
        return len(self.shares)

    @property
    def best(self) -> Any:
        """Most probable value, the first of several; a ValueError without values."""
        if not self.shares:
            raise ValueError(f"{self.header}: there is no value")
        return self.shares[0].value

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each value: value, probability, lower, upper, se."""
        return [share._asdict() for share in self.shares]

    def _table(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        rows = [(str(share), one_line(repr(share.value))) for share in self.shares]
        return ("probability", "value"), rows

    def _bars(self) -> list[list[tuple[float, ...]]]:
        return [[(share.probability, *share.interval)] for share in self.shares]


def key_of(value: Any) -> Hashable:
    """Return a key that can be hashed. Values are one value if they have the same key."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return str, value
    if isinstance(value, Mapping):
        return kind, frozenset(map(key_of, value.items()))
    if isinstance(value, Set):
        return kind, frozenset(map(key_of, value))
    if isinstance(value, list | tuple):
        return kind, tuple(map(key_of, value))
    if hasattr(kind, "tolist") and hasattr(kind, "dtype"):  # an array, a tensor, a series
        return kind, str(value.dtype), value.shape, key_of(value.tolist())
    if hasattr(kind, "__dataclass_fields__"):
        return kind, tuple(key_of(getattr(value, name, None)) for name in kind.__dataclass_fields__)
    if hasattr(kind, "model_fields"):  # a record of pydantic, with its undeclared fields
        return kind, key_of(dict(value))
    if is_hashable(value) and value == value:
        return kind, value
    state = getattr(value, "__dict__", {})
    text = repr(value)
    if state and text == object.__repr__(value):  # an address
        text = ""
    return kind, text, key_of(state)
