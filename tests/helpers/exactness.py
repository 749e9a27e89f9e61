"""Programs whose posterior is summed by hand, and the comparison of an algorithm with that sum."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from itertools import product as cartesian
from typing import Any

import numpy as np

from helpers.common import repetitions
from helpers.tiny import add_up, log_prob_by_hand, log_probs_by_hand, spelled, texts_of, tiny_lm, tiny_vocab
from llmppl import (
    EOS,
    Bernoulli,
    Categorical,
    ConstrainedText,
    Geometric,
    Infilling,
    Model,
    PromptIntersection,
    Regex,
    Rule,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints import Pattern
from llmppl.models.lookahead import Lookahead, mean_next_token, rollout

V = 6
A, B, C, SPACE, AB, END = range(V)
RUNS = repetitions(400, 150)
ENOUGH = repetitions(12, 8)                             # how many of a quarter as many runs must reach a cell
CARRIERS = repetitions(30, 80)                          # how many runs must carry the weight of a cell
RULE = Rule(1.5, 4, 0.9)

Ids = tuple[int, ...]
Sums = dict[Any, float]                                 # unnormalised posterior: weight by outcome


@dataclass(frozen=True)
class Case:
    model: Callable[[], Model]
    truth: Callable[[], Sums]
    key: Callable[[Any], Any] = str


# ---- sums


def under_rule(before: list[int]) -> np.ndarray:
    """Return (V,) probabilities: to the power 1 / 1.5, then the four largest, then the fewest that reach 0.9."""
    weights = np.exp(log_probs_by_hand(tiny_lm(V), before) / 1.5)
    weights[np.argsort(weights)[: V - 4]] = 0.0
    probs = weights / weights.sum()
    order = np.argsort(-probs)
    kept = order[np.cumsum(probs[order]) - probs[order] < 0.9]
    return np.where(np.isin(np.arange(V), kept), probs, 0.0) / probs[kept].sum()


def log_prob(before: list[int], ids: Sequence[int], rule: bool = False) -> float:
    if not rule:
        return log_prob_by_hand(tiny_lm(V), before, ids)
    with np.errstate(divide="ignore"):
        return float(np.log([under_rule([*before, *ids[:i]])[ids[i]] for i in range(len(ids))]).sum())


def summed(
    texts: Iterable[Ids],
    before: list[int],
    fits: Callable[[Ids], bool] = lambda ids: True,
    more: Callable[[Ids], float] = lambda ids: 0.0,
) -> Sums:
    """Return the probabilities of the texts that fit, each times exp(more)."""
    return add_up((spelled(ids), log_prob(before, ids) + more(ids)) for ids in texts if fits(ids))


def no_doubles(text: str) -> bool:
    """Check that no character stands twice in a row."""
    return re.search(r"(.)\1", text) is None


def single(ids: Ids) -> bool:
    return no_doubles(spelled(ids))


def in_regex(cut: bool) -> Sums:
    """Return the texts after "a" in (ab|b)*c? with at most three tokens and EOS; `cut`, also those begun by four."""

    def fits(ids: Ids) -> bool:
        pattern = "(ab|b)*c?" if ids[-1] == END else "(ab|b)*(c|a)?"
        return (cut or ids[-1] == END) and re.fullmatch(pattern, spelled(ids)) is not None

    return summed(FOUR, [A], fits)


def with_coins() -> Sums:
    """Return the texts without doubles, with the number of heads of one coin a token."""
    texts = [ids for ids in texts_of(V, 3) if single(ids)]
    heads = [(k, ids) for ids in texts for k in range(len(ids) + 1)]
    return add_up(
        ((k, spelled(ids)), log_prob([B], ids) + math.log(math.comb(len(ids), k) * 0.3**k * 0.7 ** (len(ids) - k)))
        for k, ids in heads
    )


def infilled(fragments: list[list[int]], most: int, prior: bool = False, end: Ids = (), rule: bool = False) -> Sums:
    """Return the fragments with a hole of 0 to `most` tokens before each but the first, then the end."""
    start, holes = fragments[0], [ids for n in range(most + 1) for ids in cartesian(range(END), repeat=n)]
    lengths = [0.6 * 0.4**n / (1 - 0.4 ** (most + 1)) for n in range(most + 1)]
    pairs = []
    for filled in cartesian(holes, repeat=len(fragments) - 1):
        rest = [i for part in zip(filled, fragments[1:], strict=True) for ids in part for i in ids]
        log_prior = prior * math.log(math.prod(lengths[len(hole)] for hole in filled))
        pairs.append((spelled([*start, *rest]), log_prior + log_prob(start, [*rest, *end], rule)))
    return add_up(pairs)


def intersected() -> Sums:
    """Return the product after "a", after "b" and after "c a", up to the first "c" or four tokens."""
    texts = {ids for ids in texts_of(V, 4) if C not in ids[:-1]}
    texts |= {(*ids, C) for n in range(4) for ids in cartesian([A, B, SPACE, AB], repeat=n)}
    return summed(texts, [A], more=lambda ids: log_prob([B], ids) + log_prob([C, SPACE, A], ids))


def branching() -> Sums:
    pairs = [(("calm", "." * len(ids), spelled(ids)), math.log(0.3) + log_prob([A], ids)) for ids in THREE]
    loud = [(ids, flips) for ids in THREE for flips in cartesian("!.", repeat=len(ids))]
    loud = [(ids, flips) for ids, flips in loud if set(compress(ids, map("!".__eq__, flips))) <= {C}]
    for ids, flips in loud:
        log_flips = math.log(0.7 * 0.4 ** flips.count("!") * 0.6 ** flips.count("."))
        pairs.append((("loud", "".join(flips), spelled(ids)), log_flips + log_prob([B, B], ids)))
    return add_up(pairs)


def spans(most: int, ends: Callable[[str], bool]) -> list[tuple[Ids, str]]:
    """Return the ids of every span with the cause of its end."""
    every = [ids for n in range(1, most + 1) for ids in cartesian(range(V), repeat=n)]
    going = [ids for ids in every if END not in ids[:-1] and not any(ends(spelled(ids[:i])) for i in range(len(ids)))]
    causes = ["eos" if ids[-1] == END else "until" if ends(spelled(ids)) else "max_tokens" for ids in going]
    return [(ids, why) for ids, why in zip(going, causes, strict=True) if why != "max_tokens" or len(ids) == most]


def words() -> Sums:
    def one(text: str) -> bool:
        return " " in text

    pairs = []
    for first, ended in spans(2, one):
        for second, then in [((), "")] if ended == "eos" else spans(2, one):
            long = sum(len(spelled(word)) > 1 for word in (first, second))
            key = tuple(filter(None, (ended, then))), spelled(first + second)
            pairs.append((key, log_prob([A], first + second) + 0.6 * long))
    return add_up(pairs)


def filled() -> Sums:
    values = [ids for n in (1, 2, 3) for ids in cartesian(range(END), repeat=n)]
    values = [ids for ids in values if re.fullmatch("a*(b|c)", spelled(ids))]
    firsts = [ids for ids, ended in spans(2, lambda text: "b" in text) if ended != "eos"]
    return add_up((f"{spelled(a)}|{spelled(b)}", log_prob([C], (*a, *b, C))) for a in firsts for b in values)


# ---- programs


class Text(Model):
    """Text after a prompt, token by token, up to EOS or `most` tokens. A subclass draws the tokens and weighs them."""

    prompt, most = "b", 4

    def __init__(self) -> None:
        super().__init__()
        self.context = tiny_lm(V).context(self.prompt)
        self.start = len(self.context)

    def draw(self, p: Any) -> Any:
        return self.sample(p)

    def weigh(self) -> None:
        """Weigh the text so far."""

    def step(self) -> None:
        token = self.draw(self.transformer(self.context))
        if token == EOS:
            self.finish()
            return
        self.s += token
        self.context += token
        self.weigh()
        if len(self.context) - self.start == self.most:
            self.finish()


class Where(Text):
    """Texts without doubles, by `where` of another distribution."""

    most = 3

    def fits(self, token: Any) -> bool:
        return token == EOS or no_doubles(self.s + token)

    def draw(self, p: Any) -> Any:
        return self.sample(p, proposal=p.tempered(1.5).masked(np.arange(V) != AB).where(self.fits))


class WhereSecond(Where):
    """The same by `where` alone, after a coin from a wrong proposal."""

    coins = 0

    def draw(self, p: Any) -> Any:
        self.coins += self.sample(Bernoulli(0.3), proposal=Bernoulli(0.6))
        return self.sample(p.where(self.fits))


class Soft(Text):
    """Text weighed after every token: an even number of "a" so far is e times better than an odd one."""

    def weigh(self) -> None:
        self.score(0.5 - self.s.count("a") % 2)


class Twisted(Text):
    """Five tokens, "c" among the last two; a twist keeps promising texts, once as the sum of two twists."""

    prompt, most = "c", 5

    def draw(self, p: Any) -> Any:
        return self.sample(p, proposal=p.masked(np.arange(V) != END))

    def weigh(self) -> None:
        self.condition(len(self.context) < 6 or "c" in self.s[-2:])
        self.twist(0.9 * self.s.count("c"))
        if len(self.context) < 4:
            self.twist(-0.7 * self.s.count("b"))


class InTime(ConstrainedText):
    """A regex that must end within three tokens, with a twist by its probability under another distribution."""

    def __init__(self) -> None:
        super().__init__(tiny_lm(V), "a", Regex("(ab|b)*c?"), max_tokens=3, end="eos")
        self.ahead = Lookahead(self.index, mean_next_token(tiny_lm(V).context("c"), 30), 3, "eos")

    def step(self) -> None:
        super().step()
        if not self.finished:
            self.twist(self.ahead.log_mass(self.state, 3 - self.num_tokens))


class Criticised(ConstrainedText):
    """Texts without doubles and a critic that likes many letters, of the text or also of its possible continuation."""

    def __init__(self, ahead: str = "") -> None:
        super().__init__(tiny_lm(V), "a", no_doubles, max_tokens=4)
        self.ahead = ahead

    def step(self) -> None:
        super().step()
        if not self.finished:
            end = rollout(self.context, 2 if self.ahead else 0, self.rng if self.ahead == "drawn" else None)
            self.twist(0.8 * len(set(end.text)) - 1.5 * end.text.count("c"))


class Branching(Text):
    """A topic, drawn from a wrong proposal, chooses the prompt; on one topic a coin requires that "c" comes next."""

    topic, flips, most = "", "", 3

    def draw(self, p: Any) -> Any:
        is_c = self.topic == "loud" and self.sample(Bernoulli(0.4))
        self.flips += "!" if is_c else "."
        if not is_c:
            return self.sample(p)
        self.observe(p, p.support[C])
        return p.support[C]

    def step(self) -> None:
        if self.topic:
            super().step()
            return
        self.topic = self.sample(Categorical({"calm": 0.3, "loud": 0.7}), Categorical({"loud": 0.4, "calm": 0.6}))
        self.context = tiny_lm(V).context("a" if self.topic == "calm" else "bb")
        self.start = len(self.context)


class Words(Model):
    """Two words after "a", one a step, each of two tokens at most; more than one letter is better; EOS ends all."""

    def __init__(self) -> None:
        super().__init__()
        self.context = tiny_lm(V).context("a")
        self.ends: tuple[str, ...] = ()

    def step(self) -> None:
        span = self.extend(self.context, until=" ", max_tokens=2)
        self.s += span.text
        self.context = span.context
        self.ends += (span.ended,)
        self.score(0.6 * (len(span.text) > 1))
        if span.ended == "eos" or len(self.ends) == 2:
            self.finish()


class Filled(Model):
    """After "c": a span up to "b" that is not the end, then one of a*(b|c) within three tokens, then "c" follows."""

    def step(self) -> None:
        span = self.extend(tiny_lm(V).context("c"), until="b", max_tokens=2)
        self.condition(span.ended != "eos")
        value = self.extend(span.context, constraint=Regex("a*(b|c)"), max_tokens=3)
        self.observe(self.transformer(value.context), C)
        self.s += f"{span.text}|{value.text}"
        self.finish()


def no_doubles_mask(text: str) -> np.ndarray:
    """Return the tokens that make no double; the text may end only after an odd number of characters."""
    allowed = [no_doubles(text + token.decode()) for token in tiny_vocab(V).tokens]
    return np.array([*allowed[:END], len(text) % 2 == 1])


def constrained(prompt: str, constraint: Any = None, **options: Any) -> Callable[[], Model]:
    return lambda: ConstrainedText(tiny_lm(V), prompt, constraint, **{"max_tokens": 4, **options})


def infilling(fragments: Any, most: int = 2, **options: Any) -> Callable[[], Model]:
    return lambda: Infilling(tiny_lm(V), fragments, lengths=Geometric(0.6, max_value=most), **options)


def intersection(**options: Any) -> Callable[[], Model]:
    return lambda: PromptIntersection(tiny_lm(V), ["a", "b", "c a"], until="c", max_tokens=4, **options)


def by_pair(name: str) -> Callable[[Any], Any]:
    return lambda particle: (getattr(particle, name), str(particle))


# ---- the cases

REGEX, DOUBLES = Regex("(ab|b)*c?"), r"(.)(c|\1)*(?(1)b?|c)"
HOLES, RULED = [[A], [B], [C]], [[AB], [A, A], [A, SPACE]]
FOUR, THREE = (list(texts_of(V, n)) for n in (4, 3))


def singles() -> Sums:
    return summed(FOUR, [A], single)


CASES = {
    "predicate": Case(constrained("a", no_doubles), singles),
    "mask": Case(constrained("a", mask=no_doubles_mask),
                 lambda: summed(FOUR, [A], lambda ids: single(ids) and (ids[-1] != END or len(spelled(ids)) % 2))),
    "infilling": Case(infilling(["a", "b", "c"]), lambda: infilled(HOLES, 2)),
    "infilling with a prior and EOS": Case(infilling("a[BLANK]b[BLANK]c", 1, prior=True, end="eos"),
                                           lambda: infilled(HOLES, 1, prior=True, end=(END,))),
    "infilling with a rule": Case(infilling(["ab", "aa", "a "], 1, rule=RULE), lambda: infilled(RULED, 1, rule=True)),
    "intersection, product": Case(intersection(), intersected),
    "intersection, first": Case(intersection(proposal="first"), intersected),
    "regex, cut": Case(constrained("a", REGEX, complete=False, end="eos"), lambda: in_regex(cut=True)),
    "regex that must end": Case(constrained("a", REGEX, max_tokens=3, end="eos"), lambda: in_regex(cut=False)),
    "pattern, by rejection": Case(constrained("a", Pattern(DOUBLES), max_tokens=3, end="eos"), lambda: summed(
        FOUR, [A], lambda ids: ids[-1] == END and re.fullmatch(DOUBLES, spelled(ids)) is not None)),
    "where, of another distribution": Case(
        Where, lambda: summed(THREE, [B], lambda ids: single(ids) and AB not in ids)),
    "where, second choice": Case(WhereSecond, with_coins, by_pair("coins")),
    "soft": Case(Soft, lambda: summed(FOUR, [B], more=lambda ids: sum(
        0.5 - spelled(ids[:i]).count("a") % 2 for i in range(1, 5) if len(ids) >= i and ids[i - 1] != END))),
    "twist": Case(Twisted, lambda: summed(cartesian(range(END), repeat=5), [C], lambda ids: "c" in spelled(ids)[-2:])),
    "twist by log mass": Case(InTime, lambda: in_regex(cut=False)),
    "twist by a critic": Case(Criticised, singles),
    "twist by a rollout": Case(lambda: Criticised("greedy"), singles),
    "spans, one a step": Case(Words, words, by_pair("ends")),
    "spans, two in a step": Case(Filled, filled),
    "branching": Case(Branching, branching, lambda particle: (particle.topic, particle.flips, str(particle))),
}  # fmt: skip
ALGORITHMS = {
    "steer N=4 K=2 copies": functools.partial(smc_steer, N=4, K=2, expand="copies"),
    "steer N=4 K=2 merged": functools.partial(smc_steer, N=4, K=2, expand="merged"),
    "steer N=4 K=2 distinct": functools.partial(smc_steer, N=4, K=2, expand="distinct"),
    "importance N=4": functools.partial(importance_sampling, N=4),
    "standard N=4, systematic": functools.partial(smc_standard, N=4),
    "standard N=4, systematic always": functools.partial(smc_standard, N=4, ess_threshold=1.0),
    "steer N=3 K=3 distinct": functools.partial(smc_steer, N=3, K=3, expand="distinct"),
    "steer N=3 K=3 copies": functools.partial(smc_steer, N=3, K=3, expand="copies"),
}


@functools.cache
def truth_of(name: str) -> Sums:
    """Return the unnormalised posterior by hand; its sum is Z."""
    return CASES[name].truth()


def with_sums(cells: Sums) -> Counter:
    """Add to the weights of the outcomes their sums by length, by last character, and over all."""
    sums = Counter(cells)
    for key, weight in cells.items():
        text = key if isinstance(key, str) else key[-1]
        for group in (f"length {len(text)}", f"end in {text[-1:]!r}", "Z"):
            sums[group] += weight
    return sums


def cells_of(case: Case, particles: Iterable[Any]) -> Counter:
    """Return the summed weights of particles in each cell."""
    cells: Counter = Counter()
    for particle in particles:
        cells[case.key(particle)] += math.exp(particle.log_weight)
    return with_sums(cells)


def runs_of(case: Case, algorithm: Callable[..., Any], runs: int, seed: int) -> list[Counter]:
    """Return the cells of each run."""
    model = case.model()
    return [cells_of(case, algorithm(model, rng=rng)) for rng in np.random.default_rng(seed).spawn(runs)]


def check(
    name: str, algorithm: Callable[..., Any], seed: int, runs_of: Callable[..., Any] = runs_of,
    truth: Sums | None = None,
) -> None:  # fmt: skip
    """Compare the mean weight of each cell over many runs with the sum by hand, or with another `truth`."""
    truth = with_sums(truth_of(name) if truth is None else truth)
    pilot = Counter(key for run in runs_of(CASES[name], algorithm, RUNS // 4, seed + 1) for key in run)
    tested = [key for key in truth if key == "Z" or (pilot[key] >= ENOUGH and truth[key] >= 0.01 * truth["Z"])]
    runs = runs_of(CASES[name], algorithm, RUNS, seed)
    impossible = {key for run in runs for key in run} - truth.keys()
    assert not impossible
    found = np.array([[run[key] for key in tested] for run in runs])
    means, errors = found.mean(axis=0), found.std(axis=0, ddof=1) / math.sqrt(RUNS)
    carriers = found.sum(axis=0) ** 2 / (found**2).sum(axis=0)      # the mean of few runs is not normal
    apart = np.abs(found - np.median(found, axis=0))                # nor if few runs differ from most
    room = np.where(apart.sum(axis=0) ** 2 < CARRIERS * (apart**2).sum(axis=0) + 1e-300, 1e-3, 1e-9) * truth["Z"]
    off = [
        f"{key!r}: {mean:.5g} +- {error:.2g}, not {truth[key]:.5g}"
        for key, mean, error, number, most in zip(tested, means, errors, carriers, room, strict=True)
        if number >= CARRIERS and not abs(mean - truth[key]) <= 4.5 * error + most
    ]
    assert not off, "\n".join(off)
    assert len(tested) > 3
