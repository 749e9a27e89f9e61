"""Calibration: a map from what a language model says to probabilities that are right as often as they claim.

A *map* of a question with K answers is  log p' = normalise(scale * log p + bias + weights @ features).  The features
of a state are a *sketch* of the log-probabilities of the next token where the answer begins: signed sums over SKETCH
random groups of tokens. Where logits are linear in the last hidden state, as in a transformer, so are the features. A
head on them is a linear head on the hidden state, for every engine and without a further pass.

`fit_calibration` compares kinds of maps by cross-validation:

    none          p' = p
    temperature   scale alone
    biases        scale and bias, shrunk to 0 by a normal prior
    head          bias and weights, ridge chosen by cross-validation, with a temperature from the held-out folds
    prior         bias that divides by the mean of p over the states; where the options are about equally frequent
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.json.closed import Path as FieldPath
from llmppl.constraints.json.closed import closed_values_at, name_of_path
from llmppl.decisions.measures import Outcome, measures
from llmppl.distributions import Floats, Ints
from llmppl.lm import CachedTransformer
from llmppl.report.tables import TableView
from llmppl.support.arguments import shown
from llmppl.support.identity import VERSION, digest

SKETCH = 512  # features of a state
FOLDS = 5
FEW = 20  # fewer labels choose no map, and say so
RIDGES = 1.0, 3.0, 10.0, 30.0  # standard deviations of the weights that are compared
TEMPERATURES = np.geomspace(0.3, 4, 40)
LEAST = -50.0  # log-probabilities below count as this one
MANY = 50  # fewer labels are said to be few
KINDS = "none", "temperature", "biases", "head"
FORMAT = 1
_AGAIN = "fit one in the setting of the decision, or decide without it"


# ---- maps


@dataclass(frozen=True)
class Map:
    """Map from log-probabilities and features to log-probabilities.

    scale : float; bias : (K,); weights : (K, SKETCH), empty without a head
    center, width : (SKETCH,), with which features are standardised
    """

    kind: str
    scale: float
    bias: Floats
    weights: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    center: Floats = field(default_factory=lambda: np.zeros(0))
    width: Floats = field(default_factory=lambda: np.zeros(0))

    def __call__(self, log_probs: Floats, features: Floats) -> Floats:
        """Return (n, K) log-probabilities for (n, K) log-probabilities and (n, SKETCH) features."""
        scores = self.bias + self.scale * log_probs
        if self.weights.size:
            scores = scores + (features - self.center) / self.width @ self.weights.T
        return normalised(scores)


def normalised(scores: Floats) -> Floats:
    scores = scores - scores.max(-1, keepdims=True)
    result: Floats = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return result


def log_of(probabilities: Sequence[Sequence[float]]) -> Floats:
    """Return the log-probabilities of (n, K) probabilities, none below `LEAST`."""
    with np.errstate(divide="ignore"):
        found: Floats = np.maximum(np.log(probabilities), LEAST)
    return found


def sketch(log_probs: Floats) -> Floats:
    """Return (SKETCH,) features of (V,) log-probabilities. Tokens without a probability do not count."""
    groups, signs = _groups(len(log_probs))
    finite = np.isfinite(log_probs)
    centred = np.where(finite, log_probs - log_probs[finite].mean(), 0.0)
    return np.bincount(groups, signs * centred, SKETCH).astype(np.float64)


@functools.lru_cache(4)
def _groups(size: int) -> tuple[Ints, Floats]:
    rng = np.random.default_rng(0)
    return rng.integers(SKETCH, size=size), rng.choice([-1.0, 1.0], size)


# ---- fits: each is a function of (n, K) log-probabilities, (n, SKETCH) features and (n,) labels


def _fit_none(log_probs: Floats, features: Floats, labels: Ints) -> Map:
    return Map("none", 1.0, np.zeros(log_probs.shape[1]))


def _fit_temperature(log_probs: Floats, features: Floats, labels: Ints) -> Map:
    return _fit_scale("temperature", log_probs, labels, bias_sd=0.0)


def _fit_biases(log_probs: Floats, features: Floats, labels: Ints) -> Map:
    return _fit_scale("biases", log_probs, labels, bias_sd=0.5)


def _fit_scale(kind: str, log_probs: Floats, labels: Ints, bias_sd: float) -> Map:
    """Return the most probable scale and bias under a log-normal prior of the scale and a normal one of the bias."""
    right = np.eye(log_probs.shape[1])[labels]

    def gradient(x: Floats) -> Floats:
        scale = math.exp(x[0])
        error = np.exp(normalised(scale * log_probs + x[1:])) - right
        of_bias = np.zeros(len(x) - 1)
        if bias_sd:
            of_bias = error.sum(0) + x[1:] / bias_sd**2
        return np.concatenate([[(error * log_probs).sum() * scale + x[0]], of_bias])

    found = _descend(gradient, np.zeros(1 + log_probs.shape[1]))
    return Map(kind, math.exp(found[0]), found[1:])


def _fit_prior(log_probs: Floats, features: Floats, labels: Ints) -> Map:
    return Map("prior", 1.0, -np.log(np.exp(normalised(log_probs)).mean(0)))


def _fit_head(log_probs: Floats, features: Floats, labels: Ints) -> Map:
    """Return multinomial logistic regression on the features, with ridge and temperature by cross-validation."""
    held = {}
    for sd in RIDGES:
        fit = functools.partial(_fit_ridge, sd=sd)
        held[sd] = held_out(fit, log_probs, features, labels)
    best = min(RIDGES, key=lambda sd: _log_loss(held[sd], labels))
    losses = []
    for temperature in TEMPERATURES:
        prior = 0.5 * math.log(temperature) ** 2 / len(labels)
        losses.append(_log_loss(normalised(held[best] / temperature), labels) + prior)
    scale = 1 / TEMPERATURES[int(np.argmin(losses))]
    head = _fit_ridge(log_probs, features, labels, sd=best)
    return Map("head", 0.0, scale * head.bias, scale * head.weights, head.center, head.width)


def _fit_ridge(log_probs: Floats, features: Floats, labels: Ints, sd: float) -> Map:
    """Return the head whose weights are most probable under a normal prior of the standard deviation `sd`."""
    num_options = log_probs.shape[1]
    center, width = features.mean(0), (features.std(0) + 1e-6) * math.sqrt(SKETCH)
    inputs = (features - center) / width
    left, singular, rows = np.linalg.svd(inputs, full_matrices=False)
    reduced = left * singular  # the weights lie in the space of the rows
    right = np.eye(num_options)[labels]

    def gradient(x: Floats) -> Floats:
        error = np.exp(normalised(reduced @ x[:-1] + x[-1])) - right
        return np.vstack([reduced.T @ error + x[:-1] / sd**2, error.sum(0) + x[-1] / 4])

    found = _descend(gradient, np.zeros((len(singular) + 1, num_options)))
    return Map("head", 0.0, found[-1], found[:-1].T @ rows, center, width)


def _descend(
    gradient: Callable[[Floats], Floats], x: Floats, steps: int = 300, rate: float = 0.05
) -> Floats:
    """Return the minimum that Adam (Kingma & Ba 2015) finds from x."""
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        slope = gradient(x)
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope**2
        x = x - rate * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-9)
    return x


_FITS: dict[str, Callable[[Floats, Floats, Ints], Map]] = {
    "none": _fit_none,
    "temperature": _fit_temperature,
    "biases": _fit_biases,
    "head": _fit_head,
    "prior": _fit_prior,
}


def held_out(fit: Callable[..., Map], log_probs: Floats, features: Floats, labels: Ints) -> Floats:
    """Return (n, K) log-probabilities of each item by the fit to the other folds."""
    folds = np.random.default_rng(0).permutation(len(labels)) % FOLDS
    held = np.empty_like(log_probs)
    for fold in range(FOLDS):
        inside, outside = folds == fold, folds != fold
        if inside.any():
            made = fit(log_probs[outside], features[outside], labels[outside])
            held[inside] = made(log_probs[inside], features[inside])
    return held


def _log_loss(log_probs: Floats, labels: Ints) -> float:
    return -float(log_probs[np.arange(len(labels)), labels].mean())


# ---- calibrations


class Calibration(TableView):
    """Maps of the questions for which labels were given, and a receipt: what they were fitted on, and how well.

    maps : dict of Map by question
    receipt : dict
        setting: the model, the layout of the prompts, the questions, the orders, a digest of the examples. questions:
        for each one the kind of map, the number of labels, and `Measures` before and after, of held-out folds.
        created, version: the date, and the version of llmppl.

    Examples
    --------
    >>> labelled = [("It was good.", {"good": True}), ("It was bad.", {"good": False})] * 10
    >>> calibration = fit_calibration(lm, labelled, {"good": "Was it good?"})
    >>> calibration.save("good.json")
    >>> Calibration.load("good.json").receipt["questions"]["good"]["labels"]
    20
    >>> answer = decide(lm, "It was good.", {"good": "Was it good?"}, calibration=calibration)["good"]
    >>> answer.best
    True
    """

    def __init__(self, maps: Mapping[str, Map], receipt: Mapping[str, Any]) -> None:
        self.maps, self.receipt = dict(maps), dict(receipt)

    def apply(self, name: str, probabilities: Sequence[float], features: Floats) -> list[float]:
        """Return the calibrated probabilities of the answers to a question; the same without a map of it."""
        if name not in self.maps:
            return [*probabilities]
        found: list[float] = np.exp(self.maps[name](log_of([probabilities]), features[None]))[
            0
        ].tolist()
        return found

    def apply_after(
        self, name: str, probabilities: Sequence[float], log_probs: Floats
    ) -> list[float]:
        """Return calibrated probabilities; log_probs are those of the next token before the answer, (V,)."""
        return self.apply(name, probabilities, sketch(log_probs))

    def check(self, setting: Mapping[str, Any]) -> None:
        """Compare the setting with that of a decision. ValueError if it is another."""
        mine = self.receipt["setting"]
        for part, value in setting.items():
            if part == "questions":
                changed = [
                    name
                    for name in value.keys() & self.maps.keys()
                    if value[name] != mine[part].get(name)
                ]
                if changed:
                    changes = "its text, options or examples differ"
                    raise ValueError(
                        f"the calibration is of another question {min(changed)!r}: {changes}; {_AGAIN}"
                    )
            elif value != mine.get(part):
                raise ValueError(
                    f"the calibration is of {part} {shown(mine.get(part))}, not {shown(value)}: {_AGAIN}"
                )

    def check_records(self, lm: CachedTransformer, schema: Any) -> None:
        """Compare the setting with that of records of a schema. ValueError if it is another."""
        paths = self.receipt["setting"].get("paths", [])
        self.check(setting_of_records(lm, schema, [tuple(path) for path in paths]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON."""
        maps = {}
        for name, each in self.maps.items():
            maps[name] = {key: _rounded(value) for key, value in vars(each).items()}
        data = {"format": FORMAT, "receipt": self.receipt, "maps": maps}
        Path(path).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file of `save`. ValueError for another file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}")
            maps = {}
            for name, each in data["maps"].items():
                arrays = {
                    key: np.array(each[key]) for key in ("bias", "weights", "center", "width")
                }
                maps[name] = Map(each["kind"], each["scale"], **arrays)
            return cls(maps, data["receipt"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no calibration that this version reads: {error}") from None

    def _header(self) -> str:
        return f"Calibration of {self.receipt['setting']['model']}, {self.receipt['created']}"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        heads = (
            "labels",
            "Brier before",
            "after",
            "log loss before",
            "after",
            "ECE before",
            "after",
            "floor",
            "map",
        )
        rows = list[tuple[str, ...]]()
        for name, of in self.receipt["questions"].items():
            before, after = of["before"], of["after"]
            cells = []
            for key in ("brier", "log_loss", "ece"):
                cells += [f"{before[key]:.3f}", f"{after[key]:.3f}"]
            said = f"{name}: {of['map']}"
            if of.get("answers") == 1:
                said += " (all labels are one answer)"
            elif of["labels"] < MANY:
                said += f" ({of['labels']} labels are few: {MANY} or more are wanted)"
            rows.append((str(of["labels"]), *cells, f"{after['ece_floor']:.3f}", said))
        return heads, rows


def _rounded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.round(value, 6).tolist()
    return value


def model_name(lm: CachedTransformer) -> str:
    """Return the name of a language model, with its number of tokens and its precision."""
    configured = getattr(getattr(lm.model, "config", None), "name_or_path", "")
    name = Path(lm.engine.name or configured or type(lm.model).__name__).name
    return f"{name}, {len(lm.vocab)} tokens, {getattr(lm.engine, 'dtype', 'float32')}"


def setting_of_records(
    lm: CachedTransformer, schema: Any, paths: Iterable[FieldPath]
) -> dict[str, Any]:
    """Return the model and the values of some closed fields of records, as data for JSON."""
    asked = {}
    for path in paths:
        asked[name_of_path(path)] = digest((closed_values_at(schema, path),))
    return {"model": model_name(lm), "layout": "records", "questions": asked}


class Reading(NamedTuple):
    """Belief about a labelled state: (K,) probabilities, (SKETCH,) features, the place of the label."""

    probabilities: Sequence[float]
    features: Floats
    place: int


def calibration_of(
    setting: Mapping[str, Any],
    readings: Mapping[str, Sequence[Reading]],
    kinds: Sequence[str] = KINDS,
) -> Calibration:
    """Return the maps that are fitted to the readings of each question."""
    maps = dict[str, Map]()
    receipts = dict[str, Any]()
    for name, of in readings.items():
        probabilities, features, places = zip(*of, strict=True)
        found = fitted(log_of(probabilities), np.array(features), np.array(places), kinds)
        maps[name], receipts[name] = found
    if not maps:
        names = ", ".join(setting["questions"])
        raise ValueError(f"no state has a label of a question: {names}")
    date = datetime.date.today().isoformat()
    receipt = {"setting": setting, "questions": receipts, "created": date, "version": VERSION}
    return Calibration(maps, receipt)


def fitted(
    log_probs: Floats, features: Floats, labels: Ints, kinds: Sequence[str] = KINDS
) -> tuple[Map, dict[str, Any]]:
    """Return the map of one of the kinds with the least held-out log loss, and its part of the receipt.

    log_probs : (n, K); features : (n, SKETCH); labels : (n,)
    """
    num_answers = len({*labels.tolist()})
    if len(labels) < FEW or num_answers < 2:
        kinds = ["none"]
    kinds = ["none", *(kind for kind in kinds if kind != "none")]
    held = {kind: held_out(_FITS[kind], log_probs, features, labels) for kind in kinds}
    losses = {kind: _log_loss(of, labels) for kind, of in held.items()}
    best = min(losses, key=lambda kind: losses[kind])

    def measured(kind: str) -> dict[str, Any]:
        outcomes = map(Outcome, np.exp(held[kind]).tolist(), labels.tolist())
        return measures([*outcomes])._asdict()

    receipt = {
        "map": best,
        "labels": len(labels),
        "answers": num_answers,
        "before": measured("none"),
        "after": measured(best),
    }
    return _FITS[best](log_probs, features, labels), {**receipt, "log_losses": losses}
