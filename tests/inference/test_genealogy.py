"""Tests of diagnostics: figures of steps, attribution, the standard error of log Z-hat, and repeated runs."""

import functools
import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import cold_lm
from hypothesis import assume, given
from hypothesis import strategies as st

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
from llmppl.inference import tune
from llmppl.inference.algorithms import error_of_mean
from llmppl.inference.genealogy import log_ml_error, record_step, relative_variance
from llmppl.inference.population import Columns
from llmppl.inference.resampling import multinomial, optimal, systematic

DISTS = np.random.default_rng(1).dirichlet(np.ones(6), size=6)
POTENTIALS = np.log(np.random.default_rng(2).dirichlet(np.ones(6), size=6) + 0.02)


class Chain(Model):
    """Markov chain of six states, with a second expert that weighs each move."""

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
def test_the_figures_of_a_step_agree_with_its_arrays(run):
    figures = []

    def on_step(step):
        log_weights = np.array([c.log_weight for c in step.candidates])
        taken = set(step.ancestors.tolist())
        for i, candidate in enumerate(step.candidates):
            if i not in taken:
                assert candidate.log_weight == step.candidate_log_weights[i]
        taken = zip(step.log_chosen, step.ancestors, strict=True)
        survivors = [(-log_weight, str(step.candidates[ancestor])) for log_weight, ancestor in taken]
        assert sorted(survivors) == sorted((-p.log_weight, str(p)) for p in step.particles)
        weights = np.exp(step.candidate_log_weights)
        assert len(log_weights) == len(step.parents) == len(step.candidate_log_weights)
        assert step.ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
        assert step.log_ml == pytest.approx(step.particles.log_ml)
        assert step.num_unique_ancestors == len({int(step.parents[a]) for a in step.ancestors})
        assert step.num_finished == sum(p.finished for p in step.particles)
        assert step.num_dead == int((step.candidate_log_weights == -np.inf).sum())
        assert step.index == len(figures) + 1
        figures.append(tuple(vars(step).values())[:6])

    particles = run(Chain(3), 6, seed=0, on_step=on_step, progress=False)
    assert figures == [tuple(vars(step).values())[:6] for step in particles.steps]
    assert particles.steps[-1].log_ml == pytest.approx(particles.log_ml)


def test_the_log_ml_of_a_step_excludes_the_twist():
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


# ---- attribution


class Weighed(Model):
    """Program with every verb that weighs, two of them in a loop."""

    def step(self):
        for _ in range(2):
            heads = self.sample(Bernoulli(0.5), proposal=Bernoulli(0.25))
            self.observe(Bernoulli(0.9), heads)
        self.score(-1.5)
        self.condition(heads)
        self.finish()


def test_attribution_sums_the_contribution_of_each_statement():
    for particle in importance_sampling(Weighed(), 12, seed=1, progress=False):
        assert [key.split(" (test_genealogy.py, line ")[0] for key in particle.attribution] == [
            "sample", "observe", "score",
        ]  # fmt: skip
        assert sum(particle.attribution.values()) == pytest.approx(particle.log_weight + math.log(12))
        score = next(value for key, value in particle.attribution.items() if key.startswith("score"))
        assert score == -1.5


def test_a_copy_has_its_own_attribution():
    model = Weighed()
    model.rng = np.random.default_rng(0)
    twin = model.copy()
    model.step()
    assert model.attribution and not twin.attribution and not Model().attribution


def test_attribution_of_particles_is_the_weighted_mean_and_the_largest_comes_first():
    particles = smc_steer(Weighed(), 6, 3, seed=0, progress=False)
    table = particles.mean_attribution()
    for statement, value in table.items():
        assert value == pytest.approx(particles.expect(lambda p, key=statement: p.attribution.get(key, 0.0)))
    assert [abs(v) for v in table.values()] == sorted((abs(v) for v in table.values()), reverse=True)


# ---- the standard error


R = repetitions(500, 25)


