"""Tests of argument checks before anything runs: counts, fractions, seeds and temperatures of the public API."""

import functools
import math
import pydoc
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import tiny_lm

import llmppl
from llmppl import (
    Bernoulli,
    ConstrainedText,
    Geometric,
    Infilling,
    Model,
    Particles,
    PromptIntersection,
    Regex,
    Rule,
    Uniform,
    beam_search,
    enumerate_exact,
    importance_sampling,
    repeat,
    smc_standard,
    smc_steer,
)
from llmppl.constraints.automata.rewrites import alignment, within
from llmppl.inference.resampling import multinomial, optimal, stratified, systematic
from llmppl.models.lookahead import Lookahead, mean_next_token, rollout
from llmppl.models.programs import Program, short_words
from llmppl.queries import compare
from llmppl.support import arguments


@pytest.mark.parametrize("check, given, plain", [
    (arguments.count, np.int64(7), 7), (arguments.number, np.float32(0.5), 0.5), (arguments.number, -1, -1.0),
    (arguments.number, Fraction(1, 4), 0.25), (arguments.number, math.inf, math.inf), (arguments.positive, 1, 1.0),
    (arguments.probability, np.float64(1), 1.0), (arguments.text, "né🙂", "né🙂"),
])  # fmt: skip
def test_a_check_returns_the_value_in_its_plain_python_type(check, given, plain):
    found = check("name", given)
    assert (found, type(found)) == (plain, type(plain))


class_or_text = functools.partial(arguments.function, example="short_words(vocab, 5)")
option = functools.partial(arguments.one_of, choices=["eos", "prefix"])


@pytest.mark.parametrize(
    "check, value, error, message",
    [
        (arguments.count, True, TypeError, "must be an integer, not True"),
        (arguments.count, "3", TypeError, "must be an integer, not '3'"),
        (arguments.count, 0, ValueError, "must be at least 1, not 0"),
        (arguments.count, 10**30, ValueError, f"must be at most {2**63 - 1}, not 1000"),
        pytest.param(arguments.count, 10**9999, ValueError, ".*not a int", id="10**9999"),
        (arguments.number, math.nan, ValueError, "must be a number, not nan"),
        (arguments.positive, math.inf, ValueError, "must be positive and finite, not inf"),
        (arguments.probability, 1.01, ValueError, r"must be in \[0, 1\], not 1.01"),
        (functools.partial(arguments.probability, above_0=True), 0, ValueError, r"must be in \(0, 1\], not 0"),
        (arguments.text, b"a", TypeError, "must be a str, not b'a'"),
        (option, "middle", ValueError, "must be one of 'eos', 'prefix', not 'middle'"),
        (option, 3, TypeError, "must be one of 'eos', 'prefix', not 3"),
        (class_or_text, int, TypeError, "must be a function, as short_words"),
        (class_or_text, "f", TypeError, "must be a function, as short_words"),
        (lambda name, value: arguments.truth(name, len, value), "ab", TypeError, "len returned 2 for 'ab'; it must re"),
    ],
)
def test_a_check_refuses_invalid_values_by_name(check, value, error, message):
    with pytest.raises(error, match=f"^name {message}"):
        check("name", value)


def test_a_seed_is_an_integer_of_any_size():
    assert arguments.generator(10**30).random() == np.random.default_rng(10**30).random()


# ---- every number that the public API takes

NAN, INF, HUGE = math.nan, math.inf, 10**30
COUNT = [2.5, 2.0, NAN, INF, True, "3", None, -1, HUGE]
OPTIONAL_COUNT = [bad for bad in COUNT if bad is not None]
INTEGER = [2.5, 2.0, NAN, INF, True, "3", None, HUGE]
SEED = [2.5, 2.0, NAN, INF, True, "3", -1]                          # of any size, and None is a new one
PROBABILITY = [2.5, NAN, INF, True, "0.3", None, -1, HUGE]
OPTIONAL_PROBABILITY = [bad for bad in PROBABILITY if bad is not None]
POSITIVE = [NAN, INF, True, "hot", None, -1, 0]


