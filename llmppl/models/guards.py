"""Checks of programs: a mistake that would run and mean something else is refused, and the error says what works.

A *foreign step* was written for another library (a coroutine, a generator, a step that returns its result). It would
have no effect here. An *argument of a verb* must have the right type, so that it is not read as a number or a truth
value by accident. A *name of inference* is read-only in a program. A verb has an effect that depends on its *time*:

| verb | in a step | before the first step, and between two | after `finish()` |
|---|---|---|---|
| `sample`, `extend` | choose | by hand; a particle of a run chooses in its steps alone | refused |
| `observe` | weighs | weighs | refused |
| `condition`, `score` | weigh | weigh | weigh |
| `twist` | guides the selection after the step | refused: no selection would use it | in a step nothing, else refused |
| `finish` | ends the particle after the step | ends the particle and removes its twist | nothing |
| `transformer` | returns a distribution | returns a distribution | returns a distribution |

If a bare `except:` catches a death, the step continues. The next verb that chooses leaves the step again.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from llmppl.distributions import Proposal
from llmppl.lm import Context
from llmppl.support.arguments import shown

Kinds = tuple[tuple[Callable[[Any], bool], str], ...]

_PACKAGE = __name__.partition(".")[0] + "."
_PLAIN = "steps are plain functions here: "
_AWAIT = _PLAIN + "drop async and await, self.sample(...) returns the value itself"
_YIELD = _PLAIN + "drop yield, self.sample(...) returns the value itself"
_FOREIGN_STEPS: Kinds = (
    (inspect.iscoroutinefunction, f"a coroutine (async def); {_AWAIT}"),
    (inspect.isasyncgenfunction, f"a coroutine (async def); {_AWAIT}"),
    (inspect.isgeneratorfunction, f"a generator (yield); {_YIELD}"),
)
_FOREIGN_RESULTS: Kinds = (
    (inspect.isawaitable, f"a coroutine; {_AWAIT}"),
    (inspect.isasyncgen, f"a coroutine; {_AWAIT}"),
    (inspect.isgenerator, f"a generator; {_YIELD}"),
)


def _refuse(value: Any, foreign: Kinds, subject: str) -> None:
    for is_foreign, kind in foreign:
        if is_foreign(value):
            getattr(value, "close", int)()              # else Python also warns of a coroutine
            raise TypeError(f"{subject} {kind}")


def check_step(step: Callable[..., Any], program: str) -> None:
    """Raise a TypeError if `step`, or a function that a decorator wrapped, is a coroutine or a generator."""
    layer: Any = step
    while layer is not None:
        _refuse(layer, _FOREIGN_STEPS, f"{program}.step is")
        layer = getattr(layer, "__wrapped__", None)


def check_step_result(result: Any, program: str, *, whole: bool) -> None:
    """Raise a TypeError if a step returned a coroutine or a generator; if `whole`, for any result but None."""
    if result is None:
        return
    _refuse(result, _FOREIGN_RESULTS, f"{program}.step returned")
    if whole:
        raise TypeError(
            f"{program}.step returned {shown(result)}; {_PLAIN}they return nothing, add text to self.s, keep other "
            "values in attributes of self, and end the program by self.finish()"
        )


class Dead(BaseException):
    """Exception that leaves the step of a particle that died. No `except Exception` of a program catches it."""


def check_time(model: Any, verb: str) -> None:
    """Raise a RuntimeError if `verb` has no meaning now; see the table of this module."""
    if model._stepping_:
        if not model.finished or verb == "twist":
            return
        if model._log_weight_ == -math.inf:
            raise Dead
    elif verb == "twist":
        raise RuntimeError(
            "twist() outside of a step: it guides the selection after a step, and is taken back before the next one; "
            "call it in step(), or give score() what is to stay in the weight"
        )
    if model.finished:
        raise RuntimeError(f"{verb}() after the particle has finished: return from step() after finish()")
    if not model._stepping_ and verb in ("sample", "extend") and not getattr(model._chooser_, "by_hand", True):
        raise RuntimeError(f"{verb}() outside of a step: a particle of a run chooses in step() alone")


def read_only_error(model: Any, name: str, instead: str) -> AttributeError:
    """Return the error for assigning a name that belongs to inference."""
    return AttributeError(f"{type(model).__name__}.{name} is inference's, and read-only: {instead}")


def read_only(name: str, instead: str) -> Any:
    """Return a property of Model that inference sets as `_name_`. Its error for an assignment says `instead`."""

    def refuse(model: Any, value: object) -> NoReturn:
        raise read_only_error(model, name, instead)

    return property(operator.attrgetter(f"_{name}_"), refuse)


def check_names(cls: type, base: type) -> None:
    """Raise a TypeError if `cls`, a user's program, redefines a name that inference has in `base`."""
    if cls.__module__.startswith(_PACKAGE):
        return
    for name in vars(cls):
        is_internal = name[-1] == "_" != name[1:2] and name in vars(base)
        if is_internal or isinstance(vars(base).get(name), property):
            raise TypeError(f"{cls.__name__}.{name}: this name is inference's, as Model says; my_{name}, say, is free")


def as_bool(holds: Any) -> bool:
    """Return the argument of `condition` as a bool. TypeError unless it is True, False, 0 or 1."""
    if holds is True or holds is False:
        return holds
    if isinstance(holds, Proposal):
        raise TypeError(f"condition wants True or False, not {holds!r}: condition(self.sample(...)) draws from it")
    if isinstance(holds, (int, np.generic, np.ndarray)):
        array = np.asarray(holds)
        if array.shape == () and array.dtype.kind in "biu" and array in (0, 1):
            return bool(array)
    raise TypeError(
        f"condition wants True or False, not {shown(holds)}: compare, as in condition(n > 0) or "
        "condition(match is not None)"
    )


def as_log_weight(verb: str, log_w: Any) -> float:
    """Return the log weight given to `verb` as a float. TypeError unless it is a number."""
    if isinstance(log_w, (bool, np.bool_)) or not hasattr(log_w, "__float__"):      # float("3") is 3
        raise TypeError(f"{verb} wants a log weight, a number, not {shown(log_w)}")
    try:
        return float(log_w)
    except TypeError:
        raise TypeError(f"{verb} wants a log weight, one number, not {shown(log_w)}") from None


def check_proposal(verb: str, *proposals: Any) -> None:
    """Raise a TypeError if one of the arguments of `verb` cannot be drawn from."""
    for each in proposals:
        if not isinstance(each, Proposal):
            wanted = "a Distribution or another Proposal (propose, log_measure)"
            raise TypeError(f"{verb} wants {wanted}, not {shown(each)}{_suggestion(each)}")


def check_distribution(dist: Any, value: Any) -> None:
    """Raise a TypeError if the first argument of `observe` is not a distribution."""
    if isinstance(dist, Proposal):
        return
    if isinstance(value, Proposal):
        raise TypeError(f"observe(distribution, value): they are swapped in observe({shown(dist)}, {value!r})")
    wanted = "a Distribution or another Proposal first, then the value"
    raise TypeError(f"observe wants {wanted}, not {shown(dist)}{_suggestion(dist)}")


def _suggestion(value: Any) -> str:
    """Return how to make a distribution of `value`, for the end of an error; "" if that is unknown."""
    if isinstance(value, dict):
        return f": give Categorical({shown(value)})"
    return ": give self.transformer(context)" if isinstance(value, Context) else ""
