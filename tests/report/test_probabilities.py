"""Values of a posterior: which ones are one value, and how paths spell names."""

import collections
import dataclasses
import enum
import itertools
import math
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmppl import Model, Uniform, enumerate_exact, importance_sampling
from llmppl.constraints.vocabulary import Text
from llmppl.inference.particles import NO_VALUE, value_of
from llmppl.report.probabilities import Probabilities, Share


@dataclasses.dataclass
class Pet:
    tame: object


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Named(enum.StrEnum):
    RED = "red"


Pair = collections.namedtuple("Pair", "a b")
UNEQUAL = {
    "a list, its repr, a tuple": ([1], "[1]", (1,)),
    "numbers of three types": (True, 1, 1.0, "1", Decimal(1), 1 + 0j),
    "numbers inside": ([True], [1], [1.0], ["1"]),
    "records": (Pet(True), Pet(1), Pet([1]), Pet("[1]"), "Pet(tame=1)", {"tame": 1}),
    "bytes that end in a character": (Text(b"caf\xc3"), Text(b"caf\xc2"), b"caf\xc3"),
    "normal forms": ("\u00e9", "e\u0301"),
    "dicts": ({"a": 1}, {"a": True}, {"a": 1, "b": 1}, [("a", 1)], "{'a': 1}"),
    "enums": (Colour.RED, "red", Colour.BLUE, Named.RED),
    "named tuples": (Pair(1, 2), (1, 2), Pair(True, 2)),
    "sets": ({1}, {True}, frozenset({1}), [1]),
    "arrays": (np.array([1]), np.array([1.0]), np.array([[1]]), [1]),
    "nothing": (None, "None", False, 0, "", (), [], {}, NO_VALUE),
    "numbers that are none": (math.nan, "nan", Decimal("nan"), math.inf),
}
EQUAL = {
    "not a number": (math.nan, float("nan"), np.float64("nan")),
    "zeros": (0.0, -0.0),
    "orders of a dict": ({"a": [1], "b": 2}, {"b": 2, "a": [1]}),
    "NumPy": (1, np.int64(1), np.int8(1)),
    "texts": ("\u00e9", Text(b"\xc3\xa9")),
    "records": (Pet([{1, 2}]), Pet([{2, 1}])),
    "arrays": (np.array([0.0, math.nan]), np.array([-0.0, math.nan])),
}


