"""One call for a text, a choice or a record: a ready-made program, an algorithm of inference, and the answer.

    generate(lm, "The capital of France is", Regex(" [A-Z][a-z]+"))

A *method* is an algorithm with the way in which its result becomes an answer. `Generation.call` is the call of the
library that a method stands for. A `Plan` has the arguments that do not depend on the prompt.
"""

import contextlib
import copy
import functools
import inspect
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import EnumMeta
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    Unpack,
    get_args,
    get_origin,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints import JsonSchema, Part
from llmppl.constraints.json.closed import Path, closed_values_at, name_of_path, places_of
from llmppl.constraints.values import constraint_of
from llmppl.distributions import NO_RULE, DecisionRule, Rule, is_greedy
from llmppl.inference.algorithms import importance_sampling, smc_steer
from llmppl.inference.exact import NoBeam, beam_search
from llmppl.inference.particles import Particles, answer_of
from llmppl.lm import CachedTransformer, Context, End
from llmppl.models.choices import log_joints
from llmppl.models.programs import ConstrainedText, as_context, language_model
from llmppl.models.spans import cached_index_of
from llmppl.queries.choice import choose
from llmppl.report.probabilities import Probabilities, Share, key_of
from llmppl.support.arguments import count, function, generator, is_type, one_of, shown
from llmppl.support.identity import Identity, identity
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import Runtime, spent
from llmppl.tasks.answers import Fields, Generation, Generations, parser_of, value_at
from llmppl.tasks.many import TOGETHER, lanes, recorded
from llmppl.tasks.results import load_results

Method = Literal["auto", "sample", "greedy", "beam", "best_of", "importance", "steer", "exact"]
MAX_TOKENS = 160  # of a free text
FIRST = 8  # samples that are enough where all have one value


class _Way(NamedTuple):
    """Algorithm of a method, the default of N and K where it takes them, and True if its weights give probabilities."""

    run: Callable[..., Any]
    sizes: dict[str, int]
    weighs: bool = False


WAYS = {
    "sample": _Way(importance_sampling, {}),
    "greedy": _Way(beam_search, {}),
    "beam": _Way(beam_search, {"N": 5, "K": 5}),
    "best_of": _Way(importance_sampling, {"N": 20}, weighs=True),  # and greedy decoding
    "importance": _Way(importance_sampling, {"N": 20}, weighs=True),
    "steer": _Way(smc_steer, {"N": 10, "K": 3}, weighs=True),
    "exact": _Way(choose, {}, weighs=True),
}
_ONE = {"sample": (1,), "greedy": (1, 1)}  # N and K of the others
_OF_PROGRAM = "max_tokens", "end", "complete", "mask", "min_tokens", "stop", "rule"
_OF_CHOOSE = {"end", "rule"}
_OF_FILE = {"to", "resume", "version", "key"}
_LIMITS = "timeout", "budget"
OF_LIST = {"together", "progress", "on_answer", *_OF_FILE}
_NOT_OF_RUN = {"rng", "calibration", *OF_LIST}
_TYPE = "the third argument is the type or another constraint"
_GUESSES = {
    "max_retries": "nothing is retried, since masks allow only texts of the constraint",
    "retries": "nothing is retried, since masks allow only texts of the constraint",
    "n": "N is the number of samples, and posterior has them",
    "stream": "llmppl.serving.Service streams the text of a call",
    **dict.fromkeys(
        ("response_model", "output_type", "schema", "regex", "grammar", "choices"),
        _TYPE,
    ),
}


class GenerateOptions(TypedDict, total=False):
    """Further options of `generate`."""

    N: int
    K: int
    end: End
    complete: bool
    mask: Callable[[str], NDArray[np.bool_]]
    min_tokens: int
    stop: str | Iterable[str]
    rule: DecisionRule
    temperature: float
    power: float
    rng: np.random.Generator
    calibration: Any
    together: int
    progress: bool | None
    on_answer: Callable[[Generation], Any]
    to: str | os.PathLike[str] | None
    resume: bool | Literal["force"]
    version: str
    key: Callable[[Any], str] | None


