"""Type checkers know what programs draw: mypy, strict."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from helpers.common import HANG, ROOT
from helpers.documents import DOCUMENTS, python_blocks

from llmppl.models.programs import Options, Program

pytestmark = pytest.mark.slow
PROGRAM = '''
from typing import Any, Literal, assert_type

import numpy as np

import llmppl.tasks.ray
from llmppl import *
from llmppl.distributions import Distribution, Finite, Proposal
from llmppl.lm import NextToken, TokenDistribution
from llmppl.models import Batched
from llmppl.models.lookahead import Lookahead, mean_next_token
from llmppl.queries import Match, compare
from llmppl.support.runtime import Stats
from llmppl.constraints import Token


@batched
def critic(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


@batched(max_batch=8)
def vectors(texts: list[str]) -> list[np.ndarray]:
    return [np.zeros(len(text)) for text in texts]


class Dice(Distribution[tuple[int, int]]):
    """A distribution of the user's own."""

    def sample(self, rng: np.random.Generator) -> tuple[int, int]:
        return 1, 2

    def log_prob(self, value: object) -> float:
        return 0.0


class Program(Model):
    def __init__(self, lm: CachedTransformer) -> None:
        super().__init__()
        self.context = lm.context("a")

    def step(self) -> None:
        assert_type(self.sample(Categorical({"a": 0.5, "b": 0.5})), str)
        assert_type(self.sample(Categorical([0.5, 0.5])), int)
        assert_type(self.sample(Categorical([0.5, 0.5], [b"a", b"b"])), bytes)
        assert_type(self.sample(Bernoulli(0.5)), bool)
        assert_type(self.sample(Uniform(0, 3)), int)
        assert_type(self.sample(Uniform(["a", "b"])), str)
        assert_type(self.sample(Geometric(0.5)), int)
        assert_type(self.sample(Delta("x"), proposal=Delta("x")), str)
        assert_type(self.sample(Dice()), tuple[int, int])
        assert_type(self.sample(Categorical({"a": 1.0}).where(lambda text: text.isalpha())), str)
        p = self.transformer(self.context)
        assert_type(p, NextToken)
        token = self.sample(p, proposal=p.where(lambda token: not token.is_eos))
        assert_type(token, Token)
        assert_type(p.masked(p.support.not_eos).tempered(0.5).top_k(3).top_p(0.5), TokenDistribution)
        assert_type(self.sample(p, proposal=p.tempered(0.5).top_k(3).top_p(0.5)), Token)
        assert_type(self.sample(product(p, p.top_k(3), powers=[1, -0.5])), Token)
        assert_type(self.sample(mixture([p, p.top_p(0.9)], [0.5, 0.5])), Token)
        assert_type(self.sample(Rule(temperature=0.5)(p)), Token)
        self.s += token
        assert_type(self.rng, np.random.Generator)
        self.observe(p.string(), " dog")
        self.score(critic(self.s))
        self.score(np.float32(0.5))
        self.condition(np.all(np.zeros(2) == 0))
        self.sample(p, proposal=p.where(lambda token: np.any(np.zeros(2) == token)))
        self.extend(self.context, until=lambda text: np.any(np.zeros(2) == len(text)))
        assert_type(critic, Batched[str, float])
        assert_type(critic(self.s), float)
        self.finish()


def drawn(prompt: str, rng: np.random.Generator) -> Particles[ConstrainedText]:
    return smc_steer(ConstrainedText(lm, prompt), 5, rng=rng)


def drawn_by(lm: CachedTransformer, prompt: str, rng: np.random.Generator) -> Particles[ConstrainedText]:
    return smc_steer(ConstrainedText(lm, prompt), 5, rng=rng)


def untyped(dist: Proposal, other: Finite, third: TokenDistribution, model: Model) -> None:
    assert_type(model.sample(dist), Any)
    assert_type(model.sample(third), Token)


lm = CachedTransformer.from_pretrained()
posterior = smc_steer(Program(lm), 5, 2, max_steps=3)
assert_type(posterior, Particles[Program])
assert_type(posterior.best, Program)
assert_type(posterior.stats, Stats | Any)
assert_type(posterior.stats.tokens, int | Any)
print(lm.tokenizer.eos_token_id)
llmppl.tasks.ray.run_many(drawn_by, ["a"], make_lm=CachedTransformer.from_pretrained)
for result in run_many(drawn, (text for text in ["a"])):
    assert_type(result.particles, Particles[Any] | Any)
    print(result.particles.best if result.error is None else result.error)
