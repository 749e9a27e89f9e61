"""Samples of a language under a model: weighted ones that follow the posterior, and what ReLM draws instead.

The program draws a text token by token from the model's law cut to what the language allows, and weighs it by the
probability of what was allowed; a particle filter resamples by these weights. The weights of a block of samples sum to
an unbiased estimate of the probability of the language, and weighted averages follow the model given the language.
Without the weights the samples follow another law: every token is likely given the tokens before it, though what must
come after may be improbable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from llmppl.distributions import Bernoulli, Categorical, Finite
from llmppl.inference import Particles, Step, importance_sampling, smc_standard
from llmppl.models.model import Model
from llmppl.queries.space import Match, Node, Space, Start, edits_of
from llmppl.tokens import EOS, Text

PATIENCE = 2048                                         # samples without a match after which it is an error
LONG = 100_000                                          # steps of samples that do not finish after which it is one, too


class Sampled(Model):
    """A string of the language, drawn from its left to its right; Z is its probability.

    Parameters
    ----------
    space : Space
    starts : list of Start
        Prefix strings, of which one is drawn by its own probability among them.
    """

    def __init__(self, space: Space, starts: list[Start]) -> None:
        super().__init__()
        self.space, self.starts = space, starts
        self.node: Node | None = space.root(starts[0]) if len(starts) == 1 else None
        self.log_prob = 0.0                             # of the text so far, under the rule

    def copy(self) -> Sampled:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)            # everything is immutable or shared
        return other

    def begin(self) -> Node:
        """Where the text is gone on from, drawn."""
        log_probs = np.array([start.log_prob for start in self.starts])
        weights = np.exp(log_probs - log_probs.max())
        return self.space.root(self.sample(Categorical(weights / weights.sum(), self.starts)))

    def law(self, node: Node) -> Finite:
        """Of the next token after a node, under the rule."""
        law: Finite = node.context.next_token()
        return law if self.space.rule is None else self.space.rule(law)

    def step(self) -> None:
        if self.node is None:
            self.node = self.begin()
        space, node = self.space, self.node
        ids, accepts = space.allowed(node), space.accepts(node)
        self.condition(accepts or ids.size > 0)
        if accepts and space.end == "prefix" and not ids.size:
            return self.finish()
        law = self.law(node)
        mask = np.zeros(len(space.lm.vocab), bool)
        mask[ids] = True
        if accepts and space.end == "eos":
            mask[list(space.lm.vocab.eos_ids)] = True
        elif accepts:
            ending = space.ending(node, law.log_probs())
            log_measure = float(np.logaddexp.reduce(law.log_probs()[ids], initial=ending))
            self.score(log_measure)
            if self.sample(Bernoulli(math.exp(ending - log_measure))):
                self.log_prob += ending
                return self.finish()
        if accepts and space.end != "eos":              # the weight of going on is in the score already
            token = self.sample(law.masked(mask))
        else:
            token = self.sample(law, proposal=law.masked(mask))
        if token == EOS:
            self.log_prob += law.log_prob(EOS)
            return self.finish()
        log_prob = law.log_prob(token)
        self.log_prob += log_prob
        self.node = space.child(node, int(token), log_prob)

    def match(self, log_weight: float) -> Match:
        """What a finished particle found."""
        assert self.node is not None and self.node.start is not None
        node, start = self.node, self.node.start
        return Match(
            text=Text(start.prefix.encode() + node.data),
            prefix=start.prefix,
            tokens=tuple(node.context.tokens[len(start.context) :]),
            log_prob=self.log_prob,
            log_prob_upper=self.log_prob,
            log_joint=start.log_prob + self.log_prob,
            log_weight=log_weight,
            edits=edits_of(self.space, node),
        )


def samples(
    space: Space, blocks: Iterator[list[Start]], N: int, rng: np.random.Generator, *, local: bool, normalise: bool
) -> Iterator[Match]:
    """Matches without end, in blocks of at most N; `local` ones come without weights and without resampling."""
    run: Callable[..., Particles[Sampled]] = importance_sampling if local else smc_standard
    barren = steps = 0

    def count(step: Step) -> None:
        nonlocal steps
        steps = 0 if step.num_finished else steps + len(step.candidates)
        if steps >= LONG:
            raise ValueError(
                f"no sample finished in {steps:,} steps of samples; the last ones have {step.index:,} tokens. "
                f"max_tokens bounds them, and strategy='shortest_path' would tell how probable a match is"
            )

    for starts in blocks:
        particles = run(Sampled(space, starts), N, rng=rng.spawn(1)[0], on_step=count, progress=False)
        barren = 0 if len(particles) else barren + N
        if barren >= PATIENCE:
            raise ValueError(
                f"none of {barren} samples finished: {particles.deaths[0].reason}. The language may have no "
                f"token path of this length: a larger max_tokens, or strategy='shortest_path', would tell"
            )
        for particle in particles:
            log_weight = 0.0 if local else particle.log_weight - (particles.log_ml if normalise else 0.0)
            yield particle.match(log_weight)
