"""One call for a text, a choice or a record: a ready-made program, an algorithm of inference, and the answer.

    generate(lm, "The capital of France is", Regex(" [A-Z][a-z]+"))

A *method* is an algorithm with the way in which its result becomes an answer. `Generation.call` is the call of the
library that a method stands for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from enum import EnumMeta
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args, get_origin, overload

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import NO_RULE, DecisionRule, Rule, is_greedy
from llmppl.inference.algorithms import importance_sampling, smc_steer
from llmppl.inference.exact import Beams, beam_search
from llmppl.inference.particles import Particles, answer_of
from llmppl.lm import CachedTransformer, Context, End
from llmppl.models.choices import log_joints
from llmppl.models.programs import ConstrainedText, language_model
from llmppl.queries.choice import Choice, choose
from llmppl.report.probabilities import Probabilities, Share
from llmppl.report.tables import TableView, html_table, one_line, text_table
from llmppl.support.arguments import function, generator, is_type, one_of, shown
from llmppl.support.locks import cached_property
from llmppl.support.options import Guess, list_options, unknown_option
from llmppl.support.runtime import Runtime, spent
from llmppl.tasks.many import TOGETHER, run_many

Method = Literal["auto", "sample", "greedy", "beam", "best_of", "importance", "steer", "exact"]
MAX_TOKENS = 160                                        # of a free text
MAX_ALTERNATIVES = 5                                    # that are shown
UNSURE = 0.25                                           # a larger standard error says nothing about a probability


class _Way(NamedTuple):
    """Algorithm of a method, the default of N and K where it takes them, and True if its weights give probabilities."""

    run: Callable[..., Any]
    sizes: dict[str, int]
    weighs: bool = False


WAYS = {
    "sample": _Way(importance_sampling, {}),
    "greedy": _Way(beam_search, {}),
    "beam": _Way(beam_search, {"N": 5, "K": 5}),
    "best_of": _Way(importance_sampling, {"N": 20}, weighs=True),       # and greedy decoding
    "importance": _Way(importance_sampling, {"N": 20}, weighs=True),
    "steer": _Way(smc_steer, {"N": 10, "K": 3}, weighs=True),
    "exact": _Way(choose, {}),
}
_ONE = {"sample": (1,), "greedy": (1, 1)}               # N and K of the others
_OF_PROGRAM = "max_tokens", "end", "complete", "mask", "min_tokens", "stop", "rule"
_OF_CHOOSE = {"end", "rule", "progress"}


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
    together: int
    progress: bool | None
    on_answer: Callable[[Generation], Any]


class Generation:
    """Answer of a language model. `str` is its text.

    Attributes
    ----------
    value : object
        The parsed answer, such as a record or a number; the text itself if nothing parses it, or if it was cut.
    text : str
    ended : str
        The reason why the text ended: "eos", "complete", "stop '...'", "max_tokens", "context" (the model reads no
        more), "timeout" or "budget".
    probability, probability_se : float or None
        Posterior probability of the value, None also if its standard error is above 0.25, and that error. Both are None
        if the method draws one text or optimises.
    log_prob : float
        Log-probability that the model writes the text in these tokens, and its end; for "exact", in any tokens.
    alternatives : Probabilities, or Beams
        All values that were found, the most probable first.
    fields : dict of str to Probabilities
        Posterior probabilities of each field of a record, whatever the other fields are.
    posterior, program : Particles, Beams or Choice; and ConstrainedText
    prompt : as it was given
    method, call : str, and the calls of the library for which the method stands
    tokens, seconds : int and float, number of tokens that the model ran, and time
    error : str
        Reason why there is no answer, in a list of answers; else "". The attributes above then raise a ValueError.

    Examples
    --------
    >>> generation = generate(lm, "Once upon a time", Regex(", there was a [a-z]+ (boy|girl)"), seed=0)
    >>> generation.value, f"{generation.probability:.2f}", generation.ended
    (', there was a little girl', '0.82', 'complete')
    >>> generation.method
    'best_of'
    """

    parsed = best = confidence = Guess("no such attribute: the answer is value, and its confidence is probability")

    def __init__(
        self, plan: Plan, prompt: Any, posterior: Any, tokens: int, seconds: float, error: str = ""
    ) -> None:
        self._plan, self.prompt, self._posterior = plan, prompt, posterior
        self.method, self.call = plan.method, plan.call
        self.tokens, self.seconds, self.error = tokens, seconds, error

    @property
    def posterior(self) -> Any:
        if self.error:
            raise ValueError(self.error)
        return self._posterior

    @property
    def program(self) -> ConstrainedText:
        return self._plan.program(self.prompt)

    @cached_property
    def particle(self) -> Any:
        """Particle of the answer: the heaviest one of the most probable value, or the likeliest. None for "exact"."""
        found = self.posterior
        if isinstance(found, Beams | Choice):
            return None if isinstance(found, Choice) else found.best
        if self.method in ("sample", "best_of"):
            return getattr(found, "answer", None) or found.best
        answers = found.answers()
        rank = [(p.cut, -answers[answer_of(p)], -w) for p, w in zip(found, found.weights.tolist(), strict=True)]
        return found[min(range(len(found)), key=rank.__getitem__)]      # a text that has ended, if there is one

    @property
    def value(self) -> Any:
        if self.particle is None:
            return self.posterior.best
        value = self.text if self.particle.cut else answer_of(self.particle)
        return self._plan.labels.get(value, value) if self._plan.labels else value

    @property
    def text(self) -> str:
        return str(self.posterior.text_of(self.value) if self.particle is None else self.particle)

    @property
    def ended(self) -> str:
        particle = self.particle
        if particle is None:
            return "complete"
        return str(particle.ended or ("context" if particle._limit_ else self.posterior.limit))

    @property
    def log_prob(self) -> float:
        if self.particle is None:
            return math.log(self.posterior[self.value]) + float(self.posterior.log_mass)
        return float(self.particle.log_joint)

    @cached_property
    def alternatives(self) -> Any:
        if not len(self.posterior):                     # greedy decoding alone has a text
            return Probabilities((), "no sample is left")
        return self.posterior.answers() if isinstance(self.posterior, Particles) else self.posterior

    @cached_property
    def _share(self) -> Share | None:
        if self.particle is None:
            share: Share = self.posterior.share(self.value)
            return share._replace(se=share.upper - share.lower)         # type: ignore[operator]
        value = answer_of(self.particle)               # greedy decoding may have found it alone
        return self.alternatives.share(value) if self._plan.way.weighs and value in self.alternatives else None

    @property
    def probability(self) -> float | None:
        se = self.probability_se
        return None if self._share is None or se is None or se > UNSURE else self._share.probability

    @property
    def probability_se(self) -> float | None:
        return None if self._share is None else self._share.se

    @cached_property
    def fields(self) -> Fields:
        values = _fields_of(self.value)
        if not values or not self._plan.way.weighs or all(particle.cut for particle in self.posterior):
            why = "no sample has ended" if self._plan.way.weighs else f"{self.method!r} estimates no probabilities"
            why = why if values else "the answer is no record"
            return Fields({}, {}, f"no fields: {why}")
        header = f"{len(values)} field{'s' * (len(values) > 1)}" + f"; the answer is {self._apart}" * bool(self._apart)
        return Fields({name: self.posterior.field(name) for name in values}, values, header)

    @property
    def _apart(self) -> str:
        """Note on an answer of greedy decoding that no sample has, so that it has no probability; else ""."""
        return f"none of the {len(self.posterior)} samples" * (self._share is None and self._plan.way.weighs)

    def as_dict(self) -> dict[str, Any]:
        """Return value, text, probability and cost for a table."""
        names = "value", "text", "probability", "probability_se", "ended"
        known = {name: None if self.error else getattr(self, name) for name in names}
        return {**known, "tokens": self.tokens, "seconds": self.seconds, "error": self.error}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        tables = [["", *text_table(*each)] for each in self._tables()]
        return "\n".join([self._header(), *(line for table in tables for line in table), "", *self._footer()])

    def _repr_html_(self) -> str:
        tables = "".join(html_table(*each) for each in self._tables())
        return f"<p>{html.escape(self._header())}</p>{tables}<pre>{html.escape(chr(10).join(self._footer()))}</pre>"

    def _header(self) -> str:
        if self.error:
            return f"Generation(no answer: {one_line(self.error)})"
        p = f", {self._apart}" * bool(self._apart) if self.probability is None else f", probability {self._share}"
        return f"Generation({one_line(repr(self.value))}{p}, ended: {self.ended})"

    def _tables(self) -> list[Any]:
        """Return heads and rows of the fields, and of the alternatives if there are several."""
        if self.error:
            return []
        heads, rows = self.alternatives._table()
        tables = [self.fields._table(), (heads, rows[:MAX_ALTERNATIVES] * (len(rows) > 1))]
        return [table for table in tables if table[1]]

    def _footer(self) -> list[str]:
        return [self.call, f"{self.tokens} tokens, {self.seconds:.2f} s"]


class Fields(TableView, dict[str, Probabilities]):
    """Posterior probabilities of the values of each field. The table shows those of the answer's own values."""

    def __init__(self, fields: Mapping[str, Probabilities], values: Mapping[str, Any], header: str) -> None:
        super().__init__(fields)
        self._values, self.header = values, header

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("probability", "field", "value"), [
            (str(of.share(value)) if value in of else "not sampled", name, one_line(repr(value)))
            for (name, of), value in zip(self.items(), self._values.values(), strict=True)
        ]


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
        return [each.as_dict() for each in self]

    def _header(self) -> str:
        failed = sum(bool(each.error) for each in self)
        return f"{len(self)} answers" + f", {failed} of them missing" * (failed > 0)

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = [("", f"no answer: {each.error}") if each.error else
                ("" if each.probability is None else str(each._share), repr(each.value)) for each in self]  # fmt: skip
        return ("probability", "value"), [(p, one_line(value)) for p, value in rows]


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a record with their values: of a model of pydantic, a dataclass, a dict or a named tuple."""
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if isinstance(name, str) and name.isidentifier()}
    names: Any = getattr(type(value), "model_fields", None) or getattr(value, "_fields", ())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names}


# ---- the call


@overload
def generate(
    lm: CachedTransformer, prompt: str | Context, constraint: Any = None, *, method: Method = "auto",
    max_tokens: int | None = None, budget: int | None = None, timeout: float | None = None, seed: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation: ...  # fmt: skip
@overload
def generate(
    lm: CachedTransformer, prompt: list[str] | list[Context], constraint: Any = None, *, method: Method = "auto",
    max_tokens: int | None = None, budget: int | None = None, timeout: float | None = None, seed: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Generations: ...  # fmt: skip
@list_options(GenerateOptions, {"end": "boundary", "stop": (), "rule": NO_RULE, "min_tokens": 0, "power": 1.0,
                                "temperature": 1.0, "together": TOGETHER})  # fmt: skip
def generate(
    lm: CachedTransformer, prompt: Any, constraint: Any = None, *, method: Method = "auto",
    max_tokens: int | None = None, budget: int | None = None, timeout: float | None = None, seed: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation | Generations:  # fmt: skip
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
        - "best_of": the most probable text of N samples under the mask and, without `budget` and `timeout`, greedy
          decoding. The weights of the samples give the probability of its value.
        - "importance": N samples under the mask with their weights; the value of the largest weight.
        - "steer": `smc_steer` with N and K; the value of the largest weight.
        - "exact": the most probable of some texts, in any tokens (`choose`).
        - "auto": "exact" for a list or dict of texts, a bool, an Enum or a Literal, without a limit; "best_of" under
          other constraints; "steer" under a function of the text; "sample" without one; "greedy" at temperature 0.
    max_tokens : int, optional
        Default: 160 for free text and under a function, else that of `ConstrainedText`. A text under a constraint is
        complete within it.
    budget, timeout : optional
        Tokens that the model runs, and seconds, for each prompt. The answer is then that of the step that reached it.
    seed : int, optional
    **options
        N, K : numbers of particles or beams, and of extensions of each. end, complete, mask, min_tokens, stop, rule :
        as in `ConstrainedText`. temperature : short for `rule=Rule(temperature=...)`. power : as in `smc_steer`.
        together, progress : as in `run_many`. on_answer : called with each `Generation` of a list when it ends. The
        first one ends sooner if fewer prompts run `together`.

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
    on_answer = function("on_answer", options.pop("on_answer", lambda answer: None), "print", takes=1)
    limits = {"max_tokens": max_tokens, "budget": budget, "timeout": timeout}
    plan = Plan(language_model(lm), constraint, one_of("method", method, get_args(Method)), limits, seed, options)
    several = isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], Mapping))
    if several and plan.method != "exact":
        together, progress = options.get("together", TOGETHER), options.get("progress")
        made = dict[int, Generation]()
        results = run_many(plan.run, [*map(plan.context, prompt)], seed=seed, together=together, progress=progress)
        for each in results:
            found, i = each.particles if each.matches is None else each.matches, each.index
            made[i] = Generation(plan, prompt[i], found, each.tokens, each.seconds, _error(each))
            on_answer(made[i])
        return Generations(made[i] for i in range(len(made)))
    if not several:
        return next(Runtime().each([(functools.partial(plan.answer, prompt, generator(seed)), "generate")], 1))
    start, contexts = time.perf_counter(), [*map(plan.context, prompt)]
    run = Runtime().each([(lambda: (plan.run(contexts, generator(seed)), round(spent()[1])), "generate")], 1)
    choices, tokens = next(run)
    seconds = time.perf_counter() - start
    answers = Generations(Generation(plan, each, choice, tokens // len(prompt), seconds / len(prompt))
                          for each, choice in zip(prompt, choices, strict=True))  # fmt: skip
    [*map(on_answer, answers)]
    return answers

def _error(result: Any) -> str:
    """Return why a result of `run_many` has no answer; "" if it has one."""
    if result.error:
        return str(result.error).rstrip().rpartition("\n")[2]
    left = result.matches or result.particles or getattr(result.particles, "answer", None)
    return "" if left else f"generate found no text: {result.particles._causes()}"


class Plan:
    """Arguments of `generate` that do not depend on the prompt: the algorithm and the options of the program."""

    def __init__(
        self, lm: CachedTransformer, constraint: Any, method: str, limits: dict[str, Any], seed: int | None,
        options: GenerateOptions,
    ) -> None:  # fmt: skip
        if unknown := options.keys() - GenerateOptions.__annotations__.keys():
            raise unknown_option("generate", unknown, inspect.signature(generate).parameters)
        given = {name: value for name, value in {**limits, **options}.items() if value is not None}
        if "temperature" in given:
            if "rule" in given:
                raise ValueError("generate takes temperature or rule: put the temperature into the rule")
            given["rule"] = Rule(given.pop("temperature"))
        self.lm, self.options, self.labels = lm, constraint, dict[Any, Any]()
        if isinstance(constraint, Mapping):
            if constraint.keys() & {"type", "properties", "$ref", "anyOf"}:
                raise TypeError("a dict maps labels to texts: give JsonSchema(schema) for a JSON schema")
            self.labels = {text: label for label, text in constraint.items()}
            constraint = [*constraint.values()]
        listed = isinstance(constraint, list | tuple | EnumMeta) or constraint is bool
        listed = listed or get_origin(constraint) is Literal
        self.constraint, self.seed = constraint, seed
        is_function = callable(constraint) and not is_type(constraint) and not hasattr(constraint, "index")
        if method == "auto":                            # docs/generate.md, "The methods", has the measurements
            method = "steer" if is_function else "best_of"
            if is_greedy(given.get("rule", NO_RULE)):
                method = "greedy"
            elif constraint is None and "mask" not in given:
                method = "sample"
            elif listed and given.keys() <= _OF_CHOOSE:
                method = "exact"
        self.method, self.way = method, WAYS[method]
        untaken = {"N", "K"} - self.way.sizes.keys() | ({"power"} if self.way.run is beam_search else set())
        if wrong := sorted(given.keys() - _OF_CHOOSE if method == "exact" else given.keys() & untaken):
            raise TypeError(f"generate with method={method!r} takes no {wrong[0]}")
        self.sizes = _ONE.get(method) or [given.get(name, default) for name, default in self.way.sizes.items()]
        self.limits = {name: given[name] for name in ("budget", "timeout", "power") if name in given}
        self.with_greedy = method == "best_of" and self.limits.keys() <= {"power"}      # it would double a limit
        self.program_options = {name: given[name] for name in _OF_PROGRAM if name in given}
        if constraint is None or is_function or given.get("complete") is False:
            self.program_options.setdefault("max_tokens", MAX_TOKENS)

    def context(self, prompt: Any) -> Any:
        """Return the context of messages, and other prompts as they are."""
        return self.lm.chat(prompt) if isinstance(prompt, list | tuple) else prompt

    def program(self, prompt: Any) -> ConstrainedText:
        return ConstrainedText(self.lm, self.context(prompt), self.constraint, **self.program_options)

    def run(self, prompt: Any, rng: np.random.Generator) -> Any:
        if self.way.run is choose:
            return choose(self.lm, prompt, self.options, **self.program_options)
        rest = {} if self.way.run is beam_search else {"rng": rng}
        found = self.way.run(self.program(prompt), *self.sizes, **rest, **self.limits)
        if self.method == "best_of":
            particles = [*found]
            if self.with_greedy:
                with contextlib.suppress(ValueError):   # a validator refuses the text
                    particles.append(beam_search(self.program(prompt), 1, 1).best)
            ranked = zip(particles, log_joints(particles), strict=True)     # while the cache has their tokens
            found.answer = max(ranked, key=lambda each: (not each[0].cut, each[1]), default=(None,))[0]
        return found

    def answer(self, prompt: Any, rng: np.random.Generator) -> Generation:
        """Return the answer to one prompt, as a function of `Runtime.each`. ValueError if no text is left."""
        start = time.perf_counter()
        posterior = self.run(self.context(prompt), rng)
        if isinstance(posterior, Particles) and not (posterior or getattr(posterior, "answer", None)):
            raise ValueError(f"generate found no text: {posterior._causes()}")
        return Generation(self, prompt, posterior, round(spent()[1]), time.perf_counter() - start)

    @property
    def call(self) -> str:
        """The call of the library, as a user would write it."""
        options = [f"{name}={shown(value, 40)}" for name, value in self.program_options.items()]
        constraint = self.options if self.way.run is choose else self.constraint
        name = inspect.formatannotation(constraint) if is_type(constraint) else shown(constraint, 60)
        name = getattr(constraint, "__name__", name) if isinstance(constraint, type) else name
        inside = ", ".join(["lm", "prompt", *[name] * (constraint is not None), *options])
        if self.way.run is choose:
            return f"choose({inside})"
        seeded = {} if self.way.run is beam_search or self.seed is None else {"seed": self.seed}
        outside = [*map(str, self.sizes), *(f"{name}={value}" for name, value in (self.limits | seeded).items())]
        greedy = f", beam_search(ConstrainedText({inside}), 1, 1)" * self.with_greedy
        return f"{self.way.run.__name__}(ConstrainedText({inside}), {', '.join(outside)}){greedy}"
