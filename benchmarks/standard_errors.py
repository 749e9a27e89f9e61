"""Coverage of the standard error: how often log Z lies within two standard errors of log Z-hat in a run.

Ten programs are those for which an error is hard to know, or which have a usual kind of step: a noisy channel, a twist
towards the wrong letter, two spans with a score between, a rare value whose weight comes later, a text that is scored
at its end; and single choices, several choices, a choice that is observed and tested, a number of choices that depends
on choices, and masked text. `enumerate_exact` gives log Z, or a sum over states if there are too many runs.

    python benchmarks/standard_errors.py --runs 1000 --out benchmarks/results/standard_errors.jsonl
    python benchmarks/standard_errors.py --runs 40 --particles 10 --methods distinct copies standard
    python benchmarks/standard_errors.py --programs confirming      # played no part in choosing the constants

A run *gives* an error unless one step left nearly all of the weight to first choices that chance kept. The columns
after `given` count the runs that give one: log Z within two standard errors, more than ten away, and within two errors
as they were reported before (without the allowance for families that no particle has seen, and in every run). `by` is
the share of the printed probabilities of the first choice within two of their errors. `repeat` takes three runs
together, with the error of their disagreement. A normal error lies within two standard errors in 95 % of runs.

The constants of `llmppl/inference/genealogy.py: log_ml_error` were chosen on the ten programs of the first table.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tables import machine, table
from transformers import LlamaConfig, LlamaForCausalLM

from llmppl import (
    Bernoulli,
    CachedTransformer,
    Categorical,
    ConstrainedText,
    Geometric,
    Infilling,
    Model,
    Particles,
    PromptIntersection,
    Regex,
    Uniform,
    Vocabulary,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import logsumexp
from llmppl.inference.algorithms import error_of_mean
from llmppl.inference.genealogy import MIN_FAMILIES, StepRecord, relative_variance
from llmppl.models.spans import Span

Programs = dict[str, tuple[Model, Callable[[], float]]]         # the model, and a function that computes log Z
METHODS = ("distinct", "merged", "copies", "standard", "importance")


class Cheap(Model):
    """Model whose attributes are never changed in place, so a copy shares them."""

    def copy(self) -> Cheap:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


# ---- the programs


class Hidden(Cheap):
    """Hidden Markov chain of 20 steps with five states: one choice per step, and an observation."""

    seen = (0, 1, 4, 4, 3, 0, 0, 2, 2, 4, 4, 4, 1, 0, 3, 3, 2, 0, 1, 1)
    distance = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    moves = np.exp(-0.7 * distance) / np.exp(-0.7 * distance).sum(1, keepdims=True)
    signals = np.exp(-1.1 * distance) / np.exp(-1.1 * distance).sum(1, keepdims=True)

    def __init__(self) -> None:
        super().__init__()
        self.state, self.time = 2, 0
        self.move, self.signal = ([Categorical(list(row)) for row in rows] for rows in (self.moves, self.signals))

    def step(self) -> None:
        self.state = self.sample(self.move[self.state])
        self.observe(self.signal[self.state], self.seen[self.time])
        self.time += 1
        if self.time == len(self.seen):
            self.finish()

    def log_Z(self) -> float:
        probs = np.eye(5)[2]
        for seen in self.seen:
            probs = probs @ self.moves * self.signals[:, seen]
        return math.log(probs.sum())


class Dice(Cheap):
    """Dice with two choices per step, a score, a condition, and an observation at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.total = 3, 0

    def step(self) -> None:
        one, other = self.sample(Uniform(range(1, 7))), self.sample(Uniform(range(1, 7)))
        self.total += one * other
        self.score(-0.15 * abs(one + other - 9))
        self.condition(self.total % 5 != 0)
        self.left -= 1
        if not self.left:
            self.observe(Bernoulli(1 / (1 + abs(self.total - 45) / 6)), True)
            self.finish()


class Diary(Model):
    """Diary with one span per step."""

    def __init__(self, lm: CachedTransformer) -> None:
        super().__init__()
        self.context, self.left, self.length = lm.context("b"), 2, 0

    def write(self) -> Span:
        span = self.extend(self.context, until=" ", max_tokens=3)
        self.context, self.length, self.left = span.context, self.length + len(span.text), self.left - 1
        return span

    def step(self) -> None:
        text = self.write().text
        self.score(0.8 * text.count("a") - 0.5 * text.count("d"))
        if not self.left:
            self.condition(self.length >= 3)
            self.finish()


class LateDiary(Diary):
    """Diary that is scored at the end."""

    def step(self) -> None:
        self.s += self.write().text
        if not self.left:
            self.score(1.2 * self.s.count("a") - 0.7 * self.s.count("d"))
            self.finish()


