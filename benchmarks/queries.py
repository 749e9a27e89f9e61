"""Cost and results of queries: replacements for the experiments of ReLM, with baselines in the same run.

ReLM's own figures need GPT-2 XL, The Pile and live URLs. Here the strings are planted in the model, so they are known:

    e1     URLs that a model has memorised: how many a search finds, compared with `generate` and ReLM's algorithm
    e2     how many samples are not the tokenizer's own encoding of their text, and why
    e3     the last word of a passage, in the four settings of the paper, compared with greedy decoding
    e4     a planted bias: is it recovered, and do tests find a difference that does not exist?
    e5     words that a model has memorised, with and without edits and other encodings
    e6     small languages under random models, where all is known: samples, and intervals for the probability
    e7     the positions of edits in prefixes that are drawn uniformly
    scale  the paper's URL pattern over 50,000 tokens, 500 words with an edit: the first expansion, and each

    python benchmarks/queries.py --quick                    # everything, small: about ten minutes of one core
    python benchmarks/queries.py --only e6 e7
    python benchmarks/queries.py --lambada FILE --text FILE --vocab FOLDER --plots docs

e1 and e5 train a copy of the embedded model for some minutes and keep it in `--work`. `--lambada` is a file of JSON
lines with "text", `--text` a file of passages with blank lines between them, and `--vocab` a folder with a tokenizer.
Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from last_word import e3, free_samples
from memorised import URL, URL_PREFIX, e1, e5
from scipy.stats import chi2
from tables import machine, plot, table
from transformers import AutoTokenizer

from llmppl import CachedTransformer, Regex, Vocabulary
from llmppl.constraints import DFA, alignment, within
from llmppl.inference import importance_sampling
from llmppl.queries import Edits, Exact, Query, Rule, compare, probability, search
from llmppl.queries.sampling import Sampled

# ---- e2: samples that are not canonical


def e2(options: argparse.Namespace) -> None:
    N, length = (500, 32) if options.quick else (10_000, 32)
    rows = []
    for name in options.lm or [None]:
        lm = CachedTransformer.from_pretrained(name)
        for temperature in (0.7, 1.0, 1.3):
            causes = Counter(cause_of(lm, ids) for ids in free_samples(lm, N, length, temperature, seed=0))
            wrong = N - causes[""]
            error = 1.96 * math.sqrt(wrong * (N - wrong) / N**3)
            rows.append([f"{name or 'embedded'}, T={temperature:g}", f"{100 * wrong / N:.1f} +- {100 * error:.1f}", *(
                f"{100 * causes[cause] / N:.1f}" for cause in ("merge", "border", "bytes")
            )])
    table(f"e2: samples of {length} tokens that are not the tokenizer's encoding of their text, % of {N:,}",
          ["", "not canonical", "unmerged", "across a border", "no UTF-8"], rows,
          "unmerged: tokens that the merges would join or cut elsewhere; across a border: of two pre-tokens")


def cause_of(lm: CachedTransformer, ids: list[int]) -> str:
    """Return why these tokens are not the tokenizer's own encoding; "" if they are."""
    pieces = [lm.vocab.tokens[i] for i in ids]
    try:
        text = b"".join(pieces).decode()
    except UnicodeDecodeError:
        return "bytes"
    if lm.tokenizer.encode(text, add_special_tokens=False) == ids:
        return ""
    splitter = lm.tokenizer.backend_tokenizer.pre_tokenizer
    words = splitter.pre_tokenize_str(text) if splitter is not None else []
    cuts = {len(text[:begin].encode()) for _, (begin, _) in words}
    borders = set(itertools.accumulate(map(len, pieces), initial=0))
    return "merge" if cuts <= borders else "border"


# ---- e4: a planted bias

JOBS = ("art", "science", "business", "medicine", "computer science", "engineering", "humanities", "social sciences",
        "information systems", "math")
TRAINED = f"The ((man)|(woman)) was trained in ({'|'.join(f'({job})' for job in JOBS)})"


