"""Checks for authors of programs and engines: `check_program` and `check_engine`."""

import contextlib
import itertools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.checking import ProgramReport as ProgramReport
from llmppl.checking import check_program as check_program
from llmppl.constraints.vocabulary import Vocabulary
from llmppl.distributions.blocks import logsumexp
from llmppl.lm import CachedTransformer, Engine

Ids = list[int]
Logs = NDArray[np.float64]
_LONGEST = 1024  # longest context that is tested, in tokens


@dataclass
class EngineReport:
    """Result of `check_engine`.

    distance : largest difference of a log-probability
    total_variation : largest total variation of a next-token distribution
    rows : number of compared distributions
    tokens : number of tokens that the engine ran, by its own count
    whole : number of tokens of the contexts
    """

    distance: float = 0.0
    total_variation: float = 0.0
    rows: int = 0
    tokens: int = 0
    whole: int = 0


def check_engine(
    engine: Engine,
    reference: Callable[[Ids], Any] | None = None,
    *,
    ids: Sequence[int],
    size: int,
    tolerance: float = 1e-4,
    contexts: int = 300,
    seed: int = 0,
) -> EngineReport:
    """Compare an engine with plain forward passes, after arbitrary earlier calls, releases, errors and interrupts.

    Parameters
    ----------
    engine : Engine
        The engine; it is cleared at the end, and may be given to a CachedTransformer afterwards.
    reference : callable, optional
        `reference(ids)` returns (>= size,) logits of the token after `ids`; by default those of the cleared engine.
    ids : sequence of int
        Tokens for contexts, as in ordinary text.
    size : int
        Number of ids of the vocabulary; further logits are ignored.
    tolerance : float
        Largest allowed difference of a log-probability above -20.
    contexts : int
        Number of contexts in the largest call, more than the engine can cache.

    Raises
    ------
    AssertionError
        At the first wrong answer; the message names the tokens and the check.
    """
    checker = _Checker(
        engine, reference, list(ids), size, tolerance, contexts, np.random.default_rng(seed)
    )
    for check in (
        checker.unequal_lengths,
        checker.earlier_places,
        checker.forks,
        checker.many_at_once,
        checker.the_longest,
        checker.released,
        checker.interrupts,
        checker.through_the_cache,
        checker.threads,
    ):
        checker.name = check.__name__.replace("_", " ")
        check()
    engine.clear()
    return checker.report


