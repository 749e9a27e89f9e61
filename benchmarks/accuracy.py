"""Accuracy of the algorithms: the gap log Z - E[log Z-hat], and the distance to the exact posterior.

The programs are words of at most 5 letters, infilling, both formulations of prompt intersection, a regular expression,
and sentences that must contain keywords. They run on a tiny transformer of eight tokens, whose log Z and posterior are
summed exactly, and on the embedded model, whose log Z is estimated by long runs (distinct first choices, N=400).
The methods are the particle filter, Algorithm 1 (`expand="copies"`), the same with equal copies merged (`"merged"`),
`"distinct"`, and distinct with a twist: the log mass of the program's automaton (`Lookahead`).

    python benchmarks/accuracy.py --quick               # few runs, the tiny transformer: a minute
    python benchmarks/accuracy.py                       # everything
    python benchmarks/accuracy.py --only embedded --runs 40 --particles 20
    python benchmarks/accuracy.py --only rejection      # a mask, compared with `where`, which tests only drawn tokens

`tokens` is the mean number of tokens of a run with an empty cache. It differs at equal N: equal particles share tokens,
distinct ones share fewer, and infilling runs every extension. So a second table, at N=20, gives each method the N at
which it runs as many tokens as Algorithm 1.

If log Z is exact, the estimate of a gap uses E[Z-hat] = Z: it is the mean of -log r + b (r - 1) with r = Z-hat / Z. The
factor b minimises the variance in the other runs. Otherwise the estimate is the plain mean, and its error includes the
error of log Z. Ratios are gap / gap of Algorithm 1, with errors by the delta method. Differences of `mean log Z-hat`
between methods need no log Z.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tables import machine, table
from transformers import LlamaConfig, LlamaForCausalLM

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    Geometric,
    Infilling,
    Model,
    PromptIntersection,
    Regex,
    Vocabulary,
    enumerate_exact,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import Distribution
from llmppl.models.lookahead import Lookahead, mean_next_token
from llmppl.models.programs import short_words

K = 3
LONG = 400                                              # N of the runs that replace the exact result
START = "Once upon a time, there was a little boy named Tim."
WORDS = r"( [A-Za-z]{1,5},?)*\."                        # at most five letters
AGE = r" (He|She) was [0-9]{1,2} years old and (very )?[a-z]{3,8}\."
METHODS = ("standard", "Algorithm 1", "merged", "distinct", "distinct + twist")
EXPAND = {"Algorithm 1": "copies", "merged": "merged", "distinct": "distinct", "distinct + twist": "distinct"}


class Twisted(ConstrainedText):
    """Constrained text with the log mass of the constraint as its twist."""

    def __init__(self, *args: Any, ahead: Lookahead, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ahead = ahead

    def step(self) -> None:
        super().step()
        if not self.finished:
            assert self.must_end_by is not None
            self.twist(self.ahead.log_mass(self.state, self.must_end_by - self.num_tokens))


class Counted(CachedTransformer):
    """Model that counts the distinct tokens read since `read` was emptied, so runs can share the cache."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read: set[Any] = set()
        cached = self.evaluator.cached                  # the evaluator looks up every question here first

        def counted(question: Any) -> Any | None:
            node = question[max(0, len(question) - 2)]  # the last token of a question is not read itself
            while node.parent is not None and node not in self.read:
                self.read.add(node)
                node = node.parent
            return cached(question)

        self.evaluator.cached = counted                 # type: ignore[method-assign]


@dataclass
class Subject:
    """Language model with the programs to run on it."""

    name: str
    lm: Counted
    programs: dict[str, Program]


@dataclass
class Program:
    """Program built by `make(twisted)`: whether it has a twist, log Z and its error, and the posterior if known."""

    make: Callable[[bool], Model]
    twist: bool = False
    log_Z: float = math.nan
    error: float = 0.0
    posterior: dict[str, float] | None = None


@dataclass
class Result:
    """Results of a method at one N."""

    N: int
    log_ratios: NDArray[np.float64]                     # (runs,) log Z-hat - log Z
    tokens: float                                       # mean over the runs
    distance: float                                     # mean total variation to the posterior, NaN if unknown
    gap: float = math.nan
    error: float = math.nan


