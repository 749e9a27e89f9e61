"""`llmppl generate`, `infill`, `intersect` and `demo`: the ready-made programs; `many` and `results`: many prompts."""

from __future__ import annotations

import collections
import functools
import json
import random
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmppl.cli import options
from llmppl.cli.options import FILE, INTERRUPTED, Given, command, leave, usage_error
from llmppl.report.tables import one_line
from llmppl.support.arguments import text

if TYPE_CHECKING:
    import numpy as np

    from llmppl.lm import CachedTransformer
    from llmppl.models.programs import Program
    from llmppl.tasks import Generation, Result

STEERING = "particles", "factor", "seed", "max_tokens", "temperature", "lm"
CONTINUING = "method", "regex", "grammar", "json_schema", "stop", "chat", "special"
SIZES: Any = {
    "particles": None,
    "factor": None,
    "max_tokens": None,
}  # by default those of the method
FREE_TOKENS = 40  # at most, of a text without a constraint
MAX_ROWS = 20  # of a summary of results
HEADS = " index  weight  log Z-hat  likeliest text, or error"
Export = Annotated[
    Path | None,
    typer.Option(metavar="OUT", dir_okay=False, help="Write all results to this file."),
]


@command(*STEERING, *CONTINUING, "json", "trace", **SIZES)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - is standard input.")],
    given: Given,
) -> None:
    """Continue a prompt, optionally by a pattern, a grammar or a schema.

    The constraint is on the continuation, including the space after the prompt.

    Example: llmppl generate "The cat was" --regex " [0-9]{1,2} years old[.]"
    """
    prompt = options.given_text(prompt)
    limits = given.regex or given.grammar or given.json_schema
    limit = f", matching {limits}" if limits else ""
    job = Continuation(given)
    if job.method != "steer":
        from numpy.random import default_rng

        answer = job.answer(job.lm(), prompt, default_rng(given.seed))
        typer.echo(json.dumps(answer.as_dict()) if given.json else repr(answer))
        return
    program = job.program(prompt)
    _steer(
        f"{prompt!r} {'is answered' if given.chat else 'goes on'}{limit}",
        program,
        given,
    )


class Continuation:
    """Program of `generate` for each prompt: the constraint, and the model with the index of the constraint.

    It pickles. Another process that receives it loads the language model itself.
    """

    def __init__(self, given: Given) -> None:
        self.given, self.rule = given, options.rule(given)
        self.constraint = options.constraint(given)
        wrong = "--stop excludes --regex, --grammar and --json-schema, which say how a text ends."
        usage_error(self.constraint and given.stop, wrong)
        sized = given.particles or given.factor or given.trace
        self.method: Any = "steer" if given.method == "auto" and sized else given.method
        usage_error(
            given.trace and self.method != "steer",
            "--trace records steering: give --method steer.",
        )
        self.max_tokens = given.max_tokens
        if given.max_tokens is None and self.constraint is None:
            self.max_tokens = FREE_TOKENS

    def lm(self) -> CachedTransformer:
        return options.load(self.given.lm)

    def _context(self, lm: CachedTransformer, prompt: str) -> Any:
        if self.given.chat:
            return lm.chat(prompt)
        return prompt if self.given.special else lm.context(prompt, special=False)

    def program(self, prompt: str, lm: CachedTransformer | None = None) -> Program:
        """Return the program that continues `prompt`."""
        from llmppl.models.programs import ConstrainedText

        lm, given = lm or self.lm(), self.given
        return ConstrainedText(
            lm,
            self._context(lm, prompt),
            self.constraint,
            max_tokens=self.max_tokens,
            rule=self.rule,
            stop=given.stop or (),
        )

    def answer(self, lm: CachedTransformer, prompt: str, rng: np.random.Generator) -> Generation:
        """Return the answer to a prompt."""
        from llmppl.tasks import generate

        given = self.given
        options = {
            "N": given.particles,
            "K": given.factor,
            "stop": given.stop,
            "max_tokens": self.max_tokens,
        }
        if self.rule.temperature != 1:
            options["rule"] = self.rule
        options = {name: value for name, value in options.items() if value}
        begin = self._context(lm, prompt)
        try:
            answer: Generation = generate(
                lm, begin, self.constraint, method=self.method, rng=rng, **options
            )
        except TypeError as error:  # a method without this option
            raise ValueError(str(error)) from None
        return answer


