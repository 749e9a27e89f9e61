"""The command line: the ready-made programs from a shell.

Each command makes one program, steers it, and shows its particles: a table on a terminal, plain lines elsewhere, JSON
where asked. What goes to stdout depends on the arguments alone; what the run cost goes to stderr. Bad input is one line
on stderr and exit code 2; a run that no particle survives is one line on stderr and exit code 1.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

if TYPE_CHECKING:
    from llmppl.lm.transformer import CachedTransformer
    from llmppl.models.programs import Program

app = typer.Typer(
    name="llmppl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Proposal(StrEnum):
    """What `intersect` draws tokens from."""

    product = "product"
    first = "first"


def _positive(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not positive. For the likeliest token alone, use --top-k 1.")
    return value


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most 1.")
    return value


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"llmppl {import_module('llmppl').__version__}")
        raise typer.Exit


Lm = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="the small model in the package",
        help="Language model: a hub id, or a folder written by save_pretrained.",
    ),
]
Count = Annotated[int, typer.Option(min=1, metavar="N", help="Particles kept after each step.")]
Factor = Annotated[int, typer.Option(min=1, metavar="K", help="Extensions tried of each particle in each step.")]
Seed = Annotated[
    int | None, typer.Option(min=0, metavar="S", show_default="a new one", help="The same seed draws the same texts.")
]
MaxTokens = Annotated[int, typer.Option(min=1, metavar="T", help="Cut a text off after T tokens.")]
HoleTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, metavar="T", help="The most tokens in all holes together.")
]
Temperature = Annotated[
    float, typer.Option(callback=_positive, metavar="X", help="Below 1, likely tokens become likelier.")
]
TopK = Annotated[int | None, typer.Option(min=1, metavar="N", show_default="all", help="Only the N likeliest tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(callback=_share, metavar="P", show_default="all", help="Only the likeliest tokens, P together."),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object for each particle, one a line, nothing else.")]


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Draw texts from a language model under conditions, by SMC steering.

    Texts come as weighted particles. Their weights are exact: the sum, Z-hat, is an unbiased estimate of the
    probability that what the model writes meets the condition.
    """


