"""What a run tells of itself: steps in figures, attribution, the standard error of log Z-hat, and repeated runs."""

import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import repetitions
from tiny import cold_lm

from llmppl import (
    Bernoulli,
    Categorical,
    Model,
    PromptIntersection,
    enumerate_exact,
    importance_sampling,
    repeat,
    smc_standard,
    smc_steer,
)
from llmppl.inference.genealogy import Genealogy, log_ml_error, variance_and_families
from llmppl.inference.resampling import multinomial, optimal, systematic

DISTS = np.random.default_rng(1).dirichlet(np.ones(6), size=6)
POTENTIALS = np.log(np.random.default_rng(2).dirichlet(np.ones(6), size=6) + 0.02)


class Chain(Model):
    """A Markov chain with six states, each move of which a second expert weighs."""

    def __init__(self, steps=5):
        super().__init__()
        self.state, self.left = 0, steps

    def copy(self):                                     # cheaper than a deep copy, for many runs
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def step(self):
        state = self.sample(DIST[self.state])
        self.score(POTENTIALS[self.state, state])
        self.s += "abcdef"[state]
        self.state, self.left = state, self.left - 1
        if not self.left:
            self.finish()


DIST = [Categorical(dist) for dist in DISTS]

ALGORITHMS = {
    "copies": lambda model, N, **options: smc_steer(model, N, 3, expand="copies", **options),
    "merged": lambda model, N, **options: smc_steer(model, N, 3, expand="merged", **options),
    "distinct": lambda model, N, **options: smc_steer(model, N, 3, expand="distinct", **options),
    "systematic": lambda model, N, **options: smc_standard(model, N, **options),
    "multinomial": lambda model, N, **options: smc_standard(model, N, resample=multinomial, **options),
    "importance": lambda model, N, **options: importance_sampling(model, N, **options),
}
every_algorithm = pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)


# ---- steps


@every_algorithm
def test_the_figures_of_a_step_are_those_of_its_arrays(run):
    figures, roots = [], []

    def on_step(step):
        log_weights = np.array([c.log_weight for c in step.candidates])
        taken = set(step.ancestors.tolist())
        for i, candidate in enumerate(step.candidates):
            if i not in taken:
                assert candidate.log_weight == step.candidate_log_weights[i]
        for survivor, ancestor in zip(step.particles, step.ancestors, strict=True):
            assert str(survivor) == str(step.candidates[ancestor])
        weights = np.exp(step.candidate_log_weights)
        assert len(log_weights) == len(step.parents) == len(step.candidate_log_weights)
        assert step.ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
        assert step.log_ml == pytest.approx(step.particles.log_ml)
        assert step.num_unique_ancestors == len({int(step.parents[a]) for a in step.ancestors})
        assert step.num_finished == sum(p.finished for p in step.particles)
        assert step.num_dead == int((step.candidate_log_weights == -np.inf).sum())
        assert step.index == len(roots) + 1
        before = roots[-1] if roots else np.arange(step.parents.max() + 1)
        np.testing.assert_array_equal(step.roots, before[step.parents[step.ancestors]])
        roots.append(step.roots)
        figures.append(tuple(vars(step).values())[:6])

    particles = run(Chain(3), 6, seed=0, on_step=on_step, progress=False)
    assert figures == [tuple(vars(step).values())[:6] for step in particles.steps]
    assert particles.steps[-1].log_ml == pytest.approx(particles.log_ml)


def test_the_log_ml_of_a_step_holds_no_twist():
    class Twisted(Chain):
        def step(self):
            super().step()
            if not self.finished:
                self.twist(3.0 * self.state)

    seen = []

    def on_step(step):
        untwisted = [p.log_weight - p.log_twist for p in step.particles]
        assert step.log_ml == pytest.approx(np.logaddexp.reduce(untwisted))
        seen.append(step.log_ml - step.particles.log_ml)

    smc_steer(Twisted(2), 4, 2, seed=0, progress=False, on_step=on_step)
    assert seen[0] < -1.0 and seen[1] == pytest.approx(0.0)