def planted_bias(rng: np.random.Generator) -> tuple[CachedTransformer, dict[str, np.ndarray]]:
    """Build a model whose probabilities are all known; return it with P(job given group).

    A text follows the table, one token per word, with probability 0.7. With probability 0.15, its job is drawn from the
    square root of the table and spelled in letters. With 0.15, its job is drawn uniformly and misspelled in letters.
    """
    words = ["The", " man", " woman", " was", " trained", " in", *(f" {word}" for job in JOBS for word in job.split())]
    tokens = [*dict.fromkeys(words), *" abcdefghijklmnopqrstuvwxyz"]
    number = {token: i for i, token in enumerate(tokens)}
    weights = defaultdict[tuple[int, ...], np.ndarray](lambda: np.zeros(len(tokens) + 1))
    given = {}
    for group in ("man", "woman"):
        given[group] = rng.dirichlet(np.full(len(JOBS), 2.0))
        flat = np.sqrt(given[group]) / np.sqrt(given[group]).sum()
        begin = [number[token] for token in ("The", f" {group}", " was", " trained", " in")]
        for job, p, q in zip(JOBS, given[group], flat, strict=True):
            spelled = [number[char] for char in f" {job}"]
            wrong = [*spelled[:-1], number[chr(ord("a") + (ord(job[-1]) - 96) % 26)]]
            forms = [([number[f" {word}"] for word in job.split()], 0.7 * p), (spelled, 0.15 * q), (wrong, 0.015)]
            for ids, weight in forms:
                path = [*begin, *ids, len(tokens)]
                for i in range(len(path)):
                    weights[tuple(path[:i])][path[i]] += weight

    def logits(ids: list[int]) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(weights[tuple(ids)])

    return CachedTransformer(logits, Vocabulary([*(t.encode() for t in tokens), b""], eos_ids=[len(tokens)])), given


def e4(options: argparse.Namespace) -> None:
    N, batch = (1000 if options.quick else 5000), 250
    lm, given = planted_bias(np.random.default_rng(0))
    rows = []
    for tokenization, edits, prefix in itertools.product(
        ("canonical", "all"), (0, 1), ("The (man|woman) was trained in", "The")
    ):
        region = {"suffix": Edits(edits, alphabet="[a-z]")}
        query = Query(lm, TRAINED, prefix=Regex(prefix), end="eos", tokenization=tokenization, edits=region)
        exact = tally((str(match), math.exp(match.log_joint)) for match in query.best())
        row = [f"{tokenization}, {'1 edit' if edits else 'no edits'}, {'prefix' if ' ' in prefix else 'no prefix'}"]
        row.append(f"{worst_tv(exact, given):.3f}")
        for local in (False, True):
            found = itertools.islice(query.samples(local=local, particles=batch, seed=0), 2 * N)
            sampled = tally((str(match), math.exp(match.log_weight)) for match in found)
            row.append(f"{worst_tv(sampled, exact):.3f}")
        rng = np.random.default_rng(1)
        drawn = [dict(zip(JOBS, rng.multinomial(N, exact[group]).tolist(), strict=True)) for group in exact]
        row.append(f"{compare(*drawn, permutations=9999, seed=0).p:.2g}")
        rows.append(row)
    noise = statistics.mean(
        0.5 * np.abs(np.random.default_rng(i).multinomial(N, given["man"]) / N - given["man"]).sum() for i in range(200)
    )
    table(f"e4: total variation of P(job given group), the worse group; {N:,} samples per group",
          ["", "exact to planted", "sample to exact", "local to exact", "p, man = woman"], rows,
          f"of {N:,} independent draws the total variation is {noise:.3f} on average; p is of as many of the table")
    pairs = 200 if options.quick else 2000
    rejected = np.zeros((3, 2))
    for i in range(pairs):
        rng = np.random.default_rng((2, i))
        p = rng.dirichlet(np.full(len(JOBS), 2.0))
        a, b = (dict(zip(JOBS, rng.multinomial(500, p).tolist(), strict=True)) for _ in range(2))
        tested = compare(a, b, permutations=499, rng=rng).test
        assert tested is not None
        one_sided = sum((a[job] - b[job]) ** 2 / max(b[job], 1) for job in JOBS)
        for row, p_value in enumerate((tested.p, *chi2.sf([tested.statistic, one_sided], [tested.df, len(JOBS) - 1]))):
            rejected[row] += p_value <= 0.05, p_value <= 0.01
    names = "compare, by permutations", "the same statistic, by the chi-square distribution", "b as the expected counts"
    table(f"e4: no bias at all; tests that reject, % of {pairs:,} pairs of 500 draws", ["", "at 5 %", "at 1 %"],
          [[name, *(f"{100 * share:.1f}" for share in row / pairs)] for name, row in zip(names, rejected, strict=True)],
          "the last one is ReLM's script: it takes the counts of one sample as the truth about the other")


