"""Comparison of two distributions over strings: a test of equality, and an interval for their distance.

Two samples are tested for homogeneity; a sample and a known distribution (`Exact`) for goodness of fit. The statistic
is Pearson's,  X2 = sum (observed - expected)^2 / expected.  Its chi-square distribution is wrong for small counts. So R
tables are drawn under the null hypothesis, those of two samples with the same margins, and  p = (1 + #{X2_r >= X2}) /
(1 + R).  A test at level alpha then rejects with probability at most alpha, whatever the counts.

The distance is the total variation,  TV = sum |a - b| / 2.  Between samples it is too large on average, and bootstrap
intervals hardly ever contain a true TV near 0. The interval here is Newcombe's for the difference of the probabilities
of the set S of strings that are more frequent in a. Its lower end is reduced by the bias from choosing S after seeing
the samples,  sum (E|Z| - |E Z|) / 2,  for normal Z with the variance of a - b and the smallest plausible |E Z|.

Several choices on each side, one for each template, are compared in pairs. Under the null hypothesis the groups are
exchangeable within each template, and templates are independent. So p is the share of the relabellings of the groups,
template by template, whose means are as far apart as those observed. It is exact if all relabellings can be counted.

Sources: Phipson & Smyth (2010), "Permutation p-values should never be zero"; Wilson (1927), "Probable inference";
Newcombe (1998), "Interval estimation for the difference between independent proportions", method 10.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from llmppl.queries.matches import Match
from llmppl.report.probabilities import Probabilities, key_of
from llmppl.report.tables import Bars, Rows, TableView
from llmppl.support import arguments

Array = NDArray[Any]  # (C,) int64 counts or float64 probabilities
Side = Iterable[str] | Mapping[str, int] | Probabilities | Any  # | Any: Exact
Choices = Sequence[Probabilities]  # one for each template

MAX_CELLS = 1_000_000  # cells of the tables drawn at a time
Z = NormalDist().inv_cdf(0.975)  # of a two-sided interval at 95 %
MAX_GROUPS = 7
ROUNDING = 1e-9  # relative difference below which statistics are equal
TINY = 1e-100  # in place of a standard deviation of 0


class Exact:
    """Known distribution, in place of a sample: `Exact({"yes": 0.7, "no": 0.3})`.

    The probabilities are divided by their sum. ValueError unless that is 1, to 1e-6.

    Examples
    --------
    >>> fair = Exact({"heads": 0.5, "tails": 0.5})
    >>> compare({"heads": 14, "tails": 6}, fair, seed=0).p > 0.05
    True
    """

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        for text, p in probabilities.items():
            arguments.probability(
                f"Exact: the probability of {arguments.text('Exact: each string', text)!r}", p
            )
        total = math.fsum(probabilities.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(
                f"Exact: the probabilities sum to {total:.6g}, not to 1; counts are given without Exact"
            )
        self.probabilities = {text: float(p) / total for text, p in probabilities.items() if p}

    def __repr__(self) -> str:
        return f"Exact({self.probabilities!r})"


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(TableView):
    """Result of `compare`, displayed as a table; in a notebook, each row has a bar for a and one for b, samples
    with Wilson's interval at 95 %. `names` are those of the sides.

    `categories` are the C strings on either side, the most frequent first. `a` and `b`, (C,) ndarray, are int64 counts
    of samples, or float64 probabilities of an exact side, where `num_a` or `num_b` is None. `tv_interval` contains the
    total variation of the two distributions at 95 %.

    `p` is the probability of a statistic at least as large if both sides have one distribution, from `draws` drawn
    tables; it is at least 1 / (1 + draws). `statistic` is Pearson's, inf where a sample has a string of exact
    probability 0. `df` is the number of strings on either side (on the exact side, if there is one) minus 1.
    If both sides are exact, there is nothing to test: `p`, `statistic`, `df` and `tv_interval` are None.

    Examples
    --------
    >>> comparison = compare(["yes"] * 70 + ["no"] * 30, Exact({"yes": 0.5, "no": 0.5}), seed=0)
    >>> comparison.categories, comparison.a, comparison.b
    (('yes', 'no'), array([70, 30]), array([0.5, 0.5]))
    >>> round(comparison.tv, 2), [round(end, 2) for end in comparison.tv_interval]
    (0.2, [0.1, 0.28])
    """

    categories: tuple[str, ...]
    a: Array
    b: Array
    num_a: int | None
    num_b: int | None
    p: float | Any  # | Any: None only for two exact sides
    statistic: float | Any
    df: int | Any
    draws: int
    tv_interval: tuple[float, float] | Any
    names: tuple[str, ...] = ("a", "b")

    @property
    def shares(self) -> tuple[Array, Array]:
        """(C,) frequencies or probabilities of each side."""
        return self.a / (self.num_a or 1), self.b / (self.num_b or 1)

    @property
    def tv(self) -> float:
        """Total variation between the frequencies or probabilities; on average too large for samples."""
        return float(np.abs(np.subtract(*self.shares)).sum() / 2)

    def _header(self) -> str:
        sides = []
        for name, num in zip(self.names, (self.num_a, self.num_b), strict=True):
            sides.append(f"{name}: exact" if num is None else f"{name}: {num:,} drawn")
        head = f"Comparison({', '.join(sides)}, strings: {len(self.categories):,})\ntotal variation {self.tv:.4f}"
        if self.p is None:
            return f"{head}; both sides are exact: there is nothing to test"
        low, high = self.tv_interval
        p = f"p = {self.p:.2g} by {self.draws:,} draws"
        if self.p < 1.5 / (1 + self.draws):
            p += " (the least they can show)"
        return f"{head}, between {low:.4f} and {high:.4f} at 95 %\n{p}; X2 = {self.statistic:.2f}, {self.df} df"

    def _table(self) -> tuple[list[str], Rows]:
        rows = []
        for text, a, b, difference in map(dict.values, self.records()):
            shown = arguments.shown(text)
            rows.append(
                (_cell(a, self.num_a), _cell(b, self.num_b), f"{100 * difference:+.1f} %", shown)
            )
        return [*self.names, " - ".join(self.names), "string"], rows

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each string: its count or probability on each side, and the difference of the shares."""
        sides = self.a.tolist(), self.b.tolist(), np.subtract(*self.shares).tolist()
        columns = "string", *self.names, "difference"
        return [
            dict(zip(columns, row, strict=True))
            for row in zip(self.categories, *sides, strict=True)
        ]

    def _bars(self) -> Bars:
        bars = []
        for a, b in np.column_stack(self.shares).tolist():
            bars.append(
                [(a, *_wilson(a, self.num_a or math.inf)), (b, *_wilson(b, self.num_b or math.inf))]
            )
        return bars