@command(*STEERING, "json", "trace", factor=10)
def infill(
    template: Annotated[
        str,
        typer.Argument(help="A text with [BLANK] for each hole; - is standard input."),
    ],
    given: Given,
) -> None:
    """Fill the holes of a text. Leave no space before a hole, because its filling begins with the space.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    from llmppl.models.programs import Infilling

    template, rule = options.given_text(template), options.rule(given)
    program = Infilling(
        options.load(given.lm),
        template,
        end="prefix",
        max_tokens=given.max_tokens,
        rule=rule,
    )
    _steer(f"{template!r} with its holes filled", program, given)


@command(*STEERING, "until_sentence", "json", "trace")
def intersect(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT", help="Texts with the same continuation."),
    ],
    given: Given,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    from llmppl.models.programs import PromptIntersection, ends_sentence

    rule, until = options.rule(given), ends_sentence if given.until_sentence else None
    program = PromptIntersection(
        options.load(given.lm),
        prompts,
        until=until,
        max_tokens=given.max_tokens,
        rule=rule,
    )
    _steer(" and ".join(map(repr, prompts)) + " go on alike", program, given)


@command("lm")
def demo(given: Given) -> None:
    """Run three small programs at temperature 0.7: short words, a text with holes, two prompts at once."""
    every = {
        "lm": given.lm,
        "particles": 5,
        "factor": 10,
        "seed": 7,
        "temperature": 0.7,
        "max_tokens": 40,
        "special": True,
    }
    words = {
        "method": "steer",
        "regex": "( [A-Za-z]{1,5}[,.]?)+",
        "max_tokens": 24,
        "factor": 3,
    }
    generate(
        "Once upon a time, there was a little girl",
        Given(**every | words),
    )
    typer.echo()
    infill(
        "The dog was very[BLANK] because he had lost his[BLANK].",
        Given(**every),
    )
    typer.echo()
    prompts = [
        "The little boy went to the park and",
        "The old king went to the sea and",
    ]
    intersect(prompts, Given(**every, until_sentence=True))


def _steer(title: str, program: Program, given: Given) -> None:
    """Steer the program and print its particles. After Ctrl-C, print the particles of the last whole step."""
    from llmppl.inference import smc_steer
    from llmppl.report import Recorder

    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    if given.lm:
        title += f", by {given.lm}"
    recorder = Recorder(given.trace, title) if given.trace else None
    stopped = ""
    try:
        with recorder or nullcontext():
            particles = smc_steer(
                program,
                given.particles or 8,
                given.factor or 3,
                seed=seed,
                on_step=recorder,
            )
    except KeyboardInterrupt as error:
        particles = getattr(error, "particles", None)  # type: ignore[assignment]
        if not particles or not particles.steps:
            raise
        stopped = f"interrupted after step {len(particles.steps)}: texts that had not ended are cut"
    try:
        particles.best  # noqa: B018  (its error names the causes of death)
    except ValueError as error:
        leave(1, str(error))
    options.show(title, particles, given.json)
    if not given.json:
        typer.echo(f"seed {seed}: {particles.stats}", err=True)
    if stopped:
        leave(INTERRUPTED, stopped)


# ---- many prompts


@command(*STEERING, *CONTINUING, "resume", "workers", **SIZES)
def many(
    prompts: Annotated[
        Path,
        typer.Argument(help="A prompt per line; in .jsonl files its field prompt.", **FILE),
    ],
    out: Annotated[Path, typer.Argument(metavar="RESULTS", help="File of the results.")],
    given: Given,
) -> None:
    """Continue each prompt of a file, as `generate` does, and write the results to another file.

    After Ctrl-C, --resume continues the run. The exit code is 1 if a prompt has no text.

    Example: llmppl many prompts.txt results.db --regex " (hot|cold)"
    """
    from llmppl.support.identity import identity
    from llmppl.tasks import load_results
    from llmppl.tasks.many import TOGETHER, lanes, recorded

    job, texts = Continuation(given), _prompts(prompts)
    program = dict(vars(given))
    for name in ("seed", "resume", "workers"):
        del program[name]
    if given.grammar:
        program["grammar"] = given.grammar.read_text(encoding="utf-8")
    if given.json_schema:
        program["json_schema"] = options.schema_text(given.json_schema)
    if given.workers == 1:
        run_all: Any = functools.partial(lanes, functools.partial(job.answer, job.lm()), TOGETHER)
    else:
        from llmppl.tasks.ray import on_workers

        run_all = on_workers(job.answer, job.lm, given.workers, None, TOGETHER)
    kept: Any = {"to": out, "seed": given.seed, "resume": given.resume}
    results: Any = recorded(run_all, texts, identity(job.answer, **program), **kept)
    try:
        with closing(results):
            collections.deque(results, maxlen=0)
    except KeyboardInterrupt:
        made = len(load_results(out))
        leave(
            INTERRUPTED,
            f"interrupted: {made} of {len(texts)} results are in {out}; --resume goes on",
        )
    failed = [each.value is None for each in load_results(out)]
    typer.echo(f"{out}: {len(failed)} results, {sum(failed)} failed")
    if any(failed):
        leave(
            1,
            f"{sum(failed)} of {len(failed)} tasks failed; llmppl results {out} says of what",
        )


def _prompts(file: Path) -> list[str]:
    """Return the prompts of a file. The position of a prompt, from 0, is the index of its task."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
        if file.suffix == ".jsonl":
            return [text("prompt", json.loads(line)["prompt"]) for line in lines]
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        how = 'write UTF-8, and {"prompt": "..."} on each line of a .jsonl file'
        raise ValueError(f"{file}: {how} ({type(error).__name__}: {error})") from None
    if not all(lines):
        raise ValueError(
            f"{file} has an empty line: write JSON lines, in which a prompt may be empty"
        )
    return lines


