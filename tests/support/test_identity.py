"""Tests of identities: equal values have one digest in every process, and other values have others."""

import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import linecache
import os
import pathlib
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from llmppl.constraints import Text
from llmppl.support.identity import difference, digest, identity, task_digest


@dataclasses.dataclass
class Point:
    x: object
    words: frozenset = frozenset({"one", "two", "three"})


class NoRepr:
    def __init__(self, *parts):
        self.parts = parts


class Words(set):
    pass


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, left, right):
        self.left, self.right = left, right


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def tensor(*numbers, kind="float32"):
    import torch

    return torch.tensor(numbers, dtype=getattr(torch, kind))


def frame(*numbers):
    import pandas

    return pandas.DataFrame({"n": [*numbers], "text": [str(each) for each in numbers]})


def series(*numbers):
    import pandas

    return pandas.Series(numbers, index=[f"row {i}" for i in range(len(numbers))])


def linked(letter):
    """Return two objects that lead to each other."""
    one, two = NoRepr(letter), NoRepr()
    one.other, two.other = two, one
    return one


def values():
    """Return a value of each of many kinds; the pairs of neighbours are not equal."""
    large = np.arange(5000.0)
    other = large.copy()
    other[2500] += 1
    return [
        0, False, 0.0, -0.0, "0", b"0", None, 1, True, "", b"", (), [], {}, set(), frozenset(), (1,), [1], "1", ("1",),
        [[1], [2]], [[1, 2]], [1, [2]], {"a": 1}, {"a": "1"}, {"b": 1}, {1: "a"}, {1}, {"1"}, {(1, 2)}, {("1", "2")},
        "\ud800", "é", Text(b"\xc3"), Text(b"\xff"), float("nan"), float("inf"), 10**400, 1 + 2j,
        large, other, large.astype(int), large.reshape(50, 100), np.arange(3), np.float32(1),
        np.float64(1), np.array(["a", "b"]), np.array(["a", "c"]), np.array([{"a"}, 1], object), np.zeros(2, "i4,f4"),
        tensor(*range(2000)), tensor(*range(1999), 7), tensor(1), tensor(1, kind="bfloat16"), tensor(1, kind="bool"),
        tensor(1, kind="int64"), frame(*range(5000)), frame(*range(4999), 7), series(1, 2), series(1, 3),
        datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.timedelta(1), fractions.Fraction(1, 3),
        pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b"), Colour.RED, Colour.BLUE, Point(1), Point(2),
        Point(large), Point(other),
        Point(tensor(1)), Point(tensor(2)), NoRepr(1), NoRepr(2), NoRepr({"a", "b"}), NoRepr({"a", "c"}),
        Slots(1, 2), Slots(2, 1), linked("a"), linked("b"), len, abs, NoRepr, Point, functools.partial(pow, 2),
        functools.partial(pow, 3), types.SimpleNamespace(a=1), types.SimpleNamespace(a=2),
        collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1), collections.Counter("aab"),
        np.random.default_rng(0), np.random.default_rng(1), range(3), range(4), slice(1),
        Exception("a"), Exception("b"), Words(["one", "two", "three"]), Words(["one", "two", "four"]),
    ]  # fmt: skip


def digests():
    return [task_digest(0, value, None) for value in values()]


def test_different_values_have_different_digests():
    found = digests()
    assert len(set(found)) == len(found) > 90


PRINT = "import test_identity; print(*test_identity.digests())"


def test_equal_values_have_one_digest_in_every_process():
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PRINT], env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == digests()


def test_a_digest_depends_on_values_alone():
    text = "".join(["a", "b"])
    same = ["ab", "ab"]
    assert digest([text, "ab"]) == digest(same) == digest(["ab", "".join("ab")])
    inner = [1]
    assert digest([inner, inner]) == digest([[1], [1]])
    point = Point(1)
    assert digest((point, point)) == digest((Point(1), Point(1)))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    array = np.arange(10)
    assert digest(array[::2]) == digest(array[::2].copy()) == digest(np.array([0, 2, 4, 6, 8]))
    assert digest(tensor(1, 2, 3, 4)[::2]) == digest(tensor(1, 3))


def test_digests_of_shared_and_linked_objects_take_little_time():
    shared, slots = [1], Slots(1, 2)
    for _ in range(60):
        shared, slots = [shared, shared], Slots(slots, slots)
    cells = [[NoRepr() for _ in range(5)] for _ in range(5)]
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            cell.neighbours = [cells[i - 1][j], cells[i][j - 1]]
    for task in (shared, slots):
        assert task_digest(0, task, None) == digest(task)
    assert len({digest(cells), digest(cells[0])}) == 2


def generator():
    yield 1


