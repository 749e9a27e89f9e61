"""State that copies would part or share: each program is right, or refused by the name of the attribute.

The truth is enumerated by hand: letters x, y, z of probability .5, .3, .2, of which no two in a row may be equal.
"""

import copy
import functools
import itertools
import math
import os
import random
import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.samplers import SAMPLERS, every_sampler, is_posterior

from llmppl import Bernoulli, Categorical, Model, beam_search, enumerate_exact, smc_steer
from llmppl.distributions import Distribution, Finite
from llmppl.testing import check_program

P = {"x": 0.5, "y": 0.3, "z": 0.2}
BASE = Categorical(P)
TRUTH = {
    "".join(text): math.prod(map(P.__getitem__, text))
    for text in itertools.product("xyz", repeat=3)
    if text[0] != text[1] != text[2]
}
Z = sum(TRUTH.values())


class Apart(Model):
    """Three letters, no two of which in a row are equal; `ok` says whether a letter may come next."""

    def ok(self, letter):
        return not self.s.endswith(letter)

    def prepare(self):
        """Before each step."""

    def step(self):
        self.prepare()
        letter = self.sample(BASE)
        self.condition(self.ok(letter))
        self.s += letter
        if len(self.s) == 3:
            self.finish()


EVERYTHING = {**SAMPLERS, "exact": lambda model, seed=0: enumerate_exact(model),
              "beam": lambda model, seed=0: beam_search(model, 4, 3)}  # fmt: skip
every_algorithm = pytest.mark.parametrize("run", EVERYTHING.values(), ids=EVERYTHING)
COPYING = [name for name in EVERYTHING if name not in ("standard", "importance")]           # in every step


def refused(run, program, said, kind=TypeError):
    with pytest.raises(kind, match=said):
        for seed in range(3):
            run(program(), seed=seed)


def lazily(make):
    """A program whose first step makes its `rule`, which the others find."""

    class Lazy(Apart):
        rule = None

        def prepare(self):
            if self.rule is None:
                self.rule = make(self)

    return Lazy


@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize(
    "make",
    [
        lambda self: lambda letter: not self.s.endswith(letter),
        lambda self: [lambda letter: not self.s.endswith(letter)],
        lambda self: {"ok": (1, lambda letter: not self.s.endswith(letter))},
        lambda self: SimpleNamespace(ok=lambda letter: not self.s.endswith(letter)),
        lambda self: functools.partial(lambda letter, but: not self.s.endswith(letter), but=1),
        lambda self: BASE.where(lambda letter: not self.s.endswith(letter)),
        lambda self: BASE.where(self.ok),
        lambda self: functools.lru_cache(self.ok),
    ],
    ids=["function", "in a list", "in a dict", "in an object", "partial", "where", "where by method", "cached"],
)
def test_a_kept_function_that_uses_the_model_is_refused(name, make):
    refused(EVERYTHING[name], lazily(make), r"the attribute rule of Lazy refers to another particle.*Write a method")


@every_algorithm
def test_a_function_made_anew_in_every_step_is_right(run):
    class Anew(Apart):
        def prepare(self):
            self.rule = lambda letter: not self.s.endswith(letter)

        def ok(self, letter):
            return self.rule(letter)

    assert math.exp(enumerate_exact(Anew()).log_ml) == pytest.approx(Z)
    run(Anew(), seed=0)


@every_algorithm
@pytest.mark.parametrize("made", ["before the run", "in a step"])
@pytest.mark.parametrize(
    "weak",
    [
        weakref.ref, weakref.proxy, lambda self: [weakref.ref(self)],
        lambda self: SimpleNamespace(of=weakref.proxy(self)), lambda self: weakref.WeakSet([self]),
        lambda self: weakref.WeakKeyDictionary({self: 1}),
    ],
    ids=["ref", "proxy", "ref in a list", "proxy in an object", "weak set", "weak keys"],
)  # fmt: skip
def test_a_weak_reference_to_the_model_is_refused(run, weak, made):
    if made == "in a step":
        program = lazily(weak)
    else:

        class Weak(Apart):
            def __init__(self):
                super().__init__()
                self.rule = weak(self)

        program = Weak
    refused(run, program, r"the attribute rule of \w+ holds a weak reference to the model")


