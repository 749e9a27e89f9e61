"""Comparisons: values by scipy and by hand, p against all tables, the level of the test and of the interval."""

import csv
import io
import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import tiny_lm
from scipy.stats import chi2_contingency, chisquare, multinomial, permutation_test, ttest_rel

from llmppl import Categorical, Model, choose, importance_sampling
from llmppl.queries import Comparison, Exact, Query, compare
from llmppl.queries.comparison import _wilson
from llmppl.report.probabilities import Probabilities, Share

RUNS = repetitions(4000, 400)
NAMES = [f"s{i:02}" for i in range(50)]


def named(counts) -> dict[str, int]:
    return dict(zip(NAMES, counts, strict=False))


def skewed(num: int) -> np.ndarray:
    """Return shares of `num` strings, from frequent to rare."""
    weights = 1 / np.arange(1, num + 1)
    return weights / weights.sum()


def pearson(table) -> float:
    return float(chi2_contingency(np.array(table)[:, np.sum(table, 0) > 0], correction=False).statistic)


def compared(shares_a, shares_b, n_a, n_b, runs, seed, **options) -> list[Comparison]:
    """Compare samples `runs` times; `n_b` is None for a known distribution."""
    rng = np.random.default_rng(seed)
    known = Exact(named(shares_b.tolist()))

    def drawn(n, shares):
        return named(rng.multinomial(n, shares).tolist())

    sides = [(drawn(n_a, shares_a), known if n_b is None else drawn(n_b, shares_b)) for _ in range(runs)]
    return [compare(*each, rng=rng, **options) for each in sides]


# ---- by hand


@pytest.mark.parametrize("a, b", [((10, 20), (20, 10)), ((7, 0, 12, 1), (3, 9, 4, 2)), ((1430, 510, 60), (20, 9, 4))])
def test_two_samples_have_the_statistic_of_scipy(a, b):
    found, truth = compare(named(a), named(b), seed=0), chi2_contingency([a, b], correction=False)
    assert found.statistic == pytest.approx(truth.statistic) and found.df == truth.dof
    assert (found.num_a, found.num_b) == (sum(a), sum(b)) == (found.a.sum(), found.b.sum())
    assert found.tv == pytest.approx(np.abs(np.array(a) / sum(a) - np.array(b) / sum(b)).sum() / 2)


def test_goodness_of_fit_has_the_statistic_of_scipy():
    known, truth = Exact({"a": 0.5, "b": 0.3, "c": 0.2}), chisquare([18, 42, 0], [30, 18, 12])
    found = compare({"a": 18, "b": 42}, known, seed=0)
    assert found.statistic == pytest.approx(truth.statistic)
    assert found.df == 2 and found.tv == pytest.approx(0.4)
    other = compare(known, {"a": 18, "b": 42}, seed=0)
    assert (other.p, other.statistic) == (found.p, found.statistic)
    assert other.tv_interval == pytest.approx(found.tv_interval)
    assert other.num_a is None and other.num_b == 60
    impossible = compare(["a", "b"], Exact({"a": 1}), permutations=99)
    assert impossible.statistic == math.inf and impossible.p == 0.01


def test_two_known_distributions_are_not_tested():
    found = compare(Exact({"a": 0.5, "b": 0.5}), Exact({"a": 0.25, "b": 0.5, "c": 0.25}))
    assert found.p is found.statistic is found.tv_interval is None
    assert found.tv == pytest.approx(0.25)


def test_samples_are_counted_and_seeds_repeat():
    samples, counts = ["x", "y", "x", "z"], {"x": 2, "z": 1, "y": 1, "never": 0}
    first, again = (compare(side, {"x": 5, "y": 1}, seed=3) for side in (samples, counts))
    assert repr(first) == repr(again) and first.p == again.p and "never" not in first.categories
    assert compare(iter(np.array(samples)), Counter(x=5, y=1), rng=np.random.default_rng(3)).p == first.p
    assert not first.a.flags.writeable


def test_matches_count_by_their_text_and_weighted_ones_are_refused():
    query = Query(tiny_lm(), "a(b|c)", prefix="a")
    drawn = list(query.distinct(seed=0)) * 3
    assert compare(drawn, {"b": 3, "c": 3}).categories == ("b", "c")
    with pytest.raises(ValueError, match="weighted samples have no counts"):
        compare(itertools.islice(query.samples(seed=0), 9), {"b": 3})


