"""What a program may not be: mistakes that would run, and mean something else, are refused with what works.

A *foreign step* was written for another library (a coroutine, a generator, a step that returns its result), and would
do nothing of what it says. An *argument of a verb* of another type would be taken for a number or a truth value that
nobody meant. A *name of inference* is read-only in a program. And a verb is used *in its time*:

| verb | in a step | before the first step, and between two | after `finish()` |
|---|---|---|---|
| `sample`, `extend` | choose | by hand; a particle of a run chooses in its steps alone | refused |
| `observe` | weighs | weighs | refused |
| `condition`, `score` | weigh | weigh | weigh |
| `twist` | guides the selection after the step | refused: no selection would see it | in a step nothing, else refused |
| `finish` | ends the particle after the step | ends the particle, and takes its twist back | nothing |
| `transformer` | asks | asks | asks |

A step that goes on after a death, since a bare `except:` caught it, is left again at the next verb that chooses.
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


def _refuse(thing: Any, foreign: Kinds, said: str) -> None:
    for is_foreign, kind in foreign:
        if is_foreign(thing):
            getattr(thing, "close", int)()              # else Python warns of a coroutine as well
            raise TypeError(f"{said} {kind}")


def plain_step(step: Callable[..., Any], program: str) -> None:
    """A TypeError if `step`, or what a decorator made it from, is a coroutine or a generator."""
    layer: Any = step
    while layer is not None:
        _refuse(layer, _FOREIGN_STEPS, f"{program}.step is")
        layer = getattr(layer, "__wrapped__", None)


def plain_result(result: Any, program: str, *, whole: bool) -> None:
    """A TypeError if a step returned what has still to be run; of a `whole` step, if it returned anything."""
    if result is None:
        return
    _refuse(result, _FOREIGN_RESULTS, f"{program}.step returned")
    if whole:
        raise TypeError(
            f"{program}.step returned {shown(result)}; {_PLAIN}they return nothing, add text to self.s, keep other "
            "values in attributes of self, and end the program by self.finish()"
        )


class Dead(BaseException):
    """Leaves the step of a particle that died; no `except Exception` of a program holds it up."""


def in_its_time(model: Any, verb: str) -> None:
    """A RuntimeError for a verb that means nothing now; see the table of this module."""
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


def taken(model: Any, name: str, instead: str) -> str:
    """What is told of a name that inference has."""
    return f"{type(model).__name__}.{name} is inference's, and read-only: {instead}"


def read_only(name: str, instead: str) -> Any:
    """A property of Model that inference sets as `_name_`; who assigns it is told what to do `instead`."""

    def refuse(model: Any, value: object) -> NoReturn:
        raise AttributeError(taken(model, name, instead))

    return property(operator.attrgetter(f"_{name}_"), refuse)


def free_names(cls: type, base: type) -> None:
    """A TypeError if `cls`, a program of a user, gives another meaning to a name that inference has in `base`."""
    for name in () if cls.__module__.startswith(_PACKAGE) else vars(cls):
        if isinstance(vars(base).get(name), property) or (name[-1] == "_" != name[1:2] and name in vars(base)):
            raise TypeError(f"{cls.__name__}.{name}: this name is inference's, as Model says; my_{name}, say, is free")


def truth(holds: Any) -> bool:
    """What `condition` was given, as a bool; a TypeError for what is neither True nor False nor 0 nor 1."""
    if holds is True or holds is False:
        return holds
    if isinstance(holds, Proposal):
        raise TypeError(f"condition wants True or False, not {holds!r}: condition(self.sample(...)) draws from it")
    one = np.asarray(holds) if isinstance(holds, (int, np.generic, np.ndarray)) else None
    if one is None or one.shape != () or one.dtype.kind not in "biu" or one not in (0, 1):
        raise TypeError(
            f"condition wants True or False, not {shown(holds)}: compare, as in condition(n > 0) or "
            "condition(match is not None)"
        )
    return bool(one)


def log_of(verb: str, log_w: Any) -> float:
    """The log weight that `verb` was given, as a float; a TypeError for what is no number."""
    if isinstance(log_w, (bool, np.bool_)) or not hasattr(log_w, "__float__"):      # float("3") is 3
        raise TypeError(f"{verb} wants a log weight, a number, not {shown(log_w)}")
    try:
        return float(log_w)
    except TypeError:
        raise TypeError(f"{verb} wants a log weight, one number, not {shown(log_w)}") from None


def drawable(verb: str, *given: Any) -> None:
    """A TypeError if one of these cannot be drawn from."""
    for each in given:
        if not isinstance(each, Proposal):
            wanted = "a Distribution or another Proposal (propose, log_measure)"
            raise TypeError(f"{verb} wants {wanted}, not {shown(each)}{_meant(each)}")


def _meant(given: Any) -> str:
    """What would have worked for what is no distribution."""
    if isinstance(given, dict):
        return f": give Categorical({shown(given)})"
    return ": give self.transformer(context)" if isinstance(given, Context) else ""


def observed(dist: Any, value: Any) -> None:
    """A TypeError if `observe` was not given a distribution first."""
    if isinstance(dist, Proposal):
        return
    if isinstance(value, Proposal):
        raise TypeError(f"observe(distribution, value): they are swapped in observe({shown(dist)}, {value!r})")
    wanted = "a Distribution or another Proposal first, then the value"
    raise TypeError(f"observe wants {wanted}, not {shown(dist)}{_meant(dist)}")
