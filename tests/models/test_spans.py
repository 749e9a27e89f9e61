"""Spans: the results, ends and weights of `extend`, in steps like any other.

test_exactness.py ("span") checks that its weights are exact under every algorithm.
"""

import inspect
import math
import re
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from helpers.samplers import every_sampler
from helpers.tiny import cold_lm, log_prob_by_hand, log_probs_by_hand, table_lm, tiny_lm

from llmppl import (
    CachedTransformer,
    Grammar,
    Model,
    Regex,
    Rule,
    Vocabulary,
    beam_search,
    enumerate_exact,
    importance_sampling,
    smc_steer,
)
from llmppl.models import Span, replay

V = 6
A, B, C, SPACE, AB, END = range(V)


class Spanned(Model):
    """Program of one span after `prompt`."""

    def __init__(self, lm=None, prompt="a", **options):
        super().__init__()
        self.context = (lm or tiny_lm(V)).context(prompt)
        self.options = options
        self.span = None

    def step(self):
        self.span = self.extend(self.context, **self.options)
        self.s += self.span.text
        self.finish()


def outcomes(**options):
    """Return the span of every outcome with its probability under the model, not renormalised by masks."""
    return [(particle.span, particle.log_weight) for particle in enumerate_exact(Spanned(**options))]


# ---- what it returns


def test_a_span_has_its_text_its_context_and_its_log_probability():
    found = outcomes(until="b", max_tokens=2)
    assert len(found) == 3 + 3 * V                      # "b", "ab" and EOS at once; "a", "c" and " ", then anything
    for span, log_weight in found:
        ids = [*span.context.tokens[1:], *[END] * (span.ended == "eos")]
        assert span.context.text == "a" + span.text
        assert span.log_prob == pytest.approx(log_prob_by_hand(tiny_lm(V), [A], ids), abs=1e-9)
        assert log_weight == pytest.approx(span.log_prob, abs=1e-9)


def test_a_span_ends_after_the_first_token_that_completes_until():
    lm = table_lm(lambda ids: [0.0, 0.0, 0.0, 0.0], [b"x", b"x.y", b"."])
    texts = {(span.text, span.ended) for span, _ in outcomes(lm=lm, prompt="x", until=".", max_tokens=2)}
    ended = {("x.y", "until"), (".", "until"), ("xx.y", "until"), ("x.", "until")}
    assert texts == ended | {("", "eos"), ("x", "eos"), ("xx", "max_tokens")}


def test_until_may_be_a_function_of_the_text_of_the_span():
    seen = set()

    def two(text):
        seen.add(str(text))
        return len(text) >= 2

    assert all(len(span.text) >= 2 for span, _ in outcomes(until=two) if span.ended == "until")
    letters = ("a", "b", "c", " ")
    assert seen == {*letters, "ab"} | {x + y for x in letters for y in (*letters, "ab")}


def test_the_text_consists_of_whole_characters():
    lm = table_lm(lambda ids: [0.0, 0.0, -math.inf, -math.inf], [b"\xc3", b"\xa9", b"x"])
    spans = [span for span, _ in outcomes(lm=lm, prompt="x", until="é", max_tokens=2)]
    assert "é" in {str(span.text) for span in spans}
    assert all((span.ended == "until") == ("é" in span.text) for span in spans)


def test_an_eos_ends_the_span_but_not_the_particle():
    class Two(Model):
        def step(self):
            span = self.extend(tiny_lm(V).context("a"), until="c", max_tokens=1)
            self.s += f"{span.ended} {self.finished}"
            self.finish()

    texts = {str(particle) for particle in enumerate_exact(Two())}
    assert texts == {"eos False", "until False", "max_tokens False"}


def test_without_complete_a_span_is_cut_without_a_weight():
    assert sum(math.exp(log_w) for _, log_w in outcomes(until="b", max_tokens=3)) == pytest.approx(1.0)


def test_complete_keeps_spans_that_end_in_time_not_counting_the_eos():
    cut, complete = outcomes(until="b", max_tokens=2), outcomes(until="b", max_tokens=2, complete=True)
    ended = [(span, log_w) for span, log_w in cut if span.ended != "max_tokens"]
    late = [log_w + log_probs_by_hand(tiny_lm(V), [A, *span.context.tokens[1:]])[END]
            for span, log_w in cut if span.ended == "max_tokens"]  # fmt: skip
    expected = sorted([log_w for _, log_w in ended] + late)
    assert sorted(log_w for _, log_w in complete) == pytest.approx(expected, abs=1e-9)
    assert {span.ended for span, _ in complete} == {"until", "eos"}


# ---- constraints


