"""Coverage of the standard error: how often log Z lies within one and two standard errors of log Z-hat in a run.

Ten programs cover every kind of step: single choices, several choices, spans, a choice that is observed and tested,
and a number of choices that depends on choices. Two are weighed at the end. The others are masked text, an intersection
of prompts, and infilling.
`enumerate_exact` gives log Z, or a hand-written sum over states if there are too many runs.

    python benchmarks/standard_errors.py                        # all methods, N=10 and N=50
    python benchmarks/standard_errors.py --runs 40 --particles 10 --methods distinct
    python benchmarks/standard_errors.py --choosing             # the programs used to choose the correction

A normal error lies within one standard error in 68 % of runs and within two in 95 %. `median se / sd` compares with the
standard deviation of log Z-hat over runs; a dash means a deviation below 1e-9. `rms` is the root mean square
error. A run whose particles all died reports no standard error; it counts only in `given`. The pooled line is the mean
of the programs.

The correction for few units (`llmppl/inference/genealogy.py: log_ml_error`) was chosen on the programs of `--choosing`,
seven of which are weighed at the end. The ten programs played no part in that choice.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
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
    PromptIntersection,
    Regex,
    Uniform,
    Vocabulary,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.models.spans import Span

Programs = dict[str, tuple[Model, Callable[[], float]]]         # the model, and a function that computes log Z
METHODS = ("distinct", "merged", "copies", "standard", "importance")


class Cheap(Model):
    """Model whose attributes are never changed in place, so a copy shares them."""

    def copy(self) -> Cheap:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


# ---- the ten programs


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


# ---- the programs used to choose the correction


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


def choosing() -> Programs:
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


def run(model: Model, method: str, N: int, K: int, runs: int, seed: int) -> tuple[NDArray[np.float64], ...]:
    """Return log Z-hat and its standard error of each run, (runs,) each; NaN if a run gives no error."""
    log_mls, ses = [], []
    for rng in np.random.default_rng([seed, N]).spawn(runs):
        if method in ("standard", "importance"):
            algorithm = smc_standard if method == "standard" else importance_sampling
            particles = algorithm(model, N, rng=rng, progress=False)
        else:
            particles = smc_steer(model, N, K, expand=method, rng=rng, progress=False)      # type: ignore[arg-type]
        log_mls.append(particles.log_ml)
        ses.append(math.nan if particles.log_ml_se is None else particles.log_ml_se)
    return np.array(log_mls), np.array(ses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each program, method and N; half as many at N=50")
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 50], metavar="N")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["distinct", "copies", "standard"])
    parser.add_argument("--K", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choosing", action="store_true", help="the programs used to choose the correction")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy", note=f"K={options.K}, seed {options.seed}"))
    programs = choosing() if options.choosing else measured()
    truth = {name: log_Z() for name, (_, log_Z) in programs.items()}
    for method in options.methods:
        for N in options.particles:
            rows, shares, begun = [], [], time.process_time()
            runs = options.runs if N < 50 else max(2, options.runs // 2)
            for name, (model, _) in programs.items():
                log_mls, ses = run(model, method, N, options.K, runs, options.seed)
                given = ~np.isnan(ses)
                errors, sd = np.abs(log_mls - truth[name])[given], float(np.std(log_mls[given], ddof=1))
                within = [float(np.mean(errors <= k * ses[given] + 1e-9)) for k in (1, 2)]
                shares.append([float(given.mean()), *within])
                ratio = "-" if sd < 1e-9 else f"{np.median(ses[given]) / sd:.2f}"
                rms = math.sqrt(float(np.mean(errors**2)))
                rows.append((name, *(f"{100 * share:.0f} %" for share in shares[-1]), f"{sd:.2g}", f"{rms:.2g}", ratio))
            rows.append(("pooled", *(f"{100 * share:.1f} %" for share in np.mean(shares, 0)), "", "", ""))
            columns = ("program", "given", "within 1 se", "within 2 se", "sd of log Z-hat", "rms", "median se / sd")
            taken = f"{time.process_time() - begun:.0f} CPU s"
            table(f"{method}, N={N}, {runs} runs of each program, {taken}", columns, rows)


if __name__ == "__main__":
    main()