def test_a_death_tells_the_step_the_statement_and_a_text():
    class Doomed(Chain):
        def step(self):
            super().step()
            self.condition(len(self.s) < 2)

    particles = smc_standard(Doomed(), 4, seed=0, progress=False)
    (death,) = particles.deaths
    assert (death.step, death.count, len(death.text)) == (2, 4, 2)
    assert death.reason.startswith("condition is false (test_statistics.py, line ")
    assert f"with the text {death.text!r}" in repr(particles)
    with pytest.raises(ValueError, match=f"with the text '{death.text}'"):
        particles.sample()


def test_what_is_kept_of_the_dead_grows_with_the_steps_and_not_with_their_texts():
    class Dies(Model):
        def step(self):
            value = self.sample(Categorical({"aaaaaaa": 0.8, "bbbbbbb": 0.2}))
            self.s += value
            self.condition(value != "bbbbbbb")
            if len(self.s) == 7 * 60:
                self.finish()

    particles = smc_steer(Dies(), 4, 3, expand="copies", seed=0, progress=False)
    assert len(particles.deaths) > 30 and sum(death.count for death in particles.deaths) > 80
    assert max(len(death.text) for death in particles.deaths) == 100
    assert all(death.text.endswith("abbbbbbb") for death in particles.deaths[1:])
    assert repr(particles.deaths).count("\n") == 3 and len(repr(particles.deaths)) < 300


# ---- attribution


class Weighed(Model):
    """Every verb that weighs, two of them in a loop."""

    def step(self):
        for _ in range(2):
            heads = self.sample(Bernoulli(0.5), proposal=Bernoulli(0.25))
            self.observe(Bernoulli(0.9), heads)
        self.score(-1.5)
        self.condition(heads)
        self.finish()


def test_attribution_adds_up_what_each_statement_did():
    for particle in importance_sampling(Weighed(), 12, seed=1, progress=False):
        assert [key.split(" (test_statistics.py, line ")[0] for key in particle.attribution] == [
            "sample", "observe", "score",
        ]  # fmt: skip
        assert sum(particle.attribution.values()) == pytest.approx(particle.log_weight + math.log(12))
        score = next(value for key, value in particle.attribution.items() if key.startswith("score"))
        assert score == -1.5


def test_attribution_of_a_copy_is_its_own():
    model = Weighed()
    model.rng = np.random.default_rng(0)
    twin = model.copy()
    model.step()
    assert model.attribution and not twin.attribution and not Model._attribution_


def test_attribution_of_particles_is_the_weighted_mean_and_the_largest_comes_first():
    particles = smc_steer(Weighed(), 6, 3, seed=0, progress=False)
    table = particles.mean_attribution()
    for statement, value in table.items():
        assert value == pytest.approx(particles.expect(lambda p, key=statement: p.attribution.get(key, 0.0)))
    assert [abs(v) for v in table.values()] == sorted((abs(v) for v in table.values()), reverse=True)


# ---- the standard error


@every_algorithm
def test_one_run_tells_its_standard_error(run):
    """The median of what runs tell lies within [0.7, 1.4] of the standard deviation over runs."""
    R = repetitions(400, 12)
    runs = [run(Chain(), 80, rng=rng, progress=False) for rng in np.random.default_rng(3).spawn(R)]
    spread = np.std([particles.log_ml for particles in runs], ddof=1)
    told = np.median([particles.log_ml_se for particles in runs[: repetitions(100, 6)]])
    slack = math.exp(4.5 / math.sqrt(2 * (R - 1)))      # the spread has the relative error 1 / sqrt(2 (R - 1))
    assert 0.7 / slack < told / spread < 1.4 * slack


def test_the_standard_error_of_importance_sampling_is_the_usual_one():
    particles = importance_sampling(Chain(), 50, seed=0, progress=False)
    weights = np.exp(particles.log_weights)
    assert particles.log_ml_se == pytest.approx(np.std(weights, ddof=1) / math.sqrt(50) / np.mean(weights))


def test_the_square_of_Z_over_pairs_is_unbiased():
    """With K copies and one step, Z-hat^2 (1 - se^2) has the mean Z^2."""
    Z = math.exp(enumerate_exact(Chain(1)).log_ml)
    R = repetitions(4000, 100)
    rngs = np.random.default_rng(5).spawn(R)
    runs = [smc_steer(Chain(1), 4, 2, expand="copies", rng=rng, progress=False) for rng in rngs]
    squares = [math.exp(2 * p.log_ml) * (1 - p.log_ml_se**2) for p in runs if p.log_ml_se is not None]
    assert len(squares) == R
    assert abs(np.mean(squares) - Z**2) < 4.5 * np.std(squares) / math.sqrt(R)


