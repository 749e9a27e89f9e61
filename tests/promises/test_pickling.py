"""Objects that pickle, objects that copies share, and objects that name a way to save them."""

import copy
import operator
import pickle

import numpy as np
import pytest
from helpers.machines import accepts
from helpers.tasks import told
from helpers.tiny import cold_lm, tiny_lm

from llmppl import Bernoulli, Grammar, Model, PromptIntersection, smc_steer


class Bits(Model):
    """Particles without a language model, with plain attributes and others."""

    def step(self):
        self.s += str(int(self.sample(Bernoulli(0.5))))
        self.score(-0.1 * len(self.s))
        self.condition(not self.s.endswith("00"))
        self.kept = [{"n": len(self.s)}, (1.5, np.float64(2.5)), {b"x"}, None, True, np.arange(2)]
        self.notes = {"open": open}
        if len(self.s) == 4:
            self.finish()


def test_an_object_with_a_language_model_names_a_picklable_alternative():
    lm = tiny_lm()
    model = PromptIntersection(lm, ["a", "b"], max_tokens=2)
    (particle,) = smc_steer(model, 1, 2, seed=0, progress=False)
    for held in [particle, model, lm, lm.context("a"), model.transformer(lm.context("a"))]:
        with pytest.raises(TypeError, match=r"cannot be pickled.* can: pickle the Particles, or save"):
            pickle.dumps(held)


def test_pickled_particles_hold_tokens_instead_of_the_language_model():
    lm = tiny_lm()
    particles = smc_steer(PromptIntersection(lm, ["a", "b"], max_tokens=2), 3, 2, seed=0, progress=False)
    data = pickle.dumps(particles)
    assert b"PromptIntersection" not in data and b"CachedTransformer" not in data
    again = pickle.loads(data)
    assert told(pickle.loads(pickle.dumps(again))) == told(again) == told(particles)
    assert [[*map(lm.at, each.contexts)] for each in again] == [each.contexts for each in particles]
    assert [each.s.bytes for each in again] == [each.s.bytes for each in particles]


def test_pickled_particles_keep_figures_and_plain_attributes():
    particles = smc_steer(Bits(), 4, 2, expand="copies", seed=0, progress=False)
    again = pickle.loads(pickle.dumps(particles))
    np.testing.assert_array_equal(again.log_weights, particles.log_weights)
    figures = operator.attrgetter("texts", "log_ml", "log_ml_se", "deaths", "steps")
    assert figures(again) == figures(particles)
    assert repr(again) == repr(particles) and again.mean_attribution() == particles.mean_attribution()
    np.testing.assert_equal([each.kept for each in again], [each.kept for each in particles])
    assert not [each for each in again if not each.finished or hasattr(each, "notes") or hasattr(each, "chooser")]


def test_copies_share_particles_contexts_language_models_and_grammars():
    particles, context = smc_steer(Bits(), 2, 2, seed=0, progress=False), cold_lm().context("ab")
    for each in (particles, context, context.lm, Grammar('start: "a"')):
        assert copy.copy(each) is copy.deepcopy([each])[0] is each


@pytest.mark.parametrize("text, accepted", [
    ("[]", True), ("[a,7]", True), ("[A]", True), ("[,]", False), ("[7", False),
])  # fmt: skip
def test_a_grammar_pickles_as_its_text_and_options(text, accepted):
    grammar = Grammar('list: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: "A" | "7"', "list", g_regex_flags=2)    # re.I
    assert [accepts(each, text) for each in (grammar, pickle.loads(pickle.dumps(grammar)))] == [accepted] * 2
