"""What pickles, what is shared by copies, and what says that it cannot be saved."""

import copy
import pickle

import numpy as np
import pytest
from helpers.tiny import cold_lm, tiny_lm

from llmppl import Bernoulli, Grammar, Model, PromptIntersection, smc_steer


class Bits(Model):
    """Particles without a language model."""

    def step(self):
        self.s += str(int(self.sample(Bernoulli(0.5))))
        self.score(-0.1 * len(self.s))
        self.condition(not self.s.endswith("00"))
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
    class Noting(PromptIntersection):                   # of a class that no other process could import
        def step(self):
            super().step()
            self.notes = {"length": len(self.s), "array": np.arange(2), "open": open}

    lm = tiny_lm()
    particles = smc_steer(Noting(lm, ["a", "b"], max_tokens=2), 3, 2, seed=0, progress=False)
    data = pickle.dumps(particles)
    assert b"Noting" not in data and b"CachedTransformer" not in data
    again = pickle.loads(data)
    assert repr(again) == repr(particles) and again.texts == particles.texts
    assert (again.log_ml, again.log_ml_se, again.deaths) == (particles.log_ml, particles.log_ml_se, particles.deaths)
    for one, other in zip(again, particles, strict=True):
        assert one.log_weight == other.log_weight and one.attribution == other.attribution and one.cut == other.cut
        assert [lm.at(ids) for ids in one.contexts] == other.contexts
        assert one.s.bytes == other.s.bytes
        with pytest.raises(AttributeError, match="a saved particle has no 'notes': there was none, or it was no plain"):
            _ = one.notes                               # open is no data
    assert pickle.loads(pickle.dumps(again)).texts == particles.texts


def test_a_pickle_keeps_plain_attributes():
    class Keeping(Bits):
        def step(self):
            super().step()
            self.kept = [{"n": len(self.s)}, (1.5, np.float64(2.5)), {b"x"}, None, True, np.arange(2)]
            self.itself = [self.s]
            self.itself.append(self.itself)

    particles = smc_steer(Keeping(), 2, 2, seed=0, progress=False)
    for one, other in zip(pickle.loads(pickle.dumps(particles)), particles, strict=True):
        np.testing.assert_equal(one.kept, other.kept)
        assert one.finished and not hasattr(one, "itself") and not hasattr(one, "chooser")


def test_a_copy_of_particles_is_the_same_object():
    """And not one of saved particles, though copy asks for the same state as pickle."""
    particles = smc_steer(Bits(), 2, 2, seed=0, progress=False)
    assert copy.copy(particles) is copy.deepcopy([particles])[0] is particles


def test_particles_without_a_language_model_pickle():
    particles = smc_steer(Bits(), 4, 2, expand="copies", seed=0, progress=False)
    again = pickle.loads(pickle.dumps(particles))
    assert [str(p) for p in again] == [str(p) for p in particles]
    np.testing.assert_array_equal(again.log_weights, particles.log_weights)
    assert (again.log_ml, again.log_ml_se, again.deaths, again.steps) == (
        particles.log_ml, particles.log_ml_se, particles.deaths, particles.steps,
    )  # fmt: skip
    assert repr(again) == repr(particles) and again.mean_attribution() == particles.mean_attribution()


def test_a_copy_of_a_context_or_language_model_is_itself():
    lm = cold_lm()
    context = lm.context("ab")
    for each in (copy.copy, copy.deepcopy):
        assert each(lm) is lm and each(context) is context
    assert context.node.contexts == 1


def test_a_grammar_pickles_as_its_text_and_options():
    grammar = Grammar('list: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: "A" | "7"', "list", g_regex_flags=2)    # re.I
    assert copy.copy(grammar) is grammar and copy.deepcopy([grammar])[0] is grammar
    again = pickle.loads(pickle.dumps(grammar))
    for text in ["[]", "[a,7]", "[A]", "[,]", "[7", "x"]:
        accepted = []
        for each in (grammar, again):
            state = each.start
            for byte in text.encode():
                state = state if state is None else each.step(state, byte)
            accepted.append(state is not None and each.accepts(state))
        assert accepted[0] == accepted[1] == (text in ["[]", "[a,7]", "[A]"])


def test_a_program_may_hold_a_grammar():
    class Holds(Bits):
        def __init__(self):
            super().__init__()
            self.grammar = Grammar('start: "a"')

    model = Holds()
    assert all(p.grammar is model.grammar for p in smc_steer(model, 3, 2, seed=0, progress=False))