@every_sampler
def test_an_object_that_refers_to_the_model_is_right(run):
    class Owns(Apart):
        def __init__(self):
            super().__init__()
            self.owner = SimpleNamespace(model=self)

        def ok(self, letter):
            return not self.owner.model.s.endswith(letter)

    is_posterior(run, Owns, TRUTH, quick=100)


# ---- arrays that are views of one another


def viewing(make):
    """Each letter once: a board that is read, and a view of it that is written to."""

    class Views(Model):
        def __init__(self):
            super().__init__()
            self.board, self.row = make()

        def step(self):
            letter = self.sample(BASE)
            place = "xyz".index(letter)
            self.condition(not np.asarray(self.board).ravel(order="K")[place])
            np.asarray(self.row)[..., place] = True
            self.s += letter
            if len(self.s) == 3:
                self.finish()

    return Views


def _board(order="C"):
    board = np.zeros((2, 3), bool)
    return board, board[0]


def _columns():
    board = np.zeros((3, 2), bool, order="F")
    return board, board[:, 0]


def _both_views():
    base = np.zeros(8, bool)
    return base[1:4], base[1:4].reshape(1, 3)


def _backwards():
    base = np.zeros(3, bool)
    return base, base[::-1][::-1]


ONCE = {"".join(text): math.prod(P.values()) for text in itertools.permutations("xyz")}


@every_sampler
@pytest.mark.parametrize("make", [_board, _columns, _both_views, _backwards])
def test_views_of_an_array_stay_views_in_copies(run, make):
    program = viewing(make)
    is_posterior(run, program, ONCE, quick=150)
    assert math.exp(enumerate_exact(program()).log_ml) == pytest.approx(6 * 0.03)


def test_copies_of_views_share_memory_with_each_other_only():
    model = viewing(_board)()
    model.more = [model.board[1:], {"row": model.row}]
    for twin in (model.copy(), model.copy().copy(), copy.deepcopy(model)):
        arrays = [twin.board, twin.row, twin.more[0], twin.more[1]["row"]]
        assert all(np.shares_memory(twin.board, array) for array in arrays)
        assert not any(np.shares_memory(model.board, array) for array in arrays)
        assert [array.shape for array in arrays] == [(2, 3), (3,), (1, 3), (3,)]
        twin.row[2] = True
        assert twin.board[0, 2] and twin.more[1]["row"][2] and not model.board.any()


def test_views_in_a_tuple_stay_views_in_copies():
    model = Apart()
    model.board = np.zeros((2, 3))
    model.rows = (model.board[0], [model.board[1]])
    for twin in (model.copy(), model.copy().copy()):
        twin.rows[0][1], twin.rows[1][0][2] = 1, 2
        assert twin.board[0, 1] == 1 and twin.board[1, 2] == 2 and not model.board.any()


@every_sampler
@pytest.mark.parametrize("slots", [(), ("seen", "add")])
def test_a_bound_method_of_a_list_follows_the_copied_list(run, slots):
    class Once(Apart):
        __slots__ = slots

        def __init__(self):
            super().__init__()
            self.seen = []
            self.add = self.seen.append

        def ok(self, letter):
            return letter not in self.seen

        def step(self):
            super().step()
            self.add(self.s[-1])

    is_posterior(run, Once, ONCE, quick=60)


def test_a_method_of_a_list_of_models_follows_the_copies():
    model = Apart()
    model.seen = [model]
    model.add = model.seen.append
    twin = model.copy()
    twin.add(1)
    assert twin.seen[0] is twin and twin.seen[1] == 1 and len(model.seen) == 1


def test_a_method_of_an_uncopyable_object_is_refused_unless_shared():
    class Writes(Apart):
        def __init__(self):
            super().__init__()
            self.write = open(os.devnull, "w").write    # noqa: SIM115

    with pytest.raises(TypeError, match=r'the attribute write of Writes cannot be copied .* shared = \("write",\)'):
        smc_steer(Writes(), 2, 2, seed=0, progress=False)
    Writes.shared = ("write",)
    assert smc_steer(Writes(), 2, 2, seed=0, progress=False)


def test_methods_of_immutable_objects_are_shared():
    model = Apart()
    model.look, model.root, model.matches = ({"x": 1}.get, "upper".upper), math.sqrt, re.compile("x").match
    twin = model.copy()
    assert (twin.look[0]("x"), twin.look[1](), twin.root(4), bool(twin.matches("x"))) == (1, "UPPER", 2, True)
    assert twin.root is model.root and twin.look[1] is model.look[1]


