"""Answers of `generate`: a text with its value and its probabilities.

An answer is *cut* if a limit or the model's length ended its text early. A cut text of a constraint has no value. A
*loaded* answer comes from a file or another process: it has everything except the posterior.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmppl.constraints.values import constraint_of
from llmppl.inference.detached import SavedParticle, data_of
from llmppl.inference.exact import Beam, Beams
from llmppl.inference.particles import NO_VALUE, Particles
from llmppl.queries.choice import Choice
from llmppl.report.probabilities import UNSURE, Probabilities, Share, key_of
from llmppl.report.tables import TableView, html_table, one_line, text_table
from llmppl.support.arguments import is_type, plural
from llmppl.support.locks import cached_property
from llmppl.support.options import no_attribute
from llmppl.support.values import decode, encode

MAX_ALTERNATIVES = 5  # that are shown
Parse = Callable[[str], Any]


class _NoAnswer:
    def __repr__(self) -> str:
        return "(no answer)"


NO_ANSWER = _NoAnswer()  # the value of texts that a check at their end refuses
_CONTENTS = "value", "text", "ended", "cut", "log_prob", "posterior", "particle", "_plan"

_COST = "tokens", "seconds", "error"
_OF_RUN = "method", "call", *_COST
_OF_TEXT = "text", "ended", "cut", "log_prob"
_UNKNOWN = no_attribute(
    "the answer is value, its confidence is probability, and a field of a record is answer.value.{}"
)


@dataclasses.dataclass(eq=False, repr=False)
class Generation:
    """Answer of a language model. `str` is its text.

    Attributes
    ----------
    value : object
        The parsed answer, such as a record or a number; the text itself if nothing parses it. None for a text of a
        constraint that was cut.
    text : str
    ended : str
        The reason why the text ended: "eos", "complete", "stop '...'", "max_tokens", "context" (the model reads no
        more), "timeout", "budget" or "cancelled".
    cut : bool
        True if the text has not ended by itself or by its constraint.
    probability, probability_se : float or None
        Posterior probability of the value, and its standard error. The probability is None if the error is above 0.25.
        Both are None if the method estimates none, or if a limit ended its samples.
    log_prob : float
        Log-probability that the model writes the text in these tokens, and its end; for "exact", in any tokens.
    alternatives : Probabilities, or Beams
        All values that were found, the most probable first.
    fields : dict of str to Probabilities
        Posterior probabilities of each field of a record, whatever the other fields are.
    posterior, particle : Particles, Beams or Choice, and the particle of the answer; None for a Choice
    prompt : as it was given
    method, call : str, and the calls of the library for which the method stands
    tokens, seconds : int and float, number of tokens that the model ran, and time
    error : str
        Reason why there is no answer, in a list of answers; else "". The attributes above then raise a ValueError.

    Examples
    --------
    >>> generation = generate(lm, "Once upon a time", Regex(", there was a [a-z]+ (boy|girl)"), seed=0)
    >>> generation.value, f"{generation.probability:.2f}", generation.ended
    (', there was a little girl', '0.66', 'complete')
    >>> generation.method
    'best_of'
    """

    prompt: Any
    method: str
    call: str
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    def take(self, posterior: Any, particle: Any, plan: Any) -> None:
        """Set the contents from a posterior and the particle of the answer; None is the best of a Choice."""
        self.posterior = posterior
        self.particle = particle
        self._plan = plan
        self._parse = plan.parse
        if particle is None:
            self.value = posterior.best
            self.ended = "complete"
            self.cut = False
            self.text = str(posterior.text_of(self.value))
            self.log_prob = math.log(posterior[self.value]) + float(posterior.log_mass)
            return
        self.text = str(particle)
        self.cut = particle.cut
        self.ended = str(particle.ended or ("context" if particle._limit_ else posterior.limit))
        self.log_prob = float(particle.log_joint)
        is_none = self.cut and plan.options is not None
        self.value = None if is_none else self._value_of(particle)

    def _value_of(self, particle: Any) -> Any:
        if self._parse is None and not particle.cut:
            return particle.parsed  # by its tokens, if these are special
        return self._value(str(particle))

    def _value(self, text: str) -> Any:
        return text if self._parse is None else self._parse(text)

    def _by(self, field: str | None = None) -> Probabilities:
        """Return the probabilities of the values of the particles, or of a field of these."""

        def value_in(particle: Any) -> Any:
            if particle._refused_:
                return NO_ANSWER
            if particle.cut:
                return _part(field, f"{particle} [cut]")
            return _part(field, self._value_of(particle))

        value_in.__name__ = "answers" if field is None else f"parsed.{field}"
        found: Probabilities = self.posterior.by(value_in)
        return found

    @cached_property
    def alternatives(self) -> Any:
        found = self.posterior
        if not isinstance(found, Particles):
            return found
        if self._unknown:
            return Probabilities((), f"no probabilities: {self._unknown}")
        return self._by()

    @cached_property
    def _unknown(self) -> str:
        """Reason why the answer has no probabilities; "" if it has."""
        found = self.posterior
        if not self._plan.way.weighs:
            others = "method='best_of' does, and conditionals() of closed fields"
            return f"{self.method!r} estimates none, {others}"
        if isinstance(found, Particles) and found.limit:
            return f"the {found.limit} ended the samples"
        return "" if len(found) else "no sample has ended"

    @cached_property
    def _share(self) -> Share | None:
        if self._unknown or self.cut or self.value not in self.alternatives:
            return None
        share: Share = self.alternatives.share(self.value)
        if share.lower is None or share.upper is None:
            return share
        return share._replace(se=share.upper - share.lower)

    @cached_property
    def _apart(self) -> str:
        """Note on an answer of greedy decoding that no sample has, so that it has no probability; else ""."""
        if self._unknown or self.cut or self._share is not None:
            return ""
        return f"none of the {len(self.posterior)} samples"

    @property
    def probability(self) -> float | None:
        share = self._share
        if share is None or share.se is None or share.se > UNSURE:
            return None
        return share.probability

    @property
    def probability_se(self) -> float | None:
        return None if self._share is None else self._share.se

    @cached_property
    def fields(self) -> Fields:
        values = fields_of(self.value)
        unknown = self._unknown
        if isinstance(self.posterior, Choice):
            unknown = "alternatives has the probabilities of the listed values"
        elif not unknown and all(particle.cut for particle in self.posterior):
            unknown = "no sample has ended"
        if unknown or not values:
            return Fields({}, values, f"no fields: {unknown or 'the answer is no record'}")
        header = plural(len(values), "field")
        if self._apart:
            header += f"; the answer is {self._apart}"
        return Fields({name: self._by(name) for name in values}, values, header)

    def conditionals(self) -> Fields:
        """Return the full conditionals: the probability of each value of a closed field, given the rest of the record.

        A closed field has few values: a bool, an Enum, a Literal, a constant, or integers between bounds. Each text is
        in the tokenizer's own tokens, and the probabilities are exact, whatever the method of the answer. This call
        computes them: after each value, the model reads the rest of the record.

        Examples
        --------
        >>> pet = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}
        >>> generate(lm, "Lily had a pet. ", JsonSchema(pet)).conditionals()["pet"].best
        'cat'
        """
        found: Fields = self._plan.conditionals(self)
        return found

    def closed_fields(self) -> Iterator[Any]:
        """Yield the closed fields as `llmppl.tasks.generation.ClosedField`, without a calibration."""
        found: Iterator[Any] = self._plan.closed_fields(self)
        return found

    # ---- as data

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as data for JSON: its attributes, except the prompt and the posterior."""
        if "_data" in vars(self):
            return dict(vars(self)["_data"])
        data = {name: getattr(self, name) for name in _OF_RUN}
        if self.error:
            return data
        for name in (*_OF_TEXT, "probability", "probability_se"):
            data[name] = getattr(self, name)
        data["value"] = as_data(self.value)
        data["note"] = self._unknown or self._apart
        if isinstance(self.alternatives, Beams):
            data["beams"] = [beam.as_dict() for beam in self.alternatives]
        else:
            data["alternatives"] = shares_data(self.alternatives, self._texts())
        data["fields"] = {
            name: shares_data(of, self._texts(name)) for name, of in self.fields.items()
        }
        return data

    def _texts(self, field: str | None = None) -> dict[Any, str]:
        """Return the text of one particle for each value, or for each value of a field."""
        if isinstance(self.posterior, Choice):
            return {key_of(option): self.posterior.text_of(option) for option in self.posterior}
        texts = dict[Any, str]()
        for particle in self.posterior:
            if not particle.cut and not particle._refused_:
                value = _part(field, self._value_of(particle))
                texts.setdefault(key_of(value), str(particle))
        return texts

    def __reduce__(self) -> tuple[Any, ...]:  # as a loaded answer
        return loaded, (self.as_dict(), self.prompt, vars(self).get("_parse"))

    # ---- attributes that there are not

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _CONTENTS:
                if vars(self).get("error"):
                    raise ValueError(self.error)
                others = "alternatives and fields have its probabilities"
                if name == "_plan":
                    name = "conditionals"
                    others = "generate(lm, prompts, ..., to=, resume=True) returns answers that have them"
                raise AttributeError(f"a loaded answer has no {name}: {others}")
            _UNKNOWN(self, name)

    def __getitem__(self, name: object) -> Any:
        raise TypeError(
            f"an answer has no items: {place_of(self.value, name)} is a field of its record"
        )

    # ---- as a table

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        lines = [self._header()]
        for table in self._tables():
            lines += ["", *text_table(*table)]
        return "\n".join([*lines, "", *self._footer()])

    def _repr_html_(self) -> str:
        tables = "".join(html_table(*each) for each in self._tables())
        return f"<p>{html.escape(self._header())}</p>{tables}<pre>{html.escape(chr(10).join(self._footer()))}</pre>"

    def _header(self) -> str:
        if self.error:
            return f"Generation(no answer: {one_line(self.error)})"
        if self.value is None and self.cut:
            return f"Generation(no value, the text {one_line(repr(self.text))} was cut, ended: {self.ended})"
        header = f"Generation({one_line(repr(self.value))}"
        if self.probability is not None:
            header += f", probability {self._share}"
            first = self.alternatives.shares[0]
            if key_of(first.value) != key_of(self.value):
                header += f"; {one_line(repr(first.value))} has {first}: {self._why}"
        elif self._apart:
            header += f", {self._apart}"
        return f"{header}, ended: {self.ended})"

    @property
    def _why(self) -> str:
        """Reason why the most probable value is not the answer."""
        if self.alternatives.best is NO_ANSWER:
            return "its texts fail a check at their end"
        return "the answer is the single text of the highest probability"

    def _tables(self) -> list[Any]:
        """Return heads and rows of the fields, and of the alternatives if there are several."""
        if self.error:
            return []
        heads, rows = self.alternatives._table()
        tables = []
        if self.fields:
            tables.append(self.fields._table())
        if len(rows) > 1:
            tables.append((heads, rows[:MAX_ALTERNATIVES]))
        return tables

    def _footer(self) -> list[str]:
        return [self.call, f"{self.tokens} tokens, {self.seconds:.2f} s"]


