"""Batched: a function of a list, called by particles with one argument each.

A classifier, a reward model or an embedding costs mostly by the call, and every particle has its own text. A step that
calls a batched function waits until all other steps wait as well. Then one call passes all arguments to the function.
Equal arguments are passed once, and the newest answers are cached.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import replace
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, TypeVar, overload

import numpy as np

from llmppl.support import arguments
from llmppl.support.arguments import name_of, shown
from llmppl.support.locks import Lock, locked
from llmppl.support.runtime import Evaluator, Stats, request
from llmppl.support.shared import Shared

A = TypeVar("A", bound=Hashable)
B = TypeVar("B")
_MAX_CACHED = 1 << 14  # answers


class Batched(Shared, Evaluator, Generic[A, B]):
    """A function of a list that is called with one argument and batched over particles; `batched` makes one.

    One thread at a time calls the function. A call that ends with an exception or an interrupt caches nothing.

    Examples
    --------
    >>> num_words = batched(lambda texts: [len(text.split()) for text in texts])
    >>> num_words
    batched(<lambda>)
    >>> num_words("a b"), num_words("a b"), num_words.done().calls      # the second answer is cached
    (2, 2, 1)
    """

    patient = True

    def __init__(
        self, function: Callable[[list[A]], Iterable[B]], max_batch: int | None = None
    ) -> None:
        self.function = function
        self.max_batch = arguments.optional_count("max_batch", max_batch)
        self._answers: dict[A, B] = {}
        self._done = defaultdict[int, Stats](Stats)  # by thread identifier, which Python may reuse
        self._lock = Lock()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, argument: A) -> B:
        """Return the answer for `argument`, which is hashable, cached or from a call for other particles as well."""
        answer: B = request(self, argument)
        return answer

    def done(self) -> Stats:
        """Return a copy of the statistics of the calling thread."""
        return replace(self._done[get_ident()])

    def forget(self) -> None:
        """Drop the cached answers."""
        self._answers.clear()

    def cached(self, question: A) -> B | None:
        return self._answers.get(question)

    @locked
    def evaluate(self, questions: list[A]) -> list[B]:
        found = {
            question: self._answers[question] for question in questions if question in self._answers
        }
        new = [question for question in dict.fromkeys(questions) if question not in found]
        size = self.max_batch or max(1, len(new))
        for start in range(0, len(new), size):
            batch = new[start : start + size]
            answers = dict(zip(batch, self._call(batch), strict=True))
            found |= answers
            self._answers |= answers
        while len(self._answers) > _MAX_CACHED:
            del self._answers[next(iter(self._answers))]
        return [found[question] for question in questions]

    def _call(self, questions: list[A]) -> list[B]:
        """Return the answers of the function, checked."""
        stats = self._done[get_ident()]
        start = perf_counter()
        stats.calls += 1
        stats.arguments += len(questions)
        try:
            answers = self.function(list(questions))
            is_list = isinstance(answers, Iterable) and not isinstance(
                answers, (str, bytes, Mapping, Set)
            )
            listed = list(answers) if is_list else []
        except Exception as error:
            error.add_note(f"in {self}, called with a list of {len(questions)}: {shown(questions)}")
            raise
        finally:
            stats.seconds_batched += perf_counter() - start
        if len(listed) != len(questions):
            raise ValueError(
                f"{self} returned {shown(answers)} for a list of {len(questions)}: a batched function takes a list, "
                "and returns a list of as many answers, in the same order"
            )
        return [
            self._checked(question, answer)
            for question, answer in zip(questions, listed, strict=True)
        ]

    def _checked(self, question: A, answer: Any) -> Any:
        """Return a scalar of numpy or torch as a Python number, an array as a read-only copy."""
        if isinstance(answer, np.ndarray):
            answer = answer.copy()
            answer.setflags(write=False)
        if getattr(answer, "ndim", None) == 0:
            answer = answer.item()
        numbers = np.asarray(answer) if isinstance(answer, (float, np.ndarray)) else np.empty(0)
        if answer is None or np.any(numbers != numbers):  # NaN
            raise ValueError(f"{self} answered {shown(answer)} for {shown(question)}")
        return answer

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name if the name leads to this object; else, as in `__main__`, with the function."""
        name = getattr(self, "__qualname__", "")
        found = getattr(sys.modules.get(self.__module__), name, None)
        is_named = found is self and self.__module__ != "__main__"
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
def batched(
    *, max_batch: int | None = None
) -> Callable[[Callable[[list[A]], Iterable[B]]], Batched[A, B]]: ...


def batched(function: Any = None, /, *, max_batch: int | None = None) -> Any:
    """Return a function of one argument that steps may call, made from a function of a list.

        @batched
        def sentiment(texts: list[str]) -> list[float]:
            return classifier.log_probs(texts)

    A step then calls `self.score(sentiment(self.s))`, and particles share the calls. Outside of a run the function is
    called with a list of one. Answers for equal arguments must be equal in any call, and no step may change them.

    Parameters
    ----------
    function : callable
        Takes a list of different, hashable arguments. Returns a list or an array of as many answers in the same order:
        log-weights, labels, vectors or other values, but not None or NaN.
    max_batch : int, optional
        Largest number of arguments of a call. More arguments are split over several calls.

    Raises
    ------
    ValueError
        By a call, if there are not as many answers, or one is None or NaN. Other exceptions get a note.

    Examples
    --------
    >>> lengths = batched(lambda texts: [len(text) for text in texts])
    >>> lengths("abc")
    3
    """
    if function is None:
        return functools.partial(batched, max_batch=max_batch)
    arguments.function("batched: function", function, "def sentiment(texts): return [...]", takes=1)
    return Batched(function, max_batch)
