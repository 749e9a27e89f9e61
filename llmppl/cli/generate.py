"""`llmppl generate`, `infill`, `intersect` and `demo`: the ready-made programs, steered."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from llmppl.cli import options, show
from llmppl.cli.job import GenerateJob, continue_file
from llmppl.cli.options import InfillSteering, Limits, PromptFile, Shaping, Source, Steering, Writing, usage_error

if TYPE_CHECKING:
    from llmppl.inference import Particles
    from llmppl.models.programs import Program


class ChoicesCommand(TyperCommand):
    """Command whose option --choices takes all texts up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after --choices was repeated before each of its texts."""
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
    girl = "Once upon a time, there was a little girl"
    generate(short, Writing(), Steering(max_tokens=24, **given), PromptFile(), girl)
    typer.echo()
    infill("The dog was very[BLANK] because he had lost his[BLANK].", InfillSteering(**given))
    typer.echo()
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    intersect(prompts, until_sentence=True, steering=Steering(K=10, **given))


def generate(
    limits: Limits,
    writing: Writing,
    steering: Steering,
    file: PromptFile,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", show_default=False, help="Text to continue; - is standard input."),
    ] = None,
) -> None:
    """Continue a prompt, optionally with short words, by a pattern, a grammar or a schema, or by one of some choices.

    The constraint is on the continuation, including the space after the prompt.

    Examples: llmppl generate "Once upon a time" --max-letters 5

    llmppl generate "The cat was" --regex " [0-9]{1,2} years old[.]"

    llmppl generate "Tim was very" --choices " happy" " sad" " tired"

    llmppl generate "Is a whale a fish?" --lm smollm2 --chat --system "Answer in one sentence." --stop "."

    llmppl generate --prompts prompts.txt --out results.jsonl
    """
    _check(limits, writing, nothing_to_continue=prompt is None and file.prompts is None)
    file.check(prompt, steering)
    kind, limit = limits.automaton()
    constraint = options.constraint(kind, limit) if kind else None
    job = GenerateJob(limits, constraint, writing, steering, steering.shaping.rule())
    if prompt is None:
        return continue_file(job, file)
    prompt = options.given_text(prompt)
    title = f"{prompt!r} {'is answered' if writing.chat else 'goes on'}{limits}"
    _steer(title, job.program(job.load(), prompt), steering, by_text=kind == "choices")


def _check(limits: Limits, writing: Writing, nothing_to_continue: bool) -> None:
    """Raise a usage error for options that exclude each other, or that need another option."""
    alone = [*limits.given(), *["stop"] * bool(writing.stop and limits.automaton()[0])]
    both = " and ".join(f"--{name}" for name in alone)
    usage_error(len(alone) > 1, f"{both} exclude each other: give one of them.")
    usage_error(writing.system is not None and not writing.chat, "--system needs a chat: give --chat, too.")
    choices = limits.choices or []
    if len(choices) == 1:
        parts = [part for part in re.split(r"[,|]", choices[0]) if part]
        more = f"--choices {' '.join(map(repr, parts))}" if len(parts) > 1 else "the others after it"
        usage_error(True, f"--choices {choices[0]!r} alone leaves nothing to choose: give {more}.")
    swallowed = choices and nothing_to_continue
    usage_error(swallowed, "Give the PROMPT before --choices, which takes all texts up to the next option.")


def infill(
    template: Annotated[str, typer.Argument(help="A text with [BLANK] for each hole; - is standard input.")],
    steering: InfillSteering,
) -> None:
    """Fill the holes of a text. Leave no space before a hole, because its filling begins with the space.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    model, rule = options.load(steering.source), steering.shaping.rule()
    from llmppl.models.programs import Infilling

    template = options.given_text(template)
    program = Infilling(model, template, end=steering.end, max_tokens=steering.max_tokens, rule=rule)
    _steer(f"{template!r} with its holes filled", program, steering)


def intersect(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts with the same continuation.")],
    proposal: Annotated[
        Literal["product", "first"],
        typer.Option(help="Draw tokens by the product of the distributions after the prompts, or by the first prompt."),
    ] = "product",
    until_sentence: Annotated[bool, typer.Option("--until-sentence", help="Stop at the end of a sentence.")] = False,
    *,
    steering: Steering,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    model, rule = options.load(steering.source), steering.shaping.rule()
    from llmppl.models.programs import PromptIntersection, ends_sentence

    until = ends_sentence if until_sentence else None
    program = PromptIntersection(
        model, prompts, proposal=proposal, until=until, max_tokens=steering.max_tokens, rule=rule
    )
    _steer(" and ".join(map(repr, prompts)) + " go on alike", program, steering)


def _steer(title: str, program: Program, steering: Steering, by_text: bool = False) -> None:
    """Steer the program and print its particles. After Ctrl-C, print the particles of the last whole step."""
    from llmppl.inference import smc_steer
    from llmppl.report import Recorder

    seed = random.randrange(1_000_000) if steering.seed is None else steering.seed
    title += steering.source.by
    with show.file_errors("write", steering.trace):
        recorder = None if steering.trace is None else Recorder(steering.trace, title)
    interrupted = False
    try:
        with recorder or nullcontext():
            particles = smc_steer(program, steering.N, steering.K, seed=seed, on_step=recorder)
    except KeyboardInterrupt as error:
        left: Particles[Program] | None = getattr(error, "particles", None)
        if not left or not left.steps:
            raise
        particles, interrupted = left, True
    if not particles:
        try:
            particles.best                              # noqa: B018  (its error names the causes of death)
        except ValueError as error:
            more = ". Unless the condition is impossible, more --particles or a larger --factor help"
            show.leave(1, f"{error}{'' if 'give room' in str(error) else more}")
    show.show(title, particles, steering.as_json, by_text)
    if not steering.as_json:
        typer.echo(f"seed {seed}: {particles.stats}", err=True)
    if interrupted:
        show.leave(show.INTERRUPTED, f"interrupted after step {len(particles.steps)}: texts that had not ended are cut")