def tally(weighted: Iterable[tuple[str, float]]) -> dict[str, np.ndarray]:
    """Return P(job given group) of weighted texts; a misspelled job counts as the original job."""
    sums = {group: np.zeros(len(JOBS)) for group in ("man", "woman")}
    for text, weight in weighted:
        _, group, _, _, _, job = text.split(" ", 5)
        sums[group][_job(job)] += weight
    return {group: found / found.sum() for group, found in sums.items()}


@cache
def _job(text: str) -> int:
    return next(i for i, job in enumerate(JOBS) if alignment(Regex(job), text, 1) is not None)


def worst_tv(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(a[group] - b[group]).sum()) / 2 for group in b)


# ---- e6: conditional sampling and mass

LETTERS = (b"a", b"b", b"c", b"ab", b"bc", b">")
PIECES = ("a", "b", "c", "[ab]", "[abc]", "(a|bc)", "(ab|c)?", "[bc]{0,2}", "a{1,3}", "(ab|ba)")


def random_problem(seed: int, scale: float = 2.0) -> tuple[CachedTransformer, str, dict[str, float]]:
    """Return a model of token pairs, a pattern, and the probability of each of its strings after ">"."""
    rng = np.random.default_rng((6, seed))
    logits = scale * rng.standard_normal((len(LETTERS), len(LETTERS) + 1))
    logits[:, LETTERS.index(b">")] = -np.inf
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    pattern = "".join(rng.choice(PIECES, rng.integers(2, 5)))

    def of(text: bytes, last: int) -> float:
        if not text:
            return float(p[last, -1])
        return sum(p[last, i] * of(text[len(t) :], i) for i, t in enumerate(LETTERS) if text.startswith(t))

    strings = {text: of(text.encode(), LETTERS.index(b">")) for text in Regex(pattern).enumerate()}
    lm = CachedTransformer(lambda ids: logits[ids[-1]], Vocabulary([*LETTERS, b""], eos_ids=[len(LETTERS)]))
    return lm, f">{pattern}", strings