class Unhashable:
    """Object with an equality of its own, and so without a hash."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.x == other.x


class Alike(Unhashable):
    """The same, with one repr for all."""

    def __repr__(self):
        return "named"


UNEQUAL["objects"] = (Unhashable(1), Unhashable(2), Alike(1), Alike(2), Alike(True))
UNEQUAL["tensors"] = (
    torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1.0, 2.0]), torch.zeros(5000),
    torch.tensor(np.eye(1, 5000, 2500)[0], dtype=torch.float32), np.array([1, 2]),
)  # fmt: skip
EQUAL["objects"] = (Unhashable([1]), Unhashable([1]))
EQUAL["tensors"] = (torch.tensor([1, 2]), torch.tensor([1, 2]))
EQUAL["records without a field"] = (object.__new__(Pet), object.__new__(Pet))


class Values(Model):
    values: tuple = ()
    shared = ("values",)

    def __init__(self, values):
        super().__init__()
        self.values = values

    def step(self):
        self.kind = self.values[self.sample(Uniform(0, len(self.values) - 1))]
        self.finish()


@pytest.mark.parametrize("name", UNEQUAL)
def test_values_of_different_types_stay_apart(name):
    values = UNEQUAL[name]
    found = enumerate_exact(Values(values)).by("kind")
    assert len(found) == len(values) and [*map(id, found)] == [*map(id, values)]
    for value in values:
        assert found[value] == pytest.approx(1 / len(values))
    assert [p for _, p in found.items()] == [found[value] for value in values]


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_of_one_type_are_one_value(name):
    found = enumerate_exact(Values(EQUAL[name])).by("kind")
    assert len(found) == 1
    for value in EQUAL[name]:
        assert found[value] == pytest.approx(1.0)


def test_a_probability_is_at_most_one():
    for n in range(3, 40):
        assert importance_sampling(Values(("a",)), n, seed=0, progress=False).by("kind")["a"] <= 1.0


def test_a_look_up_takes_the_only_equal_value():
    found = Probabilities([Share(True, 0.5), Share(Named.RED, 0.3), Share([1], 0.2)], "three values")
    assert (found[1], found["red"], found[[1]]) == (0.5, 0.3, 0.2)
    several = Probabilities([Share(True, 0.5), Share(1.0, 0.5)], "two values")
    for missing in 1, [True], np.array([1, 2]):
        with pytest.raises(KeyError, match="is not among the values: True, 1.0"):
            several[missing]


def test_texts_of_different_bytes_have_their_own_weight():
    class Halves(Model):
        def step(self):
            self.s = Text([b"caf\xc3", b"caf\xc2", b"caf\xc3\xa9"][self.sample(Uniform(0, 2))])
            self.finish()

    posterior = enumerate_exact(Halves())
    for found in posterior.by("s"), posterior.answers(), posterior.by_text():
        assert {text.bytes: p for text, p in found.items()} == pytest.approx(
            {b"caf\xc3": 1 / 3, b"caf\xc2": 1 / 3, b"caf\xc3\xa9": 1 / 3}
        )
        assert found["caf\u00e9"] == pytest.approx(1 / 3)
    assert repr(posterior).startswith("Particles(3 of positive weight") and "3 different texts" in repr(posterior)


RECORD = {
    "b.c": 1, "b": {"c": 2, "d.e": [3, {"f g": 4}]}, "[x]": 5, "a[0]": 6, "a": [7], "": 8, ".h": 9, 'q"': 10, "'": 11,
    "\u00e9 \n": {"0": 12}, "class": 13,
}  # fmt: skip


@pytest.mark.parametrize(
    "path, value",
    [
        ("b.c", 1), ('["b.c"]', 1), ("['b.c']", 1), ('["b"].c', 2), ("b['c']", 2), ("b.d.e", [3, {"f g": 4}]),
        ('b["d.e"][0]', 3), ('b["d.e"][1].f g', 4), ('b["d.e"][-1]["f g"]', 4), ("[x]", 5), ("a[0]", 6),
        ('["a"][0]', 7), (".h", 9), ('["q\\""]', 10), ("q\"", 10), ('["\'"]', 11), ("\u00e9 \n.0", 12), ("class", 13),
        ("b..c", NO_VALUE), ("b.x", NO_VALUE), ('["b.c', NO_VALUE), ("a[1]", NO_VALUE), ("a[x]", NO_VALUE),
    ],
)  # fmt: skip
def test_a_path_spells_names_that_are_no_identifiers(path, value):
    separator = "" if path.startswith("[") else "."
    assert value_of(SimpleNamespace(parsed=RECORD), f"parsed{separator}{path}") == value


def test_fields_of_any_name_have_probabilities():
    class Record(Model):
        def step(self):
            self.parsed = {"b.c": self.sample(Uniform(0, 1)), "d": [{"e f": [1]}]}
            self.finish()

    posterior = enumerate_exact(Record())
    for path, by in itertools.product(("b.c", '["b.c"]'), (posterior.field, posterior.by)):
        found = by(path if by == posterior.field else f"parsed{'' if path[0] == '[' else '.'}{path}")
        assert dict(found) == pytest.approx({0: 0.5, 1: 0.5})
    assert posterior.field('d[0]["e f"]')[[1]] == pytest.approx(1.0)
    assert posterior.field("d[0].e f").header.startswith("parsed.d[0].e f: 1 values")


@pytest.mark.parametrize(
    "share, text",
    [
        (Share("a", 0.684, se=0.26), "unknown (0.42 to 0.94)"), (Share("a", 1.0, se=0.33), "unknown (0.67 to 1.00)"),
        (Share("a", 0.774, se=0.2), "0.774 +- 0.2"), (Share("a", 1.0, se=0.13), "1.000 (0.87 to 1.00)"),
        (Share("a", 2.2e-7, se=0.24), "2.2e-07 (0.00 to 0.24)"), (Share("a", 0.929, se=0.16), "0.929 (0.77 to 1.00)"),
        (Share("a", 0.9997, se=0.0014), "1.000 (0.9983 to 1.0000)"), (Share("a", 1.0, se=0.0), "1.000 +- 0"),
        (Share("a", 0.5, se=0.7), "unknown (0.00 to 1.00)"), (Share("a", 0.3, 0.0, 1.0), "0.300 (error unknown)"),
        (Share("a", 0.3, 0.25, 0.5), "0.300 (0.250 to 0.500)"), (Share("a", 0.3), "0.300"),
    ],
)  # fmt: skip
def test_an_error_is_shown_within_zero_and_one(share, text):
    assert str(share) == text