def constrained(lm: CachedTransformer, prompt: str, pattern: Any, max_tokens: int) -> Program:
    index = pattern.index(lm.vocab)
    ahead = Lookahead(index, mean_next_token(lm.context(prompt), 300), max_tokens, "eos")
    options: dict[str, Any] = {"max_tokens": max_tokens, "end": "eos"}

    def make(twisted: bool) -> Model:
        if twisted:
            return Twisted(lm, prompt, index, ahead=ahead, **options)
        return ConstrainedText(lm, prompt, index, **options)

    return Program(make, twist=True)


def intersection(lm: CachedTransformer, prompts: Sequence[str], proposal: str, max_tokens: int) -> Program:
    return Program(lambda twisted: PromptIntersection(lm, prompts, proposal=proposal, max_tokens=max_tokens))


def tiny() -> Subject:
    """Build a transformer of eight tokens, whose random weights are large enough for far from uniform distributions."""
    V = 8
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.35, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=V - 1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    vocab = Vocabulary([b"a", b"b", b"c", b" ", b".", b"ab", b"ca", b""], eos_ids=[V - 1])
    lm = Counted(model, vocab)
    keywords = Regex("[abc ]*a b[abc .]*") & Regex("[abc ]*c[abc .]*")
    return Subject("tiny transformer", lm, {
        "words of at most 2 letters": constrained(lm, "a", Regex(r"([a-c]{0,2}[ .])*[a-c]{0,2}"), 4),
        "infilling": Program(lambda twisted: Infilling(lm, ["a", "b", "c"], lengths=Geometric(0.6, max_value=2))),
        "intersection, product": intersection(lm, ["a", "b.", "c a"], "product", 4),
        "intersection, first": intersection(lm, ["a", "b.", "c a"], "first", 4),
        "regex": constrained(lm, "a", Regex(r"(ab|ca? |b){1,3}\.*"), 5),
        "keywords": constrained(lm, "a", keywords, 5),
    })  # fmt: skip


def embedded() -> Subject:
    lm = Counted.from_pretrained(engine="transformers")
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    sentence = Regex(r" [A-Z][a-z]*(,? [a-z]+)*\.")
    keywords = functools.reduce(operator.and_, [Regex(rf".* {word}[ ,.].*") for word in ("dog", "ball")], sentence)
    return Subject("embedded model", lm, {
        "words of at most 5 letters": constrained(lm, START, Regex(WORDS), 10),
        "infilling": Program(
            lambda twisted: Infilling(lm, "The dog was very[BLANK] because he had lost his[BLANK].", max_tokens=12)
        ),
        "intersection, product": intersection(lm, prompts, "product", 8),
        "intersection, first": intersection(lm, prompts, "first", 8),
        "regex": constrained(lm, START, Regex(AGE), 14),
        "keywords": constrained(lm, START, keywords, 14),
    })  # fmt: skip


SUBJECTS = {"tiny": tiny, "embedded": embedded}


# ---- running


def run(subject: Subject, program: Program, method: str, N: int, runs: int, seed: int = 0) -> Result:
    log_mls, tokens, distances = [], [], []
    for rng in np.random.default_rng([seed, N, METHODS.index(method)]).spawn(runs):
        subject.lm.read.clear()
        model = program.make(method == "distinct + twist")
        if method == "standard":
            particles = smc_standard(model, N, rng=rng, progress=False)
        else:
            particles = smc_steer(model, N, K, expand=EXPAND[method], rng=rng, progress=False)
        log_mls.append(particles.log_ml)
        tokens.append(len(subject.lm.read))
        distances.append(distance(particles, program.posterior))
    log_ratios = np.array(log_mls) - program.log_Z
    return Result(N, log_ratios, float(np.mean(tokens)), float(np.mean(distances)), *gap_of(log_ratios, program))


def distance(particles: Any, posterior: dict[str, float] | None) -> float:
    """Return the total variation between the weighted particles and the posterior; 1 for a run without particles."""
    if posterior is None:
        return math.nan
    found: dict[str, float] = {}
    for particle, weight in zip(particles, particles.weights, strict=True):
        found[str(particle)] = found.get(str(particle), 0.0) + float(weight)
    return 1.0 - sum(min(weight, posterior.get(text, 0.0)) for text, weight in found.items())