def e6(options: argparse.Namespace) -> None:
    problems = 10 if options.quick else 40
    sizes = (10, 100, 1000) if options.quick else (10, 30, 100, 300, 1000, 3000)
    errors = {name: np.zeros((problems, len(sizes))) for name in ("sample", "importance", "local", "independent")}
    for i in range(problems):
        lm, pattern, strings = random_problem(i)
        names, p = list(strings), np.array(list(strings.values()))
        p /= p.sum()
        place = {name: j for j, name in enumerate(names)}
        query = Query(lm, pattern, prefix=">", end="eos")
        starts = query.space.starts()
        for j, N in enumerate(sizes):
            rng = np.random.default_rng((7, i, j))
            matches = {
                name: itertools.islice(query.samples(local=name == "local", particles=N, seed=j), N)
                for name in ("sample", "local")
            }
            particles = importance_sampling(Sampled(query.space, starts), N, rng=rng, progress=False)
            drawn = {name: [(str(m)[1:], m.log_weight) for m in found] for name, found in matches.items()}
            drawn["importance"] = [(str(x.match(0.0))[1:], x.log_weight) for x in particles]
            for name, found in drawn.items():
                q = np.zeros(len(names))
                for text, log_weight in found:
                    q[place[text]] += math.exp(log_weight)
                errors[name][i, j] = np.abs(q / q.sum() - p).sum() / 2
            errors["independent"][i, j] = np.abs(rng.multinomial(N, p) / N - p).sum() / 2
    rows = []
    logs = np.log(np.array(sizes, float))
    for name, found in errors.items():
        slope = np.polyfit(logs, np.log(np.median(found, axis=0)), 1)[0]
        rows.append([name, *(f"{np.median(found[:, j]):.3f}" for j in range(len(sizes))), f"{slope:.2f}"])
    table(f"e6: total variation to the exact distribution, median of {problems} random languages and models",
          ["", *(f"N={N:,}" for N in sizes), "slope"], rows,
          "sample: a particle filter; importance: its weights without resampling; local: ReLM's random search;\n"
          "independent: draws of the exact distribution")

    problems = 40 if options.quick else 200
    inside = np.zeros((2, 2))
    bounds = 0
    for i in range(problems):
        lm, pattern, strings = random_problem(1000 + i)
        truth = math.fsum(strings.values())
        told = probability(lm, pattern, prefix=">", end="eos", runs=0)
        bounds += told.lower <= truth * (1 + 1e-9) and truth <= told.upper * (1 + 1e-9)
        for j, (runs, t) in enumerate(((16, 2.131), (64, 1.998))):
            told = Query(lm, pattern, prefix=">", end="eos").probability(runs=runs, max_expansions=0, seed=i)
            distance = abs(told.estimate - truth)
            inside[j] += distance <= 1.96 * told.estimate_se + 1e-12, distance <= t * told.estimate_se + 1e-12
    table(f"e6: intervals that hold the probability of the language, % of {problems}; 32 particles",
          ["", "1.96 se", "by Student's t"],
          [[f"{runs} runs", *(f"{100 * share:.1f}" for share in row / problems)]
           for runs, row in zip((16, 64), inside, strict=True)],
          f"exact bounds: {bounds} of {problems}; by chance, 95 +- {196 * math.sqrt(0.05 * 0.95 / problems):.1f}")

    def draw(axes: Any) -> None:
        for name, found in errors.items():
            axes.plot(sizes, np.median(found, axis=0), ":" if name == "independent" else "-", marker=".", label=name)
        axes.set(xscale="log", yscale="log", xlabel="N", ylabel="total variation to the exact distribution")
        axes.legend(frameon=False, fontsize=8)

    plot(options, "queries-sampling", draw, (5, 3.2))


# ---- e7: prefixes that are drawn uniformly

TEMPLATE = "The blue door opened"


def e7(options: argparse.Namespace) -> None:
    N = 1000 if options.quick else 5000
    edits = Edits(1, alphabet="[a-z ]")
    near = within(Regex(TEMPLATE), 1, alphabet="[a-z ]").explore()
    strings = list(near.enumerate())
    vocab = CachedTransformer.from_pretrained().vocab
    letters = Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_ids=[256])
    even = CachedTransformer(lambda ids: np.zeros(257), letters)
    query = Query(even, TEMPLATE + "!", prefix=TEMPLATE, edits={"prefix": edits}, end="prefix")
    matches = query.samples(local=True, prefixes="uniform", particles=1, seed=0)
    drawn = {
        "llmppl, evenly over strings": [match.prefix for match in itertools.islice(matches, N)],
        "evenly over token sequences": list(over_token_sequences(near, vocab, N, np.random.default_rng(1))),
        "evenly over the next character": list(over_next_characters(near, N, np.random.default_rng(2))),
    }
    uniform = Exact(dict.fromkeys(strings, 1 / len(strings)))
    places: dict[str, list[int]] = {}
    rows = []
    for name, texts in drawn.items():
        found = [alignment(Regex(TEMPLATE), text, 1, alphabet="[a-z ]") or [] for text in texts]
        places[name] = [each[0].place for each in found if each]
        early = sum(place < 6 for place in places[name]) / len(places[name])
        fit = compare(texts, uniform, permutations=999, seed=0)
        rows.append([name, f"{100 * early:.1f}", f"{fit.test.statistic:,.0f}", fit.test.df, f"{fit.p:.2g}"])
    expected = [each[0].place for text in strings if (each := alignment(Regex(TEMPLATE), text, 1, alphabet="[a-z ]"))]
    table(f"e7: {N:,} prefixes of {len(strings):,} within one edit of {TEMPLATE!r}",
          ["", "edits in the first 6 characters, %", "X2 to uniform", "df", "p"], rows,
          f"of all strings with an edit, {100 * sum(place < 6 for place in expected) / len(expected):.1f} % have it "
          "there; paper: 80 % without walk counts")

    def draw(axes: Any) -> None:
        for name, found in places.items():
            shares = np.bincount(found, minlength=len(TEMPLATE) + 1)[: len(TEMPLATE) + 1] / len(found)
            axes.plot(shares, drawstyle="steps-mid", label=name)
        axes.set(xlabel="place of the edit", ylabel="share", xticks=range(0, len(TEMPLATE) + 1, 5))
        axes.legend(frameon=False, fontsize=8)

    plot(options, "queries-edits", draw, (5, 3.2))


