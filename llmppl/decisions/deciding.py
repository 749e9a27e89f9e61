"""Decisions: typed questions about a state in, a probability for each answer out; for one state or many."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypedDict, Unpack, overload

from llmppl.decisions.answers import Decision, Decisions, loaded
from llmppl.decisions.asking import Asking
from llmppl.decisions.calibration import KINDS, Calibration, Reading, calibration_of
from llmppl.decisions.prompts import is_messages, text_of_state
from llmppl.decisions.questions import questions_of, with_labels
from llmppl.lm import CachedTransformer
from llmppl.support.arguments import count, generator, shown
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import Runtime
from llmppl.tasks.many import TOGETHER, lanes, recorded
from llmppl.tasks.results import load_results


class HowToDecide(TypedDict, total=False):
    """Options of `decide`."""

    examples: Iterable[tuple[Any, Mapping[str, Any]]]
    orders: int
    exact: bool
    joint: bool
    think: int
    max_think: int
    seed: int | None
    abstain: float
    calibration: Calibration | None
    timeout: float | None
    budget: int | None
    together: int
    progress: bool | None
    to: str | os.PathLike[str] | None
    resume: bool | Literal["force"]
    version: str
    key: Callable[[Any], str] | None


DEFAULTS = {
    "examples": (),
    "orders": 1,
    "exact": False,
    "joint": False,
    "think": 0,
    "max_think": 64,
    "abstain": 0.0,
    "together": TOGETHER,
    "resume": False,
    "version": "",
}
_OF_RUN = "seed", "to", "resume", "key", "progress"


@overload
def decide(
    lm: CachedTransformer,
    state: list[str] | list[dict[str, Any]],
    questions: Any,
    **how: Unpack[HowToDecide],
) -> Decisions: ...
@overload
def decide(
    lm: CachedTransformer, state: str | dict[str, Any], questions: Any, **how: Unpack[HowToDecide]
) -> Decision: ...
@list_options(HowToDecide, DEFAULTS)
def decide(lm: CachedTransformer, state: Any, questions: Any, **how: Unpack[HowToDecide]) -> Any:
    """Answer typed questions about a state, with a probability for each answer.

    Parameters
    ----------
    lm : CachedTransformer
    state : str, JSON, list of messages, or a list of states
        JSON is written on one line, and messages with their roles before them. A list of dicts with roles is one state;
        another list is many states, so a JSON array as one state is [array].
    questions : dict, or type
        By name, a sentence (a predicate), `choice(...)`, `score(...)`, a list or dict of options, a bool, an Enum or a
        Literal. Or a pydantic model, a dataclass or a TypedDict of such fields and small ranges of integers, which asks
        one question for each, by its description or its name.
    examples : list of (state, {name: right answer})
        Turns of the conversation before the state. They help a small model most, and all states share their tokens.
    orders : int
        Number of rotations of the options over which probabilities are averaged. A score has one order.
    exact : bool
        Sum over all tokenisations of each answer. By default the sum begins with the tokenizer's own tokens and has few
        others, and `bounds` say what the rest can change.
    joint : bool
        Ask the questions in sequence, each given the earlier answers. `decision.joint` has the probabilities of the
        combinations, the answers are their marginals, and `decision.given(queue="billing")` those given an answer.
    think, max_think : int
        Draw so many drafts of at most `max_think` tokens before each answer. Its probability is the mean over the
        drafts, which is unbiased, with a standard error.
    seed : int, optional
        Of the drafts.
    abstain : float
        An answer whose confidence is below this is None in the value.
    calibration : Calibration, optional
        As `fit_calibration` made it, in the same setting.
    timeout, budget : float and int, optional
        Seconds, and tokens that the model runs, for each state.
    together, progress, to, resume, version, key : of a list of states, as in `run_many`

    Returns
    -------
    Decision, or Decisions for a list of states
        In a list, the `error` of a decision says why it has no answers.

    Raises
    ------
    TypeError, ValueError
        If something is no question, no option or no state, or if the calibration has another setting.
    TimeoutError
        If a limit comes before all answers are read.

    Examples
    --------
    >>> decide(lm, "The cat was happy.", {"mood": choice("How was it?", ["happy", "sad"])})["mood"].best
    'happy'
    """
    check_options("decide", how, HowToDecide.__annotations__)
    given: dict[str, Any] = {**DEFAULTS, **how}
    asking = Asking(lm, questions_of(questions), given)
    if not is_many(state):
        if "to" in how:
            raise TypeError("to= is a file of a list of states: decide(lm, [state], ..., to=...)")
        decision = functools.partial(asking.decision, state, generator(given.get("seed")))
        return next(Runtime().each([(decision, "decide")], 1))
    return Decisions(_decisions(asking, state))


def _decisions(asking: Asking, states: Sequence[Any]) -> list[Decision]:
    """Return the decisions about several states, in shared batches, and write them to a file if there is one."""
    given = asking.given
    run_all = functools.partial(lanes, asking.decision, count("together", given["together"]))
    kept: Any = {name: given[name] for name in _OF_RUN if name in given}
    made = dict[int, Decision]()
    for result in recorded(run_all, states, asking.identity(given["version"]), **kept):
        answer: Any = result.answer
        if answer is None:
            answer = Decision(result.task, {}, error=_last_line(result.error))
        made[result.index] = answer
    if len(made) < len(states):  # the file has the others
        for result in load_results(kept["to"]):
            if result.index < len(states) and result.index not in made:
                made[result.index] = loaded(
                    result.answer.as_dict(), states[result.index], asking.questions
                )
    return [made[index] for index in range(len(states))]


_NOT_FITTED = {"to", "resume", "version", "key", "abstain", "calibration", "joint", "think"}


def fit_calibration(
    lm: CachedTransformer,
    labelled: Iterable[tuple[Any, Mapping[str, Any]]],
    questions: Any,
    *,
    balanced: bool = False,
    **how: Unpack[HowToDecide],
) -> Calibration:
    """Fit a map for each question from labelled states, and choose its kind by cross-validation.

    Parameters
    ----------
    lm, questions, **how : as in `decide`, which must have the same `examples` and `orders` later
    labelled : list of (state, {name of the question: right answer})
        50 or more for each question are wanted, and 20 are needed. They must not be among the examples.
    balanced : bool
        True if the answers are about equally frequent where the calibration is used. Then it also compares division by
        the mean probability of each answer.

    Returns
    -------
    Calibration

    Examples
    --------
    >>> labelled = [("It was good.", {"good": True}), ("It was bad.", {"good": False})] * 10
    >>> fit_calibration(lm, labelled, {"good": "Was it good?"}, progress=False).maps["good"].kind
    'head'
    """
    if untaken := how.keys() & _NOT_FITTED:
        raise TypeError(f"fit_calibration takes no {min(untaken)}")
    asking = Asking(lm, questions_of(questions), {**DEFAULTS, **how})
    asking.wants_features = True
    items = with_labels("labelled", labelled)
    shown_states = {text for text, _ in chain(*asking.examples.values())}
    for state, _ in items:
        if shown_states and text_of_state(state) in shown_states:
            raise ValueError(
                f"labelled must not have the state of an example, such as {shown(state)}"
            )
    decisions = _decisions(asking, [state for state, _ in items])
    for decision in decisions:
        if decision.error:
            raise ValueError(f"there is no answer about {shown(decision.state)}: {decision.error}")
    kinds = [*KINDS, "prior"] if balanced else KINDS
    readings = dict[str, list[Reading]]()
    for decision, (_, labels) in zip(decisions, items, strict=True):
        for name, label in labels.items():
            answer = decision[name]
            place = asking.questions.asked[name].index(label)
            reading = Reading(answer.vector, answer.features, place)
            readings.setdefault(name, []).append(reading)
    return calibration_of(asking.setting(), readings, kinds)


def is_many(state: Any) -> bool:
    """Check whether this is a list of states. A list of messages is one state."""
    return isinstance(state, list | tuple) and not is_messages(state)


def _last_line(error: str | None) -> str:
    return (error or "").rstrip().rpartition("\n")[2]
