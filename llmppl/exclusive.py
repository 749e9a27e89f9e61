"""Exclusive: what several threads share, used by one call at a time, and made anew after a call that did not end.

An interrupt can end a call between any two lines, and what it was changing is then right nowhere in particular. So
nothing is repaired where it broke: a call that does not end leaves a mark, and the next one that finds the mark makes
everything anew before it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Exclusive:
    """`exclusive(function, *arguments)` is `function(*arguments)`, in one thread at a time.

    Parameters
    ----------
    renew : callable
        Brings what is shared into a state that is right whatever an unfinished call has left. It runs before the next
        call, and again if it was itself not finished.
    name : str
        What is shared, for the error.

    Raises
    ------
    RuntimeError
        If the function itself calls it again in the same thread, where waiting would never end.
    """

    def __init__(self, renew: Callable[[], None], name: str) -> None:
        self._renew, self._name = renew, name
        self._turn: Any = threading.RLock()
        self._ended = True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._turn._is_owned():                      # as threading.Condition asks
            raise RuntimeError(f"{self._name} was used from inside a call of its own, by {function.__qualname__}")
        # on one line: nothing that raises between two lines leaves it locked
        with self._turn: return self._to_its_end(function, arguments)   # noqa: E701

    def _to_its_end(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._ended:
            self._renew()
        self._ended = False
        result = function(*arguments)
        self._ended = True
        return result

    def in_order(self) -> None:
        """Say, inside a call, that all is right as it is, though the call is about to raise."""
        self._ended = True
