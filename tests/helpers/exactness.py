"""Programs whose posterior is summed by hand, and the comparison of an algorithm with that sum."""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as cartesian
from typing import Any

import numpy as np

from helpers.common import repetitions
from helpers.tiny import add_up, log_prob_by_hand, log_probs_by_hand, spelled, texts_of, tiny_lm, tiny_model, tiny_vocab
from llmppl import (
    EOS,
    Bernoulli,
    CachedTransformer,
    Categorical,
    ConstrainedText,
    Geometric,
    Grammar,
    Infilling,
    JsonSchema,
    Model,
    PromptIntersection,
    Regex,
    Rule,
    Vocabulary,
    importance_sampling,
    mixture,
    product,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import logsumexp
from llmppl.models.lookahead import Lookahead, mean_next_token, rollout

V = 6
END = V - 1
A, B, C, SPACE, AB = range(5)
RUNS = repetitions(1000, 200)
ENOUGH = repetitions(20, 8)                              # how many of a quarter as many runs must reach a cell
CARRIERS = repetitions(30, 80)                          # how many runs must carry the weight of a cell


@dataclass(frozen=True)
class Case:
    model: Callable[[], Model]
    truth: Callable[[], dict[Any, float]]
    key: Callable[[Any], Any] = str


def no_doubles(text: str) -> bool:
    """Check that no character stands twice in a row."""
    return all(x != y for x, y in zip(text, text[1:], strict=False))


def no_doubles_mask(text: str) -> np.ndarray:
    """Return the tokens that make no double; the text may end only after an odd number of characters."""
    allowed = [no_doubles(text + token.decode()) for token in tiny_vocab(V).tokens]
    allowed[END] = len(text) % 2 == 1
    return np.array(allowed)


def constrained(odd: bool) -> dict[str, float]:
    lm = tiny_lm(V)
    return add_up(
        (spelled(ids), log_prob_by_hand(lm, [A], ids))
        for ids in texts_of(V, 4)
        if no_doubles(spelled(ids)) and not (odd and ids[-1] == END and len(spelled(ids)) % 2 == 0)
    )


def tempered_and_cut(before: list[int]) -> np.ndarray:
    """Return (V,) probabilities: to the power 1 / 1.5, then the four largest, then the fewest that reach 0.9."""
    weights = np.exp(log_probs_by_hand(tiny_lm(V), before) / 1.5)
    weights[np.argsort(weights)[: V - 4]] = 0.0
    probs = weights / weights.sum()
    kept, total = np.zeros(V), 0.0
    for i in np.argsort(-probs):
        if total < 0.9:
            kept[i] = probs[i]
        total += probs[i]
    return kept / kept.sum()


def bounded() -> dict[str, float]:
    pairs = []
    for ids in texts_of(V, 4):
        if len(ids) < 3 and ids[-1] == END:             # EOS before two tokens
            continue
        prob = math.prod(tempered_and_cut([B, *ids[:i]])[ids[i]] for i in range(len(ids)))
        if prob:
            pairs.append((spelled(ids), math.log(prob)))
    return add_up(pairs)


class Where(Model):
    """Texts without doubles after "b", by `where`; `propose(p)` is the proposal of the tokens, if any."""

    def __init__(self, propose: Callable[["Where", Any], Any]) -> None:
        super().__init__()
        self.context = tiny_lm(V).context("b")
        self.propose = propose
        self.coins = 0

    def fits(self, token: Any) -> bool:
        return token == EOS or no_doubles(self.s + token)

    def step(self) -> None:
        p = self.transformer(self.context)
        token = self.propose(self, p)
        if token == EOS:
            self.finish()
            return
        self.s += token
        self.context += token
        if len(self.context) == 4:
            self.finish()


def where_alone(self: Where, p: Any) -> Any:
    return self.sample(p.where(self.fits))


def where_of_another(self: Where, p: Any) -> Any:
    return self.sample(p, proposal=p.tempered(1.5).where(self.fits))


def where_with_a_mask(self: Where, p: Any) -> Any:
    return self.sample(p, proposal=p.masked(np.arange(V) != AB).where(self.fits))


def where_second(self: Where, p: Any) -> Any:
    """Build a program that first draws a coin from a wrong proposal."""
    self.coins += self.sample(Bernoulli(0.3), proposal=Bernoulli(0.6))
    return self.sample(p, proposal=p.where(self.fits))


def without_doubles(tokens: tuple[int, ...] = tuple(range(V))) -> dict[str, float]:
    return add_up(
        (spelled(ids), log_prob_by_hand(tiny_lm(V), [B], ids))
        for ids in texts_of(V, 3)
        if no_doubles(spelled(ids)) and set(ids) <= set(tokens)
    )


def with_coins() -> dict[tuple[int, str], float]:
    pairs = []
    for ids in texts_of(V, 3):
        if no_doubles(spelled(ids)):
            log_p, n = log_prob_by_hand(tiny_lm(V), [B], ids), len(ids)
            pairs += [((k, spelled(ids)), log_p + math.log(math.comb(n, k) * 0.3**k * 0.7 ** (n - k)))
                      for k in range(n + 1)]  # fmt: skip
    return add_up(pairs)


def geometric(n: int, p: float, most: int) -> float:
    return p * (1 - p) ** n / sum(p * (1 - p) ** k for k in range(most + 1))


def infilled(prior: bool, eos: bool) -> dict[str, float]:
    """Build "a" hole "b" hole "c" (then EOS), with holes of 0 to 2 tokens."""
    lm, pairs = tiny_lm(V), []
    holes = [ids for n in range(3) for ids in cartesian(range(V - 1), repeat=n)]
    for first, second in cartesian(holes, repeat=2):
        rest = [*first, B, *second, C]
        log_weight = log_prob_by_hand(lm, [A], [*rest, END] if eos else rest)
        if prior:
            log_weight += sum(math.log(geometric(len(hole), 0.6, 2)) for hole in (first, second))
        pairs.append((spelled([A, *rest]), log_weight))
    return add_up(pairs)


def infilled_by_rule() -> dict[str, float]:
    """Build "ab" hole "aa" hole "a ", holes of 0 or 1 token, every token under the rule of `tempered_and_cut`."""
    pairs, holes = [], [(), *cartesian(range(V - 1), repeat=1)]
    fragments = [[A, A], [A, SPACE]]
    for both in cartesian(holes, repeat=2):
        rest = [id for hole, fragment in zip(both, fragments, strict=True) for id in (*hole, *fragment)]
        prob = math.prod(tempered_and_cut([AB, *rest[:i]])[id] for i, id in enumerate(rest))
        if prob:
            pairs.append((spelled([AB, *rest]), math.log(prob)))
    return add_up(pairs)


def intersected() -> dict[str, float]:
    """Build the product after "a", after "b" and after "c a", up to the first "c" or four tokens."""
    texts = {ids for ids in texts_of(V, 4) if C not in ids[:-1]}
    texts |= {(*ids, C) for n in range(4) for ids in cartesian([A, B, SPACE, AB], repeat=n)}
    prompts = [A], [B], [C, SPACE, A]
    return add_up((spelled(ids), sum(log_prob_by_hand(tiny_lm(V), p, ids) for p in prompts)) for ids in texts)


class Experts(Model):
    """Two tokens drawn by experts after "a" and after "b", as in docs/critics.md."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts = [tiny_lm(V).context(prompt) for prompt in "ab"]
        self.logs = np.log([0.3, 0.7])

    def step(self) -> None:
        token = self.draw(*map(self.transformer, self.contexts))
        self.s += token
        self.contexts = [context + token for context in self.contexts]
        if token.is_eos or len(self.contexts[0]) == 3:
            self.finish()


class Powers(Experts):
    """The target p(text)^1.5 q(text)^-0.5."""

    def draw(self, p: Any, q: Any) -> Any:
        token = self.sample(p, proposal=product(p, q, powers=[1.5, -0.5]))
        self.score(0.5 * p.log_prob(token) - 0.5 * q.log_prob(token))
        return token


class Mixture(Experts):
    """The target 0.3 p(text) + 0.7 q(text)."""

    def draw(self, p: Any, q: Any) -> Any:
        token = self.sample(mixture([p, q], np.exp(self.logs - logsumexp(self.logs))))
        self.logs = self.logs + [p.log_prob(token), q.log_prob(token)]
        return token


def of_experts(log_weight: Callable[[float, float], float]) -> dict[str, float]:
    pairs = ((ids, *(log_prob_by_hand(tiny_lm(V), [prompt], ids) for prompt in (A, B))) for ids in texts_of(V, 2))
    return add_up((spelled(ids), log_weight(p, q)) for ids, p, q in pairs)


class Soft(Model):
    """Text weighed after every token: an even number of "a" so far is e times better than an odd one."""

    def __init__(self) -> None:
        super().__init__()
        self.context = tiny_lm(V).context("b")
        self.left = 4

    def step(self) -> None:
        token = self.sample(self.transformer(self.context))
        if token == EOS:
            self.finish()
            return
        self.s += token
        self.context += token
        self.left -= 1
        self.score(0.5 if self.s.count("a") % 2 == 0 else -0.5)
        if not self.left:
            self.finish()


def soft() -> dict[str, float]:
    pairs = []
    for ids in texts_of(V, 4):
        log_weight = log_prob_by_hand(tiny_lm(V), [B], ids)
        for i in range(1, 5):
            if len(ids) >= i and ids[i - 1] != END:
                log_weight += 0.5 if spelled(ids[:i]).count("a") % 2 == 0 else -0.5
        pairs.append((spelled(ids), log_weight))
    return add_up(pairs)


class Twisted(Model):
    """Five tokens, "c" among the last two; a twist keeps promising texts, once as the sum of two twists."""

    def __init__(self) -> None:
        super().__init__()
        self.context = tiny_lm(V).context("c")

    def step(self) -> None:
        dist = self.transformer(self.context)
        token = self.sample(dist, proposal=dist.masked(dist.support.token(END) != np.arange(V)))
        self.s += token
        self.context += token
        self.twist(0.9 * self.s.count("c"))
        if len(self.context) < 4:
            self.twist(-0.7 * self.s.count("b"))
        if len(self.context) == 6:
            self.condition("c" in self.s[-2:])
            self.finish()


def twisted() -> dict[str, float]:
    lm = tiny_lm(V)
    texts = cartesian(range(V - 1), repeat=5)
    return add_up((spelled(ids), log_prob_by_hand(lm, [C], ids)) for ids in texts if "c" in spelled(ids)[-2:])


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


class Branching(Model):
    """A topic, drawn from a wrong proposal, chooses the prompt; on one topic a coin requires that "c" comes next."""

    def __init__(self) -> None:
        super().__init__()
        lm = tiny_lm(V)
        self.prompts = {"calm": lm.context("a"), "loud": lm.context("bb")}
        self.topic: str | None = None
        self.flips = ""

    def step(self) -> None:
        if self.topic is None:
            self.topic = self.sample(Categorical({"calm": 0.3, "loud": 0.7}), Categorical({"loud": 0.4, "calm": 0.6}))
            self.context = self.prompts[self.topic]
            return
        dist = self.transformer(self.context)
        if self.topic == "loud" and self.sample(Bernoulli(0.4)):
            self.flips += "!"
            token = dist.support[C]
            self.observe(dist, token)
        else:
            self.flips += "."
            token = self.sample(dist)
        if token == EOS:
            self.finish()
            return
        self.s += token
        self.context += token
        if len(self.flips) == 3:
            self.finish()


def branching() -> dict[tuple[str, str, str], float]:
    lm, pairs = tiny_lm(V), []
    for ids in texts_of(V, 3):
        log_p = log_prob_by_hand(lm, [A], ids)
        pairs.append((("calm", "." * len(ids), spelled(ids)), math.log(0.3) + log_p))
        log_p = log_prob_by_hand(lm, [B, B], ids)
        for flips in cartesian("!.", repeat=len(ids)):
            if all(i == C for i, flip in zip(ids, flips, strict=True) if flip == "!"):
                log_flips = sum(math.log(0.4 if flip == "!" else 0.6) for flip in flips)
                pairs.append((("loud", "".join(flips), spelled(ids)), math.log(0.7) + log_flips + log_p))
    return add_up(pairs)


def spans(most: int, ends: Callable[[str], bool], must_end: bool = False) -> list[tuple[tuple[int, ...], str]]:
    """Return token ids with EOS and cause of the end of every span; with `must_end`, EOS may be one token more."""
    found = []
    for n in range(1, most + 1 + must_end):
        for ids in cartesian(range(V), repeat=n):
            if END in ids[:-1] or any(ends(spelled(ids[:i])) for i in range(1, n)):
                continue
            if ids[-1] == END:
                found.append((ids, "eos"))
            elif n <= most and ends(spelled(ids)):
                found.append((ids, "until"))
            elif n == most and not must_end:
                found.append((ids, "max_tokens"))
    return found


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


def words() -> dict[tuple[tuple[str, ...], str], float]:
    lm, pairs = tiny_lm(V), []
    for first, ended in spans(2, lambda text: " " in text):
        for second, ended_then in [((), "")] if ended == "eos" else spans(2, lambda text: " " in text):
            long = (len(spelled(first)) > 1) + (len(spelled(second)) > 1)
            key = tuple(filter(None, (ended, ended_then))), spelled(first + second)
            pairs.append((key, log_prob_by_hand(lm, [A], [*first, *second]) + 0.6 * long))
    return add_up(pairs)


class Filled(Model):
    """After "c": a span up to "b" that is not the end, then one of a*(b|c) within three tokens, then "c" follows."""

    def step(self) -> None:
        span = self.extend(tiny_lm(V).context("c"), until="b", max_tokens=2)
        self.condition(span.ended != "eos")
        value = self.extend(span.context, constraint=Regex("a*(b|c)"), max_tokens=3)
        self.observe(self.transformer(value.context), C)
        self.s += f"{span.text}|{value.text}"
        self.finish()


def filled() -> dict[str, float]:
    lm, pairs = tiny_lm(V), []
    values = [ids for n in (1, 2, 3) for ids in cartesian(range(END), repeat=n)]
    values = [ids for ids in values if re.fullmatch("a*(b|c)", spelled(ids))]
    for first, ended in spans(2, lambda text: "b" in text):
        if ended != "eos":
            pairs += [(f"{spelled(first)}|{spelled(ids)}", log_prob_by_hand(lm, [C], [*first, *ids, C]))
                      for ids in values]  # fmt: skip
    return add_up(pairs)


class UntilInRegex(Model):
    """After "b": up to "c" in the language (a|ab|ca)*, in which the text may end; cut after three tokens or not."""

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete, self.regex = complete, Regex("(a|ab|ca)*")

    def step(self) -> None:
        start = tiny_lm(V).context("b")
        span = self.extend(start, until="c", constraint=self.regex, max_tokens=3, complete=self.complete)
        self.s += f"{span.text} {span.ended}"
        self.finish()


def until_in_regex(complete: bool) -> dict[str, float]:
    def ends(text: str) -> bool:
        return "c" in text and re.fullmatch("(a|ab|ca)*", text) is not None

    pairs = []
    for ids, ended in spans(3, ends, must_end=complete):
        more = [""] if ended == "eos" else ["", "a"]
        if any(re.fullmatch("(a|ab|ca)*", spelled(ids) + end) for end in more):
            pairs.append((f"{spelled(ids)} {ended}", log_prob_by_hand(tiny_lm(V), [B], ids)))
    return add_up(pairs)


class Ruled(Model):
    """After "b": no doubles, up to "c", tempered and cut."""

    def step(self) -> None:
        rule = Rule(1.5, 4, 0.9)
        span = self.extend(
            tiny_lm(V).context("b"), until=lambda text: text[-1] == "c", constraint=no_doubles, max_tokens=3, rule=rule
        )
        self.s += span.text
        self.finish()


def ruled() -> dict[str, float]:
    pairs = []
    for ids, _ in spans(3, lambda text: text[-1] == "c"):
        prob = math.prod(tempered_and_cut([B, *ids[:i]])[ids[i]] for i in range(len(ids)))
        if prob and no_doubles(spelled(ids)):
            pairs.append((spelled(ids), math.log(prob)))
    return add_up(pairs)


def matched(fits: Callable[[str, bool], bool], most: int, must_end: bool) -> dict[str, float]:
    """Return the texts after "a" such that `fits(text, EOS follows)`, with their probabilities."""
    texts = (ids for ids in texts_of(V, most + must_end) if ids[-1] == END or not must_end)
    return add_up(
        (spelled(ids), log_prob_by_hand(tiny_lm(V), [A], ids)) for ids in texts if fits(spelled(ids), ids[-1] == END)
    )


def in_regex(text: str, complete: bool) -> bool:
    """Check that (ab|b)*c? matches, or matches after one more "b"."""
    return any(re.fullmatch("(ab|b)*c?", text + more) for more in ([""] if complete else ["", "b"]))


def in_grammar(text: str, complete: bool) -> bool:
    """Check that the text is a^n c b^n, or begins one."""
    found = re.fullmatch("(a*)(c?)(b*)", text)
    if found is None or (found[3] and not found[2]):
        return False
    n, m = len(found[1]), len(found[3])
    return bool(found[2]) and n == m if complete else n >= m


@functools.cache
def json_lm() -> CachedTransformer:
    """Return the tiny transformer with tokens of JSON."""
    vocab = Vocabulary([b"[", b"]", b"1", b"2", b",", b"[1", b""], eos_ids=[6])
    return CachedTransformer(tiny_model(7), vocab)


JSON_PAIR = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}


def in_schema() -> dict[str, float]:
    """Sum over the arrays of at most two items, each 1 or 2, in at most five tokens, after "["."""
    lm, pairs = json_lm(), []
    for n in range(6):
        for ids in cartesian(range(6), repeat=n):
            text = b"".join(lm.vocab.tokens[i] for i in ids).decode()
            try:
                items = json.loads(text)
            except ValueError:
                continue
            if isinstance(items, list) and len(items) <= 2 and all(item in (1, 2) for item in items):
                pairs.append((text, log_prob_by_hand(lm, [0], [*ids, 6])))
    return add_up(pairs)


HOLES = {"lengths": Geometric(0.6, max_value=2)}
PROMPTS = ["a", "b", "c a"]
NESTED = 'start: "a" start "b" | "c"'
CASES = {
    "predicate": Case(lambda: ConstrainedText(tiny_lm(V), "a", no_doubles, max_tokens=4), lambda: constrained(False)),
    "mask": Case(
        lambda: ConstrainedText(tiny_lm(V), "a", mask=no_doubles_mask, max_tokens=4), lambda: constrained(True)
    ),
    "bounds": Case(
        lambda: ConstrainedText(tiny_lm(V), "b", min_tokens=2, max_tokens=4, rule=Rule(1.5, 4, 0.9)),
        bounded,
    ),
    "infilling": Case(lambda: Infilling(tiny_lm(V), ["a", "b", "c"], **HOLES), lambda: infilled(False, False)),
    "infilling with a prior and EOS": Case(
        lambda: Infilling(tiny_lm(V), "a[BLANK]b[BLANK]c", prior=True, end="eos", **HOLES), lambda: infilled(True, True)
    ),
    "infilling with a rule": Case(
        lambda: Infilling(tiny_lm(V), ["ab", "aa", "a "], lengths=Geometric(0.6, max_value=1), rule=Rule(1.5, 4, 0.9)),
        infilled_by_rule,
    ),
    "intersection, product": Case(
        lambda: PromptIntersection(tiny_lm(V), PROMPTS, until="c", max_tokens=4), intersected
    ),
    "intersection, first": Case(
        lambda: PromptIntersection(tiny_lm(V), PROMPTS, proposal="first", until="c", max_tokens=4), intersected
    ),
    "regex": Case(
        lambda: ConstrainedText(tiny_lm(V), "a", Regex("(ab|b)*c?"), max_tokens=4, complete=False, end="eos"),
        lambda: matched(in_regex, 4, False),
    ),
    "regex that must end": Case(
        lambda: ConstrainedText(tiny_lm(V), "a", Regex("(ab|b)*c?"), max_tokens=3, end="eos"),
        lambda: matched(in_regex, 3, True),
    ),
    "grammar": Case(
        lambda: ConstrainedText(tiny_lm(V), "a", Grammar(NESTED), max_tokens=4, complete=False, end="eos"),
        lambda: matched(in_grammar, 4, False),
    ),
    "JSON schema": Case(
        lambda: ConstrainedText(json_lm(), "[", JsonSchema(JSON_PAIR), max_tokens=5, end="eos"), in_schema
    ),
    "where, alone": Case(lambda: Where(where_alone), without_doubles),
    "where, of another distribution": Case(lambda: Where(where_of_another), without_doubles),
    "where, with a mask": Case(lambda: Where(where_with_a_mask), lambda: without_doubles((A, B, C, SPACE, END))),
    "where, second choice": Case(
        lambda: Where(where_second), with_coins, lambda particle: (particle.coins, str(particle))
    ),
    "experts, powers": Case(Powers, lambda: of_experts(lambda p, q: 1.5 * p - 0.5 * q)),
    "experts, mixture": Case(
        Mixture, lambda: of_experts(lambda p, q: math.log(0.3 * math.exp(p) + 0.7 * math.exp(q)))
    ),
    "soft": Case(Soft, soft),
    "twist": Case(Twisted, twisted),
    "twist by log mass": Case(InTime, lambda: matched(in_regex, 3, True)),
    "twist by a critic": Case(Criticised, lambda: constrained(False)),
    "twist by a rollout": Case(lambda: Criticised("greedy"), lambda: constrained(False)),
    "spans, one a step": Case(Words, words, lambda particle: (particle.ends, str(particle))),
    "spans, two in a step": Case(Filled, filled),
    "span up to a text, in a regex": Case(lambda: UntilInRegex(False), lambda: until_in_regex(False)),
    "span that must end, in a regex": Case(lambda: UntilInRegex(True), lambda: until_in_regex(True)),
    "span under a rule": Case(Ruled, ruled),
    "branching": Case(Branching, branching, lambda particle: (particle.topic, particle.flips, str(particle))),
}
ALGORITHMS = {
    "steer N=4 K=2 copies": lambda model, rng: smc_steer(model, 4, 2, rng=rng, expand="copies"),
    "steer N=4 K=2 merged": lambda model, rng: smc_steer(model, 4, 2, rng=rng, expand="merged"),
    "steer N=4 K=2 distinct": lambda model, rng: smc_steer(model, 4, 2, rng=rng, expand="distinct"),
    "importance N=4": lambda model, rng: importance_sampling(model, 4, rng=rng),
    "standard N=4, systematic": lambda model, rng: smc_standard(model, 4, rng=rng),
    "standard N=4, systematic always": lambda model, rng: smc_standard(model, 4, ess_threshold=1.0, rng=rng),
    "steer N=3 K=3 distinct": lambda model, rng: smc_steer(model, 3, 3, rng=rng, expand="distinct"),
    "steer N=3 K=3 copies": lambda model, rng: smc_steer(model, 3, 3, rng=rng, expand="copies"),
}


@functools.cache
def truth_of(name: str) -> dict[Any, float]:
    """Return the unnormalised posterior by hand; its sum is Z."""
    return CASES[name].truth()


def with_sums(cells: dict[Any, float]) -> Counter:
    """Add to the weights of the outcomes their sums by length, by last character, and over all."""
    sums = Counter(cells)
    for key, weight in cells.items():
        text = key if isinstance(key, str) else key[-1]
        for group in (f"length {len(text)}", f"end in {text[-1:]!r}", "Z"):
            sums[group] += weight
    return sums


def runs_of(case: Case, algorithm: Callable[[Model, np.random.Generator], Any], runs: int, seed: int) -> list[Counter]:
    """Return for each run the summed weights of its particles in each cell."""
    model, found = case.model(), []
    for rng in np.random.default_rng(seed).spawn(runs):
        cells: Counter = Counter()
        for particle in algorithm(model, rng):
            cells[case.key(particle)] += math.exp(particle.log_weight)
        found.append(with_sums(cells))
    return found


def check(
    name: str, algorithm: Callable[[Model, np.random.Generator], Any], seed: int, runs_of: Callable[..., Any] = runs_of
) -> None:
    truth = with_sums(truth_of(name))
    pilot = Counter(key for run in runs_of(CASES[name], algorithm, RUNS // 4, seed + 1) for key in run)
    tested = [key for key in truth if key == "Z" or (pilot[key] >= ENOUGH and truth[key] >= 0.01 * truth["Z"])]
    runs = runs_of(CASES[name], algorithm, RUNS, seed)
    impossible = {key for run in runs for key in run} - truth.keys()
    assert not impossible
    found = np.array([[run[key] for key in tested] for run in runs])
    means, errors = found.mean(axis=0), found.std(axis=0, ddof=1) / math.sqrt(RUNS)
    carriers = found.sum(axis=0) ** 2 / (found**2).sum(axis=0)      # the mean of few runs is not normal
    off = [
        f"{key!r}: {mean:.5g} +- {error:.2g}, not {truth[key]:.5g}"
        for key, mean, error, number in zip(tested, means, errors, carriers, strict=True)
        if number >= CARRIERS and not abs(mean - truth[key]) <= 4.5 * error + 1e-9 * truth["Z"]
    ]
    assert not off, "\n".join(off)
    assert len(tested) > 3
