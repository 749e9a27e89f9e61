"""`llmppl generate`, `infill`, `intersect` and `demo`: the ready-made programs, steered."""

from __future__ import annotations

import random
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from llmppl.cli import many, options, show
from llmppl.cli.continuing import Continuing
from llmppl.cli.options import option

if TYPE_CHECKING:
    from llmppl.inference import Particles
    from llmppl.models.programs import Program

MORE = ". Unless the condition is impossible, more --particles or a larger --factor help"


class Choosing(TyperCommand):
    """A command whose --choices takes all texts up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list[str]()
        taking = False
        for arg in args:
            if taking and given[-1] != "--choices" and not arg.startswith("-"):
                given.append("--choices")
            elif arg.startswith("-"):
                taking = arg == "--choices"
            given.append(arg)
        return super().parse_args(ctx, given)


def demo(
    lm: options.Lm = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Run three small programs at temperature 0.7: short words, a text with holes, two prompts at once."""
    prompt = "Once upon a time, there was a little girl"
    given: Any = {"lm": lm, "engine": engine, "device": device, "dtype": dtype, "N": 5, "seed": 7, "temperature": 0.7}
    generate(prompt, 5, max_tokens=24, **given)
    typer.echo()
    infill("The dog was very[BLANK] because he had lost his[BLANK].", **given)
    typer.echo()
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    intersect(prompts, until_sentence=True, K=10, **given)


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", show_default=False, help="The text to continue; - is standard input."),
    ] = None,
    max_letters: Annotated[
        int | None, option(none="any", min=1, metavar="L", help="No word of more than L letters.")
    ] = None,
    regex: options.Pattern = None,
    grammar: options.GrammarFile = None,
    json_schema: options.SchemaFile = None,
    choices: options.Choices = None,
    end: options.End = "boundary",
    complete: options.Complete = None,
    stop: options.Stop = None,
    chat: options.Chat = False,
    system: options.System = None,
    lm: options.Lm = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    N: options.Particles = 8,
    K: options.Factor = 3,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = 40,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    as_json: options.Json = False,
    trace: options.Trace = None,
    prompts: many.Prompts = None,
    field: many.Field = None,
    out: many.Out = None,
    resume: many.Resume = False,
    workers: many.Workers = 1,
) -> None:
    """Continue a prompt; if you like, in short words, by a pattern, a grammar or a schema, or by one of some choices.

    The constraint is on what follows the prompt, the space between included.

    Examples: llmppl generate "Once upon a time" --max-letters 5

    llmppl generate "The cat was" --regex " [0-9]{1,2} years old[.]"

    llmppl generate "Tim was very" --choices " happy" " sad" " tired"

    llmppl generate "Is a whale a fish?" --lm smollm2 --chat --system "Answer in one sentence." --stop "."

    llmppl generate --prompts prompts.txt --out results.jsonl
    """
    limits: dict[str, tuple[Any, str]] = {              # by option: what was given, and what the title says of it
        "max-letters": (max_letters, f"with no word of more than {max_letters} letter{'s' * (max_letters != 1)}"),
        "regex": (regex, f"matching {regex}"),
        "grammar": (grammar, f"as {grammar} has it"),
        "json-schema": (json_schema, f"as {json_schema} has it"),
        "choices": (choices or None, f"with {' or '.join(map(repr, choices or []))}"),
    }
    given = [name for name, (value, _) in limits.items() if value is not None]
    automaton = next((name for name in given if name != "max-letters"), None)
    alone = [*given, *["stop"] * bool(stop and automaton)]
    if len(alone) > 1:
        raise typer.BadParameter(f"{' and '.join(f'--{name}' for name in alone)} exclude each other: give one of them.")
    if system is not None and not chat:
        raise typer.BadParameter("--system is of a conversation: give --chat, too.")
    if choices and len(choices) == 1:
        parts = [part for part in re.split(r"[,|]", choices[0]) if part]
        said = f"--choices {' '.join(map(repr, parts))}" if len(parts) > 1 else "the others behind it"
        raise typer.BadParameter(f"--choices {choices[0]!r} alone leaves nothing to choose: give {said}.")
    if choices and prompt is None and prompts is None:
        raise typer.BadParameter("Give the PROMPT before --choices, which takes all texts up to the next option.")
    of_many = {"--out": out, "--field": field, "--resume": resume, "--workers": workers > 1}
    many.check(prompt, prompts, of_many, {"--json": as_json, "--trace": trace})
    with show.plain_errors():
        limit = None if automaton is None else limits[automaton][0]
        constraint = None if automaton is None else options.constraint(automaton, limit)
        from llmppl.distributions import Rule

        rule = Rule(temperature, top_k, top_p, min_p)
        source = options.Source(lm, engine, device, dtype)
        job = Continuing(source, max_letters, constraint, N, K, max_tokens, end, complete, rule, stop, chat, system)
        if prompts is not None and out is not None:
            many.generate(job, many.told(job, limit), prompts, field, out, workers, seed=seed, resume=resume)
        elif prompt is not None:
            prompt = options.given_text(prompt)
            what = f"{prompt!r} {'is answered' if chat else 'goes on'}"
            title = ", ".join([what, *(limits[name][1] for name in given)]) + source.by
            _steer(title, job.program(job.load(), prompt), N, K, seed, as_json, trace, by_text=bool(choices))