@pytest.mark.parametrize("task", [
    lambda: 1, threading.Lock(), generator(), [{"a": lambda: 1}], Point(threading.Lock()), memoryview(b"a"),
    functools.reduce(lambda inner, _: [inner], range(10_000), []),
])  # fmt: skip
def test_a_task_without_a_pickle_needs_a_key(task):
    with pytest.raises(TypeError, match=r"task 7, .* cannot be pickled .*: give key=.* key=lambda task: task\.name"):
        task_digest(7, task, None)
    assert task_digest(7, task, lambda task: "name") == "name"


class Changes:
    def __reduce__(self):
        return str, (str(id(self)),)


def test_a_task_of_another_pickle_each_time_needs_a_key():
    with pytest.raises(TypeError, match="task 1, .* has another pickle each time: give key="):
        task_digest(1, Changes(), None)


def test_members_of_a_set_that_lead_to_each_other_need_a_key():
    for _ in range(20):                                 # in a new order each time
        cells = {NoRepr(i) for i in range(3)}
        for cell in cells:
            cell.others = [*cells - {cell}]
        with pytest.raises(TypeError, match="has another pickle each time: give key="):
            task_digest(1, cells, None)


def test_a_key_is_a_text():
    with pytest.raises(TypeError, match="key must return a text; for task 2 it returned 1"):
        task_digest(2, "a", len)


def plain(task, rng):
    return task


class Program:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, task, rng):
        return task


def attributes(**values):
    """Return the attributes in the identity of a program."""
    found = identity(Program(**values))
    return {name.removeprefix("the attribute "): value for name, value in found.items() if "attribute" in name}


def test_only_plain_data_is_compared():
    others = {"lock": threading.Lock(), "call": lambda: 1, "_rng_": 1, "state": NoRepr(2), "cell": {1: [NoRepr(1)]}}
    others["local"] = dataclasses.make_dataclass("Local", "x")(1)
    assert attributes(number=3, name="a", **others) == {"number": "3", "name": "'a'"}
    endless, shared = [], [1]
    endless.append(endless)
    for _ in range(60):
        shared = [shared, shared]
    data = [(1, "a"), [1, "a"], {1, "a"}, {1: "a"}, {"a": 1}, np.arange(3), np.arange(4), np.float64(1), endless,
            shared, "a" * 1000, "a" * 999 + "b", [["a"] * 1000], 10**100, Colour.RED, Colour.BLUE, Point(1), Point([1]),
            datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]  # fmt: skip
    told = [attributes(lambda_=each)["lambda_"] for each in data]
    assert len(set(told)) == len(data) and max(map(len, told)) < 100


@functools.lru_cache
def kept(task, rng):
    return task


def test_decorated_functions_and_partials_have_the_source_of_their_function():
    wrapper = functools.wraps(plain)(lambda *given: plain(*given))
    assert identity(plain) == identity(functools.partial(plain)) == identity(wrapper)
    assert "the source of kept" in identity(kept) and identity(kept)["its program"] == "kept"


METHODS = """
    @property
    def weight(self): return {0}
    @functools.cached_property
    def kept(self): return {1}
    @functools.lru_cache
    def cached(self): return {2}
    @staticmethod
    def alone(): return {3}
    @classmethod
    def made(cls, of={4}): return of
    called = lambda self, x={5}: x + {6}
    def __call__(self, task, rng, *, n={7}): return n
    number = {8}
"""
CELL = METHODS + "    array = np.array({9}) + noise\n"


def shell(text, name, file="<stdin>"):
    names = {"__name__": "shell", "functools": functools, "np": np, "noise": 1}
    exec(compile(text, file, "exec"), names)
    return names[name]


def notebook(text, name):
    """Return an object of a cell of a notebook, whose lines are known by a name."""
    cell = f"<ipython-input-{len(linecache.cache)}>"
    linecache.cache[cell] = len(text), None, text.splitlines(keepends=True), cell
    return shell(text, name, cell)


@pytest.mark.parametrize("made, text", [(shell, METHODS), (notebook, CELL)])
def test_each_part_of_a_class_without_a_file_is_compared(made, text):
    numbers = list(range(1, 11))
    now = identity(made("class Own:" + text.format(*numbers), "Own")())
    assert now == identity(made("class Own:" + text.format(*numbers), "Own")())
    for place in range(text.count("{")):
        changed = [*numbers[:place], 99, *numbers[place + 1 :]]
        before = identity(made("class Own:" + text.format(*changed), "Own")())
        assert difference(before, now) == "the source of Own has changed"


@pytest.mark.parametrize("call", ["lambda task, rng, n={}: n", "lambda task, rng, *, n={}: n"])
def test_defaults_of_a_lambda_are_compared(call):
    one, same, two = (identity(shell(f"call = {call.format(n)}", "call")) for n in (1, 1, 2))
    assert one == same and difference(one, two) == "the source of <lambda> has changed"
