"""`llmppl generate`, `infill`, `intersect` and `demo`: the ready-made programs, steered."""

from __future__ import annotations

import random
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from llmppl.cli import options, show
from llmppl.cli.job import GenerateJob, Limits, Many, Writing, continue_file
from llmppl.cli.options import Shaping, Source, Steering, option

if TYPE_CHECKING:
    from llmppl.inference import Particles
    from llmppl.models.programs import Program

MORE = ". Unless the condition is impossible, more --particles or a larger --factor help"


@dataclass(frozen=True)
class Filling(Steering):
    """Options of steering of `infill`."""

    K: options.Factor = 10                              # a step fills a whole hole, so many tries pay
    max_tokens: int = option("The most tokens in all holes together.", default=40, min=1, metavar="T")


class Choosing(TyperCommand):
    """Command whose --choices takes all texts up to the next option."""

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


def demo(source: Source) -> None:
    """Run three small programs at temperature 0.7: short words, a text with holes, two prompts at once."""
    given: Any = {"source": source, "N": 5, "seed": 7, "shaping": Shaping(temperature=0.7)}
    short = Limits(max_letters=5)
    generate(short, Writing(), Steering(max_tokens=24, **given), Many(), "Once upon a time, there was a little girl")
    typer.echo()
    infill("The dog was very[BLANK] because he had lost his[BLANK].", steering=Filling(**given))
    typer.echo()
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    intersect(prompts, until_sentence=True, steering=Steering(K=10, **given))


def generate(
    limits: Limits,
    writing: Writing,
    steering: Steering,
    many: Many,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", show_default=False, help="The text to continue; - is standard input."),
    ] = None,
) -> None:
    """Continue a prompt; if you like, in short words, by a pattern, a grammar or a schema, or by one of some choices.

    The constraint is on what follows the prompt, the space between included.

    Examples: llmppl generate "Once upon a time" --max-letters 5

    llmppl generate "The cat was" --regex " [0-9]{1,2} years old[.]"

    llmppl generate "Tim was very" --choices " happy" " sad" " tired"

    llmppl generate "Is a whale a fish?" --lm smollm2 --chat --system "Answer in one sentence." --stop "."

    llmppl generate --prompts prompts.txt --out results.jsonl
    """
    _check(limits, writing, nothing_to_continue=prompt is None and many.prompts is None)
    many.check(prompt, steering)
    with show.plain_errors():
        kind, limit = limits.automaton()
        constraint = options.constraint(kind, limit) if kind else None
        job = GenerateJob(limits, constraint, writing, steering, steering.shaping.rule())
        if many.prompts is not None and many.out is not None:
            continue_file(job, many.prompts, many.out, many)
        elif prompt is not None:
            prompt = options.given_text(prompt)
            title = f"{prompt!r} {'is answered' if writing.chat else 'goes on'}{limits}{steering.source.by}"
            _steer(title, job.program(job.load(), prompt), steering, by_text=kind == "choices")


def _check(limits: Limits, writing: Writing, nothing_to_continue: bool) -> None:
    """Raise a usage error for options that do not go together."""
    alone = [*limits.given(), *["stop"] * bool(writing.stop and limits.automaton()[0])]
    if len(alone) > 1:
        raise typer.BadParameter(f"{' and '.join(f'--{name}' for name in alone)} exclude each other: give one of them.")
    if writing.system is not None and not writing.chat:
        raise typer.BadParameter("--system is of a conversation: give --chat, too.")
    choices = limits.choices
    if choices and len(choices) == 1:
        parts = [part for part in re.split(r"[,|]", choices[0]) if part]
        said = f"--choices {' '.join(map(repr, parts))}" if len(parts) > 1 else "the others behind it"
        raise typer.BadParameter(f"--choices {choices[0]!r} alone leaves nothing to choose: give {said}.")
    if choices and nothing_to_continue:
        raise typer.BadParameter("Give the PROMPT before --choices, which takes all texts up to the next option.")


def infill(
    template: Annotated[str, typer.Argument(help="A text with [BLANK] for each hole; - is standard input.")],
    end: Annotated[
        Literal["prefix", "eos"], typer.Option(help="What follows the last fragment: anything, or the end of the text.")
    ] = "prefix",
    *,
    steering: Filling,
) -> None:
    """Fill the holes of a text. Leave no space before a hole: what fills it brings its own.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    with show.plain_errors():
        model = options.load(steering.source)
        from llmppl.models.programs import Infilling

        template, rule = options.given_text(template), steering.shaping.rule()
        program = Infilling(model, template, end=end, max_tokens=steering.max_tokens, rule=rule)
        _steer(f"{template!r} with its holes filled{steering.source.by}", program, steering)


def intersect(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts to continue alike.")],
    proposal: Annotated[
        Literal["product", "first"],
        typer.Option(
            help="Draw tokens from the product of the prompts' distributions, or from that of the first prompt."
        ),
    ] = "product",
    until_sentence: Annotated[bool, typer.Option("--until-sentence", help="Stop at the end of a sentence.")] = False,
    *,
    steering: Steering,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    with show.plain_errors():
        model = options.load(steering.source)
        from llmppl.models.programs import PromptIntersection, ends_sentence

        program = PromptIntersection(
            model,
            prompts,
            proposal=proposal,
            until=ends_sentence if until_sentence else None,
            max_tokens=steering.max_tokens,
            rule=steering.shaping.rule(),
        )
        _steer(" and ".join(map(repr, prompts)) + " go on alike" + steering.source.by, program, steering)


def _steer(title: str, program: Program, steering: Steering, by_text: bool = False) -> None:
    """Steer the program and show its particles."""
    from llmppl.inference import smc_steer
    from llmppl.trace import Recorder

    seed, trace = steering.seed, steering.trace
    seed = random.randrange(1_000_000) if seed is None else seed
    recorder: AbstractContextManager[Recorder | None]
    try:
        recorder = nullcontext() if trace is None else Recorder(trace, title)
    except OSError as error:
        raise ValueError(f"cannot write {trace}: {error.strerror}") from None
    interrupted = False
    try:
        with recorder as on_step:
            particles = smc_steer(program, steering.N, steering.K, seed=seed, on_step=on_step)
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
    show.show(title, particles, steering.as_json, by_text)
    if not steering.as_json:
        typer.echo(f"seed {seed}: {particles.stats}", err=True)
    if interrupted:
        show.leave(show.INTERRUPTED, f"interrupted after step {len(particles.steps)}: texts that had not ended are cut")
