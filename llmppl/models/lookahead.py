"""Looking ahead: what a twist may know of the tokens that are still to come.

The best twist of a particle is the log of the weight that its continuations will gain on average; every particle then
ends with the same weight. Here are two ways to come near it, both used inside a step:

    self.twist(self.ahead.log_mass(self.state, left))           # ahead = Lookahead(index, law, most)
    self.twist(critic(rollout(self.context, 8).text))

A twist leaves the target alone, so neither has to be right; it only has to rank particles better than their weights do.
Sources: Lin, Chen & Liu (2013), "Lookahead strategies for sequential Monte Carlo", for pilots such as `rollout`;
Whiteley & Lee (2014), "Twisted particle filters", for the best twist.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.arguments import count, generator
from llmppl.lm import Context, TokenDistribution
from llmppl.masks import END, Index, WholeIndex
from llmppl.tokens import EOS

Floats = NDArray[np.float64]


class Lookahead:
    """How probable it is that a text will be complete in time, by the state of its automaton.

    Tokens are drawn independently from one law r, whatever was read. With V_n(s) the probability that a text in state s
    goes on with at most n of them and an EOS, all as the automaton allows,

        V_n(s) = r(EOS) [s accepts] + sum_v r(v) V_{n-1}(s v),    V_{-1} = 0,

    which is tabulated here for every state and n, so that a step only reads it. It knows what is missing and how rare
    that is, and nothing of the context. Copies are the table itself.

    Parameters
    ----------
    index : Index
        Of a Regex or a DFA: of what has finitely many states.
    law : TokenDistribution over the vocabulary of `index`
        The law r, such as `mean_law`. What r excludes is taken to be impossible.
    most : int
        The most tokens that may be left, EOS not counted.

    Raises
    ------
    TypeError
        If `index` is none, or one of a constraint whose states cannot be listed (a Grammar).
    ValueError
        If `law` is over another vocabulary, or never ends a text of the language within `most` tokens.
    """

    def __init__(self, index: Index, law: TokenDistribution, most: int) -> None:
        if not isinstance(index, Index):
            raise TypeError(f"Lookahead wants an index, Regex(...).index(lm.vocab), not {index!r}")
        if not isinstance(law, TokenDistribution):
            raise TypeError(f"Lookahead wants a law over tokens, such as mean_law(context, 200), not {law!r}")
        if law.support is not index.vocab and law.support != index.vocab:
            raise ValueError(f"the law is over {law.support}, and {index!r} over another vocabulary")
        most = count("most", most, least=0)
        whole = index.build_all()
        if not isinstance(whole, WholeIndex):
            raise TypeError(f"Lookahead wants finitely many states, those of a Regex or a DFA, not {index!r}")
        self.index, self.most = index, most
        self._row = {state: i for i, state in enumerate(whole.states)}
        self._table = _tabulate(whole, law.log_probs(), law.log_prob(EOS), most)
        if self._table[most, 0] == -math.inf:
            raise ValueError(
                f"{index!r}: the law gives probability 0 to every text of at most {most} tokens and an EOS; use a "
                f"larger `most`, or a law that gives every token some probability"
            )

    def log_mass(self, state: Any, left: int) -> float:
        """log V_left(state): of ending within `left` more tokens, EOS not counted; 0.0 where EOS has been read.

        It is -inf where that is impossible, which no twist may be: there, `condition(False)`.

        Raises
        ------
        ValueError
            If no tokens lead from the start to `state`, or `left` is not in 0 .. most.
        """
        if count("left", left, least=0) > self.most:
            raise ValueError(f"left={left}: the table is for 0 to {self.most} tokens, the `most` of Lookahead")
        if state is END:
            return 0.0
        row = self._row.get(state)
        if row is None:
            raise ValueError(f"no tokens lead from the start of {self.index!r} to the state {state!r}")
        return float(self._table[left, row])

    def __repr__(self) -> str:
        return f"Lookahead({self.index!r}, most={self.most})"

    def __copy__(self) -> Lookahead:
        return self

    def __deepcopy__(self, memo: object) -> Lookahead:
        return self


def _tabulate(whole: WholeIndex, log_probs: Floats, log_eos: float, most: int) -> Floats:
    """(most + 1, S) log V_n(s), by value iteration over the rows of an index."""
    probs = np.exp(log_probs)
    sources, targets, weights = [], [], []
    for i in range(len(whole)):
        tokens, rows = whole.row(i)
        mass = np.bincount(rows, probs[tokens], minlength=1)        # tokens that lead to one state are one step
        (ends,) = mass.nonzero()
        sources.append(np.full(len(ends), i))
        targets.append(ends)
        weights.append(np.log(mass[ends]))
    source, target, weight = (np.concatenate(each) for each in (sources, targets, weights))
    moving, begin = np.unique(source, return_index=True)            # sources are in order
    table = np.empty((most + 1, len(whole)))
    table[:] = np.where(whole.accepting, log_eos, -np.inf)
    for n in range(1, most + 1):
        if len(moving):
            steps = np.logaddexp.reduceat(weight + table[n - 1, target], begin)
            table[n, moving] = np.logaddexp(table[0, moving], steps)
    table.flags.writeable = False
    return table


def mean_law(context: Context, num_tokens: int, seed: int = 0) -> TokenDistribution:
    """The mean of the laws of `num_tokens` tokens in a row, drawn after `context`: how often each token comes.

    A text that ends, or is as long as the model can read, is begun again. It costs `num_tokens` tokens, once.
    """
    count("num_tokens", num_tokens)
    rng, at, total = generator(seed), context, np.zeros(len(context.lm.vocab))
    longest = context.lm.backend.max_length
    for _ in range(num_tokens):
        law = at.next_token()
        total += np.exp(law.log_probs())
        token = law.sample(rng)
        at = context if token == EOS or len(at) == longest else at + token
    with np.errstate(divide="ignore"):
        return TokenDistribution(context.lm.vocab, np.log(total / num_tokens))


def rollout(context: Context, num_tokens: int, rng: np.random.Generator | None = None) -> Context:
    """The context after up to `num_tokens` more tokens: the likeliest each time, or drawn with `rng`; before any EOS.

    It runs as many tokens through the model, less what is cached: where the text went the way of its last rollout, the
    next one runs one token. Rollouts of several particles share their forward passes. In a step, draw with `self.rng`.
    """
    count("num_tokens", num_tokens, least=0)
    for _ in range(num_tokens):
        law = context.next_token()
        token = law.support[int(np.argmax(law.log_probs()))] if rng is None else law.sample(rng)
        if token == EOS:
            break
        context = context + token
    return context
