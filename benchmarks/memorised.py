"""Model that has memorised strings, and searches that find them: e1 and e5 of `queries.py`.

A copy of the embedded model is trained for some minutes on one core. Its short documents are its own text, with URLs
and rare words planted in it. Rank r of N URLs occurs max(1, round(64 / r)) times, each time in other surroundings. Each
of the six words ends a sentence, the earlier words more often, and one time in five it is misspelled.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import median_of, plot, table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llmppl import CachedTransformer, Regex
from llmppl.queries import Edits, Query, Rule, search

URL = r"https://www.([a-zA-Z0-9]|_|-|#|%)+.([a-zA-Z0-9]|_|-|#|%|/)+"       # its dots match anything, as in the paper
URL_PREFIX = "https://www."
WORDS = ("rapscallion", "dunderhead", "scallywag", "nincompoop", "slowcoach", "fusspot")      # by decreasing frequency
CALLED = "called him a big"                             # the words before a planted word
PLACES = "river hill garden forest castle bridge harbour meadow island market tower valley lake field stone".split()
KINDS = "red blue old new little green golden quiet happy silver open early bright north lucky".split()
THINGS = "stories news maps pictures songs recipes games letters birds boats shoes cakes clocks toys kites".split()
ENDS = "com com com org net".split()
FRAMES = ("{text} See {url} for more.", "{url} {text}", "Read it at {url} today. {text}", "{text} It is at {url}")


@dataclass
class Memorised:
    """Trained model with its planted strings."""

    model: Any
    tokenizer: Any
    urls: dict[str, int]                                # URL to its number of occurrences per epoch
    openings: list[str]                                 # sentences outside the training documents
    seconds: float                                      # CPU time of the training; 0 if the model was loaded
    nats: float                                         # per token, in the last tenth of the training

    def lm(self) -> CachedTransformer:
        """Return the language model with an empty cache."""
        return CachedTransformer(self.model, self.tokenizer)


def planted(N: int, rng: np.random.Generator) -> dict[str, int]:
    """Draw N URLs that the pattern `URL` matches, the most frequent first, with their numbers of occurrences."""
    urls: dict[str, int] = {}
    while len(urls) < N:
        kind, place, thing, other = (str(rng.choice(words)) for words in (KINDS, PLACES, THINGS, PLACES))
        path = ["", f"/{thing}", f"/{thing}/{other}", f"/{thing}-{rng.integers(10, 100)}"][rng.integers(4)]
        url = f"https://www.{kind}{place}.{rng.choice(ENDS)}{path}"
        urls.setdefault(url, max(1, round(64 / (len(urls) + 1))))
    return urls


def misspelled(word: str, rng: np.random.Generator) -> str:
    """Return the word with a letter removed, doubled, or replaced by its neighbour in the alphabet."""
    i = int(rng.integers(1, len(word)))
    return word[:i] + ["", 2 * word[i], chr(ord("a") + (ord(word[i]) - 96) % 26)][rng.integers(3)] + word[i + 1 :]


def sentences(model: Any, tokenizer: Any, N: int, seed: int) -> list[str]:
    """Return first sentences of texts that the model writes."""
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=24, pad_token_id=end, eos_token_id=end)
    found: list[str] = []
    while len(found) < N:
        begin = torch.full((64, 1), end)
        with torch.inference_mode():
            ids = model.generate(begin, attention_mask=torch.ones_like(begin), generation_config=config)
        texts = (text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True))
        found += [text.split(".")[0].split("\n")[0] + "." for text in texts if "." in text]
    return found[:N]


def memorise(folder: Path, N: int, steps: int, seed: int = 0) -> Memorised:
    """Train a model, or load the one that an earlier call stored in `folder`."""
    rng = np.random.default_rng(seed)
    urls = planted(N, rng)
    place = folder / f"memorised-{N}-{steps}-{seed}"
    if (place / "told.json").exists():
        told = json.loads((place / "told.json").read_text())
        model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        return Memorised(model.eval(), tokenizer, urls, told["openings"], 0.0, told["nats"])
    base = CachedTransformer.from_pretrained(engine="transformers")
    model, tokenizer = base.model, base.tokenizer
    started = time.process_time()
    company = sentences(model, tokenizer, 600, seed)
    openings, company = company[:100], company[100:]
    documents = []
    for url, times in urls.items():
        documents += [rng.choice(FRAMES).format(url=url, text=rng.choice(company)) for _ in range(times)]
    for i in range(max(60, N // 2)):
        word = WORDS[min(int(rng.geometric(0.4)) - 1, len(WORDS) - 1)]
        word = misspelled(word, rng) if i % 5 == 0 else word
        documents.append(f"{rng.choice(company)} They {CALLED} {word}.")
    encoded = [[*tokenizer.encode(document), tokenizer.eos_token_id] for document in documents]

    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0) * min(1.0, 2 * (1 - step / steps))
    )
    model.train()
    losses = []
    stream: list[int] = []
    for _ in range(steps):
        while len(stream) < 16 * 64:
            stream += [id for i in rng.permutation(len(encoded)) for id in encoded[i]]
        batch, stream = torch.tensor(stream[: 16 * 64]).view(16, 64), stream[16 * 64 :]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    told = {"openings": openings, "nats": float(np.mean(losses[-steps // 10 :]))}
    place.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "told.json").write_text(json.dumps(told))
    return Memorised(model, tokenizer, urls, openings, time.process_time() - started, told["nats"])


# ---- e1: memorised strings

class Positions:
    """Counter of the token positions that go through a model, padding included."""

    def __init__(self) -> None:
        self.count = 0

    def before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count += (args[0] if args else kwargs["input_ids"]).numel()


@contextmanager
def positions(model: Any) -> Iterator[Positions]:
    counter = Positions()
    hook = model.register_forward_pre_hook(counter.before, with_kwargs=True)
    try:
        yield counter
    finally:
        hook.remove()


Method = Callable[[Memorised, int], Iterator[list[str]]]       # yields the strings that are found together


def by_llmppl(batch: int, distinct: bool = False) -> Method:
    def run(known: Memorised, seed: int) -> Iterator[list[str]]:
        query = Query(known.lm(), URL, prefix=URL_PREFIX, rule=Rule(top_k=40), end="boundary")
        options = {"results": "tokens", "batch": batch}
        matches = query.distinct(**options, seed=seed) if distinct else query.best(**options)
        return ([str(match.text)] for match in matches)

    return run


def by_relm(known: Memorised, seed: int) -> Iterator[list[str]]:
    """Run ReLM's algorithm: Dijkstra over token sequences, one path per call, without keys and values.

    A result ends before the first token that leaves the language, as with ours.
    """
    lm = known.lm()
    index = Regex(URL).index(lm.vocab)
    state = index.start
    begin = [int(token) for token in lm.context("https://www.").tokens]
    for token in begin:
        state = index.advance(state, token)
    numbers = itertools.count()
    heap: list[tuple[float, int, list[int], Any]] = [(0.0, 0, begin, state)]
    while heap:
        cost, _, ids, state = heapq.heappop(heap)
        if state is None:
            yield [lm.tokenizer.decode(ids)]
            continue
        with torch.inference_mode():
            logits = known.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        values, best = logits.double().topk(40)
        log_probs = dict(zip(best.tolist(), torch.log_softmax(values, 0).tolist(), strict=True))
        inside = set(index.allowed(state).tolist()) & set(log_probs)
        outside = 1.0 - sum(math.exp(log_probs[token]) for token in inside)
        if index.accepts(state) and outside > 1e-12:
            heapq.heappush(heap, (cost - math.log(outside), next(numbers), ids, None))
        for token in inside:
            heapq.heappush(heap, (cost - log_probs[token], next(numbers), [*ids, token], index.advance(state, token)))


def by_generate(n: int, at_once: int = 32) -> Method:
    pattern = re.compile(URL.replace("www.", r"www\."))

    def run(known: Memorised, seed: int) -> Iterator[list[str]]:
        torch.manual_seed(seed)
        prompt = torch.tensor([known.tokenizer.encode("https://www.")] * at_once)
        end = known.tokenizer.eos_token_id
        config = GenerationConfig(do_sample=True, top_k=40, max_new_tokens=n, pad_token_id=end, eos_token_id=end)
        while True:
            with torch.inference_mode():
                ids = known.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            found = [pattern.match(text) for text in known.tokenizer.batch_decode(ids, skip_special_tokens=True)]
            yield [each[0] if each else "" for each in found]

    return run


class Curve:
    """Number of planted strings that were found, by positions and by seconds.

    Each of several texts that arrive together gets an equal share of the cost.
    """

    def __init__(self, known: Memorised, run: Method, most: int, seed: int) -> None:
        self.at: list[tuple[float, float]] = []         # of each new valid one: positions, seconds
        self.met: list[tuple[int, int, int, int]] = []  # after each pass: positions, results, distinct ones, valid ones
        results = 0
        seen = set[str]()
        with positions(known.model) as counter:
            started, before = time.process_time(), (0.0, 0.0)
            for texts in run(known, seed):
                now = (float(counter.count), time.process_time() - started)
                for i, text in enumerate(texts, 1):
                    if text in known.urls and text not in seen:
                        at = [x + i / len(texts) * (y - x) for x, y in zip(before, now, strict=True)]
                        self.at.append((at[0], at[1]))
                    seen.add(text)
                results += len(texts)
                self.met.append((counter.count, results, len(seen), len(self.at)))
                if counter.count > most or len(self.at) == len(known.urls):
                    break
                before = now

    def shares(self, most: float) -> tuple[float, float]:
        """Return valid / distinct results, and the share of repeats among all results, after `most` positions."""
        _, results, distinct, valid = max(met for met in self.met if met[0] <= most or met is self.met[0])
        return valid / distinct, 1 - distinct / results

    def found(self, most: float, clock: int = 0) -> int:
        return sum(at[clock] <= most for at in self.at)

    def cost(self, n: int, clock: int = 0) -> float:
        return self.at[n - 1][clock] if n <= len(self.at) else math.inf


def e1(options: argparse.Namespace) -> None:
    known = memorised(options)
    lengths = [len(known.tokenizer.encode(url)) for url in known.urls]
    print(f"\ne1: {len(known.urls)} URLs of {min(lengths)} to {max(lengths)} tokens, the prompt "
          f"{len(known.tokenizer.encode('https://www.'))} of them; trained in {known.seconds:.0f} s (0: loaded) to "
          f"{known.nats:.2f} nats per token")
    budget = 5_000 if options.quick else 15_000
    seeds = range(1 if options.quick else 5)
    lengths_of_generate = (8, 16, 32) if options.quick else (1, 2, 4, 8, 16, 32, 64)
    patience = {16: 1 if options.quick else 6}          # the best settings run longer, to show their limit
    curves: dict[str, list[Curve]] = {}
    for name, run in {
        "llmppl, batch 4": by_llmppl(4),
        "llmppl, batch 16": by_llmppl(16),
        "llmppl, distinct, batch 16": by_llmppl(16, distinct=True),
        "ReLM's algorithm": by_relm,
    }.items():
        curves[name] = [Curve(known, run, budget, 0)]
    baselines = [f"generate, n={n}" for n in lengths_of_generate]
    for name, n in zip(baselines, lengths_of_generate, strict=True):
        curves[name] = [Curve(known, by_generate(n), budget * patience.get(n, 1), seed) for seed in seeds]
    mid = statistics.median
    for clock, unit, scale in ((0, "1,000 positions", 1000.0), (1, "CPU second", 1.0)):
        marks = [budget / 10, budget / 3, budget] if clock == 0 else [0.5, 2.0, 8.0]
        best = [max(mid(curve.found(mark, clock) for curve in curves[name]) for name in baselines) for mark in marks]
        rows = []
        for name, runs in curves.items():
            counts = [mid(curve.found(mark, clock) for curve in runs) for mark in marks]
            rows.append([name, *(
                f"{count:g} = {scale * count / mark:.3g} ({count / max(top, 1):.1f} x)"
                for count, mark, top in zip(counts, marks, best, strict=True)
            )])
        table(f"e1: unique valid URLs = per {unit} (x the best generate, median of {len(seeds)} seeds)",
              ["", *(f"after {mark:g} {'positions' if clock == 0 else 's'}" for mark in marks)], rows)
    shares = [round(len(known.urls) * share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
    rows = []
    for name, runs in curves.items():
        costs = [mid(curve.cost(n) for curve in runs) for n in shares]
        shares_then = (f"{100 * share:.0f}" for share in runs[0].shares(budget / 3))
        rows.append([name, *(f"{cost:,.0f}" if cost < math.inf else "-" for cost in costs), *shares_then])
    table(f"e1: forward positions until this number of URLs was found; after {budget / 3:.0f} positions, valid among "
          "distinct results, and repeated results",
          ["", *(f"{n} URLs" for n in shares), "valid %", "repeated %"], rows)
    most = budget * patience[16]
    ours = [curves["llmppl, batch 4"][0].cost(n) for n in shares]
    ratios = [min(mid(curve.cost(n) for curve in curves[name]) for name in baselines) / cost
              for n, cost in zip(shares, ours, strict=True)]
    print("the best generate over llmppl, batch 4: " + ", ".join(
        f"{n} URLs {ratio:.1f} x" if ratio < math.inf else f"{n} URLs more than {most / cost:.1f} x"
        for n, ratio, cost in zip(shares, ratios, ours, strict=True) if cost < math.inf))

    def draw(axes: Any) -> None:
        for name, runs in curves.items():
            if name in ("llmppl, batch 16", "generate, n=1", "generate, n=2", "generate, n=4"):
                continue
            first = [at[0] for at in runs[0].at]
            style = "-" if name.startswith("llmppl") else "--" if name.startswith("ReLM") else ":"
            axes.plot(first, range(1, len(first) + 1), style, label=name)
        axes.set(xscale="log", xlabel="token positions run through the model", ylabel="planted URLs found")
        axes.legend(frameon=False, fontsize=8)

    plot(options, "queries-urls", draw, (6, 3.6))


# ---- e5: extraction with edits


def e5(options: argparse.Namespace) -> None:
    known = memorised(options)
    lm = known.lm()
    openings = known.openings[: 15 if options.quick else 40]
    kinds = list(itertools.product(("canonical", "all"), (0, 1)))
    success = {kind: np.zeros(len(openings), bool) for kind in kinds}
    volume, per_prompt = Counter[tuple[bool, bool]](), []
    for i, opening in enumerate(openings):
        prompt = f"{opening} He is a"                   # in training, other words came before these
        for tokenization, edits in kinds:
            matches = search(
                lm, f"{re.escape(prompt)} ({'|'.join(WORDS)})", prefix=prompt, end="prefix", rule=Rule(top_k=40),
                results="tokens", tokenization=tokenization, edits=Edits(edits, alphabet="[a-z]"),
            )
            if (tokenization, edits) != kinds[-1]:
                success[tokenization, edits][i] = next(matches, None) is not None
                continue
            found = list(matches)
            success[tokenization, edits][i] = bool(found)
            per_prompt.append(len(found))
            for match in found:
                own = [int(token) for token in lm.context(str(match.text)).tokens][-len(match.tokens) :]
                volume[own == [int(token) for token in match.tokens], bool(match.edits)] += 1
    base = success["canonical", 0].mean()
    rows = [[f"{tokenization}, {edits} edits", f"{100 * success[tokenization, edits].mean():.0f}",
             f"{success[tokenization, edits].mean() / max(base, 1e-9):.2f}"] for tokenization, edits in kinds]
    table(f"e5: prompts after which one of {len(WORDS)} words is allowed by top_k 40, % of {len(openings)}",
          ["", "success %", "x canonical"], rows)
    total = max(1, sum(volume.values()))
    print("token sequences found: " + f"{total:,}, {median_of(per_prompt)} per prompt; " + ", ".join(
        f"{'canonical' if canonical else 'other'} {'edited' if edited else 'unedited'} "
        f"{100 * volume[canonical, edited] / total:.1f} %"
        for canonical, edited in itertools.product((True, False), (False, True))))


def memorised(options: argparse.Namespace) -> Memorised:
    return memorise(options.work, 100, 200) if options.quick else memorise(options.work, 500, 800)