@command()
def results(
    file: Annotated[Path, typer.Argument(help="A file of `llmppl many` or run_many.", **FILE)],
    given: Given,
    jsonl: Export = None,
    csv: Export = None,
) -> None:
    """Summarise a file of results, or export it. The file may still be written.

    --jsonl writes a line of JSON for each task, --csv a row for each particle. The likeliest text of a task has the
    largest total weight over the particles with this text.

    Example: llmppl results results.db --jsonl results.jsonl
    """
    from llmppl.tasks import load_results

    loaded = load_results(file)
    if jsonl is not None:
        loaded.to_jsonl(jsonl)
    if csv is not None:
        loaded.to_pandas().to_csv(csv, index=False)
    lines: list[str] = []
    failed = tokens = 0
    cpu_seconds = 0.0
    for each in loaded:
        lines.append(_row(each))
        failed += each.error is not None
        tokens += each.tokens
        cpu_seconds += each.cpu_seconds
    typer.echo(f"{file}: {len(lines)} results, {failed} failed")
    typer.echo(f"{tokens} tokens, {cpu_seconds:.1f} s of CPU", err=True)
    if len(lines) > MAX_ROWS:
        more = f"... and {len(lines) - MAX_ROWS} more: --jsonl and --csv write all"
        lines[MAX_ROWS:] = [more]
    if lines:
        lines = ["", HEADS, *lines]
    typer.echo("\n".join(lines))


def _row(result: Result) -> str:
    """Return the row of a task: its likeliest text, or else the cause of the failure."""
    weight, log_ml = "-", "-"
    if result.answer is not None:
        text = result.answer.text
        weight = "-" if result.probability is None else f"{result.probability:.3f}"
    elif result.particles:
        text, share = next(iter(result.particles.by_text().items()))
        weight, log_ml = f"{share:.3f}", f"{result.particles.log_ml:z.2f}"
    elif result.matches:
        text = result.matches[0]["text"]
    elif result.error:
        text = result.error.rstrip().rpartition("\n")[2]
    else:
        text = "no text is left" + "".join(
            f"; {death}" for death in getattr(result.particles, "deaths", [])[:1]
        )
    return f"{result.index:6}  {weight:>6}  {log_ml:>9}  {one_line(text)}"