@dataclass(frozen=True, repr=False, eq=False)
class PairedComparison(TableView):
    """Result of `compare` for T templates and G groups, displayed as a table of means over the templates.

    names, options : tuples of the names of the groups, and of the C options
    probabilities : (T, G, C) ndarray
    tv : float, total variation between the means of two groups, on average over all pairs of groups
    p : float
        Probability of at least this `tv`, if the groups are exchangeable within each template. It is exact if `draws`
        is 0, else from so many drawn relabellings.

    Examples
    --------
    >>> templates = ["{} was very", "{} felt so", "Soon {} was"]
    >>> groups = {name: choose(lm, [each.format(name) for each in templates], [" happy", " sad"])
    ...           for name in ("Lily", "Tom")}
    >>> compared = compare(groups)
    >>> compared.names, compared.probabilities.shape, compared.p, compared.draws
    (('Lily', 'Tom'), (3, 2, 2), 0.25, 0)
    """

    names: tuple[str, ...]
    options: tuple[Any, ...]
    probabilities: Array
    tv: float
    p: float
    draws: int

    def _header(self) -> str:
        by = f"{self.draws:,} draws" if self.draws else "all relabellings"
        head = f"PairedComparison({len(self.probabilities)} templates, {len(self.names)} groups)"
        return f"{head}\ntotal variation of the means {self.tv:.4f}\np = {self.p:.2g} by {by} within templates"

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each option and group: the mean, its difference to the first group, and the error of that.

        The standard error is that over the templates.
        """
        differences = self.probabilities - self.probabilities[:, :1]
        errors = differences.std(axis=0, ddof=1) / math.sqrt(len(differences))
        columns = np.stack(
            [self.probabilities.mean(axis=0), differences.mean(axis=0), errors], axis=-1
        ).tolist()
        rows = []
        for c, option in enumerate(self.options):
            for name, numbers in zip(self.names, columns, strict=True):
                mean, difference, se = numbers[c]
                rows.append(
                    {
                        "option": option,
                        "group": name,
                        "mean": mean,
                        "difference": difference,
                        "se": se,
                    }
                )
        return rows

    def _table(self) -> tuple[list[str], Rows]:
        rows = []
        for row in self.records():
            difference = f"{100 * row['difference']:+.1f} % +- {100 * row['se']:.1f}"
            rows.append(
                [
                    f"{100 * row['mean']:.1f} %",
                    difference,
                    row["group"],
                    arguments.shown(row["option"]),
                ]
            )
        return ["mean", f"minus {self.names[0]}", "group", "option"], rows


@overload
def compare(  # type: ignore[overload-overlap]
    a: Choices | Mapping[str, Choices],
    b: Choices | None = None,
    *,
    permutations: int = 10_000,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
) -> PairedComparison: ...
@overload
def compare(
    a: Side,
    b: Side = None,
    *,
    permutations: int = 10_000,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
) -> Comparison: ...


def compare(
    a: Any,
    b: Any = None,
    *,
    permutations: int = 10_000,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
) -> Comparison | PairedComparison:
    """Test if two distributions over strings differ, and bound their distance.

    Parameters
    ----------
    a, b : iterable of str or Match, mapping of str to int, Exact, Choice, or list of Choices
        Samples, their counts, or a known distribution; of matches, the texts after the prefix count. Samples must be
        independent. Draws from one set of weighted particles are not: many are copies of a few, and the test would
        reject far too often. Weighted matches are a ValueError. Lists of choices are those after several templates,
        in one order (`PairedComparison`).
        In place of both, a mapping from names to sides. Lists of choices may then be of more than two groups.
    permutations : int, at least 1
        Number R of tables or relabellings to draw for p. Fewer relabellings are all counted.

    Examples
    --------
    >>> comparison = compare({"yes": 70, "no": 30}, {"yes": 50, "no": 50}, seed=0)
    >>> round(comparison.tv, 2), comparison.p < 0.05
    (0.2, True)
    """
    arguments.count("permutations", permutations)
    rng = arguments.generator(seed, rng)
    sides: Mapping[str, Any] = {"a": a, "b": b}
    if b is None and isinstance(a, Mapping) and not isinstance(a, Probabilities):
        sides = a
    for name in sides:
        if arguments.text("compare: each name of a side", name) in ("string", "difference"):
            raise ValueError(
                f"compare: {name!r} is another column of the table; give the side another name"
            )
    if len(sides) > 1 and all(map(_is_paired, sides.values())):
        return _paired(sides, permutations, rng)
    if len(sides) != 2 or any(side is None or isinstance(side, int) for side in sides.values()):
        raise TypeError(
            'compare takes two sides, or a mapping from their names, as {"men": ..., "women": ...}; '
            "lists of choices after the same templates may be more than two"
        )
    (of_a, num_a), (of_b, num_b) = itertools.starmap(_side, sides.items())

    def rank(text: str) -> tuple[float, str]:
        joint = of_a.get(text, 0) / (num_a or 1) + of_b.get(text, 0) / (num_b or 1)
        return -joint, text

    categories = tuple(sorted(of_a | of_b, key=rank))
    left = _column(of_a, num_a, categories)
    right = _column(of_b, num_b, categories)
    test: Any = None, None, None
    if num_a:
        test = _test(left, num_a, right, num_b, permutations, rng)
    elif num_b:
        test = _test(right, num_b, left, None, permutations, rng)
    p, statistic, df = test
    found = Comparison(
        categories, left, right, num_a, num_b, p, statistic, df, permutations, None, (*sides,)
    )
    if df is None:
        return found
    return replace(
        found, tv_interval=_interval(*found.shares, num_a or math.inf, num_b or math.inf)
    )


def _column(counts: Mapping[str, float], num: int | None, categories: tuple[str, ...]) -> Array:
    """Return the counts of the categories, or the probabilities of an exact side."""
    column = np.array([counts.get(text, 0) for text in categories], np.int64 if num else np.float64)
    column.flags.writeable = False
    return column


def _cell(value: float, num: int | None) -> str:
    """Return a count with its share, or the probability of an exact side."""
    if num is None:
        return f"{100 * value:.1f} %"
    return f"{value:,} ({100 * value / num:.1f} %)"


def _is_paired(side: Any) -> bool:
    return isinstance(side, list | tuple) and len(side) > 0 and isinstance(side[0], Probabilities)


def _paired(sides: Mapping[str, Choices], draws: int, rng: np.random.Generator) -> PairedComparison:
    """Compare groups of choices, one for each template."""
    first, *_ = sides.values()
    lengths = {name: len(choices) for name, choices in sides.items()}
    if set(lengths.values()) != {len(first)} or len(first) < 2:
        raise ValueError(
            f"each side has one choice for each template, at least two; they have {lengths}"
        )
    options = [share.value for share in first[0].shares]
    rows = []
    for name, choices in sides.items():
        for number, choice in enumerate(choices):
            _check_exact(f"{name}[{number}]", choice)
            if {*map(key_of, choice)} != {*map(key_of, options)}:
                raise ValueError(
                    f"{name}[{number}] has other options than the first choice: {[*choice]}"
                )
            rows.append([choice[option] for option in options])
    probabilities = np.reshape(rows, (len(sides), len(first), -1)).swapaxes(0, 1)
    p, drawn = _relabelled(probabilities, draws, rng)
    tv = float(_spread(probabilities.mean(axis=0)))
    return PairedComparison((*sides,), (*options,), probabilities, tv, p, drawn)


def _relabelled(probabilities: Array, draws: int, rng: np.random.Generator) -> tuple[float, int]:
    """Return p over relabellings of the groups in each template, and the number of draws, 0 if all were counted."""
    num_templates, num_groups, num_options = probabilities.shape
    if num_groups > MAX_GROUPS:
        raise ValueError(f"{num_groups} groups: at most {MAX_GROUPS} are compared together")
    orders = np.array([*itertools.permutations(range(num_groups))])
    exact = len(orders) ** (num_templates - 1) <= draws  # the first template keeps its labels
    if exact:
        picks = np.array([*itertools.product(range(len(orders)), repeat=num_templates - 1)])
    else:
        picks = rng.integers(len(orders), size=(draws, num_templates - 1))
    least = _spread(probabilities.sum(axis=0)) * (1 - ROUNDING)
    size = max(1, MAX_CELLS // (num_groups * num_options))
    as_large = 0
    for begin in range(0, len(picks), size):
        sums = probabilities[:1]
        for template, pick in zip(probabilities[1:], picks[begin : begin + size].T, strict=True):
            sums = sums + template[orders[pick]]
        as_large += int((_spread(sums) >= least).sum())
    if exact:
        return as_large / len(picks), 0
    return (1 + as_large) / (1 + draws), draws


def _spread(means: Array) -> Any:
    """Return the total variation between (..., G, C) distributions, on average over all pairs."""
    pairs = itertools.combinations(range(means.shape[-2]), 2)
    return np.mean(
        [np.abs(means[..., i, :] - means[..., j, :]).sum(axis=-1) / 2 for i, j in pairs], axis=0
    )


def _check_exact(name: str, given: Probabilities) -> None:
    if any(share.se is not None for share in given.shares):
        raise ValueError(
            f"{name} has estimates of particles, which are no independent samples: compare exact ones"
        )


def _side(name: str, given: Side) -> tuple[dict[str, float], int | None]:
    """Return the counts or probabilities above 0, and the number of samples, None if `given` is exact."""
    if isinstance(given, Probabilities):
        _check_exact(name, given)
        labels = [each if isinstance(each, str) else repr(each) for each in given]
        given = Exact(dict(zip(labels, given.values(), strict=True)))
    if isinstance(given, Exact):
        return given.probabilities, None
    if isinstance(given, str):
        raise TypeError(
            f"{name} is the str {given!r}; samples are strings in a list, as in [{given!r}]"
        )
    if not isinstance(given, Mapping):
        given = map(_text, given)
    counts = Counter(given)
    for text, times in counts.items():
        arguments.text(f"{name}: each string", text)
        arguments.count(
            f"{name}: the number of {text!r} (known probabilities need Exact({{...}}))",
            times,
            least=0,
        )
    found: dict[str, float] = {text: int(times) for text, times in counts.items() if times}
    if not found:
        raise ValueError(f"{name} has no sample; at least one is needed")
    return found, int(sum(found.values()))


def _text(drawn: Any) -> Any:
    """Return the text of a match, after its prefix. ValueError for a weighted sample."""
    if getattr(drawn, "log_weight", 0.0):
        raise ValueError(
            "weighted samples have no counts: draw with Query.distinct(seed=...), or compare Exact"
        )
    return str(drawn)[len(drawn.prefix) :] if isinstance(drawn, Match) else drawn


def _test(
    sample: Array,
    num: int,
    other: Array,
    num_other: int | None,
    draws: int,
    rng: np.random.Generator,
) -> tuple[float, float, int]:
    """Test a sample against another one, or against a known distribution. Return p, X2 and its degrees of freedom."""
    draw: Callable[..., Array]
    if num_other:  # by tables with the same margins
        total = sample + other
        expected = total * (num / (num + num_other))
        # (o - e)^2 / e summed over both rows: the differences are equal, and 1 / e + 1 / e_other = 1 / scale
        scale = expected * (num_other / (num + num_other))
        draw = partial(rng.multivariate_hypergeometric, total, num)
    else:  # by samples from the distribution
        possible = other > 0
        if sample[~possible].any():
            return 1 / (1 + draws), math.inf, int(possible.sum()) - 1
        sample = sample[possible]
        known = other[possible] / other[possible].sum()
        expected = scale = num * known
        draw = partial(rng.multinomial, num, known)
    statistic = float(((sample - expected) ** 2 / scale).sum())
    as_large = 0
    size = max(1, MAX_CELLS // sample.size)  # tables at a time
    for begin in range(0, draws, size):
        drawn = ((draw(min(size, draws - begin)) - expected) ** 2 / scale).sum(axis=1)
        as_large += int((drawn >= statistic * (1 - ROUNDING)).sum())
    return (1 + as_large) / (1 + draws), statistic, sample.size - 1


def _interval(p_a: Array, p_b: Array, num_a: float, num_b: float) -> tuple[float, float]:
    """Return the interval for the total variation of two distributions, given num_a and num_b samples (inf: exact)."""
    more = p_a > p_b
    high = float(p_a[more].sum())
    low = float(p_b[more].sum())
    for share in p_a[
        p_a == p_b
    ].tolist():  # ties: bring S near one half, where its frequency varies most
        if abs(high + share - 0.5) < abs(high - 0.5):
            high += share
            low += share
    below_high, above_high = _wilson(high, num_a)
    below_low, above_low = _wilson(low, num_b)
    pooled = (p_a + p_b) / 2
    sd = np.maximum(np.sqrt(pooled * (1 - pooled) * (1 / num_a + 1 / num_b)), TINY)
    least = np.maximum(0, np.abs(p_a - p_b) / sd - Z)
    tails = np.vectorize(math.erfc)(least / math.sqrt(2))
    chosen = float(
        (sd * (math.sqrt(2 / math.pi) * np.exp(-(least**2) / 2) - least * tails)).sum() / 2
    )
    lower = high - low - chosen - math.hypot(high - below_high, above_low - low)
    upper = high - low + math.hypot(above_high - high, low - below_low)
    return max(0.0, lower), min(1.0, upper)


def _wilson(p: float, num: float) -> tuple[float, float]:
    """Return Wilson's interval for a probability, from its frequency `p` among `num` samples (inf: exact)."""
    whole = 1 + Z * Z / num
    middle = (p + Z * Z / (2 * num)) / whole
    half = Z / whole * math.sqrt(max(0.0, p * (1 - p)) / num + (Z / num) ** 2 / 4)
    return middle - half, middle + half