def test_the_table_shows_counts_shares_and_results():
    shown = repr(compare({"yes": 1430, "no": 510, "may\nbe": 60}, Exact({"yes": 0.75, "no": 0.25}), seed=1))
    assert shown == "\n".join(
        [
            "Comparison(a: 2,000 drawn, b: exact, strings: 3)",
            "total variation 0.0350, between 0.0115 and 0.0552 at 95 %",
            "p = 0.0001 by 10,000 draws (the least they can show); X2 = inf, 1 df",
            "",
            "             a       b   a - b  string",
            "1,430 (71.5 %)  75.0 %  -3.5 %  'yes'",
            "  510 (25.5 %)  25.0 %  +0.5 %  'no'",
            "    60 (3.0 %)   0.0 %  +3.0 %  'may\\nbe'",
        ]
    )
    known = compare(Exact({"a": 0.25, "b": 0.75}), Exact({"b": 1}))
    assert repr(known).splitlines()[1] == "total variation 0.2500; both sides are exact: there is nothing to test"
    widths = [float(width) for width in re.findall(r'rect y="1" width="([0-9.]+)"', known._repr_html_())]
    assert widths == [59.5, 79.0, 20.5, 1.0] and "<path" not in known._repr_html_()       # px of a and b in each row
    drawn = compare({"x": 30, "y": 10}, {"x": 10, "y": 10}, seed=0)
    assert drawn._bars()[0][0] == (0.75, *_wilson(0.75, 40)) and drawn._repr_html_().count("<path") == 4
    many = repr(compare({f"{i}" * 100: 30 - i for i in range(25)}, {"x": 1}))
    assert "'" + "0" * 49 + "..." in many and "... and 6 more" in many


# ---- p


def test_p_is_never_zero():
    assert compare({"a": 1000}, {"b": 1000}, permutations=99).p == 0.01
    assert compare({"a": 1000}, Exact({"a": 0.5, "b": 0.5}), permutations=49).p == 0.02
    assert compare({"a": 10}, {"a": 12}).p == compare({"a": 10}, Exact({"a": 1})).p == 1


@pytest.mark.parametrize("a, b", [((5, 1), (1, 5)), ((3, 0, 1), (0, 4, 2)), ((1, 0), (0, 1)), ((5, 5), (1, 1))])
def test_p_counts_the_relabelings_that_are_at_least_as_far_apart(a, b):
    total = np.add(a, b)
    labels = np.repeat(np.arange(len(a)), total)
    lefts = [np.bincount(labels[[*c]], minlength=len(a)) for c in itertools.combinations(range(len(labels)), sum(a))]
    truth = float(np.mean([pearson([left, total - left]) >= pearson([a, b]) - 1e-9 for left in lefts]))
    R = repetitions(100_000, 8000)
    p = compare(named(a), named(b), permutations=R, seed=5).p
    assert abs(p - truth) <= 4 * math.sqrt(truth * (1 - truth) / R) + 1 / R


def test_p_is_the_share_of_samples_that_fit_no_better():
    shares, n, observed = np.array([0.6, 0.3, 0.1]), 6, np.array([2, 1, 3])
    tables = np.array([counts for counts in itertools.product(range(n + 1), repeat=3) if sum(counts) == n])

    def statistic(counts):
        return ((counts - n * shares) ** 2 / (n * shares)).sum(-1)

    truth = multinomial(n, shares).pmf(tables[statistic(tables) >= statistic(observed)]).sum()
    known, R = Exact(named(shares.tolist())), repetitions(100_000, 8000)
    p = compare(named(observed.tolist()), known, permutations=R, seed=2).p
    assert abs(p - truth) <= 4 * math.sqrt(truth * (1 - truth) / R) + 1 / R


def rejections(*problem, runs=RUNS) -> float:
    """Return the frequency of p <= 0.05."""
    return float(np.mean([each.p <= 0.05 for each in compared(*problem, runs, 11, permutations=199)]))