def over_token_sequences(language: DFA, vocab: Vocabulary, N: int, rng: np.random.Generator) -> Iterator[str]:
    """Draw ReLM's prefixes: paths of the token automaton, all equally probable."""
    index = language.index(vocab)

    @cache
    def arcs(state: Any) -> list[tuple[int, Any]]:
        return [(t, index.advance(state, t)) for t in index.allowed(state).tolist() if vocab.tokens[t]]

    @cache
    def walks(state: Any) -> int:
        return int(index.accepts(state)) + sum(walks(to) for _, to in arcs(state))

    for _ in range(N):
        state, data = index.start, b""
        while True:
            left = int(rng.integers(walks(state))) - int(index.accepts(state))
            if left < 0:
                break
            for token, to in arcs(state):
                left -= walks(to)
                if left < 0:
                    state, data = to, data + vocab.tokens[token]
                    break
        yield data.decode()


def over_next_characters(language: DFA, N: int, rng: np.random.Generator) -> Iterator[str]:
    """Draw prefixes without path counts: every next character, or the end, is equally probable."""
    for _ in range(N):
        state, data = language.start, b""
        while True:
            choices = np.flatnonzero(language.table[state]).tolist() + [-1] * language.accepts(state)
            byte = choices[rng.integers(len(choices))]
            if byte < 0:
                break
            state, data = int(language.table[state, byte]), data + bytes([byte])
        yield data.decode()


# ---- scale


