"""Batched: a function of many arguments at once, asked from a step as a language model is.

What a classifier, a reward model or an embedding costs is mostly by the call, and every particle has a text of its own.
A step that calls a batched function waits until all others wait too; then the function is called once, with what all of
them ask. Equal arguments are asked once, and the newest answers are kept, so that the function must answer the same for
equal arguments, whatever else is asked with them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import replace
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, TypeVar, overload

import numpy as np

from llmppl.support import arguments
from llmppl.support.arguments import kind, name_of, shown
from llmppl.support.locks import Turn, in_turn
from llmppl.support.runtime import Evaluator, Stats, request
from llmppl.support.shared import Shared

A = TypeVar("A", bound=Hashable)
B = TypeVar("B")
_MOST_KEPT = 1 << 14                                    # answers
_EXAMPLE = "def sentiment(texts): return [...]"


class Batched(Shared, Evaluator, Generic[A, B]):
    """A function of a list, called with one argument and batched over particles; `batched` makes one.

    It is an evaluator of `llmppl.support.runtime`. Threads call the function in turn; one that ends with an exception, or by an
    interrupt, has answered nothing.
    """

    patient = True

    def __init__(self, function: Callable[[list[A]], Iterable[B]], max_batch: int | None = None) -> None:
        self.function = function
        self.max_batch = arguments.optional_count("max_batch", max_batch)
        self._answers: dict[A, B] = {}
        self._done: dict[int, Stats] = {}               # of each thread, by an identifier that Python uses again
        self._turn = Turn()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, argument: A) -> B:
        """The answer for `argument`: the one that is kept, or of a call with what all others ask."""
        if not arguments.is_hashable(argument):
            raise TypeError(
                f"{self} is asked once for equal arguments, and {kind(argument)} has no hash: give it a text, a number "
                "or a tuple of them"
            )
        answer: B = request(self, argument)
        return answer

    def done(self) -> Stats:
        """What was asked for the calling thread; a copy."""
        return replace(self._stats())

    def cached(self, question: A) -> B | None:
        return self._answers.get(question)

    @in_turn
    def evaluate(self, questions: list[A]) -> list[B]:
        found = {question: self._answers.get(question) for question in questions}
        new = [question for question, answer in found.items() if answer is None]
        most = self.max_batch or max(1, len(new))
        for start in range(0, len(new), most):
            asked = new[start : start + most]
            answers = dict(zip(asked, self._call(asked), strict=True))
            found |= answers
            self._answers |= answers
        while len(self._answers) > _MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        return [found[question] for question in questions]          # type: ignore[misc]    # none is None any more

    def _stats(self) -> Stats:
        return self._done.setdefault(get_ident(), Stats())

    def _call(self, asked: list[A]) -> list[B]:
        """The function's answers, checked."""
        stats, start = self._stats(), perf_counter()
        stats.calls += 1
        stats.arguments += len(asked)
        try:
            answers: Any = self.function(list(asked))
            is_listed = isinstance(answers, Iterable) and not isinstance(answers, (str, bytes, Mapping, Set))
            listed = list(answers) if is_listed and getattr(answers, "ndim", None) != 0 else None
        except Exception as error:
            error.add_note(f"in {self}, called with a list of {len(asked)}: {shown(asked)}")
            raise
        finally:
            stats.seconds_batched += perf_counter() - start
        if listed is None:
            raise TypeError(
                f"{self} returned {shown(answers)} for a list of {len(asked)}: a batched function takes a list, and "
                "returns a list of as many answers, in the same order"
            )
        if len(listed) != len(asked):
            raise ValueError(
                f"{self} returned {len(listed)} answers for a list of {len(asked)}: one is wanted for each, in the "
                "same order"
            )
        return [self._checked(question, answer) for question, answer in zip(asked, listed, strict=True)]

    def _checked(self, question: A, answer: Any) -> Any:
        """A scalar of numpy or torch as a number of Python, an array read-only."""
        if getattr(answer, "ndim", None) == 0:
            answer = answer.item()
        elif isinstance(answer, np.ndarray):
            answer = answer.copy()
            answer.setflags(write=False)
        is_float = isinstance(answer, float) or getattr(getattr(answer, "dtype", None), "kind", "") == "f"
        if answer is None or (is_float and np.isnan(answer).any()):
            raise ValueError(f"{self} answered {shown(answer)} for {shown(question)}")
        return answer

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name, where it is found by that; what is defined in a program goes with its function."""
        name = getattr(self, "__qualname__", "")
        named = functools.reduce(lambda part, name: getattr(part, name, None), name.split("."), _module(self))
        is_named = named is self and self.__module__ != "__main__"
        return name if is_named else (Batched, (self.function, self.max_batch))

    def __str__(self) -> str:
        return name_of(self.function)

    def __repr__(self) -> str:
        most = "" if self.max_batch is None else f", max_batch={self.max_batch}"
        return f"batched({self}{most})"


@overload
def batched(
    function: Callable[[list[A]], Iterable[B]], /, *, max_batch: int | None = None
) -> Batched[A, B]: ...


@overload
def batched(*, max_batch: int | None = None) -> Callable[[Callable[[list[A]], Iterable[B]]], Batched[A, B]]: ...


def batched(function: Any = None, /, *, max_batch: int | None = None) -> Any:
    """A function of a list, as a function of one argument that steps may call: particles share its calls.

        @batched
        def sentiment(texts: list[str]) -> list[float]:
            return classifier.log_probs(texts)

    and `self.score(sentiment(self.s))` in a step. Outside of a run it is called with a list of one. Equal arguments are
    asked once: it must answer the same for them, and nobody may change an answer.

    Parameters
    ----------
    function : callable
        Takes a list of different arguments, which can be hashed, and returns a list or an array of as many answers in
        the same order: log-weights, labels, vectors, whatever the step makes of them, but None and NaN.
    max_batch : int, optional
        The most arguments of a call; more are given in several.

    Raises
    ------
    TypeError, ValueError
        For what is no function of one list. Where it is called: for an argument without a hash, and for answers that
        are not as many, None or NaN. Its own exceptions say in a note what it was called with.
    """
    if function is None:
        return functools.partial(batched, max_batch=max_batch)
    arguments.function("batched: function", function, _EXAMPLE)
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{name_of(function)} is a coroutine (async def), and batched takes a plain function")
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise TypeError(
            f"batched takes a function of one argument, a list, as {_EXAMPLE}; {name_of(function)} cannot be called so "
            f"({error}). A method is taken from its object: batched(critic.score)"
        ) from None
    except ValueError:                                  # a built-in one that does not tell
        pass
    return Batched(function, max_batch)


def _module(value: Any) -> Any:
    return sys.modules.get(value.__module__)
