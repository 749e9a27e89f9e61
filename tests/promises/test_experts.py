"""Experts over whole texts, as in docs/critics.md: their posteriors equal sums over every text."""

import math

import pytest
from helpers.common import repetitions
from helpers.tiny import add_up, log_prob_by_hand, spelled, texts_of, tiny_lm

from llmppl import Model, enumerate_exact, mixture, product, smc_steer
from llmppl.distributions import logsumexp

A, B = 0, 1


class Written(Model):
    """Program of two tokens, or an earlier EOS, that `draw` chooses after "a" and "b"."""

    def __init__(self):
        super().__init__()
        self.contexts = [tiny_lm().context(prompt) for prompt in "ab"]
        self.num = 0

    def draw(self, p, q):
        raise NotImplementedError

    def step(self):
        token = self.draw(*map(self.transformer, self.contexts))
        self.s += token
        self.contexts = [context + token for context in self.contexts]
        self.num += 1
        if token.is_eos or self.num == 2:
            self.finish()


class Powers(Written):
    """Program with the target p(text)^a q(text)^b."""

    a, b = 1.5, -0.5

    def draw(self, p, q):
        token = self.sample(p, proposal=product(p, q, powers=[self.a, self.b]))
        self.score((self.a - 1) * p.log_prob(token) + self.b * q.log_prob(token))
        return token


class Product(Written):
    """Program with the target p(text) q(text)."""

    def draw(self, p, q):
        token = self.sample(p, proposal=product(p, q))
        self.observe(q, token)
        return token


class Mixture(Written):
    """Program with the target 0.3 p(text) + 0.7 q(text)."""

    def __init__(self):
        super().__init__()
        self.logs = [math.log(0.3), math.log(0.7)]

    def draw(self, p, q):
        total = logsumexp(self.logs)
        token = self.sample(mixture([p, q], [math.exp(log - total) for log in self.logs]))
        self.logs = [log + dist.log_prob(token) for log, dist in zip(self.logs, (p, q), strict=True)]
        return token


EXPERTS = {
    Powers: lambda p, q: 1.5 * p - 0.5 * q,
    Product: lambda p, q: p + q,
    Mixture: lambda p, q: logsumexp([math.log(0.3) + p, math.log(0.7) + q]),
}


@pytest.mark.parametrize("program", EXPERTS, ids=lambda program: program.__name__)
def test_experts_over_texts_are_exact(program):
    lm, log_weight = tiny_lm(), EXPERTS[program]
    weights = add_up(
        (spelled(ids), log_weight(log_prob_by_hand(lm, [A], ids), log_prob_by_hand(lm, [B], ids)))
        for ids in texts_of(6, 2)
    )
    exact, Z = enumerate_exact(program()), sum(weights.values())
    assert exact.log_ml == pytest.approx(math.log(Z), abs=1e-9)
    for text, weight in weights.items():
        assert exact.by_text()[text] == pytest.approx(weight / Z, abs=1e-9)
    runs = repetitions(1000, 150)
    Zs = [math.exp(smc_steer(program(), 3, 2, seed=seed).log_ml) for seed in range(runs)]
    error = math.sqrt(sum((each - Z) ** 2 for each in Zs)) / runs
    assert abs(sum(Zs) / runs - Z) <= 4.5 * error + 1e-9
