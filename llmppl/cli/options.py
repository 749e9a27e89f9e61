"""Options of the command line, the objects that they name, and the output of commands.

`OPTIONS` defines each option once. A command lists the names of its options, and receives their values as `given`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_type_hints

import typer

from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.distributions import Rule
    from llmppl.inference import Particles
    from llmppl.lm import CachedTransformer

INTERRUPTED = 130  # exit code of shells after SIGINT
FILE = {"exists": True, "dir_okay": False, "readable": True, "metavar": "FILE"}

app = typer.Typer(
    name="llmppl",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Given(SimpleNamespace):
    """Values of the options of a command; None for an option that it does not take."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # pickle asks for such names
            raise AttributeError(name)


def _option(kind: Any, default: Any, help: str, *names: str, **settings: Any) -> inspect.Parameter:
    info = typer.Option(*names, help=help, show_default=default is not None, **settings)
    return inspect.Parameter(
        "_", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


OPTIONS = {
    "lm": _option(
        str | None,
        None,
        "Model: a hub id, a folder, a GGUF file or smollm2; by default the model in the package. "
        "Options of CachedTransformer.from_pretrained may follow: smollm2,device=cuda,dtype=bfloat16.",
        metavar="NAME[,OPTION=VALUE]",
    ),
    "particles": _option(
        int, 8, "Particles kept after each step.", "--particles", "-N", min=1, metavar="N"
    ),
    "factor": _option(
        int,
        3,
        "Extensions tried of each particle in each step.",
        "--factor",
        "-K",
        min=1,
        metavar="K",
    ),
    "method": _option(
        Literal["auto", "sample", "greedy", "beam", "best_of", "importance", "steer"],
        "auto",
        "As in generate of the library; auto is steer with -N, -K or --trace.",
    ),
    "seed": _option(int | None, None, "The same seed draws the same texts.", min=0, metavar="S"),
    "max_tokens": _option(
        int | None,
        40,
        "At most T tokens; by default 40 in a free text, and what a constraint needs.",
        min=1,
        metavar="T",
    ),
    "temperature": _option(
        float, 1.0, "Below 1, likely tokens become likelier; 0 is greedy decoding.", metavar="X"
    ),
    "top_k": _option(int | None, None, "Only the N likeliest tokens.", min=1, metavar="N"),
    "regex": _option(str | None, None, "Only texts that R matches as a whole.", metavar="R"),
    "grammar": _option(Path | None, None, "Only texts of a grammar of lark.", **FILE),
    "json_schema": _option(
        str | None, None, "Only JSON of a schema: '{\"type\": ...}', or its file.", metavar="SCHEMA"
    ),
    "stop": _option(
        list[str] | None,
        None,
        "End a text before TEXT. Several --stop are allowed.",
        metavar="TEXT",
    ),
    "chat": _option(bool, False, "The prompt is a message to a model trained to chat.", "--chat"),
    "special": _option(
        bool,
        True,
        "Names of special tokens in the text are these tokens, or all of it is text.",
        "--special/--no-special",
    ),
    "json": _option(
        bool, False, "Print a JSON object for each text, one per line, and nothing else.", "--json"
    ),
    "trace": _option(
        Path | None,
        None,
        "Record the run here, for `llmppl trace`.",
        metavar="FILE",
        dir_okay=False,
    ),
    "resume": _option(
        bool, False, "Continue the file of results: skip the prompts that have one.", "--resume"
    ),
    "workers": _option(
        int, 1, "Processes, each with its own model. More than 1 need Ray.", min=1, metavar="N"
    ),
    "until_sentence": _option(bool, False, "Stop at the end of a sentence.", "--until-sentence"),
    "prefix": _option(str, "", "The given text. No rule applies to its tokens.", metavar="TEXT"),
    "end": _option(
        Literal["eos", "prefix", "boundary"],
        "boundary",
        "The text ends with a match, begins with one, or leaves the language after it.",
    ),
    "strategy": _option(
        Literal["shortest_path", "sample", "local", "distinct"],
        "shortest_path",
        "Best first, weighted samples, the samples of ReLM, or distinct samples.",
    ),
    "edits": _option(int, 0, "Also texts within N edits after the prefix.", min=0, metavar="N"),
    "matches": _option(int, 10, "Stop after N matches.", "--matches", "-n", min=1, metavar="N"),
    "plan": _option(bool, False, "Print the size of the query, without a model.", "--plan"),
    "output": _option(
        Path | None, None, "Write it here, not beside it.", "--output", "-o", metavar="PAGE"
    ),
}


def command(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to `app`, with these options. `defaults` replace those of the table."""

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(run, include_extras=True)
        own = [
            each.replace(annotation=hints[each.name])
            for each in inspect.signature(run).parameters.values()
        ]
        options = [OPTIONS[name].replace(name=name) for name in names]
        options = [each.replace(default=defaults.get(each.name, each.default)) for each in options]

        @functools.wraps(run)
        def call(**values: Any) -> None:
            given = Given(**{name: values.pop(name) for name in names})
            with_plain_errors(run, **values, given=given)

        signature = inspect.Signature([each for each in own if each.name != "given"] + options)
        setattr(call, "__signature__", signature)  # noqa: B010
        app.command()(call)
        return run

    return decorate


# ---- objects that options name


def usage_error(wrong: object, message: str) -> None:
    """Raise a usage error if `wrong`."""
    if wrong:
        raise typer.BadParameter(message)


def given_text(argument: str) -> str:
    """Return the text of an argument. `-` stands for standard input without the end of its last line."""
    return sys.stdin.read().removesuffix("\n") if argument == "-" else argument


def constraint(given: Given) -> Any:
    """Return the constraint of --regex, --grammar or --json-schema, or None."""
    from llmppl.constraints import Grammar, JsonSchema, Regex

    several = [given.regex, given.grammar, given.json_schema].count(None) < 2
    usage_error(several, "--regex, --grammar and --json-schema exclude each other: give one.")
    if given.regex is not None:
        return Regex(given.regex)
    if given.json_schema is not None:
        name = "--json-schema" if is_json(given.json_schema) else given.json_schema
        try:
            return JsonSchema(schema_text(given.json_schema))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return given.grammar and Grammar.from_file(given.grammar)


def is_json(argument: str) -> bool:
    """Check whether --json-schema is a JSON object, and not the name of a file."""
    return argument.lstrip()[:1] in ("{", "")


def schema_text(argument: str) -> str:
    """Return the JSON of --json-schema."""
    return argument if is_json(argument) else Path(argument).read_text(encoding="utf-8")


def rule(given: Given) -> Rule:
    """Return the decision rule of --temperature and --top-k."""
    from llmppl.distributions import Rule

    return Rule(temperature=given.temperature, top_k=given.top_k)


@functools.cache
def load(lm: str | None) -> CachedTransformer:
    """Load the model of --lm, by default the one in the package."""
    from llmppl.lm import CachedTransformer

    # the library itself reports prompts that are too long
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    name, *pairs = (lm or "").split(",")
    usage_error(
        not all("=" in pair for pair in pairs),
        f"--lm {lm}: give options as NAME,device=cuda,dtype=bfloat16.",
    )
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    numbers = {option: int(value) for option, value in options.items() if value.isdigit()}
    return CachedTransformer.from_pretrained(name or None, **options | numbers)


# ---- output: particles on stdout, errors and warnings on stderr


def show(title: str, particles: Particles[Any], as_json: bool) -> None:
    """Print the particles, the heaviest first, as lines of a table or of JSON."""
    weights = particles.log_weights.tolist(), particles.weights.tolist()
    rows = sorted(zip(particles, *weights, strict=True), key=lambda row: -row[2])
    if as_json:
        for p, log_w, w in rows:
            typer.echo(json.dumps({"text": str(p), "log_weight": log_w, "weight": w, "cut": p.cut}))
        return
    lines = [
        f"{w:6.3f}  {log_w:10.2f}  {printable(str(p))}{' [cut]' if p.cut else ''}"
        for p, log_w, w in rows
    ]
    total = (
        f"log Z-hat {particles.log_ml:z.2f}, ess {particles.ess:.1f} of {len(particles)} particles"
    )
    typer.echo("\n".join([title, "", "weight  log weight  text", *lines, "", total]))


def with_plain_errors(run: Callable[..., None], **values: Any) -> None:
    """Call `run`. Print errors about bad input as one line, without a traceback, and warnings likewise."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: typer.echo(f"llmppl: {message}", err=True)
            run(**values)
    except KeyboardInterrupt:
        leave(INTERRUPTED, "interrupted")
    except OSError as error:
        leave(2, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ImportError) as error:
        leave(2, str(error))


def leave(code: int, message: str) -> NoReturn:
    """Print a message to stderr and exit. The message keeps its lines if a caret points at the line above it."""
    has_caret = re.search(r"\n *\^", message)
    typer.echo(f"llmppl: {message.rstrip() if has_caret else ' '.join(message.split())}", err=True)
    raise typer.Exit(code)
