"""Options of the command line, each defined once, and the objects that they name.

A group is a frozen dataclass. Its fields are options or other groups. A command takes groups as parameters. typer reads
options from flat signatures only, so `flat` replaces each group of a command by its options.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from llmppl.cli import show

if TYPE_CHECKING:
    from llmppl.distributions import Rule
    from llmppl.lm import CachedTransformer

T = TypeVar("T")
FILE = {"exists": True, "dir_okay": False, "readable": True, "metavar": "FILE"}


def flat(make: Callable[..., T]) -> Callable[..., T]:
    """Return `make`, a command or a group, as a function whose parameters are options instead of groups."""
    hints = get_type_hints(make, include_extras=True)
    own = inspect.signature(make).parameters
    options = {each.name: each.metadata.values() for each in fields(make)} if is_dataclass(make) else {}
    groups = {name: flat(hints[name]) for name in own if is_dataclass(hints[name])}
    parameters = list[inspect.Parameter]()
    for name, old in own.items():
        if name in groups:
            parameters += inspect.signature(groups[name]).parameters.values()
        else:
            hint = Annotated[hints[name], *options[name]] if options.get(name) else hints[name]
            parameters.append(old.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    @functools.wraps(make, updated=())
    def call(**given: object) -> T:
        values = given | {name: group(**given) for name, group in groups.items()}
        return make(**{name: values[name] for name in own})

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def option(default: T, help: str, *names: str, none: str = "none", **given: Any) -> T:
    """Return a field of a group that is an option. Its help shows `none` instead of the default None."""
    info = typer.Option(*names, help=help, show_default=none if default is None else True, **given)
    return field(default=default, metadata={"option": info})


def usage_error(wrong: object, message: str) -> None:
    """Raise a usage error if `wrong`."""
    if wrong:
        raise typer.BadParameter(message)


def _positive(value: float) -> float:
    usage_error(not value > 0, f"{value:g} is not positive. For the likeliest token alone, use --top-k 1.")
    return value


def _fraction(value: float | None) -> float | None:
    if value is not None:
        usage_error(not 0 < value <= 1, f"{value:g} is not above 0 and at most 1.")
    return value


# options of several groups
Seed = Annotated[
    int | None, typer.Option(show_default="a new one", min=0, metavar="S", help="The same seed draws the same texts.")
]
Factor = Annotated[
    int, typer.Option("--factor", "-K", min=1, metavar="K", help="Extensions tried of each particle in each step.")
]


@dataclass(frozen=True)
class Source:
    """Language model, by name. `str` is empty for the model in the package."""

    name: str | None = option(
        None,
        "Language model: a hub id, a folder written by save_pretrained, a GGUF file, or smollm2.",
        "--lm",
        none="the small model in the package",
        metavar="NAME",
    )
    engine: Literal["transformers", "numpy", "llama.cpp", "vllm"] | None = option(
        None,
        "Engine that computes the model.",
        none="numpy for the model in the package, llama.cpp for a GGUF file if it is installed, else transformers",
    )
    device: str | None = option(None, "Device, for transformers: cpu, cuda, mps, ...", none="cpu", metavar="D")
    dtype: str | None = option(
        None, "For transformers: float32, bfloat16, ...", none="float32 on a cpu, else the checkpoint's", metavar="T"
    )

    def __str__(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in vars(self).items() if value and name != "name")
        return f"{self.name or 'the model in the package'} ({options})" if options else self.name or ""

    @property
    def by(self) -> str:
        """Words that name the model at the end of a title."""
        return f", by {self}" if str(self) else ""


@dataclass(frozen=True)
class Shaping:
    """Options of a `Rule`, which shapes the distribution of the next token."""

    temperature: float = option(1.0, "Below 1, likely tokens become likelier.", callback=_positive, metavar="X")
    top_k: int | None = option(None, "Only the N likeliest tokens.", none="all", min=1, metavar="N")
    top_p: float | None = option(
        None, "Only the likeliest tokens of total probability P.", none="all", callback=_fraction, metavar="P"
    )
    min_p: float | None = option(
        None, "Only tokens P times as likely as the likeliest.", none="all", callback=_fraction, metavar="P"
    )

    def rule(self) -> Rule:
        """Return the rule with these options."""
        from llmppl.distributions import Rule

        return Rule(**vars(self))


@dataclass(frozen=True)
class Steering:
    """Options of a command that steers a program and prints its particles."""

    source: Source = Source()
    N: int = option(8, "Particles kept after each step.", "--particles", "-N", min=1, metavar="N")
    K: Factor = 3
    seed: Seed = None
    max_tokens: int = option(40, "Cut a text off after T tokens.", min=1, metavar="T")
    shaping: Shaping = Shaping()
    as_json: bool = option(False, "Print a JSON object for each particle, one per line, and nothing else.", "--json")
    trace: Path | None = option(None, "Record the run here, for `llmppl trace`.", metavar="FILE", dir_okay=False)


@dataclass(frozen=True)
class InfillSteering(Steering):
    """Options of `infill` that steer its program. A step fills a whole hole, so a larger factor pays."""

    K: Factor = 10
    end: Literal["prefix", "eos"] = option("prefix", "After the last fragment: any tokens, or the end of the text.")
    max_tokens: int = option(40, "Fill all holes together with at most T tokens.", min=1, metavar="T")


@dataclass(frozen=True)
class Limits:
    """Limits of the text. A command line gives at most one."""

    max_letters: int | None = option(None, "No word of more than L letters.", none="any", min=1, metavar="L")
    regex: str | None = option(None, "Only texts that R matches as a whole.", none="any", metavar="R")
    grammar: Path | None = option(None, "Only texts that lark parses with this grammar.", none="any", **FILE)
    json_schema: Path | None = option(None, "Only JSON texts that this schema admits.", none="any", **FILE)
    choices: list[str] | None = option(
        None, "Only one of these texts: all up to the next option.", none="any", metavar="TEXT TEXT ..."
    )

    def given(self) -> dict[str, Any]:
        """Return the values of the given options, by the names of the options."""
        return {name.replace("_", "-"): value for name, value in vars(self).items() if value not in (None, [])}

    def automaton(self) -> tuple[str, Any]:
        """Return the name and the value of the option that an automaton enforces; ("", None) without one."""
        return next((each for each in self.given().items() if each[0] != "max-letters"), ("", None))

    def __str__(self) -> str:
        kind, limit = next(iter(self.given().items()), ("", None))
        words = {
            "": "",
            "max-letters": f", with no word of more than {limit} letter{'s' * (limit != 1)}",
            "regex": f", matching {limit}",
            "choices": f", with {' or '.join(map(repr, self.choices or ()))}",
        }
        return words.get(kind, f", as {limit} has it")


@dataclass(frozen=True)
class Writing:
    """Options of the beginning and the end of a text."""

    end: Literal["boundary", "prefix", "eos"] = option(
        "boundary", "After a constrained text: tokens that leave the constraint, any, or the end of the text."
    )
    complete: bool | None = option(
        None,
        "At --max-tokens: only complete texts, or also texts that are cut there.",
        "--complete/--cut",
        none="--complete under a constraint, else --cut",
    )
    stop: list[str] | None = option(None, "End a text before TEXT. Several --stop are allowed.", metavar="TEXT")
    chat: bool = option(False, "The prompt is a message to a model trained to chat.", "--chat")
    system: str | None = option(None, "System message of --chat.", metavar="TEXT")


@dataclass(frozen=True)
class PromptFile:
    """Options of a file of prompts."""

    prompts: Path | None = option(
        None, "Continue each prompt of a file: one per line, .jsonl, .csv, or - for standard input.", metavar="FILE"
    )
    field: str | None = option(None, "Field of JSON lines, or column of a .csv file.", none="prompt", metavar="NAME")
    out: Path | None = option(None, "Write the results of --prompts here, a line of JSON each.", metavar="FILE")
    resume: bool = option(False, "Continue --out FILE: skip the prompts that have results there.", "--resume")
    force: bool = option(False, "Continue --out FILE also after other options or another version.", "--force")
    workers: int = option(
        1, "Processes for --prompts, each with its own model. More than 1 need Ray.", min=1, metavar="N"
    )

    def check(self, prompt: str | None, steering: Steering) -> None:
        """Raise a usage error unless the options are for one prompt, or all for a file of prompts."""
        one, file = prompt is not None, self.prompts is not None
        usage_error(one == file, "Give a PROMPT, or a file of them: --prompts FILE --out FILE.")
        of_one = {"--json": steering.as_json, "--trace": steering.trace}
        of_file = {"--out": self.out, "--field": self.field, "--resume": self.resume}
        of_file |= {"--force": self.force, "--workers": self.workers > 1}
        wrong, place = (of_file, "--prompts FILE") if one else (of_one, "a single PROMPT")
        for name, value in wrong.items():
            usage_error(value, f"{name} goes with {place}.")
        usage_error(file and self.out is None, "--prompts FILE wants --out FILE, where the results go.")
        usage_error(str(self.out) == "-", "--out FILE is one that --resume can go on with, not standard output.")


def given_text(argument: str) -> str:
    """Return the text of an argument. `-` stands for standard input without the end of its last line."""
    return sys.stdin.read().removesuffix("\n") if argument == "-" else argument


def constraint(kind: str, given: Any) -> Any:
    """Return the constraint of the option --`kind`, whose value is a pattern, a file or a list of texts."""
    from llmppl.constraints.automata import DFA, Regex
    from llmppl.constraints.json import JsonSchema
    from llmppl.constraints.lark import Grammar

    makers: dict[str, Callable[[Any], Any]] = {
        "regex": Regex,
        "choices": DFA.from_strings,
        "grammar": Grammar.from_file,
        "json-schema": lambda file: JsonSchema(Path(file).read_text(encoding="utf-8")),
    }
    with show.file_errors("read", given):
        try:
            return makers[kind](given)
        except ValueError as error:                     # a Grammar names its file itself
            raise error if kind != "json-schema" else ValueError(f"{given}: {error}") from None


@functools.cache
def load(source: Source) -> CachedTransformer:
    """Load the model. The numpy engine computes the model in the package, because importing torch takes seconds."""
    from llmppl.lm import CachedTransformer

    # the library itself reports prompts that are too long
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    given = {name: value for name, value in vars(source).items() if value is not None} or {"engine": "numpy"}
    if source.name is not None:
        typer.echo(f"loading {source} ...", err=True)
    try:
        return CachedTransformer.from_pretrained(given.pop("name", None), **given)
    except OSError as error:                            # no such model, or no space for a converted one
        raise ValueError(str(error)) from None