class Late(Model):
    """Five letters, scored together at the end."""

    def step(self) -> None:
        self.s += self.sample(Categorical({"a": 0.5, "b": 0.3, "c": 0.2}))
        if len(self.s) == 5:
            self.score(1.5 * self.s.count("c") - 0.8 * self.s.count("b"))
            self.finish()


class Matches(Cheap):
    """Hidden skill, then nine games with noisy observations, and conditions on the number of wins."""

    def __init__(self) -> None:
        super().__init__()
        self.skill, self.played, self.won = 0.0, 0, 0

    def step(self) -> None:
        if not self.skill:
            self.skill = self.sample(Categorical({0.15: 0.4, 0.35: 0.3, 0.6: 0.2, 0.9: 0.1}))
            return
        won = self.sample(Bernoulli(self.skill))
        self.played, self.won = self.played + 1, self.won + won
        self.observe(Bernoulli(0.75 if won else 0.4), True)
        self.condition(self.won >= self.played - 4)
        if self.played == 9:
            self.condition(self.won >= 6)
            self.finish()


class Trees(Cheap):
    """Two trees of choices, in which each choice determines whether there are further ones."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.total = 2, 0

    def grow(self, depth: int) -> None:
        if depth < 2 and self.sample(Bernoulli(0.55)):
            self.grow(depth + 1)
            self.grow(depth + 1)
        else:
            leaf = self.sample(Categorical({1: 0.5, 2: 0.3, 5: 0.2}))
            self.total += leaf
            self.score(-0.4 * (leaf == 1))

    def step(self) -> None:
        self.grow(0)
        self.left -= 1
        self.score(-abs(self.total - 6 * (2 - self.left)) / 5)
        if not self.left:
            self.finish()


def tiny(seed: int, tokens: list[bytes], scale: float) -> CachedTransformer:
    """Build a transformer with random weights; a larger `scale` moves its distributions further from uniform."""
    V = len(tokens) + 1
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=scale, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=V - 1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    return CachedTransformer(model, Vocabulary([*tokens, b""], eos_ids=[V - 1]))


def enumerated(model: Model) -> tuple[Model, Callable[[], float]]:
    return model, lambda: enumerate_exact(model).log_ml


class Noisy(Cheap):
    """Noisy channel: tokens of a bigram model, each letter of which is observed with an error rate of 1 %."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng, letters, V = np.random.default_rng(seed), [*"abcdefghijklmnopqrstuvwxyz"], 60
        self.tokens = [*letters]
        while len(self.tokens) < V:
            token = "".join(rng.choice(letters[:12], size=rng.integers(2, 5)))
            if token not in self.tokens:
                self.tokens.append(token)
        self.moves = 0.98 * rng.dirichlet(np.full(V, 0.06), V) + 0.02 / V
        self.move = [Categorical(dict(zip(self.tokens, row, strict=True))) for row in self.moves]
        self.places = {token: place for place, token in enumerate(self.tokens)}
        last, clean = 0, ""
        for _ in range(8):
            last = rng.choice(V, p=self.moves[last])
            clean += self.tokens[last]
        wrong = rng.integers(len(clean))
        self.seen = clean[:wrong] + letters[rng.integers(26)] + clean[wrong + 1 :]
        self.last, self.at = 0, 0

    def log_likelihood(self, token: str, at: int) -> float:
        right = sum(one == other for one, other in zip(token, self.seen[at:], strict=False))
        return right * math.log(0.99) + (len(token) - right) * math.log(0.01 / 25)

    def step(self) -> None:
        token = self.sample(self.move[self.last])
        self.condition(self.at + len(token) <= len(self.seen))
        self.score(self.log_likelihood(token, self.at))
        self.last, self.at = self.places[token], self.at + len(token)
        if self.at == len(self.seen):
            self.finish()

    def log_Z(self, first: str | None = None) -> float:
        """Return log Z, or the log of its part that begins with one token."""
        ends = np.zeros((len(self.seen) + 1, len(self.tokens)))
        ends[0, 0] = 1.0
        for at in range(len(self.seen)):
            probs = ends[at] @ self.moves
            for place, token in enumerate(self.tokens):
                if at + len(token) <= len(self.seen) and (at or first in (None, token)):
                    ends[at + len(token), place] += probs[place] * math.exp(self.log_likelihood(token, at))
        return math.log(ends[-1].sum())