@pytest.mark.parametrize("num", [2, 10])
@pytest.mark.parametrize("n_a, n_b", [(1000, 1000), (200, 1500), (500, None)])
def test_the_test_rejects_one_true_hypothesis_in_twenty(num, n_a, n_b):
    rate = rejections(skewed(num), skewed(num), n_a, n_b)
    assert abs(rate - 0.05) < 4 * math.sqrt(0.05 * 0.95 / RUNS) + 0.005       # what is lost to ties


@pytest.mark.parametrize("num", [2, 10, 40])
@pytest.mark.parametrize("n_a, n_b", [(8, 8), (5, 30), (12, None)])
def test_the_test_keeps_its_level_at_small_counts(num, n_a, n_b):
    assert rejections(skewed(num), skewed(num), n_a, n_b) < 0.05 + 4 * math.sqrt(0.05 * 0.95 / RUNS)


def test_a_shift_is_found_as_often_as_the_normal_distribution_says():
    # two shares, 0.5 and 0.6, of 500 samples each: a difference of 3.18 standard errors, so power 0.889
    rate = rejections(np.array([0.5, 0.5]), np.array([0.6, 0.4]), 500, 500)
    assert abs(rate - 0.889) < 4 * math.sqrt(0.889 * 0.111 / RUNS) + 0.02     # permutations are few, ties are counted
    assert rejections(skewed(10), skewed(10)[::-1], 100, 100, runs=50) == 1


# ---- the interval


def test_the_interval_without_maximisation_is_Newcombes():
    # Newcombe (1998): 81 / 263 by Wilson's method; 56 / 70 - 48 / 80 by method 10
    low, high = compare({"x": 81, "y": 182}, Exact({"y": 1}), seed=0).tv_interval
    assert low == pytest.approx(0.2553, abs=5e-5) and high == pytest.approx(0.3662, abs=5e-5)
    low, high = compare({"x": 56, "y": 14}, {"x": 48, "y": 32}, seed=0).tv_interval
    assert high == pytest.approx(0.3339, abs=5e-5) and 0.02 < low < 0.0524     # moved down: which is more was seen
    low, high = compare({"x": 5600, "y": 1400}, {"x": 4800, "y": 3200}, seed=0).tv_interval
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.8 * 0.2 / 7000 + 0.6 * 0.4 / 8000), rel=1e-2)


@pytest.mark.parametrize("num", [2, 3, 10, 50])
@pytest.mark.parametrize("n_a, n_b", [(20, 20), (200, 200), (30, 500), (200, None)])
@pytest.mark.parametrize("shift", [0, 0.1, 0.5, 1])
def test_the_interval_covers_the_total_variation_at_its_level(num, n_a, n_b, shift):
    a, runs = skewed(num), repetitions(2000, 100)
    b = (1 - shift) * a + shift * a[::-1]
    found = [each.tv_interval for each in compared(a, b, n_a, n_b, runs, 4, permutations=1)]
    low, high = np.array(found).T
    truth = np.abs(a - b).sum() / 2
    inside = np.mean((low - 1e-12 <= truth) & (truth <= high + 1e-12))
    assert inside > 0.93 - 4 * math.sqrt(0.95 * 0.05 / runs)


def test_the_interval_shrinks_with_the_root_of_the_samples():
    counts = [(n * skewed(4)).astype(int).tolist() for n in (10_000, 40_000)]
    intervals = [compare(named(each), named(each[::-1]), permutations=1).tv_interval for each in counts]
    wide, narrow = np.diff(intervals).ravel()
    assert wide / narrow == pytest.approx(2, rel=0.01)


# ---- errors


OK = {"a": 3, "b": 4}


@pytest.mark.parametrize("a, options, error, message", [
    ({"a": -1}, {}, ValueError, "a: the number of 'a' .* must be at least 0, not -1"),
    ({"a": 0.5}, {}, TypeError, r"known probabilities need Exact\({...}\)\) must be an integer, not 0.5"),
    ({"a": 0}, {}, ValueError, "a has no sample; at least one is needed"),
    ([], {}, ValueError, "a has no sample"),
    ("yes", {}, TypeError, r"a is the str 'yes'; samples are strings in a list, as in \['yes'\]"),
    ([("a", 0.5)], {}, TypeError, r"a: each string must be a str, not \('a', 0.5\)"),
    (OK, {"permutations": 0}, ValueError, "permutations must be at least 1, not 0"),
])  # fmt: skip
def test_errors_name_the_fault_and_a_remedy(a, options, error, message):
    with pytest.raises(error, match=message):
        compare(a, OK, **options)


