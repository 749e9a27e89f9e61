"""Job of `llmppl generate`: continue one prompt, or each prompt of a file, whose results go to another file."""

from __future__ import annotations

import functools
import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from llmppl.cli import options, show
from llmppl.cli.options import Limits, PromptFile, Steering, Writing
from llmppl.cli.prompts import read

if TYPE_CHECKING:
    import numpy as np

    from llmppl.constraints.constraint import Index
    from llmppl.distributions import Rule
    from llmppl.inference import Particles
    from llmppl.lm import CachedTransformer
    from llmppl.models.programs import ConstrainedText
    from llmppl.tasks import Result


class Loaded(NamedTuple):
    """Objects that all prompts share: the model, the index of the constraint, and the mask of short words."""

    model: CachedTransformer
    limit: Index | None
    fits: Any                                           # (text) -> (V,) bool mask


@dataclass(frozen=True)
class GenerateJob:
    """Options of the command, with the constraint and the rule that they name.

    A job pickles. Another process that receives it loads the language model itself.
    """

    limits: Limits
    constraint: Any
    writing: Writing
    steering: Steering
    rule: Rule

    def load(self) -> Loaded:
        """Load the model and index the constraint. Raise a ValueError if the options allow no text for any prompt."""
        model = options.load(self.steering.source)
        from llmppl.constraints.values import index_of
        from llmppl.models.programs import short_words
        from llmppl.models.spans import must_end_by

        if self.writing.chat and getattr(model.tokenizer, "chat_template", None) is None:
            raise ValueError("--chat wants a model that was trained to chat and has a chat template, as --lm smollm2")
        index = index_of(self.constraint, model.vocab)
        try:
            must_end_by("text", self.writing.complete, self.steering.max_tokens, index)
        except ValueError as error:
            raise ValueError(str(error).replace("complete=False", "--cut")) from None
        letters = self.limits.max_letters
        return Loaded(model, index, None if letters is None else short_words(model.vocab, letters))

    def program(self, loaded: Loaded, prompt: str) -> ConstrainedText:
        """Return the program that continues `prompt`. Its first word may begin at the end of the prompt."""
        from llmppl.models.programs import ConstrainedText

        model, limit, fits = loaded
        chat = self.writing.chat
        begun = "" if chat else prompt
        return ConstrainedText(
            model,
            model.chat(prompt, system=self.writing.system) if chat else prompt,
            limit,
            mask=None if fits is None else lambda text: fits(begun + text),
            end=self.writing.end,
            complete=self.writing.complete,
            max_tokens=self.steering.max_tokens,
            rule=self.rule,
            stop=self.writing.stop or (),
        )

    def steer(self, loaded: Loaded, prompt: str, rng: np.random.Generator) -> Particles[ConstrainedText]:
        """Return the particles of a prompt of a file."""
        from llmppl.inference import smc_steer

        return smc_steer(self.program(loaded, prompt), self.steering.N, self.steering.K, rng=rng)

    def identity(self) -> tuple[dict[str, Any], Any]:
        """Return the identity of runs with these options. A hash of its contents stands for a file."""
        from llmppl.inference.resuming.fingerprint import identity_of

        _, limit = self.limits.automaton()
        if isinstance(limit, Path):
            limit = hashlib.sha256(limit.read_bytes()).hexdigest()[:12]
        steering = self.steering
        given = {
            "lm": str(steering.source), "max_letters": self.limits.max_letters, "constraint": limit, "N": steering.N,
            "K": steering.K, "max_tokens": steering.max_tokens, **vars(self.writing), **vars(self.rule),
        }  # fmt: skip
        return identity_of("llmppl generate", {}, **given)


def continue_file(job: GenerateJob, file: PromptFile) -> None:
    """Continue each prompt of --prompts, append the results to --out, and print a summary.

    Exit with code 1 if a task failed, with 2 if --out cannot be written or no worker is left, and with 130 after
    Ctrl-C. In the last two cases --resume continues the run.
    """
    from llmppl.report.progress import Bar
    from llmppl.tasks import read_results
    from llmppl.tasks.many import TOGETHER, RunAll, in_lanes, recorded

    assert file.prompts is not None and file.out is not None        # PromptFile.check refuses other options
    texts, out = read(file.prompts, file.field), file.out
    load, alone = functools.cache(job.load), file.workers == 1
    failed = list[bool]()                               # for each result of `out`
    run_all: RunAll
    try:
        if alone:
            run_all = in_lanes(lambda prompt, rng: job.steer(load(), prompt, rng), TOGETHER)
        else:
            from llmppl.tasks.ray import on_workers

            run_all = on_workers(job.steer, job.load, file.workers, None, TOGETHER)
        kept: Any = {"to": out, "seed": job.steering.seed, "resume": "force" if file.force else file.resume}
        results: Any = recorded(run_all, texts, job.identity, progress=False, **kept)
        with closing(results):
            failed += map(has_no_text, read_results(out))
            typer.echo(f"{len(texts)} prompts, {len(failed)} of them done before; the results go to {out}", err=True)
            if alone and len(failed) < len(texts):
                load()                                  # an error of the options is not a result
            with Bar(None, len(texts), str, "prompt") as shown:
                for result in results:
                    failed.append(has_no_text(result))
                    shown(len(failed), f"{sum(failed)} failed")
    except (KeyboardInterrupt, RuntimeError) as error:
        by_hand = isinstance(error, KeyboardInterrupt)
        if alone and not by_hand:
            raise
        code, why = (show.INTERRUPTED, "interrupted") if by_hand else (2, error)
        how = f"{len(failed)} of {len(texts)} results are in {out}; the same command with --resume goes on"
        show.leave(code, f"{why}: {how}")
    except OSError as error:
        show.leave(2, f"{error.filename}: {error.strerror}".replace("resume=True", "--resume"))
    except ValueError as error:
        raise ValueError(str(error).replace('resume="force"', "--force")) from error
    typer.echo(f"{out}: {len(failed)} results, {sum(failed)} failed")
    if any(failed):
        show.leave(1, f"{sum(failed)} of {len(failed)} tasks failed; llmppl results {out} says of what")


def has_no_text(result: Result) -> bool:
    """Return whether a task has no text, because it failed or all of its particles died."""
    return not result.particles