class _AllOptions(GenerateOptions, total=False):
    method: Method
    max_tokens: int | None
    budget: int | None
    timeout: float | None
    seed: int | None


# ---- the call


@overload
def generate(
    lm: CachedTransformer,
    prompt: str | Context,
    constraint: Any = None,
    **options: Unpack[_AllOptions],
) -> Generation: ...
@overload
def generate(
    lm: CachedTransformer,
    prompt: list[str] | list[Context],
    constraint: Any = None,
    **options: Unpack[_AllOptions],
) -> Generations: ...
@list_options(
    GenerateOptions,
    {
        "end": "boundary",
        "stop": (),
        "rule": NO_RULE,
        "min_tokens": 0,
        "power": 1.0,
        "temperature": 1.0,
        "together": TOGETHER,
        "resume": False,
        "version": "",
    },
)
def generate(
    lm: CachedTransformer,
    prompt: Any,
    constraint: Any = None,
    *,
    method: Method = "auto",
    max_tokens: int | None = None,
    budget: int | None = None,
    timeout: float | None = None,
    seed: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation | Generations:
    """Generate a text, a choice or a record after a prompt.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str, Context, list of messages, or a list of prompts
        Messages are dicts of a role and a content; `lm.chat` makes their context. A list of prompts gives a list of
        answers, and shares batches.
    constraint : type, list of str, dict, Regex, Grammar, JsonSchema, function, or None
        As in `ConstrainedText`. A dict maps labels to texts, and the value is the label.
    method : str
        - "sample": one text, drawn under the mask of the constraint.
        - "greedy": at each token, the most probable one that the mask allows.
        - "beam": beam search with N beams; the text of the highest probability.
        - "best_of": the most probable text of greedy decoding and N samples under the mask. The weights of the samples
          give the probability of its value.
        - "importance": N samples under the mask with their weights; the value of the largest weight.
        - "steer": `smc_steer` with N and K; the value of the largest weight.
        - "exact": the most probable of some texts, in any tokens (`choose`).
        - "auto": "exact" for a list or dict of texts, a bool, an Enum or a Literal, without a limit. "greedy" for other
          types and JSON schemas, and "best_of" where a validator refuses its text, or with N or power. "best_of" under
          other constraints; "steer" under a function of the text; "sample" without one; "greedy" at temperature 0.
    max_tokens : int, optional
        Default: 160 for free text and under a function, else that of `ConstrainedText`. A text under a constraint is
        complete within it.
    budget : int, optional
        Tokens that the model runs for each prompt. If no text is complete by then, the answer is `cut`: under a
        constraint it has no value. "greedy" needs the fewest tokens, and "best_of" begins with it.
    timeout : float, optional
        Seconds for each prompt, with the same effect.
    seed : int, optional
    N, K : int
        Numbers of particles or beams, and of extensions of each.
    temperature : float
        Short for `rule=Rule(temperature=...)`.
    power : float
        As in `smc_steer`.
    end, complete, mask, min_tokens, stop, rule
        As in `ConstrainedText`.
    rng : numpy.random.Generator
        In place of `seed`.
    calibration : Calibration
        Of `llmppl.decisions.fit_record_calibration`: the answer's `conditionals` are then calibrated.
    together, progress
        As in `run_many`.
    on_answer : function
        Called with each `Generation` of a list when it ends. The first one ends sooner if fewer prompts run `together`.
    to, resume, version, key
        Of a list, as in `run_many`: a file of results that a killed run continues. The method, the options and the
        constraint must be those of the file.

    Returns
    -------
    Generation, or a list of them

    Raises
    ------
    ValueError
        If no text is left, with the reasons. In a list, the `error` of an answer has them.

    Examples
    --------
    >>> generate(lm, "He was", [" happy", " sad"], seed=0).value
    ' happy'
    """
    on_answer = function(
        "on_answer", options.pop("on_answer", lambda answer: None), "print", takes=1
    )
    limits = {"max_tokens": max_tokens, "budget": budget, "timeout": timeout}
    plan = Plan(
        language_model(lm),
        constraint,
        one_of("method", method, get_args(Method)),
        limits,
        seed,
        options,
    )
    rng = generator(seed, options.get("rng"))
    if not is_list(prompt):
        of_file = options.keys() & _OF_FILE
        if of_file:
            raise TypeError(f"generate takes {min(of_file)} with a list of prompts: give [prompt]")
        return next(Runtime().each([(lambda: plan.answer(prompt, rng), "generate")], 1))
    if "rng" in options:
        seed = int(rng.integers(2**63))
    run_all = functools.partial(
        lanes, plan.answer, count("together", options.get("together", TOGETHER))
    )
    kept: Any = {
        name: options[name] for name in ("to", "resume", "key", "progress") if name in options
    }
    made = dict[int, Generation]()
    for result in recorded(
        run_all, prompt, plan.identity(options.get("version", "")), seed=seed, **kept
    ):
        made[result.index] = result.answer or plan.missing(result)
        on_answer(made[result.index])
    if len(made) < len(prompt):  # the file has the others
        for result in load_results(kept["to"], plan.options):
            if result.index < len(prompt) and result.index not in made:
                made[result.index] = result.answer
                result.answer.prompt = prompt[result.index]
                result.answer._plan = plan  # for its conditionals
    return Generations(made[index] for index in range(len(prompt)))


def is_list(prompt: Any) -> bool:
    """Check whether this is a list of prompts. A list of messages is one prompt."""
    return isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], Mapping))


