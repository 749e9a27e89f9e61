"""Options of the command line, each defined once, and the language model that `--lm` names.

A group is a frozen dataclass whose fields are options, or groups. A command takes groups as parameters. `flat` puts
the options of a group in its place, because typer knows no groups.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from llmppl.distributions import Rule
    from llmppl.lm import CachedTransformer

FILE = {"exists": True, "dir_okay": False, "readable": True, "metavar": "FILE"}

# options with a default of their own in some groups
Seed = Annotated[
    int | None, typer.Option(show_default="a new one", min=0, metavar="S", help="The same seed draws the same texts.")
]
Factor = Annotated[
    int, typer.Option("--factor", "-K", min=1, metavar="K", help="Extensions tried of each particle in each step.")
]


def option(help: str, *names: str, default: Any = None, none: str | None = None, **given: Any) -> Any:
    """Return a field of a group that is an option. Its help shows `none` in place of the default None."""
    info = typer.Option(*names, show_default=none or ("none" if default is None else True), help=help, **given)
    return field(default=default, metadata={"typer": info})


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the options of its groups as parameters."""
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**{name: _collected(hints[name], name, given) for name in parameters})

    options = [each for name, old in parameters.items() for each in _flat(name, hints[name], old.default)]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _flat(name: str, kind: Any, default: Any, *option: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters that stand for one of type `kind`: those of its fields if it is a group."""
    if not is_dataclass(kind):
        hint = Annotated[kind, *option] if option else kind
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        return
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        yield from _flat(each.name, hints[each.name], each.default, *each.metadata.values())


def _collected(kind: Any, name: str, given: dict[str, Any]) -> Any:
    """Return the value of a parameter; a group is made of the values of its fields."""
    if name in given:                                   # so no group may have the name of an option
        return given[name]
    hints = get_type_hints(kind)
    return kind(**{each.name: _collected(hints[each.name], each.name, given) for each in fields(kind)})


def _positive(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not positive. For the likeliest token alone, use --top-k 1.")
    return value


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most 1.")
    return value


@dataclass(frozen=True)
class Source:
    """Language model that a command line names. It pickles; `str` is what was given, empty if nothing was."""

    name: str | None = option(
        "Language model: a hub id, a folder written by save_pretrained, a GGUF file, or smollm2.",
        "--lm",
        none="the small model in the package",
        metavar="NAME",
    )
    engine: Literal["transformers", "numpy", "llama.cpp", "vllm"] | None = option(
        "What computes the model.",
        none="numpy for the model in the package, llama.cpp for a GGUF file if it is installed, else transformers",
    )
    device: str | None = option("Where, by transformers: cpu, cuda, mps, ...", none="cpu", metavar="D")
    dtype: str | None = option(
        "By transformers: float32, bfloat16, ...", none="float32 on a cpu, else the checkpoint's", metavar="T"
    )

    def __str__(self) -> str:
        given = {"engine": self.engine, "device": self.device, "dtype": self.dtype}
        options = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        return f"{self.name or 'the model in the package'} ({options})" if options else self.name or ""

    @property
    def by(self) -> str:
        """Words that name it at the end of a title."""
        return f", by {self}" if str(self) else ""


@dataclass(frozen=True)
class Shaping:
    """Options of a `Rule`, which shapes the distribution of the next token."""

    temperature: float = option("Below 1, likely tokens become likelier.", default=1.0, callback=_positive, metavar="X")
    top_k: int | None = option("Only the N likeliest tokens.", none="all", min=1, metavar="N")
    top_p: float | None = option("Only the likeliest tokens, P together.", none="all", callback=_fraction, metavar="P")
    min_p: float | None = option(
        "Only tokens P times as likely as the likeliest.", none="all", callback=_fraction, metavar="P"
    )

    def rule(self) -> Rule:
        from llmppl.distributions import Rule

        return Rule(**vars(self))


@dataclass(frozen=True)
class Steering:
    """Options of every command that steers a program."""

    source: Source = Source()
    N: int = option("Particles kept after each step.", "--particles", "-N", default=8, min=1, metavar="N")
    K: Factor = 3
    seed: Seed = None
    max_tokens: int = option("Cut a text off after T tokens.", default=40, min=1, metavar="T")
    shaping: Shaping = Shaping()
    as_json: bool = option("Print a JSON object for each particle, one a line, nothing else.", "--json", default=False)
    trace: Path | None = option("Record the run there, for `llmppl trace` to show.", metavar="FILE", dir_okay=False)


def given_text(argument: str) -> str:
    """Return the text of an argument; `-` stands for standard input, without the end of its last line."""
    return sys.stdin.read().removesuffix("\n") if argument == "-" else argument


def constraint(kind: str, given: Any) -> Any:
    """Return the constraint of the option --`kind`: a pattern, a file, or some texts."""
    from llmppl.constraints.automata import DFA, Regex
    from llmppl.constraints.json import JsonSchema
    from llmppl.constraints.lark import Grammar

    makers: dict[str, Callable[[Any], Any]] = {
        "regex": Regex,
        "choices": DFA.from_strings,
        "grammar": Grammar.from_file,
        "json-schema": lambda file: JsonSchema(Path(file).read_text(encoding="utf-8")),
    }
    try:
        return makers[kind](given)
    except OSError as error:
        raise ValueError(f"cannot read {given}: {error.strerror}") from None
    except ValueError as error:                         # a Grammar names its file itself
        raise error if kind != "json-schema" else ValueError(f"{given}: {error}") from None


@functools.cache
def load(source: Source) -> CachedTransformer:
    """Load the model. That of the package, if nothing else is given, needs no torch, whose import takes seconds."""
    from llmppl.lm import CachedTransformer

    # the library itself says when a prompt is too long
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    given = {name: value for name, value in vars(source).items() if value is not None} or {"engine": "numpy"}
    if source.name is not None:
        typer.echo(f"loading {source} ...", err=True)
    try:
        return CachedTransformer.from_pretrained(given.pop("name", None), **given)
    except OSError as error:                            # no such model, or no room for a converted one
        raise ValueError(str(error)) from None
