"""Posteriors by value: probabilities, their errors, the share that was found, and doubts, against enumeration."""

import functools
import math
import pickle
import sys
import types

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.exactness import CASES
from helpers.programs import ThreeCoins
from helpers.tiny import tiny_lm

from llmppl import (
    Bernoulli,
    Categorical,
    ConstrainedText,
    Model,
    Particles,
    Regex,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.inference.genealogy import tail_shape

LM = tiny_lm(6)


class Mood(Model):
    """A latent mood, a list and a nested record; only the mood is observed."""

    def step(self):
        self.mood = self.sample(Categorical({"glad": 0.5, "sad": 0.3, "odd": 0.2}))
        self.record = {"pets": [{"kind": self.sample(Categorical({"cat": 0.6, "dog": 0.4}))}]}
        self.letters = [self.mood[0]]
        self.observe(Bernoulli({"glad": 0.1, "sad": 0.5, "odd": 0.5}[self.mood]), True)
        self.s = self.mood
        self.finish()


TRUTH = {"glad": 0.05 / 0.3, "sad": 0.15 / 0.3, "odd": 0.1 / 0.3}


@functools.cache
def many_moods():
    return importance_sampling(Mood(), 4000, seed=0)


@pytest.mark.parametrize(
    "key, truth",
    [
        ("mood", TRUTH), ("record.pets[0].kind", {"cat": 0.6, "dog": 0.4}),
        (lambda p: len(p.mood), {4: 1 / 6, 3: 5 / 6}),
        (lambda p: tuple(p.letters), {("g",): TRUTH["glad"], ("s",): TRUTH["sad"], ("o",): TRUTH["odd"]}),
    ],
)  # fmt: skip
def test_by_gives_the_probability_of_each_value(key, truth):
    found = enumerate_exact(Mood()).by(key)
    assert dict(found) == pytest.approx(truth)
    assert [*found] == sorted(truth, key=truth.get, reverse=True)
    assert all(share.se is None for share in found.shares)
    drawn = many_moods().by(key)
    assert dict(drawn) == pytest.approx(truth, abs=0.03)
    assert all(0 < share.se < 0.02 and abs(share.probability - truth[k]) < 4 * share.se
               for k, share in zip(drawn, drawn.shares, strict=True))  # fmt: skip


def test_answers_of_values_are_merged_and_cut_texts_are_marked():
    program = ConstrainedText(LM, "a", Regex("[ab]{1,4}"), max_tokens=2, complete=False)
    found = importance_sampling(program, 200, seed=0)
    by_text = found.by_text()
    merged = dict.fromkeys(by_text, 0.0)
    for each, p in found.answers().items():
        merged[each.removesuffix(" [cut]")] += p
    assert merged == pytest.approx(by_text)
    assert any(each.endswith(" [cut]") for each in found.answers())


def test_a_key_that_no_particle_has_is_named():
    with pytest.raises(AttributeError, match="no particle has 'moods': the first one has .* mood, record"):
        enumerate_exact(Mood()).by("moods")
    with pytest.raises(ValueError, match="no particle is left"):
        Particles([]).by("mood")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("record.pets[0].kind", r"the first one has record.pets = \[\]"),
        ("record.pets[0]", r"has record.pets = \[\]"),
        ("record.nothing.more", r"has record = \{'pets': \[\]\}"),
        ("nothing[0].more", "the first one has .*record"),
    ],
)
def test_a_path_without_values_shows_how_far_it_leads(key, said):
    class Empty(Mood):
        def step(self):
            super().step()
            self.record = {"pets": []}

    with pytest.raises(AttributeError, match=said):
        enumerate_exact(Empty()).by(key)


def test_tables_of_values_are_text_html_and_frames():
    found = importance_sampling(Mood(), 50, seed=1).by("mood")
    assert repr(found).splitlines()[0].startswith("mood: 3 values of 50 particles, ess")
    assert " +- " in repr(found) and found._repr_html_().count("<rect") == 3
    assert found.to_pandas()["probability"].sum() == pytest.approx(1.0)
    saved = pickle.loads(pickle.dumps(importance_sampling(Mood(), 50, seed=1)))
    assert dict(saved.by("mood")) == dict(found) and saved.found is None


def test_frames_have_columns_of_names_paths_and_functions():
    def half(particle):
        return len(particle.mood) / 2

    pytest.importorskip("pandas", reason="pandas is not installed")
    posterior = importance_sampling(Mood(), 30, seed=1)
    frame = posterior.to_pandas("mood", "record.pets[0].kind", half)
    assert frame.columns[4] == "mood" and frame["mood"].tolist() == posterior.texts
    assert frame["record.pets[0].kind"].tolist() == [p.record["pets"][0]["kind"] for p in posterior]
    assert frame.iloc[:, 6].tolist() == [*map(half, posterior)]
    assert frame.groupby("mood")["weight"].sum().to_dict() == pytest.approx(dict(posterior.by("mood")))
    with pytest.raises(AttributeError, match="no particle has 'moods'"):
        posterior.to_pandas("moods")


