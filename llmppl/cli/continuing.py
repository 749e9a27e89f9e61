"""How `llmppl generate` continues prompts: one, or those of a file, whose results go to another file."""

from __future__ import annotations

import functools
import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from llmppl.cli import options, show
from llmppl.cli.options import FILE, Steering, option
from llmppl.cli.prompts import read

if TYPE_CHECKING:
    import numpy as np

    from llmppl.constraints.constraint import Index
    from llmppl.distributions import Rule
    from llmppl.inference import Particles
    from llmppl.lm import CachedTransformer
    from llmppl.models.programs import ConstrainedText
    from llmppl.tasks import Result


@dataclass(frozen=True)
class Limits:
    """Limits of the texts, of which a command has at most one."""

    max_letters: int | None = option("No word of more than L letters.", none="any", min=1, metavar="L")
    regex: str | None = option("Only texts that R matches as a whole.", none="any", metavar="R")
    grammar: Path | None = option("Only texts that lark parses with this grammar.", none="any", **FILE)
    json_schema: Path | None = option("Only JSON texts that this schema admits.", none="any", **FILE)
    choices: list[str] | None = option(
        "Only one of these texts, all up to the next option.", none="any", metavar="TEXT TEXT ..."
    )

    def given(self) -> dict[str, Any]:
        """Return the limits of the command, by the names of their options."""
        return {name.replace("_", "-"): value for name, value in vars(self).items() if value not in (None, [])}

    def automaton(self) -> tuple[str, Any]:
        """Return the name and the value of the option that an automaton enforces; ("", None) without one."""
        return next((each for each in self.given().items() if each[0] != "max-letters"), ("", None))

    def __str__(self) -> str:
        """Return the words of a title that name the limit."""
        if self.max_letters is not None:
            return f", with no word of more than {self.max_letters} letter{'s' * (self.max_letters != 1)}"
        kind, limit = self.automaton()
        if kind == "choices":
            return f", with {' or '.join(map(repr, limit))}"
        return f", matching {limit}" if kind == "regex" else f", as {limit} has it" if kind else ""


@dataclass(frozen=True)
class Writing:
    """Options of how a text begins and ends."""

    end: Literal["boundary", "prefix", "eos"] = option(
        "What follows a text under a constraint: what leaves it, anything, or the end of the text.", default="boundary"
    )
    complete: bool | None = option(
        "At --max-tokens: only texts that end by then, or texts cut there.",
        "--complete/--cut",
        none="--complete under a constraint, else --cut",
    )
    stop: list[str] | None = option(
        "End a text at TEXT, which is left out; give it again for a further one.", metavar="TEXT"
    )
    chat: bool = option("The prompt is a message, answered by a model trained to chat.", "--chat", default=False)
    system: str | None = option("With --chat: what the system says first.", metavar="TEXT")


@dataclass(frozen=True)
class Many:
    """Options of a file of prompts."""

    prompts: Path | None = option(
        "Continue each prompt of a file: a line each, .jsonl, .csv, or - for standard input.", metavar="FILE"
    )
    field: str | None = option("The field of JSON lines or the column of a .csv file.", none="prompt", metavar="NAME")
    out: Path | None = option("Where the results of --prompts go, a line of JSON each.", metavar="FILE")
    resume: bool = option("Go on with --out FILE: skip the prompts that it has results of.", "--resume", default=False)
    force: bool = option("Go on with --out FILE as other options or another version made it.", "--force", default=False)
    workers: int = option(
        "With --prompts: processes, each with a model of its own, by Ray if above 1.", default=1, min=1, metavar="N"
    )

    def check(self, prompt: str | None, steering: Steering) -> None:
        """Raise a usage error unless the options are those of one prompt, or those of many."""
        if (prompt is None) == (self.prompts is None):
            raise typer.BadParameter("Give a PROMPT, or a file of them: --prompts FILE --out FILE.")
        of_one = {"--json": steering.as_json, "--trace": steering.trace}
        of_many = {"--out": self.out, "--field": self.field, "--resume": self.resume}
        of_many |= {"--force": self.force, "--workers": self.workers > 1}
        wrong, place = (of_many, "--prompts FILE") if self.prompts is None else (of_one, "a single PROMPT")
        for name in (name for name, value in wrong.items() if value):
            raise typer.BadParameter(f"{name} goes with {place}.")
        if self.prompts is not None and self.out is None:
            raise typer.BadParameter("--prompts FILE wants --out FILE, where the results go.")
        if str(self.out) == "-":
            raise typer.BadParameter("--out FILE is one that --resume can go on with, not standard output.")


class Loaded(NamedTuple):
    """Parts that all prompts share."""

    model: CachedTransformer
    limit: Index | None                                 # of the constraint
    fits: Any                                           # from a text to the tokens that keep its words short


