"""`llmppl results`: a summary of a file of results."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmppl.cli.options import FILE, Given, command
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.tasks import Result

MAX_ROWS = 10
TASK_WIDTH = 30                                         # characters of a task in a table


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task: its likeliest text, or its error.

    text : str, the text of the largest weight
    weight : float, of all particles with this text; None for matches
    error : str, the last line of the traceback, or the cause by which most particles died
    """

    index: int
    task: Any = None
    text: str | None = None
    weight: float | None = None
    log_ml: float | None = None
    log_ml_se: float | None = None
    error: str | None = None

    def row(self) -> str:
        """Return the row of the task in the table of likeliest texts."""
        is_text = self.task is None or isinstance(self.task, str)
        task = printable(_cell(self.task if is_text else json.dumps(self.task, ensure_ascii=False)))
        end = task if len(task) <= TASK_WIDTH else f"...{task[3 - TASK_WIDTH :]}"
        weight, log_ml = _cell(self.weight, ".3f"), _cell(self.log_ml, "z.2f")
        return f"{self.index:6}  {weight:>6}  {log_ml:>10}  {end:{TASK_WIDTH}}  {printable(self.text or '')}"


@command("json")
def results(
    file: Annotated[Path, typer.Argument(help="A file of `llmppl many` or run_many.", **FILE)],
    given: Given,
    repair: Annotated[bool, typer.Option("--repair", help="First rewrite a damaged FILE.")] = False,
) -> None:
    """Summarise a file of results: the number of tasks, errors, log Z-hat, the likeliest texts.

    A file that is being written is read up to its last whole line. The likeliest text of a task has the largest total
    weight over the particles with this text. --repair names the wrong lines and removes them from FILE. It keeps the
    damaged file as FILE.damaged.

    Example: llmppl results results.jsonl
    """
    from llmppl.tasks import read_results
    from llmppl.tasks.results import repair as repaired

    for wrong in repaired(file) if repair else ():
        typer.echo(f"llmppl: {file}, {wrong}", err=True)
    outcomes = sorted(map(outcome, read_results(file)), key=lambda each: each.index)
    if given.json:
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
    _print_table(" tasks   first  its error", rows)
    log_mls = [each.log_ml for each in outcomes if each.log_ml is not None]
    if log_mls:
        median, low, high = statistics.median(log_mls), min(log_mls), max(log_mls)
        typer.echo(f"\nlog Z-hat of a task: median {median:z.2f}, from {low:z.2f} to {high:z.2f}")
    written = [each for each in outcomes if each.text is not None]
    texts = Counter(each.text or "" for each in written)
    _print_table(" tasks  likeliest text", [f"{n:6}  {printable(text)}" for text, n in texts.most_common() if n > 1])
    heading = f" index  weight   log Z-hat  {'task':{TASK_WIDTH}}  likeliest text"
    _print_table(heading, [each.row() for each in written])


def outcome(result: Result) -> Outcome:
    """Return the outcome of the task of a result."""
    found = partial(Outcome, result.index, result.task)
    if result.error is not None:
        return found(error=_last_error(result.error))
    if result.particles is None:
        return found(next((match["text"] for match in result.matches), None))
    if not result.particles:
        deaths = Counter[str]()
        for death in result.particles.deaths:
            deaths[death.reason] += death.count
        most = "".join(f": most died by {reason}" for reason, _ in deaths.most_common(1))
        return found(error=f"no particle is left{most}")
    text, weight = next(iter(result.particles.by_text().items()))
    return found(text, weight, result.particles.log_ml, result.particles.log_ml_se)


def _last_error(traceback: str) -> str:
    """Return the line that names the exception: the first one after the last line of code. Notes may follow it."""
    lines = traceback.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    return next(line for line in [*lines[last + 1 :], traceback] if not line.startswith(" "))


def _cell(value: Any, form: str = "") -> str:
    """Return the cell of a table, which is "-" for None."""
    return "-" if value is None else format(value, form)


def _print_table(heading: str, rows: list[str]) -> None:
    """Print the first rows below their heading, if there are any."""
    if rows:
        more = [f"... and {len(rows) - MAX_ROWS} more: --json has all"] * (len(rows) > MAX_ROWS)
        typer.echo("\n".join(["", heading, *rows[:MAX_ROWS], *more]))
