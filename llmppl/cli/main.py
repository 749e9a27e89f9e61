"""The command line: the ready-made programs from a shell.

Each command makes one program, steers it, and shows its particles: a table on a terminal, plain lines elsewhere, JSON
where asked. What goes to stdout depends on the arguments alone; what the run cost goes to stderr. Bad input is one line
on stderr (more where a caret shows the place in a pattern) and exit code 2; a run that no particle survives is one line
on stderr and exit code 1.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

if TYPE_CHECKING:
    from llmppl.lm.transformer import CachedTransformer
    from llmppl.models.programs import Program
    from llmppl.queries import Matches

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


class Strategy(StrEnum):
    """How `query` looks for matches."""

    shortest_path = "shortest_path"
    beam = "beam"
    sample = "sample"
    local = "local"
    distinct = "distinct"


class Tokenization(StrEnum):
    """Which token sequences `query` takes."""

    all = "all"
    canonical = "canonical"
    canonical_prefix = "canonical_prefix"


class End(StrEnum):
    """What a match of `query` is."""

    eos = "eos"
    prefix = "prefix"
    boundary = "boundary"


class Results(StrEnum):
    """What `query` counts as one match."""

    strings = "strings"
    tokens = "tokens"


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
File = {"metavar": "FILE", "exists": True, "dir_okay": False, "readable": True}
Pattern = Annotated[
    str | None, typer.Option("--regex", metavar="R", show_default="any", help="Only texts that R matches as a whole.")
]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", show_default="any", help="Only texts that lark parses with this grammar.", **File),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--json-schema", show_default="any", help="Only JSON texts that this schema admits.", **File),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", show_default="any", help="Only this text; give it again for each further choice."),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", dir_okay=False, show_default="none", help="Record the run there, for `llmppl trace` to show."
    ),
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
    generate("Once upon a time", 5, lm, particles=5, factor=3, seed=7, max_tokens=24)
    typer.echo()
    infill("The dog was very[BLANK] because he had lost his[BLANK].", lm, particles=5, factor=10, seed=7)
    typer.echo()
    prompts = ["The little boy went to the park and", "The old king went to the sea and"]
    intersect(prompts, Proposal.product, True, lm, particles=5, factor=10, seed=7)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_letters: Annotated[
        int | None, typer.Option(min=1, metavar="L", show_default="any", help="No word of more than L letters.")
    ] = None,
    regex: Pattern = None,
    grammar: GrammarFile = None,
    json_schema: SchemaFile = None,
    choices: Choices = None,
    must_end: Annotated[
        bool, typer.Option("--must-end", help="Only texts that end within --max-tokens, instead of cutting them off.")
    ] = False,
    lm: Lm = None,
    particles: Count = 8,
    factor: Factor = 3,
    seed: Seed = None,
    max_tokens: MaxTokens = 40,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    as_json: Json = False,
    trace: Trace = None,
) -> None:
    """Continue a prompt; if you like, in short words, by a pattern, a grammar or a schema, or by one of some choices.

    The constraint is on what follows the prompt, the space between included.

    Examples: llmppl generate "Once upon a time" --max-letters 5

    llmppl generate "The cat was" --regex " [0-9]{1,2} years old[.]"

    llmppl generate "Tim was very" --choices " happy" --choices " sad"
    """
    limits = {
        "--max-letters": max_letters,
        "--regex": regex,
        "--grammar": grammar,
        "--json-schema": json_schema,
        "--choices": choices or None,
    }
    given = [name for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other: give one of them.")
    with _plain_errors():
        title, constraint, mask = f"{prompt!r} goes on", None, None
        if regex is not None:
            constraint, title = _constraint("regex", regex), f"{title}, matching {regex}"
        elif grammar is not None:
            constraint, title = _constraint("grammar", grammar), f"{title}, as {grammar} has it"
        elif json_schema is not None:
            constraint, title = _constraint("json-schema", json_schema), f"{title}, as {json_schema} has it"
        elif choices:
            constraint, title = _constraint("choices", choices), f"{title}, with {' or '.join(map(repr, choices))}"
        model = _load(lm)
        from llmppl.distributions import Rule
        from llmppl.models.programs import ConstrainedText, short_words

        if max_letters is not None:
            fits = short_words(model.vocab, max_letters)
            mask = lambda text: fits(prompt + text)     # noqa: E731  (the prompt may end inside a word)
            title += f", with no word of more than {max_letters} letter{'s' * (max_letters > 1)}"
        program = ConstrainedText(
            model,
            prompt,
            constraint,
            mask=mask,
            complete=must_end,
            max_tokens=max_tokens if must_end else None,
            rule=Rule(temperature, top_k, top_p),
        )
        _steer(title, program, particles, factor, seed, as_json, trace, max_steps=None if must_end else max_tokens)


@app.command()
def check(
    pattern: Annotated[str, typer.Argument(help="A regex, or the file that an option says it is.")],
    text: Annotated[str, typer.Argument(help="The text to look at.")],
    grammar: Annotated[bool, typer.Option("--grammar", help="PATTERN is a file: a grammar in lark's syntax.")] = False,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="PATTERN is a file: a JSON schema.")] = False,
) -> None:
    """Say whether a text matches a pattern, and if not, where it leaves the language and what could stand there.

    The exit code is 0 if it matches and 1 if it does not, also where it is the beginning of a match.

    Example: llmppl check "[0-9]{4}-[0-9]{2}" "2023/07"
    """
    if grammar and json_schema:
        raise typer.BadParameter("--grammar and --json-schema exclude each other: give one of them.")
    with _plain_errors():
        kind = "grammar" if grammar else "json-schema" if json_schema else "regex"
        reading = _read(_constraint(kind, pattern), text)
        line, caret = _pointed(text, reading.length)
        if reading.length < len(text):
            typer.echo(f"{line}\n{caret}\nno match: {reading.expected}, not {text[reading.length]!r}")
        elif not reading.complete:
            typer.echo(f"{line}\n{caret}\nonly the beginning of a match: {reading.expected}")
        else:
            typer.echo(f"{line}\ncomplete: it matches; {reading.expected}")
        if reading.length < len(text) or not reading.complete:
            raise typer.Exit(1)


@app.command()
def query(
    pattern: Annotated[str, typer.Argument(help="A regex of whole texts, the prefix included.")],
    prefix: Annotated[str, typer.Option(metavar="R", help="A regex of what is given; no rule applies to it.")] = "",
    strategy: Annotated[
        Strategy, typer.Option(help="Best first, by a beam, by weighted samples, by ReLM's samples, or all different.")
    ] = Strategy.shortest_path,
    tokenization: Annotated[
        Tokenization, typer.Option(help="Any tokens that spell a text, or the tokenizer's own encoding.")
    ] = Tokenization.all,
    end: Annotated[
        End, typer.Option(help="The text ends with a match, begins with one, or leaves the language behind it.")
    ] = End.eos,
    results: Annotated[
        Results, typer.Option(help="Each string once, summed over its spellings, or each token sequence.")
    ] = Results.strings,
    edits: Annotated[int, typer.Option(min=0, metavar="N", help="Also texts within N edits behind the prefix.")] = 0,
    ignore: Annotated[
        str | None, typer.Option(metavar="R", show_default="none", help="Leave out matches that go on so.")
    ] = None,
    most: Annotated[int, typer.Option("--matches", "-n", min=1, metavar="N", help="Stop after N matches.")] = 10,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, metavar="T", show_default="any", help="At most T tokens behind the prefix.")
    ] = None,
    lm: Lm = None,
    seed: Seed = None,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    batch: Annotated[int, typer.Option(min=1, metavar="B", help="Contexts, or samples, at a time.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each match, one a line.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what the query comes to, and do not run it.")] = False,
) -> None:
    """Find the texts of a pattern that a language model would write, and how probable they are.

    Matches are printed as they are found, the most probable first; Ctrl-C keeps what was found.

    Example: llmppl query "The ((cat)|(dog)) (was|ran)" --prefix "The" --end prefix
    """
    with _plain_errors():
        from llmppl.queries import Query, Rule

        asked = Query(
            _load(lm),
            pattern,
            prefix=prefix,
            end=end.value,
            rule=Rule(temperature, top_k, top_p),
            edits=edits,
            ignore=ignore,
            tokenization=tokenization.value,
            max_tokens=max_tokens,
        )
        if plan:
            typer.echo(asked.plan())
            return
        answers: dict[str, Callable[[], Matches]] = {
            "shortest_path": lambda: asked.best(results=results.value, batch=batch),
            "beam": lambda: asked.best(results=results.value, beam_width=batch),
            "sample": lambda: asked.samples(particles=batch, seed=seed),
            "local": lambda: asked.samples(local=True, particles=batch, seed=seed),
            "distinct": lambda: asked.distinct(results=results.value, batch=batch, seed=seed),
        }
        matches = answers[strategy.value]()
        weighted = strategy is Strategy.sample
        if not as_json:
            typer.echo(f"log prob  {'log weight  ' if weighted else ''}text")
        try:
            for match in itertools.islice(matches, most):
                if as_json:
                    typer.echo(json.dumps(match.as_dict()))
                else:
                    weight = f"{match.log_weight:10.3f}  " if weighted else ""
                    typer.echo(f"{match.log_prob:8.3f}  {weight}{_printable(str(match))}{_edited(match.edits)}")
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
        typer.echo(f"{matches.expansions} expansions: {matches.stats}", err=True)
        if not matches.num_matches:
            _leave(1, "no match" + (": --top-k or --top-p leaves none" if top_k or top_p else ""))


def _edited(edits: Any) -> str:
    """The edits of a match, in brackets behind it."""
    shown = [f"{edit.kind} at {edit.place}: {edit.wanted!r} -> {edit.found!r}" for edit in edits]
    return f"  [{'; '.join(shown)}]" if shown else ""


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
    trace: Trace = None,
) -> None:
    """Fill the holes of a text. Leave no space before a hole: what fills it brings its own.

    Example: llmppl infill "The dog was very[BLANK] because he had lost his[BLANK]."
    """
    with _plain_errors():
        model = _load(lm)
        from llmppl.distributions import Rule
        from llmppl.models.programs import Infilling

        program = Infilling(model, template, max_tokens=max_tokens, rule=Rule(temperature, top_k, top_p))
        _steer(f"{template!r} with its holes filled", program, particles, factor, seed, as_json, trace)


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
    trace: Trace = None,
) -> None:
    """Find text that is likely after every one of several prompts.

    Example: llmppl intersect "The boy went to the park and" "The king went to the sea and" --until-sentence
    """
    with _plain_errors():
        model = _load(lm)
        from llmppl.distributions import Rule
        from llmppl.models.programs import PromptIntersection, ends_sentence

        until = ends_sentence if until_sentence else None
        program = PromptIntersection(
            model, prompts, proposal=proposal.value, until=until, rule=Rule(temperature, top_k, top_p)
        )
        title = " and ".join(map(repr, prompts)) + " go on alike"
        _steer(title, program, particles, factor, seed, as_json, trace, max_steps=max_tokens)


@app.command()
def trace(
    recording: Annotated[Path, typer.Argument(help="What --trace, or a Recorder, wrote.", **File)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", show_default="beside it, as .html", help="Write it here."),
    ] = None,
) -> None:
    """Show a recorded run as a page: its particles as a tree of text, their weights, and what killed them.

    A run that is still going on, or was killed, is shown up to its last step.

    Example: llmppl generate "Once upon a time" --trace run.jsonl; llmppl trace run.jsonl -o run.html
    """
    from llmppl.trace import load
    from llmppl.trace.html_page import page

    with _plain_errors():
        output = recording.with_suffix(".html") if output is None else output
        if output.resolve() == recording.resolve():
            raise ValueError(f"the page would replace the recording {recording}: give another file with -o")
        loaded = load(recording)
        try:
            output.write_text(page(loaded), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {output}: {error.strerror}") from None
        typer.echo(f"{output}: {loaded.status()}")


def _constraint(kind: str, given: Any) -> Any:
    """The constraint that an option gives: a pattern, a file, some texts."""
    if kind == "regex":
        from llmppl.languages import Regex

        return Regex(given)
    if kind == "choices":
        from llmppl.languages import DFA

        return DFA.from_strings(given)
    try:
        if kind == "grammar":
            from llmppl.grammar import Grammar

            return Grammar.from_file(given)
        from llmppl.masks import JsonSchema

        return JsonSchema(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {given}: {error.strerror}") from None


class Reading(NamedTuple):
    """How far a text stays in a language."""

    length: int                                         # characters that are the beginning of a match
    complete: bool                                      # whether they are one as they stand
    expected: str                                       # what may come after it


def _read(constraint: Any, text: str) -> Reading:
    """Read the text byte by byte, each byte being a token."""
    from llmppl.tokens import Vocabulary

    bytes_alone = Vocabulary([*(b"%c" % byte for byte in range(256)), b""], eos_ids=[256])
    index = constraint.index(bytes_alone)
    state = index.start
    for length, character in enumerate(text):
        before = state
        for byte in character.encode():
            if not index.mask(state)[byte]:
                return Reading(length, index.accepts(before), _expected(index, before))
            state = index.advance(state, byte)
    return Reading(len(text), index.accepts(state), _expected(index, state))


def _expected(index: Any, state: Any, most: int = 12) -> str:
    """What may come in a state between two characters, in words: runs of ASCII, and the first few other characters."""
    wanted = index.next_bytes(state)
    ends = "it ends here" if index.accepts(state) else ""
    ascii_runs: list[list[int]] = []
    for byte in wanted:
        if byte < 128 and ascii_runs and ascii_runs[-1][1] == byte - 1:
            ascii_runs[-1][1] = byte
        elif byte < 128:
            ascii_runs.append([byte, byte])
    named = []
    for low, high in ascii_runs:
        shown = range(low, high + 1) if high - low < 3 else (low, high)
        named.append((", " if high - low < 3 else " to ").join(repr(chr(code)) for code in shown))
    todo, others = [(state, bytes([byte])) for byte in reversed(wanted) if byte > 127], list[str]()
    while todo and len(others) <= most:
        at, start = todo.pop()
        at = index.advance(at, start[-1])
        size = 2 if start[0] < 0xE0 else 3 if start[0] < 0xF0 else 4
        if len(start) == size:
            others.append(start.decode())
        else:
            todo += [(at, start + bytes([byte])) for byte in reversed(index.next_bytes(at))]
    named += ["characters beyond ASCII"] if len(others) > most else [repr(other) for other in others]
    if not named:
        return ends or "nothing may come here"
    return f"{ends}, or goes on with {', '.join(named)}" if ends else f"here may come {', '.join(named)}"


def _pointed(text: str, at: int, before: int = 60, after: int = 20) -> tuple[str, str]:
    """The line to show of a text, and a line with a caret below the character `at`."""
    from rich.cells import cell_len

    left, right = _printable(text[max(at - before, 0) : at]), _printable(text[at : at + after])
    left, right = "..." * (at > before) + left, right + "..." * (at + after < len(text))
    return left + right, " " * cell_len(left) + "^"


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
    title: str,
    program: Program,
    N: int,
    K: int,
    seed: int | None,
    as_json: bool,
    trace: Path | None,
    max_steps: int | None = None,
) -> None:
    """Run the program and show what came of it."""
    from llmppl.inference import smc_steer
    from llmppl.trace import Recorder

    seed = random.randrange(1_000_000) if seed is None else seed
    recorder: AbstractContextManager[Recorder | None]
    try:
        recorder = nullcontext() if trace is None else Recorder(trace, title)
    except OSError as error:
        raise ValueError(f"cannot write {trace}: {error.strerror}") from None
    with recorder as on_step:
        particles = smc_steer(program, N, K, seed=seed, max_steps=max_steps, on_step=on_step)
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
    return _printable(row.text) + " [cut]" * row.cut


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
    points = re.search(r"\n *\^", message)               # a caret needs the line above it
    typer.echo(f"llmppl: {message.rstrip() if points else ' '.join(message.split())}", err=True)
    raise typer.Exit(code)