@pytest.mark.parametrize("probabilities, message", [
    ({"a": 0.5}, "the probabilities sum to 0.5, not to 1; counts are given"),
    ({"a": 1.5, "b": -0.5}, r"the probability of 'a' must be in \[0, 1\], not 1.5"),
    ({"a": math.nan}, "the probability of 'a' must be a number, not nan"),
    ({}, "sum to 0, not to 1"),
])  # fmt: skip
def test_probabilities_of_a_known_distribution_sum_to_one(probabilities, message):
    with pytest.raises(ValueError, match=message):
        Exact(probabilities)


# ---- choices


def group(rows) -> list[Probabilities]:
    """Return a choice for each row of probabilities, as of one template."""
    return [Probabilities([Share(f"o{i}", float(p)) for i, p in enumerate(row)], "") for row in rows]


def total_variation(means) -> float:
    return float(np.mean([np.abs(a - b).sum() / 2 for a, b in itertools.combinations(means, 2)]))


@pytest.mark.parametrize("num_templates", [2, 5, 9])
def test_two_groups_have_the_p_and_the_error_of_scipy(num_templates):
    rng = np.random.default_rng(num_templates)
    a, b = rng.dirichlet([2.0, 2.0], num_templates), rng.dirichlet([3.0, 2.0], num_templates)
    found = compare({"men": group(a), "women": group(b)})
    truth = permutation_test(
        (a[:, 0], b[:, 0]), lambda x, y: abs(x.mean() - y.mean()), permutation_type="samples", alternative="greater"
    )
    assert found.p == pytest.approx(truth.pvalue) and found.draws == 0 and found.names == ("men", "women")
    assert found.tv == pytest.approx(truth.statistic)
    first, second = (row for row in found.records() if row["option"] == "o0")
    assert (first["group"], second["group"]) == ("men", "women") and first["se"] == first["difference"] == 0.0
    assert second["difference"] / second["se"] == pytest.approx(ttest_rel(b[:, 0], a[:, 0]).statistic)


@pytest.mark.parametrize("num_groups, num_templates", [(2, 4), (3, 3), (3, 4), (4, 2)])
def test_several_groups_have_the_p_of_all_relabellings(num_groups, num_templates):
    """Truth: every relabelling of every template, the first one included."""
    rng = np.random.default_rng(7 * num_groups + num_templates)
    data = rng.dirichlet(np.ones(3), (num_templates, num_groups))
    data[:, 0, 0] += 0.5                                # the first group differs
    data /= data.sum(axis=2, keepdims=True)
    observed, orders = total_variation(data.mean(axis=0)), [*itertools.permutations(range(num_groups))]
    ways = itertools.product(orders, repeat=num_templates)
    spreads = [total_variation(np.mean([data[t, list(o)] for t, o in enumerate(way)], axis=0)) for way in ways]
    expected = np.mean(np.array(spreads) >= observed * (1 - 1e-9))
    sides = {f"g{g}": group(data[:, g]) for g in range(num_groups)}
    found = compare(sides)
    assert found.p == pytest.approx(expected) and found.tv == pytest.approx(observed)
    drawn, error = compare(sides, permutations=200, seed=0), math.sqrt(expected * (1 - expected) / 200)
    assert drawn.draws in (0, 200) and abs(drawn.p - expected) < 4 * error + 0.01


