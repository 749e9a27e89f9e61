"""Lookahead: twists from the probability of completions, and from rollouts.

The best twist of a particle is the log of the weight that its continuations will gain on average: every particle then
ends with the same weight. This module has two approximations, both used inside a step:

    self.twist(self.ahead.log_mass(self.state, left))           # ahead = Lookahead(index, dist, max_tokens)
    self.twist(critic(rollout(self.context, 8).text))

A twist does not change the target, so neither must be exact. It only has to rank particles better than their weights.
Sources: Lin, Chen & Liu (2013), "Lookahead strategies for sequential Monte Carlo", for pilots such as `rollout`;
Whiteley & Lee (2014), "Twisted particle filters", for the best twist.
"""

import math

import numpy as np

from llmppl.constraints.constraint import Index, State
from llmppl.constraints.masks import END, PrecomputedIndex
from llmppl.constraints.vocabulary import EOS
from llmppl.distributions import Floats
from llmppl.lm import ENDS, Context, End, TokenDistribution
from llmppl.support.arguments import count, generator, one_of
from llmppl.support.shared import Shared


class Lookahead(Shared):
    """Table of the probability that a text ends in time, complete, by the state of its automaton.

    Tokens are drawn independently from one distribution r, whatever the text is. Let V_n(s) be the probability that a
    text in state s continues with at most n tokens and ends, all as the automaton allows:

        V_n(s) = e(s) [s accepts] + sum_v r(v) V_{n-1}(s v),    V_{-1} = 0,

    where e(s) is the probability of the event that ends a text: a token that the automaton refuses in s, EOS, or 1.
    Copies of a particle share the table of all states and n.

    Parameters
    ----------
    index : Index
        The index of a Regex or a DFA, which has finitely many states; else TypeError.
    dist : TokenDistribution over the vocabulary of `index`
        The distribution r, such as `mean_next_token`. Tokens that r excludes count as impossible. ValueError if it
        never ends a text of the language within `max_tokens`.
    max_tokens : int
        Largest number of tokens that may be left, EOS not counted.
    end : "boundary", "prefix" or "eos"
        The event that ends a text, as in ConstrainedText.

    Examples
    --------
    >>> index = Regex(" [a-z ]+happy").index(lm.vocab)
    >>> ahead = Lookahead(index, lm.context("The cat was").next_token(), max_tokens=10)
    >>> [round(ahead.log_mass(index.start, left), 1) for left in (2, 5, 10)]
    [-9.9, -8.5, -7.7]
    """

    def __init__(
        self, index: Index, dist: TokenDistribution, max_tokens: int, end: End = "boundary"
    ) -> None:
        if not isinstance(index, Index) or not isinstance(dist, TokenDistribution):
            raise TypeError(
                "Lookahead wants an index, Regex(...).index(lm.vocab), and a distribution over tokens, such as "
                f"mean_next_token(context, 200), not {index!r} and {dist!r}"
            )
        if dist.support != index.vocab:
            raise ValueError(
                f"the distribution is over {dist.support}, and {index!r} over another vocabulary"
            )
        self.index = index
        self.max_tokens = count("max_tokens", max_tokens, least=0)
        one_of("end", end, ENDS)
        whole = index.build_all()
        if not isinstance(whole, PrecomputedIndex):
            raise TypeError(
                f"Lookahead wants finitely many states, those of a Regex or a DFA, not {index!r}"
            )
        self._row_of = {state: i for i, state in enumerate(whole.states)}
        self._table = _tabulate(whole, dist.log_probs(), _log_ends(whole, dist, end), max_tokens)
        if self._table[max_tokens, 0] == -math.inf:
            raise ValueError(
                f"{index!r}: the distribution gives probability 0 to every text of at most {max_tokens} tokens and "
                "its end; use larger max_tokens, or a distribution that gives every token some probability"
            )

    def log_mass(self, state: State, left: float) -> float:
        """Return log V_left(state), for an end within `left` more tokens, EOS not counted; 0.0 after EOS.

        It is -inf if that is impossible. A twist must be finite, so call `condition(False)` then. ValueError if `left`
        is not in 0 .. max_tokens.
        """
        num_left = count("left", left, least=0)
        if num_left > self.max_tokens:
            raise ValueError(
                f"left={left}: the table is for 0 to {self.max_tokens} tokens, its max_tokens"
            )
        return 0.0 if state is END else float(self._table[num_left, self._row_of[state]])

    def __repr__(self) -> str:
        return f"Lookahead({self.index!r}, max_tokens={self.max_tokens})"


def _log_ends(whole: PrecomputedIndex, dist: TokenDistribution, end: End) -> Floats:
    """Return (S,) log-probabilities of the event that ends a text in each state; -inf if none may end there."""
    log_ends = np.where(whole.accepting, 0.0 if end == "prefix" else dist.log_prob(EOS), -np.inf)
    if end == "boundary":
        probs = np.exp(dist.log_probs())
        with np.errstate(divide="ignore"):
            for i in np.flatnonzero(whole.accepting).tolist():
                log_ends[i] = np.log(np.delete(probs, whole.row(i)[0]).sum())
    return log_ends


def _tabulate(
    whole: PrecomputedIndex, log_probs: Floats, log_ends: Floats, max_tokens: int
) -> Floats:
    """Return (max_tokens + 1, S) log V_n(s), by value iteration over the rows of an index."""
    probs = np.exp(log_probs)
    sources = []
    targets = []
    weights = []
    for i in range(len(whole)):
        tokens, rows = whole.row(i)
        mass = np.bincount(
            rows, probs[tokens], minlength=1
        )  # tokens with the same next state are one step
        (ends,) = mass.nonzero()
        sources.append(np.full(len(ends), i))
        targets.append(ends)
        weights.append(np.log(mass[ends]))
    source, target, weight = map(np.concatenate, (sources, targets, weights))
    moving, begin = np.unique(source, return_index=True)  # sources are in order
    table = np.empty((max_tokens + 1, len(whole)))
    table[:] = log_ends
    for n in range(1, max_tokens + 1):
        steps = np.logaddexp.reduceat(weight + table[n - 1, target], begin)
        table[n, moving] = np.logaddexp(table[0, moving], steps)
    table.flags.writeable = False
    return table


def mean_next_token(context: Context, num_tokens: int, seed: int = 0) -> TokenDistribution:
    """Return the mean next-token distribution along `num_tokens` tokens drawn after `context`.

    A text that ends, or is as long as the model can read, starts again. The cost is `num_tokens` tokens of model work.
    """
    count("num_tokens", num_tokens)
    rng = generator(seed)
    at = context
    total = np.zeros(len(context.lm.vocab))
    for _ in range(num_tokens):
        dist = at.next_token()
        total += np.exp(dist.log_probs())
        token = dist.sample(rng)
        at = context if token == EOS or at.room == 0 else at + token
    with np.errstate(divide="ignore"):
        return TokenDistribution(context.lm.vocab, np.log(total / num_tokens))


def rollout(context: Context, max_tokens: int, rng: np.random.Generator | None = None) -> Context:
    """Return the context after up to `max_tokens` more tokens, each the likeliest, or drawn with `rng`; EOS ends it.

    Tokens in the prefix cache cost nothing: if a text followed its last rollout, the next one runs one token. Rollouts
    of several particles share their forward passes. In a step, draw with `self.rng`.
    """
    count("max_tokens", max_tokens, least=0)
    for _ in range(max_tokens):
        dist = context.next_token()
        token = dist.support[int(np.argmax(dist.log_probs()))] if rng is None else dist.sample(rng)
        if token == EOS:
            break
        context = context + token
    return context