class Fields(TableView, dict[str, Probabilities]):
    """Posterior probabilities of the values of each field. The table shows those of the answer's own values."""

    def __init__(
        self,
        fields: Mapping[str, Probabilities],
        values: Mapping[str, Any],
        header: str,
    ) -> None:
        super().__init__(fields)
        self._values = values
        self.header = header

    def __missing__(self, name: str) -> Probabilities:
        raise KeyError(f"{name!r}: {self.header}{', '.join(['', *self])}")

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return the fields as data for JSON: for each field a list of its values with their probabilities."""
        return {name: shares_data(of, {}) for name, of in self.items()}

    if not TYPE_CHECKING:
        __getattr__ = no_attribute(
            "fields[{0!r}] has the probabilities, and answer.value.{0} is the value"
        )

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = list[tuple[str, ...]]()
        for name, of in self.items():
            value = self._values[name]
            share = str(of.share(value)) if value in of else "not sampled"
            rows.append((share, one_line(name), one_line(repr(value))))
        return ("probability", "field", "value"), rows


class Generations(TableView, list[Generation]):
    """Answers to a list of prompts, in its order.

    Examples
    --------
    >>> generations = generate(lm, ["He was", "She was"], [" happy", " sad"])
    >>> [(generation.value, f"{generation.probability:.2f}") for generation in generations]
    [(' happy', '0.61'), (' happy', '0.69')]
    """

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each prompt."""
        names = "value", "text", "probability", "probability_se", "ended"
        rows = []
        for each in self:
            row = {name: None if each.error else getattr(each, name) for name in names}
            row |= {name: getattr(each, name) for name in _COST}
            rows.append(row)
        return rows

    if not TYPE_CHECKING:
        __getattr__ = no_attribute("it is a list of answers, as in answers[0].{}")

    def _header(self) -> str:
        failed = sum(bool(each.error) for each in self)
        header = plural(len(self), "answer")
        if failed:
            header += f", {failed} of them missing"
        return header

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = list[tuple[str, ...]]()
        for each in self:
            share = ""
            if each.error:
                said = f"no answer: {each.error}"
            elif each.cut and each.value is None:
                said = f"no value: {each.text!r} was cut, {each.ended}"
            else:
                said = repr(each.value)
                share = "" if each.probability is None else str(each._share)
            rows.append((share, one_line(said)))
        return ("probability", "value"), rows