@pytest.mark.parametrize("version", ["0.23.4", "1.0.0"])
def test_draws_for_arviz_have_the_weights(monkeypatch, version):
    """ArviZ 1 takes the groups as a dict, earlier versions by keyword."""
    arviz = types.ModuleType("arviz")
    arviz.__version__ = version
    arviz.from_dict = {"1": lambda groups: groups, "0": lambda **groups: groups}[version[0]]
    monkeypatch.setitem(sys.modules, "arviz", arviz)
    posterior = importance_sampling(Mood(), 30, seed=1)
    found = posterior.to_arviz("mood", seed=0)
    drawn, places = found["posterior"]["mood"], found["sample_stats"]["particle"]
    assert drawn.shape == places.shape == (1, 1000) and [posterior[i].mood for i in places[0]] == drawn[0].tolist()
    np.testing.assert_allclose(np.bincount(places[0], minlength=30) / 1000, posterior.weights, atol=1e-3)
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install arviz"):
        posterior.to_arviz("mood")


@pytest.mark.parametrize("name", ["late", "mood"])
def test_standard_errors_of_values_cover_the_truth(name):
    """Two standard errors cover in 88% of the runs or more, also for a weight that comes last."""
    model, key = (Mood(), "mood") if name == "mood" else (CASES["soft"].model(), lambda p: str(p)[:1])
    truth = enumerate_exact(model).by(key)
    inside = []
    for rng in np.random.default_rng(3).spawn(60):
        found = smc_steer(model, 8, 2, rng=rng, expand="copies").by(key)
        inside += [abs(share.probability - truth[k]) <= 2 * share.se + 1e-9 for k, share in
                   zip(found, found.shares, strict=True)]  # fmt: skip
    assert np.mean(inside) >= 0.88


# ---- the share that was found, and doubts


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("name", ["predicate", "soft", "branching", "spans, two in a step", "where, second choice"])
def test_found_is_the_mass_of_the_different_runs(name, power):
    model = CASES[name].model()
    everything = enumerate_exact(model, power=power)
    assert everything.found == pytest.approx(1.0)

    def path(particle):
        return tuple(item[0] for step in particle.choices for item in step)

    mass = {path(particle): weight for particle, weight in zip(everything, everything.weights, strict=True)}
    many = smc_standard(model, repetitions(300, 80), seed=2, power=power)
    for steered in (many, smc_steer(model, 3, 2, seed=0, power=power)):
        covered = sum(mass[each] for each in {path(particle) for particle in steered})
        expected = covered * math.exp(everything.log_ml - steered.log_ml)
        assert steered.found == pytest.approx(min(1.0, expected), rel=1e-6)


def test_nothing_is_known_of_runs_that_draw_from_their_stream():
    class Own(Mood):
        def step(self):
            self.rng.random()
            super().step()

    assert importance_sampling(Own(), 3, seed=0).found is None and Particles([]).found == 0.0


def test_lineages_count_the_ancestors_of_the_last_particles():
    found = smc_standard(ThreeCoins(), 40, seed=0, ess_threshold=1.0)
    assert found.lineages.tolist() == sorted(found.lineages) and found.lineages[-1] == len(found)
    alive, expected = set(range(len(found.steps[-1].ancestors))), []
    for step in found.steps[::-1]:
        expected.append(len(alive))
        alive = {int(step.parents[step.ancestors[i]]) for i in alive}
    assert found.lineages.tolist() == expected[::-1] and expected[-1] < 40
    assert f"1 different text, {expected[-1]} ancestors at step 1" in repr(found)
    assert Particles([]).lineages.size == 0 and "lineages" in found._repr_html_()


@pytest.mark.parametrize("k", [0.2, 0.5, 1.0])
def test_the_tail_shape_of_pareto_weights_is_their_exponent(k):
    log_weights = k * np.random.default_rng(0).exponential(size=40_000)
    assert tail_shape(log_weights) == pytest.approx(k, abs=0.12)
    assert math.isnan(tail_shape(log_weights[:20])) and math.isnan(tail_shape(np.zeros(100)))


class Rare(Model):
    def step(self):
        self.score(-math.log(1 - self.rng.random()))    # weights of a Pareto distribution without a mean
        self.finish()


def test_weights_that_are_not_to_be_trusted_are_doubted():
    assert any("heavy tail, k-hat" in each for each in importance_sampling(Rare(), 1000, seed=0).doubts)
    assert importance_sampling(Mood(), 100, seed=0).doubts == enumerate_exact(Mood()).doubts == []

    class One(Rare):
        def step(self):
            self.score(self.sample(Categorical({9.0: 0.1, 0.0: 0.9})))
            self.finish()

    (doubt,) = importance_sampling(One(), 10, seed=1).doubts
    assert "one of 10 particles has 100% of the weight: docs/inference.md" in doubt
    assert doubt in repr(importance_sampling(One(), 10, seed=1))