@app.command()
def demo(lm: Lm = None) -> None:
    """Run three small programs: short words, a text with holes, two prompts at once."""
    generate("Once upon a time", 5, lm, particles=5, factor=3, seed=1, max_tokens=24)
    typer.echo()
    infill("The dog was very[BLANK] because he had lost his[BLANK].", lm, particles=5, factor=10, seed=1)
    typer.echo()
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    intersect(prompts, Proposal.product, True, lm, particles=5, factor=10, seed=1)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_letters: Annotated[
        int | None, typer.Option(min=1, metavar="L", show_default="any", help="No word of more than L letters.")
    ] = None,
    lm: Lm = None,
    particles: Count = 8,
    factor: Factor = 3,
    seed: Seed = None,
    max_tokens: MaxTokens = 40,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, in short words if you like.

    Example: llmppl generate "Once upon a time" --max-letters 5
    """
    with _plain_errors():
        model = _load(lm)
        from llmppl.models.programs import ConstrainedText, short_words

        title, mask = f"{prompt!r} goes on", None
        if max_letters is not None:
            fits = short_words(model.vocab, max_letters)
            mask = lambda text: fits(prompt + text)     # noqa: E731  (the prompt may end inside a word)
            title += f", with no word of more than {max_letters} letter{'s' * (max_letters > 1)}"
        program = ConstrainedText(model, prompt, mask=mask, temperature=temperature, top_k=top_k, top_p=top_p)
        _steer(title, program, particles, factor, seed, as_json, max_steps=max_tokens)


@app.command()
def infill(
    template: Annotated[str, typer.Argument(help="A text with [BLANK] for each hole.")],
    lm: Lm = None,
    particles: Count = 8,
    factor: Factor = 10,                                # a step fills a whole hole, so many tries pay
    seed: Seed = None,
    max_tokens: HoleTokens = 40,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    as_json: Json = False,
) -> None:
    """Fill the holes of a text. Leave no space before a hole: what fills it brings its own.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    with _plain_errors():
        model = _load(lm)
        from llmppl.models.programs import Infilling

        program = Infilling(model, template, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        _steer(f"{template!r} with its holes filled", program, particles, factor, seed, as_json)


@app.command()
def intersect(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts to continue alike.")],
    proposal: Annotated[
        Proposal,
        typer.Option(help="Draw tokens from the product of the prompts' laws, or from that of the first prompt."),
    ] = Proposal.product,
    until_sentence: Annotated[bool, typer.Option("--until-sentence", help="Stop at the end of a sentence.")] = False,
    lm: Lm = None,
    particles: Count = 8,
    factor: Factor = 3,
    seed: Seed = None,
    max_tokens: MaxTokens = 40,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    as_json: Json = False,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    with _plain_errors():
        model = _load(lm)
        from llmppl.models.programs import PromptIntersection, ends_sentence

        until = ends_sentence if until_sentence else None
        program = PromptIntersection(
            model, prompts, proposal=proposal.value, until=until, temperature=temperature, top_k=top_k, top_p=top_p
        )
        title = " and ".join(map(repr, prompts)) + " go on alike"
        _steer(title, program, particles, factor, seed, as_json, max_steps=max_tokens)


class Row(NamedTuple):
    """What is shown of a particle."""

    text: str
    log_weight: float
    weight: float
    cut: bool                                           # whether --max-tokens ended it


@functools.cache
def _load(name: str | None) -> CachedTransformer:
    from llmppl.lm.transformer import CachedTransformer

    # the library itself says when a prompt is too long
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return CachedTransformer.from_pretrained(name)


def _steer(
    title: str, program: Program, N: int, K: int, seed: int | None, as_json: bool, max_steps: int | None = None
) -> None:
    """Run the program and show what came of it."""
    from llmppl.inference.smc import smc_steer

    seed = random.randrange(1_000_000) if seed is None else seed
    particles = smc_steer(program, N, K, seed=seed, max_steps=max_steps)
    if not particles:
        try:
            particles.best                              # noqa: B018  (its error tells what they died of)
        except ValueError as error:
            _leave(1, f"{error}. Unless the condition is impossible, more --particles or a larger --factor help")
    rows = [
        Row(str(particle), log_weight, weight, particle.cut)
        for particle, log_weight, weight in zip(
            particles, particles.log_weights.tolist(), particles.weights.tolist(), strict=True
        )
    ]
    rows.sort(key=lambda row: -row.weight)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row._asdict()))
        return
    total = f"log Z-hat {particles.log_ml:.2f}, ess {particles.ess:.1f} of {len(particles)} particles"
    if _on_terminal():
        _print_table(title, rows, total)
    else:
        typer.echo(f"{title}\n\nweight  log weight  text")
        for row in rows:
            typer.echo(f"{row.weight:6.3f}  {row.log_weight:10.2f}  {_line(row)}")
        typer.echo(f"\n{total}")
    typer.echo(f"seed {seed}: {particles.stats}", err=True)


def _print_table(title: str, rows: list[Row], total: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    table.add_column("weight", justify="right")
    table.add_column("log weight", justify="right")
    table.add_column("text", overflow="fold")
    for row in rows:
        table.add_row(f"{row.weight:.3f}", f"{row.log_weight:.2f}", Text(_line(row)))
    console = Console(highlight=False)
    console.print(Text(title, "bold"), table, Text(total), sep="\n")


def _line(row: Row) -> str:
    """The text on one line, what cannot be printed escaped, and whether it was cut off."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in row.text)
    return text + " [cut]" * row.cut


def _on_terminal() -> bool:
    return sys.stdout.isatty()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the library says of bad input, without the traceback, which is for programmers."""
    try:
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        _leave(2, str(error))


def _leave(code: int, message: str) -> NoReturn:
    typer.echo(f"llmppl: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)