@functools.cache
def runs_of(name):
    """Return R runs of an algorithm."""
    return [ALGORITHMS[name](Chain(), 80, rng=rng, progress=False) for rng in np.random.default_rng(4).spawn(R)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_single_run_estimates_its_standard_error(name):
    """The median of log_ml_se lies within [0.7, 1.4] of the standard deviation over runs."""
    runs = runs_of(name)
    spread = np.std([particles.log_ml for particles in runs], ddof=1)
    told = np.median([particles.log_ml_se for particles in runs[: repetitions(100, 6)]])
    slack = math.exp(4.5 / math.sqrt(2 * (R - 1)))      # the spread has the relative error 1 / sqrt(2 (R - 1))
    assert 0.7 / slack < told / spread < 1.4 * slack


def test_the_variance_of_importance_sampling_is_the_usual_one():
    particles = importance_sampling(Chain(), 50, seed=0, progress=False)
    weights = np.exp(particles.log_weights)
    variance, units, _ = relative_variance(particles.steps)
    assert variance == pytest.approx(np.var(weights, ddof=1) / 50 / np.mean(weights) ** 2)
    squares = (weights - np.mean(weights)) ** 2
    assert units == pytest.approx(np.sum(squares) ** 2 / np.sum(squares**2))
    v = variance * (1 + 4 / units)
    assert particles.log_ml_se == pytest.approx(math.sqrt(v + (v / 2) ** 2))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_variance_is_right_on_average(name):
    """The mean of Z-hat^2 times the relative variance lies within [0.7, 1.4] of the variance over runs."""
    runs = runs_of(name)
    Z = np.exp([p.log_ml for p in runs])
    told = np.mean([z**2 * relative_variance(p.steps)[0] for z, p in zip(Z, runs, strict=True)])
    slack = math.exp(4.5 * math.sqrt(2 / (R - 1)))      # the variance has the relative error sqrt(2 / (R - 1))
    assert 0.7 / slack < told / np.var(Z, ddof=1) < 1.4 * slack


class Two(Chain):
    """Program of two choices a step, of which the second weighs."""

    def step(self):
        self.state = self.sample(DIST[self.state])
        super().step()


class Observed(Chain):
    """Program of an observed choice, a condition, and another choice."""

    def step(self):
        self.observe(Bernoulli(0.2 + self.state / 8), self.sample(Bernoulli(0.6)))
        self.condition(self.state != 2)
        super().step()


@pytest.mark.parametrize(("program", "steps"), [(Chain, 4), (Two, 2), (Observed, 3)])
def test_the_standard_errors_of_ten_distinct_particles_cover_the_truth(program, steps):
    """Shares of at least 0.60 and 0.88 within one and two standard errors, of less than twice the true error.

    A share of R runs is known to sqrt(0.25 / R) at most: 0.02 with 600 runs, 0.09 with 30.
    """
    R = repetitions(600, 30)
    log_Z = enumerate_exact(program(steps)).log_ml
    rngs = np.random.default_rng(6).spawn(R)
    runs = [smc_steer(program(steps), 10, 2, rng=rng, progress=False) for rng in rngs]
    errors, ses = np.abs([p.log_ml - log_Z for p in runs]), np.array([p.log_ml_se for p in runs])
    slack = 3 * math.sqrt(0.25 / R)
    assert 0.60 - slack < np.mean(errors <= ses)
    assert 0.88 - slack < np.mean(errors <= 2 * ses)
    assert np.median(ses) < 2 * math.sqrt(np.mean(errors**2)) * (1 + slack)


def test_a_run_that_enumerates_everything_is_exact():
    particles = smc_steer(Chain(2), 40, 3, seed=0, progress=False)
    assert particles.log_ml == pytest.approx(enumerate_exact(Chain(2)).log_ml, abs=1e-12)
    assert particles.log_ml_se == pytest.approx(0.0, abs=1e-9)


def genealogy(rng, n, steps):
    """Return a random genealogy: any number of groups for each parent, and of candidates for each group."""
    records, log_weights = [], np.full(n, -math.log(n))
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
        survivors = SimpleNamespace(log_weights=chosen, finished=np.zeros(len(chosen), bool))
        records.append(record_step(t + 1, Columns(*columns, after), ancestors, chosen, survivors))
        n, log_weights = len(ancestors), chosen
    return records


def unit_by_unit(records):
    """Compute `relative_variance` by its definition: the terms c u (F - E)^2 of all units, one by one."""
    terms, certain = [], np.ones(1)
    for t, step in enumerate(records):
        F, w, log_kept = influence(records, t), normal(step.log_starts), step.log_kept
        members = [np.flatnonzero(step.groups == group) for group in dict.fromkeys(step.groups.tolist())]
        first = [i[0] for i in members]
        c, u = certain[(step.parents * (t > 0))], 1 - np.exp(log_kept)
        F_first, w_first = (np.array([x[i].sum() for i in members]) for x in (F, w))
        terms.extend((c * u)[first] * squares(u[first], F_first, w_first))
        c = c * (1 - u)
        runs = np.array([np.sum(step.copies[step.groups == group]) for group in step.groups])
        single = squares((step.copies > 0) & (runs == 1), F, w)
        for i in members:
            for j in i[step.copies[i] > 0]:
                n, m = runs[j], step.copies[j]
                terms.append(c[j] / m * (single[j] if n == 1 else (F[j] - np.sum(F[i]) * m / n) ** 2 * n / (n - 1)))
        c = np.where(step.copies > 0, c * (1 - 1 / np.maximum(step.copies, 1)), c)[step.ancestors]
        u = 1 - np.exp(np.minimum(step.candidate_log_weights[step.ancestors] - step.log_chosen, 0))
        terms.extend(c * u * squares(u, influence_after(records, t), normal(step.log_chosen)))
        certain = c * (1 - u)
    return sum(terms), sum(terms) ** 2 / max(sum(term**2 for term in terms), 1e-300)


def influence(records, t):
    """Return (M,) influences of the candidates of step t."""
    step, later = records[t], influence_after(records, t) - normal(records[t].log_chosen)
    changes = [later[step.ancestors == j].sum() for j in range(len(step.parents))]
    return normal(step.candidate_log_weights) + changes


def influence_after(records, t):
    """Return (n,) influences of the survivors of step t."""
    shares = normal(records[t].log_survivors)
    if t == len(records) - 1:
        return shares
    later = influence(records, t + 1) - normal(records[t + 1].log_starts)
    return shares + [later[records[t + 1].parents == k].sum() for k in range(len(shares))]


def normal(log_weights):
    return np.exp(log_weights) / np.exp(log_weights).sum()


def squares(u, F, w):
    """Return (F - r w)^2 n / (n - 1), with n and r of units of uncertainty u, and (F - w)^2 for one unit."""
    u = np.where(u > 1e-12, u, 0.0)
    if not np.any(u * w > 0):
        return np.zeros(len(F))
    n = np.sum(u * w) ** 2 / np.sum((u * w) ** 2)
    return (F - w) ** 2 if n < 1 + 1e-9 else (F - w * np.sum(u * F) / np.sum(u * w)) ** 2 * n / (n - 1)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_the_variance_is_the_sum_over_units(seed, n, steps):
    history = genealogy(np.random.default_rng(seed), n, steps)
    assume(len(history[-1].log_survivors))
    variance, units = unit_by_unit(history)
    assume(variance > 1e-9)
    assert relative_variance(history)[:2] == pytest.approx((variance, units), rel=1e-6)


def test_a_long_run_has_a_shorter_horizon():
    """All 10 particles descend from one of step 20, and the estimate still shows the variance of later steps."""
    R = repetitions(200, 20)
    runs = [smc_standard(Chain(60), 10, rng=rng, progress=False) for rng in np.random.default_rng(8).spawn(R)]
    to_the_end, shorter = ([relative_variance(p.steps, m)[0] for p in runs] for m in (1.0, 3.0))
    spread = np.var([p.log_ml for p in runs], ddof=1)
    assert np.median(to_the_end) < 0.5 * spread < np.median(shorter) < 2 * spread
    assert all(p.log_ml_se**2 > max(each) for p, *each in zip(runs, to_the_end, shorter, strict=True))


def test_the_standard_error_needs_memory_proportional_to_the_particles():
    num = repetitions(20_000, 5_000)
    history = genealogy(np.random.default_rng(0), num, 3)
    tracemalloc.start()
    se, _ = log_ml_error(history)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert se is not None and max(step.parents.size for step in history) > 1.9 * num
    assert peak < 1_000 * 2 * num                       # a table of pairs has 8 * 2 * num bytes a candidate


class Channel(Model):
    """Two tokens, of which the right one is rare, and the others are wrong by different degrees."""

    probs = np.array([0.03, *[0.97 / 59] * 59])
    scores = np.array([0.0, *(-15.0 - 2.0 * np.arange(59))])
    log_Z = 2 * math.log(probs @ np.exp(scores))
    lm = Categorical(dict(enumerate(probs)))

    def step(self):
        self.score(float(self.scores[self.sample(self.lm)]))
        self.s += "x"
        if len(self.s) == 2:
            self.finish()


def test_a_run_that_missed_the_right_candidate_does_not_state_an_error():
    """Both steps need a token of probability 0.03, which 8 of 60 candidates may miss."""
    log_Z = Channel.log_Z
    runs = [smc_steer(Channel(), 4, 2, rng=rng, progress=False) for rng in np.random.default_rng(0).spawn(60)]
    low = [p.log_ml < log_Z - 5 for p in runs]
    assert 10 < sum(low) < 60
    told = [p for p in runs if p.log_ml_se is not None]
    assert all(abs(p.log_ml - log_Z) <= 2 * p.log_ml_se for p in told)
    silent = next(p for p in runs if p.log_ml_se is None)
    assert "chance chose nearly all of the weight at step" in silent.log_ml_se_reason
    found = silent.by("s")
    assert "error unknown" in repr(found) and silent.log_ml_se_reason in repr(found)
    assert found.shares[0].interval == (0.0, 1.0) and found.shares[0].se is None


class Rare(Model):
    """A value of probability 0.15, whose weight comes after six letters."""

    rare = None

    def step(self):
        if self.rare is None:
            self.rare = self.sample(Bernoulli(0.15))
            return
        self.s += self.sample(Categorical({"a": 0.5, "b": 0.3, "c": 0.2}))
        if len(self.s) == 6:
            self.score(math.log(8) * self.rare)
            self.finish()


def test_the_error_of_a_thinned_run_is_never_zero():
    """Runs that lost the value have equal weights. Their error allows for families that selections lost."""
    runs = [smc_steer(Rare(), 5, 3, rng=rng, progress=False) for rng in np.random.default_rng(1).spawn(60)]
    lost = [p for p in runs if not any(particle.rare for particle in p)]
    assert len(lost) > 3 and all(p.log_ml_se > 0.1 * abs(p.log_ml - math.log(2.05)) for p in lost)


def test_repeated_runs_that_disagree_have_the_error_of_their_logs():
    """The log of the mean of three runs hangs on one of them: the jackknife sees 30 nats, and first order 1."""
    none = np.zeros(3)
    assert error_of_mean(np.array([-35.0, -65.0, -70.0]), none) > 15
    assert error_of_mean(np.full(3, -1.0), none) == 0.0
    assert error_of_mean(np.full(3, -1.0), none + 0.3) == pytest.approx(0.3 / math.sqrt(3))
    assert error_of_mean(np.array([-1.0, -np.inf]), none[:2]) is None is error_of_mean(none[:1], none[:1])


def test_a_run_without_chance_in_its_weights_has_no_error():
    class Certain(Chain):
        def step(self):
            self.sample(DIST[0])
            self.score(-2.0)
            self.finish()

    for run in ALGORITHMS.values():
        assert run(Certain(), 10, seed=0, progress=False).log_ml_se == pytest.approx(0.0, abs=1e-6)


def test_a_missing_standard_error_has_a_reason():
    class Doomed(Chain):
        def step(self):
            self.condition(False)

    done = Chain()
    done.finish()
    for particles, reason in [
        (smc_steer(Chain(), 1, 1, seed=0, progress=False), "one candidate at every step"),
        (smc_steer(Channel(), 4, 2, seed=0, progress=False), "chance chose nearly all of the weight at step"),
        (smc_standard(Chain(), 1, seed=0, progress=False), "one candidate at every step"),
        (smc_steer(Doomed(), 4, 2, seed=0, progress=False), "all particles died"),
        (smc_steer(done, 4, 2, seed=0, progress=False), "the program was finished before its first step"),
        (enumerate_exact(Chain(1)), "only the results of smc_steer"),
    ]:
        assert particles.log_ml_se is None and reason in particles.log_ml_se_reason


# ---- repeat


def intersection(lm):
    return PromptIntersection(lm, ["a", "b"], max_tokens=3)


def test_repeated_runs_equal_sequential_runs_in_fewer_rounds():
    model, apart = intersection(cold_lm()), intersection(cold_lm())
    repeats = repeat(lambda rng: smc_steer(model, 3, 2, rng=rng), 5, seed=7, progress=False)
    runs = [smc_steer(apart, 3, 2, rng=rng, progress=False) for rng in np.random.default_rng(7).spawn(5)]
    np.testing.assert_allclose(repeats.log_mls, [particles.log_ml for particles in runs], atol=1e-9)
    assert [one.texts for one in repeats.runs] == [one.texts for one in runs]
    assert 0 < repeats.stats.rounds < sum(particles.stats.rounds for particles in runs)
    assert repeats.stats.rows <= sum(particles.stats.rows for particles in runs)
    assert all(particles.stats is None for particles in repeats.runs)


def test_the_mean_of_repeated_runs_is_unbiased_with_a_standard_error():
    R = repetitions(2000, 50)
    repeats = repeat(lambda rng: smc_standard(Chain(3), 4, rng=rng), R, seed=0, progress=False)
    Zs = np.exp(repeats.log_mls)
    assert repeats.log_ml == pytest.approx(math.log(Zs.mean()))
    assert repeats.log_ml_se == pytest.approx(Zs.std(ddof=1) / math.sqrt(R) / Zs.mean(), rel=0.15)     # to first order
    assert abs(math.expm1(enumerate_exact(Chain(3)).log_ml - repeats.log_ml)) < 4.5 * repeats.log_ml_se
    assert f"{R} runs" in repr(repeats) and "+-" in repr(repeats)


def test_the_values_of_repeated_runs_have_the_error_of_their_disagreement():
    """Runs of `Rare` that lose the value disagree with those that keep it."""
    truth = enumerate_exact(Rare()).by("rare")[True]
    within, num_unseen = [], 0
    for seed in range(repetitions(200, 20)):
        runs = repeat(lambda rng: smc_steer(Rare(), 8, 3, rng=rng), 4, seed=seed, progress=False)
        pooled = np.exp(np.concatenate([p.log_weights for p in runs.runs]))
        holds = np.array([particle.rare for p in runs.runs for particle in p])
        found = runs.by("rare")
        if True not in found:
            num_unseen += 1
            continue
        share = found.share(True)
        assert share.probability == pytest.approx(pooled[holds].sum() / pooled.sum())
        within.append(abs(share.probability - truth) < 2 * share.se)
    assert np.mean(within) > 0.9 - 4.5 * math.sqrt(0.09 / len(within))
    assert num_unseen < len(within) / 4


def test_the_values_of_few_runs_have_no_error():
    alone = repeat(lambda rng: smc_steer(Rare(), 4, 2, rng=rng), 1, seed=0, progress=False)
    assert "(error unknown)" in repr(alone.by("rare"))

    class Doomed(Chain):
        def step(self):
            self.condition(False)

    doomed = repeat(lambda rng: smc_steer(Doomed(), 4, 2, rng=rng), 2, seed=0, progress=False)
    with pytest.raises(ValueError, match="no particle is left in any of 2 runs"):
        doomed.by("state")


class Tilted(Model):
    """A coin whose heads weigh 3: Z is 2, one draw gives 3 or 1, and two different draws give 2."""

    def step(self):
        self.score(math.log(3) * self.sample(Bernoulli(0.5)))
        self.finish()


def test_tune_names_the_cheapest_size_within_its_tolerance():
    tuning = tune(Tilted(), (1, 2), (1, 2), R=20, seed=0)
    (one, *more), log_2 = tuning.values(), math.log(2)
    heads = round(20 * one.log_mls.mean() / math.log(3))
    assert 0 < heads < 20 and one.spread == pytest.approx(math.log(3) * math.sqrt(heads * (20 - heads) / (20 * 19)))
    assert [each for runs in more for each in (*runs.log_mls, runs.spread)] == pytest.approx([*[log_2] * 20, 0] * 3)
    assert tuning.cheapest == (1, 2) and tune(Tilted(), 1, 1, tolerance=0.1, seed=0).cheapest is None
    low = log_2 - one.log_mls.mean() + one.spread
    assert tuning._bars()[0][0] == pytest.approx((one.spread, 0.0, 2 * one.spread))
    assert tuning._bars()[1][0] == pytest.approx((low, low, low)) and tuning._repr_html_().count("<rect") == 4
    with pytest.raises(ValueError, match="N must be"):  # before any run
        tune(None, (4, 0))
    lm, cold = cold_lm(), cold_lm()
    two, one = tune(intersection(lm), (2,), (2, 1), R=2, seed=5, before=lm.clear).values()
    runs = repeat(lambda rng: smc_steer(intersection(cold), 2, 2, rng=rng), 2, seed=5, progress=False)
    assert two.stats.tokens == runs.stats.tokens and one.stats.tokens > 0
    assert tuning.to_pandas()["N"].tolist() == [1, 1, 2, 2]


def test_repeat_refuses_invalid_arguments():
    with pytest.raises(TypeError, match="returns Particles, as smc_steer does, not 3"):
        repeat(lambda rng: 3, 2, seed=0, progress=False)
    with pytest.raises(TypeError, match="run must be a function, as lambda rng"):
        repeat(smc_standard(Chain(), 2, seed=0), 2)
    with pytest.raises(ValueError, match="R must be at least 1"):
        repeat(lambda rng: smc_standard(Chain(), 2, rng=rng), 0)
    with pytest.raises(ValueError, match="not both"):
        repeat(lambda rng: smc_standard(Chain(), 2, rng=rng), 2, seed=0, rng=np.random.default_rng(0))


def test_an_error_in_a_repeated_run_names_the_run():
    def run(rng):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        repeat(run, 2, seed=0, progress=False)
    assert caught.value.__notes__ == ["in run 0"]