class ClosedField(NamedTuple):
    """Field of a record with few values, and their probabilities given the rest of the record.

    value : that of the record; values : all K values that the schema admits here, as JSON has them
    shares : of the values that fit the rest, the most probable first; places : theirs among the values
    before : the context of the value
    """

    path: Path
    value: Any
    values: list[Any]
    shares: list[Share]
    places: list[int]
    before: Context

    @property
    def name(self) -> str:
        return name_of_path(self.path)

    @property
    def probabilities(self) -> list[float]:
        """(K,) probabilities, 0 for values that do not fit."""
        found = [0.0] * len(self.values)
        for share, place in zip(self.shares, self.places, strict=True):
            found[place] = share.probability
        return found

    def calibrated(self, calibration: Any) -> list[Share]:
        """Return the shares by a calibration, the most probable first."""
        log_probs = self.before.log_probs()
        found = calibration.apply_after(self.name, self.probabilities, log_probs)
        total = sum(found[place] for place in self.places)
        shares = []
        for share, place in zip(self.shares, self.places, strict=True):
            shares.append(Share(share.value, found[place] / total))
        return sorted(shares, key=lambda share: -share.probability)


class Plan:
    """Arguments of `generate` that do not depend on the prompt: the algorithm and the options of the program."""

    def __init__(
        self,
        lm: CachedTransformer,
        constraint: Any,
        method: str,
        limits: dict[str, Any],
        seed: int | None,
        options: GenerateOptions,
    ) -> None:
        check_options("generate", options, inspect.signature(generate).parameters, _GUESSES)
        given = {
            name: value
            for name, value in {**limits, **options}.items()
            if value is not None and name not in _NOT_OF_RUN
        }
        if "temperature" in given:
            if "rule" in given:
                raise ValueError(
                    "generate takes temperature or rule: put the temperature into the rule"
                )
            given["rule"] = Rule(given.pop("temperature"))
        self.lm = lm
        self.options = constraint
        if isinstance(constraint, Mapping):
            if constraint.keys() & {"type", "properties", "$ref", "anyOf"}:
                raise TypeError(
                    "a dict maps labels to texts: give JsonSchema(schema) for a JSON schema"
                )
            constraint = [*constraint.values()]
        self.constraint = constraint
        self.seed = seed
        self.records = constraint_of(self.options) if is_type(self.options) else self.options
        self.schema = self.records.schema if isinstance(self.records, JsonSchema) else None
        self._values = dict[Path, list[Any]]()  # of the closed fields
        self.calibration = options.get("calibration")
        if self.calibration is not None:
            if self.schema is None or not hasattr(self.calibration, "check_records"):
                raise TypeError(
                    "calibration must be of fit_record_calibration, and belongs to a type or schema of records"
                )
            self.calibration.check_records(lm, self.schema)
        self.parse = parser_of(self.options)
        self.is_function = (
            callable(constraint) and not is_type(constraint) and not hasattr(constraint, "index")
        )
        self.method = self._chosen(given) if method == "auto" else method
        self.way = WAYS[self.method]
        # greedy decoding by default: if a validator refuses its text, samples follow
        self.otherwise = None
        if (
            method == "auto"
            and self.method == "greedy"
            and not is_greedy(given.get("rule", NO_RULE))
        ):
            self.otherwise = Plan(lm, self.options, "best_of", limits, seed, options)
        self._take(given)

    def _chosen(self, given: Mapping[str, Any]) -> str:
        """Return the method for "auto". docs/generate.md, "The methods", has the measurements."""
        constraint = self.constraint
        listed = isinstance(constraint, list | tuple | EnumMeta) or constraint is bool
        if is_greedy(given.get("rule", NO_RULE)):
            return "greedy"
        if self.is_function:
            return "steer"
        if constraint is None and "mask" not in given:
            return "sample"
        if (listed or get_origin(constraint) is Literal) and given.keys() <= _OF_CHOOSE:
            return "exact"
        is_record = is_type(constraint) or isinstance(constraint, JsonSchema)
        if is_record and not given.keys() & {"N", "power"}:
            return "greedy"
        return "best_of"

    def _take(self, given: dict[str, Any]) -> None:
        """Check the options against the method, and keep them."""
        untaken = {"N", "K"} - self.way.sizes.keys()
        if self.way.run is beam_search:
            untaken |= {"power"}
        if self.method == "exact":
            untaken = given.keys() - _OF_CHOOSE
            if isinstance(self.options, Part) and not self.options.is_text:
                raise TypeError(
                    "options must be a list of str, a dict, a type with few values, or a constraint whose values are "
                    f"texts, not {shown(self.options)}"
                )
        wrong = given.keys() & untaken
        if wrong:
            raise TypeError(
                f"generate with method={self.method!r} takes no {min(wrong)}: leave out one of the two"
            )
        self.sizes = _ONE.get(self.method) or [
            given.get(name, default) for name, default in self.way.sizes.items()
        ]
        self.sized = "N" in given
        self.limits: dict[str, Any] = {
            name: given[name] for name in (*_LIMITS, "power") if name in given
        }
        self.program_options = {name: given[name] for name in _OF_PROGRAM if name in given}
        if self.constraint is None or self.is_function or given.get("complete") is False:
            self.program_options.setdefault("max_tokens", MAX_TOKENS)

    @property
    def settles(self) -> bool:
        """True if the beginning that all texts of a run share begins the answer, too."""
        return self.otherwise is None and self.method not in ("best_of", "exact")

    def context(self, prompt: Any) -> Any:
        """Return the context of messages, and other prompts as they are."""
        return self.lm.chat(prompt) if isinstance(prompt, list | tuple) else prompt

    def program(self, prompt: Any) -> ConstrainedText:
        return ConstrainedText(
            self.lm, self.context(prompt), self.constraint, **self.program_options
        )

    def answer(self, prompt: Any, rng: np.random.Generator) -> Generation:
        """Return the answer to one prompt, as a function of `Runtime.each`. ValueError if no text is left."""
        start = time.perf_counter()
        before = spent()[1]
        try:
            posterior, particle = self._run(prompt, rng, start, before)
        except NoBeam as error:
            if self.otherwise is not None:
                return self.otherwise.answer(prompt, rng)
            more = "a larger N or K follows"
            if self.method == "greedy":
                more = "method='best_of' or 'steer' follows"
            died = f"every text that it followed {error.reason}"
            raise ValueError(
                f"generate found no text by {self.method!r}: {died}; {more} more"
            ) from None
        if particle is None and self.method != "exact":
            why = posterior._causes()
            if len(posterior):
                why = f"all {len(posterior)} samples were refused: {posterior[0]._refused_}"
            raise ValueError(f"generate found no text: {why}")
        answer = Generation(
            prompt,
            self.method,
            self.call_of(posterior),
            round(spent()[1] - before),
            time.perf_counter() - start,
        )
        answer.take(posterior, particle, self)
        return answer

    def conditionals(self, answer: Generation) -> Fields:
        """Return the probabilities of the values of each closed field, given the rest of the answer's text."""
        values = dict[str, Any]()
        found = dict[str, Probabilities]()
        for field in self.closed_fields(answer):
            values[field.name] = field.value
            shares = field.shares
            if self.calibration is not None:
                shares = field.calibrated(self.calibration)
            found[field.name] = Probabilities(shares, f"{field.name}, given the rest of the record")
        return Fields(found, values, "closed fields, given the rest of the record")

    def closed_fields(self, answer: Generation) -> Iterator[ClosedField]:
        """Yield the closed fields of the answer's text, with the probabilities of their values."""
        if answer.cut or self.schema is None:
            return
        index: Any = cached_index_of(self.records, self.lm.vocab)
        context = as_context(self.lm, self.context(answer.prompt))
        how = {name: each for name, each in self.program_options.items() if name in _OF_CHOOSE}
        for path, start, end in places_of(answer.text):
            if path not in self._values:
                self._values[path] = closed_values_at(self.schema, path)
            values = self._values[path]
            texts = dict[str, int]()  # to the place of the value
            parsed = dict[int, Any]()
            for place, value in enumerate(values):
                written = json.dumps(value, ensure_ascii=False)
                text = answer.text[:start] + written + answer.text[end:]
                with contextlib.suppress(ValueError):  # no value beside this rest
                    index.after(text)
                    parsed[place] = value_at(answer._value(text), path, value)
                    texts[text] = place
            if texts:
                choice = choose(self.lm, context, [*texts], tokenization="canonical", **how)
                places = []
                shares = []
                for share in choice.shares:
                    place = texts[share.value]
                    places.append(place)
                    shares.append(share._replace(value=parsed[place]))
                own = value_at(answer.value, path, json.loads(answer.text[start:end]))
                before = context + answer.text[:start]
                yield ClosedField(path, own, values, shares, places, before)

    def _run(
        self, prompt: Any, rng: np.random.Generator, start: float, before: float
    ) -> tuple[Any, Any]:
        """Return the posterior and the particle of the answer; None for the best of `choose`, or if none is left."""
        if self.way.run is choose:
            return choose(self.lm, self.context(prompt), self.options, **self.program_options), None
        program = self.program(prompt)
        if self.way.run is beam_search:
            beams = beam_search(program, *self.sizes, **self.limits)
            return beams, beams.best
        # texts that a check at their end refuses keep their weight, as "no answer"
        samples = self.program(prompt)
        samples._keeps_refused_ = self.way.run is importance_sampling and self.way.weighs
        if self.method != "best_of":
            found = self.way.run(samples, *self.sizes, rng=rng, **self.limits)
            return found, _heaviest(_valid(found))
        limits = {name: value for name, value in self.limits.items() if name != "power"}
        try:
            texts = [beam_search(program, 1, 1, **limits).best]
        except NoBeam:  # a validator refuses the text
            texts = []
        rest = dict(self.limits)
        if "timeout" in rest:
            rest["timeout"] -= time.perf_counter() - start
        if "budget" in rest:
            rest["budget"] -= round(spent()[1] - before)
        reached = [name for name in _LIMITS if rest.get(name, 1) <= 0]
        if reached:
            found = Particles((), limit=reached[0])
        else:
            found = self._samples(samples, rng, rest)
        texts = [*_valid(found), *texts]
        ranked = zip(texts, log_joints(texts), strict=True)  # while the cache has their tokens
        return found, max(ranked, key=lambda each: (not each[0].cut, each[1]), default=(None,))[0]

    def _samples(
        self, program: ConstrainedText, rng: np.random.Generator, limits: dict[str, Any]
    ) -> Particles[Any]:
        """Return N samples; by default `FIRST` if all of these have one value."""
        if not self.sized and not limits:
            found = importance_sampling(program, FIRST, rng=copy.deepcopy(rng))
            values = {key_of(answer_of(particle)) for particle in _valid(found)}
            if len(values) == 1 and len(_valid(found)) == FIRST:
                return found
        return importance_sampling(program, *self.sizes, rng=rng, **limits)

    def missing(self, result: Any) -> Generation:
        """Return the answer of a result of `run_many` that has an error."""
        error = str(result.error).rstrip().rpartition("\n")[2]
        return Generation(result.task, self.method, self.call, result.tokens, result.seconds, error)

    def identity(self, version: str) -> Identity:
        """Return the identity of a file of answers: the method, the options, and the constraint as text."""
        constraint = self.records
        source = getattr(constraint, "schema", getattr(constraint, "text", constraint))
        options = {
            **self.program_options,
            **self.limits,
            "N and K": self.sizes,
            "the constraint": source,
        }
        told = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in options.items()}
        return identity(
            constraint if self.is_function else generate,
            version,
            method=self.method,
            **told,
        )

    @property
    def call(self) -> str:
        """The call of the library, as a user would write it."""
        return self.call_of(None)

    def call_of(self, found: Any) -> str:
        """Return the call that has these particles as its result."""
        options = [f"{name}={shown(value, 40)}" for name, value in self.program_options.items()]
        constraint = self.options if self.way.run is choose else self.constraint
        parts = ["lm", "prompt"]
        if isinstance(constraint, type):
            parts.append(constraint.__name__)
        elif is_type(constraint):
            parts.append(inspect.formatannotation(constraint))
        elif constraint is not None:
            parts.append(shown(constraint, 60))
        inside = ", ".join([*parts, *options])
        if self.way.run is choose:
            return f"choose({inside})"
        limits = dict(self.limits)
        if self.way.run is not beam_search and self.seed is not None:
            limits["seed"] = self.seed
        sizes = list(self.sizes)
        if self.method == "best_of" and found is not None and found.steps:
            sizes = [len(found.steps[0].log_survivors)]  # which may be `FIRST`
        outside = [*map(str, sizes)]
        outside += [f"{name}={value}" for name, value in limits.items()]
        program = f"ConstrainedText({inside})"
        call = f"{self.way.run.__name__}({program}, {', '.join(outside)})"
        if self.method == "best_of":
            call += f", beam_search({program}, 1, 1)"
        return call


def _valid(found: Particles[Any]) -> list[Any]:
    """Return the particles that no check at the end has refused."""
    return [particle for particle in found if not particle._refused_]


def _heaviest(found: Any) -> Any:
    """Return the heaviest particle of the value of the largest weight. Complete texts come before cut ones."""
    totals = defaultdict[Any, float](float)
    rows = []
    heaviest = max((particle.log_weight for particle in found), default=0.0)
    for particle in found:
        weight = math.exp(particle.log_weight - heaviest)
        key = key_of(answer_of(particle))
        totals[key] += weight
        rows.append((particle, weight, key))
    best = max(
        rows,
        key=lambda row: (not row[0].cut, totals[row[2]], row[1]),
        default=(None,),
    )
    return best[0]