def gap_of(log_ratios: NDArray[np.float64], program: Program) -> tuple[float, float]:
    """Return log Z - E[log Z-hat] and its standard error; infinite if a run lost all particles."""
    if np.isinf(log_ratios).any():
        return math.inf, math.nan
    if program.error > 0.0:
        return -float(log_ratios.mean()), math.hypot(standard_error(log_ratios), program.error)
    r = np.exp(log_ratios)
    b = np.array([slope(np.delete(r, i), np.delete(log_ratios, i)) for i in range(len(r))])
    values = -log_ratios + b * (r - 1.0)
    return float(values.mean()), standard_error(values)


def standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the slope of the least-squares line of y on x, or 1 if x is constant: the slope of the logarithm at 1."""
    return float(np.cov(x, y)[0, 1] / x.var(ddof=1)) if x.std() > 1e-9 else 1.0


def settle(subject: Subject, program: Program, runs: int) -> None:
    """Find log Z: exactly on the tiny transformer, otherwise by long runs."""
    if subject.name.startswith("tiny"):
        exact = enumerate_exact(program.make(False))
        program.log_Z, program.posterior = exact.log_ml, {}
        for particle, weight in zip(exact, exact.weights, strict=True):
            text = str(particle)
            program.posterior[text] = program.posterior.get(text, 0.0) + float(weight)
        return
    program.log_Z = 0.0
    method = "distinct + twist" if program.twist else "distinct"
    log_mls = run(subject, program, method, LONG, runs, seed=1).log_ratios
    top = log_mls.max()
    Z = np.exp(log_mls - top)
    program.log_Z = float(top + np.log(Z.mean()))
    program.error = float(Z.std(ddof=1) / Z.mean() / math.sqrt(runs))


def matched(subject: Subject, program: Program, method: str, tokens: float, start: Result) -> int:
    """Return the N at which a method runs about `tokens` tokens."""
    N, found = start.N, start.tokens
    for _ in range(2):
        N = max(1, round(N * tokens / found))
        found = run(subject, program, method, N, 3, seed=2).tokens
    return N


# ---- printing


def ratio(result: Result, base: Result) -> tuple[float, float]:
    """Return gap / gap of Algorithm 1, and its error by the delta method."""
    if not (math.isfinite(result.gap) and math.isfinite(base.gap) and base.gap > 0.0):
        return math.nan, math.nan
    error = math.hypot(result.error / base.gap, result.gap * base.error / base.gap**2)
    return result.gap / base.gap, error


def number(value: float, error: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g} +- {error:.1g}"


def compare(subject: Subject, runs: int, sizes: Sequence[int], equal: str) -> dict[tuple[str, int], dict[str, Result]]:
    """Run all methods of a subject at equal N, print the table, and return the results by program and N."""
    found: dict[tuple[str, int], dict[str, Result]] = {}
    rows = []
    for name, program in subject.programs.items():
        for N in sizes:
            base = run(subject, program, "Algorithm 1", N, runs)
            results = found[name, N] = {}
            for method in METHODS:
                if method == "distinct + twist" and not program.twist:
                    continue
                result = base if method == "Algorithm 1" else run(subject, program, method, N, runs)
                if equal == "tokens" and abs(result.tokens / base.tokens - 1.0) > 0.03:
                    M = matched(subject, program, method, base.tokens, result)
                    result = result if M == result.N else run(subject, program, method, M, runs)
                results[method] = result
                rows.append((
                    name, method, result.N, f"{result.tokens:.0f}",
                    number(program.log_Z + float(result.log_ratios.mean()), standard_error(result.log_ratios)),
                    number(result.gap, result.error),
                    number(*ratio(result, base)), "-" if program.posterior is None else f"{result.distance:.3f}",
                ))  # fmt: skip
    title = f"{subject.name}, K={K}, {runs} runs of each; at equal {equal}"
    columns = ("program", "method", "N", "tokens", "mean log Z-hat", "gap", "x Algorithm 1", "total variation")
    table(title, columns, rows)
    return found


def summarise(found: dict[tuple[str, int], dict[str, Result]], N: int, equal: str) -> None:
    """Print the geometric mean over programs of gap(distinct) / gap(Algorithm 1), and every ratio above 1."""
    print(f"\ndistinct compared with Algorithm 1, at equal {equal}")
    logs, errors, worse = [], [], []
    for (name, size), results in found.items():
        value, error = ratio(results["distinct"], results["Algorithm 1"])
        if math.isnan(value):
            print(f"excluded, a run without particles or no gap: {name}, N={size}")
            continue
        if value > 1.0:
            worse.append(f"{name}, N={size}: {number(value, error)}")
        if size == N:
            value = max(value, error)                   # a gap that cannot be distinguished from 0 counts as its error
            logs.append(math.log(value))
            errors.append(error / value)
    if logs:
        mean, error = math.exp(np.mean(logs)), math.hypot(*errors) / len(errors)
        print(f"gap(distinct) / gap(Algorithm 1), N={N}, geometric mean of {len(logs)}: {number(mean, mean * error)}")
    print("ratios above 1: " + ("; ".join(worse) or "none"))


class ShortWords(Model):
    """Ten tokens whose words have at most five letters, by a mask or by a test of the drawn tokens."""

    def __init__(self, lm: CachedTransformer, prompt: str, fits: Callable[[str], Any], masked: bool) -> None:
        super().__init__()
        self.context, self.fits, self.masked = lm.context(prompt), fits, masked
        self.calls: list[int] = []

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = self.fits(self.s)
        proposal = p.masked(allowed) if self.masked else p.where(lambda token: bool(allowed[token]))
        token = self.sample(p, proposal=proposal)
        self.calls.append(len(allowed) if isinstance(proposal, Distribution) else proposal.calls)
        self.s += token
        self.context += token
        if len(self.calls) == 10:
            self.finish()


def reject(runs: int, N: int) -> None:
    """Print Z-hat, its spread and the tokens tested per draw, for one program with a mask and with `where`."""
    lm, prompt = CachedTransformer.from_pretrained(engine="transformers"), "The Fed says"
    short, go_on = short_words(lm.vocab, 5), lm.vocab.not_eos
    rows = []
    for name in ("mask", "where"):
        model = ShortWords(lm, prompt, lambda text: short(prompt + text) & go_on, name == "mask")
        found = [smc_standard(model, N, rng=rng, progress=False) for rng in np.random.default_rng(0).spawn(runs)]
        Z = np.exp([particles.log_ml for particles in found])
        calls = np.mean([np.mean(particle.calls) for particles in found for particle in particles])
        sd = float(Z.std(ddof=1))
        rows.append((
            name, number(float(Z.mean()), sd / math.sqrt(runs)), f"{sd / Z.mean():.3f}",
            f"{np.std(np.log(Z), ddof=1):.3f}", f"{calls:.1f}", f"{len(lm.vocab) / calls:.0f}",
        ))  # fmt: skip
    columns = ("proposal", "Z-hat", "relative sd", "sd of log Z-hat", "tokens tested per draw", "fewer than V by")
    table(f"words of at most 5 letters, 10 tokens after {prompt!r}, smc_standard N={N}, {runs} runs", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SUBJECTS, "rejection"])
    parser.add_argument("--runs", type=int, default=100, help="of each method, program and N on the tiny transformer; "
                        "half as many on the embedded model")
    parser.add_argument("--particles", type=int, nargs="+", default=[5, 20, 80], metavar="N")
    parser.add_argument("--quick", action="store_true", help="the tiny transformer, 20 runs, N=20")
    options = parser.parse_args()
    if options.quick:
        options.only, options.runs, options.particles = options.only or "tiny", 20, [20]
    torch.set_num_threads(1)
    print(machine("torch", "transformers", "numpy", note=f"{torch.get_num_threads()} thread"))
    if options.only == "rejection":
        reject(options.runs, 20)
        return
    middle = 20 if 20 in options.particles else options.particles[0]
    found: dict[str, dict[tuple[str, int], dict[str, Result]]] = {"N": {}, "tokens": {}}
    for name in SUBJECTS if options.only is None else [options.only]:
        subject = SUBJECTS[name]()
        runs = options.runs if name == "tiny" else max(2, options.runs // 2)
        for program in subject.programs.values():
            settle(subject, program, max(4, runs // 10))
        for equal, sizes in (("N", options.particles), ("tokens", [middle])):
            results = compare(subject, runs, sizes, equal)
            found[equal] |= {(f"{subject.name}: {program}", N): each for (program, N), each in results.items()}
    for equal, each in found.items():
        summarise(each, middle, equal)
    if options.only is None:
        reject(options.runs, 20)


if __name__ == "__main__":
    main()