def _objects():
    base = np.array([1, "a"], dtype=object)
    return base, base[:1]


def _buffer():
    buffer = bytearray(3)
    return buffer, np.frombuffer(buffer, np.uint8)


def _tensor():
    tensor = pytest.importorskip("torch").zeros(3)
    return tensor, tensor.numpy()


@pytest.mark.parametrize(("make", "kind"), [(_objects, "ndarray"), (_buffer, "bytearray"), (_tensor, "Tensor")])
def test_views_that_cannot_be_preserved_are_refused(make, kind):
    model = Apart()
    model.one, model.other = make()
    with pytest.raises(TypeError, match=f"attributes of Apart are views of one {kind}"):
        smc_steer(model, 2, 2, seed=0, progress=False)


@every_sampler
def test_tensors_that_share_their_storage_share_it_in_copies(run):
    def make():
        board = pytest.importorskip("torch").zeros(2, 3, dtype=bool)
        return board, board[0]

    is_posterior(run, viewing(make), ONCE, quick=60)


@every_algorithm
def test_a_list_as_default_of_a_method_is_data_of_the_class(run):
    class Defaults(Apart):
        def ok(self, letter, seen=[]):                  # noqa: B006
            seen.append(letter)
            return True

    refused(run, Defaults, "step 1 changed Defaults.the defaults of ok, which all particles share", RuntimeError)


@every_algorithm
def test_a_read_only_view_that_serves_as_a_mask_is_copied(run):
    buffer = np.ones(3, bool)                           # one for all, filled anew in each step

    class Masks(Model):
        def step(self):
            buffer[:] = [not self.s.endswith(letter) for letter in "xyz"]
            view = buffer.view()
            view.flags.writeable = False
            self.s += self.sample(BASE, proposal=BASE.masked(view))
            if len(self.s) == 3:
                self.finish()

    if run in SAMPLERS.values():
        is_posterior(run, Masks, TRUTH, quick=100)
    assert math.exp(enumerate_exact(Masks()).log_ml) == pytest.approx(Z)


# ---- what all particles share


class Memory:
    def __init__(self):
        self.seen = []

    @functools.cached_property
    def letters(self):
        return "xyz"


def keeping(value, keep, read):
    """The last letter, kept in `state`, which stands in the class."""

    class Keeps(Apart):
        state = copy.deepcopy(value)

        def ok(self, letter):
            return letter != read(self)

        def prepare(self):
            if self.s:
                keep(self, self.s[-1])

    return Keeps


@every_algorithm
@pytest.mark.parametrize(
    ("value", "keep"),
    [
        ([""], lambda self, letter: self.state.__setitem__(0, letter)),
        ([], lambda self, letter: self.state.append(letter)),
        ({"last": ""}, lambda self, letter: self.state.update(last=letter)),
        ({"last": [""]}, lambda self, letter: self.state["last"].__setitem__(0, letter)),
        (set(), lambda self, letter: self.state.add(letter)),
        (np.zeros(3), lambda self, letter: self.state.__setitem__("xyz".index(letter), 1.0)),
        ("", lambda self, letter: setattr(type(self), "state", letter)),
        (0, lambda self, letter: setattr(type(self), "state", type(self).state + 1)),
        (bytearray(3), lambda self, letter: self.state.__setitem__("xyz".index(letter), 1)),
        (Memory(), lambda self, letter: self.state.seen.append(letter)),
        (SimpleNamespace(seen=()), lambda self, letter: setattr(self.state, "seen", (*self.state.seen, letter))),
    ],
    ids=["list", "growing list", "dict", "list in a dict", "set", "array", "rebound", "counter", "bytearray", "object",
         "namespace"],
)  # fmt: skip
def test_data_of_the_class_that_a_step_changes_are_refused_by_name(run, value, keep):
    program = keeping(value, keep, lambda self: "")
    refused(run, program, r"step \d changed Keeps.state('s attributes)?, which all particles share", RuntimeError)


@every_algorithm
def test_a_tensor_of_the_class_that_a_step_changes_is_refused(run):
    zeros = pytest.importorskip("torch").zeros(3)
    program = keeping(zeros, lambda self, letter: self.state.__setitem__("xyz".index(letter), 1.0), lambda self: "")
    refused(run, program, r"step \d changed Keeps.state, which all particles share", RuntimeError)


