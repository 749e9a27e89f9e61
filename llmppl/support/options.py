"""Options of functions: errors for unknown keywords, and signatures that list every option."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def check_options(
    owner: str,
    given: Iterable[str],
    known: Iterable[str],
    guesses: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise a TypeError if `owner` does not take a given keyword. It names the most similar of the `known` ones.

    `guesses` has the hints for names of other libraries.
    """
    known = sorted(known)
    name = min(set(given).difference(known), default=None)
    if name is None:
        return
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
    if "_results" in name and "results" in known:
        hint = "itertools.islice(search(...), n) takes n results"
    if "rule" in known and name in ("temperature", "top_k", "top_p", "min_p"):
        hint = f"give it in rule=Rule({name}=...)"
    raise TypeError(f"{owner} takes no {name}: {guesses.get(name, hint)}")


def list_options(options: type, defaults: Mapping[str, object]) -> Callable[[F], F]:
    """Return a decorator that lists the keys of the TypedDict `options` in a signature, in place of `**options`.

    `help` then shows them as keyword parameters, with their types and `defaults` (None where one is missing). The
    function still takes `**options: Unpack[...]`, from which type checkers know them.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = {
            name: each
            for name, each in signature.parameters.items()
            if each.kind is not each.VAR_KEYWORD
        }
        keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        for name, kind in inspect.get_annotations(options).items():
            annotation = getattr(kind, "__forward_arg__", kind)  # a type as it is written
            parameters.setdefault(
                name, keyword(name, default=defaults.get(name), annotation=annotation)
            )
        setattr(function, "__signature__", signature.replace(parameters=[*parameters.values()]))  # noqa: B010
        return function

    return decorate


class Guess:
    """Name that users guess for another one. Its AttributeError has a hint; instances may have such an attribute."""

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has {self.hint}")


def no_attribute(hint: str) -> Callable[[Any, str], NoReturn]:
    """Return a `__getattr__` whose AttributeError has a hint, in which {} is the unknown name."""

    def unknown(self: Any, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and notebooks ask for such names
            raise AttributeError(name)
        raise AttributeError(f"{type(self).__name__} has no {name}: {hint.format(name)}")

    return unknown