def test_a_constrained_span_ends_at_its_first_accepted_token():
    found = {str(span.text): log_w for span, log_w in outcomes(constraint=Regex("a+(b|c)?"))}
    assert found.keys() == {"a", "ab"}                  # "a" is accepted; "ab" is one token
    rows = log_probs_by_hand(tiny_lm(V), [A])
    assert found["a"] == pytest.approx(rows[A]) and found["ab"] == pytest.approx(rows[AB])


@pytest.mark.parametrize("constraint", [Regex("a*c"), Grammar('start: "a" start | "c"')], ids=["regex", "grammar"])
def test_every_constraint_gives_the_weights_of_the_language_model(constraint):
    for given in (constraint, constraint.index(tiny_lm(V).vocab)):
        spans = outcomes(constraint=given, max_tokens=3, complete=False)
        found = {str(span.text): (span.ended, log_w) for span, log_w in spans}
        assert found.keys() == {"c", "ac", "aac", "aaa"}
        for text, (ended, log_w) in found.items():
            ids = [{"a": A, "c": C}[letter] for letter in text]
            assert log_w == pytest.approx(log_prob_by_hand(tiny_lm(V), [A], ids), abs=1e-9)
            assert ended == ("until" if "c" in text else "max_tokens")


def test_a_token_that_makes_acceptance_impossible_is_not_proposed():
    model = Spanned(constraint=Regex("a*c"), max_tokens=3)
    posterior = importance_sampling(model, 200, seed=0)
    assert not posterior.deaths
    assert {*posterior.texts} == {"c", "ac", "aac"}


def test_a_span_that_a_function_rejects_dies_with_the_reason():
    def no_c(text):
        return "c" not in text

    posterior = importance_sampling(Spanned(constraint=no_c, max_tokens=2), 200, seed=0)
    (death,) = {death.reason for death in posterior.deaths}
    line = inspect.getsourcelines(Spanned.step)[1] + 1
    assert death == f"no_c is false of the text (test_spans.py, line {line})"
    assert not any("c" in str(particle) for particle in posterior)


def test_the_statement_that_weighs_is_extend_with_its_line():
    particle = importance_sampling(Spanned(constraint=Regex("a+")), 1, seed=0).best
    line = inspect.getsourcelines(Spanned.step)[1] + 1
    weight = log_probs_by_hand(tiny_lm(V), [A])[[A]].sum()
    assert particle.attribution == {f"extend (test_spans.py, line {line})": pytest.approx(weight)}


def test_a_rule_changes_the_distribution_and_the_log_prob_of_a_span():
    dist = np.exp(log_probs_by_hand(tiny_lm(V), [A]) / 0.5)
    found = outcomes(max_tokens=1, rule=Rule(temperature=0.5))
    assert sum(math.exp(log_w) for _, log_w in found) == pytest.approx(1.0)
    for span, log_weight in found:
        id = END if span.ended == "eos" else span.context.tokens[-1]
        assert span.log_prob == pytest.approx(log_weight) == pytest.approx(math.log(dist[id] / dist.sum()))


# ---- a step with spans is a step


class Words(Model):
    """Program of words of at most two tokens, one a step, up to three or the end."""

    def __init__(self, lm=None):
        super().__init__()
        self.context = (lm or tiny_lm(V)).context("a")
        self.spans = []

    def step(self):
        self.spans.append(self.extend(self.context, until=" ", max_tokens=2))
        self.s += self.spans[-1].text
        self.context = self.spans[-1].context
        if self.spans[-1].ended == "eos" or len(self.spans) == 3:
            self.finish()


@every_sampler
def test_a_particle_with_spans_is_replayed(run):
    for particle in run(Words(), seed=1):
        again = replay(Words(), particle.choices)
        assert (again.spans, again.s, again.attribution) == (particle.spans, particle.s, particle.attribution)
        assert sum(map(len, particle.choices)) == len(particle.context) - 1 + (particle.spans[-1].ended == "eos")


def test_a_beam_finds_the_likeliest_span():
    best = max(outcomes(until="b", max_tokens=3), key=lambda found: found[1])
    beam = beam_search(Spanned(until="b", max_tokens=3), 50, V)[0]
    assert (beam.particle.span, beam.log_joint) == (best[0], pytest.approx(best[1]))


def test_distinct_expansion_opens_the_first_token_and_draws_the_others():
    posterior = smc_steer(Spanned(max_tokens=2), 50, 2, seed=0)
    assert {str(particle)[:1] for particle in posterior} == {"", "a", "b", "c", " "}