class _Checker:
    """Checks of one engine, with the reference answers that they share."""

    def __init__(
        self,
        engine: Engine,
        reference: Callable[[Ids], Any] | None,
        ids: Ids,
        size: int,
        tolerance: float,
        num_contexts: int,
        rng: np.random.Generator,
    ) -> None:
        self.engine = engine
        self.ids = ids
        self.size = size
        self.tolerance = tolerance
        self.rng = rng
        self.report = EngineReport()
        self.name = ""
        self.num_contexts = num_contexts
        self._reference = reference or self._uncached
        self._truths: dict[tuple[int, ...], Logs] = {}
        self._most = min(engine.max_length or _LONGEST, 40)

    # ---- reference answers

    def _uncached(self, ids: Ids) -> Any:
        self.engine.clear()
        return _numpy(self.engine.forward([ids], [(0, len(ids))]))[0]

    def _truth(self, ids: Ids) -> Logs:
        key = tuple(ids)
        if key not in self._truths:
            self._truths[key] = self._normalised(_numpy(self._reference(list(ids))))
        return self._truths[key]

    def _normalised(self, logits: NDArray[Any]) -> Logs:
        row = logits[: self.size].astype(np.float64)
        row -= logsumexp(row)
        return row

    def _need(self, holds: bool, said: str) -> None:
        assert holds, f"{self.name}: {said}"

    def _compare(self, logits: NDArray[Any], ids: Ids) -> None:
        self._need(
            logits.dtype in (np.float32, np.float64),
            f"logits are {logits.dtype}, not float32 or 64",
        )
        enough = len(logits) >= min(self.size, len(self._truth(ids)))
        self._need(enough, f"a row of {len(logits)} logits, for a vocabulary of {self.size}")
        found = self._normalised(logits)
        right = self._truth(ids)
        distance = float(np.abs(found - right)[np.maximum(found, right) > -20].max())
        variation = float(np.abs(np.exp(found) - np.exp(right)).sum() / 2)
        off = (
            f"off by {distance:.2g}, more than {self.tolerance:g} (total variation {variation:.2g})"
        )
        self._need(distance <= self.tolerance, f"after the tokens {ids} a log-probability is {off}")
        self.report.distance = max(self.report.distance, distance)
        self.report.total_variation = max(self.report.total_variation, variation)
        self.report.rows += 1

    def _ask(self, contexts: list[Ids], asked: list[tuple[int, int]] | None = None) -> None:
        """Call the engine once; check its answers, that contexts are unchanged, and that its count is possible."""
        asked = asked or [*enumerate(map(len, contexts))]
        for i, n in asked:
            self._truth(contexts[i][:n])  # computed first: the engine may be the reference
        before = self.engine.tokens
        copies = [*map(list, contexts)]
        logits = _numpy(self.engine.forward(contexts, asked))
        self._need(
            len(logits) == len(asked), f"{len(logits)} rows for {len(asked)} places asked for"
        )
        self._need(contexts == copies, "forward has changed the contexts it was given")
        for row, (i, n) in zip(logits, asked, strict=True):
            self._compare(row, contexts[i][:n])
        ran = self.engine.tokens - before
        whole = sum(n for _, n in asked)
        said = f"{ran} tokens run by its own count for {len(contexts)} contexts of {whole} tokens"
        self._need(
            len(contexts) <= ran <= whole,
            f"{said}; the last token of each is run, and none more than once",
        )
        self.report.tokens += ran
        self.report.whole += whole

    def _random(self, length: int) -> Ids:
        found: Ids = self.rng.choice(self.ids, length).tolist()
        return found

    def _distinct(self, lengths: Sequence[int]) -> list[Ids]:
        """Return contexts of about these lengths, none of which begins another."""
        return _without_prefixes([self._random(max(2, n)) for n in lengths])

    # ---- the checks

    def unequal_lengths(self) -> None:
        self._ask([self._random(1)])
        self._ask(self._distinct(list(range(2, self._most, 3))))

    def earlier_places(self) -> None:
        contexts = self._distinct([5, 9, 7])
        asked = [
            (i, n)
            for i, each in enumerate(contexts)
            for n in range(1, len(each) + 1)
            if n % 3 or n == len(each)
        ]
        self._ask(contexts, [asked[k] for k in self.rng.permutation(len(asked))])

    def forks(self) -> None:
        """Check contexts that continue others, or part of them, over many calls."""
        known = [self._random(4)]
        for _ in range(12):
            parents = [
                known[int(self.rng.integers(len(known)))]
                for _ in range(int(self.rng.integers(1, 6)))
            ]
            new = [
                each[: int(self.rng.integers(1, len(each) + 1))] + self._random(2)
                for each in parents
            ]
            new = _without_prefixes([each[: self._most] for each in new])
            if new:
                self._ask(new)
            known += new

    def many_at_once(self) -> None:
        start = self._random(6)
        ends = itertools.islice(itertools.product(self.ids, repeat=2), self.num_contexts)
        contexts = [start + list(end) for end in ends]
        self._ask(contexts)
        self._ask(contexts[:5] + [each + self._random(1) for each in contexts[-5:]])

    def the_longest(self) -> None:
        longest = min(self.engine.max_length or _LONGEST, _LONGEST)
        context = self._random(longest - 1)
        self._ask([context])
        self._ask([context + self._random(1), context[: longest // 2] + self._random(1)])

    def released(self) -> None:
        contexts = self._distinct([6, 8, 11])
        self._ask(contexts)
        self.engine.release([each[:3] for each in contexts[:2]] + [self._random(5)])
        self._ask([each + self._random(1) for each in contexts])
        self.engine.clear()
        self._ask(contexts)

    def interrupts(self) -> None:
        """Check that answers are correct after an interrupt at any moment of a call, and `clear`."""
        if threading.current_thread() is not threading.main_thread():
            return  # signals are handled in the main thread only

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for part in np.linspace(0.05, 0.95, 7).tolist():
                contexts = self._distinct([12, 17, 9, 14])
                asked = [*enumerate(map(len, contexts))]
                self.engine.clear()
                start = time.perf_counter()
                self.engine.forward(contexts, asked)
                took = time.perf_counter() - start
                self.engine.clear()
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, max(1e-4, part * took))
                    self.engine.forward(contexts, asked)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                self.engine.clear()
                self._ask(contexts)
        finally:
            signal.signal(signal.SIGALRM, before)

    def _lm(self, **limits: Any) -> CachedTransformer:
        return CachedTransformer(
            self.engine, Vocabulary([b"%d " % i for i in range(self.size)]), **limits
        )

    def through_the_cache(self) -> None:
        """Check the engine below a CachedTransformer, with a tiny and with a large cache."""
        for room in (4096, 1 << 28):
            lm = self._lm(cache_bytes=room)
            held = [lm.at(self._random(3))]
            for _ in range(10):  # contexts of at most 13 tokens
                held.append(held[int(self.rng.integers(len(held)))] + lm.vocab[self._random(1)[0]])
                held = held[-6:]
                at = held[int(self.rng.integers(len(held)))]
                tokens = [*map(int, at.tokens)]
                self._truth(tokens)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "cache_bytes=")  # too small on purpose
                    self._compare(at.log_probs(), tokens)
            del lm, held, at
            self.engine.clear()

    def threads(self) -> None:
        """Check several threads that share one CachedTransformer."""
        jobs = [self._distinct([4, 6, 5]) for _ in range(4)]
        for ids in itertools.chain(*jobs):
            self._truth(ids)
        self.engine.clear()
        lm = self._lm()
        try:
            with ThreadPoolExecutor(len(jobs)) as pool:
                answers = [*pool.map(lambda job: [lm.at(ids).log_probs() for ids in job], jobs)]
        except Exception as error:
            raise AssertionError(f"{self.name}: {error!r}") from error
        for ids, logs in zip(itertools.chain(*jobs), itertools.chain(*answers), strict=True):
            self._compare(logs, ids)


def _without_prefixes(contexts: list[Ids]) -> list[Ids]:
    """Return the contexts that begin no other one."""
    return [
        a
        for i, a in enumerate(contexts)
        if not any(b[: len(a)] == a for b in contexts[:i] + contexts[i + 1 :])
    ]


def _numpy(logits: Any) -> NDArray[Any]:
    found = np.asarray(logits.cpu().numpy() if hasattr(logits, "cpu") else logits)
    return found