def test_templates_without_a_difference_are_seldom_told_apart():
    """At most 5 % of exchangeable groups have p <= 0.05; the standard error is 2.2 % at 100 runs."""
    rng, rejected, runs = np.random.default_rng(3), 0, repetitions(1000, 100)
    for _ in range(runs):
        base = rng.dirichlet(np.ones(3), 6)             # templates differ, and groups do not
        sides = {name: group([rng.dirichlet(20 * row + 0.1) for row in base]) for name in "abc"}
        rejected += compare(sides, permutations=500, rng=rng).p <= 0.05
    assert rejected / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_choices_are_compared_by_name(embedded):
    templates = ["{} was very", "{} felt so", "Soon {} was"]
    prompts = {name: [each.format(name) for each in templates] for name in ("Lily", "Tom")}
    sides = {name: choose(embedded, each, [" happy", " sad"]) for name, each in prompts.items()}
    found, again = compare(sides), compare(*sides.values())
    assert found.p == again.p == 0.25 and again.names == ("a", "b")      # two of eight relabellings: the least
    expected = [[[choice[" happy"], choice[" sad"]] for choice in side] for side in sides.values()]
    np.testing.assert_allclose(found.probabilities, np.swapaxes(expected, 0, 1))
    assert re.search(r"mean +minus Lily +group +option", repr(found)) and "p = 0.25 by all relabellings" in repr(found)
    one = compare({name: side[0] for name, side in sides.items()})
    assert isinstance(one, Comparison) and one.p is None and one.names == ("Lily", "Tom")
    assert one.tv == pytest.approx(abs(sides["Lily"][0][" happy"] - sides["Tom"][0][" happy"]))
    assert "Lily - Tom" in repr(one)
    counts = compare({"x": ["a", "b"], "y": {"a": 3, "b": 4}}, seed=0)
    assert counts.p == compare(["a", "b"], {"a": 3, "b": 4}, seed=0).p and "Comparison(x: 2 drawn" in repr(counts)


class Letter(Model):
    def step(self):
        self.s += self.sample(Categorical({"a": 0.5, "b": 0.5}))
        self.finish()


@pytest.mark.parametrize(
    "sides, error, message",
    [
        (({"a": 1, "b": 2},), TypeError, "two sides, or a mapping from their names"),
        ((["a"],), TypeError, "two sides"),
        ((group([[0.5, 0.5]]),), TypeError, "two sides"),
        (({"x": ["a"], "y": ["b"], "z": ["c"]},), TypeError, "lists of choices .* more than two"),
        ((group([[0.5, 0.5]]), group([[0.5, 0.5]] * 2)), ValueError, "one choice for each template.*'a': 1, 'b': 2"),
        ((group([[0.5, 0.5]]), group([[0.5, 0.5]])), ValueError, "at least two"),
        ((group([[0.5, 0.5]] * 2), group([[0.5, 0.3, 0.2]] * 2)), ValueError, r"b\[0\] has other options"),
        (({str(i): group([[0.5, 0.5]] * 2) for i in range(8)},), ValueError, "8 groups: at most 7"),
        ((importance_sampling(Letter(), 5, seed=0).answers(), Exact({"a": 1.0})), ValueError, "estimates of particles"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(sides, error, message):
    with pytest.raises(error, match=message):
        compare(*sides)


def test_audits_are_exported_as_csv_json_html_and_frames(embedded, tmp_path):
    prompts, options = ['The "man", said', "The\nwoman"], {"y": " yes, sir", "n": " no"}
    choices = choose(embedded, prompts, options)
    sides = {"men": choices, "women": choose(embedded, ["He", "She"], options)}
    compared, one = compare(sides), compare({name: side[0] for name, side in sides.items()})
    for table, rows in ((choices, 4), (compared, 4), (one, 2), (choices[0], 2)):
        text = table.to_csv(tmp_path / "t.csv")
        read = [*csv.DictReader(io.StringIO(text))]
        assert (tmp_path / "t.csv").read_bytes().decode() == text and len(read) == rows
        for record, row in zip(table.records(), read, strict=True):
            assert {name: "" if value is None else str(value) for name, value in record.items()} == row
        assert json.loads(json.dumps(table.records())) == table.records()
        assert table.to_html(tmp_path / "t.html").count("<tr>") == (rows if table is not choices else 2) + 1
        frame = pytest.importorskip("pandas").DataFrame(table.records())
        assert table.to_pandas().equals(frame)
    assert {row["prompt"] for row in choices.records()} == {*prompts}
    assert choices.records()[0]["text"] == options[choices.records()[0]["value"]]
    many = choose(embedded, "x", [f" {letter}{digit}" for letter in "abcde" for digit in range(8)])
    assert many.to_html().count("<tr>") == 41 and many._repr_html_().count("<tr>") == 21


@pytest.mark.parametrize("name, error", [(1, TypeError), ("string", ValueError), ("difference", ValueError)])
def test_a_side_has_a_name_of_its_own(name, error):
    with pytest.raises(error, match="compare: "):
        compare({name: {"yes": 3}, "other": {"yes": 1, "no": 2}}, seed=0)