# ---- records


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a record with their values: of a model of pydantic, a dataclass, a dict or a named tuple."""
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if isinstance(name, str)}
    names: Any = getattr(type(value), "model_fields", None) or getattr(value, "_fields", ())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names}


def _part(field: str | None, value: Any) -> Any:
    """Return a field of a value, `NO_VALUE` without it; the value itself for the field None."""
    return value if field is None else fields_of(value).get(field, NO_VALUE)


def value_at(value: Any, path: Iterable[str], default: Any) -> Any:
    """Return the value of a field of a record in a record; the default if there is none, as where names are aliases."""
    for name in path:
        fields = fields_of(value)
        if name not in fields:
            return default
        value = fields[name]
    return value


def place_of(value: Any, name: object) -> str:
    """Return the expression of a field of an answer's value."""
    if isinstance(value, dict) or not (isinstance(name, str) and name.isidentifier()):
        return f"answer.value[{name!r}]"
    return f"answer.value.{name}"


# ---- data


def as_data(value: Any) -> Any:
    """Return a value as data for JSON: an object by its fields, another one by its repr."""
    if value is NO_VALUE or value is NO_ANSWER:
        return None
    try:
        return encode(data_of(value), str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def shares_data(of: Probabilities, texts: Mapping[Any, str]) -> list[dict[str, Any]]:
    """Return the values with their probabilities, and the text of each where it is known."""
    rows = []
    for share in of.shares:
        row = share._asdict()
        row["value"] = as_data(share.value)
        if share.value is NO_ANSWER:
            row["no_answer"] = True
        if key_of(share.value) in texts:
            row["text"] = str(texts[key_of(share.value)])
        rows.append(row)
    return rows


def parser_of(constraint: Any) -> Parse | None:
    """Return the function from a text of a constraint to its value.

    None without a constraint, or if the value depends on special tokens, which the text lacks.
    """
    if constraint is None or getattr(constraint, "special_tokens", None):
        return None
    if isinstance(constraint, Mapping):
        return {text: label for label, text in constraint.items()}.__getitem__
    if is_type(constraint):
        constraint = constraint_of(constraint)
    parse = getattr(constraint, "parse", str)
    return parse


def loaded(data: Mapping[str, Any], prompt: Any, parse: Parse | None = None) -> Generation:
    """Return the answer of `as_dict`. `parse` makes the values from their texts; by default, a record is a dict."""
    run = {name: data[name] for name in _OF_RUN}
    answer = Generation(prompt, **run)
    if answer.error:
        return answer
    vars(answer).update(
        {name: data[name] for name in _OF_TEXT},
        _data=data,
        _parse=parse,
    )
    data = decode(data)

    def value_in(row: Mapping[str, Any], field: str | None = None) -> Any:
        if row.get("no_answer"):
            return NO_ANSWER
        if parse is None or row.get("text") is None or row.get("cut"):
            return row["value"]
        return _part(field, parse(row["text"]))

    def shares_in(rows: Iterable[Mapping[str, Any]], field: str | None = None) -> Probabilities:
        shares = []
        for row in rows:
            bounds = row["lower"], row["upper"], row["se"]
            shares.append(Share(value_in(row, field), row["probability"], *bounds))
        return Probabilities(shares, plural(len(shares), "value"))

    note = data["note"]
    value = value_in(data)
    if "beams" in data:
        beams = list[Beam[Any]]()
        for row in data["beams"]:
            particle: Any = SavedParticle(row["text"], row["log_joint"], row["cut"])
            beams.append(Beam(row["log_joint"], particle))
        alternatives: Any = Beams(beams)
    else:
        alternatives = shares_in(data["alternatives"])
    known = bool(alternatives) and "beams" not in data
    fields = data["fields"]
    header = f"no fields: {note or 'the answer is no record'}"
    if fields:
        header = plural(len(fields), "field")
    share = None
    if data["probability_se"] is not None:
        share = alternatives.share(value)._replace(se=data["probability_se"])
    vars(answer).update(
        value=value,
        alternatives=alternatives,
        fields=Fields(
            {name: shares_in(rows, name) for name, rows in fields.items()},
            fields_of(value),
            header,
        ),
        _share=share,
        _apart=note if known else "",
    )
    return answer
