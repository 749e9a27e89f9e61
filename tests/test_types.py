"""Type checkers know what programs draw: mypy, and pyright where it is installed, both strict."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = '''
from typing import Any, assert_type

import numpy as np

from llmppl import *
from llmppl.distributions import Distribution, Finite, Proposal
from llmppl.lm import NextToken, TokenDistribution
from llmppl.models import Batched
from llmppl.runtime import Stats
from llmppl.tokens import Token


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
        assert_type(self.sample(Geometric(0.5)), int)
        assert_type(self.sample(Delta("x"), proposal=Delta("x")), str)
        assert_type(self.sample(Dice()), tuple[int, int])
        assert_type(self.sample(Categorical({"a": 1.0}).where(lambda text: text.isalpha())), str)
        p = self.transformer(self.context)
        assert_type(p, NextToken)
        token = self.sample(p, proposal=p.where(lambda token: not token.is_eos))
        assert_type(token, Token)
        assert_type(self.sample(p, proposal=p.tempered(0.5).top_k(3).top_p(0.5)), Token)
        assert_type(self.sample(product(p, p.top_k(3), powers=[1, -0.5])), Token)
        assert_type(self.sample(mixture([p, p.top_p(0.9)], [0.5, 0.5])), Token)
        assert_type(self.sample(Rule(temperature=0.5)(p)), Token)
        self.s += token
        self.observe(p.string(), " dog")
        self.score(critic(self.s))
        assert_type(critic, Batched[str, float])
        assert_type(critic(self.s), float)
        self.finish()


def untyped(dist: Proposal, other: Finite, third: TokenDistribution, model: Model) -> None:
    assert_type(model.sample(dist), Any)
    assert_type(model.sample(third), Token)


lm = CachedTransformer.from_pretrained()
posterior = smc_steer(Program(lm), 5, 2, max_steps=3)
assert_type(posterior, Particles[Program])
assert_type(posterior.best, Program)
assert_type(posterior.stats, Stats | None)
assert_type(enumerate_exact(Program(lm)), Particles[Program])
'''
MISTAKES = {
    "self.sample(0.5)": "arg-type",
    "self.sample(Bernoulli(0.5)).upper()": "attr-defined",
    "self.score('good')": "arg-type",
    "self.transformer('a')": "",
    "critic(3)": "arg-type",
}


def mypy(*files: Path) -> list[str]:
    """What mypy says of files, strict, as it is set up for the package."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def pyright(folder: Path, *files: Path) -> list[str]:
    """What pyright says of files, strict."""
    found = shutil.which("basedpyright")
    if found is None:
        pytest.skip("needs pyright: pip install basedpyright")
    how = {"include": list(map(str, files)), "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(how), encoding="utf-8")
    command = [found, "--outputjson", "--pythonpath", sys.executable, "--project", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    told = json.loads(done.stdout)["generalDiagnostics"]
    return [f"{each['range']['start']['line'] + 1}: {each['message']}" for each in told if each["severity"] == "error"]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_what_is_sampled_has_the_type_of_what_it_is_sampled_from(program):
    assert mypy(program) == []


def test_pyright_knows_it_too(program, tmp_path):
    assert pyright(tmp_path, program) == []


def test_mistakes_are_found(tmp_path):
    path = tmp_path / "mistakes.py"
    start = PROGRAM[: PROGRAM.index("        assert_type(self.sample(Categorical")]
    path.write_text(start + "".join(f"        {line}\n" for line in MISTAKES), encoding="utf-8")
    told = mypy(path)
    for number, (line, code) in enumerate(MISTAKES.items(), start.count("\n") + 1):
        assert any(f":{number}: error" in each and code in each for each in told), (line, told)