class WrongTwist(Cheap):
    """Seven letters; the score counts one letter, and the twist another."""

    letter = Categorical({"a": 0.5, "b": 0.3, "c": 0.2})

    def step(self) -> None:
        self.s += self.sample(self.letter)
        if len(self.s) == 7:
            self.score(self.s.count("b"))
            self.finish()
        else:
            self.twist(1.2 * self.s.count("a"))


class TwoSpans(Model):
    """Two spans with a score between them."""

    def __init__(self, lm: CachedTransformer) -> None:
        super().__init__()
        self.context = lm.context("b")

    def step(self) -> None:
        one = self.extend(self.context, until=" ", max_tokens=3)
        self.score(1.0 * one.text.count("a") - 0.8 * one.text.count("d"))
        two = self.extend(one.context, until=" ", max_tokens=3)
        self.score(0.7 * two.text.count("b"))
        self.finish()


class RareValue(Cheap):
    """Value of probability 0.15, whose weight 8 comes after six letters."""

    rare: bool | None = None

    def step(self) -> None:
        if self.rare is None:
            self.rare = self.sample(Bernoulli(0.15))
            return
        self.s += self.sample(Categorical({"a": 0.5, "b": 0.3, "c": 0.2}))
        if len(self.s) == 6:
            self.score(math.log(8) * self.rare)
            self.finish()