class Flip(Model):
    def step(self):
        self.sample(Bernoulli(0.5))
        self.finish()


class Run:
    log_weight, cut, attribution = 0.0, False, {}


lm, dist, rng, word = tiny_lm(), Bernoulli(0.5), np.random.default_rng(0), Regex("ab?")
steer = functools.partial(smc_steer, Flip(), progress=False)
standard = functools.partial(smc_standard, Flip(), progress=False)
posterior = Particles([Run()])


def checkpointed(run, every):
    with tempfile.TemporaryDirectory() as folder:
        run(Flip(), 2, checkpoint=Path(folder) / "run.ckpt", every=every)


programs = {
    "ConstrainedText": functools.partial(ConstrainedText, lm, "a"),
    "Infilling": functools.partial(Infilling, lm, "a[BLANK]b"),
    "PromptIntersection": functools.partial(PromptIntersection, lm, ["a", "b"]),
    "Program": Program,
}


@functools.cache
def table():
    return Lookahead(word.index(lm.vocab), mean_next_token(lm.context("a"), 3), 4)


API = [
    # function or method, parameter, what it refuses, how to call it
    *(
        case
        for name, program in programs.items()
        for case in [
            (name, "min_tokens", COUNT, lambda x, program=program: program(min_tokens=x)),
            (name, "max_tokens", OPTIONAL_COUNT, lambda x, program=program: program(max_tokens=x)),
        ]
    ),
    ("Rule", "temperature", POSITIVE[:-1], lambda x: Rule(temperature=x)),
    ("Rule", "top_k", OPTIONAL_COUNT, lambda x: Rule(top_k=x)),
    ("Rule", "top_p", OPTIONAL_PROBABILITY, lambda x: Rule(top_p=x)),
    ("Rule", "min_p", OPTIONAL_PROBABILITY, lambda x: Rule(min_p=x)),
    ("Extent", "max_tokens", OPTIONAL_COUNT, lambda x: Model().extend(lm.context("a"), until="b", max_tokens=x)),
    ("short_words", "max_letters", COUNT, lambda x: short_words(lm.vocab, x)),
    ("Lookahead", "max_tokens", COUNT, lambda x: Lookahead(table().index, mean_next_token(lm.context("a"), 1), x)),
    ("Lookahead.log_mass", "left", COUNT, lambda x: table().log_mass(1, x)),
    ("mean_next_token", "num_tokens", COUNT, lambda x: mean_next_token(lm.context("a"), x)),
    ("mean_next_token", "seed", SEED, lambda x: mean_next_token(lm.context("a"), 1, x)),
    ("rollout", "max_tokens", COUNT, lambda x: rollout(lm.context("a"), x)),
    ("Finite.tempered", "temperature", POSITIVE[:-1], dist.tempered),
    ("Finite.top_k", "k", COUNT, dist.top_k),
    ("Finite.top_p", "p", PROBABILITY, dist.top_p),
    ("Bernoulli", "p", PROBABILITY, Bernoulli),
    ("Geometric", "p", PROBABILITY, Geometric),
    ("Geometric", "max_value", OPTIONAL_COUNT, lambda x: Geometric(0.5, x)),
    ("Uniform", "low", INTEGER, lambda x: Uniform(x, 3)),
    ("Uniform", "high", INTEGER[:-1], lambda x: Uniform(0, x)),
    ("smc_steer", "N", COUNT, lambda x: steer(x, 2)),
    ("smc_steer", "K", COUNT, lambda x: steer(2, x)),
    ("smc_steer", "max_steps", OPTIONAL_COUNT, lambda x: steer(2, 2, max_steps=x)),
    ("smc_steer", "seed", SEED, lambda x: steer(2, 2, seed=x)),
    ("smc_standard", "N", COUNT, standard),
    ("smc_standard", "ess_threshold", PROBABILITY, lambda x: standard(2, ess_threshold=x)),
    *[
        (run.__name__, "every", OPTIONAL_COUNT, lambda x, run=run: checkpointed(run, x))
        for run in (smc_steer, smc_standard, importance_sampling)
    ],
    ("smc_standard", "max_steps", OPTIONAL_COUNT, lambda x: standard(2, max_steps=x)),
    ("smc_standard", "seed", SEED, lambda x: standard(2, seed=x)),
    ("importance_sampling", "N", COUNT, lambda x: importance_sampling(Flip(), x)),
    ("importance_sampling", "max_steps", OPTIONAL_COUNT, lambda x: importance_sampling(Flip(), 2, max_steps=x)),
    ("importance_sampling", "seed", SEED, lambda x: importance_sampling(Flip(), 2, seed=x)),
    ("repeat", "R", COUNT, lambda x: repeat(lambda rng: steer(2, 2, rng=rng), x)),
    ("repeat", "seed", SEED, lambda x: repeat(lambda rng: steer(2, 2, rng=rng), 2, seed=x)),
    ("enumerate_exact", "max_steps", OPTIONAL_COUNT, lambda x: enumerate_exact(Flip(), x)),
    ("beam_search", "N", COUNT, lambda x: beam_search(Flip(), x, 2)),
    ("beam_search", "K", COUNT, lambda x: beam_search(Flip(), 2, x)),
    ("beam_search", "max_steps", OPTIONAL_COUNT, lambda x: beam_search(Flip(), 2, 2, max_steps=x)),
    ("Particles.sample", "n", OPTIONAL_COUNT, posterior.sample),
    ("Particles.sample", "seed", SEED, lambda x: posterior.sample(seed=x)),
    *(
        (scheme.__name__, "N", COUNT, lambda x, scheme=scheme: scheme(rng, [0.0, 0.0], x))
        for scheme in (multinomial, stratified, systematic, optimal)
    ),
    ("DFA.count", "length", COUNT, word.count),
    ("DFA.times", "least", COUNT, word.times),
    ("DFA.times", "most", [bad for bad in OPTIONAL_COUNT if bad != INF], lambda x: word.times(1, x)),
    ("TokenIndex.build_all", "max_states", COUNT, lambda x: word.index(lm.vocab).build_all(x)),
    ("within", "k", COUNT, lambda x: within(word, x)),
    ("alignment", "k", OPTIONAL_COUNT, lambda x: alignment(word, "a", x)),
    *(
        (edits.__name__, name, OPTIONAL_COUNT, lambda x, call=call, name=name: call(**{name: x}))
        for edits, call in [
            (within, functools.partial(within, word, 1)),
            (alignment, functools.partial(alignment, word, "a")),
        ]
        for name in ("insert", "delete", "substitute")
    ),
    ("compare", "permutations", COUNT, lambda x: compare(["a"], ["a"], permutations=x)),
    ("compare", "level", PROBABILITY, lambda x: compare(["a"], ["a"], level=x)),
    ("compare", "seed", SEED, lambda x: compare(["a"], ["a"], seed=x)),
]


@pytest.mark.parametrize("where, name, refused, call", API, ids=[f"{where}({name})" for where, name, *_ in API])
def test_every_invalid_number_is_refused_by_parameter_name(where, name, refused, call):
    for bad in refused:
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            call(bad)
            pytest.fail(f"{where}({name}={bad!r}) was accepted")


def test_numbers_of_numpy_are_numbers():
    assert ConstrainedText(lm, "a", max_tokens=np.int64(3), rule=Rule(np.float32(0.5))).max_tokens == 3
    numpys, plain = steer(np.int32(2), np.int64(2), seed=np.int64(7)), steer(2, 2, seed=7)
    assert [each.choices for each in numpys] == [each.choices for each in plain]


@pytest.mark.parametrize("name", llmppl.__all__)
def test_help_names_every_argument_and_its_type(name):
    shown = pydoc.render_doc(getattr(llmppl, name), renderer=pydoc.plaintext).splitlines()
    assert not [line for line in shown if ("*args" in line or "ForwardRef" in line) and "__init_subclass__" not in line]