def test_each_token_runs_once_and_each_index_is_built_once():
    lm, made = cold_lm(V), []

    class Counted(Regex):
        def index(self, vocab):
            made.append(vocab)
            return super().index(vocab)

    posterior = smc_steer(Spanned(lm, "a", constraint=Counted("(a|b)*c"), max_tokens=3), 10, 3, seed=0)
    read = {tuple(particle.span.context.tokens[:-1]) for particle in posterior}
    assert len(made) == 1
    assert len(read) <= posterior.stats.tokens <= 1 + 2 + 4     # "a", and "a" or "b" once or twice after it


def test_extend_works_by_hand_and_returns_after_a_death():
    model = Model()
    model.rng = np.random.default_rng(0)
    span = model.extend(tiny_lm(V).context("a"), until="b", max_tokens=4)
    assert isinstance(span, Span) and span.context.text == "a" + span.text
    span = model.extend(tiny_lm(V).context("a"), constraint=lambda text: False, max_tokens=4)
    assert model.log_weight == -math.inf and (len(span.text) > 0, span.ended) == (True, "max_tokens")
    with pytest.raises(RuntimeError, match=r"^extend\(\) after the particle has finished"):
        model.extend(tiny_lm(V).context("a"), max_tokens=2)


def test_a_span_without_an_allowed_token_kills_the_particle():
    lm = table_lm(lambda ids: [0.0, -math.inf, 0.0])
    model = Spanned(lm, "a", constraint=Regex("ba"))
    model.step()
    assert model.log_weight == -math.inf
    assert re.match(r"no token allowed by Regex\('ba'\) has positive probability \(test_spans", model.death)


# ---- what it refuses

BAD = [
    ({}, ValueError, "where the span ends: give until='.'"),
    ({"constraint": callable}, ValueError, "where the span ends"),
    ({"until": ""}, ValueError, "until must be a text of at least one character"),
    ({"until": b"x"}, TypeError, "until must be a function, as ends_sentence is, not b'x'"),
    ({"until": re.compile("x")}, TypeError, "until must be a function"),
    ({"until": "\ud83d"}, ValueError, "surrogates not allowed"),
    ({"until": len}, TypeError, "until len returned 1 for "),
    ({"constraint": len, "max_tokens": 2}, TypeError, "constraint len returned 1 for "),
    ({"constraint": "a*"}, TypeError, "a constraint is a Regex"),
    ({"constraint": Spanned}, TypeError, "cannot be the type"),
    ({"constraint": Regex("z")}, ValueError, "no sequence of tokens of this vocabulary spells"),
    ({"until": "b", "complete": True}, ValueError, "complete=True wants max_tokens, after which the text must have"),
    ({"constraint": Regex("aaac"), "max_tokens": 3, "complete": True}, ValueError, "no text ends within max_tokens=3"),
    ({"max_tokens": 2, "rule": Rule}, TypeError, "rule must be a function"),
]


@pytest.mark.parametrize("options, error, message", BAD, ids=[str(bad[0]) for bad in BAD])
def test_invalid_options_of_a_span_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        importance_sampling(Spanned(**options), 20, seed=0)


def test_a_span_is_drawn_after_a_context():
    with pytest.raises(TypeError, match=r"extend wants a Context, lm.context\(text\), not 'a'"):
        Model().extend("a", max_tokens=2)


def test_a_span_has_the_probability_of_the_eos_id_that_was_drawn():
    lm = CachedTransformer(lambda ids: [0.0, 0.0, 0.0], Vocabulary([b"a", b"", b""], eos_ids=[1, 2]))
    found = outcomes(lm=lm, until="a")
    assert sorted(span.ended for span, _ in found) == ["eos", "eos", "until"]
    assert all(span.log_prob == pytest.approx(math.log(1 / 3)) for span, _ in found)


def test_parsed_is_the_object_that_the_span_denotes():
    lm = table_lm(lambda ids: [0.0] * 4, [b"1", b"2", b" "])
    found = outcomes(lm=lm, prompt=" ", constraint=Literal[1, 22])
    assert {(span.text, span.parsed) for span, _ in found} == {("1", 1), ("22", 22)}
    digit = SimpleNamespace(index=Regex("[12]").index, parse=int)       # the index alone gives the text
    assert {span.parsed for span, _ in outcomes(lm=lm, prompt=" ", constraint=digit)} == {1, 2}
    found = outcomes(lm=lm, prompt=" ", constraint=int, until="2", max_tokens=2, complete=False)
    assert {(span.text, span.ended, span.parsed) for span, _ in found} == {
        ("2", "until", 2), ("12", "until", 12), ("1", "eos", 1), ("11", "max_tokens", None),
    }  # fmt: skip
    assert {(span.text, span.parsed) for span, _ in outcomes(until="b", max_tokens=1) if span.ended == "until"} == {
        (text, text) for text in ("b", "ab")
    }
