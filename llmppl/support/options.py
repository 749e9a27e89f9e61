"""Options: errors for unknown keywords, names that other libraries use, and signatures that list every option."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

SYNONYMS = {                                            # names of other libraries, with ours
    "num_particles": "N", "n_particles": "N", "particles": "N", "beam_factor": "K", "n_beam": "K",
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "min_new_tokens": "min_tokens",
    "min_length": "min_tokens", "stop_strings": "stop", "stop_sequences": "stop",
    "eos_token_id": "eos_ids", "eos_token_ids": "eos_ids", "stop_token_ids": "eos_ids", "torch_dtype": "dtype",
    "backend": "engine", "auth_token": "token", "use_auth_token": "token",
}  # fmt: skip
CONSTRAINTS = {                                         # names of other libraries, with the constraint
    "regex": "Regex(...)", "pattern": "Regex(...)", "grammar": "Grammar(...)", "schema": "JsonSchema(...)",
    "json_schema": "JsonSchema(...)", "choice": "[...]", "choices": "[...]", "output_type": "int",
}  # fmt: skip
_RULE = frozenset(("temperature", "top_k", "top_p", "min_p"))
_PLACES = (                                             # options of other functions, and where to give them
    (("n", "k", "limit", "num_results"), "a query", "matches come one by one, take({value}) so many"),
    (("max_tokens", "min_tokens", "stop", "prompt", "rule"), "", "it is the program's, {program}"),
    (_RULE, "", "it is the program's, {program}"),
    (("eos_ids",), "", "it is the language model's, CachedTransformer.from_pretrained(name, eos_ids=[...]); "
     "a text that ends texts is stop="),
    (("N", "K", "seed", "rng", "max_steps"), "", "it is inference's, smc_steer(program, N, K, seed=0)"),
)  # fmt: skip


def unknown_option(owner: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error for keywords that a function does not take, with the name that was probably meant.

    Parameters
    ----------
    owner : str
        Name of the function, with which the error begins.
    given : names of the unknown keywords, or a dict with their values
        A dict also recognises the names of other libraries, and options that belong to another function.
    known : names of the options that the function takes
    """
    name, known = next(iter(given)), sorted(known)
    if isinstance(given, Mapping) and (hint := foreign_hint(owner, name, given[name], known)):
        return TypeError(f"{owner} takes no {name}: {hint}")
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
    return TypeError(f"{owner} takes no {name}: {hint}")


def foreign_hint(owner: str, name: str, value: object, known: Iterable[str]) -> str:
    """Return the way to give an option that another library or function calls `name`; "" for any other name."""
    ours = SYNONYMS.get(name, name)
    if ours in known:
        return "" if ours == name else f"did you mean {ours}?"
    if name in CONSTRAINTS and "constraint" in known:
        return f"it is the constraint, {owner}(lm, prompt, {CONSTRAINTS[name]})"
    option = f"{ours}={value!r}"
    if ours in _RULE:
        option = f"rule=Rule({option})"
        if "rule" in known:
            return f"give {option}"
    program = f"ConstrainedText(lm, prompt, {option})"
    places = [place for names, of, place in _PLACES if ours in names and of in ("", owner)]
    return places[0].format(value=repr(value), program=program) if places else ""


def list_options(options: type, defaults: Mapping[str, object]) -> Callable[[F], F]:
    """Return a decorator that lists the keys of the TypedDict `options` in a signature, in place of `**options`.

    `help` then shows them as keyword parameters, with their types and `defaults` (None where one is missing). The
    function still takes `**options: Unpack[...]`, from which type checkers know them.
    """
    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=_text(kind))
            for name, kind in inspect.get_annotations(options).items()
        ]
        setattr(function, "__signature__", signature.replace(parameters=own + listed))      # noqa: B010
        return function

    return decorate


def check_keywords(owner: str) -> Callable[[C], C]:
    """Return a decorator for a dataclass whose error for an unknown keyword names the one that was meant."""
    def decorate(cls: C) -> C:
        init: Any = cls.__init__                        # type: ignore[misc]
        known = inspect.signature(init).parameters.keys() - {"self"}

        @functools.wraps(init)
        def checked_init(self: Any, *arguments: Any, **keywords: Any) -> None:
            if unknown := {name: keywords[name] for name in sorted(keywords.keys() - known)}:
                raise unknown_option(owner, unknown, known)
            init(self, *arguments, **keywords)

        setattr(cls, "__init__", checked_init)          # noqa: B010
        return cls

    return decorate


def readable_tuple(cls: C) -> C:
    """Return a NamedTuple class after making its signature show types as they are written, not as ForwardRef."""
    new: Any = cls.__new__
    new.__annotations__ = {name: _text(kind) for name, kind in new.__annotations__.items()}
    return cls


def _text(kind: Any) -> Any:
    return getattr(kind, "__forward_arg__", kind)