class Survivor:
    log_twist, finished = 0.0, False

    def __init__(self, log_weight):
        self.log_weight = log_weight


def genealogy(rng, n, steps):
    """A history as random as one can be: parents with any number of groups, of any number of candidates."""
    history, log_weights = Genealogy(n), np.full(n, -math.log(n))
    for t in range(steps):
        parents, groups, log_starts, log_kept, copies = [], [], [], [], []
        for parent in range(n):
            for group in range(1 + rng.integers(2) * (t > 0)):
                size, drew = 1 + rng.integers(3), rng.random() < 0.8
                parents += [parent] * size
                groups += [2 * parent + group if t else 0] * size
                log_starts += (log_weights[parent] + np.log(rng.dirichlet(np.ones(size)))).tolist()
                log_kept += [-rng.exponential() if t and rng.random() < 0.5 else 0.0] * size
                copies += (rng.integers(1, 3, size) if drew or not t else np.zeros(size, int)).tolist()
        where = rng.permutation(len(parents)) if t else np.arange(len(parents))
        columns = [np.array(column)[where] for column in (parents, groups, log_starts, log_kept, copies)]
        after = columns[2] + rng.normal(size=len(where))
        after[(rng.random(len(where)) < 0.2) & (after < after.max())] = -np.inf
        ancestors, chosen = (optimal if rng.random() < 0.5 else systematic)(rng, after, 1 + rng.integers(2 * n))
        names = "parent", "group", "log_start", "log_kept", "copies"
        extensions = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in zip(*columns, strict=True)]
        history.add(extensions, after, ancestors, chosen, [Survivor(w) for w in chosen])
        n, log_weights = len(ancestors), chosen
    return history


def pairs_by_table(history):
    """The variance and the families of `variance_and_families`, by a table of all pairs and the rules one by one."""
    C = apart = np.ones((1, 1))
    weights = np.ones(1)
    for t, step in enumerate(history.records):
        parents = step.parents * (t > 0)
        same, each = step.groups[:, None] == step.groups, np.eye(len(parents), dtype=bool)
        number = same @ step.copies
        up = np.where(same & (step.copies > 0), number / np.maximum(number - 1, 1), 1.0)
        moved = np.where(each & (step.copies > 0), 1 - 1 / np.maximum(step.copies, 1), 1.0)
        first = np.where(same, np.exp(step.log_kept), 1.0)
        starts, before, now = np.exp(step.log_starts), weights, np.exp(step.candidate_log_weights)
        ancestors, weights = step.ancestors, np.exp(step.log_chosen)
        second = np.where(np.eye(len(ancestors), dtype=bool), np.minimum(now[ancestors] / weights, 1.0), 1.0)
        selected = np.ix_(ancestors, ancestors)
        table = C[np.ix_(parents, parents)] * first
        table *= share(C, before) / (share(table, starts) or 1.0)
        table = table * up * moved
        C = table[selected] * second
        C = C * (share(table, now) / (share(C, weights) or 1.0))
        apart = (apart[np.ix_(parents, parents)] * first * moved)[selected] * second
    return 1 - share(C, weights), 1 / max(1 - share(apart, weights), 1e-12)


def share(C, weights):
    return weights @ C @ weights / weights.sum() ** 2


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_the_sum_over_blocks_is_the_sum_over_all_pairs(seed, n, steps):
    history = genealogy(np.random.default_rng(seed), n, steps)
    variance, families = pairs_by_table(history)
    told, told_families = variance_and_families(history.records)
    assert told == pytest.approx(variance, rel=1e-9, abs=1e-12)
    assert 1 / told_families == pytest.approx(1 / families, rel=1e-9, abs=1e-12)


