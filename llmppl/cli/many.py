"""`llmppl generate --prompts`: many prompts, and a file of results that lasts."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmppl.cli import show
from llmppl.cli.options import option
from llmppl.cli.prompts import read

if TYPE_CHECKING:
    from llmppl.cli.continuing import Continuing, Loaded, Task
    from llmppl.inference import Result

Prompts = Annotated[
    Path | None,
    option(
        none="none",
        metavar="FILE",
        help="Continue each prompt of a file: a line each, .jsonl, .csv, or - for standard input.",
    ),
]
Field = Annotated[
    str | None, option(none="prompt", metavar="NAME", help="The field of JSON lines or the column of a .csv file.")
]
Out = Annotated[
    Path | None, option(none="none", metavar="FILE", help="Where the results of --prompts go, a line of JSON each.")
]
Resume = Annotated[bool, option("--resume", help="Go on with --out FILE: skip the prompts that it has results of.")]
Workers = Annotated[
    int, option(min=1, metavar="N", help="With --prompts: processes, each with a model of its own, by Ray if above 1.")
]


def check(prompt: str | None, prompts: Path | None, of_many: Mapping[str, Any], of_one: Mapping[str, Any]) -> None:
    """A usage error unless the options are those of one prompt, or those of many."""
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("Give a PROMPT, or a file of them: --prompts FILE --out FILE.")
    for name in (name for name, value in (of_many if prompts is None else of_one).items() if value):
        raise typer.BadParameter(f"{name} goes with {'--prompts FILE' if prompts is None else 'a single PROMPT'}.")
    if prompts is not None and of_many["--out"] is None:
        raise typer.BadParameter("--prompts FILE wants --out FILE, where the results go.")
    if str(of_many["--out"]) == "-":
        raise typer.BadParameter("--out FILE is one that --resume can go on with, not standard output.")


def told(job: Continuing, limit: Any) -> str:
    """The options by which results are told from those of other commands; of a file, what it holds."""
    if isinstance(limit, Path):
        limit = hashlib.sha256(limit.read_bytes()).hexdigest()[:12]
    from llmppl.distributions import Rule

    given, plain = {**vars(job), "constraint": limit}, vars(Rule())
    given |= {name: value for name, value in vars(given.pop("rule")).items() if value != plain[name]}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value not in (None, False) and str(value))


def generate(
    job: Continuing, options: str, prompts: Path, field: str | None, out: Path, workers: int, **kept: Any
) -> None:
    """Continue each prompt, and leave with what became of them; `kept` are the seed and whether to go on."""
    texts = read(prompts, field)
    from llmppl.display.standing import standing
    from llmppl.inference import read_results

    load, done, bad = functools.cache(job.load), 0, 0
    tasks: list[Task] = [{"options": options, "prompt": text} for text in texts]
    try:
        results: Any = _results(job, load, tasks, workers, to=out, progress=False, **kept)
        with closing(results):
            for before in read_results(out):
                done, bad = done + 1, bad + is_bad(before)
            typer.echo(f"{len(texts)} prompts, {done} of them done before; the results go to {out}", err=True)
            alone = workers == 1 and done < len(texts)
            model = load().model if alone else None
            with standing(len(texts), done, bad, (lambda: model.stats.tokens) if model else None) as ended:
                for result in results:
                    ended(is_bad(result))
                    done, bad = done + 1, bad + is_bad(result)
    except KeyboardInterrupt:
        how = f"{done} of {len(texts)} results are in {out}; the same command with --resume goes on"
        show.leave(show.INTERRUPTED, f"interrupted: {how}")
    except RuntimeError as error:
        if workers == 1:
            raise
        how = f"{done} of {len(texts)} results are in {out}; the same command with --resume goes on"
        show.leave(2, f"{error}: {how}")                # no worker is left, or what ended the first
    except OSError as error:
        show.leave(2, f"{error.filename}: {error.strerror}".replace("resume=True", "--resume"))
    typer.echo(f"{out}: {done} results, {bad} failed")
    if bad:
        show.leave(1, f"{bad} of {done} tasks failed; llmppl results {out} says of what")


def _results(
    job: Continuing, load: Callable[[], Loaded], tasks: list[Task], workers: int, **options: Any
) -> Iterator[Result]:
    if workers == 1:
        from llmppl.inference import run_many

        return run_many(lambda task, rng: job.steer(load(), task, rng), tasks, **options)
    from llmppl import ray

    return ray.run_many(job.steer, tasks, make_lm=job.load, workers=workers, **options)


def is_bad(result: Result) -> bool:
    """Whether there is no text: the task failed, or all of its particles died."""
    return not result.particles
