"""`llmppl results`: what is in a file of results."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmppl.cli import options, show
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.tasks import Result

MOST = 10                                               # rows of a table
_WIDE = 30                                              # characters of a task in it


@dataclass(frozen=True)
class Outcome:
    """What came out of a task: its likeliest text, or an error."""

    index: int
    task: Any = None                                    # as the file has it
    text: str | None = None
    weight: float | None = None                         # of all particles with this text; None for matches
    log_ml: float | None = None
    log_ml_se: float | None = None
    error: str | None = None                            # its last line, or what the particles died of


def results(
    file: Annotated[Path, typer.Argument(help="What generate --prompts, or run_many, wrote.", **options.FILE)],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each task, nothing else.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="First rewrite a damaged FILE.")] = False,
) -> None:
    """Say what is in a file of results: how many, what failed, log Z-hat, the likeliest texts.

    A file that is being written is read up to its last whole line. A task's likeliest text is that of the largest
    weight, that of all particles with the same text together. --repair says which lines are wrong and leaves them out;
    the damaged file is kept as FILE.damaged.

    Example: llmppl results results.jsonl
    """
    with show.plain_errors():
        from llmppl.tasks import read_results
        from llmppl.tasks.results import repair as repaired

        for wrong in repaired(file) if repair else ():
            typer.echo(f"llmppl: {file}, {wrong}", err=True)
        outcomes = sorted(map(outcome, read_results(file)), key=lambda each: each.index)
    if as_json:
        for each in outcomes:
            typer.echo(json.dumps(asdict(each)))
        return
    errors = dict[str, list[Outcome]]()                 # by the type of the exception
    for each in outcomes:
        if each.error is not None:
            errors.setdefault(each.error.partition(":")[0], []).append(each)
    num_failed, missing = sum(map(len, errors.values())), outcomes[-1].index + 1 - len(outcomes) if outcomes else 0
    gaps = f", {missing} before the last missing" if missing > 0 else ""
    typer.echo(f"{file}: {len(outcomes)} results, {num_failed} failed{gaps}")
    most = sorted(errors.values(), key=len, reverse=True)
    rows = [f"{len(failed):6}  {failed[0].index:6}  {printable(failed[0].error or '')}" for failed in most]
    _table(" tasks   first  its error", rows)
    log_mls = [each.log_ml for each in outcomes if each.log_ml is not None]
    if log_mls:
        median, low, high = map(_rounded, (statistics.median(log_mls), min(log_mls), max(log_mls)))
        typer.echo(f"\nlog Z-hat of a task: median {median}, from {low} to {high}")
    texts = Counter(each.text for each in outcomes if each.text is not None)
    _table(" tasks  likeliest text", [f"{n:6}  {printable(text)}" for text, n in texts.most_common() if n > 1])
    heading = f" index  weight   log Z-hat  {'task':{_WIDE}}  likeliest text"
    _table(heading, [_row(each) for each in outcomes if each.text is not None])


def outcome(result: Result) -> Outcome:
    """What is told of a result."""
    told = partial(Outcome, result.index, result.task)
    if result.error is not None:
        return told(error=_last_error(result.error))
    if result.particles is None:
        return told(next((match["text"] for match in result.matches or ()), None))
    if not result.particles:
        deaths = Counter[str]()
        for death in result.particles.deaths:
            deaths[death.reason] += death.count
        most = "".join(f": most died by {reason}" for reason, _ in deaths.most_common(1))
        return told(error=f"no particle is left{most}")
    text, weight = next(iter(result.particles.by_text().items()))
    return told(text, weight, result.particles.log_ml, result.particles.log_ml_se)


def _last_error(traceback: str) -> str:
    """The line that names the exception: the first behind the last line of code. Notes may follow it."""
    lines = traceback.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    return next(line for line in [*lines[last + 1 :], traceback] if not line.startswith(" "))


def _rounded(log_ml: float) -> str:
    return f"{round(log_ml, 2) + 0.0:.2f}"              # without the sign of -0.0


def _row(each: Outcome) -> str:
    weight = "-" if each.weight is None else f"{each.weight:.3f}"
    log_ml = "-" if each.log_ml is None else _rounded(each.log_ml)
    task = printable(_shown(each.task))
    end = task if len(task) <= _WIDE else f"...{task[3 - _WIDE :]}"
    return f"{each.index:6}  {weight:>6}  {log_ml:>10}  {end:{_WIDE}}  {printable(each.text or '')}"


def _shown(task: Any) -> str:
    return "-" if task is None else task if isinstance(task, str) else json.dumps(task, ensure_ascii=False)


def _table(heading: str, rows: list[str]) -> None:
    """The first rows below their heading, if there are any."""
    if rows:
        more = [f"... and {len(rows) - MOST} more: --json has all"] * (len(rows) > MOST)
        typer.echo("\n".join(["", heading, *rows[:MOST], *more]))