def test_the_standard_error_of_many_particles_takes_memory_in_proportion_to_them():
    history = genealogy(np.random.default_rng(0), 20_000, 3)
    tracemalloc.start()
    se, _ = log_ml_error(history.records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert se is not None and max(step.parents.size for step in history.records) > 40_000
    assert peak < 1_000 * 40_000                        # a table of pairs has 8 * 40,000 bytes a candidate


def test_a_run_without_chance_in_its_weights_has_no_error():
    class Certain(Chain):
        def step(self):
            self.sample(DIST[0])
            self.score(-2.0)
            self.finish()

    for run in ALGORITHMS.values():
        assert run(Certain(), 10, seed=0, progress=False).log_ml_se == pytest.approx(0.0, abs=1e-6)


def test_where_one_run_cannot_tell_it_says_why():
    class Doomed(Chain):
        def step(self):
            self.condition(False)

    class Twice(Chain):
        def step(self):
            self.sample(DIST[0])
            super().step()

    done = Chain()
    done.finish()
    few = (smc_steer(Chain(), 8, 2, expand="copies", seed=seed, progress=False) for seed in range(200, 400))
    negative = next(particles for particles in few if "negative" in particles.log_ml_se_reason)
    for particles, reason in [
        (smc_steer(Chain(), 1, 1, seed=0, progress=False), "fewer than 3"),
        (smc_steer(Doomed(), 4, 2, seed=0, progress=False), "all particles died"),
        (smc_steer(done, 4, 2, seed=0, progress=False), "the program was finished before its first step"),
        (smc_steer(Twice(), 4, 2, expand="distinct", seed=0, progress=False), "more than its first choice"),
        (negative, "the estimate of the variance is negative"),
        (enumerate_exact(Chain(1)), "only what smc_steer"),
    ]:
        assert particles.log_ml_se is None and reason in particles.log_ml_se_reason
    assert smc_steer(Chain(), 40, 2, seed=0, progress=False).log_ml_se_reason == ""


# ---- repeat


def intersection(lm):
    return PromptIntersection(lm, ["a", "b"], max_tokens=3)


def test_repeated_runs_are_those_run_one_after_another_in_fewer_rounds():
    model, apart = intersection(cold_lm()), intersection(cold_lm())
    repeats = repeat(lambda rng: smc_steer(model, 3, 2, rng=rng), 5, seed=7, progress=False)
    runs = [smc_steer(apart, 3, 2, rng=rng, progress=False) for rng in np.random.default_rng(7).spawn(5)]
    np.testing.assert_allclose(repeats.log_mls, [particles.log_ml for particles in runs], atol=1e-9)
    assert [[str(p) for p in one] for one in repeats.runs] == [[str(p) for p in one] for one in runs]
    assert 0 < repeats.stats.rounds < sum(particles.stats.rounds for particles in runs)
    assert repeats.stats.rows <= sum(particles.stats.rows for particles in runs)
    assert all(particles.stats is None for particles in repeats.runs)


def test_the_mean_of_repeated_runs_is_unbiased_and_its_error_is_that_of_a_mean():
    R = repetitions(2000, 50)
    repeats = repeat(lambda rng: smc_standard(Chain(3), 4, rng=rng), R, seed=0, progress=False)
    Zs = np.exp(repeats.log_mls)
    assert repeats.log_ml == pytest.approx(math.log(Zs.mean()))
    assert repeats.log_ml_se == pytest.approx(Zs.std(ddof=1) / math.sqrt(R) / Zs.mean())
    assert abs(math.expm1(enumerate_exact(Chain(3)).log_ml - repeats.log_ml)) < 4.5 * repeats.log_ml_se
    assert f"{R} runs" in repr(repeats) and "+-" in repr(repeats)


def test_what_repeat_refuses():
    with pytest.raises(TypeError, match="returns Particles, as smc_steer does, not 3"):
        repeat(lambda rng: 3, 2, seed=0, progress=False)
    with pytest.raises(TypeError, match="run must be a function, as lambda rng"):
        repeat(smc_standard(Chain(), 2, seed=0), 2)
    with pytest.raises(ValueError, match="R must be at least 1"):
        repeat(lambda rng: smc_standard(Chain(), 2, rng=rng), 0)
    with pytest.raises(ValueError, match="not both"):
        repeat(lambda rng: smc_standard(Chain(), 2, rng=rng), 2, seed=0, rng=np.random.default_rng(0))


def test_an_error_in_a_repeated_run_says_in_which():
    def run(rng):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        repeat(run, 2, seed=0, progress=False)
    assert caught.value.__notes__ == ["in run 0"]