@every_algorithm
@pytest.mark.parametrize("make", [lambda: itertools.cycle("xy"), lambda: np.random.default_rng(0)])
def test_an_iterator_or_a_random_stream_in_the_class_is_refused(run, make):
    refused(run, type("Keeps", (Apart,), {"state": make()}), "Keeps.state is .* every use changes: make it in __init__")


@every_sampler
def test_an_object_of_the_class_may_compute_a_cached_property(run):
    program = keeping(Memory(), lambda self, letter: self.state.letters, lambda self: self.s[-1:])
    is_posterior(run, program, TRUTH, quick=60)


@every_algorithm
def test_a_cache_that_the_class_names_as_shared_may_grow(run):
    class Caches(Apart):
        shared = ("table", "calls")
        calls = 0

        def __init__(self):
            super().__init__()
            self.table = {"": 0}

        def prepare(self):
            self.table.setdefault(self.s, len(self.s))
            type(self).calls += 1

    run(Caches(), seed=0)
    assert Caches.calls > 5


@every_algorithm
@pytest.mark.parametrize("value", [{"last": ""}, [""], np.zeros(3)], ids=["dict", "list", "array"])
def test_a_shared_attribute_whose_entries_change_is_refused(run, value):
    class Shares(Apart):
        shared = ("table",)

        def __init__(self):
            super().__init__()
            self.table = copy.deepcopy(value)

        def prepare(self):
            self.table["last" if isinstance(self.table, dict) else 0] = len(self.s) + 1

    refused(run, Shares, r"step \d changed Shares.table, which all particles share", RuntimeError)


@every_sampler
def test_data_of_the_class_may_be_changed_between_steps(run):
    class Counts(Apart):
        steps = []

    run(Counts(), seed=0, on_step=lambda step: Counts.steps.append(step.index))
    assert Counts.steps


class Urn(Distribution):
    """Polya's: each drawn letter is put back with another one like it, where a program says so."""

    support = ("x", "y")

    def __init__(self):
        self.counts, self.cache = {"x": 1, "y": 1}, {}

    def sample(self, rng):
        return "x" if rng.random() * sum(self.counts.values()) < self.counts["x"] else "y"

    def log_prob(self, value):
        self.cache.setdefault(value, 1)
        return math.log(self.counts[value] / sum(self.counts.values()))


class Draws(Model):
    learns = True

    def __init__(self):
        super().__init__()
        self.urn = Urn()

    def step(self):
        letter = self.sample(self.urn)
        if self.learns:
            self.urn.counts[letter] += 1
        self.s += letter
        if len(self.s) == 3:
            self.finish()


@every_algorithm
def test_a_distribution_that_learns_is_refused_but_caching_is_allowed(run):
    refused(run, Draws, r"step 1 changed Draws.urn, .*keep what it learns in the particle", RuntimeError)
    run(type("Fixed", (Draws,), {"learns": False})(), seed=0)


# ---- what is only found on demand


class Foreign(Model):
    def step(self):
        self.s += "TF"[self.sample(Bernoulli(0.5))] + random.SystemRandom().choice("abcdefgh")
        if len(self.s) == 4:
            self.finish()


class Counting(Model):
    def step(self):
        COUNTS.append(self.sample(Bernoulli(0.5)))
        self.s += str(len(COUNTS))
        if len(COUNTS) % 3 == 0:
            self.finish()


COUNTS = []


class Weighing(Model):
    def step(self):
        self.s += "TF"[self.sample(Bernoulli(0.5))]
        COUNTS.append(0)
        self.score(-len(COUNTS))
        if len(self.s) == 2:
            self.finish()


@pytest.mark.parametrize("program", [Foreign, Counting, Weighing])
def test_check_program_finds_programs_that_depend_on_hidden_state(program):
    with pytest.raises(RuntimeError, match=r"under \w+.*, at step \d.*(was .* and then|makes other choices|ends at)"):
        check_program(program())


def test_check_program_reports_its_runs():
    report = check_program(Apart(), N=4, K=3, seed=1)
    assert report.steps > 100 and not report.not_run

    class Streams(Apart):
        def prepare(self):
            self.noise = self.rng.random()

    assert "cannot enumerate self.rng.random" in check_program(Streams()).not_run["beam_search"]


def test_check_program_raises_the_exception_of_the_program():
    class Fails(Model):
        def step(self):
            self.sample(Finite("ab", np.zeros(2)))
            raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        check_program(Fails())