def infill(
    template: Annotated[str, typer.Argument(help="A text with [BLANK] for each hole; - is standard input.")],
    end: Annotated[
        Literal["prefix", "eos"], option(help="What follows the last fragment: anything, or the end of the text.")
    ] = "prefix",
    lm: options.Lm = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    N: options.Particles = 8,
    K: options.Factor = 10,                             # a step fills a whole hole, so many tries pay
    seed: options.Seed = None,
    max_tokens: options.HoleTokens = 40,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    as_json: options.Json = False,
    trace: options.Trace = None,
) -> None:
    """Fill the holes of a text. Leave no space before a hole: what fills it brings its own.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    with show.plain_errors():
        source = options.Source(lm, engine, device, dtype)
        model = options.load(source)
        from llmppl.distributions import Rule
        from llmppl.models.programs import Infilling

        template = options.given_text(template)
        rule = Rule(temperature, top_k, top_p, min_p)
        program = Infilling(model, template, end=end, max_tokens=max_tokens, rule=rule)
        _steer(f"{template!r} with its holes filled{source.by}", program, N, K, seed, as_json, trace)


def intersect(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts to continue alike.")],
    proposal: Annotated[
        Literal["product", "first"],
        option(help="Draw tokens from the product of the prompts' distributions, or from that of the first prompt."),
    ] = "product",
    until_sentence: Annotated[bool, option("--until-sentence", help="Stop at the end of a sentence.")] = False,
    lm: options.Lm = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    N: options.Particles = 8,
    K: options.Factor = 3,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = 40,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    as_json: options.Json = False,
    trace: options.Trace = None,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    with show.plain_errors():
        source = options.Source(lm, engine, device, dtype)
        model = options.load(source)
        from llmppl.distributions import Rule
        from llmppl.models.programs import PromptIntersection, ends_sentence

        until, rule = ends_sentence if until_sentence else None, Rule(temperature, top_k, top_p, min_p)
        program = PromptIntersection(model, prompts, proposal=proposal, until=until, max_tokens=max_tokens, rule=rule)
        title = " and ".join(map(repr, prompts)) + " go on alike" + source.by
        _steer(title, program, N, K, seed, as_json, trace)


def _steer(
    title: str, program: Program, N: int, K: int, seed: int | None, as_json: bool, trace: Path | None,
    by_text: bool = False,
) -> None:  # fmt: skip
    """Run the program and show what came of it."""
    from llmppl.inference import smc_steer
    from llmppl.trace import Recorder

    seed = random.randrange(1_000_000) if seed is None else seed
    recorder: AbstractContextManager[Recorder | None]
    try:
        recorder = nullcontext() if trace is None else Recorder(trace, title)
    except OSError as error:
        raise ValueError(f"cannot write {trace}: {error.strerror}") from None
    interrupted = False
    try:
        with recorder as on_step:
            particles = smc_steer(program, N, K, seed=seed, on_step=on_step)
    except KeyboardInterrupt as error:
        left: Particles[Program] | None = getattr(error, "particles", None)
        if not left or not left.steps:
            raise
        particles, interrupted = left, True
    if not particles:
        try:
            particles.best                              # noqa: B018  (its error tells what they died of)
        except ValueError as error:
            more = "" if "give room" in str(error) else MORE
            show.leave(1, f"{error}{more}")
    show.show(title, particles, as_json, by_text)
    if not as_json:
        typer.echo(f"seed {seed}: {particles.stats}", err=True)
    if interrupted:
        show.leave(show.INTERRUPTED, f"interrupted after step {len(particles.steps)}: texts that had not ended are cut")
