"""Choice among given texts: the exact probability of each under a language model, over all its tokenisations."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.values import constraint_of
from llmppl.distributions import NO_RULE, DecisionRule, Floats
from llmppl.lm import ENDS, CachedTransformer, Context, End
from llmppl.models.programs import as_context
from llmppl.queries.best_first import Node, Space, Start, spelling
from llmppl.queries.compile import compile_query
from llmppl.queries.query import warn_of_seam
from llmppl.report.probabilities import Probabilities, Share
from llmppl.report.tables import TableView, one_line
from llmppl.support import arguments

Options = Iterable[str] | Mapping[Any, str] | type
FLOOR = -30.0                                           # log-probability of an impossible token, in the likely order
ROUND = 8                                               # nodes of an option that are expanded together
TINY = 1e-300
MAX_OPTIONS = 1000                                      # of a type
SELDOM = 0.01                                           # a smaller mass is said in the repr


class HowToChoose(TypedDict, total=False):
    end: End
    rule: DecisionRule
    tolerance: float
    max_expansions: int


class Choice(Probabilities):
    """Distribution over options, given that the model writes one of them.

    texts : dict of the text of each option
    log_mass : float
        Log-probability that the model writes one of the options, and ends there.

    Examples
    --------
    >>> choice = choose(lm, "He was", [" happy", " sad"])
    >>> choice.best, f"{choice[' happy']:.2f}"
    (' happy', '0.61')
    >>> f"{math.exp(choice.log_mass):.4f}"                              # that the model writes one of them
    '0.0061'
    """

    def __init__(self, totals: Mapping[Any, tuple[float, float]], texts: Mapping[Any, str]) -> None:
        self.texts = dict(texts)
        lower, upper = np.array([*totals.values()]).reshape(-1, 2).T      # (n,) log-probabilities
        self.log_mass = float(np.logaddexp.reduce(lower))
        scale = float(np.max(upper))
        low, high = np.exp(lower - scale), np.exp(upper - scale)
        others_low, others_high = low.sum() - low, high.sum() - high
        p = low / low.sum() if low.any() else high / high.sum()      # the bounds are all that is known
        bounds = low / np.maximum(low + others_high, TINY), high / np.maximum(high + others_low, TINY)
        shares = [Share(option, *map(float, each)) for option, *each in zip(totals, p, *bounds, strict=True)]
        mass = math.exp(self.log_mass)
        seldom = f": the model writes one of these with probability {mass:.2g} only" * (mass < SELDOM)
        super().__init__(shares, f"Choice({len(shares)} options){seldom}")


class Choices(TableView, list[Choice]):
    """Choices after several prompts, as a table with a row for each prompt and a column for each option."""

    def __init__(self, choices: Iterable[Choice], prompts: Iterable[Context]) -> None:
        super().__init__(choices)
        self.prompts = [str(prompt.text) for prompt in prompts]

    def _header(self) -> str:
        return f"{len(self)} choices"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        options = [*self[0].texts] if self else []
        rows = [[*(str(choice.share(each)) for each in options), one_line(prompt)]
                for prompt, choice in zip(self.prompts, self, strict=True)]  # fmt: skip
        return [*map(one_line, options), "prompt"], rows


@overload
def choose(lm: CachedTransformer, prompt: str | Context, options: Options, **how: Unpack[HowToChoose]) -> Choice: ...
@overload
def choose(
    lm: CachedTransformer, prompt: list[str] | list[Context], options: Options, **how: Unpack[HowToChoose]
) -> Choices: ...


def choose(
    lm: CachedTransformer, prompt: Any, options: Options, *, end: End = "boundary", rule: DecisionRule = NO_RULE,
    tolerance: float = 1e-3, max_expansions: int = 200,
) -> Choice | Choices:  # fmt: skip
    """Compute the probability of each of some texts after a prompt, given that the model writes one of them.

    The probability of a text is the sum over all token sequences that spell it.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str, Context, or a list of these, which shares batches and gives a table, `Choices`
    options : list of str, dict, or type
        The texts, with the blank that they begin with: [" yes", " no"]. A dict maps each label to its text. A type is a
        bool, an Enum or a Literal, whose labels are its values.
    end : str
        Event that ends an option: "boundary" (the next token leaves the options), "eos", or "prefix" (anything may
        follow, so no option may begin another).
    rule : Rule, or another function from a distribution to one over the same tokens
    tolerance : float
        Stop summing the token sequences of an option when the rest is at most this share of the sum.
    max_expansions : int
        Largest number of next-token distributions for an option. If it is reached, bounds contain the probability.

    Returns
    -------
    Choice
        A mapping from option to probability. ValueError if no option has a positive probability.

    Examples
    --------
    >>> choose(lm, "He was", [" happy", " sad"]).best
    ' happy'
    """
    arguments.one_of("end", end, ENDS)
    arguments.function("rule", rule, "Rule(top_k=40)")
    arguments.number("tolerance", tolerance)
    arguments.count("max_expansions", max_expansions)
    texts = _texts(options)
    compiled = compile_query(DFA.from_strings(list(texts.values())))
    if end == "prefix" and compiled.continues():
        raise ValueError('with end="prefix" no option may begin another: take end="boundary" or end="eos"')
    several = isinstance(prompt, list | tuple)
    contexts = [as_context(lm, each) for each in (prompt if several else [prompt])]
    for each in prompt if several else [prompt]:
        if isinstance(each, str):
            warn_of_seam(lm, each, texts.values())
    space = Space(lm, compiled, rule, end)
    starts = [Start("", context, 0.0, compiled.parts[0]) for context in contexts]
    sums = [[_Sum(space, start, text) for text in texts.values()] for start in starts]
    while unsure := [each for row in sums for each in _unsure(row, tolerance, max_expansions)]:
        nodes = [each.pop() for each in unsure]
        rows = iter(space.log_probs([*itertools.chain(*nodes)]))
        for each, popped in zip(unsure, nodes, strict=True):
            each.expand([(node, next(rows)) for node in popped])
    choices = []
    for row in sums:
        if max(each.upper for each in row) == -math.inf:
            after = str(row[0].start.context.text)[-40:]
            raise ValueError(f"no option has a positive probability after {after!r} under {rule!r}")
        totals = {option: (each.found, each.upper) for option, each in zip(texts, row, strict=True)}
        choices.append(Choice(totals, texts))
    return Choices(choices, contexts) if several else choices[0]


class _Sum:
    """Sum of the probabilities of all token sequences that spell a text: an A* search of the largest ones.

    The likely probability of the rest of a text after `n` of its bytes is that of the tokenizer's own tokens. It
    decides the order of the search, and nothing else.

    found : float, log of the sum so far
    left : float, log of the probability of all sequences that were not summed, at most
    """

    def __init__(self, space: Space, start: Start, text: str) -> None:
        self.space, self.start, self.data = space, start, text.encode()
        own = (start.context + text).tokens[len(start.context) :]
        contexts = [*itertools.accumulate(own, operator.add, initial=start.context)]
        contexts[-1].log_prob_since(start.context)      # one pass computes the distributions
        steps = [max(each.next_token().log_prob(token), FLOOR) for each, token in zip(contexts, own, strict=False)]
        self.ends = np.cumsum([0, *(len(token.bytes) for token in own)])
        self.log_probs = np.cumsum([0.0, *steps])
        self.found, self.left, self.expansions = -math.inf, 0.0, 0
        self._heap = [(0.0, 0, space.root(start))]
        self._numbers = itertools.count(1)

    @property
    def upper(self) -> float:
        """Return the log of the largest value that the sum can have."""
        return float(np.logaddexp(self.found, self.left))

    def pop(self) -> list[Node]:
        """Take the nodes that are expanded next."""
        return [heapq.heappop(self._heap)[2] for _ in range(min(ROUND, len(self._heap)))]

    def expand(self, rows: Iterable[tuple[Node, Floats]]) -> None:
        """Add the ends of the text to the sum, and the children of the other nodes to the search."""
        for node, log_probs in rows:
            self.expansions += 1
            if node.data == self.data:
                self._add(node.log_prob + self.space.ending(node, log_probs))
                continue
            for token in spelling(self.space, self.data[len(node.data) :]):
                if log_probs[token] > -math.inf:
                    child = self.space.child(node, token, float(log_probs[token]))
                    if child.data == self.data and self.space.end == "prefix":
                        self._add(child.log_prob)
                        continue
                    likely = child.log_prob - np.interp(len(child.data), self.ends, self.log_probs)
                    heapq.heappush(self._heap, (-float(likely), next(self._numbers), child))
        self.left = float(np.logaddexp.reduce([node.log_prob for _, _, node in self._heap], initial=-math.inf))

    def _add(self, log_prob: float) -> None:
        self.found = float(np.logaddexp(self.found, log_prob))


def _unsure(sums: Sequence[_Sum], tolerance: float, max_expansions: int) -> list[_Sum]:
    """Return the sums of one prompt whose rest can still matter."""
    share = math.log(tolerance / len(sums)) if tolerance else -math.inf
    matters = share + np.logaddexp.reduce([each.found for each in sums])
    return [each for each in sums if each.left > matters and each.expansions < max_expansions]


def _texts(options: Options) -> dict[Any, str]:
    """Return the text of each option."""
    if arguments.is_type(options):
        language = constraint_of(options)
        found = [*itertools.islice(language.enumerate(), MAX_OPTIONS + 1)] if isinstance(language, DFA) else []
        if not 0 < len(found) <= MAX_OPTIONS:
            takes = "a list of str, a dict, or a type with few values, such as bool, an Enum or a Literal"
            raise TypeError(f"options must be {takes}, not {arguments.shown(options)}")
        return {language.parse(text): text for text in found}
    if isinstance(options, str) or not isinstance(options, Iterable):
        raise TypeError(f'options must be a list of str, as [" yes", " no"], not {arguments.shown(options)}')
    pairs = [*options.items()] if isinstance(options, Mapping) else [(text, text) for text in options]
    if not pairs:
        raise ValueError("options must have at least one text")
    texts = {label: arguments.text("each of options", text) for label, text in pairs}
    if len(set(texts.values())) < len(pairs):
        raise ValueError(f"options must differ: {arguments.shown(options)}")
    return texts