@dataclass(frozen=True)
class Continuing:
    """Options of the command. It pickles, for other processes, which load the language model themselves."""

    limits: Limits
    constraint: Any                                     # of the limit that an automaton enforces
    writing: Writing
    steering: Steering
    rule: Rule                                          # of `steering`

    def load(self) -> Loaded:
        """Load the model, and compute the parts that take long; a ValueError for what no prompt can meet."""
        model = options.load(self.steering.source)
        from llmppl.constraints.values import index_of
        from llmppl.models.programs import short_words
        from llmppl.models.spans import must_end_by

        if self.writing.chat and getattr(model.tokenizer, "chat_template", None) is None:
            raise ValueError("--chat wants a model that was trained to chat and has a template for it, as --lm smollm2")
        index = index_of(self.constraint, model.vocab)
        try:
            must_end_by("text", self.writing.complete, self.steering.max_tokens, index)
        except ValueError as error:
            raise ValueError(str(error).replace("complete=False", "--cut")) from None
        letters = self.limits.max_letters
        return Loaded(model, index, None if letters is None else short_words(model.vocab, letters))

    def program(self, loaded: Loaded, prompt: str) -> ConstrainedText:
        from llmppl.models.programs import ConstrainedText

        model, limit, fits = loaded
        chat = self.writing.chat
        before = "" if chat else prompt                 # it may end inside a word
        return ConstrainedText(
            model,
            model.chat(prompt, system=self.writing.system) if chat else prompt,
            limit,
            mask=None if fits is None else lambda text: fits(before + text),
            end=self.writing.end,
            complete=self.writing.complete,
            max_tokens=self.steering.max_tokens,
            rule=self.rule,
            stop=self.writing.stop or (),
        )

    def steer(self, loaded: Loaded, prompt: str, rng: np.random.Generator) -> Particles[ConstrainedText]:
        """Return the particles of one of many prompts."""
        from llmppl.inference import smc_steer

        return smc_steer(self.program(loaded, prompt), self.steering.N, self.steering.K, rng=rng)

    def identity(self) -> tuple[dict[str, Any], Any]:
        """Return the identity of runs with these options, in which a file stands for its contents."""
        _, limit = self.limits.automaton()
        if isinstance(limit, Path):
            limit = hashlib.sha256(limit.read_bytes()).hexdigest()[:12]
        from llmppl.inference.resuming.fingerprint import identity_of

        steering = self.steering
        given = {
            "lm": str(steering.source), "max_letters": self.limits.max_letters, "constraint": limit, "N": steering.N,
            "K": steering.K, "max_tokens": steering.max_tokens, **vars(self.writing), **vars(self.rule),
        }  # fmt: skip
        return identity_of("llmppl generate", {}, **given)


def continue_file(job: Continuing, prompts: Path, out: Path, many: Many) -> None:
    """Continue each prompt of a file, and leave with what became of them."""
    texts = read(prompts, many.field)
    from llmppl.report.task_progress import task_progress
    from llmppl.tasks import read_results
    from llmppl.tasks.many import TOGETHER, RunAll, in_lanes, recorded

    load, done, bad = functools.cache(job.load), 0, 0
    run_all: RunAll
    try:
        if many.workers == 1:
            run_all = in_lanes(lambda prompt, rng: job.steer(load(), prompt, rng), TOGETHER)
        else:
            from llmppl.tasks.ray import on_workers

            run_all = on_workers(job.steer, job.load, many.workers, None, TOGETHER)
        kept: Any = {"to": out, "seed": job.steering.seed, "resume": "force" if many.force else many.resume}
        results: Any = recorded(run_all, texts, job.identity, progress=False, **kept)
        with closing(results):
            for before in read_results(out):
                done, bad = done + 1, bad + is_bad(before)
            typer.echo(f"{len(texts)} prompts, {done} of them done before; the results go to {out}", err=True)
            model = load().model if many.workers == 1 and done < len(texts) else None
            with task_progress(len(texts), done, bad, (lambda: model.stats.tokens) if model else None) as ended:
                for result in results:
                    ended(is_bad(result))
                    done, bad = done + 1, bad + is_bad(result)
    except (KeyboardInterrupt, RuntimeError) as error:
        by_hand = isinstance(error, KeyboardInterrupt)
        if many.workers == 1 and not by_hand:
            raise
        code, why = (show.INTERRUPTED, "interrupted") if by_hand else (2, error)        # no worker is left
        how = f"{done} of {len(texts)} results are in {out}; the same command with --resume goes on"
        show.leave(code, f"{why}: {how}")
    except OSError as error:
        show.leave(2, f"{error.filename}: {error.strerror}".replace("resume=True", "--resume"))
    except ValueError as error:
        raise ValueError(str(error).replace('resume="force"', "--force")) from error
    typer.echo(f"{out}: {done} results, {bad} failed")
    if bad:
        show.leave(1, f"{bad} of {done} tasks failed; llmppl results {out} says of what")


def is_bad(result: Result) -> bool:
    """Return whether there is no text: the task failed, or all of its particles died."""
    return not result.particles
