"""Cost of following the code for one job: calls, files, and moves from one file to another.

    python tools/walks.py

prints the table of docs/architecture.md. A *move* is a call into another file of the package than the caller's, or the
return from it; calls inside third-party packages do not count. A step is the third of a run with N=3, K=2 and a regular
expression. A mask is cached or new. The others are a question to the language model, and a query until
its first match.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import greenlet

import llmppl
from llmppl import CachedTransformer, ConstrainedText, Regex, TokenIndex, search, smc_steer

ROOT = str(Path(llmppl.__file__).parent)


class Walk:
    """Counter of calls and moves in a `with` block; each switch sets the profiler, as new greenlets have none."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.moves, self._file = 0, ""

    def __enter__(self) -> Walk:
        greenlet.settrace(lambda event, pair: sys.setprofile(self._profile))
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        greenlet.settrace(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "return") and file.startswith(ROOT):
            if event == "call":
                self.calls[file] += 1
            at = file if event == "call" else _caller(frame)
            self.moves += at not in ("", self._file)
            self._file = at or self._file

    def row(self, name: str) -> str:
        return f"| {name} | {self.calls.total():,} | {len(self.calls)} | {self.moves:,} |"


def _caller(frame: FrameType) -> str:
    """Return the file of the package that a frame returns to, or ""."""
    outer = frame.f_back
    while outer is not None and not outer.f_code.co_filename.startswith(ROOT):
        outer = outer.f_back
    return "" if outer is None else outer.f_code.co_filename


def walked(do: Callable[[], object]) -> Walk:
    with Walk() as walk:
        do()
    return walk


class Own(ConstrainedText):
    """Program of a user, whose step is not that of the library."""

    def step(self) -> None:
        super().step()


def particle(kind: type[ConstrainedText], lm: CachedTransformer, expand: str) -> Walk:
    """Profile the third step of a run, without the work of the loop's caller after a step."""
    walk, steps = Walk(), 0

    def on_step(step: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            walk.__enter__()
        if steps == 3:
            walk.__exit__()

    program = kind(lm, "Once upon a time", Regex(r"( [a-z]+)+[.]"), max_tokens=8)
    smc_steer(program, 3, 2, expand=expand, seed=0, max_steps=3, on_step=on_step, progress=False)
    return walk


def main() -> None:
    lm = CachedTransformer.from_pretrained()
    index = TokenIndex(Regex(r"( [a-z]+)+[.]"), lm.vocab)
    index.mask(index.start)
    new = index.after(" a")
    matches = search(lm, "The (cat|dog|cow)(s|)", prefix="The", progress=False)
    print("| walk | calls | files | moves |\n|---|---|---|---|")
    print(particle(Own, lm, "copies").row("a program of yours: the step of 6 candidates, copies"))
    print(particle(Own, lm, "distinct").row("a program of yours: the step of 6 candidates, distinct"))
    print(particle(ConstrainedText, lm, "copies").row("rows: the step of 6 candidates, copies"))
    print(particle(ConstrainedText, lm, "distinct").row("rows: the step of 6 candidates, distinct"))
    print(walked(lambda: index.mask(index.start)).row("a mask, met before"))
    print(walked(lambda: index.mask(new)).row("a mask, new"))
    print(walked(lm.context("The cat was").log_probs).row("a question to the language model"))
    print(walked(lambda: next(iter(matches))).row("a query, to the first match"))


if __name__ == "__main__":
    main()
