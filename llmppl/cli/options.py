"""Options that several commands take, and the language model that one of them names."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from llmppl.lm import CachedTransformer

EngineName = Literal["transformers", "numpy", "llama.cpp", "vllm"]


def _positive(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not positive. For the likeliest token alone, use --top-k 1.")
    return value


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most 1.")
    return value


def option(*names: str, none: str | None = None, **given: Any) -> Any:
    """An option; `none` is what its help says of leaving it out."""
    return typer.Option(*names, show_default=True if none is None else none, **given)


FILE = {"exists": True, "dir_okay": False, "readable": True, "metavar": "FILE"}

Lm = Annotated[
    str | None,
    option(
        none="the small model in the package",
        metavar="NAME",
        help="Language model: a hub id, a folder written by save_pretrained, a GGUF file, or smollm2.",
    ),
]
Engine = Annotated[
    EngineName | None,
    option(
        none="numpy for the model in the package, llama.cpp for a GGUF file if it is installed, else transformers",
        help="What computes the model.",
    ),
]
Device = Annotated[str | None, option(none="cpu", metavar="D", help="Where, by transformers: cpu, cuda, mps, ...")]
Dtype = Annotated[
    str | None,
    option(none="float32 on a cpu, else the checkpoint's", metavar="T", help="By transformers: float32, bfloat16, ..."),
]
Particles = Annotated[int, option("--particles", "-N", min=1, metavar="N", help="Particles kept after each step.")]
Factor = Annotated[
    int, option("--factor", "-K", min=1, metavar="K", help="Extensions tried of each particle in each step.")
]
Seed = Annotated[int | None, option(none="a new one", min=0, metavar="S", help="The same seed draws the same texts.")]
MaxTokens = Annotated[int, option(min=1, metavar="T", help="Cut a text off after T tokens.")]
HoleTokens = Annotated[int, option("--max-tokens", min=1, metavar="T", help="The most tokens in all holes together.")]
Temperature = Annotated[float, option(callback=_positive, metavar="X", help="Below 1, likely tokens become likelier.")]
TopK = Annotated[int | None, option(none="all", min=1, metavar="N", help="Only the N likeliest tokens.")]
TopP = Annotated[
    float | None, option(none="all", callback=_fraction, metavar="P", help="Only the likeliest tokens, P together.")
]
MinP = Annotated[
    float | None,
    option(none="all", callback=_fraction, metavar="P", help="Only tokens P times as likely as the likeliest."),
]
Pattern = Annotated[
    str | None, option("--regex", none="any", metavar="R", help="Only texts that R matches as a whole.")
]
GrammarFile = Annotated[
    Path | None, option("--grammar", none="any", help="Only texts that lark parses with this grammar.", **FILE)
]
SchemaFile = Annotated[
    Path | None, option("--json-schema", none="any", help="Only JSON texts that this schema admits.", **FILE)
]
Choices = Annotated[
    list[str] | None,
    option(none="any", metavar="TEXT TEXT ...", help="Only one of these texts, all up to the next option."),
]
End = Annotated[
    Literal["boundary", "prefix", "eos"],
    option(help="What follows a text under a constraint: what leaves it, anything, or the end of the text."),
]
Complete = Annotated[
    bool | None,
    option(
        "--complete/--cut",
        none="--complete under a constraint, else --cut",
        help="At --max-tokens: only texts that end by then, or texts cut there.",
    ),
]
Stop = Annotated[
    list[str] | None,
    option(none="none", metavar="TEXT", help="End a text at TEXT, which is left out; give it again for a further one."),
]
Chat = Annotated[bool, option("--chat", help="The prompt is a message, answered by a model trained to chat.")]
System = Annotated[str | None, option(none="none", metavar="TEXT", help="With --chat: what the system says first.")]
Trace = Annotated[
    Path | None,
    option(none="none", metavar="FILE", dir_okay=False, help="Record the run there, for `llmppl trace` to show."),
]
Json = Annotated[bool, option("--json", help="Print a JSON object for each particle, one a line, nothing else.")]


def given_text(argument: str) -> str:
    """An argument's text; that of `-` is what standard input has, without the end of its last line."""
    return sys.stdin.read().removesuffix("\n") if argument == "-" else argument


def constraint(kind: str, given: Any) -> Any:
    """The constraint of an option's name: a pattern, a file, some texts."""
    from llmppl.grammar import Grammar
    from llmppl.languages import DFA, JsonSchema, Regex

    def schema(file: Any) -> JsonSchema:
        return JsonSchema(Path(file).read_text(encoding="utf-8"))

    makers: dict[str, Callable[[Any], Any]] = {
        "regex": Regex, "choices": DFA.from_strings, "grammar": Grammar.from_file, "json-schema": schema,
    }  # fmt: skip
    try:
        return makers[kind](given)
    except OSError as error:
        raise ValueError(f"cannot read {given}: {error.strerror}") from None


@dataclass(frozen=True)
class Source:
    """The language model that a command line names. It pickles; `str` is what was given, empty if nothing was."""

    name: str | None = None
    engine: EngineName | None = None
    device: str | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        given = {"engine": self.engine, "device": self.device, "dtype": self.dtype}
        options = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        return f"{self.name or 'the model in the package'} ({options})" if options else self.name or ""

    @property
    def by(self) -> str:
        """What a title says of it."""
        return f", by {self}" if str(self) else ""


@functools.cache
def load(source: Source) -> CachedTransformer:
    """The model; that of the package, if nothing else is said, without the seconds that importing torch takes."""
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