def scale(options: argparse.Namespace) -> None:
    folder = options.vocab
    tokenizer = AutoTokenizer.from_pretrained(folder) if folder else CachedTransformer.from_pretrained().tokenizer
    V = len(tokenizer)
    logits = 3.0 * np.random.default_rng(0).standard_normal((64, V))
    expansions = 200 if options.quick else 1000
    lm = CachedTransformer(lambda ids: logits[ids[-1] % 64], tokenizer, cache_bytes=64 << 20)
    found = search(lm, ".*", prefix="The ", end="boundary", results="tokens")._search
    assert found is not None
    found.expand()
    rows, start = [], _resident()
    for mark in (1, 1000, 2000, 4000) if options.quick else (1, 1000, 2000, 4000, 8000):
        while found.heap and found.expansions < mark:
            found.expand()
        rows.append([f"{found.expansions:,}", f"{len(found.heap):,}", f"{_resident() - start:.0f}"])
    table("scale: memory of `.*` without a rule, cache_bytes 64 MB", ["expansions", "heap", "MB over the start"], rows)

    words = sorted({_word(i) for i in range(600)})[:500]
    urls = {"prefix": URL_PREFIX, "end": "prefix"}
    some, choice = {"prefix": "The ", "end": "eos"}, f"The ({'|'.join(words)})"
    cases: dict[str, tuple[str, dict[str, Any], str]] = {
        "URL, all": (URL, {**urls, "rule": Rule(top_k=40)}, "tokens"),
        "URL, all, no top_k": (URL, urls, "tokens"),
        "URL, canonical": (URL, {**urls, "rule": Rule(top_k=40), "tokenization": "canonical"}, "strings"),
        "500 words, 1 edit": (choice, {**some, "edits": Edits(1, alphabet="[a-z]")}, "strings"),
        "500 words, 1 edit, any character": (choice, {**some, "edits": 1}, "strings"),
        ".*": (".*", {"prefix": "The ", "end": "boundary"}, "tokens"),
    }
    rows = []
    for name, (pattern, query, results) in cases.items():
        times: list[list[float]] = []
        for batch in (1, 1, 32):
            lm = CachedTransformer(lambda ids: logits[ids[-1] % 64], tokenizer)
            lm.context("The ")                          # excludes the tokenizer's first call
            asked = _timed(lm)
            started = time.process_time()
            matches = Query(lm, pattern, **query).best(results=results, batch=batch)
            called = time.process_time() - started
            found = matches._search                     # lets the loop stop before the first match
            assert found is not None
            while not found.expansions:
                found.expand()
            times.append([called, time.process_time() - started])
            started, done, asked[0] = time.process_time(), found.expansions, 0.0
            while found.heap and found.expansions < done + expansions:
                found.expand()
            each = 1000 * (time.process_time() - started - asked[0]) / max(1, found.expansions - done)
            times[-1].append(each)
        rows.append([name, *(f"{value:.3f}" for value in times[0][:2]), f"{times[1][1]:.3f}", f"{times[1][2]:.2f}",
                     f"{times[2][2]:.2f}", f"{len(found.heap):,}"])
    table(f"scale: {V:,} tokens, a table instead of a model; CPU seconds until `search` returns and until the first "
          f"expansion, and our own milliseconds in each of {expansions:,} expansions",
          ["", "search s", "first s", "first, again s", "each ms", "batch 32, ms", "heap"], rows)


def _timed(lm: CachedTransformer) -> list[float]:
    """Measure the CPU seconds that a model takes to answer from now on, in a list of one."""
    answer, seconds = lm.evaluator.evaluate, [0.0]

    def timed(questions: list[Any]) -> list[Any]:
        started = time.process_time()
        try:
            return answer(questions)
        finally:
            seconds[0] += time.process_time() - started

    lm.evaluator.evaluate = timed                                   # type: ignore[method-assign]
    return seconds


def _word(i: int) -> str:
    rng = np.random.default_rng((8, i))
    return "".join(rng.choice(list("bcdfghklmnprstvw")) + rng.choice(list("aeiou")) for _ in range(rng.integers(2, 5)))


def _resident() -> float:
    """Return the MB of resident memory, or its peak if only the peak is known."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# ---- the command


EXPERIMENTS = {"e1": e1, "e2": e2, "e3": e3, "e4": e4, "e5": e5, "e6": e6, "e7": e7, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes and one seed")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "llmppl-queries", metavar="FOLDER")
    parser.add_argument("--lm", nargs="+", default=[], metavar="NAME", help="models for e2 and e3")
    parser.add_argument("--lambada", type=Path, metavar="FILE", help='JSON lines with "text", for e3')
    parser.add_argument("--text", type=Path, metavar="FILE", help="passages for e3, blank lines between them")
    parser.add_argument("--passages", type=int, default=500, metavar="N", help="of each kind, for e3")
    parser.add_argument("--expansions", type=int, default=20_000, metavar="N", help="limit of a search in e3")
    parser.add_argument("--dtype", help="of the models of e3 (bfloat16: half the time of float32)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON lines with e3's results, for resuming")
    parser.add_argument("--vocab", type=Path, metavar="FOLDER", help="a tokenizer for scale, such as gpt2's")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw e1, e6 and e7 there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(machine("torch", "transformers", "numpy", note=f"{torch.get_num_threads()} thread"))
    for name in options.only:
        started = time.perf_counter()
        EXPERIMENTS[name](options)
        print(f"({name}: {time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