assert_type(compare(["a"], ["b"]).p, float | Any)
assert_type(enumerate_exact(Program(lm)), Particles[Program])
text = ConstrainedText(lm, "a", Regex("[ab]+"), end="prefix", max_tokens=3, stop="b", rule=Rule(top_k=3))
assert_type(text.max_tokens, int | None)
index = Regex("[ab]+").index(lm.vocab)
Lookahead(index, mean_next_token(lm.context("a"), 3), 3, end=text.end)
assert_type(smc_steer(text, 5, expand="copies", seed=0), Particles[ConstrainedText])
assert_type(Infilling(lm, "a[BLANK]b", min_tokens=1).s, str)
Infilling(lm, "a[BLANK]b", end=Infilling(lm, "a[BLANK]b").end)
for match in Query(lm, "a").best():
    assert_type(match, Match)
assert_type(Query(lm, "a").best().stats, Stats)
assert_type(PromptIntersection(lm, ["a", "b"], proposal="first", max_tokens=3).s, str)
search(lm, "a", end="boundary", results="tokens", tokenization="canonical")
search(lm, ["a", "b"], prefix=["a", "b"])
Query(lm, Literal["a", "b"], ignore=Regex("a"))
'''
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MISTAKES = {
    "program.sample(0.5)": "arg-type",
    "program.sample(Bernoulli(0.5)).upper()": "attr-defined",
    "program.score('good')": "arg-type",
    "program.transformer('a')": "arg-type",
    "critic(3)": "arg-type",
    "ConstrainedText(lm, 'a', max_tokens='3')": "arg-type",
    "ConstrainedText(lm, 'a', max_token=3)": "call-arg",
    "Infilling(lm, 'a[BLANK]b', end='boundary')": "arg-type",
    "PromptIntersection(lm, ['a', 'b'], proposal='last')": "arg-type",
    "smc_steer(program, 5, expand='copy')": "arg-type",
    "smc_steer(program, 5, max_tokens=3)": "call-arg",
    "search(lm, 'a', end='end')": "arg-type",
    "Query(lm, 'a', tokenization='any').best(order='sum')": "arg-type",
    "run_many(drawn, [1, 2])": "arg-type",
    "llmppl.tasks.ray.run_many(drawn_by, ['a'], make_lm=int)": "misc",
    "posterior.best.rng.normally()": "attr-defined",
}


def mypy(*files: Path) -> list[str]:
    """What mypy says of files, strict, as it is set up for the package."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_samples_have_the_type_of_their_distribution_and_examples_type_check(program):
    assert mypy(program, *EXAMPLES) == []


def test_document_blocks_that_do_not_run_use_existing_names_and_arguments(tmp_path):
    blocks = [(path.stem, block) for path in DOCUMENTS for block in python_blocks(path, run=False)]
    files = [tmp_path / f"{name.replace('-', '_')}_{block.line}.py" for name, block in blocks]
    for file, (_, block) in zip(files, blocks, strict=True):
        file.write_text(block.code, encoding="utf-8")
    told = [line for line in mypy(*files) if line.endswith("[call-arg]") or 'Module "llmppl' in line]
    assert files and told == []


def test_mistakes_are_found(tmp_path):
    path = tmp_path / "mistakes.py"
    path.write_text("\n".join([PROGRAM, "program = Program(lm)", *MISTAKES]), encoding="utf-8")
    told = mypy(path)
    for number, (line, code) in enumerate(MISTAKES.items(), PROGRAM.count("\n") + 3):
        assert any(f":{number}: error: " in each and each.endswith(f"[{code}]") for each in told), (line, told)


def test_checkers_know_the_options_of_all_programs():
    hints, parameters = typing.get_type_hints(Program.__init__), inspect.signature(Program.__init__).parameters.values()
    options = {each.name: hints[each.name] for each in parameters if each.kind == each.KEYWORD_ONLY}
    assert typing.get_type_hints(Options) == options