class SoftLast(Cheap):
    """Six letters, with a soft score of the whole text at its end."""

    def step(self) -> None:
        self.s += self.sample(Categorical({"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}))
        if len(self.s) == 6:
            self.score(1.2 * self.s.count("c") - 0.7 * self.s.count("a") + ("d" in self.s))
            self.finish()


def named() -> Programs:
    tokens = [b"a", b"b", b"c", b" ", b"d", b"ad", b"b "]
    lm, noisy = tiny(5, tokens, 0.35), Noisy(0)
    usual = "one choice a step", "two choices a step", "observe and condition", "nested choices", "masked text"
    hard: Programs = {
        "noisy channel": (noisy, noisy.log_Z),
        "twist": enumerated(WrongTwist()),
        "spans": enumerated(TwoSpans(lm)),
        "rare value": enumerated(RareValue()),
        "weight comes last": enumerated(SoftLast()),
    }
    others = measured()
    return hard | {name: others[name] for name in usual}


def measured() -> Programs:
    tokens = [b"a", b"b", b"c", b" ", b"d", b"ad", b"b "]
    lm, hidden = tiny(5, tokens, 0.35), Hidden()
    return {
        "one choice a step": (hidden, hidden.log_Z),
        "two choices a step": enumerated(Dice()),
        "a span a step": enumerated(Diary(lm)),
        "observe and condition": enumerated(Matches()),
        "nested choices": enumerated(Trees()),
        "masked text": enumerated(ConstrainedText(lm, "b", Regex(r"([abd]{1,3} )*c?[abcd]*"), max_tokens=5)),
        "intersection": enumerated(PromptIntersection(lm, ["b", "a d"], max_tokens=5)),
        "infilling": enumerated(Infilling(lm, ["b", "ad", "c"], lengths=Uniform([0, 1, 2]))),
        "letters, weighed last": enumerated(Late()),
        "spans, weighed last": enumerated(LateDiary(lm)),
    }


# ---- the programs that confirm


class Chain(Cheap):
    """Markov chain whose moves are scored; with `pairs`, a step makes two moves, and the second is scored."""

    def __init__(self, steps: int, states: int, seed: int, *, pairs: bool = False) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.moves, self.weights = rng.dirichlet(np.ones(states), states), rng.dirichlet(np.ones(states), states) + 0.02
        self.move, self.log_weights = [Categorical(list(row)) for row in self.moves], np.log(self.weights)
        self.state, self.left, self.pairs = 0, steps, pairs

    def step(self) -> None:
        before = self.sample(self.move[self.state]) if self.pairs else self.state
        self.state = self.sample(self.move[before])
        self.score(self.log_weights[before, self.state])
        self.left -= 1
        if not self.left:
            self.finish()

    def log_Z(self) -> float:
        step = self.moves * self.weights
        return math.log(np.linalg.matrix_power(self.moves @ step if self.pairs else step, self.left)[0].sum())


class LateChain(Cheap):
    """Markov chain whose moves are scored together at the end."""

    def __init__(self, steps: int, states: int, seed: int, power: float) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.moves = rng.dirichlet(np.ones(states), states)
        self.weights = (rng.dirichlet(np.ones(states), states) + 0.02) ** power
        self.move = [Categorical(list(row)) for row in self.moves]
        self.state, self.left, self.total = 0, steps, 0.0

    def step(self) -> None:
        before, self.state = self.state, self.sample(self.move[self.state])
        self.total += math.log(self.weights[before, self.state])
        self.left -= 1
        if not self.left:
            self.score(self.total)
            self.finish()

    def log_Z(self) -> float:
        return math.log(np.linalg.matrix_power(self.moves * self.weights, self.left)[0].sum())


class Heads(Cheap):
    """Coins, of which enough are heads, tested at the end."""

    def __init__(self, coins: int, least: int, p: float) -> None:
        super().__init__()
        self.left, self.missing, self.p = coins, least, p

    def step(self) -> None:
        self.missing -= self.sample(Bernoulli(self.p))
        self.left -= 1
        if not self.left:
            self.condition(self.missing <= 0)
            self.finish()


class Total(Cheap):
    """Four dice, whose total is scored at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.total = 4, 0

    def step(self) -> None:
        self.total += self.sample(Uniform(range(1, 7)))
        self.left -= 1
        if not self.left:
            self.score(-0.7 * abs(self.total - 17))
            self.finish()


class LateSpans(Model):
    """Three spans, scored together at the end."""

    def __init__(self, lm: CachedTransformer) -> None:
        super().__init__()
        self.context, self.left = lm.context("a"), 3

    def step(self) -> None:
        span = self.extend(self.context, until=" ", max_tokens=2)
        self.context, self.s, self.left = span.context, self.s + span.text, self.left - 1
        if not self.left:
            self.score(0.9 * (self.s.count("b") - self.s.count("c")))
            self.finish()


class Coins(Cheap):
    """Seven coins with a biased proposal, observed, never four heads in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.heads = 7, 0

    def step(self) -> None:
        heads = self.sample(Bernoulli(0.5), proposal=Bernoulli(0.35))
        self.observe(Bernoulli(0.8 if heads else 0.3), True)
        self.heads = self.heads + 1 if heads else 0
        self.condition(self.heads < 4)
        self.left -= 1
        if not self.left:
            self.finish()


class Spans(Model):
    """Two spans of a constraint, each followed by an observed token."""

    def __init__(self, lm: CachedTransformer) -> None:
        super().__init__()
        self.context, self.left = lm.context("a"), 2

    def step(self) -> None:
        self.context = self.extend(self.context, constraint=Regex(r"[abc]{1,4}[ .]"), max_tokens=3).context
        self.left -= 1
        if not self.left:
            self.observe(self.transformer(self.context), 2)
            self.finish()


def confirming() -> Programs:
    tokens = [b"a", b"b", b"c", b" ", b".", b"ab", b"ca"]
    lm, flat = tiny(0, tokens, 0.35), tiny(3, tokens, 0.14)
    chains = {"6": (6, 6, 1), "5, wide": (5, 12, 7), "40": (40, 6, 3), "25, wide": (25, 10, 11)}
    pairs = {"4": (4, 5, 4), "2, wide": (2, 12, 9), "20": (20, 5, 8)}
    made: dict[str, Chain | LateChain] = {f"chain of {name}": Chain(*shape) for name, shape in chains.items()}
    made |= {f"pairs of {name}": Chain(*shape, pairs=True) for name, shape in pairs.items()}
    words, regex = Regex(r"([a-c]{0,2}[ .])*[a-c]{0,2}"), Regex(r"(ab|ca? |b){1,3}\.*")
    late = {"4": (4, 5, 1, 1.0), "6": (6, 6, 2, 0.7), "12": (12, 4, 5, 0.5)}
    made |= {f"chain of {name}, weighed last": LateChain(*shape) for name, shape in late.items()}
    return {name: (chain, chain.log_Z) for name, chain in made.items()} | {
        "seven of ten heads": enumerated(Heads(10, 7, 0.5)),
        "four of six heads": enumerated(Heads(6, 4, 0.4)),
        "total of dice": enumerated(Total()),
        "spans, weighed last": enumerated(LateSpans(lm)),
        "coins": enumerated(Coins()),
        "spans": enumerated(Spans(lm)),
        "words": enumerated(ConstrainedText(lm, "a", words, max_tokens=5, end="eos")),
        "regex": enumerated(ConstrainedText(lm, "a", regex, max_tokens=6, end="eos")),
        "intersection": enumerated(PromptIntersection(flat, ["a", "b.", "c a"], proposal="first", max_tokens=5)),
        "infilling": enumerated(Infilling(lm, ["a", "b", "c"], lengths=Geometric(0.6, max_value=2))),
    }


# ---- running


def first(particle: Any) -> Any:
    """Return the first choice of a run."""
    return particle.choices[0][0][0]


def error_before(steps: Sequence[StepRecord]) -> float:
    """Return the standard error that was reported before."""
    estimates = relative_variance(steps, 1.0), relative_variance(steps, MIN_FAMILIES)
    v = max(each[0] for each in estimates) * (1 + 4 / min(each[1] for each in estimates))
    return math.sqrt(v + v * v / 4)


def shares_of_first(model: Model, log_Z: float) -> dict[Any, float]:
    """Return the posterior probabilities of the first choice."""
    if isinstance(model, Noisy):
        return {token: math.exp(model.log_Z(token) - log_Z) for token in model.tokens if len(token) < len(model.seen)}
    if isinstance(model, Hidden):
        return {}
    return dict(enumerate_exact(model).by(first))


def run(model: Model, method: str, N: int, K: int, rng: np.random.Generator) -> Particles[Any]:
    if method in ("standard", "importance"):
        algorithm = smc_standard if method == "standard" else importance_sampling
        return algorithm(model, N, rng=rng, progress=False)
    return smc_steer(model, N, K, expand=method, rng=rng, progress=False)      # type: ignore[arg-type]


def coverage(model: Model, log_Z: float, method: str, N: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the measures of one program, method and N."""
    begun, tokens, num_values = time.process_time(), 0, 0
    log_mls, ses, before, covered = list[float](), list[float](), list[float](), list[bool]()
    truth = shares_of_first(model, log_Z)
    for rng in np.random.default_rng([options.seed, N]).spawn(options.runs):
        particles = run(model, method, N, options.K, rng)
        tokens += sum(step.parents.size for step in particles.steps)
        log_mls.append(particles.log_ml)
        ses.append(math.nan if particles.log_ml_se is None else particles.log_ml_se)
        before.append(error_before(particles.steps) if len(particles) else math.nan)
        if truth and len(log_mls) <= options.runs // 4:
            for share in particles.by(first).shares:
                num_values += 1
                if share.se is not None:
                    error = abs(share.probability - truth.get(share.value, 0.0))
                    covered.append(error <= 2 * share.se + 5e-4)        # half the last digit that is printed
    errors, se, old, given = np.abs(np.array(log_mls) - log_Z), np.array(ses), np.array(before), ~np.isnan(ses)
    R = len(log_mls) // 3
    triples = zip(np.array(log_mls)[: 3 * R].reshape(R, 3), np.nan_to_num(se)[: 3 * R].reshape(R, 3), strict=True)
    repeated = [(abs(logsumexp(each) - math.log(3) - log_Z), error_of_mean(each, own)) for each, own in triples]
    return {
        "given": float(given.mean()),
        "within 2 se": float(np.mean(errors[given] <= 2 * se[given] + 1e-9)),
        "beyond 10 se": float(np.mean(errors[given] > 10 * se[given] + 1e-9)),
        "before: within 2 se": float(np.mean(errors <= 2 * old + 1e-9)),
        "before: beyond 10 se": float(np.mean(errors > 10 * old + 1e-9)),
        "by: given": len(covered) / num_values if num_values else math.nan,
        "by: within 2 se": float(np.mean(covered)) if covered else math.nan,
        "repeat: within 2 se": float(np.mean([error <= 2 * (told or 0) + 1e-9 for error, told in repeated])),
        "rms error": math.sqrt(float(np.mean(errors**2))),
        "median se": float(np.median(se[given])) if given.any() else math.nan,
        "median se before": float(np.nanmedian(old)),
        "candidates a run": tokens / options.runs,
        "CPU ms a run": 1000 * (time.process_time() - begun) / options.runs,
    }


def shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2g}" if name in ("rms error", "median se", "median se before") else f"{100 * value:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sets = {"named": named, "measured": measured, "confirming": confirming}
    parser.add_argument("--runs", type=int, default=200, help="of each program, method and N")
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 20], metavar="N")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["distinct"])
    parser.add_argument("--K", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", choices=sets, default="named")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs of the set")
    parser.add_argument("--out", help="a file of JSON lines, one for each program, method and N, added at its end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy", note=f"K={options.K}, seed {options.seed}"))
    programs = {name: each for name, each in sets[options.programs]().items() if name in (options.only or [name])}
    truth = {name: log_Z() for name, (_, log_Z) in programs.items()}
    for method in options.methods:
        for N in options.particles:
            rows = []
            for name, (model, _) in programs.items():
                found = coverage(model, truth[name], method, N, options)
                rows.append((name, *(shown(*each) for each in [*found.items()][:11])))
                if options.out:
                    row = {"program": name, "method": method, "N": N, "K": options.K, "runs": options.runs, **found}
                    with open(options.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            table(f"{method}, N={N}, {options.runs} runs of each program", ["program", *[*found][:11]], rows)


if __name__ == "__main__":
    main()
